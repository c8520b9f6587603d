"""Private average of clients' updates: a central defense at the server, with a client in place of an example.

McMahan, Ramage, Talwar & Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018. A row is minus
a client's displacement, so that it is a gradient; a step is a round. Sampling, bounds, codecs, adaptive clip norms and
correlated noise are therefore those of central training.

Guarantee:
    Unit: a client with all its data. The server is trusted: it sees every update without noise. Participation `poisson`
    with a secret key: add/remove, a Poisson-subsampled Gaussian a round. `fixed`: zero-out, a Gaussian for each of a
    client's rounds; neither add/remove nor replacement is claimed, for then a client displaces another. `partition`:
    zero-out, as in central training. Sums are divided by participation x clients, a public constant, never by the
    replies. A missing or non-finite update is a zero row.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    """

    charged: Sequence[Account] = ()

    def charge(
        self,
        plan: NoisyPlan,
        *,
        step: int,
        one_off: bool = False,
        trial: bool = False,
        sampling: Sampling | None = None,
    ) -> None:
        """Charges every client's account."""
        for account in self.charged:
            account.charge(plan, step=step, one_off=one_off, trial=trial, sampling=sampling)


class PrivateServer:
    """The server of a run with a private average."""

    def __init__(self, defense: Defense, context: Context, noise: Noise, *, own_rounds: bool) -> None:
        """Starts the defense.

        Args:
            defense: with its noise multiplier set.
            context: of round 0, with the global model; a step is a round, the expected batch is participation x
                clients.
            noise: the server's secret source.
            own_rounds: whether a client is charged for its own rounds alone.

        Raises:
            ValueError: for a defense that needs other rows than the clients' updates.
        """
        self.noise, self.memory, self._own_rounds = noise, NoiseMemory(), own_rounds
        self.stepper = Stepper(defense, context, lambda parameters: None)
        self.stepper.start()
        _refuse_other_rows(defense, context.steps)
        _, plan = defense.plan(copy.deepcopy(self.stepper.state), self.stepper.context)
        if plan.correlated is not None and own_rounds:
            raise ValueError(
                f"'{defense.name}' has noise that is correlated over rounds, so participants must be 'partition', got "
                "'fixed', which has no participation pattern"
            )

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
        account = ClientAccounts(Ledger(sampling), self.noise.exact, charged=accounts)

        def gradients(point: Tensor | None) -> Tensor:
            if point is not None:
                raise ValueError("a server's defense must ask for rows at the global model, got another point")
            return -deltas

        def execute(plan: NoisyPlan) -> Release:
            return release_rows(plan, gradients, deltas, self.noise, self.memory)

        self.stepper.take(number, parameters, execute, account)
        update = -self.stepper.update
        if self.stepper.moves is None:
            return update
        moves = self.stepper.moves
        return moves.decode(moves.encode(update.unsqueeze(0)).squeeze(0))


def _refuse_other_rows(defense: Defense, rounds: int) -> None:
    """Refuses plans that need more than a client's update, found by a dry run of the first rounds on a toy."""
    for step in rehearsed(defense, Account(Ledger(full())), steps=min(rounds, _TRIED)):
        plan = None if step.plan is None else step.plan.plan
        if plan is None:
            continue
        if plan.trial is not None or plan.start_at is not None:
            raise ValueError(f"'{defense.name}' cannot average clients: a round has no trial and no other start")
        if not all(isinstance(block.query, _QUERIES) for block in plan.blocks):
            raise ValueError(f"'{defense.name}' cannot average clients: an update is known at the global model alone")


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
