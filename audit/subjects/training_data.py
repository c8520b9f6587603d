"""Data of a training, held by the auditor: members, non-members, public and test examples, and the initial model.

The negative control trains the model on public examples in the members' place, so that no member was in the training.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import nn

from leakbench.attacks.core import Examples
from leakbench.benchmarks.core import Splits
from leakbench.defenses.core import keyed

from ..plan.build import load_splits, reads_public
from ..plan.pretrain import starting_model
from ..plan.request import TrainingRequest, seed_of_data
from ..scoring.shift import Shift, shift_between
from ..targets.observe import PublicKnowledge
from .outcome import examples_of, pick, public_knowledge_of

_SHIFTS: dict[str, Shift] = {}
"""Digest of the splits, which fixes the pools -> distribution shift; shared by every defense and budget."""


class TrainingData:
    """Data of a training; each property is computed at its first use, and kept.

    Attributes:
        request: of the training.
        device: device of the computation.
        splits: of the data set.
    """

    def __init__(self, request: TrainingRequest, device: torch.device) -> None:
        """Reads the data."""
        self.request, self.device = request, device
        self.splits: Splits = load_splits(request, device)

    @cached_property
    def members(self) -> Examples:
        """The private examples, whose membership is tested."""
        return examples_of(self.splits.private, self.device)

    @cached_property
    def uninserted(self) -> Examples:
        """The training examples without canaries: the members; for the negative control public examples."""
        return self.members if not self.request.never_saw else self._stand_ins[0]

    @cached_property
    def _start(self) -> nn.Module:
        """The model at the start of training, pretrained or fresh."""
        return starting_model(self.request, self.splits, self._public_pool)

    @cached_property
    def _read(self) -> Examples:
        """The defense's public data; in the negative control the public examples that are not trained on."""
        return self._public_pool if not self.request.never_saw else self._stand_ins[1]

    @cached_property
    def _stand_ins(self) -> tuple[Examples, Examples]:
        """The negative control's public pool in two parts: training examples, no more than members, and the rest."""
        public = self._public_pool
        if not len(public):
            raise ValueError("the negative control trains on public examples; set task.public, or controls = false")
        # `train` refuses public data that contain a training example, so half is left to a defense that reads some.
        most = len(public) // 2 if self._reads_public else len(public)
        generator = keyed(seed_of_data(self.splits.digest, "stand-ins"))
        order = torch.randperm(len(public), generator=generator)
        stand_ins, remaining = order.tensor_split([min(most, len(self.members))])
        return pick(public, stand_ins.sort().values), pick(public, remaining)

    @cached_property
    def _public_pool(self) -> Examples:
        return examples_of(self.splits.public, self.device)

    @cached_property
    def _reads_public(self) -> bool:
        return reads_public(self.request.defense)

    @cached_property
    def test(self) -> Examples:
        """The examples for utility: the data set's own test set, or the non-members if it has none."""
        splits = self.splits
        return examples_of(splits.non_member if splits.test is None else splits.test, self.device)

    @cached_property
    def shift(self) -> Shift:
        """The test for a shift between members and non-members, without any model; cached per process and splits."""
        if (shift := _SHIFTS.get(self.splits.digest)) is None:
            shift = shift_between(self.members, examples_of(self.splits.non_member, self.device))
            _SHIFTS[self.splits.digest] = shift
        return shift

    @cached_property
    def public_knowledge(self) -> PublicKnowledge:
        """The public knowledge about the data set, including its public examples."""
        return public_knowledge_of(self.splits, self.device)
