"""Bases of public gradients that are not formed, or that coefficients follow from factors of: the same numbers."""

import math
import pickle
from itertools import pairwise

import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from defenses.core import Block, Complement, Context, Engine, Gradient, Layout, StepPlan, clip, seeded
from defenses.core.plan.basis import gram, leading_directions, leading_shares, orthonormality_error
from defenses.core.plan.implicit import FactoredBasis, ImplicitSubspace, RowDirections
from defenses.core.plan.products import compiled_for, inner_with
from defenses.core.plan.subspaces import PublicSubspace, group_directions
from defenses.gep import gep
from defenses.pcdp import pcdp
from defenses.pdp import pdp

from ... import duties

PUBLIC_ROWS = torch.randn(12, 900, generator=torch.Generator().manual_seed(1))
WIDE = compiled_for(PUBLIC_ROWS, PUBLIC_ROWS)
by_kernel = pytest.mark.skipif(not WIDE, reason="rows are combined where the processor has AVX-512")


def coins(seed=0):
    return torch.Generator().manual_seed(seed)


def close(found, expected, rtol=1e-4, atol=1e-4):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def cosine(one, other):
    return math.cos(scipy.linalg.subspace_angles(one.double().numpy(), other.double().numpy()).max())


# --- combinations of rows -------------------------------------------------------------------------------------------


def combined(rows=PUBLIC_ROWS, rank=9):
    return RowDirections.leading(rows, rank, gram(rows, torch.float64))


def found_of(rows=PUBLIC_ROWS, rank=9) -> RowDirections:
    found = combined(rows, rank)
    assert found is not None
    return found


@by_kernel
@pytest.mark.parametrize("rank", [1, 9, 12, 40])
def test_they_span_what_leading_directions_span(rank):
    found, formed = found_of(rank=rank), leading_directions(PUBLIC_ROWS, rank)
    assert found.rank == formed.shape[1] == min(rank, 12)
    assert orthonormality_error(found.basis) < 1e-5
    assert cosine(found.basis, formed) > 1 - 1e-6
    largest = found.weights.gather(0, found.weights.abs().argmax(dim=0, keepdim=True))
    assert bool((largest > 0).all())


@by_kernel
@pytest.mark.parametrize("count", [0, 1, 30])
def test_coefficients_combinations_and_projections_are_those_of_the_basis(count):
    found, rows = found_of(), torch.randn(count, 900, generator=coins(2))
    basis = found.basis
    close(found.of_rows(rows), rows @ basis, atol=1e-5)
    c = torch.randn(count, 9, generator=coins(3))
    close(found.combined(c), c @ basis.T, atol=1e-5)
    close(found.of_inner(rows @ PUBLIC_ROWS.T), rows @ basis, atol=1e-5)
    subspace = ImplicitSubspace((found,), ((3, 903),), 910)
    wide = torch.randn(count, 910, generator=coins(4))
    close(subspace.encode(wide), wide[:, 3:903] @ basis, atol=1e-5)
    close(subspace.project(wide)[:, 3:903], wide[:, 3:903] @ basis @ basis.T, atol=1e-5)
    if count:
        close(subspace.decode(c[0])[3:903], basis @ c[0], atol=1e-5)


@by_kernel
def test_a_row_has_the_same_coefficients_whoever_is_beside_it():
    found, rows = found_of(), torch.randn(40, 900, generator=coins(5))
    whole = found.of_rows(rows)
    for number in (0, 7, 39):
        assert torch.equal(found.of_rows(rows[number : number + 1])[0], whole[number])


@by_kernel
def test_coefficients_can_be_differentiated():
    found = found_of()
    rows = torch.randn(2, 900, generator=coins(6), requires_grad=True)
    (gradient,) = torch.autograd.grad(found.of_rows(rows)[0, 0], rows)
    close(gradient[0], found.basis[:, 0], atol=1e-5)
    assert float(gradient[1].abs().max()) == 0


@by_kernel
@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p * 0,
        lambda p: p * torch.nan,
        lambda p: p * 1e6,
        lambda p: p * 1e-7,
        lambda p: p[:1] + 1e-4 * p,
    ],
    ids=["no gradient", "NaN", "huge", "tiny", "nearly parallel"],
)
def test_where_rounding_would_show_there_are_none(spoil):
    assert combined(spoil(PUBLIC_ROWS)) is None


