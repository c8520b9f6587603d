"""Grid of a section's reconstructions, the largest leak first, with the mean public image among them.

All show the same image, the first of the run, as the strongest attack found it in each method's release as it is made.
The order is by the mean PSNR over all images, which only the auditor can compute, because it needs the originals.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..board.aggregate import Estimate
from ..metrics import METRICS
from .reconstructions import Exhibit, PictureAllowance, PictureStrip

PSNR = METRICS["psnr"]


@dataclass(frozen=True, kw_only=True)
class GridTile:
    """Reconstruction in the grid, or the mean public image.

    Attributes:
        name: of the defense, or of the guess.
        details: settings, budget and variant of the release, in words.
        attack: its label; empty for the guess.
        uri: picture; empty if there is none.
        mean: mean PSNR over all images, with its interval, in words.
        count: seeds behind the mean.
        own: PSNR of this picture, in words.
        guess: whether it is the mean public image.
        degraded: whether the attack saw itself that it found no match.
    """

    name: str
    details: str
    attack: str
    uri: str
    mean: str
    count: str
    own: str = ""
    guess: bool = False
    degraded: bool = False


@dataclass(frozen=True, kw_only=True)
class PictureGrid:
    """Original of the run's first image, and its reconstructions, the largest leak first."""

    original: str
    title: str
    tiles: tuple[GridTile, ...]


def picture_grid(exhibits: Sequence[Exhibit], allowance: PictureAllowance) -> PictureGrid | None:
    """Arranges the strongest attack on each row; None if there are no pictures.

    Args:
        exhibits: of the section; those of negative controls are left out.
        allowance: shared by all pictures of the page; a grid that exceeds it is left out.
    """
    shown = [exhibit for exhibit in exhibits if exhibit.control != "negative" and exhibit.strips[0].tiles]
    if not shown:
        return None
    first = shown[0].strips[0].tiles[0]
    tiles: list[tuple[float, GridTile]] = []
    guesses: dict[str, tuple[float, GridTile]] = {}
    for exhibit in shown:
        variants = [words for strip in exhibit.strips for words, mean in strip.main.items() if mean.value is not None]
        if not variants:
            continue
        # The release as it is made is the last variant; which attack is strongest may differ between variants.
        variant = max(variants, key=list(exhibit.strips[0].main).index)
        strip = max(exhibit.strips, key=lambda strip: _mean(strip, variant))
        mean = strip.main[variant]
        tiles.append((mean.value or 0.0, _tile(exhibit, strip, variant, mean, first.original)))
        if strip.floor_mean is not None and strip.floor_mean.value is not None:
            guess = GridTile(
                name=strip.floor_of,
                details="no update needed",
                attack="",
                uri=strip.floor_uri,
                mean=PSNR.with_unit(strip.floor_mean.words(PSNR.digits)),
                count=_count(strip.floor_mean),
                guess=True,
            )
            # Rows whose attacks had other images have other floors.
            guesses.setdefault(f"{guess.mean} {guess.uri}", (strip.floor_mean.value, guess))
    ordered = [tile for _, tile in sorted([*tiles, *guesses.values()], key=lambda pair: -pair[0])]
    cost = len(first.original) + sum(len(tile.uri) for tile in ordered)
    if not tiles or not allowance.take(cost):
        return None
    return PictureGrid(original=first.original, title=first.title, tiles=tuple(ordered))


def _mean(strip: PictureStrip, variant: str) -> float:
    value = strip.main[variant].value
    return -math.inf if value is None else value


def _tile(exhibit: Exhibit, strip: PictureStrip, variant: str, mean: Estimate, original: str) -> GridTile:
    shots = [shot for tile in strip.tiles[:1] for shot in tile.shots if tile.original == original]
    shot = next((shot for shot in shots if shot.variant == variant and shot.uri), None)
    control = f"{exhibit.control} control" if exhibit.control else ""
    return GridTile(
        name=exhibit.name,
        details=", ".join(filter(None, (exhibit.details, control, f"claimed ε {exhibit.epsilon}", variant))),
        attack=strip.attack,
        uri=shot.uri if shot else "",
        mean=PSNR.with_unit(mean.words(PSNR.digits)),
        count=_count(mean),
        own=shot.words if shot else "no picture of this image",
        degraded=variant in strip.degraded,
    )


def _count(estimate: Estimate) -> str:
    return f"{estimate.n} seed{'' if estimate.n == 1 else 's'}"
