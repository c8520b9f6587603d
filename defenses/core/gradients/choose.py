"""Chooses the engine that computes clipped sums: a static rule, then checks on synthetic examples before any data.

`auto` takes the layerwise engine if it supports every layer and passes the checks, otherwise `torch.func`, otherwise
one example at a time, and gives the reason. An engine requested by name that does not support the model or fails the
checks is an error.

Two comparisons run in float64 on a copy of the model in its own mode, with slightly perturbed weights. First, the
clipped sum of a small batch is compared with plain autograd, example by example. Second, in batches as large as the
run's, which hold copies of an example, repeated labels and inputs of several magnitudes, removing one example must
subtract its own contribution from the sum and nothing else, up to rounding. `torch.func` needs the first comparison
only: vmap calls the model with a single example.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..inputs import Inputs, called, changed, form_of, rebuilt
from ..plan.bound import normalize
from ..plan.codec import Everything
from ..plan.defense import Block, StepPlan
from ..plan.layout import Layout
from ..randomness.record_draws import entries, one_pass, record_keys, words
from .checks.branches import BranchAnswers
from .checks.fingerprint import UnknownContent, architecture, digest
from .checks.model_checks import Findings, Refused, copied_loss, fresh, loss_state, try_first, try_passes, value_read
from .checks.synthetic_examples import (
    NOT_DECLARED,
    Domains,
    SyntheticBatch,
    classes_of,
    input_specs,
    inputs_of,
    kinds_of_inputs,
    tensors_of,
)
from .engines.batches import Batches
from .engines.interface import PerExample, Unsupported
from .engines.one_by_one import OneByOne
from .engines.torch_func import TorchFunc
from .layerwise.engine import Expanded, InOrder, Layerwise
from .layerwise.layers.opened.recurrent import kept_numbers
from .layerwise.shared_uses import SharedUses
from .reference import Loss, ModelFunction

AUTO = "auto"
# Tolerance relative to the largest entry of the sum: a wrong layer errs in the first digits, a deep model by 1e-13.
_AGREES = 1e-8
_AGREES_IN_FLOAT32 = 1e-3
_BESIDE = 1e-2  # standard deviation of the weights' perturbation, relative to each parameter's root mean square
_EXAMPLES = 7  # size of the small batch: a prime, so that no other dimension is taken for a multiple of it


@dataclass(frozen=True)
class ChosenEngine:
    """An engine and the outcome of its checks.

    Attributes:
        engine: computes the sums.
        note: name of the engine, and the reason for it if `auto` fell back.
        activations: numbers that a forward pass produces per entry of the inputs.
        draws: True if the model has random layers, such as dropout, whose draws are keyed by record.
        unverified: reason why the model could not be checked; empty if it was.
    """

    engine: PerExample
    note: str
    activations: int
    draws: bool = False
    unverified: str = ""


def names() -> tuple[str, ...]:
    """Returns the accepted values of `engine`."""
    return (AUTO, Layerwise.name, TorchFunc.name, OneByOne.name, "opacus", "backpack")


def choose(
    name: str,
    model: nn.Module,
    loss: Loss,
    layout: Layout,
    inputs: Inputs,
    targets: Tensor,
    *,
    batches: Batches | None = None,
    domains: Domains = NOT_DECLARED,
) -> ChosenEngine:
    """Returns the engine called `name`, or that of the static rule, checked for data of this shape.

    Args:
        name: one of `names()`.
        model: the network.
        loss: per-example loss.
        layout: its trained parameters.
        inputs: only shape and dtype are read, no values.
        targets: likewise.
        batches: known sizes of the run's batches.
        domains: declared value ranges of inputs and targets.

    Raises:
        ValueError: for an unknown name, a model that must not be trained (`model_checks.py`), or a requested engine
            that does not support the model or fails its checks.
        ImportError: for an engine whose package is not installed; names the extra.
    """
    refuse_name(name)
    batches = batches or Batches()
    key = _key(name, model, loss, layout, inputs, targets, batches, domains)
    if key in _verdicts:
        verdict = _verdicts[key]
        return verdict.choice(verdict.construct(model, loss, layout))
    state = loss_state(loss)
    # The checks must not advance the global generators: the run draws the same numbers with and without them.
    with torch.random.fork_rng([targets.device] if targets.is_cuda else []):
        trial = _Trial(model, loss, layout, inputs, targets, domains)
        verdict = _choose(name, trial, batches)
    # If the loss changed during the checks, the verdict is not cached: an equal loss must be checked itself.
    if key and state == loss_state(loss):
        _verdicts[key] = verdict
        while len(_verdicts) > _REMEMBERED:
            _verdicts.pop(next(iter(_verdicts)))  # the oldest
    return verdict.choice(trial.made(verdict.construct, model))


def forget() -> None:
    """Empties the cache of verdicts."""
    _verdicts.clear()


_Construct = Callable[[nn.Module, Loss, Layout], PerExample]
"""An engine's type, or one with what the trial found out about the model."""


