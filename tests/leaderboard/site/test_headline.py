"""Headline board: Pareto front by means, controls apart, coverage by counting, threat models by the board's code."""

from dataclasses import replace

import numpy as np

from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.records.record import MethodUsed
from leakbench.leaderboard.site.headline import headline, pareto_front, under_each
from leakbench.leaderboard.submissions.rows import NamedRecords

from ..conftest import asked_for, claim, complete, metric, record
from .front_sites import beside_site, front_site


def trained(defense, accuracy, auc, **fields):
    return [
        record("utility", defense=defense, metrics={"accuracy": metric(accuracy, 0.01, better="higher")}, **fields),
        record(defense=defense, metrics={"auc": metric(auc, 0.02)}, **fields),
    ]


def fronts(site, access=None):
    return {
        entry.row.defense.name
        for section in headline(site.rows, access)
        for group in section.groups
        for entry in group.entries
        if entry.front
    }


def test_the_front_has_exactly_the_rows_that_no_other_dominates():
    rng = np.random.default_rng(0)
    points = {f"d{i}": (rng.integers(80, 90) / 100, rng.integers(50, 60) / 100) for i in range(30)}
    site = front_site(*(r for name, (a, u) in points.items() for r in trained(name, a, u)))
    # Sorted by accuracy, a point is on the front if its AUC is below all of larger accuracy, and least of its own.
    expected = set()
    for name, (accuracy, auc) in points.items():
        better = [u for a, u in points.values() if a > accuracy]
        equal = [u for a, u in points.values() if a == accuracy]
        if auc == min(equal) and (not better or auc < min(better)):
            expected.add(name)
    assert fronts(site) == expected and 1 < len(expected) < 30


def test_front_rows_come_first_in_their_budget_and_controls_last_and_never_on_a_front():
    good = trained("good", 0.9, 0.55)
    dominated = trained("dominated", 0.8, 0.6)
    other_budget = trained("loose", 0.7, 0.7, budget={"epsilon": 8.0, "delta": 1e-5}, claim=claim(8.0))
    control = trained("sgd", 0.99, 0.5, claim=claim(None), control="positive")
    (section,) = headline(front_site(*dominated, *good, *other_budget, *control).rows)
    found = [(group.words, [(e.row.defense.name, e.front) for e in group.entries]) for group in section.groups]
    assert found == [
        ("ε 3, δ 1e-5, unit example", [("good", True), ("dominated", False)]),
        ("ε 8, δ 1e-5, unit example", [("loose", True)]),
        ("Controls", [("sgd", False)]),
    ]


def test_a_row_without_both_numbers_or_without_a_rank_is_on_no_front():
    utility, _ = trained("half", 0.9, 0.55)
    refused = record("utility", defense="whole", seed=1, status="failed", reason="OSError")
    site = front_site(utility, *trained("whole", 0.8, 0.6), refused)
    assert pareto_front([row.row for row in site.rows], [None] * len(site.rows)) == set()


def test_coverage_counts_cells_and_attacks_of_the_suite():
    records = [*trained("a", 0.9, 0.6), *trained("b", 0.9, 0.6), record(defense="a", attack="lira")]
    records.append(record(defense="b", attack="rmia", status="failed", reason="OSError"))
    (section,) = headline(front_site(*records).rows)
    found = {e.row.defense.name: e.coverage for group in section.groups for e in group.entries}
    assert (found["a"].cells, found["a"].requested, found["a"].attacks, found["a"].run) == (3, 3, 2, 2)
    # `rmia` has a number on no row.
    assert (found["b"].cells, found["b"].requested, found["b"].attacks, found["b"].run) == (2, 3, 1, 2)


def test_a_threat_model_has_a_front_of_its_own():
    def requires(access):
        return {"access": access, "knows": [], "controls": []}

    records = []
    for name, accuracy, weak, strong in (("a", 0.9, 0.51, 0.8), ("b", 0.8, 0.55, 0.6)):
        records.append(record("utility", defense=name, metrics={"accuracy": metric(accuracy, 0.01, better="higher")}))
        for attack, auc, access in (("loss", weak, "BLACK_BOX"), ("ratio", strong, "ALL_STEPS")):
            records.append(
                record(defense=name, attack=attack, metrics={"auc": metric(auc, 0.01)}, requires=requires(access))
            )
    site = front_site(*records)
    assert fronts(site) == {"a", "b"} and fronts(site, "BLACK_BOX") == {"a"}
    assert list(under_each(site.rows)) == ["BLACK_BOX", "ALL_STEPS"]


def test_of_a_defense_without_noise_the_release_is_the_one_without_noise():
    noiseless = record("reconstruction", noise_multiplier=0.0, claim=claim(None), attack="dlg")
    utility = record("utility", noise_multiplier=0.0, claim=claim(None))
    (section,) = headline(front_site(noiseless, utility).rows)
    (entry,) = section.groups[0].entries
    assert entry.reconstruction.value == 20.0 and entry.floor.value == 11.0
    assert entry.strongest_page == "attacks/dlg/index.html"


def test_a_submission_changes_no_front_rank_or_coverage_of_published_rows():
    def attacked(defense, accuracy, auc, attacks, **fields):
        first, membership = trained(defense, accuracy, auc, **fields)
        return [first, *(replace(membership, id=f"{membership.id[:-1]}{i}", attack=MethodUsed(name=name),
                                 requires={"access": access, "knows": [], "controls": []})
                         for i, (name, access) in enumerate(attacks.items()))]  # fmt: skip

    attacks = {"loss": "BLACK_BOX", "lira": "ALL_STEPS"}
    published = [r for name, a, u in (("a", 0.8, 0.6), ("b", 0.82, 0.65)) for r in attacked(name, a, u, attacks)]
    foreign = attacked("eve/x", 0.9, 0.5, {"loss": "BLACK_BOX", "own": "BLACK_BOX"}, seed=77)
    foreign += attacked("eve/weak", 0.7, 0.7, {"loss": "BLACK_BOX", "own": "BLACK_BOX"}, seed=77)
    board = Board.from_records(published, complete(*published))
    site = beside_site(board, NamedRecords(tuple(foreign), (asked_for(*foreign),)))
    for access in (None, "BLACK_BOX"):
        alone, together = (
            {
                entry.row.defense.name: (
                    entry.front,
                    entry.row.rank,
                    entry.row.ranked_of,
                    entry.row.lacks,
                    entry.coverage,
                )
                for section in headline(rows, access)
                for group in section.groups
                for entry in group.entries
            }
            for rows in (front_site(*published).rows, site.rows)
        )
        assert {name: together[name] for name in alone} == alone
        assert together["eve/x"][:3] == (True, 1, 2) and together["eve/weak"][:3] == (False, 2, 2)
