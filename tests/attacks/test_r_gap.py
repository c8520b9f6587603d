"""What is particular to R-GAP: the networks of its paper, twins, masks, clipping, noise, and what it refuses."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbench import audit
from leakbench.attacks.core import (
    InconsistentObservation,
    NotApplicable,
    Observation,
    RankDeficient,
    Reconstruction,
    granted,
)
from leakbench.attacks.core.closed_form.recursion.invert import InvertedInput, inverted_inputs, layers_of
from leakbench.attacks.core.closed_form.recursion.observed_gradients import observed_gradients
from leakbench.attacks.r_gap import r_gap
from leakbench.benchmarks import models
from leakbench.defenses.core import Defense, seeded
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.per_layer import per_layer
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.defenses.rpdp import rpdp

from ..parameters import subtests
from .recursion_cases import mse

OPEN = dp_sgd(clip_norm=1e9, noise_multiplier=0.0)


def update(
    model: nn.Module,
    shape: tuple[int, ...],
    defense: Defense = OPEN,
    *,
    seed: int = 0,
    count: int = 1,
    label: int = 0,
    **more,
) -> tuple[Observation, torch.Tensor]:
    """A shared update of random inputs of one label, in float64, and these inputs."""
    coins = torch.Generator().manual_seed(100 + seed)
    x = torch.rand(count, *shape, generator=coins, dtype=torch.float64)
    labels = torch.full((count,), label)
    return audit.share_update(model.double(), x, labels, defense, noise=seeded(seed), **more)[0], x


def built(name: str, shape: tuple[int, ...], seed: int = 0, classes: int = 1) -> nn.Module:
    return models.build(name, input_shape=shape, classes=classes, seed=seed)


def ten_classes(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, stride=2, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(12, 20, 3, padding=1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(20, 24, 3, padding=1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(24 * 36, 10, bias=False),
    )


SMALL = (3, 12, 12)


def explanations(result: Reconstruction) -> torch.Tensor:
    """All inputs that the attack says explain the update."""
    return result.inputs if result.alternatives is None else torch.cat([result.inputs, result.alternatives])


def raw(observation: Observation) -> list[InvertedInput]:
    """The inputs before they are clamped, best first."""
    structure = granted(observation.structure)()
    network = structure.known_network()
    sums = observation.released.double() * observation.expected_batch
    return inverted_inputs(
        network, observed_gradients(structure, sums, granted(observation.noise_std).double(), layers_of(network))
    )


@pytest.mark.parametrize("side", [12, pytest.param(28, marks=pytest.mark.slow)])
def test_fcn3_gives_its_input_away_to_the_last_digit(side):
    observation, x = update(built("fcn3", (1, side, side)), (1, side, side), label=1)
    result = r_gap(observation)
    assert mse(result.inputs, x) < 1e-20
    assert result.labels.tolist() == [1] and result.status == "ok" and result.objective < 1e-12


@pytest.mark.long
def test_small_images_of_cnn6_are_found():
    observation, x = update(built("cnn6", (3, 12, 12)), (3, 12, 12), label=1)
    result = r_gap(observation)
    assert mse(result.inputs, x) < 1e-15 and result.labels.tolist() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_cnn6_gives_every_image_away_at_every_start(seed):
    observation, x = update(built("cnn6", (3, 32, 32), seed), (3, 32, 32), seed=seed, label=seed % 2)
    result = r_gap(observation)
    assert mse(result.inputs, x) < 1e-15 and result.labels.tolist() == [seed % 2]


@pytest.mark.slow  # the full size of the paper; `test_through_a_mask` has a layer that is left open
def test_the_narrow_cnn6_leaves_280_dimensions_of_its_second_layer_open():
    observation, _ = update(built("cnn6_d", (3, 32, 32)), (3, 32, 32))
    with pytest.raises(RankDeficient) as refused:
        r_gap(observation)
    assert (refused.value.layer, refused.value.deficit) == (2, 280)


@pytest.mark.long
def test_ten_classes_and_three_convolutions_clipped_or_not():
    for defense in (OPEN, dp_sgd(clip_norm=0.01, noise_multiplier=0.0)):
        observation, x = update(ten_classes(), SMALL, defense, label=7)
        result = r_gap(observation)
        assert mse(result.inputs, x) < 1e-15 and result.labels.tolist() == [7] and result.alternatives is None


@pytest.mark.long
def test_a_correct_answer_of_one_logit_has_a_twin_that_shares_the_same_update():
    model, found = built("fcn3", (1, 8, 8)).double(), []
    for label in (0, 1):
        observation, x = update(model, (1, 8, 8), label=label)
        # The range of inputs tells the twins apart; the attack itself gives both.
        result = r_gap(replace(observation, input_low=-1e9, input_high=1e9))
        found.append(len(explanations(result)))
        for twin in explanations(result):
            again = observation.simulate(twin[None], result.labels)
            assert float((again - observation.released).norm() / observation.released.norm()) < 1e-10
        assert min(mse(twin, x[0]) for twin in explanations(result)) < 1e-20
        assert mse(r_gap(observation).inputs, x) < 1e-20
    # One of the two labels is the model's own answer.
    assert sorted(found) == [1, 2]


def scalar(observation: Observation, h: float, size: int) -> Observation:
    """The observation with the last layer's gradient scaled so that <W, dL/dW> = h."""
    weight = granted(observation.structure)().known_network().parameters["5.weight"].flatten()
    assert len(weight) == size
    own = float(weight @ observation.released[-size:])
    return replace(observation, released=observation.released * (h / own))


