"""Candidates of a membership test: the auditor's view, and the attack's view.

An attack gets copies, in a random order and under random ids (aliases) drawn for the cell. The data set's own ids would
reveal members where pools are dealt by position: a test set that serves as non-members has the highest ids. They would
also reveal which half of the candidates thresholds are chosen on. Scores are mapped back to the data set's ids, by
which records, the two halves and comparisons across cells name an example.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakbench.attacks.core import Examples, InclusionScores, MembershipScores, checked_scores
from leakbench.defenses.core import keyed

TURNED = 0.01
"""Fraction of the other candidates whose rank relative to a candidate may change by rounding."""

_SUREST = 10
"""Divisor of the number of members, and of non-members, that gives the number of most confident candidates."""

_MOST = 2**63 - 1  # the largest int64, exclusive upper end of the range of ids


@dataclass(frozen=True)
class Candidates:
    """The candidates of a membership test, under the data set's ids and under aliases.

    Attributes:
        ids: ids in the data set, in the attack's order of candidates; auditor only.
        aliases: the ids that an attack gets in their place, in the same order; auditor only.
        given: the attack's own copy, which it may write into: nothing else reads it.
    """

    ids: Int[Tensor, " n"]
    aliases: Int[Tensor, " n"]
    given: Examples

    @classmethod
    def draw(cls, examples: Examples, key: int) -> Candidates:
        """Draws a random order of the candidates, and increasing random ids of 63 bits for that order.

        The key is derived from the request, which the record publishes. A reader of the record can therefore undo the
        shuffle, but finds only the order by content, which follows from the examples that an attack is given anyway.

        Args:
            examples: with the ids of the data set.
            key: key of the cell, used for the order and the aliases only.
        """
        generator, count, device = keyed(key), len(examples), examples.ids.device
        # Drawn on the CPU for every device, because a device's own generator would give another order.
        order = content_order(examples)[torch.randperm(count, generator=generator).to(device)]
        aliases = _distinct(count, generator).to(device)
        # A clone, because answers are checked against the aliases, which no attack may overwrite.
        shown = Examples(ids=aliases.clone(), inputs=examples.inputs[order], labels=examples.labels[order])
        return cls(examples.ids[order], aliases, shown)

    def __len__(self) -> int:
        return len(self.ids)

    def answers(self, result: object) -> MembershipScores:
        """Returns an attack's scores under the ids of the data set, sorted by id.

        Raises:
            TypeError: the result is not of a score type.
            ValueError: a score for a non-candidate, or a candidate without a score.
        """
        kind = InclusionScores if type(result) is InclusionScores else MembershipScores
        scores = checked_scores(result, self.aliases, kind)
        order = self.ids.argsort()
        return replace(scores, ids=self.ids[order], scores=scores.scores[order])


def content_order(examples: Examples) -> Int[Tensor, " n"]:
    """Returns positions of examples in an order that is independent of their origin: by a hash of input and label.

    Their own order reveals the origin, because pools are joined members first; so do their ids if a test set serves as
    non-members, with the highest ids. Copies of an example are ordered by a hash of their ids instead.
    """
    inputs, labels, ids = (tensor.detach().cpu().numpy() for tensor in (examples.inputs, examples.labels, examples.ids))
    marks = []
    for x, y, name in zip(inputs, labels, ids, strict=True):
        content = x.tobytes() + y.tobytes()
        own = content + int(name).to_bytes(8, "big", signed=True)
        marks.append(hashlib.sha256(content).digest() + hashlib.sha256(own).digest())
    return torch.tensor(sorted(range(len(marks)), key=marks.__getitem__), dtype=torch.int64, device=examples.ids.device)


def copied(examples: Examples) -> Examples:
    """Returns public examples for an attack: copies, numbered from 0 instead of by position in the data set."""
    numbers = torch.arange(len(examples), device=examples.ids.device)
    return Examples(ids=numbers, inputs=examples.inputs.clone(), labels=examples.labels.clone())


def repeated_alone(
    scores: Float[Tensor, " n"], members: Bool[Tensor, " n"], generator: torch.Generator
) -> Int[Tensor, " drawn"]:
    """Selects candidates that an informed attack must score again alone: two members and two non-members, by position.

    From either group, a candidate is drawn from all, and another from the attack's most confident tenth. An attack that
    compares only a few candidates would choose the most confident, which decide the true positive rate at a low false
    positive rate.

    Args:
        scores: scores of all candidates.
        members: true for members.
        generator: source hidden from attacks, so that none can treat these candidates specially.
    """
    positions = []
    for inside in (True, False):
        places = torch.nonzero(members == inside).flatten().cpu()
        surest = places[
            scores.cpu()[places].argsort(descending=inside, stable=True)[: math.ceil(len(places) / _SUREST)]
        ]
        for pool in (places, surest):
            positions.append(pool[torch.randperm(len(pool), generator=generator)[:1]])
    return torch.cat(positions).unique()


def refuse_comparison(name: str, together: MembershipScores, alone: MembershipScores) -> None:
    """Refuses an informed attack that scores a candidate by the remainders of other candidates.

    Each candidate stands for a separate adversary who knows all other records. The remainder of a non-participant is
    the noise of the step itself: comparing remainders cancels noise of any scale, which no adversary in the definition
    of differential privacy can do.

    Args:
        name: name of the attack.
        together: its scores of all candidates.
        alone: its score of a single candidate, computed without the others.

    Raises:
        ValueError: the two differ by more than rounding.
    """
    same_id = together.ids == alone.ids
    (among,), others = together.scores[same_id], together.scores[~same_id]
    (by_itself,) = alone.scores
    # Ranks are compared, not values: an offset, or one large score, would make any difference look like rounding.
    turned = (others - among).sign() != (others - by_itself).sign()
    if int(turned.sum()) > TURNED * len(others):
        raise ValueError(
            f"{name} must score a candidate by what is left without everybody else, and not by what is left for other "
            f"candidates: the score of one is {float(among):.6g} among the others and {float(by_itself):.6g} alone"
        )


def _distinct(count: int, generator: torch.Generator) -> Int[Tensor, " count"]:
    """Returns distinct random numbers in increasing order."""
    while True:
        drawn = torch.randint(_MOST, (count,), generator=generator).sort().values
        if count < 2 or bool((drawn.diff() > 0).all()):
            return drawn
