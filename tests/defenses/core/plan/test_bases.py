"""Bases in the order that rows are made in, and bases with factors: what they compute is what a basis computes."""

import math
import pickle
from itertools import pairwise

import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from leakbench.defenses.core import Block, Complement, Engine, Gradient, StepPlan, Subspace, clip, seeded
from leakbench.defenses.core.gradients.layerwise.layers import kept_rows
from leakbench.defenses.core.plan.families.public_subspaces import group_directions
from leakbench.defenses.core.plan.implicit_subspace import FactoredBasis, ImplicitSubspace, OrderedBasis
from leakbench.defenses.core.plan.linear_algebra.basis import (
    gram,
    leading_directions,
    leading_shares,
    orthonormality_error,
)
from leakbench.defenses.core.plan.linear_algebra.products import inner_with
from leakbench.defenses.gep import gep
from leakbench.defenses.pcdp import pcdp
from leakbench.defenses.pdp import pdp

from ....parameters import subtests
from ... import duties

PUBLIC_ROWS = torch.randn(12, 900, generator=torch.Generator().manual_seed(1))


def coins(seed=0):
    return torch.Generator().manual_seed(seed)


def close(found, expected, rtol=1e-4, atol=1e-4):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def cosine(one, other):
    return math.cos(scipy.linalg.subspace_angles(one.double().numpy(), other.double().numpy()).max())


# --- bases in the order of rows -------------------------------------------------------------------------------------


def pictures(count, seed):
    return torch.randn(count, 2, 12, 12, generator=coins(seed)), torch.arange(count) % 3


def convolutions():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 12, 5, stride=2, padding=2, groups=2),
            nn.Tanh(),
            nn.Conv2d(12, 16, 3, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16 * 36, 3),
        )


def engine_of(name="layerwise"):
    return Engine(convolutions(), noise=seeded(0), engine=name)


def ordered(engine, number=2, count=16) -> tuple[OrderedBasis, tuple[int, int], torch.Tensor]:
    """A basis of a convolution's public gradients, its span, and those gradients in the weight's order."""
    span = engine.layout.slices[number]
    batch = engine.batch(*pictures(count, 23))
    made = batch.made(*span)
    assert made is not None and engine.batch(*pictures(2, 1)).made(span[0], span[1] + 1) is None
    rows, sizes = made
    return OrderedBasis(leading_directions(rows, count, ordered=False), sizes), span, batch.columns(*span)


@pytest.mark.parametrize("number", [0, 2])
def test_directions_in_the_rows_order_are_those_in_the_weights(number):
    found, (start, stop), rows = ordered(engine_of(), number)
    basis = found.basis
    assert basis.shape == (stop - start, found.rank) == (rows.shape[1], 16)
    assert orthonormality_error(basis) < 1e-5 and cosine(basis, leading_directions(rows, 16)) > 1 - 1e-6
    c = torch.randn(3, 16, generator=coins(3))
    close(found.combined(c), c @ basis.T, atol=1e-5)
    for count in (0, 1, 8, 30):
        some = torch.randn(count, stop - start, generator=coins(2))
        close(found.of_rows(some), some @ basis, atol=1e-5)


@pytest.mark.parametrize("count", [0, 1, 40])
def test_a_subspace_of_one_is_the_subspace_of_its_basis(count):
    found, span, _ = ordered(engine_of())
    dim = span[1] + 7
    subspace, formed = ImplicitSubspace((found,), (span,), dim), Subspace((found.basis.clone(),), (span,), dim)
    rows, weights = torch.randn(count, dim, generator=coins(4)), torch.rand(16, generator=coins(5))
    assert subspace.size == formed.size and subspace.ranks == formed.ranks
    close(subspace.encode(rows), formed.encode(rows), atol=1e-5)
    close(subspace.decode(weights), formed.decode(weights), atol=1e-5)
    for share in (None, weights):
        close(subspace.project(rows, share), formed.project(rows, share), atol=1e-5)
    close(subspace.moments()[0], formed.moments()[0], atol=1e-5)


def test_directions_of_another_length_than_their_span_are_refused():
    found, (start, stop), _ = ordered(engine_of())
    with pytest.raises(ValueError, match="sizes must be those of a row of"):
        ImplicitSubspace((found,), ((start, stop - 1),), stop)
    with pytest.raises(ValueError, match="sizes must be those of a row of"):
        ImplicitSubspace((OrderedBasis(found.numbers, (1, 1, 1, 12, 16)),), ((start, stop),), stop)
    with pytest.raises(ValueError, match="basis must have 900 rows for its span, got"):
        ImplicitSubspace((basis_of(factored(2, 0)[0]),), ((0, 900),), 900)


def test_in_a_file_it_has_no_other_order_and_is_the_same():
    found, _, _ = ordered(engine_of())
    basis = found.basis
    again = pickle.loads(pickle.dumps(found))  # noqa: S301 -- our own bytes
    assert vars(again)["_restored"].empty and torch.equal(again.basis, basis)


def test_who_writes_into_the_directions_finds_them_in_both_orders():
    found, _, _ = ordered(engine_of())
    before = found.basis
    found.numbers.mul_(-2.0)
    assert torch.equal(found.basis, before * -2.0)


WORLD = duties.World(convolutions, pictures(60, 20), pictures(90, 21), {"engine": "layerwise"})


def parts_of(run):
    return [part for step in run.transcript.steps for part in step.plan.blocks[0].codec.parts]


