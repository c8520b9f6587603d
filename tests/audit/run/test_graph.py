"""What waits for what: each piece once, after what it needs, wherever it is computed."""

import gc
import math
import os
import platform
import sys
import time
import weakref
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from leakbench.audit import progress_events
from leakbench.audit.plan.artifact import Artifact
from leakbench.audit.run.artifacts import compute_artifact, origin_of, read_computed, read_kept
from leakbench.audit.run.executors import local
from leakbench.audit.run.executors.local import Local
from leakbench.audit.run.graph import Graph
from leakbench.audit.run.resume import StaleError
from leakbench.leaderboard.records.record import RecordError
from leakbench.malloc import give_memory_back

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def on_cpu(piece: str) -> torch.device:
    return CPU


def note(piece: str, folder: Path) -> str:
    """Work that leaves a trace of what was there when it began."""
    there = sorted(path.name for path in folder.iterdir())
    (folder / piece).write_text(" ".join(there))
    return piece.upper()


def diamond() -> Graph[str]:
    graph: Graph[str] = Graph()
    graph.add("cells", "cells", ["left", "right"])
    graph.add("left", "left", ["first"])
    graph.add("right", "right", ["first"])
    graph.add("first", "first")
    graph.add("alone", "alone")
    return graph


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_everything_is_done_once_and_after_what_it_needs(tmp_path, jobs):
    done = list(Local(on_cpu, jobs, tmp_path).run(diamond(), partial(note, folder=tmp_path)))
    assert sorted(done) == sorted((name, name.upper()) for name in ("cells", "left", "right", "first", "alone"))
    before = {path.name: set(path.read_text().split()) for path in tmp_path.iterdir()}
    assert {"left", "right"} <= before["cells"] and "first" in before["left"] and "first" in before["right"]


@pytest.mark.slow
@pytest.mark.long
def test_workers_import_nothing_from_the_current_folder(tmp_path, monkeypatch):
    """A stranger's method lies there, and may have the name of a module that multiprocessing imports."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "socket.py").write_text("raise SystemExit('hijacked')\n")
    monkeypatch.chdir(tmp_path / "there")
    done = list(Local(on_cpu, 2, tmp_path).run(diamond(), step_by_step))
    assert len(done) == 5


def step_by_step(piece: str) -> str:
    with progress_events.named_activity(piece):
        for step in range(1, 4):
            progress_events.tell(step, 3)
    return piece


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_a_piece_is_doing_is_heard_while_it_does_it(tmp_path, jobs):
    heard = []
    list(Local(on_cpu, jobs, tmp_path, heard.append).run(diamond(), step_by_step))
    for name in ("cells", "left", "right", "first", "alone"):
        assert f"{name}: step 3 of 3" in heard


def resident() -> float:
    """Memory of this process that is in use, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="only GNU's library keeps gaps"
)
def test_what_a_piece_of_work_freed_is_given_back(tmp_path):
    kept = []

    def work(_: str) -> None:
        freed = [b"%d" % i * 20_000 for i in range(1000, 4000)]  # 240 MB in pieces that are not mapped one by one
        kept.append(bytes(80_000) + freed[-1])  # above them: the heap does not shrink by itself

    give_memory_back()  # what earlier tests freed would be filled first
    before = resident()
    work("")
    assert resident() - before > 150
    graph: Graph[str] = Graph()
    graph.add("one", "one")
    list(Local(on_cpu, 1, tmp_path).run(graph, work))
    assert resident() - before < 60


class Cycle:
    """An object that only a collection can free."""

    def __init__(self):
        self.itself = self


def test_cycles_of_a_piece_of_work_are_collected_before_the_next(tmp_path):
    cycles: list[weakref.ref[Cycle]] = []

    def work(_: str) -> bool:
        free = all(cycle() is None for cycle in cycles)
        cycles.append(weakref.ref(Cycle()))
        return free

    graph: Graph[str] = Graph()
    for name in ("first", "second", "third"):
        graph.add(name, name)
    gc.disable()
    try:
        work("outside")
        assert cycles[0]() is not None  # nothing else collects it
        results = list(Local(on_cpu, 1, tmp_path).run(graph, work))
    finally:
        gc.enable()
    assert [result for _, result in results] == [False, True, True]


class InThisProcess(Executor):
    """A pool whose work is done when it is submitted, and that is known by the number of its processes."""

    submitted: ClassVar[list[tuple[int, str]]] = []

    def __init__(self, count, **_):
        self.count = count

    def submit(self, fn, /, *args, **_):
        self.submitted.append((self.count, args[-1]))
        future: Future[Any] = Future()
        future.set_result(fn(*args))
        return future

    def shutdown(self, wait=True, *, cancel_futures=False):
        pass


