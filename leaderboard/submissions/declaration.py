"""Declaration of a submission, `SUBMISSION.toml`: who submits what, computed how.

Every value is untrusted text: names that become paths are short and plain, all else is a line of bounded length.
Nothing is coerced, an unknown key is a fault, and every fault names its field.
"""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..checks.fault import Fault
from ..records.files import read_bytes
from ..records.validation import RecordError

NAME = "SUBMISSION.toml"
TO_FILL = "TO FILL IN"
"""Value of a draft's fields that a submitter has to write."""
SCHEMA = 1
LARGEST, LONGEST = 16 * 1024, 2000
"""Bytes of the file and of a line: the parser's time grows with the cube of the number of dots in a key."""

HANDLE = r"[a-z0-9](?:-?[a-z0-9]){0,38}"
SHA256 = r"[0-9a-f]{64}"
_SPDX = """
0BSD AGPL-3.0-only AGPL-3.0-or-later Apache-2.0 BSD-2-Clause BSD-3-Clause BSL-1.0 CC-BY-4.0 CC-BY-SA-4.0 CC0-1.0
EUPL-1.2 GPL-2.0-only GPL-2.0-or-later GPL-3.0-only GPL-3.0-or-later ISC LGPL-2.1-only LGPL-2.1-or-later
LGPL-3.0-only LGPL-3.0-or-later MIT MIT-0 MPL-2.0 Unlicense Zlib
"""
LICENCES = frozenset(_SPDX.split())
"""SPDX identifiers under which records and code may be published and changed."""

SubmissionKind = Literal["defense", "attack", "checkpoint", "run"]
SettingValue = bool | int | float | str
SettingName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,60}$")]
Settings = dict[SettingName, SettingValue | list[SettingValue]]


def _line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("must be a line of printable text")
    if text == TO_FILL:
        raise ValueError("must be filled in")
    if set(text) & set("<>`"):  # which pages and Markdown could read as markup
        raise ValueError("must be without <, > and `")
    return text


def _licence(text: str) -> str:
    if text not in LICENCES:
        raise ValueError(f"must be an SPDX identifier of a free licence, one of {', '.join(sorted(LICENCES))}")
    return text


ShortText = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_line)]


def _handle(value: str) -> str:
    if not is_handle(value):
        raise ValueError("must be lower case letters, digits and single hyphens, 39 at most")
    return value


class _SubmissionTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class MethodFile(_SubmissionTable):
    """The method of a defense or an attack, a single file beside the declaration."""

    file: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,60}\.py$")]
    """Name without a folder; imported as a module."""
    function: SettingName
    sha256: Annotated[str, Field(pattern=f"^{SHA256}$")]
    """SHA-256 of the file's bytes."""
    settings: Settings = {}
    """Settings other than the defaults; training values of a defense too, as in a suite's entry."""

    @model_validator(mode="after")
    def _no_name(self) -> "MethodFile":
        if "name" in self.settings:
            raise ValueError("settings must not have the key 'name', which names the method")
        return self

    @property
    def name(self) -> str:
        """Name of the method in suites and records."""
        return f"{self.file}:{self.function}"


class CheckpointFile(_SubmissionTable):
    """A trained model, which need not lie beside the declaration."""

    sha256: Annotated[str, Field(pattern=f"^{SHA256}$")]
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,80}\.safetensors$")] | None = None
    """Name beside the declaration; None if it is too large to lie there."""


class Declaration(_SubmissionTable):
    """Content of `SUBMISSION.toml`."""

    schema_: Annotated[int, Field(alias="schema")]
    handle: Annotated[str, AfterValidator(_handle)]
    """Folder of the submitter, as an account's name: lower case, digits, single hyphens."""
    who: ShortText
    licence: Annotated[str, AfterValidator(_licence)]
    contact: ShortText
    hardware: ShortText
    public_data: ShortText
    """Public data used, for example for pretraining; "none"."""
    command: ShortText
    """Command that computed the records."""
    kind: SubmissionKind
    new: ShortText
    """Novelty, in a sentence."""
    suite: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]{0,80}$")]
    small: bool = False
    """True for the suite's small form."""
    suite_digest: Annotated[str, Field(pattern=f"^{SHA256}$")]
    """Digest of the suite at its own seeds, without the method of the submission."""
    method: MethodFile | None = None
    checkpoint: CheckpointFile | None = None

    @model_validator(mode="after")
    def _subject(self) -> "Declaration":
        needs = {"defense": "method", "attack": "method", "checkpoint": "checkpoint"}.get(self.kind)
        for table in ("method", "checkpoint"):
            if (getattr(self, table) is not None) != (table == needs):
                verb = "must be there" if table == needs else "must not be there"
                raise ValueError(f"[{table}] {verb} with kind {self.kind!r}")
        return self


class DeclarationError(RecordError):
    """A declaration is bad.

    Attributes:
        faults: its faults, at least one.
    """

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


def read_declaration(folder: Path, file: str = NAME) -> Declaration:
    """Reads the declaration of a submission.

    Args:
        folder: of the submission.
        file: path of the declaration for messages, below the checked folder.

    Raises:
        DeclarationError: with every fault of the file.
    """
    try:
        path = folder / NAME
        if not path.is_symlink() and path.is_file() and path.stat().st_size > LARGEST:
            raise RecordError(f"must have at most {LARGEST} bytes, got {path.stat().st_size}")
        content = read_bytes(path, "declaration")
        if any(len(line) > LONGEST for line in content.splitlines()):
            raise RecordError(f"must have lines of at most {LONGEST} bytes")
    except RecordError as error:
        problem = str(error).replace(str(folder / NAME), NAME)
        raise DeclarationError([Fault(file=file, field="", problem=problem)]) from None
    try:
        document = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        problem = f"must be TOML in UTF-8: {_short(error)}"
        raise DeclarationError([Fault(file=file, field="", problem=problem)]) from None
    return parse(document, file)


def parse(document: dict[str, Any], file: str = NAME) -> Declaration:
    """Returns the declaration in a TOML document.

    Args:
        document: parsed.
        file: path for messages.

    Raises:
        DeclarationError: with every fault.
    """
    schema = document.get("schema")
    # CheckedSubmission before the keys, which differ between schemas.
    if type(schema) is not int or schema != SCHEMA:
        problem = f"must be {SCHEMA} for this version of the code, got {_short(schema)}"
        raise DeclarationError([Fault(file=file, field="schema", problem=problem)])
    try:
        return Declaration.model_validate(document)
    except ValidationError as error:
        faults = [
            Fault(
                file=file,
                field=".".join(map(str, problem["loc"])),
                problem=f"{problem['msg'].removeprefix('Value error, ')}, got {_short(problem['input'])}",
            )
            for problem in error.errors(include_url=False)
        ]
        raise DeclarationError(sorted(set(faults))) from None


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value) if not isinstance(value, Exception) else str(value)
    # Unprintable characters could rewrite a terminal's lines.
    text = "".join(character if character.isprintable() else "?" for character in text[:200])
    return repr(text[:57] + "..." if len(text) > 60 else text)


def is_handle(name: str) -> bool:
    """Returns whether a folder's name can be a submitter's handle."""
    return re.fullmatch(HANDLE, name) is not None
