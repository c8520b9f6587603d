"""Tiers: how far the numbers of a row were checked by anybody but their submitter."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..records.validation import RecordError
from .declaration import Declaration
from .identity import request_digest
from .stamp import Stamp, read_stamp, why_no_evidence

Tier = Literal["verified", "self-reported", "unverified parts"]
"""From the strongest evidence to the weakest; a row with `unverified parts` rests on code that nobody has checked, so
that computing it again, which runs the same code, shows its numbers and not its claim."""

UNVERIFIED = "unverified_"
"""Prefix of the flags of components that are not leakbench's (`leaderboard/README.md`)."""

IN_PROCESS = f"{UNVERIFIED}file that runs in the process of the training"
"""Flag, of no record, of a defense by a file: its code runs in the process that draws noise, attacks and scores, and
can change what any of them does. An attack by a file runs in a process of its own."""


@dataclass(frozen=True)
class TierOf:
    """Tier of a row.

    Attributes:
        tier: the tier.
        recomputed: whether a trusted verifier computed cells of its submission again, and they agree.
        reason: sentence with the evidence.
    """

    tier: Tier
    recomputed: bool
    reason: str


def tier_of(flags: Iterable[str], stamp: Stamp | None = None, ignored: str = "", by: str = "its submitter") -> TierOf:
    """Returns the tier of a row.

    Args:
        flags: of the row.
        stamp: of its submission; None without one.
        ignored: why the stamp is no evidence; empty if it is.
        by: who computed its numbers.
    """
    parts = sorted({flag.removeprefix(UNVERIFIED) for flag in flags if flag.startswith(UNVERIFIED)})
    recomputed = stamp is not None and not ignored and stamp.holds
    if stamp is None:
        evidence = f"nobody but {by} has computed it"
    elif ignored:
        evidence = f"its stamp is ignored: {ignored}"
    elif not recomputed:
        words = ", ".join(f"{c.metric} of {c.words}" for c in stamp.differing[:3]) or "some cells were not judged"
        evidence = (
            f"{stamp.verifier} computed {stamp.drawn} cells again on {stamp.date}, and they do not agree: {words}"
        )
    else:
        verdicts = Counter(comparison.verdict for comparison in stamp.comparisons)
        counts = ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items()))
        evidence = (
            f"{stamp.verifier} computed {stamp.drawn} of its cells again on {stamp.date} ({stamp.machine}, "
            f"{stamp.code.code}); numbers: {counts}"
        )
    if parts:
        words = f"nobody has checked that these parts of it do what the claim assumes: {', '.join(parts)}"
        return TierOf("unverified parts", recomputed, f"{words}; {evidence}")
    return TierOf("verified" if recomputed else "self-reported", recomputed, evidence)


def evidence_of(folder: Path, declaration: Declaration, verifiers: Path | None) -> tuple[Stamp | None, str]:
    """Returns a submission's stamp and why it is no evidence; a stamp that cannot be read counts as none, with why.

    Args:
        folder: of the submission.
        declaration: of the submission.
        verifiers: the board's file of trusted verifiers.
    """
    try:
        stamp = read_stamp(folder)
    except RecordError as error:
        return None, str(error)
    if stamp is None:
        return None, ""
    return stamp, why_no_evidence(stamp, folder, declaration.handle, request_digest(declaration), verifiers)
