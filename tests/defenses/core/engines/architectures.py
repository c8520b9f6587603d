"""Small networks for the tests of every engine, one for each layer and option; a strategy that draws more; the duties.

All in float64, so that engines are compared to 1e-12. Four examples, and no other size is four: an engine that takes
another dimension for the batch is found out. All parameters are moved off their initial ones and zeros.
"""

import copy
import math
import warnings
from collections.abc import Callable, Collection
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from defenses.core import Block, Everything, Layout, Loss, StepPlan, clip, cross_entropy
from defenses.core.engines.interface import PerExample, Unsupported

EXAMPLES, CLASSES, WORDS = 4, 3, 7
PADDING = 0  # the word that stands for none, where there is one; nought, because it is easily taken for None


class Problem(NamedTuple):
    """What rows are computed of."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor


# PyTorch says once per process that this costs a copy; tests take a warning for an error, and this one is no news.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Using padding='same' with even kernel lengths", UserWarning)
    nn.Conv1d(1, 1, 2, padding="same")(torch.zeros(1, 1, 2))


# --- parts -----------------------------------------------------------------------------------------------------


class Mean(nn.Module):
    """Average over dimensions, without parameters."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, inputs):
        return inputs.mean(self.dims)


class Standardised(nn.Module):
    """Weight standardisation: each output channel's weights get mean zero and variance one."""

    def forward(self, weight):
        dims = tuple(range(1, weight.dim()))
        centred = weight - weight.mean(dims, keepdim=True)
        return centred * (centred.square().mean(dims, keepdim=True) + 1e-4).rsqrt()


