"""The written forms: honest about what is missing, safe for their format, whole at every width."""

import csv
import io
import re

import pytest
from rich.cells import cell_len

from leakbench.leaderboard.board.table import Board

from ...parameters import subtests
from ..conftest import complete, provenance


@pytest.fixture
def board(record, metric, claim):
    """Three defenses (one without noise, one violated and half failed) and controls that hold."""
    records = []
    for seed in range(3):
        shift = 0.01 * seed
        for name, auc, fields in (
            ("random_sparsification", 0.75, {}),
            ("clipped_sgd", 0.9, {"claim": claim(None)}),
            ("sgd", 0.97, {"claim": claim(None), "control": "positive"}),
            ("sgd", 0.49, {"claim": claim(None), "control": "negative"}),
        ):
            given = {"seed": seed, "defense": name, **fields}
            records.append(record("utility", **given))
            records.append(record(**given, metrics={"auc": metric(auc + shift, 0.02)}))
        records.append(record("reconstruction", seed=seed, defense="random_sparsification"))
    records.append(record(defense="a_&_b|c%", flags=("claim_violated",), provenance=provenance(version="[x]*")))
    records.append(
        record(
            "reconstruction",
            defense="a_&_b|c%",
            status="failed",
            reason="50% of {restarts} failed_early\nat 3",
        )
    )
    return Board.from_records(records, complete(*records))


@pytest.fixture
def broken(record, metric):
    weak = record(control="positive", defense="sgd", metrics={"auc": metric(0.5, 0.05)})
    return Board.from_records([record(), weak])


FORMS = ("to_text", "to_markdown", "to_latex")


@subtests("form", FORMS)
def test_failed_controls_are_the_first_thing_a_reader_sees(broken, form):
    text = getattr(broken, form)()
    at = text.index("CONTROLS FAILED, do not trust this board")
    assert at < text.index("dp")
    assert not re.search("CONTROLS FAILED", getattr(broken, form)()[at + 10 :])


@subtests("form", FORMS)
def test_violated_claims_are_on_top_and_in_their_row(board, form):
    text = getattr(board, form)()
    assert "CLAIM VIOLATED" in text[:200]
    assert text.count("VIOLATED") >= 3  # banner, beside the epsilon it refutes, flags


@subtests("form", FORMS)
def test_missing_numbers_are_n_a_with_their_reason_never_zero(board, form):
    text = getattr(board, form)()
    assert "n/a" in text
    assert "no utility record" in text
    assert not re.search(r"(?<![\d.])0(\.0+)?(?![\d.])(?= *[|&])", text)


@subtests("form", FORMS)
def test_a_worst_tpr_without_the_strongest_attack_is_at_least_and_no_attack_is_named_for_it(record, metric, form):
    few = metric(None, reason="85 non-members are too few")
    records = [
        record(attack=attack, metrics={"auc": metric(auc, 0.01), "tpr_at_1pct_fpr": tpr}, defense="sgd")
        for attack, auc, tpr in (("informed", 1.0, few), ("loss_threshold", 0.51, metric(0.012, 0.005)))
    ]
    text = getattr(Board.from_records(records, complete(*records)), form)()
    assert re.search(r"(≥|\\ge\$?)0\.012", text)
    assert "without informed: 85 non-members are too few" in " ".join(text.split())
    assert "the strongest is loss" not in text


@subtests("width", [40, 80, 100, 120, 200])
def test_text_fits_its_terminal_and_cuts_no_number(board, width):
    text = board.to_text(width=width)
    # A terminal too narrow for the numbers of a row gets a wider table rather than cut numbers.
    assert max(map(cell_len, text.splitlines())) <= max(width, 80)
    assert "…" not in text
    joined = "".join(text.split())
    for number in ("0.76", "[0.74,0.78]", "∞", "n/a"):
        assert number in joined


def test_a_wide_terminal_shows_number_and_interval_on_one_line(board):
    assert "0.76 [0.74, 0.78]" in board.to_text(width=120)


def test_colour_is_written_only_when_asked_for(board):
    assert "\x1b[" not in board.to_text()
    assert "\x1b[" in board.to_text(color=True)


