"""Ways of computing per-example gradients and their clipped sums: the reference, our own, Opacus, BackPACK.

All answer the same questions (`interface.py`) with the same sums; `choose.py` picks one and checks it, and
`model_checks.py` refuses models that no way can train.
"""

from .batches import Batches, reused
from .choose import Choice, choose, forget, names, refuse_name
from .interface import PerExample, Unsupported
from .layerwise import Layerwise
from .model_checks import Untrained, refuse_model
from .one_by_one import OneByOne
from .torch_func import TorchFunc

__all__ = [
    "Batches",
    "Choice",
    "Layerwise",
    "OneByOne",
    "PerExample",
    "TorchFunc",
    "Unsupported",
    "Untrained",
    "choose",
    "forget",
    "names",
    "refuse_model",
    "refuse_name",
    "reused",
]
