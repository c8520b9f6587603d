"""Fixed splits of a data set into members, non-members and public examples, with checks of their content.

A measurement of leakage is meaningful only if members and non-members come from the same distribution, no example is in
two pools, and others can obtain the same pixels. So members and non-members are exchangeable, pools are disjoint by
construction, and a digest in every record identifies them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Split:
    """Pool of examples.

    Args:
        ids: position of each example in the whole data set; an image has the same id under every seed.
        inputs: images in model-input units.
        labels: classes, from 0.
    """

    ids: Int64[Tensor, " examples"]
    inputs: Float32[Tensor, "examples *shape"]
    labels: Int64[Tensor, " examples"]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Disjoint pools of a data set, slices of the same tensors.

    Args:
        name: of the data set.
        private: members, on which models are trained.
        non_member: non-members, exchangeable with `private`; if none were dealt, the official test set, which need not
            be exchangeable, and `about` says so.
        public: public examples: an attacker's prior, a defense's public data.
        input_shape: of a single input.
        classes: number of classes.
        low: least valid input value.
        high: greatest valid input value.
        digest: SHA-256 of all pixels and labels and of the assignment to pools.
        in_distribution_public: whether `public` comes from the same data set as `private`, which favours defenses and
            attacks that use it.
        about: source and licence, in a line.
        test: official test set, on which utility is measured; None: utility is measured on `non_member`.
        scaled_by_public: whether inputs are scaled by statistics of `public`, so that every training uses public data.
    """

    name: str
    private: Split
    non_member: Split
    public: Split
    input_shape: tuple[int, ...]
    classes: int
    low: float
    high: float
    digest: str
    in_distribution_public: bool
    about: str
    test: Split | None = None
    scaled_by_public: bool = False

    @staticmethod
    def cut(
        inputs: Float32[Tensor, "examples *shape"] | UInt8[Tensor, "examples *shape"],
        labels: Int64[Tensor, " examples"],
        pools: Sequence[Int64[Tensor, "_"]],
        *,
        name: str,
        classes: int,
        in_distribution_public: bool,
        about: str,
        test: Int64[Tensor, " tested"] | None = None,
        content: str | None = None,
    ) -> "Splits":
        """Cuts a whole data set by the ids of its private, non-member and public pools.

        Args:
            inputs: of all examples; floats in [0, 1], or bytes, which are divided by 255.
            labels: of all examples.
            pools: ids of the three pools; an empty second pool is replaced by `test`.
            name: see `Splits`, also for the next three.
            classes: see `Splits`.
            in_distribution_public: see `Splits`.
            about: see `Splits`.
            test: ids of the official test set.
            content: digest of inputs and labels, if it is known already; hashing takes a while.

        Raises:
            ValueError: an example is in two pools, or there are no non-members and no test set.
        """
        dealt = [*pools, *([] if test is None else [test])]
        order = torch.cat(dealt)
        if len(order.unique()) != len(order):
            raise ValueError(f"pools of {name} must share no example, got one of them twice")
        stand_in = len(pools[1]) == 0
        # Members are compared with the non-members, or with the official test set in their place.
        if stand_in and test is None:
            raise ValueError(f"non_member of {name} must be at least 1, got 0: it has no official test set to stand in")
        # A single copy in the order of the pools, which are slices of it: a copy per pool would double the memory.
        chosen, classed = inputs[order], labels[order]
        if chosen.dtype == torch.uint8:
            chosen = chosen.float().div_(255)  # in place: another float copy would double the peak of memory
        ends = [0, *accumulate(len(pool) for pool in dealt)]
        private, non_member, public, *tests = (
            Split(ids=order[a:b], inputs=chosen[a:b], labels=classed[a:b]) for a, b in pairwise(ends)
        )
        tested = tests[0] if tests else None
        return Splits(
            name=name,
            private=private,
            non_member=tested if stand_in and tested is not None else non_member,
            public=public,
            test=tested,
            input_shape=tuple(inputs.shape[1:]),
            classes=classes,
            low=0.0,
            high=1.0,
            # Includes the ids of every pool, because a data set has as many splits as seeds and sizes.
            digest=content_digest(*([inputs, labels] if content is None else [content]), *dealt),
            in_distribution_public=in_distribution_public,
            about=f"{about}; non-members are the official test set" if stand_in else about,
        )

    def to(self, device: torch.device | str) -> "Splits":
        """Moves the splits to a device; storage that pools share is moved once and stays shared."""
        if torch.empty(0, device=device).device == self.private.inputs.device:
            return self
        moved: dict[int, Tensor] = {}

        def there(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in moved:
                # The whole storage under the slice, as a tensor that can be moved.
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
                moved[storage.data_ptr()] = whole.to(device)
            return moved[storage.data_ptr()].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

        pools = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self,
            **{
                name: Split(ids=there(pool.ids), inputs=there(pool.inputs), labels=there(pool.labels))
                for name, pool in pools.items()
                if isinstance(pool, Split)
            },
        )


def choose(candidates: Int64[Tensor, " candidates"], sizes: Sequence[int], *, salt: str) -> list[Int64[Tensor, "_"]]:
    """Deals `candidates` at random, without replacement, into pools of the given sizes, each sorted by id.

    Orders by SHA-256 of salt and id instead of a random generator, whose stream may change between releases of a
    library; a split must not change.

    Raises:
        ValueError: there are too few candidates.
    """
    if sum(sizes) > len(candidates):
        raise ValueError(f"sizes must add up to at most {len(candidates)}, got {list(sizes)}")
    order = sorted(candidates.tolist(), key=lambda i: hashlib.sha256(f"{salt}/{i}".encode()).digest())
    ends = [0, *accumulate(sizes)]
    return [torch.tensor(sorted(order[a:b]), dtype=torch.int64) for a, b in pairwise(ends)]


def content_digest(*contents: Tensor | str) -> str:
    """SHA-256 over shape, dtype and bytes of each tensor, and over earlier digests, in hexadecimal."""
    digest = hashlib.sha256()
    for content in contents:
        if isinstance(content, str):
            digest.update(f"{content};".encode())
            continue
        array = content.detach().cpu().contiguous().numpy()
        # Little-endian, so that the digest depends on the values and not on the machine.
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{array.shape} {array.dtype.str};".encode())
        digest.update(array.reshape(-1).view("u1").data)
    return digest.hexdigest()


def verify(digest: str, expected: str, *, noun: str, way_out: str) -> None:
    """Refuses data whose digest differs from the recorded one, under which results are published.

    Raises:
        ValueError: the digests differ.
    """
    if digest != expected:
        raise ValueError(
            f"SHA-256 of {noun} must be {expected[:16]}..., got {digest[:16]}...: "
            f"results on it could not be compared with anybody's; {way_out}"
        )
