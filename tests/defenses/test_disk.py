"""What is particular to DiSK: where it looks, and how it filters."""

import math

import pytest
import torch

from leakbench.defenses.core import Context, GradientAhead, Offset, full, train
from leakbench.defenses.disk import disk
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.sgd import sgd

from ..parameters import subtests
from . import duties


def test_a_step_by_hand():
    here, before, last = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 2.5]), torch.tensor([0.2, -0.4])
    context = Context(step=4, steps=9, dim=2, parameters=here)
    plan = disk(kappa=0.8, gamma=0.5, noise_multiplier=1.0).plan({"filtered": last, "before": before}, context)[1]
    (block,) = plan.blocks
    assert isinstance(block.query, GradientAhead) and isinstance(plan.post, Offset)
    torch.testing.assert_close(block.query.point, torch.tensor([1.25, 1.75]))
    assert block.query.weight == pytest.approx(0.2 / 0.4)
    torch.testing.assert_close(plan.post(torch.ones(2)), 0.2 * last + 0.8)
    rows = block.query(lambda point: torch.tensor([[3.0, 1.0]]) if point is None else torch.tensor([[5.0, 0.0]]))
    torch.testing.assert_close(rows, torch.tensor([[4.0, 0.5]]))


def test_on_a_quadratic_the_filter_does_not_lag_behind():
    """The change of a linear gradient is predicted exactly: without noise every update is the gradient itself."""

    class Bowl(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.at = torch.nn.Parameter(torch.tensor([[3.0, -2.0]]))

        def forward(self, inputs):
            return self.at * inputs

    def loss(outputs, targets):
        return (outputs * outputs).sum(dim=1) / 2

    data = (torch.tensor([[1.0, 2.0]] * 4), torch.zeros(4, dtype=torch.int64))
    settings = duties.grouped({"sampling": full(), "steps": 6, "lr": 0.1, "loss": loss})
    ours = train(Bowl(), data, disk(clip_norm=1e6, kappa=0.3, gamma=0.5, noise_multiplier=0.0), **settings)
    plain = train(Bowl(), data, sgd(), **settings)
    torch.testing.assert_close(duties.parameters(ours), duties.parameters(plain), rtol=1e-4, atol=1e-5)


def test_at_kappa_1_it_is_dp_sgd_to_the_same_noise_draw():
    one = duties.trained(disk(clip_norm=0.5, kappa=1.0, noise_multiplier=1.3))
    other = duties.trained(dp_sgd(clip_norm=0.5, noise_multiplier=1.3))
    torch.testing.assert_close(duties.parameters(one), duties.parameters(other), rtol=1e-5, atol=1e-6)


@subtests("settings", [{"kappa": 0.0}, {"kappa": 1.1}, {"gamma": 0.0}, {"gamma": math.inf}, {"kappa": 1e-300}])
def test_what_makes_no_sense_is_refused(settings):
    with pytest.raises(ValueError, match="must be"):
        disk(**settings)
