"""Weight standardisation: convolution weights with mean zero and a fixed variance in every output channel.

Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization", 2019, scaled as by
Brock, De & Smith, "Characterizing signal propagation to close the performance gap in unnormalized ResNets", ICLR 2021.
It is a parametrisation of an ordinary `nn.Conv2d`, so engines that support convolutions support it; the trained
parameters are the weights before it and a gain per output channel.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

LEAST = 1e-4
"""Lower limit of variance times fan-in in the denominator, so that constant weights stay finite."""


class Standardised(nn.Module):
    """Standardisation: gain (W - mean) / sqrt(max(variance fan_in, 1e-4)), moments over each output channel's fan-in.

    Args:
        channels: output channels of the convolution.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels, 1, 1, 1))

    def forward(
        self, weight: Float[Tensor, "leaving entering height width"]
    ) -> Float[Tensor, "leaving entering height width"]:
        """Returns the weights that the convolution uses."""
        # correction=0: moments over the fan-in, as in the formula, not their unbiased estimates.
        variance, mean = torch.var_mean(weight, dim=(1, 2, 3), correction=0, keepdim=True)
        return self.gain * (weight - mean) * (variance * weight[0].numel()).clamp(min=LEAST).rsqrt()


def standardise(layer: nn.Conv2d) -> nn.Conv2d:
    """Standardises the weights of a layer from now on; returns the layer."""
    parametrize.register_parametrization(layer, "weight", Standardised(layer.out_channels))
    return layer
