"""Simulation of an update shared by a client of federated learning, from a model, a batch and a defense.

The client's steps before the shared step run on `history`, because plans of some methods depend on past releases:
DPDR's direction, the ranks of ranked sparsification. Engine and step are those of training. A client may also take
several local steps, each under the defense, and share only their sum (`local_steps.py`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leakbench.attacks.core import Examples, NotApplicable, Observation
from leakbench.defenses.core import (
    Account,
    Claim,
    Context,
    Defense,
    Engine,
    Execution,
    Ledger,
    Loss,
    Noise,
    NoisyPlan,
    PublicGradients,
    Release,
    Step,
    Stepper,
    assumptions,
    cross_entropy,
    from_os,
    full,
    logistic,
    partition,
    refuse_shared,
    unverified,
)
from leakbench.defenses.core.federated.local_training import turn
from leakbench.defenses.core.gradients.checks.devices import refuse_other_device

from ..scoring.truth import GroundTruth
from .candidates import copied
from .local_steps import LocalTraining, unknown_to_server
from .observe import PublicKnowledge, observe, observe_local
from .observed_step import Observed


@dataclass(frozen=True)
class Shared:
    """A simulated update, with the auditor's knowledge about it.

    Attributes:
        observation: the server's view.
        truth: the ground truth, hidden from the server.
        ledger: the releases that the shared batch took part in, charged without sampling: its participation is known.
        engine: method that computed the clipped sums.
        noise: kind of noise drawn; `none` if no release had any.
        public_used: whether the defense read public examples.
        remarks: remarks on the executed plans, without repetition, and flags for third-party components
            (`unverified_...`).
        unverified: a sentence for each of these flags.
    """

    observation: Observation
    truth: GroundTruth
    ledger: Ledger
    engine: str
    noise: Literal["none", "seeded", "os", "secure"] = "none"
    public_used: bool = False
    remarks: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    def claim(self, delta: float) -> Claim:
        """Returns the privacy guarantee of the releases at `delta`, with its assumptions."""
        assumes = assumptions(self.noise, self.ledger.sampling, key_given=False, public_used=self.public_used)
        return replace(self.ledger.claim(delta), assumes=assumes, unverified=self.unverified)


def share_update(
    model: nn.Module, inputs: Tensor, labels: Tensor, defense: Defense, **settings: Any
) -> tuple[Observation, GroundTruth]:
    """Returns the server's view of a shared update, and the ground truth; settings as in `simulate_share`."""
    shared = simulate_share(model, inputs, labels, defense, **settings)
    return shared.observation, shared.truth


def simulate_share(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    defense: Defense,
    *,
    public_knowledge: PublicKnowledge | None = None,
    step: int = 0,
    steps: int | None = None,
    lr: float = 0.1,
    local: LocalTraining | None = None,
    history: tuple[Tensor, Tensor] | None = None,
    population: Examples | None = None,
    prior: Examples | None = None,
    seed: int = 0,
    noise: Noise | None = None,
    execution: Execution | None = None,
) -> Shared:
    """Simulates the update that one client shares at one step, with a privacy ledger for its batch.

    Args:
        model: the model at the client's first step; not modified.
        inputs: the client's batch at the shared step [b, *shape]; all its examples if it takes several local steps.
        labels: its labels [b], int64.
        defense: with its noise multiplier set; 0 shows the protection by the release alone.
        public_knowledge: shapes, input range, loss, and a copy of the public examples if the attacker gets one.
            None assumes inputs in [0, 1], grants `population`, and takes cross-entropy with as many classes as outputs;
            a single output is the logit of two classes.
        step: number of the shared step; the steps before it are executed first.
        steps: planned length, used by schedules; None for a run that ends at the last shared step.
        lr: learning rate of the client's plain SGD.
        local: several steps of the client, from `step` on, whose sum it shares; None for a single step on its batch.
            Each step has its own noise and charge; an example is charged for the steps that contain it, one per epoch.
        history: (inputs, labels) for the earlier steps, in consecutive batches; None for the client's own examples.
        population: public examples, which the defense may read.
        prior: candidates for the first record of the batch, for an attacker who has the other records and picks the
            right candidate (`targets.candidate_prior.Prior.draw`); a result on such an update is scored as a choice.
        seed: key of the public randomness.
        noise: secret noise source; None for a key from the operating system.
        execution: engine, memory and device.

    Returns:
        The server's view (including labels and batch size, for attacks that declare this knowledge), the ground truth,
        and the ledger.

    Raises:
        ValueError: several input tensors, an uncalibrated defense, a model that mixes examples, an empty batch or
            history, a step below 0, or a population that holds an input of the batch; local steps that do not divide
            the examples or do not begin an epoch, or whose plans depend on earlier local releases.
        NotApplicable: a prior together with several local steps.
    """
    if not isinstance(inputs, Tensor):
        raise ValueError(
            f"inputs of a shared update must be one tensor, got {type(inputs).__name__}: attacks search for one"
        )
    if step < 0:
        raise ValueError(f"step must be at least 0, got {step}")
    if local is not None:
        per_epoch = local.steps_per_epoch(len(inputs))
        if step % per_epoch:
            # The ledger assumes whole epochs: each example is in exactly one step of each epoch.
            raise ValueError(f"step must begin an epoch, a multiple of the {per_epoch} local steps of one, got {step}")
        if local.steps(len(inputs)) == 1:
            local = None
        elif prior is not None:
            raise NotApplicable(
                f"a prior is for one step: of the sum of {local.steps(len(inputs))} local steps nothing is left that "
                "is one record's alone"
            )
    execution = execution or Execution()
    batch, past, public = _on_device(execution.device, (inputs, labels), history, population)
    if prior is not None:
        prior = copied(_moved(prior, execution.device))
    if public_knowledge is None:
        public_knowledge = _usual_knowledge(model, batch[0], public)
    client = _Client(model, batch, past, defense, public_knowledge.loss, noise or from_os(), execution, local)
    own = 1 if local is None else local.steps(len(inputs))
    # Schedules of a method, such as a growing sparsity, depend on the planned length.
    client.start(public, steps=steps or step + own, seed=seed)
    for earlier in range(step):
        client.step(earlier, shared=False, lr=lr)
    if local is not None:
        client.refuse_unknown_plans(step, own)
    shared_steps = [client.step(number, shared=True, lr=lr) for number in range(step, step + own)]
    return client.shares(shared_steps, public_knowledge, public, prior, lr=lr)


