"""Weight updates: membership in the sum of several local steps, from gradients between the weights before and after.

A client that shares theta_0 - theta_E shares no gradient at theta_0: an example contributed gradients at points in
between. Its gradient at a few points on the line from theta_0 to theta_E is compared with the update, as Zhu, Yao &
Blaschko (SME, ICML 2023, arXiv:2306.00127) compare images', and the score is the largest cosine. A maximum of five is
larger by chance, so it is compared with the same maximum for public examples, which took no part.

Deviation: five points, while SME finds the best point by descent. A single shared step has a single point and cosine.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .core import Access, Examples, Knows, MembershipScores, NotApplicable, Observation, attack, granted

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Points at which gradients are taken, as fractions of the way from the weights before to the weights after."""


@attack(access=Access.UPDATE, knows=Knows.POPULATION)
def weight_updates(target: Observation, generator: torch.Generator, *, batch_size: int = 64) -> MembershipScores:
    """Scores each candidate by the largest of five cosines with the update, against those of public examples.

    Args:
        target: an update, of a step or the sum of several, with public examples.
        generator: not used; the attack is deterministic.
        batch_size: examples whose contributions are computed at a time; bounds memory, changes nothing else.

    Returns:
        The candidate's largest standardised cosine, in standard deviations above the mean of that of public examples,
        float64. The cosines at each point are standardised by public examples' cosines there, so that all five count
        alike.

    Raises:
        NotApplicable: fewer than two public examples, or cosines of theirs that are all alike.
        ValueError: a setting out of range.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    candidates, public = granted(target.candidates), granted(target.population)
    if len(public) < 2:
        raise NotApplicable(f"cosines must be compared with those of at least 2 public examples, got {len(public)}")
    looks = [target.contributions]
    if target.contributions_between is not None:
        looks = [partial(_at, target.contributions_between, share) for share in SHARES]
    own = torch.stack([_cosines(look, candidates, target.released, batch_size) for look in looks])
    known = torch.stack([_cosines(look, public, target.released, batch_size) for look in looks])
    best, of_public = (_standard(pool_scores, known).amax(0) for pool_scores in (own, known))
    scores = _standard(best, of_public)
    return MembershipScores(ids=candidates.ids, scores=scores, exact=False, dependence="per_step")


def _at(between: Callable[..., Tensor], share: float, inputs: Tensor, labels: Tensor) -> Tensor:
    return between(inputs, labels, inputs.new_tensor(share))


def _standard(values: Tensor, known: Tensor) -> Tensor:
    """Standardises values by the mean and standard deviation of known values, along the last dimension."""
    deviation = known.std(-1, keepdim=True)
    if not (deviation > 0).all():
        raise NotApplicable("cosines must differ among public examples, got the same for all")
    return (values - known.mean(-1, keepdim=True)) / deviation


def _cosines(look: Callable[[Tensor, Tensor], Tensor], of: Examples, update: Tensor, batch_size: int) -> Tensor:
    along = update.double() / update.double().norm().clamp(min=torch.finfo(torch.float64).tiny)
    cosines = []
    for inputs, labels in zip(of.inputs.split(batch_size), of.labels.split(batch_size), strict=True):
        own = look(inputs, labels).double()
        cosines.append((own @ along) / own.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny))
    return torch.cat(cosines)
