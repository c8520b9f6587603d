"""Replacements of PyTorch's random functions, computed from uniform numbers that are drawn per record.

They cover dropout, also inside attention and between the layers of an LSTM, GRU or RNN, and the random tensors used by
layers such as stochastic depth. Functions outside `DRAWN`, such as `torch.randperm`, draw as in PyTorch, and models
that call them are refused in `gradients/checks/model_checks.py`. An entry is a row of the batch that the model is
called with: a record, or an augmented view of it (`record_draws.py`).
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

_WHERE = frozenset({"device", "layout", "memory_format", "pin_memory"})


@runtime_checkable  # for the type checks of the tests
class Uniforms(Protocol):
    """Source of uniform numbers in [0, 1), float64; the numbers of an entry depend on its key alone."""

    def __call__(self, shape: Sequence[int], *, folded: bool = False) -> Tensor:
        """Draws the uniform numbers of a random call in a forward pass.

        Args:
            shape: shape of the result; its first dimension runs over the entries.
            folded: whether the first dimension may be a multiple of the batch, with several adjacent indices per entry,
                such as positions or heads.
        """
        ...

    @property
    def like(self) -> Tensor:
        """Tensor with the batch dimension, which `vmap` hides from other tensors; new tensors copy it."""
        ...


def _dropout(draw: Uniforms, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Elementwise dropout."""
    if not training or p == 0:
        return NotImplemented
    return input * _scaled(draw(input.shape, folded=True) >= p, p, input)


