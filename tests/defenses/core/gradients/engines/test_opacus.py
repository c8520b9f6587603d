"""Rows by Opacus are those of the reference and of a loop, or it is said which layer is beyond it."""

import sys

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from leakbench.defenses.core import Layout, cross_entropy
from leakbench.defenses.core.gradients.engines.interface import Unsupported
from leakbench.defenses.core.gradients.engines.opacus import Opacus
from leakbench.defenses.core.gradients.engines.torch_func import TorchFunc

from . import duties, modules, strategies
from .architectures import NAMES, problem

pytestmark = pytest.mark.peers

SOME_OUTPUTS = r"layer 'inner' \(Linear\) must not be used several times where the loss depends on some"
REFUSED = {
    "conv1d_circular": r"layer '0' \(Conv1d\) must have padding_mode='zeros', .* got 'circular'",
    "conv1d_reflect": r"layer '0' \(Conv1d\) must have padding_mode='zeros', .* got 'reflect'",
    "conv1d_replicate_same": r"layer '0' \(Conv1d\) must have padding_mode='zeros', .* got 'replicate'",
    "conv2d_circular": r"layer '0' \(Conv2d\) must have padding_mode='zeros', .* got 'circular'",
    "conv2d_reflect": r"layer '0' \(Conv2d\) must have padding_mode='zeros', .* got 'reflect'",
    "conv2d_replicate_same": r"layer '0' \(Conv2d\) must have padding_mode='zeros', .* got 'replicate'",
    "layer_norm_no_bias": r"layer '1' \(LayerNorm\) must have a bias",
    "embedding_padding": r"layer '0' \(Embedding\) must have padding_idx=None, .* got 0",
    "standardised_conv_no_bias": r"layer '0.parametrizations.weight' .* must belong to a layer that trains another",
    "module_used_twice_first_forgotten": SOME_OUTPUTS,
    "module_used_twice_second_forgotten": SOME_OUTPUTS,
    "tied_by_function": "parameter 'words.weight' must not be used outside of its layer",
    "weight_used_by_function": "parameter 'inner.weight' must not be used outside of its layer",
    "relu_in_place_on_the_skip": "layer '1.body.0' must not change in place what is read elsewhere too",
    "sum_in_place": r"must not be changed in place, .* write x = x \+ y",
    "batch_second": r"layer 'inner' \(Linear\) must have the batch as its first dimension, got .* \[8, 5, 6\]",
    "folded_into_the_batch": r"layer 'conv' \(Conv1d\) must have the batch as its first dimension",
    "positions_without_a_batch": r"layer 'places' \(Embedding\) must have the batch as its first .* \[9\]",
    "attention": r"layer 'attention' \(MultiheadAttention\) must have one input and one output",
    **{
        name: r"layer 'layer' \(\w+\) must have one input and one output"
        for name in ("lstm", "lstm_projected", "gru", "gru_both_ways", "rnn", "rnn_relu")
    },
    **{
        name: r"layer 'cell' \(\w+\) must be called with one tensor and nothing else"
        for name in ("lstm_cell", "gru_cell", "rnn_cell")
    },
}
SUPPORTED = [name for name in NAMES if name not in REFUSED]


@pytest.mark.parametrize("name", SUPPORTED)
def test_rows_are_those_of_a_loop_and_the_model_is_left_as_found(name):
    duties.check_rows(Opacus, problem(name))


@pytest.mark.parametrize("name", SUPPORTED)
def test_rows_are_those_of_the_reference(name):
    rows, expected = (duties.rows_by(kind, problem(name)) for kind in (Opacus, TorchFunc))
    duties.assert_same_rows(rows, expected)


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_what_opacus_gets_wrong_is_refused_by_name(name, message):
    duties.check_refusal(Opacus, problem(name), message)


@settings(max_examples=60)
@given(strategies.architectures(without={"padding_mode", "padding_idx"}))
def test_drawn_networks_have_the_right_rows_or_none(drawn):
    duties.check_rows_or_refusal(Opacus, drawn)


@pytest.mark.parametrize("name", ["small_resnet", "conv2d_groups", "weight_norm_conv", "module_used_side_by_side"])
def test_a_row_does_not_depend_on_its_neighbours(name):
    duties.check_neighbours(Opacus, problem(name))


@pytest.mark.parametrize("name", ["small_resnet", "frozen_biases", "weight_norm_conv", "tied_embedding"])
def test_rows_can_be_taken_at_another_point(name):
    duties.check_point(Opacus, problem(name))


@pytest.mark.parametrize("name", ["small_resnet", "bare_shift_at_top"])
def test_several_views_of_an_example_are_averaged(name):
    duties.check_views(Opacus, problem(name))


@pytest.mark.parametrize("name", ["small_resnet", "unused_outputs"])
def test_sums_are_those_of_clipped_rows(name):
    duties.check_sums(Opacus, problem(name))


@pytest.mark.parametrize("name", ["small_resnet", "conv2d_plain", "conv2d_everything", "conv2d_pointwise_stride"])
def test_memory_formats_change_nothing(name):
    # Opacus itself is wrong for these, and says nothing.
    duties.check_channels_last(Opacus, problem(name))


def test_the_model_is_read_anew_at_every_call():
    duties.check_following(Opacus)


def test_the_loss_may_be_a_mean():
    duties.check_losses(Opacus)


