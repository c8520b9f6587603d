"""R-GAP says `ok` of the private image alone: one logit whose clip factor hides, twins, noise, and random networks."""

import random
from collections import Counter

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
from leakbench.attacks.core.closed_form.acceptance import ReleaseMatch
from leakbench.attacks.core.closed_form.recursion.clip_factor import sharpest
from leakbench.attacks.r_gap import r_gap
from leakbench.defenses.core import Defense, seeded
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.per_layer import per_layer
from leakbench.defenses.random_sparsification import random_sparsification

from ..parameters import subtests
from .recursion_cases import mse

SHAPE = (1, 6, 6)
ACTIVATIONS = {
    "leaky": lambda: nn.LeakyReLU(0.2),
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "relu": nn.ReLU,
    "none": nn.Identity,
}


def network(
    kind: str, activation: str, classes: int, *, body: bool = False, head: bool = False, seed: int = 0
) -> nn.Sequential:
    """A small random network, with biases in front of the last layer, in it, or without any."""
    torch.manual_seed(seed)
    act = ACTIVATIONS[activation]
    layers = {
        "linear": lambda: (nn.Flatten(), nn.Linear(36, classes, bias=head)),
        "dense": lambda: (nn.Flatten(), nn.Linear(36, 50, bias=body), act(), nn.Linear(50, classes, bias=head)),
        "fcn3": lambda: (
            *(nn.Flatten(), nn.Linear(36, 60, bias=body), act(), nn.Linear(60, 30, bias=body), act()),
            nn.Linear(30, classes, bias=head),
        ),
        "conv": lambda: (
            *(nn.Conv2d(1, 8, 3, padding=1, bias=body), act(), nn.Conv2d(8, 10, 3, stride=2, padding=1, bias=body)),
            *(act(), nn.Flatten(), nn.Linear(90, classes, bias=head)),
        ),
    }
    return nn.Sequential(*layers[kind]()).double()


def update(model: nn.Module, x: torch.Tensor, label: int, defense: Defense, **more) -> Observation:
    return audit.share_update(model, x[None], torch.tensor([label]), defense, noise=seeded(0), **more)[0]


def image(seed: int = 0) -> torch.Tensor:
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64)


def bounded(norm: float) -> Defense:
    return dp_sgd(clip_norm=norm, noise_multiplier=0.0)


def length(model: nn.Module, x: torch.Tensor, label: int) -> float:
    """Of the gradient before it is clipped."""
    return float(update(model, x, label, bounded(1e9)).released.norm())


@pytest.mark.long
@subtests("share, label", [(0.1, 0), (0.98, 1)])
@subtests(
    "kind, activation, classes",
    [("fcn3", "leaky", 1), ("dense", "relu", 2), ("conv", "leaky", 1), ("linear", "none", 1), ("linear", "none", 2)],
)
def test_a_clipped_gradient_of_a_homogeneous_network_and_one_logit_leaves_the_scale_open(
    kind, activation, classes, share, label
):
    """s x has the gradient of x but for its length: all s of a longer one are clipped to the same update."""
    model, x = network(kind, activation, classes), image()
    clipped = update(model, x, label, bounded(share * length(model, x, label)))
    result = r_gap(clipped)
    assert result.status == "degraded" and result.alternatives is not None
    # All but the contrast is known, of one label at least, and the multiple that is shown explains the update.
    found = torch.cat([result.inputs, result.alternatives]).flatten(1)
    likeness = nn.functional.cosine_similarity(found, x.flatten()[None])
    assert float(likeness.max()) > 1 - 1e-12
    assert result.objective < 1e-9 and float(result.inputs.max()) <= 1
    with pytest.raises(NotApplicable, match="not identifiable"):
        r_gap(clipped, clip_factor="unknown")


