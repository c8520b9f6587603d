"""Headline board of a site: groups of comparable rows, in each the Pareto front first, under any threat model.

The front of a budget has the ranked rows that no other ranked row dominates: as accurate or more, with a worst AUC as
small or smaller, and better in accuracy or AUC. Means are compared, so neighbours whose intervals overlap may change
places with other seeds. Controls are never on a front, nor are rows without a rank or without either number, or with a
refuted claim. Published rows are compared among themselves, a submission's with its own and the published ones: its
numbers are the submitter's word, and take no row of others off the front.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..board.aggregate import Estimate
from ..board.content import strongest_words
from ..board.proved_bound import ProvedBound, proved_bounds
from ..board.rows import Row, guarantee_words
from ..board.threat_models import accesses, under
from .links import attack_page
from .site import SiteRow


@dataclass(frozen=True, kw_only=True)
class CellCoverage:
    """Extent to which a row was measured.

    Attributes:
        cells: with numbers.
        requested: cells with a record of any status, and cells of a manifest without a record.
        attacks: names of attacks with numbers.
        run: number of the attacks with numbers on any published row of the suite, or on one of its submission.
    """

    cells: int
    requested: int
    attacks: int
    run: int


@dataclass(frozen=True, kw_only=True)
class HeadlineEntry:
    """Row of the headline board.

    Attributes:
        site_row: with its id, tier and submission.
        row: its numbers, of all attacks or of those of a threat model.
        proved: lower bounds on epsilon, by relation.
        coverage: of its cells and attacks.
        front: whether it is on the Pareto front of its budget.
    """

    site_row: SiteRow
    row: Row
    proved: list[ProvedBound]
    coverage: CellCoverage
    front: bool

    @property
    def reconstruction(self) -> Estimate:
        """PSNR of the update as it is released: with noise, or without if the defense adds none."""
        noisy = self.row.estimates["psnr_noisy"]
        return self.row.estimates["psnr_free"] if self.row.noise_multiplier == 0.0 and noisy.value is None else noisy

    @property
    def floor(self) -> Estimate:
        """PSNR of the mean public image."""
        return self.row.estimates["floor"]

    @property
    def picked(self) -> Estimate:
        """Share of images picked out of candidates, from the update as it is released."""
        noisy = self.row.estimates["prior_noisy"]
        return self.row.estimates["prior_free"] if self.row.noise_multiplier == 0.0 and noisy.value is None else noisy

    @property
    def strongest_page(self) -> str:
        """Path of the page of its strongest attack; empty without an attack."""
        label = strongest_words(self.row)[0]
        records = (record for cell in self.row.cells if cell.attack == label for record in cell.records.values())
        return next((attack_page(record.attack.name) for record in records if record.attack), "")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Contestants of a budget, the Pareto front first, or the controls of a section.

    Attributes:
        words: the guarantee, or "Controls".
        controls: whether these are controls.
        entries: in order.
    """

    words: str
    controls: bool
    entries: tuple[HeadlineEntry, ...]


@dataclass(frozen=True, kw_only=True)
class HeadlineSection:
    """Rows of a suite, data set, model and privacy unit, within which numbers are comparable."""

    suite: str
    data: str
    model: str
    unit: str
    groups: tuple[Group, ...]


def headline(rows: Sequence[SiteRow], access: str | None = None) -> list[HeadlineSection]:
    """Builds the headline board.

    Args:
        rows: of a site, in the order of its board.
        access: of a threat model, among whose attacks worst cases, front and ranks are computed; None for all attacks.
    """
    board = [site_row.row for site_row in rows]
    owners = [site_row.submission and (site_row.submission.handle, site_row.submission.digest) for site_row in rows]
    numbers = board if access is None else _under(board, access, owners)
    run: dict[Hashable, set[str]] = {}
    for row, owner in zip(numbers, owners, strict=True):
        run.setdefault((row.suite, owner), set()).update(_attacks(row))
    front = pareto_front(numbers, owners)
    entries = [
        HeadlineEntry(
            site_row=site_row,
            row=row,
            proved=proved_bounds(row),
            coverage=_coverage(row, len(run[row.suite, owners[i]] | run.get((row.suite, None), set()))),
            front=i in front,
        )
        for i, (site_row, row) in enumerate(zip(rows, numbers, strict=True))
    ]
    # `order` begins with the section, then has contestants before controls and the guarantees of the ranked rows.
    entries.sort(key=lambda entry: entry.row.order())
    sections = []
    for (suite, data, model, unit), group in groupby(entries, key=lambda entry: entry.row.section):
        section = list(group)
        groups = []
        for words, members in _by_guarantee(entry for entry in section if entry.row.control is None).items():
            ordered = sorted(members, key=lambda entry: not entry.front)
            groups.append(Group(words=words, controls=False, entries=tuple(ordered)))
        if controls := tuple(entry for entry in section if entry.row.control is not None):
            groups.append(Group(words="Controls", controls=True, entries=controls))
        sections.append(HeadlineSection(suite=suite, data=data, model=model, unit=unit, groups=tuple(groups)))
    return sections


def under_each(rows: Sequence[SiteRow]) -> Mapping[str, list[HeadlineSection]]:
    """Returns the headline board of every threat model that occurs, by access.

    Args:
        rows: of a site, in the order of its board.
    """
    return {access: headline(rows, access) for access in accesses([site_row.row for site_row in rows])}


def pareto_front(rows: Sequence[Row], owners: Sequence[Hashable]) -> set[int]:
    """Returns the places of the rows that no published row, nor one of their submission, dominates in their budget.

    Args:
        rows: contestants without a rank, with a refuted claim, and controls, are left out.
        owners: submission of each row; None for a published one.
    """
    groups: dict[tuple[object, ...], list[tuple[int, float, float]]] = {}
    for i, row in enumerate(rows):
        accuracy, auc = row.accuracy.value, row.auc.value
        ranked = row.control is None and row.rank is not None and "claim_violated" not in row.flags
        if ranked and accuracy is not None and auc is not None:
            groups.setdefault((row.section, row.guarantee), []).append((i, accuracy, auc))
    return {
        i
        for points in groups.values()
        for i, accuracy, auc in points
        if not any(
            a >= accuracy and u <= auc and (a, u) != (accuracy, auc)
            for j, a, u in points
            if owners[j] in (None, owners[i])
        )
    }


def _under(rows: Sequence[Row], access: str, owners: Sequence[Hashable]) -> list[Row]:
    """Returns the rows of a threat model, those of each submission compared among themselves, as on the board."""
    places: dict[Hashable, list[int]] = {}
    for i, owner in enumerate(owners):
        places.setdefault(owner, []).append(i)
    numbers = {}
    for of_owner in places.values():
        numbers |= zip(of_owner, under([rows[i] for i in of_owner], access), strict=True)
    return [numbers[i] for i in range(len(rows))]


def _by_guarantee(entries: Iterable[HeadlineEntry]) -> dict[str, list[HeadlineEntry]]:
    groups: dict[str, list[HeadlineEntry]] = {}
    for entry in entries:
        groups.setdefault(guarantee_words(entry.row.guarantee), []).append(entry)
    return groups


def _coverage(row: Row, run: int) -> CellCoverage:
    cells = len(row.records)
    requested = cells + len(row.unranked) + len(row.missing)
    return CellCoverage(cells=cells, requested=requested, attacks=len(_attacks(row)), run=run)


def _attacks(row: Row) -> set[str]:
    return {record.attack.name for record in row.records if record.attack}
