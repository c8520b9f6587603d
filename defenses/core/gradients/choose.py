"""Chooses the engine that computes clipped sums: a static rule, and checks on made-up examples before any data.

`auto` takes our own engine where it knows every layer and passes the checks, otherwise the reference, otherwise one
example at a time, and says why. An engine that was asked for by name and cannot do it, or fails, is an error.

Two comparisons, in float64 on a copy of the model in its own mode, with weights moved a little. A small batch's
clipped sum is compared with plain autograd example by example. And in batches as large as the run's, with copies
of one example, labels that repeat and inputs of several sizes in them, taking one example out must take exactly
its own contribution off the sum.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..plan.bound import normalize
from ..plan.codec import Everything
from ..plan.defense import Block, StepPlan
from ..plan.layout import Layout
from ..randomness.record_draws import entries, one_pass, record_keys, words
from .checks.fingerprint import UnknownContent, architecture, digest
from .checks.model_checks import Findings, Refused, copied_loss, fresh, loss_state, try_first, try_passes
from .checks.synthetic_examples import NOT_DECLARED, Domains, MadeUp, classes_of, inputs_for, inputs_of
from .engines.batches import Batches
from .engines.interface import PerExample, Unsupported
from .engines.one_by_one import OneByOne
from .engines.torch_func import TorchFunc
from .layerwise.engine import InOrder, Layerwise
from .reference import Loss, ModelFunction

AUTO = "auto"
# Relative to the largest entry of the sum. Wrong layers are wrong in the first digits; deep ones differ by 1e-13.
_AGREES = 1e-8
_AGREES_IN_FLOAT32 = 1e-3
_BESIDE = 1e-2  # of their own size: by how much weights are moved
_EXAMPLES = 7  # of the small batch: a prime, so that no other dimension passes for a multiple of it


@dataclass(frozen=True)
class ChosenEngine:
    """An engine that was checked.

    Attributes:
        engine: computes the sums.
        note: its name, and why it is not the fast one where `auto` fell back.
        activations: numbers that a forward pass leaves per entry of the inputs.
        draws: whether the model draws by record, as in dropout.
        unverified: why the model could not be checked; empty where it was.
    """

    engine: PerExample
    note: str
    activations: int
    draws: bool = False
    unverified: str = ""


def names() -> tuple[str, ...]:
    """What `engine` may be."""
    return (AUTO, Layerwise.name, TorchFunc.name, OneByOne.name, "opacus", "backpack")


def choose(
    name: str,
    model: nn.Module,
    loss: Loss,
    layout: Layout,
    inputs: Tensor,
    targets: Tensor,
    *,
    batches: Batches | None = None,
    domains: Domains = NOT_DECLARED,
) -> ChosenEngine:
    """The engine called `name`, or by the static rule, checked for data of this shape.

    Args:
        name: one of `names()`.
        model: the network.
        loss: per-example loss.
        layout: its trained parameters.
        inputs: shape and dtype are looked at, no value is.
        targets: likewise.
        batches: what is known of the run's.
        domains: what inputs and targets may be.

    Raises:
        ValueError: for an unknown name, a model that must not be trained (`model_checks.py`), or an engine that was
            asked for and does not know or fails the model.
        ImportError: for one whose package is not installed; names the extra.
    """
    refuse_name(name)
    batches = batches or Batches()
    key = _key(name, model, loss, layout, inputs, targets, batches, domains)
    if key in _verdicts:
        verdict = _verdicts[key]
        return verdict.choice(verdict.kind(model, loss, layout))
    held = loss_state(loss)
    # Whatever a layer draws in the check, a run goes on drawing as if there had been none.
    with torch.random.fork_rng([inputs.device] if inputs.is_cuda else []):
        trial = _Trial(model, loss, layout, inputs, targets, domains)
        verdict = _choose(name, trial, batches)
    # What equals a loss that has changed meanwhile has to be tried itself.
    if key and held == loss_state(loss):
        _verdicts[key] = verdict
        while len(_verdicts) > _REMEMBERED:
            _verdicts.pop(next(iter(_verdicts)))  # the oldest
    return verdict.choice(trial.made(verdict.kind, model))


def forget() -> None:
    """Empties the cache of verdicts."""
    _verdicts.clear()


@dataclass(frozen=True)
class _Verdict:
    """The outcome of the checks of a model: a `ChosenEngine` without the engine, which would keep its model alive."""

    kind: type[PerExample]
    note: str
    activations: int
    draws: bool
    unverified: str

    def choice(self, engine: PerExample) -> ChosenEngine:
        """With the engine of a model that is in all things equal."""
        return ChosenEngine(engine, self.note, self.activations, self.draws, self.unverified)


# A verdict takes passes and comparisons in float64, and a suite trains many equal models (shadows, seeds).
_REMEMBERED = 64
_verdicts: dict[str, _Verdict] = {}


def _key(
    name: str,
    model: nn.Module,
    loss: Loss,
    layout: Layout,
    inputs: Tensor,
    targets: Tensor,
    batches: Batches,
    domains: Domains,
) -> str:
    """A digest of what a verdict follows from; empty where something cannot be looked into.

    Weights that are trained are left out. They change from the first step on, and a verdict is about all of them.
    """
    fixed = {key: value for key, value in model.named_parameters() if not value.requires_grad}
    data = [(tuple(like.shape[1:]), like.dtype, like.device) for like in (inputs, targets)]
    try:
        about = (dict(architecture(model)), fixed, dict(model.named_buffers()))
        return digest(name, about, loss, layout, data, batches, [d and d.as_lists() for d in domains])
    except UnknownContent:
        return ""


def _choose(name: str, trial: _Trial, batches: Batches) -> _Verdict:
    """The fastest engine that passes the checks; where one was asked for by name, that one or an error."""
    if trial.failure:  # of whatever values
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
            break
        if trial.doubt and kind is not TorchFunc:  # torch.func keeps examples apart by its making
            reason = reason or f"not checked in float64: {trial.doubt}"
            continue
        try:
            trial.check(kind, batches)
        except Unsupported as why:
            reason = _joined(reason, kind, str(why))
            continue
        return trial.verdict(kind, _note(kind, name, reason))
    if name != AUTO:
        raise ValueError(f"engine '{name}' cannot run this model: {reason}")
    return trial.verdict(OneByOne, f"{OneByOne.name} (no {Layerwise.name}: {reason})")


def _ways(name: str) -> tuple[type[PerExample], ...]:
    if name == AUTO:
        return (Layerwise, InOrder, TorchFunc)
    if name == Layerwise.name:
        return (Layerwise, InOrder)
    if name == TorchFunc.name:
        return (TorchFunc,)
    if name == "opacus":
        from .engines.opacus import Opacus  # its package is an extra

        return (Opacus,)
    from .engines.backpack import BackPACK  # its package is an extra

    return (BackPACK,)


def _joined(reason: str, kind: type[PerExample], why: str) -> str:
    """Why the faster ways do not serve: our own engine's first reason, and the reference's where it fails too."""
    if kind is TorchFunc and reason:
        return f"{reason}; no {kind.name}: {_line(why)}"
    return reason or _line(why)


def _note(kind: type[PerExample], asked: str, reason: str) -> str:
    if not reason:
        return kind.name
    if kind is InOrder:
        return f"{kind.name} (contiguous: {reason})"
    return kind.name if asked == kind.name else f"{kind.name} (no {Layerwise.name}: {reason})"


def refuse_name(name: str) -> None:
    """Raises `ValueError` for an engine that does not exist."""
    if name not in names():
        raise ValueError(f"engine must be one of {', '.join(names())}, got '{name}'")


class _Trial:
    """A model on made-up examples: its copy in float64, what passes over a few of them showed, and comparisons.

    Attributes:
        failure: why it could not even be tried in its own precision, one example at a time; empty where it could.
        alone: why it could be tried one example at a time only; empty where it could in batches.
        doubt: why it could not be tried in float64; empty where it could.
        findings: what the passes showed.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, layout: Layout, inputs: Tensor, targets: Tensor, domains: Domains
    ) -> None:
        self._original, self._untouched_loss, self._layout = model, loss, layout
        self._inputs, self._targets, self._domains = inputs, targets, domains
        self.failure = self.alone = self.doubt = ""
        self.findings, self._activations = Findings("", False), inputs[:1].numel()
        self._own = next(p.dtype for p in model.parameters() if p.requires_grad)
        self._engines: dict[tuple[type[PerExample], nn.Module], PerExample] = {}
        # Every norm decides about the sum: no two rows are scaled by one factor.
        self.plan = StepPlan(Block(codec=Everything(layout.dim), bound=normalize(1.0, regulariser=0.01)))
        for size in (_EXAMPLES, 1):
            failures = self._try(size)
            if failures is None:
                return
            self.failure, self.alone = self.failure or failures, failures if size > 1 else self.alone

    def _try(self, size: int) -> str | None:
        """Prepares with the first kind of values that the model accepts; of none, the sentence of the first failure."""
        first = ""
        for values in inputs_for(self._original, self._inputs, self._domains.inputs):
            self._values, self.doubt = values, ""
            # Float64 first: in float32 a max-pool's argmax may flip by rounding, and equal engines differ by a percent.
            for dtype in dict.fromkeys((torch.float64, self._own)):
                try:
                    self._prepare(dtype, size)
                except Refused:
                    raise
                except Exception as error:  # whatever a user's model raises on made-up examples
                    self.doubt, first = self.doubt or _line(error), first or _line(error)
                    continue
                self.failure = ""
                return None
        return first

    def _prepare(self, dtype: torch.dtype, size: int) -> None:
        """Copies the model in this precision and records what passes over a few examples show."""
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
        """Passes of several examples, each alone: what fails on a batch may fail on its values, and accept one by luck.

        One after another, so that what a model keeps of the last one shows in the next.
        """
        batch = self._made_up(_EXAMPLES)
        for place in range(_EXAMPLES):
            alone = batch.chosen(torch.tensor([place], device=batch.inputs.device))
            seen = try_passes(self._model, self._loss, alone)
            self.findings = Findings(self.findings.reads or seen.reads, self.findings.draws or seen.draws)

    def verdict(self, kind: type[PerExample], note: str, *, unverified: str = "") -> _Verdict:
        """The verdict that this kind of engine is to be used."""
        draws = self.findings.draws or bool(unverified)
        return _Verdict(kind, note, self._activations, draws, unverified)

    def check(self, kind: type[PerExample], batches: Batches) -> None:
        """Compares an engine's sums with plain autograd's, and sums over batches with and without an example.

        Raises:
            Unsupported: when they differ, or it fails.
        """
        engine = self.made(kind, self._original)  # what it does not know it says here
        agrees = _AGREES if self._dtype == torch.float64 else _AGREES_IN_FLOAT32
        examples = self._made_up(_EXAMPLES)
        error = _distance(self._sum(kind, examples), self._sum(OneByOne, examples))
        if not error <= agrees:  # NaN differs too
            raise Unsupported(f"differs from the reference by {error:.1e} of the largest entry in float64")
        if kind is TorchFunc:  # vmap calls the model with one example, in whose gradient no other can show
            return
        if self._own != self._dtype:
            self._run_in_own_precision(kind)
        # Sizes of the run, because a model may mix examples in large batches only (experts with limited places).
        asked = batches.sizes(engine.bytes_per_entry(self._activations, self._own.itemsize))
        if asked:
            # What begins with a large batch alone, as a standard deviation does.
            try_first(self._untouched, self._untouched_loss, self._made_up(max(asked)), examples)
        for size in sorted({2, 3, *(max(2, size) for size in asked)}):
            error = self._leave_one_out(kind, size)
            if not error <= agrees:
                raise Unsupported(
                    f"in a batch of {size} one example shows in another's gradient, by {error:.1e} of the largest entry"
                )

    def _run_in_own_precision(self, kind: type[PerExample]) -> None:
        """Lets an engine refuse what float64 does not show: a model's own autocast rounds float32 alone.

        Values are not compared, which rounding may move by much.

        Raises:
            Unsupported: when it fails.
        """
        own = copy.deepcopy(self._original).to(self._own)
        two = self._made_up(2)
        x, y = (values.to(self._own) if values.is_floating_point() else values for values in (two.inputs, two.targets))
        self._sum(kind, MadeUp(x, y, two.keys, two.other.to(x)), own)

    def _leave_one_out(self, kind: type[PerExample], size: int) -> float:
        """Change of the sum beyond an example's own contribution when that is left out, of the largest entry."""
        examples = self._made_up(size)
        whole, worst = self._sum(kind, examples), 0.0
        for left_out in sorted({0, size // 2, size - 1}):
            rest = torch.arange(size, device=examples.inputs.device) != left_out
            alone = self._sum(OneByOne, examples.chosen(~rest))
            without = self._sum(kind, examples.chosen(rest))
            worst = max(worst, _distance(whole, without + alone))
        return worst

    def _sum(self, kind: type[PerExample], examples: MadeUp, model: nn.Module | None = None) -> Tensor:
        engine = self.made(kind, self._model if model is None else model)
        try:
            with entries(examples.keys if self.findings.draws else None):
                (found,) = engine.sums(self.plan, examples.inputs, examples.targets)
        except (Unsupported, ImportError):
            raise
        except Exception as error:  # whatever a third party's hooks, or torch under vmap, raise on a model
            raise Unsupported(f"fails on synthetic rows: {_line(error)}") from error
        return found

    def made(self, kind: type[PerExample], model: nn.Module) -> PerExample:
        """The engine of this kind for a model, made once."""
        if (kind, model) not in self._engines:
            loss = self._untouched_loss if model is self._original else self._loss
            self._engines[kind, model] = kind(model, loss, self._layout)
        return self._engines[kind, model]

    def _made_up(self, size: int) -> MadeUp:
        """Examples of the data's shape: half of them different, a quarter copies of one, a quarter different again."""
        # Always the same: a verdict must not depend on luck, and is remembered for equal models.
        coins = torch.Generator().manual_seed(0)
        dtype = self._dtype if self._inputs.is_floating_point() else self._inputs.dtype
        x, other = (
            made.to(self._inputs.device, dtype)
            for made in inputs_of(self._values, (size, *self._inputs.shape[1:]), coins)
        )
        y = self._made_up_targets(size, coins)
        return MadeUp(x, y, words(record_keys(x, y), 1, 0).flatten(), other)

    def _made_up_targets(self, size: int, coins: torch.Generator) -> Tensor:
        like, domain = self._targets, self._domains.targets
        shape = (size, *like.shape[1:])
        dtype = self._dtype if like.is_floating_point() else like.dtype
        if domain is not None:
            made = domain.values(shape, coins)
        elif like.is_floating_point():
            made = torch.rand(shape, generator=coins, dtype=torch.float64)
            if made.dim() > 1:  # probabilities
                made = made / made.sum(dim=1, keepdim=True)
            return made.to(like.device, dtype)
        else:
            made = torch.randint(0, self._classes, shape, generator=coins)
        made[: len(made) // 2 + 1] = made[:1]  # at least half of the examples are of one class
        return made.to(like.device, dtype)

    def _guessed_classes(self, size: int) -> int:
        """Number of classes with which the loss of the model's outputs is finite; 0 where there is nothing to guess."""
        if self._targets.is_floating_point() or self._domains.targets is not None:
            return 0
        failure: Exception | None = None
        self._classes = 1
        with torch.no_grad(), one_pass():
            # By copies: the model must not have seen a batch when `try_first` looks at what it keeps of its first.
            inputs = self._made_up(size)
            with entries(inputs.keys):
                outputs = fresh(self._untouched)(inputs.inputs)
            for self._classes in classes_of(outputs):
                try:
                    losses = copied_loss(self._untouched_loss)(outputs, self._made_up(size).targets)
                except Exception as error:  # whatever a user's loss raises
                    failure = failure or error
                    continue
                if losses.isfinite().all():
                    return self._classes
        raise failure or ArithmeticError("its loss is not finite")

    def _count(self, x: Tensor) -> int:
        """Numbers that the layers of one forward pass put out, per example."""
        total = 0

        def add(_layer: nn.Module, _args: object, output: object) -> None:
            nonlocal total
            total += output.numel() if isinstance(output, Tensor) else 0

        # Leaves alone: a container puts out what its last layer has put out already.
        leaves = [layer for layer in self._model.modules() if not [*layer.children()]]
        handles = [layer.register_forward_hook(add) for layer in leaves]
        with torch.no_grad():
            ModelFunction(self._model)({}, x)
        for handle in handles:
            handle.remove()
        return (total + x.numel()) // len(x)


def _moved(model: nn.Module) -> nn.Module:
    """The model with perturbed weights: a branch behind a gate that starts at zero has no gradient before it moves.

    Weights of a run that diverged say nothing of the model, and are made up.
    """
    coins = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.numel():
                step = torch.randn(parameter.shape, generator=coins, dtype=torch.float64)
                step = step.to(parameter.device, parameter.dtype)
                parameter.copy_(torch.where(parameter.isfinite(), parameter, step))
                size = float(parameter.square().mean().sqrt()) or 1.0
                parameter += _BESIDE * size * step
    return model


def _distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference, in units of the largest entry."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def _line(error: BaseException | str) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
