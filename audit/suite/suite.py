"""Suites: TOML files of a task, budgets, defenses and attacks; all mistakes of a file are reported at once.

A list in place of a single value is a grid. A method's settings are read from the signature of its function, so a new
method needs no schema. Loading trains nothing, but imports the methods that the suite names.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr, ValidationError

from leakbench.leaderboard.records.files import refuse_special
from leakbench.leaderboard.records.record import Reported

from ..catalog import methods as catalog
from ..catalog.canonical import canonical
from ..catalog.messages import no_such, way_out
from ..catalog.methods import MethodKind
from .changes import Change, change, put, touching
from .errors import ChoiceError, SuiteError
from .federated import wrong_federated
from .schema import BUDGETS, Document, sentences, task_values
from .small import KEY, small_form, small_forms
from .task import TRAINING, Task
from .validate import expand, with_every_other, wrong_grid, wrong_names, wrong_reported


@dataclass(frozen=True, kw_only=True)
class DefenseChoice:
    """A defense of a suite with all settings resolved.

    Attributes:
        name: of the defense.
        settings: all settings, without the noise multiplier.
        training: values that override the task's, such as {"lr": 0.01}.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    def with_values(self, values: Mapping[str, Any]) -> DefenseChoice:
        """Returns the same defense with other settings or training values."""
        own = {key: value for key, value in values.items() if key in self.settings}
        others = {key: value for key, value in values.items() if key not in own}
        return replace(self, settings=self.settings | own, training=self.training | others)


