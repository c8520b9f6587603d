"""Rows by BackPACK are those of the reference and of a loop, or it is said which layer is beyond it."""

import re
import sys

import pytest
from hypothesis import given, settings
from torch import nn

from leakbench.defenses.core import Layout, cross_entropy
from leakbench.defenses.core.gradients.engines.backpack import BackPACK
from leakbench.defenses.core.gradients.engines.torch_func import TorchFunc

from . import duties, modules, strategies
from .architectures import NAMES, problem

pytestmark = pytest.mark.peers

pytest.importorskip("backpack", reason="needs backpack-for-pytorch, of the extra 'engines'")

# Layers with something to train that it does not know, or knows in float32 only: the first of each network.
UNKNOWN = {
    "conv_transpose2d": "layer '0' (ConvTranspose2d)",
    "group_norm_image": "layer '1' (GroupNorm)",
    "group_norm_signal": "layer '1' (GroupNorm)",
    "group_norm_vector": "layer '1' (GroupNorm)",
    "group_norm_first": "layer '0' (GroupNorm)",
    "layer_norm_vector": "layer '1' (LayerNorm)",
    "layer_norm_last_dim": "layer '1' (LayerNorm)",
    "layer_norm_last_of_four": "layer '1' (LayerNorm)",
    "layer_norm_two_dims": "layer '1' (LayerNorm)",
    "layer_norm_two_of_four": "layer '1' (LayerNorm)",
    "layer_norm_three_dims": "layer '1' (LayerNorm)",
    "layer_norm_first": "layer '0' (LayerNorm)",
    "layer_norm_no_bias": "layer '1' (LayerNorm)",
    "rms_norm": "layer '1' (RMSNorm)",
    "rms_norm_two_of_four": "layer '1' (RMSNorm)",
    "transposed_linear": "layer '0' (Conv1D)",
    "transposed_linear_of_sequences": "layer '0' (Conv1D)",
    "instance_norm_signal": "layer '1' (InstanceNorm1d)",
    "instance_norm_image": "layer '1' (InstanceNorm2d)",
    "embedding": "layer '0' (Embedding)",
    "embedding_one_word": "layer '0' (Embedding)",
    "embedding_then_linear": "layer '0' (Embedding)",
    "embedding_padding": "layer '0' (Embedding)",
    "standardised_conv": "layer '0' (ParametrizedConv2d)",
    "standardised_conv_no_bias": "layer '0.parametrizations.weight' (ParametrizationList)",
    "weight_norm_conv": "layer '0' (ParametrizedConv1d)",
    "weight_norm_linear": "layer '0' (ParametrizedLinear)",
    "tied_embedding": "layer 'words' (Embedding)",
    "tied_by_function": "layer 'words' (Embedding)",
    "bare_scale": "layer 'layers.1' (Scale)",
    "bare_shift_at_top": "the model itself (Bare)",
    "prelu": "layer '1' (PReLU)",
    "frozen_biases": "layer '1' (GroupNorm)",
    "frozen_weights": "layer '1' (GroupNorm)",
    "relu_in_place_after_norm": "layer '1' (GroupNorm)",
    "sum_in_place": "layer '1.norm1' (GroupNorm)",
    "residual_pre_activation": "layer '1.body.0' (GroupNorm)",
    "residual_post_activation": "layer '0.body.1' (GroupNorm)",
    "unused_outputs": "layer 'norm' (GroupNorm)",
    "positions_without_a_batch": "layer 'words' (Embedding)",
    "bare_positions": "the model itself (BarePositions)",
    "attention": "layer 'attention' (MultiheadAttention)",
    "lstm": "layer 'layer' (LSTM)",
    "lstm_projected": "layer 'layer' (LSTM)",
    "gru": "layer 'layer' (GRU)",
    "gru_both_ways": "layer 'layer' (GRU)",
    "rnn": "layer 'layer' (RNN)",
    "rnn_relu": "layer 'layer' (RNN)",
    "lstm_cell": "layer 'cell' (LSTMCell)",
    "gru_cell": "layer 'cell' (GRUCell)",
    "rnn_cell": "layer 'cell' (RNNCell)",
    "small_resnet": "layer '1' (GroupNorm)",
}
MODE = r"layer '0' \(Conv{}d\) must have padding_mode='zeros', .* got '{}'"
SAME = r"layer '0' \(Conv{}d\) must have its padding in numbers"
ONCE = r"layer '{}' \(Linear\) must be used once"
REFUSED = {
    **{name: re.escape(f"{layer} must be one of Linear, Conv1d, Conv2d, Conv3d") for name, layer in UNKNOWN.items()},
    **{f"conv{d}d_{mode}": MODE.format(d, mode) for d in (1, 2) for mode in ("circular", "reflect")},
    **{f"conv{d}d_replicate_same": MODE.format(d, "replicate") for d in (1, 2)},
    **{f"conv{d}d_same{more}": SAME.format(d) for d in (1, 2) for more in ("", "_even_kernel", "_dilation")},
    "module_used_twice": ONCE.format("inner"),
    "module_used_side_by_side": ONCE.format("inner"),
    "module_used_twice_first_forgotten": ONCE.format("inner"),
    "module_used_twice_second_forgotten": ONCE.format("inner"),
    "module_in_two_places": ONCE.format("0.0"),
    "weight_of_two_modules": r"layer 'second' \(Linear\) must not share a parameter with 'first'",
    "weight_of_two_modules_one_forgotten": r"layer 'second' \(Linear\) must not share a parameter with 'first'",
    "weight_used_by_function": "parameter 'inner.weight' must not be used outside of its layer",
    "relu_in_place_on_the_skip": "layer '1.body.0' must not change in place what is read elsewhere too",
    "batch_second": r"layer 'inner' \(Linear\) must have the batch as its first dimension, got .* \[8, 5, 6\]",
    "folded_into_the_batch": r"layer 'conv' \(Conv1d\) must have the batch as its first dimension",
}
SUPPORTED = [name for name in NAMES if name not in REFUSED]


