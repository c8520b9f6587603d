"""What is particular to iDLG: its label, by the rule of label recovery; the search is that of `dlg`."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from leakbench import audit
from leakbench.attacks.core import InconsistentObservation, NotApplicable, Observation
from leakbench.attacks.core.closed_form.label_counts import fixed_label
from leakbench.attacks.idlg import idlg
from leakbench.defenses.core import Defense, seeded
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.defenses.rpdp import rpdp
from leakbench.defenses.sgd import sgd

from ..parameters import subtests
from . import toys


def update(defense: Defense, label: int, *, seed: int = 0, bias: bool = True) -> tuple[Observation, Tensor]:
    model = toys.conv_net(seed=seed, dtype=torch.float64)
    if not bias:
        model.get_submodule("5").register_parameter("bias", None)
    x = toys.examples(1, (1, 8, 8), seed=seed).inputs.double()
    observation, _ = audit.share_update(model, x, torch.tensor([label]), defense, seed=seed, noise=seeded(seed))
    return observation, x


MASKED = random_sparsification(final_sparsity=0.5, cooling=False, clip_norm=1e6, noise_multiplier=0.0)
PROJECTED = rpdp(rank=100, clip_norm=1e6, noise_multiplier=0.0)


CLIPPED = dp_sgd(clip_norm=1e-3, noise_multiplier=0.0)


@pytest.mark.long
@subtests("label, defense", [(0, sgd()), (3, CLIPPED), (0, MASKED), (3, PROJECTED)])
def test_the_label_is_read_off_and_the_image_found(label, defense):
    observation, x = update(defense, label)
    result = idlg(observation, toys.generator(0), iterations=60)
    assert result.labels.tolist() == [label] and result.status == "ok"
    assert float((result.inputs - x).square().mean()) < 1e-4


@pytest.mark.parametrize("bias", [True, False])
def test_every_label_is_named_with_and_without_a_bias(bias):
    for label in range(toys.CLASSES):
        observation, _ = update(sgd(), label, seed=label, bias=bias)
        assert idlg(observation, iterations=1).labels.tolist() == [label]


def test_noise_names_a_label_by_chance_in_one_of_twenty_cases_at_most_and_shows_one_that_is_there():
    quiet, _ = update(sgd(), 2)
    assert quiet.structure is not None
    structure, m = quiet.structure(), len(quiet.released)
    found: list[int | None] = []
    for seed in range(400):
        noise = torch.randn(m, generator=toys.generator(seed), dtype=torch.float64)
        try:
            found.append(fixed_label(structure, noise, torch.ones(m)))
        except (NotApplicable, InconsistentObservation):
            found.append(None)
    # 400 trials at 0.05 have a mean of 20 and a standard deviation of 4.4; five of them above.
    assert 0 < sum(one is not None for one in found) < 42
    size = float(quiet.released.abs().max())
    for seed in range(20):
        noise = 1e-2 * size * torch.randn(m, generator=toys.generator(seed), dtype=torch.float64)
        assert fixed_label(structure, quiet.released + noise, torch.full((m,), 1e-2 * size)) == 2


def test_under_noise_of_private_training_it_does_not_guess():
    named = 0
    for seed in range(6):
        try:
            named += idlg(update(dp_sgd(noise_multiplier=1.0), 1, seed=seed)[0], iterations=1).status == "ok"
        except NotApplicable as refusal:
            assert "above the noise" in str(refusal)
    assert named == 0


def test_a_basis_that_mixes_layers_is_refused():
    observation, _ = update(rpdp(rank=100, scope="global", clip_norm=1e6, noise_multiplier=0.0), 1)
    with pytest.raises(NotApplicable, match="last layer's gradient must be released"):
        idlg(observation)


def test_coefficients_in_a_square_basis_are_turned_back_with_their_noise():
    observation, _ = update(PROJECTED, 1)
    plain, _ = update(sgd(), 1)
    assert observation.structure is not None and plain.structure is not None
    std = torch.full_like(observation.released, 1e-9)
    assert fixed_label(observation.structure(), observation.released, std) == 1
    big = torch.full_like(observation.released, 1e3)
    with pytest.raises(NotApplicable, match="above the noise"):
        fixed_label(observation.structure(), observation.released, big)


def test_larger_batches_and_updates_of_no_single_example_are_refused():
    observation, _ = toys.conv_step(count=2)
    quiet = torch.zeros_like(observation.released)
    with pytest.raises(NotApplicable, match=r"the batch must be one example for its label to be one sign, got 2"):
        idlg(replace(observation, noise_std=quiet))
    pretended = replace(observation, batch_size=1, labels=None, noise_std=quiet)
    two = toys.conv_step(count=2, seed=3)[1].labels
    assert len(two.unique()) == 2
    pretended = replace(pretended, released=toys.conv_step(count=2, seed=3)[0].released)
    with pytest.raises(InconsistentObservation, match="must be negative for a batch of one, got 2"):
        idlg(pretended)


def test_a_network_without_a_linear_end_is_refused():
    model = nn.Sequential(nn.Conv2d(1, 4, 8), nn.Flatten(), nn.Linear(4, 4), nn.Softplus())
    x = toys.examples(1, (1, 8, 8), seed=0)
    observation, _ = audit.share_update(model, x.inputs, x.labels, sgd())
    with pytest.raises(NotApplicable, match="last layer must be linear"):
        idlg(observation)
    with pytest.raises(ValueError, match="iterations must be at least 1, got 0"):
        idlg(observation, iterations=0)