@dataclass(frozen=True, kw_only=True)
class AttackChoice:
    """An attack of a suite with all settings resolved."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)


class Suite(Document):
    """A valid suite, constructed by `load`; its fields are the tables of the file, as in `schema`."""

    _defenses: tuple[tuple[DefenseChoice, ...], ...] = PrivateAttr(())
    _attacks: tuple[tuple[AttackChoice, ...], ...] = PrivateAttr(())
    # The document as read: overrides are applied to it, and the whole is validated again.
    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)
    _source: str = PrivateAttr("")
    _digest: str = PrivateAttr("")
    _whole: bool = PrivateAttr(True)
    # Keys that each entry of `defense` sets: tuning does not change these.
    _given: tuple[frozenset[str], ...] = PrivateAttr(())
    _tuned: dict[str, tuple[dict[str, Any], str]] = PrivateAttr(default_factory=dict)
    # Kind, text and name of each contestant that was added.
    _added: tuple[tuple[MethodKind, str, str], ...] = PrivateAttr(())
    _changes: tuple[Change, ...] = PrivateAttr(())

    @property
    def digest(self) -> str:
        """SHA-256 of the content, independent of the file's layout; `select` keeps the digest of the whole suite."""
        return self._digest

    @property
    def source(self) -> str:
        """File of the suite, for messages."""
        return self._source

    @property
    def whole(self) -> bool:
        """True if no defense was selected, so that controls are added."""
        return self._whole

    @property
    def added(self) -> tuple[str, ...]:
        """Names of the contestants that were added to those of the file."""
        return tuple(name for _, name in self.added_methods)

    @property
    def added_methods(self) -> tuple[tuple[MethodKind, str], ...]:
        """Kinds and names of the contestants that were added."""
        return tuple((kind, name) for kind, _, name in self._added)

    def defense_grid(self) -> list[DefenseChoice]:
        """Returns every defense with every combination of its settings, in the order of the file."""
        return [choice for entry in self._defenses for choice in entry]

    def attack_grid(self) -> list[AttackChoice]:
        """Returns every attack with every combination of its settings, in the order of the file."""
        return [choice for entry in self._attacks for choice in entry]

    def budget_grid(self) -> list[dict[str, float]]:
        """Returns every budget: {"epsilon": 3.0, "delta": 1e-5} or {"noise_multiplier": 1.0, "delta": 1e-5}."""
        budget = self.budget
        limits = {kind: values for kind in BUDGETS if (values := getattr(budget, kind)) is not None}
        beside = {"delta": budget.delta} | ({} if budget.fpr is None else {"fpr": budget.fpr})
        return [{kind: value, **beside} for kind, values in limits.items() for value in values]

    def tunable(self, choice: DefenseChoice) -> frozenset[str]:
        """Returns the settings and training values of a defense that its entry does not set."""
        for entry, stated in zip(self._defenses, self._given, strict=True):
            if choice in entry:
                return frozenset({*choice.settings, *TRAINING} - stated)
        return frozenset()

    def with_tuned(
        self, choice: DefenseChoice, budget: Mapping[str, float], values: Mapping[str, Any], digest: str
    ) -> Suite:
        """Returns the suite with values chosen for a defense at a budget.

        Args:
            choice: as in `defense_grid()`.
            budget: budget of its runs.
            values: of settings or of training.
            digest: of the search behind them.
        """
        tuned = self.model_copy()
        # The dictionary is replaced, not modified: a copy shares its private attributes with the original suite.
        tuned._tuned = self._tuned | {_key(choice, budget): (dict(values), digest)}
        return tuned

    def tuned(self, choice: DefenseChoice, budget: Mapping[str, float]) -> tuple[DefenseChoice, str]:
        """Returns a defense tuned for a budget, and the digest of the search; empty without a search."""
        values, digest = self._tuned.get(_key(choice, budget), ({}, ""))
        return choice.with_values(values), digest

    def task_for(self, choice: DefenseChoice) -> Task:
        """Returns the task with this defense's overrides."""
        # With another sampler, keys of the task's sampler do not apply.
        own = {"groups": None, "largest_batch": None} if "sampling" in choice.training else {}
        return self.task.model_copy(update=own | task_values(choice.training))

    def changes_for(
        self, choice: DefenseChoice, attack: AttackChoice | None = None, *, shared: bool
    ) -> tuple[str, ...]:
        """Returns overrides of the file that affect a cell, in words such as "task.epochs 80 -> 4".

        Args:
            choice: the cell's defense.
            attack: the cell's attack; None for utility.
            shared: whether the cell is about a shared update.
        """
        name = attack.name if attack else None
        return touching(self._changes, defense=choice.name, attack=name, own=choice.training, shared=shared)

    def reported_for(
        self, choice: DefenseChoice, budget: Mapping[str, float], attack: AttackChoice | None = None
    ) -> list[Reported]:
        """Returns a paper's figures for a cell: those whose selectors all match.

        Args:
            choice: the cell's defense.
            budget: from `budget_grid()`.
            attack: the cell's attack; None for utility, which only matches figures without an attack.
        """
        settings = {**choice.settings, **choice.training, **budget}
        return [
            Reported(metric=row.metric, value=row.value, source=row.source)
            for row in self.reported
            if row.defense == choice.name
            and row.attack == (attack.name if attack else None)
            and all(key in settings and settings[key] == value for key, value in row.selectors.items())
        ]

    def select(self, *, defenses: Sequence[str] | None = None, attacks: Sequence[str] | None = None) -> Suite:
        """Returns the part of the suite with these methods; None or an empty list keeps all of a kind.

        A selection of defenses gets no added controls, because controls validate a suite as a whole. A selected
        baseline keeps its role as a control, which is part of its cells' ids, so its records are those of the whole
        suite.

        Raises:
            SuiteError: a name that the suite does not have, with the nearest name.
        """
        chosen = self.model_copy()
        chosen._whole = self._whole and not defenses
        for kind, names, attribute in (("defense", defenses, "_defenses"), ("attack", attacks, "_attacks")):
            entries = getattr(self, attribute)
            known = list(dict.fromkeys(choice.name for entry in entries for choice in entry))
            for name in names or ():
                if name not in known:
                    raise ChoiceError(f"suite {self.name!r}: {no_such(kind, name, known)}")
            if names:
                # An entry has at least one choice, and all its choices are of the same method.
                kept = [place for place, entry in enumerate(entries) if entry[0].name in names]
                setattr(chosen, attribute, tuple(entries[place] for place in kept))
                if kind == "defense":
                    chosen._given = tuple(self._given[place] for place in kept)
        return chosen

    def with_added(self, *, defenses: Sequence[str] = (), attacks: Sequence[str] = ()) -> Suite:
        """Returns the suite with further contestants, as by `--add-attack`.

        The digest stays that of the file: ids of its own cells do not depend on the list of contestants.

        Args:
            defenses: names, paths, or entries in TOML such as `{ name = "mine.py:half_dp", clip_norm = 2.0 }`.
            attacks: the same.

        Raises:
            SuiteError: no such method, a setting that it lacks, one that the suite has at these settings, or a defense
                where nothing is trained.
        """
        if self.zoo is not None and defenses:
            raise ChoiceError(
                f"--add-defense must go with a suite that trains, got {self.name!r}, which attacks checkpoints; run a "
                "suite without zoo"
            )
        if not defenses and not attacks:
            return self
        added = self.model_copy()
        kinds: tuple[tuple[MethodKind, Sequence[str]], ...] = (("defenses", defenses), ("attacks", attacks))
        for kind, names in kinds:
            key = catalog.KINDS[kind]
            if not names:
                continue
            entries = [_entry(name) for name in names]
            choices, wrong = expand({key: [*self._raw.get(key, []), *entries]}, kind)
            if wrong:
                raise ChoiceError("\n".join(f"--add-{key} {', '.join(names)}: {problem}" for _, problem in wrong))
            if kind == "defenses":
                added._defenses += tuple(tuple(DefenseChoice(**c) for c in entry) for entry in choices[-len(names) :])
                added._given += tuple(frozenset(entry) for entry in entries)
            else:
                added._attacks += tuple(
                    tuple(AttackChoice(name=c["name"], settings=c["settings"]) for c in entry)
                    for entry in choices[-len(names) :]
                )
            added._added = (
                *added._added,
                *((kind, name, entry["name"]) for name, entry in zip(names, entries, strict=True)),
            )
        return added

    def with_overrides(self, overrides: Sequence[str], *, seed: int | None = None) -> Suite:
        """Returns the suite with values replaced, as by `--set`.

        Args:
            overrides: `path=value`, such as `task.epochs=2` or `defense.dpdr.share=[0.02, 0.1]`; the value in TOML, so
                text in quotes. An entry of a list is named by its `name` or its position.
            seed: the only seed; None for those of the suite.

        Raises:
            SuiteError: a value that is not TOML, a path that leads nowhere, or mistakes in the resulting suite.
        """
        chosen = [] if seed is None else [(f"seeds=[{seed}]", ["seeds"], [seed])]
        if not overrides and not chosen:
            return self
        raw = copy.deepcopy(self._raw)  # `put` writes into it
        changes = list(self._changes)
        for override, keys, value in itertools.chain(map(_parsed, overrides), chosen):
            changes.append(change(raw, keys, value))
            try:
                put(raw, keys, value, override)
            except ValueError as error:
                raise ChoiceError(str(error)) from None
        words = ", ".join([*overrides, *(override for override, _, _ in chosen)])
        try:
            changed = _build(raw, f"{self._source} with {words}")
        except SuiteError as error:  # the file by itself was valid
            raise ChoiceError(str(error)) from None
        changed._changes = tuple(changes)
        return changed.with_added(
            defenses=[text for kind, text, _ in self._added if kind == "defenses"],
            attacks=[text for kind, text, _ in self._added if kind == "attacks"],
        )


