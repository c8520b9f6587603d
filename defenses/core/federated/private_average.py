"""Private average of clients' updates: a central defense at the server, with a client in place of an example.

McMahan, Ramage, Talwar & Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018. A row is minus
a client's displacement, so that it is a gradient; a step is a round. Sampling, bounds, codecs, adaptive clip norms and
correlated noise are therefore those of central training.

Guarantee:
    Unit: a client with all its data. The server is trusted: it sees every update without noise. Participation `poisson`
    with a secret key: add/remove, a Poisson-subsampled Gaussian a round. `fixed`: zero-out, a Gaussian for each of a
    client's rounds; neither add/remove nor replacement is claimed, for then a client displaces another. `partition`:
    zero-out, as in central training. Sums are divided by participation x clients, a public constant, never by the
    replies. A missing or non-finite update is a zero row. With noise in shares, the guarantee is that of
    `secure_sum.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..gradients.executor import Release, release_rows
from ..plan.defense import Context, Defense, NoisyPlan
from ..plan.families.adaptive_clip_norm import EncodedNormWithin
from ..plan.noise_correlation import NoiseMemory
from ..plan.query import Gradient, GradientLess, NormWithin
from ..privacy.ledger import Ledger
from ..privacy.sampling import Sampling, full
from ..randomness.noise import Noise
from ..training.calibration import rehearsed
from ..training.step import Account, Stepper
from .messages.message import Message
from .secure_sum import NoiseShares

_TRIED = 4  # rounds of the dry run: methods with a memory plan their first step otherwise
_QUERIES = (Gradient, GradientLess, NormWithin, EncodedNormWithin)
"""Queries that read a row at the global model and nothing else."""


@dataclass(frozen=True, kw_only=True)
class PrivateAverage:
    """Average of the clients' displacements under a central defense.

    Attributes:
        defense: of a round's updates, one row a client; with its noise.
    """

    defense: Defense


@dataclass
class ClientAccounts(Account):
    """Account of a release that is charged to some of the clients.

    Attributes:
        charged: accounts of the clients that the release is about.
        shares: division of the noise among clients, of which the claim counts on some; None for noise of the server.
    """

    charged: Sequence[Account] = ()
    shares: NoiseShares | None = None

    def charge(self, plan: NoisyPlan, **options: Any) -> None:
        """Charges every client's account, at the noise that the claim counts on."""
        plan = plan if self.shares is None else self.shares.claimed(plan)
        for account in self.charged:
            account.charge(plan, **options)


class PrivateServer:
    """The server of a run with a private average."""

    def __init__(
        self, defense: Defense, context: Context, noise: Noise, *, own_rounds: bool, shares: NoiseShares | None = None
    ) -> None:
        """Starts the defense.

        Args:
            defense: with its noise multiplier set.
            context: of round 0, with the global model; a step is a round, the expected batch is participation x
                clients.
            noise: the server's secret source.
            own_rounds: whether a client is charged for its own rounds alone.
            shares: division of the noise among the clients, whose sum alone is seen; None for noise of the server.

        Raises:
            ValueError: for a defense that needs other rows than the clients' updates.
        """
        self.noise, self.memory, self.shares = noise, NoiseMemory(), shares
        self.stepper = Stepper(defense, context, lambda parameters: None)
        self.stepper.start()
        refuse_as_server(defense, context.steps, own_rounds=own_rounds, shared=shares is not None)

    def average(
        self,
        number: int,
        parameters: Float[Tensor, " dim"],
        deltas: Float[Tensor, "clients dim"],
        accounts: Sequence[Account],
        sampling: Sampling,
    ) -> Float[Tensor, " dim"]:
        """Releases the average of a round, and charges it.

        Args:
            number: index of the round.
            parameters: the global model.
            deltas: displacement of each scheduled client; zero for a lost client.
            accounts: accounts of the clients that are charged.
            sampling: sampler of the clients.

        Returns:
            The displacement of the global model, before the server's learning rate.
        """
        account = self._account(accounts, sampling)

        def gradients(point: Tensor | None) -> Tensor:
            if point is not None:
                raise ValueError("a server's defense must ask for rows at the global model, got another point")
            return -deltas

        def execute(plan: NoisyPlan) -> Release:
            return release_rows(plan, gradients, deltas, self.noise, self.memory)

        self.stepper.take(number, parameters, execute, account)
        return self._moved()

    def planned(self, number: int, parameters: Float[Tensor, " dim"]) -> NoisyPlan:
        """Returns the plan of a round, with the noise of all shares: a function of public values and past releases."""
        state, context = copy.deepcopy(self.stepper.state), self.stepper.context.at(number, parameters=parameters)
        return self.stepper.defense.plan(state, context)[1].at(self.stepper.defense.calibrated_multiplier)

    def open(
        self,
        number: int,
        parameters: Float[Tensor, " dim"],
        total: Message | None,
        accounts: Sequence[Account],
        sampling: Sampling,
    ) -> Float[Tensor, " dim"] | None:
        """Releases the sum of a round's messages, or aborts the round; charges it in both cases.

        Args:
            number: index of the round.
            parameters: the global model.
            total: sum of the messages; None for a round of too few, whose sum is not opened.
            accounts: as for `average`.
            sampling: as for `average`.

        Returns:
            As `average`; None for an aborted round, after which the defense is as before it.
        """
        account, shares = self._account(accounts, sampling), self.shares
        if total is None or shares is None:
            account.charge(self.planned(number, parameters), step=number)
            return None

        def execute(plan: NoisyPlan) -> Release:
            return shares.opened(plan, total, parameters, self.noise)

        self.stepper.take(number, parameters, execute, account)
        return self._moved()

    def _account(self, accounts: Sequence[Account], sampling: Sampling) -> ClientAccounts:
        return ClientAccounts(Ledger(sampling), self.noise.exact, charged=accounts, shares=self.shares)

    def _moved(self) -> Float[Tensor, " dim"]:
        """Returns the displacement of the global model by the last release."""
        update = -self.stepper.update
        if self.stepper.moves is None:
            return update
        moves = self.stepper.moves
        return moves.decode(moves.encode(update.unsqueeze(0)).squeeze(0))


