"""Messages of a federated client as targets of attacks: what the server sees, and what an informed adversary has left.

A client sends the displacement of tau local steps. Under plain SGD (with momentum that starts anew every round) and a
linear client rule it is minus the mean rate over the expected batch times w, plus a public part, with

    w = sum_t a_t S_t,   S_t the undivided noisy sum of step t as the message can show it,

and public weights a_t. The noise of w has the same standard deviation in every direction that w can take, s = std
(sum_t a_t^2)^(1/2), because the maps between a step's release and the message are masks and orthogonal projections.
Messages for which this does not hold, as those of the largest entries, have no w, and say why.

The informed adversary has w less the contributions of all other records, computed here from the private data at the
client's own local parameters. A target holds copies, and functions over copies; only `others_removed` reads private
data, and `narrow` withholds it from attacks that do not declare this adversary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leakbench.attacks.core import Examples, ModelAccess, NotApplicable, SeenMessage, SeenMessages, Steps
from leakbench.defenses.core import (
    Coordinates,
    Everything,
    Federated,
    LargestEntries,
    Layout,
    Loss,
    Message,
    PublicCoefficients,
    Reachable,
    Recipe,
    Round,
    Sampling,
    StepPlan,
    Subspace,
    contributions,
    outputs,
    per_example_gradients,
)
from leakbench.defenses.core.federated.messages.reach import reach_of, same
from leakbench.defenses.core.plan.implicit_subspace import ImplicitSubspace
from leakbench.defenses.core.plan.post import Identity, Keep, Project, Rescale

from .candidates import Candidates
from .observe import PublicKnowledge, participation
from .observed_step import ROWS

_WHITE = (Everything, Coordinates, Subspace, ImplicitSubspace)
"""Codecs whose decoded noise has one standard deviation in all their directions; a subclass may decode otherwise."""


@dataclass(frozen=True, eq=False)
class ClientReply:
    """A round in which a client replied, as the auditor holds it.

    Attributes:
        round: public facts.
        state: state of the client's rule during the local steps.
        message: as sent.
        displacement: of the message, as the server decodes it.
        stds: of each local step, the standard deviation of the noise on the undivided sums of each block.
        points: local parameters before each local step; empty for a client whose records are not attacked.
    """

    round: Round
    state: Any
    message: Message
    displacement: Float[Tensor, " dim"]
    stds: tuple[tuple[float, ...], ...]
    points: tuple[Float[Tensor, " dim"], ...] = ()


@dataclass(frozen=True, eq=False)
class ClientData:
    """A client's private side, held by the auditor.

    Attributes:
        number: of the client.
        examples: its data, in the trainer's order: the sampler returns positions in it.
        sampling: its sampler.
        sampler_key: secret key of the sampler.
        expected_batch: public constant by which its sums are divided.
    """

    number: int
    examples: Examples
    sampling: Sampling
    sampler_key: int
    expected_batch: float


@dataclass(frozen=True)
class Sums:
    """Public facts by which a message shows its local steps' sums.

    Attributes:
        plan: plan of every local step of the round.
        weights: a_t of each local step.
        noise_std: of a step's noise in w, along any direction that w can take.
        factor: w / -displacement, before the shift is removed.
        shift: public part of w, to be subtracted; None for none.
        span: directions that the message keeps; None for all.
    """

    plan: StepPlan
    weights: tuple[float, ...]
    noise_std: float
    factor: float
    shift: Float[Tensor, " dim"] | None
    span: Subspace | None

    def lifted(self, rows: Float[Tensor, "n _"]) -> Float[Tensor, "n dim"]:
        """Returns released rows as they appear in w."""
        plan, codec = self.plan, _releasing(self.plan).codec
        if isinstance(codec, Coordinates):
            wide = rows.new_zeros(len(rows), codec.dim)
            rows = wide.index_copy(1, codec.kept.to(rows.device), rows)
        elif isinstance(codec, Subspace):
            rows = _combined(codec, rows)
        match plan.post:
            case Rescale():
                rows = plan.post.factor * rows
            case Project():
                rows = plan.post.subspace.project(rows)
            case Keep():
                rows = plan.post.coordinates.project(rows)
            case _:
                pass
        if plan.moves is not None:
            rows = plan.moves.project(rows)
        return rows if self.span is None else self.span.project(rows)


def local_weights(rates: Sequence[float], *, momentum: float = 0.0, pull: float = 0.0) -> tuple[float, ...]:
    """Returns a_t of every local step: minus the displacement by a unit update in step t alone, over the mean rate.

    Args:
        rates: learning rate of every local step.
        momentum: v <- momentum v + update, from v = 0 in every round.
        pull: of the client rule, which adds pull (point - global model) to an update.
    """
    mean, weights = sum(rates) / len(rates), []
    for impulse in range(len(rates)):
        moved = velocity = 0.0
        for step, rate in enumerate(rates):
            velocity = momentum * velocity + (step == impulse) + pull * moved
            moved -= rate * velocity
        weights.append(-moved / mean)
    return tuple(weights)


def sums_of(reply: ClientReply, method: Federated, recipe: Recipe, expected_batch: float) -> Sums | str:
    """Returns how a message shows the sums of its local steps, or the reason why it does not.

    Args:
        reply: the round.
        method: of the run.
        recipe: of the local steps.
        expected_batch: the client's divisor.
    """
    round, messages = reply.round, method.messages
    if method.update is not None or method.noise_place == "server":
        return f"the noise of {method.name} is not in the local steps"
    if round.foreseen is None:
        return "the plans of the local steps follow from releases that the server does not have"
    if recipe.optimizer != "sgd":
        return f"the optimizer of the local steps is {recipe.optimizer}, whose steps are no linear function of the sums"
    if recipe.augmentation is not None:
        return "the local steps average over views of an example"
    if why := _no_common_release(round.foreseen):
        return why
    linear = getattr(method.rule, "linear", None)
    correction = None if linear is None else linear(reply.state, round)
    if correction is None:
        return "the client rule corrects updates in a way that is not linear"
    pull, shift = correction
    plan = round.foreseen[0]
    movable, span = reach_of([plan]), None
    if type(messages) is PublicCoefficients:
        if not isinstance(movable, Everything):
            return "the message keeps other directions than the local steps release"
        span = round.codec if isinstance(round.codec, Subspace) else None
    elif type(messages) is LargestEntries and messages.sparsity:
        return "the message keeps the largest entries alone, which noise and data choose together"
    elif type(messages) not in (Reachable, LargestEntries):
        return f"the message is encoded by {type(messages).__name__}, which may change its numbers"
    position = [block.updates for block in plan.blocks].index(True)
    stds = {of_blocks[position] for of_blocks in reply.stds}
    if len(stds) > 1:
        return "the noise of the local steps differs within a round"
    weights = local_weights(round.rates, momentum=recipe.momentum, pull=pull)
    scale = plan.post.factor if isinstance(plan.post, Rescale) else 1.0
    if shift is not None:
        shift = expected_batch * sum(weights) * shift.double()
        if isinstance(movable, Subspace | Coordinates):
            shift = movable.project(shift.unsqueeze(0)).squeeze(0)
    mean = sum(round.rates) / len(round.rates)
    return Sums(plan, weights, scale * stds.pop(), expected_batch / mean, shift, span)


def _no_common_release(plans: Sequence[StepPlan]) -> str:
    """Returns the reason why local steps have no common linear release; empty if they have."""
    first = plans[0]
    for plan in plans:
        if plan.correlated is not None or plan.trial is not None or plan.start_at is not None:
            return "a local step has correlated noise, a trial, or starts at other parameters than the last ended at"
        blocks = [block for block in plan.blocks if block.updates]
        if len(blocks) != 1 or type(blocks[0].codec) not in _WHITE:
            return "a local step releases several parts, or through a map that is no mask and no projection"
        if type(plan.post) not in (Identity, Rescale, Keep, Project) or getattr(plan.post, "rescale", False):
            return "a local step changes its update after the noise by more than a mask, a projection or a factor"
        if not _stays_white(plan, blocks[0].codec):
            return "the noise of a local step has a different size in different directions of the message"
        block, like = blocks[0], _releasing(first)
        alike = type(block.query) is type(like.query) and block.bound == like.bound and _same_post(plan, first)
        if not (alike and same(block.codec, like.codec)):
            return "mask, directions or bound change within a round"
    return ""


def _stays_white(plan: StepPlan, codec: object) -> bool:
    """True if post map and mask of the moved coordinates leave noise of one standard deviation in all directions."""
    if isinstance(codec, Subspace):
        return type(plan.post) in (Identity, Rescale) and plan.moves is None
    if isinstance(plan.post, Project):
        return isinstance(codec, Everything) and plan.moves is None
    return True


def _same_post(plan: StepPlan, other: StepPlan) -> bool:
    if type(plan.post) is not type(other.post) or (plan.moves is None) != (other.moves is None):
        return False
    if plan.moves is not None and other.moves is not None and not same(plan.moves, other.moves):
        return False
    if isinstance(plan.post, Project) and isinstance(other.post, Project):
        return same(plan.post.subspace, other.post.subspace)
    if isinstance(plan.post, Keep) and isinstance(other.post, Keep):
        return same(plan.post.coordinates, other.post.coordinates)
    return plan.post == other.post


def _releasing(plan: StepPlan) -> Any:
    """Returns the block whose release moves the parameters."""
    return next(block for block in plan.blocks if block.updates)


def _combined(subspace: Subspace, rows: Float[Tensor, "n size"]) -> Float[Tensor, "n dim"]:
    wide = rows.new_zeros(len(rows), subspace.dim)
    for basis, (start, stop), part in zip(
        subspace.bases, subspace.spans, rows.split(subspace.ranks, dim=1), strict=True
    ):
        wide[:, start:stop] = part @ basis.to(rows).T
    return wide


class ClientMessages:
    """Messages of a client, its models and its data, from which targets are built."""

    def __init__(
        self,
        rounds: Sequence[ClientReply],
        models: Sequence[Float[Tensor, " dim"]],
        data: ClientData,
        *,
        final: nn.Module,
        method: Federated,
        recipe: Recipe,
        loss: Loss,
        layout: Layout,
        knowledge: PublicKnowledge,
        candidates: Candidates | None = None,
        informed: bool = False,
    ) -> None:
        """Takes a run's records; computes nothing.

        Args:
            rounds: rounds in which the client replied.
            models: global model before every round of the run.
            data: the client's private side.
            final: the trained model, the attacker's own copy.
            method: of the run.
            recipe: of the local steps.
            loss: of the network in training.
            layout: order of the flat vectors.
            knowledge: public knowledge, its population the attacker's own copy.
            candidates: of the membership test; None without a test.
            informed: whether the attacker knows every record but the candidate.
        """
        self._rounds, self._models, self._data = rounds, models, data
        self._final, self._method, self._recipe, self._loss, self._layout = final, method, recipe, loss, layout
        self._knowledge, self._candidates, self._informed = knowledge, candidates, informed

    @cached_property
    def _network(self) -> nn.Module:
        """The attacker's own copy of the network in training."""
        return copy.deepcopy(self._rounds[0].round.network).eval()

    def target(self) -> SeenMessages:
        """Returns the target of an attack on all messages.

        Raises:
            NotApplicable: the attacker knows all other contributions, and a message does not show them.
        """
        rounds = self._rounds
        for reply in rounds if self._informed else ():
            if isinstance(why := self._sums(reply), str):
                raise NotApplicable(f"messages of {self._method.name} do not show the sums of local steps: {why}")
        return SeenMessages(
            models=models_of(self._models, self._final, self._layout, self._knowledge),
            messages=Steps(lambda: (self._seen(reply) for reply in rounds), lambda: len(rounds)),
            candidates=self._given,
            final=self._queries(self._final),
        )

    @property
    def _given(self) -> Examples | None:
        return None if self._candidates is None else self._candidates.given

    def _queries(self, model: nn.Module) -> ModelAccess:
        return model_queries(model, self._knowledge)

    def _sums(self, reply: ClientReply) -> Sums | str:
        return sums_of(reply, self._method, self._recipe, self._data.expected_batch)

    def _seen(self, reply: ClientReply) -> SeenMessage:
        data, knowledge = self._data, self._knowledge
        sums = self._sums(reply)
        public = _public_round(reply.round, self._network)
        gradients = self._rows(public, copy.deepcopy(reply.state), public.parameters)
        rate = data.sampling.rate
        shown: dict[str, Any] = {"why_no_sums": sums if isinstance(sums, str) else ""}
        if not isinstance(sums, str):
            weighted = _weighted_sum(reply, sums)
            shown |= {
                "sums": weighted.to(reply.displacement.dtype),
                "weights": sums.weights,
                "noise_std": float(sums.noise_std),
            }
            if self._informed and self._candidates is not None:
                remainders = _Remainders(reply, sums, data, self._candidates.ids, weighted, self._rows)
                shown["others_removed"] = lambda part=slice(None): remainders.of(part)
        return SeenMessage(
            round=reply.round.number,
            global_model=broadcast_model(public.parameters, self._final, self._layout, knowledge),
            slices=_slices(self._layout),
            sent={name: part.clone() for name, part in {**reply.message.tensors, **reply.message.extras}.items()},
            displacement=reply.displacement.clone(),
            contributions=_contributions(sums, gradients),
            gradients=gradients,
            sample_rate=rate,
            participation=participation(data.sampling),
            population=knowledge.population,
            **shown,
        )

    def _rows(self, round: Round, state: Any, point: Tensor) -> Callable[..., Tensor]:
        """Returns a function that computes per-example gradients of the network in training at a point."""
        # The layout of the network in training, which may be a part of a larger one.
        rule, loss, layout, point = self._method.rule, self._loss, round.context.layout, point.clone()

        def gradients(inputs: Tensor, labels: Tensor) -> Tensor:
            with torch.enable_grad():  # networks with hooks are differentiated example by example
                targets = rule.targets(state, round, inputs, labels)
                rows = per_example_gradients(round.network, loss, layout, inputs, targets, parameters=point)
            return rows.detach()

        return gradients


