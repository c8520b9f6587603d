"""Dependency graph: units of work named by a hash of their content, each done once, after its dependencies.

Units are jobs of cells, and artifacts: stacks of shadow models, points of a hyperparameter search. Two requests for the
same content are the same unit, so nothing is computed twice. An executor takes the units that are ready.
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
    """Units of work and their dependencies.

    Attributes:
        items: by name, in the order of addition.
        needs: by name, the names of the dependencies.
    """

    items: dict[str, Item] = field(default_factory=dict)
    needs: dict[str, frozenset[str]] = field(default_factory=dict)
    _waiting: deque[str] = field(default_factory=deque)
    _done: set[str] = field(default_factory=set)

    def add(self, name: str, item: Item, needs: Iterable[str] = ()) -> None:
        """Adds a unit; an existing name is the same unit, and is not added again.

        Args:
            name: hash of everything that determines the result.
            item: argument of an executor's work function.
            needs: names of the dependencies.
        """
        if name not in self.items:
            self.items[name], self.needs[name] = item, frozenset(needs)
            self._waiting.append(name)

    def check(self) -> None:
        """Refuses a graph that cannot be completed, before any computation.

        Raises:
            ValueError: a dependency is missing, or cyclic.
        """
        for name, needs in self.needs.items():
            if unknown := sorted(need for need in needs if need not in self.items):
                raise ValueError(f"everything that {name} needs must be in the graph, and {unknown[0]} is not")
        remaining = dict(self.needs)
        while free := [name for name, needs in remaining.items() if all(need not in remaining for need in needs)]:
            for name in free:
                del remaining[name]
        if remaining:
            raise ValueError(f"no piece of work may wait for itself, got a circle among {', '.join(sorted(remaining))}")

    def take(self) -> str | None:
        """Returns the name of the next ready unit and marks it as started; None if none is ready."""
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
        """Marks a unit as done, so that its dependents become ready."""
        self._done.add(name)

    def __len__(self) -> int:
        return len(self.items)


class Executor(Protocol):
    """Interface of backends that compute units of work: in local processes, or on other machines."""

    def run(self, graph: Graph[Item], work: Callable[[Item], Result]) -> Generator[tuple[Item, Result], None, None]:
        """Completes a graph.

        Args:
            graph: is checked, and its units are taken and finished.
            work: computes a unit, in a process chosen by the executor; unit and result must be picklable.

        Yields:
            Each unit with its result, in the order of completion. Closing the generator stops the work; written results
            stay.
        """
        ...