class Residual(nn.Module):
    """A sum of what goes in and what a body makes of it, with something done to the sum."""

    def __init__(self, body: nn.Module, skip: nn.Module | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.skip, self.after = body, skip or nn.Identity(), after or nn.Identity()

    def forward(self, inputs):
        return self.after(self.skip(inputs) + self.body(inputs))


class AddedInPlace(nn.Module):
    """A residual block as torchvision writes it: the sum is taken in place, and so are the activations."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(2, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, inputs):
        outputs = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(inputs)))))
        outputs += inputs
        return self.relu(outputs)


class Shifted(nn.Module):
    """Inputs less a buffer, as models carry the mean of their data."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(size))

    def forward(self, inputs):
        return inputs - self.mean


class Viewed(nn.Module):
    """A module that sees its inputs through a view that is not contiguous."""

    def __init__(self, view: Callable[[Tensor], Tensor], inner: nn.Module) -> None:
        super().__init__()
        self.view, self.inner = view, inner

    def forward(self, inputs):
        return self.inner(self.view(inputs))


class Siamese(nn.Module):
    """One module that looks at an example from two sides; it may be told to forget one of the answers."""

    def __init__(self, *, forgets: int | None = None) -> None:
        super().__init__()
        self.inner, self.out, self.forgets = nn.Linear(6, 5), nn.Linear(5, CLASSES), forgets

    def forward(self, inputs):
        views = [torch.tanh(self.inner(inputs)), torch.sin(self.inner(inputs.flip(1)))]
        if self.forgets is not None:
            del views[self.forgets]
        return self.out(torch.stack(views).sum(dim=0))


class Twice(nn.Module):
    """A module that is applied to its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, inputs):
        return self.out(torch.tanh(self.inner(torch.tanh(self.inner(inputs)))))


class OneWeight(nn.Module):
    """A weight that belongs to two linear layers, each with a bias of its own; the second may be called in vain."""

    def __init__(self, *, forgets: bool = False) -> None:
        super().__init__()
        self.forgets = forgets
        self.first, self.second, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.second.weight = self.first.weight

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs))
        further = torch.tanh(self.second(hidden))
        return self.out(hidden if self.forgets else further)


class Language(nn.Module):
    """Word vectors that are also the last layer: as one parameter of two modules, or used by a bare function."""

    def __init__(self, *, by_function: bool) -> None:
        super().__init__()
        self.words, self.hidden, self.pool = nn.Embedding(WORDS, 5), nn.Linear(5, 5), Mean(1)
        self.out = None if by_function else nn.Linear(5, WORDS, bias=False)
        if self.out is not None:
            self.out.weight = self.words.weight

    def forward(self, inputs):
        hidden = self.pool(torch.tanh(self.hidden(self.words(inputs))))
        return functional.linear(hidden, self.words.weight) if self.out is None else self.out(hidden)


class Mirrored(nn.Module):
    """An autoencoder's weight, which a bare function uses once more on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 5), nn.Linear(6, CLASSES)

    def forward(self, inputs):
        hidden = torch.tanh(self.inner(inputs))
        return self.out(torch.tanh(functional.linear(hidden, self.inner.weight.T)))


class Bare(nn.Module):
    """Parameters that belong to no layer: a scale inside, another used with a function at the top."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))

        def forward(self, inputs):
            return inputs * self.scale

    def __init__(self, *, at_top: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), self.Scale(), nn.Tanh())
        self.out = nn.Linear(5, CLASSES)
        self.shift = nn.Parameter(torch.zeros(5)) if at_top else None

    def forward(self, inputs):
        hidden = self.layers(inputs)
        return self.out(hidden if self.shift is None else torch.tanh(hidden + self.shift))


class Unused(nn.Module):
    """Layers whose outputs the loss never sees, wholly or in part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.aside, self.norm = nn.Linear(6, 5), nn.Linear(5, 2), nn.GroupNorm(1, 2)
        self.never, self.out = nn.Linear(2, 2), nn.Linear(3, CLASSES)

    def forward(self, inputs):
        hidden = torch.tanh(self.first(inputs))
        self.norm(self.aside(hidden))
        return self.out(hidden[:, :3])


class BatchSecond(nn.Module):
    """A linear layer that is handed [length, batch, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, inputs):
        return self.out(torch.tanh(self.inner(inputs.transpose(0, 1))).mean(dim=0))


class Folded(nn.Module):
    """A convolution that is handed each example's patches as a batch of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(2, 3, 3), nn.Linear(3, CLASSES)

    def forward(self, inputs):
        n, patches, channels, length = inputs.shape
        hidden = torch.tanh(self.conv(inputs.reshape(n * patches, channels, length))).mean(dim=2)
        return self.out(hidden.view(n, patches, 3).mean(dim=1))


class Positions(nn.Module):
    """Word vectors with learned positions, looked up once for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(WORDS, 5), nn.Embedding(9, 5), nn.Linear(5, CLASSES)

    def forward(self, inputs):
        places = self.places(torch.arange(inputs.shape[1], device=inputs.device))
        return self.out(torch.tanh(self.words(inputs) + places).mean(dim=1))


class BarePositions(nn.Module):
    """Word vectors with learned positions that are a parameter of the network itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.out = (
            nn.Embedding(WORDS, 5),
            nn.Parameter(torch.zeros(9, 5)),
            nn.Linear(5, CLASSES),
        )

    def forward(self, inputs):
        return self.out(torch.tanh(self.words(inputs) + self.places).mean(dim=1))


class Attention(nn.Module):
    """Self-attention: a layer of several inputs, outputs and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, inputs):
        return self.out(self.attention(inputs, inputs, inputs)[0].mean(dim=1))


def standardised(layer: nn.Module) -> nn.Module:
    """The layer, its weight standardised on the way."""
    return parametrize.register_parametrization(layer, "weight", Standardised())


def normalised(layer: nn.Module) -> nn.Module:
    """The layer, its weight split into length and direction."""
    return parametrizations.weight_norm(layer)


def frozen(module: nn.Module, *names: str) -> nn.Module:
    """The module with these parameters frozen; all of them where none is named."""
    for name, parameter in module.named_parameters():
        if not names or name in names:
            parameter.requires_grad_(False)
    return module


def classifier(shape: tuple[int, ...], *layers: nn.Module) -> nn.Sequential:
    """The layers with a linear one behind them, of the right size."""
    size = math.prod(after(nn.Sequential(*layers), shape))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(size, CLASSES))


def reader(*layers: nn.Module, padding: int | None = None, width: int = 5) -> nn.Sequential:
    """A classifier of words: their vectors, the layers, the mean, a linear layer."""
    return nn.Sequential(nn.Embedding(WORDS, width, padding), *layers, Mean(1), nn.Linear(width, CLASSES))


def after(module: nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one example's output."""
    with torch.no_grad():
        return tuple(module(torch.zeros(1, *shape)).shape[1:])


def two_places() -> nn.Module:
    """One layer that is a child of two containers, under two names."""
    inner = nn.Linear(6, 6)
    return nn.Sequential(nn.Sequential(inner, nn.Tanh()), nn.Sequential(inner, nn.Tanh()), nn.Linear(6, CLASSES))


def small_resnet() -> nn.Module:
    """A ResNet in miniature: a stem, a plain block, one that halves the image, and global pooling."""

    def norm(channels: int) -> nn.Module:
        return nn.GroupNorm(3, channels)

    def body(before: int, behind: int, stride: int) -> nn.Module:
        first = nn.Conv2d(before, behind, 3, stride, padding=1, bias=False)
        second = nn.Conv2d(behind, behind, 3, padding=1, bias=False)
        return nn.Sequential(first, norm(behind), nn.ReLU(inplace=True), second, norm(behind))

    halved = nn.Sequential(nn.Conv2d(6, 9, 1, 2, bias=False), norm(9))
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=False),
        norm(6),
        nn.ReLU(inplace=True),
        Residual(body(6, 6, 1), after=nn.ReLU()),
        Residual(body(6, 9, 2), halved, nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(9, CLASSES),
    )


