"""The owner's examples: `.npz`, Parquet, a folder of images, or a built-in data set with a file of group assignments.

The format of a file follows from its first bytes, never from its name; `benchmarks/data/own` has a file per format.
Each source has a digest, which the report states. Bytes of 0 to 255 become fractions of 255, which the notes state; any
other scaling is up to the owner (`--preprocess`).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakbench.attacks.core import Examples
from leakbench.benchmarks import data as datasets
from leakbench.benchmarks.core.data.stored import AS_IS, Reading, StoredExamples
from leakbench.benchmarks.data.own import folder
from leakbench.leaderboard.records.audit_report import ExamplesSource

from ...catalog.messages import no_such
from .checked import checked
from .identity import content_ids
from .split import read_split


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """Examples of a source.

    Attributes:
        source: as the owner named it.
        sha256: of its bytes; for a folder, of its files with their names, in order.
        inputs: [n, *shape], float32, before preprocessing.
        labels: [n].
        names: the owner's own ids; row numbers if the source has no ids.
        notes: changes made to the examples, a sentence each.
        stored: type of the numbers in the source.
        class_names: in the order of the labels; None if the source has only numbers.
        columns: names of an input's columns, in their order; None if they are unnamed.
    """

    source: str
    sha256: str
    inputs: Float[Tensor, "inputs ..."]
    labels: Int[Tensor, " labels"]
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    stored: str = "float32"
    class_names: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None

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
    """Standardisation, (inputs - mean) / std, by channel or of all inputs alike."""

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
        statistics: dict[str, tuple[float, ...]] = {}
        for part in text.split(","):
            name, equals, values_text = part.partition("=")
            try:
                values = tuple(float(value) for value in values_text.split("/"))
            except ValueError:
                values = ()
            if not equals or name.strip() not in ("mean", "std") or name.strip() in statistics or not values:
                raise ValueError(
                    f"--preprocess must be mean=NUMBER,std=NUMBER, by channel with slashes between, got {text!r}"
                )
            statistics[name.strip()] = values
        mean, std = statistics.get("mean", (0.0,)), statistics.get("std", (1.0,))
        if not all(map(math.isfinite, (*mean, *std))) or min(std) <= 0:
            raise ValueError(f"--preprocess must have finite means and positive stds, got {text!r}")
        return cls(mean, std)

    def __str__(self) -> str:
        """Formats the preprocessing as `parse` reads it."""
        return ",".join(
            f"{name}={'/'.join(f'{value:.6g}' for value in values)}"
            for name, values in (("mean", self.mean), ("std", self.std))
        )

    def then(self, second: Preprocess) -> Preprocess:
        """Composes this preprocessing with a second that follows it."""
        count = max(map(len, (self.mean, self.std, second.mean, second.std)))
        mean, std, after, spread = (
            np.broadcast_to(values, (count,)) for values in (self.mean, self.std, second.mean, second.std)
        )
        return Preprocess(tuple((mean + std * after).tolist()), tuple((std * spread).tolist()))

    def __call__(self, inputs: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """Preprocesses inputs as they are fed to the model.

        Raises:
            ValueError: the number of means or stds differs from that of channels.
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
    """Members, non-members and public examples as fed to the model, with ids by content.

    Attributes:
        members: training examples of the model.
        non_members: examples outside its training set.
        population: disjoint from both; None if there are none.
        sources: name of the group -> its source, digest, number of examples and notes, for the report.
        names: id -> name of the group and the owner's own id.
        preprocess: applied to the inputs.
        columns: names of an input's columns, in the order fed to the model; None if they are unnamed.
    """

    members: Examples
    non_members: Examples
    population: Examples | None
    sources: dict[str, ExamplesSource] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    preprocess: Preprocess = Preprocess()
    columns: tuple[str, ...] | None = None


def groups_of(
    members: DataFile, non_members: DataFile, population: DataFile | None = None, preprocess: Preprocess | None = None
) -> Groups:
    """Builds groups of examples of the same shape; named columns are put into the members' order.

    Raises:
        ValueError: shapes, column names, types of stored numbers, or classes of folders differ.
    """
    files: dict[str, DataFile | None] = {"members": members, "non_members": non_members, "population": population}
    shape, groups, names = tuple(members.inputs.shape[1:]), {}, {}
    for name, file in files.items():
        if file is None:
            continue
        file = files[name] = in_order(file, members)
        if tuple(file.inputs.shape[1:]) != shape:
            raise ValueError(
                f"{file.source} must have inputs of the members' shape, {list(shape)}, got "
                f"{list(file.inputs.shape[1:])}"
            )
        if file.stored != members.stored:
            raise ValueError(
                f"{file.source} must be stored as the members are, {members.stored}, got {file.stored}: rounding alone "
                "would tell them apart"
            )
        if file.class_names != members.class_names:
            raise ValueError(
                f"{file.source} must have a folder for each class of the members, of the same name: classes go by "
                "their order"
            )
        inputs = file.inputs if preprocess is None else preprocess(file.inputs)
        groups[name] = Examples(ids=content_ids(inputs, file.labels), inputs=inputs, labels=file.labels)
        names |= {i: f"{name}:{own}" for i, own in zip(groups[name].ids.tolist(), file.names, strict=True)}
    return Groups(
        members=groups["members"],
        non_members=groups["non_members"],
        population=groups.get("population"),
        sources={
            name: ExamplesSource(source=file.source, sha256=file.sha256, n=len(file.labels), notes=file.notes)
            for name, file in files.items()
            if file is not None
        },
        names=names,
        preprocess=Preprocess() if preprocess is None else preprocess,
        columns=members.columns,
    )


