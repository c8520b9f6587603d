"""Croissant: the structure here, and its own reader in an environment of its own (make test-peers)."""

import json
import subprocess

import pytest

from leakbench.leaderboard.exports.croissant import croissant
from leakbench.leaderboard.exports.formats import write
from leakbench.leaderboard.exports.publication import Publication
from leakbench.leaderboard.exports.tidy import COLUMNS
from leakbench.leaderboard.records.files import digest_of_bytes

from .conftest import PUBLICATION, board, numbers, python_with

READER = """
import json, math, sys
import mlcroissant
dataset = mlcroissant.Dataset(jsonld=sys.argv[1])
metadata, read = dataset.metadata, {}
for unit in ("record", "client"):
    read[unit] = []
    for item in dataset.records(unit):
        plain = {name.partition("/")[2]: value for name, value in item.items()}
        if plain["value"] is not None and not math.isnan(plain["value"]):
            row, metric = (plain[name].decode() for name in ("row_id", "metric"))
            read[unit].append([row, metric, plain["value"]])
print(json.dumps({
    "read": read, "errors": sorted(metadata.ctx.issues.errors), "warnings": sorted(metadata.ctx.issues.warnings),
    "limitations": metadata.data_limitations, "version": metadata.ctx.conforms_to.value,
}))
"""


def test_files_are_named_with_their_digests_and_every_column_is_a_field():
    files = croissant(board(), PUBLICATION)
    document = json.loads(files.pop("croissant.json"))
    assert {f["contentUrl"]: f["sha256"] for f in document["distribution"]} == {
        name: digest_of_bytes(content) for name, content in files.items()
    }
    assert [[f["name"] for f in records["field"]] for records in document["recordSet"]] == [list(COLUMNS)] * 2
    assert document["license"] == "CC-BY-4.0" and "author = {somebody}" in document["citeAs"]


def test_what_the_publisher_does_not_say_is_left_out():
    document = json.loads(croissant(board(), Publication())["croissant.json"])
    assert not document.keys() & {"license", "creator", "citeAs", "url"}


@pytest.mark.peers
def test_mlcroissant_reads_equal_numbers_without_errors_and_warnings(tmp_path):
    python = python_with("mlcroissant", "mlcroissant>=1.1 pyarrow", tmp_path / "environment")
    write(croissant(board(), PUBLICATION), tmp_path / "set")
    command = [str(python), "-c", READER, str(tmp_path / "set/croissant.json")]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert (answer["errors"], answer["warnings"]) == ([], []) and answer["limitations"]
    assert answer["version"] == "http://mlcommons.org/croissant/1.1"
    for unit in ("record", "client"):
        assert {(row, metric): value for row, metric, value in answer["read"][unit]} == numbers(unit)
