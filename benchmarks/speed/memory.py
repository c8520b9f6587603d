"""Peak memory of a callable in its own process, beyond the memory in use before its first call.

On a CPU it is the operating system's high-water mark of the resident set (Linux only), on CUDA that of PyTorch's
allocator. The resident set includes memory that an allocator keeps for reuse, which the machine has to provide all the
same. Libraries are called once before, so that their permanent workspaces are not counted. Results are uncertain by
about a megabyte.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # see proc(5)
_PATIENCE = 600.0  # seconds for one process


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes beyond those in use before the first call.

    Attributes:
        extra: at the peak of the first calls, one-off preparations included.
        later: at the peak of calls after the first; never above `extra`.
    """

    extra: int
    later: int


@dataclass(frozen=True)
class Probe:
    """Callable to measure, by name, so that another process can build it too.

    Attributes:
        function: "module:function" that returns the callable to measure.
        arguments: its keyword arguments, numbers and strings.
    """

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Callable[[], object]:
        """Builds the callable."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)(**self.arguments)


class Unavailable(RuntimeError):
    """The platform has no high-water mark, or none that can be reset."""


def measured(probe: Probe, *, device: str = "cpu", threads: int | None = None, calls: int = 3) -> Memory | str:
    """Memory of a callable in a fresh process, or the reason why it is unknown.

    Args:
        probe: callable to build and call there.
        device: "cpu" or "cuda".
        threads: of PyTorch in that process; as many as here where None.
        calls: of the callable, the first included.
    """
    job = {**asdict(probe), "device": device, "threads": threads or torch.get_num_threads(), "calls": calls}
    # A checkout that is not installed is found by its path.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    try:
        done = subprocess.run(  # noqa: S603  this interpreter and our own module
            [sys.executable, "-m", __name__, json.dumps(job)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"its process took more than {_PATIENCE:.0f} s"
    # Signal 9 is most often the kernel's, when memory ran out.
    if done.returncode < 0:
        return f"its process was ended by signal {-done.returncode}"
    lines = done.stdout.strip().splitlines()
    try:
        # The last line: libraries may print before it.
        answer = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError):
        complaint = done.stderr.strip().splitlines()
        return f"its process failed: {complaint[-1] if complaint else f'exit code {done.returncode}'}"
    return answer["reason"] if "reason" in answer else Memory(**answer)


def measure_here(build: Callable[[], Callable[[], object]], *, device: str = "cpu", calls: int = 3) -> Memory:
    """Memory of a callable in this process, which should have done nothing else before.

    Args:
        build: makes the callable; memory that it allocates is not counted.
        device: "cpu" or "cuda".
        calls: number of calls, the first included; with a single call, its peak is the later peak too.

    Raises:
        Unavailable: the platform keeps no high-water mark.
    """
    mark = _Cuda() if device.startswith("cuda") else _Resident()
    _wake_libraries(device)
    step = build()
    gc.collect()
    before = mark.restart()
    step()
    # The first call includes preparations: workspaces, hooks, compiled kernels.
    first = mark.peak()
    later = first
    if calls > 1:
        mark.restart()
        for _ in range(calls - 1):
            step()
        later = mark.peak()
    # Not below 0: the kernel may reclaim pages, and a peak then lies under the start.
    return Memory(extra=max(0, first - before, later - before), later=max(0, later - before))


class _Resident:
    """Resident set of this process, from Linux's /proc."""

    def restart(self) -> int:
        """Resets the peak; returns the bytes in use now."""
        try:
            _CLEAR.write_text(_RESET_PEAK)
        except OSError as error:
            raise Unavailable("no high-water mark of the resident set that can be reset, as Linux has one") from error
        return self._read("VmRSS")

    def peak(self) -> int:
        """Bytes at the peak."""
        return self._read("VmHWM")

    def _read(self, key: str) -> int:
        # Not getrusage's ru_maxrss, which a process inherits from its parent.
        try:
            lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
            return int(lines[key].split()[0]) * 1024
        except (OSError, KeyError) as error:
            raise Unavailable(f"no {key} of this process, as Linux has one") from error


class _Cuda:
    """Allocator of PyTorch on the GPU."""

    def restart(self) -> int:
        """Resets the peak; returns the bytes in use now."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Bytes at the peak."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


def _wake_libraries(device: str) -> None:
    """Runs a convolution and a product, forward and backward, so that libraries allocate their permanent workspaces."""
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 14 * 14, 10))
    layers.to(device)(torch.zeros(4, 3, 16, 16, device=device)).sum().backward()


def main(job: str) -> None:
    """Measures a probe and prints the answer as a line of JSON."""
    settings = json.loads(job)
    torch.set_num_threads(settings["threads"])
    probe = Probe(settings["function"], settings["arguments"])
    try:
        print(json.dumps(asdict(measure_here(probe.build, device=settings["device"], calls=settings.get("calls", 3)))))
    except Exception as error:  # a tool may raise anything on unknown models
        print(json.dumps({"reason": (str(error).strip() or type(error).__name__).splitlines()[0]}))


if __name__ == "__main__":
    main(sys.argv[1])
