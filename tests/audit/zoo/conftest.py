"""A zoo of three tiny checkpoints, built once; each test gets a copy that it may damage."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from leakbench.audit.run.checkpoints import build
from leakbench.audit.suite import suite
from leakbench.audit.zoo.index import Pinned, read_index, write_index
from leakbench.leaderboard.records.files import digest_of_bytes

SUITE = """
name = "tiny"
zoo = "tiny"
seeds = [0]
budget = { epsilon = [8.0], delta = 1e-5 }
defense = [{ name = "sgd" }, { name = "dp_sgd", clip_norm = 1.0 }]
attack = [
    { name = "loss_threshold" },
    { name = "gradient_norm" },
    { name = "label_only" },
    { name = "lira", shadows = 4 },
    { name = "rmia", shadows = 4 },
]

[task]
data = "digits"
model = { name = "mlp", hidden = 4 }
private = 60
non_member = 60
public = 100
batch = 30
epochs = 2
lr = 0.5
"""
NAMES = ("tiny/dp_sgd/eps8/seed0", "tiny/sgd/never_saw/seed0", "tiny/sgd/seed0")


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("zoo")
    (folder / "tiny.toml").write_text(SUITE, encoding="utf-8")
    build(suite.load(folder / "tiny.toml"), folder, device=torch.device("cpu"), shadows=4)
    return folder


@pytest.fixture
def zoo(built, tmp_path, monkeypatch) -> Path:
    """The folder that LEAKBENCH_ZOO names."""
    copy = tmp_path / "zoo"
    shutil.copytree(built, copy)
    monkeypatch.setenv("LEAKBENCH_ZOO", str(copy))
    return copy


@pytest.fixture
def tiny(zoo) -> suite.Suite:
    return suite.load(zoo / "tiny.toml")


@pytest.fixture
def repin(zoo):
    """Changes a file or the manifest of a checkpoint, and gives manifest and index the digests that fit."""

    def change(name: str, file: str, content: bytes | dict) -> None:
        folder = zoo / name
        manifest = json.loads((folder / "manifest.json").read_text())
        if isinstance(content, dict):
            manifest |= content
        else:
            (folder / file).write_bytes(content)
            manifest["files"][file] = {"sha256": digest_of_bytes(content), "bytes": len(content)}
        written = json.dumps(manifest).encode()
        (folder / "manifest.json").write_bytes(written)
        write_index(zoo, read_index(zoo) | {name: Pinned(sha256=digest_of_bytes(written))})

    return change
