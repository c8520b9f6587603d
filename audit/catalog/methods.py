"""Lookup of methods by name, without a registry: `pcdp` is the function `pcdp` in `defenses/pcdp.py`.

Third parties add methods by the entry points `leakbench.defenses` and `leakbench.attacks`, users by the path of a file,
`mine/half_dp.py:half_dp`. A method is imported at its first use, so that a missing optional dependency affects only
users of that method; the error names the extra to install. A method's settings, their types, defaults and meaning are
read from its function: signature, annotations, docstring.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from leakbench.attacks.core import Attack
from leakbench.defenses.core import (
    Account,
    Adapted,
    BoundKind,
    Defense,
    Federated,
    Ledger,
    adapted,
    poisson,
    predict,
    rehearsed,
)

from ..isolation.worker import AttackProcessError, isolated
from . import plugins
from .listing import (
    KINDS,
    MethodKind,
    central_names,
    check,
    entry_points,
    foreign,
    is_federated,
    method_files,
    module_of,
    names,
    origin,
)
from .messages import CatalogError, in_one_line
from .settings import Setting, read_settings, resolve_settings

EXTRAS = {
    "opacus": "engines",
    "backpack": "engines",
    "torchvision": "images",
    "torchmetrics": "images",
    "lpips": "images",
    "kymatio": "images",
    "yaml": "exports",
}
"""Module of an optional dependency -> the extra of this distribution that installs it."""

__all__ = [
    "KINDS",
    "FederatedMethod",
    "MissingExtra",
    "adapts",
    "attack",
    "attack_here",
    "central_names",
    "check",
    "defense",
    "entry_points",
    "find",
    "foreign",
    "is_federated",
    "method",
    "method_files",
    "missing",
    "missing_module",
    "module_of",
    "names",
    "origin",
    "resolve",
    "settings",
]

BUDGETED = "noise_multiplier"
"""The argument of a defense that is decided by a suite's budget and is therefore no setting."""

ADAPTIVE = "adaptive"
"""Value of the setting `bound` for clipping at an adaptive clip norm, which a wrapper of the method computes."""


class MissingExtra(CatalogError):
    """A method needs an optional dependency that is not installed."""


class FederatedMethod(CatalogError):
    """A federated method was named for central training."""


def find(kind: MethodKind, name: str) -> Callable[..., Any]:
    """Returns the factory of a defense, or the attack, of that name or path.

    Raises:
        CatalogError: no such name (with the nearest name), an ambiguous name, a file without its function, or any other
            error in a third-party file, which is named.
        MissingExtra: its file imports a package that is not installed.
    """
    check(kind, name)
    try:
        if plugins.is_path(name):
            method, place = plugins.load(KINDS[kind], name), name
        else:
            method, place = _from_catalogue(kind, name)
    except ImportError as error:
        raise missing(kind, name, error) from error
    if not callable(method):
        raise CatalogError(f"{place} must hold a function named {_own_name(name)!r}, got {type(method).__name__}")
    return method


def attack(name: str) -> Attack[Any]:
    """Returns the attack of that name or path; a third-party attack runs in a separate process.

    Raises:
        CatalogError: as in `find`, or its file holds an undecorated function.
    """
    check("attacks", name)
    if not foreign("attacks", name):
        return attack_here(name)
    own, refusals = plugins.resolved(name), {"CatalogError": CatalogError, "MissingExtra": MissingExtra}
    try:
        return isolated(own, _version(name), partial(attack_here, own), refusals)
    except AttackProcessError as error:
        raise CatalogError(f"attack {name!r}: {error}") from error
    except CatalogError as error:  # from that process, which received the absolute path
        full_path, path_as_given = (spelling.rpartition(":")[0] for spelling in (own, name))
        raise type(error)(str(error).replace(full_path, path_as_given) if full_path else str(error)) from None


def attack_here(name: str) -> Attack[Any]:
    """Returns the attack of that name or path, imported into this process.

    Third-party code can read the memory of its process, so this process must hold no private data.

    Raises:
        CatalogError: as in `attack`.
    """
    return _decorated(name, find("attacks", name))


