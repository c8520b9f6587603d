"""ScatterNet features: two layers of fixed wavelets with moduli, averaged over patches of 4 x 4 pixels.

Bruna & Mallat, "Invariant Scattering Convolution Networks", PAMI 2013; Oyallon & Mallat, "Deep Roto-Translation
Scattering for Object Classification", CVPR 2015. Two scales (J = 2) and eight angles give 81 channels per input
channel: the average, 16 of first and 64 of second order. Nothing is learnt from data, so features cost no privacy.

The filters are kymatio's. The transform is written out here, for all angles at once, because kymatio's for PyTorch is
an autograd function with assignments into views, which `torch.func` cannot map; the results are the same.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ..extras import optional
from .shapes import refuse_groups

SCALES, ANGLES = 2, 8
STRIDE = 2**SCALES
PATHS = 1 + SCALES * ANGLES + ANGLES**2
"""Output channels per input channel: 81."""


class Scattering(nn.Module):
    """Maps [n, channels, height, width] to [n, 81 channels, height // 4, width // 4], without parameters.

    Differentiable any number of times, also by its inputs; at a modulus of zero the derivative is zero. Filters are
    buffers, so they follow the model to another device or dtype; they are constants, so they are not saved.

    Args:
        height: of the images, at least 8.
        width: of the images, at least 8.

    Raises:
        ModuleNotFoundError: kymatio is missing; names the extra. Not on the meta device, on which models are only
        counted.
    """

    fine: Tensor
    coarse: Tensor
    down: Tensor
    across: Tensor
    down_halved: Tensor
    across_halved: Tensor

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        # Pads to the multiple of 4 that leaves a margin of a patch on each side, which is cut off in the end.
        extra = [(size // STRIDE + 2) * STRIDE - size for size in (width, height)]
        self.padding = [side for total in extra for side in (total // 2, total - total // 2)]
        # Models on the meta device are only counted, which needs neither filters nor kymatio.
        if torch.get_default_device().type == "meta":
            return
        for name, values in _filters(height + extra[1], width + extra[0]).items():
            self.register_buffer(name, values.to(torch.get_default_device()), persistent=False)

    def forward(self, images: Float[Tensor, "n channels height width"]) -> Float[Tensor, "n features rows columns"]:
        """Averages, first order, second order of each channel in turn, in kymatio's order."""
        padded = functional.pad(images, self.padding, mode="reflect").unsqueeze(2)
        spectrum = torch.fft.fft2(padded)
        fine = torch.fft.ifft2(_times(spectrum, self.fine)).abs()
        averages = [self.down @ signals @ self.across for signals in (padded, fine)]
        # Second order goes from fine to coarse only, because there is next to no energy the other way. Angles are
        # computed separately: their values then stay in the processor's cache, which saves more time than larger
        # batches do.
        for before in (spectrum, *torch.fft.fft2(fine).split(1, dim=2)):
            coarse = torch.fft.ifft2(_halved(_times(before, self.coarse))).abs()
            averages.append(self.down_halved @ coarse @ self.across_halved)
        return torch.cat(averages, dim=2).flatten(1, 2)


class Coloured(nn.Module):
    """Standardises images in [0, 1] by mean and standard deviation of public pixels, per colour.

    Args:
        mean: of each colour; by default of ImageNet's training images, constants that every library has.
        deviation: standard deviation of each colour; by default of the same images.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self, mean: Sequence[float] = (0.485, 0.456, 0.406), deviation: Sequence[float] = (0.229, 0.224, 0.225)
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(deviation).view(3, 1, 1), persistent=False)

    def forward(self, images: Float[Tensor, "n 3 height width"]) -> Float[Tensor, "n 3 height width"]:
        """Returns the standardised images."""
        return (images - self.mean) / self.deviation


def scattered_shape(input_shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Returns the shape of the features of an image of this shape."""
    channels, height, width = input_shape
    return PATHS * channels, height // STRIDE, width // STRIDE


def scattering(input_shape: tuple[int, int, int], *, groups: int) -> nn.Sequential:
    """Builds features that are normalised within each example, in groups of channels, without parameters.

    Colours are standardised first, as Tramèr & Boneh do, by public constants; grey images are not. This matters,
    because the features of high frequencies are not large against the constant in GroupNorm.

    Args:
        input_shape: (channels, height, width).
        groups: of channels; divides 81 times the channels. 0 for unnormalised features, if training standardises them
            by statistics of the data.

    Raises:
        ValueError: `groups` does not divide the channels.
        ModuleNotFoundError: kymatio is missing.
    """
    channels, height, width = input_shape
    colours = [Coloured()] if channels == 3 else []
    if not groups:
        return nn.Sequential(*colours, Scattering(height, width))
    refuse_groups(groups, PATHS * channels)
    return nn.Sequential(*colours, Scattering(height, width), nn.GroupNorm(groups, PATHS * channels, affine=False))


def _times(spectrum: Tensor, filters: Tensor) -> Tensor:
    """Multiplies complex by real numbers as products of real numbers, which torch computes far faster."""
    return torch.view_as_complex(torch.view_as_real(spectrum) * filters)


def _halved(spectrum: Tensor) -> Tensor:
    """Spectrum of every other sample along each axis, times four: aliases of a frequency are added."""
    top, bottom = spectrum.tensor_split(2, dim=-2)
    left, right = (top + bottom).tensor_split(2, dim=-1)
    return left + right


@cache
def _filters(height: int, width: int) -> dict[str, Tensor]:
    """Spectra of the wavelets [angles, height, width, 2], and matrices that average columns and rows.

    Spectra are real and stored twice, for the real and imaginary parts of their factors.
    """
    bank: dict[str, Any] = optional("kymatio.scattering2d.filter_bank", needed_by="scattering").filter_bank(
        height, width, SCALES, ANGLES
    )
    with torch.device("cpu"):
        filters: dict[str, Tensor] = {}
        for scale, name in enumerate(("fine", "coarse")):
            spectra = [torch.as_tensor(psi["levels"][0]) for psi in bank["psi"] if psi["j"] == scale]
            # A quarter if `_halved` follows, which adds four aliases instead of averaging them.
            filters[name] = torch.stack(spectra).unsqueeze(-1).repeat(1, 1, 1, 2) / 4**scale
        for level, suffix in enumerate(("", "_halved")):
            # A round Gaussian is a product of two, so averaging is a matrix along each axis.
            gaussian = (
                torch.as_tensor(bank["phi"]["levels"][level]).double() / bank["phi"]["levels"][level][0, 0] ** 0.5
            )
            filters[f"down{suffix}"] = _averaging(gaussian[:, 0], STRIDE >> level).float()
            filters[f"across{suffix}"] = _averaging(gaussian[0], STRIDE >> level).float().T.contiguous()
    return filters


def _averaging(spectrum: Float[Tensor, " size"], stride: int) -> Float[Tensor, "rows size"]:
    """Matrix that convolves a periodic signal and keeps every `stride`-th sample except the first and last."""
    responses = torch.fft.ifft(torch.fft.fft(torch.eye(len(spectrum), dtype=torch.float64)) * spectrum).real
    return responses.T[::stride][1:-1]
