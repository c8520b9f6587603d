"""The parts of small networks that no library has, and what an engine is asked about: a network with its examples."""

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from leakbench.benchmarks.core.nets.lora import adapt

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


class Conv1D(nn.Module):
    """GPT-2's linear layer, with a weight of [in, out], under the name by which the one of transformers is known."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"


class Attention(nn.Module):
    """Self-attention: a layer of several inputs, outputs and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, inputs):
        return self.out(self.attention(inputs, inputs, inputs)[0].mean(dim=1))


class Recurrent(nn.Module):
    """A recurrent layer of which the states after all steps and the last ones are both used."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        state = layer.proj_size or layer.hidden_size
        width = (2 if layer.bidirectional else 1) * state + state
        self.out = nn.Linear(width + layer.hidden_size * isinstance(layer, nn.LSTM), CLASSES)

    def forward(self, inputs):
        outputs, last = self.layer(inputs if self.layer.batch_first else inputs.transpose(0, 1))
        last = last if isinstance(last, tuple) else (last,)
        averages = outputs.mean(dim=1 if self.layer.batch_first else 0)
        return self.out(torch.cat([averages, *(state.square().sum(dim=0) for state in last)], dim=1))


class Looped(nn.Module):
    """A recurrent cell that is called at each step."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell, self.out = cell, nn.Linear(cell.hidden_size, CLASSES)

    def forward(self, inputs):
        state = None
        for values in inputs.unbind(dim=1):
            state = self.cell(values, state)
        return self.out(state[0] if isinstance(state, tuple) else state)


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


def low_rank(model: nn.Sequential, rank: int) -> nn.Module:
    """The network with frozen weights and products beside them, but for its last layer."""
    return adapt(model, model[-1], rank=rank, scale=0.5, generator=torch.Generator().manual_seed(0))


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
