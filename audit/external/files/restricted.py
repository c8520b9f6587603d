"""PyTorch's restricted loader, in a process with few rights.

The process gets none of the environment, no input, a private folder, limits on time, memory and written bytes, and no
network if the system lets a user disable it. It returns safetensors, which are checked like any other file. Exploiting
a vulnerability of the loader therefore takes a pickle whose every instruction passed the checks, and gains a process
whose output is not trusted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from .checks import Checked, FileRefused
from .checks.limits import MAX_HEADER_BYTES, shown

SECONDS = 120
"""Time limit of a conversion, from the start of its process; PyTorch's import takes some of it."""
_IMPORT_BYTES = 12 << 30
"""Address space for the libraries that PyTorch maps on import, which take 3 GiB on Linux with CUDA, and a margin."""
_ROOM = 512 << 20
"""Bytes for the loader's objects other than tensors."""


def converted(source: Path, target: Path, checked: Checked) -> None:
    """Writes the tensors of a `torch.save` archive as safetensors.

    Args:
        source: a private copy of the archive, which was checked.
        target: path of the safetensors; its folder is private.
        checked: result of checking the archive.

    Raises:
        FileRefused: the loader refuses the archive, or exceeds a limit.
    """
    if importlib.util.find_spec("resource") is None:
        raise FileRefused(
            "pickled tensors are read with limits on their process, which this system has not; save them as safetensors"
        )
    kept = sum(tensor.bytes for tensor in checked.tensors.values())
    # The archive, its tensors side by side, and these again while they are written.
    room = checked.bytes + 2 * kept + _ROOM
    limits = {
        "RLIMIT_CPU": SECONDS,
        "RLIMIT_AS": _IMPORT_BYTES + room,
        "RLIMIT_FSIZE": kept + MAX_HEADER_BYTES + 8,
        "RLIMIT_CORE": 0,
    }
    tensors = [[name, list(tensor.shape)] for name, tensor in checked.tensors.items()]
    order = target.with_name("order.json")
    contents = {
        "source": str(source),
        "target": str(target),
        "path": checked.path,
        "tensors": tensors,
        "limits": limits,
        "room": room,
        # This process's folders, for a PyTorch that -I does not find; never relative ones, such as the current folder.
        "folders": [folder for folder in sys.path if Path(folder).is_absolute()],
    }
    order.write_text(json.dumps(contents), encoding="utf-8")
    program = Path(__file__).with_name("converter.py")
    # -I: nothing is imported from the environment, the program's folder or the user's.
    command = [sys.executable, "-I", "-W", "ignore", str(program), str(order)]
    environment = {"HOME": str(target.parent), "TMPDIR": str(target.parent), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    # A file has limited size; a pipe would be read without end.
    loader_message = target.with_name("said.txt")
    with loader_message.open("xb") as words:
        process = subprocess.Popen(  # noqa: S603 - this interpreter, on a program and an order of our own
            command,
            env=environment,
            cwd=target.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=words,
            start_new_session=True,
        )
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise FileRefused(f"PyTorch's restricted loader took more than {SECONDS} seconds") from None
        finally:
            # Kills its children as well, which would go on writing into the folder.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code or target.is_symlink() or not target.is_file():
        raise FileRefused(f"PyTorch's restricted loader refuses it: {_last_line(loader_message) or f'exit {code}'}")


def _last_line(file: Path) -> str:
    with file.open("rb") as words:
        words.seek(max(0, words.seek(0, 2) - 4096))
        lines = words.read().decode("utf-8", "replace").strip().splitlines()
    return shown(lines[-1]) if lines else ""