@dataclass(frozen=True)
class _Verdict:
    """Outcome of a model's checks: a `ChosenEngine` without the engine, which would keep its model alive."""

    construct: _Construct
    note: str
    activations: int
    draws: bool
    unverified: str

    def choice(self, engine: PerExample) -> ChosenEngine:
        """Returns the verdict with the engine of an equal model."""
        return ChosenEngine(engine, self.note, self.activations, self.draws, self.unverified)


# Checks cost passes and float64 comparisons, and a suite trains many equal models (shadow models, seeds).
_REMEMBERED = 64
_verdicts: dict[str, _Verdict] = {}


def _key(
    name: str,
    model: nn.Module,
    loss: Loss,
    layout: Layout,
    inputs: Inputs,
    targets: Tensor,
    batches: Batches,
    domains: Domains,
) -> str:
    """Returns a digest of everything that decides a verdict; empty if some content cannot be inspected.

    Trained weights are left out: they change from the first step on, and a verdict holds for all of them.
    """
    fixed = {key: value for key, value in model.named_parameters() if not value.requires_grad}
    data = [(form_of(like), like.device) for like in (inputs, targets)]
    try:
        about = (dict(architecture(model)), fixed, dict(model.named_buffers()))
        return digest(name, about, loss, layout, data, batches, domains.as_lists())
    except UnknownContent:
        return ""


def _choose(name: str, trial: _Trial, batches: Batches) -> _Verdict:
    """Returns the first engine of the static order that passes the checks; an engine requested by name, or an error."""
    if trial.failure:  # for every kind of synthetic values
        if name not in (AUTO, OneByOne.name):
            raise ValueError(f"engine '{name}' could not be checked on made-up examples: {trial.failure}")
        note = f"{OneByOne.name} (not checked: {trial.failure})"
        return trial.verdict(OneByOne, note, unverified=f"the model fails on made-up examples: {trial.failure}")
    if trial.alone and name not in (AUTO, OneByOne.name):
        raise ValueError(f"engine '{name}' cannot run this model: it fails on batches: {trial.alone}")
    if trial.alone:
        return trial.verdict(OneByOne, f"{OneByOne.name} (no {Layerwise.name}: it fails on batches: {trial.alone})")
    if name == OneByOne.name:
        return trial.verdict(OneByOne, OneByOne.name)
    reason = ""
    for kind in _ways(name):
        if reads := trial.findings.reads:
            reason = f"reads values of its inputs, by {reads}"
            if kind is Layerwise and (answered := trial.answered(batches)) is not None:
                return trial.verdict(answered, f"{kind.name} (branches fixed: {reason})")
            break
        if trial.doubt and kind is not TorchFunc:  # torch.func separates examples by construction
            reason = reason or f"not checked in float64: {trial.doubt}"
            continue
        try:
            construct = trial.informed(kind)
            trial.check(construct, batches)
        except Unsupported as why:
            reason = _joined(reason, kind, str(why))
            continue
        return trial.verdict(construct, _note(kind, name, _beside(construct) or reason))
    if name != AUTO:
        raise ValueError(f"engine '{name}' cannot run this model: {reason}")
    return trial.verdict(OneByOne, f"{OneByOne.name} (no {Layerwise.name}: {reason})")


