"""Linear maps of layers, their normal matrices, and least squares on them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from leakbench.attacks.core.closed_form.recursion import linear_systems
from leakbench.attacks.core.closed_form.recursion.convolution import Convolved, KernelGeometry, WeightGradient, pooled
from leakbench.attacks.core.closed_form.recursion.joint import SumOf
from leakbench.attacks.core.closed_form.recursion.linear_systems import Equations, factored, solve
from leakbench.attacks.core.closed_form.recursion.maps import (
    Coefficients,
    Dense,
    Factors,
    IdentityMap,
    LinearMap,
    OuterProduct,
    Reshaped,
    Then,
)

from ..parameters import subtests
from .recursion_cases import drawn, mse

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


@subtests("name", CONVOLUTIONS)
def test_normal_matrices_of_a_convolution_are_those_of_its_equations(name):
    layer, output, gradient, k = equations_of(name)
    assert_consistent(output)
    assert_consistent(gradient)
    assert_consistent(WeightGradient(k, output.geometry, gradient.shape_out, None))
    x = drawn(1, *output.shape_in, seed=9)
    z = layer(x)
    torch.testing.assert_close(output.apply(x), z.detach())
    (expected,) = torch.autograd.grad((z[0] * k).sum(), layer.weight)
    torch.testing.assert_close(
        gradient.apply(x)[0], expected * (gradient.observed if gradient.observed is not None else 1)
    )


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
        monkeypatch.setattr(linear_systems, "LARGEST_GRAM", 6000)
        exact = solve(equations)
        monkeypatch.setattr(linear_systems, "LARGEST_GRAM", 10)
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
