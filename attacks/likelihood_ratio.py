"""Exact likelihood-ratio membership test on the updates of a whole training run.

Neyman & Pearson 1933 for the test; Nasr et al., "Tight Auditing of Differentially Private Machine Learning", USENIX
Security 2023 (arXiv:2302.07956) for the adversary: it sees every update, knows everybody but the candidate, and the
noise. It is the adversary that differential privacy is defined against, so a claimed epsilon must bound its power. It
also sees releases besides the steps, such as the scores that a mask follows from: their ratios are factors like those
of steps, at the rate 1.
"""

from itertools import chain

import torch

from .core import Access, Evidence, Knows, MembershipScores, SeenTranscript, attack, granted


@attack(access=Access.ALL_STEPS, knows=Knows.OTHERS | Knows.DEFENSE)
def likelihood_ratio(target: SeenTranscript, coins: torch.Generator) -> MembershipScores:
    """Sums the log likelihood ratio of "took part" against "did not" over all steps and one-off releases.

    Args:
        target: the transcript; each step's `sample_rate` is 1 if participation is known, else the sampling rate.
        coins: not used.

    Returns:
        log prod_t (1 - q + q exp(Lambda_t)) in nats, or decisions if updates carry no noise.
    """
    candidates = granted(target.candidates)
    evidence = Evidence(len(candidates), candidates.inputs.device)
    # In turn, since the noise of each is fresh given the earlier releases.
    for step in chain(target.one_offs, target.steps):
        evidence.add_step(step, candidates)
    return evidence.about(candidates, dependence="per_model")
