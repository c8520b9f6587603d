"""Which rows a board has, in which order, what its controls decide, and what it refuses."""

import csv
import io
import json
import re

import pytest

from leakbench.leaderboard.board.content import SUPERSCRIPTS
from leakbench.leaderboard.board.table import Board, BoardError
from leakbench.leaderboard.page.papers import table as paper_table
from leakbench.leaderboard.records.details import Detail
from leakbench.leaderboard.records.fields import Reported
from leakbench.leaderboard.records.folder import Completeness
from leakbench.leaderboard.records.record import Metric

from ...parameters import subtests
from ..conftest import asked_for, complete, provenance


def rows_of(*records):
    return Board.from_records(records).rows


def test_utility_attacks_and_images_of_one_defense_make_one_row(record):
    noisy = record("reconstruction", attack="inverting_gradients").task | {"noise": "calibrated"}
    (row,) = rows_of(
        record("utility"), record(), record(attack="loss_threshold"),
        record("reconstruction"), record("reconstruction", task=noisy),
    )  # fmt: skip
    assert (row.accuracy.value, row.auc.looks, row.estimates["psnr_free"].value, row.estimates["psnr_noisy"].value) == (
        0.9,
        2,
        20.0,
        20.0,
    )
    assert (row.estimates["floor"].value, row.task["data"], row.details) == (11.0, "digits", "")


def test_seeds_are_averaged_and_splits_hashed_by_seed_do_not_divide_a_row(record, metric):
    (row,) = rows_of(
        *(
            record(seed=s, task={"data": "digits", "digest": f"h{s}"}, metrics={"auc": metric(v, 0.1)})
            for s, v in enumerate((0.6, 0.8))
        )
    )
    assert (row.auc.value, row.auc.n, row.seeds) == (pytest.approx(0.7), 2, (0, 1))


def test_the_checkpoints_of_a_zoo_one_a_seed_do_not_divide_a_row(record, metric):
    def of(seed, value, defense="dp_sgd", **fields):
        checkpoint = {"name": f"digits_mlp/{defense}/seed{seed}", "sha256": f"{seed}" * 64}
        task = {"data": "digits", "model": "mlp", "checkpoint": checkpoint, "checkpoint_digest": f"{seed}" * 64}
        return record(defense=defense, seed=seed, task=task, metrics={"auc": metric(value, 0.1)}, **fields)

    records = [of(seed, value, name) for name in ("dp_sgd", "pcdp") for seed, value in enumerate((0.6, 0.8))]
    rows = Board.from_records(records, complete(*records)).rows
    assert [(row.auc.value, row.auc.n, row.label) for row in rows] == [
        (pytest.approx(0.7), 2, "dp_sgd"), (pytest.approx(0.7), 2, "pcdp"),
    ]  # fmt: skip
    assert [row.rank for row in rows] == [1, 2] and not any("uneven_seeds" in row.flags for row in rows)


def test_settings_are_shown_only_where_rows_of_a_defense_differ_in_them(record):
    rows = rows_of(
        record(defense_settings={"clip_norm": 1.0, "lr": 0.5}),
        record(defense_settings={"clip_norm": 0.5, "lr": 0.5}),
        record(defense="dpdr", defense_settings={"clip_norm": 1.0}),
    )
    assert {row.label for row in rows} == {"dp_sgd (clip_norm=1)", "dp_sgd (clip_norm=0.5)", "dpdr"}


def test_budgets_and_tasks_make_rows_of_their_own(record):
    rows = rows_of(
        record(), record(budget={"epsilon": 8.0, "delta": 1e-5}), record(task={**record().task, "batch": 32})
    )  # fmt: skip
    assert {row.details for row in rows} == {
        "epsilon=3, batch=64",
        "epsilon=8, batch=64",
        "epsilon=3, batch=32",
    }


def test_a_changed_suite_file_does_not_divide_a_row(record):
    (row,) = rows_of(record(seed=0, suite_digest="d1"), record(seed=1, suite_digest="d2"))
    assert row.seeds == (0, 1)


