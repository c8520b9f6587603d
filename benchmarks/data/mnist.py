"""MNIST: 60,000 and 10,000 grey images of handwritten digits, 28x28 pixels.

LeCun, Cortes & Burges, "The MNIST database of handwritten digits", 1998, CC BY-SA 3.0; torchvision's MNIST.
"""

from ..core.data.data_paths import data_folder
from ..core.data.downloads import packed
from ..core.data.sizes import DEFAULT_SIZES, Sizes
from ..core.data.splits import Splits, verify

SIZES = Sizes(private=20_000, non_member=20_000, public=20_000)
# SHA-256 of pixels as bytes [70000, 1, 28, 28] and labels as int64 [70000], training part first.
CONTENT = "0754f6e850620544ee2287122ae29bb019d23aef8375ca0165344c2a6c537fc8"


def mnist(*, seed: int = 0, sizes: Sizes = DEFAULT_SIZES) -> Splits:
    """70,000 handwritten digits, 28x28 grey, 10 classes (MNIST; downloaded, or LEAKBENCH_DATA/MNIST/raw).

    Args:
        seed: decides which examples are members; the public pool is fixed.
        sizes: of the pools, dealt from the 60,000 training images; 20,000 each by default.

    Raises:
        ValueError: the data are not there, or differ.
    """
    folder = data_folder()
    dataset = packed("mnist", "MNIST", folder, unpacked_too=True)
    verify(dataset.digest, CONTENT, noun="MNIST", way_out=f"delete {folder / 'MNIST'}, so that it is downloaded again")
    about = "MNIST (LeCun, Cortes & Burges, CC BY-SA 3.0), by torchvision"
    return dataset.deal(name="mnist", about=about, seed=seed, sizes=sizes, defaults=SIZES)
