"""Ground truth of an attack, members or private inputs; visible to scorers only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GroundTruth:
    """The ground truth of an attack: the members, or the inputs behind an update.

    Attributes:
        inputs: the private inputs behind an update [b, *shape]; None for membership.
        labels: their labels [b].
        members: ids of the examples that took part; None for reconstruction.
        candidates: ids of the candidates; given with `members`, because scores of non-candidates could be made up.
        low: smallest valid input, in model-input units.
        high: largest valid input.
        floor: mean public image, the best guess without the update; None without public data.
        public: public images in an order independent of the truth; the best of a few for each input is the second
            floor.
        public_labels: labels of public examples, in any order; their class frequencies are the floor of label recovery.
        others: images that the inputs are distinguished from, chosen independently of them.
        labels_given: whether the attacker was given the labels.
        prior: candidate images given to the attacker, including the first of `inputs`; its result is then scored as a
            choice. None without candidates.
        gaussian: whether the claim compared with canaries is of Gaussian steps with full participation.
        apart: whether contributions of canaries are orthogonal in every step.
    """

    inputs: Tensor | None = None
    labels: Int[Tensor, " b"] | None = None
    members: Int[Tensor, " n"] | None = None
    candidates: Int[Tensor, " m"] | None = None
    low: float = 0.0
    high: float = 1.0
    floor: Tensor | None = None
    public: Tensor | None = None
    public_labels: Int[Tensor, " p"] | None = None
    others: Tensor | None = None
    labels_given: bool = True
    prior: Tensor | None = None
    gaussian: bool = False
    apart: bool = False

    def __post_init__(self) -> None:
        if (self.members is None) != (self.candidates is None):
            raise ValueError(
                "members and candidates must be given together: who took part, and everybody who was asked about"
            )

    def membership(self, ids: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
        """Returns which of these examples took part."""
        if self.members is None:
            raise ValueError("this truth is about reconstruction, it has no members")
        return torch.isin(ids.cpu(), self.members.cpu())
