"""Check of submissions, offline and without running any of their code: what a pull request has to pass.

A submission lies in `<root>/<handle>/<digest>/`. A bad one is set aside with its faults, and says nothing about the
others.
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..checks.check import CONTROLS, Recompute, examine
from ..checks.fault import Fault, Severity
from ..checks.suites import checkpoint_faults
from ..checks.text import MOST_NAMED, listed, printable
from ..records.manifest import Manifest
from ..records.record import Record
from ..records.validation import RecordError
from .cells import SuiteFacts, cell_problems, is_own, unmeasured
from .command import command_words, same_command
from .declaration import NAME, Declaration, DeclarationError, is_handle, read_declaration
from .identity import REPORTED, request_digest
from .method_file import code_faults
from .signature import ALLOWED, SIGNATURE, check_signature, statement
from .stamp import NAME as STAMP
from .stamp import SIGNATURE as STAMP_SIGNATURE
from .tiers import IN_PROCESS, TierOf, evidence_of, tier_of

VERIFIERS = "verifiers"
"""File at the root: keys of those whose stamps the board trusts, in OpenSSH's format of allowed signers."""

BESIDE = {NAME, SIGNATURE, STAMP, STAMP_SIGNATURE, "records", ".lock"}
LOCAL = {"__pycache__", "artifacts", "page"}
"""Traces of a run on the submitter's machine, which do no harm and belong into no pull request."""
MOST_FILES = 100_000