# --- the list --------------------------------------------------------------------------------------------------

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
    "relu_in_place_after_first_conv": (
        IMAGE,
        lambda: classifier(IMAGE, nn.Conv2d(6, 5, 3), nn.ReLU(inplace=True), nn.Conv2d(5, 2, 3)),
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
        torch.manual_seed(0)
        return synthetic(build(), shape, EXAMPLES, soft=name == "soft_targets")


def synthetic(model: nn.Module, shape: tuple[int, ...], examples: int, *, soft: bool = False) -> Problem:
    """The model in float64 and off its initial parameters, with random examples of this shape."""
    model.double()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor += 0.1 * torch.randn_like(tensor)
    if any(isinstance(module, nn.Embedding) for module in model.modules()):
        inputs = torch.randint(0, WORDS, (examples, *shape))
        inputs[0] = PADDING  # an example of nothing else, and the same word many times
    else:
        inputs = torch.randn(examples, *shape, dtype=torch.float64)
    if soft:
        return Problem(model, inputs, torch.randn(examples, CLASSES, dtype=torch.float64).softmax(dim=1))
    return Problem(model, inputs, torch.arange(examples) % CLASSES)


# --- the strategy ----------------------------------------------------------------------------------------------

INGREDIENTS = frozenset(
    {"norm", "padding_mode", "string_padding", "embedding", "padding_idx", "parametrized", "repeated", "frozen"}
)
"""What `architectures` can be told to do without."""


@st.composite
def architectures(draw: st.DrawFn, without: Collection[str] = ()) -> Problem:
    """Random networks of one to five layers, residual blocks among them, and a linear one, with one to five examples.

    Args:
        draw: of hypothesis; the network, its weights and its data are functions of what is drawn.
        without: of `INGREDIENTS`, what is left out.
    """
    if unknown := set(without) - INGREDIENTS:
        raise ValueError(f"architectures can do without {sorted(INGREDIENTS)}, got {sorted(unknown)}")
    allowed = INGREDIENTS - set(without)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw(st.integers(0, 2**16)))
        dims = draw(st.sampled_from([1, 2, 3, 3] + [0] * ("embedding" in allowed)))
        shape: tuple[int, ...] = tuple(draw(st.integers(3, 7)) for _ in range(dims or 1))
        inner = shape
        layers: list[nn.Module] = []
        if dims == 0:
            padding = draw(st.sampled_from([None, PADDING])) if "padding_idx" in allowed else None
            layers.append(nn.Embedding(WORDS, 5, padding))
            inner = (*shape, 5)
        for _ in range(draw(st.integers(1, 5))):
            layer = draw(_layers(inner, allowed))
            before, inner = inner, after(layer, inner)
            layers.append(layer)
            if "repeated" in allowed and before == inner and draw(_rarely):
                layers.append(layer)  # the very same module once more
            layers.extend(draw(_in_place(layer)))
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(math.prod(inner), CLASSES))
        if "frozen" in allowed and draw(_rarely):
            for parameter in model[:-1].parameters():
                parameter.requires_grad_(draw(st.booleans()))
        return synthetic(model, shape, draw(st.sampled_from([1, 2, 3, 4, 5])), soft=draw(st.booleans()))


