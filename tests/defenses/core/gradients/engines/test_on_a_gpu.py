"""The same engines on a CUDA device, without a change: rows and sums are those of autograd there, and of the CPU."""

import pytest
import torch

from leakbench.defenses.core import (
    Block,
    Engine,
    Everything,
    Layout,
    StepPlan,
    clip,
    cross_entropy,
    per_example_gradients,
    seeded,
)
from leakbench.defenses.core.gradients.layerwise.engine import Layerwise

from .architectures import NAMES, problem
from .duties import assert_same_rows, by_loop
from .test_layerwise import KNOWN, assert_same_sums, engine_of

pytestmark = pytest.mark.gpu

# PyTorch's CUDA kernel of weight normalisation takes the norm of float64 weights by `sqrtf`, whose result has 24 bits
# (aten/src/ATen/native/cuda/WeightNorm.cu). Its relative error of 2^-24 enters the cube of a norm and the weights
# themselves: rows are those of the CPU to a few times 2^-24.
FROM_THE_CPU = {"weight_norm_conv": 2.0**-20, "weight_norm_linear": 2.0**-20}


def moved(made):
    return type(made)(made.model.cuda(), made.inputs.cuda(), made.targets.cuda())


@pytest.mark.parametrize("name", KNOWN)
def test_rows_and_sums_are_those_of_autograd_there_and_on_the_cpu(name):
    on_cpu = by_loop(problem(name))
    made = moved(problem(name))
    expected = by_loop(made)
    rows = engine_of(made).rows(made.inputs, made.targets)
    assert rows.is_cuda
    assert_same_rows(rows, expected)
    assert float((rows.cpu() - on_cpu).abs().max()) <= FROM_THE_CPU.get(name, 1e-12) * float(on_cpu.abs().max())
    assert_same_sums(made, expected, ["three blocks"])


@pytest.mark.parametrize("name", NAMES)
def test_auto_runs_every_architecture(name):
    made = moved(problem(name))
    engine = Engine(made.model, noise=seeded(0))
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(0.1)))
    assert engine.run(plan.at(1.0), made.inputs, made.targets).total.is_cuda


def test_float32_images_agree_with_the_reference():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, padding=1),
            torch.nn.GroupNorm(4, 16),
            torch.nn.Tanh(),
            torch.nn.Conv2d(16, 16, 3, stride=2),
            torch.nn.Flatten(),
            torch.nn.Linear(16 * 15 * 15, 10),
        ).cuda()
        inputs, labels = torch.randn(64, 3, 32, 32).cuda(), torch.arange(64).cuda() % 10
    layout = Layout.of(model)
    rows = Layerwise(model, cross_entropy, layout).rows(inputs, labels)
    expected = per_example_gradients(model, cross_entropy, layout, inputs, labels)
    torch.testing.assert_close(rows, expected, rtol=1e-2, atol=1e-3)  # products may be in TF32
