"""Rows and files are all that is added for another access, another kind of result, results that cells wait for."""

import json
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType

import pandas as pd
import pytest
import torch

from leakbench.attacks.core import RESULTS, Access, Examples, Knows
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.catalog import plugins
from leakbench.audit.evidence.claim_bounds import clopper_pearson
from leakbench.audit.external.model.attacks import Audited, run_attacks
from leakbench.audit.plan import threat_models
from leakbench.audit.plan.artifact import Artifact
from leakbench.audit.plan.cells import Cell
from leakbench.audit.plan.expand import plan
from leakbench.audit.plan.threat_models import THREAT_MODELS, ThreatModel, black_box
from leakbench.audit.run import harness, verify
from leakbench.audit.subjects import table
from leakbench.audit.subjects.outcome import Finding
from leakbench.audit.subjects.trained_run import TrainedRun
from leakbench.audit.targets.candidates import Candidates
from leakbench.audit.targets.observe import RunView, logits_of
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.kinds import KINDS, KindOfResult
from leakbench.leaderboard.metrics import METRICS, BoardColumn, KnownMetric
from leakbench.leaderboard.records.record import Metric, Record

from .conftest import SUITE

CPU = torch.device("cpu")

LABELS_ALONE = '''
"""Asks the final model for its labels alone, and takes for members whom it labels right."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakbench.attacks.core import Access, Examples, MembershipScores, Target, attack

LABEL_ONLY = Access("LABEL_ONLY", "the labels that the final model predicts")


@dataclass(frozen=True, kw_only=True)
class Labels(Target):
    """The predicted labels of a model, and nothing else of it."""

    accesses: ClassVar[tuple[Access, ...]] = (LABEL_ONLY,)

    predict: Callable[[Tensor], Tensor]
    candidates: Examples | None = None


@attack(access=LABEL_ONLY)
def gap(target: Labels, coins: torch.Generator) -> MembershipScores:
    """Members are labelled right more often (Yeom et al., CSF 2018)."""
    asked = target.candidates
    right = target.predict(asked.inputs) == asked.labels
    return MembershipScores(ids=asked.ids, scores=right.double(), exact=False)
'''


@pytest.fixture
def label_only(tmp_path, monkeypatch):
    """An access that leakbench lacks: target and attack are in a file of their own, its row and builder here."""
    file = tmp_path / "label_only.py"
    file.write_text(LABELS_ALONE)
    name = f"{file}:gap"
    attack = plugins.load("attack", name)

    def build(view):
        model = view.attackers_model
        return attack.target(predict=lambda inputs: logits_of(model, inputs).argmax(dim=1), candidates=view.given)

    access = attack.requires.access
    row = ThreatModel(kind="membership", access=access, knows=Knows.NOTHING, subject="trained_model", build=build)
    monkeypatch.setitem(THREAT_MODELS, ("membership", access), row)
    return name


def test_another_access_is_a_row_and_a_builder(suite_of, label_only, tmp_path):
    text = SUITE.replace('{ name = "likelihood_ratio" }', f'{{ name = "{label_only}" }}')
    records = harness.run(suite_of(text), tmp_path / "out", device=CPU, jobs=1)
    mine = [record for record in records if record.attack is not None and record.attack.name == label_only]
    assert len(mine) == 2 and all(record.status == "ok" for record in mine), [record.reason for record in mine]
    assert {(record.requires or {})["access"] for record in mine} == {"LABEL_ONLY"}
    assert all((record.metrics["auc"].value or 0) > 0.4 for record in mine)
    assert all(record.provenance.third_party.keys() == {f"attack {label_only}"} for record in mine)


def test_its_row_serves_audits_of_finished_models_too(label_only):
    examples = [Examples(ids=torch.arange(4) + 4 * n, inputs=torch.eye(4), labels=torch.arange(4)) for n in range(2)]
    audited = Audited(model=torch.nn.Identity(), members=examples[0], non_members=examples[1], classes=4)
    (outcome,) = run_attacks(audited, [(label_only, {})], delta=1e-5)
    assert outcome.scores is not None and outcome.scores.scores.tolist() == [1.0] * 8, outcome.why_not
    assert outcome.requires["access"] == "LABEL_ONLY"


