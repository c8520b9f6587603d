"""Content of a site, from which all of its pages are made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..board.rows import Row
from ..board.table import Board
from ..exports.publication import Publication
from ..page.papers import PaperExplanation
from ..records.folder import ArraysKey
from ..submissions.attack_cells import AttackCell
from ..submissions.check import CheckedSubmission
from ..submissions.declaration import Declaration
from ..submissions.stamp import Stamp
from ..submissions.tiers import TierOf

OTHER = "other"
"""Family of a defense that is not in the guide, such as one by a file."""


@dataclass(frozen=True, kw_only=True)
class MethodWords:
    """Description of a defense or an attack, for pages about it.

    Attributes:
        summary: a sentence.
        source: paper or section; empty for none.
        family: of a defense, the part of a step that it changes, as "codec"; of an attack empty.
    """

    summary: str
    source: str = ""
    family: str = ""


@dataclass(frozen=True)
class Guide:
    """Descriptions of methods and suites by name, which the caller takes from the catalogue.

    `leaderboard` must not import the packages of the methods, so it receives what it says about them.
    """

    defenses: Mapping[str, MethodWords] = field(default_factory=dict)
    attacks: Mapping[str, MethodWords] = field(default_factory=dict)
    suites: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SubmissionOnSite:
    """Submission that counts, as its page and rows name it.

    Attributes:
        handle: of the submitter.
        digest: of the request.
        declaration: of the submission.
        tier: of its rows, by the evidence of its stamp.
        remarks: sentences on what a check flagged.
        checked: all of it, as it was checked; None in tests of pages about other things.
        stamp: of a verification, if any.
        ignored: why the stamp is no evidence; empty if it is.
        drift: of the suite's own methods, a comparison with the published records for each cell.
        attack_cells: of an attack, its own numbers beside the strongest other attack's.
    """

    handle: str
    digest: str
    declaration: Declaration
    tier: TierOf
    remarks: tuple[str, ...] = ()
    checked: CheckedSubmission | None = None
    stamp: Stamp | None = None
    ignored: str = ""
    drift: tuple[Mapping[str, Any], ...] = ()
    attack_cells: tuple[AttackCell, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SiteRow:
    """Row of the board with what a site adds to it.

    Attributes:
        id: permanent (`board.identity.row_id`).
        row: of the board.
        tier: how far its numbers were checked by others.
        submission: from which it comes; None for records of RESULTS.
    """

    id: str
    row: Row
    tier: TierOf
    submission: SubmissionOnSite | None = None


@dataclass(frozen=True, kw_only=True)
class Site:
    """All that a site shows.

    Attributes:
        board: of all records, controls included.
        rows: of the board, in its order.
        folders: of records' arrays, by `arrays_key`.
        guide: descriptions of methods and suites.
        publication: what the publisher states.
        explanations: of differences from papers' figures.
        submissions: that count.
        refused: path of a submission that was set aside -> why.
    """

    board: Board
    rows: tuple[SiteRow, ...]
    folders: Mapping[ArraysKey, Path]
    guide: Guide
    publication: Publication
    explanations: tuple[PaperExplanation, ...] = ()
    submissions: tuple[SubmissionOnSite, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
