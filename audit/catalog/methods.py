"""Finds methods by file name: `defenses/pcdp.py` holds the function `pcdp`, and there is nothing to register.

Third parties add methods by the entry points `leakbench.defenses` and `leakbench.attacks`. Nothing is
imported before it is asked for, so a method that needs an extra costs the others nothing; asked for without
its extra, it says which one. A method's settings, their types, defaults and meaning are read from its
function: signature, annotations, docstring.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.resources
import inspect
import pkgutil
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attacks.core import Attack

from .settings import CatalogError, Setting, no_such, read_settings, resolve_settings

Kind = Literal["defenses", "attacks", "suites", "data", "models"]
Method = Literal["defenses", "attacks"]

KINDS: dict[Kind, str] = {
    "defenses": "defense",
    "attacks": "attack",
    "suites": "suite",
    "data": "data set",
    "models": "model",
}
"""What can be listed -> what one of it is called in a sentence."""

EXTRAS = {
    "opacus": "engines",
    "backpack": "engines",
    "torchvision": "images",
    "torchmetrics": "images",
    "lpips": "images",
    "kymatio": "images",
}
"""Module of an optional dependency -> the extra it comes with."""

BUDGETED = "noise_multiplier"
"""The argument of a defense that a suite's budget decides, never a setting."""


class MissingExtra(CatalogError):
    """A method needs an optional dependency that is not installed."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """All that `leakbench explain` prints about one entry.

    Attributes:
        name: as in a suite file.
        kind: what it is, in the singular.
        summary: one line.
        about: the whole text of its file.
        settings: of a method; empty otherwise.
        requires: an attack's threat model, by names.
    """

    name: str
    kind: str
    summary: str
    about: str
    settings: tuple[Setting, ...] = ()
    requires: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: types in words, defaults that JSON lacks as text."""
        return {
            "name": self.name,
            "kind": self.kind,
            "summary": self.summary,
            "about": self.about,
            "settings": [setting.to_dict() for setting in self.settings],
            "requires": self.requires,
        }


