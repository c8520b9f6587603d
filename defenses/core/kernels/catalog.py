"""All kernels by name, each for its formats and for a few of the sizes that it may be compiled for."""

from __future__ import annotations

from itertools import product

from .bound_factors import bound_factors
from .convolution_rows import RowKernel
from .kernel import Kernel
from .machine_code import Processor
from .normals import CudaNormals, normals
from .product_norms import ProductKernel
from .record_uniforms import record_uniforms
from .row_products import RowProducts
from .weighted_rows import weighted_rows

_BOTH = (False, True)
# Code for other vectors than the processor's runs too: LLVM splits what it has no registers for.
_HOSTS = (Processor(vector=16, sums=24), Processor(vector=32, sums=12), Processor(vector=64, sums=24))


def _layer(entering: int, leaving: int, *, views: int = 1, wide: bool = False) -> RowKernel:
    """Returns the kernel for a convolution with uneven settings."""
    return RowKernel(
        **{"height": 7, "width": 6, "rows": 6, "columns": 4},
        **{"kernel": (3, 2), "stride": (1, 2), "dilation": (1, 1), "padding": (1, 0, 2, 1)},
        **{"entering": entering, "leaving": leaving, "views": views, "wide": wide},
    )


KERNELS: dict[str, tuple[Kernel, ...]] = {
    "bound_factors": tuple(bound_factors(wide=wide) for wide in _BOTH),
    "weighted_rows": tuple(weighted_rows(wide=wide) for wide in _BOTH),
    "convolution_rows": tuple(_layer(3, 5, views=views, wide=wide) for views, wide in product((1, 2), _BOTH)),
    "product_norms": tuple(ProductKernel(_layer(17, 33, wide=wide)) for wide in _BOTH),
    "row_products": tuple(
        RowProducts(host, given, number, scaled)
        for host, (given, number), scaled in product(_HOSTS, ((4, 4), (4, 8), (8, 8)), _BOTH)
    ),
    "record_uniforms": (record_uniforms(),),
    "normals": tuple(normals(rounded=rounded, wide=wide) for rounded, wide in product(_BOTH, _BOTH)),
    "cuda_normals": tuple(CudaNormals(rounded=rounded, wide=wide) for rounded, wide in product(_BOTH, _BOTH)),
}
