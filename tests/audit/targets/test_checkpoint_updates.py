"""Updates read off two checkpoints are those that moved them, and what is redundant shows a wrong story."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakbench import audit
from leakbench.attacks.core import AccessError, InconsistentObservation
from leakbench.defenses.core import seeded
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dp_snip import dp_snip
from leakbench.defenses.magnitude_dropping import magnitude_dropping
from leakbench.defenses.random_dropping import random_dropping
from leakbench.defenses.ranked import ranked

from ...parameters import subtests

LR, MOMENTUM, DECAY = 0.2, 0.9, 0.05


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


DIM = sum(p.numel() for p in net().parameters())


def drawn(seed: int) -> Tensor:
    return torch.randn(DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mask() -> Tensor:
    return drawn(9) > 0


def trained(
    updates: list[Tensor], dtype: torch.dtype = torch.float64, **settings: Any
) -> tuple[list[nn.Module], list[Tensor]]:
    """Checkpoints of PyTorch's SGD under these updates, before, between and after, and its velocities."""
    model = net(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, **settings)
    models, velocities = [copy.deepcopy(model)], [torch.zeros(DIM, dtype=dtype)]
    for update in updates:
        for p, part in zip(model.parameters(), update.split([p.numel() for p in model.parameters()]), strict=True):
            p.grad = part.view_as(p).to(dtype)
        optimizer.step()
        models.append(copy.deepcopy(model))
        held = [optimizer.state[p].get("momentum_buffer") for p in model.parameters()]
        velocities.append(torch.cat([torch.zeros(0) if v is None else v.flatten().clone() for v in held]))
    return models, velocities


@subtests("dtype", [torch.float64, torch.float32])
@subtests("settings", [{}, {"weight_decay": DECAY}, {"momentum": MOMENTUM, "weight_decay": DECAY}])
def test_two_checkpoints_give_back_the_update_that_pytorch_took(dtype, settings):
    updates = [drawn(seed) * mask() for seed in (0, 1)]
    models, velocities = trained(updates, dtype, **settings)
    for step, update in enumerate(updates):
        velocity = velocities[step] if "momentum" in settings else None
        found = audit.update_between(
            models[step], dict(models[step + 1].named_parameters()), lr=LR, velocity=velocity, mask=mask(), **settings
        )
        assert torch.allclose(found.update, update, atol=1e-12 if dtype is torch.float64 else 2e-5)
        assert not found.update[~mask()].any()
        if "momentum" in settings:
            assert torch.allclose(found.velocity, velocities[step + 1].double(), atol=1e-5)


def test_the_update_of_a_private_step_is_the_one_that_is_shared():
    inputs, labels = drawn(5)[:24].view(4, 6), torch.arange(4) % 3
    shared, _ = audit.share_update(net(), inputs, labels, dp_sgd(clip_norm=0.5, noise_multiplier=1.0), noise=seeded(2))
    after = net()
    start = torch.cat([p.detach().flatten() for p in after.parameters()])
    nn.utils.vector_to_parameters(start - LR * shared.released, after.parameters())
    found = audit.update_between(net(), after, lr=LR)
    assert torch.allclose(found.update, shared.released, atol=1e-12)


@subtests("dtype", [torch.float64, torch.float32])
@subtests(
    "wrong",
    [{"lr": 0.1}, {"lr": 0.21}, {"momentum": 0.85}, {"momentum": 0.0}, {"weight_decay": 0.0}, {"weight_decay": 0.06}],
)
def test_what_moves_outside_of_the_mask_shows_a_wrong_story(dtype, wrong):
    # A mask of its own in each step, so that the first leaves a velocity where the second releases nothing.
    models, velocities = trained([drawn(0), drawn(1) * mask()], dtype, momentum=MOMENTUM, weight_decay=DECAY)
    right = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY, "velocity": velocities[1], "mask": mask()}
    audit.update_between(models[1], models[2], **right)
    with pytest.raises(InconsistentObservation, match=r"^the update must be 0 outside of its mask, got .* in '[02]\."):
        audit.update_between(models[1], models[2], **{**right, **wrong})


def test_nesterovs_momentum_and_another_mask_show():
    models, velocities = trained([drawn(0), drawn(1) * mask()], momentum=MOMENTUM, nesterov=True)
    settings = {"lr": LR, "momentum": MOMENTUM, "velocity": velocities[1]}
    with pytest.raises(InconsistentObservation, match=r"momentum is Nesterov's$"):
        audit.update_between(models[1], models[2], mask=mask(), **settings)
    models, _ = trained([drawn(1) * mask()])
    narrower = mask().clone()
    narrower[narrower.nonzero()[0]] = False
    with pytest.raises(InconsistentObservation, match=r"must be 0 outside of its mask"):
        audit.update_between(models[0], models[1], lr=LR, mask=narrower)


