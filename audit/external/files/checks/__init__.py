"""Looks through a file of weights without running anything of it, and without PyTorch: standard library only.

Whatever is refused here never reaches a loader. Loaders have had holes of their own, and they take what they do not
understand for harmless; this takes it for harmful.
"""

from .file import Checked, check
from .limits import FileRefused
from .stored import StoredTensor

__all__ = ["Checked", "FileRefused", "StoredTensor", "check"]
