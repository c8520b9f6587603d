"""Freed memory: kept for the next step where it was asked for, given back on demand, left alone where others decide."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leakbench import malloc

from .parameters import subtests

# Six blocks of 10 MiB at a time, as the activations of a step; page faults of ten such steps, and of ten after a trim.
STEPS = """
import ctypes, sys
libc = ctypes.CDLL(None)
if sys.platform == "linux":
    libc.prctl(41, 1, 0, 0, 0)  # no huge pages, of which a fault brings many
import json, resource
import torch
from leakbench.malloc import give_memory_back, keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        blocks = [torch.ones(10 * 2**18) for _ in range(6)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

# The limits that the library starts from: left alone, it moves them by what a process happens to free first.
if hasattr(libc, "mallopt"):
    libc.mallopt(-1, 131072), libc.mallopt(-3, 131072)
left_alone, done = faults(), keep_freed_memory()
faults()
steady = faults()
give_memory_back()
print(json.dumps({"left_alone": left_alone, "done": done, "steady": steady, "after": faults()}))
"""
ROOT = Path(__file__).parents[1]
PAGES = 6 * 10 * 2**20 // os.sysconf("SC_PAGE_SIZE")  # of one step


@pytest.fixture(scope="module")
def kept():
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "THP_"))}
    clean["PYTHONPATH"] = str(ROOT)
    ran = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True, env=clean)
    found = json.loads(ran.stdout)
    if not found["done"]:
        pytest.skip("the C library is not GNU's")
    return found


@pytest.mark.long
def test_steps_after_the_first_touch_no_new_pages(kept):
    assert kept["left_alone"] > 5 * PAGES and kept["steady"] < PAGES / 5


@pytest.mark.long
def test_memory_is_given_back_on_demand(kept):
    assert PAGES / 2 < kept["after"] < 2 * PAGES


@subtests("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_limits_of_the_environment_are_left_alone(name, monkeypatch):
    calls = []
    with monkeypatch.context() as patch:
        patch.setenv(name, "131072")
        patch.setattr(malloc.ctypes, "CDLL", calls.append)
        assert malloc.keep_freed_memory() is False and not calls
