"""The checkpoint of a run in progress: its content, the run that it belongs to, and the releases since it was written.

Which of the releases of a killed run are taken again with the same noise, and which are charged once more, is decided
here when a run goes on (`run_file.py`; `ongoing.py` has the guarantee).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..gradients.checks.fingerprint import architecture, digest, source_digest
from ..gradients.checks.model_checks import Untrained
from ..gradients.executor import Engine
from ..inputs import Inputs
from ..plan.public_data import PublicGradients
from ..privacy.ledger import Entry, Ledger
from ..randomness.noise import Noise
from .assumptions import own_posts
from .average import ParameterAverage
from .run_file import RunFile, numerics, on_device
from .settings import TrainingSettings
from .step import Account, Stepper
from .transcript import Transcript


class Resumable(Protocol):
    """A run in progress, whose attributes a checkpoint restores."""

    settings: TrainingSettings
    model: nn.Module
    inputs: Inputs
    labels: Tensor
    device: torch.device
    noise: Noise
    runner: Engine
    optimizer: torch.optim.Optimizer
    account: Account
    average: ParameterAverage
    transcript: Transcript
    public: PublicGradients | None
    stepper: Stepper
    untrained: Untrained
    seed: int
    key: int
    started: bool

    @property
    def expected_batch(self) -> float:
        """Public constant that sums are divided by."""
        ...


class Resumption:
    """The file of a run, from which another process may go on.

    Attributes:
        file: the file on disk.
    """

    def __init__(self, run: Any, pool: tuple[Inputs, Tensor] | None) -> None:
        """Computes the run's digest.

        Args:
            run: a `Resumable`, before its seeds are drawn: drawn seeds are not part of the digest, and are restored
                from the file. It lacks some attributes yet, so its type cannot be checked at run time.
            pool: its public examples.

        Raises:
            UnknownContent: for content that cannot be inspected, if noise is seeded.
        """
        self._run: Resumable = run
        s = self._run.settings
        path = s.recording.checkpoint
        self.file = RunFile(
            path,
            "" if path is None else self._fingerprint(pool),
            steps=s.steps,
            every=s.recording.checkpoint_every or s.sampling.steps_per_epoch,
            numerics=lambda: numerics(s.execution, run.device, run.runner.precision),
        )

    def restore(self) -> int:
        """Restores the run from its file, if there is one; returns the number of steps that it has taken.

        Raises:
            ValueError: for a file that is torn, contradicts itself, or belongs to another run.
        """
        saved = self.file.read(own_posts(self._run.settings.defense))
        if saved is None or self.file.path is None:
            return 0
        self._refuse_contradiction(saved, self.file.path)
        self._put(saved)
        return saved["step"]

    def open(self, first: int) -> None:
        """Writes the file before any release: if this process is killed, it says which steps it may have taken.

        Args:
            first: number of steps taken.
        """
        run = self._run
        if self.file.path is None or first == run.settings.steps:
            return
        run.untrained = Untrained(run.model)
        run.runner.settled_budget()  # in the file, so that sums of the same steps are rounded alike
        self.save(first, first=True)

    def save(self, done: int, *, nothing_since: bool = False, first: bool = False) -> None:
        """Writes the file, if the run has one.

        Args:
            done: number of steps taken.
            nothing_since: whether the process takes no step after it.
            first: whether the process has released nothing yet.
        """
        if self.file.path is None:
            return
        self._run.untrained.check()  # a resumed run takes the restored values for unchanged
        self.file.write(self._content(), done, nothing_since=nothing_since, first=first)

    def forget(self) -> None:
        """Removes the file of a run that has failed before its first release."""
        if not self._run.account.ledger.entries:
            self.file.forget()

    def _content(self) -> dict[str, Any]:
        """Returns the content of the file."""
        run, meter = self._run, self._run.settings.recording.meter
        return {
            "started": run.started,
            "state": run.stepper.state,
            "sampler_key": run.key,
            "seed": run.seed,
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            # No other noise is drawn again, so no file needs its key.
            "noise": run.noise.state() if run.noise.kind == "seeded" else None,
            "noise_memory": run.runner.memory.state(),
            "entries": run.account.ledger.entries,
            "unrecorded": run.account.ledger.unrecorded,
            "transcript": run.transcript.state(),
            "average": run.average.value,
            "meter": None if meter is None else meter.state(),
            "remarks": dict(run.account.remarks),
            "engine": (run.runner.name, run.runner.unverified),
            "passes": (run.runner.memory_budget, run.runner.microbatch),
            "public_used": run.public is not None and run.public.used,
            "update": run.stepper.context.update,
        }

    def _put(self, saved: dict[str, Any]) -> None:
        """Puts the content of a file into the run."""
        run, device = self._run, self._run.device
        run.key, run.seed = saved["sampler_key"], saved["seed"]
        run.started = saved["started"]
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.runner.memory.load(saved["noise_memory"], device)
        run.account.ledger.entries, run.account.ledger.unrecorded = saved["entries"], saved["unrecorded"]
        run.account.remarks |= saved["remarks"]
        # A finished run executes no more plans, from which the engine would set these again.
        run.runner.name, run.runner.unverified = saved["engine"]
        if run.runner.unverified:  # of steps that were taken, whether or not it can be checked by now
            run.account.remarks["unverified_model"] = run.runner.unverified
        if self.file.alike(saved):
            # Sizes of passes, of which a device's free memory has decided, and which decide the rounding of a sum.
            run.runner.memory_budget, run.runner.microbatch = saved["passes"]
        self._go_on_with_noise(saved)
        run.transcript.load(saved["transcript"])
        run.average.value = on_device(saved["average"], device)
        if run.settings.recording.meter is not None:
            run.settings.recording.meter.load(saved["meter"])
        if run.public is not None:
            run.public.used = saved["public_used"]
        run.stepper.state = on_device(saved["state"], device)
        # Parameters, too: a method that starts again must plan at those of the file, whatever this process began with.
        run.stepper.context = replace(
            run.stepper.context,
            seed=run.seed,
            parameters=run.runner.layout.read(run.model),
            update=on_device(saved["update"], device),
        )

    def _go_on_with_noise(self, saved: dict[str, Any]) -> None:
        """Continues seeded noise, and registers steps that may have been taken since the file with other noise."""
        noise = self._run.noise
        seeded = noise.kind == "seeded"
        if seeded:
            noise.load(saved["noise"])
        if self.file.retaken(saved, seeded=seeded) == "anew":
            self._run.account.ledger.unrecorded.append((saved["step"], saved["until"]))
            if seeded:
                self.file.leave(noise, saved)

    def _refuse_contradiction(self, saved: dict[str, Any], path: Path) -> None:
        """Raises `ValueError` for a file whose ledger has not charged every step that was taken."""
        settings, entries, steps_taken = self._run.settings, saved.get("entries"), saved.get("step")
        if not (isinstance(entries, list) and all(isinstance(entry, Entry) for entry in entries)):
            raise ValueError(f"checkpoint {path} must hold a ledger's entries, got {type(entries).__name__}")
        charged = Ledger(settings.sampling, entries=entries).steps
        if not (isinstance(steps_taken, int) and charged == steps_taken <= settings.steps):
            raise ValueError(
                f"checkpoint {path} must have charged every step that it has taken, got {charged} charged of "
                f"{steps_taken} taken, in a run of {settings.steps}"
            )

    def _fingerprint(self, pool: tuple[Inputs, Tensor] | None) -> str:
        """Returns a digest of all inputs that determine the releases, up to rounding.

        Seeded noise is drawn again by a resumed run; on another sum it would reveal the difference of the two sums.
        Therefore content that cannot be inspected is refused with it. Other noise is new, and such content enters by
        its type.
        """
        run, s, recording = self._run, self._run.settings, self._run.settings.recording
        # The divisor in force: None, and the same number written out, are the same run.
        recipe = replace(s.recipe, expected_batch=run.expected_batch, nominal_size=None)
        observed = (recording.observer, sorted(recording.always), recording.only and sorted(recording.only))
        # By class: a meter influences no release, but its state in the file is for its own class alone.
        meter = f"{type(recording.meter).__module__}.{type(recording.meter).__qualname__}"
        made_of = (source_digest(), s.defense, s.sampling, run.runner.layout, dict(architecture(run.model)))
        # Apart from the recipe: the same divisor gives the same releases, but a claim with fewer assumptions.
        nominal = s.recipe.nominal_size is None
        settings = (s.steps, s.lr, recipe, nominal, s.noise.kind, *observed, recording.memory, meter)
        content = (*made_of, *settings, run.inputs, run.labels, *(pool or ()), s.seed, s.sampler_key)
        return digest(*content, hidden="refuse" if s.noise.kind == "seeded" else "type")
