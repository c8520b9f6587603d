"""Lanes: the tests on other Pythons and other versions of what leakbench depends on, each in a fresh environment.

    python tests/lanes.py newest                         newest versions, on every newer Python that is there
    python tests/lanes.py newest --only-one              on the newest of them alone
    python tests/lanes.py lowest --tests mechanisms      lowest direct versions that pyproject.toml admits
    python tests/lanes.py newest --python 3.12 --record  writes what was tested together to audit/tested_versions.json

Environments are made by uv where it is installed, else by venv and pip. A Python that is not there is skipped by name.
The exit code is 1 if the tests of a lane fail, else 0.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "audit" / "tested_versions.json"
PYTHONS = {"newest": ("3.14", "3.13", "3.12"), "lowest": ("3.11",)}
# Tests of the record, which cannot pass before it is written.
OF_RECORD = ("test_the_lowest_versions_that_are_admitted_were_tested", "test_every_python_that_is_admitted_was_tested")
# Versions of today meet each other's deprecations in the lowest lane, which are no errors of ours.
OPTIONS = {"newest": (), "lowest": ("-W", "default")}
SELECTED = ("-m", "not slow and not gpu and not peers")  # the default tests and the long ones
TESTS = {
    "default": (),
    "mechanisms": (
        *("tests/defenses", "tests/test_every_defense.py", "tests/test_epsilons.py"),
        *("tests/attacks/test_core.py", "tests/attacks/test_every_attack.py"),
    ),
}


class LaneError(Exception):
    """An environment that cannot be made."""


def main(arguments: list[str] | None = None) -> int:
    """Runs a lane on every Python that it names and that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lane", choices=PYTHONS)
    parser.add_argument("--python", action="append", metavar="X.Y", help="a version, instead of all of the lane")
    parser.add_argument("--only-one", action="store_true", help="the first version that is there, and no other")
    parser.add_argument("--tests", choices=TESTS, default="default")
    parser.add_argument("--jobs", default="auto", help="processes of pytest")
    parser.add_argument("--torch-index", metavar="URL", help="PyTorch's index of wheels without CUDA")
    parser.add_argument("--record", action="store_true", help="enters the versions, if the default tests pass")
    asked = parser.parse_args(arguments)
    if asked.record and asked.tests != "default":
        parser.error(f"--record needs --tests default, got --tests {asked.tests}: other tests are not all")

    results = []
    for version in asked.python or PYTHONS[asked.lane]:
        name = f"lane {asked.lane} on Python {version}"
        interpreter = find_python(version)
        if interpreter is None:
            print(f"{name}: skipped, because no such interpreter is here", flush=True)
            results += [(name, False)] if asked.python else []  # that was asked for by name
            continue
        print(f"{name}: installing", flush=True)
        try:
            python = made(asked.lane, version, interpreter, asked.torch_index)
        except LaneError as error:
            print(f"{name}: {error}", flush=True)
            results.append((name, False))
            continue
        passed = tested(python, asked.lane, asked.tests, asked.jobs, recording=asked.record)
        if passed and asked.record:
            record(python, asked.lane, version)
        results.append((name, passed))
        if asked.only_one:
            break
    for name, passed in results:
        print(f"{name}: {'passed' if passed else 'FAILED'}")
    return 0 if all(passed for _, passed in results) else 1


def find_python(version: str) -> Path | None:
    """An interpreter of this version, by its name on PATH or among pyenv's; one that does not start is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)]
    program = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    for candidate in filter(None, candidates):
        try:
            done = subprocess.run([candidate, "-c", program], capture_output=True, text=True, check=False)
        except OSError:  # a file of this name that is no program
            continue
        found, _, executable = done.stdout.strip().partition(" ")
        if done.returncode == 0 and found == version:
            return Path(executable)
    return None


def made(lane: str, version: str, interpreter: Path, torch_index: str | None) -> Path:
    """The interpreter of a fresh environment that has leakbench, editable, and what its tests need.

    Raises:
        LaneError: if the installation fails.
    """
    folder = ROOT / ".lanes" / f"{lane}-{version}"
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    uv = shutil.which("uv")
    if uv:
        run([uv, "venv", "--quiet", "--python", str(interpreter), "--no-python-downloads", str(folder)])
        how = ["--resolution", "lowest-direct"] if lane == "lowest" else ["--upgrade"]
        how += ["--torch-backend", "cpu"] if torch_index else []  # uv knows the index
        run([uv, "pip", "install", "--quiet", "--python", str(python), *how, "--editable", ".[dev]"])
    else:
        run([str(interpreter), "-m", "venv", str(folder)])
        how = ["--upgrade", "--upgrade-strategy", "eager"]
        if lane == "lowest":
            constraints = folder / "lowest.txt"
            constraints.write_text("\n".join(lowest()) + "\n", encoding="utf-8")
            how = ["--constraint", str(constraints)]
        how += ["--extra-index-url", torch_index] if torch_index else []
        run([str(python), "-m", "pip", "install", "--quiet", *how, "--editable", ".[dev]"])
    return python


def lowest() -> list[str]:
    """Direct dependencies at the lower bounds of pyproject.toml, as constraints for pip."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = project["dependencies"] + [one for extra in project["optional-dependencies"].values() for one in extra]
    bounds = (re.match(r"([A-Za-z0-9._-]+)(?:\[.*?\])?>=([0-9][^,;\s]*)", one) for one in asked)
    return sorted({f"{bound[1]}=={bound[2]}" for bound in bounds if bound})


def tested(python: Path, lane: str, tests: str, jobs: str, *, recording: bool) -> bool:
    """Whether the tests pass, and the quick suite has its ids, its statuses and its epsilons."""
    pytest = [str(python), "-m", "pytest", "-q", *OPTIONS[lane]]
    left_out = [f"--deselect=tests/audit/test_versions.py::{name}" for name in OF_RECORD] if recording else []
    chosen = [*pytest, "-n", jobs, "--dist", "loadfile", *SELECTED, *left_out, *TESTS[tests]]
    quick = [*pytest, "-n", "0", "-m", "slow", "tests/test_quick.py"]
    # Where the environment forbids compiled modules, every process that a test starts would compile all of ours again.
    # Options of pytest's in the environment may leave tests out, which must not be recorded.
    left = {"PYTHONDONTWRITEBYTECODE", *(["PYTEST_ADDOPTS"] if recording else [])}
    variables = {name: value for name, value in os.environ.items() if name not in left}
    return all([subprocess.run(each, cwd=ROOT, env=variables, check=False).returncode == 0 for each in (chosen, quick)])


def record(python: Path, lane: str, version: str) -> None:
    """Enters the versions of this environment, in place of the lane's earlier ones."""
    program = "import json; from leakbench.audit.versions import installed; print(json.dumps(installed()))"
    done = subprocess.run([str(python), "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    entry = {
        "lane": lane,
        "python": version,
        "on": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": json.loads(done.stdout),
    }
    before = json.loads(RECORD.read_text(encoding="utf-8"))
    kept = [other for other in before if (other["lane"], other["python"]) != (lane, version)]
    entries = sorted([*kept, entry], key=lambda each: (each["lane"], [int(n) for n in each["python"].split(".")]))
    RECORD.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def run(command: list[str]) -> None:
    """Runs a step of an installation.

    Raises:
        LaneError: if it fails.
    """
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode:
        raise LaneError(f"exit code {done.returncode} of {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
