"""Decorator that turns a function into an attack: declares needs, narrows the target, checks settings.

@attack(access=Access.UPDATE, knows=Knows.LABELS)
def method(target: Observation, generator: torch.Generator, *, steps: int = 100) -> Reconstruction: ...
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar, cast, get_type_hints

import torch

from ..targets.narrow import enabled_by, narrow
from ..targets.results import RESULTS
from ..targets.target import Target
from .requires import Access, AccessError, Controls, Knows, Requirements

R = TypeVar("R")

_FIRST = (["target", "generator"], ["target", "coins"])  # `coins`: of attacks written before the name changed


class Attack(Generic[R]):
    """An attack method with its threat model.

    Attributes:
        name: name of the function and of its file.
        summary: first line of its docstring.
        requires: its needs.
        defaults: its settings with their default values, read-only.
        kind: kind of its result, a key of `RESULTS`, such as `membership`.
        target: class of its target.
    """

    def __init__(self, function: Callable[..., R], requires: Requirements) -> None:
        functools.update_wrapper(self, function)
        parameters = [*inspect.signature(function).parameters.values()]
        first, settings = parameters[:2], parameters[2:]
        misplaced = [p.name for p in settings if p.kind is not p.KEYWORD_ONLY or p.default is p.empty]
        if misplaced or [p.name for p in first] not in _FIRST:
            raise TypeError(
                f"{function.__name__} must be written (target, generator, *, setting=default, ...), "
                f"got {', '.join(misplaced) or ', '.join(p.name for p in first) or 'no arguments'}"
            )
        hints = get_type_hints(function)
        annotated = hints.get("target")
        if not (inspect.isclass(annotated) and issubclass(annotated, Target) and requires.access in annotated.accesses):
            raise TypeError(
                f"{function.__name__} has {requires.access.name} access: "
                f"its target must be annotated as {_target_of(requires.access)}, got {annotated}"
            )
        self.target: type[Target] = annotated
        if Knows.LABELS in requires.knows and Knows.PRIOR in requires.knows:
            raise TypeError(
                f"{function.__name__} must not know both the labels of the batch and a prior: a label rules out "
                "candidates of other classes, so that the chance before the release would not be 1 in as many"
            )
        known = [row for row in RESULTS.values() if row.result is hints.get("return")]
        if not known:
            raise TypeError(
                f"{function.__name__} must be annotated to return "
                f"{' or '.join(row.result.__name__ for row in RESULTS.values())}, got {hints.get('return')}"
            )
        self.kind: str = known[0].kind
        self.name: str = function.__name__
        self.summary: str = (inspect.getdoc(function) or "").split("\n", 1)[0]
        self.requires = requires
        self.defaults = MappingProxyType({p.name: p.default for p in settings})
        self._types = {p.name: hints.get(p.name) for p in settings}
        self._function = function

    def settings(self, **chosen: Any) -> dict[str, Any]:
        """Returns all settings of a call, the given values over the defaults.

        Raises:
            ValueError: a setting that this attack does not have, or a value of the wrong type.
        """
        for name, value in chosen.items():
            if name not in self.defaults:
                near = difflib.get_close_matches(name, self.defaults, n=1)
                known = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(self.defaults) or 'none'}"
                raise ValueError(f"{self.name} has no setting {name!r}; {known}")
            declared = self._types[name]
            # Unions and sequences are the method's own to check.
            if declared in (int, float, str, bool) and not _is_a(value, declared):
                raise ValueError(f"{name} of {self.name} must be of type {declared.__name__}, got {value!r}")
        return {**self.defaults, **chosen}

    def check(self, target: Target | Requirements) -> str | None:
        """Returns the reason, a sentence, if this attack does not apply, else None; runs nothing.

        Args:
            target: the target of the attack, or the threat model that a target will offer, before the target exists.
        """
        if isinstance(target, Requirements):
            return self._missing(target)
        if not isinstance(target, self.target):
            return (
                f"{self.name} needs access to {self.requires.access.value} ({self.target.__name__}), "
                f"got {type(target).__name__}"
            )
        try:
            problem = self._missing(target.offered())
        except AccessError as error:
            return f"{self.name} does not apply: {error}"
        # Metrics of an empty group are undefined, so a test without candidates is refused.
        if problem is None and RESULTS[self.kind].of_candidates and not (target.candidates and len(target.candidates)):
            return f"{self.name} needs candidates to score: fill {self.target.__name__}.candidates"
        return problem

    def _missing(self, offered: Requirements) -> str | None:
        missing = self.requires.missing_from(offered)
        # Missing access is reported by itself: fields that would grant the knowledge belong to another class of target.
        if self.requires.access in missing:
            return f"{self.name} needs access to {self.requires.access.value}, got {offered.access.value}"
        if missing:
            return f"{self.name} needs {' and '.join(enabled_by(need) for need in missing)}, which is withheld"
        return None

    def __call__(self, target: Target, generator: torch.Generator | None = None, **settings: Any) -> R:
        """Runs the attack on the fields that it declared to need, and on no others.

        Args:
            target: narrowed before the method sees it.
            generator: the attack's own generator, on the CPU; by default with seed 0.
            **settings: the method's settings.

        Returns:
            A copy of the method's result; scores are in the order of the candidates.

        Raises:
            AccessError: the target does not grant all that the attack needs, or the attack read a field that it did not
                declare.
            TypeError: the method's result is not of its declared type.
            ValueError: an unknown or impossible setting, tensors of the target on several devices, a generator that is
                not on the CPU, scores of others than the candidates, or more inputs than the batch has examples.
        """
        resolved = self.settings(**settings)
        if (problem := self.check(target)) is not None:
            raise AccessError(problem)
        # On the CPU, whose stream does not depend on the target's device.
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        if generator.device.type != "cpu":
            raise ValueError(
                f"generator must be on the CPU, whose numbers are the same for every device, got {generator.device}; "
                "take torch.Generator()"
            )
        target.refuse_two_devices()
        # Made before the attack runs, because it may write into its target, the ids of the candidates included.
        checked = RESULTS[self.kind].expected(target)
        return cast(R, checked(self.on_view(narrow(target, self.requires), generator, resolved)))

    def on_view(self, view: Target, generator: torch.Generator, settings: Mapping[str, Any]) -> object:
        """Returns the method's result, unchecked.

        Args:
            view: a narrowed target.
            generator: the attack's own generator.
            settings: all settings.
        """
        return self._function(view, generator, **settings)

    def __repr__(self) -> str:
        return f"<attack {self.name}: {self.requires.to_dict()}>"


def attack(
    *, access: Access, knows: Knows = Knows.NOTHING, controls: Controls = Controls.NOTHING
) -> Callable[[Callable[..., R]], Attack[R]]:
    """Declares the needs of an attack; everything else is withheld from it.

    Args:
        access: decides the class of the target, such as `Observation` for `Access.UPDATE`.
        knows: side knowledge.
        controls: influence on training.
    """
    requires = Requirements(access=access, knows=knows, controls=controls)
    return lambda function: Attack(function, requires)


def _target_of(access: Access) -> str:
    """Returns the class of the target for an access, for a message."""
    kinds = (kind.__name__ for kind in Target.__subclasses__() if access in kind.accesses)
    return next(kinds, f"a subclass of Target with {access} among its accesses")


def _is_a(value: Any, declared: type) -> bool:
    if declared is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    # bool is a subclass of int: `restarts = true` must not pass for 1.
    return isinstance(value, declared) and (declared is bool or not isinstance(value, bool))
