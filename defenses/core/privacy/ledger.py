"""What was released, step by step, and the epsilon that follows from it.

The ledger records the plans that the engine executed; no method can type a guarantee in. `predict` fills a
ledger by running a method's plans on releases of pure noise, without data, and `calibrate` finds the noise
for a wanted epsilon.

Guarantee:
    Relation and sampler as in `sampling.py`. One step is one Gaussian at the defense's noise multiplier when
    all blocks are bounded, else nothing is proved and epsilon is infinite. Assumes composition over all
    releases (`updates` observer): whoever sees less, the final model only, learns no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import cast

import torch
from scipy.optimize import brentq

from ..gradients.executor import Release, add_noise
from ..plan.defense import LARGEST_MULTIPLIER, LEAST_MULTIPLIER, Context, Defense, StepPlan, checked_multiplier
from ..plan.layout import Layout
from ..plan.public import PublicRows, ToyRows
from ..training.sampling import Sampling, full, poisson
from .accounting import (
    DISCRETISATION,
    TIME_LIMIT,
    Gaussian,
    gaussian_multiplier,
    merged,
    pld_epsilon,
    quick,
    rdp_epsilon,
)
from .accounting import epsilon as proved
from .noise import seeded

_MOST_STEPS = 1_000_000  # a minute or so of dry steps
_EXACT_LOSS = 1e-12
"""By how much less than its multiplier discrete Gaussian noise is charged, relatively: see `_charged`."""
_TOY = Layout(("a.weight", "a.bias", "b.weight", "b.bias"), ((4, 3), (4,), (2, 4), (2,)))
TOY_DIM = _TOY.dim
"""Length of a gradient in the dry runs of `predict`."""


@dataclass(frozen=True)
class Entry:
    """Neighbouring steps that were charged alike.

    Attributes:
        first: number of the first of them.
        steps: how many.
        noise_multiplier: of each step as one Gaussian; None where nothing is proved.
        sampling: the sampler they ran under.
        reason: why nothing is proved; empty otherwise.
        one_off: whether it was a release of its own, on all the data, and no step.
        exact: whether the noise was a discrete Gaussian on sums of whole numbers.
    """

    first: int
    steps: int
    noise_multiplier: float | None
    sampling: Sampling
    reason: str = ""
    one_off: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None and not checked_multiplier(self.noise_multiplier) > 0:
            raise ValueError("an event without noise must have no noise multiplier, and a reason, got 0")


@dataclass(frozen=True)
class Claim:
    """What a run proves about any one example.

    Attributes:
        epsilon: in nats; infinite where nothing is proved.
        epsilon_rdp: the same by RDP.
        delta: the probability that epsilon may fail.
        relation: `add_remove` or `zero_out`.
        unit: whose presence is protected.
        sampling: the sampler.
        sample_rate: its rate.
        accountant: who computed epsilon.
        as_if_poisson: the figure that papers print for `shuffle`, `partition` and `fixed`: epsilon if the
            same steps had run under Poisson sampling, which they did not; None for `poisson` and `full`.
        events: the events in words.
        reason: why epsilon is infinite; empty otherwise.
        assumes: what the guarantee rests on beyond the mathematics, a sentence each.
        unverified: parts of the run that are none of ours, a sentence each; the claim takes their word.
    """

    epsilon: float
    epsilon_rdp: float
    delta: float
    relation: str
    unit: str
    sampling: str
    sample_rate: float
    accountant: str
    as_if_poisson: float | None
    events: tuple[str, ...]
    reason: str = ""
    assumes: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()


@dataclass
class Ledger:
    """The releases of one run.

    Attributes:
        sampling: the sampler of its steps.
        entries: run-length coded, in order of the steps.
    """

    sampling: Sampling
    entries: list[Entry] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Number of steps recorded."""
        return sum(entry.steps for entry in self.entries if not entry.one_off)

    def record(
        self,
        plan: StepPlan,
        noise_multiplier: float,
        *,
        step: int,
        sampling: Sampling | None = None,
        one_off: bool = False,
        exact: bool = False,
    ) -> None:
        """Charges one executed plan.

        Args:
            plan: as executed.
            noise_multiplier: as executed.
            step: in which step.
            sampling: the sampler, where it is not the run's.
            one_off: a release of its own on all the data: no sampler amplifies it.
            exact: whether the noise was a discrete Gaussian on sums of whole numbers.

        Raises:
            ValueError: for a noise multiplier that is none.
        """
        noise_multiplier = checked_multiplier(noise_multiplier)
        sampling = full() if one_off else sampling or self.sampling
        reason = ""
        if math.isinf(plan.sensitivity):
            reason = "one example's contribution is not bounded"
        elif noise_multiplier == 0:
            reason = "no noise is added"
        # Blocks whose shares sum to 1 are one Gaussian at the step's own multiplier.
        sigma = None if reason else noise_multiplier / plan.sensitivity
        if sigma is not None and math.isclose(sigma, noise_multiplier, rel_tol=1e-9):
            sigma = noise_multiplier  # shares sum to 1 up to rounding: keep one number for one event
        new = Entry(step, 1, sigma, sampling, reason, one_off, exact and not reason)
        last = self.entries[-1] if self.entries else None
        same = last and replace(last, first=step, steps=1) == new and last.first + last.steps == step
        if last and same:
            self.entries[-1] = replace(last, steps=last.steps + 1)
        else:
            self.entries.append(new)

    def claim(self, delta: float, *, time_limit: float = TIME_LIMIT) -> Claim:
        """The (epsilon, delta) of everything recorded so far.

        Args:
            delta: in (0, 1).
            time_limit: seconds for the PLD accountant where it is slow.
        """
        s = self.sampling
        # Gaussians under add/remove hold under zero-out too, not the other way round.
        relations = {s.relation, *(entry.sampling.relation for entry in self.entries)}
        words = tuple(_words(self.entries))
        shared = {
            "delta": delta,
            "relation": "zero_out" if "zero_out" in relations else "add_remove",
            "unit": "example",
            "sampling": s.kind,
            "sample_rate": s.rate,
        }
        reasons = sorted({entry.reason for entry in self.entries if entry.reason})
        if reasons:
            return Claim(
                epsilon=math.inf,
                epsilon_rdp=math.inf,
                accountant="none needed",
                as_if_poisson=None,
                events=words,
                reason="; ".join(reasons),
                **shared,
            )
        found = proved(list(_charged(self.entries)), delta, time_limit=time_limit)
        as_if = None
        if s.kind in ("shuffle", "partition", "fixed"):
            believed = [replace(e, sampling=poisson(e.sampling.rate)) for e in self.entries]
            as_if = proved(list(_charged(believed)), delta, time_limit=time_limit).value
        return Claim(found.value, found.rdp, accountant=found.accountant, as_if_poisson=as_if, events=words, **shared)


