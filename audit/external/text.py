"""Reports of audits as text for the terminal: models and scores, plans of `--describe`, shared updates."""

from __future__ import annotations

from leakbench.leaderboard.records.audit_findings import EpsilonBound, NoBound
from leakbench.leaderboard.records.audit_report import AuditReport, ScoreMetric, ScoresReport, WatchedTrainingReport
from leakbench.leaderboard.records.record import Metric
from leakbench.leaderboard.records.update_report import (
    JudgedCandidates,
    ReconstructedInputs,
    RecoveredLabels,
    UpdateAttack,
    UpdateReport,
)

from .model.attack_requirements import AuditPlan
from .update.verdict import left_words


def audit_text(report: AuditReport | ScoresReport) -> str:
    """Formats the verdict, a line per attack, and the bound on epsilon."""
    lines = [f"{report.verdict.headline}: {report.verdict.sentence}", ""]
    names = ("auc", "tpr_at_1pct_fpr", "tpr_at_0.1pct_fpr")
    ran = [attack for attack in report.attacks if attack.metrics]
    width = max((len(attack.name) for attack in ran), default=6)
    lines.append("attack".ljust(width) + "  AUC                   TPR at 1 % FPR        TPR at 0.1 % FPR")
    for attack in ran:
        cells = [_cell(attack.metrics.get(name)) for name in names]
        lines.append(attack.name.ljust(width) + "  " + "  ".join(cell.ljust(20) for cell in cells).rstrip())
    lines.append("")
    bound = report.epsilon
    if isinstance(bound, NoBound):
        lines.append(f"epsilon: no bound, for {bound.why_not}")
    else:
        kind = "at least" if bound.split == "random" else "if members and non-members were exchangeable, at least"
        lines.append(
            f"epsilon: {kind} {bound.value:.2f} (replace-one, delta {bound.delta:.2g}, {bound.percent}; {bound.attack} "
            f"right in {bound.correct} of {bound.guessed}; {bound.ceiling:.2f} at most could have been shown)"
        )
        if bound.claimed is not None:
            judged = "refuted" if bound.refutes else "not by this bound" if report.verdict.refuted else _power(bound)
            lines.append(f"claim:   allows {bound.claimed:.2f}: {judged}")
    if isinstance(report, AuditReport):
        lines += [f"transcript: {sentence}" for sentence in (report.transcript.sentences if report.transcript else ())]
        lines += [f"not tested: {sentence}" for sentence in report.not_tested]
    return "\n".join(lines)


def _power(bound: EpsilonBound) -> str:
    if bound.split != "random":
        return "not judged, for nobody says that the split was random (--split random)"
    if bound.needed is None:
        return "no violation found, and with so many pairs none could have been; take more members and non-members"
    return (
        "no violation found; one would have been in four audits of five if the attack were right in "
        f"{bound.needed:.1%} of its answers, and it was in {bound.share:.1%}"
    )


def _cell(metric: Metric | ScoreMetric | None) -> str:
    if metric is None or metric.value is None:
        return "n/a"
    ends = "" if metric.low is None else f" [{metric.low:.3f}, {metric.high:.3f}]"
    return f"{metric.value:.3f}{ends}"


def plan_text(plan: AuditPlan) -> str:
    """Formats the answer of `--describe`: sources, attacks with their unmet requirements, the smallest leak shown."""
    lines = [f"{name}: {source.n} of {source.source}" for name, source in plan.sources.items()]
    for attack in plan.attacks:
        needs = f": needs {attack.needs}" if attack.needs else ""
        lines.append(f"{'runs ' if attack.runs else 'skips'} {attack.name}{needs}")
    least = plan.smallest_leak
    rates = ", ".join(
        f"TPR at {words} FPR {'n/a (more members and non-members)' if rate is None else f'{rate:.3f}'}"
        for rate, words in ((least.tpr_at_1pct_fpr, "1 %"), (least.tpr_at_01pct_fpr, "0.1 %"))
    )
    proved = "n/a (10 pairs at least)" if least.epsilon_ceiling is None else f"{least.epsilon_ceiling:.2f}"
    lines.append(
        f"smallest leak that would show in four audits of five: AUC {least.auc:.3f}, {rates}; epsilon proved at "
        f"most {proved} from {least.pairs} pairs, by the best of {least.attacks} attacks"
    )
    return "\n".join(lines)


def update_text(report: UpdateReport) -> str:
    """Formats the results: the verdict, the notes, and a line per attack."""
    lines = [f"{report.verdict.word}: {report.verdict.sentence}", "", *(f"note: {note}" for note in report.notes)]
    return "\n".join([*lines, *map(attack_text, report.attacks)])


def attack_text(attack: UpdateAttack) -> str:
    """Formats the result of an attack on an update in a line."""
    match attack:
        case ReconstructedInputs():
            proved = "" if attack.certified is None else f", {attack.certified} of them proved to be in the batch"
            if attack.expected_error is not None:
                proved += (
                    f", expected to be off by {attack.expected_error:.2g} or less (root mean square) under this noise"
                )
            if attack.beside_guesses is not None:
                proved += f"; they {left_words(attack.beside_guesses)}"
            return f"{attack.name}: {attack.images} input(s) reconstructed ({attack.status}{proved})"
        case RecoveredLabels():
            labels = ", ".join(f"{label} x{count}" for label, count in attack.labels.items())
            return f"{attack.name}: labels {labels or 'none'}"
        case JudgedCandidates():
            sure = attack.shown
            shown = ", ".join(sure[:20]) + (" ..." if len(sure) > 20 else "")
            # Candidates not shown to have been in the batch may have been in it.
            return (
                f"{attack.name}: {len(sure)} of {len(attack.candidates)} candidates shown to have been in it, at a "
                f"false discovery rate of {100 * attack.false_discovery_rate:.3g} %{': ' + shown if sure else ''}"
            )
        case _:
            return f"not tested: {attack.why_not}"


def transcript_text(report: WatchedTrainingReport) -> str:
    """Formats the verdict of a transcript alone, its remarks, and the tests left out."""
    verdict = report.verdict
    lines = [f"{verdict.word}: {verdict.sentence}"]
    lines += [f"transcript: {sentence}" for sentence in (*verdict.problems, *verdict.remarks)]
    lines += [f"not tested: {sentence}" for sentence in verdict.skipped]
    lines.append("not tested: the finished model: pass --checkpoint, --model, --members and --non-members")
    return "\n".join(lines)
