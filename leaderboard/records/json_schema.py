"""JSON Schemas (draft 2020-12) of a record's file and of a manifest, derived from their dataclasses.

Validators of other languages read them; `python -m leakbench.leaderboard.records.json_schema` writes the record's
beside this file. A schema states keys, types, choices and ranges. The reader refuses more: a seal or a name that is not
that of the content, a value outside of its interval, 1.0 for an integer. Standard library only.
"""

import dataclasses
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Union

from ..kinds import KINDS
from ..metrics import CLAIM, METRICS, KnownMetric
from .fields import Metric, Provenance, RecordedClaim
from .manifest import SCHEMA as MANIFEST_SCHEMA
from .manifest import Manifest
from .record import ADDED, SCHEMA, SEAL, Record
from .task import TrainingTask, UpdateTask
from .validation import KEY, OpenFields

PATH = Path(__file__).with_name("record.schema.json")
"""Committed schema of a record."""

DRAFT = "https://json-schema.org/draft/2020-12/schema"

_SCALARS = {float: "number", int: "integer", str: "string", bool: "boolean", types.NoneType: "null"}
_DIGEST = {"pattern": "^[0-9a-f]{64}$"}

RULES: dict[tuple[type, str], dict[str, Any]] = {
    (Record, "schema"): {"const": SCHEMA},
    (Record, "id"): {"pattern": "^[0-9a-f]{16,128}$"},
    (Record, "suite"): {"minLength": 1},
    (Record, "seconds"): {"minimum": 0},
    (Record, "noise_multiplier"): {"minimum": 0},
    (Record, "arrays"): {"pattern": r"^\w[\w.-]*$"},
    (Record, "arrays_digest"): _DIGEST,
    (Metric, "n"): {"minimum": 0},
    (Provenance, "source"): _DIGEST,
    (RecordedClaim, "epsilon"): {"minimum": 0},
    (RecordedClaim, "epsilon_rdp"): {"minimum": 0},
    (RecordedClaim, "as_if_poisson"): {"minimum": 0},
    (RecordedClaim, "delta"): {"minimum": 0, "exclusiveMaximum": 1},
    (RecordedClaim, "sample_rate"): {"exclusiveMinimum": 0, "maximum": 1},
    (Manifest, "schema"): {"const": MANIFEST_SCHEMA},
}
"""Ranges and patterns that the dataclasses check after their types."""


def record_schema() -> dict[str, Any]:
    """Returns the schema of `<id>.json`."""
    definitions: dict[str, Any] = {}
    schema = _object(Record, definitions)
    schema["properties"] |= {
        "kind": {"enum": list(KINDS)},
        SEAL: {"type": "string", **_DIGEST, "description": "SHA-256 of the rest of the record: a checksum."},
        "task": {"type": "object"},
        "metrics": {
            "type": "object",
            "properties": {name: _metric(known, definitions) for name, known in METRICS.items() if known.kind != CLAIM},
            "additionalProperties": _of(Metric, definitions),
        },
    }
    schema["required"] = [key for key in [*schema["required"], SEAL] if key not in ADDED]
    schema["allOf"] = [
        *(_of_kind(name, definitions) for name in KINDS),
        _if(
            {"status": {"const": "ok"}},
            {"metrics": {"minProperties": 1}},
            {"reason": {"type": "string", "minLength": 1}},
        ),
        _if({"arrays": {"type": "null"}}, {"arrays_digest": {"type": "null"}}, {"arrays_digest": {"type": "string"}}),
    ]
    return {
        "$schema": DRAFT,
        "$id": f"urn:leakbench:record:{SCHEMA}",
        "title": "Record",
        **schema,
        "$defs": definitions,
    }


def manifest_schema() -> dict[str, Any]:
    """Returns the schema of a `.manifest`."""
    definitions: dict[str, Any] = {}
    schema = _object(Manifest, definitions)
    title = {"$schema": DRAFT, "$id": f"urn:leakbench:manifest:{MANIFEST_SCHEMA}", "title": "Manifest"}
    return {**title, **schema, "$defs": definitions}


