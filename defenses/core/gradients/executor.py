"""Executes a step plan on a batch and returns its noisy release: the only code that holds raw rows or secret noise.

Per block: query each example (or the mean of its views), encode, bound, sum, add noise; then decode the noisy sums.
`choose.py` selects the engine that computes the clipped sums. Micro-batches accumulate in float64, so their size
affects memory and the last digits only, and noise is drawn once per step, after the last of them. Exact noise requires
exact sums, for which each example is processed alone (`exact_sums.py`).

Guarantee:
    Relation: add or remove one example. Released: the noisy blocks of `Release`, as multiples of a public unit
    (`noise.py`) rounded to the model's dtype; everything else here (rows, raw sums, norms) stays inside. Assumes a loss
    and a model under which a gradient depends on its own example only: known violations are refused when an `Engine` is
    constructed, and those that passes over synthetic examples reveal before data are touched (`model_checks.py` lists
    the undetectable ones). A non-finite row counts as zero, and affects no other row. Views, dropout and other random
    layers are drawn for each record from its content (`record_draws.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ..inputs import Inputs, form_of, joined
from ..plan.defense import Context, Defense, NoisyPlan, State, StepPlan
from ..plan.layout import Layout
from ..plan.noise_correlation import NoiseMemory
from ..plan.public_data import GradientBatch
from ..plan.query import Gradients
from ..randomness.noise import CipherNoise, Noise, from_generator
from ..randomness.record_draws import entries, entry_keys
from .augmentation import Augmentation, drawn_views
from .checks.batch_norm import refuse_batch_norm
from .checks.devices import refuse_other_device
from .checks.model_checks import Refused, refuse_model
from .checks.synthetic_examples import NOT_DECLARED, Domains
from .choose import ChosenEngine, choose, refuse_name
from .engines.batches import Batches, reused
from .engines.interface import PerExample
from .exact_sums import exact_sums
from .numerics.device_memory import usable_memory
from .numerics.full_precision import ONE_PASS, Precision, full_precision, precision_for, refuse_autocast
from .reference import Loss, cross_entropy, microbatches
from .reference_sums import added_up, totals

# Default limit on the bytes of activations, their derivatives and rows at a time, on a CPU.
MEMORY_BUDGET = 2 * 2**30


@dataclass(frozen=True)
class Release:
    """The noisy result of a step, which is all that leaves the engine.

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
        plan: the executed plan.
        sums: float64, or int64 for exact noise; for `CipherNoise` float32 too.
        noise: secret source.
        dtype: dtype of the release.
        memory: state of noise that is correlated over steps; None for a single step, whose noise is then independent,
            with the standard deviation that it would have in the stream.

    Raises:
        ValueError: if noise is to be added and no source is given.
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
    return opened(plan, sums, dtype)


def opened(plan: NoisyPlan, sums: Sequence[Tensor], dtype: torch.dtype) -> Release:
    """Returns the release of noisy sums.

    Args:
        plan: the executed plan.
        sums: of each block, with their noise.
        dtype: dtype of the release.
    """
    # The dtype is compared first: a conversion that changes nothing takes 3 us.
    noisy = tuple([values if values.dtype == dtype else values.to(dtype) for values in sums])
    # Decoded after the rounding to `dtype`: `total` is then a function of `noisy`, and releases nothing further.
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
    """Returns a step's release for given rows, outside of training: for tests, notebooks and audits.

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
    return release_rows(plan, gradients, like, source)


def release_rows(
    plan: NoisyPlan, gradients: Gradients, like: Tensor, noise: Noise | None, memory: NoiseMemory | None = None
) -> Release:
    """Executes a plan on rows that no model computes, such as clients' updates.

    Args:
        plan: fixed before the rows were drawn, with its noise.
        gradients: function from a parameter point to the rows.
        like: the rows at the current point; number, dtype and device are read.
        noise: secret source; needed unless the multiplier is 0.
        memory: state of correlated noise; None for a single step.
    """
    if plan.noise_multiplier > 0 and noise is not None and noise.exact:
        one_by_one = [(_only(gradients, i), None) for i in range(len(like))]
        sums = exact_sums(plan.plan, one_by_one, units_of(plan, noise), like.device)
    else:
        sums = totals(plan.plan, [added_up(plan.plan, gradients)], like.device)
    return add_noise(plan, sums, noise, like.dtype, memory)


def units_of(plan: NoisyPlan, noise: Noise) -> list[float]:
    """Returns the public unit of each block's release."""
    return [noise.unit(std) for std in plan.stds]