def test_finite_epsilon_comes_first_then_the_pessimistic_end_and_controls_come_last(record, metric, claim):
    def row(name, auc, half, epsilon: float | None = 3.0, **fields):
        return record(defense=name, metrics={"auc": metric(auc, half)}, claim=claim(epsilon), **fields)

    rows = rows_of(
        row("no_noise", 0.5, 0.01, epsilon=None), row("untrained", 0.4, 0.01, control="negative"),
        row("sgd", 0.99, 0.01, epsilon=None, control="positive"), row("uncertain", 0.60, 0.15),
        row("certain", 0.65, 0.02), record("utility", defense="not_attacked"),
    )  # fmt: skip
    names = [row.defense.name for row in rows]
    assert names == ["certain", "uncertain", "not_attacked", "no_noise", "sgd", "untrained"]


def test_failed_and_skipped_cells_rank_nowhere_and_keep_their_sentence(record):
    board = Board.from_records(
        [
            record("utility"), record(status="failed", reason="out of memory"),
            record(attack="loss_threshold", status="skipped", reason="needs BLACK_BOX access"),
            record(defense="dpdr", status="failed", reason="diverged"),
        ]
    )  # fmt: skip
    (row,) = board.rows
    assert row.auc.value is None
    assert row.auc.reason == "failed: out of memory; skipped: needs BLACK_BOX access"
    assert "incomplete" in row.flags
    assert [record.reason for record in board.unranked] == [
        "out of memory",
        "needs BLACK_BOX access",
        "diverged",
    ]


def test_an_image_attack_that_fails_at_one_noise_explains_only_that_column(record):
    noisy = record("reconstruction").task | {"noise": "calibrated"}
    (row,) = rows_of(record("utility"), record("reconstruction", task=noisy, status="skipped", reason="no past"))
    assert row.estimates["psnr_noisy"].reason == "skipped: no past"
    assert row.estimates["psnr_free"].reason == "no noise-free reconstruction record"


def test_uneven_seeds_are_flagged_and_each_attack_keeps_its_own_mean(record, metric):
    many = [record(seed=s, metrics={"auc": metric(0.6 + 0.01 * s, 0.05)}) for s in range(3)]
    (row,) = rows_of(*many, record(attack="loss_threshold", metrics={"auc": metric(0.55, 0.05)}))
    assert "uneven_seeds" in row.flags
    assert (row.auc.attack, row.auc.n, row.auc.looks) == ("likelihood_ratio", 3, 2)


def test_the_largest_claim_is_shown_and_infinite_is_the_largest(record, claim):
    (row,) = rows_of(record(seed=0, claim=claim(2.0)), record(seed=1, claim=claim(3.0)))
    assert row.claim is not None
    assert (row.claim.epsilon, row.flags) == (3.0, ("claims_differ",))
    (row,) = rows_of(record(seed=0, claim=claim(2.0)), record(seed=1, claim=claim(None)))
    assert row.claim is not None
    assert row.claim.epsilon is None


def test_the_claim_of_the_training_is_shown_not_that_of_an_update_without_noise(record, claim):
    (row,) = rows_of(record(), record("reconstruction", claim=claim(None)))
    assert row.claim == claim(3.0)


def test_attacks_of_one_name_are_told_apart_by_their_settings(record, metric):
    (row,) = rows_of(
        record(attack_settings={"steps": 10}, metrics={"auc": metric(0.6, 0.1)}),
        record(attack_settings={"steps": 99}, metrics={"auc": metric(0.8, 0.1)}),
    )
    assert (row.auc.attack, row.auc.looks) == ("likelihood_ratio (steps=99)", 2)


def test_copies_repetitions_and_nothing_at_all_are_refused(record):
    one = record()
    with pytest.raises(BoardError, match=f"{one.id} is there 2 times"):
        Board.from_records([one, one])
    other = record(id="f" * 64, provenance=provenance(version="0.2.0"))  # the last in the order of ids
    with pytest.raises(BoardError, match=r"likelihood_ratio, seed 0 is recorded twice.*code 0\.1\.0.*code 0\.2\.0"):
        Board.from_records([one, other])
    with pytest.raises(BoardError, match="records must not be empty"):
        Board.from_records([])


