"""Which engine computes the sums: a static rule, and a check in float64 on synthetic rows before data are touched.

`auto` takes our own engine where it knows every layer and passes the check, otherwise the reference, and says why. An
engine that was asked for by name and cannot do it, or fails, is an error.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..bound import normalize
from ..codec import Everything
from ..defense import Block, StepPlan
from ..rows import Layout, Loss, function_of, per_example_gradients
from .interface import PerExample, Unsupported
from .layerwise import InOrder, Layerwise
from .torch_func import TorchFunc

AUTO = "auto"
# A private name, because PyTorch has no public one for dropout of all dimensions.
_Dropout = nn.modules.dropout._DropoutNd
# Relative to the largest entry of the sum. Wrong layers are wrong in the first digits; deep ones differ by 1e-13.
_AGREES = 1e-8
_EXAMPLES = 3


@dataclass(frozen=True)
class Choice:
    """An engine that was checked.

    Attributes:
        engine: computes the sums.
        note: its name, and why it is not the fast one where `auto` fell back.
        activations: numbers that a forward pass leaves per entry of the inputs.
    """

    engine: PerExample
    note: str
    activations: int


def names() -> tuple[str, ...]:
    """What `engine` may be."""
    return (AUTO, Layerwise.name, TorchFunc.name, "opacus", "backpack")


def choose(name: str, model: nn.Module, loss: Loss, layout: Layout, inputs: Tensor, targets: Tensor) -> Choice:
    """The engine called `name`, or by the static rule, checked for data of this shape.

    Args:
        name: one of `names()`.
        model: the network.
        loss: per-example loss.
        layout: its trained parameters.
        inputs: shape and dtype are looked at, no value is.
        targets: likewise.

    Raises:
        ValueError: for an unknown name, or an engine that was asked for and does not know or fails the model.
        ImportError: for one whose package is not installed; names the extra.
    """
    refuse_name(name)
    # Whatever a layer draws in the check, a run goes on drawing as if there had been none.
    with torch.random.fork_rng([inputs.device] if inputs.is_cuda else []):
        return _choose(name, model, loss, layout, inputs, targets)


def _choose(name: str, model: nn.Module, loss: Loss, layout: Layout, inputs: Tensor, targets: Tensor) -> Choice:
    try:
        synthetic = _Synthetic(model, loss, layout, inputs, targets)
    except Exception as error:  # whatever a user's model raises on synthetic rows in float64
        if name not in (AUTO, TorchFunc.name):
            raise ValueError(f"engine '{name}' could not be checked on synthetic rows in float64: {error}") from error
        why = f" (not checked: {_line(error)})"
        return Choice(TorchFunc(model, loss, layout), TorchFunc.name + why, inputs[:1].numel())
    if name == TorchFunc.name:
        return Choice(TorchFunc(model, loss, layout), TorchFunc.name, synthetic.activations)
    kind = _kind(Layerwise.name if name == AUTO else name)
    try:
        return Choice(_checked(kind, synthetic, model, loss, layout), kind.name, synthetic.activations)
    except Unsupported as reason:
        if kind is Layerwise and inputs.dim() == 4:
            with suppress(Unsupported):
                engine = _checked(InOrder, synthetic, model, loss, layout)
                return Choice(engine, f"{kind.name} (contiguous: {_line(reason)})", synthetic.activations)
        if name != AUTO:
            raise ValueError(f"engine '{name}' cannot run this model: {reason}") from reason
        note = f"{TorchFunc.name} (no {kind.name}: {_line(reason)})"
        return Choice(TorchFunc(model, loss, layout), note, synthetic.activations)


def _checked(kind: type[PerExample], synthetic: _Synthetic, model: nn.Module, loss: Loss, layout: Layout) -> PerExample:
    """An engine that agrees with the reference; raises `Unsupported` otherwise."""
    engine, error = kind(model, loss, layout), synthetic.error_of(kind)
    if not error <= _AGREES:
        raise Unsupported(f"differs from the reference by {error:.1e} of the largest entry in float64")
    return engine


def refuse_name(name: str) -> None:
    """Raises `ValueError` for an engine that does not exist."""
    if name not in names():
        raise ValueError(f"engine must be one of {', '.join(names())}, got '{name}'")


def _kind(name: str) -> type[PerExample]:
    if name == Layerwise.name:
        return Layerwise
    if name == "opacus":
        from .opacus import Opacus  # its package is an extra

        return Opacus
    from .backpack import BackPACK  # its package is an extra

    return BackPACK


class _Synthetic:
    """A float64 copy of a model with a few made-up examples, and what the reference makes of them."""

    def __init__(self, model: nn.Module, loss: Loss, layout: Layout, inputs: Tensor, targets: Tensor) -> None:
        # In the model's own mode, because a layer may mix examples in training alone. Dropout rests: it draws anew at
        # every pass, and two passes are compared.
        self.model = copy.deepcopy(model).double()
        for layer in self.model.modules():
            if isinstance(layer, _Dropout):
                layer.eval()
        self.loss, self.layout = loss, layout
        coins = torch.Generator().manual_seed(0)
        self.inputs = _made_up(inputs, coins, _vocabulary(model))
        with torch.no_grad():
            outputs = self.model(self.inputs)
        self.targets = _made_up_targets(targets, outputs, coins)
        self.activations = self._count()
        # Every norm decides about the sum: no two rows are scaled by one factor.
        self.plan = StepPlan(Block(codec=Everything(layout.dim), bound=normalize(1.0, regulariser=0.01)))
        self.sum = torch.zeros(layout.dim, dtype=torch.float64, device=inputs.device)
        # Row by row, by plain autograd: nothing of a batch is involved.
        for i in range(_EXAMPLES):
            x, y = self.inputs[i : i + 1], self.targets[i : i + 1]
            row = per_example_gradients(self.model, loss, layout, x, y).detach()
            self.sum += self.plan.blocks[0].bound(row)[0]

    def error_of(self, kind: type[PerExample]) -> float:
        """Largest difference of an engine's clipped sum, in units of the largest entry."""
        try:
            (found,) = kind(self.model, self.loss, self.layout).sums(self.plan, self.inputs, self.targets)
        except (Unsupported, ImportError):
            raise
        except Exception as error:  # whatever a third party's hooks, or torch under vmap, raise on a model
            raise Unsupported(f"fails on synthetic rows: {_line(error)}") from error
        return float((found - self.sum).abs().max() / self.sum.abs().max().clamp(min=1e-300))

    def _count(self) -> int:
        """Numbers that the layers of one forward pass put out, per example."""
        total = 0

        def add(_layer: nn.Module, _args: object, output: object) -> None:
            nonlocal total
            total += output.numel() if isinstance(output, Tensor) else 0

        leaves = [layer for layer in self.model.modules() if not [*layer.children()]]
        handles = [layer.register_forward_hook(add) for layer in leaves]
        with torch.no_grad():
            function_of(self.model)({}, self.inputs)
        for handle in handles:
            handle.remove()
        return (total + self.inputs.numel()) // _EXAMPLES


def _made_up(inputs: Tensor, coins: torch.Generator, vocabulary: int) -> Tensor:
    shape = (_EXAMPLES, *inputs.shape[1:])
    if inputs.is_floating_point():
        return torch.randn(shape, generator=coins, dtype=torch.float64).to(inputs.device)
    return torch.randint(0, vocabulary, shape, generator=coins).to(inputs.device, inputs.dtype)


def _made_up_targets(targets: Tensor, outputs: Tensor, coins: torch.Generator) -> Tensor:
    shape = (_EXAMPLES, *targets.shape[1:])
    if not targets.is_floating_point():
        classes = outputs.shape[1] if outputs.dim() > 1 else 2
        return torch.randint(0, max(1, classes), shape, generator=coins).to(targets.device, targets.dtype)
    made = torch.rand(shape, generator=coins, dtype=torch.float64)
    if made.dim() > 1:  # probabilities
        made = made / made.sum(dim=1, keepdim=True)
    return made.to(targets.device)


def _vocabulary(model: nn.Module) -> int:
    sizes = [layer.num_embeddings for layer in model.modules() if isinstance(layer, nn.Embedding)]
    return min(sizes, default=2)


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
