"""What is particular to a step by itself: parameters that a plan holds are put back where an optimizer moved them."""

import pytest
import torch

from leakbench.defenses.core import Context, Coordinates, Defense, Whole, clip
from leakbench.defenses.core.training.step import Stepper


@pytest.mark.parametrize(
    ("moved", "expected"),
    [
        ([1.0, 5.0, 6.0, 4.0], None),
        ([1.0, 2.0, 3.0, 4.0], None),
        ([0.5, 5.0, 6.0, 4.0], [1.0, 5.0, 6.0, 4.0]),
        ([float("nan"), 5.0, 6.0, 4.0], [1.0, 5.0, 6.0, 4.0]),
    ],
)
def test_what_a_plan_holds_is_put_back_if_it_was_moved(moved, expected):
    placed: list[torch.Tensor] = []
    stepper = Stepper(
        Defense(Whole(bound=clip(1.0)), 1.0),
        Context(step=0, steps=1, dim=4, parameters=torch.tensor([1.0, 2.0, 3.0, 4.0])),
        placed.append,
        moves=Coordinates(torch.tensor([1, 2]), dim=4),
    )
    stepper.hold(torch.tensor(moved))
    assert [values.tolist() for values in placed] == ([] if expected is None else [expected])
