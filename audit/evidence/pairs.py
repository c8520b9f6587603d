"""Guesses at fair coins: the inclusion bits of canaries, or the member of each random pair of records.

A finished model whose training set was drawn at random from a pool has such coins without any canary (own derivation):
match members to non-members at random. Given each unordered pair, which of its records is the member is a fair coin,
independent of all others, because the draw was uniform. Guess the record with the higher score; answer the pairs with
the largest gaps. Flipping a coin replaces a record by another, so the result holds under replace-one.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy import ndarray

from .one_run import Guesses


def canary_guesses(scores: ndarray, included: ndarray, *, highest: int, lowest: int, seed: int = 0) -> Guesses:
    """Guesses that the canaries with the highest scores were included, and those with the lowest were not.

    Ties at either end are broken at random, independently of the coins.

    Args:
        scores: [m], one per canary; larger for "in".
        included: bool [m], the coins.
        highest: number of canaries guessed to be in, fixed before the coins were seen.
        lowest: number of canaries guessed to be out.
        seed: of the random tie-breaking; `seed_of_split` if positions may depend on the coins.

    Raises:
        ValueError: if shapes differ, a score is not finite, or there are more guesses than canaries.
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
    # The same order for both ends, so that they share no canary.
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
    """Guesses the member of each random pair.

    Args:
        members: scores of records that were trained on [p], of a set drawn uniformly from the pool.
        non_members: scores of the rest of the pool [q], which the training has not seen at all.
        answered: number of answered pairs, those with the largest gaps; fixed before the scores were seen.
        seed: of the matching, which must not depend on the scores, and must depend on the split if scores may depend on
            positions: see `seed_of_split`.
        member_strata: [p], if the draw was within strata such as classes: pairs are then within strata, too.
        non_member_strata: [q].

    Raises:
        ValueError: for no pair, a score that is not finite, or more answers than pairs.
    """
    members, non_members = np.asarray(members, dtype=np.float64), np.asarray(non_members, dtype=np.float64)
    for name, values in (("members", members), ("non_members", non_members)):
        if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
            raise ValueError(
                f"{name} must be finite scores of at least one record, [n], got shape {list(values.shape)}"
            )
    if (member_strata is None) != (non_member_strata is None):
        raise ValueError("strata must be given for members and non-members, or for neither")
    stratum_inside = np.zeros(len(members), int) if member_strata is None else np.asarray(member_strata)
    stratum_outside = np.zeros(len(non_members), int) if non_member_strata is None else np.asarray(non_member_strata)
    if stratum_inside.shape != members.shape or stratum_outside.shape != non_members.shape:
        raise ValueError("strata must be one a record")
    largest = max(np.abs(members).max(), np.abs(non_members).max())
    scale = 0.5 if largest > np.finfo(np.float64).max / 2 else 1.0
    generator, gaps = np.random.default_rng(seed), []
    for stratum in np.unique(stratum_inside):
        inside, outside = members[stratum_inside == stratum], non_members[stratum_outside == stratum]
        count = min(len(inside), len(outside))
        # Halved first if a difference of the largest floats would overflow: infinite gaps would tie.
        gaps.append(generator.permutation(inside)[:count] * scale - generator.permutation(outside)[:count] * scale)
    gap = np.concatenate(gaps)
    if not 1 <= answered <= len(gap):
        raise ValueError(f"answered must be in [1, {len(gap)}], the number of pairs, got {answered}")
    size = np.abs(gap)
    # Ties between gaps are broken at random, independently of the member of each pair.
    chosen = np.lexsort((generator.random(len(gap)), -size))[:answered]
    # A gap of 0 has no higher score, and is not answered.
    return Guesses(len(gap), int((size[chosen] > 0).sum()), int((gap[chosen] > 0).sum()))


def seed_of_split(ids: ndarray, members: ndarray, seed: int = 0) -> int:
    """Returns a seed for `pair_guesses` that differs for every split, and is unknown without the split.

    Under the same seed for every split, the first member always meets the same position among the non-members. In a
    pool that is sorted by class, scores that reveal only classes then prove an epsilon in every split alike, at any
    confidence.

    Args:
        ids: of the pool [n], numbers or words, each once and in any order.
        members: bool [n], the split.
        seed: distinguishes several matchings of the same split.
    """
    inside = np.sort(np.asarray(ids)[np.asarray(members)].astype(str))
    return int.from_bytes(hashlib.sha256("\n".join([str(seed), *inside.tolist()]).encode()).digest(), "big")
