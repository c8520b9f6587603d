"""Users' own networks: `nets/mine.py:build` names the function `build` of that file.

The function is called with its settings, and with `input_shape` and `classes` if its signature takes them, and returns
an `nn.Module`. The file is executed anew for every model and may import from its own folder, as a script may.
"""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from .nets.shapes import first_line, refuse_misfit
from .open_names import Answers, as_they_are

DECIDED = ("input_shape", "classes")
"""Arguments of a factory that follow from the data and are therefore never settings."""


def check(name: str) -> None:
    """Checks that the file exists, without running it.

    Args:
        name: path of a Python file, a colon, the name of a function.

    Raises:
        ValueError: names the file or the function.
    """
    path, function = _parts(name)
    if not path.is_file():
        raise ValueError(f"no file {str(path)!r} to build model {name!r} from; a path is relative to {Path.cwd()}")
    if not function.isidentifier():
        raise ValueError(f"model {name!r} must end in the name of a function, got {function!r}")


def describe(name: str) -> str:
    """Returns a line about a factory, without running its file; raises as `check`."""
    check(name)
    path, function = _parts(name)
    return f"What {function}() of {path.name} builds."


def build(
    name: str,
    *,
    input_shape: tuple[int, ...],
    classes: int | None,
    settings: Mapping[str, Any],
    answers: Answers = as_they_are,
) -> nn.Module:
    """Builds the user's network, and checks that it maps inputs to logits.

    Args:
        name: as for `check`.
        input_shape: of a single input.
        classes: number of logits; None for an encoder, which is not passed `classes` and may return any numbers.
        settings: further keyword arguments of the factory.
        answers: extracts the logits from the network's output; None to skip the check.

    Raises:
        ValueError: names file and function, for any error in them.
    """
    check(name)
    path, function = _parts(name)
    with _running(name, path) as module:
        factory = getattr(module, function, None)
        if not callable(factory):
            own = [
                key
                for key, value in inspect.getmembers(module, inspect.isfunction)
                if value.__module__ == module.__name__
            ]
            raise ValueError(f"no function {function!r} in {path}; it has {', '.join(own) or 'none'}")
        # Inside the context, because a factory may import from its folder only when it is called.
        data = {"input_shape": input_shape} | ({} if classes is None else {"classes": classes})
        arguments = _arguments(name, factory, data, settings)
        try:
            model = factory(**arguments)
        except Exception as error:  # user code may raise anything
            raise ValueError(f"{function}() in {path} raised {type(error).__name__}: {first_line(error)}") from error
        if not isinstance(model, nn.Module):
            raise ValueError(f"{function}() in {path} must return a torch.nn.Module, got {type(model).__name__}")
        if answers is not None:
            refuse_misfit(model, name, input_shape, classes, answers=answers)
    return model


def _parts(name: str) -> tuple[Path, str]:
    path, _, function = name.rpartition(":")
    return Path(path).expanduser(), function


def _arguments(
    name: str, factory: Callable[..., Any], data: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    parameters = inspect.signature(factory).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for setting in settings:
        if setting in data or not (takes_all or setting in parameters):
            known = ", ".join(key for key in parameters if key not in data) or "none"
            raise ValueError(f"model {name!r} has no setting {setting!r}; it has {known}")
    # Only arguments in the signature, so that a factory for a single data set needs none.
    return {key: value for key, value in data.items() if takes_all or key in parameters} | dict(settings)


@contextmanager
def _running(name: str, path: Path) -> Iterator[Any]:
    """Executes the user's file as a module in `sys.modules`; meanwhile it may import from its own folder."""
    # The module stays in sys.modules under a unique name: dataclasses and pickle look up the module of a class by name
    # when a model is copied.
    label = f"leakbench_model_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(label, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"model {name!r} must be built by a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs: a dataclass looks up its module while its class is created.
    sys.modules[label] = module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # user code may raise anything
            raise ValueError(f"{path} raised {type(error).__name__}: {first_line(error)}") from error
        yield module
    finally:
        sys.path.remove(folder)
