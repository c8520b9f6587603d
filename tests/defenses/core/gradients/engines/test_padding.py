"""Passes of a public size: padding adds nothing, and the number of examples decides no size."""

import copy
import math

import pytest
import torch

from leakbench.defenses.core import (
    Block,
    Engine,
    Everything,
    Layout,
    StepPlan,
    clip,
    clipped_sums,
    cross_entropy,
    seeded,
)
from leakbench.defenses.core.gradients.engines.batches import Batches
from leakbench.defenses.core.gradients.engines.torch_func import TorchFunc
from leakbench.defenses.core.gradients.layerwise.engine import Layerwise
from tests.pretend_device import device

from .....parameters import in_turn, subtests
from .architectures import problem
from .duties import by_loop
from .test_layerwise import engine_of, plans

NAMES = ("conv2d_plain", "linear_one_sequence", "small_resnet", "embedding", "module_used_twice")


def padded(values, copies):
    return torch.cat([values, *[values[:1]] * copies])


@subtests("place", range(3))
@pytest.mark.parametrize(("name", "shift"), in_turn(NAMES, range(3), every=3))
def test_padding_adds_nothing_whatever_the_plan(name, shift, place):
    bad, copies = (None, 0, 2)[place], (0, 1, 5)[(place + shift) % 3]
    made = problem(name)
    inputs = made.inputs.clone()
    if bad is not None and inputs.is_floating_point():
        inputs[bad] = math.nan  # its row counts as zero, and so do those of its copies
    made = made._replace(inputs=inputs)
    rows = by_loop(made)
    reference = TorchFunc(made.model, cross_entropy, Layout.of(made.model))
    entered = [padded(values, copies) for values in (made.inputs, made.targets)]
    for label, plan in plans(torch.nan_to_num(rows)).items():
        if label == "difference":
            expected = reference.sums(plan, made.inputs, made.targets)
        else:
            expected = clipped_sums(plan, [lambda _point: rows], rows)
        for engine in (engine_of(made), reference):
            sums = engine.sums(plan, *entered, counted=len(made.inputs))
            for ours, wanted in zip(sums, expected, strict=True):
                assert float((ours - wanted).abs().max()) <= 1e-12 * max(float(wanted.abs().max()), 1e-300), label


@pytest.mark.long
@subtests("draws", [False, True])
@pytest.mark.parametrize("sizes", [range(1, 40, 3)])
def test_on_a_device_the_number_of_examples_decides_no_size(sizes, draws, monkeypatch):
    torch.manual_seed(0)
    dropout = torch.nn.Dropout(0.5) if draws else torch.nn.Identity()
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), dropout, torch.nn.Tanh(), torch.nn.Linear(8, 3))
    passes, compute = [], Layerwise._gradients

    def recorded(self, inputs, *others):
        passes.append(len(inputs))
        return compute(self, inputs, *others)

    inputs, labels = torch.randn(40, 6), torch.arange(40) % 3
    plan = StepPlan(Block(codec=Everything(Layout.of(model).dim), bound=clip(0.1))).at(0.0)
    with device() as pretend:
        on_cpu = Engine(model, noise=seeded(0), expected_batch=16, engine="layerwise")
        settings = {"noise": seeded(0), "expected_batch": 16, "engine": "layerwise"}
        engine = Engine(copy.deepcopy(model).to(pretend), **settings)
        engine.prepare(inputs.to(pretend), labels.to(pretend))
        expected = [on_cpu.run(plan, inputs[:n], labels[:n], seed=n).total for n in sizes]
        monkeypatch.setattr(Layerwise, "_gradients", recorded)
        for n, total in zip(sizes, expected, strict=True):
            batch = (inputs[:n].to(pretend), labels[:n].to(pretend))
            torch.testing.assert_close(engine.run(plan, *batch, seed=n).total.cpu(), total, rtol=1e-4, atol=1e-6)
    assert set(passes) == {24}  # 16 and two standard deviations
    assert len(passes) == sum(-(-n // 24) for n in sizes)


@pytest.mark.parametrize(
    ("expected", "examples", "fitting", "size"),
    [(256, 3, 10**6, 288), (256, 300, 10**6, 288), (256, 256, 100, 100), (0, 17, 10**6, 18), (0, 64, 10**6, 64)],
)
def test_public_sizes(expected, examples, fitting, size):
    assert Batches(expected=expected, budget=fitting).public_size(examples, 1) == size
