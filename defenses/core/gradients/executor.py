"""Executes a step plan on a batch and returns its noisy release: the only code that holds raw rows or secret noise.

Per block: query each example (or the mean of its views), encode, bound, sum, add noise; then decode the noisy sums.
Which engine computes the clipped sums is decided in `choose.py`. Sums of micro-batches accumulate in float64, so
micro-batches change nothing but memory, and noise is drawn once per step, after the last of them. Exact noise gets
exact sums, for which each example is worked on by itself (`exact_sums.py`).

Guarantee:
    Relation: add or remove one example. Released: the noisy blocks of `Release`, as multiples of a public unit
    (`noise.py`) rounded to the model's dtype; everything else here (rows, raw sums, norms) stays inside. Assumes a loss
    and a model under which a gradient depends on its own example only: what is known to break this is refused when an
    `Engine` is made, and what can be found by trying is refused before data are touched
    (`model_checks.py` says what cannot be found). A non-finite row counts as zero, by itself. Views, dropout and other
    random layers are drawn for each record from what it is (`record_draws.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ..plan.defense import Context, Defense, NoisyPlan, State, StepPlan
from ..plan.layout import Layout
from ..plan.noise_correlation import NoiseMemory
from ..plan.public_data import GradientBatch
from ..plan.query import Gradients
from ..randomness.noise import CipherNoise, Noise, from_generator
from ..randomness.record_draws import entries, entry_keys
from .augmentation import Augmentation, drawn_views
from .checks.batch_norm import refuse_batch_norm
from .checks.model_checks import Refused, refuse_model
from .checks.synthetic_examples import NOT_DECLARED, Domains
from .choose import ChosenEngine, choose, refuse_name
from .engines.batches import Batches, reused
from .engines.interface import PerExample
from .exact_sums import exact_sums
from .numerics.full_precision import ONE_PASS, full_precision, refuse_autocast
from .reference import Loss, cross_entropy, microbatches
from .reference_sums import added_up, totals

# Bytes of activations, their derivatives and rows that may exist at a time, unless the user says otherwise.
MEMORY_BUDGET = 2 * 2**30


@dataclass(frozen=True)
class Release:
    """What leaves the engine in one step.

    Attributes:
        noisy: the undivided noisy sum of each block, in the block's released space.
        total: the decoded sum of the updating blocks [dim], undivided; a function of `noisy`.
    """

    noisy: tuple[Tensor, ...]
    total: Float[Tensor, " dim"]


def add_noise(
    plan: NoisyPlan,
    sums: Sequence[Tensor],
    noise: Noise | None,
    dtype: torch.dtype,
    memory: NoiseMemory | None = None,
) -> Release:
    """Adds each block's noise to its sum, which may be overwritten, and decodes.

    Args:
        plan: as executed.
        sums: float64, or int64 for exact noise; for `CipherNoise` float32 too.
        noise: secret source.
        dtype: of the release.
        memory: of noise that is correlated over steps; None for a step that is seen by itself, whose noise is then
            drawn with the standard deviation that it would have in its stream.

    Raises:
        ValueError: where there is noise to add, and no source of it.
    """
    if plan.noise_multiplier > 0:
        if noise is None:
            raise ValueError(
                f"noise must be given when noise_multiplier is positive, got None at {plan.noise_multiplier}"
            )
        row = plan.plan.correlated
        if row is None or memory is None:
            sums = [noise.add(values, std) for values, std in zip(sums, plan.stds, strict=True)]
        else:
            sums = memory.add(row, list(sums), plan.fresh_stds, noise)
    # Asked first: a conversion that changes nothing takes 3 us.
    noisy = tuple([values if values.dtype == dtype else values.to(dtype) for values in sums])
    # Decoded after the rounding to `dtype`: `total` is then a function of `noisy`, and releases nothing of its own.
    decoded = [b.codec.decode(values) for b, values in zip(plan.blocks, noisy, strict=True) if b.updates]
    return Release(noisy, sum(decoded[1:], start=decoded[0]))


def release(
    defense: Defense,
    rows: Float[Tensor, "rows dim"] | Callable[[Tensor | None], Tensor],
    context: Context,
    *,
    noise: Noise | torch.Generator | None = None,
    state: State = None,
) -> Release:
    """One step's release for given rows, outside of training: for tests, notebooks and audits.

    Args:
        defense: with its noise multiplier set.
        rows: per-example gradients, or a function from a parameter point to them.
        context: the step.
        noise: secret source; needed unless the multiplier is 0.
        state: the method's state; None starts it afresh.

    Returns:
        The noisy blocks and their decoded sum, undivided.
    """
    sigma = defense.calibrated_multiplier
    if state is None:
        state = defense.start(context)
    plan = defense.plan(state, context)[1].at(sigma)
    gradients = (lambda _point: rows) if isinstance(rows, Tensor) else rows
    like = rows if isinstance(rows, Tensor) else rows(None)
    source = from_generator(noise) if isinstance(noise, torch.Generator) else noise
    if sigma > 0 and source is not None and source.exact:
        one_by_one = [(_only(gradients, i), None) for i in range(len(like))]
        sums = exact_sums(plan.plan, one_by_one, units_of(plan, source), like.device)
    else:
        sums = totals(plan.plan, [added_up(plan.plan, gradients)], like.device)
    return add_noise(plan, sums, source, like.dtype)


def units_of(plan: NoisyPlan, noise: Noise) -> list[float]:
    """The public unit of each block's release."""
    return [noise.unit(std) for std in plan.stds]


