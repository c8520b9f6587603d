"""The `[federated]` table of a suite: clients, their data, rounds; and rules between it and the other tables.

Every defense of such a suite is trained by clients: a federated method as it is, a central defense as the local steps
of FedAvg, or as the server's average of updates for `unit = "client"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from leakbench.defenses.core import Federation

from .fields import Count, Rate, StrictTable

_OF_SPLIT = {"shards": "shards", "concentration": "dirichlet", "least": "dirichlet"}
"""Key -> the split that it belongs to."""


class FederatedTable(StrictTable):
    """Clients of a federated training, their data and rounds."""

    clients: Count
    """Number of clients, among which the private examples are divided."""
    split: Literal["iid", "class", "shards", "dirichlet"] = "iid"
    """Division of the examples: at random, sorted by class and cut, dealt in shards of the sorted examples, or each
    class in random proportions."""
    shards: Count | None = None
    """For `shards`: parts of the sorted examples per client; 2 if absent."""
    concentration: Rate | None = None
    """For `dirichlet`: concentration of the proportions; 0.5 if absent."""
    least: Count | None = None
    """For `dirichlet`: least number of examples of a client; 1 if absent."""
    rounds: Count
    local_steps: Count | None = None
    """Local steps of a client in a round."""
    local_epochs: Count | None = None
    """The same in passes over a client's expected batches."""
    participation: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Expected fraction of the clients in a round."""
    participants: Literal["fixed", "poisson", "partition"] = "fixed"
    """Distribution of a round's clients: a fixed number, independent coins, or every client once in a cycle."""
    equal: Literal["rate", "batch"] = "rate"
    """Common quantity of clients of different sizes: the sample rate, or the expected batch."""
    weights: Literal["uniform", "size"] = "uniform"
    """Weights of the average; by size, claims are under zero-out."""
    server_lr: Rate = 1.0
    """Factor of the averaged displacement."""
    unit: Literal["record", "client"] = "record"
    """Privacy unit of central defenses: the clients' local steps, or the server's average of their updates."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Chance of a scheduled client to be lost in a round, after some of its local steps."""
    attacked: Literal["worst"] | Annotated[int, Field(ge=0)] | None = None
    """Client whose records are attacked by its messages and local steps: a number, or the "worst", the client with the
    largest claimed epsilon, of equals the first. None for the worst, so that ids do not depend on naming it."""

    @field_validator("attacked")
    @classmethod
    def _unnamed_worst(cls, attacked: Literal["worst"] | int | None) -> int | None:
        return None if attacked == "worst" else attacked

    aggregation: Literal["messages", "sum"] | None = None
    """The server's view of a round: every message, if absent, or by secure aggregation their sum alone."""
    least_honest: Count | None = None
    """For `sum`: least number of honest clients whose messages come; a round of fewer is aborted."""
    colluders: Count | None = None
    """For `sum`: largest number of a round's clients who share their noise with others; none if absent."""

    @field_validator("aggregation")
    @classmethod
    def _default_absent(cls, value: str | None) -> str | None:
        """Returns None for the default, under which a suite without the key has the same cells."""
        return None if value == "messages" else value

    @model_validator(mode="after")
    def _consistent(self) -> FederatedTable:
        if (self.local_steps is None) == (self.local_epochs is None):
            number = "neither" if self.local_steps is None else "both"
            raise ValueError(f"must have one of local_steps, local_epochs, got {number}")
        for key, split in _OF_SPLIT.items():
            if getattr(self, key) is not None and self.split != split:
                raise ValueError(f"{key} must go with split = '{split}', got '{self.split}'")
        for key in ("least_honest", "colluders"):
            if getattr(self, key) is not None and self.aggregation is None:
                raise ValueError(f"{key} must go with aggregation = 'sum', got 'messages'")
        if isinstance(self.attacked, int) and self.attacked >= self.clients:
            raise ValueError(f"attacked must be a client's number below {self.clients}, got {self.attacked}")
        return self

    chosen_models: Annotated[int, Field(ge=2)] | None = None
    """Largest number of releases in which an active server chooses the model of a client; 1 if absent."""

    @property
    def division(self) -> dict[str, Any]:
        """The division of examples, as arguments of `client_splits`."""
        chosen = {key: getattr(self, key) for key in _OF_SPLIT}
        return {"split": self.split} | {key: value for key, value in chosen.items() if value is not None}

    def federation(self, steps_per_epoch: int) -> Federation:
        """Returns the shape of the run in the trainer's form.

        Args:
            steps_per_epoch: expected batches in a pass over a client's examples.
        """
        return Federation(
            rounds=self.rounds,
            local_steps=self.local_steps or (self.local_epochs or 1) * steps_per_epoch,
            participation=self.participation,
            participants=self.participants,
            equal=self.equal,
            weights=self.weights,
            server_lr=self.server_lr,
            dropout=self.dropout,
            aggregation=self.aggregation or "messages",
            least_honest=self.least_honest,
            colluders=self.colluders,
        )


