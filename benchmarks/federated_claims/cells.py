"""Cells of federated suites: values of each method by noise multiplier and seed, read from folders of results.

Records are of the same setting if suite, data, model, sizes, batch and clients agree, whoever is attacked. Seeds of a
suite may lie in several folders. Clip norm and learning rate may differ between methods and seeds, where they were
chosen separately; other settings of a method may not, nor the data of a seed.
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
_OF_RUNS = ("optimizer", "momentum", "schedule", "nominal_size", "pretrain")


@dataclass
class MethodCells:
    """A method at a noise multiplier.

    Attributes:
        values: metric -> seed -> value.
        settings: seed -> learning rate and settings that a search may have chosen.
        tuned: whether all of its settings were chosen on public data.
        reported: the paper's accuracy at this noise multiplier, whatever the other settings; None for none.
        proves: whether every record claims a finite epsilon.
        fixed: settings that no search chose, the same for all seeds.
    """

    values: dict[str, dict[int, float]] = field(default_factory=dict)
    settings: dict[int, dict[str, float]] = field(default_factory=dict)
    tuned: bool = True
    reported: float | None = None
    proves: bool = True
    fixed: str | None = None

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
        data: seed -> digests of the data and of their division among clients.
        control: settings of `public_only`, the same for all seeds.
    """

    suite: str
    task: dict[str, Any]
    methods: dict[tuple[float, str], MethodCells] = field(default_factory=dict)
    public_only: dict[int, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    data: dict[int, dict[str, str]] = field(default_factory=dict)
    control: str | None = None

    @property
    def seeds(self) -> set[int]:
        """Seeds under which anything was measured."""
        measured = (seed for cells in self.methods.values() for own in cells.values.values() for seed in own)
        return {*self.public_only, *measured}

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
        ValueError: as `settings_of`.
        RecordError: a bad record.
    """
    return settings_of([record for folder in folders for record in read_all(folder)])


def settings_of(records: Sequence[Record]) -> list[SuiteResults]:
    """Returns the settings of records, in the order of their first ones; records of central training are left out.

    Args:
        records: of any suites.

    Raises:
        ValueError: two records of the same method, noise multiplier and seed; seeds of a method with other settings;
            other data under the same seed.
    """
    settings: dict[str, SuiteResults] = {}
    for record in records:
        task = json.loads(record.to_json())["task"]
        if not task.get("federated") or record.kind not in ("utility", "rounds", "federation"):
            continue
        # `client_sizes`, schedules and settings of a method are not part of the setting.
        names = ("data", "model", "model_settings", "private", "non_member", "public", "batch", "sampling", "federated")
        common = {name: task.get(name) for name in names}
        # The attacked client has no part in the training, and a record without attacks may lack the key.
        common["federated"] = {key: value for key, value in task["federated"].items() if key != "attacked"}
        key = json.dumps([record.suite, common], sort_keys=True)
        _add(settings.setdefault(key, SuiteResults(record.suite, common)), record, task)
    _name_apart([*settings.values()])
    return list(settings.values())


def _name_apart(settings: Sequence[SuiteResults]) -> None:
    """Names later settings of a suite by their difference from its first one, such as "fed (split dirichlet)"."""
    first: dict[str, dict[str, Any]] = {}
    for setting in settings:
        own = {**setting.task, **setting.task["federated"]}
        del own["federated"]
        base = first.setdefault(setting.suite, own)
        if own != base:
            differing = sorted(key for key in own.keys() | base.keys() if own.get(key) != base.get(key))
            setting.suite += f" ({', '.join(f'{key} {own.get(key)}' for key in differing)})"


def method_name(name: str, settings: Mapping[str, Any]) -> str:
    """Returns the name of a method, with its variant if it has several."""
    variant = settings.get("variant", "simplified")
    return f"{name} ({variant})" if name == "pfa" and variant != "simplified" else name


def _add(setting: SuiteResults, record: Record, task: Mapping[str, Any]) -> None:
    noise, seed = record.budget.noise_multiplier, record.seed
    name = record.control or method_name(record.defense.name, record.defense.settings)
    cell = f"{name}{'' if noise is None else f', noise {noise:g}'}, seed {seed}"
    if record.status != "ok":
        setting.missing.append(f"{cell}, {record.kind}: {record.reason}")
        return
    if "accuracy" in record.metrics and record.metrics["accuracy"].value is None:
        setting.missing.append(f"{cell}: {record.metrics['accuracy'].reason}")
    _same_data(setting, seed, task)
    if record.control == "public_only":
        setting.control = _same(setting.control, _fixed(record, task), f"public_only in {setting.suite}")
        accuracy = record.metrics["accuracy"].value if "accuracy" in record.metrics else None
        # Runs of single noise multipliers each have the control, which is the same in all of them.
        if accuracy is not None and setting.public_only.setdefault(seed, accuracy) != accuracy:
            _refuse_second(setting.public_only, seed, f"public_only in {setting.suite}")
        return
    if noise is None or record.control is not None:
        return  # controls, and methods with noise of their own, are in no claim
    cells = setting.methods.setdefault((noise, name), MethodCells())
    where = f"{name} in {setting.suite} at noise {noise:g}"
    cells.fixed = _same(cells.fixed, _fixed(record, task), where)
    cells.proves = cells.proves and record.claim is not None and record.claim.epsilon is not None
    for metric in METRICS:
        value = record.metrics[metric].value if metric in record.metrics else None
        if value is None:
            continue
        _refuse_second(cells.values.setdefault(metric, {}), seed, where)
        cells.values[metric][seed] = value
    own = {"lr": task["lr"], **record.defense.settings}
    cells.settings[seed] = {key: float(own[key]) for key in _CHOSEN if isinstance(own.get(key), int | float)}
    cells.tuned = cells.tuned and "tuned_on_public" in record.flags
    if setting.split == "iid":
        cells.reported = reported(task["data"]).get((name, noise))


def _refuse_second(values: Mapping[int, float], seed: int, where: str) -> None:
    if seed in values:
        raise ValueError(
            f"results must have one record of {where}, seed {seed}, got two; leave one out, or give every value of a "
            "grid a run of its own"
        )


def _same_data(setting: SuiteResults, seed: int, task: Mapping[str, Any]) -> None:
    """Refuses other data, or another division of them, under a seed: its cells would be no pairs."""
    known = setting.data.setdefault(seed, {})
    for key in ("digest", "clients_digest"):
        if task.get(key) and known.setdefault(key, task[key]) != task[key]:
            raise ValueError(
                f"results must have the same data under a seed, got two values of {key} in {setting.suite}, seed "
                f"{seed}; leave one out"
            )


def _fixed(record: Record, task: Mapping[str, Any]) -> str:
    """Returns the settings that all seeds of a method share, as JSON."""
    content = json.loads(record.to_json())
    own = {key: value for key, value in content["defense"]["settings"].items() if key not in _CHOSEN}
    return json.dumps([own, content["budget"], {key: task.get(key) for key in _OF_RUNS}], sort_keys=True)


def _same(known: str | None, own: str, where: str) -> str:
    if known not in (None, own):
        raise ValueError(f"results must have the same settings for every seed of {where}, got {known} and {own}")
    return own


@cache
def reported(data: str) -> dict[tuple[str, float], float]:
    """Returns the accuracies of the paper's i.i.d. table, by method and noise multiplier; empty for other data."""
    if data not in _OF_PAPER:
        return {}
    # Not from records, which have no reported figure where any setting of a suite was changed.
    text = resources.files("leakbench.benchmarks.suites").joinpath(_OF_PAPER[data]).read_text(encoding="utf-8")
    return {(row["defense"], row["noise_multiplier"]): row["value"] for row in tomllib.loads(text)["reported"]}
