"""What every test shares: shapes and types checked at run time, one thread, the optional data folder."""

import ast
import functools
import gc
import importlib.metadata
import inspect
import os
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import jaxtyping
import pytest
import torch
from jaxtyping import _import_hook, install_import_hook

# What follows reaches into jaxtyping, as this version is made; with an older one, types are not checked.
_JAXTYPING, _LEAST_JAXTYPING = importlib.metadata.version("jaxtyping"), "0.3.11"
_TYPES_ARE_CHECKED = [int(n) for n in _JAXTYPING.split(".")[:3]] >= [int(n) for n in _LEAST_JAXTYPING.split(".")]

# An int is a float, as type checkers have it.
# (Compiled modules are kept by this text: another one, where the code below writes another decorator.)
_CHECKER = "beartype.beartype(conf=beartype.BeartypeConf( is_pep484_tower=True))"


_SHAPED = frozenset({"Bool", "Float", "Float32", "Int", "Int64", "UInt8"})


def _by_need(self, node, visit=_import_hook.JaxtypingTransformer.visit_FunctionDef):
    """Checks shapes where a function states some, and else types alone: it takes a tenth of the time.

    Functions within functions are left unchecked: they would be decorated at every call, for milliseconds each.
    """
    inside = any(isinstance(parent, ast.FunctionDef) for parent in self._parents)
    stated = [node.returns, *(a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg))]
    names = {n.id for one in stated if one is not None for n in ast.walk(one) if isinstance(n, ast.Name)}
    if names & _SHAPED and not inside:
        return visit(self, node)
    if not inside:
        plain = f"jaxtyping.types_alone(jaxtyping._import_hook.Typechecker.lookup['{self._typechecker.get_hash()}'])"
        decorator = ast.parse(plain, mode="eval").body
        for part in ast.walk(decorator):
            ast.copy_location(part, node)
        node.decorator_list.append(decorator)
    self._no_type_check_level += 1
    visit(self, node)
    self._no_type_check_level -= 1
    return node


# A checked call takes a tenth of a millisecond, as long as all that a small function does, and a short run makes
# thousands: by default the first call in every test is checked. With `make test-all` every call is.
_test = object()  # another one in every test
_each_call = False


_NO_FUNCTION = getattr(jaxtyping._decorator, "_sentinel", None)


def _first_calls(fn=_NO_FUNCTION, *, typechecker, jaxtyped=jaxtyping.jaxtyped):
    """jaxtyping's decorator, whose checks are made at the first call in every test."""
    if fn is _NO_FUNCTION:
        return functools.partial(_first_calls, typechecker=typechecker)
    if inspect.isfunction(fn):
        return _at_first(fn, lambda: jaxtyped(fn, typechecker=typechecker))
    checked = jaxtyped(fn, typechecker=typechecker)
    # Of a dataclass alone, and of one whose parent is checked, `__init__` was replaced.
    plain: Any = vars(fn).get("__init__") if isinstance(fn, type) else None
    if hasattr(plain, "__wrapped__") and not hasattr(plain, "at_first"):
        fn.__init__ = _at_first(plain.__wrapped__, lambda: plain)
    return checked


def _types_alone(checker):
    """The type checker as a decorator, at the first call in every test."""
    return lambda fn: _at_first(fn, lambda: checker(fn))


def _at_first(unchecked, decorated):
    # Decorated when it is first called: to do that to every function takes five seconds in each worker.
    checked, at = None, None

    @functools.wraps(unchecked)
    def called(*args, **kwargs):
        nonlocal checked, at
        if at is _test:
            return unchecked(*args, **kwargs)
        at = None if _each_call else _test
        if checked is None:
            checked = decorated()
        return checked(*args, **kwargs)

    vars(called)["at_first"] = True
    return called


def _get_code(self, fullname):
    """Compiled code of one of our modules, in a file of its own; what it imports keeps its usual files.

    jaxtyping has the whole import look for files of its name, and then compiles whatever is imported from ours.
    """
    named = functools.partial(_import_hook._optimized_cache_from_source, self._typechecker.get_hash())
    with mock.patch("importlib._bootstrap_external.cache_from_source", named):
        return SourceFileLoader.get_code(self, fullname)


if _TYPES_ARE_CHECKED:
    _import_hook.JaxtypingTransformer.visit_FunctionDef = _by_need
    _import_hook._JaxtypingLoader.get_code = _get_code
    _import_hook._JaxtypingLoader.exec_module = SourceFileLoader.exec_module
    jaxtyping.types_alone = _types_alone  # pyright: ignore[reportAttributeAccessIssue]
    jaxtyping.jaxtyped = _first_calls
    # Before any of them is imported: a module that is loaded already is not checked any more.
    install_import_hook(["leakbench"], _CHECKER)


def pytest_report_header() -> str | None:
    """Says where types are not checked."""
    return None if _TYPES_ARE_CHECKED else f"types are not checked: jaxtyping {_JAXTYPING} is below {_LEAST_JAXTYPING}"


# What the user's shell asks for is not what is tested: colours, a GPU (but for tests marked `gpu`), a budget of digits.
# Children of tests inherit it.
for _name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "PYTHONVERBOSE", "OMP_DISPLAY_ENV", "KMP_SETTINGS"):
    os.environ.pop(_name, None)
os.environ["TERM"] = "dumb"
if "gpu" in os.environ.get("PYTEST_ADDOPTS", "") + " ".join(sys.argv):
    os.environ["LEAKBENCH_TESTS"] = "gpu"  # for workers, which have other arguments
if os.environ.get("LEAKBENCH_TESTS") != "gpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before PyTorch looks
sys.set_int_max_str_digits(4300)

# Workers of pytest-xdist share the cores; more threads for such small tensors only make them wait.
torch.set_num_threads(1)

# What tests write need not outlast a power cut, and each call waits for the disk; tests of failures have their own.
os.fsync = lambda _: None

# No deadline: a shared machine is slow at times. The same examples every time: if a fresh clone fails, the
# reason is in the clone.
_FULL = 150
for _name, _examples in (("few", 10), ("leakbench", 20), ("full", _FULL)):
    hypothesis.settings.register_profile(
        _name,
        deadline=None,
        derandomize=True,
        max_examples=_examples,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("leakbench")


# Of what imports and collection make, hardly anything is ever garbage; to look for it takes an eighth of their time.
gc.disable()


def pytest_collection_finish() -> None:
    """Collects garbage from here on, of what tests make alone."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `gpu`, saying so, where there is no CUDA device."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch finds none")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """PyTorch's own generator begins alike in every test, whichever ran before."""
    torch.manual_seed(0)


_patched = False


@pytest.fixture(autouse=True)
def _nothing_known(request: pytest.FixtureRequest) -> None:
    """Every test checks types afresh, and forgets what engines make of a model where it, or the last one, patches."""
    global _patched, _test, _each_call
    _test, _each_call = object(), hypothesis.settings().max_examples >= _FULL
    # Else nothing is known yet, and tests of a board need not import it.
    choose = sys.modules.get("leakbench.defenses.core.gradients.choose")
    before, _patched = _patched, "monkeypatch" in request.fixturenames
    if choose is not None and (before or _patched):
        choose.forget()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the data sets that are not embedded, named by LEAKBENCH_DATA; skips where there is none."""
    named = os.environ.get("LEAKBENCH_DATA")
    if not named:
        pytest.skip("LEAKBENCH_DATA is not set: it names a folder with MNIST or CIFAR-10, which are not embedded")
    folder = Path(named)
    if not folder.is_dir():
        pytest.skip(f"LEAKBENCH_DATA names {folder}, which is not a folder")
    return folder
