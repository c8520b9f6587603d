"""Original images of a run next to their reconstructions, for the page.

The images shown are the first in the order of the run; none is selected by its result. If arrays contradict their
record, the page says so, and missing images get a sentence with the reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from markupsafe import Markup

from ..board.aggregate import BoardCell, Estimate, over_seeds
from ..board.choices import is_choice
from ..board.content import Footnotes
from ..board.rows import DEGRADED, Row
from ..kinds import KINDS, KindOfResult
from ..metrics import METRICS, KnownMetric
from ..records.folder import ArraysFolder
from .figures import epsilon_words
from .images import ImagePair, PictureError, floor_image, pairs_of, png
from .plots import Style, marker
from .tables import Value, in_short, value

OPEN, MOST = 6, 24
"""Number of tiles of a strip visible at once, and the largest number after unfolding; the arrays have the rest."""

BYTES = 3_000_000
"""Limit for the pictures of a page, in bytes of their encoded form."""


@dataclass(frozen=True, kw_only=True)
class Shot:
    """Reconstruction of an original.

    Attributes:
        variant: "no noise" or "with noise".
        uri: picture; empty if there is none.
        words: its PSNR, or why there is none.
    """

    variant: str
    uri: str = ""
    words: str


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Original with a reconstruction for each variant of the release."""

    title: str
    original: str
    shots: tuple[Shot, ...]


@dataclass(kw_only=True)
class PictureStrip:
    """Reconstructions by an attack on a defense.

    Attributes:
        attack: its label.
        headers: metric -> title, the main one first.
        lines: variant -> metric -> cell, means over seeds with intervals.
        floor: main metric of a guess without the update; None if it has no floor.
        floor_of: source of that guess.
        floor_mean: that guess with its seeds; None if it has no floor.
        floor_uri: picture of that guess; empty if the arrays have none.
        main: variant -> main metric, with its seeds.
        degraded: variants in which the attack saw itself that it found no match.
        tiles: visible at once.
        folded: visible after unfolding.
        remarks: reasons why pictures are missing.
    """

    attack: str
    headers: dict[str, str]
    lines: dict[str, dict[str, Value]] = field(default_factory=dict)
    floor: Value | None = None
    floor_of: str = ""
    floor_mean: Estimate | None = None
    floor_uri: str = ""
    main: dict[str, Estimate] = field(default_factory=dict)
    degraded: list[str] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    folded: list[Tile] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """Strips of a row of the board, the strongest attack first."""

    name: str
    details: str
    control: str
    key: Markup
    epsilon: str
    strips: tuple[PictureStrip, ...]


class PictureAllowance:
    """Bytes left for pictures on a page; a picture that is shown twice is written and counted twice."""

    def __init__(self, bytes_: int = BYTES) -> None:
        """Starts with the whole allowance."""
        self.left = bytes_

    def take(self, cost: int) -> bool:
        """Takes `cost` bytes if they are left; returns whether they were."""
        enough = cost <= self.left
        if enough:
            self.left -= cost
        return enough


def exhibits(
    rows: Sequence[Row], folder: ArraysFolder, style: Style, notes: Footnotes, allowance: PictureAllowance
) -> list[Exhibit]:
    """Collects the pictures of a section.

    Args:
        rows: of the section.
        folder: of records and arrays.
        style: method -> (colour, marker).
        notes: collects the reasons for missing measurements.
        allowance: shared by all sections.

    Returns:
        An exhibit for each row and kind of attack that reconstructs pictures.
    """
    row_exhibits, measured = [], _measured(rows)
    for row, kind in [(row, kind) for row in rows for kind in KINDS.values() if kind.pictured]:
        attacks: dict[str, dict[str, BoardCell]] = {}
        for cell in row.cells:
            # Attacks that choose among candidates return a copy of the image, which would look like a reconstruction.
            if cell.kind == kind.name and not is_choice(cell):
                attacks.setdefault(cell.attack or "", {})[cell.noise or ""] = cell
        first = next((estimate.attack for estimate in row.main(kind) if estimate.attack), None)
        names = sorted(attacks, key=lambda name, first=first: (name != first, name))
        if names:
            row_exhibits.append(
                Exhibit(
                    name=row.defense.name,
                    details=row.details,
                    control=row.control or "",
                    key=marker(*style[row.method]),
                    epsilon=epsilon_words(row),
                    strips=tuple(
                        _strip(name, attacks[name], row, kind, folder, notes, allowance, measured) for name in names
                    ),
                )
            )
    return row_exhibits


