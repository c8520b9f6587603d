"""Suite files, and methods of a third party as an installed distribution would bring them."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from leakbench.audit.catalog import listing
from leakbench.audit.isolation import worker
from leakbench.audit.suite import suite as suites

from .forked import Forked

SUITE = """
name = "toy"
seeds = [0]
task = { data = "digits", model = { name = "mlp", hidden = 8 }, batch = 70, epochs = 1, lr = 0.5, candidates = 100 }
budget = { epsilon = 3.0, delta = 1e-5 }
defense = [{ name = "sgd" }, { name = "dp_sgd" }]
attack = [{ name = "likelihood_ratio" }, { name = "loss_threshold" }]
controls = false
"""

SHARE = '\nshare = { data = "photos", model = "mlp", step = 1, images = 1 }\n'
INVERSION = '{ name = "inverting_gradients", iterations = 3 }'


@pytest.fixture(scope="session", autouse=True)
def _forked_attacks() -> None:
    """Processes of third parties' attacks start in milliseconds."""
    worker.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": Forked})  # type: ignore[assignment]


@pytest.fixture(scope="session", autouse=True)
def _cached_bounds() -> None:
    """Bounds are functions of counts, and many simulated audits have equal counts: each is computed once."""
    from leakbench.audit.evidence.audit import METHODS

    METHODS.update({name: replace(row, bound=cache(row.bound)) for name, row in METHODS.items()})


@pytest.fixture(scope="session", autouse=True)
def _cached_shifts() -> None:
    """A shift is a function of the examples, and takes as long as all else that an audit of a model asks of them."""
    from leakbench.audit.external.examples import exchangeable
    from leakbench.audit.external.model import audit, preflight
    from leakbench.audit.scoring.shift import shift_between
    from leakbench.audit.subjects import training_data

    known = {}

    def cached(members, non_members, *, seed=0):
        parts = [one.cpu() for part in (members, non_members) for one in (part.ids, part.inputs, part.labels)]
        key = (seed, *((one.dtype, one.shape, one.numpy().tobytes()) for one in parts))
        if key not in known:
            known[key] = shift_between(members, non_members, seed=seed)
        return known[key]

    for module in (exchangeable, audit, preflight, training_data):
        vars(module)["shift_between"] = cached


@pytest.fixture
def converted_here(monkeypatch) -> None:
    """Pickled tensors are loaded in this process; the loader in one of its own is tested in files/test_read.py."""
    from safetensors.torch import save_file

    from leakbench.audit.external.files import read

    def converted(source, target, checked):
        state = torch.load(source)
        for name in checked.path:
            state = state[name]
        tensors = {name: state[name].detach() for name in checked.tensors}
        save_file({name: one.clone(memory_format=torch.contiguous_format) for name, one in tensors.items()}, target)

    monkeypatch.setattr(read, "converted", converted)


@pytest.fixture
def suite_of(tmp_path) -> Callable[[str], suites.Suite]:
    """Loads the text of a suite file."""

    def read(text: str) -> suites.Suite:
        path = tmp_path / "toy.toml"
        path.write_text(text, encoding="utf-8")
        return suites.load(path)

    return read


class Site:
    """A folder on the import path with a distribution that adds methods by entry points."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info = folder / "borrowed-1.0.dist-info"
        self.info.mkdir(parents=True)
        (self.info / "METADATA").write_text("Metadata-Version: 2.1\nName: borrowed\nVersion: 1.0\n", encoding="utf-8")

    def add(self, kind: str, name: str, source: str) -> None:
        """One method of its own module."""
        (self.folder / f"borrowed_{name}.py").write_text(source, encoding="utf-8")
        with (self.info / "entry_points.txt").open("a", encoding="utf-8") as points:
            points.write(f"[leakbench.{kind}]\n{name} = borrowed_{name}:{name}\n")
        listing._entry_points.cache_clear()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A third party's distribution, gone after the test."""
    made = Site(tmp_path / "site")
    monkeypatch.syspath_prepend(str(made.folder))
    yield made
    for name in [name for name in sys.modules if name.startswith("borrowed_")]:
        del sys.modules[name]


@dataclass(frozen=True)
class Elsewhere:
    """A model that was trained elsewhere, members, non-members and public examples (inputs, labels)."""

    model: nn.Module
    members: tuple[torch.Tensor, torch.Tensor]
    non_members: tuple[torch.Tensor, torch.Tensor]
    public: tuple[torch.Tensor, torch.Tensor]

    def write(self, folder):
        """The examples as .npz, and the model's parameters as safetensors."""
        from safetensors.torch import save_file

        for name in ("members", "non_members", "public"):
            inputs, labels = getattr(self, name)
            np.savez(folder / f"{name}.npz", inputs=inputs.numpy(), labels=labels.numpy())
        save_file(self.model.state_dict(), str(folder / "model.safetensors"))
        return folder


@pytest.fixture(scope="session")
def overfitted() -> Elsewhere:
    """Digits, 600 members known by heart."""
    from leakbench.benchmarks import models

    data, target = load_digits(return_X_y=True)
    inputs = torch.tensor(data / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(target, dtype=torch.int64)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    inside, outside, public = order[:600], order[600:1200], order[1200:]
    model = models.build("mlp", input_shape=(1, 8, 8), classes=10, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    coins = torch.Generator().manual_seed(1)
    for _ in range(100):
        for batch in inside[torch.randperm(600, generator=coins)].split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    pairs = [(inputs[chosen], labels[chosen]) for chosen in (inside, outside, public)]
    return Elsewhere(model.eval(), *pairs)
