"""Ground truth of an attack, members or private inputs; only scorers get it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GroundTruth:
    """What one attack tries to find out: who are members, or which inputs are behind an update.

    Attributes:
        inputs: the private inputs behind an update [b, *shape]; None for membership.
        labels: their labels [b].
        members: ids of the examples that took part; None for reconstruction.
        candidates: ids of the examples that were asked about; given with `members`, because scores of anybody else
            could be made up.
        low: smallest valid input, in model-input units.
        high: largest valid input.
        floor: mean public image, the best guess without looking at the update; None without public data.
        public: public images in an order that no truth decided; the best of a few for each input is the second floor.
        public_labels: labels of public examples, in any order; their shares are the floor of label recovery.
        others: images that the inputs have to be told from, chosen without looking at them.
        labels_given: whether the attacker was told the labels.
        prior: images that the attacker was told to pick from, the first of `inputs` one of them; its result is then
            scored as a choice. None where it was told none.
        gaussian: whether the claim that canaries are held against is of Gaussian steps in which everybody takes part.
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
        """Which of these examples took part."""
        if self.members is None:
            raise ValueError("this truth is about reconstruction, it has no members")
        return torch.isin(ids.cpu(), self.members.cpu())