def in_order(file: DataFile, members: DataFile) -> DataFile:
    """Reorders columns by name into the members' order.

    Args:
        file: examples of any group.
        members: of the audited model.

    Raises:
        ValueError: the names differ, or only one of the two has names.
    """
    ours, theirs = members.columns, file.columns
    if ours == theirs:
        return file
    if ours is None or theirs is None:
        with_names, without = (members, file) if theirs is None else (file, members)
        raise ValueError(
            f"{without.source} must name its columns as {with_names.source} does: without names nobody knows whether "
            "they are in one order; give both as the same kind of file"
        )
    lacking, strange = [name for name in ours if name not in theirs], [name for name in theirs if name not in ours]
    if lacking or strange:
        differences = [
            f"{verb} {', '.join(names[:3])}" for verb, names in (("lacks", lacking), ("has", strange)) if names
        ]
        raise ValueError(
            f"{file.source} must have the columns of {members.source}, whatever their order, "
            f"and {' and '.join(differences)}"
        )
    places = torch.tensor([theirs.index(name) for name in ours])
    inputs = file.inputs.flatten(1)[:, places].reshape(file.inputs.shape)
    note = f"columns of {file.source} were put into the order of {members.source}, by their names"
    return replace(file, inputs=inputs, columns=ours, notes=(*file.notes, note))


def read_examples(source: str, *, reading: Reading = AS_IS) -> DataFile:
    """Reads the examples of a file or folder, in the format that its first bytes show, and checks them.

    Args:
        source: path of an `.npz`, a Parquet file, or a folder of images.
        reading: options on the layout of the source.

    Raises:
        ValueError: there is no such file, or its format is not supported.
    """
    path = Path(source)
    if path.is_dir():
        raw, digest = folder.read_examples(source, path, reading)
        return _examples(raw, source, digest, reading)
    if not path.exists():
        way_out = f"; a data set of ours is --data {source} with --split-file" * (source in datasets.names())
        raise ValueError(f"examples must be in a file or a folder, and there is no {source}{way_out}")
    if not path.is_file():
        raise ValueError(f"examples must be in a regular file or a folder, and {source} is neither")
    with path.open("rb") as file:
        # Hashed and read through the same handle, so that both see the same bytes.
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        start = file.read(4)
        file.seek(0)
        if (read := datasets.examples_reader(start)) is None:
            raise ValueError(
                f"{source} must be an .npz, Parquet, or a folder of images by class; its first bytes are {start!r}; "
                "write a CSV table as Parquet: pandas.read_csv(file).to_parquet(other)"
            )
        raw = read(source, file, reading)
    return _examples(raw, source, digest, reading)


def _examples(raw: StoredExamples, source: str, digest: str, reading: Reading) -> DataFile:
    raw = checked(source, raw, reading)
    notes = raw.notes
    with np.errstate(over="ignore"):  # overflow becomes infinity, which is refused
        inputs = torch.from_numpy(np.array(raw.inputs, dtype=np.float32, order="C"))
    if raw.inputs.dtype == np.uint8:
        inputs, notes = inputs.div_(255), (*notes, f"bytes of {source}, 0 to 255, were divided by 255")
    return DataFile(
        source=source,
        sha256=digest,
        inputs=inputs,
        labels=torch.from_numpy(raw.labels),
        names=tuple(map(str, range(len(inputs)))) if raw.ids is None else tuple(map(str, raw.ids.tolist())),
        notes=notes,
        stored=str(raw.inputs.dtype),
        class_names=raw.class_names,
        columns=raw.columns,
    )


def read_named(name: str, split_file: Path) -> dict[str, DataFile]:
    """Reads examples of a built-in data set, grouped by a file of assignments.

    Args:
        name: of `leakbench list data`.
        split_file: CSV with columns id (position in the whole data set) and group (member, non_member or population),
            or JSON, `{"members": [ids], "non_members": [ids], "population": [ids]}`.

    Returns:
        Group -> its examples, for the groups in the file.

    Raises:
        ValueError: an unknown set, group or id.
    """
    if name not in datasets.names():
        raise ValueError(no_such("data set", name, datasets.names()))
    digest, table = read_split(split_file)
    whole = _whole(name)
    pools = [pool for pool in (whole.private, whole.non_member) if pool is not None]
    ids, inputs, labels = (torch.cat([getattr(pool, part) for pool in pools]) for part in ("ids", "inputs", "labels"))
    order = ids.argsort(stable=True)
    files = {}
    for group, listed in table.items():
        listed_ids = torch.tensor(listed, dtype=torch.int64)
        places = torch.searchsorted(ids[order], listed_ids).clamp(max=len(ids) - 1)
        chosen = order[places]
        if bool((strange := ids[chosen] != listed_ids).any()):
            raise ValueError(f"{name} has no example with id {int(listed_ids[strange][0])}, which {split_file} names")
        files[group] = DataFile(
            source=f"{name} by {split_file.name}",
            sha256=digest,
            inputs=inputs[chosen],
            labels=labels[chosen],
            names=tuple(map(str, listed)),
            notes=(f"digest of the data set {whole.digest}",),
        )
    return files


def _whole(name: str) -> datasets.Splits:
    """Loads a built-in data set without a public pool, which would remove the copies of its images from the others."""
    dealt = datasets.load(name)
    if dealt.test is not None:
        return datasets.load(name, sizes=datasets.Sizes(private=int(dealt.test.ids.min()), non_member=0, public=0))
    pools = (dealt.private, dealt.non_member, dealt.public)
    last = max(int(pool.ids.max()) for pool in pools if len(pool))
    return datasets.load(name, sizes=datasets.Sizes(private=last, non_member=1, public=0))
