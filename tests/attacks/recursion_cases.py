"""Single gradients with their equations, by autograd: no defense is between, so that batch norms are allowed too."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from leakbench.attacks.core import Network, ReleasedPart, Structure
from leakbench.attacks.core.closed_form.recursion.invert import layers_of
from leakbench.attacks.core.closed_form.recursion.observed_gradients import LayerGradient, observed_gradients
from leakbench.audit.targets.structure import structure
from leakbench.defenses.core import Block, Everything, Layout, StepPlan, clip, cross_entropy, logistic


@dataclass(frozen=True)
class Case:
    """One example's gradient and what it is of."""

    network: Network
    gradients: dict[str, LayerGradient]
    x: Tensor
    label: int
    structure: Structure
    released: Tensor


def described(model: nn.Module, shape: tuple[int, ...], classes: int) -> Structure:
    """The equations of a model whose whole gradient is released."""
    layout = Layout.of(model)
    plan = StepPlan(Block(codec=Everything(layout.dim), bound=clip(1.0)))
    loss = logistic if classes == 1 else cross_entropy
    return structure(plan, model, layout, layout.read(model), loss, shape)


def case(
    model: nn.Module,
    shape: tuple[int, ...],
    *,
    label: int = 1,
    seed: int = 0,
    factor: float = 1.0,
    keep: Tensor | None = None,
    parts: tuple[ReleasedPart, ...] | None = None,
    noise: float = 0.0,
    count: int = 1,
) -> Case:
    """The gradient of random inputs at a model in evaluation mode, in float64.

    Args:
        model: of one logit, or of as many as there are classes.
        shape: of an input.
        label: of all.
        seed: of inputs and noise.
        factor: by which the gradient is shortened.
        keep: bool, the coordinates that are released; None for all.
        parts: the release, instead of coordinates.
        noise: its standard deviation on each number.
        count: of inputs whose gradients are added.
    """
    model = model.double().eval()
    coins = torch.Generator().manual_seed(seed)
    x = torch.rand(count, *shape, generator=coins, dtype=torch.float64)
    logits = model(x)
    if logits.shape[1] == 1:
        loss = functional.softplus(logits[:, 0] * (1 - 2 * label)).sum()
    else:
        loss = functional.cross_entropy(logits, torch.full((count,), label), reduction="sum")
    flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]) * factor
    equations = described(model, shape, logits.shape[1])
    if keep is not None:
        parts = (ReleasedPart(start=0, stop=int(keep.sum()), kind="coordinates", coordinates=keep.nonzero()[:, 0]),)
    if parts is not None:
        equations = Structure(network=equations.network, names=equations.names, shapes=equations.shapes, parts=parts)
    released = torch.cat([_released(part, flat) for part in equations.parts])
    released = released + noise * torch.randn(released.shape, generator=coins, dtype=torch.float64)
    network = equations.known_network()
    gradients = observed_gradients(equations, released, torch.full_like(released, noise), layers_of(network))
    return Case(network, gradients, x[0], label, equations, released)


def _released(part: ReleasedPart, flat: Tensor) -> Tensor:
    if part.coordinates is not None:
        return flat[part.coordinates]
    return torch.cat([v.T @ flat[a:b] for (a, b), v in zip(part.spans, part.bases, strict=True)])


def mse(one: Tensor, other: Tensor) -> float:
    return float((one - other).square().mean())


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
