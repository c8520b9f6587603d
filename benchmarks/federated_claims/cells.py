"""Cells of federated suites: values of each method by noise multiplier and seed, read from folders of results.

Records are of the same setting if suite, data, model, sizes, batch and clients agree. Seeds of a suite may lie in
several folders. Clip norm and learning rate may differ between methods and seeds, where they were chosen separately.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from leakbench.leaderboard.records.record import Record, read_all

METRICS = ("accuracy", "relative_drift", "bytes_up", "bytes_down", "epsilon_worst")
"""Metrics that claims and tables read, of the kinds `utility`, `rounds` and `federation`."""
_OF_PAPER = {"mnist": "fed_mnist.toml", "fashion_mnist": "fed_fmnist.toml"}
"""Data -> suite whose `reported` rows are the paper's i.i.d. table."""
_CHOSEN = ("lr", "clip_norm", "mu")


@dataclass
class MethodCells:
    """A method at a noise multiplier.

    Attributes:
        values: metric -> seed -> value.
        settings: seed -> learning rate and settings that a search may have chosen.
        tuned: whether all of its settings were chosen on public data.
        reported: the paper's accuracy at this noise multiplier, whatever the other settings; None for none.
    """

    values: dict[str, dict[int, float]] = field(default_factory=dict)
    settings: dict[int, dict[str, float]] = field(default_factory=dict)
    tuned: bool = True
    reported: float | None = None

    def of(self, metric: str) -> dict[int, float]:
        """Returns seed -> value of a metric; empty where it was not measured."""
        return self.values.get(metric, {})


@dataclass
class SuiteResults:
    """Results of a federated suite.

    Attributes:
        suite: its name.
        task: data, model, sizes, batch and clients.
        methods: (noise multiplier, method) -> cells.
        public_only: seed -> accuracy of the network trained on the public examples alone.
        missing: reasons of cells without a result.
    """

    suite: str
    task: dict[str, Any]
    methods: dict[tuple[float, str], MethodCells] = field(default_factory=dict)
    public_only: dict[int, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def split(self) -> str:
        """Division of the private examples."""
        return self.task["federated"]["split"]

    @property
    def noises(self) -> list[float]:
        """Noise multipliers, in ascending order."""
        return sorted({noise for noise, _ in self.methods})

    def names(self, noise: float) -> list[str]:
        """Returns the methods at a noise multiplier, in alphabetical order."""
        return sorted(name for at, name in self.methods if at == noise)

    def of(self, noise: float, method: str, metric: str = "accuracy") -> dict[int, float]:
        """Returns seed -> value; empty where it was not measured."""
        cells = self.methods.get((noise, method))
        return {} if cells is None else cells.of(metric)

    @property
    def words(self) -> str:
        """Data, clients and lengths in words."""
        clients = self.task["federated"]
        steps = f"{clients['local_steps']} steps" if "local_steps" in clients else f"{clients['local_epochs']} epochs"
        return (
            f"{self.suite}: {self.task['data']}, {self.task['private'] or 'all'} private examples among "
            f"{clients['clients']} clients ({clients['split']}), {clients['rounds']} rounds of {steps}"
        )


def read(folders: Iterable[str | Path]) -> list[SuiteResults]:
    """Reads the federated records of result folders.

    Args:
        folders: outputs of `leakbench run`.

    Raises:
        ValueError: two records of the same method, noise multiplier and seed.
        RecordError: a bad record.
    """
    return settings_of([record for folder in folders for record in read_all(folder)])


def settings_of(records: Sequence[Record]) -> list[SuiteResults]:
    """Returns the settings of records, in the order of their first ones; records of central training are left out.

    Args:
        records: of any suites.

    Raises:
        ValueError: two records of the same method, noise multiplier and seed.
    """
    settings: dict[str, SuiteResults] = {}
    for record in records:
        task = json.loads(record.to_json())["task"]
        if not task.get("federated") or record.kind not in ("utility", "rounds", "federation"):
            continue
        # `client_sizes`, schedules and settings of a method are not part of the setting.
        names = ("data", "model", "model_settings", "private", "non_member", "public", "batch", "sampling", "federated")
        common = {name: task.get(name) for name in names}
        key = json.dumps([record.suite, common], sort_keys=True)
        _add(settings.setdefault(key, SuiteResults(record.suite, common)), record, task)
    return list(settings.values())


def method_name(name: str, settings: Mapping[str, Any]) -> str:
    """Returns the name of a method, with its variant if it has several."""
    variant = settings.get("variant", "simplified")
    return f"{name} ({variant})" if name == "pfa" and variant != "simplified" else name


def _add(setting: SuiteResults, record: Record, task: Mapping[str, Any]) -> None:
    noise, seed = record.budget.noise_multiplier, record.seed
    name = method_name(record.defense.name, record.defense.settings)
    if record.status != "ok":
        setting.missing.append(f"{name}, seed {seed}: {record.reason}")
        return
    if record.control == "public_only":
        accuracy = record.metrics["accuracy"].value
        if accuracy is not None:
            setting.public_only[seed] = accuracy
        return
    if noise is None or record.control is not None:
        return  # controls, and methods with noise of their own, are in no claim
    cells = setting.methods.setdefault((noise, name), MethodCells())
    for metric in METRICS:
        value = record.metrics[metric].value if metric in record.metrics else None
        if value is None:
            continue
        if seed in cells.values.setdefault(metric, {}):
            raise ValueError(
                f"results must have one record of {name} in {setting.suite} at noise {noise:g}, seed {seed}, "
                "got two; leave one out, or give every value of a grid a run of its own"
            )
        cells.values[metric][seed] = value
    own = {"lr": task["lr"], **record.defense.settings}
    cells.settings[seed] = {key: float(own[key]) for key in _CHOSEN if isinstance(own.get(key), int | float)}
    cells.tuned = cells.tuned and "tuned_on_public" in record.flags
    if setting.split == "iid":
        cells.reported = reported(task["data"]).get((name, noise))


@cache
def reported(data: str) -> dict[tuple[str, float], float]:
    """Returns the accuracies of the paper's i.i.d. table, by method and noise multiplier; empty for other data."""
    if data not in _OF_PAPER:
        return {}
    # Not from records, which have no reported figure where any setting of a suite was changed.
    text = resources.files("leakbench.benchmarks.suites").joinpath(_OF_PAPER[data]).read_text(encoding="utf-8")
    return {(row["defense"], row["noise_multiplier"]): row["value"] for row in tomllib.loads(text)["reported"]}
