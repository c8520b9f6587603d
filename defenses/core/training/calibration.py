"""Noise calibration: predicts the privacy cost of a run by dry runs, and finds its noise multiplier.

`predict` takes the steps of a run on empty batches over a toy layout. Its ledger equals the run's, because plans depend
on public values and releases only, and the cost of a step depends on its plan alone. `calibrate` predicts once, and
searches for the noise multiplier with the accountants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch
from jaxtyping import Float
from scipy.optimize import brentq
from torch import Tensor, nn

from ..gradients.executor import Release, add_noise
from ..plan.defense import LARGEST_MULTIPLIER, LEAST_MULTIPLIER, Context, Defense, NoisyPlan, checked_multiplier
from ..plan.layout import Layout
from ..plan.public_data import PublicRows, ToyRows
from ..privacy.accounting import DISCRETISATION, gaussian_multiplier, pld_epsilon, quick, rdp_epsilon
from ..privacy.accounting import epsilon as proved
from ..privacy.events import Gaussian, merged
from ..privacy.ledger import Entry, Ledger, events_of
from ..privacy.sampling import Sampling
from ..privacy.tradeoff import gaussian_shift, of_events
from ..randomness.noise import seeded
from .assumptions import unverified
from .step import Account, Execute, Stepper
from .transcript import Step

_OF_GRID = 1e-6
"""Delta whose epsilon sets the resolution of the loss grid, if no epsilon is requested."""
_MOST_STEPS = 1_000_000  # a minute or so of dry steps
# Two layers with biases: methods with a basis or a direction per tensor or per layer then have several.
TOY_LAYOUT = Layout(("a.weight", "a.bias", "b.weight", "b.bias"), ((4, 3), (4,), (2, 4), (2,)))
"""Layout of the dry runs of `predict`."""
TOY_DIM = TOY_LAYOUT.dim
"""Length of a gradient in the dry runs of `predict`."""


def predict(
    defense: Defense,
    *,
    sampling: Sampling,
    steps: int,
    public: PublicRows | None = None,
    before: Sequence[NoisyPlan] = (),
) -> Ledger:
    """Returns the ledger that a run will have, from dry-running the defense's plans without data.

    The plans of all steps are executed on empty batches over a toy layout.

    Args:
        defense: with its noise multiplier set.
        sampling: the sampler.
        steps: planned steps.
        public: stands in for public data; synthetic rows if None.
        before: releases on all the data before the first step, such as `FeatureStatistics.plans()`.
    """
    return predicted(defense, sampling=sampling, steps=steps, public=public, before=before).ledger


def predicted(
    defense: Defense,
    *,
    sampling: Sampling,
    steps: int,
    public: PublicRows | None = None,
    before: Sequence[NoisyPlan] = (),
) -> Account:
    """Predicts the ledger as `predict` does, and the claim's remarks on components from outside leakbench.

    Args:
        defense: with its noise multiplier set.
        sampling: the sampler.
        steps: planned steps.
        public: stands in for public data; synthetic rows if None.
        before: releases on all the data before the first step.
    """
    account = Account(Ledger(sampling), remarks=unverified(defense=defense))
    for plan in before:
        account.charge(plan, step=0, one_off=True)
    for _ in rehearsed(defense, account, steps=steps, public=public):
        pass
    return account


def rehearsed(
    defense: Defense,
    account: Account,
    *,
    steps: int,
    only: Collection[int] | None = None,
    others: Account | None = None,
    public: PublicRows | None = None,
    layout: Layout = TOY_LAYOUT,
    seed: int = 0,
    architecture: Callable[[], nn.Module] | None = None,
    input_shape: tuple[int, ...] = (),
) -> Iterator[Step]:
    """Yields the steps of a run on empty batches, with their releases, and charges them.

    Args:
        defense: with its noise multiplier set.
        account: charged for the steps; its sampler decides the length of an epoch.
        steps: planned steps.
        only: numbers of the steps to take, as if the others had changed nothing; None for all of them.
        others: charged for the steps that are not in `only`, which are then taken too, up to the last of `only`; None
            to skip them.
        public: stands in for public data; synthetic rows if None.
        layout: layout of the trained parameters.
        seed: key of the public randomness.
        architecture: makes the network of that layout, for methods that inspect it; None for none.
        input_shape: shape of a single input of the network.
    """
    if not 1 <= steps <= _MOST_STEPS:
        raise ValueError(f"steps must be from 1 to {_MOST_STEPS} for a prediction, got {steps}")
    stepper, execute, parameters = rehearsal(
        defense,
        account,
        steps=steps,
        steps_per_epoch=account.ledger.sampling.steps_per_epoch,
        layout=layout,
        public=public or ToyRows(layout.dim),
        seed=seed,
        architecture=architecture,
        input_shape=input_shape,
    )
    stepper.start()
    chosen = range(steps) if only is None else sorted(only)
    for step in chosen if others is None else range(max(chosen) + 1):
        payer = account if others is None or step in chosen else others
        executed = stepper.take(step, parameters.clone(), execute, payer)
        parameters -= stepper.update
        stepper.hold(parameters.clone())
        verdict = stepper.judge(execute, payer)
        yield replace(executed, verdict=verdict)


def rehearsal(
    defense: Defense, account: Account, *, layout: Layout = TOY_LAYOUT, **public: Any
) -> tuple[Stepper, Execute, Float[Tensor, " dim"]]:
    """Returns a stepper before its start, the executor of its plans on empty batches, and the parameters.

    Args:
        defense: with its noise multiplier set.
        account: charged for one-off releases.
        layout: layout of the trained parameters.
        public: further fields of the first step's context.
    """
    # With noise although there are no data: after releases of zeros a method may plan differently (DPDR has no
    # direction).
    noise = seeded(0)

    def execute(plan: NoisyPlan) -> Release:
        sums = [torch.zeros(block.codec.size, dtype=torch.float64) for block in plan.blocks]
        return add_noise(plan, sums, noise, torch.float32)

    parameters = torch.zeros(layout.dim)
    release = account.one_off(execute)
    context = Context(step=0, layout=layout, parameters=parameters.clone(), one_off=release, **public)
    return Stepper(defense, context, parameters.copy_), execute, parameters


@dataclass(frozen=True, kw_only=True)
class MembershipLimit:
    """Limit on every membership test: an advantage, or a true positive rate at a false positive rate.

    Attributes:
        advantage: largest TPR - FPR, in (0, 1); None to use the other two.
        tpr: largest true positive rate at `fpr`, in (0, 1).
        fpr: below `tpr`, in (0, 1).
    """

    advantage: float | None = None
    tpr: float | None = None
    fpr: float | None = None

    def __post_init__(self) -> None:
        if (self.advantage is None) == (self.tpr is None) or (self.tpr is None) != (self.fpr is None):
            raise ValueError(
                "a limit must be an advantage, or tpr and fpr, got "
                f"advantage {self.advantage}, tpr {self.tpr} and fpr {self.fpr}"
            )
        if self.advantage is not None and not 0 < self.advantage < 1:
            raise ValueError(f"advantage must be in (0, 1), got {self.advantage}")
        if self.tpr is not None and self.fpr is not None and not 0 < self.fpr < self.tpr < 1:
            raise ValueError(
                f"tpr must be in (fpr, 1), and fpr above 0, got {self.tpr} and {self.fpr}: coins have a tpr of fpr"
            )

    @property
    def words(self) -> str:
        """The limit in words."""
        return f"advantage {self.advantage:g}" if self.advantage else f"TPR {self.tpr:g} at FPR {self.fpr:g}"

    @property
    def shift(self) -> float:
        """Sensitivity / noise std (mu of mu-GDP) of the Gaussian mechanism whose best test is exactly at the limit."""
        return gaussian_shift(advantage=self.advantage, tpr=self.tpr or 0.0, fpr=self.fpr or 0.0)

    def exceeded(self, events: Sequence[Gaussian]) -> float:
        """Log of the best test's gain over random guessing / the allowed gain; positive if the limit is exceeded."""
        trade_off = of_events(events, _OF_GRID)
        gain, limit = trade_off.advantage, self.advantage
        if self.tpr is not None and self.fpr is not None:
            gain, limit = trade_off.tpr_at(self.fpr) - self.fpr, self.tpr - self.fpr
        return math.log(max(gain, 1e-12) / (limit or 1.0))


