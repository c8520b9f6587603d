"""Reports of audits as text for the terminal: models and scores, plans of `--describe`, shared updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .update.public_guesses import GuessComparison
from .update.verdict import left_words


def audit_text(told: Mapping[str, Any]) -> str:
    """Formats the verdict, a line per attack, and the bound on epsilon."""
    decided = told["verdict"]
    lines = [f"{decided['headline']}: {decided['sentence']}", ""]
    names = ("auc", "tpr_at_1pct_fpr", "tpr_at_0.1pct_fpr")
    ran = [one for one in told["attacks"] if one["metrics"]]
    width = max((len(one["name"]) for one in ran), default=6)
    lines.append("attack".ljust(width) + "  AUC                   TPR at 1 % FPR        TPR at 0.1 % FPR")
    for one in ran:
        cells = [_cell(one["metrics"].get(name)) for name in names]
        lines.append(one["name"].ljust(width) + "  " + "  ".join(cell.ljust(20) for cell in cells).rstrip())
    lines.append("")
    bound, refuted = told["epsilon"], decided["word"] == "claim refuted"
    if "why_not" in bound:
        lines.append(f"epsilon: no bound, for {bound['why_not']}")
    else:
        kind = "at least" if bound["split"] == "random" else "if members and non-members were exchangeable, at least"
        lines.append(
            f"epsilon: {kind} {bound['value']:.2f} (replace-one, delta {bound['delta']:.2g}, "
            f"{100 * bound['level']:.10g}%; {bound['attack']} right in {bound['correct']} of {bound['guessed']}; "
            f"{bound['ceiling']:.2f} at most could have been shown)"
        )
        if bound["claimed"] is not None:
            judged = "refuted" if bound["refutes"] else "not by this bound" if refuted else _power(bound)
            lines.append(f"claim:   allows {bound['claimed']:.2f}: {judged}")
    for sentence in (told.get("transcript") or {}).get("sentences", ()):
        lines.append(f"transcript: {sentence}")
    for one in told.get("not_tested", ()):
        lines.append(f"not tested: {one}")
    return "\n".join(lines)


def _power(bound: Mapping[str, Any]) -> str:
    if bound["split"] != "random":
        return "not judged, for nobody says that the split was random (--split random)"
    if bound["needed"] is None:
        return "no violation found, and with so many pairs none could have been; take more members and non-members"
    return (
        "no violation found; one would have been in four audits of five if the attack were right in "
        f"{bound['needed']:.1%} of its answers, and it was in {bound['correct'] / max(1, bound['guessed']):.1%}"
    )


def _cell(metric: Mapping[str, Any] | None) -> str:
    if metric is None or metric["value"] is None:
        return "n/a"
    ends = "" if metric["low"] is None else f" [{metric['low']:.3f}, {metric['high']:.3f}]"
    return f"{metric['value']:.3f}{ends}"


def plan_text(told: Mapping[str, Any]) -> str:
    """Formats the answer of `--describe`: sources, attacks with their unmet requirements, the smallest leak shown."""
    lines = [f"{name}: {one['n']} of {one['source']}" for name, one in told["sources"].items()]
    for one in told["attacks"]:
        needs = f": needs {one['needs']}" if one["needs"] else ""
        lines.append(f"{'runs ' if one['runs'] else 'skips'} {one['name']}{needs}")
    least = told["smallest_leak"]
    ceiling = least["epsilon_ceiling"]
    rates = ", ".join(
        f"TPR at {words} FPR {'n/a (more members and non-members)' if least[key] is None else f'{least[key]:.3f}'}"
        for key, words in (("tpr_at_1pct_fpr", "1 %"), ("tpr_at_0.1pct_fpr", "0.1 %"))
    )
    proved = "n/a (10 pairs at least)" if ceiling is None else f"{ceiling:.2f}"
    lines.append(
        f"smallest leak that would show in four audits of five: AUC {least['auc']:.3f}, {rates}; epsilon proved at "
        f"most {proved} from {least['pairs']} pairs, by the best of {least['attacks']} attacks"
    )
    return "\n".join(lines)


def update_text(told: Mapping[str, Any]) -> str:
    """Formats the results: the verdict, and a few lines per attack."""
    lines = [f"{told['verdict']['word']}: {told['verdict']['sentence']}", ""]
    lines += [f"note: {one}" for one in told.get("notes", ())]
    for one in told["attacks"]:
        if one["why_not"]:
            lines.append(f"not tested: {one['why_not']}")
        elif one["kind"] == "reconstruction":
            proved = "" if one["certified"] is None else f", {one['certified']} of them proved to be in the batch"
            if one["expected_error"] is not None:
                proved += (
                    f", expected to be off by {one['expected_error']:.2g} or less (root mean square) under this noise"
                )
            if (guesses := one["beside_guesses"]) is not None:
                proved += f"; they {left_words(GuessComparison(**guesses))}"
            lines.append(f"{one['name']}: {one['images']} input(s) reconstructed ({one['status']}{proved})")
        elif one["kind"] == "labels":
            lines.append(f"{one['name']}: labels {', '.join(f'{k} x{v}' for k, v in one['labels'].items()) or 'none'}")
        else:
            sure = [c["name"] for c in one["candidates"] if c["shown"]]
            shown = ", ".join(sure[:20]) + (" ..." if len(sure) > 20 else "")
            # Candidates not shown to have been in the batch may have been in it.
            lines.append(
                f"{one['name']}: {len(sure)} of {len(one['candidates'])} candidates shown to have been in it, at a "
                f"false discovery rate of {100 * one['false_discovery_rate']:.3g} %{': ' + shown if sure else ''}"
            )
    return "\n".join(lines)
