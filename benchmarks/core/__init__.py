"""Core of data sets and architectures: catalogues by name, fixed splits, client splits, checks of shapes."""

from .catalogue import Catalogue
from .data.client_splits import client_splits
from .data.dealing import LabelledImages
from .data.splits import DEFAULT_SIZES, Sizes, Split, Splits, choose, content_digest, verify
from .nets.shapes import features, image_shape

__all__ = [
    "DEFAULT_SIZES",
    "Catalogue",
    "LabelledImages",
    "Sizes",
    "Split",
    "Splits",
    "choose",
    "client_splits",
    "content_digest",
    "features",
    "image_shape",
    "verify",
]
