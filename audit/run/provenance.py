"""Provenance of a number: digests and versions of the code that computed it.

It covers this library, its numerical packages, third-party methods, and the hyperparameter search behind the settings.
Digests of source files are compared, so that different code is always distinguished, in a wheel as in a modified
checkout; version and commit are for the reader.
"""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

from leakbench.leaderboard.records.record import Provenance, RecordError

from ..catalog import methods as catalog
from ..catalog import plugins
from ..plan.request import RequestedMethod, TrainingRequest
from ..versions import version

ROOT = Path(__file__).resolve().parents[2]
"""Folder of the packages: a checkout, or the install location of a wheel."""

COMPUTING = ("defenses", "attacks", "audit", "benchmarks")
"""This library's packages whose source affects results; `leaderboard` stores and shows them."""

PACKAGES = (
    "torch", "numpy", "scipy", "scikit-learn", "dp-accounting", "opacus", "backpack-for-pytorch", "torchvision",
    "torchmetrics", "lpips", "kymatio",
)  # fmt: skip
"""Distributions whose version may change a number."""


@cache
def library() -> Provenance:
    """Returns the provenance common to all cells; hashed once per process, because modules are imported once."""
    files = [path for package in COMPUTING for path in sorted((ROOT / package).rglob("*.py"))]
    commit = _git("rev-parse", "HEAD")
    return Provenance(
        version=version("leakbench") or "unreleased checkout",
        commit=commit or None,
        dirty=bool(_git("status", "--porcelain", "--", *COMPUTING)) if commit else None,
        source=_digest(files, ROOT),
        versions={"python": platform.python_version()}
        | {name: installed for name in PACKAGES if (installed := version(name))},
    )


def third_party(*methods: RequestedMethod | None) -> dict[str, str]:
    """Returns digests of the code of third-party methods, by "defense NAME" or "attack NAME".

    Args:
        *methods: of a request; None without an attack.
    """
    digests = {}
    for method in methods:
        if method is None:
            continue
        role = f"{catalog.KINDS[method.kind]} {method.name}"
        if plugins.is_path(method.name):
            digests[role] = _digest(plugins.source_files(method.name), plugins.folder(method.name))
        elif (module := catalog.module_of(method.kind, method.name)) is not None:
            digests[role] = _code_of(module)
    return digests


def tuning_digest(request: TrainingRequest, directory: Path) -> str | None:
    """Returns the SHA-256 of the file that holds the hyperparameter search of a request; None without a search."""
    name = request.training.tuning_digest
    if not name:
        return None
    path = directory / "tuning" / f"{name}.json"
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise RecordError(f"cannot read tuning {path}: {error.strerror}; run the same command again") from None


def _code_of(module: str) -> str:
    """Returns a digest of the source of a module's whole top-level package, any part of which it may import."""
    top = module.partition(".")[0]
    spec = importlib.util.find_spec(top)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    if folders:
        # Compiled extensions affect results, too. Bytecode caches follow from the source; data files are not hashed.
        files = [path for folder in folders for path in sorted(folder.rglob("*"))]
        return _digest([path for path in files if path.suffix in (".py", ".so", ".pyd")], folders[0].parent)
    origin = Path(spec.origin) if spec and spec.origin else None
    if origin is None or not origin.is_file():
        raise RecordError(f"module {top!r} must lie in files, so that records can say which code it was; it does not")
    return _digest([origin], origin.parent)


def _digest(files: list[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        # With name and length, so that no two trees of files give the same stream of bytes.
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _git(*arguments: str) -> str:
    """Returns git's output about this library's checkout; empty without a checkout, also inside a user's repository."""
    program = shutil.which("git")
    if program is None or not (ROOT / ".git").exists():
        return ""
    command = [program, "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- arguments are ours
    return done.stdout.strip() if done.returncode == 0 else ""
