"""`leakbench evidence`: lower bounds on epsilon from scores of any membership test, compared with a claim."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import FAILED, OK, Json, print_json

# A `DataFrame`; pandas is imported on use, so that `--help` does not wait.
Table = Any

TRIALS = ("runs", "canaries", "random-split", "labels")


def evidence(
    scores: Annotated[Path, typer.Argument(help="CSV with columns id, score (larger: a member), member (0 or 1).")],
    trials: Annotated[
        str,
        typer.Option(
            help="runs: independent trainings; canaries: one training, each by a fair coin; random-split: one training "
            "on a set that was drawn at random; labels: one training, each record shown with its label or a proxy's."
        ),
    ],
    method: Annotated[
        str,
        typer.Option(
            help="Of runs: clopper_pearson, gaussian, pld, bayesian; else one_run, one_run_f_dp, order_statistics."
        ),
    ],
    delta: Annotated[float, typer.Option(help="Of the claim.")],
    threshold: Annotated[
        str | None,
        typer.Option(help="Of runs: fixed:T, declared:T1,T2,... or split[:N]; must be given, for it decides validity."),
    ] = None,
    guesses: Annotated[
        str | None,
        typer.Option(
            help="Of canaries and labels: HIGHEST+LOWEST guesses, as 100+100; of a random split: pairs answered. "
            "Declared before scores were looked at; several, with commas, share the level."
        ),
    ] = None,
    truth: Annotated[
        Path | None, typer.Option(help="CSV with columns id and member, where the scores' file has no member.")
    ] = None,
    level: Annotated[float, typer.Option(help="Confidence.")] = 0.95,
    claim: Annotated[
        float | None, typer.Option(help="Epsilon that is claimed at this delta; exit 1 if refuted.")
    ] = None,
    claim_relation: Annotated[str, typer.Option(help="add_remove or replace_one.")] = "add_remove",
    relation: Annotated[
        str | None,
        typer.Option(help="Of the trials: add_remove (the default) or replace_one; a random split's is that."),
    ] = None,
    sample_rate: Annotated[float | None, typer.Option(help="Of the mechanism, for pld.")] = None,
    steps: Annotated[int | None, typer.Option(help="Of the mechanism, for pld.")] = None,
    proxy_error: Annotated[
        float | None,
        typer.Option(help="Of labels: the proxy's largest distance from the truth in total variation, a mean."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of random splits and matchings.")] = 0,
    as_json: Json = False,
) -> int:
    """Computes the least epsilon that scores prove, with its assumptions; and whether it refutes a claim."""
    from ..evidence.audit import audit_canaries, audit_labels, audit_random_split, audit_runs
    from ..evidence.estimate import judge
    from ..evidence.pairs import seed_of_split

    _check(trials, relation, proxy_error, claim, claim_relation)
    own: Any = "replace_one" if trials in ("random-split", "labels") else relation or "add_remove"
    claimed = None if claim is None else _Guarantee(claim, delta, claim_relation)
    judged = claimed and claimed.under(own)
    choice = _choice(threshold, seed) if trials == "runs" else None
    if (trials == "runs") == (guesses is not None):
        raise ValueError("--threshold is of runs, and --guesses of the others; give the one that fits")
    if choice is None and threshold is not None:
        raise ValueError(f"--threshold is of runs, got trials {trials!r}")
    table = _read(scores, truth)
    values, member = table["score"].to_numpy(), table["member"].to_numpy() == 1
    if claim is not None and trials != "runs" and values.min() == values.max():
        raise ValueError(f"scores must differ for a verdict on a claim, got {len(values)} of {values[0]:g}")
    groups, declared = (values[member], values[~member]), str(guesses).split(",")
    settings: dict[str, Any] = {"method": method, "delta": delta if judged is None else judged.delta, "level": level}
    if trials != "runs":
        settings["seed"] = seed_of_split(table["id"].to_numpy(), member, seed)
    if choice is not None:
        bound = audit_runs(*groups, choice=choice, relation=own, sample_rate=sample_rate, steps=steps, **settings)
    elif sample_rate is not None or steps is not None:
        raise ValueError("--sample-rate and --steps are of method pld")
    elif trials == "random-split":
        bound = audit_random_split(*groups, answered=[_count(text) for text in declared], **settings)
    elif proxy_error is None:
        pairs = [_pair(text) for text in declared]
        bound = audit_canaries(values, member, guesses=pairs, relation=own, **settings)
    else:
        pairs = [_pair(text) for text in declared]
        bound = audit_labels(values, member, guesses=pairs, proxy_error=proxy_error, **settings)
    remark = _backwards(values, member)
    verdict = None if judged is None else judge(bound, **asdict(judged))
    if as_json:
        against = claimed and asdict(claimed)
        if against and judged and judged is not claimed:
            against["implies"] = asdict(judged)
        print_json({"bound": bound.to_dict(), "claim": against, "verdict": verdict, "remark": remark})
    else:
        print(_bound_words(bound))
        if remark:
            print(f"remark: {remark}")
        if claimed and judged:
            implied = f", which implies {judged.epsilon:.4g} at delta {judged.delta:.3g} for replace_one"
            more = "" if judged is claimed else implied
            print(f"claim: epsilon {claim:g} at delta {delta:g}, {claim_relation}{more}: {verdict}")
    return FAILED if verdict == "violation" else OK


@dataclass(frozen=True)
class _Guarantee:
    """A claimed guarantee, or one that it implies."""

    epsilon: float
    delta: float
    relation: str

    def under(self, relation: str) -> _Guarantee:
        """Returns the guarantee under the relation of the trials: an add/remove claim implies one of replacement."""
        from ..evidence.estimate import of_replacement

        if (self.relation, relation) != ("add_remove", "replace_one"):
            return self
        epsilon, delta = of_replacement(self.epsilon, self.delta)
        if delta >= 1:
            raise ValueError(
                f"--claim {self.epsilon:g} at delta {self.delta:g} by add_remove implies nothing of replacement; give "
                "the claim's own epsilon of replacement with --claim-relation replace_one"
            )
        return _Guarantee(epsilon, delta, relation)


def _check(
    trials: str, relation: str | None, proxy_error: float | None, claim: float | None, claim_relation: str
) -> None:
    """Refuses options that do not fit the trials, before any file is read."""
    if trials not in TRIALS:
        raise ValueError(f"--trials must be one of {', '.join(TRIALS)}, got {trials!r}")
    for name, value in (("--relation", relation), ("--claim-relation", claim_relation)):
        if value not in (None, "add_remove", "replace_one"):
            raise ValueError(f"{name} must be add_remove or replace_one, got {value!r}")
    if claim is not None and not claim >= 0:
        raise ValueError(f"--claim must be at least 0, got {claim}")
    if (trials == "labels") == (proxy_error is None):
        raise ValueError("--proxy-error is of labels, and must be given there: what they prove is proved up to it")
    if trials == "random-split" and relation == "add_remove":
        raise ValueError("--relation of a random split is replace_one: each pair exchanges two records")
    if trials == "labels" and relation == "add_remove":
        raise ValueError("--relation of labels is replace_one: one label takes the place of another")


def _backwards(values: Any, member: Any) -> str | None:
    """Warns if scores are smaller for members, because the bound then shows nothing."""
    from ..scoring.membership import auc

    area = auc(values[member], values[~member])
    if area.value is None or area.high is None or area.high >= 0.5:
        return None
    return (
        f"scores are smaller for members (AUC {area.value:.3f} [{area.low:.3f}, {area.high:.3f}]), and a bound "
        "takes larger ones for theirs: are the two groups exchanged, or is this a loss?"
    )


def _bound_words(bound: Any) -> str:
    kind = f"{bound.level:.0%} {bound.kind}"
    # Three digits suffice: a probability is no more exact than its assumptions.
    counted = {
        name: float(f"{value:.3g}") if isinstance(value, float) else value for name, value in bound.detail.items()
    }
    lines = [
        f"epsilon is at least {bound.value:.4g} at delta {bound.delta:.3g} ({bound.relation}, {kind}, {bound.method})",
        f"it could have been {bound.ceiling:.4g} at most, from {bound.positives} trials with the record and "
        f"{bound.negatives} without; looks: {bound.looks}",
        "counted: " + ", ".join(f"{name} {value}" for name, value in counted.items()),
        f"holds if {bound.assumption}",
    ]
    return "\n".join(lines)


def _choice(text: str | None, seed: int) -> Any:
    from ..evidence.thresholds import DeclaredThresholds, FixedThreshold, SplitThreshold

    if text is None:
        raise ValueError("--threshold must be given for runs: fixed:T, declared:T1,T2,... or split[:N]")
    kind, _, numbers_text = text.partition(":")
    if kind == "split":
        return SplitThreshold(splits=_count(numbers_text or "1"), seed=seed)
    try:
        numbers = tuple(float(part) for part in numbers_text.split(","))
    except ValueError:
        numbers = ()
    if kind == "fixed" and len(numbers) == 1:
        return FixedThreshold(numbers[0])
    if kind == "declared" and numbers:
        return DeclaredThresholds(numbers)
    raise ValueError(f"--threshold must be fixed:T, declared:T1,T2,... or split[:N], got {text!r}")


def _pair(text: str) -> tuple[int, int]:
    highest, plus, lowest = text.partition("+")
    if not plus:
        raise ValueError(f"--guesses of canaries and labels must be HIGHEST+LOWEST, as 100+100, got {text!r}")
    return _count(highest, least=0), _count(lowest, least=0)


def _count(text: str, least: int = 1) -> int:
    # Python converts no number of more than 4,300 digits, and no table has 10**18 rows.
    if text.strip().isdecimal() and len(text.strip()) > 18:
        raise ValueError(f"a number of guesses or splits must have at most 18 digits, got {len(text.strip())}")
    if not text.strip().isdecimal() or int(text) < least:
        raise ValueError(f"a number of guesses or splits must be whole and at least {least}, got {text!r}")
    return int(text)


def _read(scores: Path, truth: Path | None) -> Table:
    """Reads scores and truth, joined by id."""
    table = _table(scores, ["id", "score"] if truth is not None else ["id", "score", "member"])
    if truth is not None:
        known = _table(truth, ["id", "member"])
        for reference, table_to_match, file in ((known, table, scores), (table, known, truth)):
            missing = reference.loc[~reference["id"].isin(table_to_match["id"]), "id"]
            if len(missing):
                raise ValueError(
                    f"{file.name} must have every id once, and lacks {len(missing)}, as {missing.iloc[0]!r}"
                )
        table = table.drop(columns="member", errors="ignore").merge(known, on="id", validate="one_to_one")
    flags = table["member"].astype(str).str.strip().str.lower().map({"0": 0, "1": 1, "false": 0, "true": 1})
    if flags.isna().any():
        raise ValueError(f"member must be 0 or 1, got {table['member'][flags.isna()].iloc[0]!r}")
    table["member"] = flags.astype(int)
    for value, words in ((1, "with member 1"), (0, "with member 0")):
        if not (table["member"] == value).any():
            raise ValueError(f"there must be rows {words}, got none in {len(table)} rows")
    return table


def _table(file: Path, columns: list[str]) -> Table:
    import numpy as np
    import pandas as pd

    from leakbench.leaderboard.records.files import refuse_special

    from ..external.scores.score_files import read_csv

    refuse_special(file)
    try:
        table: Table = read_csv(file.read_bytes(), file)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} must be a CSV file with a header, got: {' '.join(str(error).split())}") from error
    lacking = [name for name in columns if name not in table.columns]
    if lacking:
        raise ValueError(f"{file.name} must have the columns {', '.join(columns)}, and lacks {', '.join(lacking)}")
    repeated = table.loc[table["id"].duplicated(), "id"]
    if len(repeated):
        raise ValueError(f"ids of {file.name} must be distinct, and {repeated.iloc[0]!r} occurs twice")
    if table["id"].isna().any():
        raise ValueError(
            f"every row of {file.name} must have an id, and row {int(table['id'].isna().argmax()) + 2} has none"
        )
    if "score" in columns:
        numbers: Table = pd.to_numeric(table["score"], errors="coerce")
        bad = ~np.isfinite(numbers.to_numpy(dtype=float))
        if bad.any():
            first = table[bad].iloc[0]
            raise ValueError(f"scores must be finite numbers, got {first['score']!r} for id {first['id']!r}")
        table["score"] = numbers.astype(float)
    return table[columns]
