"""Submissions on a site: those that count with their rows, those set aside with the reason, and the page of each."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..board.content import Footnotes, at_least, seeds_words
from ..board.rows import Row
from ..exports.safe_text import portable
from ..metrics import columns
from ..page.build import render_page
from ..page.figures import epsilon_words
from ..page.tables import flags_of, value
from ..records.files import digest_of_bytes, read_bytes
from ..records.folder import ArraysKey, arrays_key
from ..records.record import Record
from ..submissions.attack_cells import attack_cells, comparison_words, difference_words
from ..submissions.check import CheckedSubmission, Rules, check_tree
from ..submissions.rows import NamedRecords, drift_lines, named_records
from ..submissions.signature import SIGNATURE
from ..submissions.tiers import evidence_of
from . import links
from .site import Site, SiteRow, SubmissionOnSite

LARGEST_SHOWN = 64 * 1024
"""Bytes of a method's file up to which its text is on the page."""


@dataclass(frozen=True)
class SubmissionsRead:
    """Content of a folder of submissions, for a site.

    Attributes:
        submissions: that count.
        refused: path of a submission that was set aside, or of anything else that lies there -> its first fault.
        named: path of a submission that counts -> its records and requests, defenses named with the handle.
        folders: folder of a record's arrays, by `arrays_key`.
        owners: name of a defense, which begins with the handle, and id of a record -> its submission.
    """

    submissions: tuple[SubmissionOnSite, ...]
    refused: dict[str, str]
    named: Mapping[str, NamedRecords]
    folders: dict[ArraysKey, Path]
    owners: dict[tuple[str, str], SubmissionOnSite]

    def owner(self, row: Row) -> SubmissionOnSite | None:
        """Returns the submission of a row; None for a row of published records."""
        # Anybody may write the id of another record.
        return self.owners.get((row.defense.name, row.records[0].id))


def read_submissions(folder: Path, rules: Rules, published: Sequence[Record] = ()) -> SubmissionsRead:
    """Reads and checks the submissions of a folder, as `leakbench submit FOLDER --check` does; no code of them runs.

    Args:
        folder: of the handles' folders.
        rules: of the check, which the command makes (`audit.cli.submit.rules_of`).
        published: records of the board, which judge the attacks and are compared with the suite's own methods.
    """
    checked, others = check_tree(folder, rules)
    refused = {fault.file: fault.problem for fault in others if fault.severity == "refused"}
    for bad in checked:
        if not bad.counts:
            fault = next(fault for fault in bad.faults if fault.severity == "refused")
            file = fault.file.removeprefix(f"{bad.path}/") if fault.file != bad.path else ""
            refused[bad.path] = ", ".join(filter(None, (file, fault.field))) + (": " if file else "") + fault.problem
    counting = [submission for submission in checked if submission.counts]
    named = named_records(counting, published)
    submissions, folders, owners = [], {}, {}
    for good in counting:
        submission = _on_site(good, published, rules.verifiers or folder / "verifiers")
        submissions.append(submission)
        for record in named[good.path].records:
            folders.setdefault(arrays_key(record), good.folder / "records")
            owners[record.defense.name, record.id] = submission
    return SubmissionsRead(tuple(submissions), refused, named, folders, owners)


def _on_site(checked: CheckedSubmission, published: Sequence[Record], verifiers: Path) -> SubmissionOnSite:
    if checked.declaration is None or checked.tier is None:
        raise ValueError(f"submission {checked.path} must count to be shown, and has no declaration")
    stamp, ignored = evidence_of(checked.folder, checked.declaration, verifiers)
    return SubmissionOnSite(
        handle=checked.declaration.handle,
        digest=checked.digest,
        declaration=checked.declaration,
        tier=checked.tier,
        remarks=tuple(portable(fault.problem) for fault in checked.faults),
        checked=checked,
        stamp=stamp,
        ignored=ignored,
        drift=tuple(drift_lines(checked, published)),
        attack_cells=attack_cells(checked),
    )