@subtests(
    "control, auc, half, ok",
    [
        ("positive", 0.9, 0.05, True),
        ("positive", 0.55, 0.1, False),
        ("negative", 0.55, 0.1, True),
        ("negative", 0.4, 0.05, True),
        ("negative", 0.7, 0.1, False),
        ("positive", 0.9, None, False),
        ("negative", 0.5, None, False),
    ],
)
def test_a_control_holds_when_its_interval_lies_on_the_right_side_of_chance(record, metric, control, auc, half, ok):
    board = Board.from_records([record(), record(control=control, metrics={"auc": metric(auc, half)})])
    (result,) = board.controls
    assert (result.ok, board.trustworthy) == (ok, ok)
    assert f"AUC {auc:.3f}" in result.measured


@subtests(
    "control, psnrs, ok",
    [
        ("positive", (20.0, 21.0), True),
        ("positive", (10.0, 11.0), False),
        ("negative", (10.0, 10.9), True),
        ("negative", (11.0, 11.5), True),
        ("negative", (20.0, 20.1), False),
        ("negative", (11.5,), True),  # by one seed, half a decibel is chance
        ("negative", (14.5,), False),
    ],
)
def test_image_controls_are_measured_against_the_mean_public_image(record, metric, control, psnrs, ok):
    metrics = [{"psnr": metric(value, 1.0), "psnr_floor": metric(11.0)} for value in psnrs]
    records = [record("reconstruction", control=control, seed=s, metrics=m) for s, m in enumerate(metrics)]
    (result,) = Board.from_records(records).controls
    assert result.ok is ok


def test_a_positive_control_holds_by_its_strongest_attack_a_negative_one_by_all(record, metric):
    def board(control):
        strong = record(control=control, metrics={"auc": metric(0.9, 0.05)})
        return Board.from_records([strong, record(attack="b", control=control, metrics={"auc": metric(0.5, 0.05)})])

    assert board("positive").trustworthy
    assert not board("negative").trustworthy


def test_a_control_that_was_not_measured_does_not_hold(record):
    board = Board.from_records([record(), record(control="positive", status="failed", reason="diverged")])
    (result,) = board.controls
    assert not result.ok
    assert "diverged" in result.measured


def test_without_controls_a_board_is_not_trustworthy_and_says_so(record):
    board = Board.from_records([record()])
    assert board.controls == ()
    assert not board.trustworthy
    assert "no controls in these records" in board.to_text()


def test_a_violated_claim_is_listed_whatever_the_status(record):
    board = Board.from_records([record(flags=("claim_violated",)), record(seed=1)])
    (violation,) = board.violations
    assert (violation.defense, violation.attack, violation.seed) == ("dp_sgd", "likelihood_ratio", 0)
    assert "claims epsilon 3 at delta 1e-05, auc 0.700 [0.650, 0.750]" in violation.sentence
    assert board.rows[0].flags == ("claim_violated",)


def test_the_dictionary_is_json_without_nan_and_keeps_every_attack(record, claim):
    board = Board.from_records(
        [record(claim=claim(None)), record(attack="loss_threshold", claim=claim(None)), record("utility")]
    )
    tree = json.loads(json.dumps(board.to_dict(), allow_nan=False))
    (row,) = tree["rows"]
    assert (row["epsilon"], row["epsilon_reason"]) == (None, "no noise is added")
    assert [cell["attack"] for cell in row["attacks"]] == [None, "likelihood_ratio", "loss_threshold"]
    assert row["psnr_with_noise"]["value"] is None
    assert row["psnr_with_noise"]["reason"] == "no noisy reconstruction record"
    assert (row["auc"]["n"], row["auc"]["seeds"], row["auc"]["looks"]) == (1, [0], 2)


