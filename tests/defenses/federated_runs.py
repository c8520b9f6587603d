"""A tiny federation that the tests of federated methods share: four clients of twelve examples, and a public pool."""

from typing import Any

import torch
from torch import Tensor, nn

from leakbench.defenses.core import (
    Context,
    Federated,
    FederatedRun,
    Federation,
    Follow,
    Layout,
    Round,
    RoundSchedule,
    federate,
    poisson,
)

from .duties import PUBLIC, network

_DRAW = torch.Generator().manual_seed(5)
INPUTS = torch.randn(48, 6, generator=_DRAW)
LABELS = torch.randint(0, 3, (48,), generator=_DRAW)
SHARDS = [(INPUTS[i::4], LABELS[i::4]) for i in range(4)]
LAYOUT = Layout.of(network())
FEDERATION = Federation(rounds=3, local_steps=4, participation=1.0)
EVERYBODY = RoundSchedule(((0, 1, 2, 3),) * 3)


def federated(method: Federated, *, shards: Any = None, **settings: Any) -> FederatedRun:
    """A short run that is a function of its settings alone."""
    usual = {
        "federation": FEDERATION,
        "sampling": poisson(0.4),
        "lr": 0.3,
        "seed": 2,
        "key": 7,
        "public": PUBLIC,
        "keep_messages": True,
    }
    return federate(network(), SHARDS if shards is None else shards, method, **usual | settings)


def parameters(run: FederatedRun | nn.Module) -> Tensor:
    """The global model as a vector."""
    return LAYOUT.read(run.model if isinstance(run, FederatedRun) else run)


def round_at(theta: Tensor) -> Round:
    """A round of two local steps that starts at a global model of the network's layout."""
    context = Context(step=0, steps=2, layout=LAYOUT, parameters=theta)
    return Round(number=0, context=context, network=network(), clients=4, rates=(0.3, 0.3))


class Diverging(Follow):
    """Ends at infinity for the client of eleven records."""

    def begin(self, state, round, noisy, size):
        return size

    def correct(self, state, round, point, update):
        return update * float("inf") if state == 11 else update
