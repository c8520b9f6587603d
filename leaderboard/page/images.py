"""Pairs of original and reconstruction from the arrays beside the records, with their PSNR recomputed.

PSNR is on [0, 1], under the matching of least total MSE within a target, as the scorer computes it, so that a page can
report a record that disagrees with its arrays.
"""

import base64
import io
import math
from dataclasses import dataclass

import numpy as np
from numpy import ndarray
from scipy.optimize import linear_sum_assignment

from ..records.arrays import read_table
from ..records.files import read_bytes
from ..records.folder import ArraysFolder, arrays_path
from ..records.left_out import FLAG, REASON
from ..records.record import Record

RESOLUTION = 1e-12
"""Lower limit of the MSE: PSNR is capped at 120 dB, as in the records."""

TOLERANCE = 0.02
"""Tolerance, dB, between the record's mean PSNR and that of its arrays, which are stored in single precision."""


class PictureError(ValueError):
    """Arrays of a record that cannot be shown; the message gives the reason."""


@dataclass(frozen=True)
class ImagePair:
    """Original and its reconstruction, both on [0, 1], with seed, target and position in the target's batch."""

    seed: int
    target: int
    place: int
    label: int
    original: ndarray
    reconstruction: ndarray
    psnr: float


def unit_images(values: ndarray, low: float, high: float) -> ndarray:
    """Rescales model inputs to [0, 1] and clamps them.

    Args:
        values: in model-input units.
        low: value of black.
        high: value of white.
    """
    return np.clip((values - low) / (high - low), 0.0, 1.0)


def mean_squares(a: ndarray, b: ndarray) -> ndarray:
    """Mean squared difference between every image of `a` [n, dim] and of `b` [m, dim], as [n, m]."""
    # Differences instead of |a|^2 - 2ab + |b|^2, which loses all digits for a good match.
    return np.stack([np.square(a - image).mean(axis=1) for image in b], axis=1)


def psnr(error: float) -> float:
    """Peak signal-to-noise ratio, dB, of an image on [0, 1] with this mean squared error; at most 120."""
    return -10 * math.log10(max(error, RESOLUTION))


def png(image: ndarray) -> str:
    """Encodes an image [channels, height, width] on [0, 1] as a PNG data URI.

    Args:
        image: with 1 or 3 channels.
    """
    from PIL import Image

    # Rounded: a cast alone would truncate every pixel, and darken the picture by half a level.
    pixels = np.rint(image * 255).astype(np.uint8)
    picture = Image.fromarray(pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, -1))
    file = io.BytesIO()
    picture.save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def pairs_of(record: Record, folder: ArraysFolder) -> tuple[list[ImagePair], str]:
    """Returns the originals of a record with their reconstructions.

    Args:
        record: a reconstruction with arrays.
        folder: of its arrays.

    Returns:
        The pairs, in the order of the run, and a remark if they contradict the record; empty otherwise.

    Raises:
        PictureError: there are no arrays, or they are no images.
    """
    targets, labels, originals, reconstructions = _read(record, folder)
    low, high = _range(record, originals)
    originals, reconstructions = unit_images(originals, low, high), unit_images(reconstructions, low, high)
    shape = _shape(record, originals.shape[1])
    pairs = []
    for target in np.unique(targets):
        places = np.flatnonzero(targets == target)
        costs = mean_squares(reconstructions[places], originals[places])
        rows, columns = linear_sum_assignment(costs)
        # By the place of the original, so that pictures keep the order of the run under any matching.
        order = np.argsort(columns)
        for k, i in zip(rows[order], columns[order], strict=True):
            true, guess = originals[places[i]].reshape(shape), reconstructions[places[k]].reshape(shape)
            decibel = psnr(float(costs[k, i]))
            pairs.append(ImagePair(record.seed, int(target), int(i), int(labels[places[i]]), true, guess, decibel))
    recorded = record.metrics.get("psnr")
    again = sum(pair.psnr for pair in pairs) / len(pairs)
    if recorded is not None and recorded.value is not None and abs(again - recorded.value) > TOLERANCE:
        return pairs, (
            f"record {record.id} says PSNR {recorded.value:.2f} dB, its arrays give {again:.2f} dB: do not "
            "trust this strip"
        )
    return pairs, ""


