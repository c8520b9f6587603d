"""Suites on checkpoints: nothing is trained, an added attack meets every checkpoint, mismatches are errors."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from leakbench.audit.cli import app as cli
from leakbench.audit.plan.checkpoints import stored_weights
from leakbench.audit.plan.expand import plan
from leakbench.audit.run import harness
from leakbench.audit.run.verify import contradiction
from leakbench.audit.subjects import shadow_bank, trained_run
from leakbench.audit.suite import suite as suites
from leakbench.audit.suite.suite import SuiteError, load
from leakbench.defenses.core import OngoingRun
from leakbench.leaderboard.checks.suites import checkpoint_faults
from leakbench.leaderboard.records.details import LARGEST_UNDER_CLAIM
from leakbench.leaderboard.records.files import digest_of_bytes
from leakbench.leaderboard.records.manifest import read_manifests
from leakbench.leaderboard.records.record import RecordError
from leakbench.leaderboard.records.task import TrainingTask
from leakbench.leaderboard.submissions.method_file import code_faults

from ...leaderboard.submissions.declarations import declaration
from ..conftest import SUITE as TRAINED
from .conftest import NAMES

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def documented_attack() -> str:
    """The example of benchmarks/README.md."""
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    section = page.partition("### Bring an attack")[2]
    (code,) = re.findall(r"```python\n(\"\"\".*?)```", section, re.DOTALL)
    return code


@pytest.fixture
def mine(tmp_path, monkeypatch) -> str:
    """The documented attack in a file of the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "margin.py").write_text(documented_attack(), encoding="utf-8")
    return "margin.py:margin"


@pytest.fixture
def untrained(monkeypatch):
    """Fails any training of this process."""

    def refused(*arguments, **settings):
        raise AssertionError("a suite with zoo must train nothing")

    monkeypatch.setattr(OngoingRun, "run", refused)
    monkeypatch.setattr(shadow_bank, "train", refused)
    monkeypatch.setattr(shadow_bank, "train_stacked", refused)
    monkeypatch.setattr(trained_run, "OngoingRun", refused)


@pytest.mark.long
def test_an_added_attack_is_on_the_board_of_every_checkpoint_and_nothing_is_trained(zoo, mine, untrained, tmp_path):
    events: list[str] = []
    suite = load(zoo / "tiny.toml").with_added(attacks=[mine])
    report = lambda done, total, activity: events.append(activity)  # noqa: E731 - a listener
    records = harness.run(suite, tmp_path / "out", device=CPU, jobs=1, report=report)
    assert {record.status for record in records} == {"ok"}
    ours = [record for record in records if record.attack is not None and record.attack.name == mine]
    assert len(ours) == len(NAMES) and len({record.task["checkpoint_digest"] for record in ours}) == len(NAMES)
    assert all(record.provenance.third_party for record in ours)
    assert "ran_beside_the_data" not in {flag for record in records for flag in record.flags}
    assert not [event for event in events if "train" in event] and any("attack sgd" in event for event in events)
    assert not (tmp_path / "out" / "artifacts").exists()
    assert not [fault for record in records if (fault := contradiction(record, tmp_path / "out" / "records"))]


@pytest.mark.long
def test_the_claim_of_a_record_is_that_of_its_checkpoint(zoo, tiny, tmp_path):
    records = harness.run(tiny, tmp_path, device=CPU, jobs=1)
    for record in records:
        assert record.claim is not None and record.claim.delta == 1e-5
        assert (record.claim.epsilon is not None) == (record.defense.name == "dp_sgd")
    bounded = next(r for r in records if r.defense.name == "dp_sgd" and r.attack is not None)
    assert 0.5 < bounded.metrics["auc"].detail[LARGEST_UNDER_CLAIM] < 1


def test_ids_of_a_suites_own_cells_do_not_depend_on_what_is_added(zoo, mine, tmp_path):
    (tmp_path / "toy.toml").write_text(TRAINED, encoding="utf-8")
    for source in (zoo / "tiny.toml", tmp_path / "toy.toml"):
        suite = load(source)
        added = suite.with_added(attacks=[mine])
        before, after = ({cell.id for cell in plan(chosen).cells} for chosen in (suite, added))
        assert before < after and added.digest == suite.digest
        assert not any(cell.changes for cell in plan(added).cells)
    more = load(tmp_path / "toy.toml").with_added(defenses=["dp_snip"])
    assert before < {cell.id for cell in plan(more).cells}


