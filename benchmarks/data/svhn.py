"""SVHN: 73,257 and 26,032 colour images of house numbers, 32x32 pixels, with the digit in the middle.

Netzer et al., "Reading Digits in Natural Images with Unsupervised Feature Learning", 2011, for non-commercial use;
torchvision's SVHN. Its extra part is not used.
"""

from ..core.data.data_paths import data_folder
from ..core.data.downloads import checked
from ..core.data.sizes import DEFAULT_SIZES, Sizes
from ..core.data.splits import Splits

SIZES = Sizes(private=25_000, non_member=25_000, public=20_000)
FILES = ("svhn/train_32x32.mat", "svhn/test_32x32.mat")


def svhn(*, seed: int = 0, sizes: Sizes = DEFAULT_SIZES) -> Splits:
    """99,289 digits of house numbers, 32x32 colour, 10 classes (downloaded, or LEAKBENCH_DATA/svhn).

    Args:
        seed: decides which examples are members; the public pool is fixed.
        sizes: of the pools, dealt from the 73,257 training images; 25,000, 25,000 and 20,000 by default.

    Raises:
        ValueError: the data are not there, or damaged.
    """
    # A subfolder, because torchvision puts the files of SVHN, unlike those of CIFAR, directly into its root.
    dataset = checked("svhn", "SVHN", data_folder(), FILES, below="svhn", classes=10)
    about = "SVHN, cropped digits (Netzer et al., 2011, non-commercial use), by torchvision"
    return dataset.deal(name="svhn", about=about, seed=seed, sizes=sizes, defaults=SIZES)
