"""Threads of Python that compute gradients at once, of one model or with one engine, do not meet in it."""

import multiprocessing
import threading

import pytest
import torch
from torch import nn

from leakbench.defenses.core import Block, Engine, Everything, StepPlan, clip
from leakbench.defenses.core.gradients.numerics.full_precision import full_precision
from leakbench.defenses.core.kernels.bound_factors import bound_factors
from leakbench.defenses.core.kernels.machine_code import COMPILING


@pytest.mark.parametrize("shared", [True, False])
def test_sums_of_one_model_are_the_same_whichever_thread_is_beside(shared):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 64), nn.Tanh(), nn.Linear(64, 4)
    )
    batches = [(torch.randn(12, 3, 8, 8), torch.arange(12) % 4) for _ in range(2)]
    engines = [Engine(model)] * 2 if shared else [Engine(model), Engine(model)]
    plan = StepPlan(Block(codec=Everything(engines[0].layout.dim), bound=clip(0.1)))
    alone = [engine.clipped_sums(plan, *batch)[0] for engine, batch in zip(engines, batches, strict=True)]
    failed, start = [], threading.Barrier(2)

    def work(number):
        start.wait()
        for _ in range(30):
            try:
                found = engines[number].clipped_sums(plan, *batches[number])[0]
            except Exception as error:
                failed.append(repr(error))
                return
            if not torch.allclose(found, alone[number], rtol=1e-5, atol=1e-6):
                failed.append(float((found - alone[number]).norm()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("lock", [full_precision, lambda: COMPILING], ids=["a pass", "compiling"])
def test_a_fork_computes_gradients_whatever_other_threads_were_at(lock):
    held, forked = threading.Event(), threading.Event()

    def beside():
        with lock():
            held.set()
            forked.wait(0.5)  # the fork waits for this to end

    thread = threading.Thread(target=beside)
    thread.start()
    held.wait()
    assert _exit_of_a_fork() == 0
    forked.set()
    thread.join()


@pytest.mark.long
def test_a_fork_compiles_whatever_another_thread_compiles():
    """LLVM has a lock of its own, of which what frees its objects is in want as well."""
    stop, kept = threading.Event(), []

    def beside():
        while not stop.is_set():
            kept.append(bound_factors.__wrapped__(wide=False).code)

    thread = threading.Thread(target=beside)
    thread.start()
    found = [_exit_of_a_fork() for _ in range(3)]
    stop.set()
    thread.join()
    assert found == [0, 0, 0]


def _exit_of_a_fork():
    child = multiprocessing.get_context("fork").Process(target=_one_pass)
    child.start()
    child.join(120)
    found = child.exitcode
    child.kill()
    return found


def _one_pass():
    with full_precision():
        assert bound_factors.__wrapped__(wide=True).code
