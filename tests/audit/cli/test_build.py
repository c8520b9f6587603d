"""The command that makes a site: where it puts it, what it prints, its exit codes, and the guide to methods."""

import json
from functools import partial

import pytest

from leakbench.audit.catalog import listing
from leakbench.audit.cli.guide import defense_families, guide
from leakbench.leaderboard.records.record import write

from .conftest import toy_record


@pytest.fixture
def command(command):
    """Runs `leakbench leaderboard build` in an empty folder: code, stdout, stderr."""
    return partial(command, "leaderboard", "build")


@pytest.fixture
def results(tmp_path):
    """Two folders of one record each."""
    for i, name in enumerate(("one", "two")):
        write(toy_record(i), tmp_path / name / "records")


def test_several_folders_make_one_site_and_the_last_line_names_it(command, results, tmp_path):
    assert command("one", "two", "--out", "out") == (0, "site: out/index.html\n", "")
    (row,) = (tmp_path / "out/rows").iterdir()
    assert json.loads((row / "row.json").read_text())["seeds"] == [0, 1]


def test_without_out_the_site_lies_in_the_folder_site(command, results, tmp_path):
    assert command("one") == (0, "site: site/index.html\n", "")
    assert (tmp_path / "site/board.csv").is_file()


def test_with_json_there_is_one_document(command, results, tmp_path):
    code, out, err = command("one", "--json", "--license", "CC-BY-4.0", "--dataset", "org/name")
    (row,) = (tmp_path / "site/rows").iterdir()
    assert (code, json.loads(out), err) == (0, {"site": "site/index.html", "rows": [row.name]}, "")
    assert "license CC-BY-4.0" in (row / "index.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["nothing"], 3, "error: no results in nothing: there is no such directory\n"),
        (["one", "--out", "two"], 3, "out must be an empty folder or a site"),
        (["one", "--out", "one/records/0000000000000000.json"], 3, "out must be a folder"),
        (["one", "one/records"], 2, "records must differ in id"),
        (["one", "--dataset", "name"], 2, "dataset must be ORG/NAME"),
        ([], 2, "Missing argument"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(command, results, arguments, code, sentence):
    got, out, err = command(*arguments)
    assert (got, out) == (code, "") and sentence in err and err.count("\n") == 1


def test_every_defense_of_the_catalogue_has_a_family_and_a_source():
    families = defense_families()
    assert not set(listing.names("defenses")) - families.keys()
    assert {families["dp_sgd"], families["pcdp"], families["dpdr"], families["dp_ssgd"], families["fed_avg"]} == {
        "bound", "codec", "two blocks", "pruned", "federated",
    }  # fmt: skip
    words = guide()
    assert all(method.summary and method.source and method.family for method in words.defenses.values())
    assert all(method.summary and method.source for method in words.attacks.values())
    assert all(words.suites.values())
