"""Rows of a convolution by the vendor's kernel: examples side by side are the groups of one convolution.

The weight gradient of a convolution with groups holds one block for each group. With one example's channels as a group
the blocks are the per-example gradients (Rochette, Manoel & Tramel, "Efficient Per-Example Gradient Computations in
Convolutional Neural Networks", 2019). No patch is copied, and oneDNN's kernels use all of AVX-512, where MKL's products
on AMD use half: 1.5 to 3 times the speed of `patches.py` there. It takes memory in which examples lie innermost but for
their channels, a few at a time: strides of a whole batch would miss the cache.

Guarantee:
    An example's row is made of its own numbers, whatever its neighbours hold. PyTorch's kernels for channels-last
    float32 have had bugs that the engine's check, which is in float64, cannot see: so each geometry is tried first, on
    made-up images next to one that is NaN, against the products of patches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ...plan import onednn
from .geometry import Geometry
from .kept_rows import LastOrder
from .patches import PatchProducts, images_of

# What a group's inputs, derivatives and rows may take: twice the second level of cache of a server's core.
_CHUNK_BYTES = 9 * 2**18
_TOLERANCE = 1e-4  # of a row's length: what is off by less is rounding


class ExampleGroups:
    """Makes rows by the vendor's kernel.

    Attributes:
        order: of the numbers in them.
        scratch: numbers that exist for a while for each row that is made.
    """

    def __init__(
        self,
        inputs: Float[Tensor, "images channels height width"],
        signals: Float[Tensor, "images out rows columns"],
        geometry: Geometry,
        views: int,
    ) -> None:
        """Takes what went into the layer and the derivatives by what came out, of `views` images for each example."""
        self.inputs, self.signals, self.geometry, self.views = inputs, signals, geometry, views
        self.size, self.order = torch.Size(geometry.weight_shape).numel(), LastOrder(geometry)
        self.scratch = views * (inputs[0].numel() + signals[0].numel() + 2 * self.size)

    def parts(self, *, wide: bool = False) -> Iterator[slice]:
        """Slices of examples that are worked on at a time, of nearly the same size each."""
        examples, each = len(self.signals) // self.views, self.scratch * self.signals.element_size()
        count = -(-examples * each // _CHUNK_BYTES)
        step = max(1, -(-examples // max(1, count)))
        for start in range(0, examples, step):
            yield slice(start, min(start + step, examples))

    def made(self, which: slice | Tensor, out: Float[Tensor, "some size"] | None = None) -> Float[Tensor, "some size"]:
        """The gradients of some examples; into `out` if given."""
        g, (inputs, signals) = self.geometry, images_of((self.inputs, self.signals), which, self.views)
        top, bottom, left, right = g.padding
        # conv2d pads both sides of a dimension alike; "same" with an even kernel does not.
        if top == bottom and left == right:
            padding = (top, left)
        else:
            inputs, padding = F.pad(inputs, (left, right, top, bottom)), (0, 0)
        images = len(inputs)
        # Not `torch.nn.grad.conv2d_weight`: it stands one number in for the weight, which is then laid out in full.
        weight = inputs.new_empty(images * g.channels[1], *g.kernel, g.weight_shape[1]).permute(0, 3, 1, 2)
        _, found, _ = torch.ops.aten.convolution_backward(
            _side_by_side(signals), _side_by_side(inputs), weight, None, g.stride, padding, g.dilation,
            False, (0, 0), images * g.groups, (False, True, False),
        )  # fmt: skip
        # As the kernel leaves them, channels last: a view.
        rows = found.permute(0, 2, 3, 1).reshape(images, self.size)
        if self.views > 1:
            rows = rows.unflatten(0, (-1, self.views)).sum(dim=1)
        return rows if out is None else out.copy_(rows)


def usable(inputs: Tensor, geometry: Geometry) -> bool:
    """Whether rows can be made this way, and fast; with groups of its own a layer's channels are too few."""
    return geometry.groups == 1 and onednn.faster_here(inputs)


@lru_cache(maxsize=256)
def right(geometry: Geometry, inputs: tuple[int, int], signals: tuple[int, int]) -> bool:
    """Whether rows are those of patches, in float32 and next to an image that is NaN.

    Args:
        geometry: of the layer.
        inputs: height and width.
        signals: rows and columns.
    """
    coins, (entering, leaving) = torch.Generator().manual_seed(0), geometry.channels
    x = torch.randn(3, entering, *inputs, generator=coins)
    s = torch.randn(3, leaving, *signals, generator=coins)
    expected = rows_of(PatchProducts(x.double(), s.double(), geometry, 1))[::2]
    x[1], s[1] = torch.nan, torch.nan
    found = rows_of(ExampleGroups(x, s, geometry, 1))[::2].double()
    off, length = ((v.square().sum(dim=1)).sqrt() for v in (found - expected, expected))
    return bool((off <= _TOLERANCE * length).all())


def rows_of(maker: ExampleGroups | PatchProducts, which: slice | Tensor = slice(None)) -> Float[Tensor, "some size"]:
    """Rows of some examples in the weight's own order."""
    return maker.order.in_order(maker.made(which))


def _side_by_side(images: Float[Tensor, "n c h w"]) -> Float[Tensor, "1 channels h w"]:
    """All images' channels as those of one image, channels last in memory."""
    count, channels, high, wide = images.shape
    lying = images.permute(2, 3, 0, 1).contiguous().view(1, high, wide, count * channels)
    return lying.permute(0, 3, 1, 2)
