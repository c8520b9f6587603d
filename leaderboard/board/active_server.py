"""Results of active servers, which choose the model that a client trains from: a table of their own.

An honest server sends the model of the last rounds. One that sends any other sees more of a client than every honest
adversary of the board, and may be noticed. So its records are in no worst case, control, rank or plot; only a claim
that they refute is an alarm, and flags its row, because a claim holds for any model that is sent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..kinds import KINDS
from ..metrics import METRICS
from ..records.labels import differences, key_of
from ..records.record import Record
from .aggregate import BoardCell, Estimate, over_seeds

TITLE = "Active server: it chooses the model that a client trains from"
"""Title of the table."""

ABOUT = (
    "Attacks of a server that sends a client a model of its own choice, or a block in front of it. They are compared "
    "with no honest attacker, and are in no worst case, control, rank or plot. An estimate above the most that the "
    "claim allows is no violation by itself; a refuted claim is flagged. The claim is that of the messages which they "
    "asked for; it holds for any model, as long as sample rate, bound and noise are the client's own."
)
"""Sentences under the title."""


@dataclass(frozen=True, kw_only=True)
class ActiveResult:
    """Measurements of an attack of an active server on a defense.

    Attributes:
        suite: its name.
        defense: name with the settings and the budget in which rows differ, and its role as a control.
        attack: name with its settings, if attacks of the same name differ.
        kind: of the attack's result.
        variant: form of the release in words; empty if its kind has one.
        claim: epsilon of the messages in words.
        measured: the kind's main metric.
        floor: the same of a guess without any message; None if its kind has none.
        sizes: number of candidates or images of a record, in words; empty without a value.
        releases: number of messages of a client, in words.
        seeds: number of seeds with a value.
        flags: of its records.
        reasons: why records of it have no number; empty if all have.
    """

    suite: str
    defense: str
    attack: str
    kind: str
    variant: str
    claim: str
    measured: Estimate
    floor: Estimate | None
    sizes: str
    releases: str
    seeds: int
    flags: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def words(self) -> dict[str, str]:
        """The row in words, by column."""
        metric = METRICS[KINDS[self.kind].main]
        number = f"{metric.label} {self.measured.words(metric.digits)} of {self.sizes}" if self.seeds else "n/a"
        if self.measured.largest is not None and self.measured.largest < 1:
            number += f", at most {self.measured.largest:.{metric.digits}f} by the claim"
        if self.floor is not None and self.floor.value is not None:
            number += f", {self.floor.value:.{metric.digits}f} without a message"
        return {
            "defense": self.defense,
            "attack": self.attack + (f", {self.variant}" if self.variant else ""),
            "messages": self.releases,
            "epsilon": self.claim,
            "measured": number,
            "seeds": str(self.seeds),
            "remarks": "; ".join([*(flag.replace("_", " ") for flag in self.flags), *self.reasons]),
        }


def active_results(records: Iterable[Record]) -> tuple[ActiveResult, ...]:
    """Groups records of active servers by suite, defense with budget, attack and form of the release.

    Args:
        records: of any kind and status; those of honest attackers are left out.
    """
    own = [record for record in records if record.active_server and record.attack is not None]
    names: dict[str, list[Record]] = {}
    for record in own:
        names.setdefault(key_of((record.suite, record.defense.name)), []).append(record)
    results = []
    for of_name in names.values():
        settings = differences([record.defense.settings for record in of_name])
        budgets = differences([record.budget for record in of_name])
        groups: dict[str, list[tuple[str, Record]]] = {}
        for record, *details in zip(of_name, settings, budgets, strict=True):
            words = ", ".join(filter(None, details))
            control = f" ({record.control} control)" if record.control else ""
            label = record.defense.name + (f" ({words})" if words else "") + control
            attack = None if record.attack is None else (record.attack.name, record.attack.settings)
            key = key_of((label, attack, record.kind, record.task.noise, record.noise == "secure"))
            groups.setdefault(key, []).append((label, record))
        results += [_result(label_of[0][0], [record for _, record in label_of]) for label_of in groups.values()]
    return tuple(sorted(results, key=lambda r: (r.suite, r.defense, r.kind, r.attack, r.variant)))


def _result(label: str, records: Sequence[Record]) -> ActiveResult:
    first = records[0]
    kind, name = KINDS[first.kind], "" if first.attack is None else first.attack.name
    metric = METRICS[kind.main]
    ok = {record.seed: record for record in records if record.status == "ok"}
    cell = BoardCell(kind=first.kind, attack=name, noise=first.task.noise, records=ok)
    measured, variant = over_seeds(metric.name, cell), kind.variant(first.task.noise)
    sizes = sorted({n for record in ok.values() if (n := record.metrics[metric.name].n)})
    releases = sorted({int(record.task.get("releases", 1)) for record in ok.values()})
    return ActiveResult(
        suite=first.suite,
        defense=label,
        attack=name,
        kind=first.kind,
        variant="" if variant is None else variant.label,
        claim=_claim(ok.values()),
        measured=measured,
        floor=None if metric.floor is None else over_seeds(metric.floor.metric, cell),
        sizes=f"{_from_to(sizes)} {kind.counts}" if sizes else "",
        releases=_from_to(releases) or "n/a",
        seeds=measured.n,
        flags=tuple(dict.fromkeys(flag for record in records for flag in record.flags)),
        reasons=tuple(dict.fromkeys(f"{r.status}: {r.reason}" for r in records if r.status != "ok")),
    )


def _from_to(counts: Sequence[int]) -> str:
    """Formats the smallest and the largest of sorted counts, such as "86" or "84-86"."""
    return "-".join(str(count) for count in dict.fromkeys((*counts[:1], *counts[-1:])))


def _claim(records: Iterable[Record]) -> str:
    claims = [record.claim for record in records if record.claim is not None]
    if not claims:
        return "n/a"
    epsilons = [claim.epsilon for claim in claims]
    finite = [epsilon for epsilon in epsilons if epsilon is not None]
    return "∞" if len(finite) < len(epsilons) else f"{max(finite):.2f}"
