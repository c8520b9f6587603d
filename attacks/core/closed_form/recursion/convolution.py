"""Convolution as linear equations of its input: those of its output, and of the gradient of its weight.

(dL/dW)[f, c, a] = sum over positions o of k[f, o] x[c, p(a, o)], with k the derivatives of the loss with respect to the
output, and p(a, o) the pixel under offset a of the kernel at position o (R-GAP, section 3.3). The gradient's equations
are therefore a small matrix K0 for every input channel: K = I (x) K0. Padded pixels are not unknowns, so their columns
are deleted.

Both normal matrices are computed from the index map p, without forming the equations. The output's, sum over o of W[.,
a]^T W[., b] at (p(a, o), p(b, o)), takes a channels x channels product for each pair of offsets.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .maps import LinearMap


class KernelGeometry:
    """Stride, padding, dilation and groups of a convolution on inputs of a fixed shape, and its index map.

    Attributes:
        kernel: (height, width).
        groups: groups of channels.
        shape_in: (channels, height, width).
        shape_out: the same of the output.
        pixel: int64 [offsets, positions], the pixel under an offset at a position; -1 on the padding.
    """

    def __init__(
        self, settings: Mapping[str, Any], shape_in: tuple[int, ...], shape_out: tuple[int, ...], device: torch.device
    ) -> None:
        self.kernel = tuple(settings["kernel_size"])
        self.stride, self.padding = tuple(settings["stride"]), tuple(settings["padding"])
        self.dilation = tuple(settings.get("dilation", (1, 1)))
        self.groups = int(settings.get("groups", 1))
        self.shape_in, self.shape_out = tuple(shape_in), tuple(shape_out)
        height, width = self.shape_in[1:]
        numbers = torch.arange(1, height * width + 1, dtype=torch.float64, device=device).view(1, 1, height, width)
        self.pixel = self.unfold(numbers)[0].round().long() - 1

    @property
    def pixels(self) -> int:
        """Pixels of a channel of the input."""
        return self.shape_in[1] * self.shape_in[2]

    @property
    def positions(self) -> int:
        """Pixels of a channel of the output."""
        return self.shape_out[1] * self.shape_out[2]

    def unfold(self, x: Tensor) -> Tensor:
        """Maps [b, channels, height, width] to [b, channels * offsets, positions]."""
        return functional.unfold(x, self.kernel, self.dilation, self.padding, self.stride)

    def fold(self, patches: Tensor) -> Tensor:
        """Applies the adjoint of `unfold`."""
        return functional.fold(patches, self.shape_in[1:], self.kernel, self.dilation, self.padding, self.stride)


class Convolved(LinearMap):
    """Output of a convolution without its bias."""

    def __init__(self, weight: Tensor, geometry: KernelGeometry, *, lossy: bool = False) -> None:
        super().__init__(geometry.shape_in, geometry.shape_out, weight)
        self.weight, self.geometry, self.lossy = weight, geometry, lossy

    def apply(self, x: Tensor) -> Tensor:
        """Applies the convolution."""
        g = self.geometry
        return functional.conv2d(x, self.weight, None, g.stride, g.padding, g.dilation, g.groups)

    def adjoint(self, y: Tensor) -> Tensor:
        """Applies the transposed convolution; pixels that no kernel reaches are 0."""
        g = self.geometry
        extents = zip(self.shape_in[1:], self.shape_out[1:], g.kernel, g.stride, g.padding, g.dilation, strict=True)
        output_padding = [n - ((m - 1) * s - 2 * p + d * (k - 1) + 1) for n, m, k, s, p, d in extents]
        return functional.conv_transpose2d(
            y, self.weight, None, g.stride, g.padding, output_padding, g.groups, g.dilation
        )

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """Returns W^T D W by pairs of offsets of the kernel."""
        g, pixels, channels = self.geometry, self.geometry.pixels, self.shape_in[0]
        width = channels // g.groups
        kernels = self.weight.reshape(g.groups, -1, width, g.pixel.shape[0])
        filters = kernels.shape[1]
        diagonal = None if weights is None else weights.reshape(g.groups, filters, g.positions)
        total = self.like.new_zeros(0)
        if g.groups > 1:
            total = self.like.new_zeros(channels, pixels, channels, pixels)
        for group in range(g.groups):
            own = kernels[group]
            flat = own.permute(0, 2, 1).reshape(filters, -1)  # [filters, offsets * channels]
            sums = self.like.new_zeros(pixels * pixels, width * width)
            # A loop over offsets, because all pairs at once may be larger than the result.
            for a, under in enumerate(g.pixel):
                if diagonal is None:
                    products = (own[:, :, a].T @ flat).view(1, width, -1, width)
                else:
                    weighted = own[:, :, a].T[None] * diagonal[group].T[:, None, :]  # [positions, channels, filters]
                    products = (weighted @ flat).view(g.positions, width, -1, width)
                both = (under[None] >= 0) & (g.pixel >= 0)  # [offsets, positions]
                offset, position = both.nonzero(as_tuple=True)
                target = under[position] * pixels + g.pixel[offset, position]
                chosen = products[0].permute(1, 0, 2)[offset] if diagonal is None else products[position, :, offset]
                sums.index_add_(0, target, chosen.reshape(-1, width * width))
            block = sums.view(pixels, pixels, width, width).permute(2, 0, 3, 1)
            if g.groups == 1:
                return block.reshape(self.unknowns, self.unknowns)
            channel = slice(group * width, (group + 1) * width)
            total[channel, :, channel] = block
        return total.view(self.unknowns, self.unknowns)


class WeightGradient(LinearMap):
    """Gradient of a convolution's weight as a map of its input, at released entries."""

    def __init__(
        self, slopes: Tensor, geometry: KernelGeometry, filters_shape: tuple[int, ...], observed: Tensor | None
    ) -> None:
        """Builds the map from the derivatives with respect to the convolution's output.

        Args:
            slopes: k, in the shape of the output.
            geometry: geometry of the convolution.
            filters_shape: shape of its weight.
            observed: bool in the shape of the weight; None for all.
        """
        super().__init__(geometry.shape_in, filters_shape, slopes)
        self.geometry, self.observed = geometry, observed
        self.slopes = slopes.reshape(geometry.groups, -1, geometry.positions)

    def apply(self, x: Tensor) -> Tensor:
        """Returns the gradient of the weight for this input."""
        g = self.geometry
        patches = g.unfold(x).view(len(x), g.groups, -1, g.positions)
        gradient = torch.einsum("gfo,bgko->bgfk", self.slopes, patches).reshape(-1, *self.shape_out)
        return gradient if self.observed is None else gradient * self.observed

    def adjoint(self, y: Tensor) -> Tensor:
        """Returns the derivative of <y, gradient of the weight> with respect to the input."""
        g = self.geometry
        y = y if self.observed is None else y * self.observed
        patches = torch.einsum("gfo,bgfk->bgko", self.slopes, y.reshape(len(y), g.groups, self.slopes.shape[1], -1))
        return g.fold(patches.reshape(len(y), -1, g.positions))

    def channel_matrix(self) -> Tensor:
        """Returns K0, [groups, filters, offsets, pixels]."""
        g = self.geometry
        matrix = self.like.new_zeros(g.groups, self.slopes.shape[1], len(g.pixel), g.pixels)
        offset, position = (g.pixel >= 0).nonzero(as_tuple=True)
        # At a given offset, positions have different pixels, so nothing is overwritten.
        matrix[:, :, offset, g.pixel[offset, position]] = self.slopes[:, :, position]
        return matrix

    def channel_grams(self, weights: Tensor | None = None) -> Tensor:
        """Returns K0^T D K0 for each input channel, or each group if its channels share it, [.., pixels, pixels]."""
        g, matrix = self.geometry, self.channel_matrix()
        if self.observed is None and weights is None:
            rows = matrix.flatten(1, 2)
            return rows.mT @ rows
        diagonal = torch.ones(self.shape_out, dtype=self.like.dtype, device=self.like.device)
        diagonal = diagonal if weights is None else diagonal * weights
        diagonal = diagonal if self.observed is None else diagonal * self.observed
        # [groups, filters, channels of a group, offsets]
        by_channel = diagonal.reshape(g.groups, self.slopes.shape[1], -1, len(g.pixel))
        grams = []
        for c in range(by_channel.shape[2]):
            rows = (matrix * by_channel[:, :, c, :, None]).flatten(1, 2)
            grams.append(rows.mT @ matrix.flatten(1, 2))
        # Channels of a group are contiguous.
        return torch.stack(grams, dim=1).flatten(0, 1)

    def gram(self, weights: Tensor | None = None) -> Tensor:
        """Returns K^T D K: a block for each channel."""
        grams, channels = self.channel_grams(weights), self.shape_in[0]
        total = self.like.new_zeros(channels, grams.shape[-1], channels, grams.shape[-1])
        blocks = grams.repeat_interleave(channels // len(grams), dim=0)
        total.diagonal(dim1=0, dim2=2).copy_(blocks.permute(1, 2, 0))
        return total.view(self.unknowns, self.unknowns)


def pooled(
    settings: Mapping[str, Any], shape_in: tuple[int, ...], shape_out: tuple[int, ...], like: Tensor
) -> Convolved:
    """Returns average pooling as a lossy depthwise convolution.

    Args:
        settings: `kernel_size`, `stride` and `padding`.
        shape_in: (channels, height, width).
        shape_out: the same of the output.
        like: any tensor on its device; float64.
    """
    channels, (height, width) = shape_in[0], settings["kernel_size"]
    weight = like.new_full((channels, 1, height, width), 1.0 / (height * width))
    geometry = KernelGeometry({**settings, "groups": channels}, shape_in, shape_out, like.device)
    return Convolved(weight, geometry, lossy=True)
