"""The machinery of recursive inversion: maps and their normal matrices, least squares, heads, walks over networks."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from attacks.core import InconsistentObservation, NotApplicable, RankDeficient, ReleasedPart
from attacks.core.network import Operation
from attacks.core.recursion import least_squares
from attacks.core.recursion.activations import invert
from attacks.core.recursion.completion import components, spread
from attacks.core.recursion.convolution import Convolved, KernelGeometry, WeightGradient, pooled
from attacks.core.recursion.forward import derivatives, drawn_inputs, results
from attacks.core.recursion.gaps import filled, open_features
from attacks.core.recursion.head import LEAST, TURN, HeadGradient, candidates, margins
from attacks.core.recursion.invert import inverted, layers_of
from attacks.core.recursion.joint import SumOf
from attacks.core.recursion.least_squares import Equations, factored, solve
from attacks.core.recursion.maps import (
    Coefficients,
    Dense,
    Factors,
    IdentityMap,
    LinearMap,
    OuterProduct,
    Reshaped,
    Then,
)
from attacks.core.recursion.ranks import random_mask, rank_analysis
from attacks.core.recursion.shown import shown
from benchmarks import models

from .recursion_cases import case, described, mse

LEAKY = nn.LeakyReLU


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- maps

CONVOLUTIONS = {
    "padded": (nn.Conv2d(2, 3, 3, padding=1, bias=False), (2, 5, 6)),
    "strided": (nn.Conv2d(2, 3, (4, 3), stride=(2, 1), padding=(2, 0), bias=False), (2, 7, 5)),
    "dilated": (nn.Conv2d(2, 3, 3, padding=2, dilation=2, stride=2, bias=False), (2, 6, 6)),
    "groups": (nn.Conv2d(4, 6, (2, 3), groups=2, bias=False), (4, 4, 5)),
    "leaves pixels out": (nn.Conv2d(1, 2, 2, stride=3, bias=False), (1, 7, 7)),
}


def equations_of(name: str) -> tuple[nn.Conv2d, Convolved, WeightGradient, torch.Tensor]:
    """A convolution, its maps, and derivatives by its output."""
    layer, shape = CONVOLUTIONS[name]
    layer = layer.double()
    with torch.no_grad():
        layer.weight.copy_(drawn(*layer.weight.shape, seed=3))
        out = tuple(layer(torch.zeros(1, *shape, dtype=torch.float64)).shape[1:])
    settings = {k: getattr(layer, k) for k in ("kernel_size", "stride", "padding", "dilation", "groups")}
    geometry = KernelGeometry(settings, shape, out, torch.device("cpu"))
    k = drawn(*out, seed=4)
    seen = drawn(*layer.weight.shape, seed=5) > -0.3
    return (
        layer,
        Convolved(layer.weight.detach(), geometry),
        WeightGradient(k, geometry, tuple(layer.weight.shape), seen),
        k,
    )


def assert_consistent(one: LinearMap) -> None:
    """Adjoint and normal matrices agree with what the map does, column by column."""
    x, y = drawn(2, *one.shape_in, seed=6), drawn(2, *one.shape_out, seed=7)
    assert one.apply(x).shape == y.shape and one.adjoint(y).shape == x.shape
    inner = (one.apply(x) * y).flatten(1).sum(dim=1)
    torch.testing.assert_close(inner, (one.adjoint(y) * x).flatten(1).sum(dim=1))
    columns, weights = LinearMap.columns(one), drawn(*one.shape_out, seed=8).abs()
    torch.testing.assert_close(one.gram(), columns @ columns.T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(one.gram(weights), (columns * weights.flatten()) @ columns.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_normal_matrices_of_a_convolution_are_those_of_its_equations(name):
    layer, output, gradient, k = equations_of(name)
    assert_consistent(output)
    assert_consistent(gradient)
    assert_consistent(WeightGradient(k, output.geometry, gradient.shape_out, None))
    x = drawn(1, *output.shape_in, seed=9)
    z = layer(x)
    torch.testing.assert_close(output.apply(x), z.detach())
    (expected,) = torch.autograd.grad((z[0] * k).sum(), layer.weight)
    torch.testing.assert_close(gradient.apply(x)[0], expected * (gradient.seen if gradient.seen is not None else 1))


def test_normal_matrices_of_other_maps_are_those_of_their_equations():
    like = torch.zeros((), dtype=torch.float64)
    dense = Dense(drawn(5, 12), (3, 2, 2))
    pool = pooled({"kernel_size": (2, 2), "stride": (2, 2), "padding": (0, 0)}, (3, 4, 4), (3, 2, 2), like)
    outer = OuterProduct(drawn(4), 6, drawn(4, 6, seed=1) > 0)
    assert pool.lossy and Then(pool, dense).lossy and not dense.lossy
    for one in (
        dense,
        pool,
        outer,
        OuterProduct(drawn(4), 6, None),
        IdentityMap((2, 3), like),
        Factors(drawn(3, 1, 1), (3, 2, 2)),
        Reshaped(outer, (2, 3)),
        Then(pool, dense),
        Coefficients(OuterProduct(drawn(4), 6, None), drawn(24, 5)),
        # Of the first twelve unknowns twice, and of the last five.
        SumOf([(0, dense), (14, Dense(drawn(5, 5, seed=2), (5,))), (0, Dense(drawn(5, 12, seed=3), (12,)))], 19),
    ):
        assert_consistent(one)


def test_gradient_and_output_of_a_convolution_repeat_each_other_once_for_every_pair_of_filters():
    """sum W[f', c, a] (K x)[f, c, a] = sum over positions of k[f] (W x)[f']: the rows are never all independent."""
    for name in ("padded", "strided", "dilated", "leaves pixels out"):
        _, output, gradient, k = equations_of(name)
        whole = WeightGradient(k, output.geometry, gradient.shape_out, None)
        x = drawn(1, *output.shape_in, seed=10)
        left = torch.einsum("gcab,fcab->fg", output.weight, whole.apply(x)[0])
        right = torch.einsum("fhw,ghw->fg", k, output.apply(x)[0])
        assert float((left - right).abs().max()) < 1e-12 * max(1.0, float(left.abs().max()))


def test_deleting_padded_pixels_is_the_system_with_an_equation_for_each_of_them():
    layer, output, gradient, k = equations_of("strided")
    whole = WeightGradient(k, output.geometry, gradient.shape_out, None)
    x = drawn(*output.shape_in, seed=11)
    equations = [Equations(map=one, target=one.apply(x[None])[0]) for one in (whole, output)]
    found = solve(equations)
    # The same layer without padding on the padded input: more unknowns, and a row for each padded pixel.
    pad = (0, 0, 2, 2)
    wide = functional.pad(x, pad)
    settings = {"kernel_size": layer.kernel_size, "stride": layer.stride, "padding": (0, 0)}
    geometry = KernelGeometry(settings, tuple(wide.shape), output.shape_out, torch.device("cpu"))
    inside = functional.pad(torch.ones_like(x), pad).flatten() > 0
    rows = [
        WeightGradient(k, geometry, gradient.shape_out, None).columns().T,
        Convolved(output.weight, geometry).columns().T,
        torch.eye(wide.numel(), dtype=torch.float64)[~inside],
    ]
    targets = [*(one.target.flatten() for one in equations), torch.zeros(int((~inside).sum()), dtype=torch.float64)]
    augmented = torch.linalg.lstsq(torch.cat(rows), torch.cat(targets)[:, None], driver="gelsd").solution[:, 0]
    assert found.deficit == 0
    torch.testing.assert_close(found.x.flatten(), augmented[inside], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.x, x, rtol=1e-10, atol=1e-10)


# --- least squares


def test_many_unknowns_are_solved_by_iteration_to_the_same_solution(monkeypatch):
    for name in ("padded", "strided"):
        _, output, gradient, k = equations_of(name)
        x = drawn(*output.shape_in, seed=12)
        whole = WeightGradient(1e-4 * k, output.geometry, gradient.shape_out, None)
        weights = torch.ones(output.shape_out, dtype=torch.float64)
        weights[0, 0, 0] = 0.0
        equations = [
            Equations(map=whole, target=whole.apply(x[None])[0]),
            Equations(map=output, target=output.apply(x[None])[0], weights=weights),
        ]
        monkeypatch.setattr(least_squares, "LARGEST_GRAM", 6000)
        exact = solve(equations)
        monkeypatch.setattr(least_squares, "LARGEST_GRAM", 10)
        found = solve(equations)
        assert found.converged and found.deficit == -1
        assert float((found.x - exact.x).abs().max()) < 1e-8
        assert mse(exact.x, x) < 1e-25


def test_rank_is_that_of_the_spectrum_and_the_shortest_solution_is_found():
    tall = drawn(30, 4) @ drawn(4, 9, seed=1)
    made = factored(tall.T @ tall)
    assert (made.rank, made.factor) == (4, None)
    x = drawn(9, seed=2)
    found = solve([Equations(map=Dense(tall, (9,)), target=tall @ x)])
    assert found.deficit == 5
    torch.testing.assert_close(found.x, torch.linalg.pinv(tall) @ tall @ x, rtol=1e-7, atol=1e-9)


def test_posterior_variance_is_that_of_weighted_least_squares():
    matrix, std = drawn(8, 3), torch.linspace(0.1, 0.4, 8, dtype=torch.float64)
    equations = [Equations(map=Dense(matrix, (3,)), target=drawn(8, seed=1), weights=std**-2)]
    expected = torch.linalg.inv(matrix.T @ torch.diag(std**-2) @ matrix)
    found = solve(equations, weighted=True)
    assert found.variance == pytest.approx(float(expected.diagonal().mean()))
    torch.testing.assert_close(found.x, expected @ (matrix.T @ (drawn(8, seed=1) * std**-2)))


# --- heads


@pytest.mark.parametrize("mu", [-30.0, -1.0, -1e-6, 0.3, 1.0, 1.27, 1.4, 5.0, 40.0])
def test_the_margin_of_one_logit_is_among_the_roots(mu):
    h = -mu / (1 + math.exp(mu))
    found = margins(h)
    assert len(found) == (1 if h > 0 else 2)
    # Near the turn the function is flat, and a root has half the digits.
    near = 1e-13 if abs(mu - TURN) > 0.1 else 1e-9
    assert min(abs(one - mu) for one in found) < near * abs(mu)
    assert pytest.approx(-0.2784645, abs=1e-7) == LEAST and pytest.approx(1.2784645, abs=1e-7) == TURN


def test_a_scalar_below_the_least_is_of_no_example():
    assert len(margins(-0.2)) == 2 and len(margins(0.2)) == 1 and margins(0.0) == [0.0]
    with pytest.raises(
        InconsistentObservation, match=re.escape("must be at least -0.278465 for one example, got -0.3")
    ):
        margins(-0.3)


def head_case(
    classes: int, *, bias: bool, factor: float, seed: int, shown: bool = True
) -> tuple[HeadGradient, torch.Tensor, int]:
    """A random head, its gradient, its input and label."""
    coins = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, 30, generator=coins, dtype=torch.float64) / 30**0.5
    shift = torch.randn(classes, generator=coins, dtype=torch.float64) * bias
    x = torch.randn(30, generator=coins, dtype=torch.float64)
    label = int(torch.randint(classes, (1,), generator=coins))
    k = (weight @ x + shift).softmax(dim=0)
    k[label] -= 1
    gradient = factor * k[:, None] * x
    shared = factor * k if bias and shown else None
    return HeadGradient(weight=weight, bias=shift, gradient=gradient, bias_gradient=shared, has_bias=bias), x, label


@pytest.mark.parametrize("classes", [3, 10])
@pytest.mark.parametrize(("bias", "shown"), [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("factor", [1.0, 0.9995, 0.2])
def test_a_softmax_head_gives_its_input_its_label_and_the_clip_factor(classes, bias, shown, factor):
    for seed in range(20):
        head, x, label = head_case(classes, bias=bias, factor=factor, seed=seed, shown=shown)
        (found,) = candidates(head, loss="cross_entropy", clipped=None)
        assert found.label == label
        # The scale rests on a difference of logits of two classes, which may be small for three classes.
        assert float((found.x - x).norm() / x.norm()) < (1e-12 if factor == 1 else 1e-9)
        assert found.factor == pytest.approx(factor, rel=1e-9)


def test_two_classes_are_one_logit_with_its_two_roots_and_signs():
    twins = 0
    for seed in range(20):
        head, x, label = head_case(2, bias=False, factor=1.0, seed=seed)
        found = candidates(head, loss="cross_entropy", clipped=None)
        assert len(found) in (2, 4)
        twins += len(found) == 4
        assert min(float((one.x - x).norm() / x.norm()) for one in found if one.label == label) < 1e-7
    assert 0 < twins < 20
    with pytest.raises(NotApplicable, match="not identifiable"):
        candidates(head_case(2, bias=False, factor=1.0, seed=0)[0], loss="cross_entropy", clipped=True)


def test_a_factor_above_one_is_of_no_clipping():
    head, _, _ = head_case(5, bias=False, factor=1.5, seed=1)
    with pytest.raises(InconsistentObservation, match=re.escape("it is 1.5 times as long")):
        candidates(head, loss="cross_entropy", clipped=None)
    shorter, _, _ = head_case(5, bias=True, factor=0.5, seed=1)
    with pytest.raises(InconsistentObservation, match=re.escape("it is 0.5 times as long")):
        candidates(shorter, loss="cross_entropy", clipped=False)


def test_a_gradient_of_two_examples_is_no_head_of_one():
    (one, _, _), (other, _, _) = (head_case(5, bias=False, factor=1.0, seed=seed) for seed in (1, 2))
    both = HeadGradient(
        weight=one.weight, bias=one.bias, gradient=one.gradient + other.gradient, bias_gradient=None, has_bias=False
    )
    with pytest.raises(InconsistentObservation, match="must be that of one example"):
        candidates(both, loss="cross_entropy", clipped=None)
    nothing = HeadGradient(
        weight=one.weight, bias=one.bias, gradient=0 * one.gradient, bias_gradient=None, has_bias=False
    )
    with pytest.raises(InconsistentObservation, match="must not vanish"):
        candidates(nothing, loss="cross_entropy", clipped=None)


def test_gaps_of_a_rank_one_matrix_are_filled_where_they_are_connected():
    matrix = drawn(4, 1) @ drawn(1, 40, seed=1)
    seen = torch.rand(4, 40, generator=torch.Generator().manual_seed(2)) < 0.4
    seen[:, 7] = False
    found = spread(matrix, seen, 2)
    assert bool(found.rows.all()) and torch.equal(found.columns, seen.any(dim=0))
    product = torch.outer(found.left, found.right)
    torch.testing.assert_close(product[:, found.columns], matrix[:, found.columns], rtol=1e-12, atol=1e-12)
    assert not product[:, ~found.columns].any()
    # Two blocks that share no entry: each by itself, and what is zero connects nothing.
    apart = torch.zeros(4, 40, dtype=torch.bool)
    apart[:2, :20] = apart[2:, 20:] = True
    apart[0, 25] = True
    matrix[:, 25] = 0.0
    assert [int(one.rows.sum()) for one in components(matrix, apart)] == [2, 2]


def test_features_that_stay_open_are_as_many_as_the_equations_of_a_last_layer_lack():
    """A column of no entry is one unknown; C - 1 logits are equations of these, of a constant and of the scale."""
    seen = torch.ones(6, 12, dtype=torch.bool)
    for lost, bias, left in ((3, False, 0), (4, False, 4), (4, True, 0), (5, True, 5)):
        seen[:, :lost] = False
        shown = torch.full((6,), bias)
        assert open_features(seen, shown) == left
        torch.manual_seed(lost)
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 6, bias=bias))
        keep = torch.cat([seen.flatten(), shown[: 6 * bias]])
        made = case(model, (1, 3, 4), keep=keep)
        head = layers_of(made.network)[-1]
        found = filled(made.network, head, made.gradients, exact=True)
        assert int(found.open.sum()) == left
        if not left:
            whole = case(model, (1, 3, 4)).gradients[head.name].weight
            torch.testing.assert_close(found.gradient, whole, rtol=1e-9, atol=1e-12)
    # A class of no entry: one follows because all add up to 0, two by the logits of the others alone.
    seen[:, :5] = True
    seen[:2] = False
    assert open_features(seen, torch.zeros(6, dtype=torch.bool)) == 0
    assert open_features(seen[:4], torch.zeros(4, dtype=torch.bool)) == 12


@pytest.mark.parametrize("offset", [0.0, -3.0, 0.7, 5.0])
def test_margins_beside_a_bias_are_the_roots_of_the_scalar(offset):
    for h in (2.0, 0.0, -0.01, -0.2):
        try:
            roots = margins(h, offset)
        except InconsistentObservation:
            grid = torch.linspace(-50, 200, 200_001, dtype=torch.float64)
            assert float((-grid * torch.sigmoid(-grid - offset)).min()) > h
            continue
        assert len(roots) == (2 if h < 0 else 1)
        for mu in roots:
            assert -mu / (1 + math.exp(mu + offset)) == pytest.approx(h, abs=1e-12)


# --- activations


@pytest.mark.parametrize("kind", ["leaky_relu", "relu", "tanh", "sigmoid"])
def test_activations_are_inverted_with_their_slopes(kind):
    before = drawn(50).requires_grad_()
    operation = Operation(name="a", kind=kind, inputs=("x",), shape=(50,), settings={"slope": 0.1})
    after = functional.leaky_relu(before, 0.1) if kind == "leaky_relu" else getattr(torch, kind)(before)
    found = invert(operation, after.detach())
    where = torch.ones(50, dtype=torch.bool) if found.known is None else found.known
    torch.testing.assert_close(found.before[where], before.detach()[where], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.slope, torch.autograd.grad(after.sum(), before)[0], rtol=1e-12, atol=1e-12)
    assert int(where.sum()) == (50 if kind != "relu" else int((before > 0).sum()))


def test_results_out_of_range_are_clamped_and_counted():
    operation = Operation(name="a", kind="tanh", inputs=("x",), shape=(3,))
    found = invert(operation, torch.tensor([0.5, 1.5, -1.0], dtype=torch.float64))
    assert found.clamped == 2 and bool(found.before.isfinite().all())


# --- walks


class Skip(nn.Module):
    """A block whose activation follows the sum, with an identity or a projection beside it."""

    def __init__(
        self,
        activation: type[nn.Module],
        *,
        projection: bool,
        norm: bool,
        before: bool = False,
        channels: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__()
        # Of the block's input, between its layers, and of its result; the last one's padding where they are given.
        low, middle, width = channels or (4, 6, 12 if projection else 4)
        padding = 1 if channels or not projection else 0
        self.first, self.one, self.two = (
            nn.Conv2d(1, low, 3, padding=1),
            nn.Conv2d(low, middle, 3, padding=1),
            nn.Conv2d(middle, width, 3, padding=padding),
        )
        self.pad = nn.Conv2d(low, width, 3, padding=padding) if projection else nn.Identity()
        self.norm = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.act, self.mid, self.last = activation(), activation(), activation()
        self.before, self.out = before, nn.Linear(width * (36 if padding else 16), 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.first(x))
        inner = self.norm(self.two(self.mid(self.one(x))))
        x = self.last(inner) + self.pad(x) if self.before else self.last(inner + self.pad(x))
        return self.out(torch.flatten(x, 1))


class Parallel(nn.Module):
    """Two convolutions of one input, added; each alone leaves it open."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.act = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1), nn.Tanh()
        self.out = nn.Linear(72, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.flatten(self.act(self.one(x) + self.two(x)), 1))


