"""Pre-flight checks before any attack: the model, its examples, and the smallest leak that their number could show.

Accuracy at chance is no finding about privacy: preprocessing differs, classes are in another order, or the file is of
another model. The audit then stops. It names the preprocessing or the order of classes under which the model is right,
if there is one, and corrects nothing silently.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from leakbench.attacks.core import Examples
from leakbench.leaderboard.records.audit_findings import SmallestLeak
from leakbench.leaderboard.records.audit_report import PreflightReport, Remark
from leakbench.leaderboard.records.details import CountDetail
from leakbench.leaderboard.records.record import Metric

from ...scoring.shift import Shift, shift_between
from ...scoring.utility import score_utility
from ...targets.observe import logits_of
from ..examples.groups import Groups, Preprocess
from ..examples.overlap import contents, near_duplicates
from .answers import NoLogits, answering_logits
from .diagnosis import Knowledge, another_order, knowledge, other_inputs, unsteady
from .sizes import smallest_leak

ACCEPTABLE = ("chance", "one answer", "preprocessing", "swapped", "few", "near-duplicates", "unsteady")
"""Kinds of remarks that the owner may accept instead of a stop: a model may be meant to be at chance."""

FEW = 10
"""Smallest number of examples per group for an audit."""


class StoppedError(ValueError):
    """Raised if the pre-flight finds an audit meaningless; the message holds all its remarks."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Result of the pre-flight.

    Attributes:
        remarks: all findings.
        accuracy: of members and of non-members.
        shift: distribution shift between them, without the model.
        sizes: the smallest leak that so many examples could show.
        classes: number of the model's classes.
        model: the audited model, or a copy whose answers are converted to logits.
    """

    remarks: tuple[Remark, ...]
    accuracy: dict[str, Metric] = field(default_factory=dict)
    shift: Shift
    sizes: SmallestLeak
    classes: int
    model: nn.Module

    @property
    def stops(self) -> tuple[Remark, ...]:
        """Remarks that end the audit."""
        return tuple(remark for remark in self.remarks if remark.stop)

    @property
    def report(self) -> PreflightReport:
        """The pre-flight's part of a report."""
        return PreflightReport(findings=self.remarks, numbers=self.accuracy)


def preflight(
    model: nn.Module, groups: Groups, *, delta: float = 1e-5, level: float = 0.95, accept: Collection[str] = ()
) -> Preflight:
    """Checks a model and its examples before any attack.

    Args:
        model: in evaluation mode, on the examples' device.
        groups: preprocessed as for the model.
        delta: of the bound on epsilon.
        level: its confidence.
        accept: kinds of remarks, among `ACCEPTABLE`, that do not stop the audit.

    Returns:
        The remarks, and a model that answers with logits; a remark that stops rules out any attack.

    Raises:
        ValueError: a model that cannot take these inputs, or answers with no logits; a kind that cannot be accepted.
    """
    members, outside = groups.members, groups.non_members
    shape = list(members.inputs.shape[1:])
    try:
        labels = torch.cat([members.labels, outside.labels])
        model, note = answering_logits(model, torch.cat([members.inputs, outside.inputs]), labels)
        answers = [logits_of(model, group.inputs) for group in (members, outside)]
    except NoLogits:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"model must take inputs of shape {shape}, and fails on them: {why}; images lie channels first"
        ) from None
    classes = int(answers[0].shape[1])
    remarks = [*_of_labels(labels, classes), *without_model(groups, accept), *_of_near(groups)]
    if note:
        remarks.append(Remark(kind="form", stop=False, sentence=f"the model is read as one of logits: {note}"))
    remarks += _of_steadiness(model, members.inputs)
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
                    f"members and non-members differ without any model ({shift.words}): "
                    "what attacks find may be that; draw both at random from one pool"
                ),
            )
        )
    return Preflight(
        remarks=tuple(replace(remark, stop=remark.stop and remark.kind not in accept) for remark in remarks),
        accuracy=accuracy,
        shift=shift,
        sizes=smallest_leak(len(members), len(outside), delta, level),
        classes=classes,
        model=model,
    )


def without_model(groups: Groups, accept: Collection[str] = ()) -> list[Remark]:
    """Returns the remarks on the examples alone.

    Args:
        groups: preprocessed as for the model.
        accept: kinds of remarks, among `ACCEPTABLE`, that do not stop the audit.

    Raises:
        ValueError: a kind that cannot be accepted.
    """
    if strange := [kind for kind in accept if kind not in ACCEPTABLE]:
        raise ValueError(f"accept must be of {', '.join(ACCEPTABLE)}, got {strange[0]!r}")
    remarks, labels = [], torch.cat([groups.members.labels, groups.non_members.labels])
    if int(labels.unique().numel()) == 1:
        remarks.append(
            Remark(
                kind="one class",
                stop=True,
                sentence=(
                    f"all examples are of class {int(labels[0])}: accuracy and attacks say nothing of one class alone"
                ),
            )
        )
    remarks += [*_of_inputs(groups), *_of_copies(groups), *_of_sizes(groups.members, groups.non_members)]
    return [replace(remark, stop=remark.stop and remark.kind not in accept) for remark in remarks]