def _version(name: str) -> tuple[Any, ...]:
    """Returns a cache key of a third-party attack, which changes if other code would be imported under its name."""
    if plugins.is_path(name):
        return plugins.digests(name)
    points, top = entry_points("attacks")[name], module_of("attacks", name) or ""
    spec = importlib.util.find_spec(top.partition(".")[0])
    times = [Path(spec.origin).stat().st_mtime_ns] if spec and spec.origin and Path(spec.origin).is_file() else []
    return (*(point.value for point in points), *times, *sys.path)


def _decorated(name: str, function: Callable[..., Any]) -> Attack[Any]:
    if not isinstance(function, Attack):
        raise CatalogError(
            f"attack {name!r} must be decorated with leakbench.attacks.core.attack, got a plain function"
        )
    return function


def settings(kind: MethodKind, name: str) -> dict[str, Setting]:
    """Returns the settings of a method in the order of its signature, without the noise multiplier of a defense.

    Raises:
        CatalogError: as in `find`.
    """
    if kind == "attacks":
        check(kind, name)
        return read_settings(attack(name) if foreign(kind, name) else attack_here(name), ignoring=BUDGETED)
    factory = find(kind, name)
    _refuse_positional(name, factory)
    return read_settings(factory, ignoring=BUDGETED)


def _refuse_positional(name: str, factory: Callable[..., Any]) -> None:
    """Refuses positional arguments of a defense, which a suite file could not name."""
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            place = origin("defenses", name)
            hint = (
                "decorate it with leakbench.attacks.core.attack, if it is one"
                if parameter.name == "target"
                else "write *, before it"
            )
            raise CatalogError(f"{place} must take keyword-only settings, got ({parameter}): {hint}")


