"""Suite behind a declaration: its digest, seeds and cells, without the submission's method, whose code is not run."""

from __future__ import annotations

import importlib.util
import io
import sys
import tokenize
import unicodedata
from pathlib import Path

from leakbench.leaderboard.records.files import read_bytes
from leakbench.leaderboard.submissions.cells import SuiteFacts
from leakbench.leaderboard.submissions.command import SUITE_ROLES, entry
from leakbench.leaderboard.submissions.declaration import Declaration
from leakbench.leaderboard.submissions.identity import request_digest, seeds_of

from ..catalog import plugins
from ..plan import expand as planning
from ..plan.checkpoints import stored_weights
from ..plan.manifest import manifest_of
from ..run.provenance import library
from ..suite import suite as suites
from ..suite.errors import ChoiceError, SuiteError
from ..suite.suite import Suite

MOST_PARTS = 100
"""Parts of a dotted name in a method's file."""


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
            f"suite {name!r} chooses settings by a search, and a submission does not hold its points, so the choice "
            "could not be checked; take a suite without [tune]"
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
    cells, why, figures = None, "", {}
    try:
        plan = planning.plan(with_seeds(suite, seeds))
        cells = manifest_of(plan, suite, secure_noise=False).cells
        figures = {cell.id: frozenset(cell.reported) for cell in plan.cells}
    except (SuiteError, OSError, ImportError) as error:  # data or an extra that are not here
        why = " ".join(str(error).split())
    return SuiteFacts(
        name=suite.name,
        digest=suite.digest,
        seeds=seeds,
        cells=cells,
        unplanned=why,
        source=library().source,
        checkpoints=stored_weights(suite.zoo) if suite.zoo else {},
        reported=frozenset((row.defense, row.attack, row.metric, row.value, row.source) for row in suite.reported),
        figures=figures,
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
    """Returns why a method's file is not all of its code, or not as it reads; empty if it is. The file is not run.

    A verifier reads the file before running it: an encoding in which a comment is code, a line end that editors do not
    show, and a character that reorders a line would hide code. A file with the name of a module would be imported in
    its place by processes that start in its folder.

    Args:
        path: of the file.
    """
    if why := _hidden(read_bytes(path, "method file")):
        return why
    if path.stem in sys.stdlib_module_names or _is_installed(path):
        return f"must have a name of its own: {path.stem} is an installed module, which it would replace"
    try:
        beside = [file.name for file in plugins.source_files(f"{path}:f") if file != path.resolve()]
    except (RecursionError, MemoryError):  # of Python's parser, on thousands of nested brackets
        return "must be a Python file that can be parsed"
    return f"must be the method's only file, and it imports {', '.join(sorted(beside))}" if beside else ""


def _hidden(content: bytes) -> str:
    """Returns why Python may read other code in a file than a person; empty if not."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode()
    except (SyntaxError, UnicodeDecodeError):
        return "must be in UTF-8"
    if encoding not in ("utf-8", "utf-8-sig"):
        return f"must be in UTF-8, and declares the encoding {encoding}"
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        # Cc: control characters, as a carriage return, which ends a line. Cf: invisible ones, which may reorder it.
        if odd := [c for c in line if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c != "\t"]:
            return f"must be without invisible characters, line {number} has U+{ord(odd[0]):04X}"
    return "" if _longest_name(text) <= MOST_PARTS else f"must have names of at most {MOST_PARTS} parts with dots"


def _longest_name(text: str) -> int:
    """Returns the number of dots of the longest dotted name; Python's parser keeps every prefix of an imported one."""
    longest = dots = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.NL, tokenize.COMMENT, tokenize.NAME):
                continue
            dots = dots + token.string.count(".") if set(token.string) == {"."} else 0
            longest = max(longest, dots)
            if longest > MOST_PARTS:
                break
    except (SyntaxError, tokenize.TokenError):  # which the parser refuses too
        pass
    return longest


def _is_installed(path: Path) -> bool:
    """True if another file is imported by the name of this one; nothing is imported."""
    try:
        spec = importlib.util.find_spec(path.stem)
    except ValueError:  # a module without a spec
        return True
    return spec is not None and (spec.origin is None or Path(spec.origin).resolve() != path.resolve())
