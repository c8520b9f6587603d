"""The hub: trains defended models, gives attackers what they may see, scores what they find, writes records.

`share_update` simulates one shared update and `score` judges an attack on it; `leakbench run` does both at length.
"""

from . import lifeline, siblings  # noqa: F401 - before anything that takes long, or imports `benchmarks`
from .observe import GroundTruth
from .score import score
from .share import share_update

__all__ = ["GroundTruth", "score", "share_update"]