def test_the_family_that_is_clipped_to_one_update_is_real():
    model, x = network("fcn3", "leaky", 1), image()
    label = max((0, 1), key=lambda label: length(model, x, label))  # the wrong one: longer inputs have longer gradients
    norm = 0.5 * length(model, x, label)
    updates = [update(model, times * x, label, bounded(norm)).released for times in (0.9, 1.0, 1.5)]
    for one in updates:
        torch.testing.assert_close(one, updates[0], rtol=1e-10, atol=1e-14)


NETWORKS = [
    ("fcn3", "tanh", False, 1),
    ("dense", "sigmoid", False, 2),
    ("dense", "leaky", True, 1),
    ("conv", "tanh", True, 1),
]
SHARES = [(0.02, "auto"), (0.3, "unknown"), (0.99, "auto"), (0.02, "unknown"), (0.3, "auto"), (0.99, "unknown")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("network_settings", "shares"),
    [
        # Every pair of two settings, but that the convolution has one share.
        *((settings, SHARES[3 * (i % 2) :][:3]) for i, settings in enumerate(NETWORKS[:3])),
        (NETWORKS[3], SHARES[1:2]),
        *(pytest.param(settings, SHARES, marks=pytest.mark.slow) for settings in NETWORKS),
    ],
)
def test_other_layers_tell_a_clip_factor_that_one_logit_does_not(network_settings, shares):
    kind, activation, body, classes = network_settings
    model, x = network(kind, activation, classes, body=body), image()
    for share, clip_factor in shares:
        result = r_gap(update(model, x, 1, bounded(share * length(model, x, 1))), clip_factor=clip_factor)
        assert result.status == "ok" and result.labels.tolist() == [1], (share, clip_factor)
        assert mse(result.inputs[0], x) < 1e-12


def test_a_factor_that_is_told_to_be_one_is_taken_for_one_or_contradicted():
    model, x = network("fcn3", "tanh", 1), image()
    clipped = update(model, x, 1, bounded(0.3 * length(model, x, 1)))
    try:
        assert r_gap(clipped, clip_factor="one").status == "degraded"
    except InconsistentObservation as refused:
        assert "must be that of one example" in str(refused)
    assert r_gap(update(model, x, 1, bounded(1e9)), clip_factor="one").status == "ok"


@pytest.mark.long
def test_a_clip_factor_hides_where_the_mask_hides_the_bias_too():
    model, x = network("fcn3", "leaky", 1, head=True), image()
    norm = 0.3 * length(model, x, 1)
    hidden = []
    for seed in range(12):
        sparse = random_sparsification(clip_norm=norm, final_sparsity=0.5, noise_multiplier=0.0)
        observation = update(model, x, 1, sparse, step=1, steps=2, seed=seed)
        bias = granted(observation.structure)().gradients(observation.released)["5.bias"]
        result = r_gap(observation)
        hidden.append(not bool(bias.observed.any()))
        assert (result.status == "ok") != hidden[-1]
        assert hidden[-1] or mse(result.inputs[0], x) < 1e-12
    assert 0 < sum(hidden) < 12


def test_of_two_twins_in_the_range_none_is_called_right():
    model, x = network("fcn3", "leaky", 1), image()
    with torch.no_grad():
        label = int(float(model(x[None])) > 0)
    for times, status in ((0.5, "degraded"), (1.0, "ok")):
        with torch.no_grad():
            # A margin of 1 has its twin at 1.62.
            for weight in model[-1].parameters():
                weight.mul_(1 / float(model(times * x[None]).abs()))
        observation = update(model, times * x, label, bounded(1e9))
        result = r_gap(observation)
        assert result.alternatives is not None and result.status == status
        found = torch.cat([result.inputs, result.alternatives])
        assert min(mse(one, times * x) for one in found) < 1e-18
        assert status == "degraded" or mse(result.inputs[0], x) < 1e-18


