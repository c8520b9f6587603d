"""Guesses at fair coins: at canaries that were each put in by one, and at which of a random pair was trained on.

A finished model whose training set was drawn at random from a pool has such coins without any canary (own derivation):
match members to non-members at random. Given each unordered pair, who of the two was trained on is a fair coin,
independent of all others, because the draw was uniform. Guess that the higher score was; answer the pairs with the
largest gaps. To turn a coin round is to replace one record by another, so what follows is of that relation.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy import ndarray

from .one_run import Guesses


def canary_guesses(scores: ndarray, included: ndarray, *, highest: int, lowest: int, seed: int = 0) -> Guesses:
    """Guesses that the highest scores are of canaries that were put in, and the lowest of others.

    Of equal scores at an end some are picked by lot, which tells nothing of their coins.

    Args:
        scores: [m], one a canary; larger for "in".
        included: bool [m], the coins.
        highest: how many are guessed to be in, fixed before the coins were looked at.
        lowest: how many to be out.
        seed: of the lot; `seed_of_split` where places may tell the coins.

    Raises:
        ValueError: shapes differ, a score is not finite, or more guesses than canaries.
    """
    scores, included = np.asarray(scores, dtype=np.float64), np.asarray(included)
    if scores.ndim != 1 or scores.shape != included.shape or included.dtype != np.bool_ or len(scores) == 0:
        raise ValueError(
            f"included must be one coin a score, bool [m], got {included.dtype} {list(included.shape)} for "
            f"{list(scores.shape)} scores"
        )
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite, got NaN or infinity")
    if min(highest, lowest) < 0 or not 1 <= highest + lowest <= len(scores):
        raise ValueError(
            f"highest and lowest must be at least 0 and together in [1, {len(scores)}], got {highest} and {lowest}"
        )
    # One order for both ends, so that they have nobody in common.
    order = np.lexsort((np.random.default_rng(seed).random(len(scores)), scores))
    guessed_out, guessed_in = order[:lowest], order[len(order) - highest :]
    correct = int(included[guessed_in].sum() + (~included[guessed_out]).sum())
    return Guesses(len(scores), highest + lowest, correct)


def pair_guesses(
    members: ndarray,
    non_members: ndarray,
    *,
    answered: int,
    seed: int,
    member_strata: ndarray | None = None,
    non_member_strata: ndarray | None = None,
) -> Guesses:
    """Guesses at which of each random pair was trained on.

    Args:
        members: scores of records that were trained on [p], of a set drawn uniformly from the pool.
        non_members: scores of the rest of the pool [q], which nothing of the training has seen.
        answered: pairs that are answered, those with the largest gaps; fixed before the scores were looked at.
        seed: of the matching, which must not depend on the scores, and must on the split where scores may go by place:
            see `seed_of_split`.
        member_strata: [p], where the draw was within strata, as classes: pairs are then too.
        non_member_strata: [q].

    Raises:
        ValueError: no pair, a score that is not finite, or more answers than pairs.
    """
    members, non_members = np.asarray(members, dtype=np.float64), np.asarray(non_members, dtype=np.float64)
    for name, values in (("members", members), ("non_members", non_members)):
        if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
            raise ValueError(
                f"{name} must be finite scores of at least one record, [n], got shape {list(values.shape)}"
            )
    if (member_strata is None) != (non_member_strata is None):
        raise ValueError("strata must be given for members and non-members, or for neither")
    own = np.zeros(len(members), int) if member_strata is None else np.asarray(member_strata)
    other = np.zeros(len(non_members), int) if non_member_strata is None else np.asarray(non_member_strata)
    if own.shape != members.shape or other.shape != non_members.shape:
        raise ValueError("strata must be one a record")
    largest = max(np.abs(members).max(), np.abs(non_members).max())
    scale = 0.5 if largest > np.finfo(np.float64).max / 2 else 1.0
    coins, gaps = np.random.default_rng(seed), []
    for stratum in np.unique(own):
        inside, outside = members[own == stratum], non_members[other == stratum]
        count = min(len(inside), len(outside))
        # Halved first where a difference of the largest floats would overflow: infinite gaps would tie.
        gaps.append(coins.permutation(inside)[:count] * scale - coins.permutation(outside)[:count] * scale)
    gap = np.concatenate(gaps)
    if not 1 <= answered <= len(gap):
        raise ValueError(f"answered must be in [1, {len(gap)}], the number of pairs, got {answered}")
    size = np.abs(gap)
    # Of equal gaps some are answered by lot: which ones tells nothing of who is the member of a pair.
    chosen = np.lexsort((coins.random(len(gap)), -size))[:answered]
    # A gap of 0 has no higher score, and is no answer.
    return Guesses(len(gap), int((size[chosen] > 0).sum()), int((gap[chosen] > 0).sum()))


def seed_of_split(ids: ndarray, members: ndarray, seed: int = 0) -> int:
    """A seed for `pair_guesses` that is another one for every split, and known to nobody who does not know the split.

    Under a seed that is the same for every split, the first member of all meets the same place among the non-members
    always. Of a pool that is sorted by class, scores that tell nothing but classes then prove an epsilon in one split
    as in any other, with whatever confidence.

    Args:
        ids: of the pool [n], numbers or words, each once and in any order.
        members: bool [n], the split.
        seed: tells several matchings of one split apart.
    """
    inside = np.sort(np.asarray(ids)[np.asarray(members)].astype(str))
    return int.from_bytes(hashlib.sha256("\n".join([str(seed), *inside.tolist()]).encode()).digest(), "big")
