"""What the process of the restricted loader gives up before it opens an archive, in a process that gives it up."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CONVERTER = Path(__file__).parents[4] / "audit" / "external" / "files" / "converter.py"
PROGRAM = """
import importlib.util, json, socket, sys
spec = importlib.util.spec_from_file_location("converter", sys.argv[1])
converter = importlib.util.module_from_spec(spec)
spec.loader.exec_module(converter)

def reached():
    try:
        socket.create_connection(("127.0.0.1", int(sys.argv[2])), timeout=5).close()
    except OSError:
        return False
    return True

def allocated(size):
    try:
        return len(bytearray(size)) == size
    except MemoryError:
        return False

before = reached(), allocated(1 << 30)
converter._leave_network()
converter._limit_memory(256 << 20)
after = reached(), allocated(1 << 30), allocated(64 << 20)
print(json.dumps([before, after]))
"""


@pytest.mark.long
def test_network_and_memory_are_given_up():
    if sys.platform != "linux":
        pytest.skip("a process leaves its network on Linux alone")
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-I", "-c", PROGRAM, str(CONVERTER), str(server.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    (connected, large), (connected_still, large_still, small) = json.loads(done.stdout)
    assert connected
    assert large
    assert not large_still
    assert small
    if connected_still:
        pytest.skip("this system lets no process leave its network, as some containers do")
