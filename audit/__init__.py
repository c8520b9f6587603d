"""Privacy audits: models trained under a defense, attacks given what their threat model grants, scores, records.

The hub of the project: it alone imports the types of the other packages, and it finds methods by name. From Python,
`share_update` simulates one shared update and `score` judges an attack on it; `leakbench run` does both for a suite.
`update_between` reads an update off two checkpoints, and `refuse_other_mask` compares a mask with its defense's.
`watch` writes the updates of somebody's own training to disk. `show_versions` prints what a bug report needs.
"""

if __name__ == "audit":
    # Two classes of one name would make `isinstance` fail where both are imported.
    raise ImportError("audit must be imported as leakbench.audit")

import gc
from typing import TYPE_CHECKING, Any

from .run.executors import parent_death  # noqa: F401 - before anything that takes long

# A fifth of the time that PyTorch and SciPy take to import is a search for garbage among what they make for good.
_collecting = gc.isenabled()
gc.disable()
try:
    from .scoring.score import score
    from .scoring.truth import GroundTruth
    from .targets.checkpoint_updates import refuse_other_mask, update_between
    from .targets.simulated_update import share_update
    from .versions import show_versions
finally:
    if _collecting:
        gc.enable()

if TYPE_CHECKING:
    from .external.transcript.watch import watch

__all__ = ["GroundTruth", "refuse_other_mask", "score", "share_update", "show_versions", "update_between", "watch"]


def __getattr__(name: str) -> Any:
    """`watch` by need: who trains elsewhere wants it, and nobody else."""
    if name == "watch":
        from .external.transcript.watch import watch

        return watch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
