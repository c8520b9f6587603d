"""Suite behind a declaration: its digest, seeds and cells, without the submission's method, whose code is not run."""

from __future__ import annotations

from pathlib import Path

from leakbench.leaderboard.submissions.cells import SuiteFacts
from leakbench.leaderboard.submissions.command import SUITE_ROLES, entry
from leakbench.leaderboard.submissions.declaration import Declaration
from leakbench.leaderboard.submissions.identity import request_digest, seeds_of

from ..catalog import plugins
from ..plan import expand as planning
from ..run.harness import manifest_of
from ..run.provenance import library
from ..suite import suite as suites
from ..suite.suite import ChoiceError, Suite, SuiteError


def plain_suite(name: str, small: bool) -> Suite:
    """Returns a built-in suite at its own seeds.

    Args:
        name: of the suite; a path is refused, because its file is not here.
        small: True for its small form.

    Raises:
        SuiteError: no such suite, or it chooses settings by a search.
    """
    if Path(name).name != name or name.endswith(".toml"):
        raise ChoiceError(f"a submission must be of a suite of leakbench, by its name, got {name!r}")
    suite = suites.load(name, small=small)
    if suite.tune is not None:
        raise ChoiceError(
            f"suite {name!r} chooses settings by a search, whose records a submission does not hold; take a suite "
            "without [tune]"
        )
    return suite


def with_seeds(suite: Suite, seeds: tuple[int, ...]) -> Suite:
    """Returns the suite at other seeds."""
    return suite.with_overrides([f"seeds={list(seeds)}"])


def seeds_in(suite: Suite, digest: str) -> tuple[int, ...]:
    """Returns the seeds of a submission: they follow from its digest, unless the suite trains nothing.

    A suite on checkpoints keeps its own seeds, because its zoo has no others.

    Args:
        suite: at its own seeds.
        digest: of the request.
    """
    return suite.seeds if suite.zoo is not None else seeds_of(digest, len(suite.seeds))


def facts(declaration: Declaration) -> SuiteFacts:
    """Returns what a check compares a submission with.

    Args:
        declaration: of the submission; none of its code is run.

    Raises:
        SuiteError: no such suite.
    """
    suite = plain_suite(declaration.suite, declaration.small)
    seeds = seeds_in(suite, request_digest(declaration))
    cells, why = None, ""
    try:
        plan = planning.plan(with_seeds(suite, seeds))
        cells = manifest_of(plan, suite, secure_noise=False).cells
    except (SuiteError, OSError, ImportError) as error:  # data or an extra that are not here
        why = " ".join(str(error).split())
    return SuiteFacts(
        name=suite.name, digest=suite.digest, seeds=seeds, cells=cells, unplanned=why, source=library().source
    )


def with_method(declaration: Declaration, suite: Suite) -> Suite:
    """Returns the suite with the submission's method, whose file is run; the current folder holds it.

    Args:
        declaration: of the submission.
        suite: at any seeds.
    """
    if declaration.method is None:
        return suite
    added = [entry(declaration)]
    is_defense = SUITE_ROLES[declaration.kind] == "--add-defense"
    return suite.with_added(defenses=added) if is_defense else suite.with_added(attacks=added)


def single_file(path: Path) -> str:
    """Returns why a method's file is not all of its code; empty if it is. The file is read and not run.

    Args:
        path: of the file.
    """
    try:
        beside = [file.name for file in plugins.source_files(f"{path}:f") if file != path.resolve()]
    except (RecursionError, MemoryError):  # of Python's parser, on thousands of nested brackets
        return "must be a Python file that can be parsed"
    return f"must be the method's only file, and it imports {', '.join(sorted(beside))}" if beside else ""
