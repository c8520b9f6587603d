"""SCAFFOLD: control variates correct the drift of clients with different data.

Karimireddy, Kale, Mohri, Reddi, Stich & Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020, Algorithm 1. A local step is u - c_i + c, with control variates c of the server and c_i of the client, 0 at
first; c moves by the sum of the clients' changes over K, the number of all clients.

`control="reuse"` (option II): c_i+ = c_i - c - Delta_i / (sum of the rates), the mean of the round's noisy updates:
post-processing, free. `control="gradient"` (option I): c_i+ is the mean gradient at the global model, a further release
of all the client's data. It is bounded by the clip norm and noised at a multiplier of its own, and charged every round
the client takes part in; the paper's exact gradient proves nothing, and is `control_noise_multiplier=0`.
Deviation: noise and bound in option I are ours.
Guarantee: unit record: each local step is a Gaussian mechanism at the noise multiplier; in option I, each round is one
more on all of the client's data, at its own multiplier.
Caveat: the variance of the averaged displacement's noise is 2 - m / K times FedAvg's, for m of K clients a round. The
correction by c leaves the span of a round's plans, so a client with projected updates sends all numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .core import (
    Average,
    Block,
    Bound,
    Everything,
    Federated,
    FixedBoundKind,
    Follow,
    Layout,
    NoisyPlan,
    Recipe,
    Reply,
    Round,
    StepPlan,
    bounded,
    refuse_unknown,
)
from .dp_sgd import dp_sgd


@dataclass(frozen=True, kw_only=True)
class ControlVariates(Follow):
    """Client rule with a control variate; state: (c_i, the released mean gradient or None).

    Attributes:
        stored: whether the server stores every c_i and computes its change, so that it is not sent.
        gradient: noisy release of the mean gradient at the global model; None for option II.
        control_noise_multiplier: noise standard deviation / bound of that release.
    """

    stored: bool = False
    gradient: Bound | None = None
    control_noise_multiplier: float = 0.0

    @property
    def keeps_span(self) -> bool:
        """False: control variates of earlier rounds point elsewhere."""
        return False

    def check(self, recipe: Recipe) -> None:
        """Refuses optimizers under which a displacement is not the sum of rates times corrected updates."""
        if recipe.optimizer != "sgd" or recipe.momentum:
            raise ValueError(f"scaffold must have plain SGD, got {recipe.optimizer} with momentum {recipe.momentum}")

    def start(self, layout: Layout) -> tuple[Tensor, None]:
        """Returns c_i = 0."""
        return torch.zeros(layout.dim), None

    def releases(self, dim: int) -> tuple[NoisyPlan, ...]:
        """Returns the release of the summed gradients at the global model, in option I."""
        if self.gradient is None:
            return ()
        return (StepPlan(Block(codec=Everything(dim), bound=self.gradient)).at(self.control_noise_multiplier),)

    def begin(
        self, state: tuple[Tensor, Tensor | None], round: Round, noisy: Sequence[Tensor], size: float
    ) -> tuple[Tensor, Tensor | None]:
        """Keeps the released mean gradient, the next c_i of option I."""
        control = state[0].to(round.parameters)
        return control, noisy[0] / size if noisy else None

    def correct(self, state: tuple[Tensor, Tensor | None], round: Round, point: Tensor, update: Tensor) -> Tensor:
        """Returns u - c_i + c."""
        return update - state[0] + round.broadcast["control"].to(update)

    def linear(self, state: tuple[Tensor, Tensor | None], round: Round) -> tuple[float, Tensor]:
        """Returns the shift c - c_i: the server adds up the changes of c_i that it receives."""
        return 0.0, round.broadcast["control"].to(state[0]) - state[0]

    def finish(
        self, state: tuple[Tensor, Tensor | None], round: Round, delta: Tensor
    ) -> tuple[tuple[Tensor, None], Mapping[str, Tensor]]:
        """Returns the next c_i, and its change for the server."""
        control, released = state
        if released is None:
            released = reused(control, round, delta)
        return (released, None), {} if self.stored else {"control": released - control}


def reused(control: Tensor, round: Round, delta: Tensor) -> Tensor:
    """Computes the control variate of option II, c_i - c - Delta_i / (sum of the rates)."""
    return control - round.broadcast["control"].to(delta) - delta / sum(round.rates)


@dataclass(frozen=True, kw_only=True)
class ControlledAverage(Average):
    """Server rule with a control variate; state: (c, stored c_i by client).

    Attributes:
        stored: whether it stores every c_i.
    """

    stored: bool = False

    @property
    def reads_sum(self) -> bool:
        """True unless every client's variate is computed from its own message."""
        return not self.stored

    def start(self, layout: Layout) -> tuple[Tensor, dict[int, Tensor]]:
        """Returns c = 0."""
        return torch.zeros(layout.dim), {}

    def broadcast(self, state: tuple[Tensor, dict[int, Tensor]]) -> Mapping[str, Tensor]:
        """Returns c."""
        return {"control": state[0]}

    def aggregate(
        self, state: tuple[Tensor, dict[int, Tensor]], round: Round, replies: Sequence[Reply]
    ) -> tuple[tuple[Tensor, dict[int, Tensor]], Tensor]:
        """Returns c moved by the clients' changes over the number of all clients, and the mean displacement."""
        control, own = state[0].to(round.parameters), dict(state[1])
        total = torch.zeros_like(control, dtype=torch.float64)
        for reply in replies:
            if self.stored:
                before = own.get(reply.client, torch.zeros_like(control))
                own[reply.client] = reused(before, round, reply.delta)
                total += own[reply.client].double() - before.double()
            else:
                total += reply.extras["control"].double()
        moved = (control.double() + total / round.clients).to(control)
        return (moved, own), super().aggregate(None, round, replies)[1]


def scaffold(
    *,
    clip_norm: float = 1.0,
    control: Literal["reuse", "gradient"] = "reuse",
    control_noise_multiplier: float = 60.0,
    stored: bool = False,
    bound: FixedBoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Federated:
    """Federated averaging with control variates, of clients that train under DP-SGD.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        control: "reuse" the round's noisy updates (option II), or release the "gradient" at the global model (option
            I).
        control_noise_multiplier: noise standard deviation / C of that release, in every round of a client.
        stored: whether the server stores all control variates of clients, for half the bytes up; for "reuse" alone.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD) or "adaptive_weight" (DP-PSAC).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C in every local step; None until calibrated.
    """
    refuse_unknown("control", control, ("reuse", "gradient"))
    if stored and control == "gradient":
        raise ValueError("stored must be False for control='gradient', whose release only the client has, got True")
    limit = bounded(clip_norm, bound, regulariser)
    rule = ControlVariates(
        stored=stored,
        gradient=limit if control == "gradient" else None,
        control_noise_multiplier=control_noise_multiplier if control == "gradient" else 0.0,
    )
    client = dp_sgd(clip_norm=clip_norm, bound=bound, regulariser=regulariser, noise_multiplier=noise_multiplier)
    return Federated(client=client, rule=rule, server=ControlledAverage(stored=stored), name="scaffold")
