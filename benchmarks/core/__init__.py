"""What the data sets and the architectures share."""

from .catalogue import Catalogue
from .data.client_splits import partition
from .data.dealing import Deck
from .data.splits import DEFAULT_SIZES, Sizes, Split, Splits, choose, content_digest, verify
from .nets.shapes import features, image_shape

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
