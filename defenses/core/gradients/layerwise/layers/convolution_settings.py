"""Settings of a convolution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

IntPair = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """A two-dimensional convolution's settings; a one-dimensional convolution has height 1.

    Attributes:
        channels: of input and output.
        kernel: height and width.
        stride: of the kernel.
        dilation: of the kernel.
        padding: (top, bottom, left, right), zeros.
        groups: of channels.
    """

    channels: IntPair
    kernel: IntPair
    stride: IntPair
    dilation: IntPair
    padding: tuple[int, int, int, int]
    groups: int

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
