"""What long work is doing: named, a second apart, and heard by whoever runs it, in this process and in others."""

import pytest

from leakbench.audit import progress_events
from leakbench.audit.run import progress


@pytest.fixture
def clock(monkeypatch):
    times = [100.0]
    monkeypatch.setattr(progress_events.time, "monotonic", lambda: times[0])
    monkeypatch.setattr(progress_events, "_last", 0.0)
    return times


def test_steps_are_told_a_second_apart_and_the_last_always(clock):
    heard = []
    with (
        progress_events.with_listener(heard.append),
        progress_events.named_activity("likelihood_ratio on dp_sgd, seed 0"),
    ):
        for step in range(1, 1001):
            progress_events.tell(step, 1000)
            clock[0] += 0.01
    assert heard[0] == "likelihood_ratio on dp_sgd, seed 0: step 1 of 1,000"
    assert heard[-1].endswith(": step 1,000 of 1,000")
    assert 10 <= len(heard) <= 12


def test_nobody_who_listens_costs_nothing_and_listeners_end(clock):
    progress_events.tell(1, 2)
    heard = []
    with progress_events.with_listener(heard.append):
        progress_events.tell(2, 2, unit="model")
    progress_events.tell(2, 2)
    assert heard == ["model 2 of 2"]


def test_lines_off_a_terminal_tell_what_is_done_only_after_a_silence(monkeypatch, capsys):
    times = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: times[0])
    with progress.show() as report:
        told = progress.RunProgress(report, total=4)
        told.now("starting")
        for _ in range(10):
            times[0] += 10.0
            told.doing("likelihood_ratio on dp_sgd, seed 0: step 5 of 9")
        told.finished = 1
        told.now("train dp_sgd, seed 0")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[0/4] 0 s: starting"
    assert lines[1] == "[0/4] 30 s: … likelihood_ratio on dp_sgd, seed 0: step 5 of 9"
    assert len(lines) == 5 and lines[-1].endswith("train dp_sgd, seed 0")
