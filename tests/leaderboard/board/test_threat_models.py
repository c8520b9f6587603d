"""Worst cases of a threat model: those of a board that has only the attacks that its adversary can run."""

import pytest

from leakbench.attacks.core import Access
from leakbench.leaderboard.board.rows import rows_from
from leakbench.leaderboard.board.threat_models import INCLUDED, NOT_ATTACKED, WORDS, accesses, under

from ..conftest import complete, metric, record

ACCESS = {"loss": "BLACK_BOX", "lira": "WHITE_BOX", "ratio": "ALL_STEPS"}


def attacked(attack, auc, seed=0, defense="dp_sgd", **fields):
    calibration, report = auc
    detail = {"calibration_value": calibration, "report_value": report, "report_low": report - 0.1}
    detail |= {"report_high": report + 0.1, "report_n": 50}
    worst = metric((calibration + report) / 2, 0.05, n=100, detail=detail)
    requires = {"access": ACCESS[attack], "knows": [], "controls": []}
    return record(attack=attack, seed=seed, defense=defense, metrics={"auc": worst}, requires=requires, **fields)


def records():
    made = []
    for defense, shift in (("dp_sgd", 0.0), ("dpdr", 0.05)):
        for seed in range(2):
            made.append(record("utility", defense=defense, seed=seed))
            for attack, auc in (("loss", (0.55, 0.54)), ("lira", (0.60, 0.58)), ("ratio", (0.70, 0.72))):
                made.append(attacked(attack, (auc[0] + shift + seed / 90, auc[1] - shift), seed, defense))
    return made


@pytest.mark.parametrize(
    "access, kept", [("BLACK_BOX", {"loss"}), ("WHITE_BOX", {"loss", "lira"}), ("ALL_STEPS", set(ACCESS))]
)
def test_numbers_are_those_of_a_board_of_these_attacks_alone(access, kept):
    made = records()
    alone = [r for r in made if r.attack is None or r.attack.name in kept]
    expected = {row.defense.name: row for row in rows_from(alone, complete(*alone))}
    whole = rows_from(made, complete(*made))
    narrowed = under(whole, access)
    assert [row.defense.name for row in narrowed] == [row.defense.name for row in whole]
    for row in narrowed:
        reference = expected[row.defense.name]
        # Means, halves, simultaneous intervals and ranks.
        assert row.auc == reference.auc and row.accuracy == reference.accuracy
        assert (row.rank, row.ranked_of) == (reference.rank, reference.ranked_of)


def test_without_an_attack_of_the_threat_model_the_reason_says_so():
    update = {"requires": {"access": "UPDATE", "knows": [], "controls": []}, "attack": "dlg"}
    made = [record("utility"), attacked("ratio", (0.7, 0.7)), record("reconstruction", **update)]
    rows = rows_from(made, complete(*made))
    assert accesses(rows) == ["ALL_STEPS", "UPDATE"]
    (row,) = under(rows, "UPDATE")
    assert row.auc.value is None and row.auc.reason == NOT_ATTACKED and row.rank is None and row.unplaced
    assert row.estimates["psnr_free"].value == 20.0 and row.accuracy.value == 0.9


def test_a_failed_attack_lowers_only_the_threat_models_that_can_run_it():
    failed = attacked("ratio", (0.7, 0.7), status="failed", reason="OutOfMemoryError")
    rows = rows_from([attacked("loss", (0.6, 0.6)), failed])
    assert "membership" in under(rows, "ALL_STEPS")[0].lacks
    assert "membership" not in under(rows, "BLACK_BOX")[0].lacks


def test_an_adversary_has_all_that_the_attacks_core_says_its_access_includes():
    known = {access.name: access for access in vars(Access).values() if isinstance(access, Access)}
    assert set(WORDS) == set(known) - {"ACTIVE_SERVER"}
    for name in WORDS:
        assert set(known[name].includes) <= set(INCLUDED.get(name, ()))
