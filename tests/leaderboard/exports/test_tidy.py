"""The tidy table: a line per row and metric, nothing invented, units apart, no path."""

import io
import math

import pyarrow.parquet as pq
import pytest

import leakbench.leaderboard
from leakbench.leaderboard.board.identity import board_version, row_id
from leakbench.leaderboard.exports.parquet import parquet
from leakbench.leaderboard.exports.safe_text import portable, slug
from leakbench.leaderboard.exports.tidy import COLUMNS, arrow, tables
from leakbench.leaderboard.records.record import write

from ...parameters import subtests
from ..conftest import claim, record
from .conftest import PUBLICATION, board, lines


def test_every_estimate_of_a_board_is_a_line_with_the_same_numbers():
    for row in board().rows:
        for key, estimate in row.estimates.items():
            line = next(x for (of, name), x in lines().items() if of == row_id(row) and name in names_of(key))
            assert (line["value"], line["low"], line["high"], line["n"], line["reason"]) == (
                *(estimate.value, estimate.low, estimate.high, estimate.n),
                portable(estimate.reason),
            )
            assert line["value"] is not None or line["reason"]
    # And the proved lower bound of every row.
    assert len(lines()) == sum(len(row.estimates) + 1 for row in board().rows)


def names_of(key):
    from leakbench.leaderboard.metrics import columns

    return {column.field or column.key for _, column in columns() if column.key == key}


def test_an_infinite_epsilon_is_infinite_with_its_reason_and_an_absent_one_is_null():
    by_defense = {line["defense"]: line for line in lines().values() if not line["control"]}
    assert by_defense["clipped_sgd"]["epsilon"] == math.inf
    assert by_defense["clipped_sgd"]["epsilon_reason"] == "no noise is added"
    assert by_defense["random_sparsification"]["epsilon"] == 3.0


def test_rows_of_clients_are_in_a_table_of_their_own():
    assert {
        unit: {line["defense"] for line in of} & {"dp_fed_avg", "clipped_sgd"} for unit, of in tables(board()).items()
    } == {
        "record": {"clipped_sgd"},
        "client": {"dp_fed_avg"},
    }


def test_parquet_reads_back_equal_with_its_version_and_meanings():
    files = parquet(board(), PUBLICATION)
    assert sorted(files) == ["client.parquet", "record.parquet"]
    for unit, content in tables(board()).items():
        table = pq.read_table(io.BytesIO(files[f"{unit}.parquet"]))
        assert table.to_pylist() == content
        assert table.schema.metadata[b"leakbench.version"].decode() == board_version()
        assert table.schema.field("low").metadata[b"meaning"].decode() == COLUMNS["low"][1]


def folder_of(tmp_path, name, *made):
    for one in made:
        write(one, tmp_path / name / "records")
    return tmp_path / name


def test_to_pandas_reads_folders_and_keeps_null_and_infinity(tmp_path):
    first = folder_of(tmp_path, "a", record(), record("utility"))
    second = folder_of(tmp_path, "b", record(defense="clipped_sgd", claim=claim(None)))
    frame = leakbench.leaderboard.to_pandas(first, second)
    assert list(frame.columns) == list(COLUMNS)
    accuracy = frame[frame["metric"] == "accuracy"].set_index("defense")
    values, epsilons = accuracy["value"].to_dict(), accuracy["epsilon"].to_dict()
    assert values["dp_sgd"] == 0.9 and math.isnan(values["clipped_sgd"])
    assert epsilons["clipped_sgd"] == math.inf
    assert set(frame["version"]) == {board_version()}


def test_to_pandas_does_not_mix_units(tmp_path):
    both = folder_of(tmp_path, "a", record(), record(defense="dp_fed_avg", claim=claim(unit="client")))
    with pytest.raises(ValueError, match="unit must be 'record' or 'client' for a board of both"):
        leakbench.leaderboard.to_pandas(both)
    assert set(leakbench.leaderboard.to_pandas(both, unit="client")["defense"]) == {"dp_fed_avg"}
    alone = folder_of(tmp_path, "b", record())
    with pytest.raises(ValueError, match="unit must be one of the board's, record, got 'client'"):
        leakbench.leaderboard.to_pandas(alone, unit="client")


def test_an_empty_table_has_all_columns():
    assert arrow([]).column_names == list(COLUMNS)


@subtests(
    "text, expected",
    [
        ("run toy --out /home/somebody/res", "run toy --out res"),
        ("'/home/some body/a b.py' failed", "'a b.py' failed"),
        ("C:\\Users\\me\\a.py:f", "a.py:f"),
        ("file:///home/x/y.txt", "y.txt"),
        ("~/me/z", "z"),
        ('{"p": "/tmp/abc/d.py:f"}', '{"p": "d.py:f"}'),
        ("https://a.b/c/d", "https://a.b/c/d"),
        ("1/2, TPR/FPR, mine/half.py:f, a / b /C </b>", "1/2, TPR/FPR, mine/half.py:f, a / b /C </b>"),
        ("\ud800", "?"),
    ],
)
def test_paths_become_file_names(text, expected):
    assert portable(text) == expected


def test_slugs_of_different_texts_differ():
    assert slug("dp_sgd") == "dp_sgd"
    assert len({slug(text) for text in ("a b", "a/b", "a-b", "../a", "", ".", "日本")}) == 7
    assert not {slug(text) for text in ("..", "", "/")} & {"", ".", ".."}
