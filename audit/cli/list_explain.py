"""`leakbench list` and `leakbench explain`: entries of the catalogue, with their settings and threat models."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import FAILED, OK, Json, print_json


def list_(
    kind: Annotated[
        str | None, typer.Argument(help="defenses, attacks, suites, data or models; all if absent.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Lists the entries of the catalogue, a line each."""
    from ..catalog import listing
    from ..catalog.messages import no_such

    if kind is not None and kind not in listing.KINDS:
        raise ValueError(no_such("kind", kind, list(listing.KINDS)))
    kinds: list[listing.EntryKind] = [k for k in listing.KINDS if kind in (None, k)]
    entries = {k: {name: listing.describe(k, name) for name in listing.names(k)} for k in kinds}
    if as_json:
        print_json(entries if kind is None else entries[kinds[0]])
        return OK
    for k in kinds:
        entries[k] |= listing.patterns(k)
        if kind is None:
            print(f"{k}:")
        width = max((len(name) for name in entries[k]), default=0)
        for name, line in entries[k].items():
            size = ""
            if k == "models":
                count = listing.parameters(name)
                size = f"{'' if count is None else f'{count:,}':>12}  "
            print(f"{'  ' if kind is None else ''}{name:<{width}}  {size}{line}")
    return OK


def explain(
    name: Annotated[str, typer.Argument(help="A defense, attack, suite, data set or model.")],
    as_json: Json = False,
) -> int:
    """Explains a method: its idea, source and settings."""
    from ..catalog import explain as about

    description = about.explain(name)
    # A method without required settings that cannot take a step is broken, which the exit code must show to scripts.
    broken = isinstance(description.step_summary, str) and not any(setting.required for setting in description.settings)
    code = FAILED if broken else OK
    if as_json:
        print_json(description.to_dict())
        return code
    print(f"{description.name} ({description.kind})\n\n{description.about}")
    if description.requires:
        print("\nneeds: " + "; ".join(f"{k} {v}" for k, v in description.requires.items() if v))
    if description.sees:
        print(f"\nan observer of the updates sees: {description.sees}")
    if isinstance(description.step_summary, str):
        print(f"\na step cannot be rehearsed at the default settings: {description.step_summary}")
    elif description.step_summary:
        print("\na step, by a rehearsal at the default settings:")
        print("\n".join(f"  {line}" for line in description.step_summary.lines()))
    if description.settings:
        print("\nsettings:")
        for setting in description.to_dict()["settings"]:
            default = "required" if setting.get("required") else f"default {setting.get('default')}"
            about_it = f": {setting['about']}" if setting.get("about") else ""
            print(f"  {setting['name']} ({setting['type']}, {default}){about_it}")
    return code
