"""Directions that are never formed are those that would be, and do what a basis does."""

import math
import pickle

import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from leakbench.defenses.core import Block, Complement, Engine, Gradient, StepPlan, Subspace, clip, seeded
from leakbench.defenses.core.plan.implicit_subspace import ImplicitSubspace, OuterDirections
from leakbench.defenses.core.plan.linear_algebra.basis import leading_directions, orthonormality_error
from leakbench.defenses.core.plan.linear_algebra.sketch import SketchDirections
from leakbench.defenses.core.training.transcript import storages
from leakbench.defenses.pcdp import pcdp

from ....parameters import subtests
from ... import duties


def coins(seed=0):
    return torch.Generator().manual_seed(seed)


def factors(m, out, entering, seed=0):
    return torch.randn(m, out, generator=coins(seed)), torch.randn(m, entering, generator=coins(seed + 1))


def products(signals, inputs):
    return torch.einsum("mo,mi->moi", signals, inputs).flatten(1)


def leading(signals, inputs, rank) -> OuterDirections:
    found = OuterDirections.leading(signals, inputs, rank)
    assert found is not None
    return found


def close(found, expected, rtol=1e-4, atol=1e-4):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def cosine(one, other):
    return math.cos(scipy.linalg.subspace_angles(one.double().numpy(), other.double().numpy()).max())


@given(
    m=st.integers(1, 24),
    out=st.integers(2, 9),
    entering=st.integers(3, 30),
    rank=st.integers(1, 30),
    seed=st.integers(),
)
def test_they_span_what_leading_directions_of_the_rows_span(m, out, entering, rank, seed):
    m = min(m, out * entering // 2)  # so many random products are far from dependent
    signals, inputs = factors(m, out, entering, seed % 2**30)
    found = OuterDirections.leading(signals, inputs, rank)
    if found is None:
        assert torch.linalg.cond(products(signals, inputs).double()) > 1e3
        return
    formed = leading_directions(products(signals, inputs), rank)
    assert found.basis.shape == formed.shape and found.rank == formed.shape[1]
    assert orthonormality_error(found.basis) < 1e-4
    whole = torch.linalg.svdvals(products(signals, inputs).double())
    if found.rank == len(whole) or whole[found.rank - 1] - whole[found.rank] > 0.05 * whole[0]:
        assert cosine(found.basis, formed) > 1 - 1e-5


def test_coefficients_combinations_and_projections_are_those_of_the_basis():
    signals, inputs = factors(10, 6, 20)
    found, basis = leading(signals, inputs, 7), leading(signals, inputs, 7).basis
    others = factors(30, 6, 20, seed=5)
    rows = products(*others)
    close(found.of_products(*others), rows @ basis)
    c = torch.randn(3, 7, generator=coins(9))
    close(found.of_rows(rows[:3]), rows[:3] @ basis)
    close(found.combined(c), c @ basis.T)
    assert found._formed.empty
    close(found.of_rows(rows), rows @ basis)
    assert not found._formed.empty


def subspaces(kind="outer products"):
    """One of two spans, the first implicit, beside the same with its bases formed; 4 coordinates are in none."""
    first = leading(*factors(10, 6, 20), 7) if kind == "outer products" else SketchDirections.drawn(120, 7, coins())
    second = torch.linalg.qr(torch.randn(15, 4, generator=coins(3))).Q
    spans = ((0, 120), (124, 139))
    return ImplicitSubspace((first, second), spans, 139), Subspace((first.basis.clone(), second), spans, 139)


@subtests("kind", ["outer products", "sketch"])
@subtests("count", [0, 1, 40])
def test_a_subspace_of_them_is_the_subspace_with_their_bases(count, kind):
    implicit, formed = subspaces(kind)
    rows = torch.randn(count, 139, generator=coins(4))
    weights = torch.rand(11, generator=coins(5))
    assert implicit.size == formed.size == 11 and implicit.ranks == formed.ranks == [7, 4]
    close(implicit.decode(weights), formed.decode(weights))
    for share in (None, weights):
        close(implicit.project(rows, share), formed.project(rows, share))
    close(implicit.encode(rows), formed.encode(rows))
    for one, other in zip(implicit.moments(), formed.moments(), strict=True):
        close(one, other)


def test_in_a_file_it_has_no_basis_and_does_the_same_to_the_last_digit():
    implicit, _ = subspaces()
    rows = torch.randn(5, 139, generator=coins(4))
    expected = implicit.encode(rows)  # which forms the bases
    again = pickle.loads(pickle.dumps(implicit))  # noqa: S301 -- our own bytes
    assert type(again) is ImplicitSubspace and vars(again.parts[0])["_formed"].empty
    assert torch.equal(again.encode(rows), expected)


def test_that_somebody_formed_a_basis_changes_no_digit():
    looked_at, _ = subspaces()
    left_alone = pickle.loads(pickle.dumps(looked_at))  # noqa: S301 -- our own bytes, without bases
    assert looked_at.bases and vars(left_alone.parts[0])["_formed"].empty
    values = torch.randn(11, generator=coins(6))
    assert torch.equal(looked_at.decode(values), left_alone.decode(values))
    row = torch.randn(1, 139, generator=coins(7))
    assert torch.equal(looked_at.project(row), left_alone.project(row))


@subtests("kind", ["outer products", "sketch"])
def test_coordinates_of_a_vector_are_those_of_the_bases_and_form_none(kind):
    implicit, formed = subspaces(kind)
    vector = torch.randn(139, generator=coins(8))
    fresh = pickle.loads(pickle.dumps(implicit))  # noqa: S301 -- our own bytes, without bases
    close(fresh.coordinates(vector), formed.encode(vector[None])[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(formed.coordinates(vector), formed.encode(vector[None])[0])
    assert kind == "sketch" or vars(fresh.parts[0])["_formed"].empty


def test_directions_of_anothers_making_are_refused():
    class Counting(OuterDirections):
        """Its coefficients tell how many rows there are."""

        def of_products(self, signals, inputs):
            return super().of_products(signals, inputs) + len(signals)

    own = Counting(*factors(10, 6, 20), torch.eye(10))
    with pytest.raises(ValueError, match=r"must be OuterDirections, .* or SketchDirections itself, got Counting"):
        ImplicitSubspace((own,), ((0, 120),), 120)


PRIVATE = (torch.randn(60, 60, generator=coins(20)), torch.arange(60) % 3)
PUBLIC = (torch.randn(90, 60, generator=coins(21)), torch.arange(90) % 3)


def parts_of(step):
    return step.plan.blocks[0].codec.parts


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("engine", ["layerwise", "torch.func"])
def test_a_run_that_is_interrupted_goes_on_bit_for_bit_and_its_transcript_forms_no_basis(interval, engine, tmp_path):
    # The network of the duties is too small to have such directions.
    world = duties.World(linear_net, PRIVATE, PUBLIC, {"engine": engine})
    defense = pcdp(rank=6, interval=interval, noise_multiplier=1.0)
    whole = duties.trained(defense, world)
    resumed = duties.interrupted(pcdp(rank=6, interval=interval, noise_multiplier=1.0), tmp_path / "c", world, after=2)
    factored = [isinstance(part, OuterDirections) for part in parts_of(whole.transcript.steps[0])]
    assert factored == [engine == "layerwise", False, False, False]
    duties.check_same_run(resumed, whole)
    if engine == "layerwise":
        again = duties.trained(pcdp(rank=6, interval=interval, noise_multiplier=1.0), world)
        step = again.transcript.steps[0]
        assert sum(storages(step).values()) < 4 * 6 * 960  # bytes of a basis of the first weight alone
        assert vars(parts_of(step)[0])["_formed"].empty


def test_the_largest_share_in_a_direction_is_positive():
    signals, inputs = factors(10, 6, 20)
    weights = leading(signals, inputs, 7).weights
    assert (weights.gather(0, weights.abs().argmax(dim=0, keepdim=True)) > 0).all()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: s * 0,
        lambda s: s * torch.nan,
        lambda s: s * 1e30,
        lambda s: s * 1e-30,
        lambda s: torch.cat([s[:1], s[:1] * (1 + 1e-4 * torch.arange(9.0)[:, None])]),
    ],
    ids=["no product", "NaN", "huge", "tiny", "parallel signals and inputs"],
)
def test_where_factors_do_not_tell_directions_there_are_none(spoil):
    signals, inputs = factors(10, 6, 20)
    alike = inputs[:1].expand(10, -1) + 1e-4 * inputs
    assert OuterDirections.leading(spoil(signals), alike, 10) is None


def linear_net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(60, 16), nn.Tanh(), nn.Linear(16, 3))