def test_without_its_row_no_suite_offers_it(suite_of, label_only, monkeypatch):
    monkeypatch.delitem(THREAT_MODELS, ("membership", plugins.load("attack", label_only).requires.access))
    text = SUITE.replace('{ name = "likelihood_ratio" }', f'{{ name = "{label_only}" }}')
    skipped = plan(suite_of(text)).skipped
    assert skipped and all("needs LABEL_ONLY access, which no suite offers yet" in cell.skip for cell in skipped)


def shadow(number: int, folder, device: torch.device) -> dict:
    """Stands for a shadow model: leaves a trace each time that it is computed."""
    with (folder / f"made_{number}").open("a") as trace:
        trace.write("x")
    if number == 9:
        raise ValueError("it diverged")
    return {"mean": number / 10}


def waiting(suite_of, monkeypatch, folder, numbers=(1, 2)):
    """A suite whose black-box attacks wait for shadow models, the same ones for every defense."""
    row = THREAT_MODELS["membership", Access.BLACK_BOX]

    def needs(request):
        made = [
            Artifact({"shadow": n, "seed": request.seed}, f"shadow {n}", partial(shadow, n, folder)) for n in numbers
        ]
        return tuple(made)

    new = threat_models.ThreatModel(**{**vars(row), "needs": needs})
    monkeypatch.setitem(THREAT_MODELS, ("membership", Access.BLACK_BOX), new)
    seen = []
    real = table.SUBJECTS["trained_model"]

    def watched(cells, device, artifacts):
        seen.append({name: dict(result) for name, result in artifacts.items()})
        return real(cells, device, artifacts)

    monkeypatch.setitem(table.SUBJECTS, "trained_model", watched)
    return suite_of(SUITE), seen


def traces(folder) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("made_*")}


@pytest.mark.long
def test_cells_wait_for_results_that_are_computed_once_and_kept(suite_of, monkeypatch, tmp_path):
    suite, seen = waiting(suite_of, monkeypatch, tmp_path)
    run = partial(harness.run, suite, tmp_path / "out", device=CPU, jobs=1)
    records = run()
    assert all(record.status == "ok" for record in records)
    assert traces(tmp_path) == {"made_1": "x", "made_2": "x"}  # though two trainings wait for both
    assert len(seen) == 2 and all(sorted(r["mean"] for r in one.values()) == [0.1, 0.2] for one in seen)
    for path in (tmp_path / "out" / "records").glob("*.json"):
        path.unlink()
    run()
    assert traces(tmp_path) == {"made_1": "x", "made_2": "x"}
    (first, *_) = sorted((tmp_path / "out" / "artifacts").glob("*.json"))
    edited = json.loads(first.read_text())
    edited["result"]["mean"] = 0.7
    first.write_text(json.dumps(edited))
    for path in (tmp_path / "out" / "records").glob("*.json"):
        path.unlink()
    with pytest.raises(ValueError, match="it was edited after it was written"):
        run()
    run(recompute=True)
    assert sorted(traces(tmp_path).values()) == ["x", "xx"]


def test_a_result_that_fails_is_the_error_of_the_cells_that_wait_for_it(suite_of, monkeypatch, tmp_path):
    suite, _ = waiting(suite_of, monkeypatch, tmp_path, numbers=(1, 9))
    records = harness.run(suite, tmp_path / "out", device=CPU, jobs=1)
    assert records and all(record.status == "failed" for record in records)
    assert all("shadow 9 failed: ValueError: it diverged" in (record.reason or "") for record in records)
    harness.run(suite, tmp_path / "out", device=CPU, jobs=1)
    assert traces(tmp_path) == {"made_1": "x", "made_9": "xx"}  # what failed is tried again


def test_what_cannot_be_run_waits_for_nothing(suite_of, monkeypatch, tmp_path):
    suite, _ = waiting(suite_of, monkeypatch, tmp_path)
    assert all(not cell.needs for cell in plan(suite).cells if cell.kind == "utility")
    jobs = [job for job in plan(suite).jobs if job.needs]
    assert jobs and all(len(job.needs) == 2 for job in jobs)
    assert not traces(tmp_path)


