"""Weights of a folder: a single file, or the shards of an index, as `save_pretrained` of Hugging Face writes them.

An index, `model.safetensors.index.json`, maps each tensor's name to its file in the folder. Index and files must agree,
since readers differ in how they resolve a disagreement.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .checks import FileRefused
from .checks.limits import MAX_BYTES, MAX_TENSORS, shown
from .json_object import read_object, refuse_link
from .read import StateFile, read_as_stored
from .unwrap import without_wrappers

INDEX = ".index.json"
"""Ending of an index's file name."""

WAY_OUT = (
    "save it by model.save_pretrained(folder), which writes model.safetensors, alone or in shards with their index"
)

_SHARDS = 1000


def read_folder(folder: Path, *, allow_pickle_tensors: bool = False) -> StateFile:
    """Reads the weights of a folder: safetensors if there are any, else pickled tensors.

    Args:
        folder: with model.safetensors, or pytorch_model.bin, or shards of either with their index.
        allow_pickle_tensors: see `read_tensors`.

    Raises:
        FileRefused: weights that are not read, in one sentence.
    """
    for name, ending in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        single = folder / f"{name}{ending}"
        if single.is_symlink() or single.exists():
            return _single(single, allow_pickle_tensors=allow_pickle_tensors)
        # Also indices of one precision, such as model.fp16.safetensors.index.json.
        indices = sorted(folder.glob(f"*{ending}{INDEX}"))
        if len(indices) > 1:
            raise FileRefused(f"cannot read {folder}: it must have one index, and has {_listed(indices)}")
        if indices:
            return read_sharded(indices[0], allow_pickle_tensors=allow_pickle_tensors)
    others = sorted(folder.glob("*.safetensors"))
    hint = f"it has {_listed(others)}; name the file itself" if others else WAY_OUT
    raise FileRefused(f"cannot read {folder}: No such file as model.safetensors or model.safetensors{INDEX}; {hint}")


def _single(path: Path, *, allow_pickle_tensors: bool) -> StateFile:
    try:
        refuse_link(path)
    except FileRefused as error:
        raise FileRefused(f"cannot read {path.parent}: {error}") from None
    state = read_as_stored(path, allow_pickle_tensors=allow_pickle_tensors)
    return _bare(state)


def read_sharded(index: Path, *, allow_pickle_tensors: bool = False) -> StateFile:
    """Reads the shards of an index.

    Args:
        index: JSON with a weight_map, in the folder of its shards.
        allow_pickle_tensors: see `read_tensors`.

    Raises:
        FileRefused: a shard is missing, or outside the folder, or has other tensors than the index says.
    """
    folder = index.parent
    try:
        shards = _shards(index)
        for shard in shards:
            refuse_link(folder / shard)
            if not (folder / shard).is_file():
                raise FileRefused(f"{index.name} names the shard {shown(shard)}, which is not in the folder")
        size = sum((folder / shard).stat().st_size for shard in shards)
        if size > MAX_BYTES:
            raise FileRefused(f"its shards may have at most {MAX_BYTES} bytes together, got {size}")
    except FileRefused as error:
        raise FileRefused(f"cannot read {folder}: {error}") from None
    except OSError as error:
        raise FileRefused(f"cannot read {folder}: {error.strerror or error}") from error
    read = {shard: read_as_stored(folder / shard, allow_pickle_tensors=allow_pickle_tensors) for shard in shards}
    tensors: dict[str, Any] = {}
    for shard, names in shards.items():
        own = read[shard].tensors
        if lacking := [name for name in names if name not in own]:
            problem = f"{index.name} says that {shard} has {shown(lacking[0])}, and it lacks it"
            raise FileRefused(f"cannot read {folder}: {problem}")
        elsewhere = {name for file, tensor_names in shards.items() if file != shard for name in tensor_names}
        if doubled := [name for name in own if name in tensors or name in elsewhere]:
            raise FileRefused(f"cannot read {folder}: {shown(doubled[0])} is in {shard} and in another shard")
        tensors |= own
    digest = hashlib.sha256()
    for shard, state in sorted(read.items()):
        digest.update(f"{shard} {state.sha256}\n".encode())
    kinds = sorted({state.kind for state in read.values()})
    return _bare(
        StateFile(
            tensors,
            f"{' and '.join(kinds)}, {len(shards)} shards",
            digest.hexdigest(),
            size,
            tuple(dict.fromkeys(note for state in read.values() for note in state.notes)),
        )
    )


def _shards(index: Path) -> dict[str, list[str]]:
    """Returns the names of each shard's tensors, by the index."""
    mapped = read_object(index).get("weight_map")
    if not isinstance(mapped, Mapping) or not mapped:
        raise FileRefused(f"{index.name} must have a weight_map of names to files")
    if len(mapped) > MAX_TENSORS:
        raise FileRefused(f"weight_map of {index.name} may have at most {MAX_TENSORS} names, got {len(mapped)}")
    shards: dict[str, list[str]] = {}
    for name, shard in mapped.items():
        # Plain names only: a separator of any system, or a folder's own name, may lead elsewhere.
        if (
            not isinstance(shard, str)
            or shard in ("", ".", "..")
            or not shard.isprintable()
            or set("/\\:") & set(shard)
        ):
            raise FileRefused(f"weight_map of {index.name} must name files of the folder itself, got {shown(shard)}")
        shards.setdefault(shard, []).append(name)
    if len(shards) > _SHARDS:
        raise FileRefused(f"weight_map of {index.name} may name at most {_SHARDS} files, got {len(shards)}")
    return shards


def _bare(state: StateFile) -> StateFile:
    """Removes wrappers' prefixes that the names of all shards share."""
    tensors, notes = without_wrappers(state.tensors)
    return replace(state, tensors=tensors, notes=(*state.notes, *notes))


def _listed(paths: list[Path]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(path.name for path in paths[:3]) + more