class PublicOnlyTable(StrictTable):
    """The control of a federated suite: the same network, trained on the public examples alone."""

    epochs: Count = 50
    """Passes over the public examples."""
    lr: Rate = 0.001
    """Learning rate, of the mean loss of a batch."""
    batch: Count = 32
    """Public examples per step."""
    optimizer: Literal["sgd", "adam"] = "adam"


def wrong_federated(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns conflicts between `[federated]` and the rest of a document, as (key.path, problem).

    Args:
        raw: the document.
    """
    task = raw.get("task")
    task = task if isinstance(task, dict) else {}
    if raw.get("federated") is None:
        wrong = [("task.epochs", "is missing")] if task and "epochs" not in task else []
        alone = "must go with a [federated] table, and this suite has none"
        keys = (["public_only"] if "public_only" in raw else []) + _tuned(raw, _OF_TRIALS)
        return wrong + [(key, alone) for key in keys]
    wrong = []
    if "epochs" in task:
        wrong.append(("task.epochs", "must be absent with [federated], whose rounds and local steps decide the length"))
    elsewhere = "is for central training: must be absent with [federated]"
    wrong += _wrong_share(raw.get("share"))
    if "share" in raw and isinstance(raw["federated"], dict) and raw["federated"].get("aggregation") == "sum":
        wrong.append(("share", "must be absent with aggregation = 'sum', under which no message of a client is seen"))
    wrong += [(f"task.{key}", elsewhere) for key in _CENTRAL if key in task]
    instead = "must be absent with [federated], whose trials have trial_rounds"
    wrong += [(key, instead if key == "tune.epochs" else elsewhere) for key in _tuned(raw, _NOT_TUNED)]
    if task.get("sampling") in _NOT_OF_CLIENTS:
        wrong.append(("task.sampling", f"{elsewhere}, got '{task['sampling']}'; take poisson"))
    entries = raw.get("defense")
    for position, entry in enumerate(entries if isinstance(entries, list) else []):
        if isinstance(entry, dict):
            keys = ("epochs", "release_noise", *_CENTRAL)
            wrong += [(f"defense[{position}].{key}", elsewhere) for key in keys if key in entry]
    return wrong


def _wrong_share(share: Any) -> list[tuple[str, str]]:
    """Returns keys of `[share]` that the rounds of clients decide: its update is a client's first message."""
    if not isinstance(share, dict):
        return []
    decided = "must be absent with [federated], whose first round's message is attacked: its"
    wrong = [(f"share.{key}", f"{decided} rounds decide the length") for key in ("step", "steps") if key in share]
    local = share.get("local")
    if isinstance(local, dict) and "epochs" in local:
        wrong.append(("share.local.epochs", f"{decided} local_steps decide them"))
    return wrong


def _tuned(raw: Mapping[str, Any], keys: tuple[str, ...]) -> list[str]:
    """Returns the paths of these keys that the document's `tune` table has."""
    table = raw.get("tune")
    return [f"tune.{key}" for key in keys if key in table] if isinstance(table, dict) else []


_CENTRAL = ("average", "statistics", "pretrain", "canaries")
_NOT_TUNED = ("epochs", "release_noise", *_CENTRAL)
_OF_TRIALS = ("trial_rounds", "trial_examples")
_NOT_OF_CLIENTS = ("truncated_poisson", "cyclic")
