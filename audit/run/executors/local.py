"""Independent pieces of work, side by side in processes of one core each, or one after another in this one.

What a worker has written stays written whatever happens to the others; an interrupt ends the workers and removes their
drafts, and a worker ends with the process that started it, whatever ended that.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch

from .lifeline import children_end_with_us, end_with_runner

MOST_JOBS = 8
_THREADS = 1  # of a job: sums over several threads round differently, and no result may depend on --jobs
Item = TypeVar("Item")
Result = TypeVar("Result")


def execute(
    todo: Sequence[Item],
    work: Callable[[Item], Result],
    *,
    device: torch.device,
    jobs: int | None,
    drafts: Path,
) -> Generator[tuple[Item, Result], None, None]:
    """Works on every item.

    Args:
        todo: the items, which processes can be sent.
        work: a function that processes can be sent.
        device: where it computes, which decides the number of processes where none is given.
        jobs: processes; one a core (8 at most) on the CPU and one on a GPU where None.
        drafts: the folder that workers write to.

    Yields:
        Each item with its result, in the order in which they are ready.

    Raises:
        BrokenProcessPool: a process died.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = jobs or (1 if device.type == "cuda" else min(cores, MOST_JOBS))
    count = min(count, len(todo))
    if count <= 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(_THREADS)
        try:
            for item in todo:
                yield item, work(item)
        finally:
            torch.set_num_threads(threads)
        return
    # Spawned, not forked: torch's threads do not survive a fork.
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
    )
    waiting: dict[Future[Result], Item] = {}
    try:
        with _interrupts_ignored(), children_end_with_us():
            waiting = {pool.submit(work, item): item for item in todo}
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                result = future.result()
                yield waiting.pop(future), result
    except BrokenProcessPool as error:
        raise BrokenProcessPool(
            "a process died in the middle of a job, for want of memory perhaps; what was finished is kept, "
            "run the same command with --jobs 1 to go on and to see which job it is"
        ) from error
    finally:
        # Also on an interrupt or when the caller stops: what has not begun is dropped.
        with _interrupts_ignored():  # a second Control-C would leave this half done; it takes no time
            workers = [process for process in multiprocessing.active_children() if process not in others]
            pool.shutdown(wait=not waiting, cancel_futures=True)
            if waiting:
                for process in workers:
                    process.terminate()
                for process in workers:
                    process.join()
                    for draft in drafts.glob(f".*.{process.pid}.*.tmp"):  # it was ended while it wrote
                        with suppress(OSError):
                            draft.unlink()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Children started meanwhile ignore Control-C from their first moment: it reaches the whole group."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start_worker() -> None:
    torch.set_num_threads(_THREADS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_runner()
