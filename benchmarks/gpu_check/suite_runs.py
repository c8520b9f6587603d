"""Runs of suites by the command `leakbench run`: quick with the device chosen by `auto`, and a cell of RS's Table 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.data.data_paths import data_folder
from .processes import ROOT
from .rows import CheckedFigure, CheckedRow, PartSettings

_COMMAND = "from leakbench.audit.cli import main; main()"
_JPEG = ("cifar10-jpeg/train.parquet", "cifar10-jpeg/test.parquet")
_MADE_UP = 50_000
_SUITES = Path(__file__).resolve().parents[1] / "suites"
_LAST = 2.0  # seconds before the part's budget at which its run is ended, so that its records are counted


def measure_quick(settings: PartSettings) -> Iterator[CheckedRow]:
    """Yields a row on suite quick with `--device auto`, or on a few of its cells if small.

    Args:
        settings: of the part.
    """
    device = "auto" if settings.device != "cpu" else "cpu"
    first, second = (entry["name"] for entry in _suite("quick")["attack"][:2])
    few = ["--seed", "0", "--defense", _first_defense("quick"), "--attack", first, "--attack", second]
    arguments = ["quick", "--device", device, *(few if settings.small else ())]
    yield _run("quick", arguments, settings, processes=settings.small)


def measure_cell(settings: PartSettings) -> Iterator[CheckedRow]:
    """Yields a row on the first defense of suite rs_table2_cifar10 at epsilon 3: 2,000 steps of dp_cnn at batch 1,000.

    Data are `cifar10_jpeg`, or random images of its size where it is not on this machine: times do not depend on them.

    Args:
        settings: of the part.
    """
    suite = "rs_table2_cifar10"
    arguments = [suite, "--seed", "0", "--defense", _first_defense(suite), "--set", "budget.epsilon=[3.0]"]
    arguments += ["--device", settings.device]
    name = "cifar10_jpeg"
    if settings.small or not all((data_folder() / file).is_file() for file in _JPEG):
        examples = 400 if settings.small else _MADE_UP
        name = f"{examples:,} random images"
        arguments += ["--set", f"task.data={json.dumps(f'npz:{_random_images(settings.folder, examples)}')}"]
        if settings.small:
            arguments += ["--set", "task.private=200", "--set", "task.batch=50", "--set", "task.epochs=1"]
    else:
        arguments += ["--set", 'task.data="cifar10_jpeg"']
    yield _run(name, arguments, settings, processes=True)


def _suite(name: str) -> dict[str, Any]:
    """Returns a suite's file."""
    return tomllib.loads((_SUITES / f"{name}.toml").read_text(encoding="utf-8"))


def _first_defense(suite: str) -> str:
    return _suite(suite)["defense"][0]["name"]


def _random_images(folder: Path, examples: int) -> Path:
    """Writes random images of CIFAR-10's shape, with as many for tests as a fifth of those for training."""
    generator, path = np.random.default_rng(0), folder / "random_images.npz"
    arrays = {}
    for part, count in (("train", examples), ("test", examples // 5)):
        arrays[f"x_{part}"] = generator.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
        arrays[f"y_{part}"] = generator.integers(0, 10, count)
    np.savez(path, **arrays)
    return path


def _run(name: str, arguments: Sequence[str], settings: PartSettings, *, processes: bool) -> CheckedRow:
    """Runs a suite until it ends, or shortly before the part's budget; returns its seconds and numbers of cells."""
    out = settings.folder / f"run_{os.getpid()}"
    command = [sys.executable, "-c", _COMMAND, "run", *arguments, "--out", str(out)]
    command += ["--jobs", str(settings.jobs)] * processes
    begun, code = time.monotonic(), None
    with (settings.folder / f"run_{arguments[0]}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)  # noqa: S603  ours
        try:
            code = process.wait(timeout=max(1.0, settings.seconds - _LAST))
        except subprocess.TimeoutExpired:
            process.kill()  # its workers end with it, and records are written as a whole
            process.wait()
    seconds = time.monotonic() - begun
    cells = Counter(json.loads(file.read_text(encoding="utf-8"))["status"] for file in out.glob("records/**/*.json"))
    figures: dict[str, CheckedFigure] = {
        "seconds": round(seconds, 1),
        **{f"{status} cells": n for status, n in cells.items()},
    }
    remarks = (f"stopped after {seconds:.0f} s",) if code is None else ()
    wrong = () if code in (None, 0) else (f"leakbench run ended with code {code}, see {log.name}",)
    return CheckedRow(name=name, figures=figures, wrong=wrong, remarks=remarks)
