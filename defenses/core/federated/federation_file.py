"""The checkpoint of a federated run between two rounds: its content, and the charges of rounds that nobody recorded.

The file is written before the first release and after every `checkpoint_every` rounds (`training/run_file.py`). A run
that was killed takes the rounds since then again. Under a key that was given, noise is drawn again on the same sums:
messages, ledgers and model are those of a run that was never killed. Other noise is fresh, and every client is charged
once more for what it may have released in these rounds: its scheduled local steps and its one-off releases, or, where a
client is the unit, its rounds.

Guarantee:
    The charge covers every release that no file recorded, because the schedule, which the file restores, decides who
    trains in a round and for how many steps, and no release does. No file holds a key of noise that is not seeded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..gradients.checks.fingerprint import architecture, digest, source_digest
from ..gradients.checks.model_checks import Untrained
from ..gradients.executor import Engine
from ..gradients.numerics.full_precision import precision_for
from ..plan.defense import Context
from ..plan.layout import Layout
from ..privacy.ledger import Entry, Ledger
from ..randomness.noise import NoiseSource
from ..training.assumptions import own_posts
from ..training.run_file import RunFile, numerics, on_device
from ..training.step import Stepper
from .client import Client, Shard
from .federated_settings import FederatedSettings, FederationState
from .local_training import LocalTrainer
from .messages.message import Message
from .private_average import PrivateServer
from .public_pool import SharedPublic
from .run import RoundRecord
from .schedule import RoundSchedule


@runtime_checkable
class ResumableFederation(Protocol):
    """A federated run, whose attributes a checkpoint restores."""

    settings: FederatedSettings
    model: nn.Module
    engine: Engine
    trainer: LocalTrainer
    untrained: Untrained
    public: SharedPublic | None
    seed: int
    key: int
    kind: NoiseSource
    remarks: dict[str, str]
    schedule: RoundSchedule
    ledgers: list[Ledger]
    context: Context
    state: FederationState


class FederationFile:
    """The file of a federated run, from which another process may go on.

    Attributes:
        file: the file on disk.
        saved: its content when the run began; None without a file.
    """

    def __init__(
        self, settings: FederatedSettings, model: nn.Module, data: Sequence[Shard], pool: tuple[Tensor, Tensor] | None
    ) -> None:
        """Computes the run's digest, and reads the file if there is one.

        Args:
            settings: arguments of the run; seeds that are not given are restored from the file.
            model: to be trained.
            data: inputs and labels of every client; None for a client without data.
            pool: public examples.

        Raises:
            UnknownContent: for content that cannot be inspected, if noise is seeded.
            ValueError: for a file that is torn, contradicts itself, or belongs to another run.
        """
        s = self._settings = settings
        parameter = next((p for p in model.parameters() if p.requires_grad), torch.zeros(1))
        self.file = RunFile(
            s.checkpoint,
            "" if s.checkpoint is None else _digest(s, model, data, pool),
            steps=s.federation.rounds,
            every=s.checkpoint_every or 1,
            numerics=lambda: numerics(s.execution, parameter.device, precision_for(parameter, s.execution.precision)),
        )
        parts = (s.method.client, s.method.update, getattr(s.method.server, "defense", None))
        own = [kind for part in parts if part is not None for kind in own_posts(part)]
        self.saved = self.file.read([RoundRecord, Message, RoundSchedule, *own])
        if self.saved is not None:
            model.load_state_dict(self.saved["model"])

    def restore(self, setup: ResumableFederation) -> None:
        """Restores the state of the loop, and registers the rounds that may have been taken since with other noise.

        Args:
            setup: of a run with the file's seeds, model and schedule.
        """
        saved = self.saved
        if saved is None or self.file.path is None:
            return
        self.saved = None  # the state has it from here on, and it may be large
        self._refuse_contradiction(setup, saved, self.file.path)
        state, device = setup.state, setup.context.device
        state.round, state.records = saved["step"], saved["records"]
        state.server = on_device(saved["server"], device)
        state.foreseen.load(on_device(saved["foreseen"], device))
        if state.private is not None:
            _put(saved["private"], state.private.stepper, state.private, device)
        for number, client in state.clients.items():
            own = saved["clients"][number]
            _put(own, client.stepper, client, device)
            if client.update is not None:
                client.update.state, update = on_device(own["displacement"], device)
                client.update.context = replace(client.update.context, update=update)
            client.state, client.begun = on_device(own["rule"], device), own["begun"]
            client.steps.ledger.entries = own["steps"]
            client.account.remarks |= own["remarks"]
        for ledger, (entries, unrecorded) in zip(setup.ledgers, saved["ledgers"], strict=True):
            ledger.entries, ledger.unrecorded = entries, unrecorded
        if setup.public is not None and saved["public_used"]:
            setup.public.mark_used()
        # A finished run executes no more plans, from which the engine would set these again.
        setup.engine.name, setup.engine.unverified = saved["engine"]
        if setup.engine.unverified:  # of steps that were taken, whether or not it can be checked by now
            setup.remarks["unverified_model"] = setup.engine.unverified
        if self.file.alike(saved):
            # Sizes of passes, of which a device's free memory has decided, and which decide the rounding of a sum.
            setup.engine.memory_budget, setup.engine.microbatch = saved["passes"]
        if self.file.retaken(saved, seeded=setup.kind == "seeded") == "anew":
            self._charge_again(setup, saved)

    def _charge_again(self, setup: ResumableFederation, saved: dict[str, Any]) -> None:
        """Registers releases that nobody recorded with every client that may have made them."""
        first, until = saved["step"], saved["until"]
        ledgers = {id(setup.ledgers[number]): number for number in setup.state.clients}  # a ledger may be of several
        for number in ledgers.values():
            ranges = charged_ranges(setup, number, first, until)
            client = setup.state.clients[number]
            if ranges and not client.begun and ranges[0][0] > 0 and setup.settings.method.noise_place == "local steps":
                ranges = [(0, 1), *ranges]  # one-off releases of its defense, which are charged to step 0
            setup.ledgers[number].unrecorded += ranges
        if setup.kind == "seeded":
            server = [] if setup.state.private is None else [setup.state.private]
            for party in (*setup.state.clients.values(), *server):
                self.file.leave(party.noise, saved)

    def open(self, setup: ResumableFederation) -> None:
        """Writes the file before any release: if this process is killed, it says which rounds it may have taken."""
        if self.file.path is not None and setup.state.round < self._settings.federation.rounds:
            setup.engine.settled_budget()  # in the file, so that sums of the same steps are rounded alike
            self.save(setup, first=True)

    def save(self, setup: ResumableFederation, *, nothing_since: bool = False, first: bool = False) -> None:
        """Writes the file, if the run has one.

        Args:
            setup: of the run, between two rounds.
            nothing_since: whether the process takes no round after it.
            first: whether the process has released nothing yet.
        """
        if self.file.path is None:
            return
        setup.untrained.check()  # a resumed run takes the restored values for unchanged
        setup.trainer.place(setup.state.parameters, None)
        self.file.write(self._content(setup), setup.state.round, nothing_since=nothing_since, first=first)

    def forget(self, setup: ResumableFederation) -> None:
        """Removes the file of a run that has failed before its first release."""
        if not any(ledger.entries for ledger in setup.ledgers):
            self.file.forget()

    def _content(self, setup: ResumableFederation) -> dict[str, Any]:
        """Returns the content of the file."""
        state, private = setup.state, setup.state.private
        return {
            "sampler_key": setup.key,
            "seed": setup.seed,
            "schedule": setup.schedule,
            "model": setup.model.state_dict(),
            "server": state.server,
            "private": None if private is None else _of_party(private.stepper, private),
            "foreseen": state.foreseen.state(),
            "clients": {number: _of_client(client) for number, client in state.clients.items()},
            "ledgers": [(ledger.entries, ledger.unrecorded) for ledger in setup.ledgers],
            "records": state.records,
            "public_used": setup.public is not None and setup.public.used,
            "engine": (setup.engine.name, setup.engine.unverified),
            "passes": (setup.engine.memory_budget, setup.engine.microbatch),
        }

    def _refuse_contradiction(self, setup: ResumableFederation, saved: dict[str, Any], path: Path) -> None:
        """Raises `ValueError` for a file whose ledgers have not charged every step that was taken."""
        rounds_done, ledgers = saved.get("step"), saved.get("ledgers")
        rounds = self._settings.federation.rounds
        if not (isinstance(rounds_done, int) and 0 <= rounds_done <= rounds and isinstance(ledgers, list)):
            raise ValueError(
                f"checkpoint {path} must be after a round of {rounds}, with ledgers, got round {rounds_done}"
            )
        for number in setup.state.clients:
            entries = ledgers[number][0]
            if not all(isinstance(entry, Entry) for entry in entries):
                raise ValueError(f"checkpoint {path} must hold ledgers' entries, got others at client {number}")
            charged = Ledger(setup.ledgers[number].sampling, entries=entries).steps
            steps = sum(end - first for first, end in charged_ranges(setup, number, 0, rounds_done))
            if charged != steps:
                raise ValueError(
                    f"checkpoint {path} must have charged every step that it has taken, got {charged} charged of "
                    f"{steps} taken by client {number}"
                )


def charged_ranges(setup: ResumableFederation, client: int, first: int, end: int) -> list[tuple[int, int]]:
    """Returns the steps, as ranges in the numbers of its ledger, for which a client is charged in some rounds.

    Args:
        setup: of the run.
        client: number of a client with data.
        first: number of the first round.
        end: number of the round after the last.
    """
    s, tau = setup.settings, setup.settings.federation.local_steps
    if s.method.noise_place == "server" and s.federation.participants != "fixed":
        return [(first, end)] if end > first else []
    if s.method.noise_place != "server" and setup.state.clients[client].elsewhere:
        return []
    own = [number for number in setup.schedule.rounds_of(client) if first <= number < end]
    if s.method.noise_place == "server":
        return [(number, number + 1) for number in own]
    if s.method.noise_place == "update":
        return [(number, number + 1) for number in own if (number, client) not in setup.schedule.lost]
    steps = {number: setup.schedule.steps_of(client, number, tau) for number in own}
    return [(number * tau, number * tau + count) for number, count in steps.items() if count]


def _of_party(stepper: Stepper, party: Client | PrivateServer) -> dict[str, Any]:
    """Returns the content of a client, or of a server that releases an average."""
    return {
        "method": (stepper.state, stepper.context.update),
        # No other noise is drawn again, so no file needs its key.
        "noise": party.noise.state() if party.noise.kind == "seeded" else None,
        "memory": party.memory.state(),
    }


def _of_client(client: Client) -> dict[str, Any]:
    displacement = None if client.update is None else (client.update.state, client.update.context.update)
    return _of_party(client.stepper, client) | {
        "displacement": displacement,
        "rule": client.state,
        "begun": client.begun,
        "steps": client.steps.ledger.entries,
        "remarks": dict(client.account.remarks),
    }


def _put(saved: dict[str, Any], stepper: Stepper, party: Client | PrivateServer, device: torch.device) -> None:
    """Restores the content of `_of_party`."""
    stepper.state, update = on_device(saved["method"], device)
    stepper.context = replace(stepper.context, update=update)
    party.memory.load(saved["memory"], device)
    if party.noise.kind == "seeded":
        party.noise.load(saved["noise"])


def _digest(s: FederatedSettings, model: nn.Module, data: Sequence[Shard], pool: tuple[Tensor, Tensor] | None) -> str:
    """Returns a digest of all inputs that determine the releases, up to rounding.

    Seeded noise is drawn again by a resumed run; on another sum it would reveal the difference of the two sums.
    Therefore content that cannot be inspected is refused with it. Other noise is new, and such content enters by its
    type.
    """
    made_of = (source_digest(), s.method, s.federation, s.sampling, Layout.of(model), dict(architecture(model)))
    settings = (s.lr, s.recipe, s.noise, s.schedule, s.keep_messages, s.seed, s.key)
    return digest(*made_of, *settings, [*data], pool, hidden="refuse" if s.noise == "seeded" else "type")
