"""A static cost model of per-example gradient norms and clipped sums: selects the fastest formula for a layer.

A layer's gradient of an example is a sum over positions (pixels of the output, places of a sequence) of outer
products. Its norm comes from the product itself, or from inner products between positions ("ghost" norms, Goodfellow
2015; Rochette et al. 2019); the clipped sum from kept rows, or from one product over the whole batch. All costs are per
example, so the choice does not depend on the batch and is the same in the check as in training. Nothing is timed: a
choice by timing would round differently from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import inf


class Strategy(Enum):
    """Formulas of per-example norms, and the inputs of the subsequent weighted sum."""

    KEEP = "rows, kept for the sum"
    FREE = "rows, freed at once"
    GRAM = "inner products of patches"
    PIXELS = "inner products of pixels, summed along the kernel"
    PAIRS = "inner products of pixels, by our kernel for them"


class Summation(Enum):
    """Method of a weighted sum over the batch if rows are not kept."""

    VENDOR = "the vendor's kernel for a whole batch"
    TILES = "Winograd's products of tiles"


@dataclass(frozen=True)
class Speeds:
    """Rates that the model divides by; only their ratios matter.

    Attributes:
        batched: many small matrix products, flop/s.
        whole: the vendor's weight gradient of a whole batch, flop/s.
        memory: bytes/s of copies and element-wise passes.
        stream: bytes/s of sequential reads or writes.
        compiled: our kernels, flop/s.
    """

    batched: float
    whole: float
    memory: float
    stream: float
    compiled: float


# Measured on two cores of a server CPU with AVX2; for CUDA the ratios of a data-centre GPU's data sheet, where rows may
# be in TF32 and a weight gradient of a whole batch is in float32.
_SPEEDS = {"cpu": Speeds(120e9, 130e9, 15e9, 30e9, 120e9), "cuda": Speeds(60e12, 40e12, 3e12, 3e12, 0)}
# One core of a server CPU with AVX-512, of which MKL uses half (AMD Zen 5).
_WIDE = Speeds(105e9, 240e9, 15e9, 40e9, 235e9)
_WIDE_LANES = 16
_BYTES = 4
# Rows are kept if they take at most this many times the memory of the tensors they are computed from.
_ROOM = 5.0
# Bytes of the Winograd factors of an image, beyond which they fit neither the cache nor a memory budget.
_MOST_FACTORS = 16 * 2**20


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer, per example.

    Attributes:
        positions: pixels of the output, or places of a sequence; of all views together.
        inputs: numbers that an output is computed from (channels times kernel), per group.
        outputs: channels of the output, per group.
        groups: groups of channels.
        pixels: pixels of the padded input; None if the pixel formula does not apply.
        channels: channels of the input; read only for layers with a single group.
        kernel: (height, width).
        patched: True if patches have to be copied out of the input.
        stored: entries of input and output, which are in memory anyway.
        tiles: number of tiles of 2x2 positions, if Winograd's algorithm applies (`winograd.py`); else None.
        lanes: numbers that our row kernel processes at a time (`compiled_rows.py`); 0 if it cannot be used.
        multiplied: multiplications of that kernel at each position, including idle lanes.
        products: float64 flops of our kernel for inner products (`product_norms.py`); None if it cannot be used.
    """

    positions: int
    inputs: int
    outputs: int
    stored: int
    groups: int = 1
    pixels: int | None = None
    channels: int = 0
    kernel: tuple[int, int] = (1, 1)
    patched: bool = True
    tiles: int | None = None
    lanes: int = 0
    multiplied: int = 0
    products: float | None = None

    @property
    def row(self) -> int:
        """Entries of an example's gradient."""
        return self.groups * self.inputs * self.outputs


@lru_cache(maxsize=1024)  # looked up for every layer in every step
def cheapest(shape: Shape, device: str) -> Strategy:
    """Returns the formula with the least estimated time that fits the memory rule."""
    costs = estimates(shape, device)
    return min(costs, key=lambda strategy: costs[strategy])


@lru_cache(maxsize=1024)  # looked up for every layer in every step
def made_by_kernel(shape: Shape, device: str) -> bool:
    """Returns whether rows are computed by a compiled kernel rather than from patches."""
    return _by_kernel(shape, device) < _by_patches(shape, device)


