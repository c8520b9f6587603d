"""Leaderboard of defenses: accuracy, claimed epsilon and the strongest attacks, computed from records alone.

A row is a suite, a defense with its settings, a budget and a task; its values are means over seeds, of attacks the
worst. The top of a board says whether its controls failed or a claim was violated. Missing measurements are n/a.
"""

import csv
import dataclasses
import io
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..kinds import attacked
from ..metrics import METRICS, columns
from ..records.details import LARGEST_UNDER_CLAIM
from ..records.folder import Completeness, ScoreCheck, read_folder
from ..records.record import Record
from . import text_formats as forms
from .active_server import ActiveResult, active_results
from .aggregate import BoardCell, BoardError, Estimate, over_seeds
from .content import Content, active_content, content
from .controls import ControlResult, Violation, check_controls, find_violations
from .identity import board_version, row_id
from .notes import alarms, gaps
from .proved_bound import NAME, proved_bound, proved_bounds
from .public_only import public_numbers
from .reconstruction_summary import reconstruction_summaries
from .rows import RANKED_BY, Row, guarantee_words, rows_from

__all__ = ["Board", "BoardError", "ControlResult", "Estimate", "Row", "Violation"]


@dataclass(frozen=True)
class Board:
    """Leaderboard of the records of any number of suites.

    Attributes:
        rows: sorted: contestants before controls, rankable rows before others, by the guarantee (infinite epsilon
            last), then by the pessimistic (high) end of the worst-case AUC; rows without an AUC come last.
        controls: expectation of every control, and whether it held.
        violations: records whose claim was refuted.
        unranked: records that failed or were skipped.
        gaps: sentences on missing and failed cells, differing code, changed suites and unknown completeness.
        active: results of active servers, which are in none of the above but `violations` and `gaps`.
        of_submissions: sentences on failed controls, refuted claims and gaps of others' submissions, which are in none
            of the above but `rows`, `unranked` and `active`: nobody's submission is an alarm about the rest.
    """

    rows: tuple[Row, ...]
    controls: tuple[ControlResult, ...]
    violations: tuple[Violation, ...]
    unranked: tuple[Record, ...]
    gaps: tuple[str, ...] = ()
    active: tuple[ActiveResult, ...] = ()
    of_submissions: tuple[str, ...] = ()

    @classmethod
    def from_records(cls, records: Iterable[Record], complete: Completeness | None = None) -> "Board":
        """Builds the board from records.

        Args:
            records: of any number of suites, without duplicates.
            complete: manifests beside them, as `read_folder` returns them; without manifests nothing is ranked.

        Returns:
            The board; it has no rows if everything failed.

        Raises:
            BoardError: there are no records, two share an id, or a cell and seed was recorded twice.
        """
        records = sorted(records, key=_place)
        if not records:
            raise BoardError("records must not be empty: run a suite first")
        identifier, count = Counter(record.id for record in records).most_common(1)[0]
        if count > 1:
            raise BoardError(f"records must differ in id, {identifier} is there {count} times; remove the copies")
        rows = rows_from(records, complete)
        honest = [record for record in records if not record.active_server]
        return cls(
            rows=tuple(rows),
            controls=check_controls(rows, honest),
            violations=find_violations(records),
            unranked=tuple(record for record in honest if record.status != "ok"),
            gaps=tuple(gaps(records, complete or Completeness())),
            active=active_results(records),
        )

    @classmethod
    def from_folder(cls, results: str | os.PathLike[str], verify: ScoreCheck | None = None) -> "Board":
        """Builds the board of a results folder, checked against the arrays and manifests in it.

        Args:
            results: output of the run.
            verify: recomputes numbers from scores.
        """
        return cls.from_folders([results], verify)

    @classmethod
    def from_folders(cls, results: Iterable[str | os.PathLike[str]], verify: ScoreCheck | None = None) -> "Board":
        """Builds the board of all records in several results folders, each checked as by `from_folder`.

        Args:
            results: outputs of runs; no record may be in two of them.
            verify: recomputes numbers from scores.
        """
        folders = [read_folder(folder, verify) for folder in results]
        if len(folders) == 1:
            return cls.from_records(folders[0].records, folders[0].complete)
        manifests = tuple(manifest for folder in folders for manifest in folder.complete.manifests or ())
        return cls.from_records([record for folder in folders for record in folder.records], Completeness(manifests))

    @property
    def trustworthy(self) -> bool:
        """True if there are controls and all of them hold."""
        # all() of an empty list is True, but a board without controls cannot be trusted.
        return bool(self.controls) and all(control.ok for control in self.controls)

    def to_text(self, *, width: int | None = None, color: bool = False) -> str:
        """Formats the board for a terminal.

        Args:
            width: columns to fill; by default the terminal's own, or 100 without a terminal.
            color: whether to write ANSI codes.

        Returns:
            Lines of text.
        """
        columns = width if width is not None else shutil.get_terminal_size((100, 24)).columns
        return "\n".join(forms.text(page, width=columns, color=color) for page in self._pages())

    def to_markdown(self) -> str:
        """Formats the board as GitHub-flavoured Markdown."""
        return "\n".join(map(forms.markdown, self._pages()))

    def to_latex(self) -> str:
        r"""Formats the board as a LaTeX fragment that needs no package."""
        return "\n".join(map(forms.latex, self._pages()))

    def to_csv(self) -> str:
        """Formats the rows as CSV: a number per column, empty if not measured, `inf` for an infinite epsilon.

        The first column of every row says whether the controls held; the last ones are the row's id, its privacy unit
        and the versions of package and schema. A text that a spreadsheet would compute begins with an apostrophe.
        """
        # In every line, because spreadsheets are sorted, cut and passed on without their top lines.
        verdict = "held" if self.trustworthy else "FAILED" if self.controls else "none"
        lines = [
            {"controls": verdict, **_flat(row), "row_id": row_id(row), "unit": row.unit, "version": board_version()}
            for row in self.rows
        ]
        file = io.StringIO()
        names = list(lines[0]) if lines else ["controls"]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _no_formula(value) for name, value in line.items()} for line in lines)
        return file.getvalue()

    def to_dict(self) -> dict[str, Any]:
        """Returns the board as plain JSON values, including every attack; infinite epsilon is None with its reason."""
        return {
            "banner": alarms(self.controls, self.violations, self.gaps),
            "trustworthy": self.trustworthy,
            "gaps": list(self.gaps),
            "controls": [dataclasses.asdict(control) for control in self.controls],
            "violations": [dataclasses.asdict(violation) for violation in self.violations],
            **({"of_submissions": list(self.of_submissions)} if self.of_submissions else {}),
            "rows": [_tree(row) for row in self.rows],
            "still_leaks": dict(reconstruction_summaries(self.rows)),
            "public_only": public_numbers(self.rows),
            "unranked": [
                {
                    "id": record.id,
                    "suite": record.suite,
                    "defense": dataclasses.asdict(record.defense),
                    "attack": record.attack and dataclasses.asdict(record.attack),
                    "kind": record.kind,
                    "task": dict(record.task),
                    "seed": record.seed,
                    "status": record.status,
                    "reason": record.reason,
                }
                for record in self.unranked
            ],
            **({"active_server": [dataclasses.asdict(result) for result in self.active]} if self.active else {}),
        }

    def _pages(self) -> list[Content]:
        """Returns the board, and behind it the table of active servers if there are any."""
        return [self._content(), *([active_content(self.active)] if self.active else [])]

    def _content(self) -> Content:
        return content(
            self.rows,
            controls=self.controls,
            violations=self.violations,
            unranked=self.unranked,
            gaps=self.gaps,
        )


