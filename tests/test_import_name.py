"""One import name, `leakbench`, over the folders of a checkout: public names by need, and no file under two names."""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import leakbench
from leakbench.defenses.core import Defense
from leakbench.lazy_names import homes

from .parameters import subtests

ROOT = Path(__file__).parents[1]
PARTS = ("attacks", "audit", "benchmarks", "defenses", "leaderboard")


def run(code: str, folder: Path, *first: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (*first, ROOT)))
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_public_name_is_there_and_completes_by_tab():
    for name in (*leakbench.__all__, *PARTS, "zoo"):
        assert getattr(leakbench, name) is not None
        assert name in dir(leakbench)
    with pytest.raises(AttributeError, match="module 'leakbench' has no attribute 'trian'"):
        leakbench.trian  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


def test_a_method_is_an_attribute_of_its_package_whichever_way_it_was_imported():
    assert isinstance(leakbench.defenses.dp_sgd(noise_multiplier=1.0), Defense)
    from leakbench.attacks.lira import lira
    from leakbench.defenses.pcdp import pcdp

    assert leakbench.attacks.lira is lira and leakbench.defenses.pcdp is pcdp
    assert {"dp_sgd", "pcdp", "core"} <= set(dir(leakbench.defenses))
    with pytest.raises(AttributeError, match=r"'leakbench\.defenses' has no attribute 'pcpd'"):
        leakbench.defenses.pcpd  # noqa: B018 # pyright: ignore[reportAttributeAccessIssue]


@subtests(
    "package",
    ["leakbench", *(f"leakbench.{one}" for one in ("attacks.core", "audit", "benchmarks.core", "leaderboard"))],
)
def test_every_name_that_a_package_promises_is_imported_from_its_home(package):
    module = importlib.import_module(package)
    assert set(homes(package)) | {"__version__"} >= set(module.__all__)
    for name, home in homes(package).items():
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
        assert name in dir(module)
        # A module of the name of a public name would stand in its place once it is imported.
        assert importlib.util.find_spec(f"{package}.{name}") is None


@pytest.mark.long
def test_pytorch_is_not_imported_before_it_is_used(tmp_path):
    code = """
import sys
import leakbench.defenses.core, leakbench.attacks.core, leakbench.benchmarks.core, leakbench.leaderboard
from leakbench.audit.cli import main
for words in ([], ["--version"], ["--help"], ["list"]):
    try:
        words and main(words)
    except SystemExit as end:
        assert not end.code, words
    if "torch" in sys.modules:
        sys.exit(f"torch is imported after {words}")
"""
    done = run(code, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@subtests("part", PARTS)
def test_a_part_by_its_bare_name_is_refused_with_the_right_one(part, tmp_path):
    done = run(f"import {part}", tmp_path)
    assert done.returncode == 1
    assert f"ImportError: {part} must be imported as leakbench.{part}" in done.stderr


@pytest.mark.long
def test_foreign_packages_of_the_names_of_our_folders_do_not_get_in_the_way(tmp_path):
    """Three questions to one process, because it imports PyTorch."""
    for part in PARTS:
        (tmp_path / part).mkdir()
        (tmp_path / part / "__init__.py").touch()
    watch = "leakbench.audit.external.transcript.watch"
    code = f"import sys, {', '.join(PARTS)}\nfrom leakbench import audit\nfrom leakbench.benchmarks import data\n"
    code += f"print('{watch}' in sys.modules, callable(audit.watch))\n"
    code += "for name in data.names(): print(data.describe(name))\n"
    code += "data.check('mnist')\nprint(data.names(), 'torchvision' in sys.modules)"
    done = run(code, tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False True\n") and "digits" in done.stdout and done.stdout.endswith("False\n")
