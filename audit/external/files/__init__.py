"""Files of weights that somebody else wrote: looked through by code that runs nothing of them, then read.

What a file is, its bytes say and its name does not. safetensors are read in this process. What `torch.save` writes, and
wrote before PyTorch 1.6, is a pickle, which is a program: it is read only where its user allows it, after every
instruction of it was looked at, by PyTorch's restricted loader in a process of its own. What else there is gets refused
with the way out; nothing is ever tried in a less safe way after a safer one failed.
"""

from pathlib import Path

from .adapter import is_adapter, read_adapter
from .checks import FileRefused
from .read import StateFile, read_tensors
from .sharded import INDEX, read_folder, read_sharded

__all__ = ["FileRefused", "StateFile", "is_adapter", "read_adapter", "read_folder", "read_tensors", "read_weights"]


def read_weights(path: Path, *, allow_pickle_tensors: bool = False) -> StateFile:
    """Reads the weights of a file, of an index of shards, or of a folder; of an adapter with those of its base model.

    Raises:
        FileRefused: for whatever is not read, in one sentence.
    """
    if path.is_dir() and is_adapter(path):
        adapter = read_adapter(path, allow_pickle_tensors=allow_pickle_tensors)
        whole = read_folder(adapter.base, allow_pickle_tensors=allow_pickle_tensors)
        return adapter.merged(whole, whole.tensors)
    read = read_folder if path.is_dir() else read_sharded if path.name.endswith(INDEX) else read_tensors
    return read(path, allow_pickle_tensors=allow_pickle_tensors)
