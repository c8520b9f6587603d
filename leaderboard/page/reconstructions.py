"""Originals beside their reconstructions, as a page shows them.

The pictures are the first ones in the order of the run, never a choice. Where the arrays contradict their record the
page says so, and what cannot be shown has a sentence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from ..board.aggregate import Cell, Estimate, over_seeds
from ..board.content import Footnotes
from ..board.rows import Row
from .figures import Style, epsilon_words
from .images import Pair, PictureError, pairs_of, png
from .plots import marker
from .tables import Value, value

VARIANTS = {"none": "no noise", "calibrated": "with noise"}
SHOWN = ("psnr", "ssim", "lpips", "label_accuracy")
"""Metrics of a strip."""

OPEN, MOST = 6, 24
"""Tiles of a strip that are seen at once, and those that can be unfolded; the rest stays in the arrays."""

BYTES = 3_000_000
"""Of pictures on a page, as they are written there."""


@dataclass(frozen=True, kw_only=True)
class Shot:
    """One reconstruction.

    Attributes:
        variant: "no noise" or "with noise".
        uri: the picture; empty when there is none.
        words: its PSNR, or why there is none.
    """

    variant: str
    uri: str = ""
    words: str


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One original and what was made of it."""

    title: str
    original: str
    shots: tuple[Shot, ...]


@dataclass(kw_only=True)
class Strip:
    """One attack on one defense.

    Attributes:
        attack: its label.
        lines: variant -> metric -> cell, means over seeds with intervals.
        floor: PSNR of the mean public image.
        tiles: seen at once.
        folded: the next ones.
        remarks: what is not shown, and why.
    """

    attack: str
    lines: dict[str, dict[str, Value]] = field(default_factory=dict)
    floor: Value
    tiles: list[Tile] = field(default_factory=list)
    folded: list[Tile] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """All strips of one row of the board, the strongest attack first."""

    name: str
    details: str
    control: str
    key: Markup
    epsilon: str
    strips: tuple[Strip, ...]


class Purse:
    """What is left of the bytes that pictures may take on a page; a picture shown twice is paid twice."""

    def __init__(self, bytes_: int = BYTES) -> None:
        """Fills it."""
        self.left = bytes_

    def pay(self, cost: int) -> bool:
        """Whether there was enough, which is then gone."""
        enough = cost <= self.left
        if enough:
            self.left -= cost
        return enough


def exhibits(rows: Sequence[Row], folder: Path, style: Style, notes: Footnotes, purse: Purse) -> list[Exhibit]:
    """The pictures of one section.

    Args:
        rows: of the section.
        folder: where records and arrays lie.
        style: method -> (colour, marker).
        notes: takes the reasons of what was not measured.
        purse: shared by all sections.

    Returns:
        One for each row that was attacked by reconstruction.
    """
    found = []
    for row in rows:
        attacks: dict[str, dict[str, Cell]] = {}
        for cell in row.cells:
            if cell.kind == "reconstruction":
                attacks.setdefault(cell.attack or "", {})[cell.noise or "none"] = cell
        first = row.psnr_free.attack or row.psnr_noisy.attack
        names = sorted(attacks, key=lambda name, first=first: (name != first, name))
        if names:
            found.append(
                Exhibit(
                    name=row.defense.name,
                    details=row.details,
                    control=row.control or "",
                    key=marker(*style[row.method]),
                    epsilon=epsilon_words(row),
                    strips=tuple(_strip(name, attacks[name], row, folder, notes, purse) for name in names),
                )
            )
    return found


def _strip(
    attack: str, cells: Mapping[str, Cell], row: Row, folder: Path, notes: Footnotes, purse: Purse
) -> Strip:  # fmt: skip
    anyone = next(iter(cells.values()))
    strip = Strip(attack=attack, floor=value(over_seeds("psnr_floor", anyone), notes))
    absent = {"none": row.psnr_free.reason, "calibrated": row.psnr_noisy.reason}
    for noise, words in VARIANTS.items():
        if noise in cells:
            estimates = {name: over_seeds(name, cells[noise]) for name in SHOWN}
        else:
            why = absent[noise] or "not attacked"
            estimates = {name: Estimate(metric=name, value=None, reason=why) for name in SHOWN}
        strip.lines[words] = {name: value(e, notes) for name, e in estimates.items()}
    made, remarks = _collect(cells, folder)
    strip.remarks += remarks
    several = any(key.place for key in made)
    # Images before seeds, so that what is seen at once is of all seeds.
    for key in sorted(made)[:MOST]:
        tile = _tile(key, made[key], cells, absent, several=several)
        if not purse.pay(len(tile.original) + sum(len(shot.uri) for shot in tile.shots)):
            break
        (strip.tiles if len(strip.tiles) < OPEN else strip.folded).append(tile)
    if left := len(made) - len(strip.tiles) - len(strip.folded):
        strip.remarks.append(f"{left} more of {len(made)} images are in the arrays beside the records")
    return strip


class _Key(NamedTuple):
    """One original: its place in the run, and its pixels, should they differ from one variant to the other."""

    target: int
    place: int
    seed: int
    pixels: bytes


_Found = dict[str, tuple[Pair, str]]
"""Variant -> the pair, and its PSNR in words."""


def _collect(cells: Mapping[str, Cell], folder: Path) -> tuple[dict[_Key, _Found], list[str]]:
    """Every original once, with what each variant made of it, and remarks on what is not there."""
    made: dict[_Key, _Found] = {}
    unshown: dict[str, list[int]] = {}
    remarks = []
    for noise, cell in cells.items():
        for record in cell.records.values():
            try:
                pairs, remark = pairs_of(record, folder)
            except PictureError as error:
                unshown.setdefault(f"{VARIANTS.get(noise, noise)}: {error}", []).append(record.seed)
                continue
            remarks += [remark] if remark else []
            measured = record.metrics.get("psnr")
            why = "not measured" if measured is None else measured.reason
            failed = measured is None or measured.value is None
            for pair in pairs:
                key = _Key(pair.target, pair.place, pair.seed, pair.original.tobytes())
                made.setdefault(key, {})[noise] = pair, f"n/a: {why}" if failed else f"{pair.psnr:.1f} dB"
    remarks += [
        f"no pictures of seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}, {why}"
        for why, seeds in unshown.items()
    ]
    return made, remarks


def _tile(
    key: _Key, found: _Found, cells: Mapping[str, Cell], absent: Mapping[str, str | None], *, several: bool
) -> Tile:  # fmt: skip
    shots = []
    for noise, variant in VARIANTS.items():
        if noise in found:
            pair, words = found[noise]
            shots.append(Shot(variant=variant, uri=png(pair.found), words=words))
        else:
            why = "no picture of this one" if noise in cells else absent[noise] or "not attacked"
            shots.append(Shot(variant=variant, words=f"n/a: {why}"))
    pair = next(iter(found.values()))[0]
    number = f"{key.target + 1}.{key.place + 1}" if several else f"{key.target + 1}"
    return Tile(
        title=f"seed {key.seed}, image {number}, class {pair.label}", original=png(pair.original), shots=tuple(shots)
    )  # fmt: skip
