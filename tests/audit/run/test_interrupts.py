"""What a run leaves behind when it is interrupted, killed, or the disk is full: whole records, and no process."""

import dataclasses
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from leakbench.audit.cli import main
from leakbench.audit.run.executors import local
from leakbench.audit.run.lock import locked
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.records.record import read, read_all

from ..conftest import SUITE
from .runs import load, run

resource = pytest.importorskip("resource", reason="limits of a process are Unix's")
ROOT = Path(__file__).parents[3]
# Whoever runs the tests in the background may have Control-C ignored, and children inherit that.
CODE = """
import signal
from leakbench.audit.cli import main
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
"""
COMMAND = [sys.executable, "-c", CODE]

DYING = """
import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path
from leakbench.defenses.core import Block, Defense, Stateless, StepPlan, clip

@dataclass(frozen=True)
class Dying(Stateless):
    def plan(self, context):
        if multiprocessing.current_process().name != "MainProcess":
            while not list(Path("FOLDER").glob("records/*.json")):
                time.sleep(0.1)
            os._exit(3)
        return StepPlan(Block(bound=clip(1.0)))

def dying(*, noise_multiplier: float | None = None) -> Defense:
    return Defense(Dying(), noise_multiplier=noise_multiplier)
"""


def start(text: str, folder: Path, *options: str, **environment: str) -> subprocess.Popen:
    """The real command, in a group of its own."""
    load(folder, text)
    return subprocess.Popen(
        [*COMMAND, "run", str(folder / "toy.toml"), "--out", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *environment.values()])},
        start_new_session=True,
    )


class Forked:
    """The command in a fork of this process, as `start` has it; its workers are forks too, and import nothing."""

    def __init__(self, text: str, folder: Path, *options: str) -> None:
        load(folder, text)
        self.outputs = [folder / "stdout", folder / "stderr"]
        options = ("run", str(folder / "toy.toml"), "--out", str(folder), *options)
        self.process = multiprocessing.get_context("fork").Process(target=self._run, args=options)
        self.process.start()
        self.pid = self.process.pid

    def _run(self, *options: str) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, output in enumerate(self.outputs, 1):
            file = output.open("w", encoding="utf-8")
            os.dup2(file.fileno(), number)
            setattr(sys, output.name, file)
        forks = {"get_context": lambda _: multiprocessing.get_context("fork")}
        local.multiprocessing = SimpleNamespace(**vars(multiprocessing) | forks)  # type: ignore[assignment]
        try:
            main(list(options))
        except SystemExit as end:
            # At once: a further interrupt in what multiprocessing does behind a fork's target would change the code.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 1)

    def poll(self) -> int | None:
        return self.process.exitcode

    def communicate(self, timeout: float) -> list[str]:
        self.process.join(timeout)
        self.returncode = self.process.exitcode
        return [output.read_text(encoding="utf-8") for output in self.outputs]


def first_record(folder: Path, process: subprocess.Popen | Forked) -> None:
    limit = time.monotonic() + 600
    while not list(folder.glob("records/*.json")):
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.02)


def nobody_is_left(group: int) -> bool:
    for _ in range(100):
        if not living(group):
            return True
        time.sleep(0.1)
    return False


def living(group: int) -> bool:
    """Whether a process of a group runs: of those that ended some stay until their parent asks, which may be never."""
    if not Path("/proc/self/stat").exists():
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        return True
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, own = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(own) == group and state not in "ZX":
            return True
    return False


@pytest.mark.long
@pytest.mark.parametrize(
    ("begin", "jobs"), [(Forked, "2"), *(pytest.param(start, jobs, marks=pytest.mark.slow) for jobs in "12")]
)
def test_control_c_ends_the_run_and_what_is_finished_stays(begin, jobs, tmp_path):
    seeds = ", ".join(map(str, range(20)))  # far more than there is time for
    text = SUITE.replace("seeds = [0]", f"seeds = [{seeds}]").replace("epsilon", "noise_multiplier")
    process = begin(text, tmp_path, "--jobs", jobs)
    first_record(tmp_path, process)
    for _ in range(3):  # by somebody impatient
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to everybody
        time.sleep(0.05)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1] == "interrupted; what was finished is kept, run the same command to go on"
    assert "Traceback" not in err
    assert 1 <= len(read_all(tmp_path)) < 120  # every one of them is whole
    assert not [path for path in (tmp_path / "records").iterdir() if path.name.startswith(".")]
    assert nobody_is_left(process.pid)


@pytest.mark.slow
def test_a_process_that_dies_is_one_sentence_and_what_is_finished_stays(tmp_path, site):
    site.add("defenses", "dying", DYING.replace("FOLDER", str(tmp_path)))
    text = SUITE.replace('{ name = "dp_sgd" }', '{ name = "dying" }')
    process = start(text, tmp_path, "--jobs", "2", site=str(site.folder))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in err and "a process died" in err.splitlines()[-1] and "--jobs 1" in err
    assert {r.status for r in read_all(tmp_path)} == {"ok"}
    assert read(next((tmp_path / "records").glob("*.json")))


