"""Claims that need no records: T6 on pure noise, T7 on messages of the paper's network, T9 on the norm of updates.

T6: images are black and the noise multiplier is 1e6 at a clip norm of 1e-6, so the global model moves by noise alone,
of unit scale; its variance is measured where every client has taken part before. T7: bytes of the messages of one
round. T9: share of an update's norm that its message loses, on digits without noise.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn

from leakbench.defenses.core import (
    Federated,
    FederatedRun,
    Federation,
    Layout,
    RoundSchedule,
    federate,
    full,
    poisson,
)

from .. import models
from ..core import Sizes, client_splits
from ..data.digits import digits
from .claims import ClaimResult
from .comparisons import PaperVerdict, paired, verdict_on

KEYS = 10
"""Runs behind a variance of T6, each with other noise."""
SEEDS = tuple(range(5))
PAPERS_NUMBERS = (26_010, 490)
"""The paper's 25 and 0.48 KB times 1024: numbers of a dense message, and coefficients of rank 100."""
PAPERS_RATIO = 53


def by_arithmetic() -> list[ClaimResult]:
    """Returns the verdicts that need no records; half a minute on a core."""
    return [variance_of_corrections(), *bytes_of_messages(), norm_lost()]


def method(name: str, **settings: Any) -> Federated:
    """Returns a federated method by the name of its file."""
    return getattr(importlib.import_module(f"leakbench.defenses.{name}"), name)(**settings)


def variance_of_corrections(clients: int = 10, members: tuple[int, ...] = (10, 8, 5)) -> ClaimResult:
    """Measures the variance of the global model's last move under SCAFFOLD over that under FedAvg.

    Args:
        clients: K.
        members: numbers m of clients in a round.
    """
    facts, inside, above = [], [], []
    for size in members:
        moves = [_moves(name, clients, size, keys) for name, keys in (("scaffold", 0), ("fed_avg", KEYS))]
        ratio = float(moves[0].var() / moves[1].var())
        # Both samples are independent normal numbers, so the ratio over its expectation has an F distribution.
        ends = stats.f.ppf([0.975, 0.025], moves[0].numel() - 1, moves[1].numel() - 1)
        low, high = (ratio / float(end) for end in ends)
        expected = 2 - size / clients
        inside.append(low <= expected <= high)
        if size < clients:
            above.append(low > 1)
        facts.append(f"m {size} of K {clients}: {ratio:.3f} [{low:.3f}, {high:.3f}], 2 - m/K is {expected:.2f}")
    right: PaperVerdict = "holds" if all(inside) and all(above) else "does not hold"
    return ClaimResult(claim="T6", setting="pure noise", verdict=right, facts=tuple(facts))


