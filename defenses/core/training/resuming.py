"""The checkpoint of a run in progress: its content, the run that it belongs to, and the releases since it was written.

A process may be killed after any release, and its file tells how far it may have come. Which of these releases are
taken again with the same noise, and which are charged once more, is decided here when a run goes on (`ongoing.py` has
the guarantee).
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
from ..kernels.machine_code import processor_name
from ..plan.defense import State
from ..plan.public_data import PublicGradients
from ..privacy.ledger import Entry, Ledger
from ..randomness.noise import CipherNoise, Noise
from . import checkpoint as disk
from .assumptions import own_posts
from .average import ParameterAverage
from .settings import TrainingSettings
from .step import Account, Stepper
from .transcript import Transcript


class Resumable(Protocol):
    """A run in progress, whose attributes a checkpoint restores."""

    settings: TrainingSettings
    model: nn.Module
    inputs: Tensor
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
        path: the file; None if the run writes none.
        mark: digest of all inputs of the run's releases.
        resumed: whether the run has gone on from a file.
        repeated: whether steps were taken again with the same seeded noise.
    """

    def __init__(self, run: Resumable, pool: tuple[Tensor, Tensor] | None) -> None:
        """Computes the run's digest.

        Args:
            run: before its seeds are drawn: drawn seeds are not part of the digest, and are restored from the file.
            pool: its public examples.

        Raises:
            UnknownContent: for content that cannot be inspected, if noise is seeded.
        """
        self._run, self.path = run, run.settings.recording.checkpoint
        self.mark = "" if self.path is None else self._fingerprint(pool)
        self.resumed = self.repeated = False
        # Until a release, an error leaves no file behind, which would belong to a run with another setting.
        self._created = False
        self._heads: list[bytes] = []  # of files that this run has read or written
        # Steps up to this number may have been taken with the stream of seeded noise in use, by killed processes.
        self._reached = 0

    def restore(self) -> int:
        """Restores the run from its file, if there is one; returns the number of steps that it has taken.

        Raises:
            ValueError: for a file that is torn, contradicts itself, or belongs to another run.
        """
        if self.path is None or not self.path.exists():
            return 0
        own = own_posts(self._run.settings.defense)
        saved = disk.load(self.path, fingerprint=self.mark, own=own, heads=self._heads)
        self._refuse_contradiction(saved, self.path)
        self._put(saved)
        return saved["step"]

    def open(self, first: int) -> None:
        """Writes the file before any release: if this process is killed, it says which steps it may have taken.

        Args:
            first: number of steps taken.
        """
        run = self._run
        if self.path is None or first == run.settings.steps:
            return
        run.untrained = Untrained(run.model)
        run.runner.settled_budget()  # in the file, so that sums of the same steps are rounded alike
        self.save(first)
        self._created = first == 0 and not self.resumed

    def due(self, step: int) -> int:
        """Returns the number of steps taken at the first write of the file after a step."""
        settings = self._run.settings
        every = settings.recording.checkpoint_every or settings.sampling.steps_per_epoch
        return min(settings.steps, (step // every + 1) * every)

    def save(self, done: int, *, nothing_since: bool = False) -> None:
        """Writes the file, if the run has one.

        Args:
            done: number of steps taken.
            nothing_since: whether the process takes no step after it.
        """
        if self.path is None:
            return
        self._run.untrained.check()  # a resumed run takes the restored values for unchanged
        until = max(self._reached, done if nothing_since else self.due(done))
        disk.save(self._content(done, until), self.path, self._heads)

    def forget(self) -> None:
        """Removes the file of a run that has failed before its first release."""
        unused = self._created and not self._run.account.ledger.entries
        if unused and self.path is not None and disk.head(self.path) in self._heads:
            self.path.unlink(missing_ok=True)

    def _content(self, done: int, until: int) -> dict[str, Any]:
        """Returns the content of the file.

        Args:
            done: number of steps taken.
            until: number of steps that may have been taken when the file is read.
        """
        run, meter = self._run, self._run.settings.recording.meter
        return {
            "fingerprint": self.mark,
            "step": done,
            "until": until,
            "numerics": self._numerics,
            "started": run.started,
            "state": run.stepper.state,
            "sampler_key": run.key,
            "seed": run.seed,
            "resumed": self.resumed,
            "repeated": self.repeated,
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
        self.resumed = saved["resumed"] or saved["step"] < run.settings.steps
        self.repeated, run.started = saved["repeated"], saved["started"]
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.runner.memory.load(saved["noise_memory"], device)
        run.account.ledger.entries, run.account.ledger.unrecorded = saved["entries"], saved["unrecorded"]
        run.account.remarks |= saved["remarks"]
        # A finished run executes no more plans, from which the engine would set these again.
        run.runner.name, run.runner.unverified = saved["engine"]
        if run.runner.unverified:  # of steps that were taken, whether or not it can be checked by now
            run.account.remarks["unverified_model"] = run.runner.unverified
        alike = saved["numerics"] == self._numerics
        if alike:
            # Sizes of passes, of which a device's free memory has decided, and which decide the rounding of a sum.
            run.runner.memory_budget, run.runner.microbatch = saved["passes"]
        self._go_on_with_noise(saved, alike=alike)
        run.transcript.load(saved["transcript"])
        run.average.value = _to(saved["average"], device)
        if run.settings.recording.meter is not None:
            run.settings.recording.meter.load(saved["meter"])
        if run.public is not None:
            run.public.used = saved["public_used"]
        # A file is loaded to the CPU, so that it opens on any machine.
        run.stepper.state = _to(saved["state"], device)
        # Parameters, too: a method that starts again must plan at those of the file, whatever this process began with.
        run.stepper.context = replace(
            run.stepper.context,
            seed=run.seed,
            parameters=run.runner.layout.read(run.model),
            update=_to(saved["update"], device),
        )

    def _go_on_with_noise(self, saved: dict[str, Any], *, alike: bool) -> None:
        """Continues seeded noise, and registers steps that may have been taken since the file with other noise.

        Args:
            saved: content of the file.
            alike: whether sums are rounded as in the process that wrote it.
        """
        noise = self._run.noise
        if noise.kind == "seeded":
            noise.load(saved["noise"])
        if saved["step"] == saved["until"]:
            return
        if noise.kind == "seeded" and alike:
            self.repeated, self._reached = True, saved["until"]
            return
        self._run.account.ledger.unrecorded.append((saved["step"], saved["until"]))
        if noise.kind == "seeded":
            if not isinstance(noise, CipherNoise):
                raise ValueError(
                    f"noise must be leakbench's to go on from a killed run as {self._numerics}, got "
                    f"{type(noise).__name__}: it would be drawn again on sums with other rounding; go on as "
                    f"{saved['numerics']}"
                )
            noise.leave("/".join(self._numerics))

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

    def _fingerprint(self, pool: tuple[Tensor, Tensor] | None) -> str:
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

    @property
    def _numerics(self) -> tuple[str, ...]:
        """Everything that the rounding of a sum depends on besides its inputs."""
        how, device = self._run.settings.execution, self._run.device
        if device.type == "cuda":
            cudnn: Any = torch.backends.cudnn
            processor = (torch.cuda.get_device_name(device), cudnn.version(), cudnn.benchmark, cudnn.deterministic)
        else:
            # Libraries of one capability choose kernels by the processor, too.
            processor = (torch.backends.cpu.get_cpu_capability(), processor_name(), torch.get_num_threads())
        settings = (how.engine, how.microbatch, how.memory_budget, self._run.runner.precision)
        strict = torch.are_deterministic_algorithms_enabled()
        return tuple(map(str, (torch.__version__, device.type, *processor, strict, *settings)))


def _to(state: State, device: torch.device) -> State:
    """Returns a method's state with its tensors on the device."""
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, dict):
        return {k: _to(v, device) for k, v in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_to(v, device) for v in state)
    return state
