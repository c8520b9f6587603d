"""Code that is none of ours runs, and the claim, the run and whoever reads them are told of it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from leakbench.defenses.core import (
    Block,
    Bound,
    ConcatenatedCodec,
    Context,
    Coordinates,
    CropAndFlip,
    Defense,
    Everything,
    Masked,
    Projected,
    Sampling,
    SpanCodec,
    Stateless,
    StepPlan,
    clip,
    seeded,
)
from leakbench.defenses.core.training.assumptions import unverified
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.pcdp import pcdp
from leakbench.defenses.rpdp import rpdp

from ....parameters import subtests
from ... import duties


@dataclass(frozen=True)
class Counting(Everything):
    """Looks at how many rows there are, which no codec may."""

    def encode(self, rows):
        return rows * 0 + len(rows) / rows.shape[1] ** 0.5


class Stashing:
    """Gives back in `decode` what it saw in `encode`."""

    def __init__(self, dim):
        self.dim = self.size = dim
        self.seen = None

    def encode(self, rows):
        self.seen = rows.sum(dim=0).float()
        return rows

    def decode(self, values):
        return values if self.seen is None else self.seen

    def signal(self, values):
        return values


@dataclass(frozen=True, kw_only=True)
class NoBound(Bound):
    """Says that it clips."""

    def __call__(self, rows, least=None):
        return rows


@dataclass(frozen=True)
class FullGradient:
    """A query that nobody has looked at."""

    linear: bool = True

    def __call__(self, gradients):
        return gradients(None)


class Doubled:
    """A map of the update."""

    def __call__(self, update):
        return 2 * update


class Silence:
    """Draws nothing."""

    kind, exact = "os", False

    def unit(self, std):
        return std

    def add(self, sums, std):
        return sums

    def state(self):
        return None

    def load(self, state):
        pass


@dataclass(frozen=True, kw_only=True)
class Views(CropAndFlip):
    pass


@dataclass(frozen=True)
class Everybody(Sampling):
    def indices(self, step, examples, key):
        return torch.arange(examples)


class Quiet(Block):
    def noise_std(self, noise_multiplier):
        return 1e-9


class Lying(float):
    """Compares as itself, and multiplies as a millionth of that."""

    def __mul__(self, other):
        return float(self) * other * 1e-6

    __rmul__ = __mul__

    def __truediv__(self, other):
        return float(self) / other * 1e6


class OwnOptimizer(torch.optim.SGD):
    """May know more than releases."""


class OwnDefense(Defense):
    """May plan by anything."""


@dataclass(frozen=True)
class Planned(Stateless):
    make: Callable[[int], StepPlan]

    def plan(self, context):
        return self.make(context.dim)


def plain(dim, **parts):
    return {"codec": Everything(dim), "bound": clip(1.0)} | parts


PLANS = {
    "codec": lambda dim: StepPlan(Block(**plain(dim, codec=Counting(dim)))),
    "bound": lambda dim: StepPlan(Block(**plain(dim, bound=NoBound(kind="clip", norm=1.0)))),
    "query": lambda dim: StepPlan(Block(**plain(dim, query=FullGradient()))),
    "post": lambda dim: StepPlan(Block(**plain(dim)), post=Doubled()),
    "block": lambda dim: StepPlan(Quiet(**plain(dim))),
}
RUNS = {
    "noise": {"noise": Silence()},
    "augmentation": {"augmentation": Views(padding=1)},
    "sampling": {"sampling": Everybody("poisson", 0.5)},
}


@subtests("role", PLANS)
def test_a_part_of_a_plan_that_is_none_of_ours_is_named(role):
    run = duties.trained(Defense(Planned(PLANS[role]), 1.0))
    assert run.remarks == ("unverified_method", f"unverified_{role}")
    claim = run.claim(1e-5)
    assert math.isfinite(claim.epsilon)
    assert len(claim.unverified) == 2 and claim.unverified == run.unverified
    assert claim.unverified[0].startswith("method Planned (of ")
    assert claim.unverified[1].startswith(f"{role} ") and "is none of leakbench's" in claim.unverified[1]


def test_a_codec_that_gives_back_what_it_saw_is_named():
    stash = Stashing(duties.DIM)
    run = duties.trained(Defense(Planned(lambda dim: StepPlan(Block(**plain(dim, codec=stash)))), 1.0))
    assert run.remarks == ("unverified_method", "unverified_codec")


@pytest.mark.parametrize("role", RUNS)
def test_a_part_of_a_run_that_is_none_of_ours_is_named(role):
    run = duties.trained(dp_sgd(noise_multiplier=1.0), duties.DRAWN, **RUNS[role])
    assert run.remarks == (f"unverified_{role}",)
    assert run.claim(1e-5).unverified[0].startswith(f"{role} {type(next(iter(RUNS[role].values()))).__qualname__} ")


def test_it_is_still_named_after_an_interruption(tmp_path):
    defense = Defense(Planned(PLANS["codec"]), 1.0)
    resumed = duties.interrupted(defense, tmp_path / "c", after=2, observer="final")
    assert resumed.remarks == ("unverified_method", "unverified_codec") and len(resumed.claim(1e-5).unverified) == 2


def test_what_is_ours_is_not_named():
    run = duties.trained(dp_sgd(noise_multiplier=1.0), duties.DRAWN)
    assert run.remarks == run.unverified == run.claim(1e-5).unverified == ()


# --- what a claim assumes -------------------------------------------------------------------------------------------


def test_a_claim_says_what_it_assumes():
    given = duties.trained(dp_sgd(noise_multiplier=1.0)).claim(1e-5).assumes
    assert "the noise follows from a seed" in given[0] and "the sampler's key was given" in given[1]
    drawn = duties.trained(dp_sgd(noise_multiplier=1.0), noise=None, sampler_key=None).claim(1e-5).assumes
    assert "ChaCha20" in drawn[0] and "drawn from the operating system, stays secret" in drawn[1]
    silent = duties.trained(dp_sgd(noise_multiplier=0.0), sampler_key=None).claim(1e-5).assumes
    assert silent == drawn[1:]
    full = duties.trained(dp_sgd(noise_multiplier=1.0), sampling=Sampling("full", 1.0), noise=seeded(0)).claim(1e-5)
    assert len(full.assumes) == 2  # nothing rests on the sampler


def test_a_defense_and_an_optimizer_that_are_none_of_ours_are_named_and_an_optimizer_of_pytorch_is_not():
    assert duties.trained(OwnDefense(dp_sgd().method, 1.0)).remarks == ("unverified_defense",)
    own = duties.trained(dp_sgd(noise_multiplier=1.0), optimizer=lambda p: OwnOptimizer(p, lr=0.1))
    assert own.remarks == ("unverified_optimizer",) and "optimizer OwnOptimizer" in own.claim(1e-5).unverified[0]
    known = duties.trained(dp_sgd(noise_multiplier=1.0), optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))
    assert known.remarks == known.unverified == ()


def test_a_number_that_multiplies_as_another_one_is_taken_for_what_it_compares_as():
    assert Lying(1.0) == 1.0 and Lying(1.0) * 3.0 == 3e-6
    block = Block(codec=Everything(4), bound=clip(Lying(1.0)), share=Lying(1.0))
    assert block.noise_std(Lying(2.0)) == 2.0
    rows = torch.full((2, 4), 100.0)
    torch.testing.assert_close(block.bound(rows).norm(dim=1), torch.ones(2))
    assert (
        Bound(kind="normalize", norm=1.0, regulariser=Lying(0.5)).factors(torch.ones(1, dtype=torch.float64)) == 2 / 3
    )
    assert Sampling("poisson", Lying(0.5)).expected_batch(10) == 5.0
    assert dp_sgd(noise_multiplier=Lying(1.0)).calibrated_multiplier * 2.0 == 2.0


@dataclass(frozen=True)
class OwnSubspace:
    """Directions that somebody else chose, for a method that is ours."""

    rank: int = 2

    def at(self, bases: Any, context: Context) -> Any: ...


def test_what_a_method_of_ours_was_given_is_as_much_of_the_method():
    projected = Projected(bound=clip(1.0), subspace=OwnSubspace(), where="before the bound")
    assert "method OwnSubspace" in unverified(defense=Defense(projected, 1.0))["unverified_method"]
    assert not unverified(defense=rpdp(rank=2, noise_multiplier=1.0))
    patched = dp_sgd(noise_multiplier=1.0)
    object.__setattr__(patched.method, "plan", lambda state, context: None)
    assert set(unverified(defense=patched)) == {"unverified_method"}


class OwnCodec(Everything):
    """Somebody else's, inside of ours."""


