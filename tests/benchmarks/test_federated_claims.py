"""Verdicts on federated claims: of made-up differences, of made-up records, and of what is measured directly."""

import hashlib
import json
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from leakbench.benchmarks.federated_claims import __main__ as command_line
from leakbench.benchmarks.federated_claims import direct
from leakbench.benchmarks.federated_claims.cells import MethodCells, SuiteResults, reported, settings_of
from leakbench.benchmarks.federated_claims.claims import CLAIMS, by_records
from leakbench.benchmarks.federated_claims.comparisons import PairedDifference, holm, paired, verdict_on
from leakbench.benchmarks.federated_claims.document import markdown
from leakbench.leaderboard.records.record import MethodUsed, Metric, Provenance, Record, RecordedClaim, write

from ..parameters import subtests

SEEDS = range(5)
JITTER = (0.004, -0.003, 0.001, -0.004, 0.002)
"""Deviations by seed, of mean 0; two methods get them in another order, so that their differences vary."""


def difference(mean, spread=0.01, n=5):
    """A difference of this mean over n seeds, with a spread."""
    steps = np.linspace(-1, 1, n) * spread
    return PairedDifference(name="a - b", differences=dict(enumerate(mean + steps)))


def results(accuracies, *, split="iid", noises=(4.0, 10.0), public=0.95):
    """A setting in which a method has these accuracies, one a noise multiplier, with other jitter in every method."""
    task = {"data": "toy", "private": 100, "federated": {"split": split, "clients": 4, "rounds": 2, "local_steps": 3}}
    setting = SuiteResults("toy", task, public_only=dict.fromkeys(SEEDS, public))
    for shift, (name, values) in enumerate(accuracies.items()):
        for noise, value in zip(noises, values, strict=True):
            own = {seed: value + JITTER[(seed + shift) % 5] for seed in SEEDS}
            setting.methods[noise, name] = MethodCells(values={"accuracy": own})
    return setting


def verdicts(setting):
    return {result.claim: result.verdict for result in by_records(setting)}


def test_interval_and_p_value_are_those_of_the_t_test():
    values = np.random.default_rng(3).normal(0.02, 0.03, 6)
    own = PairedDifference(name="", differences=dict(enumerate(values)))
    test: Any = stats.ttest_1samp(values, 0.0)
    assert own.p == pytest.approx(test.pvalue)
    assert own.interval == pytest.approx(tuple(test.confidence_interval(0.95)))


