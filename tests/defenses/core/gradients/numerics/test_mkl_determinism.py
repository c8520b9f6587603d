"""An example's numbers are the same to the last digit, wherever in a batch it lies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = """
import os
import torch
import leakbench.defenses.core
from torch.nn import functional as F

strict = os.environ["MKL_CBWR"].endswith("STRICT")  # on Intel's processors
torch.manual_seed(0)
for threads in (1, 2, 4) if strict else (1,):
    torch.set_num_threads(threads)
    for entering in (33, 64, 200, 512, 785) if strict else (33, 200, 785):
        for leaving in (2, 7, 16, 33, 64) if strict else (2, 7, 33, 64):
            weight = torch.randn(leaving, entering)
            for n in (3, 5, 9, 16, 17, 64) if strict else (5, 9, 17, 64):
                inputs = torch.randn(n, entering)
                there = F.linear(inputs, weight)
                for without in (0, n // 2):
                    rest = torch.arange(n) != without
                    case = (threads, entering, leaving, n)
                    assert torch.equal(there[rest], F.linear(inputs[rest], weight)), case
torch.set_num_threads(1)
print(leakbench.defenses.core.sums_are_alike())
"""

ROOT = Path(__file__).parents[5]


def answered():
    clean = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=clean)


@pytest.mark.long
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="PyTorch was built without MKL")
def test_a_row_of_a_product_is_the_same_without_another_example():
    done = answered()
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_choice_of_the_environment_stands():
    program = "import os, leakbench.defenses.core; print(os.environ['MKL_CBWR'])"
    variables = os.environ | {"MKL_CBWR": "COMPATIBLE", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=variables)
    assert done.stdout == "COMPATIBLE\n"