def _ways(name: str) -> tuple[type[PerExample], ...]:
    if name == AUTO:
        return (Layerwise, InOrder, Expanded, TorchFunc)
    if name == Layerwise.name:
        return (Layerwise, InOrder, Expanded)
    if name == TorchFunc.name:
        return (TorchFunc,)
    if name == "opacus":
        from .engines.opacus import Opacus  # its package is an extra

        return (Opacus,)
    from .engines.backpack import BackPACK  # its package is an extra

    return (BackPACK,)


def _joined(reason: str, kind: type[PerExample], why: str) -> str:
    """Returns why faster engines are not used: the layerwise engine's first reason, and that of `torch.func`."""
    if kind is TorchFunc and reason:
        return f"{reason}; no {kind.name}: {_line(why)}"
    # The sentence on copies says more than the first, that no layer holds the parameter.
    return _line(why) if _line(why).startswith(reason) else reason


def _beside(construct: _Construct) -> str:
    """Returns which parameter functions use beside its layer; empty if there is none."""
    uses = construct.keywords.get("uses") if isinstance(construct, partial) else None
    return f"functions use '{uses.beside}' beside its layer" if isinstance(uses, SharedUses) and uses.beside else ""


def _note(kind: type[PerExample], requested: str, reason: str) -> str:
    if not reason:
        return kind.name
    if kind is InOrder:
        return f"{kind.name} (contiguous: {reason})"
    if kind is Expanded:
        return f"{kind.name} (expanded: {reason})"
    return kind.name if requested == kind.name else f"{kind.name} (no {Layerwise.name}: {reason})"


def refuse_name(name: str) -> None:
    """Raises `ValueError` for an unknown engine name."""
    if name not in names():
        raise ValueError(f"engine must be one of {', '.join(names())}, got '{name}'")


