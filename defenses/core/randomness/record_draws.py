"""Public randomness per record, for dropout and augmentation: draws depend on a record's content, not its position.

Augmentation and dropout use public randomness. If it were drawn by position, removing a record from a batch would
change the draws of all later ones, and with them their gradients: the sum would change by more than a single
contribution. Here every record has a key, a hash of its own input and target. Each augmented view of a record is an
entry of the batch that the model is called with; its key is a hash of the record's key, the step's seed and the index
of the view, and each of its draws is a hash of that key and the index of the draw.

Draws are intercepted at PyTorch's functions (`drawn_functions.py`), in any layer, copy or engine, and inside
`torch.func.vmap` too. Other random layers are found by `gradients/checks/model_checks.py` and refused.

Guarantee:
    Draws for a record are a function of that record, the public seed, the index of the draw and the shape of the
    record's own activations. Equal records get equal draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode

from ..inputs import Inputs
from ..kernels.record_uniforms import FIRST as _FIRST
from ..kernels.record_uniforms import GOLDEN as _GOLDEN
from ..kernels.record_uniforms import SECOND as _SECOND
from ..kernels.record_uniforms import RecordUniforms, record_uniforms
from .drawn_functions import DRAWN, OPENED
from .keys import seed_from

_AT_ONCE = 2**24  # entries of the input tensor hashed at a time, which limits memory
_OF_INPUT, _OF_TARGET, _OF_FURTHER = 1, 2, 3  # seeds of hashes: of an input, a target, and each of several inputs

_keys: ContextVar[Tensor | None] = ContextVar("keys of the entries that a model is called with", default=None)


def record_keys(inputs: Inputs, targets: Tensor | None = None) -> Int64[Tensor, " n"]:
    """Computes the key of each record, a hash of the bits of its input and target.

    Args:
        inputs: records along the first dimension; of several tensors, all enter the key.
        targets: targets of the records; None to hash the inputs alone.
    """
    if not len(inputs):
        return torch.zeros(0, dtype=torch.int64, device=inputs.device)
    each = max(1, inputs[0].numel())
    parts = [_hashed_inputs(part) for part in inputs.split(max(1, _AT_ONCE // each))]
    keys = torch.cat(parts)
    return keys if targets is None else _mixed(keys + _hashed(targets, _OF_TARGET))


def words(keys: Int64[Tensor, " n"], count: int, seed: int) -> Int64[Tensor, "n count"]:
    """Computes pseudorandom 64-bit words for each key, by splitmix64.

    Args:
        keys: keys of records, or of their views.
        count: number of words per key.
        seed: any integer; words of different seeds are unrelated.
    """
    return _mixed(_streams(keys, seed).unsqueeze(-1) + torch.arange(1, count + 1, device=keys.device) * _GOLDEN)


def entry_keys(inputs: Inputs, targets: Tensor, views: int, seed: int) -> Int64[Tensor, " entries"]:
    """Computes the key of each entry (view of a record); the views of a record are adjacent.

    Args:
        inputs: records along the first dimension.
        targets: targets of the records.
        views: views per record; 1 without augmentation.
        seed: public seed of the step.
    """
    return words(record_keys(inputs, targets), views, seed_from(seed, "entries")).flatten()


def uniforms(keys: Int64[Tensor, " n"], count: int, seed: int) -> Float[Tensor, "n count"]:
    """Uniform numbers in [0, 1) in float64, multiples of 2^-53; arguments as for `words`."""
    # Seen by no mode: the checks of a model take a tensor's address for a read of its values.
    with DisableTorchFunction():
        streams = _streams(keys, seed)
        if RecordUniforms.usable(streams, count):
            return record_uniforms()(streams, count)[0]
    return _shifted(words(keys, count, seed), 11).double() * 2.0**-53


def _streams(keys: Int64[Tensor, " n"], seed: int) -> Int64[Tensor, " n"]:
    """Returns the start of each record's stream of words."""
    return _mixed(keys + _wrapped(seed * _GOLDEN))


