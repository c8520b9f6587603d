"""The check of a GPU: its processes and budgets with made-up parts, and its own parts on a CPU with small sizes."""

import json
import sys
import time
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from leakbench.benchmarks.gpu_check import __main__ as command_line
from leakbench.benchmarks.gpu_check import (
    contributions,
    device_noise,
    document,
    gpu_tests,
    networks,
    private_steps,
    restarts,
    suite_runs,
    sums,
)
from leakbench.benchmarks.gpu_check.contributions import GHOST, HOOKS, LIMIT, OURS
from leakbench.benchmarks.gpu_check.parts import PARTS, CheckPart
from leakbench.benchmarks.gpu_check.processes import PartOutcome, run_part
from leakbench.benchmarks.gpu_check.products import DEFAULT, FLOAT32, TF32, products
from leakbench.benchmarks.gpu_check.rows import CheckedRow, NotMeasured, PartSettings
from leakbench.defenses.core import from_os

from ..parameters import subtests

SLOWLY = "print(ROW, flush=True); import time; time.sleep(60)"
ROW = CheckedRow(name="case", figures={"ms": 1.5, "way": "eager", "cells": 3, "MiB": None}, remarks=("no peer",))
WRONG = CheckedRow(name="case", wrong=("an example is 3 bounds long",))


def settings(folder, seconds=20.0):
    return PartSettings(device="cpu", small=True, seconds=seconds, jobs=1, folder=folder)


def made_up(name, seconds=1.0):
    return CheckPart(name=name, module="", seconds=seconds, about=f"Part {name}")


def only(rows) -> Any:
    (row,) = rows
    return row


def program(text, row=ROW):
    """A command that runs a program in place of every part."""
    return lambda part, given: [sys.executable, "-c", text.replace("ROW", repr(row.to_line()))]


def outcome_of(text, folder, *, seconds=20.0, row=ROW):
    rows = []
    outcome = run_part(
        made_up("a"), settings(folder, seconds), lambda _, new: rows.append(new), command=program(text, row)
    )
    assert rows == outcome.rows
    return outcome


def test_rows_are_read_among_what_libraries_print(tmp_path):
    assert CheckedRow.from_line(ROW.to_line()) == ROW
    assert PartSettings.from_json(settings(tmp_path).to_json()) == settings(tmp_path)
    outcome = outcome_of("print('loading'); print('{\"row\": 3}'); print(ROW); print('7')", tmp_path)
    assert (outcome.rows, outcome.status, outcome.wrong) == ([ROW], "done", [])


def test_a_part_that_dies_keeps_its_rows_and_is_wrong(tmp_path):
    outcome = outcome_of("print(ROW, flush=True); raise SystemExit('no kernel image')", tmp_path)
    assert (outcome.rows, outcome.status) == ([ROW], "died")
    assert outcome.wrong == ["a: died, exit code 1: no kernel image"]
    outcome = outcome_of("import os; os.kill(os.getpid(), 11)", tmp_path)
    assert outcome.wrong == ["a: died, ended by signal 11"]


def test_a_part_over_its_budget_keeps_its_rows_and_ends_with_its_processes(tmp_path):
    file = tmp_path / "alive"
    child = (
        f"import time, pathlib\nwhile True: pathlib.Path({str(file)!r}).write_text(str(time.time())); time.sleep(.05)"
    )
    text = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); {SLOWLY}"
    begun = time.monotonic()
    outcome = outcome_of(text, tmp_path, seconds=4.0)
    assert time.monotonic() - begun < 30
    assert (outcome.rows, outcome.status, outcome.wrong) == ([ROW], "over its budget", [])
    last = file.read_text()
    time.sleep(0.3)
    assert file.read_text() == last


def test_a_part_that_lacks_a_package_says_so_and_is_not_wrong(tmp_path):
    outcome = outcome_of('print(\'{"missing": "timm is not installed"}\')', tmp_path)
    assert (outcome.status, outcome.reason, outcome.wrong) == ("not measured", "timm is not installed", [])


def test_results_are_written_after_each_row_and_kept_when_a_later_part_dies(tmp_path, capsys):
    written = tmp_path / "gpu_check.json"
    texts = {
        "a": "print(ROW)",
        "b": f"import json; assert json.load(open({str(written)!r}))['parts'][0]['rows']; print(ROW); 1 / 0",
        "c": "print(ROW)",
    }
    outcomes = command_line.check(
        [made_up(name) for name in texts],
        settings(tmp_path, 60.0),
        command=lambda part, given: program(texts[part.name])(part, given),
    )
    assert [outcome.status for outcome in outcomes] == ["done", "died", "done"]
    results = json.loads(written.read_text())
    assert [len(part["rows"]) for part in results["parts"]] == [1, 1, 1]
    assert results["wrong"] == ["b: died, exit code 1: ZeroDivisionError: division by zero"]
    page = (tmp_path / "gpu_check.md").read_text()
    assert "| case | 1.5 | eager | 3 | n/a |" in page and "case: no peer." in page and "- **wrong**: b: died" in page
    assert "WRONG: 1 in 3 rows of 3 parts; incomplete: b (died)" in page
    printed = capsys.readouterr().out
    assert "case: ms 1.5, way eager, cells 3, MiB n/a; no peer" in printed and "WRONG: b: died" in printed


