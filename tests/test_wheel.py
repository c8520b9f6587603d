"""The wheel: holds everything that is needed, nothing that is not, and runs where there is no checkout."""

import csv
import io
import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.peers

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "leaderboard" / "published"
PARTS = {"defenses", "attacks", "audit", "benchmarks", "leaderboard"}
SUITE = """
name = "tiny"
seeds = [0]
task = { data = "digits", model = "mlp", private = 100, batch = 50, epochs = 2, lr = 0.5 }
budget = { epsilon = 8.0, delta = 1e-5 }
defense = [{ name = "sgd" }, { name = "dp_sgd", clip_norm = 1.0 }]
attack = [{ name = "likelihood_ratio" }]
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this checkout, built without network by the build backend that is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("leakbench-*.whl")
    return built


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_one_package_of_five_parts_and_nothing_else(wheel):
    tops = {name.split("/")[0] for name in contents(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"leakbench"} and len(tops) == 2
    inside = {name.split("/")[1] for name in contents(wheel) if name.startswith("leakbench/")}
    assert {name for name in inside if "." not in name} == PARTS
    assert {name for name in inside if "." in name} == {
        one.name for one in (ROOT / "leakbench").iterdir() if one.is_file()
    }


def test_every_module_suite_template_and_catalogue_page_is_in_the_wheel(wheel):
    patterns = ["*.py", "suites/*.toml", "templates/*", "*.json", "*.safetensors", "README.md"]
    expected = {
        f"leakbench/{file.relative_to(ROOT).as_posix()}"
        for package in PARTS
        for pattern in patterns
        for file in (ROOT / package).rglob(pattern)
        if not file.is_relative_to(PUBLISHED)
    }
    assert "leakbench/benchmarks/data/digits.py" in expected
    assert "leakbench/benchmarks/zoo/digits_mlp/dp_sgd/eps3/seed0/weights.safetensors" in expected
    assert expected <= contents(wheel)


def test_the_records_of_the_published_board_are_in_no_wheel(wheel):
    assert any(PUBLISHED.rglob("*.json"))
    assert not [name for name in contents(wheel) if "published" in name.split("/")]


def test_the_wheel_declares_its_command_and_carries_its_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        texts = {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist() if "dist-info" in name}
    assert b"leakbench = leakbench.audit.cli:main" in texts["entry_points.txt"]
    assert b"Apache License" in texts["licenses/LICENSE"]
    assert b"Requires-Python: <3.15,>=3.11" in texts["METADATA"]


@pytest.mark.slow
def test_an_installed_wheel_runs_a_suite_outside_the_checkout(wheel, tmp_path):
    """In an environment of its own, which sees this one's dependencies but not this checkout."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    bin_folder = environment / ("Scripts" if os.name == "nt" else "bin")
    install = ["-m", "pip", "--python", str(bin_folder / "python"), "install", "--no-index", "--no-deps"]
    subprocess.run([sys.executable, *install, str(wheel)], check=True, capture_output=True)
    # A path named by a .pth is searched, but the .pth files in it are not obeyed: a checkout installed as
    # editable stays out.
    installed = sysconfig.get_path("purelib", vars={"base": str(environment)})
    Path(installed, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    whereabouts = run(str(bin_folder / "python"), "-c", "from leakbench import audit; print(audit.__file__)")
    assert Path(whereabouts.strip()).is_relative_to(environment)

    (tmp_path / "tiny.toml").write_text(SUITE, encoding="utf-8")
    leakbench = str(bin_folder / "leakbench")
    run(leakbench, "run", "tiny.toml", "--out", "out", "--device", "cpu")
    records = [json.loads(file.read_text(encoding="utf-8")) for file in (tmp_path / "out").rglob("*.json")]
    assert {record["defense"]["name"] for record in records} >= {"sgd", "dp_sgd"}
    assert {record["status"] for record in records} == {"ok"}
    table = run(leakbench, "leaderboard", "table", "out", "--format", "csv")
    assert len(list(csv.reader(io.StringIO(table)))) >= 3  # a header and two defenses
    assert "quick" in run(leakbench, "list", "suites")
