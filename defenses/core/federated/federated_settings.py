"""Settings of a federated run, and the state of its loop between two rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from ..plan.defense import State
from ..plan.refusals import refuse_count
from ..privacy.sampling import Sampling
from ..randomness.noise import NoiseSource
from ..training.settings import Execution, Recipe
from .client import Client
from .method import Federated
from .private_average import PrivateAverage, PrivateServer
from .run import RoundRecord
from .schedule import Federation, RoundSchedule
from .server_view import ForeseenPlans


@dataclass(frozen=True, kw_only=True)
class FederatedSettings:
    """The arguments of `federate` with defaults filled in; keys that are not given stay None."""

    method: Federated
    federation: Federation
    sampling: Sampling
    lr: float
    seed: int | None
    key: int | None = field(repr=False)
    exact: bool
    schedule: RoundSchedule | None
    recipe: Recipe
    execution: Execution
    keep_messages: bool
    checkpoint: Path | None = None
    checkpoint_every: int | None = None
    progress: Callable[[int, int], None] | None
    observe: Callable[[Mapping[int, Tensor], Mapping[int, float]], None] | None = None
    """Called before each average with the decoded displacements and the weights of the clients that replied; never
    where the server sees their sum alone."""

    @property
    def noise(self) -> NoiseSource:
        """Source of the noise: "seeded" only under a given key."""
        return "secure" if self.exact else "os" if self.key is None else "seeded"

    def __post_init__(self) -> None:
        refuse_count("checkpoint_every", self.checkpoint_every)
        recipe, federation, place = self.recipe, self.federation, self.method.noise_place
        refuse_unfit(self.method, federation)
        if recipe.average is not None or recipe.statistics is not None:
            raise ValueError("recipe of a federated run must have no average and no statistics of features, got one")
        if federation.equal == "batch" and place != "local steps" and recipe.nominal_size is None:
            raise ValueError(
                "equal must be 'rate' where a client is the unit, got 'batch': the size of one client would decide the "
                "sample rates of all others; or give a nominal_size"
            )
        if place != "local steps" and self.method.rule.releases(1):
            raise ValueError("a client rule with releases of its own must have noise in the local steps as well")
        if self.exact and self.execution.engine not in ("auto", "one_by_one"):
            raise ValueError(f"engine must be 'auto' or 'one_by_one' with exact noise, got '{self.execution.engine}'")
        self.method.rule.check(recipe)


def refuse_unfit(method: Federated, federation: Federation) -> None:
    """Refuses a method in a run of another shape, whatever the data, recipe and schedule are.

    Args:
        method: any.
        federation: shape of the run.

    Raises:
        ValueError: for weights that release what neighbours do not share, or messages of which a sum says nothing.
    """
    place = method.noise_place
    if federation.weights == "size" and place != "local steps":
        raise ValueError(
            "weights must be 'uniform' where a client is the unit, got 'size': a weight would release the size of its "
            "data, which neighbours do not share"
        )
    if getattr(method.messages, "reads_update", False) and place != "local steps":
        raise ValueError(
            f"score must be 'size' for noise in the {place}, got 'effect': updates of local steps have none"
        )
    if federation.shows_messages:
        return
    if place == "server" and federation.least_honest is None:
        raise ValueError(
            "least_honest must be set for aggregation 'sum' where the noise is in the server's average, got None: the "
            "claim counts on the shares of as many clients"
        )
    reads_sum = isinstance(method.server, PrivateAverage) or method.server.reads_sum
    adds = getattr(method.messages, "adds", None)
    if place != "server" and not (adds and reads_sum):
        reason = "its server reads each client's message" if adds else "its messages have positions of their own"
        reason += ", which a sum does not show"
        if adds is None:
            reason = f"its codec, {type(method.messages).__name__}, must say by `adds` that a sum of messages is read"
        raise ValueError(f"aggregation must be 'messages' for '{method.name}', got 'sum': {reason}")


@dataclass
class FederationState:
    """State of the loop between two rounds: all that a checkpoint restores (`federation_file.py`).

    Attributes:
        round: number of the next round.
        parameters: global model [dim].
        server: state of the server's rule.
        clients: clients with data, by number: keys, noise, accounts and states.
        private: server with a private average; None for others.
        foreseen: the server's own planning.
        records: rounds so far.
    """

    round: int
    parameters: Float[Tensor, " dim"]
    server: State
    clients: dict[int, Client]
    private: PrivateServer | None
    foreseen: ForeseenPlans
    records: list[RoundRecord] = field(default_factory=list)
