"""Transcripts of training runs: the view of an observer of final model, iterates or noisy updates, step by step.

`final` sees the last model, `iterates` every model, `updates` every released noisy block, of steps and of one-off
releases: the observer that composition accounting assumes. The transcript holds public values only; the participants of
a step are not in it. When the steps exceed their memory limit, only those requested by number are kept from then on,
and the transcript is marked as truncated: an incomplete transcript would make an attack look weak.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from ..plan.defense import NoisyPlan
from ..plan.implicit_subspace import ImplicitSubspace
from ..plan.layout import Layout

Observer = Literal["final", "iterates", "updates"]


@dataclass(frozen=True, eq=False)
class Step:
    """A step, or a one-off release on all the data, as an observer saw it.

    Attributes:
        step: number of the step, from 0; for a one-off release the step that it was charged to.
        parameters: the model before the step [dim].
        noise_multiplier: noise multiplier of the step.
        expected_batch: expected batch, the public constant that sums were divided by.
        sample_rate: probability that an example took part.
        plan: the executed plan with its noise; None for `iterates`.
        noisy: undivided noisy sum of each block; None for `iterates`.
        verdict: release of the step's trial, undivided; None without a trial, and for `iterates`.
        one_off: index among the run's one-off releases, from 0; None for a step.
    """

    step: int
    parameters: Float[Tensor, " dim"]
    noise_multiplier: float
    expected_batch: float
    sample_rate: float
    plan: NoisyPlan | None = None
    noisy: tuple[Tensor, ...] | None = None
    verdict: Tensor | None = None
    one_off: int | None = None

    @property
    def key(self) -> int:
        """Unique number of this step or release: negative for one-off releases."""
        return self.step if self.one_off is None else -1 - self.one_off


@dataclass
class Transcript:
    """The steps of a run in order.

    Attributes:
        observer: decides how much is recorded.
        layout: names and shapes of the flat vectors.
        always: numbers of steps kept regardless of their size.
        only: numbers of the other steps to keep; None for all of them.
        memory: limit in bytes for the kept steps that are not in `always`; None for no limit.
        steps: empty for `final`.
        one_offs: separate releases on all the data, without limit; for `updates` alone.
        truncated: whether steps were dropped because they exceed `memory`; steps left out by `only` do not count.
    """

    observer: Observer
    layout: Layout
    always: frozenset[int] = frozenset()
    only: frozenset[int] | None = None
    memory: int | None = None
    steps: list[Step] = field(default_factory=list)
    truncated: bool = False
    one_offs: list[Step] = field(default_factory=list)
    _taken: int = 0
    _counted: set[int] = field(default_factory=set, repr=False)

    def record(self, step: Step) -> None:
        """Keeps the part of a step that this observer sees."""
        if self.observer == "final":
            return
        if self.observer == "iterates":
            step = Step(step.step, step.parameters, step.noise_multiplier, step.expected_batch, step.sample_rate)
        if step.step not in self.always:
            if self.only is not None and step.step not in self.only:
                return
            if self.memory is not None:
                # Counted even if dropped: no step is kept after the first that exceeds the limit, so there is no gap.
                self._taken += self._fresh(step)
                self.truncated = self._taken > self.memory
                if self.truncated:
                    return
        self.steps.append(step)

    def _fresh(self, step: Step) -> int:
        """Returns the bytes of a step's storages that no earlier step has: many steps may share a basis."""
        # Storages of kept steps stay alive, so an address identifies a storage.
        sizes = {place: size for place, size in storages(step).items() if place not in self._counted}
        self._counted |= sizes.keys()
        return sum(sizes.values())

    def record_one_off(self, release: Step) -> None:
        """Keeps a one-off release if this observer sees releases."""
        if self.observer == "updates":
            self.one_offs.append(replace(release, one_off=len(self.one_offs)))

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"steps": self.steps, "one_offs": self.one_offs, "truncated": self.truncated, "taken": self._taken}

    def load(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint."""
        self.steps, self.one_offs = state["steps"], state["one_offs"]
        self.truncated, self._taken = state["truncated"], state["taken"]
        self._counted = {place for step in self.steps if step.step not in self.always for place in storages(step)}


def storages(value: Any) -> dict[int, int]:
    """Returns address and bytes of every storage of a step or a message, those of plans' masks and bases included."""
    # By storage: blocks of a plan share bases, and a view keeps its whole storage alive.
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(value)}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, Mapping):
        yield from _tensors([*value.values()])
    elif isinstance(value, ImplicitSubspace):
        # Iterating over its fields would form its bases.
        yield from _tensors(value.parts)
    elif is_dataclass(value):
        for part in fields(value):
            yield from _tensors(getattr(value, part.name))