def calibrate(
    defense: Defense,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    advantage: float | None = None,
    tpr: float | None = None,
    fpr: float | None = None,
    sampling: Sampling,
    steps: int,
    precision: float = 1e-3,
    before: Sequence[NoisyPlan] = (),
) -> Defense:
    """Returns the defense with the smallest noise multiplier that proves a privacy target.

    Args:
        defense: its noise multiplier, if set, is replaced; 0 means that it adds no noise by choice.
        epsilon: target at `delta`, in nats, by the PLD accountant.
        delta: in (0, 1).
        advantage: largest TPR - FPR of any test of a record's membership, in (0, 1).
        tpr: largest true positive rate of any such test at `fpr`.
        fpr: false positive rate, in (0, 1).
        sampling: the sampler of the run.
        steps: its number of steps.
        precision: relative, of the noise multiplier; the result is on the private side.
        before: releases on all the data before the first step, whose noise stays unchanged.

    Returns:
        A new defense whose predicted epsilon, advantage or true positive rate is at most the target.

    Raises:
        ValueError: for no target or several, or if no noise multiplier, or no practical multiplier, proves it for this
            defense.
    """
    limited = not advantage is tpr is fpr is None
    if limited == (epsilon is not None) or (epsilon is None) != (delta is None):
        raise ValueError(
            "one thing must be wanted: epsilon and delta, advantage, or tpr and fpr, got "
            f"epsilon {epsilon}, delta {delta}, advantage {advantage}, tpr {tpr} and fpr {fpr}"
        )
    limit = MembershipLimit(advantage=advantage, tpr=tpr, fpr=fpr) if limited else None
    proves = "no epsilon" if limit is None else "nothing"
    if defense.noise_multiplier == 0:
        # Otherwise clipped SGD, say, would become DP-SGD under a name that promises no noise.
        raise ValueError(f"'{defense.name}' proves {proves}: it adds no noise, its noise_multiplier is 0")
    probe = predict(defense.with_noise(1.0), sampling=sampling, steps=steps, before=before)
    reasons = sorted({entry.reason for entry in probe.entries if entry.reason})
    if reasons:
        raise ValueError(f"'{defense.name}' proves {proves} at any noise multiplier: {'; '.join(reasons)}")
    # Every step of every bounded plan is a Gaussian at the defense's multiplier, so the same search serves all methods;
    # one-off releases, and trials, keep the multiplier that their method gives them.
    own = tuple(entry for entry in probe.entries if entry.own_noise)
    steady = all(entry.row is None for entry in probe.entries)
    rows = () if steady else tuple(entry for entry in probe.entries if not entry.own_noise)
    if limit is not None:
        sigma = noise_within(limit, rows or (Entry(0, steps, 1.0, sampling),), precision=precision, beside=own)
    else:
        limits = {"epsilon": epsilon, "delta": delta, "sampling": sampling, "steps": steps, "precision": precision}
        sigma = noise_multiplier(**limits, beside=own, correlated=rows)
    calibrated = defense.with_noise(sigma)
    if own:
        then = predict(calibrated, sampling=sampling, steps=steps, before=before).entries
        then = tuple(entry for entry in then if entry.own_noise)
        if then != own:
            at_one, at_sigma = ({float(e.noise_multiplier or 0.0) for e in entries} for entries in (own, then))
            raise ValueError(
                f"releases of its own of '{defense.name}' must keep their noise whatever the noise multiplier is, got "
                f"{sorted(at_one)} at 1 and {sorted(at_sigma)} at {sigma:.4g}: give them a noise multiplier "
                "of their own"
            )
    return calibrated


