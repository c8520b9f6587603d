"""Canaries of a training: records that a suite inserts, each by an independent fair coin, for attacks to detect.

Canaries in input space are a mislabelled example that was removed from every pool (`mislabelled`), a blank with one
pixel lit (`blank`), or a random pattern of the two ends of the input range (`crafted`).

A canary in gradient space (Nasr et al., "Adversary Instantiation", S&P 2021; Andrew et al., ICLR 2024) is a record
whose gradient is a chosen direction. No image has a chosen gradient in an ordinary network, so the trained model
accepts an additional kind of input: a constant image beyond the input range, whose value encodes the number of a
canary. Its first logit has that canary's direction as its gradient. The logits of examples are unaffected, and the
parameters, their order and their names stay the same. Like all records, canaries pass the trainer's sampling, encoding
and bound. If a method's masks are known before the run, `dirac` and `orthonormal` directions are drawn within each
mask: a canary then has a direction per mask, and the trainer's augmentation changes its constant image to that of the
direction of the step.

The inclusion bits are seeded by the request like the noise, or by the operating system with secure noise. They are
hidden from attacks that score canaries. The number of included canaries is secret, so sampling must not depend on it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.func import functional_call

from leakbench.attacks.core import Examples
from leakbench.benchmarks.core import Splits
from leakbench.defenses.core import Coordinates, Layout, RecordSchedule, Sampling, keyed

from .build import built
from .gradient_canaries import CanaryKind, unit_directions
from .masks import public_masks
from .mislabelled_pool import mislabelled_examples
from .request import TrainingRequest, seed_of_data
from .splits_cache import load_data

GRADIENT_KINDS = get_args(CanaryKind)
"""Kinds with a chosen gradient."""

_BEYOND = 1000.0  # from the largest valid input to the value of the first canary; no attack's inputs reach it
_ENGINES = ("auto", "torch.func")  # engines that accept any module
_MOST_NUMBERS = 2**26  # entries of all directions together: 256 MiB


@dataclass(frozen=True)
class Canaries:
    """The canaries of a training, with their inclusion bits.

    Attributes:
        examples: as records, under ids below 0, which no example of a data set has.
        included: bool [n], the inclusion bits; for the trainer and for scorers only.
        directions: [masks, n, dim], unit directions of the gradients under each mask; None in input space.
        norm: norm of these gradients before the bound.
        of_step: mask index of each step; empty in input space.
        schedule: augmentation that gives each canary the input of its direction in each step; None with a single mask.
    """

    examples: Examples
    included: Bool[Tensor, " n"]
    directions: Float[Tensor, "masks n dim"] | None = None
    norm: float = 1.0
    of_step: tuple[int, ...] = ()
    schedule: RecordSchedule | None = None

    def __len__(self) -> int:
        return len(self.included)

    @property
    def put_in(self) -> Examples:
        """The included canaries."""
        chosen = self.included.to(self.examples.ids.device)
        return Examples(
            ids=self.examples.ids[chosen], inputs=self.examples.inputs[chosen], labels=self.examples.labels[chosen]
        )


class CanaryInput(nn.Module):
    """A model with an additional kind of input: canaries, whose gradients are chosen directions."""

    def __init__(self, model: nn.Module, directions: Float[Tensor, "n dim"], scale: float, first: float) -> None:
        """Takes a model's parameters and buffers under their own names.

        Args:
            model: without dropout.
            directions: one per canary, in the order of the trained parameters.
            scale: factor of the first logit.
            first: value of canary 0's image; each next canary's is larger by 1.
        """
        super().__init__()
        # In a list, so that the model is no submodule: a layerwise engine would then compute the gradients of its
        # layers and miss the canaries' logit, which reads the parameters directly. Modules without layers hold the
        # tensors.
        self._inside = [model]
        self._names = Layout.of(model).names
        for name, parameter in model.named_parameters():
            self._holder(name).register_parameter(name.rpartition(".")[2], parameter)
        for name, buffer in model.named_buffers():
            self._holder(name).register_buffer(name.rpartition(".")[2], buffer)
        self._first = first
        self.register_buffer("canary_directions", directions * scale)

    def _holder(self, name: str) -> nn.Module:
        """Returns the empty module at the position of a tensor in the model."""
        holder: nn.Module = self
        for part in name.split(".")[:-1]:
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        return holder

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the model's logits; for a canary its own logit, and 0 for all other classes."""
        tensors = dict(self.named_parameters()) | dict(self.named_buffers())
        directions = tensors.pop("canary_directions")
        number = inputs.flatten(1)[:, 0] - self._first
        is_canary = number > -0.5
        blank = torch.where(is_canary.view(-1, *[1] * (inputs.dim() - 1)), torch.zeros_like(inputs), inputs)
        logits = functional_call(self._inside[0], tensors, (blank,))
        chosen = directions[number.round().clamp(0, len(directions) - 1).long()]
        along = chosen @ torch.cat([tensors[name].flatten() for name in self._names])
        # The value is 0 for any parameters, so that the gradient has the same length in every step.
        along = (along - along.detach()).unsqueeze(1)
        own = torch.cat([along, torch.zeros_like(logits[:, 1:])], dim=1)
        return torch.where(is_canary.unsqueeze(1), own, logits)


