"""Files of weights that somebody else wrote: looked through by code that runs nothing of them, then read.

What a file is, its bytes say and its name does not. safetensors are read in this process. What `torch.save` writes, and
wrote before PyTorch 1.6, is a pickle, which is a program: it is read only where its user allows it, after every
instruction of it was looked at, by PyTorch's restricted loader in a process of its own. What else there is gets refused
with the way out; nothing is ever tried in a less safe way after a safer one failed.
"""

from .checks import FileRefused
from .read import StateFile, read_tensors

__all__ = ["FileRefused", "StateFile", "read_tensors"]
