"""Types of values in a suite file, and the base class of its tables: nothing is coerced, unknown keys are errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _several(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else (value,)


T = TypeVar("T")


def _distinct(values: tuple[T, ...]) -> tuple[T, ...]:
    # Repeated values are refused, because they request the same cells twice.
    if any(value in values[:place] for place, value in enumerate(values)):  # no set: a table cannot be hashed
        raise ValueError(f"must be distinct, got {list(values)}")
    return values


Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Padding = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), AfterValidator(_distinct)]
Grid = Annotated[tuple[T, ...], BeforeValidator(_several), Field(min_length=1), AfterValidator(_distinct)]


class StrictTable(BaseModel):
    """A table that refuses unknown keys and values of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class ModelChoice(StrictTable):
    """A model by name, or as a table whose other keys are its settings."""

    name: Text
    settings: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_file(cls, value: Any) -> Any:
        if isinstance(value, ModelChoice):
            return value
        return rest_in(value, "settings", ("name",)) if isinstance(value, dict) else {"name": value}


def rest_in(table: dict[str, Any], into: str, named: Sequence[str]) -> dict[str, Any]:
    """Moves all keys but the named ones into a nested table."""
    kept = {key: value for key, value in table.items() if key in named}
    return kept | {into: {key: value for key, value in table.items() if key not in named}}
