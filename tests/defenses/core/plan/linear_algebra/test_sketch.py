"""Directions of a count sketch: orthonormal, unbiased, and the same as their matrix wherever they stand for it."""

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from leakbench.defenses.core import Block, Engine, StepPlan, Subspace, clip
from leakbench.defenses.core.plan.implicit_subspace import ImplicitSubspace
from leakbench.defenses.core.plan.linear_algebra.basis import orthonormality_error
from leakbench.defenses.core.plan.linear_algebra.sketch import SketchDirections
from leakbench.defenses.core.training.transcript import storages
from leakbench.defenses.rpdp import rpdp

from .....parameters import subtests
from .... import duties


def coins(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(span, rank, seed=0):
    return SketchDirections.drawn(span, rank, coins(seed))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@given(span=st.integers(1, 60), share=st.floats(0, 1), seed=st.integers(0, 2**30), data=st.data())
def test_they_are_orthonormal_and_do_what_their_matrix_does(span, share, seed, data):
    rank = max(1, round(share * span))
    sketch = drawn(span, rank, seed)
    basis = sketch.basis
    assert basis.shape == (span, rank) and orthonormality_error(basis) < 1e-6
    assert bool((basis != 0).sum(dim=1).eq(1).all()), "every coordinate is in one direction"
    rows, c = torch.randn(3, span, generator=coins(seed)), torch.randn(2, rank, generator=coins(seed + 1))
    close(sketch.of_rows(rows), rows @ basis)
    close(sketch.combined(c), c @ basis.T)
    first = data.draw(st.integers(0, span))
    last = data.draw(st.integers(first, span))
    close(sketch.of_rows(rows[:, first:last], first), rows[:, first:last] @ basis[first:last])


def test_coefficients_are_differentiated_as_a_product():
    sketch = drawn(13, 4)
    rows = torch.randn(2, 13, generator=coins(1), dtype=torch.float64, requires_grad=True)
    c = torch.randn(2, 4, generator=coins(2), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(sketch.of_rows, rows)
    assert torch.autograd.gradcheck(sketch.combined, c)


@pytest.mark.long
@pytest.mark.parametrize(("span", "rank"), [(12, 4), pytest.param(13, 4, marks=pytest.mark.slow), (7, 3)])
def test_on_average_a_projection_is_k_over_d_times_the_identity(span, rank):
    draws = 4000
    bases = torch.stack([drawn(span, rank, seed).basis.double() for seed in range(draws)])
    found = torch.einsum("nik,njk->nij", bases, bases)

    def distance(mean):
        return float((mean - rank / span * torch.eye(span)).abs().max())

    # Entries are at most 1, so five standard errors are at most:
    limit = 5 / math.sqrt(draws)
    assert distance(found.mean(dim=0)) < limit
    # Without signs coordinates of one direction would add up, which the test would tell.
    assert distance(found.abs().mean(dim=0)) > 2 * limit


@pytest.mark.long
def test_the_turn_is_uniform_so_that_no_coordinate_is_kept_better_than_others():
    turns = torch.tensor([drawn(7, 6, seed).turn for seed in range(3500)])
    assert bool(((turns.bincount(minlength=7) - 500).abs() < 5 * math.sqrt(500)).all())


def test_settings_out_of_range_are_refused():
    for rank in (0, 8):
        with pytest.raises(ValueError, match=f"rank must be between 1 and 7, the coordinates, got {rank}"):
            SketchDirections(torch.ones(7), rank)
    with pytest.raises(ValueError, match="turn must be between 0 and 6, got 7"):
        SketchDirections(torch.ones(7), 2, 7)


@subtests("factor", [0.0, 1.01, 1e6, math.inf, math.nan])
def test_factors_that_lengthen_or_shorten_a_direction_are_refused(factor):
    sketch = drawn(13, 4)
    factors = torch.where(torch.arange(13) == 5, factor * sketch.factors, sketch.factors)
    with pytest.raises(ValueError, match="must make directions of length 1, got squared ones that are off by"):
        SketchDirections(factors, sketch.rank, sketch.turn)


@pytest.mark.parametrize("span", [6, 8])
def test_a_sketch_of_another_length_than_its_span_is_refused(span):
    with pytest.raises(ValueError, match=f"factors must be {span}, one for each of a span, got 7"):
        ImplicitSubspace((drawn(7, 2),), ((0, span),), 9)


def test_directions_of_anothers_making_are_refused():
    class Counting(SketchDirections):
        """Its coefficients tell how many rows there are."""

        def of_rows(self, rows, first=0):
            return super().of_rows(rows, first) + len(rows) - 1

    with pytest.raises(ValueError, match="itself, got Counting"):
        ImplicitSubspace((Counting(torch.ones(7), 7),), ((0, 7),), 7)


def test_in_a_file_they_are_what_they_are_made_of():
    sketch = drawn(1000, 7)
    before = len(pickle.dumps(sketch))
    assert sketch.basis.shape == (1000, 7)
    assert len(pickle.dumps(sketch)) == before
    again = pickle.loads(pickle.dumps(sketch))  # noqa: S301 -- our own bytes
    assert torch.equal(again.basis, sketch.basis)


def network(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "linear":
            return nn.Sequential(nn.Flatten(), nn.Linear(98, 16), nn.Tanh(), nn.Linear(16, 3)), (2, 7, 7)
        if kind == "conv":
            layers = nn.Conv2d(2, 6, 3), nn.GroupNorm(2, 6), nn.Tanh(), nn.Conv2d(6, 4, 3), nn.Flatten()
            return nn.Sequential(*layers, nn.Linear(36, 3)), (2, 7, 7)
        return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Flatten(), nn.Linear(80, 3)), (4, 6)


@pytest.mark.long
@subtests("kind", ["linear", "conv", "sequence"])
@subtests("spans", ["tensor", "global", "across"])
@subtests("bad", [None, torch.nan, 1e30])
def test_the_engine_without_rows_agrees_with_rows_times_the_matrix(kind, spans, bad):
    model, shape = network(kind)
    inputs, labels = torch.randn(9, *shape, generator=coins(2)), torch.arange(9) % 3
    if bad is not None:
        inputs[4] *= bad
    engines = [Engine(model, engine=name) for name in ("layerwise", "torch.func")]
    layout = engines[0].layout
    # Across: a span that begins and ends within a parameter.
    chosen = {"tensor": layout.slices, "global": ((0, layout.dim),), "across": ((5, layout.dim // 2 + 1),)}[spans]
    parts = [drawn(b - a, min(20, b - a), seed) for seed, (a, b) in enumerate(chosen)]
    implicit = ImplicitSubspace(parts, chosen, layout.dim)
    formed = Subspace(tuple(part.basis for part in parts), chosen, layout.dim)
    for bound in (clip(0.05), clip(1e6)):
        sums = []
        for engine in engines:
            expected, found = (
                engine.clipped_sums(StepPlan(Block(codec=codec, bound=bound)), inputs, labels)[0]
                for codec in (formed, implicit)
            )
            assert bool(expected.isfinite().all()) and float(expected.norm()) > 0
            assert float((found - expected).norm()) <= 1e-4 * float(expected.norm())
            sums.append(found)
        if bad != 1e30:  # of which one engine's group norm makes a NaN, and another's does not
            assert float((sums[0] - sums[1]).norm()) <= 1e-4 * float(sums[1].norm())


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_a_run_that_is_interrupted_goes_on_bit_for_bit(interval, scope, tmp_path):
    def defense():
        return rpdp(rank=5, scope=scope, interval=interval, directions="sketch", noise_multiplier=1.0)

    whole = duties.trained(defense())
    resumed = duties.interrupted(defense(), tmp_path / "c", after=2)
    duties.check_same_run(resumed, whole)
    plan = whole.transcript.steps[0].plan
    assert plan is not None and isinstance(plan.blocks[0].codec, ImplicitSubspace)
    assert all(isinstance(part, SketchDirections) for part in plan.blocks[0].codec.parts)
    # A number a coordinate, and no basis.
    assert sum(storages(whole.transcript.steps[0]).values()) < 4 * 5 * plan.blocks[0].codec.dim