def test_a_row_that_lacks_cells_is_not_ranked_its_worst_case_is_at_least_and_the_command_is_said(record, metric):
    def cells(defense, auc):
        return [
            record(defense=defense, seed=seed, attack=attack, metrics={"auc": metric(auc - weaker, 0.02)})
            for seed in (0, 1)
            for attack, weaker in (("likelihood_ratio", 0.0), ("loss_threshold", 0.1))
        ]

    good, bad = cells("dp_sgd", 0.6), cells("random_sparsification", 0.65)
    whole = Board.from_records([*good, *bad], complete(*good, *bad))
    assert [(row.defense.name, row.rank) for row in whole.rows] == [("dp_sgd", 1), ("random_sparsification", 2)]
    assert not whole.gaps and "≥0" not in whole.to_markdown()
    left = [r for r in bad if r.attack.name == "loss_threshold" and r.seed == 0]
    board = Board.from_records([*good, *left], complete(*good, *bad))
    row = board.rows[1]
    assert (row.defense.name, row.rank) == ("random_sparsification", None)
    assert row.unplaced == "3 of its cells have no record"
    assert {"missing_cells", "uneven_seeds", "uneven_attacks"} <= set(row.flags) and len(row.missing) == 3
    assert board.rows[0].rank == 1 and "≥0.55" in board.to_markdown() and "≥0.60" not in board.to_markdown()
    (said,) = board.gaps
    assert said.startswith("INCOMPLETE: 3 of the 8 cells asked for have no record (random_sparsification x ")
    assert said.endswith("Compute them with: leakbench run quick --out results")
    assert said in " ".join(board.to_text().split()) and said in board.to_dict()["banner"]
    cells_of = board.to_dict()["rows"][1]
    assert cells_of["at_least"] == ["membership"] and cells_of["rank_reason"] == row.unplaced
    assert board.to_csv().splitlines()[2].split(",")[2] == ""


def test_without_a_manifest_completeness_is_unknown_and_nothing_is_ranked(record):
    one, other = record(), record(seed=1)
    board = Board.from_records([one, other])
    assert board.rows[0].rank is None and "is unknown" in board.rows[0].unplaced
    assert board.gaps == ("Whether these records are complete is unknown: no manifest of a run lies beside them.",)
    part = Board.from_records([one, other], complete(one))
    assert part.rows[0].rank is None and part.gaps[0].startswith("1 of 2 records are in no manifest")


def test_requests_of_parts_and_of_several_machines_are_held_against_together(record):
    mine, yours = record(), record(defense="dpdr")
    parts = Completeness((asked_for(mine), asked_for(yours, command=("leakbench", "run", "quick", "--seed", "1"))))
    board = Board.from_records([mine, yours], parts)
    assert [row.rank for row in board.rows] == [1, 2] and not board.gaps
    half = Board.from_records([mine], Completeness((asked_for(mine), asked_for(mine, yours))))
    assert half.rows[0].rank == 1 and len(half.gaps) == 1 and "1 of the 2 cells" in half.gaps[0]


def test_a_weaker_selection_of_attacks_is_no_better_rank(record, metric):
    strong = [record(attack=name) for name in ("likelihood_ratio", "loss_threshold")]
    weak = record(defense="dpdr", attack="loss_threshold", metrics={"auc": metric(0.5, 0.01)})
    board = Board.from_records([*strong, weak], complete(*strong, weak))
    assert [(row.defense.name, row.rank) for row in board.rows] == [("dp_sgd", 1), ("dpdr", None)]
    assert "uneven_attacks" in board.rows[1].flags and "≥0.50" in board.to_markdown()


def test_controls_need_no_manifest_entry_of_their_own_to_hold(record, metric):
    sgd = {"defense": "sgd", "metrics": {"auc": metric(0.97, 0.01)}, "control": "positive"}
    control, contestant = record(**sgd), record()
    board = Board.from_records([control, contestant], complete(control, contestant))
    assert board.trustworthy and [row.rank for row in board.rows] == [1, None] and not board.rows[1].unplaced


