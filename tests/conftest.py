"""Setup that every test shares: one thread, the optional data folder, and in one lane types checked at run time."""

import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jaxtyping
import pytest
import torch
import typer.main

from . import costs, pretend_device

# Shapes and types are checked by `make test-shapes` alone: a checked call takes a tenth of a millisecond, as long as
# all that a small function does, and the tests three times as long. An int is a float, as type checkers have it.
if os.environ.get("LEAKBENCH_SHAPES"):
    # Before any of ours is imported: a module that is loaded already is not checked any more.
    jaxtyping.install_import_hook(["leakbench"], "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")


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

# A run that a shell started in the background ignores Control-C, which tests send to themselves.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What tests write need not outlast a power cut, and each call waits for the disk; tests of failures have their own.
os.fsync = lambda _: None

# Typer makes the commands of an application from the signatures of its functions at each call, which takes as long as
# most commands: once for each application is enough.
typer.main.get_command = functools.cache(typer.main.get_command)

# No deadline: a shared machine is slow at times. The same examples every time: if a fresh clone fails, the
# reason is in the clone.
for _name, _examples in (("few", 10), ("leakbench", 20), ("full", 150)):
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
    """Collects garbage from here on, of what tests make alone, and rarely: the usual limits are for small programs."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


_begun = pytest.StashKey[float]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Notes when a test begins, before its fixtures do."""
    item.stash[_begun] = costs.cpu_seconds()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `gpu`, saying so, where there is no CUDA device."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch finds none")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Notes the CPU time of a default test, which processes of pytest-xdist hand on with their reports."""
    default = not any(map(item.get_closest_marker, ("long", "slow", "gpu", "peers")))
    if call.when == "teardown" and default:
        item.user_properties.append(("cpu_seconds", costs.cpu_seconds() - item.stash[_begun]))
    return (yield)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Names the default tests that are expensive here; none fails for it, because machines differ."""
    reports = [
        report for kind in terminalreporter.stats.values() for report in kind if isinstance(report, pytest.TestReport)
    ]
    for line in costs.expensive(reports):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """PyTorch's own generator begins alike in every test, whichever ran before."""
    torch.manual_seed(0)


@pytest.fixture(params=["pretend", pytest.param("cuda", marks=pytest.mark.gpu)])
def accelerator(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device whose tensors do not meet those of the CPU: on every machine a pretend one, and CUDA's by its marker."""
    if request.param == "cuda":
        yield torch.device("cuda", 0)
        return
    with pretend_device.device() as pretend:
        yield pretend


def _forgetting(name: str) -> Callable[..., None]:
    """A method of `MonkeyPatch` after which nothing is known of what engines make of a model."""
    change = getattr(pytest.MonkeyPatch, name)

    @functools.wraps(change)
    def changed(self: pytest.MonkeyPatch, *arguments: Any, **options: Any) -> None:
        # Else nothing is known yet, and tests of a board need not import it.
        choose = sys.modules.get("leakbench.defenses.core.gradients.choose")
        of_code = [*self._setattr, *(place for place, _, _ in self._setitem if place is not os.environ)]
        change(self, *arguments, **options)
        if choose is not None and (of_code if name == "undo" else arguments[0] is not os.environ):
            choose.forget()

    return changed


# Folders and variables of the environment decide nothing of an engine.
for _name in ("setattr", "delattr", "setitem", "delitem", "undo"):
    setattr(pytest.MonkeyPatch, _name, _forgetting(_name))


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
