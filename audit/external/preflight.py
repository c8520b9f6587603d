"""What is looked at before any attack: is this the model, are these the examples, and could a leak show at this size?

A model at chance is no finding about privacy: its inputs are scaled otherwise, its classes are in another order, or the
file is of another model. So the audit stops, and says which of these makes it right, where one does. That is diagnosis
alone: nothing is repaired in silence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from scipy import optimize, stats
from torch import Tensor, nn

from attacks.core import Examples
from leaderboard.records.record import Metric

from ..evidence.one_run import Guesses, one_run
from ..observe import logits_of
from ..scoring.membership import auc
from ..scoring.random_split import SHARE
from ..scoring.shift import Shift, shift_between
from ..scoring.utility import score_utility
from .data import Groups

POWER = 0.8
"""With which the smallest leak that a size can show would show."""

AT_CHANCE = 1e-3
"""p-value above which an accuracy is not told from that of a model that knows nothing."""

NEAR = 1e-3
"""Root mean square difference, as a share of the range of inputs, under which two examples are near-duplicates."""

_COMPARED = 5000
"""Examples a group, for near-duplicates: a quadratic comparison."""


@dataclass(frozen=True, kw_only=True)
class Remark:
    """One thing that the pre-flight says.

    Attributes:
        kind: one word for it, as "overlap".
        stop: whether the audit ends here.
        sentence: what is wrong, and what to do.
    """

    kind: str
    stop: bool
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What was looked at.

    Attributes:
        remarks: what is to be said.
        accuracy: of members and of non-members.
        shift: between them, without the model.
        sizes: the smallest leak that so many examples could show.
        classes: that the model answers with.
    """

    remarks: tuple[Remark, ...]
    accuracy: dict[str, Metric] = field(default_factory=dict)
    shift: Shift
    sizes: dict[str, float | int | None]
    classes: int

    @property
    def stops(self) -> tuple[Remark, ...]:
        """What ends the audit."""
        return tuple(one for one in self.remarks if one.stop)

    def to_dict(self) -> dict[str, Any]:
        """As a report has it."""
        return {
            "findings": [asdict(one) for one in self.remarks],
            "numbers": {name: asdict(metric) for name, metric in self.accuracy.items()},
        }


