"""Batch samplers (Poisson, shuffle, partition, fixed size, full), and what the accountant charges for each.

`poisson`: every example joins each step by its own coin; the only sampler that amplifies. `shuffle`: a new
order every epoch, cut into batches. `partition`: one order for all epochs. `fixed`: a uniform subset of fixed
size each step. `full`: everybody, always.

Guarantee:
    `poisson` is charged as a Poisson-subsampled Gaussian under add/remove. `shuffle` and `partition` use
    every record at most once an epoch, so E epochs are an E-fold Gaussian under zero-out (a record is
    replaced by one that contributes nothing); a shuffled order is a mixture of fixed ones. `fixed` and `full`
    are charged in every step. Assumes that the sampler's key stays secret (for `poisson`; the others do not
    rely on it): it is drawn from the operating system unless one is given. Who can compute the key knows who took part,
    and amplification protects nobody from them.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from ..privacy.keys import keyed

Sampler = Literal["poisson", "shuffle", "partition", "fixed", "full"]


@dataclass(frozen=True)
class Sampling:
    """A sampler and its rate.

    Attributes:
        kind: which sampler.
        rate: expected batch / number of examples, in (0, 1].
    """

    kind: Sampler
    rate: float

    def __post_init__(self) -> None:
        if self.kind not in get_args(Sampler):
            raise ValueError(f"sampling must be one of {', '.join(get_args(Sampler))}, got '{self.kind}'")
        object.__setattr__(self, "rate", float(self.rate))
        if not 0 < self.rate <= 1:
            raise ValueError(f"sample_rate must be in (0, 1], got {self.rate}")
        if self.kind == "full" and self.rate != 1:
            raise ValueError(f"sample_rate must be 1 for full batches, got {self.rate}")

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every example is used once (for `shuffle` and `partition`) or once on average."""
        return math.ceil(1 / self.rate - 1e-9)  # 1 / (70 / 700) may come out a hair above 10

    @property
    def relation(self) -> str:
        """The neighbouring relation that claims under this sampler hold for."""
        return "add_remove" if self.kind in ("poisson", "full") else "zero_out"

    def expected_batch(self, examples: int) -> float:
        """The public constant that sums are divided by; never the size that was drawn."""
        return self.rate * examples

    def indices(self, step: int, examples: int, key: int) -> Int[Tensor, " batch"]:
        """Who takes part in a step: a pure function of step and secret key, so a run can be resumed anywhere.

        Args:
            step: number of the step, from 0.
            examples: how many there are.
            key: secret of the trainer.

        Returns:
            Distinct example numbers; may be empty under `poisson`.
        """
        if self.kind == "full":
            return torch.arange(examples)
        epoch, position = divmod(step, self.steps_per_epoch)
        tag = {"shuffle": epoch, "partition": 0}.get(self.kind, step)
        # All bits of the key count, and no step's generator tells that of another.
        digest = hashlib.sha256(f"sample/{key}/{self.kind}/{tag}".encode()).digest()
        generator = keyed(int.from_bytes(digest, "big"))
        if self.kind == "poisson":
            # float64 coins: float32 has only 2^24 values, too coarse for small rates.
            coins = torch.rand(examples, generator=generator, dtype=torch.float64)
            return torch.nonzero(coins < self.rate).squeeze(1)
        order = torch.randperm(examples, generator=generator)
        batch = self.expected_batch(examples)
        if self.kind == "fixed":
            return order[: max(1, round(batch))]
        # The cuts are rounded, not the batch: else a rate that does not divide leaves some examples out of
        # every epoch. Neighbouring batches share a cut, so no example is used twice in one.
        return order[round(position * batch) : round((position + 1) * batch)]


def poisson(sample_rate: float) -> Sampling:
    """Every example joins each step independently with probability `sample_rate`."""
    return Sampling("poisson", sample_rate)


def shuffle(sample_rate: float) -> Sampling:
    """A new random order each epoch, cut into batches of `sample_rate` of the examples, the last smaller."""
    return Sampling("shuffle", sample_rate)


def partition(sample_rate: float) -> Sampling:
    """The same batches in every epoch."""
    return Sampling("partition", sample_rate)


def fixed(sample_rate: float) -> Sampling:
    """A uniform subset of `sample_rate` of the examples each step, without replacement."""
    return Sampling("fixed", sample_rate)


def full() -> Sampling:
    """Every example in every step."""
    return Sampling("full", 1.0)
