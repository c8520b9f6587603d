"""A training step under a defense: plan, release, charge to the ledger, post-process, observe.

`train`, a shared update and `predict` take the same step. They differ in the executor of a plan (an engine on data, or
a dry run), in the ledger that is charged, and in the way the parameters move afterwards.

Guarantee:
    An executed plan is charged before a method or an optimizer sees its release.
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
"""Executes a plan with its noise on the batch of a step or on all the data, and returns the release."""


@dataclass
class Account:
    """Ledger of a run, and the remarks that its claim and its record must carry.

    Attributes:
        ledger: ledger of the releases.
        exact: whether the noise is a discrete Gaussian on sums of integers.
        remarks: mark of a record -> sentence for the claim, empty if the mark is enough.
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
        """Records an executed plan, with arguments as for `Ledger.record`."""
        self.ledger.record(plan, step=step, one_off=one_off, trial=trial, sampling=sampling, exact=self.exact)
        self.remarks |= dict.fromkeys(plan.plan.remarks, "") | unverified(plan=plan.plan)

    def drew(self, noise: Noise, multiplier: float, one_offs: Iterable[Step] = ()) -> NoiseSource | Literal["none"]:
        """Returns the kind of the noise that was drawn; "none" if no release had any.

        A one-off release, or a step's trial, has its own noise, even if the steps have none.

        Args:
            noise: its source, if any was drawn.
            multiplier: noise multiplier of the steps.
            one_offs: recorded one-off releases. Noise on unbounded contributions proves nothing and has no multiplier
                in the ledger, but it is drawn, too.
        """
        own = any(entry.noise_multiplier is not None for entry in self.ledger.entries)
        noisy = multiplier > 0 or own or any(release.noise_multiplier > 0 for release in one_offs)
        return noise.kind if noisy else "none"

    def one_off(self, execute: Execute) -> Callable[[NoisyPlan, int], tuple[Tensor, ...]]:
        """Returns `Context.one_off`: a function that charges a plan without sampling and executes it on all the data.

        Args:
            execute: executes a plan on all the data.
        """

        def release(plan: NoisyPlan, step: int) -> tuple[Tensor, ...]:
            self.charge(plan, step=step, one_off=True)
            return execute(plan).noisy

        return release


@dataclass
class Stepper:
    """State and context of a defense from step to step of a run.

    Attributes:
        defense: with its noise multiplier set.
        context: context of the current step, or of the last step with its update.
        place: writes parameters [dim] into the model.
        state: the method's state.
        moves: coordinates that the optimizer may move after the step; None for all.
        trial: decides whether the step stands; None if it always does.
        stands: whether the last step with a trial stood.
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
        """Gets the method's first state, for which it may spend one-off releases."""
        self.state = self.defense.start(self.context)

    @property
    def update(self) -> Float[Tensor, " dim"]:
        """The update of the last step, as the optimizer gets it.

        Raises:
            ValueError: before the first step.
        """
        if self.context.update is None:
            raise ValueError("an update must follow a step, and none was taken")
        return self.context.update

    def hold(self, moved: Float[Tensor, " dim"]) -> None:
        """Restores coordinates that the plan holds and the optimizer moved, by momentum or weight decay.

        Args:
            moved: the parameters after the optimizer's step.
        """
        if self.moves is not None and self.context.parameters is not None:
            kept = self.moves.kept.to(moved.device)
            masked = self.context.parameters.scatter(0, kept, moved.index_select(0, kept))
            if not torch.equal(masked, moved):  # without momentum nothing was moved
                self.place(masked)

    def judge(self, execute: Execute, account: Account, drawn: Sampling | None = None) -> Tensor | None:
        """Executes and charges the trial of a step that has moved the parameters, and undoes the step if it fails.

        Args:
            execute: executes a plan on the trial's own sample.
            account: charged for the trial.
            drawn: sampler of the trial; Poisson sampling at the trial's rate if None.

        Returns:
            The trial's release, undivided; None without a trial. Afterwards `stands` has the verdict.
        """
        if self.trial is None or self.before is None:
            self.stands = True
            return None
        drawn = drawn or poisson(self.trial.rate)
        released = execute(self.trial.plan).noisy[0]
        account.charge(self.trial.plan, step=self.context.step, trial=True, sampling=drawn)
        # Public, as the divisor of the step is.
        expected = self.context.expected_batch * drawn.rate / account.ledger.sampling.rate
        self.stands = float(released) / expected < self.trial.below
        if not self.stands:
            self.state, parameters, update = self.before
            self.context = replace(self.context, parameters=parameters, update=update)
            self.place(parameters)
        return released

    def take(self, step: int, parameters: Float[Tensor, " dim"], execute: Execute, account: Account) -> Step:
        """Executes and charges a step; `update` is then the input of the optimizer.

        Args:
            step: its number.
            parameters: the parameters before it.
            execute: executes a plan on the step's batch, which must not be known before the call.
            account: charged for the step.

        Returns:
            The step as seen by an observer of every noisy block.
        """
        # Before the plan: draws for public gradients are keyed by the number of the current step.
        self.context = context = self.context.at(step, parameters=parameters)
        earlier = self.state, parameters, context.update
        state, plan = self.defense.plan(self.state, context)
        self.moves, self.trial = plan.moves, plan.trial
        self.before = earlier if plan.trial is not None else None
        if plan.start_at is not None:
            # A copy: a method may keep the tensor it names, and the model moves on.
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
    """Applies a plan's post-processing to an update.

    Args:
        post: the plan's map.
        update: sums divided by the expected batch.

    Raises:
        ValueError: the result is no update; a user's own map is tried here for the first time.
    """
    after = post(update)
    if not isinstance(after, Tensor) or after.shape != update.shape:
        form = list(after.shape) if isinstance(after, Tensor) else type(after).__name__
        raise ValueError(f"post must return an update as long as it was given, {list(update.shape)}, got {form}")
    return after
