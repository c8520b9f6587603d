"""What waits for what: pieces of work named by a hash of their content, each done once, after all that it needs.

A training that a cell attacks, a shadow model, a point of a tuning are such pieces; so is a job of cells. Two requests
for the same content are one piece, so nothing is computed twice. An executor takes what is ready, wherever it computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Graph(Generic[Item]):
    """Pieces of work, and which of them wait for which.

    Attributes:
        items: by name, in the order in which they were added.
        needs: by name, the names of what has to be done before.
    """

    items: dict[str, Item] = field(default_factory=dict)
    needs: dict[str, frozenset[str]] = field(default_factory=dict)
    _waiting: deque[str] = field(default_factory=deque)
    _done: set[str] = field(default_factory=set)

    def add(self, name: str, item: Item, needs: Iterable[str] = ()) -> None:
        """Adds a piece; one of that name is the same piece, and is not added again.

        Args:
            name: hash of everything that decides what it gives.
            item: what an executor's work is called with.
            needs: names of what has to be done before.
        """
        if name not in self.items:
            self.items[name], self.needs[name] = item, frozenset(needs)
            self._waiting.append(name)

    def check(self) -> None:
        """Refuses a graph that cannot be worked off, before anything of it is computed.

        Raises:
            ValueError: a piece needs another that is not there, or, by way of others, itself.
        """
        for name, needs in self.needs.items():
            if unknown := sorted(need for need in needs if need not in self.items):
                raise ValueError(f"everything that {name} needs must be in the graph, and {unknown[0]} is not")
        left = dict(self.needs)
        while free := [name for name, needs in left.items() if all(need not in left for need in needs)]:
            for name in free:
                del left[name]
        if left:
            raise ValueError(f"no piece of work may wait for itself, got a circle among {', '.join(sorted(left))}")

    def take(self) -> str | None:
        """The name of the next piece that is ready, which counts as started; None where all are done or wait."""
        passed = []
        try:
            while self._waiting:
                name = self._waiting.popleft()
                if self.needs[name] <= self._done:
                    return name
                passed.append(name)
            return None
        finally:
            self._waiting.extendleft(reversed(passed))

    def finish(self, name: str) -> None:
        """Says that a piece is done, so that what waited for it is ready."""
        self._done.add(name)

    def __len__(self) -> int:
        return len(self.items)


class Executor(Protocol):
    """Where pieces of work are computed: in processes here, or on other machines."""

    def run(self, graph: Graph[Item], work: Callable[[Item], Result]) -> Generator[tuple[Item, Result], None, None]:
        """Works a graph off.

        Args:
            graph: checked; its pieces are taken and finished.
            work: computes one piece, where the executor chooses; piece and result can be sent there and back.

        Yields:
            Each piece with its result, in the order in which they are ready. Whoever stops reading stops the work: what
            was written stays written.
        """
        ...
