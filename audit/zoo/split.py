"""Split of a checkpoint: ids of members, non-members and public examples of a public data set, without the data."""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from leakbench.attacks.core import Examples
from leakbench.benchmarks import data as datasets
from leakbench.benchmarks.core import Sizes, Splits
from leakbench.leaderboard.records.validation import CheckedFields, build

from .index import ZooError


@dataclass(frozen=True, kw_only=True)
class StoredSplit(CheckedFields):
    """Content of a `split.json`.

    Attributes:
        data: name of the data set, in the catalogue.
        seed: that dealt its pools.
        digest: of the splits: all pixels, labels and pools.
        classes: number of classes.
        members: ids of the private examples, increasing.
        non_members: ids of their counterparts, never trained on.
        public: ids of the public examples.
    """

    data: str
    seed: int
    digest: str
    classes: int
    members: tuple[int, ...]
    non_members: tuple[int, ...]
    public: tuple[int, ...]

    @classmethod
    def of(cls, splits: Splits, seed: int) -> StoredSplit:
        """Returns the split that a seed deals."""
        members, non_members, public = (
            tuple(sorted(pool.ids.tolist())) for pool in (splits.private, splits.non_member, splits.public)
        )
        return cls(
            data=splits.name,
            seed=seed,
            digest=splits.digest,
            classes=splits.classes,
            members=members,
            non_members=non_members,
            public=public,
        )

    def to_json(self) -> bytes:
        """Returns the content of its file."""
        return json.dumps(vars(self)).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes, source: str) -> StoredSplit:
        """Parses the content of a file.

        Raises:
            ZooError: a malformed split.
        """
        try:
            return build(cls, json.loads(content))
        except (ValueError, RecursionError) as error:
            raise ZooError(f"bad split {source}: {error}") from None

    def load(self) -> Splits:
        """Returns the pools, dealt again from the data set.

        Raises:
            ZooError: the data set is not of the catalogue, or deals other pools here.
        """
        # A path would make a manifest of others read files of this machine.
        if self.data not in datasets.names():
            raise ZooError(f"data of a checkpoint must be a data set of the catalogue, got {self.data!r}")
        sizes = Sizes(private=len(self.members), non_member=len(self.non_members), public=len(self.public))
        splits = datasets.load(self.data, seed=self.seed, sizes=sizes)
        self.check(splits)
        return splits

    def check(self, splits: Splits) -> None:
        """Refuses pools other than those of the file.

        Raises:
            ZooError: the digest or the ids differ.
        """
        if splits.digest != self.digest or StoredSplit.of(splits, self.seed) != self:
            raise ZooError(
                f"split of {self.data!r}, seed {self.seed}, must have the digest {self.digest}, got {splits.digest}: "
                "the checkpoint is of other examples"
            )


def ids_of(numbers: tuple[int, ...]) -> Int[Tensor, " n"]:
    """Returns ids as a tensor."""
    return torch.tensor(numbers, dtype=torch.int64)


def candidates_of(splits: Splits) -> Examples:
    """Returns members and non-members by increasing id, an order that is independent of the pools."""
    pools = (splits.private, splits.non_member)
    ids, inputs, labels = (torch.cat([getattr(pool, name) for pool in pools]) for name in ("ids", "inputs", "labels"))
    order = ids.argsort()
    return Examples(ids=ids[order], inputs=inputs[order], labels=labels[order])
