"""Rows of a board: records grouped by suite, defense with its settings, budget and task.

Records of a kind with a task of its own (reconstruction: a shared update of a fresh model) join the rows of the same
suite, defense, budget and control. Values that depend on the seed (hashes of its split) do not divide a row. The
suite's digest does not either, because adding a cell to a suite changes no other cell.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..kinds import KINDS, ControlRole, KindOfResult
from ..metrics import METRICS, BoardColumn, KnownMetric, columns
from ..records.fields import MethodUsed, RecordedClaim, RequestedBudget
from ..records.folder import Completeness
from ..records.labels import differences, key_of, public, without
from ..records.manifest import Expected, belongs
from ..records.record import Record
from ..records.task import TrainingTask, UpdateTask, task_of
from .aggregate import BoardCell, BoardError, Estimate, worst_case
from .comparable import attacks_tried, mixed, same_splits

Unit = Literal["record", "client"]
"""Privacy unit: an example or a record of a client, or all of a client's records."""

RANKED_BY = "membership"
"""Kind of attack whose worst case decides ranks."""

DEGRADED = "degraded"
"""Flag of a record whose attack saw itself that it found no match; it is listed with the attack, not with the row."""

NO_AUC = "no membership attack was measured, and ranks are by the worst AUC"

CONTROL_FAILED = "control_failed"
"""Flag of the records of a submission whose own controls failed."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Results of a defense at a budget and task.

    Attributes:
        suite: its name.
        defense: name and full settings.
        budget: as requested.
        task: resolved, without values that depend on the seed; that of a shared update if no training was recorded.
        control: whether the row must leak ("positive"), must not ("negative"), or is a contestant (None).
        details: settings, budget and task in which rows of this defense differ, in words.
        variant: `details` without the budget: rows that share it differ in their budgets alone.
        claim: claim of its records with the largest epsilon; None without claims.
        noise_multiplier: noise std / sensitivity; None if not recorded or not a single number.
        cells: all measured cells.
        estimates: key of a column -> its estimate, for every column of `metrics.columns`.
        flags: of the records, except that of an attack alone (`degraded`), and the row's own: incomplete,
            missing_cells, uneven_seeds, uneven_attacks, uneven_tasks, mixed_code, claims_differ.
        unranked: its records that failed or were skipped.
        missing: requested cells without a record.
        lacks: kinds of result whose worst case is only a lower limit, because a cell failed, was refused or is missing,
            or other rows have more attacks.
        rank: place among the contestants of its section and `guarantee`, from 1; None without a rank.
        ranked_of: number of contestants with a rank there; None without a rank.
        unplaced: why it has no rank; empty for controls and ranked rows.
    """

    suite: str
    defense: MethodUsed
    budget: RequestedBudget
    task: TrainingTask | UpdateTask
    control: ControlRole | None
    details: str
    variant: str
    claim: RecordedClaim | None
    noise_multiplier: float | None
    cells: tuple[BoardCell, ...]
    estimates: Mapping[str, Estimate]
    flags: tuple[str, ...]
    unranked: tuple[Record, ...]
    missing: tuple[Expected, ...] = ()
    lacks: frozenset[str] = frozenset()
    rank: int | None = None
    ranked_of: int | None = None
    unplaced: str = ""

    @property
    def section(self) -> tuple[str, str, str, str]:
        """Suite, data set, model and privacy unit, within which rows are comparable; a defense may override the rest.

        The unit is empty for an example or a record of a client: an epsilon of another unit is another guarantee.
        """
        return self.suite, self.task.data, self.task.model, "unit: client" if self.unit == "client" else ""

    @property
    def unit(self) -> Unit:
        """Privacy unit of the claim: `client`, or `record` for an example, for a record of a client, or no claim."""
        return "client" if self.claim is not None and self.claim.unit == "client" else "record"

    @property
    def guarantee(self) -> tuple[float, float | None, str]:
        """Epsilon, delta and privacy unit, within which rows are ranked; an infinite epsilon has no delta.

        The epsilon is the requested one if the claim stays within it, because calibrated claims differ in their last
        digits, and otherwise the claim's, to two decimals.
        """
        if self.claim is None or self.claim.epsilon is None:
            return math.inf, None, "" if self.claim is None else self.claim.unit
        requested = self.budget.epsilon
        epsilon = (
            requested if requested is not None and self.claim.epsilon <= requested else round(self.claim.epsilon, 2)
        )
        return epsilon, self.claim.delta, self.claim.unit

    @property
    def degraded(self) -> tuple[str, ...]:
        """Attacks on the row that saw themselves that they found no match: a property of the attack's result."""
        words = [
            f"{cell.attack}{KINDS[cell.kind].noise_words(cell.noise)}"
            for cell in self.cells
            if any(DEGRADED in record.flags for record in cell.records.values())
        ]
        return tuple(dict.fromkeys(words))

    @property
    def method(self) -> str:
        """Name of the defense with the settings in which its rows differ, without the budget."""
        return self.defense.name + (f" ({self.variant})" if self.variant else "")

    @property
    def label(self) -> str:
        """Name of the row for a reader."""
        control = f" ({self.control.replace('_', ' ')} control)" if self.control else ""
        return self.defense.name + (f" ({self.details})" if self.details else "") + control

    @property
    def accuracy(self) -> Estimate:
        """Accuracy on held-out data."""
        return self.estimates["accuracy"]

    @property
    def auc(self) -> Estimate:
        """Worst AUC over the membership attacks, which ranks contestants."""
        return self.estimates["auc"]

    def main(self, kind: KindOfResult) -> list[Estimate]:
        """Estimates of a kind's main metric, one per column."""
        return [self.estimates[column.key] for column in METRICS[kind.main].columns]

    @property
    def records(self) -> list[Record]:
        """Records with numbers (status "ok"), each once."""
        return [record for cell in self.cells for record in cell.records.values()]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds with which any cell was measured."""
        return tuple(sorted({record.seed for record in self.records}))

    def order(self) -> tuple[Any, ...]:
        """Sort key: section, contestants before controls, rankable rows, the guarantee, the pessimistic AUC."""
        epsilon, delta, unit = self.guarantee
        value = math.inf if self.auc.value is None else self.auc.value
        # The high end, so that a wide interval, as of few seeds, is no advantage.
        high = value if self.auc.high is None else self.auc.high
        place = [None, "positive", "negative", "public_only"].index(self.control)
        budget = (epsilon, delta or 0.0, unit)
        return (*self.section, place, bool(self.unplaced), *budget, high, value, self.defense.name, self.details)


def rows_from(records: Iterable[Record], complete: Completeness | None = None) -> list[Row]:
    """Groups records into rows, in the order of the board.

    Args:
        records: of any number of suites; of active servers, only a refuted claim is part of a row.
        complete: manifests beside them; without manifests, completeness is unknown and nothing is ranked.

    Returns:
        Rows that have an "ok" record, sorted.

    Raises:
        BoardError: a cell and seed was recorded twice.
    """
    records = list(records)
    known = Completeness() if complete is None else complete
    lacking = [(manifest.suite, cell) for manifest, cells in known.missing(records) for cell in cells]
    uncovered = {record.id for record in known.uncovered(records)}
    # A claim holds for any model that a server sends, so an active server refutes it for all.
    refuted = {_defended(record) for record in records if record.active_server and "claim_violated" in record.flags}
    records = [record for record in records if not record.active_server]
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(_defended(record), []).append(record)
    drafts = [draft for group in groups.values() for draft in _drafts(group)]
    families: dict[tuple[str, ...], list[_Draft]] = {}
    for draft in drafts:
        # Controls are labelled as such, so a difference from them needs no details.
        key = (draft.suite, draft.data, draft.model, draft.name, draft.first.control or "")
        families.setdefault(key, []).append(draft)
    rows = [row for family in families.values() for row in _finish(family)]
    rows = [
        replace(row, flags=tuple(dict.fromkeys((*row.flags, "claim_violated"))))
        if _defended(row.records[0]) in refuted
        else row
        for row in rows
    ]
    rows = placed(
        [_compared_with_plan(row, complete, lacking, uncovered) for row in _compared(rows, set(mixed(records)))]
    )
    return rows


def _defended(record: Record) -> str:
    """Key of the records of a defense, whatever was trained and attacked."""
    secure = record.noise == "secure"  # other random draws throughout, so a separate row
    return key_of((record.suite, record.defense.name, record.defense.settings, record.budget, record.control, secure))


def placed(rows: Iterable[Row]) -> list[Row]:
    """Sorts rows into the order of the board, and ranks those that can be ranked within their section and guarantee."""
    rows, ranks, ranked = sorted(rows, key=Row.order), Counter(), []
    groups = [(row.section, row.guarantee) if row.control is None and not row.unplaced else None for row in rows]
    sizes = Counter(groups)
    for row, group in zip(rows, groups, strict=True):
        if group is not None:
            ranks[group] += 1
            row = replace(row, rank=ranks[group], ranked_of=sizes[group])
        ranked.append(row)
    return ranked


def attacked_by(rows: Sequence[Row], kept: Callable[[Record | Expected], bool]) -> list[Row]:
    """Returns the rows as if only some attacks had been tried, with worst cases and ranks of these alone.

    Flags, and reasons for which a row has no rank, are those of all attacks.

    Args:
        rows: of a board, in its order.
        kept: whether a cell is of such an attack; cells without an attack stay in any case.

    Returns:
        A row for each, in the same order.
    """
    narrowed = _compared([_narrowed(row, lambda cell: cell.attack is None or kept(cell)) for row in rows], set())
    places = sorted(range(len(narrowed)), key=lambda i: narrowed[i].order())
    ranked = dict(zip(places, placed([narrowed[i] for i in places]), strict=True))
    return [ranked[i] for i in range(len(narrowed))]


def _kept_cell(cell: BoardCell, kept: Callable[[Record | Expected], bool]) -> bool:
    return kept(next(iter(cell.records.values())))


def _narrowed(row: Row, kept: Callable[[Record | Expected], bool]) -> Row:
    cells = tuple(cell for cell in row.cells if _kept_cell(cell, kept))
    unranked = tuple(record for record in row.unranked if kept(record))
    missing = tuple(cell for cell in row.missing if kept(cell))
    # Kinds of which every attack stays keep their estimates, because a board may have thousands of cells.
    kinds = {cell.kind for cell in row.cells if not _kept_cell(cell, kept)} | {
        r.kind for r in row.unranked if not kept(r)
    }
    known = {column.key: row.estimates[column.key] for metric, column in columns() if metric.kind not in kinds}
    narrowed = replace(
        row,
        cells=cells,
        unranked=unranked,
        missing=missing,
        estimates=_estimates(list(cells), list(unranked), noiseless=row.noise_multiplier == 0.0, known=known),
        lacks=_kinds_lacking(unranked) | {cell.kind for cell in missing},
        rank=None,
        ranked_of=None,
    )
    if narrowed.auc.value is not None or row.control is not None:
        return narrowed
    return replace(narrowed, unplaced=row.unplaced or NO_AUC)


def several_guarantees(rows: Iterable[Row]) -> bool:
    """Returns whether contestants have different guarantees, so that a rank must say among how many it is."""
    return len({row.guarantee for row in rows if row.control is None}) > 1


def guarantee_words(guarantee: tuple[float, float | None, str]) -> str:
    """Formats a guarantee, as "ε 3, δ 1e-5, unit example"; "no proved ε" for an infinite one."""
    epsilon, delta, unit = guarantee
    if math.isinf(epsilon):
        return "no proved ε"
    return f"ε {epsilon:g}, δ {delta:g}, unit {unit}".replace("e-0", "e-")


def _compared(rows: list[Row], mixed_suites: set[str]) -> list[Row]:
    """Flags rows that lack seeds, attacks, splits or code which other rows of their section have."""
    sections: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        if row.control is None:
            sections.setdefault(row.section, []).append(row)
    of_section = {key: [r for row in rows if row.section == key for r in row.records] for key in sections}
    uneven = {key for key, records in of_section.items() if not same_splits(records)}
    # Once for each section, because a board may have a thousand rows.
    tried_in = {
        key: attacks_tried([record for row in own for record in (*row.records, *row.unranked)])
        for key, own in sections.items()
    }
    seeds_in = {key: {seed for row in own for seed in row.seeds} for key, own in sections.items()}
    flagged = []
    for row in rows:
        # Controls are not ranked, so they may be measured less evenly than contestants.
        tried, seeds = (tried_in[row.section], seeds_in[row.section]) if row.control is None else ({}, set())
        flags, lacks = dict.fromkeys(row.flags), set(row.lacks)
        if seeds - set(row.seeds):
            flags["uneven_seeds"] = None
        own = [*row.records, *row.unranked]
        absent = tried.keys() - attacks_tried(own).keys()
        lacks |= {tried[key][0] for key in absent}
        # Ranks are by membership: a membership attack that refused the release costs the rank, a closed form that did
        # not apply to it does not.
        own_attacks = attacks_tried(own, refused=True)
        if any(key not in own_attacks or tried[key][0] == RANKED_BY for key in absent):
            flags["uneven_attacks"] = None
        if row.control is None and row.section in uneven:
            flags["uneven_tasks"] = None
        if row.suite in mixed_suites:
            flags["mixed_code"] = None
        flagged.append(replace(row, flags=tuple(flags), lacks=frozenset(lacks)))
    return flagged


def _compared_with_plan(
    row: Row, complete: Completeness | None, lacking: list[tuple[str, Expected]], uncovered: set[str]
) -> Row:
    """Returns the row with its missing cells, and with the reason, if any, why it cannot be ranked."""
    first = row.records[0]
    missing = tuple(cell for suite, cell in lacking if belongs(cell, suite, first, row.task))
    flags = dict.fromkeys((*row.flags, *(["missing_cells"] if missing else [])))
    why = ""
    if missing:
        why = f"{len(missing)} of its cells have no record"
    elif "incomplete" in flags:
        why = "some of its cells failed"
    elif "uneven_attacks" in flags:
        why = "other defenses were attacked by more"
    elif "uneven_seeds" in flags:
        why = "not everything was measured with the same seeds"
    elif "uneven_tasks" in flags:
        why = "rows of this table were not trained on the same examples, with the same model, sampling and optimizer"
    elif "mixed_code" in flags:
        why = "records of its suite are of different code"
    elif CONTROL_FAILED in flags:
        why = "a control of its submission failed, so that its attacks or its splits may be at fault"
    elif "diverged" in flags:
        why = "a training under it diverged: that little leaks from a model that learned nothing is no protection"
    elif row.auc.value is None:
        # Otherwise rows without an AUC would be numbered in the order of their names.
        why = NO_AUC
    elif complete is None or not complete.known or any(record.id in uncovered for record in row.records):
        why = "whether its cells are complete is unknown: no manifest of a run lists them"
    lacks = row.lacks | {cell.kind for cell in missing}
    unplaced = why if row.control is None else ""
    return replace(row, flags=tuple(flags), missing=missing, lacks=lacks, unplaced=unplaced)


@dataclass(frozen=True, kw_only=True)
class _Draft:
    first: Record
    task: TrainingTask | UpdateTask
    ok: list[Record]
    unranked: list[Record]

    @property
    def suite(self) -> str:
        return self.first.suite

    @property
    def name(self) -> str:
        return self.first.defense.name

    @property
    def data(self) -> str:
        return self.task.data

    @property
    def model(self) -> str:
        return self.task.model


def _drafts(group: list[Record]) -> list[_Draft]:
    """Splits the records of a defense by training task; records with a task of their own join every part."""
    ok = [record for record in group if record.status == "ok"]
    unranked = [record for record in group if record.status != "ok"]
    shared = [record for record in ok if _own_task(record)]
    trained: dict[str, list[Record]] = {}
    for record in ok:
        if not _own_task(record):
            trained.setdefault(key_of(public(record.task)), []).append(record)
    if not trained and shared:
        # Both variants of an update, with and without noise, are in the same row.
        task = task_of(shared[0].kind, without(public(shared[0].task), "noise"))
        return [_Draft(first=shared[0], task=task, ok=shared, unranked=unranked)]
    drafts = []
    for key, own in trained.items():
        # A cell may fail before its task is resolved; it then counts against every row to which it may belong.
        others = trained.keys() - {key}
        failed = [r for r in unranked if _own_task(r) or key_of(public(r.task)) not in others]
        drafts.append(
            _Draft(first=own[0], task=task_of(own[0].kind, public(own[0].task)), ok=own + shared, unranked=failed)
        )
    return drafts


def _finish(family: list[_Draft]) -> list[Row]:
    parts = [
        differences([draft.first.defense.settings for draft in family]),
        differences([draft.first.budget for draft in family]),
        differences([{"noise": "secure"} if any(r.noise == "secure" for r in d.ok) else {} for d in family]),
        differences([without(draft.task, "data", "model") for draft in family]),
    ]
    details = [", ".join(filter(None, words)) for words in zip(*parts, strict=True)]
    # words[1] is the budget, in which rows of a variant may differ.
    variants = [", ".join(filter(None, (words[0], *words[2:]))) for words in zip(*parts, strict=True)]
    return [_row(draft, *words) for draft, *words in zip(family, details, variants, strict=True)]


def _row(draft: _Draft, details: str, variant: str) -> Row:
    cells = _cells(draft.ok)
    # Trainings only: the variant of an update without noise is recorded with a multiplier of 0.
    multipliers = {r.noise_multiplier for r in draft.ok if not _own_task(r)}
    claim, differ = _claim(draft.ok)
    # Dictionaries serve as ordered sets, so that flags keep the order of the records.
    flags = dict.fromkeys(flag for r in draft.ok + draft.unranked for flag in r.flags if flag != DEGRADED)
    if any(record.status == "failed" for record in draft.unranked):
        flags["incomplete"] = None
    refused = {kind: _refused_seeds(draft.unranked, kind) for kind in KINDS}
    if any(len({refused[cell.kind] | set(cell.records) for cell in cells if cell.kind == kind}) > 1 for kind in KINDS):
        flags["uneven_seeds"] = None
    if differ:
        flags["claims_differ"] = None
    return Row(
        suite=draft.suite,
        defense=draft.first.defense,
        budget=draft.first.budget,
        task=draft.task,
        control=draft.first.control,
        details=details,
        variant=variant,
        claim=claim,
        noise_multiplier=next(iter(multipliers)) if len(multipliers) == 1 else None,
        cells=tuple(cells),
        estimates=_estimates(cells, draft.unranked, noiseless=multipliers == {0.0}),
        flags=tuple(flags),
        unranked=tuple(draft.unranked),
        lacks=_kinds_lacking(draft.unranked),
    )


def _kinds_lacking(unranked: Iterable[Record]) -> frozenset[str]:
    # A refusal on any seed is no evidence of safety, so the worst case is marked "at least".
    return frozenset(r.kind for r in unranked if r.status == "failed" or r.attack_refused)


def _refused_seeds(records: Iterable[Record], kind: str) -> frozenset[int]:
    """Seeds on which attacks of a kind refused the release as outside their scope; empty for the ranking kind."""
    if kind == RANKED_BY:
        return frozenset()
    return frozenset(record.seed for record in records if record.kind == kind and record.attack_refused)


def _estimates(
    cells: list[BoardCell], unranked: list[Record], *, noiseless: bool, known: Mapping[str, Estimate] | None = None
) -> dict[str, Estimate]:
    """Estimates of every column, in order, taken from `known` if there; `noiseless`: no variant that needs noise."""
    estimates = dict(known or {})
    # Worst cases first, because they decide the leading attack, whose numbers other columns take.
    for metric, column in sorted(columns(), key=lambda pair: pair[0].over_attacks == "leading"):
        if column.key in estimates:
            continue
        matching = [c for c in cells if c.kind == metric.kind and column.variant in (None, c.noise)]
        if metric.over_attacks == "leading":
            # From the leading attack, because attacks on different shared updates have different images and floors.
            main = [estimates[main_column.key] for main_column in METRICS[KINDS[metric.kind].main].columns]
            lead = next((estimate.attack for estimate in main if estimate.attack), None)
            matching = [cell for cell in matching if cell.attack == lead][:1]
        missing = _why_missing(metric, column, unranked, noiseless=noiseless)
        estimates[column.key] = worst_case(metric.name, matching, missing=missing)
    return {column.key: estimates[column.key] for _, column in columns()}


def _cells(records: list[Record]) -> list[BoardCell]:
    """Groups records into a cell for each attack (with its settings and shared task), with its seeds in order."""
    by_attack: dict[str, list[Record]] = {}
    for record in records:
        attack = None if record.attack is None else (record.attack.name, record.attack.settings)
        task = public(record.task) if _own_task(record) else None
        by_attack.setdefault(key_of((record.kind, attack, task)), []).append(record)
    groups = list(by_attack.values())
    labels = _attack_labels([group[0] for group in groups])
    cells = []
    for group, label in zip(groups, labels, strict=True):
        seeds: dict[int, Record] = {}
        for record in sorted(group, key=lambda record: record.seed):
            if (recorded := seeds.setdefault(record.seed, record)) is not record:
                cell = f"{record.defense.name} x {label or record.kind}, seed {record.seed}"
                raise BoardError(
                    f"{cell} is recorded twice, as {recorded.id} (code {recorded.provenance.code}) "
                    f"and {record.id} (code {record.provenance.code}); remove one"
                )
        noise = group[0].task.noise if KINDS[group[0].kind].variants else None
        cells.append(BoardCell(kind=group[0].kind, attack=label, noise=noise, records=seeds))
    return cells


def _attack_labels(firsts: list[Record]) -> list[str | None]:
    """Names of the attacks, with the settings in which attacks of the same name differ."""
    labels: list[str | None] = [None] * len(firsts)
    same: dict[tuple[str, str], list[int]] = {}
    for i, record in enumerate(firsts):
        if record.attack is not None:
            same.setdefault((record.kind, record.attack.name), []).append(i)
    for (kind, name), places in same.items():
        settings = differences([a.settings for i in places if (a := firsts[i].attack) is not None])
        tasks = [without(public(firsts[i].task), "noise") for i in places]
        extra = differences(tasks) if KINDS[kind].own_task else [""] * len(places)
        for i, words in zip(places, zip(settings, extra, strict=True), strict=True):
            text = ", ".join(filter(None, words))
            labels[i] = f"{name} ({text})" if text else name
    return labels


def _claim(records: list[Record]) -> tuple[RecordedClaim | None, bool]:
    """Returns the claim with the largest epsilon, and whether claims differ; claims of trainings have precedence."""
    # Trainings before shared updates, and among those the release with noise before the release without.
    rank = [(_own_task(r) + (r.task.noise == "none"), r.claim) for r in records if r.claim]
    claims = [claim for place, claim in rank if place == min(place for place, _ in rank)]
    if not claims:
        return None, False
    # A row claims the guarantee that all of its records satisfy, which is the largest epsilon.
    largest = max(claims, key=lambda claim: math.inf if claim.epsilon is None else claim.epsilon)
    return largest, len({(claim.epsilon, claim.delta) for claim in claims}) > 1


def _why_missing(metric: KnownMetric, column: BoardColumn, unranked: list[Record], *, noiseless: bool) -> str:
    noise, variant = column.variant, KINDS[metric.kind].variant(column.variant)
    if variant is not None and variant.needs_noise and noiseless:
        # Checked before failed or skipped records: such a cell is never planned, so nothing else explains its absence.
        return "this defense adds no noise"
    of_kind = [r for r in unranked if r.kind == metric.kind and (noise is None or r.task.noise in (None, noise))]
    reasons = dict.fromkeys(f"{record.status}: {record.reason}" for record in of_kind)
    kind = metric.kind if variant is None else f"{variant.adjective} {metric.kind}"
    return "; ".join(reasons) or f"no {kind} record"


def _own_task(record: Record) -> bool:
    return KINDS[record.kind].own_task
