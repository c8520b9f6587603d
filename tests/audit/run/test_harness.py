"""Runs of small suites from end to end: what is written, what is not computed twice, and what survives a failure."""

import dataclasses
import hashlib
import json
import os
import pickle
import re
import shutil
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from leakbench.audit.evidence.claim_bounds import gaussian_epsilon
from leakbench.audit.plan import pretrain
from leakbench.audit.plan.expand import plan
from leakbench.audit.run import harness
from leakbench.audit.run.harness import pick_device
from leakbench.audit.run.lock import BusyError, locked
from leakbench.audit.run.provenance import library
from leakbench.audit.run.verify import contradiction
from leakbench.audit.subjects.outcome import Outcome
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.records.files import WriteError
from leakbench.leaderboard.records.folder import read_folder
from leakbench.leaderboard.records.manifest import read_manifests
from leakbench.leaderboard.records.record import Record, RecordError, read, read_all, write

from ..conftest import INVERSION, SHARE, SUITE
from .runs import BROKEN, CPU, MEMBERSHIP, SPY, load, run

# Ten steps of an epsilon that other tests calibrate, too: the search for it takes longer than everything else.
WHOLE = SUITE.replace(MEMBERSHIP, f"{MEMBERSHIP}, {INVERSION}").replace("controls = false", "controls = true") + SHARE
CELLS = 4 * 3 + 1 + 1 + 2  # both defenses trained, and as negative controls; shared: sgd twice, dp_sgd twice
WORKING = SPY.format("return MembershipScores(ids=ids, scores=ids.double(), exact=False)").replace(
    '"""Does what the test asks for."""', "ids = target.candidates.ids"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> tuple[Path, list[Record]]:
    folder = tmp_path_factory.mktemp("results")
    return folder, run(WHOLE, folder)


@pytest.fixture
def copied(results, tmp_path) -> Path:
    """The results in a folder of their own, times and all."""
    return shutil.copytree(results[0], tmp_path / "copy")


def timeless(record: Record) -> Record:
    return dataclasses.replace(record, seconds=0.0)


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    records = [path for path in (folder / "records").iterdir() if path.suffix != ".manifest"]
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in records}


def of(records: list[Record], defense: str, attack: str | None = None, control: str | None = None) -> Record:
    (found,) = (
        r
        for r in records
        if (r.defense.name, r.attack and r.attack.name, r.control) == (defense, attack, control)
        and r.task.get("noise") != "calibrated"
    )
    return found


def test_every_cell_has_a_valid_record_named_by_its_id(results):
    folder, records = results
    assert len(records) == CELLS and {r.status for r in records} == {"ok"}
    assert [r.id for r in records] == [cell.id for cell in plan(load(folder, WHOLE)).cells]
    assert {r.id: r for r in read_all(folder)} == {r.id: r for r in records}
    names = {path.name for path in (folder / "records").iterdir()}
    (manifest,) = read_manifests(folder / "records")
    assert [cell.id for cell in manifest.cells] == [r.id for r in records]
    names.remove(manifest.name)
    assert names == {f"{r.id}{kind}" for r in records for kind in (".json", ".parquet")}
    for path in (folder / "records").glob("*.json"):
        json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    for record in records:
        assert record.arrays == f"{record.id}.parquet" and record.seconds > 0
        content = (folder / "records" / record.arrays).read_bytes()
        assert record.arrays_digest == hashlib.sha256(content).hexdigest()
        assert record.provenance == library()
        assert record.suite == "toy" and record.suite_digest == load(folder, WHOLE).digest
        assert record.device.startswith("cpu") and record.provenance.versions["torch"] == version("torch")
        assert (record.requires is None) == (record.kind == "utility")


def test_what_lies_beside_a_record_gives_its_numbers_again(results):
    folder, records = results
    for record in records:
        table = pd.read_parquet(folder / "records" / str(record.arrays))
        if record.kind == "membership":
            inside, outside = (table.score[table.member == member].to_numpy() for member in (True, False))
            order = (inside[:, None] > outside) + 0.5 * (inside[:, None] == outside)
            assert record.metrics["auc"].value == pytest.approx(order.mean(), abs=1e-12)
            assert record.metrics["auc"].n == len(table) == 200 and table.id.is_unique
        elif record.kind == "utility":
            assert record.metrics["accuracy"].value == (table.label == table.predicted).mean()
        else:
            original, found = (np.stack(table[name].to_list()) for name in ("original", "reconstruction"))
            assert record.metrics["mse"].value == pytest.approx(((original - found) ** 2).mean(), rel=1e-6)


