"""Dependency graph of work: pieces named by a hash of their content, each done once, after everything that it needs.

A job of cells is a piece; so is a point of a hyperparameter search, or a shadow model. Two requests for the same
content are one piece, so nothing is computed twice. An executor takes the pieces that are ready, and computes them
wherever it does.
"""

from __future__ import annotations

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
    _started: set[str] = field(default_factory=set)
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

    def check(self) -> None:
        """Refuses a graph that cannot be worked off, before anything of it is computed.

        Raises:
            ValueError: a piece needs another that is not there, or, by way of others, itself.
        """
        for name, needs in self.needs.items():
            if unknown := sorted(needs - self.items.keys()):
                raise ValueError(f"everything that {name} needs must be in the graph, and {unknown[0]} is not")
        left = dict(self.needs)  # Kahn's algorithm: what remains when nothing is free waits for itself
        while free := [name for name, needs in left.items() if not needs & left.keys()]:
            for name in free:
                del left[name]
        if left:
            raise ValueError(f"no piece of work may wait for itself, got a circle among {', '.join(sorted(left))}")

    def take(self) -> str | None:
        """The name of the next piece that is ready, which counts as started; None where all are done or wait."""
        # In the order of addition, which is that of the suite: a run that is cut short has its first cells.
        for name, needs in self.needs.items():
            if name not in self._started and needs <= self._done:
                self._started.add(name)
                return name
        return None

    def finish(self, name: str) -> None:
        """Marks a piece as done, so that what waited for it is ready; one that failed is done, with its error."""
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
