"""Verification of a record (`--verify`): its metrics recomputed from the stored per-example arrays.

These metrics follow from arrays and are compared, each with its interval and the numbers in its detail, such as values
on half of the candidates and the bound behind a verdict:

- utility: accuracy and loss;
- membership: AUC, TPR, advantage, balanced accuracy, implied epsilon, and the lower bound on epsilon;
- canaries: the lower bound on epsilon;
- labels: the overlap with the true labels, its floor, and exact batches;
- reconstruction: PSNR, its floors, the gains over them with the verdict, MSE and SSIM; picks of candidates.

Flags that decide whether a bound is valid have to agree with the rest of the record, and a claim has to follow from its
steps, noise and budget, as has every client's epsilon in the table of a federation. These metrics need more than arrays
and are not compared: LPIPS (weights), label accuracy, coverage and certificates of reconstructions (statements of the
attack), identifiability (the other images), an attack's objective, the cosine of successive updates (stored in no
file), the bounds allowed by a claim, and SSIM if torchmetrics is not installed, here or on the machine that wrote the
record.
"""

from __future__ import annotations

import math
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from leakbench.attacks.core import Controls, Knows
from leakbench.leaderboard.records.arrays import read_table
from leakbench.leaderboard.records.details import AucDetail, ProvedDetail
from leakbench.leaderboard.records.files import read_bytes
from leakbench.leaderboard.records.record import Metric, Record, RecordedRequirements

from ..catalog import methods as catalog
from ..catalog.messages import CatalogError
from ..plan.threat_models import THREAT_MODELS
from ..scoring import canaries, random_split
from ..scoring.shift import LEVEL as SHIFTED
from .claims import OTHER_VERSIONS, claim_fault, clients_fault, messages_fault, proved_claim

OF_EXTRAS = ("ssim", "lpips")
"""Metrics that are null if an optional package is not installed."""

TOLERANCE = 1e-6
"""Relative tolerance of values and interval ends: arrays hold images in single precision."""


def contradiction(record: Record, folder: Path) -> str:
    """Returns the first disagreement between a record and its arrays, as a sentence; empty if all numbers agree.

    Args:
        record: with status "ok".
        folder: folder of its arrays.
    """
    if record.arrays is None:
        return "it names no arrays, so its numbers cannot be computed again"
    if (scoring := find_spec(f"..scoring.{record.kind}", __package__)) is None:
        return f"numbers of {record.kind} cannot be computed again from arrays"
    try:
        table = read_table(read_bytes(folder / record.arrays, "arrays")).to_pandas()
        again = import_module(scoring.name).again(record, table)
    except Exception as error:  # a third-party file may raise any exception
        return f"its arrays {record.arrays} cannot be scored: {' '.join(str(error).split())}"
    if fault := claim_fault(record):
        return fault
    if record.kind == "federation" and (fault := clients_fault(record, table["epsilon"].tolist())):
        return fault
    for name, metric in again.items():
        recorded = record.metrics.get(name)
        if name in OF_EXTRAS and recorded is not None and (_without_an_extra(recorded) or _without_an_extra(metric)):
            continue
        if recorded is None:  # otherwise a record would pass if a wrong number were removed from it
            return f"it has no {name}, and its scores give {_words(metric)}"
        pairs = zip(
            (recorded.value, recorded.low, recorded.high, recorded.n),
            (metric.value, metric.low, metric.high, metric.n),
            strict=True,
        )
        if not all(_same(a, b) for a, b in pairs):
            return f"its {name} is {_words(recorded)}, and its scores give {_words(metric)}"
        # Only keys in both are compared: older records lack numbers that were introduced later.
        for key in metric.detail.keys() & recorded.detail.keys():
            ours, theirs = metric.detail[key], recorded.detail[key]
            if not _equal(ours, theirs):
                return f"the {key} of its {name} is {theirs}, and its scores give {ours}"
    return _unlike_itself(record, again)


def _without_an_extra(metric: Metric) -> bool:
    """True if a metric is missing because an optional package was, here or on the machine that wrote the record."""
    return metric.value is None and "which is not installed" in (metric.reason or "")


