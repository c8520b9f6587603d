"""A client's first message of a federated run as functions of data: local steps, client rule, codec.

The message is what is really sent: local minus global parameters after tau local steps under the defense, the client's
rule, the noise of its update if the method has one, and the codec. `simulate` takes the same steps without noise on
given data and applies the same codec: numbers at the positions that were sent, coefficients along the directions that
the server has, or, for a codec of another class, the displacement that the server would decode. Released numbers are
divided by minus the learning rate, so that those of a single step are a gradient.

The server knows the plans of all local steps, the order of the client's examples and its learning rates. What a rule
sends beside the displacement counts if it is a release of its own (SCAFFOLD's mean gradient); a function of the
displacement would repeat it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leakbench.attacks.core import NotApplicable
from leakbench.defenses.core import (
    Block,
    Codec,
    Context,
    Coordinates,
    Everything,
    Federated,
    Gradient,
    Identity,
    Keep,
    LargestEntries,
    Layout,
    Loss,
    Message,
    NoisyPlan,
    Project,
    PublicCoefficients,
    Reachable,
    Rescale,
    Round,
    StepPlan,
    Subspace,
    contributions,
    keyed,
    outputs,
    per_example_gradients,
    reach,
)
from leakbench.defenses.core.federated.local_training import moved, turn
from leakbench.defenses.core.federated.messages.reach import same
from leakbench.defenses.core.training.step import posted

from .local_steps import linear_alike, noise_variances

_KNOWN_CODECS = (Reachable, LargestEntries, PublicCoefficients)
"""Codecs whose message is a selection or a projection of the displacement; by exact class."""

_LINEAR = (Identity, Keep, Project, Rescale)
"""Maps after the noise that are linear; by exact class."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SentMessage:
    """A message and everything that its receiver knows about the client's round.

    Attributes:
        message: as sent.
        method: the federated method.
        round: public facts of the round at the global model.
        plans: executed plans of the local steps, with their noise.
        update_plan: executed plan of the update's own release, with its noise; None for none.
        network: network in training, which may compute more than the model's outputs.
        model: the model, whose parameters are those of the network.
        loss: per-example loss of the network.
        layout: order of the flat vectors.
        momentum: of the local SGD.
        expected_batch: public constant that sums are divided by.
        batch: examples per local step.
        size: public number of the client's examples.
    """

    message: Message
    method: Federated
    round: Round
    plans: tuple[NoisyPlan, ...]
    update_plan: NoisyPlan | None
    network: nn.Module
    model: nn.Module
    loss: Loss
    layout: Layout
    momentum: float
    expected_batch: float
    batch: int
    size: float


