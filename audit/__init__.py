"""Privacy audits: models trained under a defense, attacks given what their threat model grants, scores, records.

This package is the hub of the project: it alone imports the types of the other packages, and it finds methods by name.
From Python, `share_update` simulates a shared update and `score` judges an attack on it; `leakbench run` does both for
a suite. `update_between` computes an update from two checkpoints, and `refuse_other_mask` compares a mask with its
defense's. `watch` writes the updates of your own training to disk. `show_versions` prints versions for bug reports.
"""

if __name__ == "audit":
    # With two classes of the same name, `isinstance` would fail where both are imported.
    raise ImportError("audit must be imported as leakbench.audit")

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .run.executors import parent_death  # noqa: F401 - before anything that takes long

if TYPE_CHECKING:
    from .external.model.audit import audit_model
    from .external.transcript.watch import watch
    from .scoring.score import score
    from .scoring.truth import GroundTruth
    from .targets.checkpoint_updates import refuse_other_mask, update_between
    from .targets.simulated_update import share_update
    from .versions import show_versions

# Imported on demand: the command, worker processes and attack processes each need only a part of this package.
_HOMES = {
    "GroundTruth": "scoring.truth",
    "audit_model": "external.model.audit",
    "refuse_other_mask": "targets.checkpoint_updates",
    "score": "scoring.score",
    "share_update": "targets.simulated_update",
    "show_versions": "versions",
    "update_between": "targets.checkpoint_updates",
    "watch": "external.transcript.watch",
}

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


def __getattr__(name: str) -> Any:
    """Imports a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
