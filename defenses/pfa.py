"""PFA: updates are projected on a subspace, of public gradients or of the clients with the loosest budgets.

Liu, Lou, Wang, Xi & Wang, "Projected Federated Averaging with Heterogeneous Differential Privacy", VLDB 2022, Algorithm
1, and the simplified form of the PCDP-SGD paper. `variant="simplified"`: clients train under DP-SGD and send the
coefficients V^T Delta of their displacement, along public directions at the global model; the rest is lost.
`variant="full"`: clients choose budgets, each with its noise multiplier and ledger; those with the loosest budgets
count as "public". V are the leading right singular vectors of their displacements, for every tensor, and the next
model moves by (m_pub / m) mean_pub + (m_priv / m) V V^T mean_priv. Displacements are releases, so V is free, and no
public data are read. `variant="plus"` (PFA+): strict clients send V^T Delta along the V of the last round in which
loose clients replied, which the server sends them, and the server adds V V^T Delta as it comes.
Deviation: the simplified form's V, which its paper does not define, is that of `fed_pcdp`; the loosest budgets are
those of the lower component of a two-component Gaussian mixture on the logarithms of the noise multipliers, unless a
threshold is set; until a V is known, strict clients of "plus" send all numbers, as in "full".
Guarantee: unit record: each local step is a Gaussian mechanism at the client's noise multiplier; all else is
post-processing. Budgets are public.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .core import (
    Average,
    Context,
    Federated,
    FixedBoundKind,
    Message,
    PublicCoefficients,
    PublicSubspace,
    Reachable,
    Reply,
    Round,
    Subspace,
    coefficients,
    decoded_message,
    dense_message,
    leading_directions,
    refuse_count,
    refuse_unknown,
    weighted_mean,
)
from .dp_sgd import dp_sgd

_BASIS = "basis"  # and the number of a tensor, by which its directions are sent


@dataclass(frozen=True, kw_only=True)
class ProjectedAverage(Average):
    """Server rule that projects displacements of clients with strict budgets on the span of the others'.

    Attributes:
        loose: numbers of the clients whose budget is loose.
        rank: k, largest number of directions of a tensor.
        ahead: whether strict clients project their displacements themselves, along the last round's directions, which
            are the rule's state.
    """

    loose: frozenset[int]
    rank: int
    ahead: bool = False

    @property
    def reads_sum(self) -> bool:
        """False: loose and strict clients are told apart."""
        return False

    def broadcast(self, state: tuple[Tensor, ...] | None) -> Mapping[str, Tensor]:
        """Returns the last directions, a basis [k, d_l] a tensor, where strict clients need them."""
        return {f"{_BASIS}{number}": basis for number, basis in enumerate(state or ())}

    def aggregate(
        self, state: tuple[Tensor, ...] | None, round: Round, replies: Sequence[Reply]
    ) -> tuple[tuple[Tensor, ...] | None, Tensor]:
        """Returns the weighted sum of the mean of loose clients, and of the projected mean of strict ones.

        In a round without loose clients, or without strict ones, it is the plain mean.
        """
        public = [reply for reply in replies if reply.client in self.loose]
        private = [reply for reply in replies if reply.client not in self.loose]
        span = self._span(round, public) if public else None
        if self.ahead and span is not None:
            state = span.bases
        projected = self.ahead and _sent(round) is not None
        if span is None or not private or projected:
            return state, super().aggregate(None, round, replies)[1]
        of_public, of_private = (
            weighted_mean([reply.delta for reply in part], [reply.weight for reply in part])
            for part in (public, private)
        )
        share = sum(reply.weight for reply in public) / sum(reply.weight for reply in replies)
        inside = span.project(of_private.unsqueeze(0)).squeeze(0)
        return state, share * of_public + (1 - share) * inside

    def _span(self, round: Round, public: Sequence[Reply]) -> Subspace:
        """Returns the leading directions of the loose clients' displacements."""
        rows, spans = torch.stack([reply.delta for reply in public]), round.context.layout.slices
        # Uncentred, and no more directions than rows.
        bases = tuple(leading_directions(rows[:, a:b], min(self.rank, len(rows), b - a)) for a, b in spans)
        return Subspace(bases, spans, rows.shape[1])


def _sent(round: Round) -> Subspace | None:
    """Returns the directions that the server has sent; None before it has any."""
    context, sent = round.context, round.broadcast
    if not any(name.startswith(_BASIS) for name in sent):
        return None
    names = [f"{_BASIS}{number}" for number in range(len(context.layout.slices))]  # arrays may come in another order
    if absent := sorted({*names} - {*sent}):
        raise ValueError(f"broadcast must have the directions of every tensor, got none named '{absent[0]}'")
    bases = tuple(sent[name].to(round.parameters) for name in names)
    return Subspace(bases, context.layout.slices, context.dim)