def test_the_scalar_of_the_head_decides_how_many_inputs_explain_it():
    observation, _ = update(built("fcn3", (1, 8, 8)), (1, 8, 8))
    assert len(explanations(r_gap(scalar(observation, -0.2, 100)))) == 2
    assert len(explanations(r_gap(scalar(observation, 0.2, 100)))) == 1
    with pytest.raises(InconsistentObservation, match=re.escape("got -0.3")):
        r_gap(scalar(observation, -0.3, 100))


def test_the_gradient_of_a_linear_model_has_an_input_for_either_label():
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 1, bias=False))
    observation, x = update(model, (1, 4, 4), label=1)
    result = r_gap(observation)
    # Of the signs only one has pixels in the range.
    assert mse(result.inputs, x) < 1e-25 and result.labels.tolist() == [1]
    assert len(explanations(result)) in (2, 4)


def masked(sparsity: float) -> Defense:
    return random_sparsification(clip_norm=1e9, final_sparsity=sparsity, noise_multiplier=0.0)


@subtests("sparsity", [0.3, 0.8, 0.9])
def test_through_a_mask_it_is_exact_or_says_which_layer_is_left_open(sparsity):
    observation, x = update(ten_classes(), SMALL, masked(sparsity), label=3, step=3, steps=4)
    assert observation.released.numel() < (1.01 - sparsity) * 15_700
    if sparsity < 0.9:
        result = r_gap(observation)
        assert mse(result.inputs, x) < 1e-15 and result.labels.tolist() == [3] and result.determined is None
        return
    with pytest.raises(RankDeficient) as refused:
        r_gap(observation)
    assert (refused.value.layer, refused.value.deficit > 0) == (4, True)
    result = r_gap(observation, allow_min_norm=True)
    # A hidden layer that is open leaves no pixel certain.
    assert result.status == "degraded" and result.determined is not None and not result.determined.any()


def layers(classes: int, *, bias: bool, activation: type[nn.Module] = nn.LeakyReLU, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    sizes = [(64, 80), (80, 40), (40, classes)]
    first, second, last = (nn.Linear(a, b, bias=bias) for a, b in sizes)
    return nn.Sequential(nn.Flatten(), first, activation(), second, activation(), last)


@pytest.mark.long
@subtests(
    "model, label, sparsity",
    [
        # Half of the features show in no row: the layer before tells them, and their scale follows at the end.
        (lambda: built("fcn3", (1, 8, 8)), 0, 0.5),
        (lambda: layers(3, bias=False), 2, 0.8),
        (lambda: layers(10, bias=False), 3, 0.8),
        # The bias's own gradient, if it is released, gives the scale; its root is found where it is not.
        (lambda: layers(1, bias=True, activation=nn.Tanh), 1, 0.5),
        (lambda: layers(2, bias=True), 1, 0.7),
        (lambda: layers(10, bias=True, activation=nn.Tanh), 3, 0.8),
        # No layer is before: ten classes are nine equations of what is missing.
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 3, 0.8),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False)), 3, 0.75),
    ],
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_features_that_a_mask_hides_in_every_class_come_from_the_layer_before_or_the_logits(
    model, label, sparsity, seed
):
    torch.manual_seed(seed)
    observation, x = update(model(), (1, 8, 8), masked(sparsity), seed=seed, label=label, step=3, steps=4)
    structure = granted(observation.structure)()
    last = structure.known_network().operations[-1]
    seen = structure.gradients(observation.released)[str(last.weight)].observed
    assert bool((~seen).all(dim=0).any())
    result = r_gap(observation)
    assert min(mse(one, x[0]) for one in explanations(result)) < 1e-18 and result.labels.tolist() == [label]


