"""Settings of convolutions, and images and derivatives for them."""

import torch

from leakbench.defenses.core.gradients.layerwise.layers.convolution_settings import Geometry


def geometry_of(**changes):
    plain = {"channels": (3, 5), "kernel": (3, 2), "stride": (1, 2), "dilation": (1, 1), "padding": (1, 0, 2, 1)}
    return Geometry(**{**plain, **changes}, groups=1)


def outputs(size, g):
    top, bottom, left, right = g.padding
    full = (size[0] + top + bottom, size[1] + left + right)
    spans = zip(full, g.kernel, g.stride, g.dilation, strict=True)
    return tuple((length - d * (k - 1) - 1) // s + 1 for length, k, s, d in spans)


def images(count, g, size, *, dtype=torch.float32, seed=0):
    coins, places = torch.Generator().manual_seed(seed), outputs(size, g)
    inputs = torch.randn(count, g.channels[0], *size, generator=coins)
    signals = torch.randn(count, g.channels[1], *places, generator=coins)
    last = torch.channels_last
    return inputs.to(dtype).contiguous(memory_format=last), signals.to(dtype).contiguous(memory_format=last)
