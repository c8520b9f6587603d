"""Checks of weights files that execute nothing of them, with the standard library alone, without PyTorch.

Refused files never reach a loader. Loaders have had vulnerabilities of their own, and take unknown content for
harmless; these checks take it for harmful.
"""

from .file import Checked, check
from .limits import FileRefused
from .stored import StoredTensor

__all__ = ["Checked", "FileRefused", "StoredTensor", "check"]
