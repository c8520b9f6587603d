"""Canaries that a suite puts into a training, end to end: coins, training, attack, bound, verdict, record, board."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from leakbench.audit.cli.app import main
from leakbench.audit.plan.expand import plan
from leakbench.audit.run.job import compute
from leakbench.audit.run.verify import contradiction
from leakbench.audit.scoring.canaries import NAME
from leakbench.audit.subjects import trained_run
from leakbench.audit.subjects.trained_model import TrainedModel
from leakbench.audit.targets.observed_step import Observed
from leakbench.defenses.core import cross_entropy
from leakbench.defenses.core.randomness.noise import CipherNoise
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.records.record import read_all

from ...parameters import subtests
from ..run.runs import run

CPU = torch.device("cpu")
SUITE = """
name = "toy"
seeds = [0]
budget = { noise_multiplier = 1.732, delta = 1e-5 }
defense = [{ name = "dp_sgd" }]
attack = [{ name = "canary_alignment" }]
controls = false
[task]
data = "digits"
model = { name = "mlp", hidden = 16 }
private = 100
non_member = 100
batch = 100
epochs = 3
lr = 0.5
sampling = "full"
canaries = { kind = "dirac", number = 1000 }
"""
CONTROLLED = SUITE.replace("controls = false", "controls = true")


def job_of(suite, defense: str = "dp_sgd", control: str | None = None):
    (job,) = (
        job
        for job in plan(suite).jobs
        if (job.cells[0].request.defense.name, job.cells[0].request.control) == (defense, control)
    )
    return job


def found(suite, defense: str = "dp_sgd", control: str | None = None) -> Any:
    """The outcome of the attack on canaries."""
    cells = job_of(suite, defense, control).cells
    (outcome,) = (one for cell, one in compute(cells, CPU) if cell.kind == "canaries")
    return outcome


def half_the_noise(monkeypatch):
    real = CipherNoise.add
    monkeypatch.setattr(CipherNoise, "add", lambda self, sums, std: real(self, sums, 0.5 * std))


@pytest.mark.long
def test_a_run_that_outgrows_its_memory_proves_the_same(suite_of, monkeypatch):
    text = SUITE.replace("number = 1000", "number = 100")
    kept = found(suite_of(text))
    monkeypatch.setattr(trained_run, "TRANSCRIPT_MEMORY", 10_000)
    again = found(suite_of(text))
    assert not again.error and (again.metrics, again.flags) == (kept.metrics, kept.flags)


@pytest.mark.long
def test_noise_of_half_the_scale_is_found_by_the_canaries_alone(suite_of, monkeypatch):
    half_the_noise(monkeypatch)
    outcome = found(suite_of(SUITE))
    metric = outcome.metrics[NAME]
    assert metric.detail["verdict"] == "violation" and metric.value > outcome.claim["epsilon"]
    assert "claim_violated" in outcome.flags


@pytest.mark.long
def test_canaries_are_trained_on_by_their_coins_and_the_right_noise_is_not_accused(suite_of):
    job = job_of(suite_of(SUITE))
    subject = TrainedModel(job.cells, CPU)
    utility, canaries = (subject.outcome(cell) for cell in job.cells)
    model: Any = subject.model
    inserted = torch.isin(model.trained_on.ids, model.canaries.examples.ids)
    assert int(inserted.sum()) == int(model.canaries.included.sum()) == canaries.arrays["member"].sum()
    assert 420 < int(inserted.sum()) < 580 and int((~inserted).sum()) == 100
    # What everybody may read does not tell how many coins fell.
    assert utility.task["trained_on"] == 100 and model.run.transcript.steps[0].expected_batch == 100
    # The auditor's own look at the noise knows the canaries, and finds what is claimed.
    assert not [flag for flag in utility.flags if "noise" in flag]
    # A part of the epsilon is proved.
    assert canaries.claim is not None
    metric, claimed = canaries.metrics[NAME], canaries.claim["epsilon"]
    assert canaries.flags == [] and metric.detail["verdict"] == "no violation found"
    assert 0.3 * claimed < metric.value < claimed == pytest.approx(metric.detail["claimed"])
    assert metric.detail["method"] == "order_statistics" and metric.detail["ceiling"] > claimed


@pytest.mark.long
def test_a_model_that_never_saw_a_canary_proves_nothing(suite_of):
    suite = suite_of(CONTROLLED.replace("number = 1000", "number = 200"))
    for defense in ("sgd", "dp_sgd"):
        outcome = found(suite, defense, "negative")
        assert outcome.metrics[NAME].detail["value_at_verdict"] == 0 and not outcome.error
        assert 60 < outcome.arrays["member"].sum() < 140
    assert found(suite, "sgd", "positive").metrics[NAME].value > 3


@pytest.mark.long
@subtests("kind", ["mislabelled", "blank", "crafted", "random", "orthonormal"])
def test_every_kind_is_put_in_and_bounded(suite_of, kind):
    text = SUITE.replace('"dirac", number = 1000', f'"{kind}", number = 80')
    outcome = found(suite_of(text.replace("noise_multiplier = 1.732", "noise_multiplier = 0.3")))
    assert outcome.metrics[NAME].value is not None and not outcome.error
    overlap = kind != "orthonormal"
    assert outcome.metrics[NAME].detail["method"] == ("one_run_f_dp" if overlap else "order_statistics")
    if kind in ("random", "orthonormal"):
        assert outcome.metrics[NAME].value > 1


@pytest.mark.long
def test_under_poisson_sampling_nothing_is_assumed_of_the_mechanism(suite_of):
    outcome = found(suite_of(SUITE.replace('"full"', '"poisson"').replace("batch = 100", "batch = 50")))
    metric = outcome.metrics[NAME]
    assert metric.detail["method"] == "one_run"
    assert metric.detail["delta_at_verdict"] < 1e-9 and metric.value < outcome.claim["epsilon"]


@pytest.mark.long
@subtests("defense", ["random_sparsification", "pcdp", "dpdr", "gep", "diff2", "dpsur"])
def test_masks_subspaces_and_two_blocks_take_canaries(suite_of, defense):
    text = SUITE.replace("dp_sgd", defense).replace('"dirac", number = 1000', '"random", number = 100')
    outcome = found(suite_of(text.replace("noise_multiplier = 1.732", "noise_multiplier = 0.5")), defense)
    assert not outcome.error and not outcome.skipped and outcome.metrics[NAME].value is not None


def test_without_public_examples_the_attack_does_not_apply_and_does_not_fail(suite_of):
    without_public = found(suite_of(SUITE.replace("non_member = 100", "non_member = 100\npublic = 0")))
    assert "the task has none; set task.public" in without_public.skipped


def test_a_count_that_all_rows_share_brings_canaries_together(suite_of):
    text = SUITE.replace("dp_sgd", "adaptive_clipping").replace("number = 1000", "number = 60")
    assert found(suite_of(text), "adaptive_clipping").metrics[NAME].detail["method"] == "one_run_f_dp"


TWICE = '''
from leakbench.defenses.core import Bound, Defense, Whole

class Twice(Bound):
    def factors(self, norms):
        return 2 * super().factors(norms)

def wrong(*, noise_multiplier: float | None = None) -> Defense:
    """Clips to twice the norm that it claims and is charged for."""
    return Defense(Whole(bound=Twice(kind="clip", norm=1.0)), noise_multiplier)
'''


@pytest.mark.long
def test_a_defense_that_claims_half_of_its_norm_is_found_by_canaries_and_ends_the_command_with_1(tmp_path, capsys):
    """The auditor's look at the noise finds nothing: it is as the plan says, and so are contributions."""
    (tmp_path / "wrong.py").write_text(TWICE, encoding="utf-8")
    path = tmp_path / "wrong.toml"
    path.write_text(SUITE.replace('"dp_sgd"', f'"{tmp_path}/wrong.py:wrong"'), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["run", str(path), "--out", str(tmp_path / "out"), "--jobs", "1"])
    assert ended.value.code == 1
    records = {one.kind: one for one in read_all(tmp_path / "out" / "records")}
    assert "claim_violated" in records["canaries"].flags and "claim_violated" not in records["utility"].flags
    assert records["canaries"].metrics[NAME].detail["verdict"] == "violation"
    assert "canary_epsilon" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.slow