def unmeasured_metrics(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Metrics of pictures that are n/a for every image of a section, as (title, reasons); no table shows them.

    Args:
        rows: of the section.
    """
    measured, left_out = _measured(rows), []
    for kind in [kind for kind in KINDS.values() if kind.pictured]:
        records = [r for row in rows for cell in row.cells if cell.kind == kind.name for r in cell.records.values()]
        for metric in [metric for metric in _pictured(kind) if metric.name not in measured and records]:
            reasons = dict.fromkeys(r.metrics[metric.name].reason for r in records if metric.name in r.metrics)
            left_out.append((metric.title, in_short(reasons)))
    return left_out


def _pictured(kind: KindOfResult) -> list[KnownMetric]:
    return [metric for metric in METRICS.values() if metric.pictured and metric.kind == kind.name]


def _measured(rows: Sequence[Row]) -> set[str]:
    """Names of the metrics that have a value in some record."""
    records = [record for row in rows for record in row.records]
    return {name for record in records for name, metric in record.metrics.items() if metric.value is not None}


def _strip(
    attack: str,
    cells: Mapping[str, BoardCell],
    row: Row,
    kind: KindOfResult,
    folder: ArraysFolder,
    notes: Footnotes,
    allowance: PictureAllowance,
    measured: set[str],
) -> PictureStrip:
    shown = [metric for metric in _pictured(kind) if metric.name in measured or metric.name == kind.main]
    strip = PictureStrip(attack=attack, headers={metric.name: metric.title for metric in shown})
    if floor := METRICS[kind.main].floor:
        # Any variant will do: the floor depends on the images, not on the release.
        cell = next(iter(cells.values()))
        strip.floor_mean = over_seeds(floor.metric, cell)
        strip.floor = value(strip.floor_mean, notes)
        strip.floor_of = floor.of.removeprefix("the ")
        strip.floor_uri = _floor_picture(cell, folder)
    variants = _variants(row, kind)
    for noise, (words, absent) in variants.items():
        if noise in cells:
            estimates = {metric.name: over_seeds(metric.name, cells[noise]) for metric in shown}
        else:
            estimates = {m.name: Estimate(metric=m.name, value=None, reason=absent) for m in shown}
        strip.lines[words] = {name: value(e, notes) for name, e in estimates.items()}
        strip.main[words] = estimates[kind.main]
        if noise in cells and any(DEGRADED in record.flags for record in cells[noise].records.values()):
            strip.degraded.append(words)
    collected, remarks = _collect(cells, variants, folder)
    strip.remarks += remarks
    # Titles have a second number only if a target has several images.
    several = any(key.place for key in collected)
    # Images before seeds, so that the visible tiles cover all seeds.
    for key in sorted(collected)[:MOST]:
        tile = _tile(key, collected[key], cells, variants, several=several)
        # Stops even if a later, smaller tile would fit: the images shown are always the first of the run.
        if not allowance.take(len(tile.original) + sum(len(shot.uri) for shot in tile.shots)):
            break
        (strip.tiles if len(strip.tiles) < OPEN else strip.folded).append(tile)
    if omitted := len(collected) - len(strip.tiles) - len(strip.folded):
        strip.remarks.append(f"{omitted} more of {len(collected)} images are in the arrays beside the records")
    return strip


def _floor_picture(cell: BoardCell, folder: ArraysFolder) -> str:
    """Picture of the guess without the update, from the first seed's arrays; empty if they have none."""
    try:
        image = floor_image(next(iter(cell.records.values())), folder)
    except PictureError:
        return ""
    return "" if image is None else png(image)


_Variants = Mapping[str, tuple[str, str]]
"""Variant -> (label, reason why a row lacks it); a single unnamed variant if the kind has only one form."""


def _variants(row: Row, kind: KindOfResult) -> _Variants:
    reasons = {column.variant: row.estimates[column.key].reason for column in METRICS[kind.main].columns}
    if not kind.variants:
        return {"": ("found", reasons.get(None) or "not attacked")}
    return {variant.name: (variant.label, reasons.get(variant.name) or "not attacked") for variant in kind.variants}


class _ImageKey(NamedTuple):
    """Original: its place in the run, and its pixels, which may differ between variants."""

    target: int
    place: int
    seed: int
    pixels: bytes


_Found = dict[str, tuple[ImagePair, str]]
"""Variant -> (pair, PSNR in words)."""


def _collect(
    cells: Mapping[str, BoardCell], variants: _Variants, folder: ArraysFolder
) -> tuple[dict[_ImageKey, _Found], list[str]]:
    """Collects every original once, with its reconstruction for each variant, and remarks on missing pictures."""
    collected: dict[_ImageKey, _Found] = {}
    unshown: dict[str, list[int]] = {}
    remarks = []
    for noise, cell in cells.items():
        for record in cell.records.values():
            try:
                pairs, remark = pairs_of(record, folder)
            except PictureError as error:
                unshown.setdefault(f"{variants[noise][0]}: {error}", []).append(record.seed)
                continue
            remarks += [remark] if remark else []
            measured = record.metrics.get("psnr")
            why = "not measured" if measured is None else measured.reason
            # The arrays of a failed search hold its random start, which is shown without a PSNR.
            failed = measured is None or measured.value is None
            for pair in pairs:
                # Pixels are in the key, so that variants share an original only if they attacked the same image.
                key = _ImageKey(pair.target, pair.place, pair.seed, pair.original.tobytes())
                collected.setdefault(key, {})[noise] = (
                    pair,
                    f"n/a: {why}" if failed else METRICS["psnr"].words(pair.psnr),
                )
    remarks += [
        f"no pictures of seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}, {why}"
        for why, seeds in unshown.items()
    ]
    return collected, remarks


def _tile(
    key: _ImageKey, reconstructions: _Found, cells: Mapping[str, BoardCell], variants: _Variants, *, several: bool
) -> Tile:
    shots = []
    for noise, (variant, absent) in variants.items():
        if noise in reconstructions:
            pair, words = reconstructions[noise]
            shots.append(Shot(variant=variant, uri=png(pair.reconstruction), words=words))
        else:
            why = "no picture of this one" if noise in cells else absent
            shots.append(Shot(variant=variant, words=f"n/a: {why}"))
    pair = next(iter(reconstructions.values()))[0]
    number = f"{key.target + 1}.{key.place + 1}" if several else f"{key.target + 1}"
    return Tile(
        title=f"seed {key.seed}, image {number}, class {pair.label}", original=png(pair.original), shots=tuple(shots)
    )  # fmt: skip
