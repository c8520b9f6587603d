"""`leakbench epsilon`: epsilon of a planned run and its bounds on membership tests, from the defense's plans."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Any, get_args

import typer

from .options import OK, Json, Overrides, print_json


def epsilon(
    defense: Annotated[str, typer.Option(help="Name of a defense.")],
    sample_rate: Annotated[float, typer.Option(help="Expected batch / number of examples.")],
    steps: Annotated[int, typer.Option(help="Number of steps.")],
    delta: Annotated[float, typer.Option(help="Probability that epsilon may fail.")],
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise standard deviation / sensitivity; or --calibrate.")
    ] = None,
    calibrate: Annotated[
        str, typer.Option(help="The least noise for epsilon=3, advantage=0.1 or tpr=0.05@0.01 (TPR at FPR).")
    ] = "",
    sampling: Annotated[
        str,
        typer.Option(help="poisson, truncated_poisson, random_allocation, cyclic, shuffle, partition, fixed or full."),
    ] = "poisson",
    groups: Annotated[int, typer.Option(help="Of cyclic sampling: parts of the examples that take turns.")] = 1,
    largest_batch: Annotated[int, typer.Option(help="Of truncated_poisson sampling.")] = 0,
    examples: Annotated[int, typer.Option(help="Of truncated_poisson sampling: records it draws from.")] = 0,
    advantage: Annotated[
        bool, typer.Option("--advantage", help="Also the largest TPR - FPR and AUC of any membership test.")
    ] = False,
    tpr_at_fpr: Annotated[
        list[float] | None, typer.Option(help="Also the largest TPR of any membership test at this FPR; repeat it.")
    ] = None,
    delta_at: Annotated[list[float] | None, typer.Option(help="Also delta at this epsilon; repeat it.")] = None,
    settings: Overrides = None,
    as_json: Json = False,
) -> int:
    """Computes epsilon of a planned run from the defense's own plans, and its bounds on any membership test."""
    import torch

    from leakbench.defenses.core import Sampling, predicted
    from leakbench.defenses.core import calibrate as calibrated

    from ..catalog import methods as catalog
    from ..catalog.messages import CatalogError, in_one_line, no_such
    from ..catalog.plugins import place
    from ..catalog.settings import parse_settings
    from ..suite.task import SamplingName

    torch.set_num_threads(1)
    if (noise_multiplier is None) == (not calibrate):
        raise ValueError("one of --noise-multiplier and --calibrate must be given")
    limits: dict[str, Any] = _wanted(calibrate, delta) if calibrate else {}
    if noise_multiplier is not None and not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise ValueError(f"noise_multiplier must be zero or a positive number, got {noise_multiplier}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    if sampling not in (known := get_args(SamplingName)):
        raise ValueError(no_such("sampling", sampling, known))
    if bad := [rate for rate in tpr_at_fpr or () if not 0 <= rate <= 1]:
        raise ValueError(f"tpr_at_fpr must be a rate in [0, 1], got {bad[0]}")
    if bad := [value for value in delta_at or () if not 0 <= value < math.inf]:
        raise ValueError(f"delta_at must be a finite epsilon of at least 0, got {bad[0]}")
    built = catalog.defense(defense, parse_settings(settings or []), noise_multiplier=noise_multiplier)
    try:
        drawn = Sampling(sampling, sample_rate, groups, largest_batch, examples)  # pyright: ignore[reportArgumentType]  refused there by name
        if limits:
            built = calibrated(built, sampling=drawn, steps=steps, **limits)
        account = predicted(built, sampling=drawn, steps=steps)
    except Exception as error:
        if not catalog.foreign("defenses", defense):
            raise
        raise CatalogError(
            f"{catalog.origin('defenses', defense)} raised {in_one_line(error)}{place(error, defense)}"
        ) from error
    claim = account.ledger.claim(delta)
    # Nobody checked that third-party code keeps its promises, so its claim is marked unverified, as in a record.
    doubts = [sentence for sentence in account.remarks.values() if sentence]
    allowed = _allowed(claim, advantage=advantage, fprs=tpr_at_fpr or [], epsilons=delta_at or [])
    if as_json:
        print_json(_document(defense, built, claim, steps) | allowed | ({"unverified": doubts} if doubts else {}))
        return OK
    if limits:
        print(f"noise   {built.noise_multiplier:.6g}, calibrated for {calibrate}")
    _print(replace(claim, unverified=tuple(doubts)))
    _print_allowed(allowed)
    return OK


# Any: the types are in `leakbench.defenses.core`, whose import takes seconds, too long for a command's help.
def _document(name: str, defense: Any, claim: Any, steps: int) -> dict[str, Any]:
    proved = math.isfinite(claim.epsilon)
    return {
        "defense": name,
        "noise_multiplier": defense.noise_multiplier,
        "epsilon": claim.epsilon if proved else None,
        "epsilon_rdp": claim.epsilon_rdp if proved else None,
        "delta": claim.delta,
        "relation": claim.relation,
        "unit": claim.unit,
        "sampling": claim.sampling,
        "sample_rate": claim.sample_rate,
        "steps": steps,
        "accountant": claim.accountant,
        "as_if_poisson": claim.as_if_poisson,
        "events": list(claim.events),
        "reason": claim.reason or None,
    }


def _wanted(text: str, delta: float) -> dict[str, Any]:
    """Parses the target of `--calibrate` into arguments of `calibrate`."""
    name, _, value = text.partition("=")
    try:
        if name == "epsilon":
            return {"epsilon": float(value), "delta": delta}
        if name == "advantage":
            return {"advantage": float(value)}
        if name == "tpr":
            tpr, _, fpr = value.partition("@")
            return {"tpr": float(tpr), "fpr": float(fpr)}
    except ValueError:
        pass
    raise ValueError(f"calibrate must be epsilon=NUMBER, advantage=NUMBER or tpr=NUMBER@NUMBER, got {text!r}")


def _allowed(claim: Any, *, advantage: bool, fprs: list[float], epsilons: list[float]) -> dict[str, Any]:
    """Returns the requested bounds of the claim besides its epsilon; empty if none are requested."""
    bounds: dict[str, Any] = {}
    if advantage:
        bounds |= {"advantage": claim.advantage, "auc": claim.trade_off.auc}
    if fprs:
        bounds["tpr_at_fpr"] = [{"fpr": fpr, "tpr": claim.tpr_at(fpr)} for fpr in fprs]
    if epsilons:
        bounds["delta_at"] = [{"epsilon": epsilon, "delta": claim.delta_at(epsilon)} for epsilon in epsilons]
    return bounds | {"allowed_by": claim.trade_off.by} if bounds else {}


def _print_allowed(allowed: dict[str, Any]) -> None:
    if not allowed:
        return
    if "advantage" in allowed:
        print(f"tests   advantage at most {allowed['advantage']:.4g}, AUC at most {allowed['auc']:.4g}")
    for bound in allowed.get("tpr_at_fpr", ()):
        print(f"tests   TPR at most {bound['tpr']:.4g} at FPR {bound['fpr']:g}")
    for bound in allowed.get("delta_at", ()):
        print(f"delta   {bound['delta']:.4g} at epsilon {bound['epsilon']:g}")
    print(f"from    {allowed['allowed_by']}")


def _print(claim: Any) -> None:
    proved = math.isfinite(claim.epsilon)
    print(claim.first_line)
    if proved:
        print(f"by RDP  {claim.epsilon_rdp:.4g}")
        print(f"by      {claim.accountant}")
    else:
        print(f"because {claim.reason}")
    if claim.as_if_poisson is not None:
        print(f"as if the sampling were Poisson, as papers do, it would be {claim.as_if_poisson:.4g}: not proved")
    for event in claim.events:
        print(f"event   {event}")
    for sentence in claim.unverified:
        print(f"unverified: {sentence}")
