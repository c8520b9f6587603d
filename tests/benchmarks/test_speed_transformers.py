"""The benchmark of transformers: what it compares, what it skips by name, and whose sums it calls wrong."""

import json

import pytest
import torch
from typer.testing import CliRunner

from leakbench.benchmarks.speed import transformer_models, transformers
from leakbench.benchmarks.speed.__main__ import app
from leakbench.benchmarks.speed.harness import Measurement, SpeedComparison
from leakbench.benchmarks.speed.part import SpeedPart

from ..parameters import subtests


@pytest.mark.long
def test_a_quick_run_has_a_table_of_engines_ratios_differences_and_refusals(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers, "missing", lambda name: "" if name == "lstm" else "transformers")
    command = ["transformers", "--quick", "--rounds", "1", "--case", "lstm", "--case", "bert+lora"]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "transformers.json").read_text())
    assert document["skipped"] == {"bert+lora": "transformers is not installed"}
    assert [comparison["name"] for comparison in document["comparisons"]] == ["lstm"]
    assert document["differences"]["lstm"]["auto"] < 1e-5
    text = (tmp_path / "transformers.md").read_text()
    assert "Skipped: bert+lora, transformers is not installed." in text and "| lstm |" in text


def test_cases_are_the_models_plain_and_with_adapters():
    names = transformer_models.names()
    assert {"bert", "bert+lora", "swin", "lstm", "timm_convnext+lora"} <= {*names} and "lstm+lora" not in names
    assert transformer_models.missing("lstm") == ""
    refused = CliRunner().invoke(app, ["transformers", "--case", "bart"])
    assert refused.exit_code == 2
    assert CliRunner().invoke(app, ["transformers", "--way", "auto"]).exit_code == 2


def test_ratios_are_of_medians_within_rounds_and_of_minima():
    ways = {"auto": (2.0, 3.0, 4.0), "sgd": (1.0, 1.0, 2.0), "opacus-hooks": (4.0, 6.0, 9.0)}
    measured = tuple(Measurement(way=way, seconds=seconds, note="layerwise") for way, seconds in ways.items())
    compared = SpeedComparison(name="a", about={}, measurements=measured, peer="opacus-hooks")
    row = transformers._row(compared, {"auto": 2e-7, "opacus-hooks": "n/a"})
    assert row == ["a", "layerwise", "3000.0", "2.00 (2.00)", "0.50 (0.50)", "n/a", "2e-07", "n/a"]


def test_a_wrong_sum_of_the_peer_is_among_the_refusals(monkeypatch):
    monkeypatch.setattr(transformers, "_checked", lambda *_: None)
    compared = SpeedComparison(name="lstm", about={}, measurements=(), peer="opacus-hooks")
    part = SpeedPart("benchmarks.transformers", {"quick": True})
    (*_, last) = transformers._refusals("lstm", compared, 0.5, part)
    assert last == ["lstm", "opacus-hooks", "accepts the model; its clipped sum is off by 5e-01"]


@pytest.mark.peers
@subtests("network", ["lstm", *(name for name in transformer_models.names() if name != "lstm")])
def test_models_are_the_same_each_time_and_give_logits(network):
    if package := transformer_models.missing(network):
        pytest.skip(f"{package} is no dependency of leakbench")
    first, second = (transformer_models.model_of(network, quick=True).eval() for _ in range(2))
    inputs, labels = transformer_models.data_of(network, 3, quick=True)
    assert first(inputs).shape == (3, transformer_models.CLASSES) and labels.shape == (3,)
    assert torch.equal(first(inputs), second(inputs))
