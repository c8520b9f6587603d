"""Data set in memory, and its random division into the private, non-member and public pools."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from .sizes import Sizes
from .splits import Splits, choose, content_digest

POOLS = ("private", "non_member", "public")


@dataclass(frozen=True, kw_only=True)
class LabelledImages:
    """Examples of a data set, its training part first.

    Args:
        pixels: bytes, or floats in [0, 1]. Bytes if the source has bytes, at a quarter of the memory. Feature vectors
            may hold any floats; their reader scales them after the deal.
        labels: classes, from 0.
        train: number of leading examples that are the training part; the others are the official test set.
        classes: number of classes.
        source: SHA-256 of the encoded images and labels as stored, which unlike that of pixels does not depend on a
            decoder; empty if the reader does not compute it.
    """

    pixels: UInt8[Tensor, "examples channels height width"] | Float32[Tensor, "examples *shape"]
    labels: Int64[Tensor, " examples"]
    train: int
    classes: int
    source: str = ""

    @staticmethod
    def renumbered(
        pixels: UInt8[Tensor, "examples channels height width"] | Float32[Tensor, "examples *shape"],
        labels: Int64[Tensor, " examples"],
        *,
        train: int,
        noun: str,
        source: str = "",
    ) -> "LabelledImages":
        """Wraps a user's own data; labels with gaps are renumbered from 0, in their order.

        Args:
            pixels: see `LabelledImages`.
            labels: any whole numbers from 0.
            train: see `LabelledImages`.
            noun: noun for the data, in errors.
            source: see `LabelledImages`.

        Raises:
            ValueError: there are fewer than two classes, or a class is in the test part alone.
        """
        if len(labels) and int(labels.min()) < 0:
            first = int((labels < 0).nonzero()[0])
            raise ValueError(
                f"labels of {noun} must be whole numbers from 0, got {int(labels[first])} for example {first}; "
                "leave out a part that has no labels"
            )
        known = labels[:train].unique()
        if len(known) < 2:
            raise ValueError(f"{noun} must have at least two classes, got {len(known)}: a classifier needs two")
        strange = (~torch.isin(labels, known)).nonzero()
        if len(strange):
            raise ValueError(
                f"{noun} must have every class in its training part, got class {int(labels[strange[0]])} in the test "
                "part alone"
            )
        # `unique` sorts, so the position of a label among the known labels is its new number.
        numbered = torch.searchsorted(known, labels)
        return LabelledImages(pixels=pixels, labels=numbered, train=train, classes=len(known), source=source)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of pixels and labels."""
        return content_digest(self.pixels, self.labels)

    @cached_property
    def _looks(self) -> Int64[Tensor, " train"]:
        """Hash of each training image, by which duplicates are recognised."""
        # Exact pixels: near copies, such as another crop of a photograph, count as different images.
        content = self.pixels[: self.train].numpy()
        # 64 bits: a collision, improbable among a million images, would leave an additional image out of the deal.
        return torch.tensor([hash(image.tobytes()) for image in content], dtype=torch.int64)

    def deal(self, *, name: str, about: str, seed: int, sizes: Sizes, defaults: Sizes | None = None) -> Splits:
        """Deals all three pools from the training part, so that members and non-members are exchangeable.

        The public pool is dealt first and does not depend on the seed, so settings tuned on it use no member under any
        seed. Members and non-members are dealt from the rest by the seed, without duplicates of public images, which
        are not secret.

        Args:
            name: of the data set.
            about: source and licence.
            seed: decides which examples are members.
            sizes: requested sizes.
            defaults: sizes of the remaining pools; None: 40 %, 40 % and 20 % of the training part.

        Raises:
            ValueError: fewer examples than requested.
        """
        tested = torch.arange(self.train, len(self.labels))
        counts = pool_sizes(sizes, defaults, available=self.train, name=name, tested=len(tested) > 0)
        # The salt has the kind and not the path of a user's data, so that moving a folder changes no pool.
        salt = name.partition(":")[0]
        everyone = torch.arange(self.train)
        (public,) = choose(everyone, [counts["public"]], salt=f"{salt}/public")
        remaining = everyone[~torch.isin(self._looks, self._looks[public])]
        # Copies are known only after the public pool is, so sizes are computed again without them.
        if copies := self.train - len(public) - len(remaining):
            counts = pool_sizes(
                replace(sizes, public=len(public)),
                defaults,
                available=self.train - copies,
                name=f"{name}, without {copies} images that equal public ones,",
                tested=len(tested) > 0,
            )
        private, non_member = choose(remaining, [counts["private"], counts["non_member"]], salt=f"{salt}/{seed}")
        return Splits.cut(
            self.pixels,
            self.labels,
            [private, non_member, public],
            name=name,
            classes=self.classes,
            in_distribution_public=True,
            about=about,
            test=tested if len(tested) else None,
            content=self.digest,
        )


def pool_sizes(sizes: Sizes, defaults: Sizes | None, *, available: int, name: str, tested: bool) -> dict[str, int]:
    """Computes the number of examples in each pool.

    A requested size is kept. Other pools have their default sizes, or shrink in proportion if fewer examples remain.
    They never shrink to 0, because an empty pool changes the meaning of a result: 0 has to be requested.

    Args:
        sizes: requested sizes.
        defaults: of the data set; None: 40 %, 40 % and 20 % of the examples.
        available: number of examples to deal.
        name: of the data set, for errors.
        tested: whether there is an official test set, which replaces an empty pool of non-members.

    Raises:
        ValueError: the request cannot be met.
    """
    if defaults is None:
        fifths = max(1, 2 * available // 5)
        defaults = Sizes(private=fifths, non_member=fifths, public=max(1, available - 2 * fifths))
    requested = {pool: count for pool in POOLS if (count := getattr(sizes, pool)) is not None}
    others = {pool: getattr(defaults, pool) for pool in POOLS if pool not in requested}
    if requested.get("non_member") == 0 and not tested:
        raise ValueError(f"non_member of {name} must be at least 1, got 0: it has no official test set to stand in")
    remaining = available - sum(requested.values())
    listing = ", ".join(f"{pool}={count}" for pool, count in requested.items())
    if remaining < 0:
        raise ValueError(
            f"sizes of {name} must add up to at most {available}, got {sum(requested.values())} ({listing})"
        )
    if remaining < len(others):
        may_be_empty = [f"{pool}=0" for pool in others if pool == "public" or (pool == "non_member" and tested)]
        way_out = "; ask for fewer" + (f", or for {' and '.join(may_be_empty)}" if may_be_empty else "")
        raise ValueError(
            f"{name} must have examples left for {' and '.join(others)}, got {remaining} of {available}"
            + (f" beside {listing}{way_out}" if requested else "")
        )
    if sum(others.values()) > remaining:
        total = sum(others.values())
        others = {pool: max(1, remaining * count // total) for pool, count in others.items()}
        # Rounding a pool up to 1 example may exceed the remaining examples; the largest pool gives it up.
        while sum(others.values()) > remaining:
            others[max(others, key=lambda pool: others[pool])] -= 1
    return requested | others