def _of_labels(labels: Tensor, classes: int) -> list[Remark]:
    remarks, largest = [], int(labels.max())
    if largest >= classes:
        remarks.append(
            Remark(
                kind="classes",
                stop=True,
                sentence=(
                    f"labels go from {int(labels.min())} to {largest}, and the model has {classes} classes: labels "
                    f"count from 0{'; subtract 1' if (int(labels.min()), largest) == (1, classes) else ''}"
                ),
            )
        )
    return remarks


def _of_steadiness(model: nn.Module, inputs: Tensor) -> list[Remark]:
    if (unsteadiness := unsteady(model, inputs)) is None:
        return []
    sentence = (
        f"the model answers {unsteadiness.moved} of {unsteadiness.compared} members otherwise when it is "
        f"{unsteadiness.condition}; audit it in evaluation mode (--accept unsteady where it is used like this)"
    )
    return [Remark(kind="unsteady", stop=True, sentence=sentence)]


def _of_sizes(members: Examples, outside: Examples) -> list[Remark]:
    least = min(len(members), len(outside))
    if least >= 100:
        return []
    sizes = smallest_leak(len(members), len(outside))
    ceiling = sizes.epsilon_ceiling
    bound = f"at most {ceiling:.2f}" if ceiling is not None else "nothing"
    return [
        Remark(
            kind="few",
            stop=least < FEW,
            sentence=(
                f"{len(members)} members and {len(outside)} non-members show an AUC from {sizes.auc:.2f} on, no TPR "
                f"at low false positive rates, and {bound} of epsilon; take 1,000 of each, at least {FEW}"
            ),
        )
    ]


def _of_inputs(groups: Groups) -> list[Remark]:
    """Returns remarks on inputs that are constant, all together or each by itself."""
    both = [groups.members.inputs, groups.non_members.inputs]
    if max(float(part.max()) for part in both) == min(float(part.min()) for part in both):
        value = float(both[0].flatten()[0])
        return [Remark(kind="constant", stop=True, sentence=f"all inputs are {value:g} everywhere: they hold nothing")]
    rows = [part.flatten(1) for part in both]
    blank = sum(int((part == part[:, :1]).all(1).sum()) for part in rows)
    if not blank or rows[0].shape[1] == 1:
        return []
    total = sum(map(len, rows))
    return [Remark(kind="blank", stop=False, sentence=f"{blank} of {total} inputs have one value everywhere")]


def _of_copies(groups: Groups) -> list[Remark]:
    """Returns remarks on examples that are in two groups, or twice in a group."""
    by_name = {"members": groups.members, "non-members": groups.non_members, "population": groups.population}
    present = {name: group for name, group in by_name.items() if group is not None}
    keys = dict(zip(present, contents([group.inputs for group in present.values()]), strict=True))
    remarks = []
    for first, second in (("members", "non-members"), ("population", "members"), ("population", "non-members")):
        if first not in keys or second not in keys:
            continue
        shared = len(np.intersect1d(keys[first], keys[second]))
        if not shared:
            continue
        smaller = min(len(np.unique(keys[first])), len(np.unique(keys[second])))
        words = "the very same examples" if shared == smaller else f"{shared} examples in common"
        way_out = "" if shared == smaller else "; leave them out (--drop-overlap)"
        sentence = f"{first} and {second} have {words}; an example is in one group{way_out}"
        remarks.append(Remark(kind="overlap", stop=True, sentence=sentence))
    for name, own in keys.items():
        if (twice := len(own) - len(np.unique(own))) > 0:
            remarks.append(
                Remark(
                    kind="duplicates",
                    stop=False,
                    sentence=f"{twice} of {len(own)} {name} are copies of others: intervals count them as independent",
                )
            )
    return remarks


def _of_near(groups: Groups) -> list[Remark]:
    """Returns remarks on members with near-duplicates among the non-members."""
    remarks = []
    near = near_duplicates(groups.members.inputs, groups.non_members.inputs)
    if near.compared < near.of and not near.count and near.compared:
        sentence = f"near-duplicates were sought among {near.compared} of {near.of} members, and none was found"
        remarks.append(Remark(kind="near-duplicates", stop=False, sentence=sentence))
    if near.count:
        of = "" if near.compared == near.of else f", of {near.compared} of {near.of} that were compared"
        remarks.append(
            Remark(
                kind="near-duplicates",
                # No number is meaningful if the groups are copies of each other.
                stop=2 * near.count > near.compared,
                sentence=(
                    f"{near.count} members have a near-duplicate among the non-members{of}, which the model has all "
                    "but seen: leaks look smaller than they are"
                ),
            )
        )
    return remarks