def predict(defense: Defense, *, sampling: Sampling, steps: int, public: PublicRows | None = None) -> Ledger:
    """The ledger that a run will have, from dry-running the defense's plans without data.

    The plans of all steps are executed on empty batches over a toy layout.

    Args:
        defense: with its noise multiplier set.
        sampling: the sampler.
        steps: planned steps.
        public: stands in for public data; made-up rows where None.
    """
    if not 1 <= steps <= _MOST_STEPS:
        raise ValueError(f"steps must be from 1 to {_MOST_STEPS} for a prediction, got {steps}")
    sigma, noise = defense.calibrated_multiplier, seeded(0)
    ledger, parameters = Ledger(sampling), torch.zeros(_TOY.dim)

    def release(plan: StepPlan, multiplier: float, *, one_off: bool = False) -> Release:
        ledger.record(plan, multiplier, step=context.step, one_off=one_off)
        sums = [torch.zeros(block.codec.size, dtype=torch.float64) for block in plan.blocks]
        return add_noise(plan, sums, multiplier, noise, torch.float32)

    context = Context(
        step=0,
        steps=steps,
        steps_per_epoch=sampling.steps_per_epoch,
        layout=_TOY,
        parameters=parameters,
        public=public or ToyRows(_TOY.dim),
        one_off=lambda plan, own: release(plan, own, one_off=True).noisy,
    )
    state = defense.start(context)
    for step in range(steps):
        context = context.at(step)
        state, plan = defense.plan(state, context)
        out = release(plan, sigma)
        update = plan.post(out.total)
        state = defense.observe(state, context, out.noisy, update)
        parameters = parameters - update
        context = replace(context, parameters=parameters, update=update)
    return ledger


