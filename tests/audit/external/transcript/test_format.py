"""Transcripts on disk: what the documented writer writes is read, and what is not whole is refused by name."""

import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from leakbench.audit.external.files import FileRefused
from leakbench.audit.external.transcript.format import TranscriptHeader, TranscriptRefused, read_transcript, step_file

from ....parameters import subtests

PAGE = Path(__file__).parents[4] / "docs" / "transcript_format.md"
DIM = 6


def documented():
    """The writer of the page, as somebody would copy it."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    writer = next(block for block in blocks if "def write_step" in block)
    assert "torch" not in writer
    found: dict = {}
    exec(compile(writer, str(PAGE), "exec"), found)  # noqa: S102 - the page's own code is what is tested
    return found


WRITER = documented()


def written(folder, *, steps=3, change=None, **stated):
    """A transcript by the page's writer, each step's arguments changed by `change(step, arguments)`."""
    WRITER["write_header"](folder, {"weight": (2, 2), "bias": (2,)}, **{"clip_norm": 1.0, "clipping": "flat"} | stated)
    coins, theta = np.random.default_rng(0), np.zeros(DIM, dtype=np.float32)
    for step in range(steps):
        released = coins.normal(size=DIM).astype(np.float32) / 4
        given = {"released": released, "parameters": theta, "expected_batch": 4, "noise_std": 1.0, "lr": 0.5}
        theta = theta - np.float32(0.5) * released
        if change is not None:
            change(step, given)
        WRITER["write_step"](folder, step, **given)
    WRITER["write_end"](folder, steps)
    return folder


def test_what_a_writer_of_numpy_alone_wrote_is_read(tmp_path):
    there = read_transcript(written(tmp_path / "run"))
    steps = list(there)
    assert [step.step for step in steps] == [0, 1, 2] and there.steps_taken == 3 and there.remarks == ()
    assert there.header.layout.dim == DIM and there.header.clip_norm == 1.0
    for one, after in pairwise(steps):
        assert one.after is not None and after.parameters is not None
        torch.testing.assert_close(one.after, after.parameters)
    torch.testing.assert_close(steps[0].sums, 4 * steps[0].released)


@subtests(
    ("change", "message"),
    [
        (lambda s, g: g.update(released=g["released"][:5]), r"released must have shape \[6\], got \[5\]"),
        (lambda s, g: g.update(noise_std=-1.0), "noise_std of .* must be positive"),
        (lambda s, g: g.update(noise_std=float("nan")), "NaN or infinite"),
        (lambda s, g: g.update(expected_batch=0), "expected_batch of .* must be positive"),
        (lambda s, g: s == 1 and g.update(released=g["released"] * np.float32("nan")), "entries of 'released' are NaN"),
        (lambda s, g: g.update(batch=3), "unknown tensor 'batch'"),
        (lambda s, g: g.update(released=np.ones(DIM, dtype=np.float32)), "same release in steps 0 and 1"),
        (lambda s, g: g.update(session=2 - s), "sessions .* must not fall"),
        (lambda s, g: g.update(released=np.arange(DIM)), "released must be of F32 or F64, got I64"),
    ],
)
def test_a_step_that_is_none_is_refused_by_its_field(tmp_path, change, message):
    with pytest.raises((TranscriptRefused, FileRefused), match=message):
        list(read_transcript(written(tmp_path / "run", change=change)))


def test_gaps_exchanged_files_and_cut_ones_are_told_apart(tmp_path):
    gap = written(tmp_path / "gap")
    (gap / step_file(1)).unlink()
    with pytest.raises(TranscriptRefused, match="without a gap, got none of number 1"):
        read_transcript(gap)
    exchanged = written(tmp_path / "exchanged")
    (exchanged / step_file(0)).rename(exchanged / "x")
    (exchanged / step_file(1)).rename(exchanged / step_file(0))
    (exchanged / "x").rename(exchanged / step_file(1))
    with pytest.raises(TranscriptRefused, match="must hold step 0, got step 1: files were exchanged"):
        list(read_transcript(exchanged))
    cut = written(tmp_path / "cut")
    (cut / step_file(1)).write_bytes((cut / step_file(1)).read_bytes()[:-1])
    with pytest.raises(TranscriptRefused, match="steps behind it cannot stand without it"):
        read_transcript(cut)
    last = written(tmp_path / "last")
    (last / step_file(2)).write_bytes(b"")
    assert read_transcript(last).lost == (2,)
    short = written(tmp_path / "short")
    WRITER["write_end"](short, 2)
    with pytest.raises(TranscriptRefused, match="says 2 steps, and there are 3"):
        read_transcript(short)


@subtests(
    ("change", "message"),
    [
        ({"format": "mine"}, "format and version"),
        ({"version": 2}, "format and version"),
        ({"names": ["a", "a"]}, "names must be distinct"),
        ({"names": "ab"}, "names must be a list"),
        ({"shapes": [[2, 2]]}, "one shape a name"),
        ({"shapes": [[2, -1], [2]]}, "positive whole numbers"),
        ({"shapes": [[2, 2.5], [2]]}, "lists of whole numbers"),
        ({"clip_norm": -1.0}, "clip_norm must be a positive"),
        ({"clip_norm": "1"}, "clip_norm must be a number"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier must be a positive"),
        ({"clipping": "none"}, "clipping must be one of"),
        ({"parameters": 3}, "parameters must be a string"),
        ({"batch": 3}, "unknown field 'batch'"),
    ],
)
def test_a_header_is_refused_by_its_field(tmp_path, change, message):
    folder = written(tmp_path / "run")
    path = folder / "header.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(TranscriptRefused, match=message):
        read_transcript(folder)


def test_what_is_no_transcript_is_refused(tmp_path):
    with pytest.raises(TranscriptRefused, match="must be a folder"):
        read_transcript(tmp_path / "nowhere")
    with pytest.raises(TranscriptRefused, match=r"header\.json"):
        read_transcript(tmp_path)
    for content in (b"", b"[]", b"{", b"[" * 100_000, b"\xff"):
        (tmp_path / "header.json").write_bytes(content)
        with pytest.raises(TranscriptRefused, match=r"header\.json"):
            read_transcript(tmp_path)
    (tmp_path / "header.json").write_bytes(TranscriptHeader(names=("a",), shapes=((2,),)).to_bytes())
    with pytest.raises(TranscriptRefused, match="must have steps, got none"):
        read_transcript(tmp_path)


def test_a_file_of_another_kind_under_a_steps_name_runs_nothing(tmp_path):
    folder = written(tmp_path / "run", steps=2)
    torch.save({"step": torch.zeros(1)}, folder / step_file(0))
    with pytest.raises(TranscriptRefused, match="cannot read"):
        read_transcript(folder)
