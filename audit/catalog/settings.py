"""Settings of a method, read from the signature, annotations and docstring of its function, and checks of values.

A setting with a misspelt name or a value of the wrong type is refused in a sentence before any computation, even if
the method itself would accept it.
"""

from __future__ import annotations

import inspect
import json
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from .messages import CatalogError, way_out


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of a method: a keyword-only parameter of its function.

    Attributes:
        name: as in a suite file.
        annotation: its type, evaluated; `Any` without an annotation.
        required: whether it has no default.
        default: None if required.
        about: its description in the function's docstring.
    """

    name: str
    annotation: Any
    required: bool
    default: Any
    about: str

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values: the type in words, a default that JSON lacks as text."""
        return {
            "name": self.name,
            "type": self.type,
            "required": self.required,
            "default": _plain(self.default),
            "about": self.about,
        }

    @property
    def type(self) -> str:
        """The type in words, such as "a number"."""
        return _words(self.annotation)

    def conform(self, value: Any) -> Any:
        """Returns the value in the method's type: an integer is accepted for a float, a list for a tuple.

        Raises:
            CatalogError: another type, such as text for a number or true for 1.
        """
        try:
            # Through JSON: pydantic's strict mode then accepts a list for a tuple, and coerces nothing else.
            return _read(json.dumps(value), self.annotation)
        except (ValidationError, TypeError):
            raise CatalogError(f"{self.name} must be {self.type}, got {value!r}") from None


def read_settings(method: Callable[..., Any], *, ignoring: str = "") -> dict[str, Setting]:
    """Returns the keyword-only parameters of a method, in the order of its signature.

    Args:
        method: a factory of defenses or an attack.
        ignoring: a keyword that is not a setting.
    """
    function = inspect.unwrap(method)  # the decorated function of an attack
    # A callable object may be unhashable.
    read = _settings_of if isinstance(function, types.FunctionType) else _settings_of.__wrapped__
    return dict(read(function, ignoring))


# Each cell reads settings dozens of times, and signature, type hints and docstring take a millisecond.
@lru_cache(maxsize=512)
def _settings_of(function: Callable[..., Any], ignoring: str) -> dict[str, Setting]:
    about = _arguments(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function)
    except NameError:  # a type that its file imports for the type checker only; every setting is then `Any`
        hints = {}
    return {
        parameter.name: Setting(
            name=parameter.name,
            annotation=hints.get(parameter.name, Any),
            required=parameter.default is parameter.empty,
            default=None if parameter.default is parameter.empty else parameter.default,
            about=about.get(parameter.name, ""),
        )
        for parameter in inspect.signature(function).parameters.values()
        # Positional arguments, an attack's target and generator, are supplied by the harness.
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != ignoring
    }


def resolve_settings(known: Mapping[str, Setting], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns every setting, the given values over the defaults, each of the right type, in the order of `known`.

    Raises:
        CatalogError: all errors: unknown, missing, of another type, or without a JSON form.
    """
    resolved = {key: setting.default for key, setting in known.items() if not setting.required}
    wrong = [f"{key} is missing" for key, setting in known.items() if setting.required and key not in chosen]
    for key, value in chosen.items():
        if key not in known:
            wrong.append(f"unknown setting {key!r}; {way_out(key, known)}")
            continue
        try:
            resolved[key] = known[key].conform(value)
        except CatalogError as error:
            wrong.append(str(error))
    for key, value in resolved.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            wrong.append(f"{key} must be a value that a record can hold (finite numbers, text, lists), got {value!r}")
    if wrong:
        raise CatalogError("; ".join(wrong))
    return {key: resolved[key] for key in known}


def parse_settings(assignments: Iterable[str]) -> dict[str, Any]:
    """Parses settings from `key=value` texts, the value in TOML (text in quotes), as given to `--set`.

    Raises:
        CatalogError: no `=`, or a value that is not TOML.
    """
    parsed: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        try:
            value = tomllib.loads(f"value = {text}") if equals and key.strip() else {}
        except tomllib.TOMLDecodeError:
            value = {}
        if set(value) != {"value"}:  # a text with a line break could set further keys
            raise CatalogError(
                f'a setting must be key=value with a TOML value, as share=0.1 or kind="name", got {assignment!r}'
            )
        parsed[key.strip()] = value["value"]
    return parsed


def _arguments(doc: str) -> dict[str, str]:
    """Returns name -> text of the section `Args:` of a Google docstring."""
    texts: dict[str, str] = {}
    current = None
    lines = iter(doc.splitlines())
    for line in lines:
        if line.strip() == "Args:":
            break
    for line in lines:
        if line.strip() and not line.startswith("    "):
            break
        name, colon, text = line.strip().partition(":")
        # Continuation lines are indented further: their colons start no argument.
        if colon and not line.startswith("     ") and name.isidentifier():
            current, texts[name] = name, text.strip()
        elif current:
            texts[current] = f"{texts[current]} {line.strip()}".strip()
    return texts


def _read(text: str, annotation: Any) -> Any:
    try:
        # Settings are written into records, and JSON has neither infinity nor NaN.
        adapter = TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))
    except PydanticUserError:  # a model or dataclass has its own configuration
        adapter = TypeAdapter(annotation)
    return adapter.validate_json(text, strict=True)


def _words(annotation: Any) -> str:
    simple = {float: "a number", int: "an integer", bool: "true or false", str: "text", Any: "anything"}
    if annotation in simple:
        return simple[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        # Without None, which TOML cannot write.
        return " or ".join(_words(part) for part in arguments if part is not type(None))
    if inspect.isclass(origin) and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
        return "a list, each " + " or ".join(dict.fromkeys(_words(part) for part in arguments if part is not ...))
    return getattr(annotation, "__name__", str(annotation))


def _plain(value: Any) -> Any:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return repr(value)
    return value
