"""The benchmark of federated rounds: both ways take the same steps, and wrong options are refused."""

import json
from types import MethodType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from leakbench.benchmarks.speed import federated
from leakbench.benchmarks.speed.__main__ import app

SIZES = {"network": "mlp", "clients": 3, "examples": 20, "batch": 5, "local_steps": 2}


@pytest.mark.parametrize("method", sorted(federated.METHODS))
def test_a_call_of_either_way_takes_as_many_local_steps(method, monkeypatch):
    steps = []
    for module, name in (("training.ongoing", "OngoingRun.step"), ("federated.local_training", "LocalTrainer._step")):
        owner, _, attribute = f"leakbench.defenses.core.{module}.{name}".rpartition(".")
        package, _, of = owner.rpartition(".")
        kind = getattr(__import__(package, fromlist=[of]), of)
        before = getattr(kind, attribute)

        def counted(self, *arguments, before=before, name=name):
            steps.append(name)
            return before(self, *arguments)

        monkeypatch.setattr(kind, attribute, counted)
    for way in (federated.CENTRAL, method):
        step = federated.build(**SIZES, way=way, method=method)
        step()
        steps.clear()
        step()
        assert len(steps) == 6 and len(set(steps)) == 1


def test_the_benchmark_runs_and_judges_its_target(tmp_path):
    command = ["federated", "--quick", "--rounds", "1", "--way", "fed_avg", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, command).exit_code == 0
    document = json.loads((tmp_path / "federated.json").read_text())
    (target,) = document["targets"]
    assert target["limit"] == federated.GOAL and target["value"] > 0 and target["met"] is (target["value"] <= 1.1)


@pytest.mark.parametrize("option", [["--way", "fed_sgd"], ["--case", "mlp"], ["--rounds", "99"]])
def test_options_that_do_not_fit_are_refused(option):
    assert CliRunner().invoke(app, ["federated", "--quick", *option]).exit_code == 2


def test_a_round_moves_the_global_model_and_central_steps_move_theirs():
    way = federated.build(**SIZES, way="fed_avg", method="fed_avg")
    assert isinstance(way, MethodType)
    run: Any = way.__self__
    before = run.state.parameters.clone()
    way()
    assert not torch.equal(run.state.parameters, before) and run.state.round == 1
