"""Small networks are trained on the CPU where there is a GPU, too, and a record says where its cell was computed."""

import json

import pytest
import torch

from leakbench.audit.plan import expand
from leakbench.audit.run import harness, placement
from leakbench.audit.run.placement import MOST_ON_CPU, device_of, flops_of_step
from leakbench.audit.suite import suite as suites

from ... import pretend_device
from ...parameters import subtests
from .runs import CPU, load

GPU = torch.device("cuda")
SMALL, LARGE = 8, 5000  # hidden units of a network
TOY = """
name = "toy"
seeds = [0]
budget = {{ noise_multiplier = 1.0, delta = 1e-5 }}
defense = [{{ name = "dp_sgd" }}]
attack = [{attack}]
controls = false
[task]
data = "digits"
model = {{ name = "mlp", hidden = {hidden} }}
private = 200
public = 40
candidates = 50
batch = {batch}
epochs = 1
lr = 0.1
{more}
"""
LOSS, LIRA = '{ name = "loss_threshold" }', '{ name = "lira", shadows = 4 }'


def planned(folder, *, attack=LOSS, hidden=SMALL, batch=70, more="", share=""):
    suite = load(folder, TOY.format(attack=attack, hidden=hidden, batch=batch, more=more) + share)
    return suite, expand.plan(suite)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU is there, and nothing is computed on it."""
    monkeypatch.setattr(placement, "accelerator", lambda: GPU)


def test_operations_of_a_step_are_those_of_three_passes_over_its_batch(tmp_path):
    _, plan = planned(tmp_path)
    # A multiplication and an addition for each of 64 * 8 and 8 * 10 weights.
    assert flops_of_step(plan.jobs[0].cells[0].request) == 3 * 70 * 2 * (64 * 8 + 8 * 10)
    # Full batches hold all 200 examples, each in 2 views, which are images.
    _, plan = planned(tmp_path, more="sampling = 'full'\nviews = 2")
    assert flops_of_step(plan.jobs[0].cells[0].request) == 3 * 200 * 2 * 2 * (64 * 8 + 8 * 10)


def test_operations_on_an_update_are_those_of_its_batch_in_every_restart_of_a_search(tmp_path):
    share = "[share]\ndata = 'photos'\nmodel = { name = 'mlp', hidden = 8 }\nbatch = 2\nimages = 1\n"
    _, plan = planned(tmp_path, attack='{ name = "r_gap" }, { name = "dlg", restarts = 5 }', share=share)
    cells = [cell for job in plan.jobs for cell in job.cells if cell.subject == "shared_update"]
    found = {cell.request.requested_attack.name: flops_of_step(cell.request) for cell in cells}
    of_a_batch = 3 * 2 * 2 * (3 * 32 * 32 * 8 + 8 * 10)
    assert found == {"r_gap": of_a_batch, "dlg": 5 * of_a_batch}


@pytest.mark.usefixtures("gpu")
def test_the_networks_of_quick_belong_on_the_cpu():
    plan = expand.plan(suites.load("quick"))
    assert plan.jobs
    assert {device_of(job, None) for job in plan.jobs} == {CPU}


@pytest.mark.usefixtures("gpu")
@subtests(("hidden", "batch", "device"), [(SMALL, 70, CPU), (LARGE, 70, CPU), (LARGE, 140, GPU)])
def test_the_cost_of_a_step_decides_unless_a_device_is_named(hidden, batch, device, tmp_path):
    _, plan = planned(tmp_path, hidden=hidden, batch=batch)
    for job in plan.jobs:
        assert (flops_of_step(job.cells[0].request) > MOST_ON_CPU) == (device == GPU)
        assert device_of(job, None) == device
        assert device_of(job, CPU) == CPU and device_of(job, GPU) == GPU


@pytest.mark.usefixtures("gpu")
def test_a_stack_of_shadow_models_costs_as_much_as_all_of_its_models(tmp_path):
    _, plan = planned(tmp_path, attack=LIRA, hidden=LARGE, batch=70)
    (job,) = (job for job in plan.jobs if job.needs)
    (stack,) = job.needs.values()
    assert device_of(job, None) == CPU
    assert device_of(stack, None) == GPU


def test_without_a_gpu_everything_is_on_the_cpu_and_nothing_is_counted(tmp_path, monkeypatch):
    _, plan = planned(tmp_path, hidden=LARGE, batch=140)
    monkeypatch.setattr(placement, "flops_of_step", lambda *_: pytest.fail("counted"))
    assert {device_of(job, None) for job in plan.jobs} == {CPU}


@pytest.mark.long
@pytest.mark.parametrize(("batch", "attack", "device"), [(70, LIRA, "cpu"), (140, LOSS, "pretend")])
def test_cells_have_the_same_ids_and_their_records_say_where_they_were_computed(
    tmp_path, monkeypatch, batch, attack, device
):
    """The models of LiRA are trained on the GPU, and its cell, whose own training costs less, is on the CPU."""
    suite, plan = planned(tmp_path, attack=attack, hidden=LARGE, batch=batch)
    with pretend_device.device() as pretend:
        monkeypatch.setattr(placement, "accelerator", lambda: pretend)
        records = harness.run(suite, tmp_path, device=None, jobs=1)
    assert [record.id for record in records] == [cell.id for cell in plan.cells]
    assert {record.status for record in records} == {"ok"}
    assert {record.device.split(" ")[0] for record in records} == {device}
    for record in records:
        written = json.loads((tmp_path / "records" / f"{record.id}.json").read_text(encoding="utf-8"))
        assert written["device"] == record.device
