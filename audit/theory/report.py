"""Reports of measured claims: text, JSON, Markdown and a figure; files are written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leakbench.leaderboard.records.files import write_bytes

from .claim import Comparison, Examined, Panel, Setup

_PLANE = "the first of the random planes, in units of the gradient"


def document(claims: Sequence[Examined], setup: Setup) -> dict[str, Any]:
    """Returns all measurements as plain data: a function of the seed, on a given machine.

    Args:
        claims: examined claims.
        setup: settings of the measurement.
    """
    return {
        "seed": setup.seed,
        "draws": setup.draws,
        "device": str(setup.device),
        "as_expected": all(examined.expected for examined in claims),
        "claims": [examined.to_dict() for examined in claims],
    }


def words(claim: Examined) -> str:
    """Formats a claim as a paragraph: statement, verdict, and a line for each comparison."""
    lines = [f"{claim.claim.section} {claim.claim.name}: {_verdict(claim)}", f"    {claim.claim.about}"]
    lines += [_line(comparison) for comparison in claim.measured.comparisons]
    if claim.measured.instead:
        lines += ["  instead:", *(_line(comparison) for comparison in claim.measured.instead)]
    if claim.caveat:
        lines.append(f"    {'because' if claim.claim.should_hold is False else 'caveat'}: {claim.caveat}")
    return "\n".join(lines)


def summary(claims: Sequence[Examined]) -> str:
    """Sentence with the numbers of claims by verdict, and the verdicts that differ from the known ones."""
    wrong = [examined.claim.name for examined in claims if not examined.expected]
    verdicts = [examined.verdict for examined in claims]
    counts = ", ".join(f"{v} {verdicts.count(v)}" for v in ("holds", "holds with a caveat", "does not hold"))
    outcome = f"not as known: {', '.join(wrong)}" if wrong else "all as known"
    return f"{len(claims)} claim{'s' if len(claims) != 1 else ''}: {counts}; {outcome}"


def markdown(claims: Sequence[Examined], setup: Setup) -> str:
    """Formats a table of claims and a table of their comparisons.

    Args:
        claims: examined claims.
        setup: settings of the measurement.
    """
    lines = [
        "# Claims of theory, measured",
        "",
        f"Seed {setup.seed}, {setup.draws} draws. {summary(claims)}.",
        "Where there is an n, ± is five standard errors; elsewhere it is what rounding may leave.",
        "",
        "| section | claim | verdict | caveat |",
        "|---|---|---|---|",
    ]
    for examined in claims:
        columns = (f"`{examined.claim.name}`: {examined.claim.about}", _verdict(examined), examined.caveat)
        lines.append(f"| {examined.claim.section} | {' | '.join(map(_cell, columns))} |")
    lines += ["", "| claim | what | measured | closed form | ± | n | |", "|---|---|--:|---|--:|--:|---|"]
    for examined in claims:
        for kind, comparisons in (("", examined.measured.comparisons), ("instead: ", examined.measured.instead)):
            for c in comparisons:
                cells = (_number(c.measured), f"{c.relation} {_number(c.closed)}", f"{c.tolerance:.2g}", str(c.n or ""))
                quantity = _cell(f"{kind}{c.what}")
                lines.append(f"| `{examined.claim.name}` | {quantity} | {' | '.join(cells)} | {_mark(c)} |")
    return "\n".join(lines) + "\n"


def picture(panels: Sequence[Panel]) -> bytes:
    """Draws points and their mirror images as a PNG, in a panel for each."""
    # Imported here because their start takes longer than most claims.
    import altair as alt
    import vl_convert

    drawn = []
    for panel in panels:
        # The same scale for both directions and both signs, so that asymmetry is visible.
        reach = 1.05 * max(1e-12, panel.points.abs().max().item())
        scale, axis = alt.Scale(domain=[-reach, reach], nice=False), alt.Axis(tickCount=5)
        rows = [
            {"x": sign * x, "y": sign * y, "of": of}
            for sign, of in ((1, "deviation of a gradient"), (-1, "its mirror image"))
            for x, y in panel.points.tolist()
        ]
        # Filled and hollow markers can be distinguished without colour.
        points = alt.Chart(alt.Data(values=rows), title=panel.title, width=300, height=300).mark_point(size=18)
        drawn.append(
            points.encode(
                alt.X("x:Q", scale=scale, axis=axis, title=None),
                alt.Y("y:Q", scale=scale, axis=axis, title=None if drawn else _PLANE),
                alt.Stroke("of:N", scale=alt.Scale(range=["#0072B2", "#D55E00"]), sort=None, title=None),
                alt.Fill("of:N", scale=alt.Scale(range=["#0072B2", "transparent"]), sort=None, title=None),
            )
        )
    chart = alt.hconcat(*drawn).configure_legend(orient="bottom")
    return vl_convert.vegalite_to_png(chart.to_json(), scale=1.5)


def write(claims: Sequence[Examined], setup: Setup, folder: Path) -> list[Path]:
    """Writes theory.json, theory.md and, if there are panels, symmetry.png.

    Args:
        claims: examined claims.
        setup: settings of the measurement.
        folder: created if absent.

    Returns:
        Paths of the files.

    Raises:
        WriteError: the folder cannot be written to.
    """
    files = {
        "theory.json": (json.dumps(document(claims, setup), indent=2, allow_nan=False) + "\n").encode(),
        "theory.md": markdown(claims, setup).encode(),
    }
    panels = [panel for examined in claims for panel in examined.measured.panels]
    if panels:
        files["symmetry.png"] = picture(panels)
    return [write_bytes(folder / name, content) for name, content in files.items()]


def _verdict(examined: Examined) -> str:
    """Verdict, with a remark if it is not the known one."""
    if examined.claim.should_hold is None:
        return f"{examined.verdict}, of these data"
    return examined.verdict + (
        "" if examined.expected else ", which it should" * (not examined.holds) or ", which is not as known"
    )


def _line(c: Comparison) -> str:
    """Formats a comparison as a line."""
    draws = f", n {c.n}" if c.n else ""
    allowed = f" ± {c.tolerance:.2g}" if c.tolerance else ""
    return f"  {_mark(c):<3} {c.what}: {_number(c.measured)} {c.relation} {_number(c.closed)}{allowed}{draws}"


def _number(value: float) -> str:
    """Five digits; whole numbers in full."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.5g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _mark(c: Comparison) -> str:
    return "yes" if c.holds else "NO"
