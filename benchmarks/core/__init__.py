"""What the data sets and the architectures share."""

from .catalogue import Catalogue
from .deck import Deck
from .partitions import partition
from .shapes import features, image_shape
from .splits import DEFAULT_SIZES, Sizes, Split, Splits, choose, content_digest, verify

__all__ = [
    "DEFAULT_SIZES",
    "Catalogue",
    "Deck",
    "Sizes",
    "Split",
    "Splits",
    "choose",
    "content_digest",
    "features",
    "image_shape",
    "partition",
    "verify",
]