class _Remainders:
    """A message's weighted sum without the contributions of other records, a row per candidate."""

    def __init__(
        self,
        reply: ClientReply,
        sums: Sums,
        data: ClientData,
        candidates: Tensor,
        weighted: Tensor,
        rows: Callable[..., Callable[..., Tensor]],
    ) -> None:
        self._taken, self._sums, self._data, self._candidates = reply, sums, data, candidates
        self._weighted, self._rows = weighted, rows
        self._kept: tuple[Tensor, Tensor] | None = None

    def of(self, part: slice) -> Float[Tensor, "part dim"]:
        """Returns the rows of some candidates, in float64, rounded to float32.

        The row of a participant is the sum less its contribution, plus the same. Its last digits would differ from
        those of a non-participant, whose contribution was never subtracted, and reveal participation at any noise. The
        message is of float32 numbers, so the rounding hides nothing that is in it.
        """
        ids = self._candidates[part]
        if len(self._candidates) * len(self._weighted) > ROWS:
            noise, own = self._split(ids)
        else:
            self._kept = self._kept or self._split(self._candidates)
            noise, own = self._kept[0], self._kept[1][part]
        return (noise + own).float().double()

    def _split(self, ids: Tensor) -> tuple[Float[Tensor, " dim"], Float[Tensor, "n dim"]]:
        """Returns w less all contributions, and the contributions of the records with these ids, as subtracted."""
        noise = self._weighted.clone()
        own = noise.new_zeros(len(ids), len(noise))
        order = ids.argsort()
        for point, weight, joined in self._steps():
            for chosen in joined.split(max(1, ROWS // len(noise))) if len(joined) else ():
                # Batches of their own would give other last digits.
                added = weight * self._contributed(point, chosen)
                noise -= added.sum(dim=0)
                names = self._data.examples.ids[chosen]
                requested = torch.isin(names, ids)
                own[order[torch.searchsorted(ids[order], names[requested])]] += added[requested]
        return noise, own

    def _steps(self) -> Iterator[tuple[Tensor, float, Tensor]]:
        """Yields the local parameters before each step, its weight, and its participants, drawn again by the key."""
        data, first = self._data, self._taken.round.context.step
        for number, (point, weight) in enumerate(zip(self._taken.points, self._sums.weights, strict=True)):
            joined = data.sampling.indices(first + number, len(data.examples), data.sampler_key)
            yield point, weight, joined.to(data.examples.ids.device)

    def _contributed(self, point: Tensor, chosen: Tensor) -> Float[Tensor, "chosen dim"]:
        examples = self._data.examples
        gradients = self._rows(self._taken.round, self._taken.state, point)
        return _added(self._sums, gradients, examples.inputs[chosen], examples.labels[chosen]).double()


def _weighted_sum(reply: ClientReply, sums: Sums) -> Float[Tensor, " dim"]:
    """Returns w of a message, in float64."""
    weighted = -sums.factor * reply.displacement.double()
    movable = reach_of([sums.plan])
    if not isinstance(movable, Everything):
        # A correction may leave the span of the sums, whose noise has no density outside.
        weighted = movable.project(weighted.unsqueeze(0)).squeeze(0)
    return weighted if sums.shift is None else weighted - sums.shift


def _added(sums: Sums, gradients: Callable[..., Tensor], inputs: Tensor, labels: Tensor) -> Float[Tensor, "n dim"]:
    """Returns the addition of each example to the undivided sum of a step."""

    def at(point: Tensor | None) -> Tensor:
        if point is not None:
            raise NotApplicable("a local step takes gradients at a second point, which only the client has")
        return gradients(inputs, labels)

    with torch.no_grad():
        blocks = contributions(sums.plan, at)
        position = [block.updates for block in sums.plan.blocks].index(True)
        return sums.lifted(blocks[position])


def _contributions(sums: Sums | str, gradients: Callable[..., Tensor]) -> Callable[..., Tensor]:
    if isinstance(sums, str):
        why = sums

        def none(inputs: Tensor, labels: Tensor) -> Tensor:
            raise NotApplicable(f"an example's part in a message does not follow: {why}")

        return none
    own = copy.deepcopy(sums)
    return lambda inputs, labels: _added(own, gradients, inputs, labels)


def _public_round(round: Round, network: nn.Module) -> Round:
    """Returns the round without references to the auditor's network, public pool or clients."""
    context = replace(round.context, parameters=round.parameters.clone(), architecture=None, public=None, one_off=None)
    return replace(round, context=context, network=network)


def _slices(layout: Layout) -> dict[str, tuple[int, int]]:
    return dict(zip(layout.names, layout.slices, strict=True))


def model_queries(model: nn.Module, knowledge: PublicKnowledge) -> ModelAccess:
    """Returns queries to a model with its parameters, as every client has the global model."""

    def logits(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return model(inputs)

    return ModelAccess(
        logits=logits,
        input_shape=knowledge.input_shape,
        classes=knowledge.classes,
        parameters={name: p.detach().clone() for name, p in model.named_parameters()},
    )


def broadcast_model(
    parameters: Float[Tensor, " dim"], network: nn.Module, layout: Layout, knowledge: PublicKnowledge
) -> ModelAccess:
    """Returns queries to the model that a server has sent.

    Args:
        parameters: of the model; copied.
        network: the attacker's own copy of the architecture; its trained parameters are not read.
        layout: order of the flat vector.
        knowledge: public knowledge.
    """
    own = parameters.clone()

    def logits(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return outputs(network, layout, inputs, parameters=own)

    named: Mapping[str, Tensor] = layout.unflatten(own)
    return ModelAccess(
        logits=logits,
        input_shape=knowledge.input_shape,
        classes=knowledge.classes,
        parameters={name: part.clone() for name, part in named.items()},
    )


def models_of(
    models: Sequence[Float[Tensor, " dim"]], network: nn.Module, layout: Layout, knowledge: PublicKnowledge
) -> Steps:
    """Returns queries to the global model before every round, built on demand."""
    kept = [parameters.clone() for parameters in models]
    return Steps(lambda: (broadcast_model(p, network, layout, knowledge) for p in kept), lambda: len(kept))