def entries(keys: Int64[Tensor, " entries"] | None) -> AbstractContextManager[None]:
    """Sets the keys of the batch's entries for passes inside the context; None switches draws per record off."""
    return _Entries(keys)


class _Entries(AbstractContextManager[None]):
    """Context manager as a class, because `contextlib.contextmanager` takes three times as long."""

    __slots__ = ("_given", "_token")

    def __init__(self, keys: Int64[Tensor, " entries"] | None) -> None:
        self._given = keys

    def __enter__(self) -> None:
        self._token = _keys.set(self._given)

    def __exit__(self, *_: object) -> None:
        _keys.reset(self._token)


def current_keys() -> Int64[Tensor, " entries"] | None:
    """Returns the entries' keys of the current pass; None if none were set."""
    return _keys.get()


def one_pass() -> AbstractContextManager[DrawsByRecord | None]:
    """Returns the context of a forward pass in which layers draw per record; without keys it changes nothing."""
    keys = _keys.get()
    return nullcontext() if keys is None else DrawsByRecord(keys)


class DrawsByRecord(TorchFunctionMode):
    """`TorchFunctionMode` that replaces PyTorch's random functions by draws from the entries' keys.

    Attributes:
        calls: number of random calls in this pass so far, the seed of the next.
        like: the keys, a tensor with the batch dimension, also under `vmap`.
    """

    def __init__(self, keys: Int64[Tensor, " entries"]) -> None:
        """Takes a key for each entry of the batch."""
        super().__init__()
        self.like, self.calls = keys, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replaces random functions, and calls all others unchanged."""
        kwargs = kwargs or {}
        if func in OPENED:
            with self:
                return OPENED[func](*args, **kwargs)
        drawn = DRAWN.get(func)
        replacement = NotImplemented if drawn is None else drawn(self, *args, **kwargs)
        return func(*args, **kwargs) if replacement is NotImplemented else replacement

    def __call__(self, shape: Sequence[int], *, folded: bool = False) -> Float[Tensor, "..."]:
        """Draws uniform numbers, see `drawn_functions.Uniforms`."""
        count, size = len(self.like), torch.Size(shape).numel()
        # In a batch of a single entry, all draws belong to it, whatever the shape.
        if count != 1 and not (shape and (shape[0] == count or (folded and count and shape[0] % count == 0))):
            raise ValueError(
                f"{'dropout' if folded else 'a random tensor'} must have the batch as its first dimension to draw for "
                f"each record by itself, got {list(shape)} for {count} examples"
            )
        self.calls += 1
        # The index of the call is the seed, so that two layers draw independently for the same record.
        return uniforms(self.like, size // max(count, 1), self.calls).reshape(shape)


def _hashed_inputs(inputs: Inputs) -> Int64[Tensor, " n"]:
    if isinstance(inputs, Tensor):
        return _hashed(inputs, _OF_INPUT)
    # Each tensor with a seed of its own: two that are exchanged are another record.
    hashes = [_hashed(values, seed) for seed, values in enumerate(inputs.tensors, start=_OF_FURTHER)]
    return _mixed(torch.stack(hashes).sum(dim=0))


def _hashed(values: Tensor, seed: int) -> Int64[Tensor, " n"]:
    """Hash of each row's bits: a sum of its words with random odd weights, modulo 2^64."""
    # Bits, not values, are hashed: inputs that differ only by -0.0 and 0.0, or by two NaNs, have different keys.
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
    # Odd weights are invertible modulo 2^64, so a change of a single word always changes the sum; int64 wraps around.
    weights = _mixed(places * _GOLDEN + _wrapped(seed * _FIRST)) | 1
    return _mixed((flat.long() * weights).sum(dim=1))


def _mixed(x: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """Splitmix64's finaliser: every output bit depends on every input bit (Steele, Lea & Flood, OOPSLA 2014)."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Int64[Tensor, "*shape"], bits: int) -> Int64[Tensor, "*shape"]:
    """Logical right shift, which fills with zeros; int64's own shift is arithmetic, and fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _wrapped(number: int) -> int:
    """Wraps a Python integer modulo 2^64 to int64."""
    return (number + 2**63) % 2**64 - 2**63