def in_a_span(codec):
    return SpanCodec(0, codec, 4)


def beside(codec):
    return ConcatenatedCodec((Everything(4), codec), (1.0, 2.0))


def behind_a_mask(codec):
    return Masked(Coordinates(torch.arange(4), dim=4), codec)


@pytest.mark.parametrize("wrap", [in_a_span, beside, behind_a_mask])
def test_a_codec_of_others_is_found_inside_of_ours(wrap):
    def plan(codec):
        return StepPlan(Block(codec=codec, bound=clip(1.0)))

    assert "codec OwnCodec" in unverified(plan=plan(wrap(OwnCodec(4))))["unverified_codec"]
    assert "codec OwnCodec" in unverified(plan=plan(wrap(wrap(OwnCodec(4)))))["unverified_codec"]
    assert not unverified(plan=plan(wrap(Everything(4))))


def test_a_mask_of_others_is_found_before_a_codec_of_ours():
    class OwnMask(Coordinates):
        """Somebody else's."""

    codec = Masked(OwnMask(torch.arange(2), dim=4), Everything(2))
    assert "OwnMask" in unverified(plan=StepPlan(Block(codec=codec, bound=clip(1.0))))["unverified_codec"]


def test_a_defense_that_has_run_before_is_still_ours():
    """Its caches hold weak references to bases of the run before."""
    defense = pcdp(rank=3, noise_multiplier=1.0)
    assert [duties.trained(defense).remarks for _ in range(2)] == [(), ()]
