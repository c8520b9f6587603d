"""Core of data sets and architectures: catalogues by name, fixed splits, client splits, checks of shapes."""

from typing import TYPE_CHECKING

from leakbench.lazy_names import lazy_names

if TYPE_CHECKING:
    from .catalogue import Catalogue
    from .data.client_splits import ClientSplit, client_splits, clients_digest
    from .data.dealing import LabelledImages
    from .data.sizes import DEFAULT_SIZES, Sizes
    from .data.splits import Split, Splits, choose, content_digest, verify
    from .nets.shapes import features, image_shape

__all__ = [
    "DEFAULT_SIZES",
    "Catalogue",
    "ClientSplit",
    "LabelledImages",
    "Sizes",
    "Split",
    "Splits",
    "choose",
    "client_splits",
    "clients_digest",
    "content_digest",
    "features",
    "image_shape",
    "verify",
]

__getattr__, __dir__ = lazy_names(__name__)
