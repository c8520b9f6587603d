"""Steps that are taken once more: the same ones, and a sentence where they cannot be."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from leakbench.defenses.core import (
    Block,
    Context,
    Defense,
    Everything,
    Scaled,
    Stateless,
    StepPlan,
    clip,
    cross_entropy,
    secure,
    seeded,
    unbounded,
)
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dp_snip import dp_snip
from leakbench.defenses.dpdr import dpdr
from leakbench.defenses.random_sparsification import random_sparsification

from ....parameters import subtests
from ... import duties

DEFENSE = dpdr(noise_multiplier=1.0)


@dataclass(frozen=True)
class UnboundedAtStart(Stateless):
    """Releases a noisy sum of contributions of any size before the first step, which proves nothing."""

    def start(self, context: Context) -> None:
        context.release(StepPlan(Block(codec=Everything(context.dim), bound=unbounded())).at(2.0))

    def plan(self, context: Context) -> StepPlan:
        return StepPlan(Block(codec=Everything(context.dim), bound=clip(1.0)))


@dataclass(frozen=True)
class DrawsAtStart:
    """Keeps numbers that PyTorch's own generator gives it at the start, and moves by the first of them."""

    def start(self, context: Context) -> float:
        return float(torch.rand(()))

    def plan(self, state: float, context: Context) -> tuple[float, StepPlan]:
        return state, StepPlan(Block(codec=Scaled(torch.full((context.dim,), state)), bound=clip(1.0)))

    def observe(self, state: float, context: Context, noisy: tuple[Tensor, ...], update: Tensor) -> float:
        return state


def test_a_run_of_which_a_few_steps_were_kept_is_taken_whole():
    whole = duties.trained(DEFENSE)
    few = duties.trained(DEFENSE, memory=0, always=[duties.STEPS - 1])
    assert len(few.transcript.steps) == 1 and few.transcript.truncated
    for mine, theirs in zip(duties.begun(DEFENSE).retake(few), whole.transcript.steps, strict=True):
        assert mine.step == theirs.step and torch.equal(mine.parameters, theirs.parameters)
        assert duties.same(mine.noisy, theirs.noisy)


def test_a_reader_that_keeps_no_graphs_gets_the_same_steps():
    run = duties.trained(DEFENSE)
    for mode in (torch.no_grad(), torch.inference_mode()):
        again = duties.begun(DEFENSE)
        with mode:
            assert len(list(again.retake(run))) == duties.STEPS


def test_an_average_of_the_parameters_is_what_the_run_ends_with():
    run = duties.trained(DEFENSE, average=0.9)
    assert len(list(duties.begun(DEFENSE, average=0.9).retake(run))) == duties.STEPS
    with pytest.raises(ValueError, match="got other numbers at the end"):
        list(duties.begun(DEFENSE, average=0.01).retake(run))


def test_a_run_that_diverged_is_taken_once_more():
    def broken(outputs, labels):
        return cross_entropy(outputs, labels) * math.inf

    settings = {"loss": broken, "momentum": 0.0, "unchecked": True}
    run = duties.trained(dp_sgd(noise_multiplier=0.0), **settings)
    found = list(duties.begun(dp_sgd(noise_multiplier=0.0), **settings).retake(run))
    assert len(found) == duties.STEPS


@subtests("other", [{"noise": seeded(8)}, {"seed": 8}, {"sampler_key": 8}, {"lr": 0.2}])
def test_another_run_is_refused_where_a_step_was_kept_and_else_at_the_end(other):
    defense = random_sparsification(noise_multiplier=1.0, final_sparsity=0.5)
    run = duties.trained(defense)
    with pytest.raises(ValueError, match=r"must be the same bit for bit, got other numbers at step [012]:"):
        list(duties.begun(defense, **other).retake(run))
    few = duties.trained(defense, memory=0, always=[0] if "lr" in other else [])
    with pytest.raises(ValueError, match=r"must be the same bit for bit, got other numbers at the end: the device"):
        list(duties.begun(defense, **other).retake(few))


def test_noise_that_nobody_can_draw_again_is_refused_before_a_step():
    run = duties.trained(DEFENSE)
    with pytest.raises(ValueError, match="noise must be seeded for steps to be taken once more, got secure"):
        next(duties.begun(DEFENSE, noise=secure()).retake(run))
    silent = dp_sgd(noise_multiplier=0.0)
    run = duties.trained(silent, noise=secure())
    assert len(list(duties.begun(silent, noise=secure()).retake(run))) == duties.STEPS


def test_a_noisy_release_beside_steps_without_noise_is_not_made_a_second_time_with_fresh_noise():
    behind_mask = dp_snip(noise_multiplier=0.0)
    run = duties.trained(behind_mask, noise=secure(), memory=0)
    again = duties.begun(behind_mask, noise=secure())
    with pytest.raises(ValueError, match="noise must be seeded for steps to be taken once more, got secure"):
        next(again.retake(run))
    assert not again.transcript.one_offs
    run = duties.trained(behind_mask, memory=0)
    assert len(list(duties.begun(behind_mask).retake(run))) == duties.STEPS


def test_noise_on_contributions_of_any_size_beside_steps_without_noise_is_not_drawn_again_either():
    unbounded = Defense(UnboundedAtStart(), noise_multiplier=0.0)
    run = duties.trained(unbounded, noise=secure(), memory=0)
    assert run.transcript.one_offs[0].noise_multiplier == 2.0
    with pytest.raises(ValueError, match="noise must be seeded for steps to be taken once more, got secure"):
        next(duties.begun(unbounded, noise=secure()).retake(run))


def test_what_a_method_draws_at_the_start_from_pytorchs_own_generator_is_drawn_again():
    drawing = Defense(DrawsAtStart(), noise_multiplier=1.0)
    run = duties.trained(drawing)
    torch.manual_seed(1)
    assert len(list(duties.begun(drawing).retake(run))) == duties.STEPS


def test_a_recording_that_would_resume_or_keep_no_step_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    run = duties.trained(DEFENSE, checkpoint=path)
    settings: list[dict[str, Any]] = [{"checkpoint": path}, {"observer": "final"}, {"memory": 0}]
    for recording in settings:
        with pytest.raises(ValueError, match="recording of steps that are taken once more must be"):
            list(duties.begun(DEFENSE, **recording).retake(run))