@pytest.mark.long
def test_attacks_score_the_checkpoint_as_they_score_the_training_it_comes_from(zoo, tiny, tmp_path):
    (tmp_path / "tiny.toml").write_text((zoo / "tiny.toml").read_text().replace('zoo = "tiny"\n', ""), encoding="utf-8")
    trained = harness.run(load(tmp_path / "tiny.toml"), tmp_path / "trained", device=CPU, jobs=1)
    attacked = harness.run(tiny, tmp_path / "attacked", device=CPU, jobs=1)

    def figures(records):
        return {
            (r.defense.name, r.control, r.attack.name): r.metrics["auc"].value
            for r in records
            if r.attack is not None and r.attack.name != "label_only"
        }

    expected, computed = figures(trained), figures(attacked)
    assert computed.keys() <= expected.keys() and len(computed) == 4 * len(NAMES)
    for key, value in computed.items():
        # Shadow models' outputs are rounded to half precision.
        assert value == pytest.approx(expected[key], abs=0.02 if key[2] in ("lira", "rmia") else 1e-9), key


def test_records_name_the_attacked_checkpoint_and_a_check_refuses_another_name_or_digest(zoo, tiny, tmp_path):
    records = harness.run(tiny, tmp_path, device=CPU, jobs=1)
    for record in records:
        assert isinstance(record.task, TrainingTask) and record.task.checkpoint is not None
        weights = zoo / record.task.checkpoint.name / "weights.safetensors"
        assert record.task.checkpoint.sha256 == digest_of_bytes(weights.read_bytes())
        assert record.task.checkpoint.name == checkpoint_of(record)
    manifests = read_manifests(tmp_path / "records")
    assert manifests is not None
    (manifest,) = manifests
    zoos = {manifest.suite_digest: stored_weights("tiny")}
    assert {name for name, _ in zoos[manifest.suite_digest].values()} == {*NAMES}
    first, second = (next(r for r in records if checkpoint_of(r) == name) for name in (NAMES[0], NAMES[2]))
    own, other = (dict(record.task["checkpoint"]) for record in (first, second))
    forged = {
        "another name": {"checkpoint": own | {"name": NAMES[2]}},
        "other weights": {"checkpoint": own | {"sha256": "0" * 64}},
        "a consistent other": {"checkpoint": other},
        "an unknown one": {"checkpoint_digest": "1" * 64},
        "an older record": {"checkpoint": None},
    }
    files = {words: replace(first, task=first.task | change) for words, change in forged.items()}
    faults = {fault.file: fault for fault in checkpoint_faults(files | {"own": first}, zoos)}
    assert faults.keys() == forged.keys() - {"an older record"}
    assert {fault.severity for fault in faults.values()} == {"refused"}
    assert NAMES[0] in faults["other weights"].problem and faults["an unknown one"].field == "task.checkpoint_digest"


@pytest.mark.long
def test_a_submitted_checkpoint_must_be_named_by_the_records_that_name_any(tiny, tmp_path):
    records = harness.run(tiny, tmp_path, device=CPU, jobs=1)
    named = records[0].task["checkpoint"]["sha256"]
    without = [replace(record, task=record.task | {"checkpoint": None}) for record in records]
    for sha256, given, severities in [
        (named, records, []),
        ("2" * 64, records, ["refused"]),
        ("2" * 64, without, ["flagged"]),
    ]:
        submitted = declaration(kind="checkpoint", method=None, checkpoint={"sha256": sha256})
        faults = [*code_faults(tmp_path, "ada/x", submitted, given, lambda _: "")]
        assert [fault.severity for fault in faults if fault.field == "checkpoint.sha256"] == severities


def checkpoint_of(record) -> str:
    """The name that the request of a record stands for."""
    control = "/never_saw" if record.control == "negative" else ""
    budget = "/eps8" if record.defense.name == "dp_sgd" and not control else ""
    return f"tiny/{record.defense.name}{control}{budget}/seed0"