def test_the_text_says_how_to_read_it(board):
    text = " ".join(board.to_text(width=80).split())
    for words in (
        "simultaneous over the attacks compared",
        "11.0 dB",
        "Noise comes from seeds",
        "Cells without a number:",
    ):
        assert words in text


def test_markdown_has_as_many_cells_in_each_row_as_in_its_header(board):
    lines = [line for line in board.to_markdown().splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert r"a_&_b\|c%" in board.to_markdown()


def test_latex_escapes_what_latex_would_read(board):
    text = board.to_latex()
    assert r"a\_\&\_b\textbar{}c\%" in text
    assert r"50\% of \{restarts\} failed\_early at 3" in text
    assert r"random\_sparsification" in text
    assert r"$\infty$" in text
    assert text.isascii()
    bare = re.sub(r"\\[\\{}%&_#$]", "", text)
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    assert not re.search(r"[%#_^~]", bare)
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {10}
    assert not re.search(r"\\\\\s*[\[*]", text)  # would be an argument of the line break


def test_csv_has_one_number_a_column_and_nothing_where_nothing_was_measured(board):
    rows = list(csv.DictReader(io.StringIO(board.to_csv())))
    by_name = {(row["defense"], row["control"]): row for row in rows}
    sparse, clipped = by_name["random_sparsification", ""], by_name["clipped_sgd", ""]
    assert float(sparse["auc"]) == pytest.approx(0.76)
    assert float(sparse["auc_low"]) < 0.76 < float(sparse["auc_high"])
    assert (sparse["auc_n"], sparse["auc_attack"], sparse["psnr_without_noise"]) == (
        "3",
        "likelihood_ratio",
        "20.0",
    )
    assert (sparse["epsilon"], clipped["epsilon"], clipped["epsilon_reason"]) == (
        "3.0",
        "inf",
        "no noise is added",
    )
    assert (sparse["psnr_with_noise"], sparse["psnr_with_noise_n"]) == ("", "0")
    violated = by_name["a_&_b|c%", ""]
    assert (violated["flags"], violated["failed"], violated["accuracy"]) == (
        "claim_violated incomplete uneven_seeds mixed_code",
        "1",
        "",
    )
    assert {row["controls"] for row in rows} == {"held"}


def test_csv_says_in_every_row_that_controls_failed(broken):
    rows = list(csv.DictReader(io.StringIO(broken.to_csv())))
    assert [row["controls"] for row in rows] == ["FAILED", "FAILED"]


def test_a_board_on_which_everything_failed_still_says_why(record):
    board = Board.from_records([record(status="failed", reason="out of memory")])
    for form in FORMS:
        assert "out of memory" in getattr(board, form)()
    assert board.to_csv() == "controls\n"


def test_two_deltas_are_shown_row_by_row(record, claim):
    text = Board.from_records([record(), record(defense="dpdr", claim=claim(2.0, delta=1e-6))]).to_markdown()
    assert "3.00 δ=1e-5" in text
    assert "2.00 δ=1e-6" in text


def test_what_a_claim_would_be_under_poisson_sampling_is_a_footnote(record, claim):
    one = record(claim=claim(25.3, sampling="partition", as_if_poisson=2.75))
    text = Board.from_records([one], complete(one)).to_markdown()
    assert "25.30¹" in text
    assert "¹ sampling is partition; were it Poisson, epsilon would be 2.75" in text


def test_no_column_is_lost_at_any_width(record, metric, claim):
    given = {"defense": "clipped_sgd", "claim": claim(None), "flags": ("deterministic",)}
    records = [record("utility", **given), record(**given), record("reconstruction", **given)]
    records += [record(**{**given, "defense": "sgd", "control": "positive"})]
    found = Board.from_records(records)
    for width in range(60, 200, 3):
        text = found.to_text(width=width)
        for word in ("accuracy", "AUC", "TPR@1%FPR", "PSNR", "seeds", "flags", "deterministic", "ratio"):
            assert word in text, f"{word} at {width} columns"
