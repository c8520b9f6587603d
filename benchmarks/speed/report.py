"""Reports of measurements: JSON with every round, tables for the terminal and in Markdown, and the environment.

A document is a dict of a benchmark's name, title, environment and settings, with some of: `comparisons`, `targets`,
`sweeps` (family -> axis and comparisons), `cases` (timings that a benchmark took itself, by way), `summaries` (tables
of text).
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console
from rich.markdown import Markdown

from .harness import Measurement, Ratio, SpeedComparison

SCHEMA = 1
_PACKAGES = ("leakbench", "torch", "numpy", "opacus", "backpack-for-pytorch", "transformers", "timm", "peft")
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
        "ways": [_way_row(comparison, measurement) for measurement in comparison.measurements],
    }


def _way_row(comparison: SpeedComparison, measurement: Measurement) -> dict[str, Any]:
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
    # Like `leakbench.leaderboard.records.files.write_whole`, which this leaf may not import, without fsync and the
    # refusal of links.
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


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """Table of text cells.

    Attributes:
        title: above it.
        cells: with the headings as columns.
        remarks: below it, a line each.
        words: number of columns, from the left, that hold words; the others are aligned to the right.
    """

    title: str
    cells: pd.DataFrame
    remarks: Sequence[str] = ()
    words: int = 1

    def markdown(self) -> str:
        """Formats the table as Markdown, for a file."""
        # pandas' own form needs a package that this project does not.
        sides = [":--" if number < self.words else "--:" for number in range(len(self.cells.columns))]
        lines = [self.cells.columns, sides, *self.cells.to_numpy()]
        pipes = ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines]
        return "\n".join([f"### {self.title}", "", *pipes, *(f"\n{remark}" for remark in self.remarks)]) + "\n"

    def text(self, width: int = 120) -> str:
        """Formats the table for a terminal."""
        console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
        with console.capture() as capture:
            console.print(Markdown(self.markdown()))
        return capture.get()


def tables(document: dict[str, Any]) -> Iterator[TextTable]:
    """Yields every table of a document."""
    yield from map(_comparison, document.get("comparisons", ()))
    if document.get("targets"):
        yield _targets(document["targets"])
    yield from map(_sweep, document.get("sweeps", {}).values())
    yield from map(_case, document.get("cases", ()))
    yield from map(_summary, document.get("summaries", ()))


def _summary(summary: dict[str, Any]) -> TextTable:
    """Table of cells that a benchmark wrote itself."""
    cells = pd.DataFrame(summary["rows"], columns=summary["columns"], dtype=object)
    return TextTable(title=summary["title"], cells=cells, remarks=summary["remarks"], words=summary["words"])


def _comparison(comparison: dict[str, Any]) -> TextTable:
    ways = pd.DataFrame(comparison["ways"], dtype=object)  # None stays None
    columns = {
        "way": ways["way"],
        "median ms": ways["median_seconds"].map(milli),
        "min ms": ways["minimum_seconds"].map(milli),
        f"times as fast as {comparison['peer']}": ways["times_as_fast_as_peer"].map(_interval),
        f"times the cost of {comparison['floor']}": ways["times_the_cost_of_floor"].map(_interval),
        "extra MiB": ways["extra_bytes"].map(_mebi),
        "later MiB": ways["extra_bytes_later"].map(_mebi),
        "rounds": ways["rounds"].map(lambda rounds: str(rounds or "n/a")),
    }
    if not comparison["floor"]:
        del columns["times the cost of None"]
    remarks = _failures(comparison["ways"])
    notes = ways[ways["note"].notna() & (ways["note"] != ways["way"]) & ways["reason"].isna()]
    remarks += [f"{way} is {note}." for way, note in zip(notes["way"], notes["note"], strict=True)]
    # A single sentence for all ways: the platform lacks the measurement, or it was not requested.
    reasons = ways.loc[ways["reason"].isna(), "memory_reason"].dropna().unique()
    remarks += [f"Memory: n/a, {reason}." for reason in sorted(reasons)]
    about = ", ".join(f"{_number(value)} {key}" for key, value in comparison["about"].items())
    title = f"{comparison['name']} ({about})" if about else comparison["name"]
    return TextTable(title=title, cells=pd.DataFrame(columns), remarks=remarks)


def _failures(ways: Iterable[dict[str, Any]]) -> list[str]:
    return [f"{way['way']}: n/a, {way['reason']}." for way in ways if way["reason"]]


def _targets(targets: Sequence[dict[str, Any]]) -> TextTable:
    verdicts = {True: "met", False: "missed", None: "n/a"}
    rows = [
        (
            target["case"],
            target["target"],
            _interval({"median": target["value"], **target}),
            "fact" if target["bound"] else verdicts[target["met"]],
        )
        for target in targets
    ]
    missing: dict[str, dict[str, None]] = {}
    for target in targets:
        if target["reason"]:
            missing.setdefault(target["reason"], {})[target["case"]] = None
    remarks = [f"{', '.join(cases)}: n/a, {reason}." for reason, cases in missing.items()]
    cells = pd.DataFrame(rows, columns=["case", "target", "in this run", "verdict"])
    return TextTable(title="Targets", cells=cells, remarks=remarks, words=2)


def _sweep(sweep: dict[str, Any]) -> TextTable:
    """Table of medians in milliseconds, with a column for each point."""
    points, axis = sweep["comparisons"], sweep["axis"]
    medians = {
        _number(point["about"][axis]): {way["way"]: milli(way["median_seconds"]) for way in point["ways"]}
        for point in points
    }
    cells = pd.DataFrame(medians).fillna("n/a").rename_axis("median ms").reset_index()
    reasons = {failure for point in points for failure in _failures(point["ways"])}
    return TextTable(title=f"{sweep['title']} by {axis}", cells=cells, remarks=sorted(reasons))


def _case(case: dict[str, Any]) -> TextTable:
    """Table of an entry of `cases`, ways that share large operands."""
    ways = pd.DataFrame(case["ways"], dtype=object).T  # None stays None
    columns = {
        "median ms": ways["median_s"].map(milli),
        "min ms": ways["min_s"].map(milli),
        f"times the cost of {case['baseline']}": ways["ratio"].map(
            lambda ratio: "n/a" if ratio is None else f"{ratio:.2f}"
        ),
        "rounds": ways["rounds"].map(lambda rounds: str(rounds or "n/a")),
    }
    sizes = ", ".join(f"{key} {_number(value)}" for key, value in case.items() if isinstance(value, int))
    checks = [
        f"{name}: " + ", ".join(f"{k} {v:.3g}" for k, v in value.items()) + "."
        if isinstance(value, dict)
        else f"{name}: {value:.3g}."
        for name, value in case["checks"].items()
    ]
    cells = pd.DataFrame(columns).rename_axis("way").reset_index()
    remarks = _failures({"way": way, "reason": row.get("reason")} for way, row in case["ways"].items()) + checks
    return TextTable(title=f"{case['case']} ({sizes})", cells=cells, remarks=remarks)


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
    """Median of a ratio and its deciles, if there are any."""
    if ratio is None or ratio["median"] is None:
        return "n/a"
    return f"{ratio['median']:.2f}" + ("" if ratio["low"] is None else f" [{ratio['low']:.2f}, {ratio['high']:.2f}]")


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