def test_what_a_claim_takes_on_somebodys_word_is_seen_on_every_form(record, claim):
    made = claim(unverified=("codec Stash (of mine) is none of leakbench's",), assumes=("the key stays secret",))
    one = record(claim=made, flags=("unverified_codec",))
    board = Board.from_records([one], complete(one))
    for text in (board.to_text(width=200), board.to_markdown(), board.to_csv()):
        assert "unverified" in text and "Stash" in text
    assert "the key stays secret" in board.to_csv()


def test_a_reported_epsilon_stands_beside_the_claim(record, claim):
    theirs = Reported(metric="epsilon", value=2.5, source="Table 1")
    (one,) = paper_table(Board.from_records([record("utility", claim=claim(3.0), reported=(theirs,))]).rows)
    assert (one.theirs, one.ours, one.differs) == (2.5, 3.0, True)


T = {"data": "digits", "model": "mlp"}


@subtests(
    "mine, flag, why",
    [
        ({"attack_settings": {"shadows": 1}}, "uneven_attacks", "attacked by more"),
        ({"task": T | {"private": 5000}}, "uneven_tasks", "same examples, with the same model"),
        ({"task": T | {"model_settings": {"hidden": 1}}}, "uneven_tasks", "same examples, with the same model"),
        ({"task": T | {"statistics": {"of": "0"}}}, "uneven_tasks", "same examples, with the same model"),
        ({"task": T | {"digest": "another deal"}}, "uneven_tasks", "same examples, with the same model"),
        ({"provenance": provenance(source="1" * 64)}, "mixed_code", "different code"),
        ({"provenance": provenance(versions={"torch": "2.9"})}, "mixed_code", "different code"),
    ],
)
def test_defenses_that_were_not_treated_alike_are_not_ranked_though_each_request_is_complete(
    record, metric, mine, flag, why
):
    def cells(defense, auc, **fields):
        given = {"attack_settings": {"shadows": 64}, "task": T, **fields}
        return [record(defense=defense, seed=s, metrics={"auc": metric(auc, 0.02)}, **given) for s in (0, 1)]

    first, second = cells("dpdr", 0.5, **mine), cells("dp_sgd", 0.7)
    requests = Completeness((asked_for(*first), asked_for(*second)))
    rows = Board.from_records([*first, *second], requests).rows
    assert not any(row.rank for row in rows)
    assert all(flag in row.flags and why in row.unplaced for row in rows)


def test_a_defense_that_a_model_diverged_under_is_not_ranked_before_one_that_learns(record, metric):
    flags = {0: (), 1: ("diverged",)}
    broken = [record(defense="dpdr", seed=s, metrics={"auc": metric(0.5, 0.02)}, flags=flags[s]) for s in flags]
    whole = [record(seed=s, metrics={"auc": metric(0.7, 0.02)}) for s in (0, 1)]
    board = Board.from_records([*broken, *whole], complete(*broken, *whole))
    assert [(row.defense.name, row.rank) for row in board.rows] == [("dp_sgd", 1), ("dpdr", None)]
    assert "diverged" in board.rows[1].unplaced


def test_an_attack_that_was_skipped_in_one_environment_and_run_in_another_is_no_better_rank(record, metric):
    mine = [record(defense="dpdr", metrics={"auc": metric(0.5, 0.02)})]
    mine.append(record(defense="dpdr", attack="spy", status="skipped", reason="needs the extra 'images'"))
    yours = [record(), record(attack="spy", metrics={"auc": metric(0.9, 0.02)})]
    board = Board.from_records([*mine, *yours], complete(*mine, *yours))
    assert [(row.defense.name, row.rank) for row in board.rows] == [("dp_sgd", 1), ("dpdr", None)]
    assert "uneven_attacks" in board.rows[1].flags and "≥0.50" in board.to_markdown()


