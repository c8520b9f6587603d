"""Which engine computes the sums: a static rule, and checks on made-up examples before data are touched.

`auto` takes our own engine where it knows every layer and passes the checks, otherwise the reference, otherwise one
example at a time, and says why. An engine that was asked for by name and cannot do it, or fails, is an error.

Two comparisons, in float64 on a copy of the model in its own mode. A small batch's clipped sum is compared with plain
autograd example by example. And in batches as large as the run's, with copies of one example, labels that repeat and
inputs of several sizes in them, taking one example out must take exactly its own contribution off the sum.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..bound import normalize
from ..codec import Everything
from ..defense import Block, StepPlan
from ..record_draws import entries, record_keys, words
from ..rows import Layout, Loss, function_of
from .interface import PerExample, Unsupported
from .layerwise import InOrder, Layerwise
from .model_checks import Findings, Refused, try_passes
from .one_by_one import OneByOne
from .torch_func import TorchFunc

AUTO = "auto"
# Relative to the largest entry of the sum. Wrong layers are wrong in the first digits; deep ones differ by 1e-13.
_AGREES = 1e-8
_AGREES_IN_FLOAT32 = 1e-3
_EXAMPLES = 7  # of the small batch: a prime, so that no other dimension passes for a multiple of it


@dataclass(frozen=True)
class Choice:
    """An engine that was checked.

    Attributes:
        engine: computes the sums.
        note: its name, and why it is not the fast one where `auto` fell back.
        activations: numbers that a forward pass leaves per entry of the inputs.
        draws: whether the model computes dropout.
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
    sizes: Callable[[int], Iterable[int]] = lambda bytes_per_entry: (),
) -> Choice:
    """The engine called `name`, or by the static rule, checked for data of this shape.

    Args:
        name: one of `names()`.
        model: the network.
        loss: per-example loss.
        layout: its trained parameters.
        inputs: shape and dtype are looked at, no value is.
        targets: likewise.
        sizes: numbers of entries that the run will hand over at a time, by the bytes that an entry takes.

    Raises:
        ValueError: for an unknown name, a model that must not be trained (`model_checks.py`), or an engine that was
            asked for and does not know or fails the model.
        ImportError: for one whose package is not installed; names the extra.
    """
    refuse_name(name)
    # Whatever a layer draws in the check, a run goes on drawing as if there had been none.
    with torch.random.fork_rng([inputs.device] if inputs.is_cuda else []):
        return _choose(name, _Trial(model, loss, layout, inputs, targets), sizes)


def _choose(name: str, trial: _Trial, sizes: Callable[[int], Iterable[int]]) -> Choice:
    """The first way that agrees, from the fastest to the surest; of one that was asked for, that alone."""
    if trial.failure:  # not even in the model's own precision
        if name not in (AUTO, OneByOne.name):
            raise ValueError(f"engine '{name}' could not be checked on made-up examples: {trial.failure}")
        note = f"{OneByOne.name} (not checked: {trial.failure})"
        return trial.choice(OneByOne, note, unverified=f"the model fails on made-up examples: {trial.failure}")
    if name == OneByOne.name:
        return trial.choice(OneByOne, OneByOne.name)
    reason = ""
    for kind in _ways(name):
        if reads := trial.findings.reads:
            reason = f"reads values of its inputs, by {reads}"
            break
        if trial.doubt and kind is not TorchFunc:  # torch.func keeps examples apart by its making
            reason = reason or f"not checked in float64: {trial.doubt}"
            continue
        try:
            trial.check(kind, sizes)
        except Unsupported as why:
            reason = _joined(reason, kind, str(why))
            continue
        return trial.choice(kind, _note(kind, name, reason))
    if name != AUTO:
        raise ValueError(f"engine '{name}' cannot run this model: {reason}")
    return trial.choice(OneByOne, f"{OneByOne.name} (no {Layerwise.name}: {reason})")


