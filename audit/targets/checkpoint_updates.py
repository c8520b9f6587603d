"""Updates between checkpoints of a training, for auditors who have models but no transcript.

PyTorch's SGD takes the step theta_t - theta_{t+1} = lr w_t with the velocity w_t = momentum w_{t-1} + u_t +
weight_decay theta_t. All terms but the released update u_t are known, so u_t follows. Adam divides by moments of the
updates themselves, so its updates cannot be recovered from two checkpoints.

Stated training settings may be wrong, and only redundancy can reveal it. Coordinates outside a mask have no update: a
nonzero remainder there means a wrong momentum, velocity, weight decay or mask, or, if velocity or weight decay moved
these coordinates, a wrong learning rate. A mean of clipped gradients is no longer than the clip norm; a learning rate
that is too small violates this. A wrong learning rate by itself is undetectable: it only rescales the update. A mask
that keeps too many coordinates is undetectable, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from leakbench.attacks.core import AccessError, InconsistentObservation
from leakbench.defenses.core import Context, Coordinates, Defense, Layout

TOLERANCE = 1e-5
"""Largest remainder accepted outside the mask, as a fraction of the largest entry of the update."""

Parameters = nn.Module | Mapping[str, Tensor]
"""A model, or trainable parameters by name; not a full state dict, which also holds batch-norm statistics."""


@dataclass(frozen=True)
class UpdateBetween:
    """The update released between two checkpoints.

    Attributes:
        update: [dim], in gradient units, divided as the trainer divided it; 0 outside the mask.
        velocity: [dim], the optimizer's velocity after the step, for the next step.
        layout: names and shapes behind both.
    """

    update: Float[Tensor, " dim"]
    velocity: Float[Tensor, " dim"]
    layout: Layout


def update_between(
    before: Parameters,
    after: Parameters,
    *,
    lr: float,
    momentum: float = 0.0,
    velocity: Float[Tensor, " dim"] | None = None,
    weight_decay: float = 0.0,
    optimizer: str = "sgd",
    mask: Bool[Tensor, " dim"] | None = None,
    clip_norm: float | None = None,
) -> UpdateBetween:
    """Returns the update of the step from one checkpoint to the next, in float64.

    Args:
        before: the model before the step.
        after: the model after it.
        lr: learning rate of the step.
        momentum: momentum of SGD, without dampening or Nesterov.
        velocity: the optimizer's velocity before the step, for momentum; zeros before the first step.
        weight_decay: coefficient of the squared norm, as PyTorch adds it to the gradient.
        optimizer: "sgd"; no other optimizer can be inverted.
        mask: true where the update may be nonzero; None for everywhere.
        clip_norm: per-example clip norm, if the update is a mean without noise; None skips the check.

    Raises:
        ValueError: a setting out of range.
        AccessError: an optimizer other than SGD, or momentum without its velocity.
        InconsistentObservation: checkpoints of different models, NaN in a checkpoint, a vector of the wrong length, or
            an update that the mask or the clip norm excludes.
    """
    _check(lr, momentum, weight_decay, clip_norm)
    if optimizer != "sgd":
        raise AccessError(
            f"the updates of '{optimizer}' do not follow from two checkpoints without its state; record the releases "
            "(observer='updates'), or train with 'sgd'"
        )
    if momentum > 0 and velocity is None:
        raise AccessError("momentum needs the velocity before the step; give velocity, zeros at the first step")
    layout, start = _flat(before, "before")
    end_layout, end = _flat(after, "after")
    if layout != end_layout:
        differ = [
            name for name in {*layout.names, *end_layout.names} if _shape(layout, name) != _shape(end_layout, name)
        ]
        raise InconsistentObservation(
            f"after must have the parameters of before, got {min(differ, default='another order of them')!r} otherwise"
        )
    for name, vector in (("velocity", velocity), ("mask", mask)):
        if vector is not None and vector.shape != (layout.dim,):
            raise InconsistentObservation(
                f"{name} must have one entry a parameter, {layout.dim}, got {tuple(vector.shape)}"
            )
    if velocity is not None and not velocity.isfinite().all():
        raise InconsistentObservation("velocity must be finite, got NaN or infinity")
    if mask is not None and mask.dtype is not torch.bool:
        raise ValueError(f"mask must be true and false, got {mask.dtype}; coordinates make one by zeros and indexing")
    momentum_term = start.values.new_zeros(layout.dim) if velocity is None else velocity.to(start.values) * momentum
    now = (start.values - end.values) / lr
    update = now - momentum_term - weight_decay * start.values
    # Rounding error of the stored checkpoints, amplified by a small learning rate.
    lost = (start.digits * start.values.abs() + end.digits * end.values.abs()) / lr
    lost = lost + start.digits * (momentum_term.abs() + weight_decay * start.values.abs())
    if mask is not None:
        mask = mask.to(update.device)
        _refuse_moved(update, mask, lost, layout)
        update = torch.where(mask, update, 0.0)
    if clip_norm is not None and update.norm() > clip_norm * (1 + TOLERANCE) + lost.norm():
        raise InconsistentObservation(
            f"the update must be no longer than clip_norm, {clip_norm:g}, as means of clipped gradients are without "
            f"noise, got {float(update.norm()):g}: lr is too small, or momentum, weight_decay or clip_norm is wrong"
        )
    return UpdateBetween(update, now, layout)


def refuse_other_mask(
    mask: Bool[Tensor, " dim"],
    defense: Defense,
    model: nn.Module,
    *,
    step: int = 0,
    steps: int | None = None,
    steps_per_epoch: int = 1,
    seed: int = 0,
) -> None:
    """Refuses a mask that was sent with an update but differs from the mask that the stated defense computes.

    Masks follow from the parameters before the step (magnitudes) or from public randomness, so anybody can recompute
    them.

    Args:
        mask: as sent, true where the update may be nonzero.
        defense: the defense under which the update was computed, as stated.
        model: the model before the step.
        step: number of the step.
        steps: planned length; None for a run that ends at this step.
        steps_per_epoch: steps in which every example is expected once.
        seed: key of the public randomness.

    Raises:
        ValueError: the defense has no mask.
        AccessError: its mask is private, or depends on releases before this step.
        InconsistentObservation: a different mask, or a mask of the wrong length.
    """
    layout, flat = _flat(model, "model")
    if mask.shape != (layout.dim,):
        raise InconsistentObservation(f"mask must have one entry a parameter, {layout.dim}, got {tuple(mask.shape)}")

    def refused(*_: object) -> tuple[Tensor, ...]:
        raise AccessError(f"the mask of '{defense.name}' is a private release, which nobody else can make")

    context = Context(
        step=0,
        steps=steps or step + 1,
        steps_per_epoch=steps_per_epoch,
        layout=layout,
        parameters=flat.values.to(flat.dtype),
        architecture=lambda: model,
        seed=seed,
        one_off=refused,
        noise_multiplier=defense.noise_multiplier or 0.0,
        device=flat.values.device,
    )
    state = defense.start(context)
    state, plan = defense.plan(state, context.at(step))
    ones = tuple(torch.ones(block.codec.size, device=flat.values.device) for block in plan.blocks)
    if step > 0 and defense.observe(state, context.at(step), ones, torch.ones(layout.dim)) is not state:
        raise AccessError(f"the mask of '{defense.name}' follows from releases before step {step}")
    codecs = [block.codec for block in plan.blocks if block.updates]
    if len(codecs) != 1 or not isinstance(codecs[0], Coordinates):
        raise ValueError(f"defense must release some coordinates by a mask, and '{defense.name}' does not")
    own_mask = torch.zeros_like(mask).index_fill(0, codecs[0].kept.to(mask.device), True)
    if differ := int((own_mask != mask).sum()):
        raise InconsistentObservation(
            f"mask must be the one that '{defense.name}' makes of these parameters at step {step} and seed {seed}, "
            f"got another at {differ} of {layout.dim} coordinates"
        )


@dataclass(frozen=True)
class _Flat:
    """Parameters in float64, and the dtype that they were stored in."""

    values: Tensor
    dtype: torch.dtype

    @property
    def digits(self) -> float:
        return torch.finfo(self.dtype).eps


def _flat(parameters: Parameters, argument: str) -> tuple[Layout, _Flat]:
    if isinstance(parameters, nn.Module):
        named = {name: p.detach() for name, p in parameters.named_parameters() if p.requires_grad}
    else:
        named = {name: p.detach() for name, p in parameters.items()}
    if not named or not all(p.is_floating_point() for p in named.values()):
        raise InconsistentObservation(f"{argument} must be trained parameters, got none, or whole numbers among them")
    layout = Layout(tuple(named), tuple(tuple(p.shape) for p in named.values()))
    vector = layout.flatten(named)
    if not vector.isfinite().all():
        worst = next(name for name, p in named.items() if not p.isfinite().all())
        raise InconsistentObservation(f"{argument} must be finite, got NaN or infinity in '{worst}'")
    return layout, _Flat(vector.double(), vector.dtype)


def _shape(layout: Layout, name: str) -> tuple[int, ...] | None:
    return dict(zip(layout.names, layout.shapes, strict=True)).get(name)


def _refuse_moved(update: Tensor, mask: Tensor, lost: Tensor, layout: Layout) -> None:
    """Refuses a nonzero update outside its mask, beyond rounding and `TOLERANCE` of the largest entry inside."""
    largest = float(torch.where(mask, update, 0.0).abs().max())
    excess = torch.where(mask, 0.0, update.abs() - lost)
    if float(excess.max()) > TOLERANCE * largest:
        worst = int(excess.argmax())
        where = next(name for name, (_, stop) in zip(layout.names, layout.slices, strict=True) if worst < stop)
        raise InconsistentObservation(
            f"the update must be 0 outside of its mask, got {float(update[worst]):.3g} in '{where}' where the largest "
            f"inside is {largest:.3g}: lr, momentum, velocity, weight_decay or mask is not that of these checkpoints, "
            "or momentum is Nesterov's"
        )


def _check(lr: float, momentum: float, weight_decay: float, clip_norm: float | None) -> None:
    if not 0 < lr < float("inf"):
        raise ValueError(f"lr must be positive and finite, got {lr}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    if not 0 <= weight_decay < float("inf"):
        raise ValueError(f"weight_decay must be at least 0 and finite, got {weight_decay}")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be positive, got {clip_norm}")