def _entry(text: str) -> dict[str, Any]:
    """Returns an entry of a list of methods: a name, or a TOML table such as `{ name = "dp_sgd", clip_norm = 2.0 }`."""
    if not text.lstrip().startswith("{"):
        return {"name": text}
    try:
        document = tomllib.loads(f"entry = {text}")
    except tomllib.TOMLDecodeError:
        document = {}
    if set(document) != {"entry"}:  # a text with a line break could set further keys
        raise ChoiceError(f"an added method must be a name, a path or a TOML table with a name, got {text!r}")
    return document["entry"]


def _parsed(override: str) -> tuple[str, list[str], Any]:
    """Returns an override `path=value`, its keys, and its value."""
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        raise ChoiceError(f"an override must be key.path=value, as task.epochs=2, got {override!r}")
    try:
        value = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        value = {}
    if set(value) != {"value"}:  # a text with a line break could set further keys
        raise ChoiceError(f"the value of {path.strip()} must be TOML (text in quotes), got {text!r}")
    return override, path.strip().split("."), value["value"]


def load(name: str | Path, *, small: bool = False) -> Suite:
    """Reads a suite.

    Args:
        name: of a built-in suite (`leakbench list suites`) or of its small form, or a path to a TOML file.
        small: True for the small form, which the file's `[small]` table describes.

    Raises:
        SuiteError: no such suite, or all mistakes of the file.
    """
    path = Path(name)
    if path.suffix == ".toml" or len(path.parts) > 1:
        source = str(name)
        try:
            refuse_special(path)
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise SuiteError(f"cannot read suite {source}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise SuiteError(f"{source}: must be UTF-8 text") from None
    else:
        if full := small_forms().get(str(name)):
            name, small = full, True
        source, known = f"{name}.toml", catalog.names("suites")
        if name not in known:
            raise ChoiceError(no_such("suite", str(name), known) + " (a file's name must end in .toml)")
        text = resources.files("leakbench.benchmarks.suites").joinpath(source).read_text(encoding="utf-8")
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SuiteError(f"{source}: not TOML: {error}") from None
    if not small:
        return _build({key: value for key, value in raw.items() if key != KEY or not isinstance(value, dict)}, source)
    if not isinstance(raw.get(KEY), dict):
        raise ChoiceError(f"suite {source} has no [{KEY}] table; {way_out(str(name), small_forms().values())}")
    try:
        return _build(small_form(raw), f"{source} [{KEY}]")
    except SuiteError:
        raise
    except ValueError as error:
        raise SuiteError(f"{source}: {error}") from None


def check_sizes(suite: Suite, n_private: int, *, n_share: int | None = None) -> None:
    """Refuses pools and batches larger than the data.

    Args:
        suite: with its overrides and selection.
        n_private: private examples of the task's data.
        n_share: private examples of the share's data; None without a share.

    Raises:
        SuiteError: more private examples requested than exist, a sample rate above 1, or a nominal size under a sampler
            that depends on the number of examples; the message lists all such mistakes.
    """
    wrong = []
    if suite.task.private is not None and suite.task.private > n_private:
        wrong.append(f"task.private: must be at most {n_private}, the private examples, got {suite.task.private}")
    n = min(n_private, suite.task.private or n_private)
    tasks = {"task": suite.task} | {
        f"defense {choice.name!r}": suite.task_for(choice)
        for choice in suite.defense_grid()
        if "batch" in choice.training
    }
    for choice in suite.defense_grid():
        own = suite.task_for(choice)
        if own.nominal_size is not None and own.sampling not in ("poisson", "full"):
            wrong.append(
                f"defense {choice.name!r}.sampling: must be poisson or full with task.nominal_size, under others more "
                f"follows from the number of examples, got '{own.sampling}'"
            )
    # The sample rate is a probability, so no accountant accepts more than 1.
    for where, task in tasks.items():
        size, whose = (task.nominal_size, "nominal_size") if task.nominal_size else (n, "the private examples")
        if (batch := task.batch) > size:
            wrong.append(
                f"{where}.batch: must be at most {size}, {whose}, got {batch}: a sample rate of {batch / size:.3g}"
            )
        elif batch * (groups := task.groups or 1) > size:
            wrong.append(
                f"{where}.batch: must be at most {n // groups}, the private examples of one of {groups} groups, "
                f"got {batch}"
            )
    if suite.share and n_share is not None and suite.share.batch * suite.share.images > n_share:
        wrong.append(
            f"share.batch: batch x images must be at most {n_share}, the private examples, "
            f"got {suite.share.batch} x {suite.share.images}"
        )
    if wrong:
        raise SuiteError("\n".join(f"{suite.source}: {line}" for line in wrong))


def _build(document: dict[str, Any], source: str) -> Suite:
    raw, wrong_others = with_every_other(document)
    try:
        # Through JSON, whose strict mode coerces only a list into a tuple; TOML's dates become text.
        suite = Suite.model_validate_json(json.dumps(raw, default=str), strict=True)
        wrong = []
    except ValidationError as error:
        suite, wrong = None, sentences(error, raw)
    # Methods are checked even after errors in the schema, so that a single attempt shows all mistakes.
    defenses, wrong_defenses = expand(raw, "defenses")
    attacks, wrong_attacks = expand(raw, "attacks")
    wrong += (
        wrong_federated(raw)
        + wrong_names(raw)
        + wrong_defenses
        + wrong_attacks
        + wrong_reported(raw, defenses, attacks)
    )
    wrong += wrong_grid(raw, defenses) + wrong_others
    if wrong or suite is None:
        lines = dict.fromkeys(f"{source}: {path}: {problem}" for path, problem in wrong)
        raise SuiteError("\n".join(lines))
    suite._defenses = tuple(tuple(DefenseChoice(**choice) for choice in entry) for entry in defenses)
    suite._attacks = tuple(
        tuple(AttackChoice(name=choice["name"], settings=choice["settings"]) for choice in entry) for entry in attacks
    )
    suite._given = tuple(frozenset(entry) for entry in raw["defense"])
    suite._raw, suite._source = raw, source
    # Absent values are left out, so that a table or key added to the schema later changes no digest.
    methods = {"defense": _canonical("defenses", defenses), "attack": _canonical("attacks", attacks)}
    content = suite.model_dump(mode="json", exclude_none=True) | methods
    suite._digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).hexdigest()
    return suite


def _canonical(kind: MethodKind, entries: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Returns expanded entries with canonical settings: a setting added to a method later changes no suite's digest."""
    return [
        [choice | {"settings": canonical(kind, choice["name"], choice["settings"])} for choice in entry]
        for entry in entries
    ]


def _key(choice: DefenseChoice, budget: Mapping[str, float]) -> str:
    return json.dumps([choice.name, choice.settings, choice.training, dict(budget)], sort_keys=True, default=repr)
