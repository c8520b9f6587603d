"""Executor of this machine: units of work in parallel single-threaded processes, or sequentially in this process.

Units of the CPU and those of a GPU have processes of their own, and run at the same time. Files written by a worker
stay, whatever happens to the others. An interrupt ends the workers and removes their unfinished files; a worker also
ends with its parent process.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from leakbench.malloc import give_memory_back, keep_freed_memory

from ...environment import environment_variable
from ...progress_events import Listener, listen, with_listener
from ..graph import Graph, Item, Result
from .parent_death import children_end_with_us, end_with_runner

MOST_JOBS = 8
_LISTENED = 0.5  # seconds between two polls of the workers' messages
_THREADS = 1  # per process: sums over several threads round differently, and no result may depend on --jobs


@dataclass(frozen=True)
class Local:
    """Executor of worker processes on this machine, or of this process alone if a single process suffices.

    Attributes:
        device_of: unit -> device that it is computed on.
        jobs: processes; None for one per core (8 at most) on the CPU and one on a GPU. If units are on both, a GPU has
            one process beside those of the CPU; `jobs=1` computes all units in this process.
        drafts: folder that workers write to, from which unfinished files of killed workers are removed.
        say: listener for progress messages of units; None for none.
    """

    device_of: Callable[[Any], torch.device]
    jobs: int | None
    drafts: Path
    say: Listener | None = None

    def run(self, graph: Graph[Item], work: Callable[[Item], Result]) -> Generator[tuple[Item, Result], None, None]:
        """Completes a graph; see `Executor`.

        Raises:
            BrokenProcessPool: a process died.
            ValueError: the graph cannot be completed.
        """
        graph.check()
        counts = self._processes(graph)
        if self.jobs == 1 or sum(counts.values()) <= 1:
            return _in_this_process(graph, work, self.say)
        return _in_processes(graph, work, self.device_of, counts, self.drafts, self.say)

    def _processes(self, graph: Graph[Item]) -> dict[torch.device, int]:
        """Returns the number of processes by device."""
        units = Counter(map(self.device_of, graph.items.values()))
        # Available cores: a cluster or a container grants fewer than the machine has.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        on_cpu, on_gpu = self.jobs or min(cores, MOST_JOBS), (self.jobs or 1) if len(units) == 1 else 1
        return {device: min(count, on_cpu if device.type == "cpu" else on_gpu) for device, count in units.items()}


def _in_this_process(
    graph: Graph[Item], work: Callable[[Item], Result], say: Listener | None
) -> Generator[tuple[Item, Result], None, None]:
    """Runs units sequentially in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(_THREADS)
    try:
        while (name := graph.take()) is not None:
            with with_listener(say):
                result = _worked(work, graph.items[name])
            graph.finish(name)
            yield graph.items[name], result
    finally:
        torch.set_num_threads(threads)


def _in_processes(
    graph: Graph[Item],
    work: Callable[[Item], Result],
    device_of: Callable[[Item], torch.device],
    counts: Mapping[torch.device, int],
    drafts: Path,
    say: Listener | None,
) -> Generator[tuple[Item, Result], None, None]:
    """Runs units in parallel, in processes that are started once, `counts` of each device."""
    # The caller's own children, which must not be ended here.
    others = set(multiprocessing.active_children())
    # Spawned, not forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with current_folder_left_out():  # semaphores start a process too
        words = None if say is None else context.SimpleQueue()
        pools = {
            device: ProcessPoolExecutor(count, mp_context=context, initializer=_start_worker, initargs=(words,))
            for device, count in counts.items()
        }
    waiting: dict[Future[Result], str] = {}

    def submit() -> None:
        """Submits all ready units; a pool queues those without a free process."""
        with _interrupts_ignored(), children_end_with_us(), current_folder_left_out():  # processes start here
            while (name := graph.take()) is not None:
                item = graph.items[name]
                waiting[pools[device_of(item)].submit(_worked, work, item)] = name

    try:
        submit()
        while waiting:
            done = wait(waiting, timeout=None if words is None else _LISTENED, return_when=FIRST_COMPLETED).done
            if words is not None and say is not None:
                while not words.empty():
                    say(words.get())
            for future in done:
                result, name = future.result(), waiting[future]
                graph.finish(name)
                del waiting[future]
                # Before the result is yielded, so that processes work while the caller reads.
                submit()
                yield graph.items[name], result
    except BrokenProcessPool as error:
        raise BrokenProcessPool(
            "a process died in the middle of a job, for want of memory perhaps; what was finished is kept, "
            "run the same command with --jobs 1 to go on and to see which job it is"
        ) from error
    finally:
        _end(pools.values(), others, drafts, in_progress=bool(waiting))


def _end(pools: Iterable[Executor], others: set[BaseProcess], drafts: Path, *, in_progress: bool) -> None:
    """Ends the processes of pools, also on an interrupt or when the caller stops: queued units are dropped."""
    with _interrupts_ignored():  # a second Control-C would leave this unfinished; it takes no time
        workers = [process for process in multiprocessing.active_children() if process not in others]
        # With units in progress there is no wait, which would take as long as they do: the workers are terminated.
        for pool in pools:
            pool.shutdown(wait=not in_progress, cancel_futures=True)
        if not in_progress:
            return
        for process in workers:
            process.terminate()
        for process in workers:
            process.join()  # before the search for drafts: until it has ended it may write another
            for draft in drafts.glob(f".*.{process.pid}.*.tmp"):  # it was ended during a write
                with suppress(OSError):
                    draft.unlink()


def current_folder_left_out() -> AbstractContextManager[None]:
    """Child processes started in this context import nothing from the current folder before they have our path.

    A spawned process is `python -c ...`, which looks there first: a method's file named `socket.py` would run in every
    worker, beside the private data.
    """
    return environment_variable("PYTHONSAFEPATH", "1")


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Child processes started in this context ignore Control-C, sent to the whole group; the runner ends them.

    An ignored signal stays ignored in a new process, so this holds from its first moment.
    """
    # Python sets handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _worked(work: Callable[[Item], Result], item: Item) -> Result:
    """Returns the result of work on an item, and then releases unused memory to the system."""
    try:
        return work(item)
    finally:
        # Models with hooks and runs with callbacks are reference cycles: until a collection they keep their data.
        gc.collect()
        give_memory_back()


def _start_worker(words: Any) -> None:
    keep_freed_memory()
    gc.freeze()  # as the command does, with the imported modules
    if words is not None:
        listen(words.put)
    torch.set_num_threads(_THREADS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_runner()
