"""Data sets that torchvision reads: on small files laid out as the real ones, and on the real ones where they are."""

import gzip
import hashlib
import pickle
import re
import shutil
import socket
import struct
import subprocess
import sys
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image

from leakbench.benchmarks import data
from leakbench.benchmarks.core import Sizes, content_digest
from leakbench.benchmarks.core.data import images
from leakbench.benchmarks.core.data.downloads import aside, packed
from leakbench.benchmarks.data import cifar10_jpeg as jpeg_module
from leakbench.benchmarks.data import imagenet as imagenet_module
from leakbench.benchmarks.data import mnist as mnist_module

from ...parameters import subtests

TRAIN, TEST = 60, 20
SMALL = Sizes(private=20, non_member=20, public=20)


def md5(file: Path) -> str:
    return hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()


@pytest.fixture
def torchvision():
    return pytest.importorskip("torchvision", reason="torchvision is of leakbench[images]")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """No test asks the network; what does says so as a machine without one would."""

    def fail(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", fail)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("LEAKBENCH_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def serve(monkeypatch, store: Path, *, cut_off: bool = False) -> None:
    """A network on which the files of `store` are to be had, or their first half."""

    def retrieve(url, filename):
        print("noise on standard output")
        content = (store / url.rpartition("/")[2]).read_bytes()
        Path(filename).write_bytes(content[: len(content) // 2] if cut_off else content)

    monkeypatch.setattr("torchvision.datasets.utils._get_redirect_url", lambda url, **_: url)
    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", retrieve)


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def small_mnist(root: Path, monkeypatch, kind: str = "MNIST") -> Path:
    """Packed files of 60 and 20 images, and torchvision told that theirs are the right MD5 sums."""
    raw = root / kind / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", TRAIN), ("t10k", TEST)):
        header = struct.pack(">iiii", 0x803, count, 28, 28)
        (raw / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + pixels(count, 28, 28).tobytes()))
        labels = struct.pack(">ii", 0x801, count) + bytes(i % 10 for i in range(count))
        (raw / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    datasets = pytest.importorskip("torchvision.datasets")
    names = [name for name, _ in datasets.MNIST.resources]
    monkeypatch.setattr(getattr(datasets, kind), "resources", [(name, md5(raw / name)) for name in names])
    if kind == "MNIST":
        everything = np.concatenate([pixels(TRAIN, 28, 28), pixels(TEST, 28, 28)])[:, None]
        labels = np.concatenate([np.arange(count) % 10 for count in (TRAIN, TEST)])
        monkeypatch.setattr(
            mnist_module, "CONTENT", content_digest(torch.from_numpy(everything), torch.from_numpy(labels))
        )
    return raw


def is_the_small_one(splits: data.Splits, *, test_pixels: np.ndarray) -> None:
    """Pools of 20, and the test set as it was written."""
    assert [len(p) for p in (splits.private, splits.non_member, splits.public)] == [20, 20, 20]
    assert splits.test is not None
    assert splits.test.ids.tolist() == list(range(TRAIN, TRAIN + TEST))
    assert torch.equal(splits.test.inputs, torch.from_numpy(test_pixels) / 255)
    assert torch.equal(splits.test.labels, torch.arange(TEST) % 10)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_packed_files_are_read_and_nothing_is_written_beside_them(folder, monkeypatch, name):
    raw = small_mnist(folder, monkeypatch, {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}[name])
    before = sorted(raw.iterdir())
    splits = data.load(name, sizes=SMALL)
    assert splits.name == name
    is_the_small_one(splits, test_pixels=pixels(TEST, 28, 28)[:, None])
    assert sorted(raw.iterdir()) == before


def test_a_torn_unpacked_file_beside_whole_packed_ones_is_never_looked_at(folder, monkeypatch):
    raw = small_mnist(folder, monkeypatch)
    (raw / "train-images-idx3-ubyte").write_bytes(b"torn")
    is_the_small_one(data.load("mnist", sizes=SMALL), test_pixels=pixels(TEST, 28, 28)[:, None])


def unpack(raw: Path) -> None:
    for file in raw.glob("*.gz"):
        (raw / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()


def test_mnist_may_be_unpacked_because_its_content_is_known(folder, monkeypatch):
    raw = small_mnist(folder, monkeypatch)
    unpack(raw)
    is_the_small_one(data.load("mnist", sizes=SMALL), test_pixels=pixels(TEST, 28, 28)[:, None])
    content = bytearray((raw / "train-images-idx3-ubyte").read_bytes())
    content[100] ^= 1
    (raw / "train-images-idx3-ubyte").write_bytes(content)
    packed.cache_clear()
    with pytest.raises(
        ValueError, match=r"SHA-256 of MNIST must be .*; delete .*MNIST, so that it is downloaded again"
    ):
        data.load("mnist", sizes=SMALL)
    (raw / "train-images-idx3-ubyte").write_bytes(content[:1000])
    packed.cache_clear()
    with pytest.raises(ValueError, match="'mnist' is damaged or incomplete in"):
        data.load("mnist", sizes=SMALL)


def test_fashion_mnist_may_not_because_only_its_packed_files_can_be_checked(folder, monkeypatch):
    unpack(small_mnist(folder, monkeypatch, "FashionMNIST"))
    with pytest.raises(ValueError, match=r"the folder that holds FashionMNIST/raw/train-images-idx3-ubyte\.gz, "):
        data.load("fashion_mnist", sizes=SMALL)


def test_a_download_is_kept_whole_and_leaves_standard_output_clean(folder, tmp_path, monkeypatch, capsys):
    store = small_mnist(tmp_path / "store", monkeypatch)
    serve(monkeypatch, store)
    splits = data.load("mnist", sizes=SMALL)
    is_the_small_one(splits, test_pixels=pixels(TEST, 28, 28)[:, None])
    raw = folder / "MNIST" / "raw"
    assert sorted(f.name for f in raw.iterdir()) == sorted(f.name for f in store.iterdir())
    assert all(md5(raw / file.name) == md5(file) for file in store.iterdir())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "noise on standard output" in captured.err


def test_a_download_that_is_cut_off_leaves_nothing(folder, tmp_path, monkeypatch):
    store = small_mnist(tmp_path / "store", monkeypatch)
    serve(monkeypatch, store, cut_off=True)
    with pytest.raises(ValueError, match=r"'mnist' is not in .*, and could not be downloaded"):
        data.load("mnist", sizes=SMALL)
    assert list(folder.rglob("*-ubyte*")) == []
    serve(monkeypatch, store)
    is_the_small_one(data.load("mnist", sizes=SMALL), test_pixels=pixels(TEST, 28, 28)[:, None])


def test_a_damaged_packed_file_is_downloaded_again(folder, tmp_path, monkeypatch):
    store = small_mnist(tmp_path / "store", monkeypatch)
    shutil.copytree(store, folder / "MNIST" / "raw")
    damaged = folder / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz"
    damaged.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"'mnist' is damaged or incomplete in .*no network"):
        data.load("mnist", sizes=SMALL)
    serve(monkeypatch, store)
    is_the_small_one(data.load("mnist", sizes=SMALL), test_pixels=pixels(TEST, 28, 28)[:, None])
    assert md5(damaged) == md5(store / damaged.name)


def small_cifar(root: Path, monkeypatch, kind: str) -> np.ndarray:
    """Pickles of 60 and 20 images; returns the pixels of the test part."""
    cifar = getattr(pytest.importorskip("torchvision.datasets"), kind)
    place = root / cifar.base_folder
    place.mkdir(parents=True)
    label = "labels" if kind == "CIFAR10" else "fine_labels"
    each = TRAIN // len(cifar.train_list)
    for i, (file, _) in enumerate([*cifar.train_list, *cifar.test_list]):
        count = TEST if i == len(cifar.train_list) else each
        shift = np.uint8(i % len(cifar.train_list))  # else all files would hold the same images
        content = {"data": pixels(count, 3 * 32 * 32) + shift, label: [n % 10 for n in range(count)]}
        (place / file).write_bytes(pickle.dumps(content))
    meta = dict(cifar.meta)
    (place / meta["filename"]).write_bytes(pickle.dumps({meta["key"]: [str(i) for i in range(10)]}))
    for attribute in ("train_list", "test_list"):
        files = [[file, md5(place / file)] for file, _ in getattr(cifar, attribute)]
        monkeypatch.setattr(cifar, attribute, files)
    monkeypatch.setattr(cifar, "meta", meta | {"md5": md5(place / meta["filename"])})
    return pixels(TEST, 3 * 32 * 32).reshape(TEST, 3, 32, 32)


@pytest.mark.parametrize(("name", "kind", "classes"), [("cifar10", "CIFAR10", 10), ("cifar100", "CIFAR100", 100)])
def test_cifar_is_read_with_its_channels_first(folder, monkeypatch, name, kind, classes):
    written = small_cifar(folder, monkeypatch, kind)
    splits = data.load(name, sizes=SMALL)
    is_the_small_one(splits, test_pixels=written)
    assert (splits.name, splits.classes, splits.input_shape) == (name, classes, (3, 32, 32))


def test_the_md5_sums_of_cifar_are_checked_though_the_files_are_there(folder, monkeypatch):
    small_cifar(folder, monkeypatch, "CIFAR10")
    file = folder / "cifar-10-batches-py" / "data_batch_3"
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=r"'cifar10' is damaged or incomplete in .*no network"):
        data.load("cifar10", sizes=SMALL)


def test_svhn_is_read_with_zero_as_class_zero(folder, monkeypatch):
    svhn = pytest.importorskip("torchvision.datasets").SVHN
    (folder / "svhn").mkdir()
    files = {}
    for part, count in (("train", TRAIN), ("test", TEST)):
        file = folder / "svhn" / f"{part}_32x32.mat"
        labels = np.where(np.arange(count) % 10 == 0, 10, np.arange(count) % 10)[:, None]
        scipy.io.savemat(file, {"X": pixels(count, 3, 32, 32).transpose(2, 3, 1, 0), "y": labels})
        files[part] = [svhn.split_list[part][0], file.name, md5(file)]
    monkeypatch.setattr(svhn, "split_list", files)
    is_the_small_one(data.load("svhn", sizes=SMALL), test_pixels=pixels(TEST, 3, 32, 32))


@subtests(
    "name, files",
    [
        ("mnist", "MNIST/raw/train-images-idx3-ubyte.gz, MNIST/raw/train-labels-idx1-ubyte.gz, MNIST/raw/t10k-images"),
        ("fashion_mnist", "FashionMNIST/raw/train-images-idx3-ubyte.gz"),
        ("cifar10", "cifar-10-batches-py/data_batch_1, cifar-10-batches-py/data_batch_2"),
        ("cifar100", "cifar-100-python/train, cifar-100-python/test, cifar-100-python/meta"),
        ("svhn", "svhn/train_32x32.mat, svhn/test_32x32.mat"),
    ],
)
def test_without_network_and_data_folder_it_says_what_to_do(tmp_path, monkeypatch, torchvision, name, files):
    monkeypatch.delenv("LEAKBENCH_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="no network") as caught:
        data.load(name)
    sentence = str(caught.value)
    assert sentence.startswith(f"data set '{name}' is not in {tmp_path / 'cache' / 'leakbench'}, and could not be down")
    assert f"connect to the network once, or set LEAKBENCH_DATA to the folder that holds {files}" in sentence
    assert "\n" not in sentence


def test_without_a_cache_of_its_own_the_cache_is_in_the_home_folder(tmp_path, monkeypatch, torchvision):
    monkeypatch.delenv("LEAKBENCH_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=re.escape(f"is not in {tmp_path / '.cache' / 'leakbench'}, and could")):
        data.load("cifar10")


def test_a_data_folder_that_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("LEAKBENCH_DATA", str(tmp_path / "typo"))
    with pytest.raises(
        ValueError, match=re.escape(f"LEAKBENCH_DATA must name a folder that is there, got {tmp_path}/typo")
    ):
        data.load("mnist")


def test_without_torchvision_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    for name in ("mnist", "svhn"):
        sentence = f"data set '{name}' needs torchvision, which is not installed: pip install 'leakbench[images]'"
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            data.load(name)


def test_a_silent_server_is_given_up_and_other_programs_keep_their_patience():
    before = socket.getdefaulttimeout()
    with aside():
        assert socket.getdefaulttimeout() == 30
    assert socket.getdefaulttimeout() == before


def small_imagenet(root: Path, monkeypatch) -> None:
    """Three classes of 20 images in train/ and 4 in val/, of all sizes and modes, and torchvision's list of classes."""
    monkeypatch.setattr(imagenet_module, "EXAMPLES", {"train": 60, "val": 12})
    monkeypatch.setattr(imagenet_module, "CLASSES", 3)
    names = [f"n0{i}" for i in range(3)]
    for part, count in (("train", 20), ("val", 4)):
        for label, name in enumerate(names):
            place = root / "imagenet" / part / name
            place.mkdir(parents=True)
            for i in range(count):
                shade = 80 * label + 2 * i  # no two are equal once they are cut
                image = Image.new("RGB", (10 + i, 12), (shade,) * 3).convert(["RGB", "L", "CMYK"][i % 3])
                image.save(place / f"{i:02}.JPEG", "JPEG")
    torch.save(({name: (name,) for name in names}, names), root / "imagenet" / "meta.bin")


def test_imagenet_is_cut_to_colour_squares(folder, monkeypatch, torchvision):
    small_imagenet(folder, monkeypatch)
    splits = data.load("imagenet?size=8", sizes=SMALL)
    assert splits.input_shape == (3, 8, 8)
    assert splits.test is not None
    assert splits.test.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    middle = splits.test.inputs.flatten(1).mean(dim=1)
    torch.testing.assert_close(middle, splits.test.labels * 80 / 255, rtol=0, atol=0.03)


def test_imagenet_that_was_unpacked_in_part_is_refused(folder, monkeypatch, torchvision):
    small_imagenet(folder, monkeypatch)
    (folder / "imagenet" / "train" / "n01" / "07.JPEG").unlink()
    with pytest.raises(ValueError, match="train must hold 60 images, got 59: its unpacking was cut off; delete it"):
        data.load("imagenet?size=8", sizes=SMALL)


def test_imagenet_that_is_not_there_is_to_be_fetched_by_hand(folder, torchvision):
    with pytest.raises(ValueError, match=r"image-net\.org: set LEAKBENCH_DATA .* imagenet/ILSVRC2012_img_train\.tar"):
        data.load("imagenet?size=1")


def test_imagenet_is_refused_before_anything_is_read_where_it_does_not_fit(folder, monkeypatch):
    monkeypatch.setattr(images, "memory_bytes", lambda: 16 * 10**9)
    with pytest.raises(
        ValueError, match=r"^imagenet\?size=224 must fit into memory, got 1331167 images of 150528 values"
    ):
        data.load("imagenet")
    with pytest.raises(ValueError, match=r"take 28\.6 GB of 16\.0 GB; choose smaller images, for instance imagenet"):
        data.load("imagenet?size=64")


def test_cifar10_jpeg_that_is_not_there_is_refused_with_its_place(folder):
    with pytest.raises(ValueError, match=r"holds cifar10-jpeg/train\.parquet and cifar10-jpeg/test\.parquet"):
        data.load("cifar10_jpeg")


@pytest.mark.long
def test_the_real_mnist_is_the_published_one(data_dir, torchvision):
    if not (data_dir / "MNIST").is_dir():
        pytest.skip(f"no MNIST in {data_dir}")
    splits = data.load("mnist")
    assert splits.test is not None
    assert [len(p) for p in (splits.private, splits.non_member, splits.public, splits.test)] == [20_000] * 3 + [10_000]
    assert splits.test.labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert splits.private.inputs.mean().item() == pytest.approx(0.1307, abs=0.002)
    members, others = (torch.bincount(p.labels, minlength=10) for p in (splits.private, splits.non_member))
    assert (members - others).abs().max() < 5 * (4000 * 0.9) ** 0.5  # as many of each class, up to chance
    again = data.load("mnist", seed=1)
    assert torch.equal(again.public.ids, splits.public.ids)
    assert not torch.equal(again.private.ids, splits.private.ids)


@pytest.mark.slow
def test_the_real_cifar10_jpeg_may_all_be_trained_on(data_dir, monkeypatch):
    if not (data_dir / jpeg_module.FOLDER).is_dir():
        pytest.skip(f"no {jpeg_module.FOLDER} in {data_dir}")
    splits = data.load("cifar10_jpeg", sizes=Sizes(private=50_000, non_member=0, public=0))
    assert splits.test is not None
    assert splits.test is splits.non_member
    assert torch.bincount(splits.private.labels).tolist() == [5000] * 10
    assert torch.bincount(splits.test.labels).tolist() == [1000] * 10
    assert splits.private.inputs.mean().item() == pytest.approx(0.473, abs=0.005)
    monkeypatch.setattr(jpeg_module, "SOURCE", "0" * 64)
    with pytest.raises(ValueError, match=r"SHA-256 of the images in .* must be 0000000000000000"):
        data.load("cifar10_jpeg")


@pytest.mark.slow
def test_the_real_cifar10_jpeg_is_loaded_in_ten_seconds_of_the_processor(data_dir):
    """In a process of its own, where shapes are not checked at each of 60,000 calls."""
    if not (data_dir / jpeg_module.FOLDER).is_dir():
        pytest.skip(f"no {jpeg_module.FOLDER} in {data_dir}")
    program = "import time\nfrom benchmarks import data\nstart = time.process_time()\n"
    program += "data.load('cifar10_jpeg')\nprint(time.process_time() - start)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 10
