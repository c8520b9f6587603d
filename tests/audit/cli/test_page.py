"""The command that makes a page: where it puts it, what it prints, and what it refuses."""

import json

import pytest

from leakbench.audit.cli import app as cli
from leakbench.leaderboard.board import table
from leakbench.leaderboard.page import build as page_build
from leakbench.leaderboard.records.record import MethodUsed, Metric, Provenance, Record, RecordedClaim, write
from leakbench.leaderboard.records.task import TrainingTask


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    """Runs the command in an empty folder: code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["leaderboard", "page", *arguments])
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out, captured.err

    return run


@pytest.fixture
def results(tmp_path):
    """A folder of one record."""
    record = Record(
        id="0" * 16, suite="toy", suite_digest="d", kind="utility", defense=MethodUsed(name="dp_sgd"), seed=0,
        task=TrainingTask({"data": "digits", "model": "mlp"}), device="cpu", seconds=1.0,
        provenance=Provenance(version="0.1.0", source="0" * 64),
        metrics={"accuracy": Metric(value=0.9, low=0.8, high=1.0, better="higher")},
        claim=RecordedClaim(epsilon=3.0, delta=1e-5, relation="add_remove", sampling="poisson", accountant="PLD"),
    )  # fmt: skip
    write(record, tmp_path / "results" / "records")
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
