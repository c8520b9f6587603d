"""`leakbench evidence`: bounds from files of scores, verdicts as exit codes, and mistakes in one sentence."""

import json
from pathlib import Path

import numpy as np
import pytest

from leakbench.audit.cli import app as cli

from ...parameters import subtests

RUNS = ("--trials", "runs", "--method", "clopper_pearson", "--threshold", "fixed:1", "--delta", "1e-5")
CANARIES = ("--trials", "canaries", "--method", "one_run", "--delta", "1e-5")
LABELS = ("--trials", "labels", "--method", "one_run", "--guesses", "60+60", "--delta", "1e-5")


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Runs the command beside a file of scores: code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    coins = np.random.default_rng(0)
    rows = [f"r{i},{coins.normal(2 * (i % 2)):.6f},{i % 2}" for i in range(600)]
    Path("scores.csv").write_text("\n".join(["id,score,member", *rows]))

    def run(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["evidence", *map(str, arguments)])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


def test_a_refuted_claim_fails_the_command_and_another_one_is_not_called_verified(command):
    code, out, err = command("scores.csv", *RUNS, "--claim", "0.5")
    assert (code, err) == (1, "") and out.endswith("claim: epsilon 0.5 at delta 1e-05, add_remove: violation\n")
    assert "holds if trials are independent" in out and "it could have been" in out
    code, out, _ = command("scores.csv", *RUNS, "--claim", "8")
    assert code == 0 and out.endswith("no violation found\n")
    code, out, _ = command("scores.csv", *RUNS)
    assert code == 0 and not out.splitlines()[-1].startswith("claim")


def test_scores_that_are_smaller_for_members_get_a_remark(command):
    code, out, _ = command("scores.csv", *RUNS)
    assert code == 0 and "remark" not in out
    told = [line.split(",") for line in Path("scores.csv").read_text().splitlines()[1:]]
    Path("turned.csv").write_text("id,score,member\n" + "\n".join(f"{a},{-float(b)},{c}" for a, b, c in told))
    code, out, _ = command("turned.csv", *RUNS)
    assert code == 0 and "remark: scores are smaller for members (AUC 0.0" in out
    code, out, _ = command("turned.csv", *RUNS, "--json")
    assert "are the two groups exchanged" in json.loads(out)["remark"]


def test_a_column_that_occurs_twice_is_refused(command):
    Path("doubled.csv").write_text("id,score,member,score\n1,2,1,3\n2,1,0,2\n")
    code, _, err = command("doubled.csv", *RUNS)
    assert (code, err) == (2, "error: doubled.csv must have columns of different names, and 'score' occurs twice\n")


def test_a_random_split_is_held_against_what_the_claim_implies_of_replacement(command):
    options = ("--trials", "random-split", "--method", "one_run", "--guesses", "50", "--delta", "1e-5", "--json")
    code, out, _ = command("scores.csv", *options, "--claim", "0.2")
    document = json.loads(out)
    assert document["claim"]["implies"]["epsilon"] == 0.4 and document["bound"]["relation"] == "replace_one"
    assert document["bound"]["delta"] == document["claim"]["implies"]["delta"] == pytest.approx(2.22e-5, abs=1e-7)
    assert (code, document["verdict"]) == (1, "violation")
    code, out, _ = command("scores.csv", *options, "--claim", "0.2", "--claim-relation", "replace_one")
    assert json.loads(out)["bound"]["delta"] == 1e-5 and "implies" not in json.loads(out)["claim"]


def test_labels_are_judged_up_to_the_error_of_the_proxy_which_is_printed(command):
    claim = ("--claim", "0.5", "--claim-relation", "replace_one")
    code, out, _ = command("scores.csv", *LABELS, "--proxy-error", "0", *claim)
    assert code == 1 and "replace_one" in out and "proxy_error 0.0" in out
    code, out, _ = command("scores.csv", *LABELS, "--proxy-error", "0.1", *claim)
    assert code == 0 and out.startswith("epsilon is at least 0 ")
    assert "proxy_error 0.1" in out and "the proxy errs by at most 0.1 in total variation" in out


