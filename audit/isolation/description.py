"""Declaration of an attack as plain JSON, so that its code need not be imported next to private data."""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from leakbench.attacks.core import RESULTS, Access, Attack, Controls, Knows, Requirements, Target

from .channel import GarbledError

_PLAIN: dict[str, Any] = {
    "bool": bool, "int": int, "float": float, "str": str, "None": type(None), "Any": Any, "list": list, "tuple": tuple,
    "dict": dict, "set": set, "Sequence": Sequence, "Mapping": Mapping, "Iterable": Iterable, "...": ...,
}  # fmt: skip


class Unwritable:
    """Default value of a setting that neither JSON nor a record can hold; the refusal shows its `repr`."""

    def __init__(self, text: str) -> None:
        """Keeps the text."""
        self._text = text

    def __repr__(self) -> str:
        return self._text


def described(attack: Attack[Any]) -> dict[str, Any]:
    """Encodes the declaration of an attack as plain JSON: name, target, threat model, and settings with their types.

    Args:
        attack: the attack, imported in its own process.
    """
    hints = {name: setting.annotation for name, setting in _parameters(attack).items()}
    return {
        "name": attack.name,
        "about": inspect.getdoc(attack) or "",
        "kind": attack.kind,
        "target": [attack.target.__module__, attack.target.__qualname__],
        "access": [attack.requires.access.name, attack.requires.access.value, list(attack.requires.access.includes)],
        "knows": [flag.name for flag in attack.requires.knows],
        "controls": [flag.name for flag in attack.requires.controls],
        "settings": [[name, _type_as_json(hints[name]), _default(value)] for name, value in attack.defaults.items()],
    }


def declared(description: Mapping[str, Any], run: Callable[..., Any]) -> Attack[Any]:
    """Returns an attack with the described declaration, which runs elsewhere.

    Args:
        description: description from the attack's process, which is not trusted.
        run: runs the attack on a narrowed target, a generator and settings.

    Raises:
        GarbledError: the description is malformed.
    """
    try:
        known = next((access for access in _ACCESSES if access.name == description["access"][0]), None)
        access = Access(
            str(description["access"][0]), str(description["access"][1]), tuple(map(str, description["access"][2]))
        )
        access = known if known is not None and known == access else access
        target, result = (
            _target(str(description["target"][0]), str(description["target"][1]), access),
            RESULTS[description["kind"]].result,
        )

        def elsewhere(target: Any, generator: Any, **settings: Any) -> Any:
            return run(target, generator, settings)

        settings = {
            str(name): (_annotation(annotation), _value(value)) for name, annotation, value in description["settings"]
        }
        elsewhere.__name__ = elsewhere.__qualname__ = str(description["name"])
        elsewhere.__doc__ = str(description["about"])
        elsewhere.__annotations__ = {name: annotation for name, (annotation, _) in settings.items()}
        elsewhere.__annotations__ |= {"target": target, "return": result}
        ends = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("target", "generator")]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=annotation)
            for name, (annotation, value) in settings.items()
        ]
        elsewhere.__signature__ = inspect.Signature([*ends, *more])  # type: ignore[attr-defined]  # any function may have one
        knows, controls = Knows.NOTHING, Controls.NOTHING
        for name in description["knows"]:
            knows |= Knows[name]
        for name in description["controls"]:
            controls |= Controls[name]
        return Attack(elsewhere, Requirements(access=access, knows=knows, controls=controls))
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise GarbledError(f"what the attack declares cannot be read: {type(error).__name__}: {error}") from error


_ACCESSES = [access for access in vars(Access).values() if isinstance(access, Access)]
_OWN: dict[tuple[str, str, str], type[Target]] = {}  # classes of targets that third parties define, one per name


def _target(module: str, name: str, access: Access) -> type[Target]:
    """Returns a target's class by name, or a stand-in if the class is in the attack's own code."""
    classes = [kind for kind in _subclasses(Target) if (kind.__module__, kind.__qualname__) == (module, name)]
    if classes:
        return classes[0]
    return _OWN.setdefault((module, name, access.name), type(name, (Target,), {"accesses": (access,)}))


def _subclasses(kind: type) -> Iterable[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _parameters(attack: Attack[Any]) -> Mapping[str, inspect.Parameter]:
    function = inspect.unwrap(attack)
    try:
        hints = typing.get_type_hints(function)
    except NameError:  # a type that its file imports for the type checker only
        hints = {}
    parameters = inspect.signature(function).parameters
    return {name: parameter.replace(annotation=hints.get(name, Any)) for name, parameter in parameters.items()}


def _type_as_json(annotation: Any) -> Any:
    """Encodes a type as JSON: plain types by name, parametrised types as name of the origin and arguments."""
    plain = [name for name, kind in _PLAIN.items() if kind is annotation]
    if plain:
        return plain[0]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return (
            ["Literal", *arguments]
            if all(type(argument) in (str, int, bool, type(None)) for argument in arguments)
            else "Any"
        )
    if origin is typing.Annotated:
        return _type_as_json(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return ["Union", *map(_type_as_json, arguments)]
    names = [name for name, kind in _PLAIN.items() if kind is origin]
    return [names[0], *map(_type_as_json, arguments)] if names else "Any"


def _annotation(encoded: Any) -> Any:
    if isinstance(encoded, str):
        return _PLAIN[encoded]
    name, *arguments = encoded
    if name == "Literal":
        return Literal[tuple(arguments)]
    read = tuple(map(_annotation, arguments))
    return typing.Union[read] if name == "Union" else _PLAIN[name][read]  # noqa: UP007  of types that are data


def _default(value: Any) -> Any:
    """Encodes a default as JSON, with tuples and lists distinguished."""
    if isinstance(value, tuple):
        return {"tuple": list(map(_default, value))}
    if type(value) is list:
        return {"list": list(map(_default, value))}
    plain = type(value) in (str, int, bool, type(None)) or (type(value) is float and math.isfinite(value))
    return {"value": value} if plain else {"text": repr(value)}


def _value(encoded: Mapping[str, Any]) -> Any:
    ((form, value),) = encoded.items()
    if form in ("tuple", "list"):
        return {"tuple": tuple, "list": list}[form](map(_value, value))
    return value if form == "value" else Unwritable(str(value))
