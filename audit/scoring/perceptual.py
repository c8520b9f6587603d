"""SSIM and LPIPS of reconstructed images; without the extra `images` or weights, the reason replaces the values."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path

import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from ..catalog.methods import missing_module
from .images import ImageValues, absent

LPIPS_WEIGHTS = "LEAKBENCH_LPIPS_WEIGHTS"
"""Environment variable that names the file of AlexNet weights for LPIPS."""

SSIM_WINDOW = 11  # pixels per side, as in Wang et al.
LPIPS_SIDE = 32
"""Smallest image side for LPIPS, in pixels: AlexNet's pooling reduces much smaller images to nothing."""


def ssim_values(images: Float[Tensor, "n *shape"], truth: Float[Tensor, "n *shape"]) -> ImageValues:
    """Returns the structural similarity: Gaussian window of 11x11 with sigma 1.5, per channel, inside the border.

    Args:
        images: on [0, 1].
        truth: on [0, 1], aligned.
    """
    if reason := _not_images(truth, SSIM_WINDOW):
        return absent(len(truth), f"SSIM needs {reason}")
    try:
        from torchmetrics.functional import image  # pyright: ignore[reportMissingImports] -- an extra
    except ImportError as error:
        return absent(len(truth), f"SSIM {missing_module(error)}")
    _, local = image.structural_similarity_index_measure(
        images, truth, sigma=1.5, reduction="none", data_range=1.0, k1=0.01, k2=0.03, return_full_image=True
    )
    # torchmetrics, too, uses 11 pixels per side for sigma 1.5. Its own mean includes the border, whose windows reach
    # over reflected pixels.
    edge = SSIM_WINDOW // 2
    values = local[..., edge:-edge, edge:-edge].flatten(1).mean(dim=1)
    # SSIM is at most 1, and rounding takes that of a copy within 1e-9 above it.
    return ImageValues(n=len(truth), values=values.double().clamp(-1, 1).numpy())


def lpips_values(
    images: Float[Tensor, "n *shape"], truth: Float[Tensor, "n *shape"], weights: str | None
) -> ImageValues:
    """Returns the learned perceptual distance, only with weights supplied by the user, never with random ones.

    Args:
        images: on [0, 1]; a single channel is repeated.
        truth: on [0, 1], aligned.
        weights: file with the ImageNet weights of torchvision's AlexNet; None for the file named by the environment
            variable LEAKBENCH_LPIPS_WEIGHTS. Its SHA-256 is recorded.

    Raises:
        ValueError: the file is named but cannot be read, or holds other weights.
    """
    # Never downloaded: a metric must not depend on the network, nor on the current content of a host.
    path, n = weights or os.environ.get(LPIPS_WEIGHTS), len(truth)
    if reason := _not_images(truth, LPIPS_SIDE):
        return absent(n, f"LPIPS needs {reason}")
    if not path:
        return absent(n, f"LPIPS weights are not here: {LPIPS_WEIGHTS} can name a file of AlexNet weights")
    if truth.shape[1] not in (1, 3):
        return absent(n, f"LPIPS needs 1 or 3 channels, got {truth.shape[1]}")
    try:
        values = _lpips(images, truth, Path(path))
    except ImportError as error:
        return absent(n, f"LPIPS {missing_module(error)}")
    checksum = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return ImageValues(n=n, values=values, detail={"weights_sha256": checksum, "version": "0.1"})


def _lpips(images: Tensor, truth: Tensor, path: Path) -> ndarray:
    from lpips import LPIPS  # pyright: ignore[reportMissingImports] -- an extra

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling raises various exceptions
        raise ValueError(f"LPIPS weights must be a PyTorch state dictionary, {path} is not: {error}") from error
    # `pnet_rand` keeps the constructor from downloading; all of its random weights are replaced below.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lpips uses a parameter name deprecated in torchvision
        model = LPIPS(net="alex", version="0.1", pnet_rand=True, verbose=False)
    trunk = {
        f"net.{part}.{name}": f"features.{name}"
        for part, module in model.net.named_children()
        for name in module.state_dict()
    }
    missing = [theirs for theirs in trunk.values() if not isinstance(state, dict) or theirs not in state]
    if missing:
        raise ValueError(f"LPIPS weights must be those of torchvision's AlexNet, {path} has no {missing[0]}")
    # Not strict: the linear layers on top come with the package, not with the user's file.
    model.load_state_dict({ours: state[theirs] for ours, theirs in trunk.items()}, strict=False)
    pair = [batch.float().expand(-1, 3, -1, -1) for batch in (images, truth)]
    with torch.no_grad():
        # `normalize` maps [0, 1] to the [-1, 1] that LPIPS expects.
        return model(*pair, normalize=True).reshape(-1).double().numpy()


def _not_images(truth: Tensor, side: int) -> str | None:
    if truth.ndim != 4:
        return f"images [channels, height, width], got inputs of shape {list(truth.shape[1:])}"
    if min(truth.shape[2:]) < side:
        return f"sides of at least {side} pixels, got {truth.shape[2]}x{truth.shape[3]}"
    return None
