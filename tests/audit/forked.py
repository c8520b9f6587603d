"""Processes of attacks, forked from one that has imported leakbench and holds no data: a start takes no seconds.

`tests/audit/isolation/test_worker.py` starts the real program wherever the program itself is what a test is about.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

SERVER = """
import json, os, socket, sys
from leakbench.audit.isolation.child import serve

requests = socket.socket(fileno=int(sys.argv[1]))
while True:
    text, files, *_ = socket.recv_fds(requests, 2**20, 3)
    if not text:
        os._exit(0)
    request = json.loads(text)
    if "wait" in request:
        requests.send(json.dumps(os.waitpid(request["wait"], os.WNOHANG)).encode())
        continue
    pid = os.fork()
    if not pid:
        break
    os.setpgid(pid, pid)
    for file in files:
        os.close(file)
    requests.send(json.dumps([pid, 0]).encode())
requests.close()
stdin, stdout, number = files
for place, file in enumerate((stdin, stdout, stdout)):
    os.dup2(file, place)
os.close(stdin)
os.close(stdout)
os.setpgid(0, 0)
os.chdir(request["cwd"])
os.environ.clear()
os.environ.update(request["env"])
sys.dont_write_bytecode = True
sys.path[:] = request["path"]
serve(request["name"], number)
"""


def end(requests: socket.socket, server: subprocess.Popen[bytes]) -> None:
    """Ends the server, which ends where nobody asks any more."""
    requests.close()
    server.wait()


class Forked(subprocess.Popen):
    """Stands for `subprocess.Popen` in `leakbench.audit.isolation.worker`."""

    _child_created = False  # no child of this process, so that `Popen` waits for none
    _requests: socket.socket | None = None
    _turn = threading.Lock()

    def __init__(self, command: list[str], *, pass_fds: list[int], env: dict[str, str], cwd: str, **pipes: Any) -> None:
        *_, path, name, _ = command
        (stdin, held), (output, stdout) = os.pipe(), os.pipe()
        request: dict[str, Any] = {"path": json.loads(path), "name": name, "env": env, "cwd": cwd}
        self.pid, _ = self._ask(request, [stdin, stdout, *pass_fds])
        self.stdin, self.stdout, self._status = os.fdopen(held, "wb"), os.fdopen(output, "rb"), None
        os.close(stdin)
        os.close(stdout)

    def wait(self, timeout: float | None = None) -> int:
        limit = time.monotonic() + (timeout or 60)
        while self._status is None:
            pid, status = self._ask({"wait": self.pid}, [])
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > limit:
                raise subprocess.TimeoutExpired("an attack", timeout or 60)
            else:
                time.sleep(0.005)
        return self._status

    def __class_getitem__(cls, item: Any) -> Any:
        return subprocess.Popen[item]  # type checkers at run time take both

    @classmethod
    def _ask(cls, request: dict[str, Any], files: list[int]) -> tuple[int, int]:
        with cls._turn:
            if cls._requests is None:
                cls._requests, theirs = socket.socketpair()
                command = [sys.executable, "-c", SERVER, str(theirs.fileno())]
                server = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[2])
                theirs.close()
                weakref.finalize(cls, end, cls._requests, server)  # at exit, after processes that began later
            socket.send_fds(cls._requests, [json.dumps(request).encode()], files)
            return json.loads(cls._requests.recv(1000))