def submission_page(site: Site, submission: SubmissionOnSite) -> str:
    """Renders the page of a submission.

    Args:
        site: with its rows.
        submission: that counts.
    """
    declaration, notes = submission.declaration, Footnotes()
    rows = [row for row in site.rows if row.submission is not None and _same(row.submission, submission)]
    shown = [
        column for metric, column in columns(written=True)
        if any(row.row.estimates[column.key].value is not None for row in rows)
    ]  # fmt: skip
    path = links.submission_page(submission.handle, submission.digest)
    context = {
        "root": links.root_of(path),
        "submission": submission,
        "declaration": declaration,
        "facts": _facts(submission, rows),
        "suite_page": links.suite_page(declaration.suite) if rows else "",
        "about": _about(submission),
        "tone": "good" if submission.tier.tier == "verified" else "warn",
        "columns": [(column.title or " ".join(column.header), column.unit) for column in shown],
        "lines": [_line(row, [column.key for column in shown], notes) for row in rows],
        "notes": notes,
        "cells": submission.attack_cells,
        "comparison": comparison_words(submission.attack_cells),
        "difference": difference_words,
        "signature": _signature(submission),
        "stamp": submission.stamp,
        "verdicts": _verdicts(submission),
        "drift": submission.drift,
        "differing": sum(line["verdict"] == "differs" for line in submission.drift),
        "command": portable(declaration.command),
        "faults": [portable(str(fault)) for fault in submission.checked.faults] if submission.checked else [],
        "settings": _settings(submission),
        **_method_text(submission),
    }
    return render_page("submission.html", context)


def _same(first: SubmissionOnSite, second: SubmissionOnSite) -> bool:
    return (first.handle, first.digest) == (second.handle, second.digest)


def _about(submission: SubmissionOnSite) -> str:
    """Tier with its reason: the first sentence of the page, so that no number stands before it."""
    reason = submission.tier.reason
    return f"{submission.tier.tier.capitalize()}: {reason}" + ("" if reason.endswith(".") else ".")


def _facts(submission: SubmissionOnSite, rows: Sequence[SiteRow]) -> list[tuple[str, str, str]]:
    records = submission.checked.records if submission.checked else [r for row in rows for r in row.row.records]
    facts = [(submission.tier.tier, "tier", "good" if submission.tier.tier == "verified" else "")]
    facts += [(submission.declaration.kind, "submitted", ""), (str(len(records)), "records", "")]
    facts.append((str(len({record.seed for record in records})), "seeds, from the digest", ""))
    if submission.checked is not None and submission.checked.failed_control:
        facts.append(("failed", "control", "bad"))
    return facts


def _line(site_row: SiteRow, keys: Sequence[str], notes: Footnotes) -> dict[str, Any]:
    row = site_row.row
    return {
        "page": links.row_page(site_row.id),
        "name": row.defense.name,
        "details": row.details,
        "control": (row.control or "").replace("_", " "),
        "rank": "" if row.control else f"{row.rank} of {row.ranked_of}" if row.rank else "n/a",
        "unplaced": row.unplaced,
        "epsilon": epsilon_words(row),
        "tier": site_row.tier.tier,
        "cells": [
            value(estimate, notes, lower_end=metric.of_attack and at_least(row, estimate))
            for metric, column in columns(written=True)
            if column.key in keys and (estimate := row.estimates[column.key])
        ],
        "seeds": seeds_words(row),
        "flags": flags_of(row),
    }


def _settings(submission: SubmissionOnSite) -> str:
    method = submission.declaration.method
    return "" if method is None else ", ".join(f"{name} = {value}" for name, value in method.settings.items())


def _signature(submission: SubmissionOnSite) -> str:
    checked = submission.checked
    if checked is None or not (checked.folder / SIGNATURE).is_file():
        return "not signed: nobody's key vouches for these bytes"
    if any(fault.file.endswith(SIGNATURE) for fault in checked.faults):
        return "signed, and the signature could not be checked: the handle has no public key here"
    return (
        f"signed by a key of {submission.handle}: it vouches for these bytes, and does not show that they were computed"
    )


def _verdicts(submission: SubmissionOnSite) -> list[tuple[str, int]]:
    return sorted(Counter(line.verdict for line in submission.stamp.comparisons).items()) if submission.stamp else []


def _method_text(submission: SubmissionOnSite) -> dict[str, str]:
    """Text of the method's file, or why it is not shown."""
    method, checked = submission.declaration.method, submission.checked
    if method is None or checked is None:
        return {"text": "", "no_text": ""}
    content = read_bytes(checked.folder / method.file, "method file")
    if digest_of_bytes(content) != method.sha256:
        return {"text": "", "no_text": "it has changed since the check"}
    if len(content) > LARGEST_SHOWN:
        return {"text": "", "no_text": f"its {len(content)} bytes are more than this page shows, {LARGEST_SHOWN}"}
    try:
        return {"text": content.decode(), "no_text": ""}
    except UnicodeDecodeError:
        return {"text": "", "no_text": "it is not in UTF-8"}
