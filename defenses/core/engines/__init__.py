"""Ways of computing per-example gradients and their clipped sums: the reference, our own, Opacus, BackPACK.

All answer the same questions (`interface.py`) with the same sums; `choose.py` picks one and checks it.
"""

from .choose import Choice, choose, names, refuse_name
from .interface import PerExample, Unsupported
from .layerwise import Layerwise
from .torch_func import TorchFunc

__all__ = ["Choice", "Layerwise", "PerExample", "TorchFunc", "Unsupported", "choose", "names", "refuse_name"]
