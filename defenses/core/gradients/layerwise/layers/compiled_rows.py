"""Rows of a convolution and their norms by kernels that are compiled for its sizes.

Guarantee:
    An example's row is computed from its own numbers, whatever its neighbours hold. Each kernel is checked before its
    first use, in its dtype, against products of patches, on three synthetic examples of which the middle one is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from ....kernels.convolution_rows import RowKernel
from ....kernels.machine_code import in_threads, processor
from .convolution_settings import Geometry
from .kept_rows import product_order
from .patch_rows import PatchProducts, images_of

_TOLERANCE = 1e-5  # of a row's length: smaller differences are rounding
_WORTH_A_THREAD = 2e7  # flops, below which handing the work to a thread takes longer
_CHUNK_BYTES = 2**20  # of rows that are measured as they are computed: half of a core's L2 cache


class CompiledRows:
    """Computes rows by compiled kernels.

    Attributes:
        order: order of the numbers in a row.
        scratch: temporary numbers per row that is formed.
    """

    def __init__(
        self,
        inputs: Float[Tensor, "images channels height width"],
        signals: Float[Tensor, "images out rows columns"],
        geometry: Geometry,
        views: int,
    ) -> None:
        """Takes the layer's input and the loss's gradient at its output, of `views` images for each example.

        Raises:
            ValueError: for tensors that a kernel of this geometry would read past the end of.
        """
        refuse_unlike(inputs, signals, geometry, views)
        self.inputs, self.signals, self._geometry, self._views = inputs, signals, geometry, views
        self.order, self.scratch = product_order(geometry), 0
        wide = signals.dtype == torch.float64
        self.kernel = row_kernel(geometry, inputs.shape[2:], signals.shape[2:], views, wide)
        self.size = self.kernel.size

    def parts(self, *, wide: bool = False) -> Iterator[slice]:
        """Yields slices of examples whose rows are read while they are in the cache, or larger ones for products."""
        examples, each = len(self.signals) // self._views, self.size * self.signals.element_size()
        step = max(1, (16 if wide else 1) * _CHUNK_BYTES // each)
        for start in range(0, examples, step):
            yield slice(start, min(start + step, examples))

    def made(self, index: slice | Tensor, out: Float[Tensor, "some size"] | None = None) -> Float[Tensor, "some size"]:
        """Returns the gradients of some examples; written into `out` if given."""
        inputs, signals = images_of((self.inputs, self.signals), index, self._views)
        count = len(signals) // self._views
        rows = signals.new_empty(count, self.size) if out is None else out
        self._measured(inputs, signals, rows)
        return rows

    def squares(self, out: Float[Tensor, "rows size"] | None = None) -> Float[Tensor, " rows"]:
        """Squared norms of all rows, in float64; the rows are written into `out` if given, else discarded."""
        return self._measured(self.inputs, self.signals, out)

    def _measured(self, inputs: Tensor, signals: Tensor, out: Tensor | None) -> Tensor:
        squares = signals.new_empty(len(signals) // self._views, dtype=torch.float64)
        place = (len(squares), self.size)
        if out is not None and (out.shape != place or out.stride(1) != 1 or out.dtype != signals.dtype):
            raise ValueError(
                f"out must have rows in one piece, {place} of dtype {signals.dtype}, got {tuple(out.shape)} with "
                f"strides {out.stride()}, {out.dtype}"
            )

        def run(*batch: int) -> None:
            rows, step = (signals.new_empty(1, self.size), 0) if out is None else (out, out.stride(0))
            self.kernel.make(*batch, rows.data_ptr(), step, squares.data_ptr())

        flops = 2.0 * self.size * self._views * signals.shape[2] * signals.shape[3]
        over_images(run, (inputs, signals), len(squares), numbers=self.kernel.padded, flops=flops)
        return squares


def over_images(
    run: Callable[..., None],
    images: tuple[Tensor, Tensor],
    examples: int,
    *,
    numbers: int,
    flops: float,
    memory: torch.dtype | None = None,
) -> None:
    """Splits examples over threads and calls a kernel in each, with addresses, scratch memory and a range of examples.

    Args:
        run: takes the addresses of inputs, signals and scratch memory, the first example and the end.
        images: inputs and signals.
        examples: number of examples.
        numbers: zeros in each thread's scratch memory.
        flops: flops per example.
        memory: dtype of the scratch memory; that of the images if None.
    """
    inputs, signals = (values.permute(0, 2, 3, 1).contiguous() for values in images)
    if not examples:  # a compiled loop runs its first round before the test
        return
    count = max(1, min(torch.get_num_threads(), int(examples * flops / _WORTH_A_THREAD), examples))
    edges = [round(examples * i / count) for i in range(count + 1)]

    def share(number: int) -> None:
        zeros = signals.new_zeros(numbers, dtype=memory)
        run(inputs.data_ptr(), signals.data_ptr(), zeros.data_ptr(), edges[number], edges[number + 1])

    in_threads(share, count, at_once=count)


def refuse_unlike(inputs: Tensor, signals: Tensor, geometry: Geometry, views: int) -> None:
    """Refuses tensors that a kernel of this geometry would read past the end of."""
    count, (entering, leaving) = len(signals), geometry.channels
    if inputs.shape[:2] != (count, entering) or signals.shape[:2] != (count, leaving) or count % views:
        raise ValueError(
            f"inputs and signals must have images of {geometry.channels} channels, {views} for each example, "
            f"got {tuple(inputs.shape)}, {tuple(signals.shape)}"
        )
    if not usable(inputs, signals, geometry):
        raise ValueError(
            f"inputs and signals must both be float32 or float64 on the CPU, got {inputs.dtype}, {signals.dtype}"
        )


@lru_cache(maxsize=512)
def row_kernel(g: Geometry, inputs: tuple[int, int], signals: tuple[int, int], views: int, wide: bool) -> RowKernel:
    """Returns the kernel for a layer's settings, heights and widths, which is compiled once."""
    return RowKernel(
        height=inputs[0],
        width=inputs[1],
        entering=g.channels[0],
        leaving=g.channels[1],
        kernel=g.kernel,
        stride=g.stride,
        dilation=g.dilation,
        padding=g.padding,
        rows=signals[0],
        columns=signals[1],
        views=views,
        wide=wide,
    )