def _place(record: Record) -> tuple[str, str, str, int, str]:
    """Sort key of a record, so that the board does not depend on the order of the records."""
    attack = record.attack.name if record.attack else ""
    return record.suite, record.defense.name, attack, record.seed, record.id


def _flat(row: Row) -> dict[str, Any]:
    claim = row.claim
    line: dict[str, Any] = {
        "suite": row.suite,
        "rank": row.rank,
        "rank_of": row.ranked_of,
        "rank_among": guarantee_words(row.guarantee) if row.rank else None,
        "rank_reason": row.unplaced or None,
        "defense": row.defense.name,
        "settings": _json(row.defense.settings),
        "budget": _json(dict(row.budget)),
        "task": _json(dict(row.task)),
        "control": row.control,
        # Empty fields mean not measured; an infinite claim is known, so it is written.
        "epsilon": None if claim is None else "inf" if claim.epsilon is None else claim.epsilon,
        "epsilon_rdp": claim and claim.epsilon_rdp,
        "epsilon_as_if_poisson": claim and claim.as_if_poisson,
        "delta": claim and claim.delta,
        "relation": claim and claim.relation,
        "sampling": claim and claim.sampling,
        "accountant": claim and claim.accountant,
        "epsilon_reason": _epsilon_reason(row),
        "epsilon_assumes": "; ".join(row.claim.assumes) if row.claim else None,
        "epsilon_unverified": "; ".join(row.claim.unverified) if row.claim else None,
        "noise_multiplier": row.noise_multiplier,
    }
    for name, estimate in _by_field(row).items():
        line |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        line |= {
            f"{name}_n": estimate.n,
            f"{name}_attack": estimate.attack,
            f"{name}_looks": estimate.looks,
            f"{name}_chosen_on": estimate.chosen_on,
            f"{name}_reason": estimate.reason,
        }
        if METRICS[estimate.metric].kind == RANKED_BY:
            line |= {f"{name}_largest_under_claim": estimate.largest, f"{name}_gap": estimate.gap}
    bound = dataclasses.asdict(proved_bound(row))
    line |= {NAME: bound.pop("value"), f"{NAME}_n": len(bound["seeds"])}
    line |= {f"{NAME}_{name}": value for name, value in bound.items() if name not in ("metric", "seeds")}
    statuses = Counter(record.status for record in row.unranked)
    line |= {"failed": statuses["failed"], "skipped": statuses["skipped"], "missing": len(row.missing)}
    line["at_least"] = " ".join(_at_least(row))
    line |= {"seeds": " ".join(map(str, row.seeds)), "flags": " ".join(row.flags)}
    line["degraded_attacks"] = "; ".join(row.degraded)
    return line


