"""A federated training with its clients' private data, held by the auditor, and measurements of every round.

Examples are divided among clients by the suite's seed. Keys of noise and samplers are hashed from the cell's seed and a
client's number, or drawn from the operating system.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from leakbench.attacks.core import NotApplicable
from leakbench.benchmarks.core import clients_digest
from leakbench.defenses.core import (
    Federated,
    FederatedRun,
    Federation,
    RoundSchedule,
    Sampling,
    predict_federated,
    weighted_mean,
)
from leakbench.defenses.core.federated.federated_settings import FederatedSettings
from leakbench.defenses.core.federated.rounds import OngoingFederation

from ..plan.build import planned, recipe_of
from ..plan.federation import clients_of, defend_federated, divided, federation_of, schedule_of
from ..plan.request import TrainingRequest, seed_of_data
from ..plan.threat_models import OfClients
from ..scoring.utility import losses
from ..targets.client_messages import ClientData
from ..targets.observe import logits_of
from .outcome import pick
from .training_data import TrainingData
from .watched_federation import OF_ONE_CLIENT, WatchedFederation, refusal


@dataclass(frozen=True)
class RoundMeasure:
    """Measurements of a round.

    Attributes:
        accuracy: of the global model after the round, on test examples.
        loss: the same in nats.
        drift: sum_i w_i |Delta_i - mean|^2 / |mean|^2 over the replies; NaN for fewer than two, and where the server
            sees their sum alone.
    """

    accuracy: float
    loss: float
    drift: float


class ClientsRun(TrainingData):
    """A federated training and its data; each property is computed at its first use, and kept.

    Attributes:
        request: of the training.
        device: device of the computation.
        shown_parts: parts of the run that attacks of the job see, which are kept in training.
        splits: of the data set.
    """

    def __init__(
        self, request: TrainingRequest, device: torch.device, shown_parts: Collection[OfClients] = frozenset()
    ) -> None:
        """Reads the data; trains nothing yet."""
        super().__init__(request, device)
        self.shown_parts = frozenset(shown_parts)

    @cached_property
    def shards(self) -> list[Int64[Tensor, "_"]]:
        """Positions of each client's examples among the training examples."""
        return divided(self.request, self.uninserted.ids, self.uninserted.labels)

    @property
    def sizes(self) -> list[int]:
        """Number of each client's examples."""
        return [len(shard) for shard in self.shards]

    @property
    def public_sizes(self) -> list[int]:
        """The same as treated by claims: the nominal size where the suite has one."""
        nominal = self.request.training.nominal_size
        return [size and (nominal or size) for size in self.sizes]

    @cached_property
    def histograms(self) -> Float64[Tensor, "clients classes"]:
        """Fraction of each class among each client's examples."""
        labels = self.uninserted.labels
        counts = torch.stack([torch.bincount(labels[shard], minlength=self.splits.classes) for shard in self.shards])
        return counts.double() / counts.sum(dim=1, keepdim=True).clamp(min=1)

    @property
    def sampling(self) -> tuple[Sampling, int]:
        """Sampler of a client of average size, and local steps of a client that is in every round."""
        return planned(self.request, len(self.uninserted))

    @cached_property
    def federation(self) -> Federation:
        """Shape of the run."""
        return federation_of(self.request, len(self.uninserted))

    @property
    def schedule_seed(self) -> int:
        """Public seed of the schedule, which all methods on the same clients share."""
        return seed_of_data(self.clients_digest, "schedule")

    @property
    def schedule(self) -> RoundSchedule:
        """Participants and losses of every round."""
        return schedule_of(self.federation, self.public_sizes, self.schedule_seed)

    @cached_property
    def method(self) -> tuple[Federated, bool]:
        """The federated method at its noise, and whether the noise was matched instead of calibrated."""
        return defend_federated(self.request, self.public_sizes, self.schedule)

    @cached_property
    def attacked(self) -> int:
        """The attacked client: a number of the suite, or the first client with the largest predicted epsilon.

        Raises:
            NotApplicable: that client takes part in no round.
        """
        chosen, sizes = clients_of(self.request).attacked, self.public_sizes
        if not isinstance(chosen, int):
            delta, (method, _) = self.request.budget.delta, self.method
            run: dict[str, Any] = {"federation": self.federation, "sampling": self.sampling[0]}
            ledgers = predict_federated(method, sizes, schedule=self.schedule, **run)
            epsilons = [
                ledger.claim(delta, unit=method.unit).epsilon if self.schedule.rounds_of(client) else -1.0
                for client, ledger in enumerate(ledgers)
            ]
            return max(range(len(sizes)), key=lambda client: (epsilons[client], -client))
        if not self.schedule.rounds_of(chosen):
            raise NotApplicable(f"client {chosen} is attacked, and takes part in no round; set federated.attacked")
        return chosen

    @cached_property
    def too_long(self) -> str:
        """Reason why messages and local steps are not kept in training, by public sizes; empty if they are."""
        if not self.shown_parts & OF_ONE_CLIENT:
            return ""
        rounds = [len(self.schedule.rounds_of(client)) for client in range(len(self.sizes))]
        steps = 0 if self._attacked_if_any is None else rounds[self._attacked_if_any] * self.federation.local_steps
        messages = sum(rounds) if "messages" in self.shown_parts else 0
        dim = sum(part.numel() for part in self.network.parameters() if part.requires_grad)
        return refusal(4 * dim * (messages + steps))

    @property
    def _attacked_if_any(self) -> int | None:
        """The attacked client; None if it is in no round, a reason to skip attacks on it, and not the training."""
        try:
            return self.attacked
        except NotApplicable:
            return None

    @property
    def refused_parts(self) -> str:
        """Reason why attacks on messages and local steps are refused; trains, unless public sizes are the reason."""
        return self.too_long or self.watched.outgrew

    def private_side(self, client: int) -> ClientData:
        """Returns a client's data and secret key."""
        training, positions = self.watched, self.shards[client]
        own = training.state.clients[client]
        return ClientData(client, pick(self.uninserted, positions), own.sampling, own.sampler_key, own.expected_batch)

    @property
    def clients_digest(self) -> str:
        """SHA-256 of the ids that each client holds."""
        return clients_digest(self.uninserted.ids, self.shards)

    @property
    def network(self) -> nn.Module:
        """The network before the first round."""
        return self._start

    @property
    def shows_messages(self) -> bool:
        """True if attacks see the messages of single clients; False under `aggregation = "sum"`."""
        return self.federation.shows_messages

    @cached_property
    def public_only(self) -> nn.Module:
        """The network trained on the public examples alone."""
        return self._start.eval()

    @cached_property
    def rounds(self) -> list[RoundMeasure]:
        """Measurements of every round."""
        return self._watched[1]

    @property
    def watched(self) -> WatchedFederation:
        """The finished training with what it kept for attacks; auditor only."""
        return self._watched[2]

    @cached_property
    def run(self) -> FederatedRun:
        """The training, computed at its first use."""
        return self._watched[0]

    @cached_property
    def _watched(self) -> tuple[FederatedRun, list[RoundMeasure], WatchedFederation]:
        seeds = self.request.seeds
        measures: list[RoundMeasure] = []
        drifts: list[float] = []  # of the last round; nothing where the server sees a sum alone

        def measure(done: int, rounds: int) -> None:
            measures.append(self._measure(training, drifts.pop() if drifts else float("nan")))

        secret = self.federation.participants == "poisson" and self.method[0].noise_place == "server"
        settings = replace(
            self.settings(self.federation, seeds.noise),
            # Participants that amplify a claim for clients are drawn by the run, with its secret key.
            schedule=None if secret else self.schedule,
            progress=measure,
            observe=lambda deltas, weights: drifts.append(relative_drift([*deltas.values()], [*weights.values()])),
        )
        parts = self.shown_parts - OF_ONE_CLIENT if self.too_long else self.shown_parts
        training = self.started(settings, parts, self._attacked_if_any if parts & OF_ONE_CLIENT else None)
        run = training.run()
        return replace(run, public_used=run.public_used or self.splits.scaled_by_public), measures, training

    def settings(self, federation: Federation, key: int | None) -> FederatedSettings:
        """Returns the settings of a run of these clients, without a schedule.

        Args:
            federation: shape of the run.
            key: secret key of samplers and noise; None for keys of the operating system.
        """
        task = self.request.training
        return FederatedSettings(
            method=self.method[0],
            federation=federation,
            sampling=self.sampling[0],
            lr=task.lr,
            seed=self.request.seeds.public,
            key=key,
            exact=self.request.secure,
            schedule=None,
            recipe=recipe_of(task, self.splits),
            execution=task.execution(self.device),
            keep_messages=False,
            progress=None,
        )

    def started(
        self, settings: FederatedSettings, shown_parts: Collection[OfClients], attacked: int | None
    ) -> WatchedFederation:
        """Returns a run of these clients before its first round.

        Args:
            settings: of the run.
            shown_parts: parts that attacks see.
            attacked: client of which every local step is kept; None for none.
        """
        data, public = self.uninserted, self._read
        shards = [(data.inputs[shard], data.labels[shard]) if len(shard) else None for shard in self.shards]
        pool = (public.inputs, public.labels) if len(public) else None
        training = WatchedFederation(copy.deepcopy(self._start), shards, pool, settings)
        training.watch(shown_parts, attacked)
        return training

    def _measure(self, training: OngoingFederation, drift: float) -> RoundMeasure:
        logits = logits_of(training.global_model(), self.test.inputs)
        right = (logits.argmax(dim=1) == self.test.labels) & ~logits.isnan().any(dim=1)
        loss = losses(logits, self.test.labels).mean()
        return RoundMeasure(float(right.double().mean()), float(loss), drift)


def relative_drift(deltas: list[Float[Tensor, " dim"]], weights: list[float]) -> float:
    """Computes the weighted spread of the clients' displacements around their mean, over the mean's square.

    Args:
        deltas: displacement of each client that replied.
        weights: of the same, positive.
    """
    if len(deltas) < 2:
        return float("nan")
    shares = [weight / sum(weights) for weight in weights]
    mean = weighted_mean(deltas, shares)
    square = float(mean.double().square().sum())
    spread = sum(
        share * float((delta - mean).double().square().sum()) for share, delta in zip(shares, deltas, strict=True)
    )
    return spread / square if square > 0 else float("nan")
