"""Batch samplers, and the participation pattern of each, which the accountant charges.

`poisson`: every example joins each step by its own coin. `truncated_poisson`: the same with a largest batch, the
surplus dropped at random. `random_allocation` (also: balls in bins): every example joins a single, uniformly drawn step
of each epoch. `cyclic`: examples are dealt into groups once, groups take turns, and every example of the current group
joins by its own coin. `fixed`: a uniform subset of fixed size each step, drawn without replacement. These five amplify.
`shuffle`: a new order every epoch, cut into batches. `partition`: the same order in all epochs. `full`: all examples in
every step.

Guarantee:
    `poisson` is charged as a Poisson-subsampled Gaussian under add/remove. `fixed` holds under replace-one (a record is
    replaced by any other, which moves a sum by up to twice the bound), and all others but `full` under zero-out (a
    record is replaced by an empty contribution). `truncated_poisson`: dp-accounting's event of that name, for the
    number of examples that the sampler was made for. `random_allocation`: an epoch by the distributions of
    `random_allocation.py`; an epoch that was begun is charged whole. `cyclic`: a record's group has a single step per
    cycle, each a Poisson-subsampled Gaussian. `fixed`: dp-accounting's event of sampling without replacement, by RDP,
    for the fraction `rate` of the records, which no batch exceeds; the numbers of records and of those in a batch are
    public. `shuffle` and `partition` use every record at most once an epoch, so E epochs are an E-fold Gaussian; a
    shuffled order is a mixture of fixed orders. `full` is charged in every step.
    Amplification assumes that the sampler's key stays secret; it is drawn from the operating system unless given. An
    attacker who can compute the key learns who took part, and amplification gives no protection against them.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from ..randomness.keys import keyed

Sampler = Literal[
    "poisson", "truncated_poisson", "random_allocation", "cyclic", "shuffle", "partition", "fixed", "full"
]


@dataclass(frozen=True)
class Sampling:
    """A sampler and its rate.

    Attributes:
        kind: name of the sampler.
        rate: expected batch / number of examples, in (0, 1]. For `random_allocation` it is lowered to 1 / integer. For
            `fixed`, the batch size is rounded down to an integer.
        groups: for `cyclic`, at least 2; 1 for the others.
        most: for `truncated_poisson`, the largest batch; 0 for the others.
        examples: for `truncated_poisson`, the number of examples it draws from, which its cost depends on; 0 for the
            others.
    """

    kind: Sampler
    rate: float
    groups: int = 1
    most: int = 0
    examples: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Sampler):
            raise ValueError(f"sampling must be one of {', '.join(get_args(Sampler))}, got '{self.kind}'")
        object.__setattr__(self, "rate", float(self.rate))
        if not 0 < self.rate <= 1:
            raise ValueError(f"sample_rate must be in (0, 1], got {self.rate}")
        if math.isinf(1 / self.rate):
            raise ValueError(f"sample_rate must be so large that its inverse is a float, got {self.rate}")
        if self.kind == "full" and self.rate != 1:
            raise ValueError(f"sample_rate must be 1 for full batches, got {self.rate}")
        if self.kind == "random_allocation":
            object.__setattr__(self, "rate", 1 / self.steps_per_epoch)
        self._check_groups()
        self._check_most()

    def _check_groups(self) -> None:
        if self.kind != "cyclic":
            if self.groups != 1:
                raise ValueError(f"groups must be given for cyclic sampling alone, got {self.groups} for {self.kind}")
        elif self.groups < 2:
            raise ValueError(f"groups of cyclic sampling must be at least 2, got {self.groups}")
        elif self.rate * self.groups > 1 + 1e-9:
            raise ValueError(
                f"groups x sample_rate must be at most 1, the rate within a group, got {self.groups} x {self.rate}; "
                "ask for fewer groups or a smaller batch"
            )

    def _check_most(self) -> None:
        if self.kind != "truncated_poisson":
            if self.most or self.examples:
                raise ValueError(f"a largest batch must be given for truncated_poisson alone, got one for {self.kind}")
        elif not 1 <= self.most <= self.examples:
            raise ValueError(
                "truncated_poisson must have a largest batch between 1 and its number of examples, "
                f"got {self.most} of {self.examples}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in which every example is used once; on average, if each step is sampled independently."""
        return math.ceil(1 / self.rate - 1e-9)  # 1 / (70 / 700) may round to slightly above 10

    @property
    def relation(self) -> str:
        """Neighbouring relation of claims under this sampler."""
        return {"poisson": "add_remove", "full": "add_remove", "fixed": "replace_one"}.get(self.kind, "zero_out")

    @property
    def amplifies(self) -> bool:
        """True if its randomness lowers epsilon, so that its key must stay secret."""
        kinds = ("poisson", "truncated_poisson", "random_allocation", "cyclic", "fixed")
        return self.kind in kinds and self.rate_in_group < 1

    @property
    def rate_in_group(self) -> float:
        """Probability that a record joins a step of its group; except for `cyclic`, all records are a single group."""
        return min(1.0, self.rate * self.groups)

    def expected_batch(self, examples: int) -> float:
        """Returns the public constant that sums are divided by; never the size that was drawn."""
        return self.rate * examples

    def indices(self, step: int, examples: int, key: int) -> Int[Tensor, " batch"]:
        """Returns the participants of a step: a pure function of step and secret key, so a run can be resumed anywhere.

        Args:
            step: number of the step, from 0.
            examples: number of examples.
            key: secret of the trainer.

        Returns:
            Distinct example numbers; may be empty for samplers with a coin per example.

        Raises:
            ValueError: for a truncated sampler made for another number of examples, or a fixed size that rounds down to
                0.
        """
        if self.kind == "full":
            return torch.arange(examples)
        epoch, position = divmod(step, self.steps_per_epoch)
        if self.kind == "random_allocation":
            # float64 coins for the same reason as below: `randint` takes the remainder of 32 bits.
            coins = torch.rand(examples, generator=self._coins(key, epoch), dtype=torch.float64)
            return torch.nonzero((coins * self.steps_per_epoch).long() == position).squeeze(1)
        if self.kind in ("poisson", "truncated_poisson", "cyclic"):
            return self._by_coins(step, examples, key)
        if self.kind == "fixed":
            return self._subset(step, examples, key)
        generator = self._coins(key, {"shuffle": epoch, "partition": 0}.get(self.kind, step))
        order = torch.randperm(examples, generator=generator)
        batch = self.expected_batch(examples)
        # The cuts are rounded, not the batch: otherwise a rate that does not divide leaves some examples out of every
        # epoch. Neighbouring batches share a cut, so no example is used twice in an epoch.
        return order[round(position * batch) : round((position + 1) * batch)]

    def _subset(self, step: int, examples: int, key: int) -> Int[Tensor, " batch"]:
        """Draws a uniform subset of fixed size: never more than the fraction that is charged."""
        size = int(self.expected_batch(examples) * (1 + 2**-50))  # 29 / 100 x 100 may round to slightly below 29
        if size < 1:
            raise ValueError(
                f"sample_rate of fixed sampling must give at least one of {examples} examples, got {self.rate:g}"
            )
        # float64 coins for the same reason as below: `randperm` takes remainders of 32 bits.
        coins = torch.rand(examples, generator=self._coins(key, step), dtype=torch.float64)
        return coins.topk(min(size, examples)).indices.sort().values

    def _by_coins(self, step: int, examples: int, key: int) -> Int[Tensor, " batch"]:
        """Draws a coin per example and returns the examples that join."""
        generator = self._coins(key, step)
        # float64 coins: float32 has only 2^24 values, too coarse for small rates.
        heads = torch.rand(examples, generator=generator, dtype=torch.float64) < self.rate_in_group
        if self.kind == "cyclic":
            # Dealt once for the whole run: a record has its turn every `groups` steps, and at no other.
            order = torch.randperm(examples, generator=self._coins(key, "groups"))
            heads[order % self.groups != step % self.groups] = False
        drawn = torch.nonzero(heads).squeeze(1)
        if self.kind != "truncated_poisson":
            return drawn
        if examples != self.examples:
            raise ValueError(
                f"this truncated_poisson was made, and is charged, for {self.examples} examples, got {examples}"
            )
        # In the order of the examples, as for all samplers: the order must not reveal the dropped examples.
        return drawn[torch.randperm(len(drawn), generator=generator)[: self.most]].sort().values

    def _coins(self, key: int, tag: int | str) -> torch.Generator:
        """Returns the secret generator of a step, an epoch, or the run, hashed from all bits of the key and the tag."""
        digest = hashlib.sha256(f"sample/{key}/{self.kind}/{tag}".encode()).digest()
        return keyed(int.from_bytes(digest, "big"))


