"""The privacy ledger: Gaussian events of the executed plans, and the epsilon of their composition.

Events are derived from the executed plans; a method cannot declare a guarantee. Dry runs predict the cost of a run
(`training/calibration.py`).

Guarantee:
    Relation and sampler as in `sampling.py`. With independent noise, a step is a Gaussian at the defense's noise
    multiplier; a stream of correlated noise is charged as a whole (`participation.py`). If a block is unbounded or has
    no noise, nothing is proved and epsilon is infinite. The trial of a step is another Gaussian, on its own Poisson
    sample, whether the step is kept or not. A step that an interrupted run may have taken without a record, and that is
    taken again, is charged for each time (`Ledger.record`). Epsilon is for an observer of all releases; an observer who
    sees less, such as the final model only, learns no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..plan.defense import NoisyPlan, checked_multiplier
from ..plan.noise_correlation import NoiseStrategy, StrategyRow
from .accounting import TIME_LIMIT
from .accounting import epsilon as proved
from .events import Gaussian
from .participation import amplified, stream_events
from .sampling import Sampling, full, poisson
from .tradeoff import NOTHING_PROVED, TradeOff, of_events, of_pair

_ONCE = ("shuffle", "partition", "random_allocation", "cyclic")
"""Samplers under which a record is used at most once in an epoch, or in a cycle of its groups."""
_EXACT_LOSS = 1e-12
"""Relative reduction of the multiplier at which discrete Gaussian noise is charged: see `_own_events`."""


@dataclass(frozen=True)
class Entry:
    """Consecutive steps with the same charge.

    Attributes:
        first: index of the first step.
        steps: number of steps.
        noise_multiplier: multiplier of each step as a Gaussian, all times together that it was taken; None if nothing
            is proved.
        sampling: sampler of the steps.
        reason: reason why nothing is proved; empty otherwise.
        one_off: whether the entry is a one-off release on all the data instead of steps.
        exact: whether the noise is a discrete Gaussian on sums of integers.
        row: position of the first step in a stream of correlated noise; None for independent noise.
        trial: whether the entry is the trials of steps instead of steps.
        times: number of times that each step was taken on the same batch: more than once after an interruption.
    """

    first: int
    steps: int
    noise_multiplier: float | None
    sampling: Sampling
    reason: str = ""
    one_off: bool = False
    exact: bool = False
    row: StrategyRow | None = None
    trial: bool = False
    times: int = 1

    def __post_init__(self) -> None:
        if self.noise_multiplier is not None and not checked_multiplier(self.noise_multiplier) > 0:
            raise ValueError("an event without noise must have no noise multiplier, and a reason, got 0")

    def goes_on_with(self, new: Entry) -> bool:
        """Returns whether an entry of a single step continues this entry."""
        # Steps must be consecutive, because the epochs of an entry are computed from `first` and `steps`.
        if replace(self, first=new.first, steps=1, row=new.row) != new or self.first + self.steps != new.first:
            return False
        if self.row is None or new.row is None:
            return self.row is new.row
        ours, theirs = self.row, new.row
        return ours.strategy == theirs.strategy and ours.position + self.steps == theirs.position

    @property
    def own_noise(self) -> bool:
        """True for one-off releases and trials, which have their own noise multiplier."""
        return self.one_off or self.trial


@dataclass(frozen=True)
class Claim:
    """The (epsilon, delta)-DP guarantee of a run.

    Attributes:
        epsilon: in nats; infinite if nothing is proved.
        epsilon_rdp: epsilon by RDP.
        delta: additive slack of the guarantee.
        relation: neighbouring relation: `add_remove`, `zero_out` or `replace_one`.
        unit: privacy unit.
        sampling: name of the sampler.
        sample_rate: rate of the sampler.
        accountant: accountant of epsilon.
        as_if_poisson: the figure that papers often print for `shuffle`, `partition` and `fixed`: epsilon under
            `add_remove` as if the same steps had run under Poisson sampling. It is not proved for the run. None for
            other samplers and for correlated noise.
        events: the events in words.
        reason: reason why epsilon is infinite; empty otherwise.
        assumes: assumptions beyond the mathematics, a sentence each.
        unverified: components of the run from outside leakbench, whose privacy properties the claim assumes and nothing
            checks; a sentence each.
        gaussians: the events from which epsilon was computed; None if only a pair of epsilon and delta is known.
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
    gaussians: tuple[Gaussian, ...] | None = field(default=None, repr=False)

    @property
    def first_line(self) -> str:
        """The claim in a line, which ends with "unverified" if it has unverified components."""
        shown = "∞" if math.isinf(self.epsilon) else f"{self.epsilon:.4g}"
        about = f"{self.relation}, unit: {self.unit}, sampling: {self.sampling}"
        return f"epsilon {shown} at delta {self.delta:g} ({about})" + (", unverified" if self.unverified else "")

    def __str__(self) -> str:
        """Returns the first line and the unverified components."""
        return "\n".join([self.first_line, *(f"unverified: {sentence}" for sentence in self.unverified)])

    @property
    def trade_off(self) -> TradeOff:
        """Trade-off function of the claim: a bound on every membership test; slow at the first access."""
        if math.isinf(self.epsilon):
            return NOTHING_PROVED
        if self.gaussians is None:
            return of_pair(self.epsilon, self.delta)
        return of_events(self.gaussians, self.delta)

    def epsilon_at(self, delta: float, *, replaced: bool = False) -> float:
        """Returns epsilon at another delta, in nats, by the accountants; infinite if nothing is proved.

        Args:
            delta: in (0, 1).
            replaced: whether neighbours differ by a replaced record, instead of an added or removed record.
        """
        replaced = replaced and not self._of_replacement
        if replaced or math.isinf(self.epsilon) or self.gaussians is None:
            return self.trade_off.epsilon_at(delta, replaced=replaced)
        return proved(self.gaussians, delta).value

    def delta_at(self, epsilon: float) -> float:
        """Returns delta at another epsilon; 1 if nothing is proved.

        Args:
            epsilon: nats, at least 0.
        """
        return self.trade_off.delta_at(epsilon)

    def beta_at(self, alpha: float, *, replaced: bool = False) -> float:
        """Returns the smallest type II error of any membership test at a type I error; 0 if nothing is proved.

        Args:
            alpha: type I error, in [0, 1].
            replaced: whether the test is between a record and its replacement.
        """
        return self.trade_off.beta_at(alpha, replaced=replaced and not self._of_replacement)

    def tpr_at(self, fpr: float, *, replaced: bool = False) -> float:
        """Returns the largest true positive rate of any membership test; 1 if nothing is proved.

        Args:
            fpr: false positive rate, in [0, 1].
            replaced: as for `beta_at`.
        """
        return self.trade_off.tpr_at(fpr, replaced=replaced and not self._of_replacement)

    @property
    def _of_replacement(self) -> bool:
        """True if the events hold under replace-one already."""
        return self.relation == "replace_one"

    @property
    def advantage(self) -> float:
        """The largest TPR - FPR of any membership test; 1 if nothing is proved."""
        return self.trade_off.advantage


