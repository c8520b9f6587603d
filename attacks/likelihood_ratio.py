"""Exact likelihood-ratio membership test on the updates of a whole training run.

Neyman & Pearson 1933 for the test; Nasr et al., "Tight Auditing of Differentially Private Machine Learning",
USENIX Security 2023 (arXiv:2302.07956) for the adversary: it sees every update, knows everybody but the
candidate, and the noise. It is the adversary that differential privacy is defined against, so its power is
what a claimed epsilon must bound. Releases beside the steps, as that
which a mask follows from, are part of what it sees: their ratios are factors like those of steps, at the rate 1.
"""

from itertools import chain

import torch

from .core import Access, Evidence, Knows, MembershipScores, SeenTranscript, attack, granted


@attack(access=Access.ALL_STEPS, knows=Knows.OTHERS | Knows.DEFENSE)
def likelihood_ratio(target: SeenTranscript, coins: torch.Generator) -> MembershipScores:
    """Sums the log likelihood ratio of "took part" against "did not" over all steps and releases beside them.

    Args:
        target: the transcript; each step's `sample_rate` says whether participation is known (1) or only its
            rate.
        coins: not used.

    Returns:
        log prod_t (1 - q + q exp(Lambda_t)) in nats, or decisions where updates carry no noise.
    """
    candidates = granted(target.candidates)
    evidence = Evidence(len(candidates), candidates.inputs.device)
    # One after another, since the noise of each is fresh given what was released before.
    for step in chain(target.one_offs, target.steps):
        evidence.add_step(step, candidates)
    return evidence.about(candidates, dependence="per_model")