def conv(*layers: nn.Module, features: int, classes: int = 4, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, classes, bias=bias))


NETWORKS = {
    "ten classes, three convolutions": lambda: conv(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        LEAKY(0.2),
        nn.Conv2d(8, 12, 3, padding=1, bias=False),
        LEAKY(0.2),
        nn.Conv2d(12, 16, 3, padding=1, bias=False),
        LEAKY(0.2),
        features=16 * 36,
        classes=10,
        bias=False,
    ),
    "biases and strides": lambda: conv(
        nn.Conv2d(1, 8, 3, padding=1), LEAKY(0.2), nn.Conv2d(8, 12, 3, stride=2, padding=1), LEAKY(0.2), features=108
    ),
    "tanh": lambda: conv(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 40, 3, stride=2, padding=1), nn.Tanh(), features=360
    ),
    "sigmoid": lambda: conv(nn.Conv2d(1, 8, 3, padding=1), nn.Sigmoid(), features=8 * 36),
    "dilation and groups": lambda: conv(
        nn.Conv2d(1, 8, 3, padding=2, dilation=2),
        LEAKY(0.2),
        nn.Conv2d(8, 32, 3, padding=1, groups=2),
        features=32 * 36,
    ),
    "relu, convolutions": lambda: conv(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), features=32 * 36
    ),
    "relu, linear": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 60), nn.ReLU(), nn.Identity(), nn.Linear(60, 30), nn.ReLU(), nn.Linear(30, 4)
    ),
    "average pooling before the activation": lambda: conv(
        nn.Conv2d(1, 16, 3, padding=1), nn.AvgPool2d(2), LEAKY(0.2), features=16 * 9
    ),
    "batch norm": lambda: conv(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), LEAKY(0.2), features=16 * 36),
    "no activation": lambda: conv(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3), features=8 * 16),
    "identity skip": lambda: Skip(nn.Tanh, projection=False, norm=False),
    "identity skip, leaky ReLU, batch norm": lambda: Skip(LEAKY, projection=False, norm=True),
    "projection skip": lambda: Skip(nn.Tanh, projection=True, norm=False),
    "projection skip, batch norm": lambda: Skip(LEAKY, projection=True, norm=True),
    "branches of a sum together": lambda: Skip(LEAKY, projection=True, norm=False, channels=(1, 2, 2)),
    "branches of a sum together, batch norm": lambda: Skip(nn.Tanh, projection=True, norm=True, channels=(2, 6, 3)),
}


