"""Public randomness by record, for dropout and augmentation: draws follow from a record's content, not its place.

Augmentation and dropout draw from public coins. Were they drawn by position, taking one record out of a batch would
move the draws of all behind it, and with them their gradients: the sum would change by more than one
contribution. Here every record has a key, a hash of its own input and target, and each of its draws is a hash of that
key, the step's coins and the number of the draw.

Dropout is caught where PyTorch computes it (`torch.nn.functional`), in whatever layer, copy or engine that happens, and
inside `torch.func.vmap` too. Other random layers are found by `model_checks.py` and refused.

Guarantee:
    Draws for a record are a function of that record, the public coins and its own activations' shape. Equal records get
    equal draws.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..privacy.keys import seed_from

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, odd: the step between the inputs of a hash
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # multipliers of splitmix64's finaliser
_AT_ONCE = 2**24  # numbers of records that are hashed at a time

_keys: ContextVar[Tensor | None] = ContextVar("keys of the entries that a model is called with", default=None)


def record_keys(inputs: Tensor, targets: Tensor | None = None) -> Int64[Tensor, " n"]:
    """A key for each record: a hash of the bits of its input and target.

    Args:
        inputs: first dimension the records.
        targets: as many; None to look at the inputs alone.
    """
    if not len(inputs):
        return torch.zeros(0, dtype=torch.int64, device=inputs.device)
    each = max(1, inputs[0].numel())
    parts = [_hashed(part, 1) for part in inputs.split(max(1, _AT_ONCE // each))]
    keys = torch.cat(parts)
    return keys if targets is None else _mixed(keys + _hashed(targets, 2))


def words(keys: Int64[Tensor, " n"], count: int, seed: int) -> Int64[Tensor, "n count"]:
    """Random 64-bit words of each key.

    Args:
        keys: of records, or of their views.
        count: words a key.
        seed: which words: another seed, other words.
    """
    stream = _mixed(keys + _wrapped(seed * _GOLDEN)).unsqueeze(-1)
    return _mixed(stream + torch.arange(1, count + 1, device=keys.device) * _GOLDEN)


def entry_keys(inputs: Tensor, targets: Tensor, views: int, coins: int) -> Int64[Tensor, " entries"]:
    """A key for each view of each record, the views of a record side by side.

    Args:
        inputs: first dimension the records.
        targets: as many.
        views: of each record; 1 where it is looked at as it is.
        coins: public seed of the step.
    """
    return words(record_keys(inputs, targets), views, seed_from(coins, "entries")).flatten()


def uniforms(keys: Int64[Tensor, " n"], count: int, seed: int) -> Float[Tensor, "n count"]:
    """Numbers in [0, 1) in float64, multiples of 2^-53; arguments as for `words`."""
    return _shifted(words(keys, count, seed), 11).double() * 2.0**-53


def entries(keys: Int64[Tensor, " entries"] | None) -> AbstractContextManager[None]:
    """Sets the record keys for the passes inside of the context: one for each entry of the batch; None for no keys."""
    return _Entries(keys)


class _Entries(AbstractContextManager[None]):
    """A class, because a generator takes three times as long, which a small network's step shows."""

    __slots__ = ("_given", "_token")

    def __init__(self, keys: Int64[Tensor, " entries"] | None) -> None:
        self._given = keys

    def __enter__(self) -> None:
        self._token = _keys.set(self._given)

    def __exit__(self, *_: object) -> None:
        _keys.reset(self._token)


def current_keys() -> Int64[Tensor, " entries"] | None:
    """The record keys of the pass under way; None where none were set."""
    return _keys.get()


def one_pass() -> AbstractContextManager[DropoutByRecord | None]:
    """One pass through a model, in which dropout draws by record; nothing changes where no keys are given."""
    keys = _keys.get()
    return nullcontext() if keys is None else DropoutByRecord(keys)


