"""Untrusted files of weights: checked by code that executes nothing in them, then read.

The kind of a file follows from its bytes, not from its name. safetensors are read in this process. The formats of
`torch.save`, before and since PyTorch 1.6, hold a pickle, which is a program: they are read only if the user allows it,
after every instruction was checked, by PyTorch's restricted loader in a process of its own. Other files are refused,
with a remedy; a less safe reader is never tried after a safer one has failed.
"""

from pathlib import Path

from .adapter import is_adapter, read_adapter
from .checks import FileRefused
from .read import StateFile, read_tensors
from .sharded import INDEX, read_folder, read_sharded

__all__ = ["FileRefused", "StateFile", "is_adapter", "read_adapter", "read_folder", "read_tensors", "read_weights"]


def read_weights(path: Path, *, allow_pickle_tensors: bool = False) -> StateFile:
    """Reads the weights of a file, of an index of shards, or of a folder; an adapter is merged into its base model.

    Raises:
        FileRefused: weights that are not read, in one sentence.
    """
    if path.is_dir() and is_adapter(path):
        adapter = read_adapter(path, allow_pickle_tensors=allow_pickle_tensors)
        whole = read_folder(adapter.base, allow_pickle_tensors=allow_pickle_tensors)
        return adapter.merged(whole, whole.tensors)
    read = read_folder if path.is_dir() else read_sharded if path.name.endswith(INDEX) else read_tensors
    return read(path, allow_pickle_tensors=allow_pickle_tensors)