@pytest.mark.parametrize("interval", [1, 3])
def test_convolutions_have_them_and_a_run_goes_on_bit_for_bit(interval, tmp_path):
    def defense():
        return pcdp(rank=16, interval=interval, noise_multiplier=1.0)

    whole = duties.trained(defense(), WORLD)
    assert OrderedBasis in {type(part) for part in parts_of(whole)}
    duties.check_same_run(duties.interrupted(defense(), tmp_path / "c", WORLD, after=2), whole)


@pytest.mark.parametrize("method", [pcdp, pdp])
def test_a_run_is_that_of_an_engine_of_rows(method):
    rows = duties.World(convolutions, WORLD.data, WORLD.public, {"engine": "torch.func"})
    runs = [duties.trained(method(rank=16, noise_multiplier=1.0), world) for world in (WORLD, rows)]
    close(*(duties.parameters(run) for run in runs), rtol=1e-3, atol=1e-3)


@subtests("private", [4, 15, 16, 17, 40])  # as many as there are directions, and on both sides
@subtests("size", [1e-20, 1e-3, 1.0, 1e6])
@subtests("left_over", [False, True])
def test_removing_an_example_moves_a_sum_by_a_bound_at_most(left_over, size, private):
    engine, reference = engine_of(), engine_of("torch.func")
    found, span, _ = ordered(engine)
    codec = ImplicitSubspace((found,), (span,), engine.layout.dim)
    block = Block(codec=Complement(codec) if left_over else codec, bound=clip(0.01), query=Gradient())
    plan = StepPlan(block).at(0.0)
    inputs, labels = pictures(private, 22)
    inputs = inputs * size
    whole = engine.run(plan, inputs, labels).total
    close(whole, reference.run(plan, inputs, labels).total, rtol=1e-3, atol=1e-5)
    for gone in (0, private // 2, private - 1):
        kept = [number for number in range(private) if number != gone]
        less = engine.run(plan, inputs[kept], labels[kept]).total
        assert float((whole - less).double().norm()) <= 0.01 * (1 + 1e-3)


@pytest.mark.parametrize("count", [15, 16, 17])
def test_alike_examples_at_a_right_angle_to_the_directions_count_alike_in_every_batch(count):
    """Their coefficients are rounding: directions that were combined from products with gradients moved 2.3 bounds."""
    model = nn.Sequential(nn.Conv2d(64, 16, 3, bias=False), nn.Flatten())
    engine = Engine(model, noise=seeded(0), engine="layerwise")
    draw, labels = coins(6), torch.ones(count + 1, dtype=torch.long)
    common = 1 + 0.3 * torch.rand(576, generator=draw)
    public = common + 0.01 * torch.randn(16, 576, generator=draw)
    turned = torch.randn(576, generator=draw).double()
    inside = torch.linalg.qr(public.double().T).Q
    turned -= inside @ (inside.T @ turned)
    with torch.no_grad():  # so that of both kinds the same output is the largest, and derivatives are the same
        weight = 0.01 * torch.randn(16, 576, generator=draw)
        weight[0] += 0.5 * (turned.float() / turned.float().norm() + common / common.norm())
        vars(model[0])["_parameters"]["weight"].copy_(weight.view(16, 64, 3, 3))
    batch = engine.batch(public.view(16, 64, 3, 3), labels[:16])
    span = engine.layout.slices[0]
    made = batch.made(*span)
    assert made is not None
    found = OrderedBasis(leading_directions(made[0], 16, ordered=False), made[1])
    codec = ImplicitSubspace((found,), (span,), engine.layout.dim)
    plan = StepPlan(Block(codec=codec, bound=clip(0.05), query=Gradient())).at(0.0)
    private = (1e4 * turned.float()).view(1, 64, 3, 3).expand(count + 1, -1, -1, -1).contiguous()
    whole = engine.run(plan, private, labels).total
    less = engine.run(plan, private[:count], labels[:count]).total
    assert float((whole - less).norm()) <= 0.05 * 0.1


def test_directions_that_serve_one_step_are_not_held_in_another_order():
    engine = engine_of()
    basis = leading_directions(engine.batch(*pictures(16, 23)).columns(*engine.layout.slices[2]), 16)
    held = kept_rows._REORDERED
    codec = ImplicitSubspace((basis,), (engine.layout.slices[2],), engine.layout.dim)
    plan = StepPlan(Block(codec=codec, bound=clip(0.01), query=Gradient())).at(0.0)
    counts = []
    for _ in range(3):
        engine.run(plan, *pictures(40, 22))
        counts.append([known is not None for _, known in held.get(basis._base, {}).values()])
    assert counts == [[False], [True], [True]]
    basis.mul_(1.0)  # another version, which takes the place of the one that is held
    engine.run(plan, *pictures(40, 22))
    assert [known is not None for _, known in held[basis._base].values()] == [False]


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


@subtests("scale", [0.0, 1e-20, 1e20, torch.nan, torch.inf])
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


@subtests("sizes", [1.0, 1e-12, 1e9])
@subtests("left_over", [False, True])
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


@pytest.mark.parametrize("settings", [{}, {"biased": True, "interval": 3}, {"groups": 1, "project_noise": False}])
def test_runs_of_gep_have_factors_and_go_on_bit_for_bit(settings, tmp_path):
    def defense():
        return gep(**{"rank": 18, "groups": 2, "noise_multiplier": 1.0} | settings)

    whole = duties.trained(defense(), LINEARS, steps=4)
    assert {type(part) for part in parts_of(whole)} == {FactoredBasis}
    duties.check_same_run(duties.interrupted(defense(), tmp_path / "c", LINEARS, after=2, steps=4), whole)
    rows = duties.trained(defense(), duties.World(linears, POINTS, OTHERS, {"engine": "torch.func"}), steps=4)
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
