"""SHA-256 digest of everything that decides a computation: values, functions with all they refer to, modules, data.

A resumed run draws the noise of its interrupted step a second time, and so equals the uninterrupted run bit for bit. If
the sum had changed, the difference of the two releases would contain no noise. Therefore a checkpoint stores a digest
of all inputs of a release, down to the values in a loss function's closure, and content that cannot be inspected is
refused. A log of releases beside the checkpoint could not replace the digest: copies of the checkpoint, from which a
run may be resumed twice, are without the log. The checks of a model (`model_checks.py`, `choose.py`) detect changes by
a pass, and remember verdicts, by the same digest.

A function is inspected down to its code, defaults, closure and the globals that it names; an object down to its
attributes, its slots, and the memory of a native base class as pickle reads it. PyTorch, NumPy and the standard library
enter by name alone, and this package by name and `source_digest`. Not covered: state that an extension type does not
pickle, in a file, or in a module that a function reaches by attribute (`settings.WEIGHT`).
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..power_iteration import hooks_of

_PACKAGE = __name__.partition("core.")[0]
_BY_NAME = frozenset({"torch", "numpy", "torchvision", *sys.stdlib_module_names})
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, slice, range, type(...)}
    | {torch.dtype, torch.device, torch.Size}
)
_DESCRIPTORS = (property, staticmethod, classmethod, functools.cached_property)
_PICKLING = ("__reduce_ex__", "__reduce__", "__getstate__")
_INNER = ("__func__", "__self__", "fget", "fset", "func")  # of descriptors and of bound methods


class UnknownContent(ValueError):
    """Content that cannot be inspected; the message gives its place and type."""


@functools.cache
def source_digest() -> str:
    """SHA-256 over the source files of this package: two versions of a method have different digests."""
    sources = hashlib.sha256()
    folder = pathlib.Path(__file__).parents[__name__.count(".") - 2]
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        sources.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return sources.hexdigest()


def digest(*values: object, strict: bool = True) -> str:
    """Returns a hexadecimal SHA-256 that is the same for the same content, in every process.

    Args:
        values: of any kind.
        strict: True to raise on content that cannot be inspected; otherwise its type and attributes stand for it, and a
            dataclass's caches count as content besides its settings.

    Raises:
        UnknownContent: if strict, with the place and the type.
    """
    walker = _Walker(strict)
    for position, value in enumerate(values):
        walker.add(value, f"[{position}]")
    return walker.hash.hexdigest()


def architecture(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Yields (place, content) of a model, except the values that a checkpoint restores.

    Classes with their code, settings, shapes, trained or frozen parameters, the mode; for unsaved buffers the values
    too.
    """
    saved = set(model.state_dict())
    for name, module in model.named_modules(remove_duplicate=False):  # a layer may be called in two places
        yield f"{name}:class", type(module)
        for key, value in own_attributes(module).items():
            yield f"{name}.{key}", value
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
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

    def __init__(self, strict: bool) -> None:
        self.hash = hashlib.sha256()
        self._strict = strict
        self._met: dict[int, int] = {}
        self._kept: list[object] = []  # so that no address is reused during the walk

    def add(self, value: Any, place: str) -> None:
        """Hashes a value."""
        kind: Any = type(value)
        if kind in _PLAIN:
            return self._say(kind.__name__, repr(value))
        if kind is not tuple:  # the compiler decides whether equal constants are the same object
            if id(value) in self._met:
                return self._say("again", self._met[id(value)])
            self._met[id(value)] = len(self._met)
            self._kept.append(value)
        self._say(_name(kind))
        if isinstance(value, Tensor):
            self._tensor(value)
            return self.add(vars(value), place)
        if issubclass(kind, (np.ndarray, np.generic)) and value.dtype != object:
            return self._say(value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
        if isinstance(value, (types.ModuleType, pathlib.PurePath)):
            return self._say(getattr(value, "__name__", str(value)))
        if kind in (dict, types.MappingProxyType):
            self._say(len(value))
            # Keys of several types do not compare, so their digests are sorted; insertion order is not content.
            for name, key in sorted(((self._alone(key), key) for key in value), key=lambda pair: pair[0]):
                self._say("key", name)
                self.add(value[key], f"{place}[{key!r}]")
            return None
        if kind in (list, tuple):
            self._say(len(value))
            for position, element in enumerate(value):
                self.add(element, f"{place}[{position}]")
            return None
        if isinstance(value, (set, frozenset)):
            # Sorted digests: a set's own order follows from hashes that differ between processes.
            return self._say(*sorted(map(self._alone, value)))
        if isinstance(value, type):
            return self._class(value, place)
        if kind is types.FunctionType:
            return self._function(value, place)
        if isinstance(value, types.CodeType):
            # Without line numbers and file name: a function that was moved computes the same.
            names = (value.co_names, value.co_varnames, value.co_freevars)
            self._say(value.co_code, *names, value.co_argcount, value.co_flags)
            return self.add(value.co_consts, place)
        if _is_named(value):
            return self._say(getattr(value, "__module__", None), getattr(value, "__qualname__", value.__name__))
        if isinstance(value, (*_DESCRIPTORS, types.MethodType)):
            return self.add({name: getattr(value, name, None) for name in _INNER}, place)
        self.add(kind, f"{place}:class")
        if isinstance(value, enum.Enum):
            return self.add((value.name, value.value), place)
        if isinstance(value, nn.Module):
            everywhere = value.named_modules(remove_duplicate=False)  # a layer may be called in two places
            inside = {name: (type(module), own_attributes(module)) for name, module in everywhere}
            parameters, buffers = (
                dict(named(remove_duplicate=False)) for named in (value.named_parameters, value.named_buffers)
            )
            return self.add((inside, parameters, buffers), place)
        return self._object(value, place)

    def _alone(self, value: object) -> str:
        """Returns the digest of an element of an unordered collection."""
        other = _Walker(self._strict)
        if type(value) not in _PLAIN:
            # Objects under way end the recursion here too: a class may be a key in a table that its own methods read.
            other._met, other._kept = dict(self._met), self._kept
        other.add(value, "key")
        return other.hash.hexdigest()

    def _object(self, value: Any, place: str) -> None:
        """Hashes attributes and slots, and what else pickle reads of an object."""
        kind = type(value)
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # anything that an object's own methods raise
            reduced = None
        # The position of an iterator changes during a run, and a checkpoint does not restore it.
        if self._strict and (reduced is None or isinstance(value, Iterator)):
            raise UnknownContent(
                f"{place} is of type {_name(kind)}, into which nothing can look: a checkpoint could not "
                "tell whether a resumed run computes the same; use plain values, or train without a checkpoint"
            )
        adapted = any(getattr(kind, name) is not getattr(object, name) for name in _PICKLING)
        if isinstance(reduced, tuple):
            # Pickle's own state of a Python object repeats its attributes; a class may leave some out of another.
            state = reduced[2:3] if adapted and not dataclasses.is_dataclass(kind) else ()
            reduced = [*reduced[:2], *state, *(list(items) for items in reduced[3:5] if items is not None)]
        self.add(reduced, place)
        if adapted and _by_name(kind) and isinstance(reduced, list):
            return  # a library's class, whose attributes may be caches
        attributes: Any = object.__getstate__(value) or {}
        if isinstance(attributes, tuple):  # with slots
            attributes = (attributes[0] or {}) | attributes[1]
        caches = _caches(value) if self._strict and dataclasses.is_dataclass(value) else ()
        self.add({name: content for name, content in attributes.items() if name not in caches}, place)

    def _tensor(self, value: Tensor) -> None:
        plain = value.detach()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        if plain.dtype == torch.bfloat16:  # unknown to NumPy
            plain = plain.view(torch.int16)
        # Conjugation and negation may be pending as flags on the memory, which NumPy refuses.
        content = plain.cpu().contiguous().resolve_conj().resolve_neg().numpy().tobytes()
        self._say(str(value.dtype), tuple(value.shape), content)

    def _function(self, value: types.FunctionType, place: str) -> None:
        self._say(_name(value))
        if _by_name(value):
            return
        place = f"{place} ({value.__qualname__})"
        self.add((value.__code__, value.__defaults__, value.__kwdefaults__, vars(value)), place)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != types.CellType():  # of a name that is not bound yet
                self.add(cell.cell_contents, f"{place} variable '{name}'")
        for name in sorted(_globals_of(value.__code__) & value.__globals__.keys()):
            self._say("global", name)
            self.add(value.__globals__[name], f"{place} global '{name}'")

    def _class(self, value: type, place: str) -> None:
        self._say(_name(value))
        if _by_name(value):
            return
        self.add(value.__bases__, place)
        for name, member in sorted(vars(value).items()):
            function = isinstance(member, (types.FunctionType, *_DESCRIPTORS))
            # Python's own bookkeeping, descriptors of values that are stored in each instance, annotations (functions
            # from Python 3.14 on), and methods that `dataclass` generates from the fields.
            special = name.startswith("__") and name.endswith("__")
            kept_by_python = (special and not function) or name == "_abc_impl"
            slot = isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType))
            generated = name in ("__annotate__", "__annotate_func__") or (
                isinstance(member, types.FunctionType) and member.__code__.co_filename == "<string>"
            )
            if not (kept_by_python or slot or generated):
                self._say("member", name)
                self.add(member, f"{place}.{name}")

    def _say(self, *words: object) -> None:
        for word in words:
            # The length first, so that no two sequences of words concatenate to the same bytes.
            content = word if isinstance(word, bytes) else repr(word).encode()
            self.hash.update(f"{len(content)}:".encode() + content)


