"""Sentences around the tables: alarms and gaps above them, explanations and assumptions below.

Text formats and page share these sentences. Words that depend on the kind of result or the metric are in the tables of
`kinds.py` and `metrics.py`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from ..kinds import JUDGED, KINDS, KindOfResult, attacked
from ..metrics import METRICS, columns
from ..records.folder import Completeness
from ..records.record import Record
from ..records.task import UpdateTask
from .aggregate import over_seeds
from .comparable import mixed
from .controls import ControlResult, Violation, leaks
from .public_only import public_sentences
from .reconstruction_summary import reconstruction_summaries
from .rows import RANKED_BY, Row, several_guarantees


def alarms(
    controls: Sequence[ControlResult], violations: Sequence[Violation], gaps: Sequence[str] = (), of: str = "this board"
) -> list[str]:
    """Sentences of the banner; empty if there are controls, all held, no claim is violated, and there are no gaps.

    Args:
        controls: all results of controls.
        violations: all refuted claims.
        gaps: sentences of `gaps`.
        of: that the controls show the worth of.

    Returns:
        The sentences.
    """
    failed = [f"{c.name}: expected {c.expected}, measured {c.measured}" for c in controls if not c.ok]
    untrusted = {control.suite for control in controls if not control.ok}
    sentences = []
    if failed:
        # Controls of a suite say nothing about another's attacks and splits.
        their = "its" if len(untrusted) == 1 else "their"
        where = f" in {and_words(sorted(untrusted))}, do not trust {their} rows"
        if untrusted == {control.suite for control in controls}:
            where = f", do not trust {of}"
        sentences.append(f"CONTROLS FAILED{where}. " + "; ".join(failed) + ".")
    sentences += [f"CLAIM VIOLATED: {violation.sentence}." for violation in violations]
    sentences += gaps
    if not controls:
        sentences.append("There are no controls in these records: nothing shows that these attacks can find a leak.")
    return sentences


def gaps(records: Sequence[Record], complete: Completeness) -> list[str]:
    """Sentences on why a folder's results are incomplete or not comparable, with the command that mends it.

    Args:
        records: all records of the board.
        complete: manifests beside them.

    Returns:
        A sentence for each suite with records of different code, for each set of overrides of a suite, for each request
        that lacks cells, for failed records, and for records that no manifest lists.
    """
    sentences = [
        f"MIXED: records of {suite} are of different code ({'; '.join(words)}), so none of its rows is ranked: "
        "compute them again with --recompute, or take the others out of the folder."
        for suite, words in mixed(records).items()
    ]
    for (suite, changes), count in Counter((r.suite, r.changes) for r in records if r.changes).items():
        sentences.append(
            f"CHANGED: {count} of {len(records)} records are not of {suite} as its file has it, but with "
            f"{'; '.join(changes)}. No paper's figure stands beside them."
        )
    for manifest, cells in complete.missing(records):
        names = list(dict.fromkeys(cell.words for cell in cells))
        examples = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        sentences.append(
            f"INCOMPLETE: {len(cells)} of the {len(manifest.cells)} cells asked for have no record ({examples}). "
            f"Compute them with: {manifest.command_for(complete.results)}"
        )
    # A record whose arrays were altered counts as failed too, so this sentence covers both.
    if spoiled := [record for record in records if record.status == "failed"]:
        sentences.append(
            f"INCOMPLETE: {len(spoiled)} of {len(records)} records failed or are not their scores', "
            "so worst cases are at least what is shown; once what they say is mended, run the same command again."
        )
    loose = len(complete.uncovered(records))
    if loose == len(records):
        sentences.append("Whether these records are complete is unknown: no manifest of a run lies beside them.")
    elif loose:
        sentences.append(
            f"{loose} of {len(records)} records are in no manifest: whether their rows are complete is unknown."
        )
    return sentences


def notes(rows: Sequence[Row], controls: Sequence[ControlResult]) -> list[str]:
    """Sentences on how to read the numbers, their assumptions, the controls that held, and papers' figures.

    Args:
        rows: of the board.
        controls: all results of controls.
    """
    sentences = [
        "Means over seeds, with 95 % intervals (Student's t; the record's own for a single seed). Worst is "
        "the strongest attack's mean. Of several membership attacks it is chosen on one half of the candidates and "
        "measured on the other; the worse end of its interval is simultaneous over the attacks compared, which the "
        "column of the attack counts; "
        "≥ marks one for which attacks failed, are missing or have no such number. "
        f"{' '.join(filter(None, (_chance_words(), leak_words())))}",
    ]
    sentences += public_sentences(rows)
    sentences += filter(None, [largest_sentence(rows), one_seed_sentence(rows)])
    records = [record for row in rows for record in row.records]
    sentences += filter(None, (_target_words(kind, rows, records) for kind in attacked()))
    if sizes := sizes_words(records):
        sentences.append(f"Per seed: {sizes}.")
    sentences += filter(None, [ranks_sentence(rows)])
    sentences += powerless(rows)
    sentences += degraded_sentences(rows)
    sentences += [f"Images of {label}: {sentence}" for label, sentence in reconstruction_summaries(rows)]
    if passed := [f"{c.name}: {c.measured}" for c in controls if c.ok]:
        sentences.append(f"Controls that held: {'; '.join(passed)}.")
    # Without any control the banner says so; here a control of one role is missing.
    if roles := {row.control for row in rows} & set(JUDGED):
        absent = set(JUDGED) - roles
        sentences += [f"There is no {role} control in these records." for role in sorted(absent)]
    # Anyone with the seed can draw the noise again and subtract it.
    if any(record.noise == "seeded" for record in records):
        sentences.append("Noise comes from seeds, for repeatable experiments; a release needs secret noise.")
    sentences += [f"Attack {name}: {needs}." for name, needs in needs_words(records).items()]
    papers = [f"{r.defense.name}, {p.metric} {p.value:g} in {p.source}" for r in records for p in r.reported]
    return sentences + [f"Reported by others: {words}." for words in dict.fromkeys(papers)]


def largest_sentence(rows: Iterable[Row]) -> str:
    """Sentence on the bound beside an attack's number; empty if there is none.

    Args:
        rows: of the board.
    """
    if all(estimate.largest is None for row in rows for estimate in row.estimates.values()):
        return ""
    return (
        "≤ is the most that the claim allows any test of one record whose membership a coin decides, by the losses of "
        "the steps that were taken; the gap is what this attack did not find, and perhaps no attack can. One run "
        "may lie above it by chance."
    )


def degraded_sentences(rows: Sequence[Row]) -> list[str]:
    """Sentence for each attack that saw itself that it found no match, with the rows that it attacked.

    Args:
        rows: of the board.
    """
    labels: dict[str, list[str]] = {}
    for row in rows:
        for attack in row.degraded:
            labels.setdefault(attack, []).append(row.label)
    words = "degraded (by its own account it found no match, or others match as well)"
    return [f"Attack {attack}: {words} on {', '.join(on)}." for attack, on in labels.items()]


def ranks_sentence(rows: Sequence[Row]) -> str:
    """Sentence on the number that ranks, and on the rows among which they are given; empty if no row is ranked.

    Args:
        rows: of the board.
    """
    tables = {row.section: [] for row in rows}
    for row in rows:
        tables[row.section].append(row)
    if not any(row.rank for row in rows):
        return ""
    among = " among the rows of a table with the same epsilon, delta and privacy unit"
    several = any(several_guarantees(table) for table in tables.values())
    return f"Ranks are{among if several else ''} by the high end of the interval of the worst AUC, not by its mean."


def one_seed_sentence(rows: Iterable[Row]) -> str:
    """Caveat about intervals of a single seed; empty if no membership attack has such an interval.

    Args:
        rows: of the board.
    """
    shown = [e for row in rows for e in row.estimates.values() if METRICS[e.metric].kind == RANKED_BY]
    if not any(e.interval == "own" and e.n == 1 for e in shown):
        return ""
    return (
        "With one seed, an interval of a membership attack is over candidates alone: their scores share the noise of "
        "one model, or of one step, which only more seeds show."
    )


def _chance_words() -> str:
    """Sentence on the chance values of the board's columns; empty if no metric has such a value."""
    known = {m.name: f"{m.name_in_notes} {m.chance:g}" for m, _ in columns(written=True) if m.chance is not None}
    return f"Chance: {', '.join(known.values())}." if known else ""


