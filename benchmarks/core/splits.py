"""Fixed splits of a data set into members, non-members and public examples, with checks of their content.

A leakage figure means something only if members and non-members are drawn alike, if nobody is in two pools,
and if the next person has the same pixels. So the pools are exchangeable where they are compared, disjoint by
construction, and named by a digest that is written into every record.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float32, Int64
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Split:
    """One pool of examples.

    Args:
        ids: position of each example in the whole data set; the same image has the same id under every seed.
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
    """A data set cut into three pools that share no example.

    Args:
        name: name of the data set.
        private: the members, which models are trained on.
        non_member: exchangeable with `private` and never trained on; also the test set.
        public: what anybody may know: an attacker's prior, a defense's public data.
        input_shape: shape of one input.
        classes: number of classes.
        low: least valid input value.
        high: greatest valid input value.
        digest: SHA-256 of all pixels and labels and of who is in which pool.
        in_distribution_public: whether `public` comes from the same source as `private`, which flatters
            defenses and attacks that use it.
        about: source and licence, in one line.
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

    @staticmethod
    def cut(
        inputs: Float32[Tensor, "examples *shape"],
        labels: Int64[Tensor, " examples"],
        pools: Sequence[Int64[Tensor, "_"]],
        *,
        name: str,
        classes: int,
        in_distribution_public: bool,
        about: str,
    ) -> "Splits":
        """Cuts a whole data set, inputs in [0, 1], by the ids of its private, non-member and public pool.

        Raises:
            ValueError: if an example is in two pools.
        """
        everyone = torch.cat(list(pools))
        if len(everyone.unique()) != len(everyone):
            raise ValueError(f"pools of {name} must share no example, got one of them twice")
        private, non_member, public = (Split(ids=i, inputs=inputs[i], labels=labels[i]) for i in pools)
        return Splits(
            name=name,
            private=private,
            non_member=non_member,
            public=public,
            input_shape=tuple(inputs.shape[1:]),
            classes=classes,
            low=0.0,
            high=1.0,
            digest=content_digest(inputs, labels, *pools),
            in_distribution_public=in_distribution_public,
            about=about,
        )


def choose(candidates: Int64[Tensor, " candidates"], sizes: Sequence[int], *, salt: str) -> list[Int64[Tensor, "_"]]:
    """Deals `candidates` at random, without replacement, into pools of the given sizes, each sorted by id.

    Orders by SHA-256 of salt and id rather than by a random generator, whose stream may change from one
    release of a library to the next: a split must not.

    Raises:
        ValueError: if there are too few candidates.
    """
    if sum(sizes) > len(candidates):
        raise ValueError(f"sizes must add up to at most {len(candidates)}, got {list(sizes)}")
    order = sorted(candidates.tolist(), key=lambda i: hashlib.sha256(f"{salt}/{i}".encode()).digest())
    ends = [0, *accumulate(sizes)]
    return [torch.tensor(sorted(order[a:b]), dtype=torch.int64) for a, b in pairwise(ends)]


def content_digest(*tensors: Tensor) -> str:
    """SHA-256 over shape, dtype and bytes of each tensor, in hexadecimal."""
    digest = hashlib.sha256()
    for tensor in tensors:
        array = tensor.detach().cpu().contiguous().numpy()
        # Little-endian, so that the digest is of the values and not of the machine.
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{array.shape} {array.dtype.str};".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def verify(found: str, expected: str, *, what: str, way_out: str) -> None:
    """Refuses data whose digest is not the one that published results are about.

    Raises:
        ValueError: if the two differ.
    """
    if found != expected:
        raise ValueError(
            f"SHA-256 of {what} must be {expected[:16]}..., got {found[:16]}...: "
            f"results on it could not be compared with anybody's; {way_out}"
        )