def _unlike_itself(record: Record, again: dict[str, Metric]) -> str:
    """Returns a contradiction between a record's flags or knowledge and the rest of it; empty if none.

    Args:
        record: whose metrics agree with its scores.
        again: metrics of its scores.
    """
    if record.attack is not None:
        name = record.attack.name
        # Only attacks of the catalogue are looked up: a method given by path would be executed.
        if name in catalog.names("attacks") and (own := _granted(name)) not in (None, _decisive(record.requires)):
            return f"it says that {name} is given {_decisive(record.requires)}, and {name} is given {own}"
    if fault := messages_fault(record):
        return fault
    if record.kind == "canaries":
        return _unflagged(record, again[canaries.NAME], "canaries", "of a record that is added")
    if record.kind != "membership" or record.attack is None:
        return ""
    bound, auc = again.get(random_split.NAME), AucDetail.of(record.metrics["auc"].detail)
    if record.requires is not None:
        access = record.requires.access
        row = next(
            (row for row in THREAT_MODELS.values() if (row.kind, row.access.name) == ("membership", access)), None
        )
        if row is not None and ("participation_known" in record.flags) != row.participation_known:
            return f"it is flagged participation_known or not against its access, {access}"
    if "shift_p_value" in auc:
        p_value = auc.shift_p_value
        if ("distribution_shift" in record.flags) != (p_value is not None and p_value < SHIFTED):
            return f"it is flagged distribution_shift or not against its p-value, {p_value}"
    if bound is None:
        return ""
    return _unflagged(record, bound, "pairs", "of one record in the place of another")


def _unflagged(record: Record, bound: Metric, evidence: str, relation: str) -> str:
    """Returns a conflict between a proved bound and the claim that the record does not flag; empty if none.

    Args:
        record: with a metric of the bound.
        bound: of the scores.
        evidence: of the bound, for the sentence.
        relation: of the bound, for the sentence.
    """
    name = canaries.NAME if record.kind == "canaries" else random_split.NAME
    recorded, detail = ProvedDetail.of(record.metrics[name].detail), ProvedDetail.of(bound.detail)
    claim, proved = record.claim, detail.value_at_verdict
    least = None if claim is None else claim.epsilon
    if proved is None:
        return ""
    if least is None:
        return (
            "" if recorded.claimed is None else f"its claim is epsilon None, and {relation} it says {recorded.claimed}"
        )
    if claim is None or (record.kind == "canaries" and claim.relation != detail.relation) or claim.unit == "client":
        return ""  # which is not judged, as a claim for clients is not by the membership of one record
    for key in ("value_at_verdict", "claimed"):
        if key not in record.metrics[name].detail:
            return f"its {name} has no {key}, by which its claim is judged"
    allowed = _allowed(record, detail)
    claimed = allowed if recorded.claimed is None else recorded.claimed
    # The bound's epsilon is for replacement, or at a smaller delta, so it is at least the record's own.
    if claimed < least * (1 - TOLERANCE):
        return f"its claim is epsilon {least}, and {relation} it says {claimed}"
    if claimed > allowed * (1 + OTHER_VERSIONS):
        return f"its claim allows an epsilon of {allowed:.4g}, and {relation} it says {claimed:.4g}"
    if proved > claimed and "claim_violated" not in record.flags:
        return f"its {evidence} prove an epsilon of {proved:.4g}, its claim is {claimed:.4g}, and it is not flagged"
    return ""


def _allowed(record: Record, bound: ProvedDetail) -> float:
    """Returns the epsilon that a record's claim allows for the relation and delta of a bound; infinite if unknown."""
    own = proved_claim(record)
    if own is None or record.claim is None or record.claim.epsilon is None:
        return math.inf
    delta = own.delta if bound.delta_at_verdict is None else bound.delta_at_verdict
    replaced = bound.relation == "replace_one"
    allowed = own.epsilon if delta == own.delta and not replaced else own.epsilon_at(delta, replaced=replaced)
    # A claim above what its steps prove allows more.
    return allowed * max(1.0, record.claim.epsilon / own.epsilon) if own.epsilon > 0 else math.inf


def _granted(name: str) -> str | None:
    """Returns the requirements of an attack that decide how its scores are read; None if it is not installed."""
    try:
        return _decisive(RecordedRequirements(catalog.attack(name).requires.to_dict()))
    except CatalogError:
        return None


def _decisive(requires: RecordedRequirements | None) -> str:
    if requires is None:
        return "nothing"
    # Other declared requirements may differ between versions.
    others = " and the others" if Knows.OTHERS.name in requires.knows else ""
    chosen = " and the choice of the model" if Controls.MODEL.name in requires.controls else ""
    return f"{requires.access}{others}{chosen}"


def _same(a: float | None, b: float | None) -> bool:
    return a is b is None or (a is not None and b is not None and math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-9))


def _equal(a: float | str | None, b: float | str | None) -> bool:
    if isinstance(a, str) or isinstance(b, str):  # names of methods may change
        return isinstance(a, str) and isinstance(b, str)
    return _same(a, b)


def _words(metric: Metric) -> str:
    if metric.value is None:
        return "none"
    ends = "" if metric.low is None else f" [{metric.low:.4g}, {metric.high:.4g}]"
    return f"{metric.value:.4g}{ends} of {metric.n}"
