"""One training step under a defense: plan, release, charge to the ledger, post-process, observe.

`train`, a shared update and `predict` take the same step. They differ in who executes a plan (an engine on data, or a
dry run), in the ledger that pays, and in what moves the parameters afterwards.

Guarantee:
    A plan that was executed is charged before a method or an optimizer sees what it released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ..gradients.executor import Release
from ..plan.codec import Coordinates
from ..plan.defense import Context, Defense, NoisyPlan, State, Trial
from ..plan.post import Post
from ..privacy.ledger import Ledger
from ..privacy.sampling import Sampling, poisson
from ..randomness.noise import Noise, NoiseSource
from .assumptions import unverified
from .transcript import Step

Execute = Callable[[NoisyPlan], Release]
"""Plan with its noise -> release, on the batch of a step or on all the data."""


@dataclass
class Account:
    """A run's ledger, and the remarks that its claim and its record must carry.

    Attributes:
        ledger: of the releases.
        exact: whether the noise is a discrete Gaussian on sums of whole numbers.
        remarks: mark of a record -> sentence for the claim, empty where the mark says it all.
    """

    ledger: Ledger
    exact: bool = False
    remarks: dict[str, str] = field(default_factory=dict)

    def charge(
        self,
        plan: NoisyPlan,
        *,
        step: int,
        one_off: bool = False,
        trial: bool = False,
        sampling: Sampling | None = None,
    ) -> None:
        """Records one executed plan, with arguments as for `Ledger.record`."""
        self.ledger.record(plan, step=step, one_off=one_off, trial=trial, sampling=sampling, exact=self.exact)
        self.remarks |= dict.fromkeys(plan.plan.remarks, "") | unverified(plan=plan.plan)

    def drew(self, noise: Noise, multiplier: float, one_offs: Iterable[Step] = ()) -> NoiseSource | Literal["none"]:
        """Kind of the noise that was drawn; "none" where no release had any.

        A release beside the steps, or a step's trial, has noise of its own, also where the steps have none.

        Args:
            noise: where it came from, if any was.
            multiplier: of the steps.
            one_offs: releases beside the steps that were recorded. The ledger has no multiplier for noise on
                contributions of any size, which proves nothing but is drawn, too.
        """
        own = any(entry.noise_multiplier is not None for entry in self.ledger.entries)
        noisy = multiplier > 0 or own or any(one.noise_multiplier > 0 for one in one_offs)
        return noise.kind if noisy else "none"

    def one_off(self, execute: Execute) -> Callable[[NoisyPlan, int], tuple[Tensor, ...]]:
        """What `Context.one_off` calls: executes a plan on all the data and charges it without sampling.

        Args:
            execute: on all the data.
        """

        def release(plan: NoisyPlan, step: int) -> tuple[Tensor, ...]:
            self.charge(plan, step=step, one_off=True)
            return execute(plan).noisy

        return release


@dataclass
class Stepper:
    """A defense's state and context as a run goes from step to step.

    Attributes:
        defense: with its noise multiplier set.
        context: of the step under way, or of the last one with its update.
        place: puts the model to other parameters [dim].
        state: what the method remembers.
        moves: coordinates that the optimizer may move after the step; None for all.
        trial: decides whether the step stands; None where it does.
        stands: whether the last step with a trial did.
        before: state, parameters and last update before a step on trial.
    """

    defense: Defense
    context: Context
    place: Callable[[Tensor], Any]
    state: State = None
    moves: Coordinates | None = None
    trial: Trial | None = None
    stands: bool = True
    before: tuple[State, Tensor, Tensor | None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.context = replace(self.context, noise_multiplier=self.defense.calibrated_multiplier)

    def start(self) -> None:
        """Asks the method for its first state, for which it may spend releases of its own."""
        self.state = self.defense.start(self.context)

    @property
    def update(self) -> Float[Tensor, " dim"]:
        """What the optimizer gets of the last step.

        Raises:
            ValueError: before the first one.
        """
        if self.context.update is None:
            raise ValueError("an update must follow a step, and none was taken")
        return self.context.update

    def hold(self, moved: Float[Tensor, " dim"]) -> None:
        """Puts coordinates back that the optimizer moved, by momentum or weight decay, and the plan holds.

        Args:
            moved: the parameters after the optimizer's step.
        """
        if self.moves is not None and self.context.parameters is not None:
            kept = self.moves.kept.to(moved.device)
            held = self.context.parameters.scatter(0, kept, moved.index_select(0, kept))
            if not torch.equal(held, moved):  # without momentum nothing was moved
                self.place(held)

    def judge(self, execute: Execute, account: Account, drawn: Sampling | None = None) -> Tensor | None:
        """Executes and charges the trial of a step that has moved the parameters, and takes the step back if it fails.

        Args:
            execute: on a sample of the trial's own.
            account: who pays.
            drawn: how that sample was; by Poisson sampling at the trial's rate where None.

        Returns:
            What was released, undivided; None for a step that stands without a trial. `stands` is then known.
        """
        if self.trial is None or self.before is None:
            self.stands = True
            return None
        drawn = drawn or poisson(self.trial.rate)
        released = execute(self.trial.plan).noisy[0]
        account.charge(self.trial.plan, step=self.context.step, trial=True, sampling=drawn)
        # Public, as the step's own divisor is.
        expected = self.context.expected_batch * drawn.rate / account.ledger.sampling.rate
        self.stands = float(released) / expected < self.trial.below
        if not self.stands:
            self.state, parameters, update = self.before
            self.context = replace(self.context, parameters=parameters, update=update)
            self.place(parameters)
        return released

    def take(self, step: int, parameters: Float[Tensor, " dim"], execute: Execute, account: Account) -> Step:
        """Executes and charges one step; `update` is then what the optimizer gets.

        Args:
            step: its number.
            parameters: before it.
            execute: on the step's batch, of which nothing may be known before it is called.
            account: who pays.

        Returns:
            The step as it looks to whoever sees every noisy block.
        """
        # Before the plan: what is drawn for public gradients is drawn by the number of the step under way.
        self.context = context = self.context.at(step, parameters=parameters)
        earlier = self.state, parameters, context.update
        state, plan = self.defense.plan(self.state, context)
        self.moves, self.trial = plan.moves, plan.trial
        self.before = earlier if plan.trial is not None else None
        if plan.start_at is not None:
            # A copy: a method may keep what it names, and the model moves on.
            parameters = plan.start_at.to(parameters).clone()
            self.context = context = replace(context, parameters=parameters)
            self.place(parameters)
        noisy_plan = NoisyPlan(plan, self.defense.calibrated_multiplier)
        out = execute(noisy_plan)
        account.charge(noisy_plan, step=step)
        update = posted(plan.post, out.total / context.expected_batch)
        self.state = self.defense.observe(state, context, out.noisy, update)
        self.context = replace(context, update=update)  # a function of releases, so the next plan may read it
        rate = account.ledger.sampling.rate
        return Step(step, parameters, noisy_plan.noise_multiplier, context.expected_batch, rate, noisy_plan, out.noisy)


def posted(post: Post, update: Float[Tensor, " dim"]) -> Float[Tensor, " dim"]:
    """What a plan's map makes of an update.

    Args:
        post: the plan's map.
        update: sums divided by the expected batch.

    Raises:
        ValueError: it is no update any more; a map of somebody's own is tried here for the first time.
    """
    after = post(update)
    if not isinstance(after, Tensor) or after.shape != update.shape:
        got = list(after.shape) if isinstance(after, Tensor) else type(after).__name__
        raise ValueError(f"post must return an update as long as it was given, {list(update.shape)}, got {got}")
    return after