def test_a_loss_that_gives_no_value_per_example_is_refused():
    def loss(outputs, targets):
        return cross_entropy(outputs, targets).mean() * float(outputs.detach().sum())

    model, inputs, targets = problem("mlp")
    with pytest.raises(Unsupported, match=r"loss must give one value per example, got shape \[\] for 4 examples"):
        Opacus(model, loss, Layout.of(model)).rows(inputs, targets)


@pytest.mark.parametrize("examples", [7, 8, 9])
@pytest.mark.parametrize("name", ["batch_second", "positions_without_a_batch"])
def test_a_dimension_as_long_as_the_batch_is_not_taken_for_it(name, examples):
    # 8 and 9 are the lengths of these networks' sequences.
    model, inputs, targets = problem(name)
    inputs, targets = inputs[:1].repeat(examples, *[1] * (inputs.dim() - 1)), targets[:1].repeat(examples)
    with pytest.raises(Unsupported, match="must have the batch as its first dimension"):
        duties.rows_by(Opacus, modules.Problem(model, inputs, targets))


class Scaled(nn.Module):
    """A layer that Opacus leaves to torch.func, with one thing or another inside."""

    def __init__(self, inside, *, buffer=False):
        super().__init__()
        self.scale, self.inside = nn.Parameter(torch.ones(6)), inside
        if buffer:
            self.register_buffer("shift", torch.ones(6))

    def forward(self, inputs):
        return self.inside(inputs * self.scale)


def same_weight():
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    layers[1].weight = layers[0].weight
    return layers


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: Scaled(nn.Dropout()), r"layer '0' \(Scaled\) must be in torch.func's reach.*random"),
        (lambda: Scaled(nn.Identity(), buffer=True), r"layer '0' \(Scaled\) must not have buffers"),
        (lambda: Scaled(same_weight()), r"layer '0' \(Scaled\) must not hold one parameter under two names"),
        (lambda: nn.LSTM(6, 6), r"layer '0' \(LSTM\) must have one input and one output"),
        (lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6)), r"layer '0.1' \(BatchNorm1d\) must not have buffers"),
    ],
)
def test_a_layer_that_opacus_cannot_do_by_torch_func_is_refused_by_name(layer, message):
    model = modules.synthetic(nn.Sequential(layer(), nn.Linear(6, 3)), (6,), 4)
    duties.check_refusal(Opacus, model, message)


def test_a_layer_that_is_called_by_keyword_is_refused():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 3)

        def forward(self, inputs):
            return self.inner(input=inputs)

    here = modules.synthetic(Keyword(), (6,), 4)
    duties.check_refusal(Opacus, here, r"layer 'inner' \(Linear\) must be called with one tensor")


@pytest.mark.parametrize("setting", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"padding_idx": 3}])
def test_an_embedding_with_a_gradient_of_its_own_kind_is_refused(setting):
    embedding = nn.Embedding(7, 5, **setting)
    model = nn.Sequential(embedding, modules.Mean(1), nn.Linear(5, 3))
    (name,) = setting
    duties.check_refusal(Opacus, modules.synthetic(model, (9,), 4), f"layer '0' .* must have {name}=")
    model[0].requires_grad_(False)
    assert duties.rows_by(Opacus, modules.synthetic(model, (9,), 4)).shape == (4, 18)


def test_a_loss_that_depends_on_nothing_trained_has_rows_of_zeros():
    class Elsewhere(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 3)

        def forward(self, inputs):
            self.inner(inputs)
            return inputs[:, :3]

    here = modules.synthetic(Elsewhere(), (6,), 4)
    assert torch.equal(duties.rows_by(Opacus, here), torch.zeros(4, 21, dtype=torch.float64))


def test_a_layer_may_be_reached_in_one_batch_and_not_in_the_next():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, inputs):
            hidden = self.inner(inputs)
            return self.out(hidden if float(inputs[0, 0]) > 0 else inputs)

    model, inputs, targets = modules.synthetic(Sometimes(), (6,), 4)
    engine = Opacus(model, cross_entropy, Layout.of(model))
    for sign in (1, -1, 1):
        inputs = sign * inputs.abs()
        expected = duties.by_loop(modules.Problem(model, inputs, targets))
        duties.assert_same_rows(engine.rows(inputs, targets), expected)


def test_the_layout_says_what_is_trained():
    model, inputs, targets = problem("mlp")
    whole = duties.by_loop(problem("mlp"))
    layout = Layout.of(model)
    part = Layout(layout.names[1:], layout.shapes[1:])
    rows = Opacus(model, cross_entropy, part).rows(inputs, targets)
    duties.assert_same_rows(rows, whole[:, layout.sizes[0] :])


def test_the_callers_inputs_stay_as_they_are():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3))
    here = modules.synthetic(model, (6,), 4)
    before = here.inputs.clone()
    duties.rows_by(Opacus, here)
    assert torch.equal(here.inputs, before)


def test_a_failure_leaves_nothing_behind():
    model, inputs, targets = problem("unused_outputs")
    engine = Opacus(model, cross_entropy, Layout.of(model))
    expected = engine.rows(inputs, targets)
    with pytest.raises(IndexError):
        engine.rows(inputs, targets + 100)
    duties.assert_same_rows(engine.rows(inputs, targets), expected)


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus", None)  # importing it fails, installed or not
    model = problem("mlp").model
    with pytest.raises(ModuleNotFoundError) as caught:
        Opacus(model, cross_entropy, Layout.of(model))
    expected = "engine 'opacus' needs opacus, which is not installed: pip install 'leakbench[engines]'"
    assert (str(caught.value), caught.value.name) == (expected, "opacus")
