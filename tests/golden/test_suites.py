"""Digest, number of cells and ids of every suite that comes with leakbench, as they were when they were frozen.

Ids name what is on disk: a moved one computes everybody's results again. `python -m tests.golden.test_suites` writes
the golden file anew, after a suite was changed on purpose.
"""

import contextlib
import hashlib
import json
import tempfile
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch

from leakbench.audit.catalog import methods as catalog
from leakbench.audit.plan import splits_cache
from leakbench.audit.plan.expand import plan
from leakbench.audit.suite.small import small_forms
from leakbench.audit.suite.suite import load
from leakbench.benchmarks import data as datasets
from leakbench.benchmarks.core import Sizes, Split, Splits
from leakbench.benchmarks.core.data.dealing import pool_sizes

FILE = Path(__file__).with_name("suites.json")
GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))
SLOW = {name for name, held in GOLDEN.items() if held["cells"] > 300}  # beside each there is a small one

LONG = {"reconstruction_small", "ssgd_grid_small"}  # more than half a second

# Shape of an image, examples of the training part, and default sizes of data sets that have to be downloaded.
LARGE = {
    "mnist": ((1, 28, 28), 60_000, (20_000, 20_000, 20_000)),
    "fashion_mnist": ((1, 28, 28), 60_000, (20_000, 20_000, 20_000)),
    "cifar10": ((3, 32, 32), 50_000, (20_000, 20_000, 10_000)),
    "cifar10_jpeg": ((3, 32, 32), 50_000, (20_000, 20_000, 10_000)),
    "svhn": ((3, 32, 32), 73_257, (25_000, 25_000, 20_000)),
    "features:cifar10_simclrv2.npz": ((4096,), 50_000, (20_000, 20_000, 10_000)),
}
CONTENT = "0" * 64
"""Digest of any of them: part of an id where data are the user's own."""

KEPT = {}

_load = datasets.load


def black(name, *, seed=0, sizes=datasets.DEFAULT_SIZES):
    """Pools of the right sizes whose images are black: no id depends on a pixel of a data set that has a name."""
    if name not in LARGE:
        return _load(name, seed=seed, sizes=sizes)
    shape, train, (private, non_member, public) = LARGE[name]
    defaults = Sizes(private=private, non_member=non_member, public=public)
    counts = pool_sizes(sizes, defaults, available=train, name=name, tested=True)
    ends = torch.tensor([0, *counts.values(), 10_000]).cumsum(0).tolist()
    pools = [torch.arange(first, last) for first, last in pairwise(ends)]
    # Of one pixel's memory each.
    image = torch.zeros(1, *(1 for _ in shape))
    splits = [Split(ids=ids, inputs=image.expand(len(ids), *shape), labels=ids % 10) for ids in pools]
    return Splits(
        name=name,
        private=splits[0],
        non_member=splits[1] if len(splits[1]) else splits[3],
        public=splits[2],
        test=splits[3],
        input_shape=shape,
        classes=10,
        low=0.0,
        high=1.0,
        digest=CONTENT,
        in_distribution_public=True,
        about="black images",
    )


def frozen(name):
    """What is held of a suite, in a working folder where a file of features can be made."""
    Path("cifar10_simclrv2.npz").touch()
    # A cache of its own: nobody else's images are black.
    with mock.patch.object(datasets, "load", black), mock.patch.object(splits_cache, "_kept", KEPT):
        suite = load(name)
        cells = plan(suite).cells
    ids = "\n".join(sorted(cell.id for cell in cells))
    return {
        "digest": suite.digest,
        "cells": len(cells),
        "skipped": sum(bool(cell.skip) for cell in cells),
        "ids": hashlib.sha256(ids.encode()).hexdigest(),
    }


def test_a_suites_digest_is_what_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cifar10_simclrv2.npz").touch()
    assert {name: load(name).digest for name in GOLDEN} == {name: held["digest"] for name, held in GOLDEN.items()}


MARKS = {name: pytest.mark.slow for name in SLOW} | {name: pytest.mark.long for name in LONG}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in GOLDEN])
def test_a_suites_digest_and_ids_are_what_they_were(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert frozen(name) == GOLDEN[name]


def main() -> None:
    """Writes the golden file."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        found = {name: frozen(name) for name in sorted({*catalog.names("suites"), *small_forms()})}
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
