"""Handwritten digits: 1,797 real grey images of 8x8 pixels, embedded in scikit-learn.

Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (its test part),
CC BY 4.0. All three pools are dealt from the same set, so they are exchangeable.
"""

import torch
from sklearn.datasets import load_digits

from ..core import DEFAULT_SIZES, Sizes, Splits, choose, content_digest, verify
from ..core.data.dealing import pool_sizes

SIZES = Sizes(private=700, non_member=700, public=397)
# SHA-256 of pixels / 16 as float32 [1797, 1, 8, 8] and labels as int64 [1797]; exact on every platform.
CONTENT = "0f9d51972f162b3745a13365e4e663511a664c89bfa435327917c6ab54e31576"


def digits(*, seed: int = 0, sizes: Sizes = DEFAULT_SIZES) -> Splits:
    """1,797 handwritten digits, 8x8 grey, 10 classes (scikit-learn, embedded).

    Args:
        seed: decides which examples are members, non-members or public.
        sizes: of the pools; 700 members, 700 non-members and 397 public examples by default.

    Returns:
        The pools; inputs [n, 1, 8, 8] in [0, 1].

    Raises:
        ValueError: scikit-learn's copy does not have the recorded digest, or has too few examples.
    """
    pixels, classes = load_digits(return_X_y=True)
    # Pixels count the ink in blocks of 4x4, 0 to 16; sixteenths are exact in floats.
    inputs = torch.from_numpy(pixels / 16).float().reshape(-1, 1, 8, 8)
    labels = torch.from_numpy(classes).to(torch.int64)
    verify(
        content_digest(inputs, labels),
        CONTENT,
        noun="scikit-learn's digits",
        way_out="install an unmodified scikit-learn",
    )
    counts = pool_sizes(sizes, SIZES, available=len(labels), name="digits", tested=False)
    dealt = [counts[pool] for pool in ("private", "non_member", "public")]
    return Splits.cut(
        inputs,
        labels,
        # Trap: the seed decides the public pool too, unlike in `LabelledImages.deal`; a change would alter digests.
        choose(torch.arange(len(labels)), dealt, salt=f"digits/{seed}"),
        name="digits",
        classes=10,
        in_distribution_public=True,
        about="UCI Optical Recognition of Handwritten Digits (CC BY 4.0), as embedded in scikit-learn",
    )
