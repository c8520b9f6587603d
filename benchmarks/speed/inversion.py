"""Gradient inversion: an iteration of Inverting Gradients, with restarts in sequence or batched.

The timed work, nearly all of an iteration, is the gradient by the guesses of 1 - cos(update of the guess, shared
update) + total variation. "In turn", each restart has its own backward and double-backward pass. "Side by side" is
`leakbench.defenses.core.gradients.candidate_gradients`: a single pass for all restarts, which for a dense update forms
no parameter gradient. Masked updates keep half of the coordinates; projected updates are coefficients along random
orthonormal directions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from leakbench.defenses.core.gradients.candidate_gradients import candidate_gradients_of
from leakbench.defenses.core.gradients.reference import cross_entropy
from leakbench.defenses.core.plan.layout import Layout

from .networks import COLOUR, Workload
from .part import Options, SpeedPart

RESTARTS = 8
DIRECTIONS = 10
TV_WEIGHT = 1e-3
SEED = 0
IN_TURN, SIDE_BY_SIDE = "in turn", "side by side"

Encode = Callable[[Tensor], Tensor]


def measure(**options: Unpack[Options]) -> dict[str, Any]:
    """Times an iteration of all restarts in both ways for every case; only the smaller network if quick.

    Args:
        options: see `Options`.
    """
    part, cases = SpeedPart(__name__, options, budget=180.0, memory=False), []
    networks = ("dp_cnn",) if part.quick else ("dp_cnn", "resnet18_gn")
    for name, release in product(networks, ("dense", "masked", "projected")):
        part.say(f"{name}, {release}")
        cases.append(_case(part, name, release))
    return part.document(
        title=f"Inverting Gradients, {RESTARTS} restarts of one image, an iteration, float32", cases=cases
    )


def _case(part: SpeedPart, name: str, release: str) -> dict[str, Any]:
    """Times a network under a kind of release."""
    model = Workload(name, RESTARTS).model().to(part.device)
    in_turn, side_by_side, dim, size = both_ways(name, model, release, part.device)
    # In float64 too: in float32, rounding may switch an activation at 0 on in one way and off in the other.
    exact = both_ways(name, copy.deepcopy(model).double(), release, part.device)[:2]
    checks = {
        "largest_difference": _apart(side_by_side(), in_turn()),
        "largest_difference_float64": _apart(exact[1](), exact[0]()),
    }
    del exact  # half a gigabyte for a large network, freed before the timed ways run
    ways, about = {IN_TURN: in_turn, SIDE_BY_SIDE: side_by_side}, {"d": dim, "m": size, "restarts": RESTARTS}
    return part.case(ways, baseline=IN_TURN, checks=checks, case=f"{name}, {release}", **about)


def both_ways(
    name: str, model: nn.Module, release: str, device: str, restarts: int = RESTARTS
) -> tuple[Callable[[], Tensor], Callable[[], Tensor], int, int]:
    """Returns an iteration in turn and side by side, in the dtype of the model.

    Args:
        name: of the model, for messages.
        model: on the device.
        release: "dense", "masked" or "projected".
        device: "cpu" or "cuda".
        restarts: of the search.

    Returns:
        Both ways, which return gradients by the guesses, the number of parameters, and that of released values.

    Raises:
        ValueError: the model has a layer whose gradient is not known by factors.
    """
    layout = Layout.of(model)
    generator, like = torch.Generator().manual_seed(SEED), layout.read(model)
    guesses = torch.rand(restarts, 1, *COLOUR, generator=generator).to(like).requires_grad_()
    image, label = torch.rand(1, *COLOUR, generator=generator).to(like), torch.tensor([3], device=device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    encode = _encoder(release, layout.dim, generator, like)

    def update(inputs: Tensor, *, search: bool) -> list[Tensor]:
        loss = cross_entropy(model(inputs), label).sum()
        return list(torch.autograd.grad(loss, parameters, create_graph=search))

    shared = update(image, search=False)
    released = None if encode is None else encode(_flat(shared)[None])[0]
    length = torch.stack([part.square().sum() for part in shared]).sum().sqrt()
    known = candidate_gradients_of(model, cross_entropy, layout, like, COLOUR)
    if known is None:
        raise ValueError(f"case must have layers that are known by factors, got {name}")
    along = dict(zip(layout.names, shared, strict=True))

    def one(inputs: Tensor) -> Tensor:
        gradients = update(inputs, search=True)
        if encode is not None and released is not None:
            return _mismatch(encode(_flat(gradients)[None]), released)[0] + TV_WEIGHT * _variation(inputs[None])[0]
        inner = torch.stack([(a * b).sum() for a, b in zip(gradients, shared, strict=True)]).sum()
        squares = torch.stack([part.square().sum() for part in gradients]).sum()
        return 1 - inner / (squares.sqrt() * length) + TV_WEIGHT * _variation(inputs[None])[0]

    def in_turn() -> Tensor:
        apart = [guess.clone().requires_grad_() for guess in guesses.detach()]
        return torch.stack([torch.autograd.grad(one(guess), guess)[0] for guess in apart])

    def side_by_side() -> Tensor:
        if encode is not None and released is not None:
            values = _mismatch(encode(known.rows(guesses.flatten(0, 1), label.expand(restarts))), released)
        else:
            inner, squares = known.compared(guesses, label.expand(restarts), along, None)
            values = 1 - inner / (squares.sqrt() * length)
        return torch.autograd.grad((values + TV_WEIGHT * _variation(guesses)).sum(), guesses)[0]

    return in_turn, side_by_side, layout.dim, layout.dim if released is None else released.numel()


def _apart(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def _flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def _encoder(release: str, dim: int, generator: torch.Generator, like: Tensor) -> Encode | None:
    """Maps rows [r, dim] to released values [r, m]; None if everything is released."""
    if release == "dense":
        return None
    if release == "masked":
        kept = torch.randperm(dim, generator=generator)[: dim // 2].sort().values.to(like.device)
        return lambda rows: rows[:, kept]
    basis = torch.linalg.qr(torch.randn(dim, DIRECTIONS, generator=generator)).Q.to(like)
    return lambda rows: rows @ basis


def _mismatch(simulated: Tensor, released: Tensor) -> Tensor:
    """1 - cos of each row with the release."""
    unit = simulated / simulated.square().sum(dim=1, keepdim=True).sqrt()
    return (unit - released / released.square().sum().sqrt()).square().sum(dim=1) / 2


def _variation(images: Tensor) -> Tensor:
    """mean|dx| + mean|dy| of each guess."""
    return sum((images.diff(dim=axis).abs().flatten(1).mean(dim=1) for axis in (-1, -2)), images.new_zeros(len(images)))