class DropoutByRecord(TorchFunctionMode):
    """While it is active, dropout's masks are drawn from the keys of the entries.

    Attributes:
        calls: how often dropout was computed in this pass.
    """

    def __init__(self, keys: Int64[Tensor, " entries"]) -> None:
        """Takes one key for each entry of the batch."""
        super().__init__()
        self._entries, self.calls = keys, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replaces dropout functions, and calls everything else unchanged."""
        kwargs = kwargs or {}
        kind = _DROPOUTS.get(func)
        if kind is None:
            return func(*args, **kwargs)
        values, p, training = _arguments(*args, **kwargs)
        if not training or p == 0:
            return func(*args, **kwargs)
        self.calls += 1
        return kind(values, p, lambda shape: self._kept(shape, p))

    def _kept(self, shape: tuple[int, ...], p: float) -> Tensor:
        """A mask of what is kept of a tensor of this shape, whose first dimension is the entries."""
        count, size = len(self._entries), torch.Size(shape).numel()
        if not shape or shape[0] % max(count, 1):
            raise ValueError(
                f"dropout must have the batch as its first dimension to draw for each record by itself, "
                f"got {list(shape)} for {count} examples"
            )
        each = size // max(count, 1)
        # The number of the call is the seed: a record's masks in two layers are independent.
        return (uniforms(self._entries, each, self.calls) >= p).reshape(shape)


def _arguments(
    values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[Tensor, float, bool]:
    return values, p, training


def _plain(values: Tensor, p: float, kept: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    return values * _scaled(kept(tuple(values.shape)), p, values)


def _channels(values: Tensor, p: float, kept: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    return values * _broadcast(_scaled(kept(tuple(values.shape[:2])), p, values), values)


def _alpha(values: Tensor, p: float, kept: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    return _self_normalising(values, p, kept(tuple(values.shape)))


def _alpha_channels(values: Tensor, p: float, kept: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
    return _self_normalising(values, p, _broadcast(kept(tuple(values.shape[:2])), values))


def _scaled(kept: Tensor, p: float, like: Tensor) -> Tensor:
    return kept.to(like.dtype) * (0.0 if p == 1 else 1 / (1 - p))


def _broadcast(mask: Tensor, like: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *([1] * (like.dim() - mask.dim())))


def _self_normalising(values: Tensor, p: float, kept: Tensor) -> Tensor:
    """Alpha dropout, which keeps mean and variance (Klambauer et al., "Self-Normalizing Neural Networks", 2017)."""
    floor = -1.7580993408473766  # SELU's value at minus infinity
    if p == 1:
        return values * 0.0
    # Their affine correction a (x d + alpha' (1 - d)) + b, with a = ((1 - p)(1 + p alpha'^2))^(-1/2), b = -a p alpha'.
    scale = ((1 - p) * (1 + p * floor**2)) ** -0.5
    mask = kept.to(values.dtype)
    return scale * (values * mask + floor * (1 - mask)) - scale * floor * p


_DROPOUTS: dict[Any, Callable[[Tensor, float, Callable[[tuple[int, ...]], Tensor]], Tensor]] = {
    functional.dropout: _plain,
    functional.dropout1d: _channels,
    functional.dropout2d: _channels,
    functional.dropout3d: _channels,
    functional.alpha_dropout: _alpha,
    functional.feature_alpha_dropout: _alpha_channels,
}


def _hashed(values: Tensor, seed: int) -> Int64[Tensor, " n"]:
    """A hash of each row's bits: a sum of its words with random odd weights, modulo 2^64."""
    # Bits, not values: -0.0 and 0.0 are two records, as are a NaN and another.
    values = torch.view_as_real(values.detach()) if values.is_complex() else values.detach()
    flat = values.reshape(len(values), -1)
    if not flat.shape[1]:
        return torch.full((len(values),), seed, device=values.device)
    whole = {
        torch.float64: torch.int64,
        torch.float32: torch.int32,
        torch.float16: torch.int16,
        torch.bfloat16: torch.int16,
    }
    flat = flat.contiguous().view(whole[flat.dtype]) if flat.dtype in whole else flat
    places = torch.arange(1, flat.shape[1] + 1, device=values.device)
    # Odd weights are invertible modulo 2^64, so a change of one word always shows in the sum; int64 wraps around.
    weights = _mixed(places * _GOLDEN + _wrapped(seed * _FIRST)) | 1
    return _mixed((flat.long() * weights).sum(dim=1))


def _mixed(x: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Splitmix64's finaliser: every bit of the result depends on every bit given (Steele, Lea & Flood, OOPSLA 2014)."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Int64[Tensor, "*shape"], bits: int) -> Int64[Tensor, "*shape"]:
    """A logical right shift, which brings in zeros; int64's own is arithmetic, and brings in the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _wrapped(number: int) -> int:
    """A Python integer modulo 2^64, as int64 has it."""
    return (number + 2**63) % 2**64 - 2**63
