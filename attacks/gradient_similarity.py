"""Gradient similarity: the contribution of a member points in the direction of the shared update.

Li, Li & Ribeiro, "Effective Passive Membership Inference Attacks in Federated Learning Against Overparameterized
Models", ICLR 2023: gradients of different examples in many dimensions are nearly orthogonal, so that the cosine of a
gradient with an update is large if the update contains it. The inner product is the statistic of gradient canaries
(Nasr et al., USENIX Security 2023). Both are baselines: neither needs the other contributions, the scale of the noise,
or public examples.
"""

import torch

from .core import Access, MembershipScores, Observation, attack, granted


@attack(access=Access.UPDATE)
def gradient_similarity(
    target: Observation, generator: torch.Generator, *, measure: str = "cosine", batch_size: int = 64
) -> MembershipScores:
    """Scores each candidate by the alignment of its contribution with the update.

    Args:
        target: an update.
        generator: not used; the attack is deterministic.
        measure: "cosine", or "inner" for the inner product with the undivided update.
        batch_size: candidates whose contributions are computed at a time; bounds memory, changes nothing else.

    Returns:
        The cosine, 0 for a zero contribution, or the inner product in squared gradient units; float64.

    Raises:
        ValueError: a setting out of range.
    """
    if measure not in ("cosine", "inner"):
        raise ValueError(f"measure must be cosine or inner, got {measure!r}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    candidates = granted(target.candidates)
    sums = target.released.double() * target.expected_batch
    scores = []
    for inputs, labels in zip(candidates.inputs.split(batch_size), candidates.labels.split(batch_size), strict=True):
        own = target.contributions(inputs, labels).double()
        along = own @ sums
        if measure == "cosine":
            along = along / (own.norm(dim=1) * sums.norm()).clamp(min=torch.finfo(torch.float64).tiny)
        scores.append(along)
    return MembershipScores(ids=candidates.ids, scores=torch.cat(scores), exact=False, dependence="per_step")