@lru_cache(maxsize=1024)  # looked up for every layer in every step
def summation(shape: Shape, device: str) -> Summation:
    """Returns the method of the weighted sum over a batch whose rows were not kept."""
    costs = _summations(shape, device)
    return min(costs, key=lambda strategy: costs[strategy])


def _summations(s: Shape, device: str) -> dict[Summation, float]:
    # A recomputed sum rounds differently from the rows; `recomputed` bounds the difference in a pass over the factors.
    vouched = 2 * _BYTES * s.stored / _speeds(s, device).stream
    costs = {Summation.VENDOR: vouched + _by_vendor(s, device)}
    factors = 16 * (s.tiles or 0) * (s.channels + s.outputs) * _BYTES
    if device == "cpu" and s.tiles is not None and factors <= _MOST_FACTORS:
        costs[Summation.TILES] = vouched + _by_tiles(s, device)
    return costs


def _speeds(shape: Shape, device: str) -> Speeds:
    return _WIDE if shape.lanes >= _WIDE_LANES else _SPEEDS.get(device, _SPEEDS["cuda"])


def _by_patches(s: Shape, device: str) -> float:
    # Factors 2: a multiply and an add of every product, a read and a write of every copy.
    speed = _speeds(s, device)
    return 2 * s.positions * s.row / speed.batched + _copied(s, speed)


def _copied(s: Shape, speed: Speeds) -> float:
    return 2 * _BYTES * s.groups * s.positions * s.inputs / speed.memory if s.patched else 0.0


def _by_kernel(s: Shape, device: str) -> float:
    if not s.lanes:
        return inf
    # Inputs are padded and rows written in the cache, at twice the speed.
    speed = _speeds(s, device)
    return 2 * s.positions * s.multiplied / speed.compiled + _BYTES * (s.stored + s.row) / (2 * speed.stream)


def _by_tiles(s: Shape, device: str) -> float:
    speed, tiles = _speeds(s, device), s.tiles or 0
    factors = 2 * _BYTES * 16 * tiles * (s.channels + s.outputs) / speed.memory
    return 2 * 16 * tiles * s.channels * s.outputs / speed.batched + factors


def _by_vendor(s: Shape, device: str) -> float:
    speed = _speeds(s, device)
    scaled = 2 * _BYTES * s.groups * s.positions * s.outputs / speed.memory
    return 2 * s.positions * s.row / speed.whole + scaled


def estimates(shape: Shape, device: str) -> dict[Strategy, float]:
    """Estimates seconds per example of each applicable formula, up to a common factor."""
    speed = _speeds(shape, device)
    s, squared = shape, shape.positions**2
    making, remaking = min(_by_patches(s, device), _by_kernel(s, device)), min(_summations(s, device).values())
    # Written and read again; our kernel's own cost includes its writes.
    read = (1 if made_by_kernel(s, device) else 2) * _BYTES * s.row / speed.stream
    costs = {Strategy.FREE: making + remaking}
    if s.row <= _ROOM * s.stored:
        costs[Strategy.KEEP] = making + read
    # Two Gram matrices are read, their product is written.
    elementwise = 3 * 8 * s.groups * squared / speed.memory
    # Quadratic in positions: 90 times as fast as rows at 4x4 and 512 channels, 4 times as slow at 16x16 and 64. Inner
    # products are in float64, at half the rate, of factors that are read, written and read again for it.
    products = 2 * 2 * s.groups * squared * (s.inputs + s.outputs) / speed.batched
    widened = (_BYTES + 2 * 8) / speed.memory
    patches = s.groups * s.positions * (s.inputs + s.outputs)
    costs[Strategy.GRAM] = _copied(s, speed) + widened * patches + products + elementwise + remaking
    if s.pixels is not None:
        # Short strided runs: the shorter a line of the output, the dearer each copied number.
        line = max(1.0, s.positions**0.5)
        shifts = 2 * 8 * squared * (sum(s.kernel) + 2) * (1 + 8 / line) / speed.memory
        inner = 2 * 2 * (s.pixels**2 * s.channels + squared * s.outputs) / speed.batched
        costs[Strategy.PIXELS] = widened * s.stored + inner + shifts + elementwise + remaking
    if s.products is not None:  # float64, at half the rate
        costs[Strategy.PAIRS] = 2 * s.products / speed.compiled + _BYTES * s.stored / (2 * speed.stream) + remaking
    return costs
