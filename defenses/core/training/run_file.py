"""The file of a run, from which another process may go on: when it is written, and how far a killed run may have come.

A process may be killed after any release. Its file therefore holds two numbers: the steps that were taken, and those
that may have been taken by the time at which the file is read. A run that goes on takes the steps in between again,
with the same seeded noise where sums are rounded alike, or with other noise, which is charged once more. The steps of a
federated run are its rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ..gradients.numerics.full_precision import Precision
from ..kernels.machine_code import processor_name
from ..plan.defense import State
from ..randomness.noise import CipherNoise, Noise
from . import checkpoint as disk
from .settings import Execution

Retaken = Literal["none", "again", "anew"]
"""Noise of the steps that a killed run may have taken: no such step, the same draws, or other draws."""


class RunFile:
    """The file of a run.

    Attributes:
        path: the file; None if the run writes none.
        resumed: whether the run has gone on from the file.
        repeated: whether steps were taken again with the same seeded noise.
    """

    def __init__(
        self, path: Path | None, mark: str, *, steps: int, every: int, numerics: Callable[[], tuple[str, ...]]
    ) -> None:
        """Takes what the run knows before it starts.

        Args:
            path: the file; None for none.
            mark: digest of all inputs of the run's releases.
            steps: number of steps of the run.
            every: steps between writes.
            numerics: returns everything that the rounding of a sum depends on besides its inputs.
        """
        self.path, self._mark, self._steps, self._every, self._numerics = path, mark, steps, every, numerics
        self.resumed = self.repeated = False
        # Until a release, an error leaves no file behind, which would belong to a run with another setting.
        self._created = False
        self._heads: list[bytes] = []  # of files that this run has read or written
        # Steps up to this number may have been taken with the stream of seeded noise in use, by killed processes.
        self._reached = 0

    def read(self, own: Sequence[type] = ()) -> dict[str, Any] | None:
        """Returns the file's content; None without a file.

        Args:
            own: further allowed classes.

        Raises:
            ValueError: for a file that is torn, or belongs to another run.
        """
        if self.path is None or not self.path.exists():
            return None
        saved = disk.load(self.path, fingerprint=self._mark, own=own, heads=self._heads)
        self.resumed = saved["resumed"] or saved.get("step") != self._steps
        self.repeated = saved["repeated"]
        return saved

    def alike(self, saved: dict[str, Any]) -> bool:
        """Returns whether sums are rounded as in the process that wrote the file."""
        return saved["numerics"] == self._numerics()

    def retaken(self, saved: dict[str, Any], *, seeded: bool) -> Retaken:
        """Returns the noise of the steps that may have been taken since the file was written.

        Args:
            saved: content of the file.
            seeded: whether the noise can be drawn again.
        """
        if saved["step"] == saved["until"]:
            return "none"
        if seeded and self.alike(saved):
            self.repeated, self._reached = True, saved["until"]
            return "again"
        return "anew"

    def leave(self, noise: Noise, saved: dict[str, Any]) -> None:
        """Continues seeded noise with another stream: the same draws on sums with other rounding would reveal it.

        Args:
            noise: at its state in the file.
            saved: content of the file.

        Raises:
            ValueError: for noise of another source, which has no other stream.
        """
        if not isinstance(noise, CipherNoise):
            raise ValueError(
                f"noise must be leakbench's to go on from a killed run as {self._numerics()}, got "
                f"{type(noise).__name__}: it would be drawn again on sums with other rounding; go on as "
                f"{saved['numerics']}"
            )
        noise.leave("/".join(self._numerics()))

    def due(self, step: int) -> int:
        """Returns the number of steps taken at the first write of the file after a step."""
        return min(self._steps, (step // self._every + 1) * self._every)

    def write(self, content: dict[str, Any], done: int, *, nothing_since: bool = False, first: bool = False) -> None:
        """Writes the file.

        Args:
            content: of the run.
            done: number of steps taken.
            nothing_since: whether the process takes no step after it.
            first: whether the process has released nothing yet.
        """
        if self.path is None:
            return
        until = max(self._reached, done if nothing_since else self.due(done))
        progress = {"fingerprint": self._mark, "step": done, "until": until, "numerics": self._numerics()}
        marks = {"resumed": self.resumed, "repeated": self.repeated}
        disk.save(progress | marks | content, self.path, self._heads)
        self._created = self._created or (first and done == 0 and not self.resumed)

    def forget(self) -> None:
        """Removes the file of a run that has failed before its first release."""
        if self._created and self.path is not None and disk.head(self.path) in self._heads:
            self.path.unlink(missing_ok=True)


def numerics(execution: Execution, device: torch.device, precision: Precision) -> tuple[str, ...]:
    """Returns everything that the rounding of a sum depends on besides its inputs.

    Args:
        execution: settings of the run.
        device: device of the model.
        precision: precision of forward and backward passes.
    """
    if device.type == "cuda":
        cudnn: Any = torch.backends.cudnn
        processor = (torch.cuda.get_device_name(device), cudnn.version(), cudnn.benchmark, cudnn.deterministic)
    else:
        # Libraries of one capability choose kernels by the processor, too.
        processor = (torch.backends.cpu.get_cpu_capability(), processor_name(), torch.get_num_threads())
    settings = (execution.engine, execution.microbatch, execution.memory_budget, precision)
    strict = torch.are_deterministic_algorithms_enabled()
    return tuple(map(str, (torch.__version__, device.type, *processor, strict, *settings)))


def on_device(state: State, device: torch.device) -> State:
    """Returns a method's state with its tensors on the device: a file is loaded to the CPU, to open on any machine."""
    if isinstance(state, torch.Tensor):
        return state.to(device)
    if isinstance(state, dict):
        return {k: on_device(v, device) for k, v in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(on_device(v, device) for v in state)
    return state