def test_seconds_that_a_part_leaves_are_those_of_later_parts(tmp_path):
    budgets = []

    def command(part, given):
        budgets.append(given.seconds)
        return program("print(ROW)")(part, given)

    command_line.check(
        [made_up("a", 30), made_up("b", 10), made_up("c", 10)], settings(tmp_path, 100.0), command=command
    )
    assert budgets[0] == pytest.approx(60, abs=1) and 40 < budgets[1] < 50 and 60 < budgets[2] < 100


@subtests(
    ("outcome", "code"),
    [
        (PartOutcome(name="a", about="A", rows=[ROW]), 0),
        (PartOutcome(name="a", about="A", rows=[ROW], status="over its budget"), 0),
        (PartOutcome(name="a", about="A", status="not measured", reason="timm is not installed"), 0),
        (PartOutcome(name="a", about="A", status="died", reason="exit code 1"), 1),
        (PartOutcome(name="a", about="A", rows=[ROW, WRONG]), 1),
    ],
)
def test_a_wrong_number_fails_the_check_and_a_slow_one_does_not(monkeypatch, outcome, code):
    monkeypatch.setattr(command_line, "check", lambda parts, given: [outcome])
    assert CliRunner().invoke(command_line.app, ["--device", "cpu"]).exit_code == code


@subtests(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "device must be cpu or cuda, got 'tpu'"),
        (["--seconds", "0", "--device", "cpu"], "seconds must be a positive number, got 0.0"),
        (["--only", "speed", "--device", "cpu"], "only must be one of sums, contributions, tests, steps"),
    ],
)
def test_mistakes_on_the_command_line_are_one_sentence(arguments, message):
    done = CliRunner().invoke(command_line.app, arguments, env={"COLUMNS": "300", "TERM": "dumb"})
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_a_contribution_near_its_bound_is_shown_with_the_digits_by_which_it_exceeds_it():
    figures = [1.00004, 0.99987, 1.02, 12.3456, 3.1e-7, 1234, "eager", None]
    shown = ["1.000040", "0.999870", "1.02", "12.35", "3.1e-07", "1,234", "eager", "n/a"]
    assert [document.formatted(figure) for figure in figures] == shown


def test_the_budgets_of_all_parts_are_six_minutes():
    assert sum(part.seconds for part in PARTS) == 360


@pytest.mark.long
def test_a_part_runs_in_a_process_of_its_own(tmp_path):
    part = next(part for part in PARTS if part.name == "noise")
    outcome = run_part(part, settings(tmp_path, 120.0), lambda *_: None)
    assert outcome.status == "done", (tmp_path / "noise.log").read_text()
    assert [row.figures["unlike the CPU's"] for row in outcome.rows] == [0] and outcome.wrong == []


def longest(way, network):
    return contributions.longest(way, network, device="cpu", precision="float32", small=True, seeds=1)


@pytest.mark.parametrize("network", contributions.NETWORKS)
def test_no_example_whose_positions_cancel_adds_more_than_its_bound(network):
    found = longest(OURS, network)
    assert 0.999 < found.length <= LIMIT, found


def test_the_positions_of_an_example_cancel_up_to_its_difference():
    network = "linear layer over positions"
    model = contributions.build(network)
    *_, example = contributions.examples(network, model, (256,), 1)
    derivatives = (model(example.inputs) - example.targets).detach().double()
    terms = example.inputs.double().norm(dim=2) * derivatives.norm(dim=2)
    assert example.case == "256, 0.002, seed 0"
    assert 1e-6 < example.gradient / float(terms.sum()) < 2e-3


@pytest.mark.peers
@pytest.mark.parametrize("network", contributions.NETWORKS)
def test_opacus_exceeds_its_bound_by_ghost_clipping_and_not_by_hooks(network):
    ghost, hooks = longest(GHOST, network), longest(HOOKS, network)
    assert 0.99 < hooks.length <= LIMIT, hooks
    assert ghost.length > 1.01, (
        f"{ghost}: Opacus's ghost clipping bounds examples whose positions cancel, and its row and section in "
        "docs/comparison.md, which hold for Opacus 1.6.0, must say from which version on"
    )


@pytest.mark.peers
def test_the_contribution_of_a_linear_layer_by_ghost_clipping_is_not_clipped_at_all():
    found = longest(GHOST, "linear layer over positions")
    assert found.length == pytest.approx(1 / found.bound, rel=1e-3) and found.bound == min(contributions._SHARES)