def _modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of `model.modules()`, in a fourth of the time."""
    modules, visited = [model], {model}
    for module in modules:
        for inner in module._modules.values():
            if inner is not None and inner not in visited:
                visited.add(inner)
                modules.append(inner)
    return modules


class _Part(NamedTuple):
    """A micro-batch.

    Attributes:
        chosen: its examples.
        copies: number of entries for each of theirs.
        size: number of examples of the pass, with padding; None without.
    """

    chosen: slice
    copies: int = 1
    size: int | None = None

    @property
    def counted(self) -> dict[str, int]:
        """The argument of `sums` for padding: the number of examples that count; none without padding."""
        return {} if self.size is None else {"counted": self.chosen.stop - self.chosen.start}

    def entered(self, values: Inputs, views: int) -> Any:
        """Returns values of the entries of a pass, given those of the chosen examples: padded by the first's."""
        if self.size is None:
            return values if self.copies == 1 else values.repeat_interleave(self.copies, dim=0)
        missing = self.size - len(values) // views
        return values if not missing else joined([values, *[values[:views]] * missing])


def _per_example(sums: tuple[Tensor, ...], copies: int) -> tuple[Tensor, ...]:
    """Returns the sums for a single copy of each example."""
    return sums if copies == 1 else tuple(values / copies for values in sums)


def _only(gradients: Gradients, number: int) -> Gradients:
    # A function, because a lambda in the caller's loop would capture the last number only.
    return lambda point: gradients(point)[number : number + 1]