def test_over_many_trainings_right_noise_is_accused_within_the_level_and_half_of_it_always(suite_of, monkeypatch):
    counts = {}
    real = CipherNoise.add
    for scale in (1.0, 0.5):
        monkeypatch.setattr(CipherNoise, "add", lambda self, sums, std, scale=scale: real(self, sums, scale * std))
        bounds, accused, claimed = [], 0, 0.0
        for seed in range(40):
            outcome = found(suite_of(SUITE.replace("seeds = [0]", f"seeds = [{seed}]")))
            bounds.append(outcome.metrics[NAME].value)
            accused += outcome.metrics[NAME].detail["verdict"] == "violation"
            claimed = outcome.claim["epsilon"]
        counts[scale] = sum(one > claimed for one in bounds), accused, sum(bounds) / len(bounds)
    print(f"claimed {claimed:.2f}: noise -> bounds above the claim, verdicts, mean bound of 40: {counts}")
    assert counts[1.0][0] <= 5 and counts[1.0][1] == 0  # 2 expected at 0.95 of a bound that is met exactly
    assert counts[0.5][0] == 40 and counts[0.5][1] >= 38


MASKED = SUITE.replace('{ name = "dp_sgd" }', '{ name = "random_sparsification", final_sparsity = 0.8 }').replace(
    "number = 1000", "number = 200"
)


