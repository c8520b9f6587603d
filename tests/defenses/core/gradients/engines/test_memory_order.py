"""Images and kernels whose channels lie first or last in memory: every layer rule gives autograd's rows and sums."""

from itertools import product

import pytest
import torch
from torch import Tensor

from leakbench.defenses.core import Block, Everything, StepPlan, clip

from .....parameters import subtests
from .architectures import BUILDERS, problem
from .duties import assert_same_rows, by_loop
from .modules import Problem
from .test_layerwise import KNOWN, engine_of

IMAGES = [name for name in KNOWN if len(BUILDERS[name][0]) == 3]


def channels_first(images: Tensor) -> Tensor:
    return images.contiguous()


def channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def transposed(images: Tensor) -> Tensor:
    """In neither order: rows and columns are exchanged in memory."""
    return images.transpose(2, 3).contiguous().transpose(2, 3)


def test_networks_of_images_begin_with_each_kind_of_layer():
    assert {"conv2d_everything", "group_norm_first", "standardised_conv", "linear_two_sequences"} < {*IMAGES}


@pytest.mark.long
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@subtests("name", IMAGES)
def test_rows_and_sums_are_autograds_in_every_memory_order(name, device):
    made = problem(name)
    made = Problem(made.model.to(device), made.inputs.to(device), made.targets.to(device))
    expected = by_loop(made)
    bound = clip(float(expected.norm(dim=1).median()))
    plan = StepPlan(Block(codec=Everything(expected.shape[1]), bound=bound))
    for kernels, images in product(
        (torch.contiguous_format, torch.channels_last), (channels_first, channels_last, transposed)
    ):
        model = made.model.to(memory_format=kernels)
        arranged = Problem(model, images(made.inputs), made.targets)
        engine = engine_of(arranged)
        assert_same_rows(engine.rows(arranged.inputs, arranged.targets), expected)
        (total,) = engine.sums(plan, arranged.inputs, arranged.targets)
        assert_same_rows(total, bound(expected).sum(dim=0))
