"""Colour crops of 32x32 pixels from scikit-learn's two sample photographs, for reconstruction.

`china.jpg` and `flower.jpg`, 427x640 pixels each, Flickr photographs under CC BY 2.0. The grid of crops, without
overlap, has 13 rows and 20 columns per photograph; the class is the photograph and one of its five horizontal bands.
Public crops are those of columns 0 to 7, and members and non-members are dealt from columns 9 to 19: the column between
them keeps an attacker's prior from containing a strip of the target image. Members and non-members come from the same
columns, because otherwise position could reveal membership.

Featureless crops (blurred background, empty sky) are excluded: a constant image would count as their reconstruction,
and public and target crops would be near-copies. The remaining classes are not balanced: class 0 (the sky over the
roofs) has only public crops, class 9 (the foot of the flower) only target crops.

The SHA-256 check covers the JPEG files. Decoders may differ by a grey level, so pixels are not checked; the digest of
the splits, which every record carries, covers them.
"""

import hashlib
import io
from importlib import resources

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..core import DEFAULT_SIZES, Sizes, Splits, choose, verify

FILES = {
    "china.jpg": "8378025ad2519d649d02e32bd98990db4ab572357d9f09841c2fbfbb4fefad29",
    "flower.jpg": "a77f6ec41e353afdf8bdff2ea981b2955535d8d83294f8cfa49cf4e423dd5638",
}
CROP, ROWS, COLUMNS, BANDS = 32, 13, 20, 5
PUBLIC_COLUMNS = range(8)  # column 8 is the gap
TARGET_COLUMNS = range(9, COLUMNS)
PRIVATE, NON_MEMBER = 64, 64
# Smallest standard deviation of pixels in [0, 1], averaged over colours. No crop is within 0.0007 of this threshold,
# which is far more than the rounding of a decoder.
FEATURELESS = 0.048


def photos(*, seed: int = 0, sizes: Sizes = DEFAULT_SIZES) -> Splits:
    """32x32 colour crops of two photographs, 10 classes: which photograph and band (scikit-learn, embedded).

    Args:
        seed: decides which target crops are members; the public crops are always the same.
        sizes: of the pools: up to 64 members and 64 non-members. The public pool is fixed by position.

    Returns:
        64 members, 64 non-members and 109 public crops, inputs [n, 3, 32, 32] in [0, 1]. An id is the crop's position:
        260 * photograph + 20 * row + column.

    Raises:
        ValueError: scikit-learn's copy does not have the recorded digests, or `sizes` is out of range.
    """
    dealt = []
    for pool, most in (("private", PRIVATE), ("non_member", NON_MEMBER)):
        size = getattr(sizes, pool)
        if size is not None and not 1 <= size <= most:
            raise ValueError(f"{pool} of photos must be in [1, {most}], got {size}")
        dealt.append(most if size is None else size)
    if sizes.public is not None:
        raise ValueError(f"public of photos is fixed by where a crop lies, got {sizes.public}; leave it out")
    inputs = torch.cat([crops(photograph(name)) for name in FILES])
    ids = torch.arange(len(inputs))
    row, column = ids // COLUMNS % ROWS, ids % COLUMNS
    labels = ids // (ROWS * COLUMNS) * BANDS + row * BANDS // ROWS

    kept = inputs.flatten(start_dim=2).std(dim=2).mean(dim=1) >= FEATURELESS
    public = ids[kept & torch.isin(column, torch.tensor(PUBLIC_COLUMNS))]
    target = ids[kept & torch.isin(column, torch.tensor(TARGET_COLUMNS))]
    return Splits.cut(
        inputs,
        labels,
        [*choose(target, dealt, salt=f"photos/{seed}"), public],
        name="photos",
        classes=2 * BANDS,
        in_distribution_public=True,
        about="china.jpg and flower.jpg of scikit-learn (Flickr, CC BY 2.0), cut into 32x32 crops",
    )


def photograph(name: str) -> Tensor:
    """Reads a photograph as [3, height, width] in [0, 1]."""
    content = (resources.files("sklearn.datasets.images") / name).read_bytes()
    verify(
        hashlib.sha256(content).hexdigest(),
        FILES[name],
        noun=f"scikit-learn's {name}",
        way_out="install an unmodified scikit-learn",
    )
    with Image.open(io.BytesIO(content)) as image:
        pixels = np.array(image.convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def crops(image: Tensor) -> Tensor:
    """Cuts [3, height, width] into [260, 3, 32, 32], row by row; the remainder is dropped."""
    grid = image[:, : ROWS * CROP, : COLUMNS * CROP].unfold(1, CROP, CROP).unfold(2, CROP, CROP)
    return grid.permute(1, 2, 0, 3, 4).reshape(ROWS * COLUMNS, 3, CROP, CROP)