class _Trial:
    """A model on synthetic examples: its float64 copy, the findings of a few passes, and the comparisons.

    Attributes:
        failure: reason why the model fails in its own precision even on single examples; empty if it runs.
        alone: reason why the model fails on batches but runs on single examples; empty if batches work.
        doubt: reason why the model does not run in float64; empty if it does.
        findings: results of the passes.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, layout: Layout, inputs: Inputs, targets: Tensor, domains: Domains
    ) -> None:
        self._original, self._untouched_loss, self._layout = model, loss, layout
        self._inputs, self._targets, self._domains = inputs, targets, domains
        self._specs = input_specs(model, inputs, domains.inputs)
        self.failure = self.alone = self.doubt = ""
        self._padding: tuple[float, float] | None = None
        self.findings, self._activations = Findings("", False), inputs[:1].numel()
        self._own = next(p.dtype for p in model.parameters() if p.requires_grad)
        self._engines: dict[tuple[_Construct, nn.Module], PerExample] = {}
        # Every norm affects the sum: no two rows are scaled by the same factor.
        self.plan = StepPlan(Block(codec=Everything(layout.dim), bound=normalize(1.0, regulariser=0.01)))
        for size in (_EXAMPLES, 1):
            failures = self._try(size)
            if failures is None:
                return
            self.failure, self.alone = self.failure or failures, failures if size > 1 else self.alone

    def _try(self, size: int) -> str | None:
        """Prepares with the first kind of values that the model accepts; returns the first failure if none is."""
        first = ""
        for values in kinds_of_inputs(self._original, self._specs):
            self._values, self.doubt = values, ""
            # Float64 first: in float32, rounding may flip the argmax of a max-pool, and equal engines then differ by a
            # percent.
            for dtype in dict.fromkeys((torch.float64, self._own)):
                try:
                    self._prepare(dtype, size)
                except Refused:
                    raise
                except Exception as error:  # anything that a user's model raises on synthetic examples
                    self.doubt, first = self.doubt or _line(error), first or _line(error)
                    continue
                self.failure = ""
                return None
        return first

    def _prepare(self, dtype: torch.dtype, size: int) -> None:
        """Copies the model in this precision and records the findings of passes over a few examples."""
        self._dtype = dtype
        self._model = _moved(copy.deepcopy(self._original).to(dtype))
        self._untouched = fresh(self._model)
        self._loss = copied_loss(self._untouched_loss)
        self._classes = self._guessed_classes(size)
        examples = self._made_up(size)
        self.findings = try_passes(self._model, self._loss, examples)
        try_first(self._untouched, self._untouched_loss, examples, examples)
        if size == 1:
            self._one_by_one()
        self._activations = self._count(examples.inputs)

    def _one_by_one(self) -> None:
        """Passes several examples, each as a batch of one, for a model that fails on larger batches.

        Several, because the model may accept a single example by chance. All passes use the same copy of the model, so
        state that it keeps from one example affects the next.
        """
        batch = self._made_up(_EXAMPLES)
        for place in range(_EXAMPLES):
            alone = batch.chosen(torch.tensor([place], device=batch.keys.device))
            findings = try_passes(self._model, self._loss, alone)
            self.findings = Findings(self.findings.reads or findings.reads, self.findings.draws or findings.draws)

    def informed(self, kind: type[PerExample]) -> _Construct:
        """Returns an engine's type; for `Expanded`, with the shared uses of the model's float64 copy.

        Raises:
            Unsupported: if the engine does not support one of them.
        """
        if kind is not Expanded:
            return kind
        try:
            return Expanded.informed(self._model, self._loss, self._layout, self._made_up(_EXAMPLES))
        except Unsupported:
            raise
        except Exception as error:  # anything that a model raises on other parameters
            raise Unsupported(f"fails on synthetic rows: {_line(error)}") from error

    def answered(self, batches: Batches) -> _Construct | None:
        """Returns our engine with fixed answers to the model's questions about values (`branches.py`), if it is right.

        Some synthetic examples end with copies of a value that may stand for padding. Those answers are tried that an
        example gives alone, if others answer each of the questions otherwise, or are not asked.
        """
        for self._padding in () if self.doubt else self._padding_values():  # noqa: B020
            examples = self._made_up(_EXAMPLES)
            by_example = self._answers(examples)
            for answers in dict.fromkeys(by_example):
                differing = [
                    any(theirs[k : k + 1] != answers[k : k + 1] for theirs in by_example) for k in range(len(answers))
                ]
                if answers and all(differing) and self._is_right(answers, examples, batches):
                    return Expanded.informed(self._model, self._loss, self._layout, examples, answers)
        self._padding = None
        return None

    def _is_right(self, answers: tuple[bool, ...], examples: SyntheticBatch, batches: Batches) -> bool:
        """Returns whether our engine with these answers passes the check, and the model then reads no value."""
        try:
            if value_read(self._model, self._loss, examples, answers):
                return False
            self.check(Expanded.informed(self._model, self._loss, self._layout, examples, answers), batches)
        except Exception:  # `Unsupported`, or anything that a model raises on the wrong branch
            return False
        return True

    def _answers(self, examples: SyntheticBatch) -> list[tuple[bool, ...]]:
        """Returns the model's own answers to its questions about each of the examples; none if it fails on one."""
        by_example: list[tuple[bool, ...]] = []
        for place in range(_EXAMPLES):
            alone = examples.chosen(torch.tensor([place], device=examples.keys.device))
            with torch.no_grad(), entries(alone.keys), one_pass(), BranchAnswers() as answers:
                try:
                    called(self._model, alone.inputs)
                except Exception:  # anything that a model raises on padded examples
                    return []
            by_example.append(tuple(answers.given))
        return by_example

    def _padding_values(self) -> Iterator[tuple[float, float]]:
        """Yields values that may stand for padding, the lowest and highest of inputs, each with another value."""
        tables = [layer.num_embeddings for layer in self._original.modules() if isinstance(layer, nn.Embedding)]
        low, high = 0.0, float(min(tables, default=1) - 1)
        # Masks follow the padding of the first declared input.
        declared = [spec.domain for spec in self._specs if spec.domain is not None and not spec.masks]
        if declared:
            bounds = (declared[0].low, declared[0].high)
            low, high = float(torch.as_tensor(bounds[0]).max()), float(torch.as_tensor(bounds[1]).min())
        for value in dict.fromkeys((0.0, 1.0, low, high)):
            if low <= value <= high and low < high:
                yield value, low if value > low else min(low + 1, high)

    def verdict(self, kind: _Construct, note: str, *, unverified: str = "") -> _Verdict:
        """Returns the verdict that selects this kind of engine."""
        draws = self.findings.draws or bool(unverified)
        return _Verdict(kind, note, self._activations, draws, unverified)

    def check(self, kind: _Construct, batches: Batches) -> None:
        """Compares an engine's sums with plain autograd's, and sums over batches with and without an example.

        Raises:
            Unsupported: if they differ, or the engine fails.
        """
        engine = self.made(kind, self._original)  # raises `Unsupported` for an unknown layer
        agrees = _AGREES if self._dtype == torch.float64 else _AGREES_IN_FLOAT32
        examples = self._made_up(_EXAMPLES)
        error = _distance(self._sum(kind, examples), self._sum(OneByOne, examples))
        if not error <= agrees:  # True for NaN as well
            precision = str(self._dtype).removeprefix("torch.")
            raise Unsupported(f"differs from the reference by {error:.1e} of the largest entry in {precision}")
        if kind is TorchFunc:  # vmap calls the model with a single example, so no other can affect its gradient
            return
        if orders := self.findings.orders:
            raise Unsupported(f"selects examples of the batch by their values, by {orders}")
        if numbers := self.findings.numbers:
            raise Unsupported(
                f"its loss has {numbers} numbers for any number of examples: of {numbers} it would be "
                "taken for one of each"
            )
        if self._own != self._dtype:
            self._run_in_own_precision(kind)
        # Sizes of the run, because a model may mix examples in large batches only (mixture of experts with limited
        # capacity).
        batch_sizes = batches.sizes(engine.bytes_per_entry(self._activations, self._own.itemsize))
        if batch_sizes:
            # For state that is initialised only from a large batch, such as a standard deviation.
            try_first(self._untouched, self._untouched_loss, self._made_up(max(batch_sizes)), examples)
        for size in sorted({2, 3, *(max(2, size) for size in batch_sizes)}):
            error = self._leave_one_out(kind, size)
            if not error <= agrees:
                raise Unsupported(
                    f"in a batch of {size} one example shows in another's gradient, by {error:.1e} of the largest entry"
                )

    def _run_in_own_precision(self, kind: _Construct) -> None:
        """Runs the engine in the model's own precision, where it refuses autocast inside a model, which spares float64.

        Values are not compared, because rounding may change them by much.

        Raises:
            Unsupported: if the engine fails.
        """
        own = copy.deepcopy(self._original).to(self._own)
        two = self._made_up(2)

        def converted(values: Tensor) -> Tensor:
            return values.to(self._own) if values.is_floating_point() else values

        x, neighbour = changed(two.inputs, converted), changed(two.neighbour, converted)
        self._sum(kind, SyntheticBatch(x, converted(two.targets), two.keys, neighbour), own)

    def _leave_one_out(self, kind: _Construct, size: int) -> float:
        """Returns the change of the sum beyond a removed example's own contribution, relative to the largest entry."""
        examples = self._made_up(size)
        whole, worst = self._sum(kind, examples), 0.0
        for left_out in sorted({0, size // 2, size - 1}):
            kept = torch.arange(size, device=examples.keys.device) != left_out
            alone = self._sum(OneByOne, examples.chosen(~kept))
            without = self._sum(kind, examples.chosen(kept))
            worst = max(worst, _distance(whole, without + alone))
        return worst

    def _sum(self, kind: _Construct, examples: SyntheticBatch, model: nn.Module | None = None) -> Tensor:
        engine = self.made(kind, self._model if model is None else model)
        try:
            with entries(examples.keys if self.findings.draws else None):
                (total,) = engine.sums(self.plan, examples.inputs, examples.targets)
        except (Unsupported, ImportError):
            raise
        except Exception as error:  # anything that third-party hooks, or torch under vmap, raise on a model
            raise Unsupported(f"fails on synthetic rows: {_line(error)}") from error
        return total

    def made(self, kind: _Construct, model: nn.Module) -> PerExample:
        """Returns the engine of this kind for a model, constructed once."""
        if (kind, model) not in self._engines:
            loss = self._untouched_loss if model is self._original else self._loss
            self._engines[kind, model] = kind(model, loss, self._layout)
        return self._engines[kind, model]

    def _made_up(self, size: int) -> SyntheticBatch:
        """Returns synthetic examples of the data's shape, some of them copies of the first (`inputs_of`)."""
        # A fixed seed: a verdict must not depend on chance, and is cached for equal models.
        generator = torch.Generator().manual_seed(0)
        half = size - size // 2
        first_and_copies = (slice(0, 1), slice(half, half + size // 4))
        batch, others = list[Tensor](), list[Tensor]()
        for spec, values in zip(self._specs, self._values, strict=True):
            like = spec.like
            dtype = self._dtype if like.is_floating_point() else like.dtype
            x, neighbour = (
                inputs.to(like.device, dtype) for inputs in inputs_of(values, (size, *like.shape[1:]), generator)
            )
            batch.append(x if self._padding is None else spec.padded(x, *self._padding, first_and_copies))
            others.append(neighbour)
        x, neighbour = (rebuilt(self._inputs, tensors) for tensors in (batch, others))
        y = self._made_up_targets(size, generator)
        return SyntheticBatch(x, y, words(record_keys(x, y), 1, 0).flatten(), neighbour)

    def _made_up_targets(self, size: int, generator: torch.Generator) -> Tensor:
        like, domain = self._targets, self._domains.targets
        shape = (size, *like.shape[1:])
        dtype = self._dtype if like.is_floating_point() else like.dtype
        if domain is not None:
            targets = domain.values(shape, generator)
        elif like.is_floating_point():
            targets = torch.rand(shape, generator=generator, dtype=torch.float64)
            if targets.dim() > 1:  # class probabilities
                targets = targets / targets.sum(dim=1, keepdim=True)
            return targets.to(like.device, dtype)
        else:
            targets = torch.randint(0, self._classes, shape, generator=generator)
        targets[: len(targets) // 2 + 1] = targets[:1]  # at least half of the examples share a class
        return targets.to(like.device, dtype)

    def _guessed_classes(self, size: int) -> int:
        """Returns a number of classes for which the loss is finite; 0 if the targets need no guess."""
        if self._targets.is_floating_point() or self._domains.targets is not None:
            return 0
        failure: Exception | None = None
        self._classes = 1
        with torch.no_grad(), one_pass():
            # On copies: the model must not have seen a batch before `try_first` inspects the state kept from its first
            # one.
            inputs = self._made_up(size)
            with entries(inputs.keys):
                outputs = called(fresh(self._untouched), inputs.inputs)
            for self._classes in classes_of(outputs, inputs.targets.shape):
                try:
                    losses = copied_loss(self._untouched_loss)(outputs, self._made_up(size).targets)
                except Exception as error:  # anything that a user's loss raises
                    failure = failure or error
                    continue
                if losses.isfinite().all():
                    return self._classes
        raise failure or ArithmeticError("its loss is not finite")

    def _count(self, x: Inputs) -> int:
        """Returns the number of outputs of all layers in a forward pass, and states of recurrent ones, per example."""
        total = 0

        def add(layer: nn.Module, _args: object, output: object) -> None:
            nonlocal total
            recurrent = kept_numbers(layer, output)
            total += sum(values.numel() for values in tensors_of(output)) if recurrent is None else recurrent

        # Leaf modules only: a container returns the output of its last layer again.
        leaves = [layer for layer in self._model.modules() if not [*layer.children()]]
        handles = [layer.register_forward_hook(add) for layer in leaves]
        with torch.no_grad():
            ModelFunction(self._model)({}, x)
        for handle in handles:
            handle.remove()
        return (total + x.numel()) // len(x)


def _moved(model: nn.Module) -> nn.Module:
    """Perturbs the weights in place: a branch behind a gate that starts at zero has no gradient until the gate moves.

    Non-finite weights, as in a diverged run, are replaced by random values.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.numel():
                step = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                step = step.to(parameter.device, parameter.dtype)
                parameter.copy_(torch.where(parameter.isfinite(), parameter, step))
                size = float(parameter.square().mean().sqrt()) or 1.0
                parameter += _BESIDE * size * step
    return model


def _distance(computed: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, relative to the largest expected entry."""
    return float((computed - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def _line(error: BaseException | str) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
