"""Checkpoints of training runs: written atomically, and read with a loader restricted to leakbench's own classes.

A checkpoint is as private as the data: it holds the sampler's key, the state of seeded noise, and what correlated noise
of any kind keeps of earlier steps, so that a resumed run continues exactly from there. It is written before the first
release, so that a killed run has one, and by one process at a time.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..plan import bound, codec, composed_codecs, defense, implicit_subspace, noise_correlation, post, query
from ..plan.families import adaptive_clip_norm
from ..plan.linear_algebra import sketch
from ..privacy import ledger, sampling
from . import transcript

_KIND = b"leakbench checkpoint "
_MAGIC = _KIND + b"9\n"
_HEAD = len(_MAGIC) + 32  # bytes: with the digest
# The classes in transcripts and ledgers; torch's loader refuses any other class.
_OURS = [
    adaptive_clip_norm.EncodedNormWithin,
    bound.Bound,
    codec.Everything,
    codec.Coordinates,
    codec.Scaled,
    codec.Subspace,
    codec.Complement,
    composed_codecs.SpanCodec,
    composed_codecs.Masked,
    composed_codecs.ConcatenatedCodec,
    composed_codecs.Stretched,
    defense.Block,
    defense.StepPlan,
    defense.NoisyPlan,
    defense.Trial,
    implicit_subspace.ImplicitSubspace,
    implicit_subspace.OuterDirections,
    implicit_subspace.OrderedBasis,
    implicit_subspace.FactoredBasis,
    sketch.SketchDirections,
    ledger.Entry,
    post.Identity,
    post.Project,
    post.Keep,
    post.Rescale,
    post.Offset,
    post.Adaptive,
    query.Gradient,
    query.GradientAhead,
    query.GradientDifference,
    query.GradientLess,
    query.LossChange,
    query.NormWithin,
    sampling.Sampling,
    noise_correlation.Banded,
    noise_correlation.BandedInverse,
    noise_correlation.Buffered,
    noise_correlation.StrategyRow,
    noise_correlation.Tree,
    transcript.Step,
]


def head(path: Path) -> bytes | None:
    """Returns the first bytes of a checkpoint, which identify its content; None without a file."""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD)
    except FileNotFoundError:
        return None


def save(content: dict[str, Any], path: Path, heads: list[bytes] | None = None) -> None:
    """Writes a checkpoint; a crash leaves either the old file or the new file.

    Args:
        content: of the file.
        path: the file.
        heads: heads of files that the run has read or written, to which that of the new file is added; None to replace
            any file.

    Raises:
        ValueError: for a file of another process. Both have the same steps before them, and neither ledger would
            charge the other's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    memory = io.BytesIO()
    torch.save(content, memory)
    payload = memory.getvalue()  # not a view, which crashes Python in a collected cycle (CPython 3.12, 3.13)
    first = _MAGIC + hashlib.sha256(payload).digest()
    if heads is not None:
        if head(path) not in (None, *heads):
            raise ValueError(
                f"checkpoint {path} must be written by one process at a time, and another has written it since; go on "
                "from the file when no other process does, or name another file for another run"
            )
        heads.append(first)  # before the rename, after which an interrupt may come
    # In the same folder, because a rename is atomic only within a file system.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(first)
            file.write(payload)
            file.flush()
            # Otherwise a power cut may leave the new name on an empty file.
            os.fsync(file.fileno())
        Path(name).replace(path)
        _settle(path.parent)
    except BaseException:  # an interrupt, too, must remove the temporary file
        Path(name).unlink(missing_ok=True)
        raise


def _settle(folder: Path) -> None:
    """Waits until a new name is on disk: an old file that returns after a power cut would charge too few steps."""
    with suppress(OSError):  # not every file system can open a folder, or wait for it
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def load(path: Path, *, fingerprint: str, own: Sequence[type] = (), heads: list[bytes] | None = None) -> dict[str, Any]:
    """Reads a checkpoint through torch's restricted loader.

    Args:
        path: the file.
        fingerprint: fingerprint of the run to be resumed.
        own: further allowed classes, of the run's method.
        heads: heads of files that the run has read or written, to which this file's is added.

    Raises:
        ValueError: if the file is torn or changed, holds other classes, or belongs to another run.
    """
    if not path.is_file():  # reading a pipe would wait for a writer
        raise ValueError(f"checkpoint {path} must be a regular file; remove it to start afresh")
    raw = path.read_bytes()
    first, payload = raw[:_HEAD], raw[_HEAD:]
    if raw.startswith(_KIND) and not raw.startswith(_MAGIC):
        raise ValueError(f"checkpoint {path} must be one of this version of leakbench; delete it to start afresh")
    # The digest comes first: torch's reader accepts flipped bits in tensors, and a wrong ledger is a wrong claim.
    if first != _MAGIC + hashlib.sha256(payload).digest():
        raise ValueError(f"checkpoint {path} must be a complete file of ours; delete it to start afresh")
    try:
        with torch.serialization.safe_globals([*_OURS, *own]):
            content = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"checkpoint {path} must hold tensors, numbers and classes of leakbench.defenses.core only, got "
            f"{_named(error)}; "
            "a run whose plans use other classes cannot keep them in it: run it with observer='final', or, as a part "
            "of this library, list the class in defenses/core/training/checkpoint.py"
        ) from error
    if content["fingerprint"] != fingerprint:
        raise ValueError(
            f"checkpoint {path} belongs to another run (model, data, defense, settings or version of leakbench "
            "differ); delete it or name another file"
        )
    if heads is not None:
        heads.append(first)
    return content


def _named(error: pickle.UnpicklingError) -> str:
    """Returns the class that torch's loader refused; its message has the name after `GLOBAL`."""
    match = re.search(r"GLOBAL (\S+)", str(error))
    return "something else" if match is None else match[1]
