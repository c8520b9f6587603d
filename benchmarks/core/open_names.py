"""Names of architectures outside the catalogue: classifiers of torchvision, and functions in a user's own files."""

from collections.abc import Callable
from typing import Any

TORCHVISION = "torchvision:"
PATTERNS = {
    f"{TORCHVISION}NAME": "Any classifier of torchvision, untrained; needs the extra 'images'.",
    "FILE.py:FUNCTION": "A function of yours, called with input_shape and classes, that returns an nn.Module.",
}
"""Pattern of a kind of name -> a line about it."""


def is_torchvision(name: str) -> bool:
    """True if a name has the form torchvision:NAME."""
    return name.startswith(TORCHVISION)


def is_factory(name: str) -> bool:
    """True if a name has the form FILE.py:FUNCTION."""
    path, colon, _ = name.rpartition(":")
    return bool(colon) and path.endswith(".py")


Answers = Callable[[Any], Any] | None
"""Extracts the logits from a network's output."""


def as_they_are(outputs: Any) -> Any:
    """Returns outputs that are logits already."""
    return outputs
