"""`leakbench cache`: what is kept, why it would not be taken, and what goes."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from leakbench.audit.plan.artifact import Artifact
from leakbench.audit.run import artifacts, cache
from leakbench.audit.run.artifacts import compute_artifact, origin_of

CPU = torch.device("cpu")


def made(value: object, device: torch.device) -> dict[str, object]:
    """What an artifact gives."""
    if value == "luck":
        raise RuntimeError("out of luck")
    return {"value": value}


@pytest.fixture
def results(tmp_path):
    """A folder of results with an artifact in every state, and what asked for each."""
    folder = tmp_path / "out"
    asked = {
        word: Artifact({"x": word}, f"train {word}", partial(made, "luck" if word == "failed" else word * 2000))
        for word in ("usable", "failed", "edited", "old", "torn")
    }
    for word, one in asked.items():
        store = folder / ("tuning/points" if word == "usable" else "artifacts")
        store.mkdir(parents=True, exist_ok=True)
        compute_artifact(one, store, CPU, origin_of(one))
    store = folder / "artifacts"
    edited = store / f"{asked['edited'].name}.json"
    edited.write_text(edited.read_text().replace("editededited", "edITededited", 1))
    torn = store / f"{asked['torn'].name}.json"
    torn.write_text(torn.read_text()[:50])
    old = store / f"{asked['old'].name}.json"
    document = json.loads(old.read_text())
    document["provenance"]["source"] = "0" * 64
    old.write_text(json.dumps(document))
    return folder, asked


def test_every_artifact_is_listed_with_its_size_and_whether_a_run_would_take_it(results, document, command):
    folder, asked = results
    listed = {one["name"]: one for one in document("cache", "ls", folder)}
    states = {word: listed[one.name]["state"] for word, one in asked.items()}
    assert states == {
        "usable": "usable",
        "failed": "failed",
        "edited": "edited or torn",
        "old": "of another code",
        "torn": "edited or torn",
    }
    assert listed[asked["usable"].name]["what"] == "train usable" and listed[asked["usable"].name]["bytes"] > 12_000
    assert listed[asked["torn"].name]["what"] is None
    code, out, err = command("cache", "ls", folder)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("5 artifacts, ") and len(out.splitlines()) == 6


def test_an_artifact_is_explained_by_what_decided_it_and_why_it_is_not_taken(results, document, command):
    folder, asked = results
    one = document("cache", "explain", folder, asked["old"].name[:10])
    assert one["request"] == {"x": "old"} and len(one["differs"]) == 1
    code, out, _ = command("cache", "explain", folder, asked["failed"].name)
    assert code == 0 and "RuntimeError: out of luck" in out and "x: failed" in out
    code, _, err = command("cache", "explain", folder, "zz")
    assert code == 3 and "no artifact of" in err and "begins with 'zz'" in err
    code, _, err = command("cache", "explain", folder, "")
    assert code == 3 and "no artifact of" in err


def test_what_no_run_would_take_goes_and_nothing_else(results, document):
    folder, asked = results
    before = {path.name for path in folder.rglob("*.json")}
    assert len(document("cache", "gc", folder, "--dry-run")["found"]) == 4
    assert {path.name for path in folder.rglob("*.json")} == before
    gone = set(document("cache", "gc", folder)["removed"])
    assert gone == {one.name for word, one in asked.items() if word != "usable"}
    assert {path.stem for path in folder.rglob("*.json")} == {asked["usable"].name}
    assert document("cache", "gc", folder)["removed"] == []
    assert document("cache", "gc", folder, "--everything")["removed"] == [asked["usable"].name]
    assert document("cache", "ls", folder) == []


def test_no_folder_of_results_is_one_sentence_and_none_is_made(command, tmp_path):
    for arguments in (("ls", "nowhere"), ("gc", "nowhere"), ("explain", "nowhere", "ab")):
        code, out, err = command("cache", *arguments)
        assert (code, out) == (3, "") and "no folder of results nowhere" in err
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "artifacts").symlink_to(tmp_path / "elsewhere")
    code, _, err = command("cache", "gc", "out", "--everything")
    assert code == 3 and "symbolic link" in err


def test_what_is_not_named_as_an_artifact_stays(results, document):
    folder, asked = results
    (folder / "artifacts" / "notes.json").write_text("{}")
    (folder / "artifacts" / f"{'a' * 32}.json").mkdir()
    assert len(document("cache", "ls", folder)) == len(asked)
    assert len(document("cache", "gc", folder, "--everything")["removed"]) == len(asked)
    assert {path.name for path in folder.rglob("*.json")} == {"notes.json", f"{'a' * 32}.json"}


def test_nothing_is_removed_through_a_link_above_a_store(results, command):
    folder, _ = results
    (folder / "tuning").rename(folder.parent / "elsewhere")
    (folder / "tuning").symlink_to(folder.parent / "elsewhere")
    code, _, err = command("cache", "gc", folder, "--everything")
    assert code == 3 and "tuning is a symbolic link" in err and len(list(folder.parent.rglob("*.json"))) == 5


def test_nothing_goes_while_a_run_writes_into_the_folder(results, command, monkeypatch):
    folder, _ = results
    from leakbench.audit.run.lock import locked

    with locked(folder):
        code, _, err = command("cache", "gc", folder)
    assert code != 0 and "another run writes into" in err and len(list(folder.rglob("*.json"))) == 5


def test_an_artifact_says_what_asked_for_it(results):
    folder, asked = results
    (one,) = [one for one in cache.stored(folder) if one.name == asked["usable"].name]
    assert one.words == "train usable" and one.request == {"x": "usable"}
    # What it says of itself decides nothing: the name and the seal do.
    content = json.loads(one.path.read_text()) | {"words": "something else", "request": {"x": "else"}}
    one.path.write_text(json.dumps(content))
    kept = artifacts.read_kept({one.name: asked["usable"]}, one.path.parent)
    assert kept == {one.name: {"value": "usable" * 2000}} and replace(one, words="") != one
