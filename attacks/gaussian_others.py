"""Membership in a shared update, with the unknown others of the batch modelled on public examples.

Leemann, Pawelczyk & Kasneci, "Gaussian Membership Inference Privacy", NeurIPS 2023 (arXiv:2306.07273): a sum of many
bounded contributions is about normal. With mean g and covariance C of the contributions of public examples, the test of
"took part" against "did not" is a ratio of two normal densities that differ in their mean, N((B - 1) g + v, Sigma) and
N((B - 1) g, Sigma), with B the expected batch, v the candidate's contribution and Sigma = (B - 1) C + the variances of
the noise.

Deviation: the covariance is shrunk as by Ledoit & Wolf (2004), since there are fewer public examples than coordinates.
"""

import torch

from .core import Access, Knows, MembershipScores, NotApplicable, Observation, attack, granted
from .core.membership.shrunk_gaussian import ShrunkGaussian


@attack(access=Access.UPDATE, knows=Knows.POPULATION | Knows.DEFENSE)
def gaussian_others(
    target: Observation, generator: torch.Generator, *, examples: int = 256, batch_size: int = 64
) -> MembershipScores:
    """Scores each candidate by the ratio of two normal densities of the update, with and without its contribution.

    Args:
        target: an update, with public examples and the scale of its noise.
        generator: source of the random choice of public examples.
        examples: largest number of public examples whose contributions model those of the others; as many vectors of
            the size of the release are kept.
        batch_size: candidates whose contributions are computed at a time; bounds memory, changes nothing else.

    Returns:
        v^T Sigma^-1 r - v^T Sigma^-1 v / 2 in nats, float64, with v the candidate's contribution and r the undivided
        update less (B - 1) g.

    Raises:
        NotApplicable: too few public examples, contributions that are all alike, or a coordinate without any variance.
        ValueError: a setting out of range.
    """
    for name, value, least in (("examples", examples, 2), ("batch_size", batch_size, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    candidates, public = granted(target.candidates), granted(target.population)
    if len(public) < 2:
        raise NotApplicable(f"a covariance must be of at least 2 public examples, got {len(public)}")
    chosen = torch.randperm(len(public), generator=generator)[:examples].to(public.ids.device)
    parts = zip(public.inputs[chosen].split(batch_size), public.labels[chosen].split(batch_size), strict=True)
    known = torch.cat([target.contributions(*part) for part in parts])
    others = max(target.expected_batch - 1, 0.0)
    spread = ShrunkGaussian.of_sums(known, others, granted(target.noise_std))
    beyond = target.released.double() * target.expected_batch - others * known.mean(0, dtype=torch.float64)
    direction = spread.solved(beyond)
    scores = []
    for inputs, labels in zip(candidates.inputs.split(batch_size), candidates.labels.split(batch_size), strict=True):
        own = target.contributions(inputs, labels).double()
        scores.append(own @ direction - spread.squared_lengths(own) / 2)
    return MembershipScores(ids=candidates.ids, scores=torch.cat(scores), exact=False, dependence="per_step")
