"""Data sets that torchvision reads from the data folder, or downloads into it.

torchvision checks the MD5 sums of CIFAR and SVHN whenever it reads them. For MNIST and similar sets it has MD5 sums of
the packed files only and reads unpacked files unchecked, so the packed files are checked here and unpacked into a
temporary folder. An interrupted download leaves no file that would be taken for the data.
"""

import contextlib
import http.client
import os
import shutil
import socket
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..extras import optional
from .data_paths import VARIABLE
from .dealing import LabelledImages
from .images import reason

PATIENCE = 30
"""Timeout of a download, seconds without an answer."""
# Errors of network, disk and truncated archives; RuntimeError is torchvision's own.
FAILURES = (OSError, RuntimeError, http.client.HTTPException, tarfile.TarError, EOFError, zlib.error)

Parts = TypeVar("Parts")


def torchvision(name: str) -> Any:
    """Imports `torchvision.datasets`.

    Args:
        name: of the data set that needs it.

    Raises:
        ValueError: the extra `images` is missing; the message names it.
    """
    try:
        return optional("torchvision.datasets", needed_by=f"data set {name!r}")
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error


@lru_cache(maxsize=2)
def checked(
    name: str, dataset: str, folder: Path, files: tuple[str, ...], *, below: str = "", classes: int
) -> LabelledImages:
    """Reads a data set whose files torchvision checks itself at every read: CIFAR, SVHN.

    Args:
        name: of the data set.
        dataset: its name in torchvision.
        folder: data folder.
        files: its files in that folder, for the error.
        below: torchvision's root, relative to the data folder.
        classes: number of classes.

    Raises:
        ValueError: it is neither there nor can be downloaded.
    """
    kind = getattr(torchvision(name), dataset)
    # SVHN takes a part by name, CIFAR by a flag.
    by_name = hasattr(kind, "split_list")
    part_settings = [{"split": part} if by_name else {"train": part == "train"} for part in ("train", "test")]

    def parts(download: bool) -> list[Any]:
        return [kind(folder / below, download=download, **part) for part in part_settings]

    read = obtain(parts, name=name, folder=folder, files=files)
    # SVHN has its channels first; CIFAR does not.
    images = [torch.from_numpy(part.data if by_name else part.data.transpose(0, 3, 1, 2)) for part in read]
    labels = [torch.as_tensor(part.labels if by_name else part.targets, dtype=torch.int64) for part in read]
    return LabelledImages(
        pixels=torch.cat(images).contiguous(), labels=torch.cat(labels), train=len(labels[0]), classes=classes
    )


@lru_cache(maxsize=2)
def packed(name: str, dataset: str, folder: Path, *, unpacked_too: bool) -> LabelledImages:
    """Reads a data set of four packed files whose MD5 sums torchvision has: MNIST and similar sets.

    Args:
        name: of the data set.
        dataset: its name in torchvision.
        folder: data folder, which is torchvision's root.
        unpacked_too: whether unpacked files suffice without the packed ones, because the caller checks the content.

    Raises:
        ValueError: it is neither there nor can be downloaded.
    """
    datasets = torchvision(name)
    kind = getattr(datasets, dataset)
    raw = folder / dataset / "raw"
    sums: dict[str, str] = dict(kind.resources)
    whole = [file for file, md5 in sums.items() if datasets.utils.check_integrity(raw / file, md5)]
    missing = [file for file in sums if file not in whole]
    with tempfile.TemporaryDirectory() as temporary:
        staging = Path(temporary, dataset, "raw")
        staging.mkdir(parents=True)
        for file in whole:
            shutil.copyfile(raw / file, staging / file)

        def parts(download: bool) -> list[Any]:
            if download or not missing:
                # Unpacks the files that are there, and downloads the rest.
                with aside():
                    # The first download brings both parts, because torchvision fetches all four files at once.
                    read = [kind(temporary, train=train, download=train) for train in (True, False)]
                for file in missing:
                    _keep(staging / file, raw / file)
                return read
            if unpacked_too and all((raw / file.removesuffix(".gz")).is_file() for file in sums):
                return [kind(folder, train=train, download=False) for train in (True, False)]
            raise FileNotFoundError(raw / missing[0])

        read = obtain(parts, name=name, folder=folder, files=tuple(f"{dataset}/raw/{file}" for file in sums))
    labels = [part.targets.to(torch.int64) for part in read]
    pixels = torch.cat([part.data for part in read])[:, None].contiguous()
    return LabelledImages(pixels=pixels, labels=torch.cat(labels), train=len(labels[0]), classes=len(kind.classes))


def obtain(parts: Callable[[bool], Parts], *, name: str, folder: Path, files: tuple[str, ...]) -> Parts:
    """Returns the result of `parts(False)`, or of `parts(True)`, which downloads, if reading fails.

    Args:
        parts: reads the data set; its argument says whether to download.
        name: of the data set.
        folder: the data folder.
        files: its files in that folder.

    Raises:
        ValueError: it is absent or damaged, and cannot be downloaded either.
    """
    # torchvision raises many kinds of errors when it reads incomplete files.
    with contextlib.suppress(*FAILURES, ValueError, AssertionError):
        return parts(False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with aside():
            return parts(True)
    except FAILURES as error:
        # Unpacked files alone count as incomplete data, not as absent: without the packed files they cannot be checked.
        present = any((folder / name).exists() for file in files for name in (file, file.removesuffix(".gz")))
        state = "damaged or incomplete" if present else "not"
        raise ValueError(
            f"data set {name!r} is {state} in {folder}, and could not be downloaded ({reason(error)}); connect to the "
            f"network once, or set {VARIABLE} to the folder that holds {', '.join(files)}"
        ) from error


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Redirects torchvision's output to standard error, and sets `PATIENCE` as the timeout of sockets."""
    # torchvision opens addresses without a timeout, so only the default of all sockets can set it.
    patience = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        socket.setdefaulttimeout(patience)


def _keep(downloaded: Path, kept: Path) -> None:
    """Copies a file atomically."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    beside = kept.with_name(f".{kept.name}.{os.getpid()}")
    shutil.copyfile(downloaded, beside)
    beside.replace(kept)
