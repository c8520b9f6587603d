"""A round of m federated clients with tau local steps each, against m tau central steps of the same defense.

All clients train one after another on one network, so a round's own cost is the difference: global model and states of
each client, messages, average. The last case has many clients with few examples each, and is also about memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from typing import Any, Unpack

import torch

from leakbench.defenses.core import Execution, Federation, Recipe, Recording, poisson, seeded
from leakbench.defenses.core.federated.federated_settings import FederatedSettings
from leakbench.defenses.core.federated.rounds import OngoingFederation
from leakbench.defenses.core.training.ongoing import OngoingRun
from leakbench.defenses.core.training.settings import TrainingSettings

from .networks import Workload, parameters
from .part import ROUNDS, Options, SpeedPart, check_choices
from .targets import SpeedTarget

GOAL = 1.1
"""Limit on the time of a round, relative to as many central steps."""
CENTRAL = "central steps"
METHODS = {"fed_avg": "dp_sgd", "fed_pcdp": "pcdp", "moon": "dp_sgd"}
"""Federated method -> the central defense of its local steps."""
_RANK, _PUBLIC = 50, 500
_MOST_ROUNDS = 100  # of a run


@dataclass(frozen=True, kw_only=True)
class ClientsCase:
    """Sizes of a federation in which every client takes part in every round.

    Attributes:
        network: see `Workload`.
        clients: number of clients.
        examples: of each client.
        batch: expected number of examples of a local step.
        local_steps: of each client in a round.
        methods: subset of `METHODS`.
    """

    network: str
    clients: int
    examples: int
    batch: int
    local_steps: int
    methods: tuple[str, ...] = ("fed_avg", "fed_pcdp", "moon")

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"{self.network}, {self.clients} clients of {self.examples}, {self.local_steps} steps of {self.batch}"

    @property
    def load(self) -> Workload:
        """Network and data of all clients."""
        return Workload(self.network, self.clients * self.examples, 64 if self.network == "mlp" else 0)


CASES = (
    ClientsCase(network="mlp", clients=8, examples=90, batch=18, local_steps=5),
    ClientsCase(network="dp_cnn_small", clients=8, examples=1000, batch=250, local_steps=5),
    ClientsCase(network="dp_cnn_small", clients=1000, examples=50, batch=10, local_steps=2, methods=("fed_avg",)),
)
QUICK_CASES = (ClientsCase(network="mlp", clients=3, examples=20, batch=5, local_steps=2),)


def _built(name: str, **settings: Any) -> Any:
    function = getattr(importlib.import_module(f"leakbench.defenses.{name}"), name)
    return function(noise_multiplier=1.0, **settings)


def build(
    *,
    network: str,
    clients: int,
    examples: int,
    batch: int,
    local_steps: int,
    way: str,
    method: str,
    device: str = "cpu",
) -> Callable[[], None]:
    """Builds a run on random data, of which every call takes the next round, or as many central steps.

    Args:
        network: see `Workload`.
        clients: number of clients.
        examples: of each client; of all data in central training.
        batch: expected number of examples of a step, drawn by Poisson sampling.
        local_steps: of each client in a round.
        way: a federated method, or `CENTRAL`.
        method: federated method whose local steps central training takes.
        device: "cpu" or "cuda".
    """
    case = ClientsCase(network=network, clients=clients, examples=examples, batch=batch, local_steps=local_steps)
    inputs, labels = case.load.data()
    public = Workload(network, _PUBLIC, case.load.width).data()
    shared: dict[str, Any] = {
        "sampling": poisson(batch / examples),
        "lr": 0.01,  # so low that no method diverges
        "seed": 1,
        "recipe": Recipe(),
        "execution": Execution(device=torch.device(device)),
    }
    # Shifted by 1, because public images that equal private ones are refused.
    pool = (public[0] + 1, public[1])
    if way == CENTRAL:
        steps = clients * local_steps
        settings = TrainingSettings(
            defense=_built(METHODS[method], **({"rank": _RANK, "interval": steps} if method == "fed_pcdp" else {})),
            steps=_MOST_ROUNDS * steps,
            noise=seeded(0),
            sampler_key=2,
            recording=Recording(),
            **shared,
        )
        training = OngoingRun(case.load.model(), (inputs[:examples], labels[:examples]), pool, settings)
        numbers = count(training.begin())

        def central_steps() -> None:
            for number in islice(numbers, steps):
                training.step(number)

        return central_steps
    federation = OngoingFederation(
        case.load.model(),
        list(zip(inputs.split(examples), labels.split(examples), strict=True)),
        pool,
        FederatedSettings(
            method=_built(way, **({"rank": _RANK} if way == "fed_pcdp" else {})),
            federation=Federation(rounds=_MOST_ROUNDS, local_steps=local_steps, participation=1.0),
            key=2,
            exact=False,
            schedule=None,
            keep_messages=False,
            progress=None,
            **shared,
        ),
    )
    return federation.round


def refuse_unknown(only: Sequence[str], rounds: int | None) -> None:
    """Raises `ValueError` for an unknown method, or for more rounds than a run has."""
    if rounds is not None and rounds > _MOST_ROUNDS - 2:
        raise ValueError(f"rounds must be at most {_MOST_ROUNDS - 2}, got {rounds}")
    check_choices("way", only, list(METHODS))


def measure(*, only: Sequence[str] = (), **options: Unpack[Options]) -> dict[str, Any]:
    """Compares rounds with central steps, and measures the memory of both.

    Args:
        only: subset of `METHODS`; all if empty.
        options: see `Options`.

    Raises:
        ValueError: an unknown method.
    """
    refuse_unknown(only, options.get("rounds"))
    part = SpeedPart(__name__, options, rounds=9, budget=60.0)
    for case in QUICK_CASES if part.quick else CASES:
        for method in case.methods:
            if only and method not in only:
                continue
            name = f"{method}, {case.name}"
            part.say(name)
            sizes = {key: value for key, value in asdict(case).items() if key != "methods"}
            about = {"parameters": parameters(case.load.model()), **sizes}
            arguments = sizes | {"method": method}
            part.compare(name, (CENTRAL, method), arguments, peer=CENTRAL, floor=CENTRAL, about=about, warmup=1)
            bound = "two more forward passes a step" if method == "moon" else ""
            limit = None if bound else GOAL
            target = SpeedTarget(case=name, way=method, against=CENTRAL, quantity="time", limit=limit, bound=bound)
            part.targets.append(target)
    return part.document(
        title="Rounds of federated clients",
        method=(
            "A round of all clients, local steps by Poisson sampling, noise multiplier 1, random data, SGD, float32, "
            f"against as many steps of the clients' defense in central training on the data of one client. {ROUNDS}"
        ),
    )
