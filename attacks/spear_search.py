"""SPEAR by search: sparse directions of a larger batch's gradient, as local minima of an L1 norm on the sphere.

After "SPEAR++" (arXiv:2510.24200), which finds by dictionary learning the directions that `spear` finds by drawing
rows, at a cost that does not double with each example. The columns of D are sparse, so |left @ q|_1 has local minima at
them.

Deviation: written from the paper's idea, not from its algorithm: subgradient steps on the sphere from many starts at
once, then iteratively reweighted least squares, then a fit to the rows that are zero. Choice, scale, score and
certificate are those of `spear`.
"""

import torch

from .core import Access, Observation, Reconstruction, attack
from .core.closed_form.exact_batch import recovered_batch
from .core.closed_form.sparse_columns import small_on_sphere


@attack(access=Access.UPDATE)
def spear_search(
    target: Observation, generator: torch.Generator, *, starts: int = 4096, iterations: int = 100, together: int = 256
) -> Reconstruction:
    """Recovers every input of a batch too large for drawing rows, and certifies those that it proves right.

    Args:
        target: a shared update and the model it was taken at.
        generator: source of the starts, and of the entries that a completion is tested on.
        starts: largest number of descents.
        iterations: subgradient steps of each.
        together: descents at a time, between checks for a complete batch.

    Returns:
        The same as `spear`.

    Raises:
        ValueError: a setting is not positive.
        NotApplicable: as `spear`.
        RankDeficient: as `spear`.
    """
    for name, value in (("starts", starts), ("iterations", iterations), ("together", together)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return recovered_batch(
        target,
        generator,
        lambda left, _: small_on_sphere(left, generator, iterations=iterations),
        budget=starts,
        block=together,
    )
