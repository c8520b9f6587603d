"""The arithmetic of comparisons on fake clocks, memory of known size, and tiny runs. No test asserts a speed."""

import dataclasses
import json
import math
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from leakbench.audit.catalog.listing import is_federated
from leakbench.benchmarks.speed import (
    architectures,
    informed,
    kernels,
    masked,
    memory,
    methods,
    noise,
    part,
    report,
    rgap,
    step,
    targets,
)
from leakbench.benchmarks.speed.__main__ import app
from leakbench.benchmarks.speed.harness import Measurement, Ratio, SpeedComparison, clock_of, compare, interleaved
from leakbench.benchmarks.speed.memory import Memory, Probe, Unavailable, measured
from leakbench.benchmarks.speed.networks import Workload, parameters
from leakbench.benchmarks.speed.ways import USUAL, WAYS, Ours, has_convolutions, others_warnings

from ..parameters import subtests

ROOT = Path(__file__).parents[2]
MIB = 2**20
LINUX = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's high-water mark")


class FakeClock:
    """Time that passes only when a way says that it does."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def __call__(self):
        return self.now

    def way(self, name, seconds):
        """A builder of a step that takes the given times, call by call; the last one from then on."""
        left = list(seconds)

        def one_step():
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return lambda: one_step


def timed(ways, clock, **settings):
    return interleaved(ways, clock=clock, wall_clock=clock, **{"warmup": 0, **settings})


def test_every_round_has_one_call_of_each_way_and_its_order_rotates():
    clock = FakeClock()
    ways = {name: clock.way(name, [1.0]) for name in "abc"}
    found = timed(ways, clock, rounds=4)
    assert "".join(clock.calls) == "abc" + "bca" + "cab" + "abc"
    assert found.seconds == {name: (1.0,) * 4 for name in "abc"}


def test_calls_before_the_first_round_are_not_counted():
    clock = FakeClock()
    found = timed({"a": clock.way("a", [50.0, 40.0, 1.0, 2.0])}, clock, rounds=2, warmup=2)
    assert found.seconds == {"a": (1.0, 2.0)}


def test_a_short_step_is_taken_again_until_some_time_has_passed_and_its_time_is_the_mean():
    clock = FakeClock()
    found = timed({"a": clock.way("a", [1.0, 2.0, 3.0, 4.0]), "b": clock.way("b", [9.0])}, clock, rounds=2, least=4.0)
    # 1 + 2 + 3 seconds, then one call of 4.
    assert found.seconds == {"a": (2.0, 4.0), "b": (9.0, 9.0)}


def test_the_budget_ends_the_rounds_but_not_before_the_third():
    clock = FakeClock()
    assert len(timed({"a": clock.way("a", [1.0])}, clock, rounds=50, budget=7.5).seconds["a"]) == 8
    assert len(timed({"a": clock.way("a", [1.0])}, clock, rounds=50, budget=0.5).seconds["a"]) == 3
    assert len(timed({"a": clock.way("a", [1.0])}, clock, rounds=2, budget=0.5).seconds["a"]) == 2


def test_the_device_is_waited_for_before_and_after_each_call():
    events = []

    def waits():
        events.append("wait")
        return 0.0

    interleaved({"a": lambda: lambda: events.append("call")}, rounds=2, warmup=0, clock=waits)
    assert events == ["wait", "call", "wait"] * 2


def test_the_clock_of_cuda_waits_for_the_device_and_that_of_the_cpu_for_none(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waited.append("wait"))
    assert clock_of("cpu")() <= clock_of("cpu")() and not waited
    assert clock_of("cuda")() <= clock_of("cuda:1")() and waited == ["wait", "wait"]


def test_a_ratio_is_the_median_of_the_ratios_within_a_round():
    # The machine becomes ten times slower after the second round. Medians of the times would give 3 / 10.
    fast, slow = [1.0, 1.0, 10.0, 10.0, 10.0], [3.0, 2.0, 20.0, 20.0, 30.0]
    found = Ratio.of(slow, fast)
    assert found.median == 2.0
    assert (found.n, found.low) == (5, 2.0)
    assert found.high == pytest.approx(3.0)
    assert Ratio.of(fast, slow).median == 0.5


def test_nine_deciles_of_known_ratios():
    found = Ratio.of(list(range(1, 12)), [1.0] * 11)  # 1..11: the deciles are 2 and 10
    assert (found.median, found.low, found.high, found.n) == (6, 2.0, 10.0, 11)


def failing(*, when):
    calls = 0

    def one_step():
        nonlocal calls
        calls += 1
        if calls >= when:
            raise RuntimeError("no rule for Spiral\nand a long story")

    def build():
        if when == 0:
            raise ValueError("layer 'x' is not known")
        return one_step

    return build


@subtests(
    "when, expected",
    [
        (0, "layer 'x' is not known"),
        (1, "RuntimeError: no rule for Spiral"),
        (5, "RuntimeError: no rule for Spiral"),
    ],
)
def test_a_way_that_fails_has_a_reason_in_one_line_and_no_time(when, expected):
    clock = FakeClock()
    ways = {"bad": failing(when=when), "good": clock.way("good", [1.0])}
    found = timed(ways, clock, rounds=4, warmup=2)
    assert found.failed == {"bad": expected}
    assert found.seconds == {"good": (1.0,) * 4}


def test_a_way_that_is_not_installed_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus.grad_sample", None)  # what an import of something absent sees
    probe = Probe(
        "leakbench.benchmarks.speed.step:build", {"network": "mlp", "width": 4, "batch": 2, "way": "opacus-hooks"}
    )
    found = interleaved({"opacus-hooks": probe.build}, rounds=1)
    assert found.failed["opacus-hooks"].endswith("pip install 'leakbench[engines]'")


@subtests(
    "settings, message",
    [
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"rounds": 1, "budget": 0.0}, "budget must be a positive number of seconds, got 0.0"),
        ({"rounds": 1, "budget": math.nan}, "budget must be a positive number of seconds, got nan"),
    ],
)
def test_meaningless_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        interleaved({}, **settings)


def comparison(**measurements):
    """One comparison from way -> (seconds, memory)."""
    made = [
        Measurement(way=way, seconds=seconds, memory=None if size is None else Memory(extra=size, later=size))
        for way, (seconds, size) in measurements.items()
    ]
    return SpeedComparison(name="case", about={"batch": 4}, measurements=tuple(made), peer="peer", floor="floor")


MADE = comparison(ours=((2.0, 2.0, 4.0), 30), peer=((6.0, 8.0, 16.0), 100), floor=((1.0, 2.0, 2.0), None))


@subtests(
    "quantity, against, value, limit, met",
    [
        ("speed-up", "peer", 4.0, 4.0, True),
        ("speed-up", "peer", 4.0, 4.1, False),
        ("time", "floor", 2.0, 2.0, True),
        ("time", "floor", 2.0, 1.9, False),
        ("memory", "peer", 0.3, 0.3, True),
        ("memory", "peer", 0.3, 0.2, False),
    ],
)
def test_a_target_is_judged_by_the_median(quantity, against, value, limit, met):
    target = targets.SpeedTarget(case="case", way="ours", against=against, quantity=quantity, limit=limit)
    found = target.judge([MADE])
    assert (found["value"], found["met"], found["reason"]) == (value, met, None)


@subtests(
    "case, way, quantity, reason",
    [
        ("another", "ours", "time", "not part of this run"),
        ("case", "theirs", "time", "theirs: 'theirs' was not run"),
        ("case", "theirs", "memory", "theirs: 'theirs' was not run"),
    ],
)
def test_a_target_without_figures_is_neither_met_nor_missed(case, way, quantity, reason):
    target = targets.SpeedTarget(case=case, way=way, against="floor", quantity=quantity, limit=1.0)
    found = target.judge([MADE])
    assert (found["value"], found["met"], found["reason"]) == (None, None, reason)


def test_a_ratio_that_no_processor_here_can_lower_is_a_fact_and_no_failure():
    fact = targets.SpeedTarget(case="case", way="ours", against="floor", quantity="time", bound="41 Mflop an example")
    verdict = fact.judge([MADE])
    assert (verdict["value"], verdict["limit"], verdict["met"], verdict["reason"]) == (2.0, None, None, None)
    (table,) = report.tables({"targets": [verdict]})
    assert "| case | ours, time relative to floor: bound by 41 Mflop an example | 2.00 [" in table.markdown()
    assert table.markdown().rstrip().endswith("| fact |")


# What is measured in other processes: a module of a folder on their path.
ALLOCATES = f"""
import torch
def build(*, first, later):
    sizes = [first]
    def one_step():
        torch.ones((sizes.pop() if sizes else later) * {MIB}, dtype=torch.uint8)
    return one_step
