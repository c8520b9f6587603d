"""Prior-aware reconstruction: the most likely of some candidates for the unknown record of an update.

Hayes, Mahloujifar & Balle, "Bounding Training Data Reconstruction in DP-SGD", NeurIPS 2023 (arXiv:2302.07225), the
attack of Section 4. The adversary knows all other examples of the batch and a uniform prior over n candidates z_1 ..
z_n. The release less the known contributions is r = v_j + noise, with v_j the encoded and bounded contribution of the
z_j that took part, so that the most likely candidate is argmax_j <v_j, r> - |v_j|^2 / 2, over the variance of the noise
coordinate by coordinate. The second term corrects for the norm; it is the same for all candidates only if all are
clipped to the same norm. No attacker on this prior succeeds more often on average, and a claim of differential privacy
bounds the success (`rero_bound`).

Deviation: one release. The paper adds up this statistic over the steps of a training, with a mixture likelihood under
Poisson sampling; here the record is known to be in the step. Without noise the result is the candidate nearest in the
released space.
"""

import torch
from torch import Tensor

from .core import Access, Examples, Knows, NotApplicable, Observation, Reconstruction, attack, granted

AT_ONCE = 8
"""Candidates whose contributions are computed together: a row is as long as the model has parameters."""

ROUNDING = 1e-4
"""Relative rounding of contributions that are computed twice, in the precision of the model."""


@attack(access=Access.UPDATE, knows=Knows.PRIOR | Knows.OTHERS | Knows.DEFENSE)
def rero(target: Observation, generator: torch.Generator) -> Reconstruction:
    """Picks the most likely candidate of the prior.

    Args:
        target: a shared update, with candidates for a record of its batch, and the release less all other
            contributions.
        generator: not used.

    Returns:
        The candidate as the input, with its label; if several would contribute the same, as in a saturated network, the
        first in the prior's order, which is random. The objective is half the squared distance of its contribution to
        the remainder, in units of the noise if there is noise.

    Raises:
        NotApplicable: the record takes part in the step at random, which has another likelihood.
    """
    if target.participation != "known":
        raise NotApplicable("whether the record is in this step has to be known, got one that it joins by chance")
    prior, remainder, noise_std = granted(target.prior), granted(target.remainder), granted(target.noise_std)
    scores, distances = _of_all(target, prior, remainder.double(), noise_std.double())
    chosen = int(scores.argmax())
    return Reconstruction(
        inputs=prior.inputs[chosen : chosen + 1],
        labels=prior.labels[chosen : chosen + 1],
        objective=float(distances[chosen]),
    )


def _of_all(target: Observation, prior: Examples, remainder: Tensor, noise_std: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the log likelihood of each candidate up to a constant, and half its squared distance; float64 [n]."""
    bare = noise_std == 0
    precision = torch.where(bare, 0.0, noise_std.clamp(min=torch.finfo(torch.float64).tiny) ** -2)
    likely, apart, sizes = [], [], []
    for inputs, labels in zip(prior.inputs.split(AT_ONCE), prior.labels.split(AT_ONCE), strict=True):
        v = target.contributions(inputs, labels).double()
        likely.append((v * remainder - v.square() / 2) @ precision)
        apart.append((remainder - v).square() @ bare.double() / 2)
        sizes.append(v.square() @ bare.double())
    scores, shown = torch.cat(likely), torch.cat(apart)
    distances = (remainder.square() @ precision) / 2 - scores + shown
    if bare.all():
        return -shown, distances
    # Coordinates without noise decide first: a candidate that differs there by more than rounding is ruled out.
    slack = ROUNDING**2 * torch.cat(sizes).max()
    return scores.masked_fill(shown > shown.min() + slack, -torch.inf), distances
