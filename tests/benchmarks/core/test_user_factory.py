"""Networks from a user's file: what is called with what, and whatever goes wrong, in one sentence."""

import copy
import re
import sys
import textwrap

import pytest
import torch

from leakbench.benchmarks import models

from ...parameters import subtests

SHAPE = (1, 6, 6)
FILE = """
    from __future__ import annotations
    from dataclasses import dataclass
    from torch import nn
    from beside import HIDDEN

    @dataclass
    class Sizes:
        hidden: int = HIDDEN

    class Net(nn.Module):
        def __init__(self, classes, sizes):
            super().__init__()
            self.sizes = sizes
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(36, sizes.hidden), nn.Linear(sizes.hidden, classes))
        def forward(self, x):
            return self.layers(x)

    def build(input_shape, classes, hidden=HIDDEN):
        return Net(classes, Sizes(hidden))
    def anything(**given):
        return Net(given["classes"], Sizes(given.get("width", 2)))
    def bare():
        return Net(3, Sizes())
    def greedy(classes, lr):
        return Net(classes, Sizes())
    def broken(classes):
        raise KeyError("nothing here\\nand more")
    def number(input_shape, classes):
        return 7
    def pair(classes):
        class Pair(nn.Module):
            def forward(self, x):
                return x, x
        return Pair()
    def mixing(classes):
        return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.Dropout(0.5), nn.Linear(36, classes))
    value = 3
"""


@pytest.fixture
def file(tmp_path):
    folder = tmp_path / "nets"
    folder.mkdir()
    (folder / "mine.py").write_text(textwrap.dedent(FILE))
    (folder / "beside.py").write_text("HIDDEN = 5")
    loaded = set(sys.modules)
    yield folder / "mine.py"
    for name in set(sys.modules) - loaded:
        del sys.modules[name]


def build(name, **settings):
    return models.build(name, input_shape=SHAPE, classes=3, **settings)


def refused(sentence, name, **settings):
    with pytest.raises(ValueError, match=re.escape(sentence)) as refusal:
        build(name, **settings)
    assert "\n" not in str(refusal.value)


@subtests(
    "function, settings, hidden",
    [("build", {}, 5), ("build", {"hidden": 4}, 4), ("anything", {"width": 8}, 8), ("bare", {}, 5)],
)
def test_a_factory_is_called_with_what_it_takes(file, function, settings, hidden):
    model = build(f"{file}:{function}", **settings)
    assert model(torch.zeros(2, *SHAPE)).shape == (2, 3)
    assert model.get_submodule("layers.1").weight.shape == (hidden, 36)


def test_a_path_is_relative_to_the_working_directory(file, monkeypatch):
    monkeypatch.chdir(file.parent.parent)
    assert isinstance(build("nets/mine.py:build"), torch.nn.Module)


def test_the_seed_alone_decides_the_weights_and_nothing_is_left_behind(file):
    def weights(seed):
        return torch.nn.utils.parameters_to_vector(build(f"{file}:build", seed=seed).parameters())

    path, before = list(sys.path), torch.get_rng_state()
    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert sys.path == path
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_built_can_be_copied(file):
    model = build(f"{file}:build")
    twin = copy.deepcopy(model).double()
    assert twin(torch.zeros(1, *SHAPE, dtype=torch.float64)).dtype == torch.float64


def test_trying_a_model_out_leaves_its_mode_and_its_statistics_alone(file):
    model = build(f"{file}:mixing")
    assert all(module.training for module in model.modules())
    assert int(model.get_buffer("1.num_batches_tracked")) == 0


def test_the_file_is_read_anew_every_time(file):
    build(f"{file}:build")
    file.write_text(file.read_text().replace("hidden=HIDDEN", "hidden=9"))
    assert build(f"{file}:build").get_submodule("layers.1").weight.shape == (9, 36)


def test_what_goes_wrong_is_one_sentence_that_names_file_and_function(file):
    refused(f"no function 'buld' in {file}; it has anything, bare, broken, build", f"{file}:buld")
    refused(f"no function 'value' in {file}", f"{file}:value")
    refused(f"model '{file}:build' has no setting 'width'; it has hidden", f"{file}:build", width=1)
    refused(f"model '{file}:bare' has no setting 'classes_'; it has none", f"{file}:bare", classes_=1)
    refused(f"greedy() in {file} raised TypeError: ", f"{file}:greedy")
    refused(f"broken() in {file} raised KeyError: ", f"{file}:broken")
    refused(f"number() in {file} must return a torch.nn.Module, got int", f"{file}:number")
    refused(f"model '{file}:pair' must map [2, 1, 6, 6] to [2, 3], got tuple", f"{file}:pair")


def test_a_model_for_other_data_is_refused(file):
    with pytest.raises(ValueError, match=r"must map \[2, 1, 6, 6\] to \[2, 4\], got \(2, 3\)"):
        models.build(f"{file}:bare", input_shape=SHAPE, classes=4)
    with pytest.raises(ValueError, match=r"cannot take inputs of shape \(1, 7, 7\): "):
        models.build(f"{file}:build", input_shape=(1, 7, 7), classes=3)


def test_a_file_that_cannot_be_run_is_refused(file):
    file.write_text("import no_such_module_of_anybody")
    refused(f"{file} raised ModuleNotFoundError: No module named 'no_such_module_of_anybody'", f"{file}:build")
    file.write_text("def build(:")
    refused(f"{file} raised SyntaxError: ", f"{file}:build")


def test_checking_a_name_runs_nothing(file):
    file.write_text("raise RuntimeError")
    models.check(f"{file}:build")
    assert models.describe(f"{file}:build") == "What build() of mine.py builds."
    assert models.defaults(f"{file}:build") == {}
    assert models.takes(f"{file}:build", "hidden")
    assert not models.takes(f"{file}:build", "input_shape")
    with pytest.raises(ValueError, match=r"no file 'nets/none\.py' to build model 'nets/none\.py:build' from"):
        models.check("nets/none.py:build")
    with pytest.raises(ValueError, match="must end in the name of a function, got 'a b'"):
        models.check(f"{file}:a b")