def test_holm_steps_down_and_keeps_the_order():
    # Holm 1979: 0.01 x 4, 0.03 x 3 and 0.04 x 2 = 0.08 below it, 0.005 first.
    assert holm([0.04, 0.01, 0.03, 0.005]) == pytest.approx([0.06, 0.03, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.long
def test_the_family_of_a_claim_errs_in_at_most_the_stated_share():
    """Six differences that are all nothing: a verdict other than `cannot be told` is an error."""
    draws = np.random.default_rng(0).normal(size=(2000, 6, 5))
    wrong = 0
    for draw in draws:
        family = [PairedDifference(name="", differences=dict(enumerate(row))) for row in draw]
        wrong += verdict_on(family) != "cannot be told"
    assert wrong / 2000 <= 0.05 + 4 * (0.05 * 0.95 / 2000) ** 0.5


@subtests(
    ("means", "spread", "n", "expected"),
    [
        ((0.1, 0.2), 0.01, 5, "holds"),
        ((0.1, -0.2), 0.01, 5, "does not hold"),
        ((0.1, 0.001), 0.01, 5, "cannot be told"),
        ((-0.1, -0.001), 0.01, 5, "does not hold"),
        ((0.1, 0.2), 0.2, 5, "cannot be told"),
        ((0.1, 0.2), 0.0001, 2, "cannot be told"),
        ((), 0.01, 5, "n/a"),
    ],
)
def test_a_verdict_needs_all_differences_for_and_one_against(means, spread, n, expected):
    assert verdict_on([difference(mean, spread, n) for mean in means]) == expected


def test_seeds_that_one_of_the_two_lacks_are_left_out_and_none_is_no_difference():
    assert paired("", {0: 1.0, 1: 2.0, 2: 4.0}, {1: 0.5, 2: 1.0, 3: 9.0}).differences == {1: 1.5, 2: 3.0}
    nothing = paired("", {0: 1.0}, {1: 1.0})
    assert (nothing.n, nothing.p) == (0, 1.0)


def test_a_choice_of_the_best_is_paid_for_in_its_favour_alone():
    chosen, plain = (PairedDifference(name="", differences={0: 0.1, 1: 0.12, 2: 0.11}, candidates=n) for n in (4, 1))
    assert chosen.p == pytest.approx(4 * plain.p)
    worse = PairedDifference(name="", differences={0: -0.1, 1: -0.12, 2: -0.11}, candidates=4)
    assert worse.p == pytest.approx(plain.p)


AHEAD = {
    "fed_pcdp": (0.8, 0.7),
    "fed_pdp": (0.7, 0.5),
    "fed_avg": (0.6, 0.2),
    "fed_prox": (0.6, 0.2),
    "fed_lrs": (0.5, 0.1),
    "pfa": (0.4, 0.1),
}


def test_records_on_which_every_claim_holds_or_fails():
    told = verdicts(results(AHEAD, public=0.6))
    assert {claim: told[claim] for claim in ("T1", "T2", "T3", "T9", "T10")} == dict.fromkeys(
        ("T1", "T2", "T3", "T9", "T10"), "holds"
    )
    assert told["T8"] == "n/a" and "T4" not in told
    behind = {name: (1 - weak, 1 - strong) for name, (weak, strong) in AHEAD.items()}
    told = verdicts(results(behind, public=0.99))
    assert {told[claim] for claim in ("T1", "T2", "T3", "T9", "T10")} == {"does not hold"}


def test_a_difference_within_the_spread_of_seeds_cannot_be_told():
    told = verdicts(results(AHEAD | {"fed_pdp": (0.8, 0.7)}))
    assert told["T2"] == told["T3"] == "cannot be told"
    assert told["T1"] == "holds"


def test_an_equal_loss_at_another_level_is_no_smaller_loss():
    """T3 is about the difference of differences: methods that are far behind may lose as little."""
    told = verdicts(results({name: (weak, weak - 0.1) for name, (weak, _) in AHEAD.items()}))
    assert told["T1"] == "holds" and told["T3"] == "cannot be told"


def test_clients_that_are_unlike_have_claims_of_their_own():
    accuracies = {"fed_pcdp": (0.5, 0.4), "fed_avg": (0.4, 0.3), "moon": (0.45, 0.2), "scaffold": (0.1, 0.1)}
    setting = results(accuracies, split="class", noises=(0.0, 4.0))
    for name, drift in (("fed_avg", 3.0), ("fed_pcdp", 2.0)):
        values = {seed: drift + JITTER[seed] * len(name) for seed in SEEDS}
        setting.methods[0.0, name].values["relative_drift"] = values
    assert verdicts(setting) == {
        "T4": "holds",
        "T5": "holds",
        "T8": "holds",
        "T9": "n/a",
        "T10": "does not hold",
    }
    (moon,) = [result for result in by_records(setting) if result.claim == "T5"]
    assert [comparison.mean for comparison in moon.comparisons] == pytest.approx([0.05])


def test_a_verdict_without_some_methods_names_them():
    some = {name: values for name, values in AHEAD.items() if name != "fed_lrs"}
    (first,) = [result for result in by_records(results(some)) if result.claim == "T1"]
    assert first.verdict == "holds"
    assert first.remarks == ("not measured: fed_pcdp - fed_lrs, noise 4; fed_pcdp - fed_lrs, noise 10",)


def record(
    name: str,
    seed: int,
    accuracy: float,
    *,
    noise: float | None = 4.0,
    kind: str = "utility",
    control: str | None = None,
    flags: tuple[str, ...] = (),
    rounds: int = 2,
    settings: Any = None,
    **changes: Any,
) -> Record:
    """A record of a toy federation, by name and seed; `task` adds to its task, other changes replace fields."""
    clients = {"clients": 4, "split": "iid", "rounds": rounds, "local_steps": 3}
    task = {"data": "digits", "model": "mlp", "private": 100, "batch": 5, "lr": 0.5, "federated": clients}
    task |= changes.pop("task", {})
    digest = hashlib.sha256(repr((name, seed, noise, kind, control, rounds)).encode()).hexdigest()[:16]
    metrics = {"accuracy": Metric(value=accuracy, n=10, better="higher")}
    if kind == "federation":
        metrics = {"bytes_up": Metric(value=accuracy, n=10, better="lower")}
    return Record(
        **{
            "id": digest,
            "suite": "toy",
            "suite_digest": "d",
            "kind": kind,
            "control": control,
            "defense": MethodUsed(name=name, settings=settings or {"clip_norm": 1.0}),
            "task": task | {"trained_on": 100, "steps": 6, "sampling": "poisson", "sample_rate": 0.2},
            "budget": {"delta": 1e-5} if noise is None else {"noise_multiplier": noise, "delta": 1e-5},
            "claim": RecordedClaim(
                epsilon=1.0, delta=1e-5, relation="add_remove", sampling="poisson", accountant="PLD", reason=None
            ),
            "metrics": metrics,
            "seed": seed,
            "device": "cpu",
            "provenance": Provenance(version="0.1.0", source="0" * 64, versions={"torch": "2"}),
            "seconds": 1.0,
            "flags": flags,
        }
        | changes
    )


def made_records():
    kept = [record("sgd", seed, 0.95, noise=None, control="public_only") for seed in SEEDS]
    for shift, (name, values) in enumerate(AHEAD.items()):
        for noise, value in zip((4.0, 10.0), values, strict=True):
            kept += [
                record(name, seed, value + JITTER[(seed + shift) % 5], noise=noise, flags=("tuned_on_public",))
                for seed in SEEDS
            ]
    return kept


def test_records_become_the_cells_that_they_are_of():
    (setting,) = settings_of([*made_records(), record("fed_avg", 0, 44.0, kind="federation")])
    assert setting.noises == [4.0, 10.0] and setting.names(4.0) == sorted(AHEAD)
    assert setting.of(10.0, "fed_pdp")[2] == pytest.approx(0.5 + JITTER[3])
    assert setting.of(4.0, "fed_avg", "bytes_up") == {0: 44.0}
    assert setting.public_only == dict.fromkeys(SEEDS, 0.95)
    assert setting.methods[4.0, "fed_lrs"].tuned
    assert setting.methods[4.0, "fed_lrs"].settings[1] == {"lr": 0.5, "clip_norm": 1.0}


def test_the_papers_figures_stand_beside_its_data_alone():
    figures = reported("mnist")
    assert len(figures) == len(reported("fashion_mnist")) == 20 and reported("digits") == {}
    assert (figures["fed_pcdp", 10.0], figures["fed_avg", 4.0]) == (0.8365, 0.8470)


def test_other_rounds_are_another_setting_and_a_grid_of_one_method_is_refused():
    assert len(settings_of([record("fed_avg", 0, 0.5), record("fed_avg", 0, 0.5, rounds=3)])) == 2
    grid = [record("fed_avg", 0, 0.5, settings={"clip_norm": value}) for value in (1.0, 2.0)]
    with pytest.raises(ValueError, match="must have one record of fed_avg in toy at noise 4, seed 0, got two"):
        settings_of(grid)


def test_the_command_writes_verdicts_with_public_only_beside_them(tmp_path):
    (tmp_path / "records").mkdir()
    for made in made_records():
        write(made, tmp_path / "records")
    run = CliRunner().invoke(command_line.app, ["--no-direct", "--out", str(tmp_path / "out"), str(tmp_path)])
    assert run.exit_code == 0, run.output
    content = json.loads((tmp_path / "out" / "claims.json").read_text("utf-8"))
    told = {claim["claim"]: claim["verdict"] for claim in content["claims"]}
    assert told == {"T1": "holds", "T2": "holds", "T3": "holds", "T8": "n/a", "T9": "holds", "T10": "does not hold"}
    text = (tmp_path / "out" / "claims.md").read_text("utf-8")
    assert "| - | public_only | 0.950 [0.950, 0.950] |" in text
    assert f"| T2 | {CLAIMS['T2']} | toy | holds | 5 |" in text
    assert "fewer than" not in text


def test_fewer_seeds_than_specified_are_marked():
    setting = results(AHEAD)
    for cells in setting.methods.values():
        cells.values["accuracy"] = {seed: value for seed, value in cells.of("accuracy").items() if seed < 3}
    text = markdown(by_records(setting), [setting])
    assert "| 3* |" in text and "fewer than the 5 seeds" in text


def test_a_private_best_that_is_noisy_is_not_called_worse_than_public_data():
    """T10: the method with the largest mean of a sample may be steady and worse, beside a noisy better one."""
    draw, wrong = np.random.default_rng(0), 0
    for _ in range(200):
        setting = results({"fed_pcdp": (0.0,), "fed_avg": (0.0,), "pfa": (0.0,)}, noises=(4.0,), public=0.5)
        for name, mean, spread in (("fed_pcdp", 0.505, 0.12), ("fed_avg", 0.47, 0.002), ("pfa", 0.47, 0.002)):
            own = mean + spread * draw.normal(size=5)
            setting.methods[4.0, name] = MethodCells(values={"accuracy": dict(enumerate(own.tolist()))})
        wrong += verdicts(setting)["T10"] == "does not hold"
    assert wrong <= 20  # 5 % and four standard errors


def test_the_best_is_chosen_among_methods_with_all_seeds():
    """A single lucky seed is no best method; without it, the verdict is on the others, and not that they are worse."""
    setting = results(AHEAD, public=0.6)
    setting.methods[4.0, "lucky"] = MethodCells(values={"accuracy": {0: 0.99}})
    (best,) = [result for result in by_records(setting) if result.claim == "T10"]
    assert best.verdict == "holds" and best.comparisons[0].name.startswith("fed_pcdp")
    behind = results(AHEAD, public=0.9)
    assert verdicts(behind)["T10"] == "does not hold"
    behind.methods[4.0, "lucky"] = MethodCells(values={"accuracy": {0: 0.99}})
    behind.methods[10.0, "lucky"] = MethodCells(values={"accuracy": {0: 0.99}})
    assert verdicts(behind)["T10"] == "cannot be told"


def test_a_method_that_proves_nothing_is_no_private_method():
    nothing = RecordedClaim(
        epsilon=None, delta=1e-5, relation="add_remove", sampling="poisson", accountant="PLD", reason="no bound"
    )
    unbounded = [record("local_noise_filter", seed, 0.99 + JITTER[seed], claim=nothing) for seed in SEEDS]
    (setting,) = settings_of([*made_records(), *unbounded])
    (best,) = [result for result in by_records(setting) if result.claim == "T10"]
    assert best.verdict == "does not hold" and best.comparisons[0].name.startswith("fed_pcdp - ")
    assert any("proves nothing" in words and "local_noise_filter" in words for words in best.remarks)
    (line,) = [line for line in markdown(by_records(setting), [setting]).splitlines() if "| local_noise_filter" in line]
    assert line.endswith("| ∞ |")


@subtests(
    ("first", "second", "words"),
    [
        (("sgd", 0, {"noise": None, "control": "public_only"}), {"seconds": 2.0}, "one record of public_only in toy"),
        (
            ("fed_pcdp", 0, {"settings": {"rank": 5}}),
            {"seed": 1, "settings": {"rank": 9}},
            "the same settings for every",
        ),
        (("fed_avg", 0, {}), {"seed": 1, "budget": {"noise_multiplier": 4.0, "delta": 1e-3}}, "the same settings for"),
        (("fed_avg", 0, {}), {"seed": 1, "task": {"momentum": 0.9}}, "the same settings for every"),
        (
            ("fed_avg", 0, {"task": {"digest": "a" * 64}}),
            {"name": "moon", "task": {"digest": "b" * 64}},
            "the same data",
        ),
    ],
)
def test_results_that_are_no_pairs_are_refused(first, second, words):
    name, seed, settings = first
    other = {"name": name, "seed": seed} | settings | second
    with pytest.raises(ValueError, match=words):
        settings_of([record(name, seed, 0.5, **settings), record(accuracy=0.6, **other)])


def test_the_same_control_in_two_folders_is_one():
    twice = [record("sgd", 0, 0.9, noise=None, control="public_only") for _ in range(2)]
    (setting,) = settings_of(twice)
    assert setting.public_only == {0: 0.9}


def test_seeds_that_are_left_out_are_named_and_the_verdict_says_so():
    """Runs that fail are no fair sample of the seeds."""
    made = [kept for kept in made_records() if (kept.defense.name, kept.seed) not in {("fed_pcdp", 3), ("fed_pcdp", 4)}]
    made += [
        record("fed_pcdp", seed, 0.5, noise=noise, status="failed", reason="it diverged", metrics={}, claim=None)
        for seed in (3, 4)
        for noise in (4.0, 10.0)
    ]
    (setting,) = settings_of(made)
    (second,) = [result for result in by_records(setting) if result.claim == "T2"]
    assert second.verdict == "holds" and second.partial
    assert any("seeds left out" in words and "noise 4: 3, 4" in words for words in second.remarks)
    text = markdown(by_records(setting), [setting])
    assert f"| T2 | {CLAIMS['T2']} | toy | holds (of what was measured) | 3* |" in text
    assert "not measured: fed_pcdp, noise 10, seed 4, utility: it diverged" in text


def test_an_accuracy_that_is_not_a_number_is_named():
    bad = {"accuracy": Metric(value=None, n=0, better="higher", reason="no test example")}
    (setting,) = settings_of([record("fed_avg", 0, 0.5, metrics=bad)])
    assert setting.missing == ["fed_avg, noise 4, seed 0: no test example"]


def test_a_claim_without_one_of_its_methods_or_levels_says_that_it_is_a_part():
    some = {name: values for name, values in AHEAD.items() if name != "fed_lrs"}
    parts = {result.claim: result.partial for result in by_records(results(some))}
    assert parts["T1"] and not parts["T2"]
    (fourth,) = [result for result in by_records(results(AHEAD, split="class")) if result.claim == "T4"]
    assert fourth.verdict == "holds" and fourth.partial  # no level without noise


def test_settings_of_one_suite_have_names_of_their_own():
    two = settings_of([record("fed_avg", 0, 0.5), record("fed_avg", 0, 0.5, rounds=3)])
    assert [setting.suite for setting in two] == ["toy", "toy (rounds 3)"]


def test_records_that_differ_in_the_attacked_client_alone_are_of_one_setting():
    clients = {"clients": 4, "split": "iid", "rounds": 2, "local_steps": 3}
    attacked = [{}, {"attacked": None}, {"attacked": 1}]
    records = [
        record("fed_avg", seed, 0.5 + seed / 10, task={"federated": clients | own}) for seed, own in enumerate(attacked)
    ]
    (setting,) = settings_of(records)
    assert setting.suite == "toy" and setting.of(4.0, "fed_avg") == pytest.approx({0: 0.5, 1: 0.6, 2: 0.7})


@pytest.mark.long
def test_bytes_are_the_closed_forms_and_the_claim_is_about_one_way():
    up, both = direct.bytes_of_messages()
    assert (up.verdict, both.verdict) == ("holds", "does not hold")
    assert "104,040 and 1,960 bytes (closed forms 104,040 and 1,960), 53.1 times fewer" in up.facts[0]
    assert "10,368,000 bytes" in both.facts[1]


@pytest.mark.long
def test_noise_of_corrections_is_measured_and_fed_avg_in_its_place_is_refused(monkeypatch):
    right = direct.variance_of_corrections(clients=4, members=(2,))
    assert right.verdict == "holds", right.facts
    real = direct.method
    monkeypatch.setattr(direct, "method", lambda name, **settings: real("fed_avg", **settings))
    assert direct.variance_of_corrections(clients=4, members=(2,)).verdict == "does not hold"


@pytest.mark.long
def test_a_projected_message_loses_norm_and_coefficients_of_projected_steps_none(monkeypatch):
    monkeypatch.setattr(direct, "SEEDS", (0, 1, 2))
    lost = direct.norm_lost()
    assert lost.verdict == "holds"
    assert all(0.3 < value < 1 for value in lost.comparisons[0].differences.values())
