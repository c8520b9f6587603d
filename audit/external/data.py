"""The owner's examples: `.npz`, Parquet, a folder of images, or a data set of ours with a file that says who is what.

What a file is follows from its bytes. Nothing is unpickled: arrays of objects are refused, sizes are read from headers
before anything is unpacked. Each source has a digest, which the report names. Integer images of 0 to 255 become
fractions of 255, which is said; any other scaling is the owner's (`--preprocess`).
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from attacks.core import Examples

from ..catalog.messages import no_such
from .identity import content_ids

MOST_BYTES = 8 * 2**30
"""Of one source when it is unpacked."""

INPUTS, LABELS, IDS = ("inputs", "x", "images", "data"), ("labels", "y", "targets", "label"), ("ids", "id")
"""Names of arrays in an `.npz`, of which one each is read."""

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """Examples of one source.

    Attributes:
        source: as it was named.
        sha256: of its bytes; of a folder those of its files with their names, in order.
        inputs: [n, *shape], float32, before preprocessing.
        labels: [n].
        names: the owner's own ids; row numbers where the source has none.
        notes: what was done to them, a sentence each.
    """

    source: str
    sha256: str
    inputs: Float[Tensor, "inputs ..."]
    labels: Int[Tensor, " labels"]
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.labels):
            raise ValueError(f"{self.source} must hold at least one example, got none")
        if not len(self.inputs) == len(self.labels) == len(self.names):
            raise ValueError(
                f"{self.source} must have a label and an id an input, got {len(self.inputs)} inputs, "
                f"{len(self.labels)} labels and {len(self.names)} ids"
            )
        if not bool(self.inputs.isfinite().all()):
            bad = int((~self.inputs.flatten(1).isfinite().all(1)).nonzero()[0])
            raise ValueError(f"inputs of {self.source} must be finite, got NaN or infinity in row {bad + 1}")
        if int(self.labels.min()) < 0:
            raise ValueError(f"labels of {self.source} must be at least 0, got {int(self.labels.min())}")


@dataclass(frozen=True)
class Preprocess:
    """(inputs - mean) / std by channel, or of all inputs alike."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @classmethod
    def parse(cls, text: str | None) -> Preprocess:
        """Reads `mean=0.5,std=0.25`, or by channel `mean=0.49/0.48/0.45,std=0.2/0.2/0.2`.

        Raises:
            ValueError: another form, or a std that is not positive.
        """
        if text is None:
            return cls()
        found: dict[str, tuple[float, ...]] = {}
        for part in text.split(","):
            name, equals, rest = part.partition("=")
            try:
                values = tuple(float(value) for value in rest.split("/"))
            except ValueError:
                values = ()
            if not equals or name.strip() not in ("mean", "std") or name.strip() in found or not values:
                raise ValueError(
                    f"--preprocess must be mean=NUMBER,std=NUMBER, by channel with slashes between, got {text!r}"
                )
            found[name.strip()] = values
        mean, std = found.get("mean", (0.0,)), found.get("std", (1.0,))
        if not all(map(math.isfinite, (*mean, *std))) or min(std) <= 0:
            raise ValueError(f"--preprocess must have finite means and positive stds, got {text!r}")
        return cls(mean, std)

    def __call__(self, inputs: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Inputs as the model is fed.

        Raises:
            ValueError: as many means or stds as there are no channels.
        """
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) > 1 and (inputs.ndim < 2 or inputs.shape[1] != len(values)):
                raise ValueError(
                    f"--preprocess has {len(values)} values of {name}, and inputs have {list(inputs.shape[1:])}: one a "
                    "channel, channels first"
                )
        shape = (1, -1, *(1 for _ in inputs.shape[2:])) if inputs.ndim > 1 else (-1,)
        mean, std = (inputs.new_tensor(values).view(shape) for values in (self.mean, self.std))
        return (inputs - mean) / std


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Members, non-members and public examples as a model is fed, with ids by their content.

    Attributes:
        members: that the model was trained on.
        non_members: that it was not trained on.
        population: neither; None where there are none.
        sources: name of the group -> its source, digest, number and notes, for the report.
        names: id -> name of the group and the owner's own id.
    """

    members: Examples
    non_members: Examples
    population: Examples | None
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)


