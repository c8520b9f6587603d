"""Checkpoints by name: what is loaded is what was trained, and nothing with another digest or format is."""

import json
import os
import pickle
from dataclasses import replace

import pytest
import safetensors.torch
import torch

import leakbench
from leakbench.audit.plan import expand
from leakbench.audit.run.checkpoints import build
from leakbench.audit.subjects.shadow_bank import bank_of, outputs_of
from leakbench.audit.subjects.trained_run import TrainedRun
from leakbench.audit.zoo.index import Pinned, ZooError, read_index, write_index
from leakbench.leaderboard.records.validation import RecordError

from .conftest import NAMES

DP = NAMES[0]
CPU = torch.device("cpu")


def test_a_checkpoint_has_the_weights_outputs_and_claim_of_the_training_of_its_suite(zoo, tiny):
    request = next(r for r in expand.trainings(tiny) if r.defense.name == "dp_sgd" and r.control is None)
    trained = TrainedRun(request, CPU, every_step=False)
    checkpoint = leakbench.zoo.load(DP)
    for name, value in trained.run.model.state_dict().items():
        assert torch.equal(checkpoint.model.state_dict()[name], value)
    assert not checkpoint.model.training
    assert checkpoint.claim.epsilon == pytest.approx(trained.run.claim(1e-5).epsilon, rel=1e-9)
    assert checkpoint.record.claim.epsilon == pytest.approx(checkpoint.claim.epsilon, rel=1e-9)
    assert set(checkpoint.members().tolist()) == set(trained.members.ids.tolist())
    logits, population = outputs_of([stack(CPU) for stack in bank_of(request, 4, 1)])
    torch.testing.assert_close(checkpoint.shadow_outputs[0], logits, rtol=2**-11, atol=1e-6)
    torch.testing.assert_close(checkpoint.shadow_outputs[1], population, rtol=2**-11, atol=1e-6)


def test_the_same_code_writes_the_same_bytes(zoo, tiny, tmp_path):
    build(tiny, tmp_path / "again", device=CPU, shadows=4)
    assert read_index(tmp_path / "again") == read_index(zoo)


def test_candidates_come_in_an_order_that_is_independent_of_membership(zoo):
    checkpoint = leakbench.zoo.load(DP)
    ids = checkpoint.candidates.ids
    assert torch.equal(ids, ids.sort().values) and len(ids) == 120
    assert torch.isin(checkpoint.members(), ids).all()


def test_names_are_listed_and_an_unknown_one_gets_the_nearest(zoo):
    assert set(NAMES) <= set(leakbench.zoo.names())
    with pytest.raises(ZooError, match=r"no checkpoint named 'tiny/dp_sdg/eps8/seed0'; did you mean 'tiny/dp_sgd/eps8"):
        leakbench.zoo.load("tiny/dp_sdg/eps8/seed0")


@pytest.mark.parametrize("file", ["weights.safetensors", "split.json", "manifest.json", "shadows.safetensors"])
def test_a_file_that_differs_in_a_bit_is_refused(zoo, file):
    path = zoo / DP / file
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ZooError, match=r"must have the SHA-256 [0-9a-f]{64} .* got [0-9a-f]{64}: it was changed"):
        _ = leakbench.zoo.load(DP).shadow_outputs


def test_a_checkpoint_of_another_index_than_expected_is_refused(zoo):
    with pytest.raises(ZooError, match="must have the SHA-256 0000"):
        leakbench.zoo.load(DP, sha256="0" * 64)


def test_a_claim_that_its_steps_do_not_prove_is_refused(zoo, repin):
    """The record is sealed anew, as a forger would."""
    record = leakbench.zoo.load(DP).record
    forged = replace(record, claim=replace(record.claim, epsilon=1.0))
    repin(DP, "manifest.json", {"record": json.loads(forged.to_json())})
    with pytest.raises(ZooError, match=r"epsilon of checkpoint .* must follow from its steps, which prove 8, got 1"):
        _ = leakbench.zoo.load(DP).claim


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("bomb",))


def hostile_files():
    weights = {"0.weight": torch.zeros(4, 64)}
    return {
        "a bare pickle": (pickle.dumps(Bomb()), "it is a bare pickle"),
        "a truncated header": (b"\xff" * 7 + b"\x7f{", "cannot read"),
        "other parameters": (safetensors.torch.save(weights), "must have at least 310 parameters, got 256"),
        "NaN": (safetensors.torch.save({"x": torch.full((400,), torch.nan)}), "NaN or infinite"),
        "a web page": (b"<html></html>", "it is a web page"),
    }


