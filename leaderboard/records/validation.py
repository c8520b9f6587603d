"""Dataclasses that check the types of their fields, and their construction from parsed JSON without coercion.

A record is evidence: a misspelt key, a number in quotes or a NaN must raise instead of becoming a default. The
annotations of the dataclass are the only schema. Standard library only.
"""

import dataclasses
import functools
import json
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, TypeGuard, TypeVar, Union

T = TypeVar("T")

KEY = "key"
"""Metadata of a field whose key in a file is no Python name."""

ADDED = {"may lack": True}
"""Metadata of a field that older files of the same schema lack; they are read with its default."""

OPTIONAL = {**ADDED, "left out": True}
"""Metadata of a field that is left out of a file when it is None."""

_WORDS = {float: "a finite number", int: "an integer", str: "a string", bool: "true or false"}


class RecordError(ValueError):
    """A record or its file violates the format."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedFields:
    """Dataclass whose fields are checked against their annotations, by `conform`.

    A subclass lists in `DERIVED` the properties that its JSON object has after its fields: `json_values` writes them,
    and `build` compares them with what follows from the fields.
    """

    DERIVED: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        conform(self)


class OpenFields(Mapping[str, Any]):
    """JSON object of any keys, in the order of its file, whose annotated keys are checked and are attributes too.

    An attribute has its class default if the object lacks the key; without a default, reading it raises RecordError.
    Other keys are kept unchecked: older records lack keys, and other versions and third parties add theirs.
    """

    VALUES: ClassVar[Any] = Any
    """Annotation of the values of all keys."""

    def __init__(self, content: Any, where: str = "content") -> None:
        """Checks the object.

        Args:
            content: a mapping; copied.
            where: its path in its document, for messages.

        Raises:
            RecordError: not an object, or a value is refused.
        """
        # Content of another `OpenFields` is checked already, and checking is slow: an AUC's detail has forty keys.
        values = content.__dict__["_content"] if isinstance(content, OpenFields) else None
        values = convert(dict[str, self.VALUES], content, where) if values is None else values
        known = {key: convert(hint, values[key], f"{where}.{key}") for key, hint in _open(type(self)) if key in values}
        self.__dict__.update(known, _content=values)

    def __getitem__(self, key: str) -> Any:
        return self.__dict__["_content"][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dict__["_content"])

    def __len__(self) -> int:
        return len(self.__dict__["_content"])

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}  # checked by the field that takes it

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__dict__['_content']!r})"

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for attributes that the instance and its class lack.
        raise (RecordError if name in dict(_open(type(self))) else AttributeError)(f"key {name!r} is missing")

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


@functools.cache
def _open(cls: type) -> tuple[tuple[str, Any], ...]:
    """Annotated keys of a subclass of `OpenFields`, with their annotations."""
    return tuple((name, hint) for name, hint in _hints(cls).items() if typing.get_origin(hint) is not ClassVar)


def conform(instance: Any) -> None:
    """Checks every field of a dataclass against its annotation and stores it in plain form.

    Plain form is as JSON returns it: tuples for `tuple` fields, lists inside free dictionaries, copies of dictionaries.
    A record then equals the record read back from its file, and shares no mutable object with its caller.

    Args:
        instance: a dataclass (frozen or not), in its `__post_init__`.

    Raises:
        RecordError: a field has another type or is not finite; the message starts with the field's name.
    """
    hints = _hints(type(instance))
    for key, field in _fields(type(instance)).items():
        # Fields of a frozen dataclass can only be set this way.
        object.__setattr__(instance, field.name, convert(hints[field.name], getattr(instance, field.name), key))


def build(cls: type[T], data: Any, where: str = "") -> T:
    """Builds a dataclass from a parsed JSON object that has exactly its fields, including those with defaults.

    Only fields of the metadata `ADDED` and `OPTIONAL`, and `DERIVED` properties of a `CheckedFields`, may be missing.

    Args:
        cls: the dataclass.
        data: result of `json.loads`.
        where: path of `data` in its document, for messages; empty at the top.

    Returns:
        The instance, nested dataclasses built as well.

    Raises:
        RecordError: not an object, a key is missing or unknown, or a value is refused.
    """
    place = f" in {where}" if where else ""
    if not isinstance(data, dict):
        raise RecordError(f"{where or 'the record'} must be an object, got {_short(data)}")
    fields, derived = _fields(cls), getattr(cls, "DERIVED", ())
    if missing := [key for key, field in fields.items() if key not in data and "may lack" not in field.metadata]:
        raise RecordError(f"key {missing[0]!r} is missing{place}")
    if unknown := [key for key in data if key not in fields and key not in derived]:
        raise RecordError(f"key {unknown[0]!r} is unknown{place}")
    hints = _hints(cls)
    path = f"{where}." if where else ""
    values = {
        field.name: convert(hints[field.name], data[key], path + key) for key, field in fields.items() if key in data
    }
    try:
        instance = cls(**values)
    except RecordError as error:  # raised by `__post_init__`, which has only the name of the field
        raise RecordError(f"{path}{error}") from None
    for name in derived:
        if name in data and data[name] != (value := getattr(instance, name)):
            raise RecordError(f"{path}{name} must be {value!r}, which follows from its neighbors, got {data[name]!r}")
    return instance


def json_values(value: Any) -> Any:
    """Returns a dataclass, or a container of dataclasses, as the values that `build` reads back."""
    if dataclasses.is_dataclass(value):
        content = {
            key: json_values(getattr(value, field.name))
            for key, field in _fields(type(value)).items()
            if "left out" not in field.metadata or getattr(value, field.name) is not None
        }
        return content | {name: getattr(value, name) for name in getattr(value, "DERIVED", ())}
    if isinstance(value, Mapping):
        return {key: json_values(item) for key, item in value.items()}
    return [json_values(item) for item in value] if isinstance(value, list | tuple) else value


def parse_json(text: str) -> Any:
    """Parses JSON without NaN, infinity and repeated keys, which Python's own parser accepts.

    Raises:
        RecordError: NaN, infinity or a repeated key.
        ValueError: no JSON.
        RecursionError: thousands of nested brackets.
    """
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_repeats)


def _no_constant(name: str) -> Any:
    raise RecordError(f"numbers must be finite, got {name}")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        repeated = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise RecordError(f"key {repeated!r} is there twice")
    return data


@functools.cache
def _fields(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """Fields of a dataclass by their keys in a file."""
    return {field.metadata.get(KEY, field.name): field for field in dataclasses.fields(typing.cast(Any, cls))}


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Annotations of a dataclass as types; cached, because a board has thousands of records."""
    return typing.get_type_hints(cls)


