"""The tests marked `gpu`, side by side; counted as they end, so that a run over its budget keeps its counts."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator

from .processes import ROOT
from .rows import CheckedRow, NotMeasured, PartSettings

_TESTS, _SMALL_TESTS = "tests", "tests/defenses/core/kernels/test_cuda_normals.py"
_LAST = 2.0  # seconds before the part's budget at which the tests are ended, so that their counts are kept
_NEEDED = ("pytest", "hypothesis", "mpmath")
_ENDED = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b.*?(tests/\S+)|^(tests/\S+) (PASSED|FAILED|ERROR|SKIPPED)\b")


def measure(settings: PartSettings) -> Iterator[CheckedRow]:
    """Yields a row for each test that fails, and one with the counts.

    Args:
        settings: of the part; if small, the tests of one file.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise NotMeasured(f"{missing[0]} is not installed: pip install --editable '.[dev]'")
    if not (ROOT / _TESTS).is_dir():
        raise NotMeasured("there are no tests beside the package: run it in a checkout")
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider"]
    # Warnings of versions that are not ours are no wrong number.
    command += ["-W", "default", "--color=no", _SMALL_TESTS if settings.small else _TESTS]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(settings.jobs)]
    counts: Counter[str] = Counter()
    counted: set[str] = set()
    with (
        (settings.folder / "pytest.log").open("w", encoding="utf-8") as log,
        subprocess.Popen(  # noqa: S603  this interpreter
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        timer = threading.Timer(max(1.0, settings.seconds - _LAST), process.kill)
        timer.start()
        for text in process.stdout or ():
            log.write(text)
            ended = result_of(text)
            if ended is None or ended[1] in counted:  # failures are listed again at the end
                continue
            result, test = ended
            counted.add(test)
            counts[result] += 1
            if result in ("FAILED", "ERROR"):
                log.flush()
                yield CheckedRow(name=test, wrong=(result.lower(),))
    timer.cancel()
    code = process.returncode
    figures = {result.lower(): counts[result] for result in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
    stopped = code == -signal.SIGKILL
    # Exit code 1 is that of failed tests, which have rows of their own; 5 that of none.
    collected = () if stopped or code in (0, 1, 5) else (f"pytest ended with code {code}, see {log.name}",)
    remarks = (f"stopped after {settings.seconds - _LAST:.0f} s",) if stopped else ()
    yield CheckedRow(name="all", figures=figures, wrong=collected, remarks=remarks)


def result_of(text: str) -> tuple[str, str] | None:
    """Returns (result, test) of a line of `pytest -v`, with or without processes; None of other lines."""
    match = _ENDED.search(text)
    if match is None:
        return None
    return (match[1], match[2]) if match[1] else (match[4], match[3])
