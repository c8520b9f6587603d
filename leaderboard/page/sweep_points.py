"""Points of the plots of a swept setting: PSNR of reconstructions against sparsity, and against rank.

A sweep is a set of rows of a defense that differ in the swept setting alone; rows that also differ in another setting,
such as the clip norm, form separate lines. A row whose attack has no value is named in the caption and not drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..board.aggregate import Estimate
from ..board.rows import Row
from ..kinds import NoiseVariant
from ..metrics import METRICS
from ..records.labels import differences, key_of, without
from .plots import Point

PSNR = METRICS["psnr"]


@dataclass(frozen=True, kw_only=True)
class SweptSetting:
    """Setting that is swept.

    Attributes:
        name: of the plot.
        label: in its title.
        title: of its axis.
        settings: its names in different defenses; the first that a defense has is used.
        log: whether the axis is logarithmic.
    """

    name: str
    label: str
    title: str
    settings: tuple[str, ...]
    log: bool = False


SWEPT = (
    SweptSetting(
        name="sparsity",
        label="sparsity",
        title="fraction of numbers dropped",
        settings=("final_sparsity", "sparsity", "drop_rate", "prune_rate"),
    ),
    SweptSetting(name="rank", label="rank", title="rank of the projection", settings=("rank",), log=True),
)


def sweep_points(
    rows: Sequence[Row], swept: SweptSetting, variant: NoiseVariant
) -> tuple[list[Point], list[float], list[str]]:
    """Collects the points of a plot.

    Args:
        rows: of a section.
        swept: setting on the axis.
        variant: of the release.

    Returns:
        The points, joined along each sweep; the floors of their rows; and a sentence for each row that is left out.
    """
    lines: dict[str, list[tuple[float, Row]]] = {}
    for row in rows:
        if (at := _place(row.defense.settings, swept)) is not None:
            lines.setdefault(_line(row, swept), []).append((at, row))
    points, floors, left_out = [], [], []
    lines = {path: line for path, line in lines.items() if len({at for at, _ in line}) > 1}  # one value is no sweep
    series = _names([line[0][1] for line in lines.values()], swept)
    (column,) = [column for column in PSNR.columns if column.variant == variant.name]
    for (path, line), name in zip(lines.items(), series, strict=True):
        for at, row in line:
            estimate = row.estimates[column.key]
            if estimate.value is None:
                left_out.append(f"Not shown: {row.label}, {estimate.reason}.")
                continue
            points.append(_point(row, at, estimate, name, path))
            floor = row.estimates["floor"].value
            floors += [] if floor is None else [floor]
    return points, floors, left_out


def _names(firsts: Sequence[Row], swept: SweptSetting) -> list[str]:
    """Names lines by their defenses, with the settings in which lines of the same defense differ."""
    names = []
    for row in firsts:
        same = [first for first in firsts if first.defense.name == row.defense.name]
        words = [
            differences([without(first.defense.settings, *swept.settings) for first in same]),
            differences([first.budget for first in same]),
            [f"{first.control} control" if first.control else "" for first in same],
        ]
        at = next(place for place, first in enumerate(same) if first is row)
        names.append(", ".join(filter(None, (row.defense.name, *(each[at] for each in words)))))
    return names


def _point(row: Row, at: float, estimate: Estimate, series: str, path: str) -> Point:
    return Point(
        x=at,
        y=estimate.value or 0.0,
        y_ends=estimate.ends,
        series=series,
        title=f"{row.label}: PSNR {estimate.words(PSNR.digits)} dB by {estimate.attack}",
        path=path,
    )


def _place(settings: Mapping[str, object], swept: SweptSetting) -> float | None:
    value = next((settings[key] for key in swept.settings if key in settings), None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if swept.log and value <= 0 else float(value)


def _line(row: Row, swept: SweptSetting) -> str:
    """Key of a sweep: the settings that its rows share."""
    task = without(row.task, "noise")
    return key_of((row.defense.name, without(row.defense.settings, *swept.settings), row.budget, task, row.control))