def _of_accuracies(accuracy: dict[str, Metric]) -> list[Remark]:
    """Returns a remark if accuracy is lower on members than on non-members, by Fisher's exact test."""
    inside, outside = accuracy["members"], accuracy["non_members"]
    counts = [(CountDetail.of(metric.detail).correct, int(metric.n or 0)) for metric in (inside, outside)]
    (right, n), (right_outside, n_outside) = counts
    # Hypergeometric, given the total number of right answers.
    if float(stats.hypergeom.cdf(right, n + n_outside, right + right_outside, n)) >= 1e-3:
        return []
    return [
        Remark(
            kind="swapped",
            stop=True,
            sentence=(
                f"accuracy is {inside.value:.1%} on members and {outside.value:.1%} on non-members: a model is no "
                "worse on what it was trained on; are the two groups exchanged? (--accept swapped where they are not)"
            ),
        )
    ]


def _of_answers(model: nn.Module, groups: Groups, answers: Tensor, labels: Tensor, classes: int) -> list[Remark]:
    """Returns remarks on undefined answers and on accuracy at chance, with the correction if one is found."""
    undefined = int((~answers.isfinite()).any(1).sum())
    if undefined:
        kind = "NaN" if bool(answers.isnan().any()) else "infinity"
        sentence = f"the model answers {kind} for {undefined} of {len(labels)} examples"
        return [Remark(kind="NaN", stop=True, sentence=sentence)]
    guesses = answers.argmax(1)
    knows = knowledge(guesses, labels, classes)
    remarks = []
    largest = float(groups.members.inputs.abs().max())
    if largest > 16:
        remarks.append(
            Remark(
                kind="range",
                stop=not knows.known,
                sentence=(
                    f"inputs go up to {largest:g}, as of images in 0..255: models are fed inputs of 0 to 1, or "
                    f"standardised; pass --preprocess {groups.preprocess.then(_BYTES)}, or as in the training"
                ),
            )
        )
    if int(guesses.unique().numel()) == 1:
        remarks.append(
            Remark(
                kind="one answer",
                stop=True,
                sentence=f"the model answers class {int(guesses[0])} for all {len(labels)} examples: are they scaled "
                "otherwise?",
            )
        )
    return [*remarks, *_of_knowledge(model, groups, guesses, labels, classes, knows)]


def _of_knowledge(
    model: nn.Module, groups: Groups, guesses: Tensor, labels: Tensor, classes: int, knows: Knowledge
) -> list[Remark]:
    share = knows.right / knows.n
    summary = (
        f"the model is right on {share:.1%} of the examples, where always answering one class is on {knows.chance:.1%}"
    )
    if (order := another_order(guesses, labels, classes)) is not None:
        moved = ", ".join(f"{i} is the model's {j}" for i, j in list(order.places.items())[:5])
        sentence = f"{summary}: its classes are in another order, with which it is right on {order.share:.1%}: {moved}"
        return [Remark(kind="order", stop=True, sentence=sentence)]
    # An untrained network may by accident be right 1.5 times as often as a constant answer.
    weak = share < 2 * knows.chance and knows.agreement < 0.3
    if knows.known and not weak and share >= 0.9:
        return []
    inputs = torch.cat([groups.members.inputs, groups.non_members.inputs])
    if (rescaled := other_inputs(model, inputs, labels, groups.preprocess)) is not None:
        scale, now, then = rescaled
        summary = f"{summary}: with --preprocess {scale} it is right on {then:.1%} of some, and as it is on {now:.1%}"
        return [Remark(kind="preprocessing", stop=True, sentence=summary)]
    if knows.known and not weak:
        return []
    if knows.known:
        sentence = f"{summary}: if it is better than that, preprocessing, class order or the file is another one"
        return [Remark(kind="weak", stop=False, sentence=sentence)]
    if knows.undecided:
        sentence = f"{summary}, and {knows.n} examples are too few to tell a model from one that knows nothing"
        return [Remark(kind="undecided", stop=False, sentence=sentence)]
    way_out = "preprocessing, class order or the file is not that of the training (--accept chance where it is)"
    return [Remark(kind="chance", stop=True, sentence=f"{summary}: {way_out}")]


_BYTES = Preprocess(std=(255.0,))


def sentences(remarks: Sequence[Remark]) -> list[str]:
    """Returns remarks as lines, those that stop first."""
    return [
        f"{'stop' if remark.stop else 'note'}: {remark.sentence}"
        for remark in sorted(remarks, key=lambda remark: not remark.stop)
    ]


def refuse_stops(remarks: Sequence[Remark]) -> None:
    """Ends an audit that would be meaningless.

    Raises:
        StoppedError: a remark stops it; the message holds all remarks.
    """
    if any(remark.stop for remark in remarks):
        raise StoppedError("the audit stops before any attack:\n" + "\n".join(sentences(remarks)))
