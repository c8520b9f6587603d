"""Exact likelihood-ratio membership test on the one-off releases of a training, such as the scores behind a mask.

Neyman & Pearson 1933 for the test; Nasr et al., "Tight Auditing of Differentially Private Machine Learning", USENIX
Security 2023 (arXiv:2302.07956) for the adversary. Such a release is computed on all the data at once, so every member
takes part for certain and sampling does not amplify its privacy. The test reads the noisy values that the ledger
charges for; a mask chosen by them is a function of them, and carries no further information.
"""

import torch

from .core import Access, Evidence, Knows, MembershipScores, SeenTranscript, attack, granted


@attack(access=Access.ONE_OFF, knows=Knows.OTHERS | Knows.DEFENSE)
def one_off_likelihood_ratio(target: SeenTranscript, generator: torch.Generator) -> MembershipScores:
    """Returns the log likelihood ratio of "was trained on" against "was not", from the one-off releases.

    Args:
        target: its `one_offs` with their candidates; steps are not read.
        generator: not used.

    Returns:
        sum_i Lambda_i in nats, or decisions if a release carries no noise.
    """
    candidates = granted(target.candidates)
    evidence = Evidence(len(candidates), candidates.inputs.device)
    for release in target.one_offs:
        evidence.add_step(release, candidates)
    return evidence.about(candidates, dependence="per_model")