@pytest.mark.parametrize(("kind", "rank"), [("reconstruction", 2), ("membership", None)])
def test_an_attack_that_does_not_apply_takes_no_rank_unless_ranks_are_by_it(record, metric, kind, rank):
    about = {"attack": "spy", "status": "skipped", "reason": "spy does not apply: two parts"}
    told = {"kind": kind} if kind == "membership" else {"kind": kind, "task": record(kind).task}
    mine = [record(defense="dpdr", metrics={"auc": metric(0.5, 0.02)}), record(defense="dpdr", **told, **about)]
    found = record(kind, attack="spy") if kind == "reconstruction" else record(attack="spy")
    yours = [record(metrics={"auc": metric(0.4, 0.02)}), found]
    board = Board.from_records([*mine, *yours], complete(*mine, *yours))
    row = next(row for row in board.rows if row.defense.name == "dpdr")
    assert row.rank == rank and ("uneven_attacks" in row.flags) == (rank is None)
    assert kind in row.lacks  # no safety: worst cases of this kind are at least what was measured


def test_an_attack_that_applies_to_one_seed_alone_gives_a_least_and_no_uneven_seeds(record, metric):
    """A mask is drawn for each seed, and a closed form may invert some of them."""
    refusal = {"status": "skipped", "reason": "closed does not apply: the mask"}
    whole = [record("reconstruction", attack="search", seed=seed) for seed in (0, 1, 2)]
    closed = [record("reconstruction", attack="closed", metrics={"psnr": metric(90.0), "psnr_floor": metric(11.0)})]
    closed += [record("reconstruction", attack="closed", seed=seed, **refusal) for seed in (1, 2)]
    judged = [record(seed=seed) for seed in (0, 1, 2)]
    for sought in (closed, [*whole, *closed]):
        board = Board.from_records([*judged, *sought], complete(*judged, *sought))
        (row,) = board.rows
        assert "uneven_seeds" not in row.flags and row.rank == 1
        assert row.lacks == {"reconstruction"} and "≥90" in board.to_markdown()
    # By membership rows are ranked: there, an attack that answers on one seed alone takes the rank.
    one = [
        record(attack="spy"),
        *(record(attack="spy", seed=s, **refusal | {"reason": "spy does not apply: no"}) for s in (1, 2)),
    ]
    (row,) = Board.from_records([*judged, *one], complete(*judged, *one)).rows
    assert row.rank is None and "uneven_seeds" in row.flags and "membership" in row.lacks


def test_seeds_of_another_code_are_said_on_top(record):
    old, new = record(), record(seed=1, provenance=provenance(versions={"torch": "2.9", "lpips": "0.1"}))
    (said,) = Board.from_records([old, new], complete(old, new)).gaps
    assert said.startswith("MIXED: records of quick are of different code (torch 2.14.1 and 2.9)")


def test_overrides_of_a_suite_are_said_on_top(record):
    changed = [record(changes=("task.epochs 80 -> 4",)), record("utility", changes=("task.epochs 80 -> 4",))]
    board = Board.from_records([*changed, record(seed=1)], complete(*changed, record(seed=1)))
    (said,) = [gap for gap in board.gaps if gap.startswith("CHANGED")]
    assert said.startswith("CHANGED: 2 of 3 records are not of quick as its file has it, but with task.epochs 80 -> 4.")
    assert said in board.to_dict()["banner"]


def test_one_lucky_seed_is_no_rank(record, metric):
    lucky = record(defense="dpdr", metrics={"auc": metric(0.5, 0.02)})
    both = [record(seed=seed) for seed in (0, 1)]
    board = Board.from_records([lucky, *both], complete(lucky, *both))
    assert [(row.defense.name, row.rank) for row in board.rows] == [("dp_sgd", 1), ("dpdr", None)]
    assert "same seeds" in board.rows[1].unplaced


def test_controls_of_one_suite_speak_for_no_other(record, metric):
    control = record(control="positive", defense="sgd", metrics={"auc": metric(0.97, 0.01)})
    board = Board.from_records([control, record(), record(suite="weak")])
    assert not board.trustworthy
    assert [(result.name, result.ok) for result in board.controls if not result.ok] == [("weak · digits · mlp", False)]
    words = " ".join(board.to_text().split())
    assert "CONTROLS FAILED in weak, do not trust its rows." in words and "this board" not in words