def test_a_full_disk_is_one_sentence_with_its_path(tmp_path, capsys, monkeypatch):
    load(tmp_path, SUITE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # a limit on the size of files stands in for a disk that has no room for them
        monkeypatch.setattr(sys, "dont_write_bytecode", True)  # else modules are cut on their way to the disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (900, hard))
        with pytest.raises(SystemExit) as ended:
            main(["run", str(tmp_path / "toy.toml"), "--jobs", "1", "--out", str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (1, "")
    last = err.splitlines()[-1]
    assert last.startswith(f"error: cannot write {tmp_path / 'out' / 'records'}/") and "run the same command" in last
    assert not list((tmp_path / "out" / "records").iterdir())


SHORT = SUITE.replace("epsilon", "noise_multiplier")
SWEEP = SHORT.replace("seeds = [0]", "seeds = [0, 1]")


def killed_and_resumed(text: str, folder: Path, kills: int, moment) -> None:
    """Runs of one suite, each killed and the next going on; asserts that nothing is lost, torn or left."""
    seen: set[str] = set()
    for _ in range(kills):
        process = start(text, folder, "--jobs", "2")
        moment(folder, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
        assert nobody_is_left(process.pid)
        there = {path.name for path in (folder / "records").glob("[0-9a-f]*.json")}
        assert there >= seen and all(read(folder / "records" / name) for name in there)
        seen = there


def assert_as_uninterrupted(text: str, folder: Path) -> None:
    """What processes began and this one finished is what this one computes alone, but for times."""
    whole = folder / "whole"
    whole.mkdir()
    found, alone = run(text, folder), run(text, whole)
    assert [dataclasses.replace(r, seconds=0.0) for r in found] == [dataclasses.replace(r, seconds=0.0) for r in alone]
    boards = [Board.from_folder(at) for at in (folder, whole)]
    assert boards[0].to_csv() == boards[1].to_csv() and boards[0].to_text(width=100) == boards[1].to_text(width=100)
    assert not [path for path in (folder / "records").iterdir() if path.name.startswith(".")]
    assert {p.stem for p in folder.glob("records/*.parquet")} == {p.stem for p in folder.glob("records/*.json")}


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_no_process_and_is_gone_on_with(tmp_path):
    killed_and_resumed(SHORT, tmp_path, 1, first_record)
    assert_as_uninterrupted(SHORT, tmp_path)


@pytest.mark.slow
def test_many_kills_at_any_moment_lose_nothing(tmp_path):
    coins = random.Random(0)  # noqa: S311 -- moments, not secrets
    (tmp_path / "records").mkdir()
    killed_and_resumed(SWEEP, tmp_path, 8, lambda *_: time.sleep(coins.uniform(0.3, 12)))
    assert_as_uninterrupted(SWEEP, tmp_path)


# Only the package's path: importing the package itself takes seconds, for PyTorch.
LIGHT = """
import os, signal, sys, time, types
from pathlib import Path
import leakbench
audit = sys.modules["leakbench.audit"] = types.ModuleType("leakbench.audit")
audit.__path__ = [os.path.join(os.environ["PROJECT"], "audit")]
"""
WITH_WORKERS = """
import multiprocessing
if os.environ["KERNEL"] == "lacks it":
    sys.platform = "another"
from leakbench.audit.run.executors.parent_death import children_end_with_us, end_with_runner
def work(folder):
    end_with_runner()
    Path(folder, f"{os.getpid()}.ready").touch()
    time.sleep(120)
if __name__ == "__main__":
    with children_end_with_us():
        for _ in range(2):
            multiprocessing.get_context("spawn").Process(target=work, args=(sys.argv[1],)).start()
    time.sleep(120)
"""


def light(folder: Path, code: str, **environment: str) -> subprocess.Popen:
    """A process of the code, which finds the folder's path in `sys.argv[1]`."""
    script = folder / "light.py"
    script.write_text(LIGHT + code, encoding="utf-8")
    variables = {**os.environ, "PROJECT": str(ROOT), **environment}
    return subprocess.Popen([sys.executable, str(script), str(folder)], env=variables, start_new_session=True)


@pytest.mark.parametrize("kernel", ["ends children", "lacks it"])
def test_workers_end_with_a_runner_that_is_killed(kernel, tmp_path):
    process = light(tmp_path, WITH_WORKERS, KERNEL=kernel)
    limit = time.monotonic() + 60
    while len(list(tmp_path.glob("*.ready"))) < 2:
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert nobody_is_left(process.pid)


def test_a_lock_of_a_killed_process_blocks_nobody(tmp_path):
    code = "from leakbench.audit.run.lock import locked\n"
    code += "with locked(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    done = light(tmp_path, code)
    done.wait(timeout=60)
    assert done.returncode == -signal.SIGKILL and (tmp_path / ".lock").exists()
    with locked(tmp_path):
        pass