def _channels(draw: Uniforms, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or p == 0:
        return NotImplemented
    return input * _broadcast(_scaled(draw(input.shape[:2], folded=True) >= p, p, input), input)


def _alpha(
    dimensions: int | None, draw: Uniforms, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Any:
    if not training or p == 0:
        return NotImplemented
    return _self_normalising(input, p, _broadcast(draw(input.shape[:dimensions], folded=True) >= p, input))


def _scaled(kept: Tensor, p: float, like: Tensor) -> Tensor:
    return kept.to(like.dtype) * (0.0 if p == 1 else 1 / (1 - p))


def _broadcast(mask: Tensor, like: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *([1] * (like.dim() - mask.dim())))


def _self_normalising(values: Tensor, p: float, kept: Tensor) -> Tensor:
    """Alpha dropout, which preserves mean and variance (Klambauer et al., "Self-Normalizing Neural Networks", 2017)."""
    floor = -1.7580993408473766  # SELU's value at minus infinity
    if p == 1:
        return values * 0.0
    # Affine correction of the paper, with d the mask: a (x d + alpha' (1 - d)) + b,
    # a = ((1 - p)(1 + p alpha'^2))^(-1/2), b = -a p alpha'.
    scale = ((1 - p) * (1 + p * floor**2)) ** -0.5
    mask = kept.to(values.dtype)
    return scale * (values * mask + floor * (1 - mask)) - scale * floor * p


def _attention(
    draw: Uniforms,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Scaled dot-product attention, with dropout on the attention weights."""
    if dropout_p == 0:
        return NotImplemented
    # PyTorch's function does not return the attention weights; for unit vectors as values, they are its output.
    units = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], key.shape[-2])
    attend = partial(functional.scaled_dot_product_attention, attn_mask=attn_mask, is_causal=is_causal, scale=scale)
    weights = attend(query, key, units, enable_gqa=enable_gqa)
    if enable_gqa:
        value = value.repeat_interleave(weights.shape[-3] // value.shape[-3], dim=-3)
    return _dropout(draw, weights, dropout_p) @ value


def _recurrent(function: Callable[..., tuple[Tensor, ...]], draw: Uniforms, *arguments: Any, **named: Any) -> Any:
    """LSTM, GRU or RNN layer by layer, with dropout between layers; arguments as in `torch.lstm`."""
    if named:
        return NotImplemented
    packed = not isinstance(arguments[3], bool)  # then batch sizes follow the values
    values, sizes = arguments[0], arguments[1 : 1 + packed]
    hidden, weights, bias, layers, p, training, both_ways, *batch_first = arguments[1 + packed :]
    if not training or p == 0 or layers == 1:
        return NotImplemented
    single = isinstance(hidden, Tensor)
    states = [h.chunk(layers) for h in ([hidden] if single else hidden)]
    each, last = len(weights) // layers, []
    for layer in range(layers):
        if layer and packed:  # packed sequences interleave entries: only a single entry is served
            values = _dropout(draw, values[None], p)[0]
        elif layer:
            values = (
                _dropout(draw, values, p)
                if batch_first[0]
                else _dropout(draw, values.transpose(0, 1), p).transpose(0, 1)
            )
        state = [chunks[layer].contiguous() for chunks in states]
        own = weights[layer * each : (layer + 1) * each]
        values, *after = function(
            values, *sizes, state[0] if single else state, own, bias, 1, 0.0, training, both_ways, *batch_first
        )
        last.append(after)
    return values, *(torch.cat(parts) for parts in zip(*last, strict=True))


def _leaky(
    draw: Uniforms,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    """RReLU: a leaky ReLU with a random slope per element."""
    if not training:
        return NotImplemented
    slopes = lower + (upper - lower) * draw(input.shape, folded=True).to(input.dtype)
    return torch.where(input >= 0, input, slopes * input)


def _new(law: Callable[..., Tensor], draw: Uniforms, *size: Any, dtype: torch.dtype | None = None, **more: Any) -> Any:
    """Replaces `torch.rand` and `torch.randn`."""
    dtype = dtype or torch.get_default_dtype()
    size = (more.pop("size"),) if "size" in more else size
    if not _is_plain(more, dtype):
        return NotImplemented
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    return law(draw(shape), dtype).to(more.get("device") or torch.get_default_device())


def _drawn_like(
    law: Callable[..., Tensor], draw: Uniforms, input: Tensor, dtype: torch.dtype | None = None, **more: Any
) -> Any:
    """Replaces `torch.rand_like` and `torch.randn_like`."""
    dtype = dtype or input.dtype
    if not _is_plain(more, dtype):
        return NotImplemented
    return law(draw(input.shape), dtype).to(more.get("device") or input.device)


def _in_place(law: Callable[..., Tensor], draw: Uniforms, values: Tensor, *settings: float, **named: Any) -> Any:
    """Replaces `Tensor.uniform_`, `normal_` and `exponential_`."""
    if named.pop("generator", None) is not None or not values.dtype.is_floating_point:
        return NotImplemented
    named = {"start" if key == "from" else key: value for key, value in named.items()}
    return values.copy_(law(draw(values.shape), values.dtype, *settings, **named))


def _bernoulli(draw: Uniforms, input: Tensor, p: float | None = None, **more: Any) -> Any:
    """Replaces `torch.bernoulli`."""
    if not _is_plain(more, input.dtype):
        return NotImplemented
    return (draw(input.shape) < (input if p is None else p)).to(input.dtype)


def _coins_in_place(draw: Uniforms, values: Tensor, p: Any = 0.5, generator: Any = None) -> Any:
    return NotImplemented if generator is not None else values.copy_(draw(values.shape) < p)


def _empty(draw: Uniforms, *size: Any, dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> Any:
    """Replaces `torch.empty`: under `vmap` the new tensor has the batch dimension, so that draws fit into it."""
    if more:
        return NotImplemented
    device, dtype = device or torch.get_default_device(), dtype or torch.get_default_dtype()
    return draw.like.new_empty(*size, dtype=dtype, device=device)


def _is_plain(more: dict[str, Any], dtype: torch.dtype) -> bool:
    """Returns whether the remaining arguments leave the draw unchanged (a `generator` would not)."""
    return dtype.is_floating_point and all(key in _WHERE or value in (None, False) for key, value in more.items())


def _uniform(u: Tensor, dtype: torch.dtype, start: float = 0.0, to: float = 1.0) -> Tensor:
    grain = torch.finfo(dtype).eps / 2  # truncated, because rounding could give 1
    return start + (to - start) * ((u / grain).floor() * grain).to(dtype)


def _normal(u: Tensor, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Normal numbers by the inverse distribution function; clamped, because it is infinite at 0."""
    return (mean + std * math.sqrt(2) * torch.erfinv(2 * u.clamp(min=2.0**-54) - 1)).to(dtype)


def _exponential(u: Tensor, dtype: torch.dtype, lambd: float = 1.0) -> Tensor:
    """Exponential numbers; clamped above 0 as in PyTorch, because callers take their logarithm."""
    return -torch.log1p(-u.clamp(min=2.0**-54)).to(dtype) / lambd


DRAWN: dict[Any, Callable[..., Any]] = {
    functional.dropout: _dropout,
    functional.dropout1d: _channels,
    functional.dropout2d: _channels,
    functional.dropout3d: _channels,
    functional.alpha_dropout: partial(_alpha, None),
    functional.feature_alpha_dropout: partial(_alpha, 2),
    functional.scaled_dot_product_attention: _attention,
    functional.rrelu: _leaky,
    **{kind: partial(_recurrent, kind) for kind in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    torch.empty: _empty,
    torch.rand: partial(_new, _uniform),
    torch.randn: partial(_new, _normal),
    torch.rand_like: partial(_drawn_like, _uniform),
    torch.randn_like: partial(_drawn_like, _normal),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _coins_in_place,
    Tensor.uniform_: partial(_in_place, _uniform),
    Tensor.normal_: partial(_in_place, _normal),
    Tensor.exponential_: partial(_in_place, _exponential),
}
"""Random function -> replacement of its calls, given the uniform source; NotImplemented leaves a call to PyTorch."""


def _opened(function: Any) -> Any:
    hidden = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**vars(functional), **dict.fromkeys(hidden, lambda *_: False)}
    opened = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


OPENED = {kind: _opened(kind) for kind in (functional.multi_head_attention_forward, functional.gumbel_softmax)}
"""Python functions of PyTorch whose bodies call random functions -> copies without their dispatch to function modes.

A mode intercepts only the outermost call; inside a copy, the random functions are outermost and are intercepted.
"""