def to_json(schema: Mapping[str, Any]) -> str:
    """Returns the content of a schema's file."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _of_kind(kind: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Schema of what follows from a record's kind: its task, its attack, and metrics of no other kind."""
    others = sorted(name for name, known in METRICS.items() if known.kind not in (kind, CLAIM))
    attacked = KINDS[kind].attacked
    properties = {
        "task": _of(UpdateTask if KINDS[kind].own_task else TrainingTask, definitions),
        "attack": {"type": "object" if attacked else "null"},
        "metrics": {"propertyNames": {"not": {"enum": others}}},
    }
    return _if({"kind": {"const": kind}}, properties)


def _metric(known: KnownMetric, definitions: dict[str, Any]) -> dict[str, Any]:
    ends = {"minimum": known.least, "maximum": known.most}
    properties = {
        "value": {key: end for key, end in ends.items() if math.isfinite(end)},
        "better": {"const": known.better},
        "detail": _of(known.detail, definitions),
    }
    return {**_of(Metric, definitions), "description": known.title, "properties": properties}


def _if(test: dict[str, Any], then: dict[str, Any], otherwise: dict[str, Any] | None = None) -> dict[str, Any]:
    rule = {"if": {"properties": test}, "then": {"properties": then}}
    return rule if otherwise is None else rule | {"else": {"properties": otherwise}}


def _of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of an annotation; classes are added to the definitions."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return _union(arguments, definitions)
    if origin is tuple and arguments[-1] is not ...:
        entries = [_of(argument, definitions) for argument in arguments]
        return {"type": "array", "prefixItems": entries, "items": False, "minItems": len(entries)}
    if origin is tuple:
        return {"type": "array", "items": _of(arguments[0], definitions)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _of(arguments[1], definitions)}
    if hint.__name__ not in definitions:
        definitions[hint.__name__] = {}  # a class may contain itself
        definitions[hint.__name__] = _open(hint, definitions) if _is_open(hint) else _object(hint, definitions)
    return {"$ref": f"#/$defs/{hint.__name__}"}


def _union(choices: tuple[Any, ...], definitions: dict[str, Any]) -> dict[str, Any]:
    # A mapping beside a class of keys is what a caller may pass; a file has the keys of the class.
    opened = any(_is_open(choice) for choice in choices)
    schemas = [_of(c, definitions) for c in choices if not (opened and typing.get_origin(c) in (dict, Mapping))]
    if all(schema.keys() == {"type"} for schema in schemas):
        return {"type": [schema["type"] for schema in schemas]}
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _is_open(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, OpenFields)


def _open(cls: type[OpenFields], definitions: dict[str, Any]) -> dict[str, Any]:
    hints = {key: hint for key, hint in typing.get_type_hints(cls).items() if typing.get_origin(hint) is not ClassVar}
    properties = {key: _of(hint, definitions) for key, hint in hints.items()}
    return {
        **_documented(cls, properties),
        "type": "object",
        "properties": properties,
        "additionalProperties": _of(cls.VALUES, definitions),
    }


def _object(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints, fields = typing.get_type_hints(cls), dataclasses.fields(typing.cast(Any, cls))
    keys = {field.metadata.get(KEY, field.name): field for field in fields}
    properties = {
        key: _of(hints[field.name], definitions) | RULES.get((cls, field.name), {}) for key, field in keys.items()
    }
    # Derived values may stand beside the fields, and are compared with them by the reader.
    derived = {name: {} for name in getattr(cls, "DERIVED", ())}
    return {
        **_documented(cls, properties),
        "type": "object",
        "properties": properties | derived,
        "required": [key for key, field in keys.items() if "may lack" not in field.metadata],
        "additionalProperties": False,
    }


def _documented(cls: type, properties: dict[str, Any]) -> dict[str, str]:
    """Copies the docstring's attributes into their properties; returns its first sentence as the description."""
    text = inspect.getdoc(cls) or ""
    _, _, attributes = text.partition("Attributes:\n")
    for name, words in re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE):
        if name in properties and "$ref" not in properties[name]:
            properties[name] = properties[name] | {"description": " ".join(words.split())}
    return {"description": text.partition("\n")[0]}


if __name__ == "__main__":
    PATH.write_text(to_json(record_schema()), encoding="utf-8")