def test_the_positive_control_leaks_and_the_negative_one_does_not(results):
    _, records = results
    positive = of(records, "sgd", "likelihood_ratio", "positive").metrics["auc"]
    assert positive.low is not None and positive.low > 0.65
    for attack in ("likelihood_ratio", "loss_threshold"):
        negative = of(records, "sgd", attack, "negative").metrics["auc"]
        assert negative.low is not None and negative.low <= 0.5
    verdicts = {c.name: c.ok for c in Board.from_records(records).controls if "membership" in c.name}
    assert len(verdicts) == 3 and all(verdicts.values())


def test_records_say_what_is_proved_and_where_the_noise_is_from(results):
    _, records = results
    for record in records:
        silent = record.defense.name == "sgd" or record.task.get("noise") == "none"
        assert record.claim is not None
        assert record.noise == ("none" if silent else "seeded")
        assert (record.noise_multiplier == 0) == silent
        if silent:
            assert record.claim.epsilon is None and record.claim.reason
        elif record.kind == "reconstruction":  # one release in which the target is known to be
            alone = gaussian_epsilon(1 / record.noise_multiplier, 1e-5)
            assert record.claim.epsilon == pytest.approx(alone, abs=1e-3) and record.claim.sampling == "full"
        else:
            assert record.claim.epsilon == pytest.approx(3, rel=0.01) and record.claim.epsilon <= 3
            assert record.claim.relation == "add_remove" and record.claim.sampling == "poisson"


@pytest.mark.slow  # each imports PyTorch; test_interrupts goes on alone with what processes began, and compares
def test_several_processes_give_the_same_records(tmp_path):
    text = WHOLE.replace("epsilon", "noise_multiplier").replace("controls = true", "controls = false")
    one, two, said = tmp_path / "one", tmp_path / "two", []
    for folder in (one, two):
        folder.mkdir()
    records = run(text, one, jobs=1)
    again = run(text, two, jobs=2, report=lambda *line: said.append(line))
    assert [timeless(r) for r in again] == [timeless(r) for r in records]
    for record in records:
        first, second = (pd.read_parquet(at / "records" / str(record.arrays)) for at in (one, two))
        pd.testing.assert_frame_equal(first, second, check_exact=True)
    assert said[0] == (0, 9, "starting") and said[-1][:2] == (9, 9)