def test_what_noise_does_not_explain_is_no_match_and_what_it_hides_none_either():
    """A recursion magnifies noise beyond what was there; of one layer the rest is as long as the noise."""
    x, statuses = image(), []
    for kind, noise in (("linear", 1e-5), ("conv", 1e-4), ("linear", 3.0), ("conv", 3.0)):
        model = network(kind, "leaky", 4, head=True)
        defense = dp_sgd(clip_norm=length(model, x, 1), noise_multiplier=noise)
        try:
            statuses.append(r_gap(update(model, x, 1, defense)).status)
        except (InconsistentObservation, RankDeficient):
            statuses.append("refused")
    assert statuses[0] == "ok" and "ok" not in statuses[1:]


def test_an_explanation_is_measured_in_rounding_or_in_noise():
    model, x = network("dense", "tanh", 4), image()
    labels = torch.tensor([1])
    for noise in (0.0, 1e-3):
        observation = update(model, x, 1, dp_sgd(clip_norm=1e3, noise_multiplier=noise))
        match = ReleaseMatch.of(observation, granted(observation.noise_std))
        assert match.fits(x[None], labels)
        # 1e-3 of a clip norm of 1000 hides everything, and then the scale is open.
        assert match.fits(1.5 * x[None], labels) == (noise > 0)
        assert match.leaves_scale_open(x[None], labels) == (noise > 0)
        assert (match.stretched(x[None], labels) is not None) == (noise > 0)


def test_the_sharpest_factor_is_found_between_those_that_are_tried_and_past_refusals():
    def left(factor: float) -> float:
        if factor > 0.5:
            raise InconsistentObservation("none")
        return abs(factor - 0.0123456)

    assert sharpest(left) == pytest.approx(0.0123456, rel=1e-9)
    assert sharpest(lambda factor: 1 - factor) == pytest.approx(1.0, rel=1e-9)


def attacked(seed: int) -> tuple[str, Reconstruction | None, torch.Tensor]:
    """A random network, image and release, and what the attack says of it."""
    coins = random.Random(seed)  # noqa: S311 - draws no secret
    classes = coins.choice([1, 1, 2, 3, 10])
    kind, activation = coins.choice(["linear", "dense", "fcn3", "conv"]), coins.choice(list(ACTIVATIONS))
    model = network(kind, activation, classes, body=coins.random() < 0.5, head=coins.random() < 0.5, seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(coins.choice([1.0, 1.0, 3.0, 0.3]))
    x, label = image(seed) * coins.choice([1.0, 1.0, 0.4]), coins.randrange(max(2, classes))
    norm = length(model, x, label) * coins.choice([0.05, 0.3, 0.8, 0.99])
    release = coins.choice(["open", "clipped", "clipped", "masked", "by layer"])
    defense, more = bounded(1e9 if release == "open" else norm), {}
    if release == "by layer":
        defense = per_layer(clip_norm=norm, noise_multiplier=0.0)
    if release == "masked":
        bound = coins.choice([norm / 3, 1e9])
        defense = random_sparsification(clip_norm=bound, final_sparsity=0.4, noise_multiplier=0.0)
        more = {"step": 3, "steps": 4}
    try:
        return release, r_gap(update(model, x, label, defense, **more)), x
    except (InconsistentObservation, NotApplicable, RankDeficient):
        return release, None, x


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 600), marks=pytest.mark.slow)])
def test_ok_goes_with_the_private_image_whatever_the_network_and_the_release(seeds):
    """Parts of the input that an attack does not claim may be wrong; of what it calls right nothing may."""
    right = Counter[str]()
    for seed in seeds:
        release, result, x = attacked(seed)
        if result is None or result.status != "ok":
            continue
        claimed = torch.ones_like(x, dtype=torch.bool) if result.determined is None else result.determined[0]
        assert float((result.inputs[0] - x)[claimed].square().mean()) < 1e-6, (seed, release)
        right[release] += 1
    assert right["open"] and right["clipped"] and sum(right.values()) > 0.4 * len(seeds)
