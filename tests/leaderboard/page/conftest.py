"""Records of federated trainings with their arrays, made in code."""

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from leakbench.leaderboard.metrics import METRICS
from leakbench.leaderboard.records.files import digest_of_bytes

ROUNDS, CLIENTS = 12, 5
NUMBERS = {
    "rounds": {"round_accuracy": 0.5},
    "federation": {"bytes_up": 40.0},
    "client_property": {"classes_named": 0.5, "classes_named_floor": 0.2},
}


def arrays_of(kind, seed, draw):
    """Columns as a run writes them."""
    if kind == "rounds":
        sent = np.cumsum(draw.integers(100, 200, ROUNDS))
        return {
            "round": np.arange(ROUNDS),
            "accuracy": draw.uniform(0.3, 0.9, ROUNDS),
            "loss": draw.uniform(1, 2, ROUNDS),
            "bytes_up": sent,
            "bytes_down": 3 * sent,
            "drift": draw.uniform(0.5, 5, ROUNDS),
        }
    if kind == "federation":
        return {
            "client": np.arange(CLIENTS),
            "examples": draw.integers(10, 90, CLIENTS),
            "rounds": draw.integers(1, 12, CLIENTS),
            "messages": draw.integers(1, 12, CLIENTS),
            "bytes_up": draw.integers(100, 200, CLIENTS),
            "bytes_down": draw.integers(100, 200, CLIENTS),
            "epsilon": draw.uniform(0.5, 4, CLIENTS),
            "accuracy": draw.uniform(0.2, 0.9, CLIENTS),
        }
    held = draw.dirichlet(np.ones(3), CLIENTS)
    return {
        "client": np.repeat(np.arange(CLIENTS), 3),
        "class": np.tile(np.arange(3), CLIENTS),
        "score": draw.normal(size=3 * CLIENTS),
        "held": held.ravel(),
        "named": (held == held.max(axis=1, keepdims=True)).ravel(),
        "examples": np.full(3 * CLIENTS, 20),
    }


def drawn_of(figure, name="bands"):
    """Data of a plot: of its lines with bands, or of its marks."""
    assert figure.specification is not None, figure.caption
    return figure.specification["datasets"][name]


@pytest.fixture
def federated(record, metric, tmp_path):
    """Writes the arrays of a record of a federated training, and returns the record and its arrays."""

    def make(kind, seed=0, columns=None, **fields):
        draw = np.random.default_rng([seed, *map(ord, f"{kind} {fields}")])
        columns = arrays_of(kind, seed, draw) | (columns or {})
        folder = tmp_path / "run" / "records"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{kind}{len(list(folder.glob('*.parquet')))}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        numbers = {name: metric(value, better=METRICS[name].better) for name, value in NUMBERS[kind].items()}
        attack = {"attack": "client_classes"} if kind == "client_property" else {}
        digest = digest_of_bytes(path.read_bytes())
        made = record(kind, seed=seed, metrics=numbers, arrays=path.name, arrays_digest=digest, **attack, **fields)
        return made, columns

    return make


@pytest.fixture
def folder(tmp_path):
    """The folder of `federated` arrays."""
    return tmp_path / "run" / "records"
