"""Processes of third parties' attacks, seen from the process with the private data.

An attack imported into a process can read all of its memory, including the members, through the garbage collector or
frames. So a third party's attack is never imported next to the data: it runs in a new program (started, not forked, so
that no memory is shared), which receives the narrowed target, the attack's generator and its settings. Private data,
membership, and the keys from which they follow stay behind; the attack calls functions of the target for their values.
Answers come back as numbers and are validated as for any other attack. Nothing that comes back is unpickled.

The program starts in an empty folder, with no open file but the connection, and with an environment that names none of
leakbench's folders of data, results or caches. It is kept for the next target of the same attack.

Guarantee: an attack that uses Python, by whatever means, finds in its own process only the data that its threat model
grants. Not protected against: code that reads files or other processes of the same user, as through /proc and
debuggers, or that repeats the split of a public data set. Protection against those requires a container.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import fields
from typing import Any

import torch

from leakbench.attacks.core import RESULTS, AccessError, Attack, InconsistentObservation, NotApplicable, Target

from .answers import Respondent
from .channel import Channel, GarbledError, tensor
from .description import declared
from .sending import UnsendableError

LIMIT = "LEAKBENCH_ATTACK_SECONDS"
"""Environment variable with the seconds that an attack's own process may compute for a target."""

SECONDS = 3600.0
"""Limit if the variable is not set."""

MOST_FREE = 4
"""Idle processes that are kept; each has some 300 MB."""

_KEPT = (
    "PATH", "LANG", "TZ", "TMPDIR", "SYSTEMROOT", "VIRTUAL_ENV", "PYTHONHASHSEED", "PYTHONWARNINGS", "TORCH_HOME",
    "HF_HOME",
)  # fmt: skip
_KEPT_PREFIXES = (
    "LC_", "LD_", "DYLD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "CUDA_", "CUBLAS_", "NVIDIA_",
    "PYTORCH_", "TORCHINDUCTOR_",
)  # fmt: skip
_PROGRAM = (
    "import json, sys; _, path, name, number = sys.argv; sys.path[:] = json.loads(path); sys.argv[1:] = []; "
    "from leakbench.audit.isolation.child import serve; serve(name, int(number))"
)
_BASES = (NotApplicable, InconsistentObservation, AccessError, NotImplementedError, TypeError, ValueError)
_MOST_WORDS = 2000
_START = 600.0  # seconds in which leakbench is imported


class AttackProcessError(RuntimeError):
    """The process of an attack died, did not answer in time, or sent a malformed answer."""


class AttackTimeoutError(AttackProcessError):
    """The process of an attack did not answer in time."""


class InProcessRuns:
    """Counter of runs of third parties' attacks beside the private data, in this process."""

    times = 0


