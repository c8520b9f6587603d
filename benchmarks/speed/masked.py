"""Norms and clipped sums under a mask shared by all examples, as random sparsification needs in a linear layer.

The direct way forms and masks the gradients s xᵀ of all examples and takes their norms. The closed form forms no
gradient: |M ∘ (s xᵀ)|² = (s∘s)ᵀ M (x∘x), and the clipped sum is M ∘ the product of scaled signals and inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from leakbench.defenses.core import clip
from leakbench.defenses.core.gradients.layerwise.layers.linear import Outer

from .part import ROUNDS, Options, SpeedPart
from .targets import SpeedTarget

SIZES = ((256, 512, 32), (256, 2048, 128), (256, 784, 1000), (1024, 2048, 128))
QUICK_SIZES = SIZES[:2]
KEPT = 0.3
BOOK, CLOSED = "per-example gradients", "closed form"
NORMS = "norms by "
WAYS = (NORMS + BOOK, NORMS + CLOSED, BOOK, CLOSED)
# Least number of weights of a layer for which the closed form has the target `GAIN`.
MANY_WEIGHTS = 2**18
GAIN = 50.0

Answer = tuple[Tensor, Tensor | None]
"""Norms [rows], and the clipped masked sum [out, in] if it is requested."""


def build(*, batch: int, inputs: int, outputs: int, way: str, device: str = "cpu") -> Callable[[], Answer]:
    """Builds a way on random factors.

    Args:
        batch: number of examples.
        inputs: of the layer.
        outputs: of the layer.
        way: in `WAYS`.
        device: "cpu" or "cuda".
    """
    generator = torch.Generator().manual_seed(0)
    went_in = torch.randn(batch, inputs, generator=generator).to(device)
    signals = torch.randn(batch, outputs, generator=generator).to(device)
    mask = (torch.rand(outputs, inputs, generator=generator) < KEPT).to(device)
    bound, kept, alone = clip(1.0), mask.float(), way.startswith(NORMS)

    def by_the_book() -> Answer:
        rows = signals.unsqueeze(2) * went_in.unsqueeze(1)
        # In place: at the largest size one table of gradients is 1.1 GB, and a fair comparison holds a single table.
        rows = rows.mul_(kept).flatten(1)
        norms = torch.linalg.vector_norm(rows, dim=1)
        return (norms, None) if alone else (norms, (bound.scale(norms, rows.dtype) @ rows).view_as(mask))

    def closed_form() -> Answer:
        gradients = Outer(went_in, signals)
        # |M ∘ (s xᵀ)|² = (s∘s)ᵀ M (x∘x): rows x (in + out) numbers, instead of rows x in x out for the gradients.
        norms = gradients.masked_squares(mask.flatten()).value.sqrt()
        if alone:
            return norms, None
        total = gradients.weighted(bound.scale(norms, signals.dtype)).view_as(mask)
        return norms, total * mask

    return {BOOK: by_the_book, CLOSED: closed_form}[way.removeprefix(NORMS)]


def check(*, batch: int, inputs: int, outputs: int, device: str = "cpu") -> None:
    """Raises if the two ways disagree: a wrong answer has no speed."""
    sizes = {"batch": batch, "inputs": inputs, "outputs": outputs, "device": device}
    (norms, total), (expected, sums) = (build(**sizes, way=way)() for way in (CLOSED, BOOK))
    torch.testing.assert_close(norms.float(), expected, rtol=1e-4, atol=0)
    if total is None or sums is None:
        raise ValueError("both ways must give a sum, got none")
    torch.testing.assert_close(total, sums, rtol=1e-3, atol=1e-4)


def measure(*, sizes: Sequence[tuple[int, int, int]] = (), **options: Unpack[Options]) -> dict[str, Any]:
    """Compares the two ways at every size.

    Args:
        sizes: (batch, inputs, outputs); the usual sizes if empty, the two smallest if quick.
        options: see `Options`.
    """
    part, peer = SpeedPart(__name__, options), NORMS + BOOK
    for batch, inputs, outputs in sizes or (QUICK_SIZES if part.quick else SIZES):
        name, weights = f"{batch} x {inputs} x {outputs}", inputs * outputs
        part.say(name)
        layer = {"batch": batch, "inputs": inputs, "outputs": outputs}
        check(**layer, device=part.device)
        part.compare(name, WAYS, layer, peer=peer, about={**layer, "weights": weights})
        if weights >= MANY_WEIGHTS:
            part.targets.append(
                SpeedTarget(case=name, way=NORMS + CLOSED, against=peer, quantity="speed-up", limit=GAIN)
            )
    return part.document(
        title="Masked norms and clipped sums of a linear layer",
        method=(
            f"Masks keep {KEPT:.0%}; float32 factors. {ROUNDS} Extra memory: peak beyond the factors and the mask, in "
            "a process for each way."
        ),
        settings={"kept": KEPT},
    )