def test_a_learning_rate_by_itself_shows_by_the_clip_norm_alone_and_where_it_is_too_small():
    update = 0.5 * drawn(1) / drawn(1).norm()
    models, _ = trained([update * mask()])
    settings = {"mask": mask(), "clip_norm": 0.5}
    audit.update_between(*models, lr=LR, **settings)
    longer = audit.update_between(*models, lr=LR * 2, **settings)  # nothing says that it is not so
    assert torch.allclose(2 * longer.update, update * mask(), atol=1e-12)
    with pytest.raises(InconsistentObservation, match=r"no longer than clip_norm, 0.5, .* lr is too small"):
        audit.update_between(*models, lr=LR / 2, **settings)


def test_checkpoints_that_are_none_are_named():
    models, _ = trained([drawn(0)])
    first, second = models
    broken = copy.deepcopy(second)
    next(broken.parameters()).data[0, 0] = math.nan
    with pytest.raises(InconsistentObservation, match=r"^after must be finite, got NaN or infinity in '0.weight'$"):
        audit.update_between(first, broken, lr=LR)
    with pytest.raises(InconsistentObservation, match=r"^after must have the parameters of before, got '0.bias' other"):
        audit.update_between(first, nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)), lr=LR)
    with pytest.raises(InconsistentObservation, match=rf"^mask must have one entry a parameter, {DIM}, got \(7,\)$"):
        audit.update_between(first, second, lr=LR, mask=torch.ones(7, dtype=torch.bool))
    with pytest.raises(InconsistentObservation, match=rf"^velocity must have one entry a parameter, {DIM}, got"):
        audit.update_between(first, second, lr=LR, momentum=0.9, velocity=torch.zeros(3))
    with pytest.raises(InconsistentObservation, match=r"^velocity must be finite"):
        audit.update_between(first, second, lr=LR, momentum=0.9, velocity=torch.full((DIM,), math.inf))
    with pytest.raises(InconsistentObservation, match=r"^before must be trained parameters, got none"):
        audit.update_between({}, second, lr=LR)


def test_what_two_checkpoints_cannot_tell_is_refused():
    models, _ = trained([drawn(0)])
    with pytest.raises(AccessError, match=r"^the updates of 'adam' do not follow from two checkpoints"):
        audit.update_between(*models, lr=LR, optimizer="adam")
    with pytest.raises(AccessError, match=r"^momentum needs the velocity before the step"):
        audit.update_between(*models, lr=LR, momentum=0.9)
    for settings, sentence in (
        ({"lr": 0.0}, "lr must be positive and finite, got 0.0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0 and finite, got -1.0"),
        ({"clip_norm": 0.0}, "clip_norm must be positive, got 0.0"),
        ({"mask": torch.ones(DIM)}, "mask must be true and false, got torch.float32.*"),
    ):
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            audit.update_between(*models, **{"lr": LR, **settings})


@subtests("made_by", [magnitude_dropping, random_dropping])
def test_a_mask_that_is_not_the_one_that_its_defense_makes_is_refused(made_by):
    defense = made_by(noise_multiplier=0.0)
    inputs, labels = drawn(5)[:24].view(4, 6), torch.arange(4) % 3
    update, _ = audit.share_update(net(), inputs, labels, defense, seed=4)
    assert update.structure is not None
    (part,) = update.structure().parts
    assert part.coordinates is not None and len(part.coordinates) < DIM
    shipped = torch.zeros(DIM, dtype=torch.bool).index_fill(0, part.coordinates, True)
    audit.refuse_other_mask(shipped, defense, net(), seed=4)
    with pytest.raises(
        InconsistentObservation, match=rf"^mask must be the one that '{defense.name}' makes .* got another at 2 of"
    ):
        swapped = shipped.clone()
        swapped[[int(shipped.nonzero()[0]), int((~shipped).nonzero()[0])]] ^= True
        audit.refuse_other_mask(swapped, defense, net(), seed=4)
    with pytest.raises(InconsistentObservation, match=r"mask must have one entry a parameter"):
        audit.refuse_other_mask(shipped[:5], defense, net())


def test_masks_that_nobody_else_can_make_are_refused():
    shipped = torch.ones(DIM, dtype=torch.bool)
    with pytest.raises(AccessError, match=r"is a private release"):
        audit.refuse_other_mask(shipped, dp_snip(noise_multiplier=1.0), net())
    with pytest.raises(AccessError, match=r"follows from releases before step 2"):
        audit.refuse_other_mask(shipped, ranked(noise_multiplier=1.0), net(), step=2)
    with pytest.raises(ValueError, match=r"must release some coordinates by a mask, and 'dp_sgd' does not"):
        audit.refuse_other_mask(shipped, dp_sgd(noise_multiplier=1.0), net())
