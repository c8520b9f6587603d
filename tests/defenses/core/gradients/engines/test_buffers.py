"""Memory that batches leave to one another shows in no result."""

import pytest
import torch
from torch import nn

from leakbench.defenses.core import Block, Coordinates, Everything, Layout, StepPlan, clip, cross_entropy, full, train
from leakbench.defenses.core.gradients.engines.torch_func import TorchFunc
from leakbench.defenses.core.gradients.layerwise.buffers import BufferPool
from leakbench.defenses.core.gradients.layerwise.cost import Strategy
from leakbench.defenses.core.gradients.layerwise.engine import Layerwise
from leakbench.defenses.core.gradients.layerwise.layers import convolution
from leakbench.defenses.dp_sgd import dp_sgd

LAYER, OTHER, LIKE = nn.Linear(1, 1), nn.Linear(1, 1), torch.zeros(1)


def test_room_is_lent_again_once_it_was_given_back():
    rooms = BufferPool()
    with rooms.lend() as room:
        first = room(LAYER, 100, LIKE)
        # Used twice, a layer has room for each use; another layer has its own.
        places = {first.data_ptr(), room(LAYER, 100, LIKE).data_ptr(), room(OTHER, 100, LIKE).data_ptr()}
        assert len(places) == 3 and first.shape == (100,)
    with rooms.lend() as room:
        assert {room(LAYER, size, LIKE).data_ptr() for size in (90, 112)} < places


def test_what_is_lent_is_nobody_elses():
    rooms = BufferPool()
    with rooms.lend() as room:
        mine = room(LAYER, 10, LIKE)
        with rooms.lend() as inner:
            assert inner(LAYER, 10, LIKE).data_ptr() != mine.data_ptr()


@pytest.mark.parametrize("wanted", [(200, torch.zeros(1)), (10, torch.zeros(1, dtype=torch.float64))])
def test_room_that_does_not_fit_is_made_anew(wanted):
    rooms = BufferPool()
    with rooms.lend() as room:
        room(LAYER, 10, LIKE)
    numbers, like = wanted
    with rooms.lend() as room:
        found = room(LAYER, numbers, like)
    assert found.shape == (numbers,) and found.dtype == like.dtype


def test_batches_of_changing_size_give_the_references_sums_and_leave_earlier_ones_alone(monkeypatch):
    monkeypatch.setattr(convolution, "cheapest", lambda *_: Strategy.KEEP)
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, padding=1)
    model = nn.Sequential(conv, nn.Tanh(), nn.Conv2d(3, 3, 3), nn.Flatten(), nn.Linear(48, 3)).double()
    layout = Layout.of(model)
    engine, reference = (kind(model, cross_entropy, layout) for kind in (Layerwise, TorchFunc))
    plan = StepPlan(Block(codec=Everything(layout.dim), bound=clip(0.1)))
    found, expected = [], []
    for size in (5, 3, 7, 1, 5):
        inputs, targets = torch.randn(size, 2, 6, 6, dtype=torch.float64), torch.arange(size) % 3
        found += engine.sums(plan, inputs, targets)
        expected += reference.sums(plan, inputs, targets)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_blocks_that_ask_for_one_layer_share_its_rows_and_rest_lets_go_of_them(monkeypatch):
    monkeypatch.setattr(convolution, "cheapest", lambda *_: Strategy.KEEP)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.Flatten(), nn.Linear(48, 3)).double()
    layout = Layout.of(model)
    first = Coordinates(torch.arange(54), dim=layout.dim)
    plan = StepPlan(*(Block(codec=first, bound=clip(0.1), share=0.5) for _ in range(2)))
    engine = Layerwise(model, cross_entropy, layout)
    inputs, targets = torch.randn(4, 2, 6, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    engine.sums(plan, inputs, targets)
    assert [len(idle) for idle in engine._pool._idle.values()] == [1]
    engine.release_memory()
    assert not engine._pool._idle


@pytest.mark.long
def test_nothing_is_kept_after_a_training(monkeypatch):
    kept = []
    real = BufferPool.clear
    monkeypatch.setattr(BufferPool, "clear", lambda self: kept.append(len(self._idle)) or real(self))
    monkeypatch.setattr(convolution, "cheapest", lambda *_: Strategy.KEEP)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 3))
    examples = torch.randn(12, 2, 6, 6), torch.arange(12) % 3
    train(model, examples, dp_sgd(noise_multiplier=1.0), sampling=full(), steps=2, lr=0.1)
    assert kept == [1]
