"""A board with every difficulty of an export: n/a, infinity, a refuted claim, clients, controls and hostile names."""

import shutil
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from leakbench.leaderboard.board.rows import Unit
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.exports.publication import Publication
from leakbench.leaderboard.exports.tidy import tables

from ..conftest import claim, complete, metric, record

HOSTILE = (
    "<script>alert(1)</script>",
    "=cmd|' /C calc'!A0",
    r"\input{/etc/passwd} $x_1^2$ #1 % & ~ {",
    "&anchor *alias: !!python/object [a] {b: c} # d",
    "a | b\n---\n- c: d\n",
    "[click](javascript:alert(1))",
    "日本 \u2028 \x07 \ud800 é",
    "yes",
)
PUBLICATION = Publication(dataset="somebody/board", license="CC-BY-4.0", at=datetime(2026, 11, 28, tzinfo=UTC))


@cache
def records():
    made = []
    for seed in range(3):
        for name, auc, fields in (
            (
                "random_sparsification",
                0.75,
                {"defense_settings": {"clip_norm": 1.0, "path": "/home/bob/x y.py:f"}},
            ),
            ("clipped_sgd", 0.9, {"claim": claim(None)}),
            ("dp_fed_avg", 0.6, {"claim": claim(2.0, unit="client")}),
            ("sgd", 0.97, {"claim": claim(None), "control": "positive"}),
            ("sgd", 0.49, {"claim": claim(None), "control": "negative"}),
        ):
            fields = {"seed": seed, "defense": name, **fields}
            made.append(
                record("utility", **fields, metrics={"accuracy": metric(0.9 + seed / 300, 0.02, better="higher")})
            )
            made.append(record(**fields, metrics={"auc": metric(auc + seed / 70, 0.02)}))
    made += [record("utility", defense=name) for name in HOSTILE]
    made.append(record(defense="refuted", flags=("claim_violated",)))
    reason = "FileNotFoundError: '/home/bob/a b/c.pt' | <b> 50% {failed}"
    made.append(record("reconstruction", defense="refuted", status="failed", reason=reason))
    return tuple(made)


@cache
def board():
    return Board.from_records(records(), complete(*records()))


@cache
def numbers(unit: Unit = "record"):
    """(row, metric) -> value of everything measured."""
    return {(x["row_id"], x["metric"]): x["value"] for x in tables(board())[unit] if x["value"] is not None}


@cache
def lines():
    """(row, metric) -> line of the tidy table, of both units."""
    return {(x["row_id"], x["metric"]): x for unit in tables(board()).values() for x in unit}


def python_with(module: str, requirement: str, folder: Path, least: tuple[int, int] = (3, 11)) -> Path:
    """An interpreter that imports a reader: this one, or that of a new environment, since its packages are not ours."""
    if find_spec(module):
        return Path(sys.executable)
    names = [sys.executable, *(f"python3.{minor}" for minor in (12, 13, 14))][sys.version_info < least :]
    for base in filter(None, map(shutil.which, names)):
        if subprocess.run([base, "-m", "venv", str(folder)], capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip(f"{requirement} needs Python {least[0]}.{least[1]}, and there is none")
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", *requirement.split()]
    installed = subprocess.run(pip, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"{requirement} could not be installed: {installed.stderr.strip()[-200:]}")
    return python
