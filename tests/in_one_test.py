"""Lists of cases, as refusals, that are one test: a case of its own costs fixtures and a line of every report."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch


def in_one_test(names: str, cases: Iterable[Any]) -> Callable[[Callable[..., None]], Any]:
    """Runs a test on every case as `pytest.mark.parametrize` would, as one test that reports all failures together.

    PyTorch's generator begins alike in every case, and `tmp_path` is a folder of its own; other fixtures are shared.

    Args:
        names: the test's arguments, separated by commas.
        cases: a tuple of values each, or the value where there is one name.
    """
    arguments = [name.strip() for name in names.split(",")]
    rows = list(cases)

    def decorated(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def every_case(**fixtures: Any) -> None:
            failures, skips = [], []
            folder = fixtures.get("tmp_path")
            for number, row in enumerate(rows):
                values = dict(zip(arguments, row if len(arguments) > 1 else [row], strict=True))
                torch.manual_seed(0)
                if folder is not None:
                    fixtures["tmp_path"] = folder / f"case{number}"
                    fixtures["tmp_path"].mkdir()
                try:
                    test(**fixtures, **values)
                except pytest.skip.Exception as skip:
                    skips.append(skip)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"case: {values}")
                    failures.append(error)
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(rows)} cases fail", failures)
            if skips:
                raise skips[0]

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
        # pytest takes the arguments that are left for fixtures.
        every_case.__dict__["__signature__"] = signature.replace(parameters=kept)
        return every_case

    return decorated