@dataclass
class Ledger:
    """Charges for all releases of a run.

    Attributes:
        sampling: sampler of the steps.
        entries: charges in order of the steps; consecutive steps with equal charges are a single entry.
        unrecorded: ranges (first, end) of steps that an interrupted run may have taken without a record, to be charged
            once more when they are taken again.
    """

    sampling: Sampling
    entries: list[Entry] = field(default_factory=list)
    unrecorded: list[tuple[int, int]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Number of steps recorded."""
        return sum(entry.steps for entry in self.entries if not entry.own_noise)

    def record(
        self,
        plan: NoisyPlan,
        *,
        step: int,
        sampling: Sampling | None = None,
        one_off: bool = False,
        exact: bool = False,
        trial: bool = False,
    ) -> None:
        """Charges an executed plan.

        A step that is taken again, with fresh noise, has the same batch as before, so both releases together are a
        Gaussian on a contribution whose norm is larger by sqrt(2): at multiplier sigma / sqrt(2) under the same
        sampler, and sigma / sqrt(n) for n times. The steps in between may depend on the first release: a Gaussian of
        multiplier sigma / sqrt(n) can be split into n adaptive ones, and under a sampler this is the concurrent
        composition of interactive mechanisms, which costs as much as their composition (Vadhan & Zhang,
        "Concurrent Composition Theorems for Differential Privacy", STOC 2023; Lyu, "Composition Theorems for
        Interactive Differential Privacy", NeurIPS 2022, for RDP). Assumes that what a step releases, and at which
        multiplier, does not follow from earlier releases: the charge is that of the last time.

        Correlated noise: the releases of a stream Y = X + C^-1 Z amount to C X + Z, and rows that are taken again add
        rows of C X with fresh noise, so the whole stream is charged at the smallest of its multipliers, with the
        sensitivity of |C| X: after n passes a row was released for n histories, each of which moves it by at most the
        row of |C|.

        Args:
            plan: executed plan.
            step: index of the step.
            sampling: sampler, if different from the run's.
            one_off: whether it is a one-off release on all the data, which no sampler amplifies.
            exact: whether the noise was a discrete Gaussian on sums of integers.
            trial: whether it is the trial of a step.

        Raises:
            ValueError: for correlated noise in a one-off release or a trial, or in a step that does not continue its
                stream.
        """
        self._refuse_broken_stream(plan.plan.correlated, step, own_noise=one_off or trial)
        sampling = full() if one_off else sampling or self.sampling
        reason = ""
        if math.isinf(plan.plan.sensitivity):
            reason = "one example's contribution is not bounded"
        elif plan.noise_multiplier == 0:
            reason = "no noise is added"
        # Blocks whose shares sum to 1 are a single Gaussian at the step's own multiplier.
        sigma = None if reason else plan.noise_multiplier / plan.plan.sensitivity
        if sigma is not None and math.isclose(sigma, plan.noise_multiplier, rel_tol=1e-9):
            sigma = plan.noise_multiplier  # shares sum to 1 up to rounding; equal events must compare equal
        times = 1 + sum(first <= step < end for first, end in self.unrecorded)
        if sigma is not None and times > 1:
            sigma /= math.sqrt(times)
        row = plan.plan.correlated
        new = Entry(step, 1, sigma, sampling, reason, one_off, exact and not reason, row, trial, times)
        # Steps and trials alternate: each entry extends the last of its kind.
        same_kind = (i for i in reversed(range(len(self.entries))) if self.entries[i].trial == trial)
        place = next(same_kind, None)
        last = None if place is None else self.entries[place]
        if last and place is not None and last.goes_on_with(new):
            self.entries[place] = replace(last, steps=last.steps + 1)
        else:
            self.entries.append(new)

    def _refuse_broken_stream(self, row: StrategyRow | None, step: int, *, own_noise: bool) -> None:
        """Refuses gaps in a stream of correlated noise, because it is charged as a whole, from first to last step."""
        if row is None:
            return
        if own_noise:
            raise ValueError("a release of its own, or a trial, must have independent noise, got correlated noise")
        last = next((entry for entry in reversed(self.entries) if not entry.own_noise), None)
        # Steps may be skipped if each is examined separately, and then has independent noise.
        if row.position == 0 or last is None or last.first + last.steps != step:
            return
        if last.row is None or (last.row.strategy, last.row.position + last.steps) != (row.strategy, row.position):
            raise ValueError(
                f"step {step}, at position {row.position} of a stream of correlated noise, must follow the step before "
                f"it in the stream, and step {step - 1} is none of it; begin a stream at position 0"
            )

    def knowing(self, step: int) -> Ledger:
        """Returns the ledger for an attacker who knows that the record took part in a step.

        The step is charged without amplification. Releases before and after it keep their charges, because they depend
        on the record too.

        Args:
            step: index of the step.
        """
        if any(entry.row is not None for entry in self.entries):  # a stream is charged as a whole
            return Ledger(self.sampling, [replace(entry, sampling=full()) for entry in self.entries])
        entries: list[Entry] = []
        for e in self.entries:
            last = e.first + e.steps
            if e.own_noise or not (e.sampling.amplifies and e.first <= step < last):
                entries.append(e)
                continue
            parts = (
                replace(e, steps=step - e.first),
                replace(e, first=step, steps=1, sampling=full()),
                replace(e, first=step + 1, steps=last - step - 1),
            )
            entries += [part for part in parts if part.steps]
        return Ledger(self.sampling, entries)

    def claim(self, delta: float, *, time_limit: float = TIME_LIMIT, unit: str = "example") -> Claim:
        """Returns the guarantee of all releases recorded so far.

        Args:
            delta: in (0, 1).
            time_limit: seconds for the PLD accountant when it is slow.
            unit: privacy unit that the rows of the executed plans were.
        """
        s = self.sampling
        # A Gaussian under add/remove also holds under zero-out, not the other way round. With twice the sensitivity it
        # holds under replace-one, which implies zero-out.
        relations = {s.relation, *(entry.sampling.relation for entry in self.entries)}
        relation = next(name for name in ("replace_one", "zero_out", "add_remove") if name in relations)
        words = tuple(_words(self.entries))
        shared = {
            "delta": delta,
            "relation": relation,
            "unit": unit,
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
        gaussians = tuple(events_of(self.entries, replaced=relation == "replace_one"))
        guarantee = proved(gaussians, delta, time_limit=time_limit)
        as_if = None
        if s.kind in ("shuffle", "partition", "fixed") and all(e.row is None for e in self.entries):
            believed = [replace(e, sampling=poisson(e.sampling.rate)) for e in self.entries]
            as_if = proved(events_of(believed), delta, time_limit=time_limit).value
        return Claim(
            epsilon=guarantee.value,
            epsilon_rdp=guarantee.rdp,
            accountant=guarantee.accountant,
            as_if_poisson=as_if,
            events=words,
            gaussians=gaussians,
            **shared,
        )


def events_of(entries: Sequence[Entry], *, replaced: bool = False) -> list[Gaussian]:
    """Returns the entries as Gaussian events under their samplers, all under the same neighbouring relation.

    Args:
        entries: entries, none without a guarantee.
        replaced: whether events must hold under replace-one, for any sampler; implied if an entry's sampler has this
            relation.
    """
    replaced = replaced or any(entry.sampling.relation == "replace_one" for entry in entries)
    events = _own_events(entries)
    return [event.of_replacement for event in events] if replaced else list(events)


def _own_events(entries: Sequence[Entry]) -> Iterator[Gaussian]:
    """Yields the entries as Gaussian events under add/remove or zero-out.

    Discrete Gaussian noise of scale s on integers, in many dimensions at once, is charged as a Gaussian of scale
    sqrt(s^2 - 8), because it nearly is post-processing of it: draw z from that Gaussian, then an integer k with
    probability proportional to exp(-(k - z)^2 / 16). By Poisson's summation formula the sum of these weights over k is
    the same for every z, and that of the discrete Gaussian's weights for every integer shift, up to a factor 1 +- 2
    exp(-16 pi^2) (1 + 10^-60); so probabilities differ by a factor of exp(10^-67) per released number, for any sampler
    and composition. At 2^30 units to a standard deviation, the 8 is a relative loss of 4e-18. `_EXACT_LOSS` exceeds
    both for any feasible number of releases.
    """
    # (sampler, epoch or cycle) -> smallest multiplier among the steps in which a record may have taken part
    worst: dict[tuple[Sampling, int], float] = {}
    # (strategy, step in which the stream begins) -> entries of the stream, which are charged together
    streams: dict[tuple[NoiseStrategy, int], list[Entry]] = {}
    for e in entries:
        sigma = e.noise_multiplier
        if sigma is None:
            raise ValueError("an entry without a guarantee has no Gaussian event")
        if e.exact:
            sigma *= 1 - _EXACT_LOSS
        s = e.sampling
        if e.row is not None:
            streams.setdefault((e.row.strategy, e.first - e.row.position), []).append(
                replace(e, noise_multiplier=sigma)
            )
        elif s.kind in _ONCE:
            turns = s.groups if s.kind == "cyclic" else s.steps_per_epoch
            # Parallel composition: batches of an epoch are disjoint, so it costs as much as its least noisy step.
            for turn in range(e.first // turns, (e.first + e.steps - 1) // turns + 1):
                worst[s, turn] = min(sigma, worst.get((s, turn), math.inf))
        elif s.kind in ("poisson", "truncated_poisson", "fixed"):
            # `fixed` amplifies under replace-one only; `events_of` converts the event.
            yield Gaussian(s.rate, sigma, e.steps, most=s.most, examples=s.examples)
        else:
            yield Gaussian(1.0, sigma, e.steps)
    for (s, _), sigma in worst.items():
        allocated = s.kind == "random_allocation" and s.rate < 1
        rate = s.rate if allocated else s.rate_in_group if s.kind == "cyclic" else 1.0
        yield Gaussian(rate, sigma, 1, allocated=allocated)
    for (strategy, begun), parts in streams.items():
        yield from _of_stream(strategy, begun, parts)


def _of_stream(strategy: NoiseStrategy, begun: int, parts: list[Entry]) -> list[Gaussian]:
    """Returns the events of a stream of correlated noise, from first to last step, at its smallest multiplier."""
    first, last = min(e.first for e in parts), max(e.first + e.steps for e in parts)
    samplings = {e.sampling for e in parts}
    sampling = samplings.pop() if len(samplings) == 1 else full()
    sigma = min(e.noise_multiplier or 0.0 for e in parts)
    retaken = any(e.times > 1 for e in parts)
    places = {"first": first, "position": first - begun, "steps": last - first}
    return stream_events(strategy, sampling, sigma, **places, retaken=retaken)


def _words(entries: list[Entry]) -> Iterator[str]:
    how = {
        "poisson": "on a Poisson sample of rate {rate:.4g}",
        "shuffle": "on shuffled batches, each record at most once in {per_epoch} steps",
        "partition": "on fixed batches, each record at most once in {per_epoch} steps",
        "fixed": "on subsets of fixed size drawn without replacement, {rate:.4g} of the records",
        "full": "on all records",
        "truncated_poisson": "on a Poisson sample of rate {rate:.4g}, at most {most} of {examples} records",
        "random_allocation": "on batches that each record joins once in {per_epoch} steps, at random",
        "cyclic": "on {groups} groups in turn, a Poisson sample of rate {in_group:.4g} of one",
    }
    for e in entries:
        s = e.sampling
        known = {"rate": s.rate, "per_epoch": s.steps_per_epoch, "most": s.most, "examples": s.examples}
        sampler = how[s.kind].format(**known, groups=s.groups, in_group=s.rate_in_group)
        kind = "discrete Gaussian" if e.exact else "Gaussian"
        mechanism = (
            f"no guarantee ({e.reason})" if e.noise_multiplier is None else f"{kind}, noise {e.noise_multiplier:.4g}"
        )
        if e.times > 1:
            mechanism += f" for {e.times} times together"
        if e.row is not None:
            mechanism += f", correlated over steps ({type(e.row.strategy).__name__})"
            sampler += "" if amplified(e.row.strategy, s) else ", charged without amplification"
        yield f"{e.steps} x {mechanism} {sampler}"
