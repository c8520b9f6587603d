"""Exact likelihood-ratio membership test on the updates of a whole training run.

Neyman & Pearson 1933 for the test; Nasr et al., "Tight Auditing of Differentially Private Machine Learning", USENIX
Security 2023 (arXiv:2302.07956) for the adversary: it sees every update, and knows all other contributions and the
scale of the noise. It is the adversary that differential privacy is defined against, so a claimed epsilon must bound
its power. It also sees one-off releases, such as the noisy scores behind a mask: their likelihood ratios multiply with
those of the steps, at sample rate 1.
"""

from itertools import chain

import torch

from .core import Access, Evidence, Knows, MembershipScores, SeenTranscript, attack, granted


@attack(access=Access.ALL_STEPS, knows=Knows.OTHERS | Knows.DEFENSE)
def likelihood_ratio(target: SeenTranscript, generator: torch.Generator) -> MembershipScores:
    """Sums the log likelihood ratio of "took part" against "did not" over all steps and one-off releases.

    Args:
        target: the transcript; each step's `sample_rate` is 1 if participation is known, else the sampling rate.
        generator: not used.

    Returns:
        log prod_t (1 - q + q exp(Lambda_t)) in nats, or decisions if updates carry no noise.
    """
    candidates = granted(target.candidates)
    evidence = Evidence(len(candidates), candidates.inputs.device)
    # Ratios multiply, because the noise of each release is independent of the earlier releases.
    for step in chain(target.one_offs, target.steps):
        evidence.add_step(step, candidates)
    return evidence.about(candidates, dependence="per_model")
