"""The page of a submission: nothing on it flatters, and no text of a stranger is markup."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leakbench.leaderboard.board.identity import row_id
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.exports.publication import Publication
from leakbench.leaderboard.records.folder import Completeness
from leakbench.leaderboard.site.front import front_page
from leakbench.leaderboard.site.site import Guide, MethodWords, Site, SiteRow, SubmissionOnSite
from leakbench.leaderboard.site.submissions import LARGEST_SHOWN, submission_page
from leakbench.leaderboard.submissions.attack_cells import attack_cells
from leakbench.leaderboard.submissions.check import CheckedSubmission, Fault
from leakbench.leaderboard.submissions.rows import as_submitted, beside, named_records
from leakbench.leaderboard.submissions.stamp import CellComparison, Stamp
from leakbench.leaderboard.submissions.tiers import tier_of

from ..conftest import asked_for, metric, provenance, record
from ..submissions.declarations import declaration

SOURCE = b"def by_loss():\n    '''</code></pre><script>alert(1)</script>'''\n"


def page(folder: Path, *records, **fields: Any):
    site = site_of(folder, *records, **fields)
    return submission_page(site, site.submissions[0])


def site_of(folder: Path, *records, kind="attack", source=SOURCE, faults=(), stamp=None, ignored="", **words: Any):
    """A site of one submission of bob."""
    folder = folder / "bob" / "0"
    folder.mkdir(parents=True)
    (folder / "mine.py").write_bytes(source)
    method = {"file": "mine.py", "function": "by_loss", "sha256": hashlib.sha256(source).hexdigest()}
    declared = declaration(handle="bob", kind=kind, method=method, **words)
    checked = CheckedSubmission("bob/0", folder, declared, "0" * 32, records, faults, manifests=(asked_for(*records),))
    named = named_records([checked], [])
    board = beside(None, named)
    tier = tier_of([], stamp, ignored)
    shown = SubmissionOnSite(
        handle="bob", digest="0" * 32, declaration=declared, tier=tier, checked=checked, stamp=stamp, ignored=ignored,
        attack_cells=attack_cells(checked),
    )  # fmt: skip
    rows = tuple(SiteRow(id=row_id(row), row=row, tier=tier, submission=shown) for row in board.rows)
    return Site(board=board, rows=rows, folders={}, guide=GUIDE, publication=Publication(), submissions=(shown,))


GUIDE = Guide(defenses={"dp_sgd": MethodWords(summary="s", family="bound")})


def records(attack="mine.py:by_loss", **fields):
    return (
        record("utility", **fields),
        record(attack=attack, metrics={"auc": metric(0.6, 0.05)}, **fields),
        record(attack="other", metrics={"auc": metric(0.8, 0.05)}, **fields),
    )


def stamp(verdict: Any = "identical"):
    line = CellComparison(
        cell="0" * 16, words="dp_sgd x <b>other</b>", seeds="same", metric="auc", reported=0.6, again=0.61,
        verdict=verdict, main=True, reason="<i>rule</i>",
    )  # fmt: skip
    digests: dict[str, Any] = {name: "0" * 64 for name in ("request", "declaration", "results")}
    return Stamp(
        **digests, verifier="grace", date="2026-11-28", machine="cpu <u>", code=provenance(), salt="s", drawn=1,
        cells=("0" * 16,), comparisons=(line,),
    )  # fmt: skip


def test_the_tier_stands_first_and_beside_every_row_and_the_attack_beside_a_stronger_one(tmp_path):
    text = page(tmp_path, *records())
    assert text.index("Self-reported: nobody but its submitter has computed it") < text.index('id="rows"')
    body = text[text.index('id="rows"') : text.index('id="attack"')]
    assert body.count("bob/dp_<wbr>sgd") == 1 and body.count('class="flag warn">self-reported') == 1
    own = text[text.index('id="attack"') : text.index('id="declaration"')]
    assert "0.600 [0.550, 0.650]" in own and "0.800 [0.750, 0.850]" in own and "-0.200 (no interval: one seed)" in own
    assert "Self-reported: these are the submitter" in own


def test_the_heading_names_what_was_submitted(tmp_path):
    text = page(tmp_path, *records())
    assert "attack by_loss, to" in " ".join(re.findall(r'class="eyebrow".*?</p>', text, re.DOTALL)[0].split())


def test_a_worst_case_without_all_attacks_is_a_least_here_as_on_the_board(tmp_path):
    failed = record(attack="lira", status="failed", reason="out of memory")
    assert "≥0.800" in page(tmp_path / "failed", *records(), failed) and "≥0.800" not in page(tmp_path, *records())


def test_the_front_page_counts_a_suites_method_once_and_says_where_the_ranks_of_a_submission_hold(tmp_path):
    site = site_of(tmp_path, *records(), *records(defense="dp_sgd", defense_settings={"clip_norm": 2.0}))
    own = [record(metrics={"auc": metric(0.6, 0.02)})]
    published = Board.from_records(own, Completeness((asked_for(*own),)))
    rows = tuple(SiteRow(id=row_id(row), row=row, tier=tier_of([])) for row in published.rows)
    text = front_page(replace(site, rows=(*rows, *site.rows)))
    assert re.search(r"<dt>defenses</dt>\s*<dd[^>]*>1</dd>", text), "bob/dp_sgd is dp_sgd"
    assert text.count('data-family="bound"') == len(rows) + len(site.rows)
    assert "its rank and ◆ are among the rows of that submission alone" in text
    assert "of that submission alone" not in front_page(replace(site, rows=rows))


def test_no_text_of_a_stranger_is_markup(tmp_path):
    faults = (Fault(file="bob/0/<b>", field="<i>", problem="<script>alert(2)</script>", severity="flagged"),)
    text = page(tmp_path, *records(defense="<script>x"), faults=faults, stamp=stamp(), ignored="<script>y", who="A & B")
    assert "&lt;script&gt;alert(1)" in text and "A &amp; B" in text
    for hostile in ("<script>alert", "<script>x", "<script>y", "<b>other", "<u>", "<i>rule"):
        assert hostile not in text


@pytest.mark.parametrize(
    ("source", "words"), [(b"x" * (LARGEST_SHOWN + 1), "more than this page shows"), (b"\xff", "not in UTF-8")]
)
def test_a_file_that_is_large_or_no_text_is_named_and_not_shown(tmp_path, source, words):
    text = page(tmp_path, *records(), source=source)
    assert words in text and hashlib.sha256(source).hexdigest() in text and "Text of the file" not in text


@pytest.mark.parametrize(
    ("verdict", "ignored", "words"),
    [
        ("identical", "", "Verified: grace computed 1 of its cells again"),
        ("differs", "", "do not agree with those of the submission"),
        ("identical", "its verifier bob is the submitter", "This stamp is no evidence, and does not count"),
    ],
)
def test_a_stamp_is_shown_with_what_it_is_worth(tmp_path, verdict, ignored, words):
    text = page(tmp_path, *records(), stamp=stamp(verdict), ignored=ignored)
    assert words in text and ("Verified:" in text) == (words.startswith("Verified"))


def test_a_row_of_a_failed_control_has_no_rank_and_says_why(tmp_path):
    fault = Fault(
        file="bob/0", field="controls", problem="sgd must show AUC above 0.5, and shows 0.5", severity="flagged"
    )
    text = page(tmp_path, *records(), faults=(fault,))
    assert "control failed" in text and "No rank: a control of its submission failed" in text


def test_a_record_of_a_submission_is_returned_as_its_file_has_it():
    original = record()
    checked = CheckedSubmission("bob/0", Path("bob/0"), declaration(kind="run", method=None), "1" * 32, (original,), ())
    twin = CheckedSubmission("bob/1", Path("bob/1"), declaration(kind="run", method=None), "2" * 32, (original,), ())
    for several in ([checked], [checked, twin]):
        (named,) = named_records(several, [])["bob/0"].records
        assert named.defense.name != original.defense.name and as_submitted(named, "bob", "1" * 32) == original


def test_an_attack_of_one_handle_takes_no_rank_of_the_published_rows():
    published = [record(defense=name, metrics={"auc": metric(v, 0.02)}) for name, v in (("a", 0.6), ("b", 0.7))]
    board = Board.from_records(published, Completeness((asked_for(*published),)))
    theirs = records(seed=70_000)
    declared = declaration(kind="attack", method={"file": "mine.py", "function": "by_loss", "sha256": "1" * 64})
    checked = CheckedSubmission("bob/0", Path("bob/0"), declared, "0" * 32, theirs, (), manifests=(asked_for(*theirs),))
    both = beside(board, named_records([checked], published))
    assert {row.defense.name: row.rank for row in both.rows} == {"a": 1, "b": 2, "bob/dp_sgd": 1}