class Worker:
    """A third party's attack in a process of its own, seen from the process with the private data.

    Attributes:
        usable: whether it may be used again.
    """

    def __init__(self, name: str) -> None:
        """Starts the process.

        Args:
            name: of the attack, or its resolved path.
        """
        self.usable, self._ready = True, False
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        # Empty entries of a path mean the current folder, which is left out because results may lie there.
        path = [entry for entry in sys.path if entry]
        folder = tempfile.mkdtemp(prefix="leakbench-attack-")
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  the same interpreter
                [sys.executable, "-c", _PROGRAM, json.dumps(path), name, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=_environment(folder),
                cwd=folder,
                start_new_session=True,  # Control-C is handled by the runner, which ends this process
            )
        self._said: list[str] = []
        threading.Thread(target=_forward, args=(self._process.stdout, self._said), daemon=True).start()
        self._end = weakref.finalize(self, _end, self._process, ours, folder)

    def end(self) -> None:
        """Ends the process and everything that it started."""
        self.usable = False
        self._end()

    def describe(self) -> dict[str, Any]:
        """Returns the attack's declaration.

        Raises:
            AttackProcessError: the process does not answer.
            RuntimeError: the attack's code cannot be imported; raised under the name of the exception in its process.
        """
        answer, _ = self._final({"ask": "describe"}, [], Respondent())
        return answer["told"] if isinstance(answer.get("told"), dict) else self._garbled("description")

    def run(self, kind: str, target: Target, generator: torch.Generator, settings: Mapping[str, Any]) -> Any:
        """Returns the attack's result on a target, unchecked.

        Args:
            kind: kind of the attack's result, a key of `RESULTS`.
            target: the narrowed target.
            generator: source, advanced as the attack advances it.
            settings: complete settings.

        Raises:
            UnsendableError: the target, or an answer of its functions, cannot be sent.
            AttackProcessError: the process died, or does not answer in time.
            Exception: raised by the attack, or of the same name.
        """
        answers = Respondent()
        sent = answers.packed({"target": target, "generator": generator.get_state(), "settings": dict(settings)})
        header = {
            "ask": "run",
            "threads": torch.get_num_threads(),
            "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
            "precision": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        }
        answer, blobs = self._final(header, sent, answers)
        try:
            tensors = [tensor(description, blob) for description, blob in zip(answer["tensors"], blobs, strict=True)]
            result = _result(kind, answer["result"], tensors)
            generator.set_state(tensors[-1])
        except (GarbledError, KeyError, ValueError, TypeError, IndexError, AttributeError, RuntimeError):
            return self._garbled("result")
        return result

    def _final(
        self, header: Mapping[str, Any], blobs: list[Any], answers: Respondent
    ) -> tuple[dict[str, Any], list[bytearray]]:
        """Sends a request, answers the attack's requests meanwhile, and returns the final answer."""
        limit = remaining = _limit()
        self.usable = False  # until the final answer: an exception leaves the process in an unknown state
        try:
            if not self._ready:
                self._channel.receive(_START)
                self._ready = True
            self._channel.send(header, blobs, limit)
            while True:
                begun = time.monotonic()
                message, contents = self._channel.receive(remaining)
                # Computation here does not count against the attack's limit.
                remaining -= time.monotonic() - begun
                if "ask" not in message:
                    break
                self._channel.send(*_answered(answers, message, contents), limit)
        except TimeoutError:
            raise AttackTimeoutError(
                f"the attack must answer within {limit:g} s of its own, and did not; {LIMIT} sets another limit"
            ) from None
        except (EOFError, OSError):
            raise AttackProcessError(f"the attack ended its process: {self._how()}") from None
        except GarbledError as error:
            raise AttackProcessError(f"the attack must answer with numbers: {error}") from error
        self.usable = True
        if "failed" in message:
            raise _raised(message)
        return message, contents

    def _garbled(self, expected: str) -> Any:
        self.usable = False
        raise AttackProcessError(f"the attack must answer with numbers, got what is no {expected}")

    def _how(self) -> str:
        """Describes how the process ended, with its last line of output."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed the connection"
        how = f"exit status {code}"
        if code < 0:
            with suppress(ValueError):
                how = f"killed by {signal.Signals(-code).name}"
        last_words = " ".join(" ".join(self._said[-1:]).split())
        return f"{how}; it printed last: {last_words[:200]}" if last_words else how


@contextmanager
def borrowed(name: str, version: tuple[Any, ...]) -> Iterator[Worker]:
    """Lends a free process of an attack, kept for later use; starts another if all are busy.

    Args:
        name: of the attack, or its resolved path.
        version: of its code; a process that imported another version is not used.
    """
    key = (os.getpid(), name, version)  # a forked child holds connections that belong to its parent
    with _turn:
        # The process that was returned last, because the oldest ones are ended first.
        place = next((n for n in reversed(range(len(_free))) if _free[n][0] == key), None)
        worker = None if place is None else _free.pop(place)[1]
    worker = worker or Worker(name)
    try:
        yield worker
    finally:
        surplus = [] if worker.usable else [worker]
        with _turn:
            _free.extend([(key, worker)] if worker.usable else [])
            while len(_free) > MOST_FREE:
                surplus.append(_free.pop(0)[1])
        for process in surplus:
            process.end()


_free: list[tuple[tuple[Any, ...], Worker]] = []
_turn = threading.Lock()


def isolated(
    name: str, version: tuple[Any, ...], beside: Callable[[], Attack[Any]], refusals: Mapping[str, type[Exception]]
) -> Attack[Any]:
    """Returns an attack with the declaration that its own process reports, which runs there.

    Args:
        name: of the attack, or its resolved path.
        version: of its code.
        beside: imports it into this process, for targets that cannot be sent.
        refusals: exception classes of an import, by name, that are raised unchanged.

    Raises:
        AttackProcessError: the process does not answer.
        Exception: a class of `refusals`, or a class named as the exception in the attack's process.
    """

    def run(view: Target, generator: torch.Generator, settings: Mapping[str, Any]) -> Any:
        before = generator.get_state()
        try:
            with borrowed(name, version) as worker:
                return worker.run(attack.kind, view, generator, settings)
        except UnsendableError:
            InProcessRuns.times += 1
            generator.set_state(before)
            return beside().on_view(view, generator, settings)

    if (known := _declared.get((name, version))) is not None:
        return known
    with borrowed(name, version) as worker:
        try:
            description = worker.describe()
        except AttackProcessError:
            raise
        except Exception as error:
            raise refusals.get(type(error).__name__, type(error))(str(error)) from None
    try:
        attack = declared(description, run)
    except GarbledError as error:
        raise AttackProcessError(str(error)) from error
    return _declared.setdefault((name, version), attack)


_declared: dict[tuple[str, tuple[Any, ...]], Attack[Any]] = {}


def _answered(
    answers: Respondent, message: dict[str, Any], contents: list[bytearray]
) -> tuple[dict[str, Any], list[Any]]:
    """Answers a request, or reports the exception that a function raised to the attack."""
    try:
        return answers.answer(message, contents)
    except (GarbledError, UnsendableError):
        raise
    except Exception as error:
        return {"error": type(error).__name__, "words": str(error)}, []


def _result(kind: str, encoded: Mapping[str, Any], tensors: list[torch.Tensor]) -> Any:
    """Rebuilds a result as an object of its kind's class; other results become empty objects of their class's name."""
    result_type = RESULTS[kind].result
    if (encoded["module"], encoded["type"]) != (result_type.__module__, result_type.__name__):
        return _stranger(encoded["type"])
    values = {}
    for field in fields(result_type):
        ((form, value),) = encoded["values"][field.name].items()
        if form == "tensor" and type(value) is int and value >= 0:
            value = tensors[value]
        elif form == "class":
            value = _stranger(value)
        elif form != "value" or not isinstance(value, bool | int | float | str | None):
            raise GarbledError(f"{field.name} must be a tensor or a plain value")
        values[field.name] = value
    # Without its constructor: the validation of an attack's answer constructs it anew, so that the checks apply.
    result = object.__new__(result_type)
    vars(result).update(values)
    return result


def _stranger(name: Any) -> Any:
    return type(str(name)[:100] if str(name).isidentifier() else "object", (), {})()


def _raised(message: Mapping[str, Any]) -> Exception:
    """Rebuilds an attack's exception under its own name, derived from the first of its bases in `_BASES`."""
    named, words, frames = message.get("failed"), message.get("words"), message.get("frames")
    names = [str(name) for name in named] if isinstance(named, list) else []
    base = next((base for name in names for base in _BASES if base.__name__ == name), RuntimeError)
    name = names[0][:100] if names and names[0].isidentifier() else "RuntimeError"
    kind: Any = type(name, (base,), {"__str__": lambda self: self.args[0]})
    error = kind(str(words)[:_MOST_WORDS])
    error.frames = [
        traceback.FrameSummary(str(file), line if type(line) is int else 0, str(function))
        for file, line, function in (frames if isinstance(frames, list) else [])
    ]
    return error


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Traceback of an exception; in the attack's own process, if it was raised there."""
    return getattr(error, "frames", None) or list(traceback.extract_tb(error.__traceback__))


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Limits the time of attacks on a target within the context, as for a rehearsal.

    Args:
        seconds: that an attack's own process may compute; a smaller limit of the environment stays.
    """
    before = _most.set(seconds)
    try:
        yield
    finally:
        _most.reset(before)


_most: ContextVar[float] = ContextVar("most_seconds", default=math.inf)


def _limit() -> float:
    text = os.environ.get(LIMIT, "")
    if not text:
        return min(SECONDS, _most.get())
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{LIMIT} must be a positive number of seconds, got {text!r}")
    return min(seconds, _most.get())


def _environment(folder: str) -> dict[str, str]:
    """Environment of the program: settings of computation, and no paths of data or results."""
    kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith(_KEPT_PREFIXES)}
    return kept | {"HOME": folder, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _forward(prints: Any, lines: list[str]) -> None:
    """Forwards the process's output to standard error, because a command's result may be a JSON document."""
    with prints:
        for line in prints:
            text = line.decode(errors="replace")
            lines[:] = [text] if text.strip() else lines
            with suppress(OSError, ValueError):  # the terminal is gone
                sys.stderr.write(text)


def _end(process: subprocess.Popen[bytes], connection: socket.socket, folder: str) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    connection.close()
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)
