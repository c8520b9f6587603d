"""Pickle of a state dict, interpreted instead of executed: instructions operate on descriptions of values.

A pickle is a program for a stack machine, and two of its instructions call any function that it names. Only the few
functions that state dicts need are known here, and none is called: their results are described. The instructions are
those of PyTorch's restricted loader, without those that no state dict has. So every tensor's location in the file is
known before a loader reads it, and a tensor that reaches beyond its storage, for which the loader would allocate
memory, is refused.
"""

import pickletools
import re
from collections.abc import Callable, Mapping
from typing import Any

from .limits import WAY_OUT, FileRefused, shown
from .stored import StoredTensor, shape_of, whole

MAX_PICKLE_BYTES = 16 << 20
MAX_INSTRUCTIONS = 300_000
_MAX_OPEN_MARKS = 1000
_MAX_KEY = 1 << 48
_EXPANDED = 16
"""Largest ratio of the tensors' bytes, counted without shared storage, to those of the file: views share storages."""
_ALLOWANCE = 16 << 20
"""Bytes that tensors may take in addition, whatever the size of the file."""

_STORAGES = {
    "torch FloatStorage": "F32",
    "torch DoubleStorage": "F64",
    "torch HalfStorage": "F16",
    "torch BFloat16Storage": "BF16",
    "torch LongStorage": "I64",
    "torch IntStorage": "I32",
    "torch ShortStorage": "I16",
    "torch CharStorage": "I8",
    "torch ByteStorage": "U8",
    "torch BoolStorage": "BOOL",
}
_ORDERED, _COUNTER, _SIZE = "collections OrderedDict", "collections Counter", "torch Size"
_TENSOR, _PARAMETER, _ENCODE = "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter", "_codecs encode"
_CALLED = (_ORDERED, _COUNTER, _SIZE, _TENSOR, _PARAMETER, _ENCODE)
_DEVICE = re.compile(r"[a-z]{2,16}(:\d{1,3})?")


class _Global(str):
    """Module and name of a function or type that the pickle names."""


class _Ordered(dict):
    """An OrderedDict, the only type whose attributes are set."""


class _Storage(StoredTensor):
    """Bytes of an archive's entry, in one dimension."""


def tensors_in(pickle: bytes, entries: Mapping[str, int], size: int) -> Any:
    """Returns the object of a pickle, with a `StoredTensor` in place of each tensor.

    Args:
        pickle: all of data.pkl.
        entries: bytes of each storage by its key.
        size: bytes of the file.

    Raises:
        FileRefused: names the instruction, the function or the tensor that is refused.
    """
    if len(pickle) > MAX_PICKLE_BYTES:
        raise FileRefused(f"its pickle may have at most {MAX_PICKLE_BYTES} bytes, got {len(pickle)}")
    return _Follower(pickle, entries, _EXPANDED * size + _ALLOWANCE).result()


def legacy_tensors_in(pickle: bytes, size: int) -> tuple[Any, dict[str, StoredTensor]]:
    """Returns the object of a pickle before PyTorch 1.6, like `tensors_in`, and its storages by their keys.

    Args:
        pickle: all of it.
        size: bytes of the file.

    Raises:
        FileRefused: see `tensors_in`; the caller checks that the storages exist.
    """
    follower = _Follower(pickle, None, _EXPANDED * size + _ALLOWANCE)
    return follower.result(), dict(follower.storages)


