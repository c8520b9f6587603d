"""The hub: trains defended models, gives attackers what they may see, scores what they find, writes records.

`share_update` simulates one shared update and `score` judges an attack on it; `leakbench run` does both at length.
"""

from . import import_guard  # noqa: F401 - before anything that imports `benchmarks`
from .run.executors import lifeline  # noqa: F401 - before anything that takes long
from .scoring.score import score
from .scoring.truth import GroundTruth
from .subjects.simulate import share_update

__all__ = ["GroundTruth", "score", "share_update"]
