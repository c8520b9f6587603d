"""`leakbench epsilon`: the epsilon of a planned run, by accounting for the defense's own plans."""

from __future__ import annotations

import math
from typing import Annotated, Any, get_args

import typer

from .options import OK, Json, Overrides, print_json


def epsilon(
    defense: Annotated[str, typer.Option(help="Name of a defense.")],
    noise_multiplier: Annotated[float, typer.Option(help="Noise standard deviation / sensitivity.")],
    sample_rate: Annotated[float, typer.Option(help="Expected batch / number of examples.")],
    steps: Annotated[int, typer.Option(help="Number of steps.")],
    delta: Annotated[float, typer.Option(help="Probability that epsilon may fail.")],
    sampling: Annotated[
        str,
        typer.Option(help="poisson, truncated_poisson, random_allocation, cyclic, shuffle, partition, fixed or full."),
    ] = "poisson",
    groups: Annotated[int, typer.Option(help="Of cyclic sampling: parts of the examples that take turns.")] = 1,
    largest_batch: Annotated[int, typer.Option(help="Of truncated_poisson sampling.")] = 0,
    examples: Annotated[int, typer.Option(help="Of truncated_poisson sampling: records it draws from.")] = 0,
    settings: Overrides = None,
    as_json: Json = False,
) -> int:
    """Epsilon of a planned run, from the defense's own plans."""
    import torch

    from defenses.core import Sampling, predicted

    from ..catalog import methods as catalog
    from ..catalog.messages import in_one_line, no_such
    from ..catalog.plugins import place
    from ..catalog.settings import CatalogError, parse_settings
    from ..suite import schema

    torch.set_num_threads(1)
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0):
        raise ValueError(f"noise_multiplier must be zero or a positive number, got {noise_multiplier}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}")
    if sampling not in (known := get_args(schema.SamplingName)):
        raise ValueError(no_such("sampling", sampling, known))
    made = catalog.defense(defense, parse_settings(settings or []), noise_multiplier=noise_multiplier)
    try:
        drawn = Sampling(sampling, sample_rate, groups, largest_batch, examples)  # pyright: ignore[reportArgumentType]  refused there by name
        account = predicted(made, sampling=drawn, steps=steps)
    except Exception as error:
        if not catalog.foreign("defenses", defense):
            raise
        raise CatalogError(
            f"{catalog.origin('defenses', defense)} raised {in_one_line(error)}{place(error, defense)}"
        ) from error
    claim = account.ledger.claim(delta)
    # Of code that is none of ours the claim takes the word, as in a record.
    doubts = [sentence for sentence in account.remarks.values() if sentence]
    if as_json:
        print_json(_document(defense, made, claim, steps) | ({"unverified": doubts} if doubts else {}))
        return OK
    _print(claim)
    for sentence in doubts:
        print(f"unverified: {sentence}")
    return OK


# Their types are `defenses.core`'s, which takes seconds to import: too long for a command's help.
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


def _print(claim: Any) -> None:
    proved = math.isfinite(claim.epsilon)
    shown = f"{claim.epsilon:.4g}" if proved else "∞"
    print(
        f"epsilon {shown} at delta {claim.delta:g} ({claim.relation}, unit: {claim.unit}, sampling: {claim.sampling})"
    )
    if proved:
        print(f"by RDP  {claim.epsilon_rdp:.4g}")
        print(f"by      {claim.accountant}")
    else:
        print(f"because {claim.reason}")
    if claim.as_if_poisson is not None:
        print(f"as if the sampling were Poisson, as papers do, it would be {claim.as_if_poisson:.4g}: not proved")
    for event in claim.events:
        print(f"event   {event}")