@by_kernel
def test_parallel_gradients_have_one_direction():
    found = found_of(PUBLIC_ROWS[:1] * (1 + 1e-4 * torch.arange(12.0)[:, None]))
    assert found.rank == 1 and orthonormality_error(found.basis) < 1e-5


def test_few_numbers_are_left_to_a_formed_basis():
    assert combined(PUBLIC_ROWS[:2, :100], 2) is None


@by_kernel
def test_in_a_file_they_have_no_basis_and_do_the_same():
    found = found_of()
    assert found.basis.shape == (900, 9)
    again = pickle.loads(pickle.dumps(found))  # noqa: S301 -- our own bytes
    assert vars(again)["_formed"].empty
    rows = torch.randn(5, 900, generator=coins(7))
    assert torch.equal(again.of_rows(rows), found.of_rows(rows))


def pictures(count, seed):
    return torch.randn(count, 2, 12, 12, generator=coins(seed)), torch.arange(count) % 3


def convolutions():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 12, 5, stride=2, padding=2),
            nn.Tanh(),
            nn.Conv2d(12, 16, 3, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16 * 36, 3),
        )


WORLD = duties.World(convolutions, pictures(60, 20), pictures(90, 21), {"engine": "layerwise"})


def parts_of(run):
    return [part for step in run.transcript.steps for part in step.plan.blocks[0].codec.parts]


@by_kernel
@pytest.mark.parametrize("interval", [1, 3])
def test_convolutions_have_them_where_a_basis_serves_one_step_and_a_run_goes_on_bit_for_bit(interval, tmp_path):
    def defense():
        return pcdp(rank=16, interval=interval, noise_multiplier=1.0)

    whole = duties.trained(defense(), WORLD)
    kinds = {type(part) for part in parts_of(whole)}
    assert (RowDirections in kinds) == (interval == 1)
    duties.check_same_run(duties.interrupted(defense(), tmp_path / "c", WORLD, after=2), whole)


@by_kernel
@pytest.mark.parametrize("method", [pcdp, pdp])
def test_a_run_is_that_of_formed_bases(method, monkeypatch):
    combining = duties.parameters(duties.trained(method(rank=16, noise_multiplier=1.0), WORLD))
    monkeypatch.setattr(RowDirections, "leading", lambda *_: None)
    formed = duties.parameters(duties.trained(method(rank=16, noise_multiplier=1.0), WORLD))
    # Any basis of a span has the same sums; noise of coefficients differs by the basis, of whole updates it does not.
    if method is pdp:
        close(combining, formed, rtol=1e-3, atol=1e-4)
    assert not torch.equal(combining, formed)


@by_kernel
@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e6])
def test_removing_an_example_moves_the_sum_by_a_bound_and_the_others_by_nothing(size):
    model = convolutions()
    engine, reference = (Engine(model, noise=seeded(0), engine=name) for name in ("layerwise", "torch.func"))
    inputs, labels = pictures(40, 22)
    public = engine.batch(*pictures(16, 23))
    start, stop = engine.layout.slices[2]
    rows = public.columns(start, stop)
    directions = RowDirections.leading(rows, 16, gram(rows, torch.float64))
    assert directions is not None
    codec = ImplicitSubspace((directions,), ((start, stop),), engine.layout.dim)
    plan = StepPlan(Block(codec=codec, bound=clip(0.01), query=Gradient())).at(0.0)
    inputs = inputs * size
    whole = engine.run(plan, inputs, labels).total
    close(whole, reference.run(plan, inputs, labels).total, rtol=1e-3, atol=1e-5)
    for gone in (0, 13, 39):
        kept = [number for number in range(40) if number != gone]
        less = engine.run(plan, inputs[kept], labels[kept]).total
        assert float((whole - less).double().norm()) <= 0.01 * (1 + 1e-4)


# --- factors --------------------------------------------------------------------------------------------------------


def outer(signals, inputs):
    return torch.einsum("mo,mi->moi", signals.double(), inputs.double()).flatten(1)


@given(
    n=st.integers(1, 5),
    m=st.integers(1, 5),
    out=st.integers(1, 6),
    entering=st.integers(1, 7),
    edges=st.lists(st.integers(0, 42), min_size=2, max_size=6),
    seed=st.integers(0, 2**30),
)
def test_inner_products_of_pieces_follow_from_the_factors(n, m, out, entering, edges, seed):
    draw = coins(seed)
    signals, inputs = torch.randn(n, out, generator=draw), torch.randn(n, entering, generator=draw)
    others = torch.randn(m, out, generator=draw), torch.randn(m, entering, generator=draw)
    places = sorted(min(edge, out * entering) for edge in edges)
    pieces = [(a, b, *others) for a, b in pairwise(places)]
    for (a, b, *_), found in zip(pieces, inner_with(signals, inputs, pieces), strict=True):
        close(found, outer(signals, inputs)[:, a:b] @ outer(*others)[:, a:b].T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("rank", "passes"), [(4, 1), (4, 2), (12, 1), (30, 0)])
