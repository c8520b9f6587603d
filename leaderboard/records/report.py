"""Report of an audit as a versioned JSON file, and the parts that reports of models, scores and updates share.

Pages, summaries, texts and rules read these types alone. A report is checked when it is made and when it is read, and
a file that does not fit is refused with the name of the file and of the field. Standard library only.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from .files import read_bytes, write_bytes
from .validation import CheckedFields, RecordError, build, json_values, parse_json

R = TypeVar("R", bound="VersionedReport")


@dataclass(frozen=True, kw_only=True)
class VersionedReport(CheckedFields):
    """Results of an audit; fields have the order of the file's keys.

    Attributes:
        FILE: name of the file in the folder of the audit.
        SCHEMA: version of the layout that this class reads.
        schema: version of the layout in the file, equal to `SCHEMA`.
    """

    FILE: ClassVar[str]
    SCHEMA: ClassVar[str]
    schema: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schema != self.SCHEMA:
            raise RecordError(f"schema must be {self.SCHEMA}, got {self.schema!r}")

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain JSON values."""
        return json_values(self)

    def to_json(self) -> str:
        """Returns the content of the file, which `from_json` reads back equal."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    def write(self, folder: Path) -> Path:
        """Writes the file whole or not at all, and returns its path."""
        return write_bytes(folder / self.FILE, self.to_json().encode())

    @classmethod
    def from_json(cls: type[R], text: str, *, source: str) -> R:
        """Parses a report.

        Args:
            text: the JSON document.
            source: path of the file, for the message.

        Raises:
            RecordError: torn JSON, another schema, a missing or unknown key, or a value that does not fit.
        """
        try:
            data = parse_json(text)
        except RecordError as error:
            raise RecordError(f"{source} is no whole audit: {error}; run the audit again") from None
        except (ValueError, RecursionError):
            raise RecordError(f"{source} is not a whole JSON document; run the audit again") from None
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != cls.SCHEMA:  # checked before the keys, which differ between schemas
            raise RecordError(f"schema of {source} must be {cls.SCHEMA}, got {schema!r}; run the audit again")
        try:
            return build(cls, data)
        except RecordError as error:
            raise RecordError(f"{source} is no whole audit: {error}; run the audit again") from None

    @classmethod
    def read(cls: type[R], folder: Path) -> R:
        """Reads the report of an audit's folder.

        Raises:
            RecordError: no report, or no valid one.
        """
        path = folder / cls.FILE
        try:
            text = read_bytes(path, "audit").decode()
        except UnicodeDecodeError:
            raise RecordError(f"{path} is not a whole JSON document; run the audit again") from None
        return cls.from_json(text, source=str(path))


@dataclass(frozen=True, kw_only=True)
class DataSource(CheckedFields):
    """Source of examples.

    Attributes:
        source: path or name, as the owner gave it.
        sha256: of its bytes.
        n: number of its examples.
    """

    source: str
    sha256: str
    n: int


@dataclass(frozen=True, kw_only=True)
class LayerRank(CheckedFields):
    """Rank of the linear equations that one example's gradient gives for the input of a layer (R-GAP).

    Attributes:
        layer: counted from 1 at the input.
        words: description of the layer, from the model.
        unknowns: dimensions of its input.
        outputs: number of equations from its output.
        rank_outputs: their rank.
        gradients: number of equations from its weight's gradient.
        rank_gradients: their rank.
        rank: rank of both together.
        condition: condition number of both; None if the rank is not full.
        deficit: unknowns less rank.
        virtual: virtual constraints on inputs of later layers.
        index: deficit less the virtual constraints of all layers before.
    """

    layer: int
    words: str
    unknowns: int
    outputs: int
    rank_outputs: int
    gradients: int
    rank_gradients: int
    rank: int
    condition: float | None
    deficit: int
    virtual: int
    index: int
