"""A client of two records, asked by `local_round` at a model of the server, and the test of one record's membership.

The reference for a record's contribution is a twin of the client: the same public seed, so the same masks and bases,
that record alone, no noise. Coins of the sampler are drawn again by the client's key.
"""

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from leakbench.defenses.core import Execution, Federated, Federation, Recipe, Sampling, full, poisson
from leakbench.defenses.core.federated.client import own_sampler_key
from leakbench.defenses.core.federated.sides import ClientSide, local_round
from leakbench.defenses.core.plan.layout import Layout

SHAPE, CLASSES, SEED = (1, 4, 4), 3, 11
RECORDS = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2])
PUBLIC = torch.rand(40, *SHAPE, generator=torch.Generator().manual_seed(9)), torch.arange(40) % CLASSES


def net(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), activation(), nn.Linear(12, CLASSES))


@dataclass
class Asked:
    """A client's numbers in rounds at one model.

    Attributes:
        method: with its noise.
        sampling: of a local step.
        model: network of the client.
        chosen: flat model of the server.
        rounds: number of rounds.
        engine: of the local steps.
    """

    method: Federated
    sampling: Sampling
    model: nn.Module = field(default_factory=net)
    chosen: Tensor | None = None
    rounds: int = 1
    engine: Any = "auto"

    def client(self, records: slice, *, key: int, noise: bool = True) -> ClientSide:
        """The client with some of the records; without noise in full batches."""
        method = self.method if noise else self.method.with_noise(0.0)
        return ClientSide(
            copy.deepcopy(self.model),
            (RECORDS[0][records], RECORDS[1][records]),
            method,
            number=0,
            sizes=[2],
            federation=Federation(rounds=self.rounds, local_steps=1, participation=1.0),
            sampling=self.sampling if noise else full(),
            seed=SEED,
            lr=1.0,
            public=PUBLIC,
            key=key,
            recipe=Recipe(nominal_size=2),
            execution=Execution(engine=self.engine, unchecked=self.engine != "auto"),
        )

    def sums(self, client: ClientSide, number: int, divisor: float) -> Tensor:
        """The undivided noisy sum of a round, as its message shows it, in float64."""
        flat = Layout.of(self.model).read(self.model) if self.chosen is None else self.chosen
        arrays = local_round(client, number, {"parameters": flat.numpy().copy()})
        (values,) = (part for name, part in arrays.items() if name.split("/")[-1] == "values")
        return -divisor * torch.from_numpy(np.asarray(values)).double()

    def scores(self, *, key: int, std: float) -> tuple[Tensor, Tensor]:
        """Log likelihood ratios of the second record, of rounds with it and of rounds without it.

        Args:
            key: secret key of the client.
            std: standard deviation of the noise on the undivided sums, as it is.
        """
        other = self.client(slice(0, 1), key=key, noise=False)
        own = self.client(slice(1, 2), key=key, noise=False)
        clients = [self.client(slice(0, 2), key=key), self.client(slice(0, 1), key=key + 1)]
        rate, scores = self.sampling.rate, [[], []]
        for number in range(self.rounds):
            beside, row = (self.sums(twin, number, 2.0) for twin in (other, own))
            for place, client in enumerate(clients):
                joined = self.sampling.indices(number, 2 - place, own_sampler_key(key + place, 0))
                rest = self.sums(client, number, 2.0 * rate) - (0 in joined.tolist()) * beside
                ratio = float(row @ rest - row.square().sum() / 2) / std**2
                scores[place].append(np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + ratio))
        return torch.tensor(scores[0]), torch.tensor(scores[1])

    def claim(self, key: int = 3) -> Any:
        """The guarantee of one round, by the ledger of a client that has taken one."""
        client = self.client(slice(0, 2), key=key)
        self.sums(client, 0, 1.0)
        return client.claim(1e-5)


def bernoulli(rate: float) -> Sampling:
    return full() if rate == 1 else poisson(rate)


def excess(scores: tuple[Tensor, Tensor], claim: Any) -> float:
    """Largest TPR over what a claim allows at the FPR, over thresholds, in standard deviations of the counts."""
    inside, outside = scores
    count, worst = len(inside), -math.inf
    for threshold in (0.0, *outside.quantile(torch.tensor([0.5, 0.8, 0.95], dtype=outside.dtype)).tolist()):
        tpr, fpr = float((inside > threshold).double().mean()), float((outside > threshold).double().mean())
        allowed = claim.tpr_at(min(1.0, fpr))
        # The slope of the trade-off turns an error of the FPR into one of what is allowed.
        slope = (claim.tpr_at(min(1.0, fpr + 0.01)) - claim.tpr_at(max(0.0, fpr - 0.01))) / 0.02
        variance = tpr * (1 - tpr) + slope**2 * fpr * (1 - fpr) + 1 / count
        worst = max(worst, (tpr - allowed) / math.sqrt(variance / count))
    return worst
