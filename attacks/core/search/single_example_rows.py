"""Checks of guessed single examples against the coordinates of a release that each example alone determines.

Rows of a first layer that a single example activates are multiples of that example. Rows of several examples can also
be multiples of a common vector, if all upstream gradients are parallel (one logit, two classes) or if noise hides their
differences. The simulated release of the guessed input tells these cases apart, as far as noise and missing entries of
the input permit.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..targets.observation import Observation

PERTURBATIONS = 4
"""Number of inputs drawn within the errors of a guess, to estimate the error of its contribution."""

LARGEST_RATIO = 3.0
"""Largest accepted residual of a guess on its coordinates, over its root mean square under noise, errors and gaps."""

AMBIGUOUS = 0.2
"""Largest part of the release on a guess's coordinates that noise or another guess may cause; above it, the assignment
of these coordinates to an example is ambiguous.
"""

UNIFORM_STD = 12**-0.5
"""Standard deviation of an entry of which only the range is known (uniform), over the range."""


@dataclass(frozen=True, kw_only=True)
class SingleExampleRows:
    """Residuals of guessed inputs, each on its own coordinates of the release: those attributed to it alone.

    Attributes:
        labels: int64, the class under which each input explains its own coordinates best.
        unexplained: [n], norm of that residual, over the norm of the release on these coordinates.
        expected: [n], root mean square of that residual under noise, errors and gaps of the input, over the same norm.
        shared: [n, n], norm of the contribution of each guess (column) to the coordinates of another (row), over the
            same norm; 0 on the diagonal.
    """

    labels: Int[Tensor, " n"]
    unexplained: Float[Tensor, " n"]
    expected: Float[Tensor, " n"]
    shared: Float[Tensor, "n n"]

    def __getitem__(self, kept: Tensor) -> "SingleExampleRows":
        own = {name: values[kept] for name, values in vars(self).items()}
        return SingleExampleRows(**own | {"shared": own["shared"][:, kept]})

    def fits(self, rounding: float) -> Bool[Tensor, " n"]:
        """Returns whether the residual is no larger than noise and errors of the input explain."""
        return self.unexplained <= (LARGEST_RATIO * self.expected).clamp(min=rounding)

    def decided(self, rounding: float) -> Bool[Tensor, " n"]:
        """Returns whether a guess fits, another example would be noticed, and no other guess shares its coordinates."""
        alone = (torch.maximum(self.shared, self.shared.T) <= AMBIGUOUS).all(dim=1)
        return self.fits(rounding) & (LARGEST_RATIO * self.expected <= AMBIGUOUS) & alone

    def unclaimed(self) -> Bool[Tensor, " n"]:
        """Returns a mask without the guesses to whose coordinates an earlier, confident guess contributes."""
        sure = LARGEST_RATIO * self.expected <= AMBIGUOUS
        kept = torch.ones_like(sure)
        for number in range(1, len(kept)):  # guesses, about as many as examples
            earlier = (kept & sure)[:number]
            kept[number] = not bool((earlier & (self.shared[number, :number] > AMBIGUOUS)).any())
        return kept


def best_labels(target: Observation, inputs: Tensor, own: Bool[Tensor, "n m"]) -> tuple[Tensor, Tensor]:
    """Returns the class under which each input explains its own coordinates best, and the relative residual.

    Args:
        target: a shared update; its `contributions` are bounded by the defense, so clip factors are included.
        inputs: [n, *shape].
        own: bool [n, m], coordinates of the release that are attributed to each input alone.
    """
    sums, entries = target.released * target.expected_batch, own.to(target.released)
    best = torch.full_like(entries[:, 0], torch.inf)
    labels = torch.zeros_like(best, dtype=torch.int64)
    size = (sums * entries).norm(dim=1)
    for label in range(target.classes if len(inputs) else 0):
        classes = torch.full_like(labels, label)
        error = ((sums - target.contributions(inputs, classes)) * entries).norm(dim=1) / size
        labels = torch.where(error < best, classes, labels)
        best = torch.minimum(best, error)
    return labels, best


def checked_on_own_rows(
    target: Observation, inputs: Tensor, errors: Tensor, own: Tensor, noise_std: Tensor, generator: torch.Generator
) -> SingleExampleRows:
    """Computes the residuals of inputs on their coordinates, and those expected from their errors and the noise.

    Args:
        target: a shared update.
        inputs: [n, *shape].
        errors: standard errors of the inputs, in their shape; infinite for unknown entries.
        own: bool [n, m], coordinates of the release that are attributed to each input alone.
        noise_std: [m], on the undivided sums.
        generator: source of the inputs that are drawn within the errors.
    """
    labels, unexplained = best_labels(target, inputs, own)
    if not len(inputs):
        return SingleExampleRows(
            labels=labels, unexplained=unexplained, expected=unexplained, shared=unexplained.new_zeros(0, 0)
        )
    low, high = target.input_low, target.input_high
    entries = own.to(target.released)
    size = (target.released * target.expected_batch * entries).norm(dim=1)
    contributions = target.contributions(inputs, labels)
    spread = errors.clamp(max=UNIFORM_STD * (high - low)).to(inputs)
    off = torch.zeros_like(size)
    for _ in range(PERTURBATIONS):
        steps = torch.randn(inputs.shape, generator=generator, dtype=torch.float64).to(inputs)
        moved = target.contributions((inputs + spread * steps).clamp(low, high), labels)
        off += ((moved - contributions) * entries).square().sum(dim=1) / PERTURBATIONS
    noise = (noise_std.to(entries).square() * entries).sum(dim=1)
    # [coordinates of a guess, contributions of another]
    between = (entries @ contributions.square().T).sqrt() / size[:, None]
    return SingleExampleRows(
        labels=labels,
        unexplained=unexplained,
        expected=(off + noise).sqrt() / size,
        shared=between.fill_diagonal_(0.0),
    )