def test_a_checkpoint_of_another_training_is_an_error_and_not_trained_anew(zoo, tiny):
    for override, words in {
        "task.epochs=3": "got another epochs; a suite with zoo trains nothing",
        "defense.dp_sgd.clip_norm=2.0": "got another defense",
        "seeds=[1]": "no checkpoint named 'tiny/sgd/seed1'; did you mean 'tiny/sgd/seed0'",
        "budget.epsilon=4.0": "no checkpoint named 'tiny/dp_sgd/eps4/seed0'",
    }.items():
        with pytest.raises(SuiteError, match=re.escape(words)):
            plan(tiny.with_overrides([override]))
    with pytest.raises(SuiteError, match="got another noise"):
        plan(tiny, secure_noise=True)


@pytest.mark.long
def test_a_checkpoint_that_changes_after_the_plan_fails_its_cells(zoo, tiny, tmp_path):
    path = zoo / NAMES[0] / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")
    records = harness.run(tiny, tmp_path, device=CPU, jobs=1)
    failed = [record for record in records if record.status == "failed"]
    assert {record.defense.name for record in failed} == {"dp_sgd"} and len(failed) == 6
    assert "must have the SHA-256" in str(failed[0].reason)


def test_contestants_that_no_checkpoint_can_meet_are_refused(zoo, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, words in {
        "likelihood_ratio": "likelihood_ratio cannot be added: likelihood_ratio needs ALL_STEPS access to a training",
        "bavaria": "bavaria needs outputs of 16 shadow models at 1 view, and the zoo stores those of 4 at 1 view",
    }.items():
        with pytest.raises(SuiteError, match=words):
            plan(tiny.with_added(attacks=[name]))
    for arguments, words in (
        ({"attacks": ["loss_treshold"]}, "no attack named 'loss_treshold'; did you mean 'loss_threshold'?"),
        ({"attacks": ["none.py:f"]}, "no file 'none.py' for attack 'none.py:f'"),
        ({"attacks": ["loss_threshold"]}, "--add-attack loss_threshold: repeats attack[0]"),
        ({"defenses": ["dp_snip"]}, "--add-defense must go with a suite that trains, got 'tiny'"),
    ):
        with pytest.raises(SuiteError, match=re.escape(words)):
            tiny.with_added(**arguments)


def test_an_attack_whose_access_no_row_offers_is_refused_by_a_suite_that_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.toml").write_text(TRAINED, encoding="utf-8")
    (tmp_path / "odd.py").write_text(
        "from leakbench.attacks.core import Access, InclusionScores, SeenModels, attack\n\n"
        "@attack(access=Access.BROADCAST)\n"
        "def odd(target: SeenModels, generator) -> InclusionScores:\n    '''Canaries in a broadcast.'''\n",
        encoding="utf-8",
    )
    with pytest.raises(SuiteError, match=r"odd\.py:odd needs BROADCAST access, which no suite"):
        plan(load(tmp_path / "toy.toml").with_added(attacks=["odd.py:odd"]))


def test_a_suite_with_zoo_has_no_table_of_another_training():
    text = (ROOT / "benchmarks/suites/zoo_small.toml").read_text(encoding="utf-8")
    with pytest.raises(SuiteError, match=r"a suite with zoo must have no tune: its checkpoints are final models"):
        suites._build(suites.tomllib.loads(text + "\n[tune]\nvalidation = 20\nlr = [0.1]\n"), "x")


@pytest.mark.long
def test_the_command_is_recorded_with_the_attack(zoo, mine, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", str(zoo / "tiny.toml"), "--out", "out", "--jobs", "1", "--add-attack", mine, "--json"])
    board = json.loads(capsys.readouterr().out)
    (manifest,) = read_manifests(tmp_path / "out" / "records")
    assert manifest.command[-2:] == ("--add-attack", mine)
    assert ended.value.code in (0, 1) and len(board["records"]) == 7 * len(NAMES)
    with pytest.raises(SystemExit):
        cli.main(["zoo", "ls", "--json"])
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} >= set(NAMES)


def test_a_folder_of_another_checkpoint_is_refused(zoo, tiny, monkeypatch):
    (zoo / NAMES[0] / "manifest.json").write_bytes((zoo / NAMES[2] / "manifest.json").read_bytes())
    with pytest.raises((SuiteError, RecordError), match="must have the SHA-256"):
        plan(tiny)