@pytest.mark.parametrize("name", SUPPORTED)
def test_rows_are_those_of_a_loop_and_the_model_is_left_as_found(name):
    duties.check_rows(BackPACK, problem(name))


@pytest.mark.parametrize("name", SUPPORTED)
def test_rows_are_those_of_the_reference(name):
    rows, expected = (duties.rows_by(kind, problem(name)) for kind in (BackPACK, TorchFunc))
    duties.assert_same_rows(rows, expected)


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_what_backpack_does_not_know_or_gets_wrong_is_refused_by_name(name, message):
    duties.check_refusal(BackPACK, problem(name), message)


@settings(max_examples=40)
@given(strategies.architectures())
def test_drawn_networks_have_the_right_rows_or_none(drawn):
    duties.check_rows_or_refusal(BackPACK, drawn)


KNOWN = {"norm", "padding_mode", "string_padding", "embedding", "padding_idx", "parametrized", "repeated"}


@settings(max_examples=40)
@given(strategies.architectures(without=KNOWN))
def test_drawn_networks_of_known_layers_have_the_right_rows(drawn):
    duties.check_rows(BackPACK, drawn)


@pytest.mark.parametrize("name", ["residual_without_norm", "conv2d_groups", "linear_two_sequences"])
def test_a_row_does_not_depend_on_its_neighbours(name):
    duties.check_neighbours(BackPACK, problem(name))


@pytest.mark.parametrize("name", ["residual_without_norm", "frozen_middle_layer", "conv1d_everything"])
def test_rows_can_be_taken_at_another_point(name):
    duties.check_point(BackPACK, problem(name))


def test_several_views_of_an_example_are_averaged():
    duties.check_views(BackPACK, problem("residual_without_norm"))


def test_sums_are_those_of_clipped_rows():
    duties.check_sums(BackPACK, problem("residual_without_norm"))


@pytest.mark.parametrize("name", ["residual_without_norm", "conv2d_everything", "conv2d_pointwise_stride"])
def test_memory_formats_change_nothing(name):
    duties.check_channels_last(BackPACK, problem(name))


def test_the_model_is_read_anew_at_every_call():
    duties.check_following(BackPACK)


def test_the_loss_may_be_a_mean():
    duties.check_losses(BackPACK)


def test_a_sum_in_place_behind_a_layer_is_refused():
    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, inputs):
            outputs = self.inner(inputs)
            outputs += inputs
            return outputs

    here = modules.synthetic(Summed(), (6,), 4)
    duties.check_refusal(BackPACK, here, r"must not be changed in place, .* write x = x \+ y")


def test_a_failure_leaves_nothing_behind():
    model, inputs, targets = problem("mlp")
    engine = BackPACK(model, cross_entropy, Layout.of(model))
    expected = engine.rows(inputs, targets)
    with pytest.raises(IndexError):
        engine.rows(inputs, targets + 100)
    duties.assert_same_rows(engine.rows(inputs, targets), expected)


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "backpack", None)  # importing it fails, installed or not
    model = problem("mlp").model
    with pytest.raises(ModuleNotFoundError) as caught:
        BackPACK(model, cross_entropy, Layout.of(model))
    expected = "engine 'backpack' needs backpack, which is not installed: pip install 'leakbench[engines]'"
    assert (str(caught.value), caught.value.name) == (expected, "backpack")