def poisson(sample_rate: float) -> Sampling:
    """Every example joins each step independently with probability `sample_rate`."""
    return Sampling("poisson", sample_rate)


def truncated_poisson(sample_rate: float, *, most: int, examples: int) -> Sampling:
    """Poisson sampling from `examples` records with batches of at most `most`, the surplus dropped at random."""
    return Sampling("truncated_poisson", sample_rate, most=most, examples=examples)


def random_allocation(sample_rate: float) -> Sampling:
    """Every example joins a single, uniformly drawn step per epoch of 1 / sample_rate steps, rounded up."""
    return Sampling("random_allocation", sample_rate)


def cyclic(sample_rate: float, *, groups: int) -> Sampling:
    """Groups of examples take turns; in its group's step an example joins with probability `groups` x `sample_rate`."""
    return Sampling("cyclic", sample_rate, groups=groups)


def shuffle(sample_rate: float) -> Sampling:
    """A new random order each epoch, cut into batches of `sample_rate` of the examples, the last smaller."""
    return Sampling("shuffle", sample_rate)


def partition(sample_rate: float) -> Sampling:
    """Fixed batches, the same in every epoch."""
    return Sampling("partition", sample_rate)


def fixed(sample_rate: float) -> Sampling:
    """A uniform subset of `sample_rate` of the examples each step, rounded down, drawn without replacement."""
    return Sampling("fixed", sample_rate)


def full() -> Sampling:
    """Every example in every step."""
    return Sampling("full", 1.0)
