"""Reports of measurements: JSON with every round, tables for the terminal and in Markdown, and the environment.

A document is a dict of a benchmark's name, title, environment and settings, with some of: `comparisons`, `targets`,
`sweeps` (family -> axis and comparisons), `cases` (timings that a benchmark took itself, by way).
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from .harness import Measurement, Ratio, SpeedComparison

SCHEMA = 1
_PACKAGES = ("leakbench", "torch", "numpy", "opacus", "backpack-for-pytorch")
_CPU_INFO = Path("/proc/cpuinfo")
_MIB = 2**20


def environment(device: str) -> dict[str, Any]:
    """Factors of a measurement besides the code: versions, device, threads, date. Names neither machine nor user."""
    on_gpu = device.startswith("cuda")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        # Average over the last minute; above 0, other work was running at the start.
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cuda": torch.version.cuda if on_gpu else None,
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def cpu_name() -> str:
    """Returns the processor's model name."""
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def as_dict(comparison: SpeedComparison) -> dict[str, Any]:
    """Converts a comparison for JSON, with every round and the ratios that tables show."""
    return {
        "name": comparison.name,
        "about": comparison.about,
        "peer": comparison.peer,
        "floor": comparison.floor,
        "ways": [_way(comparison, measurement) for measurement in comparison.measurements],
    }


def _way(comparison: SpeedComparison, measurement: Measurement) -> dict[str, Any]:
    seconds = measurement.seconds
    faster = comparison.time_ratio(comparison.peer, measurement.way)
    dearer = comparison.time_ratio(measurement.way, comparison.floor) if comparison.floor else "there is no floor"
    return {
        "way": measurement.way,
        "note": measurement.note or None,
        "reason": measurement.reason or None,
        # A median over 1 second, so that times and ratios are summarised by the same lines.
        "median_seconds": Ratio.of(seconds, [1.0] * len(seconds)).median if seconds else None,
        "minimum_seconds": min(seconds) if seconds else None,
        "rounds": len(seconds),
        "times_as_fast_as_peer": asdict(faster) if isinstance(faster, Ratio) else None,
        "times_the_cost_of_floor": asdict(dearer) if isinstance(dearer, Ratio) else None,
        "extra_bytes": measurement.memory.extra if measurement.memory else None,
        "extra_bytes_later": measurement.memory.later if measurement.memory else None,
        "memory_reason": measurement.memory_reason or None,
        "seconds": list(seconds),
    }


def write(path: Path, content: str | Callable[[Any], None]) -> Path:
    """Writes a file atomically: a reader sees the old file or the whole new file.

    Args:
        path: of the file; its folder is created if absent.
        content: text, or a function that writes bytes into an open file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Same as `leakbench.leaderboard.records.files.write_bytes`, which this leaf may not import.
    draft = path.with_name(f".{path.stem}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("xb") as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                content(file)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def write_json(document: dict[str, Any], path: Path) -> Path:
    """Writes a document as JSON; NaN is refused, because strict JSON parsers refuse it."""
    return write(path, json.dumps({"schema": SCHEMA, **document}, indent=2, allow_nan=False) + "\n")


@dataclass(frozen=True)
class TextTable:
    """Table of text cells.

    Attributes:
        title: above it.
        columns: headings.
        rows: with a cell for each column.
        remarks: below it, a line each.
        words: number of columns, from the left, that hold words; the others are aligned to the right.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()
    words: int = 1

    def markdown(self) -> str:
        """Formats the table as Markdown, for a file."""
        sides = [":--" if number < self.words else "--:" for number in range(len(self.columns))]
        lines = [f"### {self.title}", "", _pipes(self.columns), _pipes(sides)]
        lines += [_pipes(row) for row in self.rows]
        return "\n".join(lines + [f"\n{remark}" for remark in self.remarks]) + "\n"

    def text(self, width: int = 120) -> str:
        """Formats the table for a terminal."""
        table = RichTable(title=self.title, title_justify="left", box=box.SIMPLE, expand=False)
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="left" if number < self.words else "right", overflow="fold")
        for row in self.rows:
            # Rich would parse [1.2, 3.4] as markup.
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        sink = io.StringIO()
        console = Console(file=sink, width=width, highlight=False, color_system=None)
        console.print(table)
        for remark in self.remarks:
            console.print(remark, markup=False)
        return sink.getvalue()


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def tables(document: dict[str, Any]) -> Iterator[TextTable]:
    """Yields every table of a document."""
    for comparison in document.get("comparisons", ()):
        yield _comparison(comparison)
    if document.get("targets"):
        yield _targets(document["targets"])
    for sweep in document.get("sweeps", {}).values():
        yield _sweep(sweep)
    for case in document.get("cases", ()):
        yield _case(case)