def resolve(kind: MethodKind, name: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all settings of a method, the given values over the defaults, each of the right type.

    Raises:
        CatalogError: unknown name, or all errors in the settings.
    """
    try:
        return resolve_settings(settings(kind, name), chosen)
    except CatalogError as error:
        raise CatalogError(f"{KINDS[kind]} {name!r}: {error}") from None


def defense(name: str, chosen: Mapping[str, Any] | None = None, *, noise_multiplier: float | None = None) -> Defense:
    """Constructs a defense of central training by name.

    Args:
        name: its file name, or the path of its function.
        chosen: settings; the others have their defaults.
        noise_multiplier: std / sensitivity, for defenses that add noise; ignored for other defenses.

    Raises:
        CatalogError: unknown name or settings, or a third-party file that raises, or returns no defense.
        FederatedMethod: it is a federated method.
        MissingExtra: it needs a package that is not installed.
        ValueError: the method refuses a value.
    """
    built = method(name, chosen, noise_multiplier=noise_multiplier)
    if isinstance(built, Federated):
        raise FederatedMethod(
            f"{name} is a federated method, and this run has no clients; a suite's [federated] table has them"
        )
    return built


def method(
    name: str, chosen: Mapping[str, Any] | None = None, *, noise_multiplier: float | None = None
) -> Defense | Federated:
    """Constructs a defense or a federated method by name; arguments and errors as for `defense`."""
    factory = find("defenses", name)
    resolved = resolve("defenses", name, chosen or {})
    # SGD, for example, adds no noise at any budget, and its function has no such argument.
    if noise_multiplier is not None and BUDGETED in inspect.signature(factory).parameters:
        resolved[BUDGETED] = noise_multiplier
    # A third-party method may have a setting `bound` with another meaning.
    ours = resolved.get("bound") == ADAPTIVE and settings("defenses", name)["bound"].annotation == BoundKind
    try:
        built = factory(**resolved | ({"bound": "clip"} if ours else {}))
    except ImportError as error:
        raise missing("defenses", name, error) from error
    except ValueError:
        raise  # the method's own check, with its own message
    except (Exception, SystemExit) as error:
        if not foreign("defenses", name):
            raise  # a bug of this library, located by its traceback
        raise CatalogError(f"{origin('defenses', name)} raised {in_one_line(error)}") from error
    if not isinstance(built, Defense | Federated):
        raise CatalogError(
            f"{origin('defenses', name)} must return a leakbench.defenses.core.Defense, got {type(built).__name__}"
        )
    if isinstance(built, Federated):
        return built
    _refuse_own_noise(name, built, noise_multiplier)
    return _adapting(name, built) if ours else built


def adapts(name: str) -> bool:
    """True if a defense, with its other settings at their defaults, may have the bound `adaptive`.

    True as well if this cannot be tried, as for a third-party file whose settings lack a default.
    """
    try:
        built = defense(name)
    except (CatalogError, ValueError):
        return True
    try:
        _adapting(name, built)
    except CatalogError:
        return False
    return True


def _adapting(name: str, defense: Defense) -> Defense:
    """Returns the defense with a clip norm that adapts to its gradients.

    Raises:
        CatalogError: it has no bound, several bounds, or an adaptive clip norm already.
    """
    try:
        around, account = replace(adapted(defense), name=defense.name), Account(Ledger(poisson(0.1)))
        # Two steps, because a method with memory may plan its first step, without memory, under another bound.
        steps = list(rehearsed(defense.with_noise(1.0), account, steps=2))
        norms = {block.bound.norm for step in steps if step.plan for block in step.plan.plan.blocks if block.updates}
        predict(around.with_noise(1.0), sampling=poisson(0.1), steps=2)
        if isinstance(defense.method, Adapted) or len(norms) > 1:
            raise ValueError("its clip norm moves already")
    except ValueError as error:
        raise CatalogError(f"{origin('defenses', name)} cannot have the bound {ADAPTIVE!r}: {error}") from error
    return around


def _refuse_own_noise(name: str, built: Defense, noise_multiplier: float | None) -> None:
    """Refuses a defense with another noise multiplier than the budget of a suite, or the user, gave to its function."""
    own_noise = built.noise_multiplier
    if own_noise == noise_multiplier or own_noise == 0.0 or (own_noise is None and noise_multiplier is None):
        return  # at 0 the method adds no noise, whatever the budget
    raise CatalogError(
        f"{origin('defenses', name)} must hand on the noise multiplier that it is given, {noise_multiplier}, and its "
        f"defense has {own_noise}: take noise_multiplier: float | None = None, and return Defense(..., "
        "noise_multiplier=noise_multiplier)"
    )


def missing_module(error: ImportError) -> str:
    """Returns the predicate "needs torchmetrics, which is not installed: pip install 'leakbench[images]'"."""
    module = (error.name or str(error)).partition(".")[0]
    extra = EXTRAS.get(module)
    return f"needs {module}, which is not installed" + (f": pip install 'leakbench[{extra}]'" if extra else "")


def missing(kind: MethodKind, name: str, error: ImportError) -> Exception:
    """Returns the exception for a method whose import failed, by the origin of the missing module."""
    # An ImportError without a module's name was raised by the method's own code and names no extra; a missing module of
    # this library is a bug.
    ours = not error.name or error.name.partition(".")[0] in plugins.OURS
    if ours and foreign(kind, name):
        return CatalogError(f"{origin(kind, name)} raised {in_one_line(error)}{plugins.place(error, name)}")
    return error if ours else MissingExtra(f"{KINDS[kind]} {name!r} {missing_module(error)}")


def _from_catalogue(kind: MethodKind, name: str) -> tuple[Any, str]:
    """Returns the function, or attack, of a name in the catalogue, and its file or entry point."""
    points = entry_points(kind).get(name, [])
    # Ambiguous names are refused: otherwise the installed packages would decide which method a record names.
    places = [f"{kind}/{name}.py"] * (name in method_files(kind)) + [point.value for point in points]
    if len(places) > 1:
        raise CatalogError(f"a {KINDS[kind]}'s name must be its own, got {name!r} from {' and '.join(places)}")
    if not points:
        return getattr(importlib.import_module(f"leakbench.{kind}.{name}"), name, None), places[0]
    try:
        return points[0].load(), places[0]
    except ImportError:
        raise
    except (Exception, SystemExit) as error:  # third-party code may raise any exception
        raise CatalogError(f"{places[0]} raised {in_one_line(error)}") from error


def _own_name(name: str) -> str:
    return name.rpartition(":")[2]
