"""The packages of this distribution are found beside one another, whatever else is installed under their names."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(code: str, folder: Path, *first: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (*first, ROOT)))
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )


def test_a_foreign_package_named_benchmarks_does_not_get_in_the_way_and_lists_need_no_torchvision(tmp_path):
    """Two questions to one process, because it imports PyTorch."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise RuntimeError('theirs')", encoding="utf-8")
    code = "import sys, audit\nfrom benchmarks import data\nfor name in data.names(): print(data.describe(name))\n"
    code += "data.check('mnist')\nprint(data.names(), 'torchvision' in sys.modules)"
    done = run(code, tmp_path, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "digits" in done.stdout and done.stdout.endswith("False\n")


def test_a_foreign_package_that_was_imported_before_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    done = run("import benchmarks\nimport audit", tmp_path, tmp_path)
    assert done.returncode != 0
    assert "benchmarks must be that of leakbench" in done.stderr and "import audit before it" in done.stderr
