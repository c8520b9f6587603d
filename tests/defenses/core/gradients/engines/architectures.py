"""Small networks for the tests of every engine, one for each layer and option.

All in float64, so that engines are compared to 1e-12. Four examples, and no other size is four: an engine that takes
another dimension for the batch is found out. All parameters are moved off their initial ones and zeros.
"""

from collections.abc import Callable

import torch
from torch import nn

from .modules import (
    CLASSES,
    EXAMPLES,
    PADDING,
    WORDS,
    AddedInPlace,
    Attention,
    Bare,
    BarePositions,
    BatchSecond,
    Conv1D,
    Folded,
    Language,
    Looped,
    Mean,
    Mirrored,
    OneWeight,
    Positions,
    Problem,
    Recurrent,
    Residual,
    Shifted,
    Siamese,
    Twice,
    Unused,
    Viewed,
    classifier,
    frozen,
    low_rank,
    normalised,
    reader,
    small_resnet,
    standardised,
    synthetic,
    two_places,
)

VECTOR, SEQUENCE, PAIRS = (6,), (8, 6), (2, 8, 6)
SIGNAL, IMAGE, VOLUME, TEXT = (6, 13), (6, 9, 8), (2, 5, 6, 7), (9,)

CONV1D = {
    "plain": {"kernel_size": 3},
    "stride": {"kernel_size": 3, "stride": 2},
    "stride_leaves_a_rest": {"kernel_size": 2, "stride": 3},
    "padding": {"kernel_size": 3, "padding": 2},
    "same": {"kernel_size": 3, "padding": "same"},
    "same_even_kernel": {"kernel_size": 2, "padding": "same"},
    "same_dilation": {"kernel_size": 3, "padding": "same", "dilation": 2},
    "valid": {"kernel_size": 3, "padding": "valid"},
    "dilation": {"kernel_size": 3, "dilation": 2},
    "everything": {"kernel_size": 3, "stride": 2, "padding": 2, "dilation": 2, "groups": 2},
    "groups": {"kernel_size": 3, "groups": 3},
    "depthwise": {"kernel_size": 3, "groups": 6},
    "pointwise": {"kernel_size": 1},
    "pointwise_stride": {"kernel_size": 1, "stride": 2},
    "no_bias": {"kernel_size": 3, "bias": False},
    "circular": {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    "reflect": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "replicate_same": {"kernel_size": 2, "padding": "same", "padding_mode": "replicate"},
}
CONV2D = {
    "plain": {"kernel_size": 3},
    "oblong": {"kernel_size": (3, 2)},
    "stride": {"kernel_size": 3, "stride": (2, 1)},
    "stride_leaves_a_rest": {"kernel_size": 2, "stride": (3, 2)},
    "padding": {"kernel_size": 3, "padding": (2, 1)},
    "padding_one_side": {"kernel_size": (3, 2), "padding": (0, 1)},
    "same": {"kernel_size": 3, "padding": "same"},
    "same_even_kernel": {"kernel_size": (2, 4), "padding": "same"},
    "same_dilation": {"kernel_size": 3, "padding": "same", "dilation": (1, 2)},
    "valid": {"kernel_size": 3, "padding": "valid"},
    "dilation": {"kernel_size": 2, "dilation": (2, 1)},
    "everything": {"kernel_size": (3, 2), "stride": (2, 1), "padding": (2, 1), "dilation": (1, 2), "groups": 2},
    "groups": {"kernel_size": 3, "groups": 3},
    "depthwise": {"kernel_size": 3, "groups": 6},
    "pointwise": {"kernel_size": 1},
    "pointwise_stride": {"kernel_size": 1, "stride": 2},
    "no_bias": {"kernel_size": 3, "bias": False},
    "circular": {"kernel_size": 3, "padding": (1, 0), "padding_mode": "circular"},
    "reflect": {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    "replicate_same": {"kernel_size": (2, 3), "padding": "same", "padding_mode": "replicate"},
}


def convolutions(kind: Callable[..., nn.Module], shape: tuple[int, ...], settings: dict) -> Callable[[], nn.Module]:
    """Two of a kind, so that one of them is not the first layer; the second makes more channels of its inputs."""

    def build() -> nn.Module:
        return classifier(shape, kind(6, 6, **settings), nn.Tanh(), kind(6, 12, **settings), nn.Tanh())

    return build


BUILDERS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "linear": (VECTOR, lambda: nn.Linear(6, CLASSES)),
    "mlp": (VECTOR, lambda: classifier(VECTOR, nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.Tanh())),
    "linear_no_bias": (VECTOR, lambda: classifier(VECTOR, nn.Linear(6, 5, bias=False), nn.Tanh())),
    "linear_one_sequence": (SEQUENCE, lambda: classifier(SEQUENCE, nn.Linear(6, 5), nn.Tanh(), Mean(1))),
    "linear_two_sequences": (PAIRS, lambda: classifier(PAIRS, nn.Linear(6, 5), nn.Tanh(), Mean(1, 2))),
    "linear_sequence_no_bias": (
        SEQUENCE,
        lambda: classifier(SEQUENCE, nn.Linear(6, 5, bias=False), nn.Tanh(), Mean(1)),
    ),
    **{f"conv1d_{name}": (SIGNAL, convolutions(nn.Conv1d, SIGNAL, kw)) for name, kw in CONV1D.items()},
    **{f"conv2d_{name}": (IMAGE, convolutions(nn.Conv2d, IMAGE, kw)) for name, kw in CONV2D.items()},
    "conv3d": (VOLUME, lambda: classifier(VOLUME, nn.Conv3d(2, 3, (2, 3, 2), (1, 2, 1), (1, 0, 2)), nn.Tanh())),
    "conv_transpose2d": (
        IMAGE,
        lambda: classifier(IMAGE, nn.ConvTranspose2d(6, 2, 3, 2, 1, output_padding=1), nn.Tanh()),
    ),
    "group_norm_image": (IMAGE, lambda: classifier(IMAGE, nn.Conv2d(6, 6, 3), nn.GroupNorm(3, 6), nn.ReLU())),
    "group_norm_signal": (SIGNAL, lambda: classifier(SIGNAL, nn.Conv1d(6, 6, 3), nn.GroupNorm(2, 6), nn.ReLU())),
    "group_norm_vector": (VECTOR, lambda: classifier(VECTOR, nn.Linear(6, 9), nn.GroupNorm(3, 9), nn.ReLU())),
    "group_norm_first": (IMAGE, lambda: classifier(IMAGE, nn.GroupNorm(1, 6, eps=0.1), nn.Conv2d(6, 2, 3))),
    "group_norm_fixed": (
        IMAGE,
        lambda: classifier(IMAGE, nn.Conv2d(6, 6, 3), nn.GroupNorm(6, 6, affine=False), nn.ReLU()),
    ),
    "layer_norm_vector": (VECTOR, lambda: classifier(VECTOR, nn.Linear(6, 5), nn.LayerNorm(5, eps=0.1), nn.ReLU())),
    "layer_norm_last_dim": (SEQUENCE, lambda: classifier(SEQUENCE, nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU())),
    "layer_norm_last_of_four": (PAIRS, lambda: classifier(PAIRS, nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU())),
    "layer_norm_two_dims": (SEQUENCE, lambda: classifier(SEQUENCE, nn.Linear(6, 5), nn.LayerNorm([8, 5]), nn.ReLU())),
    "layer_norm_two_of_four": (PAIRS, lambda: classifier(PAIRS, nn.Linear(6, 5), nn.LayerNorm([8, 5]), nn.ReLU())),
    "layer_norm_three_dims": (
        IMAGE,
        lambda: classifier(IMAGE, nn.Conv2d(6, 2, 3), nn.LayerNorm([2, 7, 6]), nn.ReLU()),
    ),
    "layer_norm_first": (SEQUENCE, lambda: classifier(SEQUENCE, nn.LayerNorm(6), nn.Linear(6, 5))),
    "layer_norm_no_bias": (SEQUENCE, lambda: classifier(SEQUENCE, nn.Linear(6, 5), nn.LayerNorm(5, bias=False))),
    "layer_norm_fixed": (
        SEQUENCE,
        lambda: classifier(SEQUENCE, nn.Linear(6, 5), nn.LayerNorm(5, elementwise_affine=False)),
    ),
    "rms_norm": (SEQUENCE, lambda: classifier(SEQUENCE, nn.Linear(6, 5), nn.RMSNorm(5), nn.Tanh())),
    "rms_norm_two_of_four": (
        PAIRS,
        lambda: classifier(PAIRS, nn.Linear(6, 5), nn.RMSNorm([8, 5], eps=0.1), nn.Tanh(), nn.RMSNorm(5)),
    ),
    "transposed_linear": (VECTOR, lambda: classifier(VECTOR, Conv1D(5, 6), nn.Tanh(), Conv1D(7, 5), nn.Tanh())),
    "transposed_linear_of_sequences": (
        SEQUENCE,
        lambda: classifier(SEQUENCE, Conv1D(5, 6), nn.Tanh(), Conv1D(7, 5), nn.Tanh()),
    ),
    "instance_norm_signal": (
        SIGNAL,
        lambda: classifier(SIGNAL, nn.Conv1d(6, 6, 3), nn.InstanceNorm1d(6, affine=True), nn.ReLU()),
    ),
    "instance_norm_image": (
        IMAGE,
        lambda: classifier(IMAGE, nn.Conv2d(6, 6, 3), nn.InstanceNorm2d(6, affine=True, eps=0.1), nn.ReLU()),
    ),
    "instance_norm_fixed": (IMAGE, lambda: classifier(IMAGE, nn.Conv2d(6, 6, 3), nn.InstanceNorm2d(6), nn.ReLU())),
    "embedding": (TEXT, reader),
    "embedding_one_word": ((), lambda: nn.Sequential(nn.Embedding(WORDS, 5), nn.Tanh(), nn.Linear(5, CLASSES))),
    "embedding_then_linear": (TEXT, lambda: reader(nn.Linear(5, 5), nn.Tanh())),
    "embedding_padding": (TEXT, lambda: reader(nn.Linear(5, 5), nn.Tanh(), padding=PADDING)),
    "standardised_conv": (
        IMAGE,
        lambda: classifier(IMAGE, standardised(nn.Conv2d(6, 6, 3)), nn.Tanh(), standardised(nn.Conv2d(6, 2, 3))),
    ),
    "standardised_conv_no_bias": (
        IMAGE,
        lambda: classifier(IMAGE, standardised(nn.Conv2d(6, 6, 3, bias=False)), nn.GroupNorm(2, 6), nn.ReLU()),
    ),
    "weight_norm_conv": (SIGNAL, lambda: classifier(SIGNAL, normalised(nn.Conv1d(6, 5, 3)), nn.Tanh())),
    "weight_norm_linear": (SEQUENCE, lambda: classifier(SEQUENCE, normalised(nn.Linear(6, 5)), nn.Tanh())),
    "module_used_twice": (VECTOR, Twice),
    "module_used_side_by_side": (VECTOR, Siamese),
    "module_used_twice_first_forgotten": (VECTOR, lambda: Siamese(forgets=0)),
    "module_used_twice_second_forgotten": (VECTOR, lambda: Siamese(forgets=1)),
    "module_in_two_places": (VECTOR, two_places),
    "weight_of_two_modules": (VECTOR, OneWeight),
    "weight_of_two_modules_one_forgotten": (VECTOR, lambda: OneWeight(forgets=True)),
    "tied_embedding": (TEXT, lambda: Language(by_function=False)),
    "tied_by_function": (TEXT, lambda: Language(by_function=True)),
    "weight_used_by_function": (VECTOR, Mirrored),
    "bare_scale": (VECTOR, lambda: Bare(at_top=False)),
    "bare_shift_at_top": (VECTOR, lambda: Bare(at_top=True)),
    "prelu": (IMAGE, lambda: classifier(IMAGE, nn.Conv2d(6, 5, 3), nn.PReLU(5), nn.Conv2d(5, 2, 3), nn.PReLU())),
    "frozen_first_layers": (
        IMAGE,
        lambda: classifier(
            IMAGE, frozen(nn.Conv2d(6, 6, 3)), frozen(nn.GroupNorm(2, 6)), nn.ReLU(), nn.Conv2d(6, 2, 3)
        ),
    ),
    "frozen_middle_layer": (
        VECTOR,
        lambda: classifier(VECTOR, nn.Linear(6, 5), nn.Tanh(), frozen(nn.Linear(5, 7)), nn.Tanh()),
    ),
    "frozen_biases": (
        IMAGE,
        lambda: frozen(
            classifier(IMAGE, nn.Conv2d(6, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Linear(6, 5), nn.LayerNorm(5)),
            *("0.bias", "1.bias", "3.bias", "4.bias", "6.bias"),
        ),
    ),
    "frozen_weights": (
        IMAGE,
        lambda: frozen(
            classifier(IMAGE, nn.Conv2d(6, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.Linear(6, 5), nn.LayerNorm(5)),
            *("0.weight", "1.weight", "3.weight", "4.weight", "6.weight"),
        ),
    ),
    "frozen_embedding": (TEXT, lambda: frozen(reader(nn.Linear(5, 5), nn.Tanh()), "0.weight")),
    "low_rank_convolutions": (
        IMAGE,
        lambda: low_rank(
            classifier(
                IMAGE,
                nn.Conv2d(6, 6, 3, stride=2),
                nn.GroupNorm(2, 6),
                nn.ReLU(),
                nn.Conv2d(6, 4, 2, groups=2, padding=1),
            ),
            rank=2,
        ),
    ),
    "low_rank_linear_of_sequences": (
        SEQUENCE,
        lambda: low_rank(classifier(SEQUENCE, nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh()), rank=3),
    ),
    "relu_in_place_after_first_conv": (
        IMAGE,
        lambda: classifier(IMAGE, nn.Conv2d(6, 5, 3), nn.ReLU(inplace=True), nn.Conv2d(5, 2, 3)),
    ),
    "relu_in_place_after_linear_of_sequences": (
        SEQUENCE,
        lambda: classifier(SEQUENCE, nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.ReLU(inplace=True)),
    ),
    "relu_in_place_after_conv": (
        IMAGE,
        lambda: classifier(IMAGE, nn.Conv2d(6, 5, 3), nn.Tanh(), nn.Conv2d(5, 2, 3), nn.ReLU(inplace=True)),
    ),
    "relu_in_place_after_norm": (
        IMAGE,
        lambda: classifier(IMAGE, nn.Conv2d(6, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(inplace=True), nn.Conv2d(6, 2, 3)),
    ),
    "relu_in_place_on_the_skip": (
        IMAGE,
        lambda: classifier(
            IMAGE,
            nn.Conv2d(6, 5, 3),
            Residual(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(5, 5, 3, padding=1))),
            nn.AvgPool2d(2),
        ),
    ),
    "sum_in_place": (
        IMAGE,
        lambda: classifier(IMAGE, nn.Conv2d(6, 6, 1), AddedInPlace(6), AddedInPlace(6), nn.AdaptiveAvgPool2d(1)),
    ),
    "max_pool": (IMAGE, lambda: classifier(IMAGE, nn.Conv2d(6, 5, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(5, 2, 2))),
    "average_pool": (IMAGE, lambda: classifier(IMAGE, nn.Conv2d(6, 5, 3), nn.ReLU(), nn.AvgPool2d(3, 2, 1))),
    "adaptive_pool": (IMAGE, lambda: classifier(IMAGE, nn.Conv2d(6, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d((2, 3)))),
    "residual_pre_activation": (
        IMAGE,
        lambda: classifier(
            IMAGE,
            nn.Conv2d(6, 6, 3),
            Residual(nn.Sequential(nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1))),
            nn.GroupNorm(3, 6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        ),
    ),
    "residual_post_activation": (
        IMAGE,
        lambda: classifier(
            IMAGE,
            Residual(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(2, 6)), after=nn.ReLU()),
            nn.AdaptiveAvgPool2d(1),
        ),
    ),
    "residual_without_norm": (
        IMAGE,
        lambda: classifier(
            IMAGE,
            nn.Conv2d(6, 5, 3),
            Residual(nn.Sequential(nn.ReLU(), nn.Conv2d(5, 5, 3, padding=1)), nn.Conv2d(5, 5, 1)),
            nn.AvgPool2d(2),
        ),
    ),
    "unused_outputs": (VECTOR, Unused),
    "conv_of_a_transposed_view": (
        IMAGE,
        lambda: classifier(IMAGE, Viewed(lambda x: x.transpose(2, 3), nn.Conv2d(6, 5, (3, 2))), nn.Tanh()),
    ),
    "padded_conv_of_a_transposed_view": (
        IMAGE,
        lambda: classifier(IMAGE, Viewed(lambda x: x.transpose(1, 3), nn.Conv2d(8, 5, (3, 2), padding=1)), nn.Tanh()),
    ),
    "conv_of_an_expanded_view": (
        IMAGE,
        lambda: classifier(IMAGE, Viewed(lambda x: x[:, :1].expand(-1, 5, -1, -1), nn.Conv2d(5, 2, 3)), nn.Tanh()),
    ),
    "conv_of_channels_last": (
        IMAGE,
        lambda: classifier(
            IMAGE,
            Viewed(lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), nn.Conv2d(6, 5, 3)),
            nn.Tanh(),
            nn.Conv2d(5, 2, 3),
        ),
    ),
    "linear_of_a_transposed_view": (
        SEQUENCE,
        lambda: classifier(SEQUENCE, Viewed(lambda x: x.transpose(1, 2), nn.Linear(8, 5)), nn.Tanh()),
    ),
    "batch_second": (SEQUENCE, BatchSecond),
    "folded_into_the_batch": ((3, 2, 7), Folded),
    "positions_without_a_batch": (TEXT, Positions),
    "bare_positions": (TEXT, BarePositions),
    "attention": (SEQUENCE, Attention),
    "lstm": (SEQUENCE, lambda: Recurrent(nn.LSTM(6, 5, batch_first=True))),
    "lstm_projected": (SEQUENCE, lambda: Recurrent(nn.LSTM(6, 5, 2, proj_size=3, bidirectional=True))),
    "gru": (SEQUENCE, lambda: Recurrent(nn.GRU(6, 5, 2, batch_first=True))),
    "gru_both_ways": (SEQUENCE, lambda: Recurrent(nn.GRU(6, 5, bias=False, bidirectional=True))),
    "rnn": (SEQUENCE, lambda: Recurrent(nn.RNN(6, 5, batch_first=True))),
    "rnn_relu": (SEQUENCE, lambda: Recurrent(nn.RNN(6, 5, 2, nonlinearity="relu"))),
    "lstm_cell": (SEQUENCE, lambda: Looped(nn.LSTMCell(6, 5))),
    "gru_cell": (SEQUENCE, lambda: Looped(nn.GRUCell(6, 5))),
    "rnn_cell": (SEQUENCE, lambda: Looped(nn.RNNCell(6, 5, bias=False, nonlinearity="relu"))),
    "shifted_by_a_buffer": (VECTOR, lambda: classifier(VECTOR, Shifted(6), nn.Linear(6, 5), nn.Tanh())),
    "dropout_at_rest": (VECTOR, lambda: classifier(VECTOR, nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.5)).eval()),
    "small_resnet": ((2, 9, 8), small_resnet),
    "soft_targets": (VECTOR, lambda: classifier(VECTOR, nn.Linear(6, 5), nn.Tanh())),
}
NAMES = tuple(BUILDERS)


def problem(name: str) -> Problem:
    """A fresh network of this name, the same each time, with inputs and targets for it."""
    shape, build = BUILDERS[name]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return synthetic(build(), shape, EXAMPLES, soft=name == "soft_targets")
