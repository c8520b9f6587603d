"""Checks of theory have power: a broken mechanism, or a wrong closed form, is not taken for what is claimed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from leakbench.audit.catalog import methods as catalog
from leakbench.audit.theory import communication, momentum, reconstruction
from leakbench.audit.theory.claim import Setup
from leakbench.audit.theory.claims import CLAIMS
from leakbench.defenses.core import (
    Block,
    Complement,
    Coordinates,
    Defense,
    Everything,
    Noise,
    Scaled,
    Stateless,
    StepPlan,
    Subspace,
    clip,
    seeded,
)

from ...parameters import subtests

SMALL = Setup(draws=60, data="digits", seed=3)


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch):
    monkeypatch.setattr(momentum, "STEPS", 40)


@dataclass(frozen=True)
class Altered(Stateless):
    """A method whose only block is changed in every plan."""

    method: Any
    change: Callable[[Block], Block]

    def plan(self, context) -> StepPlan:
        found = self.method.plan(None, context)[1]
        return StepPlan(self.change(found.blocks[0]))


def altered(change: Callable[[Block], Block], setup: Setup = SMALL) -> Setup:
    def defense(name, given, *, noise_multiplier=None) -> Defense:
        made = catalog.defense(name, given, noise_multiplier=noise_multiplier)
        return replace(made, method=Altered(made.method, change))

    return replace(setup, defense=defense)


def another(name: str, **settings) -> Setup:
    """Whatever method is asked for, this one answers."""

    def defense(_name, _given, *, noise_multiplier=None) -> Defense:
        return catalog.defense(name, settings, noise_multiplier=noise_multiplier)

    return replace(SMALL, defense=defense)


class ClipsFirst(Coordinates):
    """Masks what was clipped before: the mechanism of the printed proof of Theorem 3.1."""

    def encode(self, rows: Tensor) -> Tensor:
        return super().encode(clip(0.5)(rows))


class NoisyEverywhere(Coordinates):
    """Masks rows and releases all coordinates, so that noise falls on dropped ones too."""

    @property
    def size(self) -> int:
        return self.dim

    def encode(self, rows: Tensor) -> Tensor:
        return self.project(rows)

    def decode(self, values: Tensor) -> Tensor:
        return values


class Redrawn(Coordinates):
    """Another mask at every call, so for every micro-batch."""

    def encode(self, rows: Tensor) -> Tensor:
        calls[0] += 1
        order = torch.randperm(self.dim, generator=torch.Generator().manual_seed(calls[0]))
        return rows[:, order[: self.size].sort().values]


calls = [0]


def masked_by(kind: type[Coordinates]) -> Setup:
    def change(block: Block) -> Block:
        assert isinstance(block.codec, Coordinates)
        return replace(block, codec=kind(block.codec.kept, dim=block.codec.dim))

    return altered(change)


def scaled(factor: float) -> Setup:
    """Rows come out longer than they went in."""
    return altered(lambda b: replace(b, codec=Scaled(torch.full((b.codec.dim,), factor))))


def independent_coins(block: Block) -> Block:
    """Masks of 1 - r of the entries on average, not of one size."""
    assert isinstance(block.codec, Coordinates)
    key = int(block.codec.kept.sum()) + 1000 * int(block.codec.kept[0])
    coins = torch.rand(block.codec.dim, generator=torch.Generator().manual_seed(key))
    return replace(block, codec=Coordinates((coins < 0.37).nonzero().flatten(), dim=block.codec.dim))


def first_ones(block: Block) -> Block:
    """The same mask in every epoch."""
    return replace(block, codec=Coordinates(torch.arange(block.codec.size), dim=block.codec.dim))


class Quiet:
    """Noise of two thirds of the standard deviation that is charged."""

    def __init__(self, source: Noise) -> None:
        # Each member by name: from Python 3.12 on, what `__getattr__` answers is no member of a protocol.
        self.source, self.kind, self.exact = source, source.kind, source.exact

    def unit(self, std: float) -> float:
        return self.source.unit(std)

    def add(self, sums: Tensor, std: float) -> Tensor:
        return self.source.add(sums, std * 2 / 3)

    def state(self) -> Tensor | None:
        return self.source.state()

    def load(self, state: Tensor | None) -> None:
        self.source.load(state)


class QuietSetup(Setup):
    def noise(self, *what: object) -> Any:
        return Quiet(super().noise(*what))


class Repeated:
    """One draw of noise for all steps of a run."""

    kind, exact = "seeded", False

    def unit(self, std: float) -> float:
        return seeded(1).unit(std)

    def add(self, sums: Tensor, std: float) -> Tensor:
        return seeded(1).add(sums, std)

    def state(self) -> Tensor | None:
        return None

    def load(self, state: Tensor | None) -> None: ...


class RepeatedSetup(Setup):
    def noise(self, *what: object) -> Any:
        return Repeated()


QUIET = QuietSetup(draws=80, data="digits", seed=3)


@pytest.mark.long
@subtests(
    ("name", "setup"),
    [
        ("sparsification_sensitivity", masked_by(ClipsFirst)),
        ("sparsification_sensitivity", another("random_sparsification", without="clipping", clip_norm=0.5)),
        ("sparsification_audit", QUIET),
        ("sparsification_silence", masked_by(NoisyEverywhere)),
        ("sparsification_silence", another("posterior_freeze", clip_norm=0.5, cooling_epochs=0, final_sparsity=0.7)),
        ("sparsification_microbatches", masked_by(Redrawn)),
        ("mask_expectations", altered(independent_coins)),
        ("noise_norm", masked_by(NoisyEverywhere)),
        ("reconstruction_error", QUIET),
        ("reconstruction_error", another("random_sparsification", clip_norm=0.3, cooling=False, final_sparsity=0.5)),
        ("reconstruction_under_clipping", QUIET),
        ("reconstruction_mask_unknown", another("dp_sgd", clip_norm=1.0)),
        ("reconstruction_with_a_prior", another("random_sparsification", without="clipping", final_sparsity=0.0)),
        ("reconstruction_over_epochs", altered(first_ones)),
        ("momentum_displacement", RepeatedSetup(draws=20)),
        ("norm_pcdp", scaled(1.2)),
        ("norm_random_sparsification", scaled(1.2)),
        ("bytes_of_updates", another("pcdp", scope="global")),
        ("bytes_of_a_basis", another("pcdp", rank=90)),
        ("bytes_under_cooling", another("random_sparsification", cooling=False)),
    ],
)
def test_a_broken_mechanism_is_rejected(name, setup):
    assert CLAIMS[name].examine(setup).expected is False


def test_noise_that_repeats_would_make_the_printed_factor_of_momentum_true():
    found = CLAIMS["momentum_velocity"].examine(RepeatedSetup(draws=400))
    assert found.holds and not found.expected  # and the command would say so


@dataclass(frozen=True)
class Decomposed(Stateless):
    """Two blocks along a direction that is not the last release; or whose parts are not orthogonal."""

    leaky: bool = False

    def plan(self, context) -> StepPlan:
        direction = torch.ones(context.dim, 1) / context.dim**0.5
        along = Subspace.of(direction)
        rest = Everything(context.dim) if self.leaky else Complement(along)
        return StepPlan(
            Block(codec=along if self.leaky else rest, bound=clip(0.5), share=0.5),
            Block(codec=rest if self.leaky else along, bound=clip(0.5), share=0.5),
        )


@subtests(("name", "method"), [("norm_dpdr", Decomposed()), ("norm_gep", Decomposed(leaky=True))])
def test_parts_that_do_not_add_up_are_rejected(name, method):
    def defense(_name, _given, *, noise_multiplier=None) -> Defense:
        return Defense(method, noise_multiplier)

    assert not CLAIMS[name].examine(replace(SMALL, defense=defense)).holds


@pytest.mark.parametrize(
    ("name", "place", "wrong"),
    [
        # Jensen's bound in place of the expectation.
        (
            "reconstruction_error",
            (reconstruction, "expected_inverse"),
            lambda sparsity, offset=0.0: 1 / ((1 - sparsity) * float(reconstruction.A.square().sum())),
        ),
        # One draw's share of the displacement as if it were reached at once.
        ("momentum_rule", (momentum, "MU"), 0.8),
        # Weights and biases of a layer together.
        ("bytes_of_updates", (communication, "SIZES"), (1040, 8224, 16416, 330)),
    ],
)
def test_a_wrong_closed_form_is_rejected(name, place, wrong, monkeypatch):
    if name == "momentum_rule":  # of the closed form alone: the run goes on with 0.9
        plain = momentum._walk
        monkeypatch.setattr(momentum, "_walk", lambda setup, mu, *a, **k: plain(setup, 0.9 if mu else 0.0, *a, **k))
    monkeypatch.setattr(*place, wrong)
    assert CLAIMS[name].examine(replace(SMALL, draws=60)).expected is False


@pytest.mark.long
def test_a_plan_is_what_claims_are_measured_on():
    """No measurement has a mechanism of its own: every method is asked for by name."""
    asked = []

    def defense(name, given, *, noise_multiplier=None) -> Defense:
        asked.append(name)
        return catalog.defense(name, given, noise_multiplier=noise_multiplier)

    CLAIMS["bytes_of_updates"].examine(replace(SMALL, defense=defense))
    assert set(asked) == {"dp_sgd", "random_sparsification", "pcdp", "gep", "dpdr"}
