"""Suite files, and methods of a third party as an installed distribution would bring them."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from audit.catalog import methods as catalog
from audit.suite import suite as suites

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
        catalog._entry_points.cache_clear()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A third party's distribution, gone after the test."""
    made = Site(tmp_path / "site")
    monkeypatch.syspath_prepend(str(made.folder))
    yield made
    for name in [name for name in sys.modules if name.startswith("borrowed_")]:
        del sys.modules[name]
