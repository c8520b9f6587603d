"""Plans that do not add up are refused; public randomness is a function of seed and number."""

import dataclasses
import functools
import hashlib
import math
from typing import Any, cast

import pytest
import torch

from leakbench.defenses.core import (
    Block,
    Context,
    Coordinates,
    Defense,
    Everything,
    Layout,
    Method,
    NoisyPlan,
    Stateless,
    StepPlan,
    clip,
    seed_from,
    unbounded,
)
from leakbench.defenses.dp_sgd import dp_sgd

from ....parameters import subtests
from ... import duties


def block(**settings):
    return Block(**{"codec": Everything(4), "bound": clip(1.0)} | settings)


@subtests("share", [0.0, -0.1, 1.1, math.nan])
def test_a_share_is_a_part_of_one(share):
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\], got"):
        block(share=share)


@subtests("shares", [(0.5,), (0.5, 0.6), (1.0, 1.0), (0.3, 0.3, 0.3)])
def test_shares_must_sum_to_one_or_a_step_would_spend_more_than_it_says(shares):
    with pytest.raises(ValueError, match="the shares of a plan's blocks must sum to 1, got"):
        StepPlan(*(block(share=share) for share in shares))


def test_a_plan_updates_something_of_one_dimension():
    with pytest.raises(ValueError, match="a plan must have at least one block with updates=True, got none"):
        StepPlan(block(updates=False))
    with pytest.raises(ValueError, match="at least one block"):
        StepPlan()
    with pytest.raises(ValueError, match="must decode to the same dimension"):
        StepPlan(block(share=0.5), block(share=0.5, codec=Everything(5)))
    StepPlan(block(share=0.5), block(share=0.5, codec=Everything(1), updates=False))  # a count may differ


def test_noise_is_the_multiplier_over_the_root_of_the_share_in_units_of_the_bound():
    assert block(bound=clip(0.5), share=0.25).noise_std(3.0) == pytest.approx(3.0)
    assert StepPlan(block(share=0.25), block(share=0.75)).sensitivity == pytest.approx(1.0)
    assert StepPlan(block(share=0.25), block(share=0.75, bound=unbounded())).sensitivity == math.inf


def test_a_context_holds_public_things_and_nothing_else():
    # Whoever adds a field asks first whether a mask that depends on it costs no privacy.
    assert {field.name for field in dataclasses.fields(Context)} == {
        "step",
        "steps",
        "dim",
        "layout",
        "steps_per_epoch",
        "parameters",
        "noise_multiplier",
        "architecture",
        "input_shape",
        "update",
        "expected_batch",
        "seed",
        "public",
        "one_off",  # releases, and charges what it releases
        "device",
        "round_steps",
    }


def test_coins_are_a_pure_function_of_seed_and_number():
    context = Context(step=3, steps=10, dim=4, seed=7)

    def draw(context, number):
        return torch.rand(5, generator=context.coins(number))

    assert torch.equal(draw(context, 2), draw(context.at(8), 2))
    assert not torch.equal(draw(context, 2), draw(context, 3))
    assert not torch.equal(draw(context, 2), draw(Context(step=3, steps=10, dim=4, seed=8), 2))


def test_epochs_count_a_begun_one_whole():
    context = Context(step=5, steps=11, steps_per_epoch=4, dim=1)
    assert (context.epoch, context.epochs) == (1, 3)


@pytest.mark.parametrize("step", [-1, 10])
def test_a_step_outside_of_the_run_is_refused(step):
    with pytest.raises(ValueError, match=rf"step must be in \[0, 10\), got {step}"):
        Context(step=step, steps=10, dim=1)


def test_the_layout_knows_the_dimension():
    assert Context(step=0, steps=1, layout=duties.LAYOUT).dim == duties.DIM
    assert Context(step=0, steps=1, dim=9).layout == Layout.flat(9)


def test_public_rows_need_public_data():
    with pytest.raises(ValueError, match="this method needs public data, got none"):
        Context(step=0, steps=1, dim=4).public_rows(3)


def test_a_release_of_its_own_needs_a_run_around_it():
    with pytest.raises(ValueError, match="a release of its own needs data, and this context has none"):
        Context(step=0, steps=1, dim=4).release(StepPlan(block()).at(1.0))


class Quiet(NoisyPlan):
    """Is charged at its multiplier, and says that its noise is none."""

    @property
    def stds(self):
        return [0.0 for _ in self.blocks]


def test_a_release_of_its_own_has_noise_that_is_what_it_is_charged_by():
    context = Context(step=0, steps=1, dim=4, one_off=lambda plan, step: ())
    assert context.release(StepPlan(block()).at(1.0)) == ()
    with pytest.raises(TypeError, match=r"a release must have its noise, as in release\(plan.at\(8.0\)\), got Quiet"):
        context.release(Quiet(StepPlan(block()), 1.0))
    for wrong in (math.nan, -1.0, 1e-200):
        with pytest.raises(ValueError, match="noise_multiplier must be 0 for no noise, or in"):
            StepPlan(block()).at(wrong)


def test_a_plan_holds_and_places_the_coordinates_that_it_decodes_to():
    StepPlan(block(), moves=Coordinates(torch.arange(2), dim=4), start_at=torch.zeros(4))
    with pytest.raises(ValueError, match="moves must be of the 4 coordinates that the blocks decode to, got 5"):
        StepPlan(block(), moves=Coordinates(torch.arange(2), dim=5))
    with pytest.raises(ValueError, match=r"start_at must have 4 numbers, as the blocks decode to, got \(3,\)"):
        StepPlan(block(), start_at=torch.zeros(3))