_rarely = st.integers(0, 3).map(lambda number: number == 0)


@st.composite
def _layers(draw: st.DrawFn, shape: tuple[int, ...], allowed: Collection[str], *, within: bool = False) -> nn.Module:
    """One layer, or one residual block, that takes examples of this shape."""
    kinds = ["linear", "activation", "conv", "conv", "norm", "pool", "residual"]
    if len(shape) == 1:
        kinds = ["linear", "linear", "activation", "norm", "residual"]
    if within:
        kinds.remove("residual")
    if "norm" not in allowed:
        kinds.remove("norm")
    if "pool" in kinds and min(shape[1:]) < 2:
        kinds.remove("pool")
    match draw(st.sampled_from(kinds)):
        case "linear":
            layer = nn.Linear(shape[-1], draw(st.integers(2, 7)), bias=draw(st.booleans()))
            return draw(_parametrized(layer, allowed))
        case "conv":
            return draw(_parametrized(draw(_convolutions(shape, allowed)), allowed))
        case "norm":
            return draw(_norms(shape))
        case "pool":
            if len(shape) == 3:
                return draw(st.sampled_from([nn.MaxPool2d(2), nn.AvgPool2d(2, 1), nn.AdaptiveAvgPool2d((1, 2))]))
            return draw(st.sampled_from([nn.MaxPool1d(2, 1), nn.AvgPool1d(2), nn.AdaptiveAvgPool1d(2)]))
        case "residual":
            body: list[nn.Module] = []
            inner = shape
            for _ in range(draw(st.integers(1, 2))):
                layer = draw(_layers(inner, allowed, within=True))
                inner = after(layer, inner)
                body.extend([layer, *draw(_in_place(layer))])
            # Back to the shape that came in, whatever it was in between.
            back = [nn.Flatten(), nn.Linear(math.prod(inner), math.prod(shape)), nn.Unflatten(1, shape)]
            return Residual(nn.Sequential(*body, *([] if inner == shape else back)), after=draw(_activations))
        case _:
            return draw(_activations)


_activations = st.sampled_from([nn.Tanh, nn.ReLU, nn.GELU]).map(lambda kind: kind())


@st.composite
def _in_place(draw: st.DrawFn, layer: nn.Module) -> list[nn.Module]:
    """An activation in place, or none; only behind layers that do not need their output in the backward pass."""
    safe = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.GroupNorm, nn.LayerNorm)
    return [nn.ReLU(inplace=True)] if isinstance(layer, safe) and draw(_rarely) else []


@st.composite
def _parametrized(draw: st.DrawFn, layer: nn.Module, allowed: Collection[str]) -> nn.Module:
    if "parametrized" not in allowed or not draw(_rarely):
        return layer
    return draw(st.sampled_from([standardised, normalised]))(layer)


