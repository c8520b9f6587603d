"""Batch samplers, and the participation pattern of each, which the accountant charges.

`poisson`: every example joins each step independently, with probability `rate`. `truncated_poisson`: the same with a
largest batch, the surplus dropped at random. `random_allocation` (also: balls in bins): every example joins a single,
uniformly drawn step of each epoch. `cyclic`: examples are dealt into groups once, groups take turns, and the examples
of the current group are Poisson-sampled. `fixed`: a uniform subset of fixed size each step, drawn without replacement.
These five amplify. `shuffle`: a new random order every epoch, cut into batches. `partition`: the same order in all
epochs. `full`: all examples in every step.

Guarantee:
    Relation: `poisson` and `full` add/remove; `fixed` replace-one (a record is replaced by any other, which moves a sum
    by up to twice the bound); all others zero-out (a record is replaced by an empty contribution).
    Charge: `poisson`: a Poisson-subsampled Gaussian per step. `truncated_poisson`: dp-accounting's event of that name,
    for the number of examples that the sampler was made for. `random_allocation`: a whole epoch, even if it is
    incomplete, by the distributions of `random_allocation.py`. `cyclic`: a Poisson-subsampled Gaussian per cycle,
    because a record's group has a single step in it. `fixed`: dp-accounting's event of sampling without replacement, by
    RDP, for the fraction `rate` of the records, which no batch exceeds; the numbers of records and of those in a batch
    are public. `shuffle` and `partition`: a Gaussian per epoch, because a record is used at most once in it; a shuffled
    order is a mixture of fixed orders. `full`: a Gaussian per step.
    Amplification assumes that the sampler's key stays secret; it is drawn from the operating system unless given.
    Against an attacker who knows the key, and so the batches, amplification gives no protection.
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
        examples: for `truncated_poisson`, the number of examples to draw from, on which its epsilon depends; 0 for the
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
        """Number of steps in which every example is used once, or once on average if steps are independent."""
        return math.ceil(1 / self.rate - 1e-9)  # 1 / (70 / 700) may round to slightly above 10

    @property
    def relation(self) -> str:
        """Neighbouring relation of claims under this sampler."""
        return {"poisson": "add_remove", "full": "add_remove", "fixed": "replace_one"}.get(self.kind, "zero_out")

    @property
    def amplifies(self) -> bool:
        """True if random participation lowers epsilon, so that the sampler's key must stay secret."""
        kinds = ("poisson", "truncated_poisson", "random_allocation", "cyclic", "fixed")
        return self.kind in kinds and self.rate_in_group < 1

    @property
    def rate_in_group(self) -> float:
        """Probability that a record joins a step of its group; samplers but `cyclic` have a single group."""
        return min(1.0, self.rate * self.groups)

    def expected_batch(self, examples: int) -> float:
        """Returns the public constant by which sums are divided; the size of the drawn batch is private."""
        return self.rate * examples

    def indices(self, step: int, examples: int, key: int) -> Int[Tensor, " batch"]:
        """Returns the batch of a step: a pure function of step and secret key, so a run can be resumed at any step.

        Args:
            step: index of the step, from 0.
            examples: number of examples.
            key: secret key of the sampler.

        Returns:
            Indices of distinct examples; possibly none.

        Raises:
            ValueError: for a truncated sampler made for another number of examples, or a fixed size that rounds down to
                0.
        """
        if self.kind == "full":
            return torch.arange(examples)
        epoch, position = divmod(step, self.steps_per_epoch)
        if self.kind == "random_allocation":
            # float64 uniforms, because `randint` takes a remainder of 32 bits, which is not exactly uniform.
            uniforms = torch.rand(examples, generator=self._generator(key, epoch), dtype=torch.float64)
            return torch.nonzero((uniforms * self.steps_per_epoch).long() == position).squeeze(1)
        if self.kind in ("poisson", "truncated_poisson", "cyclic"):
            return self._by_coins(step, examples, key)
        if self.kind == "fixed":
            return self._subset(step, examples, key)
        generator = self._generator(key, {"shuffle": epoch, "partition": 0}.get(self.kind, step))
        order = torch.randperm(examples, generator=generator)
        batch = self.expected_batch(examples)
        # Positions of the cuts are rounded, not the batch size, which would leave some examples out of every epoch at
        # most rates. Neighbouring batches share a cut, so no example is used twice in an epoch.
        return order[round(position * batch) : round((position + 1) * batch)]

    def _subset(self, step: int, examples: int, key: int) -> Int[Tensor, " batch"]:
        """Draws a uniform subset of fixed size, rounded down so that it does not exceed the charged fraction."""
        size = int(self.expected_batch(examples) * (1 + 2**-50))  # 29 / 100 x 100 may round to slightly below 29
        if size < 1:
            raise ValueError(
                f"sample_rate of fixed sampling must give at least one of {examples} examples, got {self.rate:g}"
            )
        # float64 uniforms, because `randperm` takes remainders of 32 bits, which are not exactly uniform.
        uniforms = torch.rand(examples, generator=self._generator(key, step), dtype=torch.float64)
        return uniforms.topk(min(size, examples)).indices.sort().values

    def _by_coins(self, step: int, examples: int, key: int) -> Int[Tensor, " batch"]:
        """Samples each example independently (within the current group, for `cyclic`)."""
        generator = self._generator(key, step)
        # float64, because float32 uniforms have only 2^24 values, too coarse for small rates.
        heads = torch.rand(examples, generator=generator, dtype=torch.float64) < self.rate_in_group
        if self.kind == "cyclic":
            # Groups are dealt once for the whole run: the steps of a record's group are `groups` apart.
            order = torch.randperm(examples, generator=self._generator(key, "groups"))
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

    def _generator(self, key: int, tag: int | str) -> torch.Generator:
        """Returns the secret generator of a step, an epoch or the run, with a state hashed from the key and the tag."""
        digest = hashlib.sha256(f"sample/{key}/{self.kind}/{tag}".encode()).digest()
        return keyed(int.from_bytes(digest, "big"))


def poisson(sample_rate: float) -> Sampling:
    """Returns Poisson sampling: every example joins each step independently with probability `sample_rate`."""
    return Sampling("poisson", sample_rate)


def truncated_poisson(sample_rate: float, *, most: int, examples: int) -> Sampling:
    """Returns Poisson sampling of `examples` records, with a surplus over `most` dropped at random."""
    return Sampling("truncated_poisson", sample_rate, most=most, examples=examples)


def random_allocation(sample_rate: float) -> Sampling:
    """Returns random allocation: an example joins a uniformly drawn step per epoch of ceil(1 / sample_rate) steps."""
    return Sampling("random_allocation", sample_rate)


def cyclic(sample_rate: float, *, groups: int) -> Sampling:
    """Returns Poisson sampling of groups that take turns, at the rate `groups` x `sample_rate` in each."""
    return Sampling("cyclic", sample_rate, groups=groups)


def shuffle(sample_rate: float) -> Sampling:
    """Returns shuffling: a new order each epoch, cut into batches of `sample_rate` of the examples."""
    return Sampling("shuffle", sample_rate)


def partition(sample_rate: float) -> Sampling:
    """Returns a partition of the examples into fixed batches, the same in every epoch."""
    return Sampling("partition", sample_rate)


def fixed(sample_rate: float) -> Sampling:
    """Returns sampling without replacement: a uniform subset of `sample_rate` of the examples each step."""
    return Sampling("fixed", sample_rate)


def full() -> Sampling:
    """Returns full batches: every example in every step."""
    return Sampling("full", 1.0)