def test_shares_are_those_of_the_directions_that_are_found_from_rows(rank, passes):
    shares = leading_shares(gram(PUBLIC_ROWS, torch.float64), 900, rank, generator=coins(), passes=passes)
    if passes == 0:
        assert shares is not None and shares.shape == (12, 12)
        return
    expected = leading_directions(
        PUBLIC_ROWS, rank, method="randomized", generator=coins(), oversampling=0, passes=passes, ordered=False
    )
    assert shares is not None
    found = PUBLIC_ROWS.double().T @ shares
    assert float((found.T @ found - torch.eye(found.shape[1])).abs().max()) < 1e-7
    assert cosine(found, expected) > 1 - 1e-8


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e20, torch.nan, torch.inf])
def test_shares_of_rows_that_are_huge_tiny_or_not_finite_are_none(scale):
    moments = gram(PUBLIC_ROWS, torch.float64) * scale**2
    assert leading_shares(moments, 900, 4, generator=coins(), passes=1) is None
    many = torch.randn(100, 3000, generator=coins())
    assert leading_shares(gram(many, torch.float64), 3000, 4, generator=coins(), passes=1) is None


def linears():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3))


POINTS = (torch.randn(60, 60, generator=coins(30)), torch.arange(60) % 3)
OTHERS = (torch.randn(90, 60, generator=coins(31)), torch.arange(90) % 3)
LINEARS = duties.World(linears, POINTS, OTHERS, {"engine": "layerwise"})


def factored(groups, span_number, rank=9, engine=None):
    """The basis of one of some even groups of the linear network's parameters."""
    engine = engine or Engine(linears(), noise=seeded(0), engine="layerwise")
    batch, dim = engine.batch(OTHERS[0][:12], OTHERS[1][:12]), engine.layout.dim
    edges = [round(dim * i / groups) for i in range(groups + 1)]
    span = edges[span_number], edges[span_number + 1]
    rows = batch.columns(0, dim)
    made = group_directions(batch, engine.layout, span, lambda: rows, rank, generator=coins(), passes=1)
    return made, span, rows[:, span[0] : span[1]]


