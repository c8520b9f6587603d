"""Federated training that keeps what attacks see: global models, messages, and the attacked client's local steps.

Messages and local steps have the memory limit of central transcripts. Beyond it none of them is kept, because a part of
them would make an attack look weak, and the attacks are skipped with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from leakbench.defenses.core import Message, Round, Step
from leakbench.defenses.core.federated.client import Client
from leakbench.defenses.core.federated.local_training import LocalResult
from leakbench.defenses.core.federated.rounds import OngoingFederation, RoundOutcome
from leakbench.defenses.core.training.transcript import storages

from ..plan.threat_models import OfClients
from ..targets.client_messages import ClientReply
from . import trained_run

OF_ONE_CLIENT: frozenset[OfClients] = frozenset({"messages", "local steps", "last message"})
"""Parts of a run that show one client's releases."""


def refusal(least: int, when: str = "") -> str:
    """Returns the reason why messages and local steps are not kept; empty if they fit.

    Args:
        least: bytes that they take at least.
        when: time at which they were counted; empty for before the training.
    """
    limit = trained_run.TRANSCRIPT_MEMORY
    if least <= limit:
        return ""
    return (
        f"messages and local steps that attacks on a client read must fit into {limit / 2**30:.3g} GiB, and take "
        f"{least / 2**30:.3g} GiB or more{when}; take fewer rounds, local steps or clients, a smaller model, or "
        "attacks on global models alone"
    )


class WatchedFederation(OngoingFederation):
    """A federated run that keeps what attacks of its job see.

    Attributes:
        models: global model before every round, if attacks see them.
        replies: client -> rounds in which its message was received, if attacks see messages.
        steps: every local step of the attacked client, with its noisy sums, if attacks see them.
        outgrew: reason why replies and steps were dropped; empty if they were not.
    """

    _shown: frozenset[OfClients] = frozenset()
    _attacked: int | None = None
    outgrew: str = ""

    def watch(self, shown_parts: Collection[OfClients], attacked: int | None) -> None:
        """Decides what is kept; before the first round.

        Args:
            shown_parts: parts of the run that attacks see.
            attacked: client of which every local step is kept; None for none.
        """
        self._shown, self._attacked = frozenset(shown_parts), attacked
        self.models: list[Tensor] = []
        self.replies: dict[int, list[ClientReply]] = {}
        self.steps: list[Step] = []
        self._points: list[Tensor] = []
        self._counted: set[int] = set()
        self._taken = 0
        if attacked is not None:
            self.trainer.recorder = self._record

    def opened(self, broadcast: Mapping[str, Tensor] | None = None) -> RoundOutcome:
        """Returns the next round before its first message."""
        if self._shown & {"models", "messages"}:
            self.models.append(self.state.parameters.clone())
        self._points = []
        return super().opened(broadcast)

    def _record(self, client: int, step: Step) -> None:
        if client != self._attacked:
            return
        self._points.append(step.parameters)
        if self._shown & {"local steps", "last message"} and self._fits(step):
            self.steps.append(step)

    def _message(self, client: Client, round: Round, result: LocalResult) -> Message:
        state = client.state  # `finish` replaces it
        message = super()._message(client, round, result)
        if "messages" in self._shown and message.finite:
            kept = ClientReply(
                round,
                state,
                message,
                self.settings.method.messages.decode(message, round),
                tuple(tuple(plan.stds) for plan in result.plans),
                tuple(self._points) if client.number == self._attacked else (),
            )
            if self._fits(kept):
                self.replies.setdefault(client.number, []).append(kept)
        return message

    def _fits(self, kept: Any) -> bool:
        """Counts the bytes of a message or a step; drops all of them once they exceed the limit."""
        # Storages of kept parts stay alive, so an address identifies a storage.
        fresh = {place: size for place, size in storages(kept).items() if place not in self._counted}
        self._counted |= fresh.keys()
        self._taken += sum(fresh.values())
        number = self.state.round + 1
        self.outgrew = refusal(self._taken, f" by round {number} of {self.settings.federation.rounds}, bases included")
        if self.outgrew:
            self._shown -= OF_ONE_CLIENT
            self._attacked = self.trainer.recorder = None
            self.replies, self.steps, self._points, self._counted = {}, [], [], set()
            if "models" not in self._shown:
                self.models = []
        return not self.outgrew