class ClientMessage:
    """A message as functions of data.

    Attributes:
        released: [m], numbers of the message over minus the first learning rate, then the rule's own releases.
        noise_std: [m], standard deviation of the noise on `expected_batch * released`; approximate for several steps,
            for directions that are mixed by a map after the noise, and for entries that were selected by size.
        expected_batch: public constant that sums are divided by.
    """

    def __init__(self, sent: SentMessage, *, max_unroll: int) -> None:
        """Keeps copies of the public facts; the network gets the global model's parameters.

        Args:
            sent: the message.
            max_unroll: largest number of local steps that `simulate` takes.
        """
        self._sent, self._most = _public(sent), max_unroll
        self.expected_batch = sent.expected_batch
        self._start = sent.round.parameters.clone()
        self._plans = [plan.plan for plan in self._sent.plans]
        self._rule, self._messages = sent.method.rule, sent.method.messages
        values = sent.message.tensors["values"]
        dim = len(self._start)
        if type(self._messages) in _KNOWN_CODECS:
            self._codec = _codec_of(sent, dim)
            # Not decoded and selected again: directions are orthonormal up to rounding only.
            coded = values if self._codec.size == len(values) else self._codec.encode(self._decoded[None])[0]
        else:
            self._codec = None
            coded = self._decoded
        extras = [sent.message.extras[name].reshape(-1) for name in sorted(sent.message.extras)] if self._beside else []
        self.released = torch.cat([coded / -self._rate, *extras])
        self.noise_std = self._noise().to(self.released)
        white = self.expected_batch / self.noise_std.clamp(min=1e-30)
        self._whitening = torch.where(self.noise_std > 0, white, 1.0)

    def simulate(self, inputs: Tensor, labels: Tensor) -> Float[Tensor, " m"]:
        """Returns the message without noise that these data would give, step after step; differentiable.

        Raises:
            NotApplicable: more than `max_unroll` steps.
        """
        if len(self._plans) > self._most:
            raise NotApplicable(
                f"unrolling {len(self._plans)} local steps takes memory for each of them, and at most {self._most} are "
                "unrolled; sme needs one gradient, whatever their number"
            )
        (state, beside), point, velocity = self._begin(inputs, labels), self._start, None
        for step, (plan, rate) in enumerate(zip(self._plans, self._sent.round.rates, strict=True)):
            chosen = turn(step, self._sent.batch, len(inputs)).to(inputs.device)
            point = point if plan.start_at is None else plan.start_at.to(point)
            update = self._update(plan, state, inputs[chosen], labels[chosen], point)
            corrected = self._rule.correct(state, self._sent.round, point, update)
            velocity = corrected if velocity is None else self._sent.momentum * velocity + corrected
            point = _held(plan, point, point - rate * velocity)
        return self._finished(point - self._start, state, beside)

    def surrogate(self, inputs: Tensor, labels: Tensor, share: Tensor) -> Float[Tensor, " m"]:
        """Returns the message if all gradients were taken at a point the fraction `share` of the way that is decoded.

        Client rules other than the first step's are left out: at one point they have nothing to correct.
        """
        point = self._start + share * self._decoded
        state, beside = self._begin(inputs, labels)
        rows = self._rows(state, inputs, labels, point)
        if self._are_alike:
            # Each example is in one step per epoch, so a single pass over all examples serves every step.
            passes = sum(self._weights) * self._sent.batch / len(inputs)
            total = passes * self._update(self._plans[0], state, inputs, labels, point, rows)
        else:
            total = torch.zeros_like(self._start)
            for step, (plan, weight) in enumerate(zip(self._plans, self._weights, strict=True)):
                chosen = turn(step, self._sent.batch, len(inputs)).to(inputs.device)
                own = self._update(plan, state, inputs[chosen], labels[chosen], point, rows[chosen])
                total = total + weight * own
        return self._finished(-self._rate * total, state, beside)

    def contributions(self, inputs: Tensor, labels: Tensor, share: Tensor | None = None) -> Float[Tensor, "n m"]:
        """Returns each example's term in the undivided message of a step; not differentiable.

        Args:
            inputs: examples.
            labels: their labels.
            share: place between global and local model at which gradients are taken; None for the global model.

        Raises:
            NotApplicable: a message that is no sum over examples.
        """
        if reason := self.no_sum:
            raise NotApplicable(reason)
        with torch.no_grad():
            state, _ = self._begin(inputs, labels)
            point = self._start if share is None else self._start + share * self._decoded
            plan = self._plans[0]
            by_block = contributions(
                plan, lambda at: self._rows(state, inputs, labels, point if at is None else at.to(point))
            )
            terms = zip(*by_block, strict=True)
            return torch.stack([self._coded(moved(plan, tuple(term), 1.0)) for term in terms])

    def residual(self, predicted: Float[Tensor, "*guesses m"]) -> Float[Tensor, "*guesses m"]:
        """Returns released minus predicted, approximately in noise units where there is noise."""
        return (self.released - predicted) * self._whitening

    def logits(self, inputs: Tensor) -> Float[Tensor, "n classes"]:
        """Returns the logits of the global model."""
        return outputs(self._sent.model, Layout.of(self._sent.model), inputs, parameters=self._start)

    @property
    def model(self) -> nn.Module:
        """The attacker's copy of the model."""
        return self._sent.model

    @property
    def steps(self) -> int:
        """The number of local steps."""
        return len(self._plans)

    @property
    def start(self) -> Float[Tensor, " dim"]:
        """The global model."""
        return self._start

    @cached_property
    def no_sum(self) -> str:
        """Reason why examples do not add up to a message; empty if those of a step do."""
        if self._codec is None:
            return f"the codec {type(self._messages).__name__} maps a sum of examples to no sum over them"
        if self._sent.update_plan is not None:
            return "the client bounds its update as a whole, which is no sum over its examples"
        if self._beside:
            return "the message has a release of the client rule beside the update"
        first = torch.ones_like(self._start)
        state = self._rule.begin(self._rule.start(self._sent.layout), self._sent.round, [], self._sent.size)
        if not torch.equal(self._rule.correct(state, self._sent.round, self._start, first), first):
            return "the client rule changes the update of its first step"
        if not self._are_alike and (len(self._plans) > 1 or type(self._plans[0].post) not in _LINEAR):
            return "a local step's update is not linear in its examples, or the steps transform an example differently"
        return ""

    @cached_property
    def plan(self) -> StepPlan:
        """A plan whose blocks release the numbers of the message, for the meaning of each number.

        Numbers that are not a block's own are of no gradient: `words` says so.
        """
        first = self._plans[0]
        if self.steps == 1 and not self.no_sum and len(first.blocks) == 1 and self._codec is not None:
            block, post = first.blocks[0], type(first.post)
            whole = type(block.codec) is Everything and post in (Identity, Keep, Project)
            own = post is Identity and type(block.codec) is type(self._codec) and block.codec.size == self._codec.size
            if whole or own:
                block = Block(codec=self._codec, bound=block.bound, query=block.query)
                return StepPlan(block)
        return first

    @property
    def is_gradient(self) -> bool:
        """True if each number of the message is a block's, of the bounded gradients of a single step."""
        return self.plan is not self._plans[0] and type(self.plan.blocks[0].query) is Gradient

    @cached_property
    def exact_step(self) -> tuple[NoisyPlan, tuple[Tensor, ...]] | None:
        """The plan of a single step and its undivided sums, block by block, if they follow from the message."""
        plan, codec = self._plans[0], self._codec
        if self.steps > 1 or self.no_sum or type(plan.post) is not Identity or codec is None:
            return None
        if plan.moves is not None or plan.start_at is not None or plan.correlated is not None:
            return None
        if not all(block.updates for block in plan.blocks):
            return None
        # Tried with random sums: blocks that overlap, or a message that drops numbers, do not give them back.
        probes = [torch.randn(block.codec.size, generator=keyed(0)).to(self._start) for block in plan.blocks]
        for probe, returned in zip(
            probes, self._by_block(codec.encode(moved(plan, tuple(probes), 1.0)[None])[0]), strict=True
        ):
            if not torch.allclose(probe, returned, rtol=1e-3, atol=1e-3):
                return None
        return self._sent.plans[0], self._by_block(self.released * self.expected_batch)

    def _by_block(self, numbers: Float[Tensor, " m"]) -> tuple[Tensor, ...]:
        """Returns the sums of a plan's blocks, from those of the message."""
        if self._codec is None:
            raise ValueError("numbers of a message by block must have a codec, got none")
        blocks, plain = self._plans[0].blocks, Everything | Coordinates | Subspace
        own, sent = blocks[0].codec, self._codec
        if len(blocks) == 1 and isinstance(own, plain) and isinstance(sent, plain) and same(own, sent):
            return (numbers,)  # not decoded and encoded: directions are orthonormal up to rounding only
        decoded = self._codec.decode(numbers)
        return tuple(block.codec.encode(decoded[None])[0] for block in blocks)

    @cached_property
    def _decoded(self) -> Float[Tensor, " dim"]:
        """The displacement, as the server decodes it."""
        return self._messages.decode(self._sent.message, self._sent.round)

    @property
    def _rate(self) -> float:
        return self._sent.round.rates[0]

    @cached_property
    def _beside(self) -> bool:
        """True if the rule releases something of the data by itself."""
        return bool(self._rule.releases(len(self._start)))

    @cached_property
    def _weights(self) -> list[float]:
        """Factor of each step's update in the displacement, over minus the first learning rate."""
        rates, momentum = self._sent.round.rates, self._sent.momentum
        return [
            sum(rate * momentum**later for later, rate in enumerate(rates[step:])) / rates[0]
            for step in range(len(rates))
        ]

    @cached_property
    def _are_alike(self) -> bool:
        """True if all plans map a row in the same way and act linearly on a sum of rows."""
        return all(linear_alike(self._plans[0], plan) for plan in self._plans)

    def _begin(self, inputs: Tensor, labels: Tensor) -> tuple[Any, list[Tensor]]:
        """Returns the rule's state before the first step, and its own releases without noise."""
        round, beside = self._sent.round, []
        state = self._rule.start(self._sent.layout)
        for plan in self._rule.releases(len(self._start)):
            by_block = contributions(plan.plan, lambda at: self._rows(state, inputs, labels, self._start))
            beside += [values.sum(dim=0) for values in by_block]
        return self._rule.begin(state, round, beside, self._sent.size), beside

    def _rows(self, state: Any, inputs: Tensor, labels: Tensor, point: Tensor) -> Float[Tensor, "n dim"]:
        sent = self._sent
        targets = self._rule.targets(state, sent.round, inputs, labels)
        return per_example_gradients(sent.network, sent.loss, sent.layout, inputs, targets, parameters=point)

    def _update(
        self,
        plan: StepPlan,
        state: Any,
        inputs: Tensor,
        labels: Tensor,
        point: Tensor,
        rows: Tensor | None = None,
    ) -> Float[Tensor, " dim"]:
        """Returns the noiseless update of a step on these examples, each bounded by itself."""
        rows = self._rows(state, inputs, labels, point) if rows is None else rows
        by_block = contributions(
            plan, lambda at: rows if at is None else self._rows(state, inputs, labels, at.to(point))
        )
        sums = zip(plan.blocks, by_block, strict=True)
        decoded = [block.codec.decode(values.sum(dim=0)) for block, values in sums if block.updates]
        return posted(plan.post, sum(decoded[1:], start=decoded[0]) / self.expected_batch)

    def _finished(self, delta: Float[Tensor, " dim"], state: Any, beside: Sequence[Tensor]) -> Float[Tensor, " m"]:
        """Returns the numbers of the message that a displacement gives."""
        if (plan := self._sent.update_plan) is not None:
            by_block = contributions(plan.plan, lambda at: delta.unsqueeze(0))
            delta = moved(plan.plan, tuple(values.sum(dim=0) for values in by_block), 1.0)
        numbers = self._coded(delta) / -self._rate
        if not self._beside:
            return numbers
        _, extras = self._rule.finish(state, self._sent.round, delta)
        return torch.cat([numbers, *(extras[name].reshape(-1) for name in sorted(extras))])

    def _coded(self, delta: Float[Tensor, " dim"]) -> Tensor:
        """Returns the numbers of a displacement that a message of the same form has."""
        if self._codec is not None:
            return self._codec.encode(delta.unsqueeze(0)).squeeze(0)
        round = replace(self._sent.round, plans=tuple(self._plans))
        return self._messages.decode(self._messages.encode(delta, round), round)

    def _noise(self) -> Float[Tensor, " m"]:
        """Returns the standard deviation of each number's noise, in undivided units."""
        like, sent = self._start, self._sent
        of_steps = [
            weight**2 * noise_variances(plan, like) for plan, weight in zip(sent.plans, self._weights, strict=True)
        ]
        variances = sum(of_steps, start=torch.zeros_like(like))
        if sent.update_plan is not None:
            of_update = noise_variances(sent.update_plan, like)
            variances = variances + of_update * (self.expected_batch / self._rate) ** 2
        if isinstance(self._codec, Coordinates):
            variances = variances.index_select(0, self._codec.kept.to(like.device))
        elif isinstance(self._codec, Subspace):
            # Noise inside the directions has all its variance in the coefficients, other noise a share of it.
            inside = all(isinstance(reach(plan), Subspace) for plan in self._plans)
            of_direction = variances.sum() / self._codec.size if inside else variances.mean()
            variances = of_direction.expand(self._codec.size)
        noise = [variances.sqrt()]
        if self._beside:
            for plan in self._rule.releases(len(like)):
                # The sums are divided by the number of examples, and released numbers multiplied by the batch.
                factor = self.expected_batch / sent.size
                stds = zip(plan.plan.blocks, plan.stds, strict=True)
                noise += [like.new_full((block.codec.size,), std * factor) for block, std in stds]
        return torch.cat(noise)


