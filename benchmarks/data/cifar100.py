"""CIFAR-100: 50,000 and 10,000 colour photographs of 32x32 pixels in 100 classes.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009; torchvision's CIFAR100, fine labels.
"""

from ..core.data.data_paths import data_folder
from ..core.data.downloads import checked
from ..core.data.sizes import DEFAULT_SIZES, Sizes
from ..core.data.splits import Splits

SIZES = Sizes(private=20_000, non_member=20_000, public=10_000)
FILES = tuple(f"cifar-100-python/{file}" for file in ("train", "test", "meta"))


def cifar100(*, seed: int = 0, sizes: Sizes = DEFAULT_SIZES) -> Splits:
    """60,000 photographs, 32x32 colour, 100 classes (downloaded, or LEAKBENCH_DATA/cifar-100-python).

    Args:
        seed: decides which examples are members; the public pool is fixed.
        sizes: of the pools, dealt from the 50,000 training images; 20,000, 20,000 and 10,000 by default.

    Raises:
        ValueError: the data are not there, or damaged.
    """
    dataset = checked("cifar100", "CIFAR100", data_folder(), FILES, classes=100)
    about = "CIFAR-100 (Krizhevsky, 2009), by torchvision"
    return dataset.deal(name="cifar100", about=about, seed=seed, sizes=sizes, defaults=SIZES)