def leak_words() -> str:
    """Sentence on the direction of the attacks' columns, as "Higher AUC and PSNR leak more."; empty without them."""
    sentences = []
    for better, word in (("lower", "Higher"), ("higher", "Lower")):
        names = {m.name: m.name_in_notes for m, _ in columns(written=True) if m.of_attack and m.better == better}
        if names:
            sentences.append(f"{word} {and_words(list(names.values()))} leak{'s' if len(names) == 1 else ''} more.")
    return " ".join(sentences)


def and_words(words: Sequence[str]) -> str:
    """Joins words into a list, as "a, b and c"; empty for none."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def _target_words(kind: KindOfResult, rows: Sequence[Row], records: Sequence[Record]) -> str:
    """Sentences on the target of a kind's attacks and on its floor; empty if the target is the trained model."""
    shared, metric = shared_words(records, kind), METRICS[kind.main]
    if not shared:
        return ""
    variants = and_words([variant.preposition for variant in kind.variants])
    sentence = f"{metric.name_in_notes}: {kind.target} ({shared}){f', {variants} its noise' if variants else ''}."
    if metric.floor is None:
        return sentence
    floors = [row.estimates[c.key].value for row in rows for c in METRICS[metric.floor.metric].columns]
    if not (known_floors := [value for value in floors if value is not None]):
        return sentence
    least, most = (f"{end:.{metric.digits}f}" for end in (min(known_floors), max(known_floors)))
    span = metric.with_unit(least if least == most else f"{least} to {most}")
    return f"{sentence} {metric.floor.of[0].upper()}{metric.floor.of[1:]} alone has {span}."


