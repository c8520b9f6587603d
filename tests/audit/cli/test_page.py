"""The command that makes a page: where it puts it, what it prints, and what it refuses."""

import json
from functools import partial

import pytest

from leakbench.leaderboard.board import table
from leakbench.leaderboard.page import build as page_build
from leakbench.leaderboard.records.record import write

from .conftest import toy_record


@pytest.fixture
def command(command):
    """Runs `leakbench leaderboard page` in an empty folder: code, stdout, stderr."""
    return partial(command, "leaderboard", "page")


@pytest.fixture
def results(tmp_path):
    """A folder of one record."""
    write(toy_record(), tmp_path / "results" / "records")
    return tmp_path / "results"


def test_the_last_line_names_the_page(command, results, tmp_path):
    assert command("results", "--out", "out") == (0, "page: out/index.html\n", "")
    assert (tmp_path / "out/index.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_without_out_the_page_lies_among_the_results(command, results):
    assert command("results") == (0, "page: results/page/index.html\n", "")
    assert (results / "page" / "board.csv").is_file()


def test_with_json_there_is_one_document(command, results):
    code, out, err = command("results", "--out", "out", "--json")
    assert (code, json.loads(out), err) == (0, {"page": "out/index.html"}, "")


def test_records_are_read_once(command, results, monkeypatch):
    read = []
    reader = page_build.read_folder
    for module in (page_build, table):
        monkeypatch.setattr(module, "read_folder", lambda *given: read.append(given) or reader(*given))
    assert command("results")[0] == 0 and len(read) == 1


def test_the_page_made_twice_is_the_same(command, results, tmp_path):
    first = command("results") and (results / "page/index.html").read_bytes()
    assert command("results")[0] == 0 and (results / "page/index.html").read_bytes() == first


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["nothing"], 3, "error: no results in nothing: there is no such directory\n"),
        (["results", "--out", "results/records/0000000000000000.json"], 3, "out must be a folder"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(command, results, arguments, code, sentence):
    got, out, err = command(*arguments)
    assert (got, out) == (code, "") and sentence in err and err.count("\n") == 1
