"""Manifest of a plan: the request that is written beside its records, and with which checks compare them."""

from __future__ import annotations

from collections.abc import Sequence

from leakbench.leaderboard.records.manifest import Expected, Manifest
from leakbench.leaderboard.records.record import MethodUsed

from ..suite.suite import Suite
from .cells import Cell, Plan


def manifest_of(plan: Plan, suite: Suite, secure_noise: bool, command: Sequence[str] = ()) -> Manifest:
    """Returns the manifest of a plan, which lists every requested cell and is written beside the records.

    Args:
        plan: of the suite.
        suite: with its overrides and selection.
        secure_noise: as in the plan.
        command: command line of the run; `leakbench run SUITE` if empty.
    """
    plain = ("leakbench", "run", suite.source.removesuffix(".toml"), *["--secure-noise"] * secure_noise)
    return Manifest(
        suite=suite.name,
        suite_digest=suite.digest,
        command=tuple(command) or plain,
        cells=tuple(_expected(cell) for cell in plan.cells),
    )


def _expected(cell: Cell) -> Expected:
    request = cell.request
    return Expected(
        id=cell.id,
        kind=request.kind,
        control=request.control,
        defense=MethodUsed(**request.defense.to_dict()),
        attack=None if request.attack is None else MethodUsed(**request.attack.to_dict()),
        budget=request.budget.to_dict(),
        training=request.training.to_dict(),
        noise=request.release_noise,
        secure=request.secure,
        seed=request.seed,
        skip=cell.skip,
    )