# Exports shorten a path to its last name, which may be a formula too.
_FORMULA = re.compile(r"[=+\-@\t\r]|(?:/|~|file:|[A-Za-z]:[\\/]).*[\\/][=+\-@]")


def _no_formula(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def _by_field(row: Row) -> dict[str, Estimate]:
    return {column.field or column.key: row.estimates[column.key] for _, column in columns()}


def _at_least(row: Row) -> list[str]:
    """Kinds of result whose worst case is only a lower limit."""
    return sorted(row.lacks & {kind.name for kind in attacked()})


def _tree(row: Row) -> dict[str, Any]:
    return {
        "label": row.label,
        "suite": row.suite,
        "suite_digests": sorted({record.suite_digest for record in row.records}),
        "defense": dataclasses.asdict(row.defense),
        "budget": dict(row.budget),
        "task": dict(row.task),
        "control": row.control,
        "rank": row.rank,
        "rank_of": row.ranked_of,
        "rank_among": guarantee_words(row.guarantee) if row.rank else None,
        "rank_reason": row.unplaced or None,
        "at_least": _at_least(row),
        "missing": [cell.id for cell in row.missing],
        "epsilon": row.claim and row.claim.epsilon,
        "epsilon_reason": _epsilon_reason(row),
        "claim": row.claim and dataclasses.asdict(row.claim),
        "noise_multiplier": row.noise_multiplier,
        **{name: _estimate(estimate) for name, estimate in _by_field(row).items()},
        # One for each relation of neighbours: their values are not comparable.
        NAME: [dataclasses.asdict(bound) for bound in proved_bounds(row)],
        "attacks": [_cell(cell) for cell in row.cells],
        "seeds": list(row.seeds),
        "flags": list(row.flags),
        "failed": [record.id for record in row.unranked if record.status == "failed"],
        "skipped": [record.id for record in row.unranked if record.status == "skipped"],
    }


def _cell(cell: BoardCell) -> dict[str, Any]:
    names = dict.fromkeys(name for record in cell.records.values() for name in record.metrics)
    first = next(iter(cell.records.values()))
    return {
        "kind": cell.kind,
        "attack": cell.attack,
        "settings": first.attack and first.attack.settings,
        "requires": None if first.requires is None else dict(first.requires),
        "noise": cell.noise,
        "metrics": {name: _estimate(over_seeds(name, cell)) for name in names},
        "flags": list(dict.fromkeys(flag for record in cell.records.values() for flag in record.flags)),
        "records": [record.id for record in cell.records.values()],
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    tree = dict(vars(estimate))  # `asdict` copies each value, of a hundred thousand on a large board
    # Properties such as n are no fields.
    tree[LARGEST_UNDER_CLAIM] = tree.pop("largest")
    return {**tree, "gap": estimate.gap, "seeds": list(estimate.seeds), "n": estimate.n}


def _epsilon_reason(row: Row) -> str | None:
    return "no claim in these records" if row.claim is None else row.claim.reason


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
