"""Settings of a convolution, and the patches of its input."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from jaxtyping import Float
from torch import Tensor, nn

IntPair = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """A two-dimensional convolution's settings; a one-dimensional convolution has height 1.

    Attributes:
        channels: channels of input and output.
        kernel: height and width.
        stride: of the kernel.
        dilation: of the kernel.
        padding: (top, bottom, left, right), zeros.
        groups: number of groups of channels.
    """

    channels: IntPair
    kernel: IntPair
    stride: IntPair
    dilation: IntPair
    padding: tuple[int, int, int, int]
    groups: int

    @classmethod
    def of(cls, layer: nn.Conv1d | nn.Conv2d, *, padded: bool = False) -> Geometry:
        """Returns the settings of a layer; the same object for the same settings, which caches recognise.

        Args:
            layer: the convolution.
            padded: whether its input is padded already.
        """
        kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
        padding = [(0, 0)] * len(kernel) if padded else padding_of(layer)
        if isinstance(layer, nn.Conv1d):
            kernel, stride, dilation, padding = (1, *kernel), (1, *stride), (1, *dilation), [(0, 0), *padding]
        channels = (layer.in_channels, layer.out_channels)
        return _geometry(channels, kernel, stride, dilation, (*padding[0], *padding[1]), layer.groups)

    def __hash__(self) -> int:
        """Computed once: caches need it at every layer of every step."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.channels, self.kernel, self.stride, self.dilation, self.padding, self.groups))

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """Shape of the weight."""
        entering, leaving = self.channels
        return leaving, entering // self.groups, *self.kernel

    def positions(self, height: int, width: int) -> IntPair:
        """Returns rows and columns of the output for a padded image of this size."""
        sizes = zip((height, width), self.kernel, self.stride, self.dilation, strict=True)
        rows, columns = ((size - dilation * (k - 1) - 1) // stride + 1 for size, k, stride, dilation in sizes)
        return rows, columns

    def patches(
        self, images: Float[Tensor, "images channels height width"], rows: int, columns: int
    ) -> Float[Tensor, "images groups rows columns high wide each"]:
        """Returns the pixels under the kernel at each position of padded images, as a strided view."""
        each = images.shape[1] // self.groups
        by_image, by_channel, by_line, by_pixel = images.stride()
        moves = (by_line * self.stride[0], by_pixel * self.stride[1])
        offsets = (by_line * self.dilation[0], by_pixel * self.dilation[1])
        return images.as_strided(
            (len(images), self.groups, rows, columns, *self.kernel, each),
            (by_image, by_channel * each, *moves, *offsets, by_channel),
            images.storage_offset(),
        )


_geometry = lru_cache(maxsize=512)(Geometry)


def padding_of(layer: nn.Conv1d | nn.Conv2d) -> list[IntPair]:
    """Returns the (before, after) padding of each dimension."""
    if layer.padding == "valid":
        return [(0, 0)] * len(layer.kernel_size)
    if layer.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]  # the odd pixel behind, as in PyTorch
    return [(int(size), int(size)) for size in layer.padding]