@pytest.mark.parametrize("bad", [None, torch.nan, 1e30])
def test_our_engine_sums_coefficients_as_the_reference_whatever_is_in_a_row(bad):
    model, inputs, targets = linear_net(), torch.randn(50, 60, generator=coins(1)), torch.arange(50) % 3
    ours, reference = (Engine(model, noise=seeded(0), engine=name) for name in ("layerwise", "torch.func"))
    batch = ours.batch(inputs[:12], targets[:12])
    close(
        torch.cat([batch.columns(*span) for span in ours.layout.slices], dim=1),
        ours.gradients(inputs[:12], targets[:12])(None),
    )
    span = ours.layout.slices[0]
    factored = batch.outer(*span)
    assert factored is not None and batch.outer(*ours.layout.slices[1]) is None
    assert reference.batch(inputs[:12], targets[:12]).outer(*span) is None
    codec = ImplicitSubspace((leading(*factored, 8),), (span,), ours.layout.dim)
    plan = StepPlan(Block(codec=codec, bound=clip(0.05), query=Gradient()))
    private = inputs[12:].clone()
    if bad is not None:
        private[3] = bad
    sums = [engine.run(plan.at(0.0), private, targets[12:]).total for engine in (ours, reference)]
    assert sums[0].isfinite().all() and sums[0].norm() > 0
    close(sums[0], sums[1], rtol=1e-4, atol=1e-5)
    assert sums[0].norm() <= 0.05 * 38 * (1 + 1e-4)