def with_canaries(model: nn.Module, canaries: Canaries | None, splits: Splits) -> nn.Module:
    """Returns the initial model of a training with these canaries.

    Args:
        model: of the request.
        canaries: of the training; None, or input-space canaries, need no other model.
        splits: determine input range and classes.
    """
    if canaries is None or canaries.directions is None:
        return model
    # Canaries have class 1. For K equal logits, the derivative of the loss by the first logit is then 1 / K.
    scale = canaries.norm * splits.classes
    return CanaryInput(model, canaries.directions.flatten(0, 1), scale, splits.high + _BEYOND)


def drawn(
    request: TrainingRequest,
    splits: Splits,
    model: nn.Module,
    planned: tuple[Sampling, int],
    device: torch.device,
) -> Canaries | None:
    """Draws the canaries of a training; None if it requests none, or none is possible.

    Args:
        request: seeds the inclusion bits.
        splits: from `load_splits`, without the mislabelled examples.
        model: the initial model of the training.
        planned: its sampler and number of steps.
        device: device of the result.
    """
    table = request.training.canaries
    if table is None or why_none(request, model, splits, planned):
        return None
    generator = keyed(secrets.randbits(63) if request.secure else request.seed_for("coins of canaries"))
    included = torch.rand(table.number, generator=generator, dtype=torch.float64) < 0.5
    # The canaries themselves are public, and the same for every defense of a seed.
    public, directions, schedule = keyed(seed_of_data(splits.digest, "canaries")), None, None
    of_step: list[int] = []
    shape = (table.number, *splits.input_shape)
    if table.kind in GRADIENT_KINDS:
        masks, of_step = _distinct(_masks(request, table.kind, model, planned))
        directions = torch.stack(
            [
                unit_directions(cast(CanaryKind, table.kind), table.number, Layout.of(model).dim, public, codec=mask)
                for mask in masks
            ]
        )
        numbers = splits.high + _BEYOND + torch.arange(table.number, dtype=torch.float32)
        inputs = numbers.view(-1, *[1] * len(splits.input_shape)).expand(shape).clone()
        labels = torch.ones(table.number, dtype=torch.int64)
        if len(masks) > 1:
            added = table.number * torch.tensor(of_step, dtype=torch.float32)
            schedule = RecordSchedule.of(
                inputs, labels, added.unsqueeze(1).expand(-1, table.number), seed=request.seed_for("coins")
            )
    elif table.kind == "blank":
        places = torch.randperm(math.prod(splits.input_shape) * splits.classes, generator=public)[: table.number]
        inputs = torch.full((table.number, math.prod(splits.input_shape)), splits.low)
        inputs[torch.arange(table.number), places // splits.classes] = splits.high
        inputs, labels = inputs.view(shape), places % splits.classes
    elif table.kind == "crafted":
        inputs = splits.low + (splits.high - splits.low) * torch.randint(2, shape, generator=public).float()
        labels = torch.randint(splits.classes, (table.number,), generator=public)
    else:
        inputs, labels = _mislabelled(request, splits.classes, table.number, public)
    ids = -1 - torch.arange(table.number)
    examples = Examples(ids=ids.to(device), inputs=inputs.to(device), labels=labels.to(device))
    directions = None if directions is None else directions.to(device)
    return Canaries(examples, included, directions, table.norm or _NORM, tuple(of_step), schedule)


_NORM = 10.0
"""Gradient norm of a canary by default: the part of a random direction in 1 % of the coordinates still has norm 1."""


def why_none(request: TrainingRequest, model: nn.Module, splits: Splits, planned: tuple[Sampling, int]) -> str:
    """Returns the reason why a training cannot have its requested canaries; empty if it can, or requests none.

    Args:
        request: of the training.
        model: its initial model.
        splits: its data.
        planned: its sampler and number of steps.
    """
    training, table = request.training, request.training.canaries
    if table is None:
        return ""
    if table.kind == "blank" and table.number > (most := math.prod(splits.input_shape) * splits.classes):
        return f"there are {most} blank canaries, one a pixel and class, and the training asks for {table.number}"
    if table.kind not in GRADIENT_KINDS:
        return ""
    if training.engine not in _ENGINES:
        return f"engine '{training.engine}' goes by layers, and the gradient of such a canary is of none; take 'auto'"
    if training.statistics is not None:
        return "canaries in gradient space pass no features, so there are none where features are standardised"
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"canaries in gradient space need a model without dropout, and '{name}' has some"
    dim = Layout.of(model).dim
    if table.number * dim <= _MOST_NUMBERS:
        masks, _ = _distinct(_masks(request, table.kind, model, planned))
        least = min(dim if mask is None else mask.size for mask in masks)
        if table.kind != "random" and table.number > least:
            kept = f"{dim} parameters have" if least == dim else f"a mask of {least} coordinates has"
            return f"{kept} as many directions of kind '{table.kind}', and the training asks for {table.number}"
        if len(masks) > 1 and training.views is not None:
            return "canaries that are drawn anew with each mask are views of their own, and the training has others"
        if len(masks) * table.number * dim <= _MOST_NUMBERS:
            return ""
    return (
        f"{table.number} directions in {dim} parameters, under each mask, take more than "
        f"{4 * _MOST_NUMBERS // 2**20} MiB; ask for fewer canaries, or take a smaller model"
    )


def _masks(
    request: TrainingRequest, kind: str, model: nn.Module, planned: tuple[Sampling, int]
) -> list[Coordinates | None]:
    """Returns the mask of each step within which canaries are drawn; None for the whole space.

    For kind `random` always None: a random direction restricted to a mask is a random direction in it, and at the
    default norm usually long enough to reach the clip norm, so a single record serves all masks.
    """
    sampling, steps = planned
    if kind == "random":
        return [None] * steps
    defense, cpu = built(request.defense), torch.device("cpu")
    return public_masks(defense, Layout.of(model), sampling, steps, seed=request.seed_for("coins"), device=cpu)


def _distinct(masks: Sequence[Coordinates | None]) -> tuple[list[Coordinates | None], list[int]]:
    """Returns the distinct masks, and the mask index of each step."""
    keys = [b"" if mask is None else mask.kept.numpy().tobytes() for mask in masks]
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return [masks[keys.index(key)] for key in places], [places[key] for key in keys]


def _mislabelled(
    request: TrainingRequest, classes: int, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Returns examples removed from all pools, each with a random wrong label."""
    task = request.training
    whole = load_data(task.data, request.seed, task.sizes)
    pool = mislabelled_examples(whole, count)
    shift = 1 + torch.randint(classes - 1, (count,), generator=generator)
    return pool.inputs, (pool.labels + shift) % classes