def test_a_gpu_has_one_process_beside_those_of_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(InThisProcess, "submitted", [])
    graph: Graph[str] = Graph()
    for number in range(6):
        graph.add(f"cpu {number}", f"cpu {number}", [f"gpu {number}"])
        graph.add(f"gpu {number}", f"gpu {number}")

    def device_of(piece: str) -> torch.device:
        return GPU if piece.startswith("gpu") else CPU

    done = list(Local(device_of, 3, tmp_path).run(graph, partial(note, folder=tmp_path)))
    assert sorted(done) == sorted((name, name.upper()) for name in graph.items)
    assert {(count, piece[:3]) for count, piece in InThisProcess.submitted} == {(1, "gpu"), (3, "cpu")}


@pytest.mark.parametrize(("jobs", "processes"), [(None, 1), (3, 3)])
def test_all_units_on_a_gpu_are_in_one_process_unless_more_are_asked_for(tmp_path, monkeypatch, jobs, processes):
    monkeypatch.setattr(local, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(InThisProcess, "submitted", [])
    assert len(list(Local(lambda _: GPU, jobs, tmp_path).run(diamond(), partial(note, folder=tmp_path)))) == 5
    counts = {count for count, _ in InThisProcess.submitted}
    assert counts == ({processes} if processes > 1 else set())  # one process is this one


@pytest.mark.slow
def test_units_of_two_devices_are_computed_at_the_same_time_in_processes_of_their_own(tmp_path):
    graph: Graph[str] = Graph()
    for name in ("gpu first", "gpu second", "cpu first", "cpu second"):
        graph.add(name, name)
    names = partial(process_of, folder=tmp_path)
    found = dict(Local(lambda piece: GPU if piece.startswith("gpu") else CPU, 2, tmp_path).run(graph, names))
    assert found["gpu first"] == found["gpu second"]
    assert found["gpu first"] not in (found["cpu first"], found["cpu second"])


def process_of(piece: str, folder: Path) -> int:
    """Waits until a unit of each device has begun, and returns the process."""
    (folder / piece).touch()
    until = time.monotonic() + 60
    while not {path.name[:3] for path in folder.iterdir()} >= {"cpu", "gpu"}:
        assert time.monotonic() < until, "units of the other device wait for this one"
        time.sleep(0.01)
    return os.getpid()


def test_what_is_ready_comes_in_the_order_in_which_it_was_added(tmp_path):
    order = [name for name, _ in Local(on_cpu, 1, tmp_path).run(diamond(), partial(note, folder=tmp_path))]
    assert order == ["first", "left", "right", "cells", "alone"]


def test_the_same_content_is_one_piece():
    graph = diamond()
    graph.add("first", "another of that name")
    assert len(graph) == 5 and graph.items["first"] == "first"


def test_a_graph_that_cannot_be_worked_off_is_refused_before_anything_is_computed(tmp_path):
    graph = diamond()
    graph.add("more", "more", ["nowhere"])
    with pytest.raises(ValueError, match="everything that more needs must be in the graph, and nowhere is not"):
        Local(on_cpu, 1, tmp_path).run(graph, partial(note, folder=tmp_path))
    graph = diamond()
    graph.add("egg", "egg", ["hen"])
    graph.add("hen", "hen", ["egg"])
    with pytest.raises(ValueError, match="may wait for itself, got a circle among egg, hen"):
        Local(on_cpu, 1, tmp_path).run(graph, partial(note, folder=tmp_path))
    assert not list(tmp_path.iterdir())


def test_who_stops_reading_stops_the_work(tmp_path):
    executed = Local(on_cpu, 1, tmp_path).run(diamond(), partial(note, folder=tmp_path))
    next(executed)
    executed.close()
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def made(value: object, device: torch.device) -> dict[str, object]:
    """What an artifact gives."""
    return {"value": value}


def left(device: torch.device) -> dict[str, object]:
    """Ends the process, as a script would."""
    raise SystemExit(0)


def test_an_artifact_is_taken_under_its_own_name_alone_and_one_that_no_file_can_hold_failed(tmp_path):
    one, other = (Artifact({"x": x}, "one", partial(made, x)) for x in (1, 2))
    bad = [Artifact({"x": 3}, "bad", partial(made, math.nan)), Artifact({"x": 4}, "bad", left)]
    assert not compute_artifact(one, tmp_path, CPU, origin_of(one)) and read_computed([one], tmp_path) == {
        one.name: {"value": 1}
    }
    (tmp_path / f"{other.name}.json").write_bytes((tmp_path / f"{one.name}.json").read_bytes())
    with pytest.raises(StaleError, match="or is that of another"):
        read_kept({other.name: other}, tmp_path)
    with pytest.raises(RecordError, match="was edited after it was written"):
        read_computed([other], tmp_path)
    for artifact in bad:
        assert compute_artifact(artifact, tmp_path, CPU, origin_of(artifact))
        with pytest.raises(RecordError, match="bad failed"):
            read_computed([artifact], tmp_path)