def smallest_leak(members: int, non_members: int, delta: float = 1e-5, level: float = 0.95) -> dict[str, Any]:
    """The smallest leak that groups of these sizes would show in four audits of five; computes nothing of a model.

    Args:
        members: examples.
        non_members: examples.
        delta: of the bound on epsilon.
        level: its confidence.

    Returns:
        `auc` on the half that is reported, `tpr_at_1pct_fpr` of all candidates (None with fewer than 100 non-members),
        `epsilon_ceiling` of the pair bound by one attack (None with fewer than 10 pairs), and the pairs.
    """
    halves = max(1, members // 2), max(1, non_members // 2)
    detail = auc(np.zeros(halves[0]), np.zeros(halves[1])).detail
    pairs = min(members, non_members)
    ceiling = None
    if pairs >= SHARE:
        answered = pairs // SHARE
        ceiling = one_run(Guesses(pairs, answered, answered), delta, level)
    tpr = None
    if non_members >= 100:
        # The least rate of which so many members show more than 1 % at 2.5 %, exactly, in four cases of five.
        least = int(stats.binom.isf(0.025, members, 0.01)) + 1
        tpr = float(stats.beta.ppf(POWER, least, members - least + 1)) if least <= members else None
    return {
        "members": members,
        "non_members": non_members,
        "auc": float(detail["detectable"] or 1.0),
        "tpr_at_1pct_fpr": tpr,
        "pairs": pairs,
        "epsilon_ceiling": ceiling,
    }


def preflight(model: nn.Module, groups: Groups, *, delta: float = 1e-5, level: float = 0.95) -> Preflight:
    """Looks at a model and its examples before they are attacked.

    Args:
        model: in evaluation mode, on the examples' device.
        groups: as the model is fed.
        delta: of the bound on epsilon.
        level: its confidence.

    Returns:
        What is to be said; nothing is attacked where a remark stops the audit.

    Raises:
        ValueError: a model that cannot take these inputs, or answers with no logits.
    """
    members, outside = groups.members, groups.non_members
    shape = list(members.inputs.shape[1:])
    try:
        answers = [logits_of(model, group.inputs) for group in (members, outside)]
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        told = " ".join(str(error).split())
        raise ValueError(
            f"model must take inputs of shape {shape}, and fails on them: {told}; images lie channels first"
        ) from None
    if any(one.ndim != 2 or one.shape[1] < 2 for one in answers):
        raise ValueError(f"model must answer with logits [n, classes], got {list(answers[0].shape)}")
    classes = int(answers[0].shape[1])
    labels = torch.cat([members.labels, outside.labels])
    remarks = [*_of_labels(labels, classes), *_of_groups(groups), *_of_sizes(members, outside)]
    both = torch.cat(answers)
    accuracy = {}
    if int(labels.max()) < classes and int(labels.unique().numel()) > 1:
        accuracy = {
            name: score_utility(answer, group.labels)["accuracy"]
            for name, answer, group in zip(("members", "non_members"), answers, (members, outside), strict=True)
        }
        remarks += _of_answers(model, groups, both, labels, classes)
        remarks += _of_accuracies(accuracy)
    shift = shift_between(members, outside)
    if shift.found:
        remarks.append(
            Remark(
                kind="shift",
                stop=False,
                sentence=(
                    f"members and non-members differ without any model (AUC {shift.auc:.2f}, p {shift.p_value:.2g}): "
                    "what attacks find may be that; draw both at random from one pool"
                ),
            )
        )
    return Preflight(
        remarks=tuple(remarks),
        accuracy=accuracy,
        shift=shift,
        sizes=smallest_leak(len(members), len(outside), delta, level),
        classes=classes,
    )


def _of_labels(labels: Tensor, classes: int) -> list[Remark]:
    found, largest = [], int(labels.max())
    if largest >= classes:
        found.append(
            Remark(
                kind="classes",
                stop=True,
                sentence=f"labels go up to {largest}, and the model has {classes} classes: labels count from 0",
            )
        )
    if int(labels.unique().numel()) == 1:
        found.append(
            Remark(
                kind="one class",
                stop=True,
                sentence=f"all examples are of class {largest}: accuracy and attacks say nothing of one class alone",
            )
        )
    return found


def _of_sizes(members: Examples, outside: Examples) -> list[Remark]:
    least = min(len(members), len(outside))
    if least >= 100:
        return []
    sizes = smallest_leak(len(members), len(outside))
    ceiling = sizes["epsilon_ceiling"]
    told = f"at most {ceiling:.2f}" if ceiling is not None else "nothing"
    return [
        Remark(
            kind="few",
            stop=least < 10,
            sentence=(
                f"{len(members)} members and {len(outside)} non-members show an AUC from {sizes['auc']:.2f} on, no TPR "
                f"at low false positive rates, and {told} of epsilon; take 1,000 of each, at least 10"
            ),
        )
    ]


def _of_groups(groups: Groups) -> list[Remark]:
    """Examples that are in two groups, or in one twice."""
    keys = {
        name: _keys(group)
        for name, group in (
            ("members", groups.members),
            ("non-members", groups.non_members),
            ("population", groups.population),
        )
        if group is not None
    }
    found = []
    for one, other in (("members", "non-members"), ("population", "members"), ("population", "non-members")):
        if one not in keys or other not in keys:
            continue
        shared = len(set(keys[one]) & set(keys[other]))
        if shared:
            smaller = min(len(set(keys[one])), len(set(keys[other])))
            words = "the very same examples" if shared == smaller else f"{shared} examples in common"
            found.append(
                Remark(
                    kind="overlap", stop=True, sentence=f"{one} and {other} have {words}; an example is in one group"
                )
            )
    for name, own in keys.items():
        if (twice := len(own) - len(set(own))) > 0:
            found.append(
                Remark(
                    kind="duplicates",
                    stop=False,
                    sentence=f"{twice} of {len(own)} {name} are copies of others: intervals count them as independent",
                )
            )
    near = _near(groups.members.inputs, groups.non_members.inputs)
    if near and not any(one.kind == "overlap" for one in found):
        found.append(
            Remark(
                kind="near-duplicates",
                stop=False,
                sentence=(
                    f"{near} members have a near-duplicate among the non-members, which the model has all but seen: "
                    "leaks look smaller than they are"
                ),
            )
        )
    return found


def _keys(examples: Examples) -> list[bytes]:
    rows = np.ascontiguousarray(examples.inputs.detach().cpu().flatten(1).float().numpy())
    return [row.tobytes() for row in rows]


def _near(inside: Tensor, outside: Tensor) -> int:
    """Members with a non-member closer than `NEAR`, of at most `_COMPARED` of each."""
    first, second = (some[:_COMPARED].detach().flatten(1).float() for some in (inside, outside))
    extent = float(max(first.max(), second.max()) - min(first.min(), second.min()))
    if extent == 0:
        return 0
    limit, count = NEAR * extent * math.sqrt(first.shape[1]), 0
    for part in first.split(512):
        # Exactly, where the squares of the fast form are rounded: a near-duplicate is a small difference.
        close = torch.cdist(part, second, compute_mode="use_mm_for_euclid_dist")
        for row in (close.min(1).values < 10 * limit + 1e-2 * float(part.norm(dim=1).max())).nonzero()[:, 0].tolist():
            count += bool((second - part[row]).norm(dim=1).min() < limit)
    return count


def _of_accuracies(accuracy: dict[str, Metric]) -> list[Remark]:
    inside, outside = accuracy["members"], accuracy["non_members"]
    if inside.high is not None and outside.low is not None and inside.high < outside.low:
        return [
            Remark(
                kind="swapped",
                stop=False,
                sentence=(
                    f"accuracy is {inside.value:.1%} on members and {outside.value:.1%} on non-members: a model is no "
                    "worse on what it was trained on; are the two groups exchanged?"
                ),
            )
        ]
    return []


def _of_answers(model: nn.Module, groups: Groups, answers: Tensor, labels: Tensor, classes: int) -> list[Remark]:
    """Whether the model knows these examples at all; where it does not, what would make it know them."""
    undefined = int(answers.isnan().any(1).sum())
    if undefined:
        return [
            Remark(kind="NaN", stop=True, sentence=f"the model answers NaN for {undefined} of {len(labels)} examples")
        ]
    guesses = answers.argmax(1)
    right, n = int((guesses == labels).sum()), len(labels)
    shares = labels.bincount(minlength=classes).double() / n
    # A model that knows nothing answers one class always, or each as often as it pleases: right in that share at most.
    chance = float(shares.max())
    known = right / n > chance and float(stats.binom.sf(right - 1, n, chance)) < AT_CHANCE
    found = []
    largest = float(groups.members.inputs.abs().max())
    if largest > 16:
        found.append(
            Remark(
                kind="range",
                stop=not known,
                sentence=(
                    f"inputs go up to {largest:g}, as of images in 0..255: models are fed inputs of 0 to 1, or "
                    "standardised; pass --preprocess mean=0,std=255, or as in the training"
                ),
            )
        )
    if int(guesses.unique().numel()) == 1:
        found.append(
            Remark(
                kind="one answer",
                stop=True,
                sentence=f"the model answers class {int(guesses[0])} for all {n} examples: are they scaled otherwise?",
            )
        )
    order = _another_order(guesses, labels, classes)
    # A network that was never trained may be right on half as many again as one answer is, by accident.
    weak = right / n < 2 * chance
    if known and not weak and not order:
        return found
    told = f"the model is right on {right / n:.1%} of the examples, where always answering one class is on {chance:.1%}"
    better = order or _other_inputs(model, groups, labels, chance)
    if known and not better:
        sentence = f"{told}: if it is better than that, preprocessing, class order or the file is another one"
        return [*found, Remark(kind="weak", stop=False, sentence=sentence)] if right / n < 0.5 else found
    why = better or "preprocessing, class order or the file is not that of the training"
    return [*found, Remark(kind="chance", stop=True, sentence=f"{told}: {why}")]


def _another_order(guesses: Tensor, labels: Tensor, classes: int) -> str:
    """Whether other numbers for the classes make the model right."""
    n = len(labels)
    table = torch.bincount(labels * classes + guesses, minlength=classes * classes).view(classes, classes)
    rows, columns = optimize.linear_sum_assignment(table.cpu().numpy(), maximize=True)
    right = int(table[torch.as_tensor(rows), torch.as_tensor(columns)].sum()) / n
    # An assignment fits noise, too: by far less than half of all examples, unless there are hardly any. A model that is
    # right by its own order gains nothing by another one.
    if right < 0.5 or right < int((guesses == labels).sum()) / n + 0.2 or n < 10 * classes:
        return ""
    moved = [f"{i} is the model's {j}" for i, j in zip(rows, columns, strict=True) if i != j]
    return f"its classes are in another order, with which it is right on {right:.1%}: {', '.join(moved[:5])}"


def _other_inputs(model: nn.Module, groups: Groups, labels: Tensor, chance: float) -> str:
    """Whether another scale of the inputs makes the model right; tried in turn, and said as what to pass."""
    inputs = torch.cat([groups.members.inputs, groups.non_members.inputs])
    axes = [0, *range(2, inputs.ndim)] if inputs.ndim > 2 else [0, 1]
    mean, std = inputs.mean(axes), inputs.std(axes)
    flat = "/".join(f"{float(value):.4g}" for value in mean.flatten())
    spread = "/".join(f"{float(value):.4g}" for value in std.flatten())
    shape = (1, -1, *(1 for _ in inputs.shape[2:])) if inputs.ndim > 2 else (1, 1)
    tries = {
        "--preprocess mean=0,std=255": inputs / 255,
        "--preprocess mean=0,std=0.00392157": inputs * 255,
        "--preprocess mean=0.5,std=0.5": (inputs - 0.5) / 0.5,
        "--preprocess mean=127.5,std=127.5": (inputs - 127.5) / 127.5,
        f"--preprocess mean={flat},std={spread}": (inputs - mean.view(shape)) / std.view(shape).clamp(min=1e-12),
    }
    best, words = 0.0, ""
    for option, other in tries.items():
        right = float((logits_of(model, other).argmax(1) == labels).double().mean())
        if right > best:
            best, words = right, option
    # Several are tried, and the groups are not small: twice chance is no accident.
    return f"with {words} it is right on {best:.1%}" if best > max(0.5, 2 * chance) else ""


def sentences(found: Sequence[Remark]) -> list[str]:
    """Remarks as lines, those that stop first."""
    return [f"{'stop' if one.stop else 'note'}: {one.sentence}" for one in sorted(found, key=lambda one: not one.stop)]
