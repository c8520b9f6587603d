"""A killed run goes on, and its claim covers the releases that nobody recorded."""

import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant

from leakbench.defenses.core import (
    Execution,
    Ledger,
    Recording,
    StepPlan,
    StrategyRow,
    from_os,
    full,
    partition,
    poisson,
    predict,
    random_allocation,
    secure,
    seeded,
    shuffle,
    train,
)
from leakbench.defenses.core.gradients import executor
from leakbench.defenses.core.plan.noise_correlation import Banded, Tree
from leakbench.defenses.core.privacy.ledger import events_of
from leakbench.defenses.core.training import checkpoint as disk
from leakbench.defenses.core.training import run_file
from leakbench.defenses.core.training.ongoing import Engine, OngoingRun
from leakbench.defenses.dp_ftrl import dp_ftrl
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dp_snip import dp_snip

from ... import duties

DEFENSE, DELTA = dp_sgd(noise_multiplier=1.0), 1e-5
FRESH = {"os": from_os, "secure": secure}


class Killed(BaseException):
    """Ends a run without a chance to write anything, as a kill of the process does."""


def killed(path, after, defense=DEFENSE, **settings: Any):
    """Runs until a number of steps is taken; returns the noisy sums of each step."""
    released, execute = [], Engine.run

    def recording(self, *args, **options):
        out = execute(self, *args, **options)
        released.append(out.noisy[0])
        return out

    def kill(done, total):
        if done == after:
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Engine, "run", recording)
        every = settings.pop("checkpoint_every", 2)
        duties.trained(defense, checkpoint=path, checkpoint_every=every, progress=kill, **settings)
    return released


def charges(run):
    """(first step, steps, multiplier, times) of every entry."""
    return [(e.first, e.steps, e.noise_multiplier, e.times) for e in run.ledger.entries]


def composed(events):
    """Epsilon of (rate, multiplier, steps) by dp-accounting, which shares no code with the ledger."""
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for rate, sigma, steps in events:
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps))
    return accountant.get_epsilon(DELTA)


@pytest.mark.long
@pytest.mark.parametrize("kind", FRESH)
def test_steps_since_the_checkpoint_are_charged_for_both_times(kind, tmp_path):
    before = killed(tmp_path / "c", 3, noise=FRESH[kind]())
    run = duties.trained(DEFENSE, checkpoint=tmp_path / "c", noise=FRESH[kind]())
    # Written after two steps and killed after three: the file cannot tell whether the fourth was taken.
    assert charges(run) == [(0, 2, 1.0, 1), (2, 2, 1 / math.sqrt(2), 2), (4, 2, 1.0, 1)]
    expected = composed([(0.5, 1.0, 4), (0.5, 1 / math.sqrt(2), 2)])
    assert run.claim(DELTA).epsilon == pytest.approx(expected, rel=2e-3)
    assert run.claim(DELTA).epsilon > 1.05 * predict(DEFENSE, sampling=duties.POISSON, steps=6).claim(DELTA).epsilon
    # The same sum under other noise: the difference of the releases has the deviation sqrt(2), known to 11 % from 43
    # numbers, so a run in a million is off by more than 0.6.
    again = run.transcript.steps[2].noisy
    assert again is not None
    assert float((again[0] - before[2]).std()) / math.sqrt(2) == pytest.approx(1.0, abs=0.6)


def test_a_run_that_was_interrupted_between_two_steps_has_nothing_to_charge_again(tmp_path):
    run = duties.trained
    with pytest.raises(KeyboardInterrupt):
        run(DEFENSE, checkpoint=tmp_path / "c", progress=duties._Stop(3), noise=from_os())
    resumed = run(DEFENSE, checkpoint=tmp_path / "c", noise=from_os())
    assert charges(resumed) == [(0, 6, 1.0, 1)]
    assert resumed.resumed and not resumed.repeated


