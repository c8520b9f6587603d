"""ImageNet (ILSVRC 2012): 1,281,167 and 50,000 photographs in 1,000 classes, resized and cropped to squares.

Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge", IJCV 2015, for non-commercial research;
torchvision's ImageNet, which unpacks the archives but cannot download them. The test set is the validation part. All
images are decoded once and stay in memory; at 224 pixels they need more than most machines have, and data that do not
fit are refused before decoding.
"""

import tarfile
from functools import lru_cache
from pathlib import Path

import torch

from ..core.data.data_paths import VARIABLE, data_folder, stamp
from ..core.data.dealing import LabelledImages, pool_sizes
from ..core.data.downloads import torchvision
from ..core.data.images import Encoded, decode, reason, refuse_too_large
from ..core.data.sizes import DEFAULT_SIZES, Sizes
from ..core.data.splits import Splits

SIZES = Sizes(private=50_000, non_member=50_000, public=50_000)
EXAMPLES = {"train": 1_281_167, "val": 50_000}
CLASSES = 1000


def imagenet(*, seed: int = 0, sizes: Sizes = DEFAULT_SIZES, size: int = 224) -> Splits:
    """1,331,167 photographs, 1,000 classes, all in memory: imagenet?size=64 (archives in LEAKBENCH_DATA/imagenet).

    Args:
        seed: decides which examples are members; the public pool is fixed.
        sizes: of the pools, dealt from the training images; 50,000 each by default.
        size: side of the squares, in pixels; the shorter side is resized to it, the centre cropped.

    Raises:
        ValueError: the data are missing or incomplete, or do not fit into memory.
    """
    address = f"imagenet?size={size}"
    counts = pool_sizes(sizes, SIZES, available=EXAMPLES["train"], name="imagenet", tested=True)
    total, dealt = sum(EXAMPLES.values()), sum(counts.values()) + EXAMPLES["val"]
    refuse_too_large(total, dealt, 3 * size**2, address=address)
    files, labels, train = _listed(data_folder() / "imagenet")
    dataset = _decoded(tuple(files), tuple(labels), train, address, size, dealt, stamp(files))
    about = f"ILSVRC 2012 (non-commercial research) at {size}x{size}, by torchvision"
    return dataset.deal(name="imagenet", about=about, seed=seed, sizes=sizes, defaults=SIZES)


def _listed(root: Path) -> tuple[list[Path], list[int], int]:
    """Lists all images with their classes, training part first, and the number of training images."""
    kind = torchvision("imagenet").ImageNet
    try:
        # Unpacks the archives at the first call, after checking their MD5 sums.
        parts = {part: kind(root, split=part).samples for part in EXAMPLES}
    except (RuntimeError, OSError, EOFError, tarfile.TarError) as error:
        raise ValueError(
            f"data set 'imagenet' is not in {root} ({reason(error)}); it has to be fetched by "
            f"hand, from image-net.org: set {VARIABLE} to the folder that holds imagenet/ILSVRC2012_img_train.tar, "
            "imagenet/ILSVRC2012_img_val.tar and imagenet/ILSVRC2012_devkit_t12.tar.gz"
        ) from error
    for part, samples in parts.items():
        if len(samples) != EXAMPLES[part]:
            raise ValueError(
                f"{root / part} must hold {EXAMPLES[part]} images, got {len(samples)}: its unpacking was cut off; "
                "delete it, so that the archive is unpacked again, or name a part of ImageNet with folder:PATH"
            )
    listed = [*parts["train"], *parts["val"]]
    return [Path(file) for file, _ in listed], [label for _, label in listed], len(parts["train"])


@lru_cache(maxsize=1)
def _decoded(
    files: tuple[Path, ...],
    labels: tuple[int, ...],
    train: int,
    address: str,
    size: int,
    dealt: int,
    state: int,  # of the files; only a part of the cache key
) -> LabelledImages:
    encoded: list[Encoded] = [(str(file), file.read_bytes) for file in files]
    # Some of the images are grey or have four channels.
    pixels = decode(encoded, len(files), size=size, channels=3, address=address, dealt=dealt)
    return LabelledImages(pixels=torch.from_numpy(pixels), labels=torch.tensor(labels), train=train, classes=CLASSES)
