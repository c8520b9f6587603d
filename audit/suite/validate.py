"""Validation of a suite beyond its schema: checks names and settings against the catalogue, and expands grids.

Every function returns problems as pairs (key.path, sentence) instead of raising, so that all mistakes of a file are
reported together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from leakbench.benchmarks import data as datasets
from leakbench.benchmarks import models
from leakbench.leaderboard.metrics import METRICS
from leakbench.leaderboard.metrics import reported as reported_metrics

from ..catalog import methods as catalog
from ..catalog import plugins
from ..catalog.messages import CatalogError, no_such, way_out
from ..catalog.settings import Setting
from .schema import BUDGETS, ReportedRow, TuneTable, training_value
from .task import TRAINING

Problem = tuple[str, str]
Decided = dict[str, Any]
"""A method at a point of its grid, with keys name, settings and training."""


EVERY_OTHER = "*"
"""Name of a last entry that stands for all methods not named by other entries, so that none is forgotten."""


def with_every_other(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Returns a document with `*` replaced by the methods it stands for, at their default settings; and the mistakes.

    Args:
        raw: the document, which is not modified.
    """
    document, wrong = dict(raw), []
    kinds: tuple[catalog.MethodKind, ...] = ("defenses", "attacks")
    for kind in kinds:
        entries = raw.get(key := catalog.KINDS[kind])
        if not isinstance(entries, list):
            continue
        named = [entry.get("name") if isinstance(entry, dict) else None for entry in entries]
        places = [place for place, name in enumerate(named) if name == EVERY_OTHER]
        if not places:
            continue
        if places != [len(entries) - 1]:
            wrong.append((f"{key}[{places[0]}]", f"'{EVERY_OTHER}' must be there once, as the last entry"))
        elif settings := sorted(entries[-1].keys() - {"name"}):
            wrong.append((f"{key}[{places[0]}]", f"'{EVERY_OTHER}' must have no settings, got {', '.join(settings)}"))
        # Without other distributions' methods: a suite has the same content on every machine. In a central suite
        # without federated methods: it has no clients.
        central = kind == "defenses" and "federated" not in raw
        known = [name for name in sorted(catalog.method_files(kind)) if not (central and catalog.is_federated(name))]
        others = [{"name": name} for name in known if name not in named]
        document[key] = [entry for entry, name in zip(entries, named, strict=True) if name != EVERY_OTHER] + others
    return document, wrong


def expand(raw: Mapping[str, Any], kind: catalog.MethodKind) -> tuple[list[list[Decided]], list[Problem]]:
    """Expands every entry of a list of methods into its grid of choices.

    A list is a grid if the type of the setting accepts no list.

    Args:
        raw: the document.
        kind: which list.

    Returns:
        A list of choices per entry, without invalid choices; the mistakes.
    """
    key = catalog.KINDS[kind]
    entries = raw.get(key)
    expanded: list[list[Decided]] = []
    wrong: list[Problem] = []
    earlier_choices: list[tuple[str, Decided]] = []
    for position, entry in enumerate(entries if isinstance(entries, list) else []):
        if not isinstance(entry, dict):
            continue  # its type is reported by the schema
        path = f"{key}[{position}]"
        choices, problems = _expand_entry(entry, kind, path)
        # Compared after expansion: differently written entries may request the same cells.
        for choice in choices:
            same = choice | {"name": plugins.resolved(choice["name"])}  # a file may be spelled in several ways
            repeated = next((where for where, earlier in earlier_choices if earlier == same), None)
            if repeated:
                problems.append((path, f"repeats {repeated}"))
                break
            earlier_choices.append((path, same))
        if problems:
            wrong += problems
        else:
            expanded.append(choices)
    return expanded, wrong


def wrong_names(raw: Mapping[str, Any]) -> list[Problem]:
    """Returns problems with names of data sets, models and model settings, and with the kinds of a budget."""
    wrong: list[Problem] = []
    for table in ("task", "share"):
        content = raw.get(table)
        if not isinstance(content, dict):
            continue
        if isinstance(data := content.get("data"), str):
            # A suite may need data supplied by its reader; they are loaded before any computation.
            wrong += _refused(f"{table}.data", partial(datasets.check, exists=False), data)
        model = content.get("model")
        model_table = model if isinstance(model, dict) else {"name": model}
        name = model_table.get("name")
        if not isinstance(name, str):
            continue
        if problems := _refused(f"{table}.model", models.check, name):
            wrong += problems
            continue  # the settings of an unknown model are unknown
        unknown = [key for key in model_table if key != "name" and not models.takes(name, key)]
        settings = models.defaults(name)
        wrong += [(f"{table}.model.{key}", f"unknown setting of {name!r}; {way_out(key, settings)}") for key in unknown]
    budget = raw.get("budget")
    if isinstance(budget, dict):
        kinds = [key for key in BUDGETS if key in budget]
        if len(kinds) != 1:
            names = " and ".join(kinds) or "none of them"
            wrong.append(("budget", f"must have one of {', '.join(BUDGETS)}, got {names}"))
        if ("tpr" in budget) != ("fpr" in budget):
            lacking = "fpr" if "tpr" in budget else "tpr"
            wrong.append(("budget", f"must have tpr and fpr together, as tpr = 0.05, fpr = 0.01; {lacking} is missing"))
        wrong += _not_above_chance(budget.get("tpr"), budget.get("fpr"))
    return wrong


