"""Every Python snippet of every document runs as it is printed, from another folder, beside Opacus's `benchmarks`."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from opacus import optimizers
from PIL import Image
from torch import nn

from leakbench.audit.run import harness
from leakbench.audit.suite.suite import load
from leakbench.benchmarks import data

from .parameters import long_but

ROOT = Path(__file__).parents[1]
PARTS = ("attacks", "audit", "benchmarks", "defenses", "docs", "leaderboard")
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *(path for part in PARTS for path in (ROOT / part).rglob("*.md"))]
    if "```python" in path.read_text(encoding="utf-8")
)
# Parts of something larger, with `...` for the rest: they are parsed and not run.
FRAGMENTS = {
    ("CONTRIBUTING.md", 0): "the loop of a test",
    ("benchmarks/models/README.md", 0): "a row of a table",
    ("docs/federated.md", 1): "Flower's app of a client, which test_sides.py runs",
    ("docs/federated.md", 2): "Flower's app of a server, which test_sides.py runs",
    ("docs/selftest.md", 0): "a function whose loop is left out",
}


def snippets(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(encoding="utf-8"), re.M | re.S)


def a_model(_: Path) -> dict[str, Any]:
    """A model, its members, and others."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(6, 2)), torch.randn(400, 6)
    y, optimizer = (x[:, 0] > 0).long(), torch.optim.SGD(model.parameters(), 1.0)
    for _step in range(60):  # so that it is right more often than a coin
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "x": x[:200],
        "y": y[:200],
        "x2": x[200:],
        "y2": y[200:],
    }


def own_data(folder: Path) -> dict[str, Any]:
    """The files that the page names, each a small data set."""
    coins = np.random.default_rng(0)
    images = coins.integers(0, 256, (900, 32, 32, 3), dtype=np.uint8)
    for i, image in enumerate(images):
        place = folder / "birds" / f"class {i % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{i:03}.jpg", quality=95)
    (folder / "beans").mkdir()
    for part, some in (("train", range(600)), ("test", range(600, 900))):
        files = [{"bytes": (folder / "birds" / f"class {i % 2}" / f"{i:03}.jpg").read_bytes()} for i in some]
        table = pd.DataFrame({"image": files, "label": [i % 2 for i in some]})
        table.to_parquet(folder / "beans" / f"{part}-00000.parquet")
    y = np.arange(900) % 2
    np.savez(folder / "digits.npz", x=images[..., :1], y=y)
    np.savez(folder / "cifar10_resnet50.npz", x=coins.normal(size=(900, 16)).astype(np.float32), y=y)
    return {"splits": data.load("digits")}


def results(folder: Path) -> dict[str, Any]:
    """The results of a small run."""
    suite = folder / "small.toml"
    suite.write_text(
        'name = "small"\nseeds = [0]\nbudget = { epsilon = 3.0, delta = 1e-5 }\n'
        'task = { data = "digits", model = { name = "mlp", hidden = 8 }, batch = 70, epochs = 1, lr = 0.5 }\n'
        'defense = [{ name = "sgd" }]\nattack = [{ name = "loss_threshold" }]\ncontrols = false\n',
        encoding="utf-8",
    )
    harness.run(load(suite), folder / "results", device=torch.device("cpu"), jobs=1)
    return {}


def a_step(folder: Path) -> dict[str, Any]:
    """A model, Opacus's optimizer of it, and what a loop has in its hands once it has drawn its noise."""
    given = a_model(folder)
    optimizer = optimizers.DPOptimizer(
        given["optimizer"], noise_multiplier=1.1, max_grad_norm=1.0, expected_batch_size=8
    )
    return given | {"optimizer": optimizer, "step": 0, "noisy_sum": np.zeros(650), "theta": np.zeros(650)}


# Documents whose snippets take longer than half a second.
LONG = {"attacks/README.md", "benchmarks/README.md", "defenses/README.md", "docs/audit.md", "leaderboard/README.md"}
GIVEN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "benchmarks/README.md": own_data,
    "docs/audit.md": a_model,
    "docs/transcript_format.md": a_step,
    "leaderboard/README.md": results,
}


@pytest.mark.parametrize("document", long_but(set(DOCUMENTS) - LONG, DOCUMENTS))
def test_every_snippet_runs_as_it_is_printed(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    names: dict[str, Any] = {"__name__": "snippet", **GIVEN.get(document, lambda _: {})(tmp_path)}
    for i, code in enumerate(snippets(document)):
        if (document, i) in FRAGMENTS:
            ast.parse(f"{{{code}}}" if code.startswith('"') else code)
            continue
        exec(compile(code, f"{document}, snippet {i}", "exec"), names)  # noqa: S102 - the page's own code is tested