def _modules(model: nn.Module) -> list[nn.Module]:
    """Those of `model.modules()`, in a fourth of the time."""
    found, seen = [model], {model}
    for module in found:
        for inner in module._modules.values():
            if inner is not None and inner not in seen:
                seen.add(inner)
                found.append(inner)
    return found


def _copied(values: Tensor, copies: int) -> Tensor:
    return values if copies == 1 else values.repeat_interleave(copies, dim=0)


def _of_one(sums: tuple[Tensor, ...], copies: int) -> tuple[Tensor, ...]:
    """Sums of one copy of each example."""
    return sums if copies == 1 else tuple(values / copies for values in sums)


def _only(gradients: Gradients, number: int) -> Gradients:
    # A function, because a lambda in the caller's loop would see its last number only.
    return lambda point: gradients(point)[number : number + 1]


class Engine:
    """Executes plans on batches of one model: views, micro-batches, clipped sums, noise.

    Attributes:
        layout: the trained parameters, in the order of every flat vector.
        name: what the record says of how the sums were computed; before the first batch, what was asked for.
        unverified: why the model could not be checked; empty where it was.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss = cross_entropy,
        noise: Noise | None = None,
        microbatch: int | None = None,
        memory_budget: int | None = None,
        engine: str = "auto",
        augmentation: Augmentation | None = None,
        expected_batch: float = 0.0,
        domains: Domains = NOT_DECLARED,
        unchecked: bool = False,
    ) -> None:
        """Takes a model and the secret noise.

        Args:
            model: its trained parameters define the layout; refused when it mixes examples.
            loss: per-example loss.
            noise: secret source.
            microbatch: most examples that are worked on at a time; None for what fits the memory budget.
            memory_budget: bytes that activations, their derivatives and rows may take, roughly; 2 GiB where None.
            engine: "auto", "layerwise", "torch.func", "one_by_one", "opacus" or "backpack"; `auto` is a static rule,
                our own engine where it knows every layer and passes the checks, and slower ones elsewhere.
            augmentation: views of each example, whose gradients are averaged and then bounded once.
            expected_batch: examples in a batch of the run, so that the model is checked on batches of that size.
            domains: what inputs and targets may be, for the examples that the model is checked on.
            unchecked: whether a model that fails on all of these is executed anyway, one example at a time.

        Raises:
            ValueError: for a model that mixes examples, has hooks on its gradients or parameters in half precision, a
                micro-batch or budget below 1, or an unknown engine.
        """
        refuse_batch_norm(model)
        refuse_model(model)
        refuse_name(engine)
        for argument, value in (("microbatch", microbatch), ("memory_budget", memory_budget)):
            if value is not None and value < 1:
                raise ValueError(f"{argument} must be at least 1 or None, got {value}")
        self.model, self.loss, self.noise, self.microbatch = model, loss, noise, microbatch
        self.memory = NoiseMemory()
        self.memory_budget = MEMORY_BUDGET if memory_budget is None else memory_budget
        self.augmentation = augmentation
        self.layout = Layout.of(model)
        self.name = self._asked = engine
        self.unverified = ""
        self._expected_batch, self._domains, self._unchecked = expected_batch, domains, unchecked
        self._checked: dict[object, ChosenEngine] = {}

    def prepare(self, inputs: Tensor, targets: Tensor, *, exact: bool = False) -> ChosenEngine:
        """Chooses and checks what computes the sums, once for data of one shape and dtype, and the model's mode.

        No value of the data is looked at.

        Args:
            inputs: shape and dtype are looked at.
            targets: likewise.
            exact: whether every example must be worked on by itself.

        Raises:
            ValueError: when the model must not be trained or could not be checked, or the engine that was asked for
                cannot run it.
        """
        shapes = (inputs.shape[1:], inputs.dtype, targets.shape[1:], targets.dtype, inputs.is_cpu or inputs.device)
        # Modes too: a layer in training mode may draw or change what it leaves alone in evaluation mode. And the
        # modules themselves: one that came later is unchecked, and its dropout would go by places.
        kind = (exact, *shapes, *[(id(module), module.training) for module in _modules(self.model)])
        with ONE_PASS:
            if kind not in self._checked:
                refuse_batch_norm(self.model)  # its mode may be another than when this engine was made
                choice = choose(
                    "one_by_one" if exact else self._asked,
                    self.model,
                    self.loss,
                    self.layout,
                    inputs,
                    targets,
                    batches=self._batches(self._first()),
                    domains=self._domains,
                )
                if choice.unverified and not self._unchecked:
                    raise Refused(
                        f"a model must be checked before it is trained, and this one cannot be: {choice.unverified}; "
                        "a deep copy of it must run on made-up examples, of which input_domain and target_domain (of "
                        "Recipe) say what values they have; or execute it with unchecked=True (of Execution), as its "
                        "claim then says"
                    )
                self._checked[kind] = choice
        choice = self._checked[kind]
        self.name, self.unverified = choice.note, choice.unverified
        return choice

    def gradients(self, inputs: Tensor, targets: Tensor, *, coins: int | None = None) -> Gradients:
        """Per-example gradients of these examples as they are, as a function of the parameter point.

        Args:
            inputs: the examples.
            targets: of the examples.
            coins: public seed of dropout; needed where the model has some.
        """
        choice = self.prepare(inputs, targets)
        keys = self._entry_keys(choice, inputs, targets, 1, coins)

        def rows(point: Tensor | None) -> Tensor:
            refuse_autocast(inputs)
            with entries(keys), full_precision():
                return choice.engine.rows(inputs, targets, point=point)

        return rows

    def batch(self, inputs: Tensor, targets: Tensor, *, coins: int | None = None) -> GradientBatch:
        """Per-example gradients at the model's parameters as of `gradients`, with factors where there are some."""
        choice = self.prepare(inputs, targets)
        keys = self._entry_keys(choice, inputs, targets, 1, coins)
        refuse_autocast(inputs)
        with entries(keys), full_precision():
            return choice.engine.batch(inputs, targets)

    def run(self, plan: NoisyPlan, inputs: Tensor, targets: Tensor, *, coins: int | None = None) -> Release:
        """Executes a plan on one batch, which may be empty.

        Args:
            plan: fixed before the batch was drawn, with its noise.
            inputs: the batch.
            targets: of the batch.
            coins: public seed of views and dropout; needed where there are some.

        Raises:
            ValueError: without a source of noise or public coins where they are needed, or under `torch.autocast`.
        """
        refuse_autocast(inputs)
        noise = self.noise
        # Without noise nothing is claimed, and exact sums would only be slow.
        exact = plan.noise_multiplier > 0 and noise is not None and noise.exact
        if exact and self._asked not in ("auto", "one_by_one"):
            raise ValueError(
                f"engine must be 'auto' or 'one_by_one' with exact noise, got '{self._asked}': "
                "a sum is exact only where every example is worked on by itself"
            )
        choice, augmentation = self.prepare(inputs, targets, exact=exact), self.augmentation
        like = self._first()
        views = 1 if augmentation is None else augmentation.views
        keys = self._entry_keys(choice, inputs, targets, views, coins)
        drawn = None
        if augmentation is not None and coins is not None and keys is not None:
            drawn = drawn_views(augmentation, keys, coins)

        def part(chosen: slice) -> tuple[Tensor, Tensor, Int64[Tensor, " entries"] | None]:
            """Entries of some examples: their views one after another, with their targets and keys."""
            span = slice(chosen.start * views, chosen.stop * views)
            if (chosen.start, chosen.stop) == (0, inputs.shape[0]):
                x, y = inputs, targets
            else:
                x, y = inputs[chosen], targets[chosen]
            if augmentation is not None and drawn is not None:
                # Views of an example are neighbours, as `PerExample.rows` averages them.
                x, y = x.repeat_interleave(views, dim=0), y.repeat_interleave(views, dim=0)
                x = augmentation.apply(x, drawn[span])
            return x, y, None if keys is None else keys[span]

        if exact and noise is not None:
            examples = [
                (
                    partial(self._alone, choice.engine.rows, part, i, views),
                    partial(self._alone, choice.engine.losses, part, i, views),
                )
                for i in range(inputs.shape[0])
            ]
            with torch.no_grad():
                sums = exact_sums(plan.plan, examples, units_of(plan, noise), like.device)
            return add_noise(plan, sums, noise, like.dtype, self.memory)
        parts = []
        for chosen, copies in self._fitting(choice, inputs.shape[0], self._batches(like), like):
            x, y, some = part(chosen)
            x, y, some = _copied(x, copies), _copied(y, copies), None if some is None else _copied(some, copies)
            with entries(some), full_precision():
                parts.append(_of_one(choice.engine.sums(plan.plan, x, y, views=views), copies))
        # Our noise takes the one micro-batch's sums as they are, which saves four passes over float64.
        as_they_are = len(parts) == 1 and isinstance(noise, CipherNoise) and plan.plan.correlated is None
        sums = parts[0] if as_they_are else totals(plan.plan, parts, like.device)
        return add_noise(plan, sums, noise, like.dtype, self.memory)

    def clipped_sums(self, plan: StepPlan, inputs: Tensor, targets: Tensor, *, views: int = 1) -> tuple[Tensor, ...]:
        """The sum of bounded contributions to each block, float64 and without noise: private, for an auditor.

        Args:
            plan: the step's plan.
            inputs: entries as they are: `views` neighbouring ones for each example, which may be no example.
            targets: as many.
            views: of each example.
        """
        like = self._first().detach()
        with full_precision():
            answers = [
                _of_one(engine.sums(plan, x, y, views=views), copies)
                for engine, x, y, copies in self._entries(inputs, targets, views)
            ]
        return totals(plan, answers, like.device)

    def matched(
        self, plan: StepPlan, directions: Sequence[Tensor], inputs: Tensor, targets: Tensor, *, views: int = 1
    ) -> list[tuple[Tensor, Tensor]]:
        """Of each block, inner products of contributions with a direction, and their squared norms: for an auditor.

        Args:
            plan: the step's plan.
            directions: one for each block, in its released space.
            inputs: entries as for `clipped_sums`.
            targets: as many.
            views: of each example.

        Returns:
            A pair [examples] in float64 for each block: private.
        """
        like = self._first().detach()
        along, none = [d.to(like) for d in directions], like.new_zeros(0, dtype=torch.float64)
        with full_precision():
            answers = [
                [
                    (a[: len(a) // copies], b[: len(b) // copies])
                    for a, b in engine.matched(plan, along, x, y, views=views)
                ]
                for engine, x, y, copies in self._entries(inputs, targets, views)
            ]
        pairs = [[one[number] for one in answers] for number in range(len(plan.blocks))]
        return [(torch.cat([none, *(a for a, _ in p)]), torch.cat([none, *(b for _, b in p)])) for p in pairs]

    def _entries(self, inputs: Tensor, targets: Tensor, views: int) -> Iterator[tuple[PerExample, Tensor, Tensor, int]]:
        """What computes, entries that fit the memory budget, and copies of each; of a model that draws nothing."""
        refuse_autocast(inputs)
        choice = self.prepare(inputs, targets)
        if choice.draws:
            found = f"one that could not be checked: {choice.unverified}" if choice.unverified else "random layers"
            raise ValueError(f"the model must draw nothing where its entries are given as they are, got {found}")
        like = self._first()
        batches = self._batches(like)._replace(views=views)
        for chosen, copies in self._fitting(choice, inputs.shape[0] // views, batches, like):
            span = slice(chosen.start * views, chosen.stop * views)
            yield choice.engine, _copied(inputs[span], copies), _copied(targets[span], copies), copies

    @staticmethod
    def _fitting(choice: ChosenEngine, examples: int, batches: Batches, like: Tensor) -> Iterator[tuple[slice, int]]:
        """Examples that are worked on at a time, in parts of one size: a remnant of a few would cost a whole pass.

        One entry by itself is computed by other kernels than several are. Of a black image, say, rounding is much of
        what a GroupNorm passes back, and another rounding is another gradient: the removal of its only neighbour moved
        the sum by 1.36 bounds. So it is worked on as two copies, unless all are by themselves.

        Returns:
            Pairs of a span and how many copies of each of its examples are worked on.
        """
        limit = batches.fitting(choice.engine.bytes_per_entry(choice.activations, like.element_size()))
        if 1 < examples <= limit:
            yield slice(0, examples), 1
            return
        even = -(-examples // max(1, -(-examples // limit)))
        for chosen in microbatches(examples, max(1, even)):
            alone = batches.views * (chosen.stop - chosen.start) == 1
            yield chosen, 2 if alone and limit > 1 else 1

    def rest(self) -> None:
        """Frees what is kept from batch to batch; the next batch allocates it anew."""
        for choice in self._checked.values():
            choice.engine.rest()

    def _alone(
        self,
        answers: Callable[..., Tensor],
        part: Callable[[slice], tuple[Tensor, Tensor, Tensor | None]],
        number: int,
        views: int,
        point: Tensor | None,
    ) -> Float[Tensor, "1 _"]:
        """The gradient, or the loss, of one example, computed without any other."""
        x, y, keys = part(slice(number, number + 1))
        with entries(keys), full_precision():
            return answers(x, y, point=point, views=views)

    def _entry_keys(
        self, choice: ChosenEngine, inputs: Tensor, targets: Tensor, views: int, coins: int | None
    ) -> Int64[Tensor, " entries"] | None:
        """A key for each view of each record, where anything is drawn for them."""
        if self.augmentation is None and not choice.draws:
            return None
        if coins is None:
            what = "an augmentation" if self.augmentation is not None else "dropout or another random layer"
            raise ValueError(f"coins must be given where there is {what}, got None")
        return entry_keys(inputs, targets, views, coins)

    def _first(self) -> Tensor:
        """A trained parameter as it is now: another one may stand in its place since the engine was made."""
        with ONE_PASS:  # during which a model's parameters are others
            # By hand: `model.get_parameter` takes three times as long.
            *path, key = self.layout.names[0].split(".")
            module: Any = self.model
            for part in path:
                module = module._modules[part]
            return module._parameters[key]

    def _batches(self, like: Tensor) -> Batches:
        """What is known of the run's batches, given a trained parameter."""
        # An engine is handed entries: every view of an example is one.
        views = 1 if self.augmentation is None else self.augmentation.views
        budget = reused(self.memory_budget, like, self.layout.dim)
        return Batches(self._expected_batch, views, self.microbatch, budget)
