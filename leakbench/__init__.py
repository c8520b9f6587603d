"""leakbench: differentially private training, privacy attacks on its releases, and audits of the remaining leakage.

Subpackages: `leakbench.defenses`, `leakbench.attacks`, `leakbench.audit`, `leakbench.benchmarks` and
`leakbench.leaderboard`; `leakbench.zoo` loads trained checkpoints. Public names are imported on first use, so
`import leakbench` takes a millisecond.
"""

from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .lazy_names import lazy_names
from .mkl import fix_order_of_sums

_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "defenses").is_dir():
    # The subpackages lie next to this folder in a checkout, and inside it in a wheel.
    __path__.append(str(_checkout))

if TYPE_CHECKING:
    __version__: str

    from leakbench.audit import refuse_other_mask, score, share_update, show_versions, update_between, watch
    from leakbench.audit.external.model.audit import audit_model
    from leakbench.defenses.core import calibrate, fixed, full, partition, poisson, predict, shuffle, train
    from leakbench.leaderboard import Record, read_all

# Before PyTorch computes anything, whichever part is imported first.
fix_order_of_sums()

_PARTS = ("attacks", "audit", "benchmarks", "defenses", "leaderboard", "zoo")

__all__ = [
    "Record",
    "__version__",
    "audit_model",
    "calibrate",
    "fixed",
    "full",
    "partition",
    "poisson",
    "predict",
    "read_all",
    "refuse_other_mask",
    "score",
    "share_update",
    "show_versions",
    "shuffle",
    "train",
    "update_between",
    "watch",
]


_public_name, _names = lazy_names(__name__)


def __getattr__(name: str) -> Any:
    """Imports a subpackage or a public name on first use."""
    if name in _PARTS:
        return import_module(f"{__name__}.{name}")
    if name == "__version__":
        try:
            return metadata.version(__name__)
        except metadata.PackageNotFoundError:  # a checkout without an installation
            return "0+unknown"
    return _public_name(name)


def __dir__() -> list[str]:
    return sorted({*_names(), *_PARTS, "__version__"})
