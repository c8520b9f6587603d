"""Locations of data: the folder of data sets, users' own files, and the syntax of a data set's address."""

import os
import re
from pathlib import Path
from typing import NamedTuple

VARIABLE = "LEAKBENCH_DATA"
TRAIN, TEST = "train", ("test", "val", "validation")
"""Names of the training part and the test part; of several test parts the first is read."""
# In pixels; 10,000 colour images of this side are 31 GB of bytes.
LARGEST_SIDE = 1024


class Address(NamedTuple):
    """Parsed name of a data set, as `digits`, `imagenet?size=64` or `folder:PATH?size=32&channels=3`."""

    kind: str
    path: str | None
    options: dict[str, int]


def parse(name: str) -> Address:
    """Parses the address of a data set.

    Raises:
        ValueError: malformed options, or sizes that no image has.
    """
    # The last question mark, because a path may contain others.
    whole, mark, tail = name.rpartition("?")
    if not mark:
        whole, tail = name, ""
    options: dict[str, int] = {}
    for option in tail.split("&") if mark else ():
        matched = re.fullmatch(r"(\w+)=(\d+)", option)
        if not matched:
            raise ValueError(f"options of data set {name!r} must be written as ?size=32&channels=3, got {option!r}")
        options[matched[1]] = int(matched[2])
    if not 1 <= options.get("size", 1) <= LARGEST_SIDE:
        raise ValueError(f"size of data set {name!r} must be in [1, {LARGEST_SIDE}] pixels, got {options['size']}")
    if options.get("channels", 1) not in (1, 3):
        raise ValueError(f"channels of data set {name!r} must be 1 (grey) or 3 (colour), got {options['channels']}")
    kind, colon, path = whole.partition(":")
    return Address(kind, path if colon else None, options)


def data_folder() -> Path:
    """Returns the folder that LEAKBENCH_DATA names; otherwise `leakbench` in the user's cache.

    Raises:
        ValueError: the variable does not name a folder.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        # `or`: an empty variable counts as unset, by the XDG specification.
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "leakbench"
    folder = Path(named).expanduser().absolute()
    if not folder.is_dir():
        raise ValueError(f"{VARIABLE} must name a folder that is there, got {folder}")
    return folder


def existing(path: str, *, noun: str, file: bool | None = None) -> Path:
    """Returns the absolute path of an existing file or folder; `path` may start with ~.

    Args:
        path: as the user wrote it.
        noun: kind of data set, for errors.
        file: True requires a file, False a folder; None accepts either.

    Raises:
        ValueError: nothing is there, or it is of the other type.
    """
    located = Path(path).expanduser().absolute()
    if not located.exists():
        raise ValueError(f"path of {noun} must be there, and nothing is at {located}")
    if not ((located.is_file() and file is not False) or (located.is_dir() and file is not True)):
        expected = {True: "file", False: "folder", None: "file or a folder"}[file]
        raise ValueError(f"path of {noun} must be a {expected}, got {located}")
    return located


def refuse_irregular(file: Path, noun: str) -> None:
    """Refuses a pipe, a device, a socket or a folder: to open a pipe waits for a writer, and a device may have no end.

    Args:
        file: path; symbolic links are followed.
        noun: of the file, as the subject of the error.

    Raises:
        ValueError: the path is no regular file, or nothing is there.
    """
    if not file.is_file():
        raise ValueError(f"{noun} must be a regular file, got {file}, which is none; remove it, or put a file there")


def refuse_pointer(file: Path) -> None:
    """Refuses a file that Git-LFS has not fetched.

    Raises:
        ValueError: the file is a Git-LFS pointer.
    """
    with file.open("rb") as opened:
        if is_pointer(opened.read(64)):
            raise ValueError(
                f"{file} must be the data themselves, got a Git-LFS pointer to them; fetch them with 'git lfs pull'"
            )


def stamp(files: list[Path]) -> int:
    """Cache key of the files' state, which changes when a file does.

    It is computed from size and modification time, so that a cached data set is used without reading its files again.
    """
    # Trap: hashes of strings differ between processes, so this is a key for caches in memory alone.
    return hash(tuple((str(file), (state := file.stat()).st_size, state.st_mtime_ns) for file in files))


def is_pointer(content: bytes) -> bool:
    """True if the content is a Git-LFS pointer instead of the file itself."""
    return content.startswith(b"version https://git-lfs")