@pytest.mark.parametrize(("groups", "number"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_a_basis_with_factors_is_the_one_that_rows_have(groups, number):
    made, (start, stop), rows = factored(groups, number)
    assert isinstance(made, tuple)
    basis, shares, spans, *factors = made
    assert len(factors) == 2 * len(spans) > 0 and basis.shape == (stop - start, 9)
    close(basis.double(), rows.T.double() @ shares, rtol=1e-4, atol=1e-5)
    assert orthonormality_error(basis) < 1e-5
    expected = leading_directions(
        rows, 9, method="randomized", generator=coins(), oversampling=0, passes=1, ordered=False
    )
    assert cosine(basis, expected) > 1 - 1e-6


def test_without_factors_that_pay_directions_are_those_of_rows_bit_for_bit():
    engine = Engine(linears(), noise=seeded(0), engine="torch.func")
    made, _, rows = factored(2, 0, engine=engine)
    expected = leading_directions(
        rows, 9, method="randomized", generator=coins(), oversampling=0, passes=1, ordered=False
    )
    assert isinstance(made, torch.Tensor) and torch.equal(made, expected)


def basis_of(made) -> FactoredBasis:
    basis, shares, spans, *factors = made
    pairs = tuple(zip(factors[::2], factors[1::2], strict=True))
    return FactoredBasis(basis, shares, tuple((int(a), int(b)) for a, b in spans), pairs)


@pytest.mark.parametrize("written", ["basis", "weights", "signals", "inputs"])
def test_who_writes_into_a_basis_or_its_factors_has_the_factors_forgotten(written):
    found = basis_of(factored(2, 0)[0])
    span = found.spans[0]
    assert found.factors_of(span) is found.factors[0] and found.factors_of((span[0], span[1] + 1)) is None
    tensors = {"basis": found.basis, "weights": found.weights, "signals": found.factors[0][0]}
    tensors.get(written, found.factors[0][1]).mul_(1.5)
    assert found.factors_of(span) is None
    again = pickle.loads(pickle.dumps(found))  # noqa: S301 -- our own bytes
    assert again.factors == () and torch.equal(again.basis, found.basis)


@pytest.mark.parametrize("sizes", [1.0, 1e-12, 1e9])
@pytest.mark.parametrize("left_over", [False, True])
def test_coefficients_and_what_is_left_are_those_of_the_formed_basis(left_over, sizes):
    model = linears()
    engine, reference = (Engine(model, noise=seeded(0), engine=name) for name in ("layerwise", "torch.func"))
    made, span, _ = factored(2, 0, engine=engine)
    part, dim = basis_of(made), engine.layout.dim
    subspace = ImplicitSubspace((part,), (span,), dim)
    formed = ImplicitSubspace((part.basis,), (span,), dim)
    inputs, labels = POINTS[0] * sizes, POINTS[1]
    sums = []
    for codec, by in ((subspace, engine), (formed, engine), (subspace, reference)):
        block = Block(codec=Complement(codec) if left_over else codec, bound=clip(0.3), query=Gradient())
        sums.append(by.run(StepPlan(block).at(0.0), inputs, labels).total)
    close(sums[0], sums[1], rtol=1e-4, atol=1e-5)
    close(sums[0], sums[2], rtol=1e-4, atol=1e-5)


def test_rows_inside_the_span_leave_nothing_that_a_bound_makes_long():
    """Public examples among the private ones: what is left of them is rounding, which factors do not see."""
    model = linears()
    engine = Engine(model, noise=seeded(0), engine="layerwise")
    made, span, rows = factored(1, 0, rank=12, engine=engine)
    subspace = ImplicitSubspace((basis_of(made),), (span,), engine.layout.dim)
    plan = StepPlan(Block(codec=Complement(subspace), bound=clip(1.0), query=Gradient())).at(0.0)
    inputs, labels = OTHERS[0][:12], OTHERS[1][:12]
    whole = engine.run(plan, inputs, labels).total
    assert float(whole.norm()) < 12 * 0.01  # each a share of 2^-11 of its bound at most, and rounding
    for gone in (0, 5):
        kept = [number for number in range(12) if number != gone]
        assert float((whole - engine.run(plan, inputs[kept], labels[kept]).total).norm()) < 0.01
    assert rows.shape == (12, engine.layout.dim)


@pytest.mark.parametrize("settings", [{}, {"biased": True}, {"interval": 3}, {"groups": 1, "project_noise": False}])
def test_runs_of_gep_have_factors_and_go_on_bit_for_bit(settings, tmp_path):
    def defense():
        return gep(**{"rank": 18, "groups": 2, "noise_multiplier": 1.0} | settings)

    whole = duties.trained(defense(), LINEARS)
    assert {type(part) for part in parts_of(whole)} == {FactoredBasis}
    duties.check_same_run(duties.interrupted(defense(), tmp_path / "c", LINEARS, after=2), whole)
    rows = duties.trained(defense(), duties.World(linears, POINTS, OTHERS, {"engine": "torch.func"}))
    close(duties.parameters(rows), duties.parameters(whole), rtol=1e-2, atol=1e-2)


def test_a_public_gradient_that_is_not_finite_leaves_the_others():
    engine = Engine(linears(), noise=seeded(0), engine="layerwise")
    batch = engine.batch(torch.cat([OTHERS[0][:11], torch.full((1, 60), torch.nan)]), OTHERS[1][:12])
    dim = engine.layout.dim

    def rows():
        every = batch.columns(0, dim)
        return torch.where(every.isfinite().all(dim=1, keepdim=True), every, 0.0)

    made = group_directions(batch, engine.layout, (0, dim), rows, 6, generator=coins(), passes=1)
    assert isinstance(made, torch.Tensor) and orthonormality_error(made) < 1e-5


def test_public_subspaces_of_all_parameters_together_are_formed():
    engine = Engine(convolutions(), noise=seeded(0), engine="layerwise")
    layout = engine.layout
    assert isinstance(layout, Layout)

    class Public:
        size = 90

        def __call__(self, chosen):
            return engine.gradients(*pictures(len(chosen), 21))(None)

        def batch(self, chosen):
            return engine.batch(*pictures(len(chosen), 21))

    context = Context(step=0, steps=2, layout=layout, public=Public())
    bases, _, _ = PublicSubspace(rank=16, scope="global").at(None, context)
    assert isinstance(bases[0], torch.Tensor)