def _not_above_chance(tpr: Any, fpr: Any) -> list[Problem]:
    """Returns the problem of a TPR limit that is not above its FPR, as chance is; the schema reports non-numbers."""
    values = tpr if isinstance(tpr, list) else [tpr]
    if not all(isinstance(value, float) for value in (fpr, *values)) or not values:
        return []
    low = [value for value in values if value <= fpr]
    problem = f"must be above fpr, {fpr:g}, got {low[0]:g}: coins have a true positive rate of fpr" if low else ""
    return [("budget.tpr", problem)] if low else []


def _refused(where: str, check: Callable[[str], None], name: str) -> list[Problem]:
    """Returns the errors that a check of a name raises, of a data set or a model, as problems."""
    try:
        check(name)
    except ModuleNotFoundError as error:
        return [(where, f"{name!r} {catalog.missing_module(error)}")]
    except ValueError as error:
        return [(where, str(error))]
    return []


def wrong_reported(
    raw: Mapping[str, Any], defenses: Sequence[Sequence[Decided]], attacks: Sequence[Sequence[Decided]]
) -> list[Problem]:
    """Returns figures of papers that match no cell of the suite: an unknown defense, attack, metric or selector.

    Args:
        raw: the document.
        defenses: the valid choices.
        attacks: the valid choices.
    """
    rows, wrong = raw.get("reported"), []
    known_attacks = {choice["name"] for entry in attacks for choice in entry}
    keys: dict[str, set[str]] = {}
    for choice in itertools.chain.from_iterable(defenses):
        # A union over entries: a selector valid for any entry of a defense is accepted.
        keys.setdefault(choice["name"], {"epsilon", "noise_multiplier", "delta", *TRAINING}).update(choice["settings"])
    named = _names(raw, "defense")
    for position, row in enumerate(rows if isinstance(rows, list) else []):
        if not isinstance(row, dict):
            continue
        path, name = f"reported[{position}]", row.get("defense")
        if isinstance(name, str) and name not in named:
            wrong.append((f"{path}.defense", no_such("defense", name, named) + " in this suite"))
        attack = row.get("attack")
        # An invalid listed attack has no choices, and is not reported here a second time.
        if isinstance(attack, str) and attack not in known_attacks and attack not in _names(raw, "attack"):
            wrong.append((f"{path}.attack", no_such("attack", attack, sorted(known_attacks)) + " in this suite"))
        metric = row.get("metric")
        if isinstance(metric, str) and metric not in (metrics := reported_metrics()):
            wrong.append((f"{path}.metric", no_such("metric", metric, metrics)))
        elif isinstance(metric, str) and (problem := _misplaced(metric, attack)):
            wrong.append((f"{path}.metric", problem))
        for key in row:
            if name in keys and key not in ReportedRow.model_fields and key not in keys[name]:
                wrong.append((f"{path}.{key}", f"unknown selector; {way_out(key, sorted(keys[name]))}"))
    return wrong


def _misplaced(metric: str, attack: Any) -> str:
    """Returns the reason why no cell can have a figure: its attack has no such metric. Empty otherwise."""
    known = METRICS[metric]
    if not known.of_attack:
        return f"{metric!r} is no attack's, so it must go without attack, got {attack!r}" if attack else ""
    if attack is None:
        return f"{metric!r} is an attack's, so attack must name one, got none"
    if isinstance(attack, str):
        try:
            kind = catalog.attack(attack).kind
        except CatalogError:
            return ""  # reported where the attack is listed
        return "" if kind == known.kind else f"{metric!r} is of {known.kind}, and {attack} is of {kind}"
    return ""


