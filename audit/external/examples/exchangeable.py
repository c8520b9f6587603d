"""Exchangeability of candidates and public examples, without which candidates' ranks reveal nothing about a batch.

A candidate outside the batch has a uniform rank among decoys if both come from the same population. Candidates of a
single class among decoys of all classes rank high under any gradient that contains the class, in the batch or not. The
two groups are therefore compared before an update is examined: by labels, with a permutation test, and by inputs and
labels together if there are enough of them (`scoring.shift`).
"""

from __future__ import annotations

import numpy as np
import torch

from leakbench.attacks.core import Examples

from ...scoring.shift import LEVEL, of_labels, shift_between
from .overlap import contents

LEAST_DECOYS = 19
"""Fewest decoys with which a rank can be a p-value of 5 %."""


def unlike(candidates: Examples, public: Examples) -> str:
    """Returns why ranks of candidates among public examples would be meaningless; empty if no difference is found.

    Args:
        candidates: possible members of the batch.
        public: known non-members.
    """
    own, others = contents([candidates.inputs, public.inputs])
    if bool(torch.isin(candidates.ids, public.ids).any()) or len(np.intersect1d(own, others)):
        return "candidates must not be among the public examples, and one is"
    decoys = len(public) // 2
    if decoys < LEAST_DECOYS:
        return f"ranks need at least {2 * LEAST_DECOYS} public examples, half of which are compared, got {len(public)}"
    way_out = "ranks would tell that, and not who was in the batch; give --public examples of the candidates' kind"
    p = of_labels(candidates.labels.cpu().numpy(), public.labels.cpu().numpy())
    if p < LEVEL:
        return f"candidates and public examples have other labels (p {p:.2g}): {way_out}"
    shift = shift_between(candidates, public)
    if shift.found:
        return f"candidates and public examples are told apart without the update ({shift.words}): {way_out}"
    return ""
