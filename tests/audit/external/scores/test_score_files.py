"""Scores of somebody's own model as a table: read, refused, and measured as attacks are."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from leakbench.audit.cli.evidence import _table
from leakbench.audit.external.examples.split import read_split
from leakbench.audit.external.scores.score_files import read_scores
from leakbench.audit.external.transcript.format import TranscriptHeader, file_fault
from leakbench.audit.suite.suite import load as read_suite
from leakbench.defenses.core.training import checkpoint

from ....parameters import subtests


def _written(folder, **columns):
    path = folder / "scores.csv"
    pd.DataFrame(columns).to_csv(path, index=False)
    return path


def test_scores_losses_and_logits_tell_the_same(tmp_path):
    draw = np.random.default_rng(0)
    logits, labels = draw.normal(size=(60, 3)), draw.integers(0, 3, size=60)
    losses = torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(labels), reduction="none").numpy()
    member = np.arange(60) < 30
    columns = {f"logit_{i}": logits[:, i] for i in range(3)}
    path = _written(tmp_path, member=member.astype(int), score=-losses, loss=losses, label=labels, **columns)
    found = {one.name: one.metrics["auc"].value for one in read_scores(path, delta=1e-5).outcomes}
    assert set(found) == {"score", "loss", "loss_of_logits"}
    expected = (losses[member][:, None] < losses[~member]).mean()
    assert all(value == pytest.approx(expected) for value in found.values())


def test_parquet_is_known_by_its_bytes(tmp_path):
    path = tmp_path / "scores.csv"  # the name says otherwise
    pd.DataFrame({"member": [True, False], "score": [1.0, 0.0]}).to_parquet(path)
    assert read_scores(path, delta=1e-5).member.tolist() == [True, False]


@subtests(
    ("columns", "told"),
    [
        ({"score": [1.0, 2.0]}, "must have a column member"),
        ({"member": [1, 0]}, "must have a column score"),
        ({"member": [1, 1], "score": [1.0, 2.0]}, "rows with member 0"),
        ({"member": [0, 0], "score": [1.0, 2.0]}, "rows with member 1"),
        ({"member": [1, 2], "score": [1.0, 2.0]}, "must be 0 or 1, got '2' in row 2"),
        ({"member": [1, 0], "score": [1.0, float("nan")]}, "finite numbers, got 'nan' in row 2"),
        ({"member": [1, 0], "score": [1.0, float("inf")]}, "finite numbers, got 'inf' in row 2"),
        ({"member": [1, 0], "loss": ["a", "b"]}, "finite numbers, got 'a' in row 1"),
        (
            {"member": [1, 0], "label": [1, 0.9], "logit_0": [1.0, 2.0], "logit_1": [0.0, 1.0]},
            "label of scores.csv must hold whole numbers, got 0.9 in row 2",
        ),
        (
            {"member": [1, 0], "label": [1, 1e300], "logit_0": [1.0, 2.0], "logit_1": [0.0, 1.0]},
            r"whole numbers below 2\*\*63, got 1e\+300 in row 2",
        ),
        ({"id": ["x", None], "member": [1, 0], "score": [1.0, 2.0]}, "must have an id, and row 2 has none"),
        ({"id": ["x", "x"], "member": [1, 0], "score": [1.0, 2.0]}, "'x' occurs twice"),
        ({"member": [1, 0], "logit_0": [1.0, 2.0], "logit_1": [1.0, 2.0]}, "with a column label"),
        ({"member": [1, 0], "label": [0, 5], "logit_0": [1.0, 2.0], "logit_1": [1.0, 2.0]}, r"in \[0, 2\), got 5"),
        ({"member": [1, 0], "label": [0, 1], "logit_0": [1.0, 2.0]}, "give 0 as logit_0 and z as logit_1, or loss"),
        ({"member": [], "score": []}, "a row an example"),
        ({"member": [1, 0], "score": [1.0, 1.0]}, "score of scores.csv must differ between rows"),
        ({"member": [1, 0], "score": [1.0, 2.0], "loss": [0.0, 0.0]}, "loss of scores.csv must differ between rows"),
    ],
)
def test_a_bad_table_is_refused_in_one_sentence(tmp_path, columns, told):
    with pytest.raises(ValueError, match=told):
        read_scores(_written(tmp_path, **columns), delta=1e-5)


def test_what_is_no_table_is_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00garbage")
    (tmp_path / "c.csv").write_bytes(b"PAR1 and nothing else")
    for name in ("a.csv", "b.csv", "c.csv"):
        with pytest.raises(ValueError, match="must be a CSV file with a header, or Parquet"):
            read_scores(tmp_path / name, delta=1e-5)
    with pytest.raises(ValueError, match="cannot: No such file"):
        read_scores(tmp_path / "none.csv", delta=1e-5)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_in_place_of_any_file_that_a_user_names_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe.toml")
    for read in (
        lambda: read_scores(pipe, delta=1e-5),
        lambda: read_split(pipe),
        lambda: read_suite(pipe),
        lambda: _table(pipe, ["id"]),
        lambda: checkpoint.load(pipe, fingerprint=""),
    ):
        with pytest.raises((ValueError, OSError), match="regular file"):
            read()
    assert "no regular file" in str(file_fault(pipe, TranscriptHeader(names=("w",), shapes=((2,),))))


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="this system has no pipes of the shell")
def test_a_pipe_that_the_shell_opened_is_read():
    reader, writer = os.pipe()
    os.write(writer, b"member,score\n1,2\n0,1\n")
    os.close(writer)
    table = read_scores(Path(f"/dev/fd/{reader}"), delta=1e-5)
    os.close(reader)
    assert table.member.tolist() == [True, False]


def test_a_column_that_occurs_twice_is_refused(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text("member,score,score\n1,2,3\n0,1,2\n")
    with pytest.raises(ValueError, match=r"scores.csv must have columns of different names, and 'score' occurs twice"):
        read_scores(path, delta=1e-5)


@subtests("extra", ["", "x", ",,"])
def test_rows_with_more_fields_than_the_header_are_refused(tmp_path, extra):
    path = tmp_path / "scores.csv"
    path.write_text(f"id,member,guess,score\na,1,0,2.0,{extra}\nb,0,1,1.0,{extra}\n")
    with pytest.raises(ValueError, match=r"rows of scores.csv must have as many fields as its header, 4, .* comma"):
        read_scores(path, delta=1e-5)


def test_an_empty_cell_of_another_column_is_content_like_any_other(tmp_path):
    rows = {"member": [1, 0, 1], "score": [1.0, 2.0, 3.0]}
    ids = read_scores(_written(tmp_path, **rows, note=["a", "b", "c"]), delta=1e-5).ids
    blank = read_scores(_written(tmp_path, **rows, note=["a", None, "c"]), delta=1e-5).ids
    assert (ids == blank).tolist() == [True, False, True]


@pytest.mark.long
def test_a_small_parquet_file_of_very_many_rows_is_refused_before_they_are_decoded(tmp_path):
    path = tmp_path / "scores.parquet"
    rows = pa.table({"member": pa.array(np.zeros(10**6, bool)), "score": pa.array(np.zeros(10**6))})
    with pq.ParquetWriter(path, rows.schema, compression="zstd") as file:
        for _ in range(100):
            file.write_table(rows)
    with pytest.raises(ValueError, match=r"scores.parquet must be .* must decode to at most .* 200000000 values"):
        read_scores(path, delta=1e-5)


@pytest.mark.long
def test_long_values_that_a_parquet_file_repeats_are_refused_while_they_are_decoded(tmp_path):
    path = tmp_path / "scores.parquet"
    rows = pa.table({"member": pa.array(np.arange(20_000) % 2), "note": pa.array(["x" * 200_000] * 20_000)})
    pq.write_table(rows, path, compression="zstd")
    assert path.stat().st_size < 2**20
    with pytest.raises(ValueError, match=r"must decode to at most .*, and holds more"):
        read_scores(path, delta=1e-5)


@subtests("metadata", [b"{", b"[]", b'{"index_columns": ["absent"], "columns": [], "column_indexes": []}'])
def test_metadata_of_pandas_are_not_read(tmp_path, metadata):
    path = tmp_path / "scores.parquet"
    rows = pa.table({"member": pa.array([1, 0]), "score": pa.array([1.0, 2.0])})
    pq.write_table(rows.replace_schema_metadata({b"pandas": metadata}), path)
    assert read_scores(path, delta=1e-5).member.tolist() == [True, False]


def test_an_index_that_pandas_stored_is_no_content(tmp_path):
    path, table = tmp_path / "scores.parquet", pd.DataFrame({"member": [1, 0], "score": [1.0, 2.0]})
    table.to_parquet(path)
    ids = read_scores(path, delta=1e-5).ids
    table.set_axis([7, 3]).to_parquet(path)
    assert (read_scores(path, delta=1e-5).ids == ids).all()


def test_columns_of_one_name_in_parquet_are_refused(tmp_path):
    path = tmp_path / "scores.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1, 0])] * 3, names=["member", "member", "score"]), path)
    with pytest.raises(ValueError, match=r"columns of different names, and 'member' occurs twice"):
        read_scores(path, delta=1e-5)
