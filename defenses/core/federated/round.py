"""Public facts of a round of federated training, and the decoded reply of a client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor, nn

from ..plan.codec import Codec
from ..plan.defense import Context, StepPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    """A round: values that the server and all clients know.

    Attributes:
        number: index of the round, from 0.
        context: context of the round's first local step at the global model, of the server as a virtual client.
        network: the network in training, which may compute more than the model's outputs (`ClientRule.network`).
        clients: number of clients with data, K.
        rates: learning rate of each local step; its length is the number of local steps.
        broadcast: tensors that the server's rule sends beside the global model.
        foreseen: plans of the local steps that follow from public values alone; None if they follow from releases of a
            client.
        spanned: whether optimizer and client rule leave the parameters in the span of the plans' updates.
        codec: codec that the messages have prepared at the global model; None for none.
        plans: plans that the client has executed; empty at the server.
        client: number of the client; None at the server.
        update: noisy update of the client's last local step [dim]; None where local steps have no noise.
        summed: whether the server sees the sum of the messages alone, so that none may have positions of its own.
    """

    number: int
    context: Context
    network: nn.Module
    clients: int
    rates: tuple[float, ...]
    broadcast: Mapping[str, Tensor] = field(default_factory=dict)
    foreseen: tuple[StepPlan, ...] | None = None
    spanned: bool = True
    codec: Codec | None = None
    plans: tuple[StepPlan, ...] = ()
    client: int | None = None
    update: Float[Tensor, " dim"] | None = None
    summed: bool = False

    @property
    def parameters(self) -> Float[Tensor, " dim"]:
        """The global model at the start of the round.

        Raises:
            ValueError: for a context without parameters.
        """
        if self.context.parameters is None:
            raise ValueError("context of a round must have the global parameters, got None")
        return self.context.parameters

    @property
    def local_steps(self) -> int:
        """Number of local steps, tau."""
        return len(self.rates)


@dataclass(frozen=True, eq=False)
class Reply:
    """A client's message after the server has decoded it, or the sum of a round's messages.

    Attributes:
        client: number of the client; -1 for a sum.
        delta: local model minus global model [dim], as decoded; for a sum the weighted mean.
        weight: share of the client in the average; the weights of a round's replies sum to 1.
        extras: further tensors of the message, by name; for a sum their sums.
    """

    client: int
    delta: Float[Tensor, " dim"]
    weight: float
    extras: Mapping[str, Tensor] = field(default_factory=dict)