def test_a_job_takes_one_thread_whose_sums_round_alike_everywhere_and_gives_the_callers_back(tmp_path, monkeypatch):
    real, seen = harness.compute, []

    def watch(*arguments):
        seen.append(torch.get_num_threads())
        return real(*arguments)

    monkeypatch.setattr(harness, "compute", watch)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run(SUITE.replace("epsilon", "noise_multiplier").replace(MEMBERSHIP, ""), tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


def test_a_second_run_computes_nothing(copied, monkeypatch):
    monkeypatch.setattr(harness, "run_job", lambda *_, **__: pytest.fail("computed again"))
    before, said = files(copied), []
    again = run(WHOLE, copied, report=lambda *line: said.append(line))
    assert files(copied) == before
    assert said == [(CELLS, CELLS, f"{CELLS} of {CELLS} cells are there already")]
    assert len(again) == CELLS


def test_only_a_deleted_record_is_computed_again_and_is_the_same(results, copied):
    _, records = results
    lost = of(records, "dp_sgd", "loss_threshold")
    before = files(copied)
    for kind in (".json", ".parquet"):
        (copied / "records" / f"{lost.id}{kind}").unlink()
    again = run(WHOLE, copied)
    after = files(copied)
    assert timeless(of(again, "dp_sgd", "loss_threshold")) == timeless(lost)
    assert after.keys() == before.keys()
    assert {name for name in before if before[name] != after[name]} <= {f"{lost.id}.json", f"{lost.id}.parquet"}


PRETRAIN = 'pretrain = { epochs = 1, lr = 0.5, batch = 40, train = "last" }'


@pytest.mark.long
def test_records_of_pretrained_models_are_kept_made_again_alike_and_refused_where_they_say_otherwise(
    tmp_path, monkeypatch
):
    text = SUITE.replace(MEMBERSHIP, '{ name = "loss_threshold" }').replace('{ name = "sgd" }, ', "")
    text = text.replace("epsilon", "noise_multiplier").replace("lr = 0.5,", f"lr = 0.5, {PRETRAIN},")
    records = run(text, tmp_path)
    for record in records:
        assert record.status == "ok" and record.task["pretrain"]["train"] == "last"
        assert "pretrained_on_public" in record.flags
    (lost,) = (record for record in records if record.kind == "utility")
    (tmp_path / "records" / f"{lost.id}.json").unlink()
    monkeypatch.setattr(pretrain, "_kept", {})
    assert timeless(of(run(text, tmp_path), "dp_sgd")) == timeless(lost)
    monkeypatch.setattr(pretrain, "pretrained", lambda *_: pytest.fail("pretrained again"))
    assert len(run(text, tmp_path)) == 2
    tampered(tmp_path, lost, task=lost.task | {"pretrain": lost.task["pretrain"] | {"train": "all"}})
    with pytest.raises(RecordError, match=r"its task\.pretrain is not that of its cell"):
        run(text, tmp_path)


def test_another_attack_in_a_suite_changes_no_other_number(results, tmp_path):
    _, records = results
    text = SUITE.replace(MEMBERSHIP, '{ name = "loss_threshold" }').replace('{ name = "sgd" }, ', "")
    alone = run(text, tmp_path)
    assert [r.id for r in alone] == [of(records, "dp_sgd").id, of(records, "dp_sgd", "loss_threshold").id]
    for record in alone:
        (same,) = (r for r in records if r.id == record.id)
        assert (record.metrics, record.task) == (same.metrics, same.task)


def test_a_torn_record_stops_the_run_and_nothing_is_overwritten(results, copied, monkeypatch):
    torn = copied / "records" / f"{results[1][3].id}.json"
    torn.write_text(torn.read_text(encoding="utf-8")[:200], encoding="utf-8")
    (copied / "records" / f"{results[1][0].id}.json").unlink()  # something to compute
    before = files(copied)
    monkeypatch.setattr(harness, "run_job", lambda *_, **__: pytest.fail("computed"))
    with pytest.raises(RecordError, match=rf"bad record .*{torn.name}: not a whole JSON document .*; delete it") as e:
        run(WHOLE, copied)
    assert "\n" not in str(e.value)
    assert files(copied) == before


def tampered(folder: Path, record: Record, **fields) -> Record:
    """A record replaced in its folder by somebody who knows how to write one."""
    changed = dataclasses.replace(record, **fields)
    write(changed, folder / "records")
    return changed


def test_a_record_of_another_version_is_named_and_refused_unless_it_is_computed_again(results, copied, monkeypatch):
    _, records = results
    old = of(records, "dp_sgd", "loss_threshold")
    versions = {**old.provenance.versions, "torch": "2.0.0", "dp-accounting": "0.1.0"}
    other = dataclasses.replace(old.provenance, source="0" * 64, commit=None, dirty=None, versions=versions)
    tampered(copied, old, provenance=other)
    monkeypatch.setattr(harness, "run_job", lambda *_, **__: pytest.fail("computed"))
    with pytest.raises(
        RecordError, match=rf"1 record in {re.escape(str(copied))}/records cannot be kept .*dp_sgd x loss_thr"
    ) as caught:
        run(WHOLE, copied)
    for words in ("leakbench was 0", "torch was 2.0.0", "dp-accounting was 0.1.0", "with --recompute"):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    again = of(run(WHOLE, copied, recompute=True), "dp_sgd", "loss_threshold")
    assert timeless(again) == timeless(old) and read(copied / "records" / f"{old.id}.json").provenance == library()


def test_a_claim_or_setting_that_does_not_follow_is_refused(results, copied):
    old = of(results[1], "dp_sgd", "loss_threshold")
    assert old.claim is not None
    tampered(copied, old, claim=dataclasses.replace(old.claim, epsilon=0.5))
    with pytest.raises(RecordError, match=r"its epsilon 0\.5 does not follow from its steps, which prove [23]"):
        run(WHOLE, copied)
    method = dataclasses.replace(old.defense, settings={"clip_norm": 0.1})
    tampered(copied, old, defense=method, task=old.task | {"lr": 9.0})
    with pytest.raises(RecordError, match=r"its defense is not that of its cell; its task\.lr is not that of its cell"):
        run(WHOLE, copied)


def test_arrays_that_are_gone_cut_or_altered_make_a_cell_missing(results, copied):
    _, records = results
    gone, cut = of(records, "dp_sgd", "loss_threshold"), of(records, "sgd", "loss_threshold", "positive")
    (copied / "records" / str(gone.arrays)).unlink()
    (copied / "records" / str(cut.arrays)).write_bytes(b"PAR1")
    assert {r.id for r in read_folder(copied).records if r.status == "failed"} == {gone.id, cut.id}
    said = []
    again = run(WHOLE, copied, report=lambda *line: said.append(line[2]))
    assert [timeless(r) for r in again] == [timeless(r) for r in records]
    assert any(f"record {gone.id} (dp_sgd x loss_threshold, seed 0) counts as missing" in line for line in said)
    assert not [r for r in read_folder(copied).records if r.status == "failed"]


def test_every_number_is_that_of_its_scores_and_one_that_is_not_is_found(results, copied):
    folder, records = results
    for record in records:
        assert contradiction(record, folder / "records") == ""
    for defense, attack, metric in (
        ("dp_sgd", "likelihood_ratio", "auc"),
        ("dp_sgd", "likelihood_ratio", "advantage"),
        ("dp_sgd", None, "accuracy"),
        ("dp_sgd", None, "loss"),
        ("dp_sgd", "inverting_gradients", "psnr_floor"),
        ("dp_sgd", "inverting_gradients", "psnr"),
    ):
        old = of(records, defense, attack)
        fake = dataclasses.replace(old.metrics[metric], value=0.999, low=0.998, high=1.0)
        made = dataclasses.replace(old, metrics=old.metrics | {metric: fake})
        assert f"its {metric} is 0.999 [0.998, 1] of" in contradiction(made, folder / "records")
    old = of(records, "dp_sgd", "inverting_gradients")
    hidden = dataclasses.replace(old.metrics["psnr"], value=None, low=None, high=None, reason="not measured")
    made = dataclasses.replace(old, metrics=old.metrics | {"psnr": hidden})
    assert "its psnr is none, and its scores give" in contradiction(made, folder / "records")
    old = of(records, "dp_sgd", "loss_threshold")
    fake = dataclasses.replace(old.metrics["auc"], value=0.999, low=0.998, high=1.0)
    tampered(copied, old, metrics=old.metrics | {"auc": fake})
    assert of(run(WHOLE, copied), "dp_sgd", "loss_threshold").metrics["auc"].value == 0.999
    assert timeless(of(run(WHOLE, copied, verify=True), "dp_sgd", "loss_threshold")) == timeless(old)


def test_a_process_that_read_another_code_than_the_run_began_with_records_nothing(tmp_path):
    (job, *_) = plan(load(tmp_path, SUITE)).jobs
    then = {cell.id: dataclasses.replace(library(), source="0" * 64) for cell in job.cells}
    with pytest.raises(RecordError, match="was edited between the start of the run and that of its processes"):
        harness.run_job(job, tmp_path, CPU, then)
    assert not list(tmp_path.glob("*.json"))


def test_third_party_code_is_part_of_what_is_compared(tmp_path, site):
    site.add("attacks", "spy", WORKING)
    text = SUITE.replace(MEMBERSHIP, '{ name = "spy" }').replace('{ name = "sgd" }, ', "")
    records = run(text, tmp_path)
    assert not records[0].provenance.third_party and set(records[1].provenance.third_party) == {"attack spy"}
    (site.folder / "borrowed_spy.py").write_text(WORKING + "\n# another version\n")
    with pytest.raises(RecordError, match=r"1 record .*dp_sgd x spy, seed 0: the code of attack spy has changed"):
        run(text, tmp_path)


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    here = re.escape(str(tmp_path))
    said = rf"another run writes into {here} \(process {os.getpid()} on .*\); wait for it, or name another --out"
    with locked(tmp_path), pytest.raises(BusyError, match=said):
        run(SUITE, tmp_path)


def test_a_full_disk_is_said_with_its_path_when_the_lock_is_written(tmp_path, monkeypatch):
    def full(handle, content):
        raise OSError(28, "No space left on device")

    with (
        monkeypatch.context() as patched,
        pytest.raises(WriteError, match=f"cannot write {re.escape(str(tmp_path / '.lock'))}: No space"),
    ):
        patched.setattr(os, "write", full)
        with locked(tmp_path):
            pass
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("name", ["records", "tuning"])
def test_a_folder_that_is_a_link_is_neither_swept_nor_written_to(tmp_path, name):
    out, mine = tmp_path / "out", tmp_path / "mine"
    for folder in (out, mine):
        folder.mkdir()
    (mine / "0123456789abcdef.parquet").touch()
    (out / name).symlink_to(mine)
    with pytest.raises(RecordError, match=f"{re.escape(str(out / name))} is a symbolic link"):
        run(SUITE, out)
    assert [path.name for path in mine.iterdir()] == ["0123456789abcdef.parquet"]


def test_an_edited_request_stops_the_run_before_anything_is_computed(copied, monkeypatch):
    (path,) = (copied / "records").glob("*.manifest")
    path.write_text(path.read_text().replace('"toy"', '"boy"', 1))
    monkeypatch.setattr(harness, "run_job", lambda *args, **settings: pytest.fail("computed"))
    next((copied / "records").glob("*.json")).unlink()
    with pytest.raises(RecordError, match=f"bad manifest {re.escape(str(path))}: it was edited"):
        run(WHOLE, copied)


def test_a_record_that_cannot_be_written_leaves_no_arrays_behind(tmp_path, monkeypatch):
    def full(record, folder):
        raise WriteError("cannot write: No space left on device")

    monkeypatch.setattr(harness, "write", full)
    with pytest.raises(WriteError):
        run(SUITE, tmp_path)
    assert {path.suffix for path in (tmp_path / "records").iterdir()} == {".manifest"}


def test_defenses_that_prove_nothing_have_no_epsilon_and_say_why(tmp_path):
    names = ("clipped_sgd", "noisy_sgd")
    listed = ", ".join(f'{{ name = "{name}" }}' for name in names)
    text = SUITE.replace('{ name = "sgd" }, { name = "dp_sgd" }', listed).replace(MEMBERSHIP, "")
    clipped, noisy = run(text, tmp_path)
    assert clipped.claim and noisy.claim
    assert clipped.claim.epsilon is None and clipped.claim.reason == "no noise is added"
    assert noisy.claim.epsilon is None and "not bounded" in str(noisy.claim.reason)
    assert (clipped.noise, noisy.noise) == ("none", "seeded")
    assert (clipped.flags, noisy.flags) == ((), ("noise_matched",))


def test_secure_noise_is_recorded_and_kept_apart(tmp_path):
    text = SUITE.replace(MEMBERSHIP, "").replace("epsilon", "noise_multiplier")
    text = text.replace("batch = 70", "private = 80, batch = 40")  # exact noise takes example by example
    seeded, secure = (run(text, tmp_path, secure_noise=choice) for choice in (False, True))
    assert [r.noise for r in seeded] == ["none", "seeded"]
    assert [r.noise for r in secure] == ["none", "secure"]
    together = read_all(tmp_path)
    assert len(together) == 3 and len(Board.from_records(together).rows) == 3  # a row of its own, and sgd's once
    assert of(seeded, "dp_sgd").metrics != of(secure, "dp_sgd").metrics


@pytest.mark.long
def test_a_failing_cell_is_a_record_the_others_go_on_and_it_is_tried_again(tmp_path, site):
    site.add("attacks", "spy", BROKEN)
    text = SUITE.replace(MEMBERSHIP, '{ name = "spy" }, { name = "loss_threshold" }')
    records = run(text, tmp_path)
    assert [r.status for r in records] == ["ok", "failed", "ok"] * 2
    failed = of(records, "dp_sgd", "spy")
    assert failed.reason is not None
    assert failed.reason.startswith("RuntimeError: the spy was caught (borrowed_spy.py, line ")
    assert failed.metrics == {} and failed.arrays is None
    assert [r for r in read_all(tmp_path) if r.status == "failed"]
    (site.folder / "borrowed_spy.py").write_text(WORKING, encoding="utf-8")
    shutil.rmtree(site.folder / "__pycache__", ignore_errors=True)  # the two sources may be of one second and size
    before = files(tmp_path)
    again = run(text, tmp_path)
    assert [r.status for r in again] == ["ok"] * 6
    changed = {name for name, content in files(tmp_path).items() if before.get(name) != content}
    spied = {r.id for r in again if r.attack and r.attack.name == "spy"}
    assert changed == {f"{id}{kind}" for id in spied for kind in (".json", ".parquet")}


def test_an_attack_that_does_not_apply_is_skipped_with_its_sentence_and_fails_nothing(tmp_path, site):
    site.add(
        "attacks",
        "spy",
        "from leakbench.attacks.core import NotApplicable\n" + SPY.format(r'raise NotApplicable("two\nparts")'),
    )
    records = run(SUITE.replace(MEMBERSHIP, '{ name = "spy" }, { name = "loss_threshold" }'), tmp_path)
    spied = [r for r in records if r.attack and r.attack.name == "spy"]
    assert spied and all(r.status == "skipped" and r.reason == "spy does not apply: two parts" for r in spied)
    assert all(r.attack_refused for r in spied) and not any(r.attack_refused for r in records if r not in spied)
    assert all(r.status == "ok" for r in records if r not in spied)


def test_fail_fast_stops_after_the_first_job_that_fails(tmp_path, site):
    site.add("attacks", "spy", BROKEN)
    text = SUITE.replace(MEMBERSHIP, '{ name = "spy" }')
    records = run(text, tmp_path, fail_fast=True)
    assert [(r.defense.name, r.status) for r in records] == [("sgd", "ok"), ("sgd", "failed")]
    assert len(read_all(tmp_path)) == 2


def test_a_skipped_cell_is_recorded_and_run_once_it_can_be(tmp_path, site):
    site.add("attacks", "spy", WORKING.replace("BLACK_BOX)", "BLACK_BOX, knows=Knows.LABELS)").replace(
        "import Access", "import Access, Knows"
    ))  # fmt: skip
    text = SUITE.replace(MEMBERSHIP, '{ name = "spy" }').replace('{ name = "sgd" }, ', "")
    skipped = of(run(text, tmp_path), "dp_sgd", "spy")
    assert skipped.status == "skipped" and "LABELS" in str(skipped.reason) and skipped.seconds == 0
    before = files(tmp_path)
    run(text, tmp_path)
    assert files(tmp_path) == before
    (site.folder / "borrowed_spy.py").write_text(WORKING, encoding="utf-8")
    assert of(run(text, tmp_path), "dp_sgd", "spy").status == "ok"


def test_what_no_record_can_hold_is_a_failed_cell(tmp_path, monkeypatch):
    def compute(cells, device, read):
        for cell in cells:
            yield cell, Outcome(task={"set": {1, 2}}, arrays={"id": [1]})

    monkeypatch.setattr(harness, "compute", compute)
    records = run(SUITE, tmp_path)
    assert {r.status for r in records} == {"failed"}
    assert "task.set must be plain JSON" in str(records[0].reason)
    assert not list((tmp_path / "records").glob("*.parquet"))


def test_a_device_that_is_not_here_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == pick_device("cpu") == CPU
    with pytest.raises(ValueError, match="got cuda, and torch finds none; take cpu"):
        pick_device("cuda")
    with pytest.raises(ValueError, match="device must be auto, cpu or cuda, got 'gpu'"):
        pick_device("gpu")


@pytest.mark.gpu
def test_a_run_on_the_gpu_has_the_same_cells(tmp_path, results):
    records = harness.run(load(tmp_path, WHOLE), tmp_path, device=pick_device("cuda"))
    assert [r.id for r in records] == [r.id for r in results[1]]
    assert {r.status for r in records} == {"ok"}


def test_what_is_sent_to_a_process_does_not_grow_with_the_cells_of_the_run(tmp_path, monkeypatch):
    sent: list[int] = []

    class Weighing:
        def __init__(self, *_):
            pass

        def run(self, graph, work):
            sent.append(max(len(pickle.dumps((work, piece))) for piece in graph.items.values()))
            return (one for one in ())

    monkeypatch.setattr(harness, "Local", Weighing)
    for seeds in (2, 40):
        folder = tmp_path / str(seeds)
        folder.mkdir()
        assert not run(SUITE.replace("[0]", str(list(range(seeds)))), folder)
    assert len(sent) == 2 and sent[1] < 1.1 * sent[0]