@dataclass(frozen=True)
class CheckedSubmission:
    """A submission and what is wrong with it.

    Attributes:
        path: `<handle>/<digest>`, below the root.
        folder: of the submission.
        declaration: None if it cannot be read.
        digest: of its request; empty without a declaration.
        records: that can be read.
        manifests: that can be read.
        faults: of all severities, ordered; their files are below the root.
        tier: by its flags and its stamp; None without a declaration.
    """

    path: str
    folder: Path
    declaration: Declaration | None
    digest: str
    records: tuple[Record, ...]
    faults: tuple[Fault, ...]
    manifests: tuple[Manifest, ...] = ()
    tier: TierOf | None = None

    @property
    def counts(self) -> bool:
        """True if nothing keeps it off a board."""
        return not any(fault.severity == "refused" for fault in self.faults)

    @property
    def failed_control(self) -> str:
        """Sentence about a control of the submission that failed; empty if all hold."""
        return next((f.problem for f in self.faults if f.field == CONTROLS and " must show " in f.problem), "")

    @property
    def own(self) -> list[Record]:
        """Records of its own method."""
        if self.declaration is None:
            return []
        return [
            record
            for record in self.records
            if is_own(self.declaration, record.defense.name, record.attack and record.attack.name)
        ]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Functions by which submissions are checked; none may run code of a submission.

    Attributes:
        facts: returns what is known of a declaration's suite; raises ValueError if it is none.
        recompute: compares a record's numbers with those of its arrays; None to skip that.
        beside: returns how a record's numbers differ from those of the records beside it; empty if they agree.
        single_file: returns why a method's file is not all of its code; empty if it is.
        verifiers: file of the verifiers that the board trusts; None for that of the root.
    """

    facts: Callable[[Declaration], SuiteFacts]
    recompute: Recompute | None = None
    beside: Callable[[Record, Sequence[Record]], str] = lambda record, others: ""
    single_file: Callable[[Path], str] = lambda path: ""
    verifiers: Path | None = None


def check_tree(root: Path, rules: Rules) -> tuple[list[CheckedSubmission], list[Fault]]:
    """Checks every submission below a root, each by itself, and then for copies among them.

    Args:
        root: folder of the handles' folders.
        rules: of the check.

    Returns:
        The submissions, by path; the faults of anything else that lies there.
    """
    submissions, faults = [], []
    for entry in _entries(root):
        if not entry.is_dir(follow_symlinks=False):
            if entry.name not in (VERIFIERS, "README.md", ".gitkeep"):
                faults.append(_fault(printable(entry.name), "", "must be the folder of a handle; remove it"))
            continue
        if not is_handle(entry.name):
            problem = "must be a handle: lower case letters, digits and single hyphens, 39 at most; rename it"
            faults.append(_fault(printable(entry.name), "", problem))
            continue
        for inner in _entries(Path(entry.path)):
            if inner.is_dir(follow_symlinks=False):
                submissions.append(_checked(Path(inner.path), root, rules))
            elif inner.name != ALLOWED or inner.is_symlink():
                problem = f"must be the folder of a submission, or the file {ALLOWED}; remove it"
                faults.append(_fault(f"{entry.name}/{printable(inner.name)}", "", problem))
    return _with_copies(submissions), faults


def _checked(folder: Path, root: Path, rules: Rules) -> CheckedSubmission:
    """Checks a submission; an unforeseen error refuses it alone, because it says nothing about the others."""
    try:
        return check_submission(folder, root, rules)
    except Exception as error:
        path = f"{printable(folder.parent.name)}/{printable(folder.name)}"
        problem = f"cannot be checked: {type(error).__name__}: {printable(str(error))}"
        return CheckedSubmission(path, folder, None, "", (), (_fault(path, "", problem),))


def check_submission(folder: Path, root: Path, rules: Rules) -> CheckedSubmission:
    """Checks a submission.

    Args:
        folder: of the submission.
        root: folder two levels above it.
        rules: of the check.
    """
    path = f"{printable(folder.parent.name)}/{printable(folder.name)}"
    links = list(_special(folder, path))
    if links:  # nothing below is opened: a link may lead anywhere
        return CheckedSubmission(path, folder, None, "", (), tuple(links))
    try:
        declaration = read_declaration(folder, f"{path}/{NAME}")
    except DeclarationError as error:
        return CheckedSubmission(path, folder, None, "", (), tuple(error.faults))
    digest = request_digest(declaration)
    faults = [*_place(folder, path, declaration, digest), *_files(folder, path, declaration)]
    records, manifests = (), []
    if (folder / "records").is_dir():
        # Its seeds follow from its digest, so a control that fails by chance could not be measured again: its rows
        # stand without a rank.
        examined = examine(folder, rules.recompute, failed_control="flagged", left_out="refused")
        records, manifests = tuple(examined.records.values()), list(examined.manifests.values())
        faults += [replace(fault, file=f"{path}/{fault.file}" if fault.file else path) for fault in examined.faults]
        measured = [record for record in records if record.status == "ok"]
        faults += [
            _fault(f"{path}/records/{record.id}.json", "noise_multiplier", printable(problem, 400))
            for record in measured
            if (problem := rules.beside(record, measured))
        ]
    else:
        faults.append(_fault(f"{path}/records", "", "must be there: run the command of the declaration in its folder"))
    faults += code_faults(folder, path, declaration, records, rules.single_file)
    faults += _suite(path, declaration, records, manifests, rules)
    faults += _signature(folder, path, declaration, digest, root)
    stamp, ignored = evidence_of(folder, declaration, rules.verifiers or root / VERIFIERS)
    if ignored:
        faults.append(_fault(f"{path}/{STAMP}", "", f"is ignored: {ignored}", "flagged"))
    for comparison in stamp.differing if stamp is not None and not ignored else []:
        problem = f"{comparison.words}, {comparison.metric}: computed again, it differs: {comparison.reason}"
        faults.append(_fault(f"{path}/{STAMP}", comparison.cell, problem, "flagged"))
    checked = CheckedSubmission(
        path, folder, declaration, digest, records, tuple(sorted(set(faults))), tuple(manifests)
    )
    flags = {flag for record in checked.own for flag in record.flags}
    if declaration.kind == "defense":  # whatever the flags of its records, which its code may have left out
        flags.add(IN_PROCESS)
    return replace(checked, tier=tier_of(flags, stamp, ignored))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _special(folder: Path, path: str) -> Iterator[Fault]:
    """Faults of links and special files anywhere below a folder, and of too many files."""
    count = 0
    for place, folders, files in os.walk(folder):  # which follows no link
        for name in sorted((*folders, *files)):
            count += 1
            file = Path(place, name)
            status = file.lstat()
            below = f"{path}/{'/'.join(map(printable, file.relative_to(folder).parts))}"
            if stat.S_ISLNK(status.st_mode):
                yield _fault(below, "", "it is a symbolic link, and those are not followed; copy the file")
            elif not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                yield _fault(below, "", "it is no regular file; remove it")
        if count > MOST_FILES:
            yield _fault(path, "", f"it must hold at most {MOST_FILES} files")
            return


def _place(folder: Path, path: str, declaration: Declaration, digest: str) -> Iterator[Fault]:
    file = f"{path}/{NAME}"
    if folder.parent.name != declaration.handle:
        problem = f"must be the name of the folder above, {printable(folder.parent.name)}, got {declaration.handle!r}"
        yield _fault(file, "handle", problem)
    if folder.name != digest:
        problem = (
            f"its folder must be named by the digest of its request, {digest}: the request has changed, and its seeds "
            "with it; make a new submission by leakbench submit --new"
        )
        yield _fault(file, "", problem)


def _files(folder: Path, path: str, declaration: Declaration) -> Iterator[Fault]:
    """Faults of files that belong to no submission."""
    method, checkpoint = declaration.method, declaration.checkpoint
    allowed = BESIDE | ({method.file} if method else set())
    allowed |= {checkpoint.file} if checkpoint and checkpoint.file else set()
    for entry in _entries(folder):
        name = printable(entry.name)
        if entry.name in LOCAL:
            yield _fault(
                f"{path}/{name}", "", "is no part of a submission; leave it out of the pull request", "flagged"
            )
        elif entry.name not in allowed:
            yield _fault(f"{path}/{name}", "", f"must be one of {', '.join(sorted(allowed))}; remove it")
        elif (entry.name == "records") != entry.is_dir(follow_symlinks=False):
            yield _fault(f"{path}/{name}", "", "must be a folder if it is records, else a file")


def _suite(
    path: str, declaration: Declaration, records: tuple[Record, ...], manifests: list[Manifest], rules: Rules
) -> Iterator[Fault]:
    """Faults of suite, seeds, command and cells."""
    file, folder = f"{path}/{NAME}", f"{path}/records"
    try:
        facts = rules.facts(declaration)
    except ValueError as error:
        yield _fault(file, "suite", f"must be a suite of this version: {printable(str(error))}")
        return
    if declaration.suite_digest != facts.digest:
        problem = f"must be that of the suite as it is here, {facts.digest}: the suite has changed, or the digest"
        yield _fault(file, "suite_digest", problem)
    words = command_words(declaration, facts.seeds)
    if not same_command(declaration.command, words):
        yield _fault(file, "command", f"must request the cells of the declaration: {' '.join(words)}")
    for manifest in manifests:
        if manifest.command != words:
            problem = f"must be {' '.join(words)}, got {printable(' '.join(manifest.command))}"
            yield _fault(f"{folder}/{manifest.name}", "command", problem)
    names = [record.id for record in records if record.suite != facts.name]
    if names:
        yield _fault(folder, "suite", f"must be {facts.name!r}: {listed(names)}")
    chosen = sorted({record.seed for record in records} - set(facts.seeds))
    if chosen:
        problem = f"must follow from the digest of the request: {list(facts.seeds)}, got {chosen[:MOST_NAMED]}"
        yield _fault(folder, "seed", problem)
    if lacking := sorted(set(facts.seeds) - {record.seed for record in records}):
        yield _fault(folder, "seed", f"records of seeds {lacking} are missing")
    if failed := [record.id for record in records if record.status == "failed"]:
        # A failure that counted would be a way to leave out a bad seed.
        yield _fault(
            folder, "status", f"a submission must have no failed cell, run its command again: {listed(failed)}"
        )
    if old := [record.id for record in records if record.provenance.source != facts.source]:
        problem = f"{len(old)} of {len(records)} records were computed by another code than this one"
        yield _fault(folder, "provenance.source", problem, "flagged")
    if invented := [record.id for record in records if not facts.papers_say(record)]:
        # A board would show it as a paper's, beside the submitter's own number.
        yield _fault(folder, "reported", f"a paper's figure must be one that the suite states: {listed(invented)}")
    named = {f"{folder}/{record.id}.json": record for record in records}
    yield from checkpoint_faults(named, {facts.digest: facts.checkpoints})
    if facts.cells is None:
        problem = f"the suite's cells cannot be planned here, so removed cells would not be seen: {facts.unplanned}"
        yield _fault(folder, "", printable(problem), "flagged")
        return
    requested = {cell.id: cell for manifest in manifests for cell in manifest.cells}
    for problem in cell_problems(declaration, requested.values(), facts.cells):
        yield _fault(folder, "", problem)
    for problem in unmeasured(declaration, requested.values(), facts.cells):
        yield _fault(folder, "", printable(problem, 400), "flagged")
    if not any(
        record.status == "ok"
        for record in records
        if is_own(declaration, record.defense.name, record.attack and record.attack.name)
    ):
        yield _fault(folder, "", "no cell of the submission has a number")


def _signature(folder: Path, path: str, declaration: Declaration, digest: str, root: Path) -> Iterator[Fault]:
    allowed, signature = root / declaration.handle / ALLOWED, folder / SIGNATURE
    if not allowed.is_file() and not allowed.is_symlink():
        if signature.is_file():
            problem = f"cannot be checked: {declaration.handle}/{ALLOWED} is missing; add the public key"
            yield _fault(f"{path}/{SIGNATURE}", "", problem, "flagged")
        return
    try:
        check_signature(statement(folder, digest), signature, allowed, declaration.handle)
    except RecordError as error:
        yield _fault(f"{path}/{SIGNATURE}", "", str(error))


def _with_copies(submissions: list[CheckedSubmission]) -> list[CheckedSubmission]:
    """Adds a fault to submissions of different handles with equal methods or arrays: each names the other."""
    owners: dict[tuple[str, str], list[str]] = {}
    for checked in submissions:
        for key in _contents(checked):
            owners.setdefault(key, []).append(checked.path)
    faults: dict[str, list[Fault]] = {}
    for (noun, _), paths in owners.items():
        for path in paths:
            handle = path.partition("/")[0]
            copies = [copy for copy in paths if copy.partition("/")[0] != handle]
            if copies:
                problem = f"its {noun} is also that of {', '.join(copies[:MOST_NAMED])}: somebody copied it"
                faults.setdefault(path, []).append(_fault(path, "", problem, "flagged"))
    return [
        replace(checked, faults=tuple(sorted({*checked.faults, *faults.get(checked.path, [])})))
        for checked in submissions
    ]


def _contents(checked: CheckedSubmission) -> set[tuple[str, str]]:
    declaration = checked.declaration
    contents = {("checkpoint", declaration.checkpoint.sha256)} if declaration and declaration.checkpoint else set()
    if declaration and declaration.method:
        contents.add((f"{declaration.kind}'s file", declaration.method.sha256))
    own = {record.id for record in checked.own}
    for record in checked.records:
        # Scores of two trainings under different seeds are equal by no accident; other arrays may be. At a suite's own
        # seeds, as of checkpoints, its own attacks give everybody the same scores.
        labels_only = record.requires is not None and record.requires.access == "LABEL_ONLY"
        if record.kind not in ("membership", "canaries") or record.arrays_digest is None or labels_only:
            continue
        if record.seed in REPORTED or (record.id in own and declaration and declaration.method):
            contents.add((f"table of {record.kind} scores", record.arrays_digest))
    return contents


def _fault(file: str, field: str, problem: str, severity: Severity = "refused") -> Fault:
    return Fault(file=file, field=field, problem=problem, severity=severity)
