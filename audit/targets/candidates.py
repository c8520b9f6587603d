"""Candidates of a membership test: as the auditor knows them, and as an attack gets them.

An attack gets copies, in an order and under ids (aliases) that are drawn for the cell. A data set's own ids would give
members away where pools are dealt by position (a test set that stands in for non-members has the highest), and with
them the half of the candidates on which thresholds are chosen. Scores are put under the data set's ids again, by which
records, halves and comparisons across cells go.
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
"""Fraction of the others whom rounding may move from one side of a score to the other."""

_SUREST = 10
"""One in so many members, and non-members, is among those that an attack is surest of."""

_MOST = 2**63 - 1  # the largest int64, exclusive: the end of the range that ids are drawn from


@dataclass(frozen=True)
class Candidates:
    """The candidates of a membership test, under the data set's ids and under aliases.

    Attributes:
        ids: in the data set, in the order in which an attack gets the candidates; the auditor's.
        aliases: the ids that an attack gets in their place, in the same order; the auditor's, too.
        given: what an attack gets, and may write into: nobody else reads it.
    """

    ids: Int[Tensor, " n"]
    aliases: Int[Tensor, " n"]
    given: Examples

    @classmethod
    def draw(cls, examples: Examples, key: int) -> Candidates:
        """Candidates in a random order, under random ids of 63 bits, in the order of those.

        Whoever knows the key, which follows from a request and so from a record, knows the order before: that of
        content, which an attack is given anyway.

        Args:
            examples: with the ids of the data set.
            key: of the cell: nothing but the order and the aliases follows from it.
        """
        coins, count, device = keyed(key), len(examples), examples.ids.device
        # Drawn on the CPU whatever the device, whose own generator would give another order.
        order = content_order(examples)[torch.randperm(count, generator=coins).to(device)]
        aliases = _distinct(count, coins).to(device)
        # A clone of the aliases: answers are held against those that no attack can write into.
        given = Examples(ids=aliases.clone(), inputs=examples.inputs[order], labels=examples.labels[order])
        return cls(examples.ids[order], aliases, given)

    def __len__(self) -> int:
        return len(self.ids)

    def answers(self, result: object) -> MembershipScores:
        """What an attack returned, under the ids of the data set and in the order of those.

        Raises:
            TypeError: it is something else than scores.
            ValueError: it has a score for somebody else, or none for a candidate.
        """
        kind = InclusionScores if type(result) is InclusionScores else MembershipScores
        scores = checked_scores(result, self.aliases, kind)
        order = self.ids.argsort()
        return replace(scores, ids=self.ids[order], scores=scores.scores[order])


def content_order(examples: Examples) -> Int[Tensor, " n"]:
    """Positions of examples in an order that tells nothing of where they are from: by a hash of input and label.

    Their own order does, because pools are joined members first, and so do their ids where a test set stands in for
    non-members: it has the highest. Copies of one example come in the order of a hash of their ids, not of these.
    """
    inputs, labels, ids = (one.detach().cpu().numpy() for one in (examples.inputs, examples.labels, examples.ids))
    marks = []
    for x, y, name in zip(inputs, labels, ids, strict=True):
        content = x.tobytes() + y.tobytes()
        own = content + int(name).to_bytes(8, "big", signed=True)
        marks.append(hashlib.sha256(content).digest() + hashlib.sha256(own).digest())
    return torch.tensor(sorted(range(len(marks)), key=marks.__getitem__), dtype=torch.int64, device=examples.ids.device)


def copied(examples: Examples) -> Examples:
    """Public examples for an attack: copies, numbered from 0 instead of by their place in the data set."""
    numbers = torch.arange(len(examples), device=examples.ids.device)
    return Examples(ids=numbers, inputs=examples.inputs.clone(), labels=examples.labels.clone())


def asked_alone(
    scores: Float[Tensor, " n"], members: Bool[Tensor, " n"], coins: torch.Generator
) -> Int[Tensor, " drawn"]:
    """Whom an informed attack has to score again as the only candidate: two members and two non-members, by position.

    One of each is drawn from all, and one from the tenth that an attack is surest of: whoever compares candidates for a
    few alone does it where a true positive rate at few false alarms is decided.

    Args:
        scores: of all candidates.
        members: who is one.
        coins: that no attack is told, so that none behaves for these candidates only.
    """
    found = []
    for inside in (True, False):
        places = torch.nonzero(members == inside).flatten().cpu()
        surest = places[
            scores.cpu()[places].argsort(descending=inside, stable=True)[: math.ceil(len(places) / _SUREST)]
        ]
        for some in (places, surest):
            found.append(some[torch.randperm(len(some), generator=coins)[:1]])
    return torch.cat(found).unique()


def refuse_comparison(name: str, together: MembershipScores, alone: MembershipScores) -> None:
    """Refuses an informed attack that scores a candidate by the remainders of other candidates.

    Each candidate stands for an adversary of its own, who knows everybody else. The remainder of one who took no part
    is the noise of the step itself: by comparing remainders, noise of any scale cancels, which no adversary that
    differential privacy is about can do.

    Args:
        name: of the attack.
        together: its scores of all candidates.
        alone: its score of one of them, when it was asked about nobody else.

    Raises:
        ValueError: the two differ by more than rounding.
    """
    asked = together.ids == alone.ids
    (among,), others = together.scores[asked], together.scores[~asked]
    (by_itself,) = alone.scores
    # By order, and not by size: an offset, or one large score, would make any difference look like rounding.
    turned = (others - among).sign() != (others - by_itself).sign()
    if int(turned.sum()) > TURNED * len(others):
        raise ValueError(
            f"{name} must score a candidate by what is left without everybody else, and not by what is left for other "
            f"candidates: the score of one is {float(among):.6g} among the others and {float(by_itself):.6g} alone"
        )


def _distinct(count: int, coins: torch.Generator) -> Int[Tensor, " count"]:
    """Random numbers, each once, in rising order."""
    while True:
        drawn = torch.randint(_MOST, (count,), generator=coins).sort().values
        if count < 2 or bool((drawn.diff() > 0).all()):
            return drawn
