"""Networks with what transformers have: positions looked up once, tokens and scales as parameters of no layer."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from .modules import CLASSES, WORDS

LENGTH, WIDTH = 6, 8  # words of a text, numbers of a word


class RootMeanSquare(nn.Module):
    """Llama's norm: a parameter of no layer, times inputs of length one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, inputs):
        return self.weight * (inputs * (inputs.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


class Attention(nn.Module):
    """Self-attention of two heads with normalised queries, as Qwen's, and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.norm = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            RootMeanSquare(WIDTH // 2),
        )
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs):
        n, length, _ = inputs.shape
        query, key, value = self.into(inputs).view(n, length, 3, 2, WIDTH // 2).permute(2, 0, 1, 3, 4)
        query = self.norm(query) * self.temperature
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        return self.out(functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two linear layers, each behind a norm and with a scale of its own, as in ViT."""

    def __init__(self, norm) -> None:
        super().__init__()
        self.norms, self.attention = nn.ModuleList([norm(WIDTH), norm(WIDTH)]), Attention()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.scales = nn.ParameterList([torch.full((WIDTH,), 0.5), torch.full((WIDTH,), 0.3)])

    def forward(self, inputs):
        inputs = inputs + self.scales[0] * self.attention(self.norms[0](inputs))
        return inputs + self.scales[1] * self.down(functional.gelu(self.up(self.norms[1](inputs))))


class Text(nn.Module):
    """A classifier of words; positions are looked up for the whole batch, with a dimension for it or without."""

    def __init__(
        self,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        *,
        batch: bool = True,
        normed: bool = False,
        types: bool = False,
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH + 2, WIDTH)
        self.types = nn.Embedding(2, WIDTH) if types else None
        self.norm, self.after = norm(WIDTH) if normed else nn.Identity(), norm(WIDTH)
        self.block, self.out, self.batch = Block(norm), nn.Linear(WIDTH, CLASSES), batch

    def forward(self, inputs):
        places = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.words(inputs) + self.norm(self.places(places[None] if self.batch else places))
        if self.types is not None:
            hidden = hidden + self.types(torch.zeros(1, inputs.shape[1], dtype=torch.long, device=inputs.device))
        return self.out(self.block(self.after(hidden)).mean(dim=1))


class Picture(nn.Module):
    """A ViT: patches, a class token and positions that are parameters of the network, a scale of the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(2, WIDTH, 2, stride=2), nn.LayerNorm(WIDTH)
        self.channels = nn.Parameter(torch.rand(2, 1, 1) + 0.5)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 5, WIDTH))
        self.block, self.out = Block(nn.LayerNorm), nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        patches = self.patches(inputs * self.channels).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.token.expand(len(inputs), -1, -1), patches], dim=1) + self.places
        return self.out(self.norm(self.block(hidden))[:, 0])


class Kernel(nn.Module):
    """A convolution's kernel that no layer holds: a function convolves with it, of which there are no copies."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.kernel, self.out = nn.Linear(5, 8), nn.Parameter(torch.rand(2, 6, 3)), nn.Linear(12, CLASSES)

    def forward(self, inputs):
        return self.out(functional.conv1d(torch.tanh(self.inner(inputs)), self.kernel).flatten(1))
