"""Audit of a watched training: its transcript against the claim, with the finished model or by itself.

Without the model, noise, steps and divisors are compared with the claim. With the model, its members and canaries, the
model must follow from the transcript, and attacks that read updates run, too.
"""

from __future__ import annotations

from collections.abc import Callable

from leakbench.leaderboard.records.audit_report import AuditReport, WatchedTrainingReport

from ..model.attack_requirements import AuditPlan
from ..model.command import audit_checkpoint, describe
from ..request import TranscriptAuditRequest
from .canaries import read_canaries
from .claim import judge_transcript
from .format import read_transcript


def audit_transcript(request: TranscriptAuditRequest, tell: Callable[[str], None]) -> AuditReport:
    """Audits a finished model with its transcript, which is also compared with the claim.

    Args:
        request: of the audit, with a finished model.
        tell: called with a line for each stage.

    Raises:
        StoppedError: the pre-flight finds that an audit of the model would be meaningless.
        ValueError: an invalid file, option or model.
    """
    transcript = read_transcript(request.transcript)
    canaries = None if request.canaries is None else read_canaries(request.canaries)
    return audit_checkpoint(request.model, tell, transcript=transcript, canaries=canaries)


def judge_alone(request: TranscriptAuditRequest, tell: Callable[[str], None]) -> WatchedTrainingReport:
    """Tests a claim against a transcript, without the model.

    Args:
        request: of the audit.
        tell: called with a line for each stage.

    Raises:
        ValueError: an invalid transcript.
    """
    tell("transcript")
    verdict = judge_transcript(read_transcript(request.transcript), request.claim, level=request.settings.level)
    return WatchedTrainingReport(
        verdict=verdict.report(refuted=verdict.word == "violation"), claim=request.claim.report
    )


def describe_transcript(request: TranscriptAuditRequest) -> AuditPlan:
    """Returns what an audit of the transcript and the model would run; see `describe`.

    Args:
        request: of the audit, with a finished model.
    """
    read_transcript(request.transcript)
    if request.canaries is not None:
        read_canaries(request.canaries)
    return describe(request.model, transcript=True)