def convert(hint: Any, value: Any, where: str) -> Any:
    """Returns `value` in the plain form of the annotation `hint`.

    Args:
        hint: an annotation: a scalar, `Any` (free JSON), `Literal`, a union, `tuple[X, ...]`, `tuple[X, Y]`,
            `dict[str, X]`, a dataclass or an `OpenFields`.
        value: to check.
        where: path of the value, for messages.

    Returns:
        The same content, normalised.

    Raises:
        RecordError: the value does not fit.
    """
    if hint in _WORDS and _is(hint, value):
        # A whole number in a float field becomes a float: JSON of other languages writes 1.0 as 1.
        return hint(value)
    origin, arguments = _parts(hint)
    if hint is Any:
        return _plain(value, where)
    if origin in (Union, types.UnionType):
        return _union(arguments, value, where)
    if origin is Literal:
        # `==` alone would accept True for a 1 among the choices.
        if any(value is choice or (isinstance(value, str) and value == choice) for choice in arguments):
            return value
        raise RecordError(f"{where} must be one of {', '.join(map(str, arguments))}, got {_short(value)}")
    if origin is tuple and isinstance(value, list | tuple) and arguments[-1] is not ...:
        if len(value) != len(arguments):
            raise RecordError(f"{where} must have {len(arguments)} entries, got {_short(value)}")
        return tuple(convert(arguments[i], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        inner = arguments[1]
        return {_key(key, where): convert(inner, item, f"{where}.{key}") for key, item in value.items()}
    if _is_open(hint):
        return value if isinstance(value, hint) else hint(value, where)
    if dataclasses.is_dataclass(hint):
        cls = typing.cast(type, hint)
        return value if isinstance(value, cls) else build(cls, value, where)
    expected = {tuple: "a list", dict: "an object", Mapping: "an object"}.get(typing.cast(type, origin)) or _WORDS[hint]
    raise RecordError(f"{where} must be {expected}, got {_short(value)}")


@functools.cache
def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Origin and arguments of an annotation; cached, because a record has hundreds of values."""
    return typing.get_origin(hint), typing.get_args(hint)


@functools.cache
def _choices(union: tuple[Any, ...]) -> tuple[list[Any], list[Any], list[Any], tuple[Any, ...]]:
    """Choices of a union without None: all, scalars, dataclasses, open objects."""
    choices = [choice for choice in union if choice is not types.NoneType]
    classes = [typing.cast(type, choice) for choice in choices if dataclasses.is_dataclass(choice)]
    scalars = [choice for choice in choices if choice in _WORDS]
    return choices, scalars, classes, tuple(filter(_is_open, choices))


def _is_open(hint: Any) -> TypeGuard[type[OpenFields]]:
    return OpenFields in getattr(hint, "__mro__", ())  # `issubclass` of an abstract class is slow


def _union(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and types.NoneType in choices:
        return None
    given_types, scalars, classes, kinds = _choices(choices)
    if len(given_types) == 1:
        return convert(given_types[0], value, where)
    # Not converted: in `float | int | str` a count stays an integer. The exact type first: most values have it.
    if type(value) in scalars and _is(type(value), value):
        return value
    if any(_is(choice, value) for choice in scalars):
        return value
    if any(type(value) is choice for choice in classes):
        return value
    if kinds:
        if isinstance(value, kinds):
            return value
        # Among several, another field decides, so `__post_init__` chooses.
        return convert(kinds[0] if len(kinds) == 1 else dict[str, Any], value, where)
    if isinstance(value, dict) and classes:
        # The class with the most similar keys, whose error then names the key that does not fit.
        return build(min(classes, key=lambda choice: len(_fields(choice).keys() ^ value.keys())), value, where)
    for choice in given_types:
        if typing.get_origin(choice) is tuple and isinstance(value, list | tuple):
            return convert(choice, value, where)
    words = [_WORDS[choice] for choice in scalars]
    words += ["a list"] * (len(given_types) - len(scalars) - len(classes)) + ["an object"] * bool(classes)
    raise RecordError(f"{where} must be {' or '.join(words)}, got {_short(value)}")


def _is(scalar: type, value: Any) -> bool:
    if scalar is float:
        # bool is a subclass of int, and `true` is no number.
        if type(value) is not float and (isinstance(value, bool) or not isinstance(value, int | float)):
            return False
        return abs(value) <= sys.float_info.max  # false for NaN, infinity and integers no float can hold
    if scalar is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, scalar)


def _plain(value: Any, where: str) -> Any:
    # First, because most values are scalars and the checks of abstract classes are slow.
    if value is None or (type(value) in _WORDS and _is(type(value), value)):
        return value
    if isinstance(value, Mapping):
        return {_key(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if value is None or any(_is(scalar, value) for scalar in _WORDS):
        return value
    raise RecordError(f"{where} must be plain JSON without NaN or infinity, got {_short(value)}")


def _key(key: Any, where: str) -> str:
    if isinstance(key, str):
        return key
    raise RecordError(f"{where} must have strings for keys, got {_short(key)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