@pytest.mark.parametrize("written", ["signals", "weights", "a basis"])
def test_a_subspace_that_somebody_writes_into_is_what_it_is_now(written):
    """What is left over is clipped by what it is at this step, not by what the subspace was at the step before."""
    model, inputs, targets = linear_net(), torch.randn(40, 60, generator=coins(1)), torch.arange(40) % 3
    ours, reference = (Engine(model, noise=seeded(0), engine=name) for name in ("layerwise", "torch.func"))
    first, second = ours.layout.slices[0], ours.layout.slices[2]
    factored = ours.batch(inputs[:12], targets[:12]).outer(*first)
    assert factored is not None
    basis = torch.linalg.qr(torch.randn(second[1] - second[0], 5, generator=coins(2))).Q
    subspace = ImplicitSubspace((leading(*factored, 8), basis), (first, second), ours.layout.dim)
    block = Block(codec=Complement(subspace), bound=clip(0.05), query=Gradient())
    plan = StepPlan(block)

    def total(engine):
        return engine.run(plan.at(0.0), inputs[12:], targets[12:]).total

    before = total(ours)
    (basis if written == "a basis" else getattr(subspace.parts[0], written)).mul_(1.4)
    rows = ours.gradients(inputs[12:], targets[12:])(None)
    expected = block.codec.decode(block.contributions(lambda _point: rows).sum(dim=0))
    assert not torch.allclose(before, expected, rtol=1e-3)
    for engine in (ours, reference):
        close(total(engine), expected, rtol=1e-4, atol=1e-6)


@subtests("size", [1.0, 1e7, 1e10])
@subtests("count", [2, 3, 5])
def test_what_cancels_in_a_coefficient_does_not_let_one_row_move_the_others(size, count):
    """Huge rows at a right angle to the directions have coefficients of rounding, which differ by size of the batch."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(60, 16, bias=False))
    nn.init.normal_(model[1].weight, std=0.1, generator=coins(3))  # pyright: ignore[reportArgumentType]
    engine, bound = Engine(model, noise=seeded(0), engine="layerwise"), 0.05
    turned = torch.linalg.qr(torch.randn(60, 60, generator=coins(count)).double())[0]
    known = (torch.randn(12, 30, generator=coins(1)).double() @ turned[:30]).float()
    rows = (size * torch.randn(count, 30, generator=coins(2)).double() @ turned[30:]).float()
    labels, span = torch.arange(12) % 16, engine.layout.slices[0]
    outer = engine.batch(known, labels).outer(*span)
    assert outer is not None
    directions = ImplicitSubspace((leading(*outer, 8),), (span,), engine.layout.dim)
    plan = StepPlan(Block(codec=directions, bound=clip(bound), query=Gradient())).at(0.0)
    whole = engine.run(plan, rows, labels[:count]).total
    for gone in range(count):
        kept = [number for number in range(count) if number != gone]
        less = engine.run(plan, rows[kept], labels[kept]).total
        assert float((whole - less).double().norm()) <= bound * (1 + 1e-4)


def test_many_long_rows_inside_leave_as_little_as_few():
    """By a plain product of the formed basis a hundred times as much, which a bound makes longer yet."""
    signals, inputs = torch.full((1, 2), 0.5), torch.rand(1, 600_000, generator=coins()) + 0.5
    row = (signals.unsqueeze(2) * inputs.unsqueeze(1)).flatten(1)
    length = row.double().norm().float()
    directions = OuterDirections(signals, inputs, (1 / length).view(1, 1))
    rest = Complement(ImplicitSubspace((directions,), ((0, row.shape[1]),), row.shape[1]))
    for many in (1, 16):
        assert float(rest.encode(row.repeat(many, 1))[0].norm() / length) < 1e-6


@pytest.mark.parametrize("spoilt", ["long", "nan"])
def test_what_is_left_beside_directions_that_are_far_too_long_is_refused_by_our_engine(spoilt):
    """Rounding of coefficients a million times as long as the rows let one example move the sum by 38 bounds."""
    model = nn.Sequential(nn.Linear(20, 4), nn.Tanh(), nn.Linear(4, 3))
    engine = Engine(model, engine="layerwise")
    basis = torch.linalg.qr(torch.randn(engine.layout.dim, 3, generator=coins())).Q
    inputs, targets = torch.randn(5, 20, generator=coins(1)), torch.arange(5) % 3

    def answered(basis):
        rest = Complement(ImplicitSubspace([basis], ((0, len(basis)),), len(basis)))
        return engine.clipped_sums(StepPlan(Block(codec=rest, bound=clip(1.0))), inputs, targets)

    assert answered(basis)[0].isfinite().all()
    basis[:, 1] *= {"long": 1e3, "nan": torch.nan}[spoilt]
    with pytest.raises(
        ValueError, match=r"directions must be orthonormal, got some along which squares grow (1e\+06|nan)"
    ):
        answered(basis)
