"""The table of metrics: it is sound, and a row more is a column more in every form, with nothing else touched."""

import csv
import io
import json

import pytest

from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.kinds import KINDS
from leakbench.leaderboard.metrics import CLAIM, METRICS, BoardColumn, KnownMetric, columns, reported
from leakbench.leaderboard.page.build import build
from leakbench.leaderboard.records.manifest import write_manifest
from leakbench.leaderboard.records.record import RecordError, write

from .conftest import asked_for

PRECISION = KnownMetric(
    name="precision_at_10", kind="membership", label="precision at 10", short="precision", better="lower", chance=0.5,
    digits=2, in_violations=True,
    columns=(
        BoardColumn(
            key="precision", field="precision_at_10", header=("worst", "P@10"), digits=1, title="Worst precision",
            unit="at 10", hint="Members among the ten highest scores.",
        ),
    ),
)  # fmt: skip


@pytest.fixture
def one_row_more(monkeypatch):
    monkeypatch.setitem(METRICS, PRECISION.name, PRECISION)


@pytest.fixture
def run(one_row_more, record, metric):
    """A control that must leak and a defense, each attacked twice; the second attack is the stronger by precision."""
    made = []
    for name, fields in (("dp_sgd", {}), ("sgd", {"control": "positive"})):
        made.append(record("utility", defense=name, **fields))
        for attack, value in (("likelihood_ratio", 0.61), ("loss_threshold", 0.83)):
            metrics = {"auc": metric(1.3 - value, 0.01), "precision_at_10": metric(value, 0.11)}
            made.append(record(defense=name, attack=attack, metrics=metrics, **fields))
    return made


def test_a_row_more_is_a_column_of_text_markdown_and_latex(run):
    board = Board.from_records(run)
    for form in (board.to_text(width=300), board.to_markdown(), board.to_latex()):
        words = " ".join(form.split())
        assert "P@10" in words
        assert "0.8 " in words and "0.7, 1.0]" in words  # one digit, as its row says; the interval is of two looks
        assert "Chance: AUC 0.5, TPR 0.01, precision 0.5. Higher AUC, TPR, precision and PSNR leak more." in words
        assert "by P@10 the strongest is loss" in words


def test_a_row_more_is_in_csv_and_json_with_the_strongest_attack(run):
    board = Board.from_records(run)
    first = next(csv.DictReader(io.StringIO(board.to_csv())))
    assert (first["precision_at_10"], first["precision_at_10_attack"]) == ("0.83", "loss_threshold")
    tree = board.to_dict()["rows"][0]["precision_at_10"]
    assert (tree["value"], tree["looks"], tree["attack"]) == (0.83, 2, "loss_threshold")


def test_a_row_more_is_a_column_of_the_page(run, tmp_path):
    for record in run:
        write(record, tmp_path / "records")
    write_manifest(asked_for(*run), tmp_path / "records")
    page = build(tmp_path, tmp_path / "page").read_text(encoding="utf-8")
    assert 'title="Members among the ten highest scores."' in page and "Worst precision <small>at 10</small>" in page
    assert '<span class="value">0.83</span><span class="ends">[0.7' in page
    assert page.index("Worst precision") < page.index("Strongest attack")
    assert "precision_at_10" in json.loads((tmp_path / "page/board.json").read_text())["rows"][0]


def test_a_row_more_is_checked_in_records_and_said_of_violations(one_row_more, record, metric):
    with pytest.raises(RecordError, match=r"precision_at_10.value must be in \[0, 1\], got 1.5"):
        record(metrics={"precision_at_10": metric(1.5)})
    with pytest.raises(RecordError, match="precision_at_10 must be in a membership record"):
        record("utility", metrics={"precision_at_10": metric(0.5)})
    refuted = record(metrics={"precision_at_10": metric(0.9, 0.05)}, flags=("claim_violated",))
    assert "precision_at_10 0.90 [0.85, 0.95]" in Board.from_records([refuted]).violations[0].sentence
    assert "precision_at_10" in reported()


def test_a_proved_bound_is_rounded_down_and_a_measurement_to_the_nearest():
    assert METRICS["canary_epsilon"].number(5.7956) == "5.79" and METRICS["epsilon_lower"].number(2.0, 2) == "2.00"
    assert METRICS["implied_epsilon"].number(5.7956, 2) == "5.80"


def test_the_table_agrees_with_itself():
    keys = [column.key for _, column in columns()]
    assert len(keys) == len(set(keys)) and not {"defense", "epsilon", "attack", "rank", "seeds", "flags"} & set(keys)
    fields = [column.field or column.key for _, column in columns()]
    assert len(fields) == len(set(fields))
    for name, metric in METRICS.items():
        assert name == metric.name and (metric.kind in KINDS or metric.kind == CLAIM) and metric.least < metric.most
        assert metric.chance is None or metric.clip(metric.chance) == metric.chance
        assert metric.floor is None or METRICS[metric.floor.metric].kind == metric.kind
        assert all(column.variant is None or KINDS[metric.kind].variant(column.variant) for column in metric.columns)
