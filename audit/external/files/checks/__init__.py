"""Checks of weights files that execute nothing in them, with the standard library alone, without PyTorch.

Refused files never reach a loader. Loaders have had vulnerabilities of their own, and accept unknown content; these
checks refuse it.
"""

from .file import Checked, check
from .limits import FileRefused
from .stored import StoredTensor

__all__ = ["Checked", "FileRefused", "StoredTensor", "check"]