def refuse_as_server(defense: Defense, rounds: int, *, own_rounds: bool, shared: bool) -> None:
    """Refuses defenses that cannot average clients, found by a dry run of the first rounds on a toy.

    Args:
        defense: with its noise multiplier set.
        rounds: number of rounds.
        own_rounds: whether a client is charged for its own rounds alone.
        shared: whether the clients add the noise in shares.

    Raises:
        ValueError: for plans that need more than a client's update, or noise that is correlated over rounds where its
            stream would be cut.
    """
    for step in rehearsed(defense, Account(Ledger(full())), steps=min(rounds, _TRIED)):
        plan = None if step.plan is None else step.plan.plan
        if plan is None:
            continue
        if plan.trial is not None or plan.start_at is not None:
            raise ValueError(f"'{defense.name}' cannot average clients: a round has no trial and no other start")
        if not all(isinstance(block.query, _QUERIES) for block in plan.blocks):
            raise ValueError(f"'{defense.name}' cannot average clients: an update is known at the global model alone")
        if plan.correlated is not None and (own_rounds or shared):
            argument, value = ("aggregation", "sum") if shared else ("participants", "fixed")
            instead = "'messages'" if shared else "'partition'"
            why = "in which a lost client takes its part away" if shared else "which has no participation pattern"
            raise ValueError(
                f"'{defense.name}' has noise that is correlated over rounds, so {argument} must be {instead}, got "
                f"'{value}', {why}"
            )


def context_of_server(context: Context, *, rounds: int, sampling: Sampling, clients: float) -> Context:
    """Returns the context of a server's defense.

    Args:
        context: public context of the run at the global model.
        rounds: number of rounds.
        sampling: sampler of the clients.
        clients: expected number of clients in a round, participation x clients.
    """
    return replace(
        context,
        step=0,
        steps=rounds,
        steps_per_epoch=sampling.steps_per_epoch,
        expected_batch=clients,
        one_off=None,
        round_steps=1,
    )


def stacked(deltas: Sequence[Tensor | None], like: Float[Tensor, " dim"]) -> Float[Tensor, "clients dim"]:
    """Returns a row for each client, zero for a missing or non-finite displacement.

    Args:
        deltas: displacements, None for lost clients.
        like: a vector of the same length, dtype and device.
    """
    zero = torch.zeros_like(like)
    rows = [zero if delta is None or not bool(torch.isfinite(delta).all()) else delta for delta in deltas]
    return torch.stack(rows) if rows else like.new_zeros(0, len(like))
