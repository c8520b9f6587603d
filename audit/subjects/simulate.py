"""One shared update from a model, a batch and a defense: what a client of federated learning sends.

The client's steps before the shared one run on `history`, so that methods with a past have one: DPDR its direction,
ranked sparsification its ranks. Everything is executed by the same engine as training.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from attacks.core import Examples, Observation
from defenses.core import (
    Claim,
    Context,
    Defense,
    Engine,
    Ledger,
    Loss,
    Noise,
    PublicGradients,
    Step,
    StepPlan,
    assumptions,
    cross_entropy,
    from_os,
    full,
    refuse_shared,
    unverified,
)

from ..observe import World, observe
from ..scoring.truth import GroundTruth
from .candidates import copied


@dataclass(frozen=True)
class Shared:
    """One simulated update.

    Attributes:
        observation: what the server sees.
        truth: what it does not.
        ledger: the releases in which the shared batch took part, without sampling: it is known to be there.
        engine: how the clipped sums were computed.
        noise: which kind of noise was drawn; `none` when the multiplier is 0.
        public_used: whether the defense read public examples.
        remarks: of the plans executed, each once, and marks of what took part and is none of ours.
        unverified: the same in sentences.
    """

    observation: Observation
    truth: GroundTruth
    ledger: Ledger
    engine: str
    noise: str = "none"
    public_used: bool = False
    remarks: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()

    def claim(self, delta: float) -> Claim:
        """The guarantee of the releases at `delta`, with what it assumes."""
        assumes = assumptions(self.noise, self.ledger.sampling, key_given=False, public_used=self.public_used)
        return replace(self.ledger.claim(delta), assumes=assumes, unverified=self.unverified)


def share_update(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    defense: Defense,
    *,
    loss: Loss = cross_entropy,
    step: int = 0,
    steps: int | None = None,
    lr: float = 0.1,
    history: tuple[Tensor, Tensor] | None = None,
    seed: int = 0,
    noise: Noise | None = None,
    low: float = 0.0,
    high: float = 1.0,
    classes: int | None = None,
    population: Examples | None = None,
    microbatch: int | None = None,
    engine: str = "auto",
) -> tuple[Observation, GroundTruth]:
    """Simulates what one client shares at one step, and keeps the truth apart; arguments as for `simulate_share`.

    Returns:
        What the server sees (labels and batch size included, for attacks that declare to know them), and the truth.
    """
    shared = simulate_share(
        model,
        inputs,
        labels,
        defense,
        loss=loss,
        step=step,
        steps=steps,
        lr=lr,
        history=history,
        seed=seed,
        noise=noise,
        low=low,
        high=high,
        classes=classes,
        population=population,
        microbatch=microbatch,
        engine=engine,
    )
    return shared.observation, shared.truth


def simulate_share(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    defense: Defense,
    *,
    loss: Loss = cross_entropy,
    step: int = 0,
    steps: int | None = None,
    lr: float = 0.1,
    history: tuple[Tensor, Tensor] | None = None,
    seed: int = 0,
    noise: Noise | None = None,
    low: float = 0.0,
    high: float = 1.0,
    classes: int | None = None,
    population: Examples | None = None,
    population_known: bool = True,
    microbatch: int | None = None,
    engine: str = "auto",
) -> Shared:
    """Simulates what one client shares at one step, with the ledger of what that costs its batch.

    Args:
        model: at the client's first step; left as it is.
        inputs: the client's batch at the shared step [b, *shape].
        labels: its labels [b], int64.
        defense: with its noise multiplier set; 0 shows what the release alone hides.
        loss: per-example loss.
        step: which step is shared; the steps before it are executed first.
        steps: planned length, which schedules refer to; `step + 1` where None.
        lr: learning rate of the client's plain SGD between steps.
        history: (inputs, labels) for the steps before, `b` examples a step, taken in turn; the client's own batch again
            where None.
        seed: key of the public randomness.
        noise: secret source; keyed by the operating system where None.
        low: smallest valid input, in model-input units.
        high: largest valid input.
        classes: number of classes; read off the model's output where None.
        population: public examples, which the defense may read.
        population_known: whether the attacker gets a copy of them.
        microbatch: most examples that are worked on at a time; None for what fits in memory.
        engine: how clipped sums are computed, as in `defenses.core.training.train`.

    Returns:
        What the server sees (labels and batch size included, for attacks that declare to know them), the truth, and the
        ledger.

    Raises:
        ValueError: for an uncalibrated defense, a model that mixes examples, an empty batch or history, a step
            below 0, or a population that holds an input of the batch.
    """
    if step < 0:
        raise ValueError(f"step must be at least 0, got {step}")
    if len(inputs) == 0 or len(inputs) != len(labels):
        raise ValueError(f"inputs and labels must have one length above 0, got {len(inputs)} and {len(labels)}")
    sigma = defense.calibrated_multiplier
    client = copy.deepcopy(model).to(inputs.device).eval()
    source = noise or from_os()
    runner = Engine(client, loss=loss, noise=source, microbatch=microbatch, engine=engine, expected_batch=len(inputs))
    layout, size = runner.layout, len(inputs)
    past_inputs, past_labels = (inputs, labels) if history is None else history
    if len(past_inputs) == 0 or len(past_inputs) != len(past_labels):
        raise ValueError(
            f"history must be (inputs, labels) of one length above 0, got {len(past_inputs)} and {len(past_labels)}"
        )
    rows = None
    if population is not None:
        refuse_shared(inputs, population.inputs)
        rows = PublicGradients(lambda x, y: runner.gradients(x, y)(None), population.inputs, population.labels)
    ledger, remarks = Ledger(full()), unverified(noise=source, defense=defense)

    def one_off(plan: StepPlan, multiplier: float) -> tuple[Tensor, ...]:
        remarks.update(unverified(plan=plan))
        ledger.record(plan, multiplier, step=0, one_off=True, exact=source.exact)
        return runner.run(plan, inputs, labels, multiplier).noisy

    context = Context(
        step=0,
        steps=steps or step + 1,
        layout=layout,
        parameters=layout.read(client),
        expected_batch=float(size),
        seed=seed,
        public=rows,
        one_off=one_off,
        device=inputs.device,
    )
    state, shared = defense.start(context), None
    for now in range(step + 1):
        parameters = layout.read(client)
        context = context.at(now, parameters=parameters)
        state, plan = defense.plan(state, context)
        batch = torch.arange(now * size, (now + 1) * size) % len(past_inputs)
        x, y = (inputs, labels) if now == step else (past_inputs[batch], past_labels[batch])
        out = runner.run(plan, x, y, sigma)
        if now == step or history is None:
            ledger.record(plan, sigma, step=now, exact=source.exact)
            remarks |= dict.fromkeys(plan.remarks, "") | unverified(plan=plan)
        shared = Step(now, parameters, sigma, float(size), 1.0, plan, out.noisy)
        update = plan.post(out.total / size)
        state = defense.observe(state, context, out.noisy, update)
        context = replace(context, update=update)
        with torch.no_grad():
            named = dict(client.named_parameters())
            for name, change in layout.unflatten(update).items():
                named[name].sub_(lr * change)
    if shared is None:
        raise ValueError(f"step must be at least 0, got {step}")
    if classes is None:
        with torch.no_grad():
            classes = int(client(inputs[:1]).shape[1])
    world = World(
        input_shape=tuple(inputs.shape[1:]),
        classes=classes,
        low=low,
        high=high,
        loss=loss,
        population=copied(population) if population is not None and population_known else None,
    )
    observation = observe(shared, client, layout, world, labels=labels, batch_size=size)
    floor = None if population is None else population.inputs.mean(dim=0)
    truth = GroundTruth(inputs=inputs, labels=labels, low=low, high=high, floor=floor)
    if runner.unverified:
        remarks["unverified_model"] = runner.unverified
    return Shared(
        observation,
        truth,
        ledger,
        runner.name,
        noise=source.kind if sigma > 0 else "none",
        public_used=rows is not None and rows.used,
        remarks=tuple(remarks),
        unverified=tuple(sentence for sentence in remarks.values() if sentence),
    )
