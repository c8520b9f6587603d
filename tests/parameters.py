"""Parameters of tests: many values in one test, pairs in place of all combinations, few values by default."""

import functools
import inspect
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch


def subtests(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """Runs a test for every value, as `pytest.mark.parametrize` does, as one case that reports all failures.

    PyTorch's generator is seeded before each value, and `tmp_path` is a folder of its own; other fixtures are shared,
    so a test that patches must patch anew.

    Args:
        names: parameters of the test, separated by commas.
        values: a value of the parameter, or a tuple of one for each, per run.
    """
    parameters = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    runs = [value if len(parameters) > 1 else (value,) for value in values]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run_all(**fixtures: Any) -> None:
            failures, skips, folder = [], [], fixtures.get("tmp_path")
            for number, run in enumerate(runs):
                torch.manual_seed(0)
                if folder is not None:
                    fixtures["tmp_path"] = folder / str(number)
                    fixtures["tmp_path"].mkdir()
                try:
                    test(**fixtures, **dict(zip(parameters, run, strict=True)))
                except pytest.skip.Exception as skip:
                    skips.append(skip)
                except (Exception, pytest.fail.Exception) as failure:
                    failure.add_note(f"with {', '.join(parameters)} = {', '.join(map(repr, run))}")
                    failures.append(failure)
            if len(failures) == 1:
                raise failures[0]
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(runs)} runs fail", failures)
            if skips:
                raise skips[0]

        signature = inspect.signature(test)
        fixtures = [given for name, given in signature.parameters.items() if name not in parameters]
        vars(run_all)["__signature__"] = signature.replace(parameters=fixtures)
        return run_all

    return decorate


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations in which each value of each parameter meets each value of every other, far fewer than all.

    Greedy, and the same list each time: a combination begins with the first pair that is missing, and takes for each
    other parameter the value that adds the most missing pairs.
    """
    indices = [range(len(values)) for values in parameters]
    columns = combinations(range(len(parameters)), 2)
    missing = {((i, a), (j, b)): None for i, j in columns for a, b in product(indices[i], indices[j])}
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for column in set(range(len(parameters))) - row.keys():
            row[column] = max(indices[column], key=functools.partial(_missing_pairs, missing, row, column))
        for pair in combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        rows.append(tuple(values[row[column]] for column, values in enumerate(parameters)))
    return rows


def in_turn(names: Iterable[Any], values: Sequence[Any], every: int = 1) -> list[Any]:
    """Each name with one of the values, in turn; the combinations that are left with the slow tests.

    By default or, of names between those that come `every` so often, with the long tests.
    """
    slow, long = pytest.mark.slow, pytest.mark.long
    return [
        pytest.param(name, value, marks=slow if number % len(values) != place else long if number % every else ())
        for number, name in enumerate(names)
        for place, value in enumerate(values)
    ]


def long_but(by_default: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, or tuples of one for each, as cases; all with the long tests but those named."""
    cases = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [pytest.param(*case, marks=() if value in by_default else pytest.mark.long) for value, case in cases]


def _missing_pairs(missing: dict[Any, None], row: dict[int, int], column: int, value: int) -> int:
    return sum(tuple(sorted(((column, value), entry))) in missing for entry in row.items())