def test_scores_and_truth_of_two_files_are_joined_by_id(command):
    table = [line.split(",") for line in Path("scores.csv").read_text().splitlines()]
    Path("only.csv").write_text("\n".join(",".join(row[:2]) for row in table))
    Path("truth.csv").write_text("\n".join(["id,member", *(f"{row[0]},{row[2]}" for row in reversed(table[1:]))]))
    whole = command("scores.csv", *RUNS, "--json")
    assert command("only.csv", "--truth", "truth.csv", *RUNS, "--json") == whole
    Path("truth.csv").write_text("id,member\nr0,0\nr1,1\n")
    code, _, err = command("only.csv", "--truth", "truth.csv", *RUNS)
    assert code == 2 and "truth.csv must have every id once, and lacks 598, as 'r2'" in err


@subtests(
    ("text", "sentence"),
    [
        ("id,score\na,1\n", "scores.csv must have the columns id, score, member, and lacks member"),
        ("id,score,member\na,1,1\na,2,0\n", "ids of scores.csv must be distinct, and 'a' occurs twice"),
        ("id,score,member\na,nan,1\nb,2,0\n", "scores must be finite numbers"),
        ("id,score,member\na,inf,1\nb,2,0\n", "scores must be finite numbers"),
        ("id,score,member\na,x,1\nb,2,0\n", "scores must be finite numbers, got 'x' for id 'a'"),
        ("id,score,member\na,1,2\nb,2,0\n", "member must be 0 or 1, got '2'"),
        ("id,score,member\na,1,1\nb,2,1\n", "there must be rows with member 0, got none in 2 rows"),
        ("id,score,member\n,1,1\nb,2,0\n", "every row of scores.csv must have an id, and row 2 has none"),
        ("", "scores.csv must be a CSV file with a header"),
    ],
)
def test_files_that_prove_nothing_are_refused(command, text, sentence):
    Path("scores.csv").write_text(text)
    code, out, err = command("scores.csv", *RUNS)
    assert code == 2 and out == "" and sentence in err and err.count("\n") == 1


@subtests(
    ("arguments", "sentence"),
    [
        ((*RUNS[:4], "--delta", "0"), "--threshold must be given for runs"),
        ((*RUNS[:4], "--delta", "0", "--threshold", "best"), "--threshold must be fixed:T, declared:T1,T2"),
        ((*RUNS, "--guesses", "5"), "give the one that fits"),
        ((*CANARIES, "--guesses", "100"), "--guesses of canaries and labels must be HIGHEST+LOWEST"),
        ((*CANARIES, "--guesses", "a+b"), "must be whole and at least 0, got 'a'"),
        ((*CANARIES, "--guesses", "9" * 5000 + "+5"), "must have at most 18 digits, got 5000"),
        ((*CANARIES, "--guesses", "5+5", "--threshold", "fixed:1"), "--threshold is of runs"),
        ((*CANARIES, "--guesses", "5+5", "--steps", "3"), "--sample-rate and --steps are of method pld"),
        (("--trials", "walks", *RUNS[2:]), "--trials must be one of runs, canaries, random-split, labels, got 'walks'"),
        ((*RUNS[:5], "fixed:nan", "--delta", "0"), "a threshold must be a number, got NaN"),
        (
            ("--trials", "random-split", *CANARIES[2:], "--guesses", "5", "--claim", "20"),
            "--claim 20 at delta 1e-05 by add_remove implies nothing of replacement",
        ),
        ((*RUNS, "--claim", "-1"), "--claim must be at least 0, got -1"),
        ((*RUNS, "--level", "1"), "level must be in (0, 1), got 1"),
        ((*RUNS, "--relation", "swap"), "--relation must be add_remove or replace_one, got 'swap'"),
        (
            ("--trials", "random-split", *CANARIES[2:], "--guesses", "5", "--relation", "add_remove"),
            "--relation of a random split is replace_one",
        ),
        (("--trials", "labels", *CANARIES[2:], "--guesses", "5+5"), "--proxy-error is of labels, and must be given"),
        ((*CANARIES, "--guesses", "5+5", "--proxy-error", "0.1"), "--proxy-error is of labels"),
        ((*LABELS, "--proxy-error", "2"), "proxy_error must be a distance in total variation, in [0, 1], got 2.0"),
        ((*LABELS, "--proxy-error", "0", "--relation", "add_remove"), "--relation of labels is replace_one"),
    ],
)
def test_mistakes_are_one_sentence(command, arguments, sentence):
    code, out, err = command("scores.csv", *arguments)
    assert code == 2 and out == "" and sentence in err and err.count("\n") == 1
