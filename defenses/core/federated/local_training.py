"""Local training of a client: tau steps of its defense from the global model, on the network that all clients share.

A step is the central step of `training/step.py`, with the client's own noise, sampler, states and account; the rule of
the client maps the noisy update before the optimizer, whose state starts empty every round. Step number s = r tau + t
is the same for all clients, also after rounds that a client misses, so that masks and bases agree.

Guarantee:
    A batch is drawn after its plan, by the client's key, and every executed plan is charged to the client's account
    before a rule sees its release.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..gradients.augmentation import draws, draws_at_start, global_draws
from ..gradients.executor import Engine, Release
from ..plan.defense import NoisyPlan, StepPlan
from ..plan.public_data import selected
from ..privacy.sampling import poisson
from ..randomness.keys import global_generators, key_from
from ..training.settings import Recipe
from ..training.transcript import Step
from .client import Client
from .round import Round
from .rules import ClientRule


@dataclass(frozen=True, eq=False)
class LocalResult:
    """Result of a client's round.

    Attributes:
        delta: local minus global parameters [dim].
        plans: executed plans with their noise, in order.
    """

    delta: Float[Tensor, " dim"]
    plans: tuple[NoisyPlan, ...]

    @property
    def step_plans(self) -> tuple[StepPlan, ...]:
        """The executed plans without their noise."""
        return tuple(plan.plan for plan in self.plans)


class LocalTrainer:
    """The network and the engine on which all clients train, one after another.

    Attributes:
        network: the network.
        engine: of that network.
        parameters: its trained parameters.
        step: number of the current local step.
        round: current round; None before the first.
        round_at_global_model: round whose global model the network has; None after a local step has moved it.
        recorder: called with (client, step) after every local step, for an audit; the step has its noisy sums, which no
            server sees.
    """

    def __init__(
        self, network: nn.Module, engine: Engine, rule: ClientRule, *, recipe: Recipe, lr: float, steps: int, seed: int
    ) -> None:
        """Takes what all clients share.

        Args:
            network: the network in training.
            engine: of that network, without a noise source of its own.
            rule: the clients' rule.
            recipe: optimizer, momentum and schedule of the local steps.
            lr: learning rate.
            steps: local steps of a client that takes part in every round.
            seed: public seed.
        """
        self.network, self.engine, self._rule, self._recipe, self._seed = network, engine, rule, recipe, seed
        self._lr, self._steps = lr, steps
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.step = 0
        self.round: Round | None = None
        self.round_at_global_model: int | None = None
        self.recorder: Callable[[int, Step], None] | None = None

    def rates(self, first: int, count: int) -> tuple[float, ...]:
        """Returns the learning rates of consecutive local steps."""
        return tuple(self._lr * self._recipe.rate(step, self._steps) for step in range(first, first + count))

    def place(self, parameters: Float[Tensor, " dim"], number: int | None) -> None:
        """Writes parameters into the network.

        Args:
            parameters: flat vector.
            number: round whose global model they are; None for others.
        """
        self.engine.layout.write(self.network, parameters)
        self.round_at_global_model = number

    def enter(self, client: Client, round: Round) -> None:
        """Puts the network at the global model, and starts the client's defense in its first round."""
        self.place(round.parameters, round.number)
        self.step = round.context.step
        release = client.steps.one_off(partial(self._on_everybody, client, round))
        client.stepper.context = replace(client.stepper.context, one_off=release)
        if not client.begun:
            # Step 0, wherever the client's first round is: a method's one-off releases come before its steps.
            client.stepper.context = client.stepper.context.at(0, parameters=round.parameters.clone())
            with global_generators(global_draws(self._seed, None), round.parameters.device):
                client.stepper.start()
            client.begun = True

    def run(self, client: Client, round: Round, steps: int) -> LocalResult:
        """Takes local steps from the global model; the releases of the client's rule come first.

        Args:
            client: after `enter`; its states and account change.
            round: the round.
            steps: number of local steps, fewer than `round.local_steps` for a client that is lost.
        """
        first = round.context.step
        self._begin(client, round)
        plans: list[NoisyPlan] = []
        optimizer = self._recipe.optimizer_of(self.parameters, self._lr)
        # A schedule multiplies the optimizer's own rates; a user's function may set several.
        rates = [group["lr"] for group in optimizer.param_groups]
        for step in range(first, first + steps):
            self.step = step
            plans.append(self._step(client, round, optimizer, rates, step))
        delta = self.engine.layout.read(self.network) - round.parameters
        optimizer.zero_grad(set_to_none=True)
        return LocalResult(delta, tuple(plans))

    def _begin(self, client: Client, round: Round) -> None:
        """Executes the releases of the client's rule on all its data, and charges them."""
        noisy: list[Tensor] = []
        for plan in self._rule.releases(self.engine.layout.dim):
            client.account.charge(plan, step=round.context.step, one_off=True)
            noisy += self._on_everybody(client, round, plan).noisy
        client.state = self._rule.begin(client.state, round, noisy, client.size)

    def _execute(self, client: Client, round: Round, plan: NoisyPlan, chosen: Tensor, seed: int) -> Release:
        """Executes a plan on a client's records at these positions."""
        chosen = chosen.to(client.inputs.device)
        inputs, labels = selected(client.inputs, chosen), selected(client.labels, chosen)
        targets = self._rule.targets(client.state, round, inputs, labels)
        return self.engine.run(plan, inputs, targets, seed=seed, noise=client.noise, memory=client.memory)

    def _on_everybody(self, client: Client, round: Round, plan: NoisyPlan) -> Release:
        """Executes a one-off release of a method on all of a client's data."""
        everybody = torch.arange(len(client.inputs), device=client.inputs.device)
        return self._execute(client, round, plan, everybody, draws_at_start(self._seed))

    def _step(
        self, client: Client, round: Round, optimizer: torch.optim.Optimizer, rates: Sequence[float], step: int
    ) -> NoisyPlan:
        """Takes a local step, and its trial if the plan has one; returns the executed plan."""
        layout, stepper = self.engine.layout, client.stepper
        seed = draws(self._seed, step)
        point = layout.read(self.network)

        def execute(plan: NoisyPlan) -> Release:
            chosen = client.sampling.indices(step, len(client.inputs), client.sampler_key)
            return self._execute(client, round, plan, chosen, seed)

        with global_generators(global_draws(self._seed, step), point.device):
            observed = stepper.take(step, point, execute, client.steps)
        if self.recorder is not None:
            self.recorder(client.number, observed)
        undo = copy.deepcopy(optimizer.state_dict()) if stepper.trial is not None else None
        # The parameters of the step: a plan may start at others than the last step ended at.
        corrected = self._rule.correct(client.state, round, observed.parameters, stepper.update)
        factor = self._recipe.rate(step, self._steps)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        gradients = layout.unflatten(corrected.clone())
        for parameter, gradient in zip(self.parameters, gradients.values(), strict=True):
            parameter.grad = gradient
        optimizer.step()
        self.round_at_global_model = None
        if stepper.moves is not None:
            stepper.hold(layout.read(self.network))
        if stepper.trial is not None and undo is not None:
            self._try(client, round, step, seed)
            if not stepper.stands:
                optimizer.load_state_dict(undo)
        if observed.plan is None:
            raise ValueError("a step must have a plan, got none")
        return observed.plan

    def _try(self, client: Client, round: Round, step: int, seed: int) -> None:
        """Executes and charges a step's trial on its own sample; a step that fails is undone."""
        trial = client.stepper.trial
        if trial is None:
            return
        # Another key: with the step's, the step's participants would reveal the trial's.
        sampling, key = poisson(trial.rate), key_from("trial", client.sampler_key)

        def execute(plan: NoisyPlan) -> Release:
            return self._execute(client, round, plan, sampling.indices(step, len(client.inputs), key), seed)

        client.stepper.judge(execute, client.steps, sampling)


def turn(step: int, batch: int, examples: int) -> Int[Tensor, " batch"]:
    """Returns the positions of a step's examples: consecutive, starting over after the last example."""
    return torch.arange(step * batch, (step + 1) * batch) % examples


def moved(plan: StepPlan, sums: tuple[Tensor, ...], expected_batch: float) -> Float[Tensor, " dim"]:
    """Returns a plain SGD step over the learning rate: block sums, decoded, divided, post-processed, masked.

    Args:
        plan: plan of the step.
        sums: undivided sums, per block.
        expected_batch: the public divisor.
    """
    decoded = [b.codec.decode(values) for b, values in zip(plan.blocks, sums, strict=True) if b.updates]
    update = plan.post(sum(decoded[1:], start=decoded[0]) / expected_batch)
    if plan.moves is None:
        return update
    return plan.moves.decode(plan.moves.encode(update.unsqueeze(0)).squeeze(0))