class _Follower:
    """Interpreter of a pickle, whose stack holds descriptions of values instead of values.

    Args:
        pickle: all of it.
        entries: bytes of each storage by its key; None if they stand behind the pickle.
        room: limit on the bytes of all tensors together, each counted without sharing its storage.
    """

    def __init__(self, pickle: bytes, entries: Mapping[str, int] | None, room: int) -> None:
        self.pickle, self.entries, self.room = pickle, entries, room
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, _Storage] = {}
        self.copies = 0

    def result(self) -> Any:
        """Follows the pickle to its end, and returns its object."""
        place, name = 0, ""
        try:
            for count, (opcode, argument, at) in enumerate(pickletools.genops(self.pickle)):
                place, name = at or 0, opcode.name
                if count >= MAX_INSTRUCTIONS:
                    raise FileRefused(f"its pickle may have at most {MAX_INSTRUCTIONS} instructions, got more")
                if (name == "PROTO") != (count == 0) or (name == "PROTO" and argument != 2):
                    raise FileRefused(f"its pickle must be of protocol 2 and say so once, at its beginning; {WAY_OUT}")
                self._follow(name, argument)
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            if isinstance(error, FileRefused):
                raise
            raise FileRefused(f"its pickle is broken at byte {place}, {name}: {shown(str(error))}") from None
        if place != len(self.pickle) - 1:
            raise FileRefused(f"its pickle must end with its file, got {len(self.pickle) - 1 - place} bytes behind it")
        if self.outer or len(self.stack) != 1:
            raise FileRefused("its pickle must leave one object")
        unused = (self.entries or {}).keys() - self.storages.keys()
        if unused:
            raise FileRefused(f"its entry {shown('data/' + min(unused))} belongs to no tensor")
        return self.stack[0]

    def _follow(self, name: str, argument: Any) -> None:
        constants = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
        stack = self.stack
        if name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name in ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"):
            stack.append(argument)
        elif name in constants:
            stack.append(constants[name])
        elif name == "SHORT_BINSTRING":
            # Loaders decode text of Python 2 in different ways, except for ASCII.
            if not argument.isascii():
                raise FileRefused(f"texts of Python 2 in its pickle must be ASCII, got {shown(argument)}")
            stack.append(argument)
        elif name in _MAKES:
            stack.append(_MAKES[name]())
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            if len(stack) < count:
                raise IndexError("too few values")
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "MARK":
            if len(self.outer) >= _MAX_OPEN_MARKS:
                raise FileRefused(f"its pickle may be nested at most {_MAX_OPEN_MARKS} deep")
            self.outer.append(stack)
            self.stack = []
        elif name == "TUPLE":
            items = self._to_mark()
            self.stack.append(tuple(items))
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else self._to_mark()
            self._target(list, name).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            self._set(self._pair() if name == "SETITEM" else self._to_mark(), name)
        elif name == "GLOBAL":
            stack.append(self._named(argument))
        elif name == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(self._call(stack.pop(), arguments))
        elif name == "BUILD":
            self._build(stack.pop())
        elif name not in ("PROTO", "STOP"):
            raise FileRefused(f"its pickle has the instruction {name}, which no state dict needs; {WAY_OUT}")

    def _to_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.outer.pop()
        return items

    def _pair(self) -> list[Any]:
        value, key = self.stack.pop(), self.stack.pop()
        return [key, value]

    def _target(self, kind: type, name: str) -> Any:
        target = self.stack[-1]
        if not isinstance(target, kind):
            raise FileRefused(f"its pickle has {name} on {_described(target)} instead of a {kind.__name__}")
        return target

    def _set(self, items: list[Any], name: str) -> None:
        target = self._target(dict, name)
        if len(items) % 2:
            raise FileRefused(f"its pickle has {name} with a key and no value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # No tuples: hashing a tuple that holds itself many times takes forever. No large numbers: multiples of
            # 2**61 - 1 have the same hash, with which a dictionary takes time quadratic in its size.
            number = isinstance(key, int) and 0 <= key < _MAX_KEY
            if not (number or isinstance(key, str | None)) or isinstance(key, _Global):
                raise FileRefused(
                    f"keys of its dictionaries must be text or numbers from 0 to 2**48, got {_described(key)}"
                )
            if key in target:
                raise FileRefused(f"it has two entries {shown(key)} in one dictionary")
            target[key] = value

    def _named(self, argument: str) -> _Global:
        if argument not in _STORAGES and argument not in _CALLED:
            raise FileRefused(
                f"its pickle names {shown(argument.replace(' ', '.'))}, which no state dict needs and which may run "
                f"code; {WAY_OUT}"
            )
        return _Global(argument)

    def _storage(self, key: Any) -> _Storage:
        """Returns the storage of the persistent id ("storage", type, key, device, entries).

        Before PyTorch 1.6 a sixth item follows: None, or the part of another storage that this is, which is refused.
        """
        if self.entries is None:
            key = key[:5] if isinstance(key, tuple) and len(key) == 6 and key[5] is None else None
        match key:
            case ("storage", _Global() as kind, str() as name, str() as device, numel) if kind in _STORAGES:
                storage = _Storage(_STORAGES[kind], shape_of([numel], f"storage {shown(name)}"))
            case _:
                raise FileRefused(f"its pickle refers to {_described(key)} where a storage must be")
        if not _DEVICE.fullmatch(device):
            raise FileRefused(f"the device of its storage {shown(name)} must be as 'cuda:0', got {shown(device)}")
        if self.entries is not None and self.entries.get(name) != storage.bytes:
            raise FileRefused(
                f"its storage {shown(name)} must have {shown(storage.bytes)} bytes, got "
                f"{self.entries.get(name, 'none')}"
            )
        if self.storages.setdefault(name, storage) != storage:
            raise FileRefused(f"its storage {shown(name)} has two types")
        return storage

    def _call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, _Global) or function not in _CALLED or not isinstance(arguments, tuple):
            raise FileRefused(f"its pickle calls {_described(function)} with {_described(arguments)}; {WAY_OUT}")
        match (str(function), *arguments):
            case (name,) if name == _ORDERED:
                return _Ordered()
            # Python 2 wrote a list of [key, value].
            case (name, list() as pairs) if name == _ORDERED:
                self._copied(len(pairs))
                if all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
                    self.stack.append(_Ordered())
                    self._set([item for pair in pairs for item in pair], "REDUCE")
                    return self.stack.pop()
            case (name, dict() as counts) if name == _COUNTER:
                self._copied(len(counts))
                return dict(counts)
            case (name, tuple() as shape) if name == _SIZE:
                return shape_of(shape, "torch.Size")
            case (name, str() as text, "latin1") if name == _ENCODE:
                self._copied(1 + len(text) // 256)
                return text.encode("latin1")
            case (name, StoredTensor() as tensor, bool(), _Ordered() as hooks) if name == _PARAMETER and not hooks:
                if not isinstance(tensor, _Storage):
                    return tensor
            case (name, _Storage() as storage, offset, shape, stride, bool(), None | _Ordered() as hooks, *metadata):
                if name == _TENSOR and not hooks and metadata in ([], [None], [{}]):
                    return self._tensor(storage, offset, shape, stride)
        raise FileRefused(f"its pickle calls {function.replace(' ', '.')} with other arguments than torch.save writes")

    def _copied(self, count: int) -> None:
        """Counts entries that calls copy: repeated calls on the same object copy it each time.

        An entry that is copied once took an instruction, so no pickle needs more copies than it may have instructions.
        """
        self.copies += count
        if self.copies > MAX_INSTRUCTIONS:
            raise FileRefused(f"the calls of its pickle copy more than {MAX_INSTRUCTIONS} entries")

    def _tensor(self, storage: _Storage, offset: Any, shape: Any, stride: Any) -> StoredTensor:
        tensor = StoredTensor(storage.dtype, shape_of(shape, "a tensor"))
        description = f"a tensor of shape {shown(tensor.shape)}"
        if not whole(offset) or not isinstance(stride, tuple) or not all(whole(step) for step in stride):
            raise FileRefused(
                f"offset and strides of {description} must be integers from 0, got {shown(offset)} and {shown(stride)}"
            )
        if len(stride) != len(tensor.shape):
            raise FileRefused(f"{description} must have a stride for each dimension, got {shown(stride)}")
        last = offset + sum((entries - 1) * step for entries, step in zip(tensor.shape, stride, strict=True))
        if tensor.bytes and last >= storage.shape[0]:
            raise FileRefused(f"{description} reaches entry {shown(last)} of a storage of {storage.shape[0]}")
        if not tensor.bytes and offset > storage.shape[0]:
            raise FileRefused(f"{description} begins at entry {shown(offset)} of a storage of {storage.shape[0]}")
        self.room -= tensor.bytes
        if self.room < 0:
            raise FileRefused(f"its tensors take more than {_EXPANDED} times the bytes that the file has")
        return tensor

    def _build(self, state: Any) -> None:
        """Checks the attributes that BUILD sets: a state dict has only `_metadata`, the versions of its modules."""
        target = self.stack[-1]
        if not isinstance(target, _Ordered) or type(state) is not dict or state.keys() != {"_metadata"}:
            raise FileRefused(
                f"its pickle sets attributes of {_described(target)}, which no state dict needs; {WAY_OUT}"
            )


_MAKES: dict[str, Callable[[], Any]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}


def _described(value: Any) -> str:
    """Describes a value for an error, without descending into containers."""
    if isinstance(value, _Global):
        return shown(value.replace(" ", "."))
    if isinstance(value, StoredTensor):
        return "a storage" if isinstance(value, _Storage) else "a tensor"
    if isinstance(value, _Ordered):
        return "an OrderedDict"
    return shown(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