def calibrate(
    defense: Defense, *, epsilon: float, delta: float, sampling: Sampling, steps: int, precision: float = 1e-3
) -> Defense:
    """The defense with the smallest noise multiplier that proves `epsilon` at `delta`.

    Args:
        defense: its own noise multiplier, if it has one, is replaced; 0 says that it adds no noise by choice.
        epsilon: wanted, in nats, by the PLD accountant.
        delta: in (0, 1).
        sampling: the sampler of the run.
        steps: its number of steps.
        precision: relative, of the noise multiplier; the result is on the private side.

    Returns:
        A new defense whose predicted epsilon is at most `epsilon`.

    Raises:
        ValueError: when no noise multiplier gives this defense a finite epsilon, or none that is practical
            this one.
    """
    if defense.noise_multiplier == 0:
        # Else clipped SGD, say, would become DP-SGD under a name that promises no noise.
        raise ValueError(f"'{defense.name}' proves no epsilon: it adds no noise, its noise_multiplier is 0")
    probe = predict(defense.with_noise(1.0), sampling=sampling, steps=steps)
    reasons = sorted({entry.reason for entry in probe.entries if entry.reason})
    if reasons:
        raise ValueError(f"'{defense.name}' proves no epsilon at any noise multiplier: {'; '.join(reasons)}")
    # Every step of every bounded plan is one Gaussian at the defense's multiplier, so one search serves all
    # methods; releases of their own keep the multiplier that their method gives them.
    own = tuple(entry for entry in probe.entries if entry.one_off)
    sigma = noise_multiplier(
        epsilon=epsilon, delta=delta, sampling=sampling, steps=steps, precision=precision, beside=own
    )
    return defense.with_noise(sigma)


