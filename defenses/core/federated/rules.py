"""Rules of the client and of the server: what happens after the noise, and how messages become the next global model.

A rule reads releases and public values only. The exception is `ClientRule.targets`, which computes a record's targets
for a loss of the rule's own network: the gradient of that loss is bounded and noised with the record.

Guarantee:
    `correct` and `finish` get a client's noisy updates, never its data: they are post-processing. A further release of
    a client's data must be a plan of `releases`, which the loop executes with the client's noise and charges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..gradients.reference import Loss
from ..plan.defense import NoisyPlan, State
from ..plan.layout import Layout
from ..training.settings import Recipe
from .round import Reply, Round


@runtime_checkable
class ClientRule(Protocol):
    """A client's part of a method after the noise of its local steps, with a state from round to round."""

    @property
    def keeps_span(self) -> bool:
        """True if `correct` returns combinations of updates and of point minus global model."""
        ...

    def check(self, recipe: Recipe) -> None:
        """Raises `ValueError` for a recipe under which the rule is not what its paper says."""
        ...

    def start(self, layout: Layout) -> State:
        """Returns the state before the client's first round."""
        ...

    def network(self, model: nn.Module, loss: Loss) -> tuple[nn.Module, Loss]:
        """Returns the network to train, with the model's parameters in their order, and its per-example loss."""
        ...

    def releases(self, dim: int) -> tuple[NoisyPlan, ...]:
        """Returns plans with their own noise, executed on all the client's data at the start of each of its rounds."""
        ...

    def begin(self, state: State, round: Round, noisy: Sequence[Tensor], size: float) -> State:
        """Returns the state before the first local step, given the noisy sums of `releases`.

        Args:
            state: the client's.
            round: the round.
            noisy: undivided noisy sums, in the order of plans and blocks.
            size: public number of the client's examples.
        """
        ...

    def targets(self, state: State, round: Round, inputs: Tensor, labels: Tensor) -> Tensor:
        """Returns the targets of the rule's loss, each a function of its own record."""
        ...

    def correct(
        self, state: State, round: Round, point: Float[Tensor, " dim"], update: Float[Tensor, " dim"]
    ) -> Float[Tensor, " dim"]:
        """Returns the optimizer's input, given the local parameters and the noisy update of a local step."""
        ...

    def finish(self, state: State, round: Round, delta: Float[Tensor, " dim"]) -> tuple[State, Mapping[str, Tensor]]:
        """Returns the state after the round, and tensors to send beside the message.

        Args:
            state: the client's.
            round: the round.
            delta: local minus global parameters.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Follow:
    """Follows the noisy updates: the rule of FedAvg, and the base of rules that change a part of it."""

    @property
    def keeps_span(self) -> bool:
        """True: the update is passed on."""
        return True

    def check(self, recipe: Recipe) -> None:
        """Accepts every recipe."""

    def start(self, layout: Layout) -> State:
        """Returns no state."""
        return None

    def network(self, model: nn.Module, loss: Loss) -> tuple[nn.Module, Loss]:
        """Returns the model and the loss unchanged."""
        return model, loss

    def releases(self, dim: int) -> tuple[NoisyPlan, ...]:
        """Returns no release."""
        return ()

    def begin(self, state: State, round: Round, noisy: Sequence[Tensor], size: float) -> State:
        """Returns the state unchanged."""
        return state

    def targets(self, state: State, round: Round, inputs: Tensor, labels: Tensor) -> Tensor:
        """Returns the labels unchanged."""
        return labels

    def correct(
        self, state: State, round: Round, point: Float[Tensor, " dim"], update: Float[Tensor, " dim"]
    ) -> Float[Tensor, " dim"]:
        """Returns the update unchanged."""
        return update

    def linear(self, state: State, round: Round) -> tuple[float, Float[Tensor, " dim"] | None] | None:
        """Returns (pull, shift) if `correct` is update + pull (point - global model) + shift, else None.

        The audit of messages removes the shift, and allows for the pull; None for no shift. It is asked with states
        that the server knows, too: functions of messages and broadcasts.

        Args:
            state: the client's, in the round.
            round: the round.
        """
        # A subclass with another correction must say itself that it is linear.
        return (0.0, None) if type(self).correct is Follow.correct else None

    def finish(self, state: State, round: Round, delta: Float[Tensor, " dim"]) -> tuple[State, Mapping[str, Tensor]]:
        """Returns the state unchanged, and nothing to send."""
        return state, {}


@runtime_checkable
class ServerRule(Protocol):
    """The server's part of a method: a function of decoded messages, hence post-processing."""

    @property
    def reads_sum(self) -> bool:
        """True if a reply with the weighted mean and the summed extras of a round serves as well as all replies."""
        ...

    def start(self, layout: Layout) -> State:
        """Returns the state before the first round."""
        ...

    def broadcast(self, state: State) -> Mapping[str, Tensor]:
        """Returns tensors to send to all clients of a round beside the global model."""
        ...

    def aggregate(self, state: State, round: Round, replies: Sequence[Reply]) -> tuple[State, Float[Tensor, " dim"]]:
        """Returns the next state and the global model's displacement, before the server's learning rate.

        Args:
            state: the server's.
            round: the round.
            replies: at least one, by client number.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Average:
    """Weighted mean of the clients' displacements (FedAvg)."""

    @property
    def reads_sum(self) -> bool:
        """True: the mean follows from the sum."""
        return True

    def start(self, layout: Layout) -> State:
        """Returns no state."""
        return None

    def broadcast(self, state: State) -> Mapping[str, Tensor]:
        """Returns nothing: the global model suffices."""
        return {}

    def aggregate(self, state: State, round: Round, replies: Sequence[Reply]) -> tuple[State, Float[Tensor, " dim"]]:
        """Returns the weighted mean of the replies."""
        return state, weighted_mean([reply.delta for reply in replies], [reply.weight for reply in replies])


def weighted_mean(vectors: Sequence[Float[Tensor, " dim"]], weights: Sequence[float]) -> Float[Tensor, " dim"]:
    """Computes a weighted mean in float64, so that the order of the vectors affects the last digits at most.

    Args:
        vectors: at least one.
        weights: nonnegative, at least one positive; they are divided by their sum.
    """
    total, share = torch.zeros_like(vectors[0], dtype=torch.float64), sum(weights)
    for vector, weight in zip(vectors, weights, strict=True):
        total += vector.double() * (weight / share)
    return total.to(vectors[0].dtype)
