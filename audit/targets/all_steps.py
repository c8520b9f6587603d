"""All steps of a run, for attacks that read every one: those that were kept, or taken once more.

What steps show may outgrow the memory for it, as a basis in each does. They are then taken once more from the run's
seeds, one at a time, whenever somebody reads them.
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
        again: takes the steps once more; None where nobody can.
    """

    run: Run
    again: Callable[[], Iterator[Step]] | None = None

    def __len__(self) -> int:
        """How many there are, kept or not."""
        if not self.run.transcript.truncated:
            return len(self.run.transcript.steps)
        return self.run.ledger.steps

    def __iter__(self) -> Iterator[Step]:
        """From the first one on.

        Raises:
            ValueError: some are missing, and nobody can take them again.
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
        """What several readers return: one after another, or after one pass for all where a pass is a training.

        Args:
            readers: plain functions that loop over what they are given.
        """
        if not self.run.transcript.truncated:
            return [reader(self) for reader in readers]
        return in_lockstep(self, readers)


def in_lockstep(steps: Iterable[Step], readers: Sequence[Callable[[Iterable[Step]], Any]]) -> list[Any]:
    """What several readers of the same steps return, after one pass over them for all.

    Args:
        steps: from the first one on at every `iter`, which may cost much.
        readers: plain functions that loop over what they are given. Each gets a thread of its own; one runs at a time,
            until it asks for its next step, which is fetched once all have asked.

    Raises:
        ValueError: readers do not read alike.
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
            if error is not first:  # where the steps themselves fail, all readers get the one error
                first.add_note(f"another reader failed, too: {type(error).__name__}: {error}")
        raise first
    return [pace.found[number] for number in range(len(readers))]


class _Lockstep:
    """Steps that readers in threads go through together.

    Attributes:
        found: what readers returned, by number.
        failed: what they raised, by number.
    """

    def __init__(self, steps: Iterable[Step], readers: int) -> None:
        self._all, self._readers = steps, readers
        self._turns = Condition()
        self._turn = self._asking = self._place = 0
        self._wanted: set[int] = set()
        self._pass: Iterator[Step] = iter(())
        self._step: Step | None = None
        self._broken: Exception | None = None
        self.found: dict[int, Any] = {}
        self.failed: dict[int, BaseException] = {}

    def run(self, number: int, reader: Callable[[Iterable[Step]], Any]) -> None:
        """One reader, in its thread."""
        # Whoever runs holds this, and lets go of it in `_next` alone.
        with self._turns:
            try:
                self.found[number] = reader(self)
            except BaseException as error:  # raised again by `in_lockstep`, in the thread of whoever asked
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
        """Fetches the next step once all who still read have asked."""
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
                # Else it would be handed a step of the pass that was begun last, under the number of another.
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
