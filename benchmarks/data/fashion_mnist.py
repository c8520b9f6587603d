"""Fashion-MNIST: 60,000 and 10,000 grey images of clothing, 28x28 pixels.

Xiao, Rasul & Vollgraf, "Fashion-MNIST", 2017, MIT licence; torchvision's FashionMNIST. The packed files are required,
because the known MD5 sums are theirs.
"""

from ..core.data.data_paths import data_folder
from ..core.data.downloads import packed
from ..core.data.sizes import DEFAULT_SIZES, Sizes
from ..core.data.splits import Splits

SIZES = Sizes(private=20_000, non_member=20_000, public=20_000)


def fashion_mnist(*, seed: int = 0, sizes: Sizes = DEFAULT_SIZES) -> Splits:
    """70,000 articles of clothing, 28x28 grey, 10 classes (downloaded, or LEAKBENCH_DATA/FashionMNIST/raw/*.gz).

    Args:
        seed: decides which examples are members; the public pool is fixed.
        sizes: of the pools, dealt from the 60,000 training images; 20,000 each by default.

    Raises:
        ValueError: the data are not there, or damaged.
    """
    # No digest of the content is recorded here, and torchvision reads unpacked files unchecked.
    dataset = packed("fashion_mnist", "FashionMNIST", data_folder(), unpacked_too=False)
    about = "Fashion-MNIST (Zalando, MIT), by torchvision"
    return dataset.deal(name="fashion_mnist", about=about, seed=seed, sizes=sizes, defaults=SIZES)