def built(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = NETWORKS[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.running_mean, module.running_var, module.weight, module.bias):
                assert values is not None
                nn.init.uniform_(values, 0.5, 1.5)
    return model


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_inverted_from_one_gradient(name):
    made = case(built(name), (1, 6, 6))
    found = inverted(made.network, made.gradients)[0]
    assert mse(found.x, made.x) < 1e-20 and found.label == made.label and not found.degraded
    # float32 constants, as a slope of 0.2, would leave 1e-9 here.
    assert found.residual < 1e-10


@pytest.mark.parametrize(
    ("channels", "projection", "alone", "together"),
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
            inverted(made.network, made.gradients)
        assert (refused.value.layer, refused.value.deficit) == (3, together)
    else:
        assert mse(inverted(made.network, made.gradients)[0].x, made.x) < 1e-20


def test_two_layers_of_one_input_are_solved_with_their_sum():
    torch.manual_seed(0)
    made = case(Parallel(), (2, 6, 6))
    reports = rank_analysis(made.network)
    # 36 equations of either gradient and 72 of the sum; F^2 = 4 of each gradient are the sum's.
    assert [one.rank_gradients for one in reports[:2]] == [36, 36] and [one.deficit for one in reports[:2]] == [0, 0]
    assert mse(inverted(made.network, made.gradients)[0].x, made.x) < 1e-20


@pytest.mark.parametrize("solver", ["ls", "gls", "map"])
def test_branches_together_under_a_mask_and_under_noise(solver):
    model = built("branches of a sum together, batch norm")
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    coins = torch.Generator().manual_seed(1)
    # The last layer is whole: of that the recursion begins.
    keep = torch.cat([torch.rand(n, generator=coins) < (1 if "out" in name else 0.95) for name, n in sizes.items()])
    assert not bool(keep.all())
    for noise, most in ((0.0, 1e-20), (1e-8, 1e-9)):
        made = case(model, (1, 6, 6), keep=keep, noise=noise)
        assert mse(inverted(made.network, made.gradients, solver=solver)[0].x, made.x) < most


@pytest.mark.parametrize("name", ["biases and strides", "ten classes, three convolutions", "projection skip"])
def test_an_unknown_clip_factor_is_found(name):
    made = case(built(name), (1, 6, 6), factor=0.01)
    found = inverted(made.network, made.gradients)[0]
    assert found.factor == pytest.approx(0.01, rel=1e-9) and mse(found.x, made.x) < 1e-15
    with pytest.raises(InconsistentObservation, match="times as long"):
        inverted(made.network, made.gradients, clipped=False)


@pytest.mark.parametrize(
    ("model", "sentence"),
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
        inverted(made.network, made.gradients)


def test_a_layer_that_leaves_its_input_open_is_refused_with_its_number_and_deficit():
    torch.manual_seed(0)
    model = conv(nn.Conv2d(1, 16, 3, padding=1), LEAKY(0.2), nn.AvgPool2d(2), features=16 * 9)
    made = case(model, (1, 6, 6))
    with pytest.raises(RankDeficient) as refused:
        inverted(made.network, made.gradients)
    assert (refused.value.layer, refused.value.deficit) == (2, 16 * 27)
    found = inverted(made.network, made.gradients, allow_min_norm=True, combination=True)[0]
    assert "432 dimensions are open" in found.degraded[0] and mse(found.x, made.x) > 1e-6


def test_the_wrong_mask_is_noticed():
    model = built("ten classes, three convolutions")
    coins = torch.Generator().manual_seed(3)
    dim = sum(p.numel() for p in model.parameters())
    keep = torch.rand(dim, generator=coins) < 0.8
    made = case(model, (1, 6, 6), keep=keep)
    assert mse(inverted(made.network, made.gradients)[0].x, made.x) < 1e-18
    # Two of the kept coordinates are taken for two of the dropped ones.
    wrong = keep[torch.randperm(dim, generator=coins)]
    wrong = (torch.cumsum(wrong, 0) <= int(keep.sum())) & wrong
    short = int(keep.sum() - wrong.sum())
    wrong[(~wrong).nonzero()[:short, 0]] = True
    part = ReleasedPart(start=0, stop=int(wrong.sum()), kind="coordinates", coordinates=wrong.nonzero()[:, 0])
    misread = case_of(made, part)
    with pytest.raises((InconsistentObservation, RankDeficient)):
        inverted(made.network, misread)


def case_of(made, part):
    """The same numbers under another mask."""
    other = replace(made.structure, parts=(part,))
    return shown(other, made.released, torch.zeros_like(made.released), layers_of(made.network))


def test_random_inputs_and_the_described_forward_pass_are_those_of_the_model():
    model = built("batch norm").double().eval()
    made = case(model, (1, 6, 6))
    inputs = drawn_inputs((1, 6, 6), 3, -1.0, 2.0, made.x)
    assert float(inputs.min()) >= -1 and float(inputs.max()) <= 2 and float(inputs.std()) > 0.3
    torch.testing.assert_close(results(made.network, inputs)[made.network.operations[-1].name], model(inputs).detach())


# --- ranks


def test_ranks_are_those_of_the_stacked_matrices_with_and_without_a_mask():
    model = built("biases and strides")
    network = case(model, (1, 6, 6)).network
    for seen in (None, random_mask(network, 0.6, seed=1)):
        reports = rank_analysis(network, seen, seed=3)
        assert [one.layer for one in reports] == [1, 2, 3]
        coins = torch.Generator().manual_seed(3)
        inputs = torch.randn(1, 1, 6, 6, generator=coins, dtype=torch.float64)
        slopes = derivatives(network, inputs, label=0)
        for report, one in zip(reports[:2], layers_of(network), strict=False):
            below = {each.name: each.shape for each in network.operations}[one.inputs[0]]
            geometry = KernelGeometry(one.settings, below, one.shape, torch.device("cpu"))
            shown = None if seen is None else seen[str(one.weight)]
            weight = network.parameters[str(one.weight)].double()
            gradient = WeightGradient(slopes[one.name], geometry, tuple(weight.shape), shown).columns().T
            output = Convolved(weight, geometry).columns().T
            stacked = torch.cat([gradient / gradient.norm(), output / output.norm()])
            expected = [int(torch.linalg.matrix_rank(each, rtol=1e-6)) for each in (output, gradient, stacked)]
            assert [report.rank_outputs, report.rank_gradients, report.rank] == expected
            assert report.deficit == report.unknowns - report.rank
            assert report.gradients == (gradient.abs().sum(dim=1) > 0).sum() if shown is None else int(shown.sum())
        assert reports[1].index == reports[1].deficit - reports[0].virtual
        assert reports[2].deficit == (0 if seen is None else int((~seen["5.weight"]).all(dim=0).sum()))


def test_counted_rows_decide_nothing():
    """A narrow layer has more equations than unknowns, and a deficit; the recursion raises just that."""
    torch.manual_seed(0)
    model = conv(nn.Conv2d(1, 12, 3, padding=1), LEAKY(0.2), nn.Conv2d(12, 5, 3, stride=2, padding=1), features=45)
    made = case(model, (1, 6, 6))
    report = rank_analysis(made.network)[1]
    assert report.outputs + report.gradients > report.unknowns > report.rank
    # Their dependence is that of every pair of filters, and more.
    assert report.rank <= report.rank_outputs + report.rank_gradients - 25
    with pytest.raises(RankDeficient) as refused:
        inverted(made.network, made.gradients)
    assert (refused.value.layer, refused.value.deficit) == (2, report.deficit)


def test_ranks_of_a_layer_before_a_sum_or_a_relu_count_what_is_known_of_its_output():
    reports = rank_analysis(case(built("identity skip"), (1, 6, 6)).network)
    assert [one.outputs for one in reports] == [144, 216, 0, 4]
    found = rank_analysis(case(built("relu, convolutions"), (1, 6, 6)).network)
    assert 0 < found[0].outputs < 576
    pooled_one = rank_analysis(case(built("average pooling before the activation"), (1, 6, 6)).network)[0]
    assert (pooled_one.outputs, pooled_one.rank) == (144, 36)
    with pytest.raises(ValueError, match="sparsity must be in"):
        random_mask(case(built("tanh"), (1, 6, 6)).network, 1.0)


GOLDEN = {
    "cnn6": [(3072, 3468, 576), (3468, 2916, 3888), (2916, 2916, 11664), (2916, 2916, 11664), (2916, 1600, 20736)],
    "cnn6_d": [(3072, 3468, 576), (3468, 1620, 2160), (1620, 2916, 6480), (2916, 2916, 11664), (2916, 1600, 20736)],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_ranks_of_the_papers_networks(name):
    model = models.build(name, input_shape=(3, 32, 32), classes=1, seed=0)
    reports = rank_analysis(described(model, (3, 32, 32), 1).known_network())
    assert [(one.unknowns, one.outputs, one.gradients) for one in reports[:5]] == GOLDEN[name]
    assert [one.deficit for one in reports] == [0, 280 if name == "cnn6_d" else 0, 0, 0, 0, 0, 0]
    assert (reports[0].virtual, reports[1].index) == (396, -396 if name == "cnn6" else -116)
    assert reports[0].rank_outputs == 3072
    if name == "cnn6_d":
        assert (reports[1].rank, reports[1].rank_outputs, reports[1].rank_gradients) == (3188, 1620, 1968)


# --- noise and bases


def test_noise_grows_from_layer_to_layer_and_weights_by_variance_hold_some_of_it_back():
    model, errors = models.build("cnn6", input_shape=(3, 16, 16), classes=1, seed=0), {}
    for noise in (1e-8, 1e-6):
        made = case(model, (3, 16, 16), noise=noise, label=0)
        for solver in ("ls", "gls", "map"):
            errors[noise, solver] = mse(inverted(made.network, made.gradients, solver=solver)[0].x, made.x)
    # Far above the noise's own 1e-16, and useless where noise is a hundred times as large (orders of magnitude).
    assert 1e-10 < errors[1e-8, "ls"] < 1e-4 and errors[1e-6, "ls"] > 1e-3
    assert max(errors[1e-8, "gls"], errors[1e-8, "map"]) < errors[1e-8, "ls"] / 3
    made = case(model, (3, 16, 16), label=0)
    exact = [inverted(made.network, made.gradients, solver=solver)[0].x for solver in ("ls", "map")]
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
        assert mse(inverted(made.network, made.gradients)[0].x, made.x) < 1e-20
    narrow = nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.Tanh(), nn.Linear(20, 4))
    other = case(narrow, (1, 6, 6)).structure
    # 20 outputs and 10 or 20 coefficients, for 36 pixels.
    made = case(narrow, (1, 6, 6), parts=bases(other, {"hidden": 20, "head": 80, "shift": 4}, single))
    assert mse(inverted(made.network, made.gradients)[0].x, made.x) < 1e-15
    made = case(narrow, (1, 6, 6), parts=bases(other, {"hidden": 10, "head": 80, "shift": 4}, single))
    with pytest.raises(RankDeficient) as refused:
        inverted(made.network, made.gradients)
    assert (refused.value.layer, refused.value.deficit) == (1, 6)
    mixed = {"both": ("1.weight", "1.bias", "3.weight", "3.bias")}
    with pytest.raises(NotApplicable, match="must be one layer's own"):
        case(model, (1, 6, 6), parts=bases(plain.structure, {"both": 30}, mixed))