@pytest.mark.long
@subtests("kind", ["dirac", "orthonormal"])
def test_canaries_are_drawn_anew_with_each_mask_and_are_whole_in_all_of_them(suite_of, kind):
    job = job_of(suite_of(MASKED.replace("dirac", kind)), "random_sparsification")
    model: Any = TrainedModel(job.cells, CPU).model
    examples, steps = model.canaries.examples, model.run.transcript.steps
    assert len({step.plan.blocks[0].codec.size for step in steps}) == len(model.canaries.directions) == 3
    for step in steps:
        seen = Observed(step, model.run.model, model.run.transcript.layout, cross_entropy, model.run.views(step.step))
        own = seen.contributions(examples.inputs, examples.labels)
        torch.testing.assert_close(own @ own.T, torch.eye(200), atol=1e-4, rtol=0)
        # Those of the first mask would not be: as one record for all steps they are cut.
        fixed = Observed(step, model.run.model, model.run.transcript.layout, cross_entropy)
        whole = fixed.contributions(examples.inputs, examples.labels).norm(dim=1) > 0.999
        assert bool(whole.all()) == (step.step == 0 or kind == "orthonormal")
    assert not [remark for remark in model.run.remarks if "unverified" in remark]


@pytest.mark.long
@subtests("defense", ["random_sparsification", "pcdp"])
def test_directions_that_a_step_brings_together_are_no_trials_by_themselves(suite_of, defense):
    """Random ones overlap in a mask, and whatever is in a subspace."""
    kind = "random" if defense == "random_sparsification" else "dirac"
    outcome = found(suite_of(MASKED.replace("random_sparsification", defense).replace(", final_sparsity = 0.8", "")
                             .replace("dirac", kind)), defense)  # fmt: skip
    assert outcome.metrics[NAME].detail["method"] == "one_run_f_dp"


@pytest.mark.long
def test_what_redrawn_canaries_prove_and_less_noise_under_masks_is_found(suite_of, monkeypatch):
    suite = suite_of(MASKED.replace("number = 200", "number = 240"))
    right = found(suite, "random_sparsification")
    assert right.metrics[NAME].detail["method"] == "order_statistics" and right.flags == []
    assert 0.2 * right.claim["epsilon"] < right.metrics[NAME].value < right.claim["epsilon"]
    real = CipherNoise.add
    monkeypatch.setattr(CipherNoise, "add", lambda self, sums, std: real(self, sums, 0.3 * std))
    wrong = found(suite, "random_sparsification")
    assert wrong.metrics[NAME].detail["verdict"] == "violation" and "claim_violated" in wrong.flags


def test_more_canaries_than_the_smallest_mask_has_coordinates_are_not_put_in(suite_of):
    suite = suite_of(MASKED.replace("number = 200", "number = 300"))
    skipped = [cell for cell in plan(suite).skipped if cell.kind == "canaries"]
    assert "a mask of 242 coordinates has as many directions of kind 'dirac'" in skipped[0].skip
    # The training goes on without: nobody is put in, and nothing claims that somebody was.
    assert len(TrainedModel(plan(suite).jobs[0].cells, CPU).model.trained_on) == 100


@pytest.mark.long
def test_records_are_written_verified_and_on_the_board(tmp_path):
    records = run(SUITE.replace("number = 1000", "number = 100"), tmp_path)
    folder = tmp_path / "records"
    (record,) = (one for one in records if one.kind == "canaries")
    assert record.status == "ok" and record.requires is not None and record.requires["controls"] == ["CANARIES"]
    assert record.task["canaries"] == {"kind": "dirac", "number": 100}
    assert contradiction(record, folder) == ""
    metric = record.metrics[NAME]
    for change, words in (
        ({"value_at_verdict": 90.0}, "the value_at_verdict of its canary_epsilon is 90.0"),
        ({"correct": 20}, "the correct of its canary_epsilon is 20"),
        ({"method": "one_run"}, "its canary_epsilon is"),
        ({"claimed": 0.1}, "of a record that is added it says 0.1"),
    ):
        edited = replace(record, metrics={NAME: replace(metric, detail=metric.detail | change)})
        assert words in contradiction(edited, folder)
    # What assumes that everybody takes part, of a record where they do not.
    sampled = replace(record, task=record.task | {"sampling": "poisson", "sample_rate": 0.5})
    assert "its sampling is another" in contradiction(sampled, folder)
    board = Board.from_records(read_all(folder))
    (row,) = board.rows
    assert row.estimates[NAME].value == metric.value and "canaries" in board.to_text()