class Engine:
    """Executor of step plans on a model: views, micro-batches, clipped sums by one of `engines/`, noise.

    Attributes:
        layout: the trained parameters, in the order of every flat vector.
        name: description, for the record, of the engine in use; before the first batch, the requested engine.
        unverified: reason why the model could not be checked; empty if it was.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss = cross_entropy,
        noise: Noise | None = None,
        microbatch: int | None = None,
        memory_budget: int | None = None,
        precision: Precision | None = None,
        engine: str = "auto",
        augmentation: Augmentation | None = None,
        expected_batch: float = 0.0,
        domains: Domains = NOT_DECLARED,
        unchecked: bool = False,
    ) -> None:
        """Refuses models that mix examples, and stores the settings; the engine is chosen at the first batch.

        Args:
            model: its trained parameters define the layout; refused if it mixes examples.
            loss: per-example loss.
            noise: secret source.
            microbatch: maximum number of examples processed at a time; None for the memory budget's.
            memory_budget: bytes that activations, their derivatives and rows may take, roughly; if None, 2 GiB on a
                CPU, and on a CUDA device half of its memory or what is free.
            precision: "float32", "tf32" or "bfloat16" for forward and backward passes of the layerwise engine; bounds
                are computed in float32 in any case (`numerics/full_precision.py`). None for TF32 on a CUDA device, as
                PyTorch's own convolutions, and float32 on others.
            engine: "auto", "layerwise", "torch.func", "one_by_one", "opacus" or "backpack"; `auto` is a static rule,
                the layerwise engine if it supports every layer and passes the checks, otherwise slower engines.
            augmentation: views of each example, whose gradients are averaged and then bounded once.
            expected_batch: examples in a batch of the run, so that the model is checked on batches of that size.
            domains: declared ranges of inputs and targets, for the synthetic examples of the checks.
            unchecked: True to execute a model that fails on all synthetic examples anyway, one example at a time.

        Raises:
            ValueError: for a model that mixes examples, has hooks on its gradients or parameters in half precision, a
                micro-batch or budget below 1, an unknown engine or precision, or a precision that its device or its
                parameters do not have.
        """
        refuse_batch_norm(model)
        refuse_model(model)
        refuse_name(engine)
        for argument, value in (("microbatch", microbatch), ("memory_budget", memory_budget)):
            if value is not None and value < 1:
                raise ValueError(f"{argument} must be at least 1 or None, got {value}")
        self.model, self.loss, self.noise, self.microbatch = model, loss, noise, microbatch
        self.memory = NoiseMemory()
        self.memory_budget = memory_budget
        self._asked_precision: Precision | None = precision
        self.augmentation = augmentation
        self.layout = Layout.of(model)
        self.name = self._asked = engine
        self.unverified = ""
        self._expected_batch, self._domains, self._unchecked = expected_batch, domains, unchecked
        self._checked: dict[object, ChosenEngine] = {}
        self._halved = False
        self._passes: Precision = precision_for(self._first(), precision)

    def settled_budget(self) -> int:
        """Returns the memory budget in bytes: if none is given, by what a CUDA device has free at the first call.

        It decides the sizes of passes, and so the rounding of sums.
        """
        if self.memory_budget is None:  # once, since an engine is checked on the sizes that follow
            like = self._first()
            self.memory_budget = usable_memory(like.device) if like.is_cuda else MEMORY_BUDGET
        return self.memory_budget

    def prepare(self, inputs: Inputs, targets: Tensor, *, exact: bool = False) -> ChosenEngine:
        """Chooses and checks the engine, once per shape, dtype and mode of the model; reads no value of the data.

        Args:
            inputs: only shape and dtype are read.
            targets: likewise.
            exact: True if every example must be processed alone.

        Raises:
            ValueError: if the model must not be trained or could not be checked, the requested engine cannot run it, or
                the data are on another device.
        """
        devices = (inputs.is_cpu or inputs.device, targets.is_cpu or targets.device)
        shapes = (form_of(inputs), targets.shape[1:], targets.dtype, devices)
        # Modes are part of the key: a layer may draw, or change state, in training mode only. So are the modules
        # themselves: a module that was added later is unchecked, and its dropout would be drawn by position in the
        # batch.
        kind = (exact, *shapes, *[(id(module), module.training) for module in _modules(self.model)])
        with ONE_PASS:
            if kind not in self._checked:
                refuse_batch_norm(self.model)  # its mode may have changed since construction
                refuse_other_device(self._first().device, "the model", inputs=inputs, targets=targets)
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
                choice.engine.captures = True
                self._checked[kind] = choice
        choice = self._checked[kind]
        # Engines other than the layerwise one compute in float32.
        self._passes = self.precision if choice.engine.reduces else "float32"
        self.unverified = choice.unverified
        self._describe(choice)
        return choice

    def _describe(self, choice: ChosenEngine) -> None:
        """Sets the name for the record, after a pass again: only then a graph is known to have been used."""
        precision = "" if self._passes == "float32" else self._passes
        self.name = ", ".join([word for word in (choice.note, precision, choice.engine.remark) if word])

    @property
    def precision(self) -> Precision:
        """Precision of forward and backward passes, of engines that have one."""
        return precision_for(self._first(), self._asked_precision)

    def gradients(self, inputs: Inputs, targets: Tensor, *, seed: int | None = None) -> Gradients:
        """Returns the per-example gradients of these examples, without views, as a function of the parameter point.

        Args:
            inputs: the examples.
            targets: their targets.
            seed: public seed of dropout; needed if the model has random layers.
        """
        choice = self.prepare(inputs, targets)
        keys = self._entry_keys(choice, inputs, targets, 1, seed)

        def rows(point: Tensor | None) -> Tensor:
            refuse_autocast(inputs)
            with entries(keys), full_precision():
                return choice.engine.rows(inputs, targets, point=point)

        return rows

    def batch(self, inputs: Inputs, targets: Tensor, *, seed: int | None = None) -> GradientBatch:
        """Returns per-example gradients as `gradients`, at the model's parameters, with factors if available."""
        choice = self.prepare(inputs, targets)
        keys = self._entry_keys(choice, inputs, targets, 1, seed)
        refuse_autocast(inputs)
        with entries(keys), full_precision():
            return choice.engine.batch(inputs, targets)

    def run(
        self,
        plan: NoisyPlan,
        inputs: Inputs,
        targets: Tensor,
        *,
        seed: int | None = None,
        noise: Noise | None = None,
        memory: NoiseMemory | None = None,
    ) -> Release:
        """Executes a plan on a batch, which may be empty.

        Args:
            plan: fixed before the batch was drawn, with its noise.
            inputs: the batch.
            targets: targets of the batch.
            seed: public seed of views and dropout; needed if there are any.
            noise: secret source of this release; the engine's own if None. Parties that share an engine have their own.
            memory: state of correlated noise that belongs to `noise`; the engine's own if None.

        Raises:
            ValueError: without a noise source or seed if they are needed, under `torch.autocast`, or for a batch on
                another device than the model.
        """
        refuse_autocast(inputs)
        noise, memory = self.noise if noise is None else noise, self.memory if memory is None else memory
        # Without noise there is no guarantee to keep, and exact sums would only be slower.
        exact = plan.noise_multiplier > 0 and noise is not None and noise.exact
        if exact and self._asked not in ("auto", "one_by_one"):
            raise ValueError(
                f"engine must be 'auto' or 'one_by_one' with exact noise, got '{self._asked}': "
                "a sum is exact only where every example is worked on by itself"
            )
        choice, augmentation = self.prepare(inputs, targets, exact=exact), self.augmentation
        if augmentation is not None and not isinstance(inputs, Tensor):
            raise ValueError(f"augmentation must be of examples of one tensor, got {len(inputs.tensors)}")
        like = self._first()
        views = 1 if augmentation is None else augmentation.views
        keys = self._entry_keys(choice, inputs, targets, views, seed)
        drawn = None
        if augmentation is not None and seed is not None and keys is not None:
            drawn = drawn_views(augmentation, keys, seed)

        def part(chosen: slice) -> tuple[Inputs, Tensor, Int64[Tensor, " entries"] | None]:
            """Returns inputs, targets and keys of some examples; the views of an example are consecutive."""
            span = slice(chosen.start * views, chosen.stop * views)
            if (chosen.start, chosen.stop) == (0, targets.shape[0]):
                x, y = inputs, targets
            else:
                x, y = inputs[chosen], targets[chosen]
            if augmentation is not None and drawn is not None and isinstance(x, Tensor):
                # Views of an example are adjacent, as `PerExample.rows` expects for its mean.
                x, y = x.repeat_interleave(views, dim=0), y.repeat_interleave(views, dim=0)
                x = augmentation.apply(x, drawn[span])
            return x, y, None if keys is None else keys[span]

        if exact and noise is not None:
            examples = [
                (
                    partial(self._alone, choice.engine.rows, part, i, views),
                    partial(self._alone, choice.engine.losses, part, i, views),
                )
                for i in range(targets.shape[0])
            ]
            with torch.no_grad():
                sums = exact_sums(plan.plan, examples, units_of(plan, noise), like.device)
            return add_noise(plan, sums, noise, like.dtype, memory)

        def sums_of(chosen: _Part) -> tuple[Tensor, ...]:
            x, y, keys_of_part = part(chosen.chosen)
            x, y, keys_of_part = (
                chosen.entered(x, views),
                chosen.entered(y, views),
                None if keys_of_part is None else chosen.entered(keys_of_part, views),
            )
            with entries(keys_of_part), full_precision(self._passes):
                sums = choice.engine.sums(plan.plan, x, y, views=views, **chosen.counted)
            return _per_example(sums, chosen.copies)

        parts = self._micro_batches(choice, targets.shape[0], like, sums_of)
        # `CipherNoise` accepts the sums of a single micro-batch unconverted, which saves four passes over float64.
        as_they_are = len(parts) == 1 and isinstance(noise, CipherNoise) and plan.plan.correlated is None
        sums = parts[0] if as_they_are else totals(plan.plan, parts, like.device)
        return add_noise(plan, sums, noise, like.dtype, memory)

    def _micro_batches(
        self, choice: ChosenEngine, examples: int, like: Tensor, sums_of: Callable[[_Part], tuple[Tensor, ...]]
    ) -> list[tuple[Tensor, ...]]:
        """Returns the sums of each micro-batch; if a device's memory does not suffice, of micro-batches half as large.

        Nothing is released before all sums are there, and no noise is drawn, so a step can start again.

        Args:
            choice: the engine.
            examples: number of examples of the batch.
            like: a trained parameter.
            sums_of: computes the sums of a micro-batch.
        """
        released = not choice.engine.remark
        while True:
            largest, sums = 0, []
            try:
                for part in self._fitting(choice, examples, self._batches(like), like):
                    largest = max(largest, part.size or part.chosen.stop - part.chosen.start)
                    sums.append(sums_of(part))
                self._describe(choice)
                return sums
            except torch.OutOfMemoryError:
                if released and largest <= 1:
                    raise
            # Outside of the handler, whose exception keeps the tensors of the pass alive.
            sums.clear()
            if released:
                self._halve(largest)
            released = True  # first the graphs of earlier passes, each of which holds the memory of one
            self.release_memory()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _halve(self, largest: int) -> None:
        """Halves the micro-batches from here on."""
        if not self._halved:
            warnings.warn(
                f"memory of the device did not suffice for {largest} examples at a time: half as many are computed "
                "from here on, and fewer if need be; memory_budget or microbatch (of Execution) limit them beforehand",
                stacklevel=4,
            )
        self._halved, self.microbatch = True, largest // 2

    def clipped_sums(self, plan: StepPlan, inputs: Inputs, targets: Tensor, *, views: int = 1) -> tuple[Tensor, ...]:
        """Returns the sum of bounded contributions to each block, in float64, without noise: private, for audits only.

        Args:
            plan: the step's plan.
            inputs: entries without further augmentation: `views` adjacent entries per example, possibly no example.
            targets: as many.
            views: number of views of each example.
        """
        like, choice = self._first().detach(), self.prepare(inputs, targets)
        with full_precision(self._passes):
            answers = [
                _per_example(engine.sums(plan, x, y, views=views, **part.counted), part.copies)
                for engine, x, y, part in self._entries(inputs, targets, views)
            ]
        self._describe(choice)
        return totals(plan, answers, like.device)

    def matched(
        self, plan: StepPlan, directions: Sequence[Tensor], inputs: Inputs, targets: Tensor, *, views: int = 1
    ) -> list[tuple[Tensor, Tensor]]:
        """Returns, per block, inner products of contributions with a direction, and squared norms: private, for audits.

        Args:
            plan: the step's plan.
            directions: a vector in the released space of each block.
            inputs: entries as for `clipped_sums`.
            targets: as many.
            views: number of views of each example.

        Returns:
            For each block, inner products [examples] and squared norms [examples], in float64.
        """
        like = self._first().detach()
        along, none = [d.to(like) for d in directions], like.new_zeros(0, dtype=torch.float64)
        self.prepare(inputs, targets)
        with full_precision(self._passes):
            answers = [
                [
                    (a[: part.chosen.stop - part.chosen.start], b[: part.chosen.stop - part.chosen.start])
                    for a, b in engine.matched(plan, along, x, y, views=views)
                ]
                for engine, x, y, part in self._entries(inputs, targets, views)
            ]
        pairs = [[answer[number] for answer in answers] for number in range(len(plan.blocks))]
        return [(torch.cat([none, *(a for a, _ in p)]), torch.cat([none, *(b for _, b in p)])) for p in pairs]

    def _entries(
        self, inputs: Inputs, targets: Tensor, views: int
    ) -> Iterator[tuple[PerExample, Inputs, Tensor, _Part]]:
        """Yields (engine, inputs, targets, part) per micro-batch within the memory budget; refuses random layers."""
        refuse_autocast(inputs)
        choice = self.prepare(inputs, targets)
        if choice.draws:
            reason = f"one that could not be checked: {choice.unverified}" if choice.unverified else "random layers"
            raise ValueError(f"the model must draw nothing where its entries are given as they are, got {reason}")
        like = self._first()
        batches = self._batches(like)._replace(views=views)
        for part in self._fitting(choice, targets.shape[0] // views, batches, like):
            span = slice(part.chosen.start * views, part.chosen.stop * views)
            yield choice.engine, part.entered(inputs[span], views), part.entered(targets[span], views), part

    @staticmethod
    def _fitting(choice: ChosenEngine, examples: int, batches: Batches, like: Tensor) -> Iterator[_Part]:
        """Splits a batch into micro-batches (`Batches.micro_batch`), of which a lone entry is processed twice.

        On a GPU all passes of the layerwise engine are of one public size, to which batches are padded. Libraries
        choose other kernels for another size, and in TF32 the rows of all examples would then be rounded otherwise:
        removing one example moved the others' sum by up to 4.7 bounds (256 copies of an example, emulated).

        A micro-batch of one entry runs through other kernels than a larger one. For a black image, say, rounding
        dominates the gradient that a GroupNorm passes back, and other rounding is another gradient: removing its only
        neighbour moved the sum by 1.36 bounds. A lone entry is therefore processed as two copies, unless every example
        is processed alone.

        """
        needed = choice.engine.bytes_per_entry(choice.activations, like.element_size())
        limit = batches.fitting(needed)
        if choice.engine.reduces and not like.is_cpu:
            size = batches.public_size(examples, needed)
            for start in range(0, examples, size):
                yield _Part(slice(start, min(start + size, examples)), size=size)
            return
        for chosen in microbatches(examples, batches.micro_batch(examples, needed)):
            alone = batches.views * (chosen.stop - chosen.start) == 1
            yield _Part(chosen, copies=2 if alone and limit > 1 else 1)

    def release_memory(self) -> None:
        """Frees memory that is kept from batch to batch; the next batch allocates it anew."""
        for choice in self._checked.values():
            choice.engine.release_memory()

    def _alone(
        self,
        answers: Callable[..., Tensor],
        part: Callable[[slice], tuple[Inputs, Tensor, Tensor | None]],
        number: int,
        views: int,
        point: Tensor | None,
    ) -> Float[Tensor, "1 _"]:
        """Returns the gradient, or the loss, of an example, computed without any other."""
        x, y, keys = part(slice(number, number + 1))
        with entries(keys), full_precision():
            return answers(x, y, point=point, views=views)

    def _entry_keys(
        self, choice: ChosenEngine, inputs: Inputs, targets: Tensor, views: int, seed: int | None
    ) -> Int64[Tensor, " entries"] | None:
        """Returns a key for each view of each record; None if nothing is drawn."""
        if self.augmentation is None and not choice.draws:
            return None
        if seed is None:
            random_part = "an augmentation" if self.augmentation is not None else "dropout or another random layer"
            raise ValueError(f"seed must be given where there is {random_part}, got None")
        return entry_keys(inputs, targets, views, seed)

    def _first(self) -> Tensor:
        """Returns a trained parameter as it is now: it may have been replaced since construction."""
        with ONE_PASS:  # during a pass, the model's parameters are temporarily replaced
            # A manual look-up: `model.get_parameter` takes three times as long.
            *path, key = self.layout.names[0].split(".")
            module: Any = self.model
            for part in path:
                module = module._modules[part]
            return module._parameters[key]

    def _batches(self, like: Tensor) -> Batches:
        """Returns the known sizes of the run's batches, given a trained parameter."""
        # An engine receives entries: every view of an example is an entry.
        views = 1 if self.augmentation is None else self.augmentation.views
        budget = reused(self.settled_budget(), like, self.layout.dim)
        return Batches(self._expected_batch, views, self.microbatch, budget)