def test_a_run_that_went_on_after_an_interruption_and_is_killed_is_charged_for_that(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        duties.trained(DEFENSE, checkpoint=tmp_path / "c", progress=duties._Stop(3), noise=from_os())
    killed(tmp_path / "c", 4, noise=from_os(), checkpoint_every=6)
    run = duties.trained(DEFENSE, checkpoint=tmp_path / "c", noise=from_os())
    assert charges(run) == [(0, 3, 1.0, 1), (3, 3, 1 / math.sqrt(2), 2)]


def test_each_kill_is_charged_once_more(tmp_path):
    for after in (3, 3, 6):
        killed(tmp_path / "c", after, noise=from_os(), checkpoint_every=6 if after == 6 else 2)
    # The third was killed after the last step, whose file is whole: a finished run.
    run = duties.trained(DEFENSE, checkpoint=tmp_path / "c", noise=from_os())
    assert charges(run) == [(0, 2, 1.0, 1), (2, 2, 1 / math.sqrt(3), 3), (4, 2, 1.0, 1)]


def test_a_run_that_is_killed_before_its_first_epoch_ends_is_charged_from_the_first_step_on(tmp_path):
    killed(tmp_path / "c", 1, noise=from_os())
    run = duties.trained(DEFENSE, checkpoint=tmp_path / "c", noise=from_os())
    assert charges(run) == [(0, 2, 1 / math.sqrt(2), 2), (2, 4, 1.0, 1)]


def test_releases_before_the_first_step_are_charged_again_with_it(tmp_path):
    defense = dp_snip(noise_multiplier=1.0, mask_noise_multiplier=5.0)
    killed(tmp_path / "c", 1, defense, noise=from_os())
    run = duties.trained(defense, checkpoint=tmp_path / "c", noise=from_os())
    assert [(e.noise_multiplier, e.times) for e in run.ledger.entries if e.one_off] == [(5.0 / math.sqrt(2), 2)]


def test_a_method_that_starts_again_plans_at_the_weights_of_the_file(tmp_path):
    """Otherwise seeded noise would be drawn again on scores of other weights."""

    def network():
        other = duties.network()
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(-2)
        return other

    defense = dp_snip(noise_multiplier=1.0, mask_noise_multiplier=5.0)
    before = killed(tmp_path / "c", 1, defense)
    elsewhere = duties.World(network, duties.DATA, duties.PUBLIC, {})
    run = duties.trained(defense, elsewhere, checkpoint=tmp_path / "c")
    noisy = run.transcript.one_offs[0].noisy
    assert noisy is not None and torch.equal(noisy[0], before[0])


def test_a_stream_of_correlated_noise_is_charged_as_a_whole_at_the_multiplier_of_both_times(tmp_path):
    def tree(sigma):
        return dp_ftrl(noise_multiplier=sigma, tree_per_epoch=False)

    sampling = partition(0.5)
    killed(tmp_path / "c", 3, tree(1.0), noise=from_os(), sampling=sampling)
    run = duties.trained(tree(1.0), checkpoint=tmp_path / "c", noise=from_os(), sampling=sampling)
    assert [e.times for e in run.ledger.entries] == [1, 2, 1]
    twice = predict(tree(1 / math.sqrt(2)), sampling=sampling, steps=6)
    assert run.claim(DELTA).epsilon == pytest.approx(twice.claim(DELTA).epsilon, rel=1e-6)


@pytest.mark.parametrize("strategy", [Tree(8), Banded(8, (0.5, 0.375))], ids=["tree", "banded"])
def test_no_record_moves_both_passes_of_a_stream_by_more_than_is_charged(strategy):
    """The exact separation of two Gaussians, for every set of steps that a record may take part in."""
    steps, first, end = 8, 3, 6  # steps 3 to 5 are taken twice, from the memory of the noise of steps 0 to 2
    c = strategy.matrix()
    inverse = np.linalg.inv(c)
    again = np.zeros((steps - first, steps + steps - first))  # of the fresh noise of both passes
    again[:, :first] = inverse[first:, :first]
    again[:, steps:] = inverse[first:, first:]
    passes = np.vstack([np.hstack([inverse[:end], np.zeros((end, steps - first))]), again])
    covariance = passes @ passes.T
    used = np.array([[pattern >> step & 1 for step in range(steps)] for pattern in range(1, 2**steps)], dtype=float)
    moved = np.hstack([used[:, :end], used[:, first:]])
    separation = (moved * np.linalg.solve(covariance, moved.T).T).sum(axis=1)
    charged_once = ((used @ c.T) ** 2).sum(axis=1)
    assert (separation <= 2 * charged_once * (1 + 1e-9)).all()
    assert (separation > 1.5 * charged_once).any()


def test_a_stream_whose_strategy_has_both_signs_is_charged_for_the_worst_histories():
    """All 2^8 signs of a record that is in every step; a step that is taken again may have the other sign."""
    strategy, times = Banded(8, (1.0, -1.0)), 3
    c = strategy.matrix()
    signs = np.array([[1.0 if pattern >> step & 1 else -1.0 for step in range(8)] for pattern in range(2**8)])
    kept = (signs @ c.T) ** 2
    worst = np.maximum(kept, (np.abs(signs @ (c - np.eye(8)).T) + 1) ** 2)  # of the passes that were lost
    moved = (kept + (times - 1) * worst).sum(axis=1).max() / np.linalg.norm(c, axis=0).max() ** 2
    blocks = duties.history(DEFENSE)[0].plan.blocks
    squares = {}
    for unrecorded in ((), [(step, step + 1) for step in range(8)] * (times - 1)):
        ledger = Ledger(full(), unrecorded=list(unrecorded))
        for step in range(8):
            ledger.record(StepPlan(*blocks, correlated=StrategyRow(strategy, step)).at(1.0), step=step)
        (event,) = events_of(ledger.entries)
        squares[len(unrecorded)] = 1 / event.noise_multiplier**2
    assert times * squares[0] < moved <= squares[16]


@pytest.mark.parametrize(
    "sampling", [shuffle(0.5), partition(0.5), random_allocation(0.5), full()], ids=lambda s: s.kind
)
def test_under_samplers_that_use_a_record_once_the_epoch_is_charged_at_the_multiplier_of_both_times(sampling, tmp_path):
    killed(tmp_path / "c", 3, noise=from_os(), sampling=sampling)
    run = duties.trained(DEFENSE, checkpoint=tmp_path / "c", noise=from_os(), sampling=sampling)
    expected = Ledger(sampling)
    for step in range(6):
        plan = duties.history(DEFENSE)[0].plan
        expected.record(plan.at(1 / math.sqrt(2) if step in (2, 3) else 1.0), step=step)
    assert run.claim(DELTA).epsilon == pytest.approx(expected.claim(DELTA).epsilon, rel=1e-6)


def test_seeded_noise_is_drawn_again_on_the_same_sums_and_charged_once(tmp_path):
    killed(tmp_path / "c", 3)
    run = duties.trained(DEFENSE, checkpoint=tmp_path / "c", noise=seeded(777))
    duties.check_same_run(run, duties.trained(DEFENSE))
    assert charges(run) == [(0, 6, 1.0, 1)]
    assert any(sentence.startswith("steps that were taken again") for sentence in run.claim(DELTA).assumes)


@pytest.mark.parametrize("setting", [{"engine": "torch.func"}, {"microbatch": 5}, {"precision": "bfloat16"}])
def test_seeded_noise_is_another_where_sums_are_rounded_otherwise(setting, tmp_path):
    before = killed(tmp_path / "c", 3)
    run = duties.trained(DEFENSE, checkpoint=tmp_path / "c", **setting)
    assert charges(run) == [(0, 2, 1.0, 1), (2, 2, 1 / math.sqrt(2), 2), (4, 2, 1.0, 1)]
    again = run.transcript.steps[2].noisy
    assert again is not None
    assert float((again[0] - before[2]).std()) / math.sqrt(2) == pytest.approx(1.0, abs=0.6)


def test_steps_that_a_killed_run_took_are_remembered_when_the_next_one_writes_sooner(tmp_path):
    """Otherwise the noise of steps 3 and 4 would be drawn again where sums are rounded otherwise, uncharged."""
    killed(tmp_path / "c", 5, checkpoint_every=6)
    with pytest.raises(KeyboardInterrupt):
        duties.trained(DEFENSE, checkpoint=tmp_path / "c", checkpoint_every=1, progress=duties._Stop(3))
    run = duties.trained(DEFENSE, checkpoint=tmp_path / "c", engine="torch.func")
    assert charges(run) == [(0, 3, 1.0, 1), (3, 3, 1 / math.sqrt(2), 2)]


def test_on_another_machine_a_seeded_run_is_a_function_of_its_history(tmp_path, monkeypatch):
    def history(folder):
        folder.mkdir()
        killed(folder / "c", 3)
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
            killed(folder / "c", 4, checkpoint_every=6)
            return duties.trained(DEFENSE, checkpoint=folder / "c")  # the third time as the second, bit for bit

    run = history(tmp_path / "a")
    assert charges(run) == [(0, 2, 1.0, 1), (2, 2, 1 / math.sqrt(2), 2), (4, 2, 1.0, 1)]
    duties.check_same_run(history(tmp_path / "b"), run)


def test_a_run_interrupted_between_two_steps_goes_on_elsewhere_with_the_same_noise(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        duties.trained(DEFENSE, checkpoint=tmp_path / "c", progress=duties._Stop(3))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    duties.check_same_run(duties.trained(DEFENSE, checkpoint=tmp_path / "c"), duties.trained(DEFENSE))


def test_a_run_goes_on_on_another_device(accelerator, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        duties.trained(DEFENSE, checkpoint=tmp_path / "c", progress=duties._Stop(3))
    run, whole = duties.trained(DEFENSE, checkpoint=tmp_path / "c", device=accelerator), duties.trained(DEFENSE)
    assert charges(run) == [(0, 6, 1.0, 1)]
    torch.testing.assert_close(duties.parameters(run), duties.parameters(whole), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("every", [0, -3, 2.5, True])
def test_a_checkpoint_is_written_every_whole_number_of_steps(every):
    with pytest.raises(ValueError, match="checkpoint_every must be a whole number of at least 1"):
        Recording(checkpoint_every=every)


def test_seeded_noise_is_another_on_a_processor_of_another_name(tmp_path, monkeypatch):
    killed(tmp_path / "c", 3)
    monkeypatch.setattr(run_file, "processor_name", lambda: "another")
    run = duties.trained(DEFENSE, checkpoint=tmp_path / "c")
    assert charges(run) == [(0, 2, 1.0, 1), (2, 2, 1 / math.sqrt(2), 2), (4, 2, 1.0, 1)]


def test_passes_are_of_the_same_size_again_whatever_memory_is_free_by_then(tmp_path, monkeypatch):
    killed(tmp_path / "c", 1)
    with monkeypatch.context() as patch:
        patch.setattr(executor, "MEMORY_BUDGET", 1)
        run = duties.trained(DEFENSE, checkpoint=tmp_path / "c")
    duties.check_same_run(run, duties.trained(DEFENSE))


def test_copies_of_a_file_that_leave_its_noise_at_two_places_draw_two_streams(tmp_path):
    killed(tmp_path / "c", 3)
    (tmp_path / "copy").write_bytes((tmp_path / "c").read_bytes())
    killed(tmp_path / "c", 5)
    later = killed(tmp_path / "c", 5, precision="bfloat16")
    earlier = killed(tmp_path / "copy", 3, precision="bfloat16")
    # 43 numbers; a stream that both had in common would leave the difference of their sums, of deviation 0.4.
    assert float((later[0] - earlier[0]).std()) / math.sqrt(2) == pytest.approx(1.0, abs=0.6)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_an_error_of_the_progress_callback_interrupts_between_two_steps(error, tmp_path):
    def progress(done, total):
        if done == 3:
            raise error("enough")

    with pytest.raises(error, match="enough"):
        duties.trained(DEFENSE, checkpoint=tmp_path / "c", progress=progress, noise=from_os())
    assert charges(duties.trained(DEFENSE, checkpoint=tmp_path / "c", noise=from_os())) == [(0, 6, 1.0, 1)]


def test_steps_of_a_model_that_could_not_be_checked_stay_unverified_where_it_can_be(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_describe", lambda self, choice: setattr(self, "unverified", "it did not run"))
        with pytest.raises(KeyboardInterrupt):
            duties.trained(DEFENSE, checkpoint=tmp_path / "c", progress=duties._Stop(3))
    run = duties.trained(DEFENSE, checkpoint=tmp_path / "c")
    assert "it did not run" in run.unverified and "unverified_model" in run.remarks


@pytest.mark.parametrize("begun", [True, False])
def test_of_two_processes_with_one_file_only_the_last_goes_on_and_is_charged_for_both(begun, tmp_path, monkeypatch):
    """The first is overtaken at its third step, or between its start and its first file."""
    runs, released, execute, settled = [], {}, Engine.run, Engine.settled_budget

    def counting(self, *args, **options):
        out = execute(self, *args, **options)
        released[self] = released.get(self, 0) + 1
        return out

    def overtaken(*_):
        if not runs:
            runs.append(None)
            runs[0] = duties.trained(DEFENSE, checkpoint=tmp_path / "c", checkpoint_every=2, noise=from_os())

    monkeypatch.setattr(Engine, "run", counting)
    if not begun:
        monkeypatch.setattr(Engine, "settled_budget", lambda self: (overtaken(), settled(self))[1])
    settings: dict[str, Any] = {"progress": lambda done, total: overtaken() if done == 3 else None} if begun else {}
    with pytest.raises(ValueError, match="one process at a time"):
        duties.trained(DEFENSE, checkpoint=tmp_path / "c", checkpoint_every=2, noise=from_os(), **settings)
    expected = [(0, 2, 1.0, 1), (2, 2, 1 / math.sqrt(2), 2), (4, 2, 1.0, 1)] if begun else [(0, 6, 1.0, 1)]
    assert charges(runs[0]) == expected
    assert sorted(released.values()) == ([4, 4] if begun else [6])
    assert charges(duties.trained(DEFENSE, checkpoint=tmp_path / "c", noise=from_os())) == expected


@pytest.mark.parametrize("kind", FRESH)
def test_no_checkpoint_has_the_key_of_noise_that_is_not_drawn_again(kind, tmp_path, monkeypatch):
    contents, save = [], disk.save
    monkeypatch.setattr(disk, "save", lambda content, *rest: (contents.append(content), save(content, *rest)))
    noise: Any = FRESH[kind]()
    killed(tmp_path / "c", 3, noise=noise)
    assert contents and all(content["noise"] is None for content in contents)
    if kind == "os":
        assert noise.state().numpy().tobytes()[:32] not in (tmp_path / "c").read_bytes()


def test_an_error_before_the_first_release_leaves_no_checkpoint(tmp_path):
    def broken(outputs, targets):
        raise RuntimeError("not yet")

    path = tmp_path / "c"
    with pytest.raises(ValueError, match="not yet"):
        duties.trained(DEFENSE, checkpoint=path, loss=broken)
    assert not path.exists()
    duties.trained(DEFENSE, checkpoint=path)  # with what was mended, under the same name


def test_an_error_after_the_first_release_leaves_one_that_charges_for_it(tmp_path, monkeypatch):
    take_step = OngoingRun.step

    def failing(self, step, *, check=False):
        take_step(self, step, check=check)
        if step == 1:
            raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(OngoingRun, "step", failing)
        duties.trained(DEFENSE, checkpoint=tmp_path / "c", checkpoint_every=3, noise=from_os())
    run = duties.trained(DEFENSE, checkpoint=tmp_path / "c", noise=from_os())
    assert charges(run) == [(0, 3, 1 / math.sqrt(2), 2), (3, 3, 1.0, 1)]


OTHERS = """
import os, signal, sys
import torch
from leakbench.defenses.core import Recording, poisson, train
from leakbench.defenses.dp_sgd import dp_sgd

def kill(done, total):
    if done == 3:
        os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
data = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
recording = Recording(checkpoint=__import__("pathlib").Path(sys.argv[1]), checkpoint_every=2, progress=kill)
train(torch.nn.Linear(6, 3), data, dp_sgd(noise_multiplier=1.0), sampling=poisson(0.5), steps=6, recording=recording)
"""


@pytest.mark.long
def test_a_process_that_is_killed_leaves_a_file_to_go_on_from(tmp_path):
    path = tmp_path / "c"
    done = subprocess.run([sys.executable, "-c", OTHERS, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    torch.manual_seed(0)
    data = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
    run = train(
        torch.nn.Linear(6, 3),
        data,
        DEFENSE,
        sampling=poisson(0.5),
        steps=6,
        recording=Recording(checkpoint=path),
        execution=Execution(engine="torch.func"),  # the noise is new, so the way of the sums is free
    )
    assert charges(run) == [(0, 2, 1.0, 1), (2, 2, 1 / math.sqrt(2), 2), (4, 2, 1.0, 1)]
    assert sorted(Path(tmp_path).iterdir()) == [path]


def hockey_stick(rate, sigma, epsilon):
    """Delta of two looks at one Poisson sample, by quadrature over both releases."""
    grid = np.linspace(-12 * sigma, 12 * sigma + 1, 2401)
    x, y = np.meshgrid(grid, grid)

    def density(shift):
        return np.exp(-((x - shift) ** 2 + (y - shift) ** 2) / (2 * sigma**2)) / (2 * math.pi * sigma**2)

    absent = density(0.0)
    present = (1 - rate) * absent + rate * density(1.0)
    cell = (grid[1] - grid[0]) ** 2
    return max(np.maximum(p - math.exp(epsilon) * q, 0).sum() * cell for p, q in ((present, absent), (absent, present)))


@pytest.mark.long
@pytest.mark.parametrize(("rate", "sigma"), [(0.1, 1.0), (0.05, 0.8)])
def test_both_looks_at_a_sample_cost_what_the_ledger_charges_and_more_than_two_samples(rate, sigma):
    plan = duties.history(DEFENSE)[0].plan.at(sigma)
    ledger, independent = Ledger(poisson(rate)), Ledger(poisson(rate))
    ledger.unrecorded.append((0, 1))
    ledger.record(plan, step=0)
    for step in range(2):
        independent.record(plan, step=step)
    for epsilon in (0.2, 1.0):
        exact = hockey_stick(rate, sigma, epsilon)
        assert ledger.claim(DELTA).delta_at(epsilon) == pytest.approx(exact, rel=5e-3)
        assert independent.claim(DELTA).delta_at(epsilon) < 0.9 * exact


def test_a_first_control_c_waits_for_the_end_of_the_step(tmp_path, monkeypatch):
    take_step = OngoingRun.step

    def interrupted(self, step, *, check=False):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        take_step(self, step, check=check)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(OngoingRun, "step", interrupted)
        duties.trained(DEFENSE, checkpoint=tmp_path / "c", noise=from_os())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert charges(duties.trained(DEFENSE, checkpoint=tmp_path / "c", noise=from_os())) == [(0, 6, 1.0, 1)]


def test_a_second_control_c_interrupts_at_once(tmp_path, monkeypatch):
    def interrupted(self, step, *, check=False):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the step goes on")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(OngoingRun, "step", interrupted)
        duties.trained(DEFENSE, checkpoint=tmp_path / "c", noise=from_os())
    run = duties.trained(DEFENSE, checkpoint=tmp_path / "c", noise=from_os())
    assert charges(run) == [(0, 2, 1 / math.sqrt(2), 2), (2, 4, 1.0, 1)]


@pytest.mark.parametrize("setting", ["no file", "a handler of somebody else", "another thread"])
def test_control_c_stays_as_it_is_without_a_file_with_another_handler_and_in_another_thread(setting, tmp_path):
    def handler(number, frame):
        raise AssertionError

    handlers = []

    def noticed(done, total):
        handlers.append(signal.getsignal(signal.SIGINT))

    def run():
        duties.trained(DEFENSE, checkpoint=None if setting == "no file" else tmp_path / "c", progress=noticed)

    mine = handler if setting == "a handler of somebody else" else signal.default_int_handler
    before = signal.signal(signal.SIGINT, mine)
    try:
        if setting == "another thread":
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        else:
            run()
        assert set(handlers) == {mine}
    finally:
        signal.signal(signal.SIGINT, before)
