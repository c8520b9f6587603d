"""Order of summation in Intel's MKL, which must be fixed before MKL is called for the first time.

`leakbench.defenses.core.gradients.numerics.mkl_determinism` explains why, and measures it.
"""

import os
import platform
from pathlib import Path


def fix_order_of_sums() -> None:
    """Sets MKL's conditional numerical reproducibility, unless the environment has chosen.

    In time if MKL has not been called before, because MKL reads the variable at its first call.
    """
    # "AUTO": the processor's own kernels, in an order of summation independent of position. Without "STRICT" 171 of
    # 2,430 products depended on the position on an Intel Xeon with AMX, with up to 16 examples.
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT" if _of_intel() else "AUTO")


def _of_intel() -> bool:
    """Returns whether the processor is Intel's, as reported by Linux or Windows."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "GenuineIntel" in platform.processor()
