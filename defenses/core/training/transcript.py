"""Transcripts of training runs: what an observer of final model, iterates or noisy updates could see, step by step.

`final` sees the last model, `iterates` every model, `updates` every noisy block as it was released, of steps and of
releases of their own: the one that composition accounting is about. The transcript holds public things only; who took
part in a step is not in it. Where the steps outgrow the memory that they may take, no more are kept but those asked for
by number, and the transcript says so: half a transcript would make an attack look weak.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """One step, or one release of its own on all the data, as an observer saw it.

    Attributes:
        step: number of the step, from 0; of a one-off release the step that it was charged to.
        parameters: the model before the step [dim].
        noise_multiplier: of the step.
        expected_batch: expected batch, the public constant that sums were divided by.
        sample_rate: chance that an example took part.
        plan: what was executed, with its noise; None for `iterates`.
        noisy: undivided noisy sum of each block; None for `iterates`.
        verdict: what the step's trial released, undivided; None where it has none, and for `iterates`.
        one_off: place among the run's one-off releases, from 0; None for a step.
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
        """A number that is this step's or this release's alone: those of one-off releases are negative."""
        return self.step if self.one_off is None else -1 - self.one_off


@dataclass
class Transcript:
    """The steps of a run in order.

    Attributes:
        observer: how much was recorded.
        layout: names and shapes behind the flat vectors.
        always: numbers of the steps that are kept whatever their size.
        only: numbers of the other steps to keep; None for all of them.
        memory: bytes that these may take; None for any number.
        steps: empty for `final`.
        one_offs: releases of their own on all the data, whatever they take; for `updates` alone.
        truncated: whether some of them are missing.
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
        """Keeps what this observer sees of a step."""
        if self.observer == "final":
            return
        if self.observer == "iterates":
            step = Step(step.step, step.parameters, step.noise_multiplier, step.expected_batch, step.sample_rate)
        if step.step not in self.always:
            if self.only is not None and step.step not in self.only:
                return
            if self.memory is not None:
                # Counted whether kept or not: after the first step that does not fit none is kept, and there is no gap.
                self._taken += self._fresh(step)
                self.truncated = self._taken > self.memory
                if self.truncated:
                    return
        self.steps.append(step)

    def _fresh(self, step: Step) -> int:
        """Bytes behind a step that are behind no step before: a basis may serve many."""
        # Storages of kept steps live on, so that an address names one of them.
        found = {place: size for place, size in storages(step).items() if place not in self._counted}
        self._counted |= found.keys()
        return sum(found.values())

    def record_one_off(self, release: Step) -> None:
        """Keeps a release of its own, where this observer sees releases."""
        if self.observer == "updates":
            self.one_offs.append(replace(release, one_off=len(self.one_offs)))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"steps": self.steps, "one_offs": self.one_offs, "truncated": self.truncated, "taken": self._taken}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self.steps, self.one_offs = state["steps"], state["one_offs"]
        self.truncated, self._taken = state["truncated"], state["taken"]
        self._counted = {place for step in self.steps if step.step not in self.always for place in storages(step)}


def storages(step: Step) -> dict[int, int]:
    """Address and bytes of every storage behind a step, those of its plan's masks and bases included."""
    # By storage: blocks of a plan share bases, and a view keeps all the memory behind it.
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(step)}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, ImplicitSubspace):
        # Its bases would be formed to be counted.
        yield from _tensors(value.parts)
    elif is_dataclass(value):
        for part in fields(value):
            yield from _tensors(getattr(value, part.name))