@lru_cache(maxsize=256)
def noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    sampling: Sampling,
    steps: int,
    precision: float = 1e-3,
    beside: tuple[Entry, ...] = (),
    correlated: tuple[Entry, ...] = (),
) -> float:
    """Returns the least noise multiplier, up to `precision`, at which `steps` Gaussians prove `epsilon`.

    Args:
        epsilon: target, in nats.
        delta: in (0, 1).
        sampling: the sampler.
        steps: number of steps.
        precision: relative.
        beside: releases besides the steps, at fixed multipliers.
        correlated: the steps at noise multiplier 1, if their noise is correlated; empty for independent noise.

    Raises:
        ValueError: if no practical multiplier proves it.
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ValueError(f"epsilon must be a positive finite number, got {epsilon}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    unit = correlated or (Entry(0, steps, 1.0, sampling),)
    spent = proved(events_of(beside, replaced=_replaced(unit)), delta).value
    if beside and spent >= epsilon:
        raise ValueError(
            f"epsilon must be above {spent:.4g}, which releases of their own spend at their own noise, got {epsilon}; "
            "ask for more, or give those more noise"
        )
    sigma = _searched(epsilon, delta, unit, precision, beside)
    try:
        return checked_multiplier(sigma)
    except ValueError:
        way_out = "ask for more" if sigma > 1 else "ask for less, it is proved by hardly any noise"
        raise ValueError(f"epsilon {epsilon} needs a noise multiplier of {sigma:.1e}; {way_out}") from None


def _searched(
    epsilon: float, delta: float, unit: tuple[Entry, ...], precision: float, beside: tuple[Entry, ...]
) -> float:
    """Returns the least multiplier that proves `epsilon`, up to `precision`.

    Args:
        epsilon: target, in nats.
        delta: in (0, 1).
        unit: the steps at noise multiplier 1.
        precision: relative.
        beside: releases besides the steps, at fixed multipliers.
    """
    # Without subsampling, the composition of all Gaussians is a single Gaussian, whose 1 / sigma² is the sum of theirs;
    # so the steps may spend the total less `spent`. Subsampling only lowers epsilon, so that multiplier is enough with
    # it too.
    total = gaussian_multiplier(epsilon, delta) ** -2
    spent = math.fsum(e.count / e.noise_multiplier**2 for e in events_of(beside, replaced=_replaced(unit)))
    # Number of Gaussians charged for the steps: under shuffle and partition, a single Gaussian per epoch.
    events = events_of(unit)
    steps_charged = math.fsum(e.count / e.noise_multiplier**2 for e in events)
    enough = math.sqrt(steps_charged / (total - spent)) * (1 + 1e-9) if total > spent else math.inf  # rounded up
    if all(e.sample_rate == 1 for e in events) and not any(entry.sampling.amplifies for entry in beside):
        return enough

    def charged(log_sigma: float) -> list[Gaussian]:
        sigma = math.exp(log_sigma)
        return events_of([*beside, *(replace(e, noise_multiplier=sigma) for e in unit)])

    # Epsilon is close to a power of sigma, so on log scales the root finder needs few evaluations.
    def excess(log_sigma: float) -> float:
        return math.log(max(proved(charged(log_sigma), delta).value, 1e-12) / epsilon)

    def excess_rdp(log_sigma: float) -> float:
        # Under the closest Poisson sampling: except for subsets of fixed size, RDP has no bound for other samplers that
        # is a useful starting point.
        epsilon_rdp = rdp_epsilon(merged([e.as_poisson for e in charged(log_sigma)]), delta)
        return math.log(max(epsilon_rdp, 1e-12) / epsilon)

    least, most = math.log(LEAST_MULTIPLIER), math.log(LARGEST_MULTIPLIER)
    high = min(math.log(enough), most)
    if excess_rdp(least) < 0:
        return math.exp(least) / 2  # the caller refuses it by name
    # RDP is quick and, for Poisson sampling, an upper bound: its multiplier is enough, and the least a little below.
    if excess_rdp(high) < 0:
        high = cast(float, brentq(excess_rdp, least, high, xtol=precision)) + precision
    elif excess(high) > 0:
        return math.inf

    def excess_coarsely(log_sigma: float) -> float:
        interval = max(DISCRETISATION, min(20 * DISCRETISATION, epsilon / 100)) * max(1.0, epsilon / 10)
        coarse_epsilon = pld_epsilon(merged(charged(log_sigma)), delta, interval)
        return math.log(max(coarse_epsilon, 1e-12) / epsilon)

    # PLD on a coarse grid is many times as fast and hardly looser; one or two Newton steps lead from its root to the
    # least multiplier on the fine grid.
    if not quick(merged(charged(high))) or excess_coarsely(high + 0.2) > 0:
        return math.exp(_crossing(excess, high, precision))
    root = _crossing(excess_coarsely, high, precision)
    slope = (excess_coarsely(root) - excess_coarsely(root + 0.05)) / 0.05
    for _ in range(4):
        over = excess(root)
        if -slope * precision <= over <= 0:
            return math.exp(root)
        if not abs(over) < 0.1 * slope:  # the coarse grid misleads
            break
        # Newton's step with the slope of the coarse curve, and slightly more, to the private side.
        root += over / slope + precision / 4
    return math.exp(_crossing(excess, high, precision))


@lru_cache(maxsize=256)
def noise_within(
    limit: MembershipLimit, unit: tuple[Entry, ...], *, precision: float = 1e-3, beside: tuple[Entry, ...] = ()
) -> float:
    """Returns the least noise multiplier under which no membership test exceeds a limit, up to `precision`.

    Args:
        limit: limit on the tests.
        unit: the steps at noise multiplier 1.
        precision: relative.
        beside: releases besides the steps, at fixed multipliers.

    Raises:
        ValueError: if no practical multiplier does.
    """
    if beside and limit.exceeded(events_of(beside, replaced=_replaced(unit))) >= 0:
        raise ValueError(
            f"{limit.words} must be above what releases of their own allow at their own noise; ask for more, or give "
            "those more noise"
        )

    def exceeded(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        return limit.exceeded(events_of([*beside, *(replace(e, noise_multiplier=sigma) for e in unit)]))

    # Without subsampling, all releases compose to a single Gaussian; subsampling only lowers the leakage.
    events = events_of(unit)
    spent = math.fsum(e.count / e.noise_multiplier**2 for e in events_of(beside, replaced=_replaced(unit)))
    remaining = limit.shift**2 - spent
    most = math.log(LARGEST_MULTIPLIER)
    steps_charged = math.fsum(e.count / e.noise_multiplier**2 for e in events)
    high = min(most, 0.5 * math.log(steps_charged / remaining) + 1e-8) if remaining > 0 else most
    way_out = f"{limit.words} needs a noise multiplier above {LARGEST_MULTIPLIER:.0e}; ask for more"
    if high == most and exceeded(high) > 0:
        raise ValueError(way_out)
    while exceeded(high) > 0:  # the limit may be exceeded by rounding alone
        high += 1e-6
    low, step = high - precision, 0.1
    while exceeded(low) <= 0:
        high, low, step = low, low - step, 2 * step
        if low < math.log(LEAST_MULTIPLIER):
            raise ValueError(f"{limit.words} is proved by hardly any noise; ask for less")
    if high - low > precision:
        low = cast(float, brentq(exceeded, low, high, xtol=precision / 2))
        while exceeded(low) > 0:
            low += precision / 2
        high = low
    return checked_multiplier(math.exp(high))


def _replaced(unit: Sequence[Entry]) -> bool:
    """Returns whether these steps, and so all other releases of the run, are charged under replace-one."""
    return any(entry.sampling.relation == "replace_one" for entry in unit)


def _crossing(excess: Callable[[float], float], near: float, precision: float) -> float:
    """Returns the root of a falling function, up to `precision`, on the side where the function is negative.

    Args:
        excess: the function.
        near: start of the search.
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
