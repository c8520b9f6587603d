"""Decoding of images into a uint8 array; images whose size or mode differs from the first are refused.

Decoders are Pillow's. EXIF orientation is ignored, as in torchvision: images stored sideways stay sideways.
"""

import io
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from .data_paths import is_pointer

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF")
"""Accepted formats; others of Pillow's, such as PostScript, run external programs."""

MODES = ("L", "RGB")
# Below this many pixels, decoding is faster than switching threads.
WORTH_A_THREAD = 128 * 128
CHUNK = 256

Encoded = tuple[str, Callable[[], bytes]]
"""(name of an image in errors, function that reads its bytes)."""


def decode(
    images: Iterable[Encoded],
    count: int,
    *,
    size: int | None,
    channels: int | None,
    address: str,
    dealt: int | None = None,
) -> UInt8[np.ndarray, "images channels height width"]:
    """Decodes all images into bytes.

    Args:
        images: encoded images, read one at a time so that they are never in memory together.
        count: number of images.
        size: side of the square that is kept, in pixels: the shorter side is resized to it, the centre cropped. None:
            as stored, which requires a common size.
        channels: 1 (grey) or 3 (colour) to convert to; None: as stored, which requires a common mode.
        address: of the data set, for errors.
        dealt: number of images copied into pools; None: all.

    Raises:
        ValueError: an image cannot be read or differs from the first, or all together would not fit into memory.
    """
    remaining = iter(images)
    first = next(remaining, None)
    if first is None:
        raise ValueError(f"{address} must hold images, got none")
    name, read = first
    # The first image decides the shape of all, so it is decoded before memory is allocated.
    start = _open(name, read, size, channels, address)
    refuse_too_large(count, count if dealt is None else dealt, start.size, address=address)
    out = np.empty((count, *start.shape), dtype=np.uint8)
    out[0] = start

    def fill(begin: int, chunk: list[Encoded]) -> None:
        for i, (label, source) in enumerate(chunk, begin):
            image = _open(label, source, size, channels, address)
            if image.shape != start.shape:
                raise ValueError(_unlike(label, image.shape, name, start.shape, address))
            out[i] = image

    # Threads, because Pillow's decoders release the interpreter's lock.
    workers = (os.cpu_count() or 1) if start[0].size >= WORTH_A_THREAD or size is not None else 1
    with ThreadPoolExecutor(workers) as pool:
        # In rounds, so that only a few chunks wait; errors come in order, so the first bad image is named.
        for chunks in _batched(enumerate(_batched(remaining, CHUNK)), 4 * workers):
            pending = [pool.submit(fill, 1 + i * CHUNK, chunk) for i, chunk in chunks]
            try:
                for task in pending:
                    task.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return out


def refuse_too_large(images: int, dealt: int, values: int, *, address: str, resizable: bool = True) -> None:
    """Refuses data that would not fit into memory, before they are all decoded.

    Args:
        images: number of images decoded, at a byte per value.
        dealt: number of images copied into pools, at five bytes per value at the peak.
        values: per image: channels x height x width.
        address: of the data set.
        resizable: whether the data set has an option `size`.

    Raises:
        ValueError: the data exceed the memory.
    """
    # A byte per value of all, and for dealt images a copy in bytes and another in float32: 1 + 4.
    way_out = (
        f"smaller images, for instance {with_option(address, 'size=32')}" if resizable else "fewer or smaller images"
    )
    refuse_beyond_memory((images + 5 * dealt) * values, f"{images} images of {values} values", way_out, address=address)


def refuse_beyond_memory(needed: int, content: str, way_out: str, *, address: str) -> None:
    """Refuses data that need more bytes than there are.

    Args:
        needed: bytes.
        content: of the data set, in words.
        way_out: what to choose instead.
        address: of the data set.

    Raises:
        ValueError: the data exceed the memory.
    """
    available = memory_bytes()
    if needed > available:
        raise ValueError(
            f"{address} must fit into memory, got {content}, which take {needed / 1e9:.1f} GB of "
            f"{available / 1e9:.1f} GB; choose {way_out}"
        )


def memory_bytes() -> int:
    """Returns the memory of this machine, or of the container if that is less."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        physical = 16 * 2**30  # a common size, for systems that do not report it
    try:
        # Limit of a control group, version 2; without a limit it is `max`, which is no number.
        return min(physical, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    except (OSError, ValueError):
        return physical


def _open(
    name: str, read: Callable[[], bytes], size: int | None, channels: int | None, address: str
) -> UInt8[np.ndarray, "channels height width"]:
    encoded = read()
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as opened:
            # Image.open reads the header alone; damage shows when pixels are decoded.
            opened.load()
            mode, image = opened.mode, opened
            # Reducing more than 8 bits per channel is ambiguous, so such images are not converted.
            if channels is not None and not mode.startswith(("I", "F")):
                image = image.convert("RGB" if channels == 3 else "L")
            if image.mode in MODES:
                if size is not None:
                    # Bilinear with antialiasing, the default of torchvision's Resize.
                    image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
                pixels = np.asarray(image)
                return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    except Exception as error:  # decoders raise many kinds of errors on damaged bytes
        raise ValueError(f"{name} of {address} must be an image, got {_damage(encoded, error)}") from error
    if mode.startswith(("I", "F")):
        way_out = "scale it to 8 bits"
    else:
        colour = with_option(address, "channels=3")
        way_out = f"convert all with {colour} (colour, without transparency) or channels=1 (grey)"
    raise ValueError(f"{name} of {address} must be grey or colour, 8 bits a channel, got mode {mode!r}; {way_out}")


def _damage(encoded: bytes, error: Exception) -> str:
    if is_pointer(encoded):
        return "a Git-LFS pointer; fetch the content with 'git lfs pull'"
    return f"{len(encoded)} bytes that cannot be decoded ({reason(error)}); replace or remove it"


def _unlike(name: str, shape: tuple[int, ...], first: str, expected: tuple[int, ...], address: str) -> str:
    if shape[0] != expected[0]:
        kind = {1: "grey", 3: "colour"}
        return (
            f"images of {address} must be all grey or all colour, got {first} in {kind[expected[0]]} and {name} in "
            f"{kind[shape[0]]}; convert all with {with_option(address, 'channels=3')} or channels=1"
        )
    height, width = shape[1:]
    return (
        f"images of {address} must be of one size, got {first} with {expected[2]} x {expected[1]} pixels and {name} "
        f"with {width} x {height}; resize all, for instance with {with_option(address, 'size=32')}"
    )


def with_option(address: str, option: str) -> str:
    """Returns the address of a data set with an option, in place of one of the same name."""
    # The last question mark, because a path may contain others.
    whole, mark, tail = address.rpartition("?")
    kept = [setting for setting in tail.split("&") if mark and setting.partition("=")[0] != option.partition("=")[0]]
    return f"{whole if mark else address}?{'&'.join([*kept, option])}"


def reason(error: Exception) -> str:
    """First sentence of an error's message, without the advice that some append."""
    return " ".join(str(error).split()).partition(". ")[0].rstrip(".")[:160] or type(error).__name__


def _batched(items: Iterable, length: int) -> Iterator[list]:
    remaining = iter(items)
    while batch := list(islice(remaining, length)):
        yield batch
