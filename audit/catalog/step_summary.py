"""Releases and privacy cost of a defense in a step, read off a rehearsal of its plans, not declared by the method.

A rehearsal executes the plans on synthetic gradients of the tanh network with 26,010 parameters that the papers train
on MNIST; the first and the last step of 20 epochs of 10 steps are summarised. `leakbench explain` does so at a method's
default settings. Further rehearsals, under other public randomness, find the side information (`side_information.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from leakbench.benchmarks import models
from leakbench.defenses.core import (
    Account,
    Defense,
    Entry,
    Layout,
    Ledger,
    StepPlan,
    ToyRows,
    poisson,
    rehearsed,
    unverified,
)

from .side_information import SideInformation, masked, side_information

BYTES = 4  # per float32 number
_INPUT = (1, 28, 28)
_EPOCHS, _PER_EPOCH = 20, 10


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """Numbers that a defense releases in a step, and the privacy events that a step is charged.

    Attributes:
        parameters: number of parameters of the reference network.
        first: count of the numbers released in the first step, an entry per block.
        last: count of the numbers released in the last step, an entry per block.
        side_information: masks and bases that a receiver needs beside the numbers of the last step.
        shares: fraction of the last step's 1 / sigma^2 spent by each block.
        events: charged privacy events, in words.
        reason: reason why nothing is proved; empty if a bound and noise prove something.
        public: whether public examples are read.
        unverified: a sentence for each component that is not the library's own.
    """

    parameters: int
    first: tuple[int, ...]
    last: tuple[int, ...]
    side_information: tuple[SideInformation, ...]
    shares: tuple[float, ...]
    events: tuple[str, ...]
    reason: str
    public: bool
    unverified: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values, with bytes at 4 per number."""
        return {
            "parameters": self.parameters,
            "numbers_first_step": list(self.first),
            "numbers_last_step": list(self.last),
            "bytes_last_step": BYTES * sum(self.last),
            "sent_besides": [information.to_dict() for information in self.side_information],
            "shares": list(self.shares),
            "events": list(self.events),
            "proves_nothing": self.reason or None,
            "reads_public": self.public,
            "unverified": list(self.unverified),
        }

    def lines(self) -> list[str]:
        """Returns the lines that `leakbench explain` prints."""

        def told(sizes: tuple[int, ...]) -> str:
            parts = " + ".join(f"{size:,}" for size in sizes)
            return f"{parts} number{'s' if sum(sizes) != 1 else ''} ({BYTES * sum(sizes):,} bytes)"

        over = told(self.last) if self.first == self.last else f"{told(self.first)} at first, {told(self.last)} at last"
        lines = [
            f"sends, of {self.parameters:,} parameters: {over}",
            *(information.line() for information in self.side_information),
        ]
        if len(self.shares) > 1:
            shares = ", ".join(f"{share:.3g}" for share in self.shares)
            lines.append(f"shares of 1 / sigma^2: {shares}")
        lines.append("reads public examples: " + ("yes" if self.public else "no"))
        lines += [f"proves nothing: {self.reason}"] if self.reason else self.events
        return [*lines, *(f"unverified: {sentence}" for sentence in self.unverified)]


def _event(entry: Entry, sigma: float) -> str:
    if entry.one_off:
        return f"before the steps, charged: a Gaussian on all records, noise multiplier {entry.noise_multiplier}"
    if entry.trial:
        own = f"noise multiplier {entry.noise_multiplier}"
        return f"after a step, charged: a Gaussian on a Poisson sample of rate {entry.sampling.rate:.4g}, {own}"
    if entry.row is not None:
        kind = type(entry.row.strategy).__name__
        return (
            f"noise is correlated over steps ({kind}): a record that is used once is charged a Gaussian at the noise "
            "multiplier, one that is used often by what its steps share"
        )
    factor = "" if entry.noise_multiplier == sigma else f"{entry.noise_multiplier} / {sigma} times "
    return f"a step is charged: a Gaussian on its batch, at {factor}the noise multiplier"


def _sizes(plan: StepPlan) -> tuple[int, ...]:
    """Returns the count of numbers released by each block, and by a trial."""
    blocks = (*plan.blocks, *(plan.trial.plan.blocks if plan.trial else ()))
    return tuple(block.codec.size for block in blocks)


def _network() -> nn.Module:
    return models.build("dp_cnn_small", input_shape=_INPUT, classes=10)


def _account(defense: Defense) -> Account:
    return Account(Ledger(poisson(1 / _PER_EPOCH)), remarks=unverified(defense=defense))


def _plans(defense: Defense, account: Account, public: ToyRows, layout: Layout, *, seed: int = 0) -> list[StepPlan]:
    """Returns the plans of the first and the last step; methods with memory have none in the first."""
    steps = _EPOCHS * _PER_EPOCH
    executed = rehearsed(
        defense,
        account,
        steps=steps,
        only=(0, steps - 1),
        public=public,
        layout=layout,
        seed=seed,
        architecture=_network,
        input_shape=_INPUT,
    )
    return [step.plan.plan for step in executed if step.plan]


def step_summary(defense: Defense) -> StepSummary:
    """Returns the summary of a defense, at its noise multiplier, or at 1 if that is not set."""
    layout, noisy = Layout.of(_network()), defense if defense.noise_multiplier is not None else defense.with_noise(1.0)
    account, public = _account(defense), ToyRows(layout.dim)
    plans = _plans(noisy, account, public, layout)
    # If public examples are read, bases are attributed to them without another rehearsal, which takes seconds. A mask
    # may still be drawn by public randomness, so plans with a mask are rehearsed again.
    again = other_seed = other_examples = plans
    if not public.used or masked(plans[-1]):
        other_seed = _plans(noisy, _account(defense), ToyRows(layout.dim), layout, seed=1)
    if public.used and masked(plans[-1]):
        other_examples = _plans(noisy, _account(defense), ToyRows(layout.dim, seed=1), layout)
    if any(account.remarks.values()) and not public.used:  # of a method that no test has checked for public randomness
        again = _plans(noisy, _account(defense), ToyRows(layout.dim), layout)
    first, last = (_sizes(plan) for plan in (plans[0], plans[-1]))
    entries = account.ledger.entries
    return StepSummary(
        parameters=layout.dim,
        first=first,
        last=last,
        side_information=side_information(
            plans[-1],
            again=again[-1],
            other_seed=other_seed[-1],
            other_examples=other_examples[-1],
            public=public.used,
        ),
        shares=tuple(block.share for block in plans[-1].blocks),
        events=tuple(dict.fromkeys(_event(entry, noisy.calibrated_multiplier) for entry in entries)),
        reason="; ".join(sorted({entry.reason for entry in entries if entry.reason})),
        public=public.used,
        unverified=tuple(sentence for sentence in account.remarks.values() if sentence),
    )
