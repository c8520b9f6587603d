"""Rows of submissions on a site: each belongs to its own submission, and takes nothing from published rows."""

import dataclasses
import hashlib

import pytest

from leakbench.leaderboard.records.manifest import write_manifest
from leakbench.leaderboard.records.record import MethodUsed, write
from leakbench.leaderboard.site import submissions as on_site
from leakbench.leaderboard.site.build import build_site
from leakbench.leaderboard.site.headline import headline
from leakbench.leaderboard.site.site import Guide
from leakbench.leaderboard.submissions.check import CheckedSubmission, Rules
from leakbench.leaderboard.submissions.tiers import TierOf

from ..conftest import asked_for, claim, metric, record
from ..submissions.declarations import declaration
from .conftest import PUBLICATION

SOURCE = b"def half_dp():\n    pass\n"


def run(method="dp_sgd", auc=0.6, accuracy=0.8, **fields):
    """Records of a defense and a positive control."""
    leaky = {"defense": "sgd", "claim": claim(None), "control": "positive"}
    return (
        record("utility", defense=method, metrics={"accuracy": metric(accuracy, 0.01, better="higher")}, **fields),
        record(defense=method, metrics={"auc": metric(auc, 0.02)}, **fields),
        record(metrics={"auc": metric(0.99, 0.005)}, **leaky, **fields),
    )


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Builds a site of published records and of submissions, each (handle, records, tier, faults)."""

    def build(published, *submitted):
        for one in published:
            write(one, tmp_path / "results" / "records")
        write_manifest(asked_for(*published), tmp_path / "results" / "records")
        checked = []
        for handle, records, tier, *faults in submitted:
            folder = tmp_path / "submissions" / handle / ("0" * 32)
            folder.mkdir(parents=True)
            (folder / "half_dp.py").write_bytes(SOURCE)
            method = {"file": "half_dp.py", "function": "half_dp", "sha256": hashlib.sha256(SOURCE).hexdigest()}
            declared = declaration(handle=handle, method=method)
            words = TierOf(tier, tier == "verified", f"its {tier} reason")
            digest = hashlib.sha256(handle.encode()).hexdigest()[:32]
            one = CheckedSubmission(
                f"{handle}/0", folder, declared, digest, records, tuple(faults), (asked_for(*records),), words
            )
            checked.append(one)
        monkeypatch.setattr(on_site, "check_tree", lambda root, rules: (checked, []))
        rules = Rules(facts=lambda declared: pytest.fail("a site asks nothing more"))
        return build_site(
            [tmp_path / "results"], tmp_path / "site", guide=Guide(), publication=PUBLICATION,
            submissions=tmp_path / "submissions", rules=rules,
        )  # fmt: skip

    return build


def test_a_submission_whose_records_have_the_ids_of_another_has_its_own_tier(built):
    """Ids of an own method follow from its code, which no check runs, so they may be copied from anywhere."""
    ada = run("half_dp.py:half_dp", auc=0.7, seed=70_000)
    forged = run("half_dp.py:half_dp", auc=0.5, seed=80_000)
    eve = tuple(dataclasses.replace(mine, id=theirs.id) for mine, theirs in zip(forged, ada, strict=True))
    published = run(auc=0.65)
    zoe = tuple(dataclasses.replace(mine, id=theirs.id) for mine, theirs in zip(forged, published, strict=True))
    site = built(published, ("ada", ada, "verified"), ("eve", eve, "self-reported"), ("zoe", zoe, "self-reported"))
    owners = {(row.row.defense.name.partition("/")[0], row.submission and row.submission.handle) for row in site.rows}
    assert owners == {("ada", "ada"), ("eve", "eve"), ("zoe", "zoe"), ("dp_sgd", None), ("sgd", None)}


def test_a_submission_of_a_suite_without_published_records_is_on_the_site(built):
    theirs = run("half_dp.py:half_dp", auc=0.5, suite="other", seed=70_000)
    site = built(run(), ("ada", theirs, "self-reported"))
    assert {row.row.suite for row in site.rows} == {"quick", "other"}


def marked(site, access=None):
    entries = [entry for part in headline(site.rows, access) for group in part.groups for entry in group.entries]
    return {entry.row.defense.name for entry in entries if entry.front}


def test_a_submission_takes_no_published_row_off_the_front_and_has_to_beat_them(built):
    better = run("half_dp.py:half_dp", auc=0.5, accuracy=0.95, seed=70_000)
    worse = run("half_dp.py:half_dp", auc=0.7, accuracy=0.7, seed=80_000)
    site = built(run(), ("ada", better, "self-reported"), ("eve", worse, "self-reported"))
    assert marked(site) == {"dp_sgd", "ada/half_dp.py:half_dp"}


def test_a_refuted_claim_is_on_no_front(built):
    refuted = [
        dataclasses.replace(one, flags=("claim_violated",)) if one.control is None else one
        for one in run("half_dp.py:half_dp", auc=0.5, accuracy=0.95, seed=70_000)
    ]
    assert marked(built(run(), ("ada", tuple(refuted), "self-reported"))) == {"dp_sgd"}


def test_an_attack_of_a_submission_leaves_published_rows_as_they_are_under_every_threat_model(built):
    requires = {"access": "BLACK_BOX", "knows": [], "controls": []}
    published = [dataclasses.replace(one, requires=requires if one.attack else None) for one in run()]
    theirs = run("dp_sgd", seed=70_000)
    own = [
        dataclasses.replace(one, id=one.id[::-1], attack=MethodUsed(name="mine.py:f"), metrics={"auc": metric(0.9)})
        for one in theirs
        if one.attack
    ]
    theirs = [dataclasses.replace(one, requires=requires if one.attack else None) for one in (*theirs, *own)]
    site = built(published, ("ada", tuple(theirs), "self-reported"))
    for access in (None, "BLACK_BOX"):
        (row,) = (
            entry.row
            for part in headline(site.rows, access)
            for group in part.groups
            for entry in group.entries
            if entry.row.defense.name == "dp_sgd"
        )
        assert (row.rank, row.ranked_of, row.lacks, row.flags) == (1, 1, frozenset(), ())


def test_a_failed_control_of_a_submission_is_named_and_no_alarm_about_the_board(built, tmp_path):
    theirs = [
        dataclasses.replace(one, metrics={"auc": metric(0.5, 0.01)})
        if one.control
        else dataclasses.replace(one, flags=("claim_violated",))
        for one in run("half_dp.py:half_dp", seed=70_000)
    ]
    site = built(run(), ("ada", tuple(theirs), "self-reported"))
    text = (tmp_path / "site" / "index.html").read_text()
    assert site.board.trustworthy and not site.board.violations and 'class="alarm"' not in text
    assert "Submission ada/0: CONTROLS FAILED, do not trust its rows." in text
    assert "Submission ada/0: CLAIM VIOLATED: ada/half_dp.py:half_dp" in text