@pytest.mark.parametrize("kind", hostile_files())
def test_weights_that_are_no_safetensors_of_the_network_are_refused(zoo, repin, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content, message = hostile_files()[kind]
    repin(DP, "weights.safetensors", content)
    with pytest.raises(ZooError, match=message):
        leakbench.zoo.load(DP)
    assert not (tmp_path / "bomb").exists()


def test_a_file_of_torch_save_is_refused(zoo, repin, tmp_path):
    torch.save(leakbench.zoo.load(DP).model.state_dict(), tmp_path / "w.pt")
    repin(DP, "weights.safetensors", (tmp_path / "w.pt").read_bytes())
    with pytest.raises(ZooError, match="it is a pickle, which is read only where you allow it"):
        leakbench.zoo.load(DP)


BIG = {"sha256": "0" * 64, "bytes": 2**40}
HOSTILE_MANIFESTS = {
    "a file outside": ({"files": {"../../x": BIG | {"bytes": 3}}}, "files must be of"),
    "a file too large": ({"files": {"weights.safetensors": BIG, "split.json": BIG}}, r"bytes must be in \[1, "),
    "another name": ({"name": "tiny/sgd/seed0"}, "must be of checkpoint 'tiny/dp_sgd/eps8/seed0', got"),
    "a name that leads out": ({"name": "../x"}, "name must be written as"),
    "an unknown key": ({"code": "import os"}, "bad manifest"),
    "another schema": ({"schema": 7}, "schema must be 1"),
}


@pytest.mark.parametrize("kind", HOSTILE_MANIFESTS)
def test_a_manifest_that_breaks_a_rule_is_refused(zoo, repin, kind):
    changes, message = HOSTILE_MANIFESTS[kind]
    repin(DP, "manifest.json", changes)
    with pytest.raises(RecordError, match=message):
        leakbench.zoo.load(DP)


def test_a_model_or_data_set_of_a_path_is_refused(zoo, repin):
    record = leakbench.zoo.load(DP).record
    content = json.loads(record.to_json())
    split = json.loads((zoo / DP / "split.json").read_text())
    repin(DP, "split.json", json.dumps(split | {"data": "folder:/etc"}).encode())
    with pytest.raises(ZooError, match="must be a data set of the catalogue, got 'folder:/etc'"):
        _ = leakbench.zoo.load(DP).candidates
    forged = replace(record, task=dict(record.task) | {"model": "mine.py:net"})
    repin(DP, "manifest.json", {"record": json.loads(forged.to_json())})
    with pytest.raises(ZooError, match=r"model of checkpoint .* must be of the catalogue, got 'mine.py:net'"):
        leakbench.zoo.load(DP)
    huge = replace(record, task=dict(record.task) | {"model_settings": {"hidden": 10**9}})
    repin(DP, "manifest.json", {"record": json.loads(huge.to_json())})
    with pytest.raises(ZooError, match=r"must have at least 7\d{10} parameters"):
        leakbench.zoo.load(DP)
    repin(DP, "manifest.json", {"record": content | {"seconds": 5.0}})
    with pytest.raises(RecordError, match="it was edited after it was written"):
        leakbench.zoo.load(DP)


def test_a_link_in_the_place_of_a_file_is_refused(zoo):
    path = zoo / DP / "split.json"
    path.rename(zoo / "elsewhere")
    path.symlink_to(zoo / "elsewhere")
    with pytest.raises(RecordError, match="symbolic link"):
        leakbench.zoo.load(DP)


def test_an_index_with_a_name_that_leads_out_is_refused(zoo):
    for name in ("../../etc/passwd", "/etc/x", "one", "a/../b", "A/b"):
        with pytest.raises(RecordError, match="name must be written as"):
            write_index(zoo, {name: Pinned(sha256="0" * 64)})


def test_a_folder_that_does_not_exist_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("LEAKBENCH_ZOO", str(tmp_path / "none"))
    with pytest.raises(ZooError, match="LEAKBENCH_ZOO must name a folder that exists, got"):
        leakbench.zoo.names()