@st.composite
def _convolutions(draw: st.DrawFn, shape: tuple[int, ...], allowed: Collection[str]) -> nn.Module:
    channels, *sizes = shape
    kinds: list[Callable[..., nn.Module]] = [nn.Conv1d, nn.Conv2d]
    groups = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
    kernel = [draw(st.integers(1, min(3, size))) for size in sizes]
    dilation = [
        1 if k == 1 else draw(st.integers(1, max(1, (s - 1) // (k - 1)))) for k, s in zip(kernel, sizes, strict=True)
    ]
    numbers = [draw(st.integers(0, min(2, size - 1))) for size in sizes]
    same = "string_padding" in allowed and draw(_rarely)
    padding = draw(st.sampled_from(["same", "valid"])) if same else tuple(numbers)
    stride = (1,) * len(sizes) if padding == "same" else tuple(draw(st.integers(1, 3)) for _ in sizes)
    modes = ["zeros"] * 3 + ["circular", "reflect", "replicate"] * ("padding_mode" in allowed)
    return kinds[len(sizes) - 1](
        channels,
        groups * draw(st.integers(1, 2)),
        tuple(kernel),
        stride=stride,
        padding=padding,
        dilation=tuple(dilation),
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(modes)),
    )


@st.composite
def _norms(draw: st.DrawFn, shape: tuple[int, ...]) -> nn.Module:
    # A large eps: what is nearly constant must not blow up the last digits that are compared.
    channels, spatial = shape[0], math.prod(shape[1:])
    groups = [g for g in range(1, channels + 1) if channels % g == 0 and channels // g * spatial > 1]
    kinds = ["layer"] + ["group"] * bool(groups) + ["instance"] * (len(shape) > 1 and spatial > 1)
    match draw(st.sampled_from(kinds)):
        case "group":
            return nn.GroupNorm(draw(st.sampled_from(groups)), channels, eps=0.01)
        case "layer":
            dims = draw(st.integers(1, len(shape)))
            return nn.LayerNorm(list(shape[-dims:]), eps=0.01, bias=draw(st.booleans()))
        case _:
            kind = (nn.InstanceNorm1d, nn.InstanceNorm2d)[len(shape) - 2]
            return kind(channels, eps=0.01, affine=draw(st.booleans()))


# --- what every engine owes ------------------------------------------------------------------------------------

Kind = type[PerExample]


def by_loop(problem: Problem, loss: Loss = cross_entropy) -> Tensor:
    """Rows the slow and sure way: plain autograd on a batch of one, example by example."""
    model, inputs, targets = problem
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(inputs)):
        value = loss(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
        gradients = torch.autograd.grad(value, trained, materialize_grads=True)
        rows.append(torch.cat([gradient.reshape(-1) for gradient in gradients]))
    return torch.stack(rows)


def assert_same_rows(rows: Tensor, expected: Tensor) -> None:
    """Equal to 1e-12 of the largest entry, detached, of the same dtype."""
    assert rows.shape == expected.shape
    assert rows.dtype == expected.dtype
    assert not rows.requires_grad
    assert float((rows - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


def snapshot(model: nn.Module) -> list[object]:
    """All that an engine must leave as it found it, comparable by `==`: values, gradients, hooks, odd attributes."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    state = [
        (
            name,
            id(t),
            t.tolist(),
            t.stride(),
            t.requires_grad,
            None if t.grad is None else t.grad.tolist(),
            sorted(vars(t)),
        )
        for name, t in tensors
    ]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = [
        (name, id(m), type(m), m.training, sorted(vars(m)), [len(getattr(m, kind)) for kind in hooks])
        for name, m in model.named_modules()
    ]
    switches = [(name, m.inplace) for name, m in model.named_modules() if hasattr(m, "inplace")]
    return [state, modules, switches]


def rows_by(kind: Kind, problem: Problem, loss: Loss = cross_entropy) -> Tensor:
    """One engine's rows at the model's own parameters."""
    model, inputs, targets = problem
    return kind(model, loss, Layout.of(model)).rows(inputs, targets)


def check_rows(kind: Kind, problem: Problem) -> None:
    """Rows are those of the loop, of whole batches and of one example, at every call; the model is left as found."""
    model, inputs, targets = problem
    expected, found = by_loop(problem), snapshot(model)
    engine = kind(model, cross_entropy, Layout.of(model))
    assert_same_rows(engine.rows(inputs, targets), expected)
    assert_same_rows(engine.rows(inputs[:1], targets[:1]), expected[:1])
    assert_same_rows(engine.rows(inputs, targets), expected)
    assert snapshot(model) == found


def check_rows_or_refusal(kind: Kind, problem: Problem) -> None:
    """Rows are right where there are any."""
    try:
        check_rows(kind, problem)
    except Unsupported as error:
        assert "must" in str(error)


def check_neighbours(kind: Kind, problem: Problem) -> None:
    """What is in the other rows of the batch does not show in an example's own."""
    others = problem.inputs.clone()
    others[1:] = torch.nan if others.is_floating_point() else PADDING
    assert_same_rows(rows_by(kind, problem._replace(inputs=others))[:1], by_loop(problem)[:1])


def check_point(kind: Kind, problem: Problem) -> None:
    """Rows elsewhere are those of a model that is there; this one stays where it is, and so do its rows."""
    model, inputs, targets = problem
    layout, found = Layout.of(model), snapshot(model)
    there = layout.read(model) + torch.linspace(-0.3, 0.3, layout.dim, dtype=torch.float64)
    engine = kind(model, cross_entropy, layout)
    rows = engine.rows(inputs, targets, point=there)
    assert_same_rows(engine.rows(inputs, targets), by_loop(problem))
    assert snapshot(model) == found
    moved = copy.deepcopy(model)
    values = layout.unflatten(there)
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            parameter.copy_(values.get(name, parameter))
    assert_same_rows(rows, by_loop(problem._replace(model=moved)))


def check_views(kind: Kind, problem: Problem) -> None:
    """With several views of each example a row is the mean of their rows."""
    model, inputs, targets = problem
    engine = kind(model, cross_entropy, Layout.of(model))
    views = torch.stack([inputs, 2 * inputs, inputs.flip(0)], dim=1).flatten(0, 1)
    labels = targets.repeat_interleave(3, dim=0)
    rows = engine.rows(views, labels, views=3)
    each = by_loop(Problem(model, views, labels))
    assert_same_rows(rows, torch.stack([each[3 * i : 3 * i + 3].mean(dim=0) for i in range(len(inputs))]))


def check_sums(kind: Kind, problem: Problem) -> None:
    """Clipped sums are the reference's, with gradients switched off around them."""
    model, inputs, targets = problem
    layout, rows = Layout.of(model), by_loop(problem)
    bound = clip(float(rows.norm(dim=1).median()))  # some rows are clipped, and some are not
    plan = StepPlan(Block(codec=Everything(layout.dim), bound=bound))
    with torch.no_grad():
        (found,) = kind(model, cross_entropy, layout).sums(plan, inputs, targets)
    assert_same_rows(found, bound(rows).sum(dim=0))


def check_channels_last(kind: Kind, problem: Problem) -> None:
    """How images and kernels lie in memory changes nothing."""
    expected = by_loop(problem)
    model = problem.model.to(memory_format=torch.channels_last)
    inputs = problem.inputs.contiguous(memory_format=torch.channels_last)
    found = snapshot(model)
    assert_same_rows(rows_by(kind, Problem(model, inputs, problem.targets)), expected)
    assert snapshot(model) == found


def check_following(kind: Kind) -> None:
    """Parameters, buffers and mode of the model are read anew at every call."""
    here = problem("shifted_by_a_buffer")
    engine = kind(here.model, cross_entropy, Layout.of(here.model))
    for moved in (*here.model.parameters(), *here.model.buffers()):
        before = engine.rows(here.inputs, here.targets)
        with torch.no_grad():
            moved += torch.linspace(-0.5, 0.5, moved.numel(), dtype=moved.dtype).view_as(moved)
        rows = engine.rows(here.inputs, here.targets)
        assert_same_rows(rows, by_loop(here))
        assert not torch.equal(rows, before)
    here = problem("dropout_at_rest")
    engine = kind(here.model, cross_entropy, Layout.of(here.model))
    for _ in range(2):
        assert_same_rows(engine.rows(here.inputs, here.targets), by_loop(here))
        here.model.train()
        awake = [engine.rows(here.inputs, here.targets) for _ in range(2)]
        assert not torch.equal(*awake)
        here.model.eval()


def check_losses(kind: Kind) -> None:
    """A loss gives a value per example; one that takes the mean of its batch, or several per example, is as good."""
    here = problem("soft_targets")

    def by_class(outputs, targets):
        return (outputs - targets).square()

    for loss in (
        cross_entropy,
        functional.cross_entropy,
        by_class,
        lambda outputs, targets: by_class(outputs, targets).sum(dim=1),
        lambda outputs, targets: by_class(outputs, targets).mean(dim=0),
    ):
        assert_same_rows(rows_by(kind, here, loss), by_loop(here, loss))


def check_refusal(kind: Kind, problem: Problem, message: str) -> None:
    """A sentence that says which layer, and the model is left as found."""
    found = snapshot(problem.model)
    with pytest.raises(Unsupported, match=message) as caught:
        rows_by(kind, problem)
    assert "\n" not in str(caught.value)
    assert snapshot(problem.model) == found
