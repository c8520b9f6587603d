"""Power iterations of spectral normalisation, advanced once per step instead of in every forward pass.

Miyato et al., "Spectral Normalization for Generative Adversarial Networks", ICLR 2018, Algorithm 1. Its vectors are
buffers that depend on the weights of all steps only, which follow from releases, so the vectors cost no privacy.
PyTorch iterates in every pass in training mode: the vectors would then reveal how many passes a batch takes, and each
pass would change the results of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

_Parametrized: Any = parametrizations._SpectralNorm  # private, because this parametrisation has no public name
# Layers whose own forward pass ignores the mode: it decides only whether the spectral-norm hook iterates.
_WITHOUT_A_MODE = (nn.Linear, nn.Bilinear, nn.Embedding, nn.modules.conv._ConvNd)


class PowerIterations:
    """The power iterations of a model's layers, in both of PyTorch's implementations."""

    def __init__(self, model: nn.Module) -> None:
        """Collects the layers."""
        self._found: list[tuple[nn.Module, Callable[[], object]]] = []
        for module in model.modules():
            if isinstance(module, ParametrizationList):
                self._found += [(norm, module) for norm in module if type(norm) is _Parametrized]
            elif isinstance(module, _WITHOUT_A_MODE):
                self._found += [(module, partial(hook, module, None)) for hook in hooks_of(module)]

    def advance(self) -> None:
        """Takes as many iterations as a PyTorch pass in training mode; none for layers in evaluation mode."""
        with torch.no_grad():
            for layer, compute in self._found:
                if layer.training:
                    compute()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Freezes the vectors within the context."""
        going_on = [layer for layer, _ in self._found if layer.training]
        try:
            for layer in going_on:
                layer.training = False
            yield
        finally:
            for layer in going_on:
                layer.training = True


def hooks_of(module: nn.Module) -> list[SpectralNorm]:
    """Returns the hooks by which `torch.nn.utils.spectral_norm` computes a weight before each call of the module."""
    hooks: Iterator[object] = iter(module._forward_pre_hooks.values())
    return [hook for hook in hooks if isinstance(hook, SpectralNorm)]


def buffers_of_power_iterations(model: nn.Module) -> set[str]:
    """Returns the buffer names of the vectors in `model.named_buffers()`."""
    own: list[tuple[str, tuple[str, ...]]] = []
    for place, module in model.named_modules():
        names = ("_u", "_v") if type(module) is _Parametrized else ()
        names += tuple(f"{hook.name}_{end}" for hook in hooks_of(module) for end in "uv")
        own.append((place, names))
    return {f"{place}.{name}".lstrip(".") for place, names in own for name in names}
