"""The reference is held to a loop of plain autograd on every architecture; the other engines are held to both."""

import pytest
from hypothesis import given

from leakbench.defenses.core.gradients.engines.torch_func import TorchFunc

from .....parameters import subtests
from . import duties, strategies
from .architectures import NAMES, problem

# PyTorch's vmap fails on recurrent layers, whose weights get a dimension of the batch there (2.14).
RECURRENT = [name for name in NAMES if name.startswith(("lstm", "gru", "rnn"))]


@pytest.mark.long
@subtests("name", [name for name in NAMES if name not in RECURRENT])
def test_rows_are_those_of_a_loop(name):
    duties.check_rows(TorchFunc, problem(name))


@given(strategies.architectures())
def test_rows_of_drawn_networks_are_those_of_a_loop(drawn):
    duties.check_rows(TorchFunc, drawn)


@pytest.mark.parametrize("name", ["small_resnet", "tied_embedding"])
def test_a_row_does_not_depend_on_its_neighbours(name):
    duties.check_neighbours(TorchFunc, problem(name))


@pytest.mark.parametrize("name", ["small_resnet", "frozen_biases", "weight_norm_conv"])
def test_rows_can_be_taken_at_another_point(name):
    duties.check_point(TorchFunc, problem(name))


def test_several_views_of_an_example_are_averaged():
    duties.check_views(TorchFunc, problem("small_resnet"))


def test_sums_are_those_of_clipped_rows():
    duties.check_sums(TorchFunc, problem("small_resnet"))


def test_memory_formats_change_nothing():
    duties.check_channels_last(TorchFunc, problem("small_resnet"))


def test_the_model_is_read_anew_at_every_call():
    duties.check_following(TorchFunc)


def test_the_loss_may_be_a_mean():
    duties.check_losses(TorchFunc)