class _Client:
    """A client in training, up to its shared step or steps.

    Attributes:
        size: examples per step.
        local: its local steps; None if it shares a single step.
        account: ledger and remarks of the releases that its own batch took part in.
        others: ledger and remarks of the steps on the history, which are not charged to the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: tuple[Tensor, Tensor],
        past: tuple[Tensor, Tensor] | None,
        defense: Defense,
        loss: Loss,
        noise: Noise,
        execution: Execution,
        local: LocalTraining | None,
    ) -> None:
        """Takes a copy of the model; nothing is released yet."""
        _refuse_lengths("inputs and labels must have", batch)
        self.defense, self.sigma, self.noise = defense, defense.calibrated_multiplier, noise
        self.batch, self.past, self.local = batch, past, local
        self.size = len(batch[0]) if local is None else local.batch
        self.per_epoch = 1 if local is None else local.steps_per_epoch(len(batch[0]))
        # In evaluation mode: dropout would make the release depend on random draws that no simulation can repeat.
        self.model = copy.deepcopy(model).to(batch[0].device).eval()
        self.runner = Engine(
            self.model,
            loss=loss,
            noise=noise,
            microbatch=execution.microbatch,
            memory_budget=execution.memory_budget,
            precision=execution.precision,
            engine=execution.engine,
            expected_batch=self.size,
            unchecked=execution.unchecked,
        )
        if past is not None:
            _refuse_lengths("history must be (inputs, labels) of", past)
        # Rate 1, without amplification: the attacker of an update knows that the batch is in it. With several local
        # steps, an example is in one step per epoch, at the same position in each.
        sampling = full() if self.per_epoch == 1 else partition(1 / self.per_epoch)
        self.account = Account(Ledger(sampling), noise.exact, unverified(noise=noise, defense=defense))
        self.others = Account(Ledger(full()), noise.exact)

    def start(self, population: Examples | None, *, steps: int, seed: int) -> None:
        """Starts the method; a one-off release that it makes is computed on the batch and charged to it."""
        self.public = None
        if population is not None:
            refuse_shared(self.batch[0], population.inputs)  # an input that is public is no secret to attack
            self.public = PublicGradients(self._gradients, population.inputs, population.labels)
        context = Context(
            step=0,
            steps=steps,
            steps_per_epoch=self.per_epoch,
            layout=self.runner.layout,
            parameters=self.runner.layout.read(self.model),
            expected_batch=float(self.size),
            architecture=partial(copy.deepcopy, self.model),
            input_shape=tuple(self.batch[0].shape[1:]),
            seed=seed,
            public=self.public,
            one_off=self.account.one_off(lambda plan: self.runner.run(plan, *self.batch)),
            device=self.batch[0].device,
        )
        self.stepper = Stepper(self.defense, context, partial(self.runner.layout.write, self.model))
        self.stepper.start()

    def step(self, step: int, *, shared: bool, lr: float) -> Step:
        """Takes a step of plain SGD, on the batch or on the history's batch for it."""
        layout = self.runner.layout
        # Without a history the batch is in every earlier step, too, and is charged for it.
        inputs, labels = self._own(step) if shared or self.past is None else self._of_the_past(step)
        account = self.account if shared or self.past is None else self.others

        def execute(plan: NoisyPlan) -> Release:
            return self.runner.run(plan, inputs, labels)

        # Parameters before the update below, where the gradients are taken.
        executed = self.stepper.take(step, layout.read(self.model), execute, account)
        moved = executed.parameters - lr * self.stepper.update
        layout.write(self.model, moved)
        self.stepper.hold(moved)
        # A client has no other data for the trial of a step; without sampling, the batch is charged in full.
        return replace(executed, verdict=self.stepper.judge(execute, account, full()))

    def refuse_unknown_plans(self, step: int, steps: int) -> None:
        """Refuses local steps whose plans a server cannot know from their sum, before the first step is taken."""
        context = self.stepper.context.at(step, parameters=self.runner.layout.read(self.model))
        if problem := unknown_to_server(self.defense, self.stepper.state, context, steps):
            raise ValueError(problem)

    def shares(
        self,
        steps: list[Step],
        public_knowledge: PublicKnowledge,
        population: Examples | None,
        prior: Examples | None,
        *,
        lr: float,
    ) -> Shared:
        """Returns the observation of the shared step or steps, the ground truth, and the charge to the batch."""
        inputs, labels = self.batch
        known = (
            public_knowledge
            if public_knowledge.population is None
            else replace(public_knowledge, population=copied(public_knowledge.population))
        )
        knowledge: dict[str, Any] = {"labels": labels, "batch_size": len(inputs)}
        layout = self.runner.layout
        if self.local is None:
            if prior is not None:
                # Computed eagerly: no function in the attack's hands may close over the other records.
                step = Observed(steps[0], self.model, layout, public_knowledge.loss)
                knowledge |= {"prior": prior, "remainder": step.without(inputs[1:], labels[1:])}
            observation = observe(steps[0], self.model, layout, known, **knowledge)
        else:
            knowledge |= {"lr": lr, "max_unroll": self.local.max_unroll}
            observation = observe_local(steps, self.model, layout, known, **knowledge)
        # Also if the attacker gets no public examples: anybody might have seen them.
        public = None if population is None else population.inputs
        floor = None if public is None else public.mean(dim=0)
        remarks = self.account.remarks
        if self.runner.unverified:
            remarks["unverified_model"] = self.runner.unverified
        return Shared(
            observation,
            GroundTruth(
                inputs=inputs,
                labels=labels,
                low=public_knowledge.low,
                high=public_knowledge.high,
                floor=floor,
                public=public,
                public_labels=None if population is None else population.labels,
                prior=None if prior is None else prior.inputs.clone(),
            ),
            self.account.ledger,
            self.runner.name,
            noise=self.account.drew(self.noise, self.sigma),
            public_used=self.public is not None and self.public.used,
            remarks=tuple(remarks),
            unverified=tuple(sentence for sentence in remarks.values() if sentence),
        )

    def _gradients(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Returns per-example gradients of public examples at the current parameters."""
        return self.runner.gradients(inputs, labels)(None)

    def _own(self, step: int) -> tuple[Tensor, Tensor]:
        """Returns the client's own examples of a step; all of them without local steps."""
        if self.local is None:
            return self.batch
        chosen = turn(step, self.size, len(self.batch[0])).to(self.batch[0].device)
        return self.batch[0][chosen], self.batch[1][chosen]

    def _of_the_past(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, labels = self.past or self.batch
        chosen = turn(step, self.size, len(inputs))
        return inputs[chosen], labels[chosen]


def _usual_knowledge(model: nn.Module, inputs: Tensor, population: Examples | None) -> PublicKnowledge:
    """Returns the default public knowledge: inputs in [0, 1], classes and loss inferred from the model's outputs."""
    with torch.no_grad():
        # A copy in evaluation mode, like the client's: a forward pass may change the statistics of a batch norm.
        width = copy.deepcopy(model).to(inputs.device).eval()(inputs[:1]).shape[1]
    loss, classes = (logistic, 2) if width == 1 else (cross_entropy, width)
    shape = tuple(inputs.shape[1:])
    return PublicKnowledge(input_shape=shape, classes=classes, low=0.0, high=1.0, loss=loss, population=population)


def _on_device(
    device: torch.device | str | None,
    batch: tuple[Tensor, Tensor],
    history: tuple[Tensor, Tensor] | None,
    population: Examples | None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None, Examples | None]:
    """Returns all data on `device`; for None on that of the inputs, where they must be."""
    if device is None:
        others = {"labels": batch[1]} if history is None else {"labels": batch[1], "history": history[0]}
        if population is not None:
            others["population"] = population.inputs
        refuse_other_device(batch[0].device, "inputs", **others)
        return batch, history, population
    moved = None if history is None else (history[0].to(device), history[1].to(device))
    if population is not None:
        population = _moved(population, device)
    return (batch[0].to(device), batch[1].to(device)), moved, population


def _moved(examples: Examples, device: torch.device | str | None) -> Examples:
    if device is None:
        return examples
    return Examples(ids=examples.ids.to(device), inputs=examples.inputs.to(device), labels=examples.labels.to(device))


def _refuse_lengths(rule: str, pair: tuple[Tensor, Tensor]) -> None:
    if len(pair[0]) == 0 or len(pair[0]) != len(pair[1]):
        raise ValueError(f"{rule} one length above 0, got {len(pair[0])} and {len(pair[1])}")
