"""Verdict of the audit of a shared update: a word and a sentence.

Four words, from the strongest to the weakest. `leaks`: an input is proved to be in the batch, or a candidate is shown
to have been in it. `something recovered`: labels, or inputs that explain the update better than every public guess; the
ground truth is unknown here, so the owner has to look. `no leak shown`: no attack that ran returned more than a public
guess. `cannot be told`: no attack on labels or inputs could run, the file's convention is unknown, or the owner's
labels contradict the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from leakbench.attacks.core import LabelEstimate, Reconstruction
from leakbench.leaderboard.records.update_report import GuessComparison, UpdateVerdict

from .attacks import UpdateFinding

FALSE_DISCOVERIES = 0.05
"""Expected share of non-members among the candidates reported to have been in the batch."""


def verdict_of(
    findings: Sequence[UpdateFinding],
    compared: Mapping[str, GuessComparison],
    names: Sequence[str],
    rate: float,
    *,
    doubt: str = "",
) -> UpdateVerdict:
    """Returns the verdict of an audit.

    Args:
        findings: results of the attacks.
        compared: by attack, comparison of its reconstruction with guesses; only of attacks that returned inputs.
        names: of the candidates.
        rate: false discovery rate of an attack on candidates.
        doubt: why no result can be trusted: the gradient cannot be read, its convention is unknown, or the owner's
            labels contradict it; empty otherwise.
    """
    certain, recovered = _certain(findings, names, rate), _recovered(findings, compared)
    if certain:
        also = f" Not proved: {'; '.join(recovered)}." if recovered else ""
        return UpdateVerdict(word="leaks", sentence=f"This update leaks: {'; '.join(certain)}.{also}")
    if doubt:
        also = f" What attacks return all the same: {'; '.join(recovered)}." if recovered else ""
        return UpdateVerdict(
            word="cannot be told", sentence=f"What this update leaks is not known: {doubt.rstrip('.')}.{also}"
        )
    if recovered:
        return UpdateVerdict(
            word="something recovered",
            sentence=f"{_capital('; '.join(recovered))}. Nothing of it is proved: the owner must look.",
        )
    tested = any(finding.q_values for finding in findings)
    nobody = f"none of {len(names)} candidates is shown to have been in it" if tested else "nobody was asked about"
    if not any(finding.result is not None and finding.kind in ("reconstruction", "labels") for finding in findings):
        return UpdateVerdict(
            word="cannot be told",
            sentence=f"No attack on inputs or labels ran, so what this update leaks is not known; {nobody}.",
        )
    ran = f"{sum(finding.result is not None for finding in findings)} of {len(findings)} attacks ran"
    return UpdateVerdict(word="no leak shown", sentence=f"{ran}, and none returned more than a public guess; {nobody}.")


def _certain(findings: Sequence[UpdateFinding], names: Sequence[str], rate: float) -> list[str]:
    """Lists results proved of the batch, or shown by a test."""
    proved = {
        finding.name: int(finding.result.certified.sum())
        for finding in findings
        if isinstance(finding.result, Reconstruction) and finding.result.certified is not None
    }
    best = max(proved, key=lambda name: proved[name], default="")
    shown, sentences = set[int]().union(*(shown_places(finding, rate) for finding in findings)), []
    if best and proved[best]:
        sentences.append(
            f"{_counted(proved[best], 'input')} of the batch reconstructed and proved to be in it ({best})"
        )
    if shown:
        sentences.append(
            f"{len(shown)} of {len(names)} candidates shown to have been in the batch, at a false discovery rate of "
            f"{FALSE_DISCOVERIES:.0%}"
        )
    return sentences


def _recovered(findings: Sequence[UpdateFinding], compared: Mapping[str, GuessComparison]) -> list[str]:
    """Lists unproved results better than a public guess: labels, then the inputs that explain the update best."""
    sentences = []
    for finding in findings:
        if not isinstance(finding.result, LabelEstimate):
            continue
        # If several counts are possible, only labels common to all of them.
        counts = finding.result.counts if finding.result.status == "ok" else finding.result.lower
        if named := [label for label, count in enumerate(counts.tolist()) for _ in range(count)]:
            labels = ", ".join(map(str, named[:_LABELS])) + (", ..." if len(named) > _LABELS else "")
            sentences.append(f"{_counted(len(named), 'label')} recovered by {finding.name}: {labels}")
    better = {name: comparison for name, comparison in compared.items() if comparison.better}
    # Proved inputs are already reported, and inspection adds nothing to a proof.
    proved = {
        finding.name
        for finding in findings
        if isinstance(finding.result, Reconstruction)
        and finding.result.certified is not None
        and bool(finding.result.certified.all())
    }
    if unproved := {name: comparison for name, comparison in better.items() if name not in proved}:
        best = min(unproved, key=lambda name: unproved[name].unexplained)
        counts = {
            finding.name: len(finding.result.inputs)
            for finding in findings
            if isinstance(finding.result, Reconstruction)
        }
        other_attacks = [name for name in unproved if name != best]
        sentences.append(
            f"look at the {_counted(counts[best], 'input')} of {best}{_other_attacks_words(other_attacks)}, which "
            f"{left_words(unproved[best])}"
        )
    return sentences


_LABELS = 12
"""Most labels named in the sentence."""


def left_words(comparison: GuessComparison) -> str:
    """Describes a reconstruction's comparison with guesses."""
    kind = "public guesses" if comparison.public else "guesses without public examples"
    return (
        f"leave {comparison.unexplained:.2g} of the update unexplained; the best of {comparison.guesses} {kind} leaves "
        f"{comparison.guessed:.2g}"
    )


def _other_attacks_words(names: Sequence[str]) -> str:
    return f" (and of {', '.join(names)})" if names else ""


def contradicted_labels(findings: Sequence[UpdateFinding], stated: Sequence[int] | None) -> str:
    """Returns why the owner's labels cannot be those of the batch; empty if they can.

    Args:
        findings: results of the attacks.
        stated: labels of the batch; None if the owner gave none.
    """
    for finding in findings:
        if stated is None or not isinstance(finding.result, LabelEstimate):
            continue
        counts = torch.bincount(torch.tensor(list(stated)), minlength=len(finding.result.counts)).to(
            finding.result.counts
        )
        if len(counts) > len(finding.result.counts) or bool(
            ((counts < finding.result.lower) | (counts > finding.result.upper)).any()
        ):
            return (
                f"--labels {', '.join(map(str, stated))} cannot be those of the batch, by {finding.name}, which names "
                f"{', '.join(map(str, finding.result.labels.tolist())) or 'none of them'}; attacks were given wrong "
                "labels"
            )
    return ""


def rate_of(findings: Sequence[UpdateFinding]) -> float:
    """Returns the false discovery rate of each attack with q-values: equal parts of `FALSE_DISCOVERIES`."""
    return FALSE_DISCOVERIES / max(1, sum(bool(finding.q_values) for finding in findings))


def shown_places(finding: UpdateFinding, rate: float) -> set[int]:
    """Returns the indices of candidates that an attack shows to have been in the batch."""
    return {place for place, q in enumerate(finding.q_values) if q <= rate}


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