def _public(sent: SentMessage) -> SentMessage:
    """Returns copies of the public facts, without references into the client's run."""
    round, start = sent.round, sent.round.parameters.clone()
    network, model = copy.deepcopy((sent.network, sent.model))  # together: they may share parameters
    for part in (network, model):
        part.requires_grad_(True).zero_grad(set_to_none=True)
    sent.layout.write(network, start)
    context = Context(
        step=round.context.step,
        steps=round.context.steps,
        steps_per_epoch=round.context.steps_per_epoch,
        layout=sent.layout,
        parameters=start,
        expected_batch=round.context.expected_batch,
        seed=round.context.seed,
        device=start.device,
        round_steps=round.context.round_steps,
    )
    # Without the memo of a deep copy, codecs of plans and of the round would no longer be the same object.
    kept = (sent.message, sent.plans, sent.update_plan, round.foreseen, round.codec, dict(round.broadcast))
    message, plans, update_plan, foreseen, codec, broadcast = copy.deepcopy(kept)
    public = replace(
        round, context=context, network=network, broadcast=broadcast, foreseen=foreseen, codec=codec, plans=()
    )
    return replace(
        sent,
        message=message,
        round=public,
        plans=plans,
        update_plan=update_plan,
        network=network,
        model=model,
    )


def _codec_of(sent: SentMessage, dim: int) -> Codec:
    """Returns the map from a displacement to the numbers of a message of the same form."""
    message, values = sent.message, sent.message.tensors["values"]
    if message.kind == "dense":
        return Everything(dim)
    if message.kind == "coefficients":
        if sent.round.codec is not None:
            return sent.round.codec
        return next(codec for codec in map(reach, sent.round.foreseen or ()) if isinstance(codec, Subspace))
    # The positions, by a message of ones: they are in the message, or the server computes them.
    ones = replace(message, tensors={**message.tensors, "values": torch.ones_like(values)})
    placed = sent.method.messages.decode(ones, sent.round)
    return Coordinates(placed.nonzero().flatten(), dim=dim)


def _held(plan: StepPlan, before: Tensor, after: Tensor) -> Tensor:
    """Returns parameters after a step, with those before it at coordinates that the plan holds."""
    if plan.moves is None:
        return after
    kept = plan.moves.kept.to(after.device)
    return before.scatter(0, kept, after.index_select(0, kept))