def shared_words(records: Sequence[Record], kind: KindOfResult | None = None) -> str:
    """Names the attacked targets other than the trained model, as "photos, convnet, batch 1, step 2"; empty for none.

    Args:
        records: of any kind.
        kind: of the targets; None for every kind.
    """
    kinds = [target_kind for target_kind in (KINDS.values() if kind is None else [kind]) if target_kind.own_task]
    shared = dict.fromkeys(
        r.task.words
        for r in records
        if isinstance(r.task, UpdateTask) and any(r.kind == target_kind.name for target_kind in kinds)
    )
    return "; ".join(shared)


def sizes_words(records: Sequence[Record]) -> str:
    """Numbers of examples, candidates and images behind a record."""
    words = []
    for kind in KINDS.values():
        sizes = {r.metrics[kind.main].n for r in records if r.kind == kind.name and kind.main in r.metrics} - {None}
        if sizes:
            counts = sorted(n for n in sizes if n is not None)
            numbers = " or ".join(map(str, counts)) if len(counts) < 3 else f"{counts[0]} to {counts[-1]}"
            singular = kind.counts.removesuffix("es" if kind.counts.endswith("ches") else "s")
            words.append(f"{numbers} {singular if counts == [1] else kind.counts}")
    return ", ".join(words)


def powerless(rows: Sequence[Row]) -> list[str]:
    """Sentences on attacks without power: their interval on a positive control includes chance."""
    sentences = []
    for row in rows:
        for cell in row.cells if row.control == "positive" else ():
            kind = KINDS[cell.kind]
            # Not widened for several looks: the sentence is about this attack, not about the strongest.
            estimate, metric = over_seeds(kind.main, cell), METRICS[kind.main]
            if kind.powerless and leaks(metric, estimate) is False:
                sentences.append(
                    f"{cell.attack} {kind.powerless.format(row.defense.name)} ({metric.label} {estimate.words(2)}): "
                    "near chance, its numbers say nothing about a defense."
                )
    return sentences


def needs_words(records: Sequence[Record]) -> dict[str, str]:
    """Threat model of each attack in words: a worst case is only as realistic as its access and knowledge."""
    requirements = {}
    for record in records:
        if record.attack is not None and record.requires:
            words = []
            for name, value in record.requires.items():
                if value:
                    items = value if isinstance(value, list) else [value]
                    words.append(f"{name} {', '.join(str(item).lower() for item in items)}")
            # By name: the requirements are in the attack's decorator and do not depend on settings.
            requirements[record.attack.name] = "; ".join(words)
    return {name: requirements[name] for name in sorted(requirements) if requirements[name]}


def unranked_words(records: Sequence[Record]) -> list[str]:
    """A line for each reason, with all of its cells and seeds."""
    lines: dict[tuple[str, str, str], list[int]] = {}
    for record in records:
        method = record.attack.name if record.attack else record.kind
        cell = f"{record.defense.name} x {method}{KINDS[record.kind].noise_words(record.task.noise)}"
        lines.setdefault((record.status, cell, record.reason or ""), []).append(record.seed)
    # Sorting puts failed before skipped.
    return [f"{status}: {cell}, {_seeds(seeds)}: {reason}" for (status, cell, reason), seeds in sorted(lines.items())]


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {listed(seeds)}"


def listed(seeds: Iterable[int]) -> str:
    """Joins seeds in order, as "0, 1, 2"."""
    return ", ".join(map(str, sorted(seeds)))
