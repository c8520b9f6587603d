"""What the data sets and the architectures share."""

from .catalogue import Catalogue
from .shapes import features, image_shape
from .splits import Split, Splits, choose, content_digest, verify

__all__ = [
    "Catalogue",
    "Split",
    "Splits",
    "choose",
    "content_digest",
    "features",
    "image_shape",
    "verify",
]