def groups_of(
    members: DataFile, non_members: DataFile, population: DataFile | None = None, preprocess: Preprocess | None = None
) -> Groups:
    """Groups of examples of one shape.

    Raises:
        ValueError: shapes differ.
    """
    given = {"members": members, "non_members": non_members, "population": population}
    wanted, made, names = tuple(members.inputs.shape[1:]), {}, {}
    for name, one in given.items():
        if one is None:
            continue
        if tuple(one.inputs.shape[1:]) != wanted:
            raise ValueError(
                f"{one.source} must have inputs of the members' shape, {list(wanted)}, got {list(one.inputs.shape[1:])}"
            )
        inputs = one.inputs if preprocess is None else preprocess(one.inputs)
        made[name] = Examples(ids=content_ids(inputs, one.labels), inputs=inputs, labels=one.labels)
        names |= {i: f"{name}:{own}" for i, own in zip(made[name].ids.tolist(), one.names, strict=True)}
    return Groups(
        members=made["members"],
        non_members=made["non_members"],
        population=made.get("population"),
        sources={
            name: {"source": one.source, "sha256": one.sha256, "n": len(one.labels), "notes": list(one.notes)}
            for name, one in given.items()
            if one is not None
        },
        names=names,
    )


def read_examples(source: str, *, channels_last: bool = False) -> DataFile:
    """Reads examples.

    Args:
        source: path of an `.npz`, a Parquet file, or a folder with a folder of images a class.
        channels_last: whether images of arrays lie [height, width, channels], and are to be turned.

    Raises:
        ValueError: no such thing, or not of the form that is read.
    """
    path = Path(source)
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        raise ValueError(f"examples must be in a file or a folder, and there is no {source}")
    if not path.is_file():
        raise ValueError(f"examples must be in a regular file or a folder, and {source} is neither")
    content = path.read_bytes()
    kinds: dict[bytes, Callable[..., DataFile]] = {b"PK\x03\x04": _npz, b"PAR1": _parquet}
    if content[:4] not in kinds:
        raise ValueError(
            f"{source} must be an .npz, Parquet, or a folder of images by class; its first bytes are {content[:4]!r}"
        )
    return kinds[content[:4]](source, content, channels_last)


def _npz(source: str, content: bytes, channels_last: bool) -> DataFile:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            total = sum(info.file_size for info in archive.infolist())
    except zipfile.BadZipFile as error:
        raise ValueError(f"{source} must be an .npz of NumPy, got a broken archive: {error}") from None
    if total > MOST_BYTES:
        raise ValueError(f"{source} must unpack to at most {MOST_BYTES >> 30} GiB, and says {total / 2**30:.1f}")
    arrays: dict[str, ndarray] = {}
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as found:
            chosen = [_named(kind, found.files, source) for kind in (INPUTS, LABELS)]
            ids = [name for name in IDS if name in found.files]
            for name in (*chosen, *ids[:1]):
                arrays[name] = found[name]
    except (ValueError, OSError, zipfile.BadZipFile, EOFError) as error:
        told = " ".join(str(error).split())
        if told.startswith(source):
            raise
        way = "; arrays of objects are refused, save numbers" if "allow_pickle" in told else ""
        raise ValueError(f"{source} cannot be read: {told}{way}") from None
    inputs, labels = (arrays[name] for name in chosen)
    return _of_arrays(source, content, inputs, labels, arrays.get(ids[0]) if ids else None, channels_last)


def _named(wanted: tuple[str, ...], there: list[str], source: str) -> str:
    found = [name for name in wanted if name in there]
    if len(found) != 1:
        raise ValueError(
            f"{source} must have one array named {' or '.join(wanted)}; it has {', '.join(there) or 'none'}"
        )
    return found[0]


