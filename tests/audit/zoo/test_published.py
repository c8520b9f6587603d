"""The zoo of this distribution: small enough for a repository, and every file, claim and split is what it should be."""

import importlib.resources
from pathlib import Path

import pytest
import torch

import leakbench
from leakbench.audit.plan.checkpoints import checkpoint_name
from leakbench.audit.plan.expand import plan, trainings
from leakbench.audit.suite.suite import load
from leakbench.audit.zoo.index import read_index

FOLDER = Path(str(importlib.resources.files("leakbench.benchmarks.zoo")))
NAMES = tuple(read_index(FOLDER))


@pytest.fixture(autouse=True)
def _this_distribution(monkeypatch):
    monkeypatch.delenv("LEAKBENCH_ZOO", raising=False)


def test_all_files_have_under_ten_megabytes_and_belong_to_a_checkpoint():
    files = [path for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert sum(path.stat().st_size for path in files) < 10_000_000
    folders = {path.parent.relative_to(FOLDER).as_posix() for path in files} - {"."}
    assert folders == set(NAMES) == set(leakbench.zoo.names())


@pytest.mark.long
def test_the_suite_asks_for_exactly_these_checkpoints_and_trains_nothing():
    suite = load("zoo_small")
    assert {checkpoint_name("digits_mlp", request) for request in trainings(suite)} == set(NAMES)
    cells = plan(suite).cells
    assert {cell.subject for cell in cells} == {"checkpoint"} and not any(cell.skip or cell.needs for cell in cells)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n.endswith("seed0") else [pytest.mark.slow]) for n in NAMES]
)
def test_a_checkpoint_keeps_its_digests_claim_split_and_shadow_models(name):
    checkpoint = leakbench.zoo.load(name)
    stored = checkpoint.record.claim.epsilon
    assert checkpoint.claim.epsilon == pytest.approx(torch.inf if stored is None else stored, rel=1e-3)
    assert f"eps{stored:.0f}" in name if stored is not None else "eps" not in name
    assert len(checkpoint.candidates) == 600 and len(checkpoint.members()) == 300
    logits, population = checkpoint.shadow_outputs
    assert logits.shape == (16, 600, 1, 10) and population.shape == (16, 200, 10)
    with torch.no_grad():
        predicted = checkpoint.model(checkpoint.candidates.inputs).argmax(dim=1)
    outside = ~torch.isin(checkpoint.candidates.ids, checkpoint.members())
    accuracy = (predicted == checkpoint.candidates.labels)[outside].float().mean()
    assert accuracy == pytest.approx(checkpoint.record.metrics["accuracy"].value, abs=1e-6)
