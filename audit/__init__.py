"""Privacy audits: trains models under a defense, gives attacks what their threat model grants, scores and records them.

This package is the hub of the project: it alone imports the types of the other packages, and it finds methods by name.
From Python, `share_update` simulates a shared update and `score` judges an attack on it; `leakbench run` does both for
a suite. `update_between` computes an update from two checkpoints, and `refuse_other_mask` compares a mask with its
defense's. `watch` writes the updates of your own training to disk. `show_versions` prints versions for bug reports.
"""

if __name__ == "audit":
    # Imported under two names, the package would have two classes of each name, and `isinstance` would fail.
    raise ImportError("audit must be imported as leakbench.audit")

from typing import TYPE_CHECKING

from leakbench.lazy_names import lazy_names

from .run.executors import parent_death  # noqa: F401 - before anything that takes long

if TYPE_CHECKING:
    from .external.model.audit import audit_model
    from .external.transcript.watch import watch
    from .scoring.score import score
    from .scoring.truth import GroundTruth
    from .targets.checkpoint_updates import refuse_other_mask, update_between
    from .targets.simulated_update import share_update
    from .versions import show_versions

__all__ = [
    "GroundTruth",
    "audit_model",
    "refuse_other_mask",
    "score",
    "share_update",
    "show_versions",
    "update_between",
    "watch",
]

# The command, worker processes and attack processes each need only a part of this package.
__getattr__, __dir__ = lazy_names(__name__)
