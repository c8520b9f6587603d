"""All steps of a run, for attacks that read every step: kept in the transcript, or recomputed.

The observations of all steps may exceed the transcript's memory limit, for example with a basis in each step. The steps
are then recomputed from the run's seeds at each read, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Any

from leakbench.defenses.core import Run, Step


@dataclass(frozen=True)
class AllSteps:
    """All steps of a run in order.

    Attributes:
        run: trained with observer="updates".
        again: recomputes the steps; None if impossible.
    """

    run: Run
    again: Callable[[], Iterator[Step]] | None = None

    def __len__(self) -> int:
        """Returns the number of steps, kept or not."""
        if not self.run.transcript.truncated:
            return len(self.run.transcript.steps)
        return self.run.ledger.steps

    def __iter__(self) -> Iterator[Step]:
        """Iterates from the first step on.

        Raises:
            ValueError: steps are missing and cannot be recomputed.
        """
        if not self.run.transcript.truncated:
            return iter(self.run.transcript.steps)
        if self.again is None:
            raise ValueError(
                f"an attack that reads every step must be given all {len(self)}, got {len(self.run.transcript.steps)}: "
                "what the others show outgrew the memory of the transcript; take fewer steps, or a smaller model"
            )
        return self.again()

    def read_by(self, readers: Sequence[Callable[[Iterable[Step]], Any]]) -> list[Any]:
        """Returns the readers' results; if steps must be recomputed, all readers share a single pass.

        Args:
            readers: plain functions that loop over the steps.
        """
        if not self.run.transcript.truncated:
            return [reader(self) for reader in readers]
        return in_lockstep(self, readers)


def in_lockstep(steps: Iterable[Step], readers: Sequence[Callable[[Iterable[Step]], Any]]) -> list[Any]:
    """Returns the results of several readers after a single shared pass over the steps.

    Args:
        steps: starts at the first step at every `iter`, which may be expensive.
        readers: plain functions that loop over the steps. Each runs in its own thread, only one at a time, until it
            requests its next step, which is fetched once all have requested it.

    Raises:
        ValueError: readers differ in the order of their reads.
    """
    pace = _Lockstep(steps, len(readers))
    threads = [Thread(target=pace.run, args=(number, reader), daemon=True) for number, reader in enumerate(readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if pace.failed:
        first, *others = pace.failed.values()
        for error in others:
            if error is not first:  # an error of the steps themselves reaches all readers as the same object
                first.add_note(f"another reader failed, too: {type(error).__name__}: {error}")
        raise first
    return [pace.results[number] for number in range(len(readers))]


class _Lockstep:
    """Steps that readers in several threads consume together.

    Attributes:
        results: of readers, by the reader's number.
        failed: exceptions of readers, by the reader's number.
    """

    def __init__(self, steps: Iterable[Step], readers: int) -> None:
        self._all, self._readers = steps, readers
        self._turns = Condition()
        self._turn = self._asking = self._place = 0
        self._wanted: set[int] = set()
        self._pass: Iterator[Step] = iter(())
        self._step: Step | None = None
        self._broken: Exception | None = None
        self.results: dict[int, Any] = {}
        self.failed: dict[int, BaseException] = {}

    def run(self, number: int, reader: Callable[[Iterable[Step]], Any]) -> None:
        """Runs a reader in its thread."""
        # The running reader holds this lock and releases it only in `_next`.
        with self._turns:
            try:
                self.results[number] = reader(self)
            except BaseException as error:  # raised again by `in_lockstep`, in the caller's thread
                self.failed[number] = error
            finally:
                self._readers -= 1
                self._go_on()

    def __iter__(self) -> Iterator[Step]:
        number = 0
        while (step := self._next(number)) is not None:
            yield step
            number += 1

    def _next(self, number: int) -> Step | None:
        turn = self._turn
        self._asking += 1
        self._wanted.add(number)
        self._go_on()
        self._turns.wait_for(lambda: self._turn != turn)
        if self._broken is not None:
            raise self._broken
        return self._step

    def _go_on(self) -> None:
        """Fetches the next step once all remaining readers have requested it."""
        if not self._asking or self._asking < self._readers:
            return
        try:
            if len(self._wanted) > 1:
                raise ValueError(
                    "an attack must read the steps in the same way whomever it is asked about, got one that starts "
                    "anew for some candidates while it goes on for others"
                )
            (number,) = self._wanted
            if number == 0:
                self._pass, self._place = iter(self._all), 0
            if number != self._place:
                # Otherwise a reader of an earlier pass would receive a step of the latest pass.
                raise ValueError(
                    f"an attack must read the steps one after another, got one that asks for step {number} of a pass "
                    f"while another pass is at step {self._place}"
                )
            self._step = next(self._pass, None)
            self._place += 1
        except Exception as error:
            self._broken = error
        self._asking, self._turn = 0, self._turn + 1
        self._wanted.clear()
        self._turns.notify_all()
