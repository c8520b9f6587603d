"""Feature extraction: computes the features of a data set under a public pretrained network, and writes them to a file.

Tramèr & Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", ICLR 2021, section 5.2:
private training fits only a linear head, on the features of an encoder with frozen public weights. The features are
computed once, here, and `features:FILE` reads them.

Guarantee:
    An example's features are a function of that example and of the encoder alone: evaluation mode, batch by batch.
    Assumes that no private example was used to train the encoder, which this code cannot check.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from leakbench.benchmarks import data as datasets
from leakbench.benchmarks.core import Sizes, Split, Splits, content_digest, user_factory
from leakbench.benchmarks.core.nets import torchvision_models
from leakbench.benchmarks.core.nets.shapes import first_line
from leakbench.benchmarks.core.open_names import PATTERNS, is_factory, is_torchvision
from leakbench.benchmarks.data.own import features as own
from leakbench.leaderboard.records.files import write_whole

from .external.files.read import read_tensors
from .external.model.network import filled
from .plan.pretrain import last_linear, layer_input

ENCODERS = " or ".join(PATTERNS)


@dataclass(frozen=True)
class Encoder:
    """Network with public weights, and its description.

    Attributes:
        network: in evaluation mode; maps images in [0, 1] to features.
        head: its last linear layer, whose inputs are the features; None if the network's outputs are the features.
        side: side of the square that images are resized to, in pixels; None leaves them as they are.
        about: its name, the source of its weights, and their SHA-256.
    """

    network: nn.Module
    head: nn.Linear | None
    side: int | None
    about: dict[str, str]

    def __call__(self, inputs: Float[Tensor, "n *shape"]) -> Float[Tensor, "n dim"]:
        """Computes the features of a batch.

        Raises:
            ValueError: they are not finite.
        """
        with torch.no_grad():
            images = _prepared(inputs, self.side, colour=self.head is not None)
            features = self.network(images) if self.head is None else layer_input(self.head, self.network, images)
        if not bool(features.isfinite().all()):
            raise ValueError(f"features of {self.about['encoder']} must be finite, got NaN or infinity: other weights?")
        return features.flatten(1).float()


def encoder(name: str, *, weights: Path | None, input_shape: tuple[int, ...], side: int | None) -> Encoder:
    """Builds an encoder by name.

    Args:
        name: `torchvision:NAME`, a classifier without its last linear layer; or `FILE.py:FUNCTION`, a function that is
            called with `input_shape` if it takes it, and returns a network whose outputs are features.
        weights: file of safetensors; None downloads torchvision's published weights.
        input_shape: shape of an image, before resizing.
        side: side of the square that images are resized to, in pixels; None leaves them as they are.

    Raises:
        ValueError: an unknown name, weights that do not fit or are unavailable, or images that cannot be resized.
        ModuleNotFoundError: torchvision is not installed; names the extra.
    """
    vision = is_torchvision(name)
    if not vision and not is_factory(name):
        raise ValueError(f"an encoder must be {ENCODERS}, got {name!r}")
    if not vision and weights is None:
        raise ValueError(f"weights of {name!r} must be given in a file of safetensors: random ones are no encoder")
    if len(input_shape) != 3 and (vision or side is not None):
        raise ValueError(f"inputs must be images, to be resized or for {name!r}, got shape {input_shape}")
    state = None if weights is None else read_tensors(weights)
    blank = _prepared(torch.zeros(1, *input_shape), side, colour=vision)
    head, weights_name = None, ""
    if vision:
        colours, classifier, weights_name = torchvision_models.published(name, download=state is None)
        network = nn.Sequential(colours, classifier).eval()
        try:
            with torch.no_grad():
                head = last_linear(network, blank, of=name)
        except (RuntimeError, AssertionError) as error:  # torch's, and vision transformers'
            raise ValueError(
                f"{name} cannot take images of {tuple(blank.shape[1:])}: {first_line(error)}; resize them, as by "
                "--size 224"
            ) from error
    else:
        network = classifier = user_factory.build(name, input_shape=tuple(blank.shape[1:]), classes=None, settings={})
    if state is not None:
        filled(classifier, state.tensors)
    digest = content_digest(*network.state_dict().values()) if state is None else state.sha256
    about = {"encoder": name, "weights": weights_name if weights is None else weights.name, "weights_sha256": digest}
    return Encoder(network.eval(), head, side, about)


def everybody(data: str) -> tuple[Split, Split | None, Splits]:
    """Returns all examples of a data set in their order: training part, test part if there is one, and its splits."""
    splits = datasets.load(data)
    if splits.test is None:  # without a test part, the pools together are the whole set
        pools = [splits.private, splits.non_member, splits.public]
        ids = torch.cat([pool.ids for pool in pools])
        order = ids.argsort()
        inputs, labels = (torch.cat([getattr(pool, part) for pool in pools])[order] for part in ("inputs", "labels"))
        return Split(ids=ids[order], inputs=inputs, labels=labels), None, splits
    # Ids of the test part follow those of the training part.
    splits = datasets.load(data, sizes=Sizes(private=int(splits.test.ids.min()), non_member=0, public=0))
    return splits.private, splits.test, splits


def write_features(
    data: str,
    out: Path,
    *,
    name: str,
    weights: Path | None,
    side: int | None,
    public: str | None,
    batch: int,
    device: torch.device,
) -> dict[str, str]:
    """Writes the features of a data set, whole or not at all, and returns their origin as stored in the file.

    Args:
        data: as in a suite.
        out: the archive, .npz.
        name: of the encoder, as for `encoder`.
        weights: as for `encoder`.
        side: as for `encoder`.
        public: another data set, whose feature statistics the file stores for standardisation; None leaves it to the
            reader, by its own public pool.
        batch: number of images encoded at a time.
        device: device of the encoding.

    Raises:
        ValueError: as for `encoder` and for loading data.
    """
    if out.suffix != ".npz":
        raise ValueError(f"the file of features must end in .npz, got {out.name}")
    training, test, splits = everybody(data)
    feature_encoder = encoder(name, weights=weights, input_shape=splits.input_shape, side=side)
    feature_encoder.network.to(device)
    origin = {**feature_encoder.about, "side": str(side or "as it is"), "data": data, "data_digest": splits.digest}
    parts = {"": training} if test is None else {"_train": training, "_test": test}
    arrays: dict[str, Tensor] = {}
    for suffix, part in parts.items():
        arrays |= {f"x{suffix}": _encoded(feature_encoder, part.inputs, batch, device), f"y{suffix}": part.labels}
    if public is not None:
        others, _, public_splits = everybody(public)
        if public_splits.input_shape[: 1 if side else None] != splits.input_shape[: 1 if side else None]:
            raise ValueError(
                f"images of {public} must be like those of {data}, {splits.input_shape}, got "
                f"{public_splits.input_shape}; --size brings sizes together, and ?channels= the colours of data of "
                "your own"
            )
        mean, std = own.statistics(_encoded(feature_encoder, others.inputs, batch, device))
        arrays |= {"mean": mean, "std": std}
        origin |= {"public": public, "public_digest": public_splits.digest}
    content = {key: value.numpy() for key, value in arrays.items()}
    write_whole(out, lambda file: np.savez(file, allow_pickle=False, origin=json.dumps(origin), **content))
    return origin | {"dim": str(arrays[f"x{next(iter(parts))}"].shape[1])}


def _encoded(encoder: Encoder, inputs: Tensor, batch: int, device: torch.device) -> Tensor:
    """Computes features of all inputs, on the CPU."""
    return torch.cat([encoder(images.to(device)).cpu() for images in inputs.split(batch)])


def _prepared(images: Tensor, side: int | None, *, colour: bool) -> Tensor:
    """Resizes images; grey images are repeated in three equal channels if the network takes colour."""
    if colour and images.shape[1] == 1:
        images = images.expand(-1, 3, -1, -1)
    if side is None:
        return images
    size = (side, side)
    return functional.interpolate(images, size, mode="bilinear", antialias=True, align_corners=False).clamp(0, 1)
