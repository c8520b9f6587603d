"""Attacks that identify the image among given candidates, judged separately from attacks that reconstruct images.

The image is among the candidates, so a right choice is an exact copy, whose PSNR cannot be compared with that of a
reconstruction. Records of such attacks have the share of right choices instead, the success of a guess from the
candidates alone, and the bound that the claim puts on any choice (reconstruction robustness).
"""

from collections.abc import Sequence

from ..metrics import METRICS
from ..records.details import ChoiceDetail
from .aggregate import BoardCell, over_seeds

SUCCESS, BOUND = METRICS["prior_success"], METRICS["rero_bound"]

MARGIN = 0.2
"""Margin over chance that the success rate of a positive control must exceed."""


def is_choice(cell: BoardCell) -> bool:
    """True if the cell's attack picked among candidates."""
    return any(SUCCESS.name in record.metrics for record in cell.records.values())


def chance(cell: BoardCell) -> float:
    """Success rate of a guess from the candidates alone: the largest among the cell's records; 1 if unknown."""
    picked = [r.metrics[SUCCESS.name] for r in cell.records.values() if SUCCESS.name in r.metrics]
    known = [kappa for metric in picked if (kappa := ChoiceDetail.of(metric.detail).kappa) is not None]
    return max(known, default=1.0)


def choices_words(cells: Sequence[BoardCell]) -> list[str]:
    """Clauses on the success rate of each attack, with chance and the claim's bound; for the middle of a sentence.

    Args:
        cells: of choices, of a single variant of the release.
    """
    clauses = []
    for cell in cells:
        success, bound, by_chance = over_seeds(SUCCESS.name, cell), over_seeds(BOUND.name, cell), chance(cell)
        if success.value is None:
            clauses.append(f"what {cell.attack} picks is n/a ({success.reason}: no safety)")
            continue
        allowed = "no claim bounds it" if bound.value is None else f"{bound.value:.2f} at most by the claim"
        counted = sorted({r.metrics[SUCCESS.name].n or 1 for r in cell.records.values() if SUCCESS.name in r.metrics})
        targets = "-".join(str(n) for n in dict.fromkeys((counted[0], counted[-1])))
        clauses.append(
            f"{cell.attack} picks the image out of {round(1 / by_chance)} candidates in {success.words(2)} of cases "
            f"({by_chance:.2f} by chance, {allowed}; {success.n} seed{'s' * (success.n != 1)} of {targets} "
            f"update{'s' * (counted != [1])})"
        )
    return clauses


def judged(cells: Sequence[BoardCell], *, positive: bool) -> tuple[str, str, bool]:
    """Judges a control by its choices; returns (expected, measured, ok).

    Args:
        cells: of choices; not empty.
        positive: if True, some attack must exceed chance by the margin on average; else none may exceed it
            significantly.
    """
    pairs = [(over_seeds(SUCCESS.name, cell, looks=len(cells)), chance(cell)) for cell in cells]
    pairs = [(estimate, by_chance) for estimate, by_chance in pairs if estimate.value is not None]
    expected = f"{SUCCESS.label} {'above' if positive else 'not above'} chance"
    if not pairs:
        return expected, f"nothing: {over_seeds(SUCCESS.name, cells[0]).reason}", False
    best, by_chance = max(pairs, key=lambda pair: (pair[0].value or 0.0) - pair[1])
    measured = f"{SUCCESS.label} {best.words(SUCCESS.digits)} against {by_chance:.2f} by {best.attack}"
    if positive:
        return expected, measured, (best.value or 0.0) > by_chance + MARGIN
    return expected, measured, all(estimate.low is not None and estimate.low <= free for estimate, free in pairs)
