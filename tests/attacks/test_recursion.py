"""Recursive inversion of whole networks: walks, clip factors, refusals, noise and bases."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from leakbench.attacks.core import InconsistentObservation, NotApplicable, RankDeficient, ReleasedPart
from leakbench.attacks.core.closed_form.recursion.forward import drawn_inputs, results
from leakbench.attacks.core.closed_form.recursion.invert import inverted_inputs, layers_of
from leakbench.attacks.core.closed_form.recursion.observed_gradients import observed_gradients
from leakbench.attacks.core.closed_form.recursion.ranks import rank_analysis
from leakbench.attacks.core.closed_form.recursion.walk import Solver
from leakbench.benchmarks import models

from ..parameters import subtests
from .recursion_cases import case, drawn, mse
from .recursion_networks import LEAKY, NETWORKS, Parallel, Skip, built, conv


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_inverted_from_one_gradient(name):
    made = case(built(name), (1, 6, 6))
    found = inverted_inputs(made.network, made.gradients)[0]
    assert mse(found.x, made.x) < 1e-20 and found.label == made.label and not found.degraded
    # float32 constants, as a slope of 0.2, would leave 1e-9 here.
    assert found.residual < 1e-10


@subtests(
    "channels, projection, alone, together",
    [
        # One main path's gradient alone leaves 36 of 72, 54 of 216 and 72 of 288 dimensions open.
        ((1, 2, 2), True, 36, 0),
        ((4, 6, 3), True, 54, 0),
        # F^2 equations repeat one another, and the rest is not enough.
        ((4, 8, 3), True, 72, 9),
        ((2, 2, 2), True, 36, 4),
        # Of what is not multiplied by weights no gradient tells anything: what the layer's own leaves open stays open.
        ((3, 3, 3), False, 27, 27),
        ((4, 4, 4), False, 0, 0),
    ],
)
def test_both_branches_of_a_sum_determine_what_neither_does_alone(channels, projection, alone, together):
    torch.manual_seed(0)
    made = case(Skip(nn.Tanh, projection=projection, norm=False, channels=channels), (1, 6, 6))
    report = rank_analysis(made.network)[2]
    assert (report.unknowns, report.deficit) == (36 * channels[1], together)
    assert report.unknowns - report.rank_gradients == alone
    if together:
        with pytest.raises(RankDeficient) as refused:
            inverted_inputs(made.network, made.gradients)
        assert (refused.value.layer, refused.value.deficit) == (3, together)
    else:
        assert mse(inverted_inputs(made.network, made.gradients)[0].x, made.x) < 1e-20


def test_two_layers_of_one_input_are_solved_with_their_sum():
    torch.manual_seed(0)
    made = case(Parallel(), (2, 6, 6))
    reports = rank_analysis(made.network)
    # 36 equations of either gradient and 72 of the sum; F^2 = 4 of each gradient are the sum's.
    assert [one.rank_gradients for one in reports[:2]] == [36, 36] and [one.deficit for one in reports[:2]] == [0, 0]
    assert mse(inverted_inputs(made.network, made.gradients)[0].x, made.x) < 1e-20


@subtests("solver", ["ls", "gls", "map"])
def test_branches_together_under_a_mask_and_under_noise(solver):
    model = built("branches of a sum together, batch norm")
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    coins = torch.Generator().manual_seed(1)
    # The last layer is whole: of that the recursion begins.
    keep = torch.cat([torch.rand(n, generator=coins) < (1 if "out" in name else 0.95) for name, n in sizes.items()])
    assert not bool(keep.all())
    for noise, most in ((0.0, 1e-20), (1e-8, 1e-9)):
        made = case(model, (1, 6, 6), keep=keep, noise=noise)
        assert mse(inverted_inputs(made.network, made.gradients, solver=solver)[0].x, made.x) < most


@subtests("name", ["biases and strides", "ten classes, three convolutions", "projection skip"])
def test_an_unknown_clip_factor_is_found(name):
    made = case(built(name), (1, 6, 6), factor=0.01)
    found = inverted_inputs(made.network, made.gradients)[0]
    assert found.factor == pytest.approx(0.01, rel=1e-9) and mse(found.x, made.x) < 1e-15
    with pytest.raises(InconsistentObservation, match="times as long"):
        inverted_inputs(made.network, made.gradients, clipped=False)


@subtests(
    "model, sentence",
    [
        (lambda: conv(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), features=16), "has none|is not"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Tanh()), "the last operation must be a linear layer"),
        (lambda: Skip(nn.Tanh, projection=False, norm=False, before=True), "a sum must come before its activation"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 9), nn.ReLU(), nn.ReLU(), nn.Linear(9, 4)),
            "must not follow",
        ),
    ],
)
def test_what_has_no_inverse_is_refused(model, sentence):
    torch.manual_seed(0)
    with pytest.raises(NotApplicable, match=sentence):
        made = case(model(), (1, 6, 6))
        inverted_inputs(made.network, made.gradients)


def test_a_layer_that_leaves_its_input_open_is_refused_with_its_number_and_deficit():
    torch.manual_seed(0)
    model = conv(nn.Conv2d(1, 16, 3, padding=1), LEAKY(0.2), nn.AvgPool2d(2), features=16 * 9)
    made = case(model, (1, 6, 6))
    with pytest.raises(RankDeficient) as refused:
        inverted_inputs(made.network, made.gradients)
    assert (refused.value.layer, refused.value.deficit) == (2, 16 * 27)
    found = inverted_inputs(made.network, made.gradients, allow_min_norm=True, combination=True)[0]
    assert "432 dimensions are open" in found.degraded[0] and mse(found.x, made.x) > 1e-6


def test_the_wrong_mask_is_noticed():
    model = built("ten classes, three convolutions")
    coins = torch.Generator().manual_seed(3)
    dim = sum(p.numel() for p in model.parameters())
    keep = torch.rand(dim, generator=coins) < 0.8
    made = case(model, (1, 6, 6), keep=keep)
    assert mse(inverted_inputs(made.network, made.gradients)[0].x, made.x) < 1e-18
    # Two of the kept coordinates are taken for two of the dropped ones.
    wrong = keep[torch.randperm(dim, generator=coins)]
    wrong = (torch.cumsum(wrong, 0) <= int(keep.sum())) & wrong
    short = int(keep.sum() - wrong.sum())
    wrong[(~wrong).nonzero()[:short, 0]] = True
    part = ReleasedPart(start=0, stop=int(wrong.sum()), kind="coordinates", coordinates=wrong.nonzero()[:, 0])
    misread = case_of(made, part)
    with pytest.raises((InconsistentObservation, RankDeficient)):
        inverted_inputs(made.network, misread)


def case_of(made, part):
    """The same numbers under another mask."""
    other = replace(made.structure, parts=(part,))
    return observed_gradients(other, made.released, torch.zeros_like(made.released), layers_of(made.network))


def test_random_inputs_and_the_described_forward_pass_are_those_of_the_model():
    model = built("batch norm").double().eval()
    made = case(model, (1, 6, 6))
    inputs = drawn_inputs((1, 6, 6), 3, -1.0, 2.0, made.x)
    assert float(inputs.min()) >= -1 and float(inputs.max()) <= 2 and float(inputs.std()) > 0.3
    torch.testing.assert_close(results(made.network, inputs)[made.network.operations[-1].name], model(inputs).detach())


@pytest.mark.long
def test_noise_grows_from_layer_to_layer_and_weights_by_variance_hold_some_of_it_back():
    model, errors = models.build("cnn6", input_shape=(3, 12, 12), classes=1, seed=0), {}
    settings: list[tuple[float, Solver]] = [(1e-8, "ls"), (1e-8, "gls"), (1e-8, "map"), (1e-6, "ls")]
    for noise, solver in settings:
        made = case(model, (3, 12, 12), noise=noise, label=0)
        errors[noise, solver] = mse(inverted_inputs(made.network, made.gradients, solver=solver)[0].x, made.x)
    # Far above the noise's own 1e-16, and useless where noise is a hundred times as large (orders of magnitude).
    assert 1e-10 < errors[1e-8, "ls"] < 1e-4 and errors[1e-6, "ls"] > 1e-3
    assert max(errors[1e-8, "gls"], errors[1e-8, "map"]) < errors[1e-8, "ls"] / 3
    made = case(built("biases and strides"), (1, 6, 6))
    exact = [inverted_inputs(made.network, made.gradients, solver=solver)[0].x for solver in ("ls", "map")]
    assert torch.equal(*exact)


def bases(structure, sizes: dict[str, int], spans: dict[str, tuple[str, ...]]) -> tuple[ReleasedPart, ...]:
    """One part of directions: random orthonormal bases of so many columns, each of the parameters named together."""
    starts, start = {}, 0
    for name, shape in zip(structure.names, structure.shapes, strict=True):
        starts[name] = (start, start + math.prod(shape))
        start += math.prod(shape)
    where = [(starts[names[0]][0], starts[names[-1]][1]) for names in spans.values()]
    made = [torch.linalg.qr(drawn(b - a, sizes[key], seed=a))[0] for key, (a, b) in zip(spans, where, strict=True)]
    total = sum(basis.shape[1] for basis in made)
    return (ReleasedPart(start=0, stop=total, kind="directions", spans=tuple(where), bases=tuple(made)),)


def test_coefficients_in_bases_of_single_layers_are_equations_and_mixed_ones_are_refused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 50), nn.Tanh(), nn.Linear(50, 4))
    plain = case(model, (1, 6, 6))
    single = {"hidden": ("1.weight", "1.bias"), "head": ("3.weight",), "shift": ("3.bias",)}
    # The head's bases are whole, and hide nothing; of 1850 coordinates of the layer before there are 10 or 30.
    for rank in (10, 30):
        parts = bases(plain.structure, {"hidden": rank, "head": 200, "shift": 4}, single)
        made = case(model, (1, 6, 6), parts=parts)
        assert mse(inverted_inputs(made.network, made.gradients)[0].x, made.x) < 1e-20
    narrow = nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.Tanh(), nn.Linear(20, 4))
    other = case(narrow, (1, 6, 6)).structure
    # 20 outputs and 10 or 20 coefficients, for 36 pixels.
    made = case(narrow, (1, 6, 6), parts=bases(other, {"hidden": 20, "head": 80, "shift": 4}, single))
    assert mse(inverted_inputs(made.network, made.gradients)[0].x, made.x) < 1e-15
    made = case(narrow, (1, 6, 6), parts=bases(other, {"hidden": 10, "head": 80, "shift": 4}, single))
    with pytest.raises(RankDeficient) as refused:
        inverted_inputs(made.network, made.gradients)
    assert (refused.value.layer, refused.value.deficit) == (1, 6)
    mixed = {"both": ("1.weight", "1.bias", "3.weight", "3.bias")}
    with pytest.raises(NotApplicable, match="must be one layer's own"):
        case(model, (1, 6, 6), parts=bases(plain.structure, {"both": 30}, mixed))