def test_an_example_longer_than_its_bound_is_wrong_for_leakbench_alone(monkeypatch, tmp_path):
    def unclipped(model, inputs, targets, bound, precision):
        return list(torch.autograd.grad(contributions.squared_error(model(inputs), targets).sum(), model.parameters()))

    monkeypatch.setattr(contributions, "NETWORKS", {"convolution": contributions.NETWORKS["convolution"]})
    monkeypatch.setattr(contributions, "WAYS", {GHOST: unclipped, OURS: contributions.WAYS[OURS]})
    row = only(contributions.measure(settings(tmp_path)))
    assert row.name == "convolution, float32" and row.figures[GHOST] == pytest.approx(10, rel=0.1) and not row.wrong
    monkeypatch.setattr(contributions, "WAYS", {OURS: unclipped})
    row = only(contributions.measure(settings(tmp_path)))
    assert "an example is 10" in row.wrong[0] and "bounds long" in row.wrong[0]


def test_networks_have_the_same_weights_and_leave_the_generator_alone():
    before = torch.get_rng_state()
    a, b = (contributions.build("convolution") for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert torch.equal(before, torch.get_rng_state())


def test_precisions_of_products_are_set_and_restored():
    backends: Any = torch.backends
    switches = (backends.cuda.matmul, backends.cudnn.conv)

    def precisions():
        return [switch.fp32_precision for switch in switches]

    before = precisions()
    for name, expected in ((FLOAT32, ["ieee", "ieee"]), (DEFAULT, ["ieee", "tf32"]), (TF32, ["tf32", "tf32"])):
        with products(name):
            assert precisions() == expected
        assert precisions() == before


@pytest.mark.long
def test_sums_are_those_of_the_reference_and_others_are_wrong(monkeypatch, tmp_path):
    rows: list[Any] = list(sums.measure(settings(tmp_path)))
    assert [row.name for row in rows] == ["dp_cnn_small", "mlp"] and not any(row.wrong for row in rows)
    assert all(0 <= row.figures["error in float64"] < 1e-12 for row in rows)
    total = sums._total
    monkeypatch.setattr(sums, "_total", lambda *arguments: total(*arguments) * (1 + 1e-2))
    monkeypatch.setattr(sums, "names", lambda small: ("mlp",))
    row = only(sums.measure(settings(tmp_path)))
    assert "the sum in float64 is off by 0.01 of its length, and 1e-09 is allowed" in row.wrong
    assert "an example in float32 is 1.010000 bounds long" in row.wrong


def test_a_network_of_a_package_that_is_not_installed_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setattr(sums, "names", lambda small: (networks.VISION_TRANSFORMER,))
    monkeypatch.setattr(private_steps, "SMALL_CASES", ((networks.VISION_TRANSFORMER, 2),))
    for part in (sums, private_steps):
        (row,) = part.measure(settings(tmp_path))
        assert row.remarks == ("timm is not installed",) and row.figures == {} and row.wrong == ()


@pytest.mark.long
def test_a_step_of_ours_that_fails_is_wrong_and_one_of_a_peer_is_a_remark(monkeypatch, tmp_path):
    def fails(*_, **__):
        raise RuntimeError("no rule for Spiral")

    monkeypatch.setattr(private_steps, "SMALL_CASES", (("mlp", 4),))
    monkeypatch.setattr(private_steps, "WAYS", {"sgd": private_steps.WAYS["sgd"], "opacus-hooks": fails})
    row = only(private_steps.measure(settings(tmp_path)))
    assert "hooks takes no step: RuntimeError: no rule for Spiral" in row.remarks and not row.wrong
    assert row.figures["SGD ms"] > 0 and row.figures["leakbench / SGD"] > 0 and row.figures["hooks ms"] is None
    monkeypatch.setattr(private_steps, "Ours", fails)
    row = only(private_steps.measure(settings(tmp_path)))
    assert row.wrong == ("leakbench takes no step: RuntimeError: no rule for Spiral",)


@pytest.mark.peers
def test_all_ways_of_a_step_are_timed_and_their_memory_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(private_steps, "SMALL_CASES", (("mlp", 4),))
    row = only(private_steps.measure(settings(tmp_path)))
    assert row.name == "mlp, 4, float32" and row.wrong == () and None not in row.figures.values()


def test_noise_unlike_that_of_the_cpu_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setattr(device_noise, "seeded", lambda seed: from_os())
    row = only(device_noise.measure(settings(tmp_path)))
    assert row.figures["unlike the CPU's"] > 1990 and len(row.wrong) == 2
    assert "numbers in torch.float32 are not those of the CPU" in row.wrong[0]


@pytest.mark.long
def test_restarts_side_by_side_are_those_in_turn(monkeypatch, tmp_path):
    rows: list[Any] = list(restarts.measure(settings(tmp_path, 1.0)))
    assert [row.name for row in rows] == ["convnet, 1 restarts", "convnet, 2 restarts"]
    assert not any(row.wrong for row in rows) and all(row.figures["in turn, ms a restart"] > 0 for row in rows)
    both_ways = restarts.both_ways
    monkeypatch.setattr(
        restarts, "both_ways", lambda *given: (lambda: 2 * both_ways(*given)[0](), *both_ways(*given)[1:])
    )
    monkeypatch.setattr(restarts, "SMALL_RESTARTS", (1,))
    row = only(restarts.measure(settings(tmp_path, 1.0)))
    assert row.wrong == ("derivatives in float64 differ by 0.5, and 1e-09 is allowed",)


@subtests(
    ("text", "result"),
    [
        ("[gw3] [ 12%] PASSED tests/a/test_b.py::test_c[d e] \n", ("PASSED", "tests/a/test_b.py::test_c[d")),
        ("tests/a/test_b.py::test_c FAILED                [ 50%]\n", ("FAILED", "tests/a/test_b.py::test_c")),
        ("FAILED tests/a/test_b.py::test_c - assert 1 == 2\n", ("FAILED", "tests/a/test_b.py::test_c")),
        ("======= 3 passed in 0.1s =======\n", None),
        ("tests/a/test_b.py::test_c \n", None),
    ],
)
def test_results_of_tests_are_read_from_the_lines_of_pytest(text, result):
    assert gpu_tests.result_of(text) == result


@pytest.mark.long
def test_tests_are_counted_and_a_failed_one_is_wrong(monkeypatch, tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs one\n")
    (folder / "test_x.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\n"
        "def test_right(): pass\ndef test_wrong(): assert 1 == 2\n"
        "def test_warns(): __import__('warnings').warn('old')\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
    )
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_tests, "_SMALL_TESTS", "tests")
    *failed, total = gpu_tests.measure(settings(tmp_path))
    assert [(row.name, row.wrong) for row in failed] == [("tests/test_x.py::test_wrong", ("failed",))]
    assert total.figures == {"passed": 2, "failed": 1, "error": 0, "skipped": 1} and total.wrong == ()
    slow = "\n@pytest.mark.gpu\ndef test_slow(): __import__('time').sleep(60)\n"
    (folder / "test_x.py").write_text((folder / "test_x.py").read_text() + slow)
    *_, total = gpu_tests.measure(settings(tmp_path, 12.0))
    assert total.figures["passed"] == 2 and total.remarks == ("stopped after 10 s",) and total.wrong == ()
    (folder / "test_x.py").write_text("import nothing_of_that_name\n")
    assert any(row.wrong for row in gpu_tests.measure(settings(tmp_path)))
    monkeypatch.setattr(gpu_tests, "_NEEDED", ("nothing_of_that_name",))
    with pytest.raises(NotMeasured, match="nothing_of_that_name is not installed"):
        list(gpu_tests.measure(settings(tmp_path)))


RUN = """
import json, pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1]) / "records"
out.mkdir(parents=True)
for number, status in enumerate(("ok", "ok", "skipped")):
    (out / f"{number}.json").write_text(json.dumps({"status": status}))
"""


def test_a_run_of_a_suite_counts_its_cells_and_is_stopped_in_time(monkeypatch, tmp_path):
    monkeypatch.setattr(suite_runs, "_COMMAND", RUN)
    for name in "abc":
        (tmp_path / name).mkdir()
    row = only(suite_runs.measure_quick(settings(tmp_path / "a")))
    assert {**row.figures, "seconds": 0} == {"seconds": 0, "ok cells": 2, "skipped cells": 1}
    assert row.wrong == row.remarks == ()
    monkeypatch.setattr(suite_runs, "_COMMAND", RUN + "time.sleep(60)")
    row = only(suite_runs.measure_quick(settings(tmp_path / "b", 5.0)))
    assert row.figures["ok cells"] == 2 and row.remarks[0].startswith("stopped after ") and row.wrong == ()
    monkeypatch.setattr(suite_runs, "_COMMAND", RUN + "sys.exit(1)")
    row = only(suite_runs.measure_cell(settings(tmp_path / "c")))
    assert row.name == "400 random images" and "leakbench run ended with code 1, see " in row.wrong[0]


@pytest.mark.slow
@pytest.mark.parametrize(("measure", "cells"), [(suite_runs.measure_quick, 3), (suite_runs.measure_cell, 1)])
def test_a_few_cells_of_each_suite_run(tmp_path, measure, cells):
    row = only(measure(settings(tmp_path, 300.0)))
    assert row.figures["ok cells"] == cells and row.wrong == row.remarks == ()