def _ways(name: str) -> tuple[type[PerExample], ...]:
    if name == AUTO:
        return (Layerwise, InOrder, TorchFunc)
    if name == Layerwise.name:
        return (Layerwise, InOrder)
    if name == TorchFunc.name:
        return (TorchFunc,)
    if name == "opacus":
        from .opacus import Opacus  # its package is an extra

        return (Opacus,)
    from .backpack import BackPACK  # its package is an extra

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
        failure: why it could not even be tried in its own precision; empty where it could.
        doubt: why it could not be tried in float64; empty where it could.
        findings: what the passes showed.
    """

    def __init__(self, model: nn.Module, loss: Loss, layout: Layout, inputs: Tensor, targets: Tensor) -> None:
        self._original, self._loss, self._layout = model, loss, layout
        self._inputs, self._targets = inputs, targets
        self.failure = self.doubt = ""
        self.findings, self._activations = Findings("", False), inputs[:1].numel()
        self._own = next(p.dtype for p in model.parameters() if p.requires_grad)
        self._engines: dict[tuple[type[PerExample], nn.Module], PerExample] = {}
        for dtype in dict.fromkeys((torch.float64, self._own)):
            try:
                self._prepare(dtype)
            except Refused:
                raise
            except Exception as error:  # whatever a user's model raises on made-up examples
                self.doubt, self.failure = self.doubt or _line(error), _line(error)
                continue
            self.failure = ""
            break
        # Every norm decides about the sum: no two rows are scaled by one factor.
        self.plan = StepPlan(Block(codec=Everything(layout.dim), bound=normalize(1.0, regulariser=0.01)))

    def _prepare(self, dtype: torch.dtype) -> None:
        """Copies the model in this precision and looks what passes over a few examples show."""
        self._dtype = dtype
        self._model = copy.deepcopy(self._original).to(dtype)
        x, y, keys = self._made_up(_EXAMPLES)
        self.findings = try_passes(self._model, self._loss, x, y, keys)
        self._activations = self._count(x)

    def choice(self, kind: type[PerExample], note: str, *, unverified: str = "") -> Choice:
        """This way for the model itself."""
        draws = self.findings.draws or bool(unverified)
        return Choice(self._made(kind, self._original), note, self._activations, draws, unverified)

    def check(self, kind: type[PerExample], sizes: Callable[[int], Iterable[int]]) -> None:
        """Compares a way with plain autograd, example by example.

        Raises:
            Unsupported: when they differ, or it fails.
        """
        engine = self._made(kind, self._original)  # what it does not know it says here
        agrees = _AGREES if self._dtype == torch.float64 else _AGREES_IN_FLOAT32
        x, y, keys = self._made_up(_EXAMPLES)
        error = _distance(self._sum(kind, x, y, keys), self._sum(OneByOne, x, y, keys))
        if not error <= agrees:
            raise Unsupported(f"differs from the reference by {error:.1e} of the largest entry in float64")
        if kind is TorchFunc:
            return
        asked = sizes(engine.bytes_per_entry(self._activations, self._own.itemsize))
        for size in sorted({2, 3, *(max(2, size) for size in asked)}):
            error = self._leave_one_out(kind, size)
            if not error <= agrees:
                raise Unsupported(
                    f"in a batch of {size} one example shows in another's gradient, by {error:.1e} of the largest entry"
                )

    def _leave_one_out(self, kind: type[PerExample], size: int) -> float:
        """By how much the sum changes beyond an example's contribution when that is taken out."""
        x, y, keys = self._made_up(size)
        whole, worst = self._sum(kind, x, y, keys), 0.0
        for left_out in sorted({0, size // 2, size - 1}):
            rest = torch.arange(size, device=x.device) != left_out
            alone = self._sum(OneByOne, x[~rest], y[~rest], keys[~rest])
            without = self._sum(kind, x[rest], y[rest], keys[rest])
            worst = max(worst, _distance(whole, without + alone))
        return worst

    def _sum(self, kind: type[PerExample], x: Tensor, y: Tensor, keys: Tensor) -> Tensor:
        engine = self._made(kind, self._model)
        try:
            with entries(keys if self.findings.draws else None):
                (found,) = engine.sums(self.plan, x, y)
        except (Unsupported, ImportError):
            raise
        except Exception as error:  # whatever a third party's hooks, or torch under vmap, raise on a model
            raise Unsupported(f"fails on synthetic rows: {_line(error)}") from error
        return found

    def _made(self, kind: type[PerExample], model: nn.Module) -> PerExample:
        """This way for a model, made once."""
        if (kind, model) not in self._engines:
            self._engines[kind, model] = kind(model, self._loss, self._layout)
        return self._engines[kind, model]

    def _made_up(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Examples of the data's shape: half of them different, a quarter copies of one, a quarter large or small."""
        coins = torch.Generator().manual_seed(0)
        shape, device = (size, *self._inputs.shape[1:]), self._inputs.device
        if self._inputs.is_floating_point():
            x = torch.randn(shape, generator=coins, dtype=torch.float64)
            half, quarter = size - size // 2, size // 4
            x[half : half + quarter] = x[0]
            rest = size - half - quarter
            scales = torch.logspace(-1, 1, rest, dtype=torch.float64) if rest else torch.zeros(0)
            x[half + quarter :] *= scales.reshape(-1, *[1] * (x.dim() - 1))
            x = x.to(device, self._dtype)
        else:
            x = torch.randint(0, _vocabulary(self._original), shape, generator=coins).to(device, self._inputs.dtype)
        y = self._made_up_targets(x, coins)
        return x, y, words(record_keys(x, y), 1, 0).flatten()

    def _made_up_targets(self, x: Tensor, coins: torch.Generator) -> Tensor:
        like = self._targets
        shape = (len(x), *like.shape[1:])
        if like.is_floating_point():
            made = torch.rand(shape, generator=coins, dtype=torch.float64)
            if made.dim() > 1:  # probabilities
                made = made / made.sum(dim=1, keepdim=True)
            return made.to(like.device, self._dtype)
        with torch.no_grad():
            outputs = self._model(x[:1])
        classes = outputs.shape[1] if outputs.dim() > 1 else 2
        made = torch.randint(0, max(1, classes), shape, generator=coins)
        made[: len(made) // 2 + 1] = made[:1]  # at least half of the examples are of one class
        return made.to(like.device, like.dtype)

    def _count(self, x: Tensor) -> int:
        """Numbers that the layers of one forward pass put out, per example."""
        total = 0

        def add(_layer: nn.Module, _args: object, output: object) -> None:
            nonlocal total
            total += output.numel() if isinstance(output, Tensor) else 0

        leaves = [layer for layer in self._model.modules() if not [*layer.children()]]
        handles = [layer.register_forward_hook(add) for layer in leaves]
        with torch.no_grad():
            function_of(self._model)({}, x)
        for handle in handles:
            handle.remove()
        return (total + x.numel()) // len(x)


def _distance(found: Tensor, expected: Tensor) -> float:
    """Largest difference, in units of the largest entry."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def _vocabulary(model: nn.Module) -> int:
    sizes = [layer.num_embeddings for layer in model.modules() if isinstance(layer, nn.Embedding)]
    return min(sizes, default=2)


def _line(error: BaseException | str) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