def test_where_no_membership_attack_was_run_there_is_nothing_to_rank_by(record):
    """Else the first name of the alphabet would be first."""
    found = [record("utility", defense=name) for name in ("dp_sgd", "dpdr")]
    board = Board.from_records(found, complete(*found))
    assert [row.rank for row in board.rows] == [None, None]
    assert all("ranks are by the worst AUC" in row.unplaced for row in board.rows)


def test_what_the_claim_allows_stands_beside_what_an_attack_reached(record, metric):
    def told(auc, largest, **fields):
        return record(metrics={"auc": metric(auc, 0.02, detail={"largest_under_claim": largest})}, **fields)

    records = [told(0.60, 0.6751, seed=0), told(0.62, 0.6751, seed=1), told(0.52, 0.98, attack="weak", seed=0)]
    board = Board.from_records([*records, told(0.53, 0.98, attack="weak", seed=1)])
    (row,) = board.rows
    # Of the strongest attack, and rounded up: a bound is never shown as less than it is.
    assert row.auc.largest == pytest.approx(0.6751) and row.auc.gap == pytest.approx(0.0651)
    assert "≤0.68" in board.to_text(width=160) and "≤ is the most that the claim allows" in board.to_markdown()
    line = next(csv.DictReader(io.StringIO(board.to_csv())))
    assert float(line["auc_gap"]) == pytest.approx(0.0651) and line["tpr_at_1pct_fpr_largest_under_claim"] == ""
    tree = board.to_dict()["rows"][0]
    assert tree["auc"]["largest_under_claim"] == pytest.approx(0.6751)
    assert [one["metrics"]["auc"]["gap"] for one in tree["attacks"]] == pytest.approx([0.0651, 0.455])


def test_no_bound_is_shown_where_everything_is_allowed_or_a_record_says_none(record, metric):
    everything = record(metrics={"auc": metric(0.6, 0.02, detail={"largest_under_claim": 1.0})})
    assert "≤" not in Board.from_records([everything]).to_text(width=160).split("≤ is")[0]
    told, silent = metric(0.6, 0.02, detail={"largest_under_claim": 0.7}), metric(0.6, 0.02)
    (row,) = rows_of(record(metrics={"auc": told}, seed=0), record(metrics={"auc": silent}, seed=1))
    assert row.auc.largest is None and row.auc.gap is None


def test_one_seed_says_what_its_interval_leaves_out(record):
    words = "share the noise of one model, or of one step"
    assert words in " ".join(Board.from_records([record()]).to_markdown().split())
    assert words not in " ".join(Board.from_records([record(seed=0), record(seed=1)]).to_markdown().split())


def test_a_control_of_several_attacks_says_the_interval_that_it_was_judged_by(record):
    def told(whole, calibration, report, attack):
        detail = {"calibration_value": calibration, "report_value": report, "report_low": report - 0.1}
        detail |= {"report_high": report + 0.1, "report_n": 50}
        auc = Metric(value=whole, low=whole - 0.05, high=whole + 0.05, n=100, better="lower", detail=Detail(detail))
        return record(defense="sgd", control="positive", attack=attack, metrics={"auc": auc})

    board = Board.from_records([told(0.6, 0.63, 0.57, "strong"), told(0.5, 0.5, 0.5, "weak")])
    (row,) = board.rows
    assert row.auc.chosen_on == "calibration half" and row.auc.value == 0.57 and (row.auc.low or 0) < 0.5
    # Judged on all candidates, at the level of two looks: 0.05 becomes 0.0572.
    (control,) = [one for one in board.controls if "membership" in one.name]
    assert control.ok and control.measured == "AUC 0.600 [0.543, 0.657] by strong"


def test_what_has_to_be_said_of_a_bound_is_its_footnote(record, metric):
    detail = {"largest_under_claim": 0.7, "largest_note": "scores of one run share its noise"}
    board = Board.from_records([record(metrics={"auc": metric(0.8, 0.02, detail=detail)})])
    assert re.search(f"≤0.70[{SUPERSCRIPTS}]", board.to_text(width=160))
    assert "scores of one run share its noise" in board.to_markdown()