@lru_cache(maxsize=256)
def noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    sampling: Sampling,
    steps: int,
    precision: float = 1e-3,
    beside: tuple[Entry, ...] = (),
) -> float:
    """The noise multiplier at which `steps` Gaussians prove `epsilon`; arguments as for `calibrate`.

    Args:
        epsilon: wanted, in nats.
        delta: in (0, 1).
        sampling: the sampler.
        steps: how many.
        precision: relative.
        beside: what is released besides, at multipliers that stay as they are.

    Raises:
        ValueError: where no practical multiplier proves it.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon must be a positive finite number, got {epsilon}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    spent = proved(list(_charged([*beside])), delta).value
    if beside and spent >= epsilon:
        raise ValueError(
            f"epsilon must be above {spent:.4g}, which releases of their own spend at their own noise, got {epsilon}; "
            "ask for more, or give those more noise"
        )
    sigma = _searched(epsilon, delta, sampling, steps, precision, beside)
    try:
        return checked_multiplier(sigma)
    except ValueError:
        way_out = "ask for more" if sigma > 1 else "ask for less, it is proved by hardly any noise"
        raise ValueError(f"epsilon {epsilon} needs a noise multiplier of {sigma:.1e}; {way_out}") from None


def _searched(
    epsilon: float, delta: float, sampling: Sampling, steps: int, precision: float, beside: tuple[Entry, ...]
) -> float:
    """The least multiplier that proves `epsilon`, up to `precision`; arguments as for `noise_multiplier`."""
    # Without subsampling everything is one Gaussian. With it, epsilon is at most that.
    total = gaussian_multiplier(epsilon, delta) ** -2
    unsampled = [replace(e, sampling=full()) if e.sampling.kind == "poisson" else e for e in beside]
    taken = math.fsum(e.count / e.noise_multiplier**2 for e in _charged(unsampled))
    plain = full() if sampling.kind == "poisson" else sampling
    steps_charged = sum(e.count for e in _charged([Entry(0, steps, 1.0, plain)]))
    enough = math.sqrt(steps_charged / (total - taken)) * (1 + 1e-9) if total > taken else math.inf
    if sampling.kind != "poisson" or sampling.rate == 1:
        return enough

    def charged(log_sigma: float) -> list[Gaussian]:
        return list(_charged([*beside, Entry(0, steps, math.exp(log_sigma), sampling)]))

    # Epsilon is close to a power of sigma, so on log scales the root finder needs few evaluations.
    def excess(log_sigma: float) -> float:
        return math.log(max(proved(charged(log_sigma), delta).value, 1e-12) / epsilon)

    def excess_rdp(log_sigma: float) -> float:
        return math.log(max(rdp_epsilon(merged(charged(log_sigma)), delta), 1e-12) / epsilon)

    least, most = math.log(LEAST_MULTIPLIER), math.log(LARGEST_MULTIPLIER)
    high = min(math.log(enough), most)
    if excess_rdp(least) < 0:
        return math.exp(least) / 2  # refused by name
    # RDP is quick and an upper bound, so its answer is enough noise, and the one wanted is a little below.
    if excess_rdp(high) < 0:
        high = cast(float, brentq(excess_rdp, least, high, xtol=precision)) + precision
    elif excess(high) > 0:
        return math.inf

    def excess_coarsely(log_sigma: float) -> float:
        interval = max(DISCRETISATION, min(20 * DISCRETISATION, epsilon / 100)) * max(1.0, epsilon / 10)
        found = pld_epsilon(merged(charged(log_sigma)), delta, interval)
        return math.log(max(found, 1e-12) / epsilon)

    # PLD in wide steps is many times as quick and hardly looser; a step or two from its answer is the one wanted.
    if not quick(merged(charged(high))) or excess_coarsely(high + 0.2) > 0:
        return math.exp(_crossing(excess, high, precision))
    root = _crossing(excess_coarsely, high, precision)
    slope = (excess_coarsely(root) - excess_coarsely(root + 0.05)) / 0.05
    for _ in range(4):
        over = excess(root)
        if -slope * precision <= over <= 0:
            return math.exp(root)
        if not abs(over) < 0.1 * slope:  # the wide steps lead astray
            break
        root += over / slope + precision / 4
    return math.exp(_crossing(excess, high, precision))


def _crossing(excess: Callable[[float], float], near: float, precision: float) -> float:
    """Where a falling function crosses 0, up to `precision`, on the side where it is negative.

    Args:
        excess: to be crossed.
        near: where to begin.
        precision: absolute.
    """
    low, high = near - 0.2, near
    while excess(high) > 0:
        low, high = high, high + 0.2
    while excess(low) < 0:
        low, high = low - 0.2, low
    root = cast(float, brentq(excess, low, high, xtol=precision / 2))
    while excess(root) > 0:  # the root is within xtol on either side
        root += precision / 2
    return root


def _charged(entries: list[Entry]) -> Iterator[Gaussian]:
    """The entries as Gaussian events under their samplers; all multipliers are known by now.

    Discrete Gaussian noise of scale s on whole numbers, in many dimensions at once, is charged as a Gaussian of scale
    sqrt(s^2 - 8), because it nearly is a function of one: draw z from that, then an integer k with probability
    proportional to exp(-(k - z)^2 / 16). By Poisson's summation formula the sum of these weights over k is the same for
    every z, and that of the discrete Gaussian's own for every whole shift, up to a factor 1 +- 2 exp(-16 pi^2) (1 +
    10^-60); so probabilities differ by a factor of exp(10^-67) a number released, whatever the sampler and however
    steps compose. At 2^30 units to a standard deviation, the 8 is a relative loss of 4e-18. `_EXACT_LOSS` is more than
    both for as many numbers as there will ever be.
    """
    # (sampler, epoch) -> smallest multiplier of a step that a record may have been used in
    worst: dict[tuple[Sampling, int], float] = {}
    for e in entries:
        sigma = e.noise_multiplier
        if sigma is None:
            raise ValueError("an entry without a guarantee has no Gaussian event")
        if e.exact:
            sigma *= 1 - _EXACT_LOSS
        if e.sampling.kind in ("shuffle", "partition"):
            per_epoch = e.sampling.steps_per_epoch
            for epoch in range(e.first // per_epoch, (e.first + e.steps - 1) // per_epoch + 1):
                worst[e.sampling, epoch] = min(sigma, worst.get((e.sampling, epoch), math.inf))
        else:
            yield Gaussian(e.sampling.rate if e.sampling.kind == "poisson" else 1.0, sigma, e.steps)
    for sigma in worst.values():
        yield Gaussian(1.0, sigma, 1)


def _words(entries: list[Entry]) -> Iterator[str]:
    how = {
        "poisson": "on a Poisson sample of rate {rate:.4g}",
        "shuffle": "on shuffled batches, each record at most once in {per_epoch} steps",
        "partition": "on fixed batches, each record at most once in {per_epoch} steps",
        "fixed": "on subsets of fixed size, charged without amplification",
        "full": "on all records",
    }
    for e in entries:
        sampler = how[e.sampling.kind].format(rate=e.sampling.rate, per_epoch=e.sampling.steps_per_epoch)
        kind = "discrete Gaussian" if e.exact else "Gaussian"
        what = f"no guarantee ({e.reason})" if e.noise_multiplier is None else f"{kind}, noise {e.noise_multiplier:.4g}"
        yield f"{e.steps} x {what} {sampler}"