def floor_image(record: Record, folder: ArraysFolder) -> ndarray | None:
    """Mean public image in a record's arrays, on [0, 1]; None if they have none.

    Raises:
        PictureError: the arrays are no images.
    """
    if record.arrays is None:
        return None
    try:
        table = read_table(read_bytes(arrays_path(record, folder), "arrays"), ["original", "floor"])
        originals, floors = (table.column(name).combine_chunks().drop_null() for name in ("original", "floor"))
        if not len(floors):
            return None
        values = np.array(floors[0].as_py(), dtype=float)
        if not np.isfinite(values).all():
            return None
        low, high = _range(record, originals.flatten().to_numpy())
    except (OSError, AttributeError, TypeError, ValueError):
        # `RecordError` of a table without that column, as of an older version, is a ValueError.
        return None
    return unit_images(values, low, high).reshape(_shape(record, len(values)))


def _read(record: Record, folder: ArraysFolder) -> tuple[ndarray, ndarray, ndarray, ndarray]:
    if record.arrays is None:
        raise PictureError("its record names no arrays")
    if FLAG in record.flags:
        raise PictureError(REASON)
    path = arrays_path(record, folder)
    if not path.is_file():
        raise PictureError(f"{record.arrays} is not beside its record")
    try:
        # `read_bytes` refuses links; pyarrow would follow a link out of the folder.
        content = read_bytes(path, "arrays")
        table = read_table(content, ["target", "label", "original", "reconstruction"])
        # A single chunk, because `flatten` of a chunked column splits structs and not lists.
        columns = {name: table.column(name).combine_chunks() for name in table.column_names}
        flat = {name: columns[name].flatten().to_numpy() for name in ("original", "reconstruction")}
        targets, labels = (columns[name].to_numpy().astype(int) for name in ("target", "label"))
        # float64, as for the record's PSNR; arrays on disk are float32.
        images = [flat[name].astype(float).reshape(table.num_rows, -1) for name in flat]
    except (OSError, AttributeError, TypeError, ValueError) as error:
        raise PictureError(
            f"{record.arrays} holds no images with their reconstructions ({_first_line(error)})"
        ) from None
    if not table.num_rows or images[0].shape != images[1].shape:
        raise PictureError(f"{record.arrays} must have as many reconstructions as originals and at least one")
    if not all(np.isfinite(image).all() for image in images):
        raise PictureError(f"{record.arrays} has values that are not finite")
    return targets, labels, images[0], images[1]


def _range(record: Record, originals: ndarray) -> tuple[float, float]:
    input_range = record.task.input_range
    if input_range is None:  # records without it have data on [0, 1]
        input_range = (0.0, 1.0)
        if originals.min() < 0 or originals.max() > 1:
            raise PictureError("its inputs leave [0, 1] and its record has no task.input_range")
    if len(input_range) != 2 or not input_range[0] < input_range[1]:
        raise PictureError(f"task.input_range must be two growing numbers, got {list(input_range)}")
    return input_range[0], input_range[1]


def _shape(record: Record, dim: int) -> tuple[int, int, int]:
    """Channels, height and width; without a shape in the record, those of a square image in grey or colour."""
    shape = record.task.input_shape
    if shape is None:
        # 3 is not a square, so at most one of the two is possible.
        shape = next(((c, s, s) for c in (1, 3) if c * (s := math.isqrt(dim // c)) ** 2 == dim), None)
        if shape is None:
            raise PictureError(f"{dim} numbers are no square image, and its record has no task.input_shape")
    if len(shape) != 3 or min(shape) < 1 or shape[0] not in (1, 3) or math.prod(shape) != dim:
        raise PictureError(f"inputs of shape {list(shape)} with {dim} numbers are no grey or colour images")
    return shape[0], shape[1], shape[2]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
