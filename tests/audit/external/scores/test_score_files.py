"""Scores of somebody's own model as a table: read, refused, and measured as attacks are."""

import os

import numpy as np
import pandas as pd
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


def test_a_column_that_occurs_twice_is_refused(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text("member,score,score\n1,2,3\n0,1,2\n")
    with pytest.raises(ValueError, match=r"scores.csv must have columns of different names, and 'score' occurs twice"):
        read_scores(path, delta=1e-5)
