"""Transcripts on disk: all noisy updates of a training run elsewhere, one file of safetensors per step.

docs/transcript_format.md specifies the format; `watch` or any other program writes it. A step file has flat vectors in
the order of the header's names. Reading validates the format first: gapless step numbers, shapes, finite entries, no
repeated step. A truncated last file is reported and left out: its writer was interrupted.

A transcript contains no batch and no example. Readers trust its writer for nothing but the format: the noise in a
header is a statement, which `claim` tests against the releases themselves.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from jaxtyping import Float
from torch import Tensor

from leakbench.defenses.core import Layout
from leakbench.leaderboard.records.files import read_bytes, refuse_special

from ..files import FileRefused, read_tensors
from ..files.checks import check

FORMAT, VERSION = "leakbench transcript", 1
HEADER, END = "header.json", "end.json"

KeptParameters = Literal["every", "first"]
"""Kept parameters: those before each step, or only those before the first step of each session."""

Clipping = Literal["flat", "by_layer", "unknown"]

_STEP_FILE = re.compile(r"step-(\d{8,})\.(safetensors|broken)")
_NUMBERS = ("expected_batch", "noise_std", "noise_multiplier", "clip_norm", "lr")
_KEYS = {"step", "session", "released", "parameters", "absent", *_NUMBERS}
_NEEDED = {"step", "session", "released", "expected_batch", "noise_std"}
_LARGEST_JSON = 16 << 20


class TranscriptRefused(ValueError):
    """Folder that is not a whole transcript; the message names the file and the rule."""


@dataclass(frozen=True, kw_only=True)
class TranscriptHeader:
    """Constants of a training run.

    Attributes:
        names: of the trained parameters, in the order of the flat vectors.
        shapes: of these parameters.
        optimizer: in words; not used in computations.
        clipping: of each example: `flat` over all parameters, `by_layer`, or `unknown`.
        clip_norm: L2, in gradient units; None if unknown or varying between steps.
        noise_multiplier: noise standard deviation / clip norm; None as above.
        expected_batch: divisor of the sums; None if it varies between steps.
        parameters: which steps keep the parameters before them.
        format: name of the format.
        version: of the format.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    optimizer: str = ""
    clipping: Clipping = "unknown"
    clip_norm: float | None = None
    noise_multiplier: float | None = None
    expected_batch: float | None = None
    parameters: KeptParameters = "every"
    format: str = FORMAT
    version: int = VERSION

    def __post_init__(self) -> None:
        if (self.format, self.version) != (FORMAT, VERSION):
            raise ValueError(
                f"format and version must be {FORMAT!r} and {VERSION}, got {self.format!r} and {self.version!r}"
            )
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"names must be distinct and at least one, got {len(self.names)} of them")
        if len(self.shapes) != len(self.names) or any(n < 1 for shape in self.shapes for n in shape):
            raise ValueError(
                f"shapes must be of positive whole numbers, one shape a name, got {len(self.shapes)} for "
                f"{len(self.names)} names"
            )
        for name in ("clip_norm", "noise_multiplier", "expected_batch"):
            value = getattr(self, name)
            least = value == 0 and name == "noise_multiplier"
            if value is not None and not (math.isfinite(value) and (value > 0 or least)):
                raise ValueError(f"{name} must be a positive finite number or null, got {value}")

    @property
    def layout(self) -> Layout:
        """Order of the flat vectors."""
        return Layout(self.names, self.shapes)

    def to_bytes(self) -> bytes:
        """Encodes the header as its file."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, header: Mapping[str, Any]) -> TranscriptHeader:
        """Parses the content of a header file, field by field.

        Raises:
            ValueError: names the field.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(map(str, header.keys() - known)):
            raise ValueError(f"it has the unknown field {unknown[0]!r}; fields are {', '.join(sorted(known))}")
        if missing := [name for name in ("format", "version", "names", "shapes") if name not in header]:
            raise ValueError(f"it must have the field {missing[0]!r}")
        values = dict(header)
        names, shapes = values["names"], values["shapes"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("names must be a list of strings")
        if not isinstance(shapes, list) or not all(
            isinstance(shape, list) and all(type(n) is int for n in shape) for shape in shapes
        ):
            raise ValueError("shapes must be a list of lists of whole numbers")
        values |= {"names": tuple(names), "shapes": tuple(tuple(shape) for shape in shapes)}
        for name in ("clip_norm", "noise_multiplier", "expected_batch"):
            value = values.get(name)
            if value is not None and type(value) not in (int, float):
                raise ValueError(f"{name} must be a number or null, got {value!r}")
            values[name] = None if value is None else float(value)
        for name in ("optimizer", "clipping", "parameters", "format"):
            if name in values and not isinstance(values[name], str):
                raise ValueError(f"{name} must be a string, got {values[name]!r}")
        for name, words in (("clipping", get_args(Clipping)), ("parameters", get_args(KeptParameters))):
            if name in values and values[name] not in words:
                raise ValueError(f"{name} must be one of {', '.join(words)}, got {values[name]!r}")
        if type(values["version"]) is not int:
            raise ValueError(f"version must be a whole number, got {values['version']!r}")
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class WatchedStep:
    """One step of a transcript: the release, its stated scales, and the parameters before it.

    Attributes:
        step: number, from 0.
        session: number of the session that wrote it, from 0; increases by one at every resume.
        released: [dim], the noisy sum as the optimizer received it, divided by `expected_batch`.
        expected_batch: divisor of the sum; 1 for a sum.
        noise_std: stated standard deviation of the noise on the undivided sum.
        noise_multiplier: stated noise multiplier; None if not stated.
        clip_norm: stated clip norm; None if not stated.
        parameters: [dim], before the step; None if they are neither kept nor derivable from earlier steps.
        lr: of plain SGD, which determines the next parameters; None for other optimizers.
        absent: positions in the header's names of parameters without a gradient; zeros in `released`.
        derived: whether the parameters were computed from earlier steps.
    """

    step: int
    session: int
    released: Float[Tensor, " dim"] = field(repr=False)
    expected_batch: float
    noise_std: float
    noise_multiplier: float | None = None
    clip_norm: float | None = None
    parameters: Float[Tensor, " dim"] | None = field(default=None, repr=False)
    lr: float | None = None
    absent: tuple[int, ...] = ()
    derived: bool = False

    @property
    def sums(self) -> Float[Tensor, " dim"]:
        """The undivided noisy sum."""
        return self.released * self.expected_batch

    @property
    def after(self) -> Float[Tensor, " dim"] | None:
        """Parameters after the step, if the optimizer is plain SGD and those before are known; else None."""
        if self.parameters is None or self.lr is None:
            return None
        return self.parameters.add(self.released, alpha=-self.lr)


@dataclass(frozen=True)
class WatchedTranscript:
    """Transcript folder with valid file names, numbers and headers; steps are read one at a time.

    Attributes:
        folder: its path.
        header: constants of the training.
        numbers: numbers of the steps present, rising.
        lost: numbers of steps with truncated files; they were taken, and cost privacy.
        taken: steps of the training by the writer's own count; None if the transcript was not closed.
        remarks: limitations for the reader, a sentence each.
    """

    folder: Path
    header: TranscriptHeader
    numbers: tuple[int, ...]
    lost: tuple[int, ...] = ()
    steps_taken: int | None = None
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def steps_counted(self) -> int:
        """Number of updates released, as far as the folder shows: steps present, lost or not written."""
        return max(len(self.numbers) + len(self.lost), self.steps_taken or 0)

    def __iter__(self) -> Iterator[WatchedStep]:
        """Yields steps in order, as stored, with parameters derived from earlier steps.

        Raises:
            FileRefused: a file is damaged, or has entries that are NaN or infinite.
            TranscriptRefused: a step contradicts its position.
        """
        digests: dict[bytes, tuple[int, int]] = {}
        before: WatchedStep | None = None
        for number in self.numbers:
            step = _read_step(self.folder / step_file(number), number, self.header)
            digest = hashlib.sha256(step.released.numpy().tobytes()).digest()
            earlier, session = digests.setdefault(digest, (number, step.session))
            # Across sessions the same step may be repeated from a checkpoint, with the same noise.
            if earlier != number and session == step.session and bool(step.released.any()):
                raise TranscriptRefused(
                    f"steps of {self.folder} must each have noise of their own, got the same release in steps "
                    f"{earlier} and {number}"
                )
            first = before is None or step.session != before.session
            if before is not None and step.session < before.session:
                raise TranscriptRefused(
                    f"sessions of {self.folder} must not fall, got {step.session} at step {number} after "
                    f"{before.session}"
                )
            if step.parameters is None:
                if first or self.header.parameters == "every":
                    raise TranscriptRefused(
                        f"step {number} of {self.folder} must have parameters, as its header says "
                        f"{self.header.parameters!r} and {'it opens a session' if first else 'it is a step'}"
                    )
                # Only from the step directly before: a lost step moved the parameters, too.
                if before is not None and before.step == number - 1:
                    step = replace(step, parameters=before.after, derived=before.after is not None)
            before = step
            yield step


def read_transcript(folder: str | Path) -> WatchedTranscript:
    """Opens a transcript: its header, the numbers of its files, and each file's header and length.

    Args:
        folder: written by `leakbench.watch` or another program.

    Raises:
        TranscriptRefused: names the file and the rule.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise TranscriptRefused(f"a transcript must be a folder, got {folder}; leakbench.watch writes one")
    header = read_header_file(folder)
    whole, broken, others = listed(folder)
    remarks = [f"Files that are none of a transcript were left alone: {', '.join(others[:3])}."] if others else []
    if not whole:
        raise TranscriptRefused(f"a transcript must have steps, got none in {folder}")
    lost = sorted(broken)
    for number in whole:
        path = folder / step_file(number)
        if (wrong := file_fault(path, header)) is None:
            continue
        # Only the last file may be damaged: an interrupted writer leaves earlier files whole.
        if number != whole[-1]:
            raise TranscriptRefused(f"cannot read {path}: {wrong}; steps behind it cannot stand without it")
        lost.append(number)
    whole = [number for number in whole if number not in lost]
    if lost:
        remarks.append(f"Steps {', '.join(map(str, sorted(lost)))} were cut short and are left out; they are counted.")
    if not whole:
        raise TranscriptRefused(f"a transcript must have a whole step, got none in {folder}")
    expected = set(range(max([*whole, *lost]) + 1))
    if missing := sorted(expected - set(whole) - set(lost)):
        raise TranscriptRefused(
            f"steps of a transcript must be numbered from 0 without a gap, got none of number {missing[0]} in {folder}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        )
    steps_taken = _steps_taken(folder)
    if steps_taken is None:
        remarks.append("It was not closed: the training may have gone on, or was stopped.")
    elif steps_taken < len(whole) + len(lost):
        raise TranscriptRefused(f"{END} of {folder} says {steps_taken} steps, and there are {len(whole) + len(lost)}")
    elif steps_taken > len(whole) + len(lost):
        remarks.append(
            f"The training took {steps_taken} steps, of which {len(whole) + len(lost)} were written before the "
            "limit of disk."
        )
    return WatchedTranscript(folder, header, tuple(whole), tuple(sorted(lost)), steps_taken, tuple(remarks))


def read_header_file(folder: Path) -> TranscriptHeader:
    """Reads the header of a transcript.

    Raises:
        TranscriptRefused: it is absent, or a field is wrong.
    """
    try:
        return TranscriptHeader.from_json(_json(folder / HEADER))
    except (TypeError, ValueError) as error:
        raise TranscriptRefused(f"cannot read {folder / HEADER}: {error}") from None


def listed(folder: Path) -> tuple[list[int], list[int], list[str]]:
    """Lists the numbers of step files, of those that a resumed writer found truncated, and names of other files."""
    whole, broken, others = [], [], []
    for path in sorted(folder.iterdir()):
        match = _STEP_FILE.fullmatch(path.name)
        if match is not None and step_file(int(match[1]), match[2]) == path.name:
            (whole if match[2] == "safetensors" else broken).append(int(match[1]))
        elif path.name not in (HEADER, END) and not path.name.startswith("."):
            others.append(path.name)
    return sorted(whole), sorted(broken), others


def step_file(number: int, kind: str = "safetensors") -> str:
    """Returns the name of a step's file."""
    return f"step-{number:08d}.{kind}"


def file_fault(path: Path, header: TranscriptHeader) -> str | None:
    """Describes the fault of a step's file by its header and length, without reading its numbers; None if valid."""
    try:
        refuse_special(path)
        with path.open("rb") as file:
            tensors = check(file).tensors
    except (FileRefused, OSError) as error:
        return str(error)
    if missing := sorted(_NEEDED - tensors.keys()):
        return f"it must have the tensor {missing[0]!r}"
    if unknown := sorted(tensors.keys() - _KEYS):
        return f"it has the unknown tensor {unknown[0]!r}; tensors are {', '.join(sorted(_KEYS))}"
    dim = header.layout.dim
    for name, tensor in tensors.items():
        floats = name in ("released", "parameters")
        types = ("F32", "F64") if floats else ("F64",) if name in _NUMBERS else ("I64",)
        if tensor.dtype not in types:
            return f"{name} must be of {' or '.join(types)}, got {tensor.dtype}"
        shape = (dim,) if floats else tensor.shape[:1] if name == "absent" else (1,)
        if tensor.shape != shape or (name == "absent" and len(shape) != 1):
            return f"{name} must have shape {list(shape)}, got {list(tensor.shape)}"
    return None


def _read_step(path: Path, number: int, header: TranscriptHeader) -> WatchedStep:
    if (wrong := file_fault(path, header)) is not None:
        raise TranscriptRefused(f"cannot read {path}: {wrong}")
    tensors = read_tensors(path).tensors
    numbers = {name: float(tensors[name]) for name in _NUMBERS if name in tensors}
    if int(tensors["step"]) != number:
        raise TranscriptRefused(
            f"{path} must hold step {number}, got step {int(tensors['step'])}: files were exchanged"
        )
    for name, value in numbers.items():
        if not (value > 0 or (value == 0 and name in ("noise_std", "noise_multiplier", "lr"))):
            raise TranscriptRefused(f"{name} of {path} must be positive, got {value}")
    absent = tuple(tensors["absent"].tolist()) if "absent" in tensors else ()
    if any(not 0 <= at < len(header.names) for at in absent):
        raise TranscriptRefused(f"absent of {path} must be positions of {len(header.names)} names, got {list(absent)}")
    return WatchedStep(
        step=number,
        session=int(tensors["session"]),
        released=tensors["released"],
        parameters=tensors.get("parameters"),
        absent=absent,
        expected_batch=numbers["expected_batch"],
        noise_std=numbers["noise_std"],
        noise_multiplier=numbers.get("noise_multiplier"),
        clip_norm=numbers.get("clip_norm"),
        lr=numbers.get("lr"),
    )


def _steps_taken(folder: Path) -> int | None:
    if not (folder / END).exists():
        return None
    steps = _json(folder / END).get("steps")
    if type(steps) is not int or steps < 0:
        raise TranscriptRefused(f"steps of {folder / END} must be a whole number, got {steps!r}")
    return steps


def _json(path: Path) -> dict[str, Any]:
    try:
        content = read_bytes(path)
        if len(content) > _LARGEST_JSON:
            raise TranscriptRefused(f"{path} may have at most {_LARGEST_JSON} bytes, got {len(content)}")
        document = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise TranscriptRefused(f"cannot read {path}: {error}") from None
    if not isinstance(document, dict):
        raise TranscriptRefused(f"{path} must be a JSON object")
    return document
