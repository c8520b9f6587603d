"""Networks of the check, from the papers, and a small vision transformer if timm is installed; random data."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor, nn

from .. import models
from ..speed.networks import CLASSES, COLOUR, GREY
from .rows import NotMeasured

VISION_TRANSFORMER = "vit_tiny"
_SHAPES = {
    "resnet18": COLOUR,
    "dp_cnn": COLOUR,
    "dp_cnn_small": GREY,
    "wrn_16_4": COLOUR,
    VISION_TRANSFORMER: COLOUR,
    "mlp": GREY,
    "cnn6": COLOUR,
}
_SMALL = ("dp_cnn_small", "mlp")


def names(*, small: bool) -> tuple[str, ...]:
    """Returns the networks; the two smallest if small."""
    return _SMALL if small else tuple(_SHAPES)


def build(network: str) -> nn.Module:
    """Builds a network with the same weights in every call, on the CPU.

    Raises:
        NotMeasured: timm is not installed, of which the vision transformer is.
    """
    if network != VISION_TRANSFORMER:
        return models.build(network, input_shape=_SHAPES[network], classes=CLASSES, seed=0)
    try:
        timm = importlib.import_module("timm")
    except ModuleNotFoundError as error:
        raise NotMeasured("timm is not installed") from error
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=CLASSES)
    # Parameters that no layer holds: Opacus has no rule for them.
    model.cls_token.requires_grad_(False)
    model.pos_embed.requires_grad_(False)
    return model


def data(network: str, batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Returns random images in [0, 1) and labels, always the same."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(batch, *_SHAPES[network], generator=generator)
    labels = torch.randint(0, CLASSES, (batch,), generator=generator)
    return inputs.to(device), labels.to(device)