class NoPlan(Stateless):
    """Forgot its plan."""


def test_a_method_without_a_plan_is_told_so():
    with pytest.raises(NotImplementedError, match=r"NoPlan must define plan\(context\)"):
        Defense(NoPlan(), 1.0).plan(None, Context(step=0, steps=1, dim=1))


def test_a_defense_is_named_as_its_method_unless_it_is_told():
    assert Defense(NoPlan()).name == "no_plan"
    assert Defense(NoPlan(), name="mine").name == "mine"
    assert dp_sgd().with_noise(2.0) == dp_sgd(noise_multiplier=2.0)


def test_seeds_are_the_same_on_every_machine():
    assert seed_from(0, "coins", 1) == int.from_bytes(hashlib.sha256(b"0/coins/1").digest()[:8], "big") >> 1
    assert 0 <= seed_from("x") < 2**63


@pytest.mark.parametrize("slots", [False, True])
def test_a_plan_written_for_a_context_alone_is_that_of_a_method(slots):
    @dataclasses.dataclass(frozen=True, slots=slots)
    class Plain(Stateless):
        norm: float = 1.0

        def plan(self, context):
            return StepPlan(Block(codec=Everything(context.dim), bound=clip(self.norm)))

    class Remarked(Plain):
        def plan(self, context):
            return StepPlan(*super().plan(context).blocks, remarks=("seen",))

    context = Context(step=0, steps=1, dim=4)
    cases: list[tuple[Any, tuple[str, ...]]] = [(Plain(2.0), ()), (Remarked(2.0), ("seen",))]
    for method, remarks in cases:
        state, plan = method.plan(None, context)
        assert state is None and plan.remarks == remarks and plan.blocks[0].bound == clip(2.0)
        assert method.plan(context).remarks == remarks
        assert method.start(context) is None and method.observe(None, context, (), torch.zeros(4)) is None
        assert isinstance(method, Method)


class Remembering:
    """A method with memory whose plan is whatever it was given."""

    def __init__(self, answer):
        self.answer = answer

    def start(self, context):
        return None

    def plan(self, state, context):
        return self.answer

    def observe(self, state, context, noisy, update):
        return state


@subtests("answer", [None, Block(codec=Everything(3), bound=clip(1.0)), (None, None), ("state",)])
def test_a_plan_that_is_none_is_refused_with_the_name_of_its_defense(answer):
    class Forgetful(Stateless):
        def plan(self, context):
            return answer

    for method, name in ((Forgetful(), "forgetful"), (Remembering(answer), "remembering")):
        with pytest.raises(TypeError, match=f"plan of '{name}' must return a StepPlan, .* got"):
            Defense(method).plan(None, Context(step=0, steps=1, dim=3))


def test_a_plan_without_the_state_or_of_another_length_is_refused_in_those_words():
    plan = StepPlan(Block(codec=Everything(3), bound=clip(1.0)))

    class Short(Stateless):
        def plan(self, context):
            return plan

    context, wrong = Context(step=0, steps=1, dim=3), cast(Any, Remembering(plan))
    with pytest.raises(TypeError, match="got StepPlan alone, and it has a state: return state, plan"):
        Defense(wrong).plan(None, context)
    assert Defense(Short()).plan(None, context)[1] is plan
    with pytest.raises(ValueError, match=r"plan of 'short' must have codecs of the 4 parameters, .* got one of 3"):
        Defense(Short()).plan(None, Context(step=0, steps=1, dim=4))


def test_a_method_that_cannot_be_called_as_it_will_be_is_refused_before_a_run():
    class Deaf(Stateless):
        def plan(self, context):
            return StepPlan(Block(codec=Everything(3), bound=clip(1.0)))

        def observe(self, state, context, noisy):  # pyright: ignore[reportIncompatibleMethodOverride]
            return state

    def logged(function):
        @functools.wraps(function)
        def called(self, state, context, noisy, update):
            return function(self, state, update)

        return called

    class Logged(Stateless):
        def plan(self, context):
            return StepPlan(Block(codec=Everything(3), bound=clip(1.0)))

        @logged
        def observe(self, state, update):  # pyright: ignore[reportIncompatibleMethodOverride]
            return state

    class Unreadable:
        start, plan, observe = max, max, max

    assert Defense(Logged()).name == "logged" and Defense(cast(Any, Unreadable())).name == "unreadable"
    with pytest.raises(TypeError, match=r"observe of Deaf must take \(self, state, context, noisy, update\), got one"):
        Defense(Deaf())


def test_what_is_no_method_is_refused_when_a_defense_is_made_of_it():
    class Half:
        def plan(self, context):
            return None

    made = object.__new__(Defense)  # past the types that are checked while tests run, and nowhere else
    for method, words in ((Half(), "got Half, which has no start and no observe"), (Half, "got the class Half")):
        object.__setattr__(made, "method", method)
        with pytest.raises(TypeError, match=f"method must be an instance .* {words}"):
            made.__post_init__()


def test_a_stateless_plan_with_a_state_is_refused_when_its_class_is_made():
    with pytest.raises(TypeError, match=r"plan of Wrong, which is Stateless, must take \(self, context\), got"):

        class Wrong(Stateless):
            def plan(self, state, context):
                return None