def _parquet(source: str, content: bytes, channels_last: bool) -> DataFile:
    import pandas as pd

    try:
        table = pd.read_parquet(io.BytesIO(content))
    except (ValueError, OSError) as error:
        raise ValueError(f"{source} must be a Parquet file, got: {' '.join(str(error).split())}") from None
    columns = list(map(str, table.columns))
    label = _named(LABELS, columns, source)
    ids = [name for name in IDS if name in columns]
    rest = [name for name in columns if name not in (label, *ids)]
    if not len(table) or not rest:
        raise ValueError(
            f"{source} must have rows, a column {label}, and numbers beside it; it has {', '.join(columns)}"
        )
    if table[[label, *rest]].isna().to_numpy().any():
        raise ValueError(f"{source} must have a number everywhere, and some are missing")
    if len(rest) == 1 and not pd.api.types.is_numeric_dtype(table[rest[0]]):
        try:
            inputs = np.stack([np.asarray(one.tolist() if hasattr(one, "tolist") else one) for one in table[rest[0]]])
        except (ValueError, TypeError):
            inputs = np.array([None])
    else:
        inputs = table[rest].to_numpy()
    own = table[ids[0]].astype(str).to_numpy() if ids else None
    return _of_arrays(source, content, inputs, table[label].to_numpy(), own, channels_last)