def refuse():
    raise ValueError("layer 'x' is not known\\nand a long story")
"""


@pytest.fixture
def allocates(tmp_path, monkeypatch):
    (tmp_path / "allocates.py").write_text(ALLOCATES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.long
@LINUX
def test_memory_of_known_sizes_is_measured_in_a_process_of_its_own(allocates):
    # This process is larger than that, which must not show: getrusage would report it.
    mine = torch.ones(300 * MIB, dtype=torch.uint8)
    found = measured(Probe("allocates:build", {"first": 120, "later": 60}), threads=1)
    assert isinstance(found, Memory), found
    assert found.extra / MIB == pytest.approx(120, abs=8)
    assert found.later / MIB == pytest.approx(60, abs=8)
    assert len(mine) == 300 * MIB


def test_a_process_that_dies_gives_a_reason(tmp_path, monkeypatch):
    dying = tmp_path / "python"  # instead of this interpreter, which imports PyTorch first
    dying.write_text("#!/bin/sh\nkill -9 $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    assert measured(Probe("allocates:build"), threads=1) == "its process was ended by signal 9"


def test_a_way_that_refuses_its_model_gives_its_reason_instead_of_a_size(allocates, capsys):
    job = {"function": "allocates:refuse", "arguments": {}, "device": "cpu", "threads": torch.get_num_threads()}
    memory.main(json.dumps(job))
    assert json.loads(capsys.readouterr().out) == {"reason": "layer 'x' is not known"}


def test_without_a_high_water_mark_memory_is_refused_with_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "absent" / "clear_refs")
    with pytest.raises(Unavailable, match="no high-water mark of the resident set that can be reset, as Linux has one"):
        memory.measure_here(lambda: lambda: None)


def test_json_is_replaced_as_a_whole_and_kept_when_writing_fails(tmp_path):
    path = tmp_path / "new" / "step.json"
    report.write_json({"value": 1}, path)
    report.write_json({"value": 2}, path)
    assert json.loads(path.read_text()) == {"schema": 1, "value": 2}
    with pytest.raises(ValueError, match="JSON"):
        report.write_json({"value": math.nan}, path)

    def torn(file):
        file.write(b"{")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        report.write(path, torn)
    assert json.loads(path.read_text())["value"] == 2
    assert [file.name for file in path.parent.iterdir()] == ["step.json"]


def test_the_environment_names_what_a_figure_depends_on_and_no_machine(monkeypatch):
    named = os.uname_result(("Linux", "a-host-of-mine", *os.uname()[2:]))
    monkeypatch.setattr(os, "uname", lambda: named)
    monkeypatch.setattr(platform, "node", lambda: named.nodename)
    found = report.environment("cpu")
    assert found["threads"] == torch.get_num_threads()
    assert found["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert found["cpu"]
    text = json.dumps(found)
    assert named.nodename not in text
    assert str(ROOT) not in text


def test_a_table_shows_what_is_missing_as_such_and_says_why():
    def bad():
        raise ValueError("layer 'x' is not known")

    clock = FakeClock()
    found = interleaved({"bad": bad, "peer": clock.way("peer", [0.25])}, rounds=3, clock=clock)
    measurements = (
        Measurement(way="bad", reason=found.failed["bad"]),
        Measurement(way="peer", seconds=found.seconds["peer"]),
    )
    made = SpeedComparison(name="case", about={"batch": 1024}, measurements=measurements, peer="peer")
    document = {"comparisons": [report.as_dict(made)]}
    (table,) = report.tables(document)
    assert table.title == "case (1,024 batch)"
    assert list(table.cells.iloc[0]) == ["bad", "n/a", "n/a", "n/a", "n/a", "n/a", "n/a"]
    assert list(table.cells.iloc[1])[:4] == ["peer", "250", "250", "1.00 [1.00, 1.00]"]
    assert "bad: n/a, layer 'x' is not known." in table.remarks
    assert "| bad | n/a |" in table.markdown()
    assert "1.00 [1.00, 1.00]" in table.text()


@subtests("load", [*step.CASES.values()])
def test_networks_have_the_parameters_that_figures_are_quoted_for(load):
    expected = {"dp_cnn_small": 26_010, "dp_cnn": 550_570, "resnet18_gn": 11_173_962}
    assert parameters(load.model()) == expected[load.network]


def test_widths_of_a_family_give_growing_dimensions():
    for title, axis, loads in step.SWEEPS.values():
        assert axis in ("batch", "parameters"), title
        sizes = [load.batch if axis == "batch" else parameters(load.model()) for load in loads]
        assert sizes == sorted(set(sizes)), title


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def moved(way, model, inputs, labels):
    """How a step without noise moves the parameters, in float64."""
    before = weights(model)
    with others_warnings():
        WAYS[way](model, inputs, labels, 0.0)()
    return weights(model) - before


def ways(names) -> list:
    return [pytest.param(way, marks=[pytest.mark.peers] * way.startswith(("opacus", "backpack"))) for way in names]


@pytest.mark.parametrize("way", ways(way for way in WAYS if not way.startswith("sgd")))
def test_every_private_way_takes_the_same_step(way):
    load = Workload("cnn", 6, 2)
    inputs, labels = load.data()
    inputs = inputs.double() * torch.linspace(0.1, 3, 6, dtype=torch.float64).view(-1, 1, 1, 1)  # some are not clipped
    expected = moved("torch.func", load.model().double(), inputs, labels)
    found = moved(way, load.model().double(), inputs, labels)
    # Opacus divides by the norm + 1e-6.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    plain = moved("sgd", load.model().double(), inputs, labels)
    assert (plain - expected).abs().max() > 1e-2 * expected.abs().max()  # there was something to clip


def test_plain_steps_are_the_same_in_both_memory_formats():
    load = Workload("cnn", 4, 2)
    inputs, labels = load.data()
    found = [moved(way, load.model().double(), inputs.double(), labels) for way in ("sgd", "sgd-channels-last")]
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("way", ways(USUAL))
def test_private_steps_have_noise_and_plain_ones_have_none(way):
    load = Workload("cnn", 4, 2)

    def after(noise):
        model, (inputs, labels) = load.model(), load.data()
        torch.manual_seed(1)
        with others_warnings():
            WAYS[way](model, inputs, labels, noise)()
        return weights(model)

    spread = (after(1.0) - after(0.0)).std().item()
    # lr * multiplier * clip norm / batch
    assert spread == pytest.approx(0.0 if way.startswith("sgd") else 0.05 / 4, rel=0.1)


def test_masked_ways_agree_and_are_compared_with_a_target_for_large_layers():
    masked.check(batch=5, inputs=7, outputs=3)
    found = masked.measure(rounds=1, memory=False, sizes=[(2, 512, 512), (3, 8, 4)])
    assert [c["about"]["weights"] for c in found["comparisons"]] == [512 * 512, 32]
    assert [target["case"] for target in found["targets"]] == ["2 x 512 x 512"]


def test_an_informed_score_is_that_of_contributions_and_its_price_is_held_against_training():
    for plan in informed.PLANS:
        informed.check(network="mlp", plan=plan, examples=3)
    found = informed.measure(rounds=1, memory=False, networks=["mlp"], examples=3)
    assert [c["about"]["plan"] for c in found["comparisons"]] == list(informed.PLANS)
    assert {one["way"] for c in found["comparisons"] for one in c["ways"]} == set(informed.WAYS)
    assert [t["case"] for t in found["targets"]] == [f"mlp, {plan}" for plan in informed.PLANS]
    assert all(f"{informed.ALONG} at most 1.5 times the time of {informed.TRAIN}" in str(t) for t in found["targets"])


@pytest.mark.long
def test_both_ways_to_invert_a_gradient_find_the_image_and_ours_exactly():
    found = rgap.measure(rounds=1, memory=False, sizes=[8])
    (comparison,) = found["comparisons"]
    assert {one["way"] for one in comparison["ways"]} == set(rgap.WAYS) and found["targets"] == []
    assert comparison["about"][f"error of {rgap.OURS}"] < rgap.LARGEST_ERROR
    # A dense float32 solution finds a picture, not noise: 1/12 is the error of a uniform guess.
    assert comparison["about"][f"error of {rgap.DENSE}"] < 0.08


def test_the_usual_size_of_an_inversion_says_that_the_papers_is_larger(monkeypatch):
    said, sizes = [], []

    def no_comparison(name, probes, **about):
        sizes.append(about["about"]["size"])
        assert about["memory_calls"] == 1 and set(probes) == set(rgap.WAYS)
        return SpeedComparison(name=name, about={}, measurements=(), peer=rgap.DENSE)

    monkeypatch.setattr(part, "compare", no_comparison)
    monkeypatch.setattr(rgap, "errors", lambda **_: {})
    found = rgap.measure(say=said.append)
    assert sizes == [24] and "the paper's 32: --full" in said[0] and "--full measures that size" in found["method"]
    assert found["settings"]["rounds"] == 1 and [one["limit"] for one in found["targets"]] == [20.0, 0.25]
    whole = rgap.measure(full=True, say=said.append)
    assert sizes == [24, 32] and "--full" not in said[1] + whole["method"] and whole["settings"]["rounds"] == 3


def test_the_full_size_is_of_one_part_and_not_quick():
    for arguments in (["noise", "--full"], ["rgap", "--full", "--quick"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2 and "full" in result.output


@pytest.mark.parametrize("way", ways(noise.WAYS))
def test_every_kind_of_noise_is_added_to_the_same_sum_at_the_same_scale(way):
    size = 100_000
    draw = noise.build(size=size, way=way)
    first, second = draw(), draw()
    assert first.dtype == torch.float32
    sums = torch.randn(size, generator=torch.Generator().manual_seed(0))
    for release in (first, second):
        # The standard deviation of 100,000 draws is off by 0.0022, their mean by 0.0032; six times that.
        assert (release - sums).std().item() == pytest.approx(noise.STD, rel=0.0135)
        assert abs((release - sums).mean().item()) < 0.019
    assert not torch.equal(first, second)


@pytest.mark.peers
def test_noise_is_compared_with_opacus_at_every_size():
    found = noise.measure(rounds=1, memory=False, sizes=[100, 300])
    assert [c["about"]["parameters"] for c in found["comparisons"]] == [100, 300]
    for compared in found["comparisons"]:
        assert [way["way"] for way in compared["ways"]] == list(noise.WAYS)
        assert all(way["rounds"] == 1 and way["times_the_cost_of_floor"]["median"] > 0 for way in compared["ways"])
        assert {"os", "secure", compared["floor"], compared["peer"]} <= noise.WAYS.keys()
    columns = ["times as fast as opacus secure mode", "times the cost of opacus"]
    assert [list(table.cells)[3:5] for table in report.tables(found)] == [columns] * 2


def test_a_step_with_exact_noise_is_a_way_that_is_timed_when_asked_for():
    assert "secure" not in USUAL
    load = Workload("cnn", 3, 2)
    taken = WAYS["secure"](load.model(), *load.data(), 1.0)
    taken()
    assert isinstance(taken, Ours)
    assert taken.note.startswith("one_by_one")


def test_memory_is_asked_of_a_fresh_process_for_each_way(monkeypatch):
    asked = []

    def answer(probe, *, device, calls):
        asked.append((probe.arguments["way"], device, calls))
        return Memory(extra=10, later=5)

    monkeypatch.setattr("leakbench.benchmarks.speed.harness.measured", answer)
    sizes = {"batch": 2, "inputs": 3, "outputs": 4}
    probes = {
        way: Probe("leakbench.benchmarks.speed.masked:build", {**sizes, "way": way})
        for way in (masked.BOOK, masked.CLOSED)
    }
    found = compare("case", probes, peer=masked.BOOK, rounds=1, memory=True)
    assert asked == [(masked.BOOK, "cpu", 3), (masked.CLOSED, "cpu", 3)]
    assert found.memory_ratio(masked.CLOSED, masked.BOOK) == 1.0


@pytest.mark.peers
def test_a_quick_run_of_the_step_writes_json_tables_and_figures(tmp_path, monkeypatch):
    small = Workload("dp_cnn_small", 4)
    monkeypatch.setattr(step, "QUICK_CASES", {small.name: small})
    monkeypatch.setattr(
        step,
        "QUICK_SWEEPS",
        {"batch_x": step._by_batch("dp_cnn_small", (2, 4)), "dimension_x": step._by_width("mlp", (2, 4), 3)},
    )
    command = ["step", "--quick", "--rounds", "1", "--out", str(tmp_path)]
    for way in ("sgd", "sgd-channels-last", "auto", "opacus-hooks"):
        command += ["--way", way]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    names = {"step.json", "step.md"} | {
        f"step_{axis}.{end}" for axis in ("batch", "dimension") for end in ("png", "svg")
    }
    assert {file.name for file in tmp_path.iterdir()} == names
    found = json.loads((tmp_path / "step.json").read_text())
    (only,) = found["comparisons"]
    assert [way["way"] for way in only["ways"]] == ["sgd", "sgd-channels-last", "auto", "opacus-hooks"]
    assert all(way["rounds"] == 1 and way["median_seconds"] > 0 for way in only["ways"])
    assert only["ways"][2]["note"]
    assert all(target["met"] is None and target["reason"] for target in found["targets"])
    refused = found["sweeps"]["dimension_x"]["comparisons"][0]["ways"][1]
    assert refused["median_seconds"] is None
    assert "this network has none" in refused["reason"]
    page = (tmp_path / "step.md").read_text()
    assert "sgd-channels-last: n/a, channels-last is for convolutions" in page
    assert "![step batch](step_batch.png)" in page
    assert (tmp_path / "step_batch.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_a_step_of_every_method_is_compared_with_plain_dp_sgd():
    names = methods.names()
    files = {path.stem for path in (ROOT / "defenses").glob("*.py")} - {"__init__"}
    assert set(names) == {name for name in files if not is_federated(name)}
    assert methods.ways() == sorted(methods.ways(), key=lambda way: (way != methods.PLAIN, way))
    kept = [way for way in methods.ways() if way.endswith(methods.AFTER)]
    assert "pdp" + methods.AFTER in kept
    kept_for: Any = methods.defense_of("pdp" + methods.AFTER).method
    assert kept_for.subspace.interval == methods.KEPT
    sketched: Any = methods.defense_of("rpdp" + methods.SKETCHED + methods.AFTER).method
    assert (sketched.subspace.interval, sketched.subspace.directions) == (methods.KEPT, "sketch")
    judged = methods.targets(Workload("dp_cnn_small", 256))
    assert {target.limit for target in judged} == {1.1, 1.6, 2.5, None}
    # The dense directions of 26,010 coordinates, of which there are 800.
    assert [(t.way, t.bound) for t in judged if t.bound] == [("rpdp" + methods.AFTER, "41 Mflop an example")]


@pytest.mark.long
def test_a_way_of_methods_takes_steps_and_is_judged():
    asked = ["pdp" + methods.AFTER]
    found = methods.measure(quick=True, rounds=1, only=asked)
    (only,) = found["comparisons"]
    assert [way["way"] for way in only["ways"]] == [methods.PLAIN, *asked]
    assert all(way["median_seconds"] > 0 for way in only["ways"])
    # Of another batch than the target's, so that nothing is said of it.
    assert [target["met"] for target in found["targets"]] == [None]
    assert list(report.tables(found))


def test_the_limit_of_a_network_follows_its_layers_and_not_which_ways_ran():
    for failed in (
        Measurement(way="sgd-channels-last", reason="out of memory"),
        Measurement(way="sgd-channels-last", seconds=(0.9,) * 3),
    ):
        others = (Measurement(way="sgd", seconds=(1.0,) * 3), Measurement(way="auto", seconds=(1.9,) * 3))
        compared = SpeedComparison(name="x", about={}, measurements=(*others, failed), peer="sgd")
        assert architectures._target(compared, linear=False).limit == architectures.LIMIT
        assert architectures._target(compared, linear=True).limit == architectures.LIMIT_OF_LINEAR
    of_images = {name: has_convolutions(architectures._model(name)[0]) for name in ("mlp", "dp_cnn_small")}
    assert of_images == {"mlp": False, "dp_cnn_small": True}


def test_a_way_of_a_case_that_fails_says_why_and_a_baseline_that_fails_is_refused():
    def fail():
        raise RuntimeError("out of memory")

    timed = part.SpeedPart("x.y", {"rounds": 3})
    case = timed.case({"a": lambda: sum(range(1000)), "b": fail}, baseline="a", checks={}, case="case", d=3)
    assert case["ways"]["b"] == {
        "median_s": None, "min_s": None, "rounds": 0, "ratio": None, "reason": "RuntimeError: out of memory",
    }  # fmt: skip
    assert case["ways"]["a"]["rounds"] == 3 and case["ways"]["a"]["reason"] is None
    json.dumps(case, allow_nan=False)
    assert "| b | n/a | n/a | n/a | n/a |" in report._case(case).markdown()
    assert "b: n/a, RuntimeError: out of memory." in report._case(case).markdown()
    for baseline, got in (("b", "RuntimeError: out of memory"), ("c", "no such way")):
        with pytest.raises(ValueError, match=f"baseline '{baseline}' must run, .*, got {got}"):
            timed.case({"a": fail, "b": fail}, baseline=baseline, checks={}, case="case")


def test_no_rounds_are_refused_and_one_round_has_no_range():
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        part.SpeedPart("x.y", {"rounds": 0})
    assert part.SpeedPart("x.y", {"rounds": None}).rounds == 15
    once = Ratio.of([20.0], [1.0])
    assert (once.median, once.low, once.high, once.n) == (20.0, None, None, 1)
    assert report._interval(dataclasses.asdict(once)) == "20.00"


@pytest.mark.long
def test_networks_are_judged_against_the_faster_plain_format(monkeypatch):
    monkeypatch.setattr(architectures, "BATCHES", (2,))
    found = architectures.measure(quick=True, rounds=1, only=["mlp", "dp_cnn_small"])
    limits = {target["case"]: target["limit"] for target in found["targets"]}
    assert limits == {"mlp-2": architectures.LIMIT_OF_LINEAR, "dp_cnn_small-2": architectures.LIMIT}
    for comparison, target in zip(found["comparisons"], found["targets"], strict=True):
        seconds = {way["way"]: way["median_seconds"] for way in comparison["ways"]}
        plain = [seconds[way] for way in architectures.PLAIN if seconds[way] is not None]
        assert target["value"] == pytest.approx(seconds["auto"] / min(plain))
    with pytest.raises(ValueError, match="case must be one of"):
        architectures.measure(only=["nothing"])


@pytest.mark.peers
def test_from_the_root_the_command_is_ours_beside_a_benchmarks_of_others(tmp_path):
    pytest.importorskip("opacus")  # which installs a top-level package of that name
    command = [
        sys.executable,
        "-m",
        "leakbench.benchmarks.speed",
        "masked",
        "--quick",
        "--rounds",
        "1",
        "--threads",
        "1",
    ]
    done = subprocess.run([*command, "--out", tmp_path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "masked.json").read_text())["settings"]["quick"] is True
    assert {"masked.md", "masked.png", "masked.svg"} <= {file.name for file in tmp_path.iterdir()}


@subtests(
    "arguments, message",
    [
        (["step", "--case", "dp_cnn-1"], "case must be one of dp_cnn_small-256"),
        (["step", "--way", "sgdd"], "way must be one of sgd, sgd-channels-last"),
        (["--device", "tpu"], "device must be cpu or cuda, got 'tpu'"),
        (["--budget", "0"], "budget must be a positive number of seconds, got 0.0"),
    ],
)
def test_mistakes_on_the_command_line_are_one_sentence(arguments, message):
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "300", "TERM": "dumb"})
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


NETWORKS = {"bound_factors": "mlp", "weighted_rows": "mlp", "convolution_rows": "dp_cnn_small", "product_norms": "cnn6"}


@pytest.mark.long
@subtests("kernel, network", NETWORKS.items())
def test_a_step_without_a_kernel_runs_no_code_of_it(kernel, network, monkeypatch):
    def called(_):
        raise AssertionError("code was called")

    step = kernels._step(network, 2, masked=False)
    step()
    monkeypatch.setattr(type(kernels.KERNELS[kernel][0]), "code", property(called))
    with pytest.raises(AssertionError, match="code was called"):
        step()
    with kernels.replaced(kernels.WITHOUT[kernel]):
        step()
    monkeypatch.undo()
