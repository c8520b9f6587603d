"""Exact likelihood-ratio membership test on a shared update.

Neyman & Pearson 1933 for the test; Nasr et al., "Tight Auditing of Differentially Private Machine Learning", USENIX
Security 2023 (arXiv:2302.07956) for the adversary, which here sees a single step.
"""

import torch

from .core import Access, Evidence, Knows, MembershipScores, Observation, attack, granted


@attack(access=Access.UPDATE, knows=Knows.OTHERS | Knows.DEFENSE)
def one_step_likelihood_ratio(target: Observation, generator: torch.Generator) -> MembershipScores:
    """Returns the log likelihood ratio of "took part" against "did not", from one update.

    Args:
        target: an update with its candidates.
        generator: not used.

    Returns:
        log(1 - q + q exp(Lambda)) in nats, or decisions if the update carries no noise.
    """
    candidates = granted(target.candidates)
    evidence = Evidence(len(candidates), candidates.inputs.device)
    evidence.add_step(target, candidates)
    return evidence.about(candidates, dependence="per_step")
