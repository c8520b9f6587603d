"""SHA-256 digest of everything that decides a computation: values, functions with all they refer to, modules, data.

Three promises rest on it. A resumed run draws the seeded noise of its interrupted steps a second time: if a sum had
changed, the difference of the two releases would contain no noise, so a checkpoint stores a digest of all inputs of a
release, down to the values in a loss function's closure, and content that cannot be inspected is refused. The verdict
on a model's engine serves all models of the same content (`choose.py`). A forward pass that changes any content of a
model or a loss is refused (`model_checks.py`).

A function is inspected down to its code, defaults, closure and the globals that it names. PyTorch, torchvision, NumPy
and the standard library enter by name alone, and `leakbench.defenses` by name and `source_digest`. Not covered: state
behind a C extension, in a file, or in a module that a function reaches by attribute (`settings.WEIGHT`).
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import io
import logging
import pathlib
import pickle
import random
import struct
import sys
import types
from collections.abc import Iterator, Mapping, Set
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..power_iteration import hooks_of

_PACKAGE = __name__.partition("core.")[0]
_BY_NAME = frozenset({"torch", "numpy", "torchvision", *sys.stdlib_module_names})
_ANNOTATIONS = ("__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__")
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Size,
    slice,
    range,
    type(...),
)
_BUILTIN = (types.BuiltinFunctionType, types.MethodWrapperType, types.MethodDescriptorType, np.ufunc)
_MANAGED_DICT, _WORD = 1 << 4, struct.calcsize("P")


class UnknownContent(ValueError):
    """Content that cannot be inspected; the message gives its place and type."""


@functools.cache
def source_digest() -> str:
    """SHA-256 over the source files of `leakbench.defenses`: two versions of a method have different digests."""
    sources = hashlib.sha256()
    folder = pathlib.Path(__file__).parents[__name__.count(".") - 2]
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        sources.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return sources.hexdigest()


Hidden = Literal["refuse", "type", "pickle"]
"""Treatment of content that cannot be inspected."""


def digest(*values: object, hidden: Hidden = "refuse") -> str:
    """Returns a hexadecimal SHA-256 that is the same for the same content, in every process.

    Args:
        values: values of any type.
        hidden: "refuse" to raise on content that cannot be inspected, "type" to hash its type, "pickle" to hash type
            and pickle. With "pickle", a dataclass's caches are hashed too, to detect changes.

    Raises:
        UnknownContent: for hidden content if it is refused, with the place and the type.
    """
    walker = _Walker(hidden)
    for position, value in enumerate(values):
        walker.add(value, f"[{position}]")
    return walker.hash.hexdigest()


def architecture(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Yields (place, content) of a model, except the values that a checkpoint restores.

    The content is each module's class, attributes and mode, each parameter's first place, shape, dtype and whether it
    is trained, and each buffer's shape and dtype, or its values if `state_dict` omits it.
    """
    saved, first = set(model.state_dict()), {id(parameter): name for name, parameter in model.named_parameters()}
    for name, module in model.named_modules(remove_duplicate=False):  # a layer may be called in two places
        yield f"{name}:class", type(module)
        for key, value in own_attributes(module).items():
            yield f"{name}.{key}", value
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, (first[id(parameter)], tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, (tuple(buffer.shape), buffer.dtype) if name in saved else buffer


def own_attributes(module: nn.Module) -> dict[str, object]:
    """Returns a module's attributes other than parameters, buffers and submodules, and its forward hooks."""
    before, after = vars(module)["_forward_pre_hooks"], vars(module)["_forward_hooks"]
    computed = {hook.name for hook in hooks_of(module)}  # from parameters, at every call
    others = _OF_EVERY_MODULE | computed | (_OF_RECURRENT if isinstance(module, nn.RNNBase) else set())
    own: dict[str, object] = {key: value for key, value in vars(module).items() if key not in others}
    # The keys of the hook dictionaries are counters of the process.
    return own | {"hooks before": [*before.values()], "hooks after": [*after.values()]}


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_OF_RECURRENT = frozenset({"_flat_weights", "_flat_weight_refs"})  # its parameters, looked up at every call


class _Walker:
    """Feeds a hash with a tree of content; repeated objects enter by number, so that cycles end."""

    def __init__(self, hidden: Hidden) -> None:
        self.hash = hashlib.sha256()
        self._hidden: Hidden = hidden
        self._met: dict[int, int] = {}
        self._kept: list[object] = []  # so that no address is reused during the walk

    def add(self, value: object, place: str) -> None:
        """Hashes a value."""
        if isinstance(value, _PLAIN) and type(value).__module__ in ("builtins", "torch"):
            return self._say(type(value).__name__, repr(value))
        if not isinstance(value, tuple):  # the compiler decides whether equal constants are the same object
            if id(value) in self._met:
                return self._say("again", self._met[id(value)])
            self._met[id(value)] = len(self._met)
            self._kept.append(value)
        if isinstance(value, Tensor):
            self._tensor(value)
            return self._attached(value, place)
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
            return self._say("array", value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
        if isinstance(value, enum.Enum):
            self._say("enum", _name(type(value)), value.name)
            return self.add(value.value, f"{place}.value")
        if isinstance(value, pathlib.PurePath):
            return self._say("path", str(value))
        if isinstance(value, _PLAIN):  # of a subclass, which may define its own repr
            kind: Any = next(kind for kind in _PLAIN if isinstance(value, kind))
            self._say(_name(type(value)), kind.__repr__(value))
            self.add(type(value), f"{place}:class")
            return self._attached(value, place)
        if isinstance(value, Mapping):
            self._mapping(value, place)
            self.add(getattr(value, "default_factory", None), f"{place}.default_factory")
            return self._attached(value, place)
        if isinstance(value, (list, tuple)):
            self._say(_name(type(value)), len(value))
            for position, entry in enumerate(value):
                self.add(entry, f"{place}[{position}]")
            return self._attached(value, place)
        if isinstance(value, (set, frozenset)):
            # Sorted digests: a set's own order follows from hashes that differ between processes.
            return self._say(_name(type(value)), *sorted(map(self._alone, value)))
        return self._object(value, place)

    def _alone(self, value: object) -> str:
        """Returns the digest of an element of an unordered collection."""
        walker = _Walker(self._hidden)
        if not isinstance(value, _PLAIN):
            # Objects under way end the recursion here too: a class may be a key in a table that its own methods read.
            walker._met, walker._kept = dict(self._met), self._kept
        walker.add(value, "key")
        return walker.hash.hexdigest()

    def _attached(self, value: object, place: str) -> None:
        """Hashes the attributes of an object whose own content was hashed."""
        if attached := _dictionary(value):
            self.add(dict(attached), place)

    def _object(self, value: object, place: str) -> None:
        if isinstance(value, types.ModuleType):
            return self._say("module", value.__name__)
        if isinstance(value, type):
            return self._class(value, place)
        if isinstance(value, types.FunctionType):
            return self._function(value, place)
        if isinstance(value, types.MethodType):
            self.add(value.__func__, f"{place}.__func__")
            return self.add(value.__self__, f"{place}.__self__")
        if isinstance(value, functools.partial):
            return self.add((value.func, value.args, value.keywords), f"{place}.partial")
        if isinstance(value, np.ufunc) and all(set(kinds) <= set("O->") for kinds in value.types):
            return self._opaque(value, place)  # of `np.frompyfunc`, which does not expose its function
        if isinstance(value, _BUILTIN):
            self._say("builtin", getattr(value, "__module__", None), getattr(value, "__qualname__", repr(value)))
            # The object that a method is bound to is content too, besides its name: `rates.get`, `weights.mul`.
            return self.add(_bound_to(value), f"{place}.__self__")
        if isinstance(value, (property, staticmethod, classmethod, functools.cached_property)):
            inner = [getattr(value, key, None) for key in ("fget", "fset", "__func__", "func")]
            return self.add(inner, place)
        if isinstance(value, types.CodeType):
            return self._code(value, place)
        if isinstance(value, logging.Logger) or _stands_for_itself(value):
            return self._say("named", _name(type(value)), getattr(value, "__name__", getattr(value, "name", "")))
        if isinstance(value, torch.Generator):
            return self.add((str(value.device), value.get_state()), place)
        if isinstance(value, nn.Module):
            self.add(type(value), f"{place}:class")
            everywhere = value.named_modules(remove_duplicate=False)  # a layer may be called in two places
            inside = {name: (type(module), own_attributes(module)) for name, module in everywhere}
            parameters, buffers = (
                dict(named(remove_duplicate=False)) for named in (value.named_parameters, value.named_buffers)
            )
            return self.add((inside, parameters, buffers), place)
        if dataclasses.is_dataclass(value):
            # If no field is compared, all fields are content, and none is a cache.
            never = all(not f.compare for f in dataclasses.fields(value))
            # When changes are to be detected, caches are content too.
            return self._instance(value, place, _memories(value) if self._hidden != "pickle" and not never else set())
        return self._instance(value, place)

    def _instance(self, value: object, place: str, left_out: Set[str] = frozenset()) -> None:
        content = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
        content |= _dictionary(value)
        content = {name: entry for name, entry in content.items() if name not in left_out}
        # Python objects keep all state in attributes and slots; native objects may have more, behind them.
        empty = not content and not hasattr(value, "__dict__") and type(value) is not object
        if isinstance(value, io.IOBase) or empty or _extends_native(type(value)):
            return self._opaque(value, place)
        if isinstance(value, random.Random) and type(value).getstate is random.Random.getstate:
            self.add(value.getstate(), f"{place}.getstate()")
        self.add(type(value), f"{place}:class")
        return self.add(content, place)

    def _opaque(self, value: object, place: str) -> None:
        """Refuses content that cannot be inspected, or hashes its type, or that and its pickle."""
        if self._hidden == "refuse":
            raise UnknownContent(
                f"{place} is of type {_name(type(value))}, into which nothing can look: a checkpoint could not tell "
                "whether a resumed run computes the same; use plain values, train without a checkpoint, or take noise "
                "that is not seeded"
            )
        self._say("opaque", _name(type(value)), _pickled(value) if self._hidden == "pickle" else b"")

    def _tensor(self, value: Tensor) -> None:
        plain = value.detach()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        if plain.dtype == torch.bfloat16:  # unknown to NumPy
            plain = plain.view(torch.int16)
        # Conjugation and negation may be pending as flags on the memory, which NumPy refuses.
        content = plain.cpu().contiguous().resolve_conj().resolve_neg().numpy().tobytes()
        self._say("tensor", str(value.dtype), tuple(value.shape), content)

    def _mapping(self, value: Mapping[Any, Any], place: str) -> None:
        self._say(_name(type(value)), len(value))
        # Keys of several types do not compare, so their digests are sorted; insertion order is not content.
        keyed = sorted(((self._alone(key), key) for key in value), key=lambda pair: pair[0])
        for name, key in keyed:
            self._say("key", name)
            self.add(value[key], f"{place}[{key!r}]")

    def _function(self, value: types.FunctionType, place: str) -> None:
        self._say("function", _name(value))
        # `functools.wraps` copies the module's name, but not the globals, so they tell where the code was written.
        # (Type checkers at run time wrap functions of this package, so its names are taken as they are.)
        ours = (value.__module__ or "").startswith(_PACKAGE)
        if ours or (_by_name(value) and _of_library(value.__globals__.get("__name__"))):
            return
        place = f"{place} ({value.__qualname__})"
        self._code(value.__code__, place)
        self.add(value.__defaults__, f"{place} defaults")
        self.add(value.__kwdefaults__, f"{place} defaults")
        self._attached(value, place)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # a name that is not bound yet
                content = None
            self.add(content, f"{place} variable '{name}'")
        for name in sorted(_globals_of(value.__code__)):
            if name in value.__globals__:
                self._say("global", name)
                self.add(value.__globals__[name], f"{place} global '{name}'")

    def _code(self, code: types.CodeType, place: str) -> None:
        # Without line numbers and file name: a function that was moved computes the same.
        self._say(
            "code", code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_flags
        )
        for constant in code.co_consts:
            self.add(constant, place)

    def _class(self, value: type, place: str) -> None:
        self._say("class", _name(value))
        if _by_name(value):
            return
        for base in value.__bases__:
            self.add(base, place)
        for name, member in sorted(vars(value).items()):
            kinds = (
                types.FunctionType,
                property,
                staticmethod,
                classmethod,
                functools.cached_property,
                *_PLAIN,
                Tensor,
            )
            special = name.startswith("__") and name.endswith("__")
            # Annotations compute nothing; from Python 3.14 on, functions create them.
            text = special and (isinstance(member, (str, type(None))) or name in _ANNOTATIONS)
            # Methods that `dataclass` generates follow from the fields.
            written = isinstance(member, types.FunctionType) and member.__code__.co_filename == "<string>"
            # Python's own bookkeeping, and descriptors of values that are stored in each instance.
            inner = (
                special or name == "_abc_impl" or (hasattr(type(member), "__get__") and not hasattr(member, "__dict__"))
            )
            if (isinstance(member, kinds) or not inner) and not text and not written:
                self._say("member", name)
                self.add(member, f"{place}.{name}")

    def _say(self, *words: object) -> None:
        for word in words:
            # The length first, so that no two sequences of words concatenate to the same bytes.
            content = word if isinstance(word, bytes) else repr(word).encode()
            self.hash.update(f"{len(content)}:".encode() + content)


def _dictionary(value: object) -> Mapping[str, object]:
    """Returns an object's attributes; empty if it only has slots and answers every name, as a library behind ctypes."""
    dictionary = getattr(value, "__dict__", None)
    return dictionary if isinstance(dictionary, Mapping) else {}


def _pickled(value: object) -> bytes:
    """Returns the pickle of an object; empty if it cannot be pickled."""
    try:
        return pickle.dumps(value)
    except Exception:  # anything that an object's own methods raise
        return b""


def _bound_to(value: Any) -> object:
    """Returns the object that a built-in method is bound to, or a function's module; None for neither."""
    owner = getattr(value, "__self__", None)
    # Functions of pybind11 are bound to a record of themselves.
    record = type(owner).__name__ == "PyCapsule" or type(owner).__module__.startswith("pybind11")
    return None if record else owner


def _extends_native(kind: type) -> bool:
    """Returns whether an inspected class has memory besides its attributes and slots, from a base in C."""
    if _by_name(kind) or kind is object:
        return False
    # The count of Python's pickling (`object_getstate_default`): a word for each slot, for weak references, and for the
    # attributes, unless a flag marks these as managed before the object.
    words = sum(name not in ("__dict__", "__weakref__") for name in _slots(kind))
    words += (kind.__dictoffset__ != 0 and not kind.__flags__ & _MANAGED_DICT) + (kind.__weakrefoffset__ > 0)
    return kind.__itemsize__ > 0 or kind.__basicsize__ > object.__basicsize__ + words * _WORD


def _slots(kind: type) -> list[str]:
    slots = []
    for base in kind.__mro__:
        names = vars(base).get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            # A name with two leading underscores is mangled by the compiler, in __slots__ too.
            private = name.startswith("__") and not name.endswith("__")
            slots.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return slots


def _memories(value: Any) -> set[str]:
    """Returns a dataclass's caches: fields that are neither arguments nor compared, and cached properties."""
    kept = {f.name for f in dataclasses.fields(value) if not (f.compare or f.init)}
    members = (member for base in type(value).__mro__ for member in vars(base).items())
    return kept | {name for name, member in members if isinstance(member, functools.cached_property)}


def _stands_for_itself(value: object) -> bool:
    """Returns whether a library's callable is identified by its name: it wraps nothing and has no attributes."""
    kind = type(value)
    if not (_by_name(kind) and callable(value) and hasattr(value, "__name__")):
        return False
    return kind.__module__ == "torch._ops" or not getattr(value, "__dict__", None)


@functools.lru_cache(maxsize=2**14)  # a library's functions are met hundreds of times: 15 of 20 s for a small BERT
def _globals_of(code: types.CodeType) -> frozenset[str]:
    """Returns the global names that a function's code reads, including those of functions defined inside it."""
    names = frozenset(i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_of(constant)
    return names


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _by_name(value: Any) -> bool:
    """Returns whether a function or class comes from a library whose content is identified by name."""
    return _of_library(value.__module__)


def _of_library(module: str | None) -> bool:
    """Returns whether a module belongs to a library whose content is identified by name."""
    module = module or ""
    return module.startswith(_PACKAGE) or module.partition(".")[0] in _BY_NAME
