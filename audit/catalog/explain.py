"""Descriptions of defenses, attacks, suites, data sets and models, for `leakbench list` and `leakbench explain`."""

from __future__ import annotations

import importlib
import tomllib
from dataclasses import dataclass, replace
from typing import Any

from leakbench.defenses.core import BoundKind, Federated, FixedBoundKind

from . import plugins
from .listing import (
    HAS_SMALL,
    KINDS,
    EntryKind,
    MethodKind,
    check,
    column,
    describe,
    file_text,
    foreign,
    names,
    text_of_suite,
)
from .messages import CatalogError, in_one_line, no_such
from .methods import BUDGETED, adapts, find, method, settings
from .settings import Setting, read_settings
from .step_summary import StepSummary, step_summary

CALIBRATED = "calibrated to the budget"
"""Description of a defense's noise multiplier if none is given."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The output of `leakbench explain` about an entry.

    Attributes:
        name: as in a suite file.
        kind: kind of entry, in the singular.
        summary: a single line.
        about: the full docstring of its file.
        settings: of a method; empty otherwise.
        requires: an attack's threat model, by names.
        sees: what an observer of every update sees of a step under a defense; None for others, and if undocumented.
        step_summary: releases and cost of a defense in a step, or the reason why they are unknown; None for others.
    """

    name: str
    kind: str
    summary: str
    about: str
    settings: tuple[Setting, ...] = ()
    requires: dict[str, Any] | None = None
    sees: str | None = None
    step_summary: StepSummary | str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values: types in words, defaults that JSON lacks as text."""
        return {
            "name": self.name,
            "kind": self.kind,
            "summary": self.summary,
            "about": self.about,
            "settings": [setting.to_dict() for setting in self.settings],
            "requires": self.requires,
            "sees": self.sees,
            "in_a_step": self.step_summary.to_dict() if isinstance(self.step_summary, StepSummary) else None,
            "not_rehearsed": self.step_summary if isinstance(self.step_summary, str) else None,
        }


def explain(name: str) -> Explanation:
    """Explains an entry of any kind; a name of several kinds is taken for the first kind in the order of `KINDS`.

    Raises:
        CatalogError: no such name, with the nearest name.
        MissingExtra: a method whose settings cannot be read without an optional dependency.
    """
    if plugins.is_path(name):
        return _explain_path(name)
    everything: dict[str, EntryKind] = {}
    for kind in KINDS:
        for known in names(kind):
            everything.setdefault(known, kind)
    if name not in everything:
        raise CatalogError(no_such("defense, attack, suite, data set or model", name, sorted(everything)))
    kind = everything[name]
    summary = describe(kind, name)
    if kind == "suites":
        summary = summary.removesuffix(HAS_SMALL)
        about = "\n\n".join([summary, *_comment(text_of_suite(name)), *_small_of_suite(name)])
        return Explanation(name=name, kind=KINDS[kind], summary=summary, about=about)
    if kind in ("data", "models"):
        entries = importlib.import_module(f"leakbench.benchmarks.{kind}")
        known = read_settings(entries.factory(name), ignoring="sizes" if kind == "data" else "classes")
        # A model's arguments that follow from the data, and a data set's that follow from the suite, are not settings.
        own_settings = tuple(setting for key, setting in known.items() if key not in ("input_shape", "seed"))
        about = entries.about(name)
        return Explanation(name=name, kind=KINDS[kind], summary=summary, about=about, settings=own_settings)
    return _of_method(kind, name, summary, file_text(kind, name) or summary)


def _small_of_suite(name: str) -> list[str]:
    """Returns paragraphs about the small form of a suite; empty without one."""
    text = text_of_suite(name)
    form = tomllib.loads(text).get("small")
    if form is None:
        return []
    return [f"With --small: {form.get('about', '')}", *_comment(text.partition("\n[small]\n")[2])]


def _comment(text: str) -> list[str]:
    """Returns the comment before the first key of a suite's file, or of a table in it; empty without a comment."""
    head: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        head.append(line.removeprefix("#").removeprefix(" "))
    return ["\n".join(head)] if head else []


def _explain_path(name: str) -> Explanation:
    """Explains a user's own file: as an attack if decorated, else as a defense."""
    check("defenses", name)
    # A path does not state its kind, and `find` works for either kind; only attacks have the attribute `requires`.
    kind: MethodKind = "attacks" if hasattr(find("defenses", name), "requires") else "defenses"
    summary = plugins.summary(name)
    return _of_method(kind, name, summary, plugins.docstring(name) or summary)


def _of_method(kind: MethodKind, name: str, summary: str, about: str) -> Explanation:
    requires = getattr(find(kind, name), "requires", None)
    return Explanation(
        name=name,
        kind=KINDS[kind],
        summary=summary,
        about=about,
        settings=_of_a_defense(name) if kind == "defenses" else tuple(settings(kind, name).values()),
        requires=None if requires is None else requires.to_dict(),
        sees=column("leakbench.defenses", "sees").get(name) if kind == "defenses" and not foreign(kind, name) else None,
        step_summary=_facts(name) if kind == "defenses" else None,
    )


def _of_a_defense(name: str) -> tuple[Setting, ...]:
    """Returns the settings of a defense, including its noise multiplier, each with its accepted values."""
    accepted = list(settings("defenses", name).values())
    noise = read_settings(find("defenses", name)).get(BUDGETED)
    if noise is not None:
        accepted.append(replace(noise, required=False, default=CALIBRATED))
    if any(setting.annotation == BoundKind for setting in accepted) and not adapts(name):
        accepted = [
            replace(setting, annotation=FixedBoundKind) if setting.annotation == BoundKind else setting
            for setting in accepted
        ]
    return tuple(accepted)


def _facts(name: str) -> StepSummary | str:
    """Returns releases and cost of a defense; for a third-party defense that fails at its defaults, the reason.

    A step of a federated method is that of its part with noise: a local step, a client's update, or a round.
    """
    try:
        built = method(name, {})
        return step_summary(built.private_part if isinstance(built, Federated) else built)
    except Exception as error:  # third-party code may raise any exception, and is explained all the same
        if not foreign("defenses", name):
            raise
        return f"{in_one_line(error)}{plugins.place(error, name)}"