def wrong_grid(raw: Mapping[str, Any], defenses: Sequence[Sequence[Decided]]) -> list[Problem]:
    """Returns keys of the `tune` table that no defense accepts, and values invalid for those that do.

    Args:
        raw: the document.
        defenses: the valid choices.
    """
    table = raw.get("tune")
    if not isinstance(table, dict):
        return []
    wrong, budget = [], raw.get("budget")
    for key in ("epsilon", "noise_multiplier"):
        if key in table and isinstance(budget, dict) and key not in budget:
            budget_kinds = " or ".join(kind for kind in BUDGETS if kind in budget)
            wrong.append(
                (f"tune.{key}", f"must be of the kind that the budget is, which has {budget_kinds or 'neither'}")
            )
    names = dict.fromkeys(choice["name"] for entry in defenses for choice in entry)
    known = {name: catalog.settings("defenses", name) for name in names}
    # `grid` is not a key of the file: there it would be an ordinary setting, and the schema collects settings under it.
    grid = {key: value for key, value in table.items() if key not in TuneTable.model_fields or key == "grid"}
    if not grid:
        wrong.append(("tune", "must have a grid of at least one setting, as lr = [0.1, 0.5], got none"))
    for key, values in grid.items():
        where = f"tune.{key}"
        # Every defense with the key has to accept the values.
        conforms = [settings[key].conform for settings in known.values() if key in settings]
        if key in TRAINING:
            conforms.append(partial(_training, key))
        if not conforms and known:  # unknown if every defense has mistakes
            options = sorted({*TRAINING, *(name for settings in known.values() for name in settings)})
            wrong.append((where, f"no defense of this suite has this setting; {way_out(key, options)}"))
        elif not isinstance(values, list):
            wrong.append((where, f"must be a list of values to choose from, got {values!r}"))
        else:
            wrong += [problem for conform in conforms for problem in _values(values, conform, where)[1]]
    return list(dict.fromkeys(wrong))


def _expand_entry(entry: Mapping[str, Any], kind: catalog.MethodKind, path: str) -> tuple[list[Decided], list[Problem]]:
    name = entry.get("name")
    if not isinstance(name, str):
        return [], [(f"{path}.name", "is missing" if name is None else f"must be text, got {name!r}")]
    try:
        catalog.check(kind, name)
    except CatalogError as error:
        return [], [(f"{path}.name", str(error))]
    try:
        settings = catalog.settings(kind, name)
        if kind == "attacks":
            catalog.attack(name)
    except CatalogError as error:
        return [], [(path, str(error))]
    training = TRAINING if kind == "defenses" else {}
    wrong = [
        (f"{path}.{key}", "is missing") for key, setting in settings.items() if setting.required and key not in entry
    ]
    grid: dict[str, list[Any]] = {key: [setting.default] for key, setting in settings.items() if not setting.required}
    for key, value in entry.items():
        if key == "name":
            continue
        where = f"{path}.{key}"
        if key in settings:
            grid[key], problems = _values(value, settings[key].conform, where)
        elif key in training:
            grid[key], problems = _values(value, partial(_training, key), where)
        elif key == catalog.BUDGETED and kind == "defenses":
            hint = "give it there, as budget = { noise_multiplier = 1.0, delta = 1e-5 }"
            problems = [(where, f"is decided by the budget: {hint}")]
        else:
            problems = [(where, f"unknown setting of {name!r}; {way_out(key, [*settings, *training])}")]
        wrong += problems
    if wrong:
        return [], wrong
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    choices = [_choice(name, settings, values) for values in combinations]
    # An attack has no factory to try: its own checks are made when it runs.
    if kind == "defenses":
        for choice in choices:
            try:
                catalog.method(name, choice["settings"])  # the method's own checks, such as final_sparsity < 1
            except ValueError as error:
                wrong.append((path, str(error)))
    return choices, wrong


def _values(value: Any, conform: Callable[[Any], Any], where: str) -> tuple[list[Any], list[Problem]]:
    """Returns the grid that a value stands for: itself if the type accepts it, else the entries of a list."""
    try:
        return [conform(value)], []
    except CatalogError as error:
        if not isinstance(value, list):
            return [], [(where, _without_name(error))]
    values, wrong = [], []
    for position, entry in enumerate(value):
        try:
            values.append(conform(entry))
        except CatalogError as error:
            wrong.append((f"{where}[{position}]", _without_name(error)))
    if not value:
        wrong.append((where, "must have at least one entry, got none"))
    return values, wrong


def _choice(name: str, settings: Mapping[str, Setting], values: dict[str, Any]) -> Decided:
    return {
        "name": name,
        "settings": {key: value for key, value in values.items() if key in settings},
        "training": {key: value for key, value in values.items() if key not in settings},
    }


def _training(key: str, value: Any) -> Any:
    try:
        return training_value(key, value)
    except ValueError as error:
        raise CatalogError(f"{key} {error}") from None


def _without_name(error: CatalogError) -> str:
    # The key.path before the sentence names the setting already.
    return str(error).partition(" ")[2]


def _names(raw: Mapping[str, Any], key: str) -> list[str]:
    entries = raw.get(key)
    listed = entries if isinstance(entries, list) else []
    named = [entry.get("name") for entry in listed if isinstance(entry, dict)]
    return [name for name in named if isinstance(name, str)]