def names(kind: Kind) -> tuple[str, ...]:
    """Names of everything of a kind, sorted; imports no method."""
    if kind == "suites":
        folder = importlib.resources.files("benchmarks.suites")
        found = [entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")]
    elif kind in ("data", "models"):
        found = importlib.import_module(f"benchmarks.{kind}").names()
    else:
        found = {*_files(kind), *_entry_points(kind)}
    return tuple(sorted(found))


def find(kind: Method, name: str) -> Callable[..., Any]:
    """The factory of a defense, or the attack, of that name.

    Raises:
        CatalogError: no such name (with the nearest one), two of that name, or a file without its function.
        MissingExtra: its file imports what is not installed.
    """
    known = names(kind)
    if name not in known:
        raise CatalogError(no_such(KINDS[kind], name, known))
    points = _entry_points(kind).get(name, [])
    places = [f"{kind}/{name}.py"] * (name in _files(kind)) + [point.value for point in points]
    if len(places) > 1:
        raise CatalogError(f"a {KINDS[kind]}'s name must be its own, got {name!r} from {' and '.join(places)}")
    try:
        found = points[0].load() if points else getattr(importlib.import_module(f"{kind}.{name}"), name, None)
    except ImportError as error:
        raise _missing(kind, name, error) from error
    if not callable(found):
        raise CatalogError(f"{places[0]} must hold a function named {name!r}, got {type(found).__name__}")
    return found


def module_of(kind: Method, name: str) -> str | None:
    """The module of a third party that a method comes from; None for ours, and for a name that is not there."""
    points = _entry_points(kind).get(name, [])
    return points[0].module if points and name not in _files(kind) else None


def attack(name: str) -> Attack[Any]:
    """The attack of that name.

    Raises:
        CatalogError: as `find`, or its file holds a function that was not decorated.
    """
    found = find("attacks", name)
    if not isinstance(found, Attack):
        raise CatalogError(f"attack {name!r} must be decorated with attacks.core.attack, got a plain function")
    return found


def settings(kind: Method, name: str) -> dict[str, Setting]:
    """The settings of a method in the order of its signature, without the noise multiplier of a defense.

    Raises:
        CatalogError: as `find`.
    """
    return read_settings(find(kind, name), ignoring=BUDGETED)


def resolve(kind: Method, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a method, the given ones over the defaults, each of the right type.

    Raises:
        CatalogError: unknown name, or what is wrong with the settings, all of it.
    """
    try:
        return resolve_settings(settings(kind, name), given)
    except CatalogError as error:
        raise CatalogError(f"{KINDS[kind]} {name!r}: {error}") from None


def defense(name: str, given: Mapping[str, Any] | None = None, *, noise_multiplier: float | None = None) -> Any:
    """Makes a defense by name.

    Args:
        name: its file name.
        given: settings; defaults for the others.
        noise_multiplier: std / sensitivity, for those that add noise; the others have no use for it.

    Raises:
        CatalogError: unknown name or settings.
        MissingExtra: it needs what is not installed.
        ValueError: the method refuses a value.
    """
    factory = find("defenses", name)
    resolved = resolve("defenses", name, given or {})
    if noise_multiplier is not None and BUDGETED in inspect.signature(factory).parameters:
        resolved[BUDGETED] = noise_multiplier
    try:
        return factory(**resolved)
    except ImportError as error:
        raise _missing("defenses", name, error) from error


def describe(kind: Kind, name: str) -> str:
    """One line about an entry; imports no method, so it works without its extras.

    Raises:
        CatalogError: no such name.
    """
    known = names(kind)
    if name not in known:
        raise CatalogError(no_such(KINDS[kind], name, known))
    if kind == "suites":
        text = importlib.resources.files("benchmarks.suites").joinpath(f"{name}.toml").read_text(encoding="utf-8")
        return tomllib.loads(text).get("about", "")
    if kind in ("data", "models"):
        return importlib.import_module(f"benchmarks.{kind}").describe(name)
    if name in _files(kind):
        return _file_text(kind, name).partition("\n")[0]
    return f"added by {_entry_points(kind)[name][0].value}"


def patterns(kind: Kind) -> dict[str, str]:
    """How entries are named that have no file of ours, as `folder:PATH`, with a line about each."""
    return importlib.import_module(f"benchmarks.{kind}").patterns() if kind in ("data", "models") else {}


def explain(name: str) -> Explanation:
    """What an entry of any kind is; of several of one name, the first in the order of `KINDS`.

    Raises:
        CatalogError: no such name, with the nearest one.
        MissingExtra: a method whose settings cannot be read without its extra.
    """
    everything: dict[str, Kind] = {}
    for kind in KINDS:
        for known in names(kind):
            everything.setdefault(known, kind)
    if name not in everything:
        raise CatalogError(no_such("defense, attack, suite, data set or model", name, sorted(everything)))
    kind = everything[name]
    summary = describe(kind, name)
    if kind == "suites":
        return Explanation(name=name, kind=KINDS[kind], summary=summary, about=summary)
    if kind in ("data", "models"):
        module = importlib.import_module(f"benchmarks.{kind}.{name}")
        known = read_settings(getattr(module, name), ignoring="sizes" if kind == "data" else "classes")
        # What the data decide for a model, and a suite for the data, is nothing to be set.
        told = tuple(setting for key, setting in known.items() if key not in ("input_shape", "seed"))
        about = f"{inspect.getdoc(module) or ''}\n\n{summary}"
        return Explanation(name=name, kind=KINDS[kind], summary=summary, about=about, settings=told)
    requires = getattr(find(kind, name), "requires", None)
    return Explanation(
        name=name,
        kind=KINDS[kind],
        summary=summary,
        about=_file_text(kind, name) or summary,
        settings=tuple(settings(kind, name).values()),
        requires=None if requires is None else requires.to_dict(),
    )


def count(name: str) -> int | None:
    """Trained parameters of a model at the input that it is quoted for; None for other kinds of names."""
    models = importlib.import_module("benchmarks.models")
    return models.count(name) if name in models.names() else None


def missing_module(error: ImportError) -> str:
    """The predicate "needs torchmetrics, which is not installed: pip install 'leakbench[images]'"."""
    module = (error.name or str(error)).partition(".")[0]
    extra = EXTRAS.get(module)
    return f"needs {module}, which is not installed" + (f": pip install 'leakbench[{extra}]'" if extra else "")


def _missing(kind: Method, name: str, error: ImportError) -> Exception:
    # One of our own modules that is not there is a mistake in the code, and its traceback says where.
    if not error.name or error.name.partition(".")[0] in (
        "defenses",
        "attacks",
        "audit",
        "benchmarks",
        "leaderboard",
    ):
        return error
    return MissingExtra(f"{KINDS[kind]} {name!r} {missing_module(error)}")


def _files(kind: Method) -> dict[str, Path]:
    return {
        module.name: Path(folder) / f"{module.name}.py"
        for folder in importlib.import_module(kind).__path__
        for module in pkgutil.iter_modules([folder])
        if not module.ispkg and not module.name.startswith("_")
    }


def _entry_points(kind: Method) -> dict[str, list[importlib.metadata.EntryPoint]]:
    found: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for point in importlib.metadata.entry_points(group=f"leakbench.{kind}"):
        found.setdefault(point.name, []).append(point)
    return found


def _file_text(kind: Method, name: str) -> str:
    path = _files(kind).get(name)
    return "" if path is None else ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