def _moves(name: str, clients: int, members: int, first: int) -> Tensor:
    """Returns the numbers by which the last round moves the global model, for several keys."""
    shift = clients - members
    rounds = (range(members), range(shift, clients), range(shift // 2, shift // 2 + members))
    black = [(torch.zeros(2, 200), torch.zeros(2, dtype=torch.int64))] * clients
    moves = []
    for key in range(first, first + KEYS):
        model = nn.Linear(200, 5)
        run = federate(
            model,
            black,
            method(name, clip_norm=1e-6, noise_multiplier=1e6),
            federation=Federation(rounds=3, local_steps=2, participation=members / clients),
            sampling=full(),
            lr=0.3,
            seed=0,
            key=key,
            schedule=RoundSchedule(tuple(tuple(chosen) for chosen in rounds)),
            keep_messages=True,
        )
        moves.append(Layout.of(run.model).read(run.model) - run.rounds[-1].parameters)
    return torch.stack(moves)


def bytes_of_messages() -> list[ClaimResult]:
    """Counts the bytes of a round of the paper's network at rank 100, each way, beside the closed forms."""
    runs = {name: _round_of(name, settings) for name, settings in (("fed_avg", {}), ("fed_pcdp", {"rank": 100}))}
    sizes = [parameter.numel() for parameter in runs["fed_avg"].model.parameters()]
    forms = {"fed_avg": 4 * sum(sizes), "fed_pcdp": 4 * sum(min(100, size) for size in sizes)}
    basis = 4 * sum(100 * size for size in sizes if size > 100)
    up, down = ({name: getattr(run, way)(0) for name, run in runs.items()} for way in ("bytes_up", "bytes_down"))
    dense, projected = up["fed_avg"], up["fed_pcdp"]
    facts = (
        f"up: {dense:,} and {projected:,} bytes (closed forms {forms['fed_avg']:,} and {forms['fed_pcdp']:,}), "
        f"{dense / projected:.1f} times fewer",
        f"the paper's 25 and 0.48 KB are {PAPERS_NUMBERS[0]:,} and {PAPERS_NUMBERS[1]} numbers / 1024; in float32 "
        f"{dense / 1024:.1f} and {projected / 1024:.2f} KiB",
    )
    same = up == forms and round(dense / projected) == PAPERS_RATIO
    both = (dense + down["fed_avg"]) / (projected + down["fed_pcdp"])
    return [
        ClaimResult(
            claim="T7",
            setting="messages up",
            verdict="holds" if same else "does not hold",
            facts=facts,
        ),
        ClaimResult(
            claim="T7",
            setting="both ways",
            verdict="holds" if both >= PAPERS_RATIO else "does not hold",
            facts=(
                f"down: {down['fed_avg']:,} and {down['fed_pcdp']:,} bytes; both ways {both:.2f} times fewer, if every "
                "party computes the basis from a pool of its own",
                f"a basis that is sent has {basis:,} bytes more, {basis / forms['fed_avg']:.0f} models a round",
            ),
        ),
    ]


def _round_of(name: str, settings: dict[str, Any]) -> FederatedRun:
    draw = torch.Generator().manual_seed(0)
    images = [(torch.rand(20, 1, 28, 28, generator=draw), torch.arange(20) % 10) for _ in range(3)]
    return federate(
        models.build("dp_cnn_small", input_shape=(1, 28, 28), classes=10),
        images[:2],
        method(name, noise_multiplier=1.0, **settings),
        federation=Federation(rounds=1, local_steps=1, participation=1.0),
        sampling=poisson(0.5),
        public=(torch.rand(100, 1, 28, 28, generator=draw), torch.arange(100) % 10),
        seed=0,
        key=0,
    )


@dataclass(frozen=True, kw_only=True)
class LossOfMessages:
    """Codec that notes |Delta - decoded| / |Delta| of every message.

    Attributes:
        inner: codec that it measures.
        shares: measured so far.
    """

    inner: Any
    shares: list[float] = field(default_factory=list)

    def prepare(self, context: Any) -> Any:
        """Returns the inner codec's preparation."""
        return self.inner.prepare(context)

    def check(self, round: Any) -> None:
        """Makes the inner codec's checks."""
        self.inner.check(round)

    def encode(self, delta: Tensor, round: Any) -> Any:
        """Returns the inner codec's message."""
        message = self.inner.encode(delta, round)
        self.shares.append(float((delta - self.inner.decode(message, round)).norm() / delta.norm()))
        return message

    def decode(self, message: Any, round: Any) -> Tensor:
        """Returns the inner codec's displacement."""
        return self.inner.decode(message, round)


def norm_lost(rank: int = 20) -> ClaimResult:
    """Measures the share of an update's norm that PFA (simplified) and FedPCDP lose in messages, without noise.

    Args:
        rank: k.
    """
    lost = {name: {seed: _lost(name, rank, seed) for seed in SEEDS} for name in ("pfa", "fed_pcdp")}
    comparison = paired("norm lost by pfa - by fed_pcdp, noise 0", lost["pfa"], lost["fed_pcdp"])
    ranges = [f"{name} {min(own.values()):.2g} to {max(own.values()):.2g}" for name, own in lost.items()]
    return ClaimResult(
        claim="T9",
        setting="norm of digits' updates",
        verdict=verdict_on([comparison]),
        comparisons=(comparison,),
        facts=(f"share of the norm lost, rank {rank}, means of {len(SEEDS)} seeds: {', '.join(ranges)}",),
    )


def _lost(name: str, rank: int, seed: int) -> float:
    splits = digits(seed=seed, sizes=Sizes(private=680))
    pool, public = splits.private, splits.public
    parts = client_splits(pool.ids, pool.labels, 8, split="iid", seed=seed)
    chosen = method(name, rank=rank, noise_multiplier=0.0)
    codec = LossOfMessages(inner=chosen.messages)
    federate(
        models.build("mlp", input_shape=splits.input_shape, classes=splits.classes, seed=seed),
        [(pool.inputs[part], pool.labels[part]) for part in parts],
        replace(chosen, messages=codec),
        federation=Federation(rounds=5, local_steps=5, participation=0.75),
        sampling=poisson(0.2),
        lr=1.0,
        public=(public.inputs, public.labels),
        seed=seed,
        key=seed,
    )
    return sum(codec.shares) / len(codec.shares)
