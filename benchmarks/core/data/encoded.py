"""Decoding of the images of a folder or a column, after a check of size and mode in all headers."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from functools import partial

from numpy import ndarray
from PIL import Image

from .images import FORMATS, MODES, decode, reason
from .stored import Reading


def decoded(
    source: str, images: Sequence[tuple[str, bytes | Callable[[], bytes]]], reading: Reading
) -> tuple[ndarray, tuple[str, ...]]:
    """Decodes images to bytes [n, channels, height, width], with notes on the changes made to them.

    Args:
        source: for errors.
        images: name of each, and its bytes or a function that reads them.
        reading: resize, channels and the limit.

    Raises:
        ValueError: an image is damaged, a decompression bomb, of another size or mode than the first; or too many.
    """
    reads = [(name, partial(bytes, image) if isinstance(image, bytes) else image) for name, image in images]
    headers = [_header(source, name, read) for name, read in reads]
    first = headers[0]
    for (name, _), (size, mode) in zip(reads, headers, strict=True):
        if reading.channels is None and mode not in MODES:
            raise ValueError(
                f"{name} of {source} must be grey or colour with 8 bits a channel, got mode {mode!r}; convert all by "
                "--reading channels=3 or 1"
            )
        if reading.channels is None and mode != first[1]:
            raise ValueError(
                f"images of {source} must be all grey or all colour, got {reads[0][0]} in mode {first[1]} and {name} "
                f"in {mode}; convert all by --reading channels=3 or 1"
            )
        if reading.resize is None and size != first[0]:
            raise ValueError(
                f"images of {source} must be of one size, got {reads[0][0]} with {first[0][0]} x {first[0][1]} pixels "
                f"and {name} with {size[0]} x {size[1]}; bring all to one by --reading resize=32"
            )
    side, channels = reading.resize, reading.channels or (3 if first[1] == "RGB" else 1)
    pixels = side * side if side else first[0][0] * first[0][1]
    reading.refuse_large(len(reads) * channels * pixels, 1, source)
    note = f"images of {source} were resized to {side} x {side} pixels, the centre cropped: as the model was trained?"
    pixel_values = decode(reads, len(reads), size=side, channels=reading.channels, address=source)
    return pixel_values, (note,) if side and {size for size, _ in headers} != {(side, side)} else ()


def _header(source: str, name: str, read: Callable[[], bytes]) -> tuple[tuple[int, int], str]:
    try:
        # Pillow warns about possible decompression bombs, and raises only from twice that size on.
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(read()), formats=FORMATS) as opened:
                return opened.size, opened.mode
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise ValueError(
            f"{name} of {source} must have at most {Image.MAX_IMAGE_PIXELS} pixels, got a decompression bomb"
        ) from error
    except Exception as error:  # decoders raise many types of errors on damaged bytes
        raise ValueError(f"{name} of {source} must be an image, got what cannot be opened ({reason(error)})") from error