def _caches(value: Any) -> set[str]:
    """Returns a dataclass's caches: fields that are neither arguments nor compared, and cached properties.

    If no field is compared, all fields are content.
    """
    fields = dataclasses.fields(value)
    kept = {f.name for f in fields if not (f.compare or f.init)} if any(f.compare for f in fields) else set()
    members = (member for base in type(value).__mro__ for member in vars(base).items())
    return kept | {name for name, member in members if isinstance(member, functools.cached_property)}


def _is_named(value: Any) -> bool:
    """Returns whether a library's callable is identified by its name: unbound, wrapping nothing, without attributes."""
    kind, owner = type(value), getattr(value, "__self__", None)
    if not (_by_name(kind) and callable(value) and hasattr(value, "__name__")):
        return False
    if isinstance(value, np.ufunc) and all(set(kinds) <= set("O->") for kinds in value.types):
        return False  # of `np.frompyfunc`, which does not expose its function
    # Functions of pybind11 are bound to a record of themselves.
    record = type(owner).__name__ == "PyCapsule" or type(owner).__module__.startswith("pybind11")
    bound = not (owner is None or record or isinstance(owner, types.ModuleType))
    return not bound and (kind.__module__ == "torch._ops" or not getattr(value, "__dict__", None))


def _globals_of(code: types.CodeType) -> set[str]:
    """Returns the global names that a function's code reads, including those of functions defined inside it."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_globals_of(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _by_name(value: Any) -> bool:
    """Returns whether a function or class comes from a library whose content is identified by name."""
    module = value.__module__ or ""
    return module.startswith(_PACKAGE) or module.partition(".")[0] in _BY_NAME