def _comparison(comparison: dict[str, Any]) -> TextTable:
    peer, floor = comparison["peer"], comparison["floor"]
    columns = ["way", "median ms", "min ms", f"times as fast as {peer}"]
    columns += [f"times the cost of {floor}"] if floor else []
    columns += ["extra MiB", "later MiB", "rounds"]
    rows, remarks = [], []
    for way in comparison["ways"]:
        cells = [way["way"], milli(way["median_seconds"]), milli(way["minimum_seconds"])]
        cells.append(_interval(way["times_as_fast_as_peer"]))
        cells += [_interval(way["times_the_cost_of_floor"])] if floor else []
        cells += [_mebi(way["extra_bytes"]), _mebi(way["extra_bytes_later"]), str(way["rounds"] or "n/a")]
        rows.append(tuple(cells))
        if way["reason"]:
            remarks.append(f"{way['way']}: n/a, {way['reason']}.")
        elif way["note"] and way["note"] != way["way"]:
            remarks.append(f"{way['way']} is {way['note']}.")
    # A single sentence for all ways: the platform lacks the measurement, or it was not requested.
    reasons = {way["memory_reason"] for way in comparison["ways"] if not way["reason"]} - {None}
    remarks += [f"Memory: n/a, {reason}." for reason in sorted(reasons)]
    about = ", ".join(f"{_number(value)} {key}" for key, value in comparison["about"].items())
    title = f"{comparison['name']} ({about})" if about else comparison["name"]
    return TextTable(title, tuple(columns), tuple(rows), tuple(remarks))


def _targets(targets: Sequence[dict[str, Any]]) -> TextTable:
    rows, missing = [], dict[str, list[str]]()
    for target in targets:
        low = {"median": target["value"], "low": target["low"], "high": target["high"]}
        value = (
            "n/a" if target["value"] is None else f"{target['value']:.2f}" if target["n"] is None else _interval(low)
        )
        met = {True: "met", False: "missed", None: "n/a"}[target["met"]]
        rows.append((target["case"], target["target"], value, met))
        if target["reason"]:
            missing.setdefault(target["reason"], []).append(target["case"])
    remarks = [f"{', '.join(dict.fromkeys(names))}: n/a, {reason}." for reason, names in missing.items()]
    return TextTable("Targets", ("case", "target", "in this run", "verdict"), tuple(rows), tuple(remarks), words=2)


def _sweep(sweep: dict[str, Any]) -> TextTable:
    """Table of medians in milliseconds, with a column for each point."""
    points = sweep["comparisons"]
    ways = list(dict.fromkeys(way["way"] for point in points for way in point["ways"]))
    by_way = [{way["way"]: way for way in point["ways"]} for point in points]
    rows = [(way, *(milli(point.get(way, {}).get("median_seconds")) for point in by_way)) for way in ways]
    reasons = {f"{way['way']}: n/a, {way['reason']}." for point in points for way in point["ways"] if way["reason"]}
    columns = ("median ms", *(_number(point["about"][sweep["axis"]]) for point in points))
    return TextTable(f"{sweep['title']} by {sweep['axis']}", columns, tuple(rows), tuple(sorted(reasons)))


def _case(case: dict[str, Any]) -> TextTable:
    """Table of an entry of `cases`, timings that a benchmark took itself."""
    rows = tuple(
        (way, milli(timing["median_s"]), milli(timing["min_s"]), f"{timing['ratio']:.2f}", str(timing["rounds"]))
        for way, timing in case["ways"].items()
    )
    sizes = ", ".join(f"{key} {_number(value)}" for key, value in case.items() if isinstance(value, int))
    checks = [
        f"{name}: " + ", ".join(f"{k} {v:.3g}" for k, v in value.items()) + "."
        if isinstance(value, dict)
        else f"{name}: {value:.3g}."
        for name, value in case.get("checks", {}).items()
    ]
    columns = ("way", "median ms", "min ms", f"times the cost of {case['baseline']}", "rounds")
    return TextTable(f"{case['case']} ({sizes})", columns, rows, tuple(checks))


def markdown(document: dict[str, Any], figures: Sequence[str] = ()) -> str:
    """Formats the whole document as Markdown, with its figures."""
    where = document["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    lines = [f"## {document['title']}", ""]
    lines += [
        f"{where['device']}; {where['cpu']}, {where['cores']} cores, {where['threads']} threads; {where['system']}."
    ]
    if where["load_before"] is not None:
        lines += [f"Load of the machine in the minute before: {where['load_before']}.", ""]
    lines += [f"Python {where['python']}, {versions}. {where['date']}.", ""]
    lines += [document["method"], ""] if document.get("method") else []
    lines += [table.markdown() for table in tables(document)]
    lines += [f"![{name.removesuffix('.png').replace('_', ' ')}]({name})\n" for name in figures]
    return "\n".join(lines)


def milli(seconds: float | None) -> str:
    """Seconds as milliseconds, three digits."""
    return "n/a" if seconds is None else f"{seconds * 1e3:.3g}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"


def _mebi(size: int | None) -> str:
    return "n/a" if size is None else f"{size / _MIB:.1f}" if size < 10 * _MIB else f"{size / _MIB:.0f}"


def _interval(ratio: dict[str, Any] | None) -> str:
    return "n/a" if ratio is None else f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
