"""What waits for what: each piece once, after what it needs, wherever it is computed."""

from functools import partial
from pathlib import Path

import pytest
import torch

from audit.run.executors.local import Local
from audit.run.graph import Graph

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("jobs", [1, 2])
def test_everything_is_done_once_and_after_what_it_needs(tmp_path, jobs):
    done = list(Local(CPU, jobs, tmp_path).run(diamond(), partial(note, folder=tmp_path)))
    assert sorted(done) == sorted((name, name.upper()) for name in ("cells", "left", "right", "first", "alone"))
    before = {path.name: set(path.read_text().split()) for path in tmp_path.iterdir()}
    assert {"left", "right"} <= before["cells"] and "first" in before["left"] and "first" in before["right"]


def test_what_is_ready_comes_in_the_order_in_which_it_was_added(tmp_path):
    order = [name for name, _ in Local(CPU, 1, tmp_path).run(diamond(), partial(note, folder=tmp_path))]
    assert order == ["first", "left", "right", "cells", "alone"]


def test_the_same_content_is_one_piece():
    graph = diamond()
    graph.add("first", "another of that name")
    assert len(graph) == 5 and graph.items["first"] == "first"


def test_a_graph_that_cannot_be_worked_off_is_refused_before_anything_is_computed(tmp_path):
    graph = diamond()
    graph.add("more", "more", ["nowhere"])
    with pytest.raises(ValueError, match="everything that more needs must be in the graph, and nowhere is not"):
        Local(CPU, 1, tmp_path).run(graph, partial(note, folder=tmp_path))
    graph = diamond()
    graph.add("egg", "egg", ["hen"])
    graph.add("hen", "hen", ["egg"])
    with pytest.raises(ValueError, match="may wait for itself, got a circle among egg, hen"):
        Local(CPU, 1, tmp_path).run(graph, partial(note, folder=tmp_path))
    assert not list(tmp_path.iterdir())


def test_who_stops_reading_stops_the_work(tmp_path):
    executed = Local(CPU, 1, tmp_path).run(diamond(), partial(note, folder=tmp_path))
    next(executed)
    executed.close()
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
