"""Steps on a CUDA device: TF32, bfloat16 and graphs keep the sums of float64 and every bound."""

import pytest
import torch
from torch import nn

from leakbench.defenses.core import Block, Engine, Everything, StepPlan, clip, normalize, seeded

pytestmark = pytest.mark.gpu


def network(dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(inplace=True))
        more = (nn.Conv2d(16, 64, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(64 * 15 * 15, 10))
        return nn.Sequential(*layers, *more).to("cuda", dtype)


def batch(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(size, 3, 32, 32, generator=generator)
    return images.cuda(), torch.randint(0, 10, (size,), generator=generator).cuda()


def plan_of(engine, bound=None):
    return StepPlan(Block(codec=Everything(engine.layout.dim), bound=bound or normalize(1.0, regulariser=0.01)))


@pytest.mark.parametrize(
    ("precision", "error"), [("float32", 1e-4), ("tf32", 1e-2), ("bfloat16", 5e-2), (None, 1e-2)], ids=str
)
def test_sums_are_those_of_float64_with_and_without_a_graph(precision, error):
    exact, engine = Engine(network(torch.float64)), Engine(network(), precision=precision)
    plan, sizes = plan_of(engine), (64, 64, 64, 63, 57)
    for number, size in enumerate(sizes):
        images, labels = batch(size, number)
        expected = exact.clipped_sums(plan, images.double(), labels)[0]
        sums = engine.clipped_sums(plan, images, labels)[0].double()
        assert float((sums - expected).norm() / expected.norm()) < error
    engine.prepare(*batch(64))
    assert engine.name == f"layerwise, {precision or 'tf32'}, CUDA graph".replace(" float32,", "")


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("size", [33, 64, 65, 257])
def test_removing_an_example_moves_a_sum_by_its_bound(size, precision):
    """Also where one example less is another size of the graph."""
    engine = Engine(network(), precision=precision)
    plan, (images, labels) = plan_of(engine, clip(0.01)), batch(size)
    for _ in range(3):
        whole, rest = (engine.clipped_sums(plan, images[i:], labels[i:])[0].double() for i in (0, 1))
        assert float((whole - rest).norm()) <= 0.01 * (1 + (1e-3 if precision == "float32" else 0.02))


def test_an_example_that_is_not_finite_adds_nothing_to_a_replay():
    engine, (images, labels) = Engine(network()), batch(61)
    plan = plan_of(engine)
    for _ in range(2):
        engine.clipped_sums(plan, images, labels)
    images[0] = torch.nan
    sums = engine.clipped_sums(plan, images, labels)[0].double()
    expected = engine.clipped_sums(plan, images[1:], labels[1:])[0].double()
    assert float((sums - expected).norm()) <= 1e-3 * float(expected.norm())


def test_a_step_waits_for_the_device_once():
    engine, (images, labels) = Engine(network(), noise=seeded(0)), batch(64)
    plan = plan_of(engine).at(1.0)
    for _ in range(3):
        engine.run(plan, images, labels)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="synchronizing") as warned:
            engine.run(plan, images, labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([each for each in warned if "synchronizing" in str(each.message)]) == 1


def test_checks_after_a_step_find_no_graph_under_way():
    """A model is checked, trained, checked again and trained, with its graphs freed between."""
    engine, (images, labels) = Engine(network(), noise=seeded(0)), batch(64)
    plan = plan_of(engine).at(0.0)
    totals = [engine.run(plan, images, labels).total for _ in range(3)]
    engine.release_memory()
    engine.model.eval()
    totals += [engine.run(plan, images, labels).total for _ in range(3)]
    for total in totals[1:]:
        torch.testing.assert_close(total, totals[0], rtol=1e-3, atol=1e-4)
