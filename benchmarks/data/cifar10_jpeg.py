"""CIFAR-10 with each image re-encoded as JPEG: the same labels, and slightly different pixels.

A Parquet file for each part, as on the Hugging Face Hub. Pixels differ from CIFAR-10's, so results have to be
reported under this name.

The SHA-256 check covers the JPEG images and labels. Decoders may differ by a grey level, so pixels are not checked; the
digest of the splits, which every record carries, covers them.
"""

from ..core.data.data_paths import VARIABLE, data_folder
from ..core.data.sizes import DEFAULT_SIZES, Sizes
from ..core.data.splits import Splits, verify
from .own.parquet import read

SIZES = Sizes(private=20_000, non_member=20_000, public=10_000)
FOLDER = "cifar10-jpeg"
# SHA-256 of the encoded images and labels, row by row, training part first.
SOURCE = "8800b84df341260a656987443a9366e5b718af4de74019344cfe9441013a10e8"


def cifar10_jpeg(*, seed: int = 0, sizes: Sizes = DEFAULT_SIZES) -> Splits:
    """60,000 photographs of CIFAR-10 stored as JPEG, 32x32 colour, 10 classes (LEAKBENCH_DATA/cifar10-jpeg/*.parquet).

    Args:
        seed: decides which examples are members; the public pool is fixed.
        sizes: of the pools, dealt from the 50,000 training images; 20,000, 20,000 and 10,000 by default.

    Raises:
        ValueError: the data are not there, or differ.
    """
    folder = data_folder() / FOLDER
    for part in ("train", "test"):
        if not (folder / f"{part}.parquet").is_file():
            raise ValueError(
                f"data set 'cifar10_jpeg' is not in {folder}, and is nowhere to be downloaded from; set {VARIABLE} to "
                f"the folder that holds {FOLDER}/train.parquet and {FOLDER}/test.parquet (column image of bytes and "
                "path, column label), or use 'cifar10'"
            )
    dataset = read(folder, address="cifar10_jpeg")
    verify(dataset.source, SOURCE, noun=f"the images in {folder}", way_out="name others with parquet:PATH")
    about = "CIFAR-10 (Krizhevsky, 2009), each image re-encoded as JPEG"
    return dataset.deal(name="cifar10_jpeg", about=about, seed=seed, sizes=sizes, defaults=SIZES)
