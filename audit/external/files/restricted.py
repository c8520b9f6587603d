"""PyTorch's restricted loader, in a process that has little to lose.

It gets no environment, no input, a private folder, limits on time, memory and what it writes, and no network where the
system lets a user go without; it hands over safetensors, which are looked through like any other file. So a hole in
the loader meets a pickle whose every instruction was already looked at, in a process whose answer is not believed.
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
"""Of a conversion, from the start of its process; PyTorch's import takes some of them."""
_IMPORT_BYTES = 12 << 30
"""Address space that PyTorch's libraries map when they are imported, with room to spare: 3 GiB on Linux with CUDA."""
_ROOM = 512 << 20
"""Bytes for whatever the loader makes beside tensors."""


def converted(source: Path, target: Path, checked: Checked) -> None:
    """Writes the tensors of an archive of `torch.save` as safetensors.

    Args:
        source: a copy of the archive that nobody else writes, looked through.
        target: where the safetensors are to lie; its folder is private.
        checked: what was found in the archive.

    Raises:
        FileRefused: where the loader refuses it, or takes too much.
    """
    if importlib.util.find_spec("resource") is None:
        raise FileRefused(
            "pickled tensors are read with limits on their process, which this system has not; save them as safetensors"
        )
    kept = sum(tensor.bytes for tensor in checked.tensors.values())
    # What the archive holds, the tensors side by side, and those again while they are written.
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
        # Of this process, for a PyTorch that lies where -I does not look; never relative, as the current folder is.
        "folders": [folder for folder in sys.path if Path(folder).is_absolute()],
    }
    order.write_text(json.dumps(contents), encoding="utf-8")
    program = Path(__file__).with_name("converter.py")
    # -I: neither the environment nor the folder of the program or of the user adds to what is imported.
    command = [sys.executable, "-I", "-W", "ignore", str(program), str(order)]
    environment = {"HOME": str(target.parent), "TMPDIR": str(target.parent), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    # To a file, whose size is limited, and not to a pipe, which would be read without end.
    said = target.with_name("said.txt")
    with said.open("xb") as words:
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
            # With whatever it started, which would go on writing into the folder.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code or target.is_symlink() or not target.is_file():
        raise FileRefused(f"PyTorch's restricted loader refuses it: {_last_line(said) or f'exit {code}'}")


def _last_line(file: Path) -> str:
    with file.open("rb") as words:
        words.seek(max(0, words.seek(0, 2) - 4096))
        lines = words.read().decode("utf-8", "replace").strip().splitlines()
    return shown(lines[-1]) if lines else ""
