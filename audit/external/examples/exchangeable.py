"""Whether candidates and public examples are of one kind, without which ranks among these say nothing of a batch.

A candidate who was not in the batch ranks among decoys by chance where both come from one population. Candidates of one
class among decoys of all classes rank high with any gradient that has that class in it, in the batch or not. So the two
are held against each other before an update is looked at: by their labels, by a permutation test, and by inputs and
labels together where there are enough of them (`scoring.shift`).
"""

from __future__ import annotations

import numpy as np
import torch

from leakbench.attacks.core import Examples

from ...scoring.shift import LEVEL, of_labels, shift_between
from .overlap import contents

LEAST_DECOYS = 19
"""With fewer no rank is a p-value of 5 %."""


def unlike(candidates: Examples, public: Examples) -> str:
    """Why ranks of candidates among public examples would say nothing of a batch; empty where nothing shows it.

    Args:
        candidates: who may have been in the batch.
        public: who was not.
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