ATTRIBUTE = '''
"""Guesses whether the label of a candidate is even, from the answers of the final model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from leakbench.attacks.core import RESULTS, Access, ModelAccess, ResultType, attack, granted


@dataclass(frozen=True, kw_only=True)
class Parities:
    """A guess for each candidate."""

    ids: Tensor
    even: Tensor


def expected(target):
    asked = granted(target.candidates).ids.clone()

    def checked(result):
        if type(result) is not Parities or not torch.equal(result.ids, asked):
            raise ValueError("parities must be of the candidates")
        return result

    return checked


RESULTS["attribute"] = ResultType(kind="attribute", result=Parities, expected=expected, of_candidates=True)


@attack(access=Access.BLACK_BOX)
def parity(target: ModelAccess, coins: torch.Generator) -> Parities:
    """The parity of the predicted class."""
    asked = granted(target.candidates)
    return Parities(ids=asked.ids, even=target.logits(asked.inputs).argmax(dim=1) % 2 == 0)
'''


def parity_metric(right: torch.Tensor) -> Metric:
    low, high = clopper_pearson(int(right.sum()), len(right))
    return Metric(value=float(right.float().mean()), low=low, high=high, n=len(right), better="lower")


def parity_again(record: Record, table: pd.DataFrame) -> dict[str, Metric]:
    """Recomputes the metric from the arrays of a record."""
    return {"parity_accuracy": parity_metric(torch.tensor(table["right"].to_numpy()))}


def ask_parity(model: TrainedRun, cell: Cell) -> Finding:
    """What computes the kind on a trained model: whom it is about, what it is given, how it is scored."""
    members = model.members
    candidates = Candidates.draw(members, cell.request.seed_for(cell.id))
    view = RunView(model.run, model.public_knowledge, members, model.sampling[0], candidates)
    row = THREAT_MODELS["attribute", Access.BLACK_BOX]
    assert row.build is not None
    result = catalog.attack(cell.request.requested_attack.name)(row.build(view))
    labels = dict(zip(candidates.aliases.tolist(), candidates.given.labels.tolist(), strict=True))
    truth = torch.tensor([labels[alias] % 2 == 0 for alias in result.ids.tolist()])
    right = result.even == truth
    return Finding({"parity_accuracy": parity_metric(right)}, {"right": right.numpy()})


@pytest.fixture
def attribute(tmp_path, monkeypatch):
    """A kind of result that leakbench lacks: a row in each table, and two files of its name."""
    file = tmp_path / "attribute.py"
    file.write_text(ATTRIBUTE)
    monkeypatch.setitem(RESULTS, "attribute", None)  # so that what the file adds is taken back
    name = f"{file}:parity"
    plugins.load("attack", name)
    row = ThreatModel(
        kind="attribute", access=Access.BLACK_BOX, knows=Knows.NOTHING, subject="trained_model", build=black_box
    )
    monkeypatch.setitem(THREAT_MODELS, ("attribute", Access.BLACK_BOX), row)
    for folder, functions in (("subjects", {"attribute": ask_parity}), ("scoring", {"again": parity_again})):
        module = ModuleType(f"leakbench.audit.{folder}.attribute")
        module.__spec__ = ModuleSpec(module.__name__, loader=None)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    kind = KindOfResult(name="attribute", main="parity_accuracy", counts="guesses", question="asked for parities")
    monkeypatch.setitem(KINDS, "attribute", kind)
    column = BoardColumn(key="parity", header=("parity", "accuracy"), title="Parity", hint="0.5 is chance.")
    metric = KnownMetric(
        name="parity_accuracy", kind="attribute", label="parity accuracy", better="lower", chance=0.5, columns=(column,)
    )
    monkeypatch.setitem(METRICS, "parity_accuracy", metric)
    return name


@pytest.mark.long
def test_another_kind_of_result_is_a_row_in_each_table_and_two_files_of_its_name(suite_of, attribute, tmp_path):
    text = SUITE.replace('{ name = "likelihood_ratio" }', f'{{ name = "{attribute}" }}')
    text = text.replace("epochs = 1", "epochs = 5")
    run = partial(harness.run, suite_of(text), tmp_path / "out", device=CPU, jobs=1)
    mine = [record for record in run() if record.kind == "attribute"]
    assert len(mine) == 2 and all(record.status == "ok" for record in mine), [record.reason for record in mine]
    assert all((record.metrics["parity_accuracy"].value or 0) > 0.5 for record in mine)
    run(verify=True)
    words = Board.from_folder(tmp_path / "out", verify.contradiction).to_text(width=200)
    assert "parity" in words and f"{mine[0].metrics['parity_accuracy'].value:.2f}" in words
