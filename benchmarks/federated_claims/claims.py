"""The claims that records decide: T1 to T5, T8 to T10, each as signed differences of a setting.

T1 to T9 are the PCDP-SGD paper's, T10 is ours. Methods that were not measured are named, and the verdict is on the
others. "Good" and "best" of the paper are read as: better than FedAvg, and than every other method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from .cells import SuiteResults
from .comparisons import PairedDifference, PaperVerdict, best_of, paired, verdict_on

CLAIMS = {
    "T1": "i.i.d.: FedPCDP beats FedAvg, FedProx and FedLRS",
    "T2": "i.i.d.: FedPCDP beats FedPDP",
    "T3": "i.i.d.: FedPCDP loses less from the weakest noise to the strongest",
    "T4": "clients that are unlike: FedPCDP is best, with noise and without",
    "T5": "clients that are unlike: MOON is good without noise",
    "T6": "corrections by past gradients carry noise: SCAFFOLD's mean has 2 - m/K times FedAvg's variance",
    "T7": "FedPCDP sends 53 times fewer bytes",
    "T8": "projection narrows the clients' variance: relative drift without noise",
    "T9": "projecting the message alone loses more than projecting first (PFA simplified)",
    "T10": "the best private method beats training on the public pool alone, at epsilon 0",
}
"""Claim -> its sentence."""

OURS = "fed_pcdp"
BASELINES = ("fed_avg", "fed_prox", "fed_lrs")


@dataclass(frozen=True, kw_only=True)
class ClaimResult:
    """A claim in a setting.

    Attributes:
        claim: key of `CLAIMS`.
        setting: name of the setting.
        verdict: on the claim.
        comparisons: differences that it rests on.
        remarks: what was not measured, and how it is read.
        facts: further measured numbers, in words.
        partial: whether the verdict rests on a part: seeds are missing, or, for `holds`, differences.
    """

    claim: str
    setting: str
    verdict: PaperVerdict
    comparisons: tuple[PairedDifference, ...] = ()
    remarks: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    partial: bool = False


def by_records(setting: SuiteResults) -> list[ClaimResult]:
    """Returns the verdicts of a setting's records; `n/a` with a reason where they do not decide a claim."""
    return [
        _decided(claim, setting, *differences(setting))
        for claim, differences in _DIFFERENCES.items()
        if _concerns(claim, setting)
    ]


def _concerns(claim: str, setting: SuiteResults) -> bool:
    alike = setting.split == "iid"
    return {"T1": alike, "T2": alike, "T3": alike, "T4": not alike, "T5": not alike}.get(claim, True)


def _decided(claim: str, setting: SuiteResults, comparisons: list[PairedDifference], remarks: list[str]) -> ClaimResult:
    measured = tuple(comparison for comparison in comparisons if comparison.n)
    missing = "; ".join(comparison.name for comparison in comparisons if not comparison.n)
    # Seeds may be missing because a run failed, and those that did not fail are no fair sample.
    lacking = [
        f"{comparison.name}: {', '.join(map(str, seeds))}"
        for comparison in measured
        if (seeds := sorted(setting.seeds - {*comparison.differences}))
    ]
    verdict = verdict_on(measured)
    unmeasured = bool(missing) or any(remark.startswith("not measured") for remark in remarks)
    return ClaimResult(
        claim=claim,
        setting=setting.suite,
        verdict=verdict,
        comparisons=measured,
        remarks=(
            *remarks,
            *([f"not measured: {missing}"] if missing else []),
            *([f"seeds left out, because one of the two has no value: {'; '.join(lacking)}"] if lacking else []),
        ),
        partial=(verdict == "holds" and unmeasured) or (verdict in ("holds", "does not hold") and bool(lacking)),
    )


def _ahead(setting: SuiteResults, names: tuple[str, ...], noises: list[float]) -> list[PairedDifference]:
    """Returns FedPCDP's accuracy less those of others, at every noise multiplier."""
    return [
        paired(f"{OURS} - {name}, noise {noise:g}", setting.of(noise, OURS), setting.of(noise, name))
        for noise, name in product(noises, names)
    ]


def _noisy(setting: SuiteResults) -> list[float]:
    return [noise for noise in setting.noises if noise > 0]


def _t1(setting: SuiteResults) -> tuple[list[PairedDifference], list[str]]:
    return _ahead(setting, BASELINES, _noisy(setting)), []


def _t2(setting: SuiteResults) -> tuple[list[PairedDifference], list[str]]:
    return _ahead(setting, ("fed_pdp",), _noisy(setting)), []


def _t3(setting: SuiteResults) -> tuple[list[PairedDifference], list[str]]:
    noises = _noisy(setting)
    if len(noises) < 2:
        return [], ["needs two noise multipliers above 0"]
    low, high = noises[0], noises[-1]

    def loss(method: str) -> dict[int, float]:
        weak, strong = setting.of(low, method), setting.of(high, method)
        return {seed: weak[seed] - strong[seed] for seed in sorted({*weak} & {*strong})}

    return [
        paired(f"loss of {name} - loss of {OURS}, noise {low:g} to {high:g}", loss(name), loss(OURS))
        for name in (*BASELINES, "fed_pdp")
    ], ["a method near chance at the weakest noise has little to lose"]


def _t4(setting: SuiteResults) -> tuple[list[PairedDifference], list[str]]:
    comparisons = [
        comparison
        for noise in setting.noises
        for comparison in _ahead(setting, tuple(n for n in setting.names(noise) if n != OURS), [noise])
    ]
    missing = ["not measured with noise"] if not _noisy(setting) else []
    missing += ["not measured without noise"] if 0.0 not in setting.noises else []
    return comparisons, missing


def _t5(setting: SuiteResults) -> tuple[list[PairedDifference], list[str]]:
    moon, plain = setting.of(0.0, "moon"), setting.of(0.0, "fed_avg")
    return [paired("moon - fed_avg, noise 0", moon, plain)], ["good is read as better than FedAvg"]


def _t8(setting: SuiteResults) -> tuple[list[PairedDifference], list[str]]:
    plain, projected = (setting.of(0.0, name, "relative_drift") for name in ("fed_avg", OURS))
    return [paired(f"relative drift of fed_avg - of {OURS}, noise 0", plain, projected)], []


def _t9(setting: SuiteResults) -> tuple[list[PairedDifference], list[str]]:
    return _ahead(setting, ("pfa",), _noisy(setting)), ["accuracy; the norm itself is measured directly"]


def _t10(setting: SuiteResults) -> tuple[list[PairedDifference], list[str]]:
    comparisons, unproved = [], set[str]()
    for noise in _noisy(setting):
        private = [name for name in setting.names(noise) if setting.methods[noise, name].proves]
        unproved.update({*setting.names(noise)} - {*private})
        best = best_of(
            [
                paired(f"{name} - public_only, noise {noise:g}", setting.of(noise, name), setting.public_only)
                for name in private
            ]
        )
        if best is not None:
            comparisons.append(best)
    remarks = ["the method with the largest mean, whose p-value counts the choice, and against which all must be worse"]
    return comparisons, remarks + [f"proves nothing, so it is no private method: {name}" for name in sorted(unproved)]


_DIFFERENCES: dict[str, Callable[[SuiteResults], tuple[list[PairedDifference], list[str]]]] = {
    "T1": _t1,
    "T2": _t2,
    "T3": _t3,
    "T4": _t4,
    "T5": _t5,
    "T8": _t8,
    "T9": _t9,
    "T10": _t10,
}