@dataclass(frozen=True, kw_only=True)
class AlongLast:
    """Messages of PFA+: strict clients send coefficients along the directions that the server has sent.

    Attributes:
        loose: numbers of the clients whose budget is loose, which send all numbers.
    """

    loose: frozenset[int]

    @property
    def adds(self) -> bool:
        """False: loose and strict clients send different numbers."""
        return False

    def prepare(self, context: Context) -> None:
        """Returns None: the server sends the directions."""

    def check(self, round: Round) -> None:
        """Accepts every round."""

    def encode(self, delta: Tensor, round: Round) -> Message:
        """Returns coefficients of a strict client's displacement, once there are directions; otherwise all numbers."""
        span = _sent(round)
        if round.client in self.loose or span is None:
            return dense_message(delta)
        return coefficients(delta, span)

    def decode(self, message: Message, round: Round) -> Tensor:
        """Returns the displacement, for a strict client its part along the directions."""
        return decoded_message(message, round.context.dim, _sent(round))


def loosest(budgets: Sequence[float], threshold: float | None) -> frozenset[int]:
    """Returns the numbers of the clients with loose budgets.

    Args:
        budgets: noise multiplier of every client; positive without a threshold.
        threshold: largest multiplier of a loose budget; None for a two-component mixture. Equal budgets are all loose.
    """
    if threshold is None and len({*budgets}) > 1:
        from sklearn.mixture import GaussianMixture  # here, because it would delay the import of the method

        logs = np.log(np.asarray(budgets))[:, None]
        mixture = GaussianMixture(2, random_state=0).fit(logs)
        lower = int(np.argmin(np.asarray(mixture.means_)[:, 0]))
        return frozenset(np.flatnonzero(mixture.predict(logs) == lower).tolist())
    limit = math.inf if threshold is None else threshold
    return frozenset(client for client, multiplier in enumerate(budgets) if multiplier <= limit)


def pfa(
    *,
    clip_norm: float = 1.0,
    variant: Literal["simplified", "full", "plus"] = "simplified",
    rank: int = 20,
    auxiliary_size: int | None = None,
    budgets: tuple[float, ...] = (),
    threshold: float | None = None,
    bound: FixedBoundKind = "clip",
    regulariser: float | None = None,
    noise_multiplier: float | None = None,
) -> Federated:
    """Federated averaging of projected updates, of clients that train under DP-SGD.

    Args:
        clip_norm: C, largest norm of an example's gradient, L2, in gradient units.
        variant: "simplified" projects every message on public directions, "full" the strict clients' updates on the
            loose ones', "plus" the same at the client, on those of the round before.
        rank: k, largest number of directions of a tensor.
        auxiliary_size: public examples of a round, for "simplified"; None for as many as `rank`.
        budgets: noise multiplier of every client, for "full" and "plus".
        threshold: largest noise multiplier of a loose budget, for these; None for a mixture of two components.
        bound: bounding method: "clip", "normalize" (AUTO-S, NSGD) or "adaptive_weight" (DP-PSAC).
        regulariser: parameter of "normalize" or "adaptive_weight", in gradient units; None for the papers' 0.01 and
            0.1.
        noise_multiplier: noise standard deviation / C in every local step, for "simplified"; None until calibrated.
    """
    refuse_unknown("variant", variant, ("simplified", "full", "plus"))
    refuse_count("rank", rank)
    client = dp_sgd(clip_norm=clip_norm, bound=bound, regulariser=regulariser, noise_multiplier=noise_multiplier)
    if variant == "simplified":
        if budgets or threshold is not None:
            raise ValueError("budgets and threshold must go with variant 'full', got them with 'simplified'")
        subspace = PublicSubspace(rank=rank, auxiliary_size=auxiliary_size)
        return Federated(client=client, messages=PublicCoefficients(subspace=subspace), name="pfa")
    if not budgets or (threshold is None and min(budgets) <= 0):
        raise ValueError(
            f"budgets must be a positive noise multiplier for every client in variant '{variant}', got {budgets}"
        )
    loose, ahead = loosest(budgets, threshold), variant == "plus"
    server = ProjectedAverage(loose=loose, rank=rank, ahead=ahead)
    messages = AlongLast(loose=loose) if ahead else Reachable()
    return Federated(client=client, messages=messages, server=server, budgets=budgets, name="pfa")
