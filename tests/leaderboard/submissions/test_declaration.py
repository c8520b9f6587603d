"""Declarations: what is refused, by the name of its field, and how files are read."""

import json
import os

import pytest

from leakbench.leaderboard.submissions.declaration import LARGEST, NAME, DeclarationError, parse, read_declaration
from tests.parameters import subtests

from .declarations import DOCUMENT, declaration

METHOD = DOCUMENT["method"]


def refused(document):
    with pytest.raises(DeclarationError) as error:
        parse({key: value for key, value in document.items() if value is not None})
    return error.value.faults


@subtests(
    "field, value",
    [
        ("handle", "../ada"),
        ("handle", "Ada"),
        ("handle", "-o"),
        ("handle", "a--b"),
        ("handle", "ada\n"),
        ("handle", "a" * 41),
        ("licence", "CC-BY-NC-4.0"),
        ("licence", "Apache 2.0"),
        ("licence", "MIT OR LicenseRef-mine"),
        ("who", "<script>alert(1)</script>"),
        ("who", ""),
        ("who", " "),
        ("who", "x" * 301),
        ("who", "a\x1b[2J"),
        ("who", "left\u202eright"),
        ("who", "TO FILL IN"),
        ("contact", 3),
        ("suite", "../quick"),
        ("suite", "quick.toml"),
        ("suite_digest", "0" * 63),
        ("small", "yes"),
        ("kind", "baseline"),
        ("new", "two\nlines"),
        ("surprise", "x"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_of_its_field(field, value):
    faults = refused(DOCUMENT | {field: value})
    assert [fault.field for fault in faults] == [field]
    assert faults[0].file == NAME and "\x1b" not in str(faults[0])


@subtests(
    "field, value",
    [
        ("file", "../half_dp.py"),
        ("file", "/etc/passwd"),
        ("file", "half_dp.txt"),
        ("file", "-f.py"),
        ("file", ".hidden.py"),
        ("function", "os.system"),
        ("sha256", "1" * 64 + "\n"),
        ("sha256", "A" * 64),
    ],
)
def test_a_bad_value_of_the_method_is_refused_by_the_name_of_its_field(field, value):
    assert [fault.field for fault in refused(DOCUMENT | {"method": METHOD | {field: value}})] == [f"method.{field}"]


@subtests(
    "settings",
    [
        {"a } , b": 1},
        {"name": "other"},
        {"lr": {"deep": 1}},
        {"lr": float("nan")},
    ],
)
def test_settings_are_plain_values_under_plain_names(settings):
    assert all(
        fault.field.startswith("method") for fault in refused(DOCUMENT | {"method": METHOD | {"settings": settings}})
    )


def test_all_faults_are_named_together():
    faults = refused(DOCUMENT | {"handle": "A", "licence": "none", "who": None})
    assert {fault.field for fault in faults} == {"handle", "licence", "who"}


@subtests(
    "kind, changes",
    [
        ("defense", {"method": None}),
        ("attack", {"method": None}),
        ("checkpoint", {}),
        ("run", {}),
        ("checkpoint", {"method": None}),
        ("run", {"method": None, "checkpoint": {"sha256": "2" * 64}}),
    ],
)
def test_a_kind_has_its_own_subject_and_no_other(kind, changes):
    assert "must" in refused(DOCUMENT | {"kind": kind} | changes)[0].problem


def test_a_checkpoint_or_a_plain_run_needs_no_method():
    assert declaration(kind="run", method=None).method is None
    assert declaration(kind="checkpoint", method=None, checkpoint={"sha256": "2" * 64}).checkpoint is not None


@subtests(
    "schema",
    [
        2,
        True,
        1.0,
        "1",
        None,
    ],
)
def test_another_schema_is_refused_before_its_keys(schema):
    (fault,) = refused(DOCUMENT | {"schema": schema, "unknown_to_us": 1})
    assert fault.field == "schema" and "must be 1" in fault.problem


@subtests(
    "content",
    [
        b"\xff\xfe",
        b"handle = ",
        b"a = " + b"[" * 30_000,
        b"a = " + b"{a=" * 10_000,
        b"[" + b"a." * 20_000 + b"a]",
        b"schema = " + b"9" * 10_000,
        b"x = 1\n" * (LARGEST // 6 + 2),
        b"schema = 1\nschema = 1\n",
    ],
)
def test_bombs_and_broken_files_are_faults(content):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, NAME).write_bytes(content)
        with pytest.raises(DeclarationError) as error:
            read_declaration(Path(folder))
    assert error.value.faults[0].file == NAME and folder not in str(error.value)


def test_links_pipes_and_missing_files_are_faults(tmp_path):
    for make in (lambda path: path.symlink_to("/etc/passwd"), os.mkfifo, os.mkdir, lambda path: None):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        make(folder / NAME)
        with pytest.raises(DeclarationError, match=NAME) as error:
            read_declaration(folder)
        assert str(tmp_path) not in str(error.value)


def test_a_file_is_read_as_its_document(tmp_path):
    lines = [f"{key} = {json.dumps(value)}" for key, value in DOCUMENT.items() if not isinstance(value, dict)]
    table = [f"{key} = {json.dumps(value)}" for key, value in METHOD.items() if key != "settings"]
    text = [*lines, "[method]", *table, "[method.settings]", "clip_norm = 2.0"]
    (tmp_path / NAME).write_text("\n".join(text))
    assert read_declaration(tmp_path) == declaration()
