"""Decoding of images into one array of bytes; the first image of another size or mode than the others is refused.

Decoders are Pillow's. What is stored sideways with an orientation tag stays sideways, as in torchvision.
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

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF")
"""Formats that bytes are tried as; some of Pillow's others, such as PostScript, run programs of their own."""

MODES = ("L", "RGB")
# Below this many pixels an image decodes faster than threads take turns.
WORTH_A_THREAD = 128 * 128
CHUNK = 256

Encoded = tuple[str, Callable[[], bytes]]
"""What an image is called in errors, and how to get at its bytes."""


def decode(
    images: Iterable[Encoded],
    count: int,
    *,
    size: int | None,
    channels: int | None,
    address: str,
    dealt: int | None = None,
) -> UInt8[np.ndarray, "images channels height width"]:
    """All images as bytes.

    Args:
        images: encoded, one at a time: they are never in memory together.
        count: how many there are.
        size: side of the square that is kept, in pixels: the shorter side is resized to it, the centre cropped. None:
            as they are, which must be one size.
        channels: 1 (grey) or 3 (colour) to convert to; None: as they are, which must be one of the two for all.
        address: name of the data set, for the way out.
        dealt: how many are copied into pools; None: all.

    Raises:
        ValueError: if one cannot be read, or differs from the first; or if all of them would not fit into memory.
    """
    rest = iter(images)
    first = next(rest, None)
    if first is None:
        raise ValueError(f"{address} must hold images, got none")
    name, read = first
    # The first image decides shape and size of all, so one is decoded before memory is taken.
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

    # Threads, because Pillow's decoders let go of the interpreter's lock.
    workers = (os.cpu_count() or 1) if start[0].size >= WORTH_A_THREAD or size is not None else 1
    with ThreadPoolExecutor(workers) as pool:
        # In rounds, so that no more than a few chunks wait; errors come in order, so the first offender is named.
        for chunks in _batched(enumerate(_batched(rest, CHUNK)), 4 * workers):
            pending = [pool.submit(fill, 1 + i * CHUNK, chunk) for i, chunk in chunks]
            try:
                for task in pending:
                    task.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return out


def refuse_too_large(images: int, dealt: int, values: int, *, address: str) -> None:
    """Refuses data that would not fit into memory, before all of them are decoded.

    Args:
        images: how many are decoded, at a byte a value.
        dealt: how many of them are copied into pools, at five bytes a value at the peak.
        values: of one image: channels x height x width.
        address: name of the data set.

    Raises:
        ValueError: if that exceeds the memory.
    """
    # Bytes of all, and of those dealt a copy in bytes and one in float32: 1 + 4.
    needed, there = (images + 5 * dealt) * values, memory_bytes()
    if needed > there:
        raise ValueError(
            f"{address} must fit into memory, got {images} images of {values} values, which take {needed / 1e9:.1f} GB "
            f"of {there / 1e9:.1f} GB; choose smaller images, for instance {address.partition('?')[0]}?size=32"
        )


def memory_bytes() -> int:
    """Memory of this machine, or of the container where that is less."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        physical = 16 * 2**30  # where the system does not say, a common size
    try:
        # Limit of a control group, version 2; it says `max`, which is no number, where there is none.
        return min(physical, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    except (OSError, ValueError):
        return physical


def _open(
    name: str, read: Callable[[], bytes], size: int | None, channels: int | None, address: str
) -> UInt8[np.ndarray, "channels height width"]:
    encoded = read()
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as opened:
            # Image.open reads the header alone; damage shows while pixels are decoded.
            opened.load()
            mode, image = opened.mode, opened
            # More than 8 bits a channel have no one way to fewer, so they are not converted.
            if channels is not None and not mode.startswith(("I", "F")):
                image = image.convert("RGB" if channels == 3 else "L")
            if image.mode in MODES:
                if size is not None:
                    # Bilinear with antialiasing, as torchvision's Resize has it by default.
                    image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
                pixels = np.asarray(image)
                return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    except Exception as error:  # decoders raise all sorts of things at damaged bytes
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
    """The address of a data set with one option more."""
    return f"{address}{'&' if '?' in address else '?'}{option}"


def reason(error: Exception) -> str:
    """What an error says, in a few words: its first sentence, since some go on to give advice."""
    return " ".join(str(error).split()).partition(". ")[0].rstrip(".")[:160] or type(error).__name__


def is_pointer(content: bytes) -> bool:
    """Whether a file is what Git-LFS leaves in the place of one that was not fetched."""
    return content.startswith(b"version https://git-lfs")


def _batched(items: Iterable, length: int) -> Iterator[list]:
    rest = iter(items)
    while batch := list(islice(rest, length)):
        yield batch