def test_what_a_mask_leaves_of_an_input_is_told_from_what_it_hides():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    observation, x = update(model, (1, 8, 8), masked(0.9), label=3, step=3, steps=4)
    seen = granted(observation.structure)().gradients(observation.released)["1.weight"].observed
    with pytest.raises(RankDeficient) as refused:
        r_gap(observation)
    result = r_gap(observation, allow_min_norm=True)
    assert result.determined is not None and refused.value.deficit == int((~result.determined).sum())
    assert 9 < refused.value.deficit < 60 and not bool(result.determined.flatten()[~seen.any(dim=0)].any())
    assert mse(result.inputs[result.determined], x[result.determined]) < 1e-20
    # Without a bias nothing gives the scale of what is seen.
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    observation, _ = update(model, (1, 8, 8), masked(0.9), label=3, step=3, steps=4)
    result = r_gap(observation, allow_min_norm=True)
    assert result.determined is not None and not result.determined.any()
    # Of a first layer that is behind no other, the same pixel by pixel.
    observation, x = update(layers(10, bias=True), (1, 8, 8), masked(0.8), label=3, step=3, steps=4)
    hidden = granted(observation.structure)().gradients(observation.released)["1.weight"].observed
    assert bool(hidden.any(dim=0).all()) and mse(r_gap(observation).inputs, x) < 1e-18


def test_gaps_of_several_examples_are_found_out():
    torch.manual_seed(0)
    observation, _ = update(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), (1, 8, 8), masked(0.5), count=2, step=3)
    with pytest.raises(InconsistentObservation, match="must be that of one example"):
        r_gap(replace(observation, batch_size=1, labels=None))


def test_one_logit_whose_layers_are_all_masked_away_says_how_much_is_open():
    observation, _ = update(built("fcn3", (1, 8, 8)), (1, 8, 8), masked(0.9), step=3, steps=4)
    seen = int(granted(observation.structure)().gradients(observation.released)["5.weight"].observed.sum())
    with pytest.raises(RankDeficient) as refused:
        r_gap(observation)
    assert (refused.value.layer, refused.value.deficit) == (3, 100 - seen)


def test_a_rate_that_is_not_the_true_one_is_noticed():
    observation, _ = update(ten_classes(), SMALL)
    with pytest.raises(InconsistentObservation, match="2 times as long"):
        r_gap(replace(observation, released=2 * observation.released))
    with pytest.raises(InconsistentObservation, match=re.escape("it is 0.5 times as long")):
        r_gap(replace(observation, released=0.5 * observation.released), clip_factor="one")
    # Half of it might be a clipped one.
    assert (
        mse(r_gap(replace(observation, released=0.5 * observation.released)).inputs, r_gap(observation).inputs) < 1e-15
    )


def test_layers_that_are_clipped_apart_are_refused_and_taken_as_they_are_where_nothing_is_clipped():
    observation, x = update(ten_classes(), SMALL, per_layer(clip_norm=1e9, noise_multiplier=0.0), label=1)
    assert mse(r_gap(observation).inputs, x) < 1e-15
    clipped, _ = update(ten_classes(), SMALL, per_layer(clip_norm=0.01, noise_multiplier=0.0), label=1)
    with pytest.raises(NotApplicable, match="bounded together"):
        r_gap(clipped)


def test_several_examples_are_refused_or_give_one_input_between_them():
    observation, _ = update(ten_classes(), SMALL, count=3, label=2)
    with pytest.raises(NotApplicable, match="must be one example, got 3; mode = 'combination'"):
        r_gap(observation)
    result = r_gap(observation, mode="combination")
    assert result.status == "degraded" and result.inputs.shape == (1, *SMALL) and result.labels.tolist() == [2]


def test_a_last_layer_in_a_basis_is_refused():
    observation, _ = update(ten_classes(), SMALL, rpdp(clip_norm=1.0, rank=20, noise_multiplier=0.0))
    with pytest.raises(NotApplicable, match="must be released in entries"):
        r_gap(observation)


@subtests(
    "setting, sentence",
    [
        ({"solver": "qr"}, "solver must be one of ls, gls, map, got 'qr'"),
        ({"mode": "all"}, "mode must be one of single, combination, got 'all'"),
        ({"clip_factor": "two"}, "clip_factor must be one of auto, one, unknown, got 'two'"),
    ],
)
def test_a_setting_out_of_its_list_is_refused(setting, sentence):
    observation, _ = update(built("fcn3", (1, 8, 8)), (1, 8, 8))
    with pytest.raises(ValueError, match=re.escape(sentence)):
        r_gap(observation, **setting)


def test_the_clip_factor_of_one_logit_without_bias_cannot_be_told():
    observation, _ = update(built("fcn3", (1, 8, 8)), (1, 8, 8))
    with pytest.raises(NotApplicable, match="it is not identifiable"):
        r_gap(observation, clip_factor="unknown")
