"""CPU time of tests: those that the default ones are too expensive to keep belong to `make test-long`."""

import os
from collections.abc import Iterable
from typing import Any

LIMIT = 1.0  # CPU seconds; the mark is for half of it, because times differ between machines


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def expensive(reports: Iterable[Any]) -> list[str]:
    """Lines that name the tests above the limit, the most expensive first; none if there are none.

    Args:
        reports: reports of pytest, those of a teardown with the test's `cpu_seconds` if it is a default test.
    """
    times = [
        (dict(report.user_properties).get("cpu_seconds", 0.0), report.nodeid)
        for report in reports
        if report.when == "teardown"
    ]
    above = sorted((entry for entry in times if entry[0] > LIMIT), reverse=True)
    if not above:
        return []
    head = f"{len(above)} default tests take over {LIMIT:g} s of CPU time (CONTRIBUTING.md, Test tiers):"
    return [head, *(f"  {seconds:5.1f} s  {name}" for seconds, name in above[:20])]
