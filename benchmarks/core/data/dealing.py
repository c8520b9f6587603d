"""A whole data set in memory, and how its private, non-member and public pools are dealt from it."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from .splits import Sizes, Splits, choose, content_digest

POOLS = ("private", "non_member", "public")


@dataclass(frozen=True, kw_only=True)
class LabelledImages:
    """All examples of a data set, its training part first.

    Args:
        pixels: bytes, or floats in [0, 1]. Bytes where the source has them: a quarter of the memory. Vectors of
            features have any floats, until whoever reads them scales what was dealt.
        labels: classes, from 0.
        train: how many of the first examples are the training part; the others are the official test set.
        classes: number of classes.
        source: SHA-256 of the encoded images and labels as they were stored, where they were read one by one: unlike
            the pixels it does not depend on a decoder.
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
        what: str,
        source: str = "",
    ) -> "LabelledImages":
        """Somebody's own data: labels are renumbered from 0, in their order, where there are gaps.

        Args:
            pixels: see `LabelledImages`.
            labels: any whole numbers from 0.
            train: see `LabelledImages`.
            what: the data, for errors.
            source: see `LabelledImages`.

        Raises:
            ValueError: if there are fewer than two classes, or one is in the test part alone.
        """
        if len(labels) and int(labels.min()) < 0:
            first = int((labels < 0).nonzero()[0])
            raise ValueError(
                f"labels of {what} must be whole numbers from 0, got {int(labels[first])} for example {first}; "
                "leave out a part that has no labels"
            )
        known = labels[:train].unique()
        if len(known) < 2:
            raise ValueError(f"{what} must have at least two classes, got {len(known)}: a classifier needs two")
        strange = (~torch.isin(labels, known)).nonzero()
        if len(strange):
            raise ValueError(
                f"{what} must have every class in its training part, got class {int(labels[strange[0]])} in the test "
                "part alone"
            )
        # `unique` sorts, so the place of a label among the known ones is its new number.
        numbered = torch.searchsorted(known, labels)
        return LabelledImages(pixels=pixels, labels=numbered, train=train, classes=len(known), source=source)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of pixels and labels."""
        return content_digest(self.pixels, self.labels)

    @cached_property
    def _looks(self) -> Int64[Tensor, " train"]:
        """A hash of each training image, by which copies of one image are found."""
        # Of the exact pixels: near copies, another crop of one photograph, count as other images.
        content = self.pixels[: self.train].numpy()
        # 64 bits: a collision, improbable among a million images, would leave one more image out of the deal.
        return torch.tensor([hash(image.tobytes()) for image in content], dtype=torch.int64)

    def deal(self, *, name: str, about: str, seed: int, sizes: Sizes, defaults: Sizes | None = None) -> Splits:
        """Deals all three pools from the training part, so that members and non-members are exchangeable.

        The public pool is dealt first and does not depend on the seed: settings that were tuned on it under one seed
        have then seen no member of another. The seed deals the rest, less the images that equal a public one: an
        image that anybody may know is nobody's secret.

        Args:
            name: of the data set.
            about: source and licence.
            seed: decides who is a member.
            sizes: what is asked for.
            defaults: sizes of what is not asked for; None: 40 %, 40 % and 20 % of the training part.

        Raises:
            ValueError: if there are not as many examples as asked for.
        """
        tested = torch.arange(self.train, len(self.labels))
        counts = pool_sizes(sizes, defaults, available=self.train, name=name, tested=len(tested) > 0)
        # The salt has the kind and not the path of a user's data, so that moving a folder changes no pool.
        salt = name.partition(":")[0]
        everyone = torch.arange(self.train)
        (public,) = choose(everyone, [counts["public"]], salt=f"{salt}/public")
        rest = everyone[~torch.isin(self._looks, self._looks[public])]
        # Copies are known only once the public pool is, so sizes are dealt out a second time without them.
        if copies := self.train - len(public) - len(rest):
            counts = pool_sizes(
                replace(sizes, public=len(public)),
                defaults,
                available=self.train - copies,
                name=f"{name}, without {copies} images that equal public ones,",
                tested=len(tested) > 0,
            )
        private, non_member = choose(rest, [counts["private"], counts["non_member"]], salt=f"{salt}/{seed}")
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
    """The number of examples in each pool: what is asked for, and of the others what there is room for.

    A pool that is not asked for has its default size, or shrinks in proportion to what is left. It never shrinks to
    nothing, because an empty pool changes what a figure means: that has to be asked for, with 0.

    Args:
        sizes: what is asked for.
        defaults: of the data set; None: 40 %, 40 % and 20 % of what there is.
        available: how many examples there are to deal.
        name: of the data set, for errors.
        tested: whether an official test set can stand in for the non-members.

    Raises:
        ValueError: if that cannot be done.
    """
    if defaults is None:
        fifths = max(1, 2 * available // 5)
        defaults = Sizes(private=fifths, non_member=fifths, public=max(1, available - 2 * fifths))
    asked = {pool: count for pool in POOLS if (count := getattr(sizes, pool)) is not None}
    others = {pool: getattr(defaults, pool) for pool in POOLS if pool not in asked}
    if asked.get("non_member") == 0 and not tested:
        raise ValueError(f"non_member of {name} must be at least 1, got 0: it has no official test set to stand in")
    left = available - sum(asked.values())
    said = ", ".join(f"{pool}={count}" for pool, count in asked.items())
    if left < 0:
        raise ValueError(f"sizes of {name} must add up to at most {available}, got {sum(asked.values())} ({said})")
    if left < len(others):
        may_be_empty = [f"{pool}=0" for pool in others if pool == "public" or (pool == "non_member" and tested)]
        way_out = "; ask for fewer" + (f", or for {' and '.join(may_be_empty)}" if may_be_empty else "")
        raise ValueError(
            f"{name} must have examples left for {' and '.join(others)}, got {left} of {available}"
            + (f" beside {said}{way_out}" if asked else "")
        )
    if sum(others.values()) > left:
        total = sum(others.values())
        others = {pool: max(1, left * count // total) for pool, count in others.items()}
        # Rounding a pool up to one example may exceed what is left; the largest pool gives it.
        while sum(others.values()) > left:
            others[max(others, key=lambda pool: others[pool])] -= 1
    return asked | others