def usable(inputs: Tensor, signals: Tensor, geometry: Geometry) -> bool:
    """Returns whether the compiled kernel can compute rows; grouped layers have too few channels for its vectors."""
    if geometry.groups > 1 or signals.dtype not in (torch.float32, torch.float64) or inputs.dtype != signals.dtype:
        return False
    plain = all(type(values) is Tensor and values.is_cpu for values in (inputs, signals))
    # Without channels there is nothing to sum; all sizes of a kernel must be positive.
    return plain and min(geometry.channels) > 0 and lanes() > 0


@cache
def lanes() -> int:
    """Numbers of float32 in a vector of the processor; 0 if nothing is compiled for it."""
    host = processor()
    return 0 if host is None else host.vector // 4


@lru_cache(maxsize=1024)
def right(
    geometry: Geometry,
    inputs: tuple[int, ...],
    signals: tuple[int, ...],
    views: int,
    dtype: torch.dtype,
) -> bool:
    """Returns whether the kernel's rows and norms equal those from patches, beside an example that is NaN.

    Args:
        geometry: settings of the layer.
        inputs: height and width.
        signals: rows and columns.
        views: images of an example.
        dtype: dtype of inputs and signals.
    """
    generator, (entering, leaving) = torch.Generator().manual_seed(0), geometry.channels
    x = torch.randn(3 * views, entering, *inputs, generator=generator, dtype=dtype)
    s = torch.randn(3 * views, leaving, *signals, generator=generator, dtype=dtype)
    reference = PatchProducts(x.double(), s.double(), geometry, views)
    expected = torch.cat([reference.made(slice(i, i + 1)) for i in (0, 2)])  # patches of large images are large
    x[views : 2 * views], s[views : 2 * views] = torch.nan, torch.nan
    maker = CompiledRows(x, s, geometry, views)
    rows = x.new_empty(3, maker.size)
    comparisons = [(maker.squares(out)[::2].sqrt(), expected.norm(dim=1)) for out in (rows, None)]
    comparisons.append((rows[::2].double(), expected))
    limit = _TOLERANCE * float(expected.norm(dim=1).max())
    return all(bool((a - b).abs().max() <= limit) for a, b in comparisons)
