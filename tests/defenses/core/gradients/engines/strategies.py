"""A strategy that draws small networks for the property tests of engines."""

import math
from collections.abc import Callable, Collection

import torch
from hypothesis import strategies as st
from torch import nn

from .modules import CLASSES, PADDING, WORDS, Problem, Residual, after, normalised, standardised, synthetic

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