def _of_arrays(
    source: str, content: bytes, inputs: ndarray, labels: ndarray, ids: ndarray | None, channels_last: bool
) -> DataFile:
    notes: list[str] = []
    if inputs.dtype.kind not in "fiub" or inputs.ndim < 2:
        raise ValueError(
            f"inputs of {source} must be numbers [n, ...], got {inputs.dtype} of shape {list(inputs.shape)}"
        )
    labels = np.squeeze(labels, axis=1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    whole = labels.dtype.kind in "iu" or (labels.dtype.kind == "f" and bool(np.all(labels == np.floor(labels))))
    if labels.ndim != 1 or not whole:
        raise ValueError(
            f"labels of {source} must be class numbers [n], got {labels.dtype} of shape {list(labels.shape)}"
        )
    if channels_last:
        if inputs.ndim != 4:
            raise ValueError(
                f"--channels-last is of images [n, height, width, channels], and {source} has {list(inputs.shape)}"
            )
        inputs, notes = np.moveaxis(inputs, -1, 1), ["channels were moved to the front"]
    if inputs.dtype == np.uint8:
        inputs, notes = inputs.astype(np.float32) / 255, [*notes, "integers of 0 to 255 were divided by 255"]
    names = tuple(map(str, range(len(labels)))) if ids is None else tuple(map(str, ids.tolist()))
    if len(set(names)) < len(names):
        raise ValueError(f"ids of {source} must be distinct, got one twice")
    with np.errstate(over="ignore"):
        values = torch.from_numpy(np.array(inputs, dtype=np.float32, order="C"))
    return DataFile(
        source=source,
        sha256=hashlib.sha256(content).hexdigest(),
        inputs=values,
        labels=torch.from_numpy(np.array(labels, dtype=np.int64)),
        names=names,
        notes=tuple(notes),
    )


def _folder(root: Path) -> DataFile:
    """A folder with a folder of images a class, classes in the order of their names."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ValueError("a folder of images needs Pillow; pip install 'leakbench[images]'") from None

    files: list[tuple[Path, int]] = []
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
    for number, name in enumerate(classes):
        for entry in sorted(os.scandir(root / name), key=lambda one: one.name):
            if entry.is_symlink():
                raise ValueError(f"{root} must hold files and no links, got {name}/{entry.name}")
            if entry.is_file() and Path(entry.name).suffix.lower() in IMAGES:
                files.append((root / name / entry.name, number))
    if not files:
        raise ValueError(f"{root} must have a folder of images a class ({', '.join(IMAGES)}), got none")
    digest, found, total = hashlib.sha256(), [], 0
    for path, _ in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
        try:
            with Image.open(io.BytesIO(content)) as image:
                # Before it is decoded: a small file may say that it is a huge picture.
                total += image.width * image.height * 3
                if total > MOST_BYTES:
                    raise ValueError(f"images of {root} must take at most {MOST_BYTES >> 30} GiB")
                grey = image.mode in ("1", "L", "I;16")
                array = np.asarray(image.convert("L" if grey else "RGB"), dtype=np.float32) / 255
        except (UnidentifiedImageError, OSError, Image.DecompressionBombError, SyntaxError) as error:
            raise ValueError(f"{path} must be an image, got: {' '.join(str(error).split())}") from None
        found.append(array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0))
    shapes = {one.shape for one in found}
    if len(shapes) > 1:
        raise ValueError(
            f"images of {root} must be of one size and mode, got {' and '.join(map(str, sorted(shapes)[:2]))}"
        )
    return DataFile(
        source=str(root),
        sha256=digest.hexdigest(),
        inputs=torch.from_numpy(np.stack(found)),
        labels=torch.tensor([number for _, number in files]),
        names=tuple(path.relative_to(root).as_posix() for path, _ in files),
        notes=(f"classes by name: {', '.join(classes[:12])}", "pixels were divided by 255"),
    )


def read_named(name: str, split_file: Path) -> dict[str, DataFile]:
    """Examples of a data set of ours, by a file that says who is in which group.

    Args:
        name: of `leakbench list data`.
        split_file: CSV with columns id (position in the whole data set) and group (member, non_member or population).

    Returns:
        Group -> its examples; those that the file names.

    Raises:
        ValueError: an unknown set, group or id.
    """
    import pandas as pd

    from benchmarks import data as datasets
    from benchmarks.core import DEFAULT_SIZES

    if name not in datasets.names():
        raise ValueError(no_such("data set", name, datasets.names()))
    try:
        content = split_file.read_bytes()
        table = pd.read_csv(io.BytesIO(content))
    except (OSError, ValueError) as error:
        raise ValueError(f"--split-file must be a CSV file, and {split_file} is not: {error}") from None
    if not {"id", "group"} <= set(table.columns):
        raise ValueError(
            f"{split_file} must have the columns id and group; it has {', '.join(map(str, table.columns))}"
        )
    known = {"member": "members", "non_member": "non_members", "population": "population"}
    if other := [group for group in table["group"].unique() if group not in known]:
        raise ValueError(f"group of {split_file} must be {', '.join(known)}, got {other[0]!r}")
    if table["id"].dtype.kind not in "iu" or table["id"].duplicated().any():
        raise ValueError(f"ids of {split_file} must be whole numbers, each once")
    splits = datasets.load(name, seed=0, sizes=DEFAULT_SIZES)
    pools = [pool for pool in (splits.private, splits.non_member, splits.public, splits.test) if pool is not None]
    ids, inputs, labels = (torch.cat([getattr(pool, part) for pool in pools]) for part in ("ids", "inputs", "labels"))
    order = ids.argsort(stable=True)
    found = {}
    for group, called in known.items():
        wanted = torch.tensor(table.loc[table["group"] == group, "id"].to_numpy(dtype=np.int64))
        if not len(wanted):
            continue
        places = torch.searchsorted(ids[order], wanted).clamp(max=len(ids) - 1)
        chosen = order[places]
        if bool((strange := ids[chosen] != wanted).any()):
            raise ValueError(f"{name} has no example with id {int(wanted[strange][0])}, which {split_file} names")
        found[called] = DataFile(
            source=f"{name} by {split_file.name}",
            sha256=hashlib.sha256(content).hexdigest(),
            inputs=inputs[chosen],
            labels=labels[chosen],
            names=tuple(map(str, wanted.tolist())),
            notes=(f"digest of the data set {splits.digest}",),
        )
    return found
