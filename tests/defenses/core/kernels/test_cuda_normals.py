"""The noise kernel of CUDA devices gives the CPU's numbers bit for bit: interpreted, compiled, and on a device."""

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import product

import pytest
import torch

from leakbench.defenses.core import seeded
from leakbench.defenses.core.kernels.normals import CudaNormals, Normals, normals
from leakbench.defenses.core.randomness import noise as noise_module
from leakbench.defenses.core.randomness.noise import CipherNoise

KEYS, DRAWS, STD, UNIT = (bytes(range(32)), bytes(255 - 7 * i for i in range(32))), (3, 2**33 + 5), 1.7, 2.0**-18
DTYPES = (torch.float64, torch.float32)
FUSED, PAIRS = 22, 8  # `fma` instructions for a pair of numbers, pairs of a thread

INTERPRETED = """
import ctypes
import numpy as np
import torch
from triton.runtime import interpreter
from leakbench.defenses.core.kernels import cuda_normals
from leakbench.defenses.core.kernels.normals import normals

fma = ctypes.CDLL(None).fma
fma.restype, fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3

# By the C library, because some versions of Triton's interpreter round the product too; then as those do.
for fused in (np.frompyfunc(fma, 3, 1), lambda x, y, z: x * y + z):
    interpreter.InterpreterBuilder.create_fma = lambda _, x, y, z: interpreter.TensorHandle(
        fused(x.data, y.data, z.data).astype(np.float64), z.dtype.scalar
    )
    differ = 0
    for size, dtype, key, draw, rounded in CASES:
        dtype = getattr(torch, dtype)
        values = torch.linspace(-9, 9, size, dtype=torch.float64).to(dtype)
        expected, unit = values.clone(), UNIT if rounded else None
        normals(rounded=rounded, wide=dtype == torch.float64)(expected, key, draw, STD, unit)
        cuda_normals.add_noise(values, key, draw, STD, unit)
        differ += int((values != expected).sum())
    print(differ)
"""

COMPILED = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from leakbench.defenses.core.kernels.cuda_normals import _add, OPTIONS, THREADS

kinds = {"values": "*" + KIND, "size": "i64", "draw": "u64"} | {f"k{i}": "u32" for i in range(8)}
kinds |= dict.fromkeys(("std", "unit", "inverse"), "fp64") | dict.fromkeys(("ROUNDED", "THREADS"), "constexpr")
source = ASTSource(fn=_add, signature=kinds, constexprs={"ROUNDED": True, "THREADS": THREADS})
for capability in CAPABILITIES:
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=OPTIONS | EXTRA).asm["ptx"]
    names = re.findall(r"^\\s+(?:@%p\\d+ )?((?:fma|mul|add|sub|div|sqrt)\\.\\S*f(?:64|32))\\s", ptx, re.M)
    exact = all(re.fullmatch(r"(fma|mul|add|sub|div|sqrt)\\.rn\\.f64", name) for name in names)
    print(names.count("fma.rn.f64"), exact, ".ftz" in ptx)
"""


def in_a_process(script, folder, **constants):
    """Runs a script under constants in a process of its own: Triton reads its environment when it is imported."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed: it comes with PyTorch's CUDA builds alone")
    begin = "".join(f"{name} = {value!r}\n" for name, value in constants.items())
    environment = os.environ | {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    environment |= {"TRITON_INTERPRET": "1"} if script is INTERPRETED else {}
    found = subprocess.run([sys.executable, "-c", begin + script], env=environment, capture_output=True, text=True)
    assert not found.returncode, found.stderr[-2000:]
    return found.stdout.split()


@pytest.mark.peers
def test_the_interpreted_kernel_gives_the_numbers_of_the_cpu(tmp_path):
    cases = [(1000, "float64", KEYS[0], DRAWS[0], False), (129, "float32", KEYS[1], DRAWS[1], True)]
    fused, rounded_twice = map(int, in_a_process(INTERPRETED, tmp_path, CASES=cases, STD=STD, UNIT=UNIT))
    assert fused == 0
    assert rounded_twice > 0  # the comparison has power


@pytest.mark.peers
def test_compiled_code_rounds_every_operation_and_fuses_what_is_written_so(tmp_path):
    as_written = [str(FUSED * PAIRS), "True", "False"]
    assert in_a_process(COMPILED, tmp_path, KIND="fp64", CAPABILITIES=(80, 90), EXTRA={}) == as_written * 2
    assert in_a_process(COMPILED, tmp_path, KIND="fp32", CAPABILITIES=(90,), EXTRA={}) == as_written
    fusing = {"enable_fp_fusion": True}
    assert in_a_process(COMPILED, tmp_path, KIND="fp32", CAPABILITIES=(90,), EXTRA=fusing) != as_written


class OnCpu(CudaNormals):
    """A kernel that computes on the CPU, perhaps something else."""

    def __init__(self, code=None, wide=True):
        super().__init__(rounded=True, wide=wide)
        vars(self)["code"] = code or normals(rounded=True, wide=wide)

    def examples(self):
        return Normals.examples(self)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_that_fails_or_gives_other_numbers_is_not_used(dtype):
    wide = dtype == torch.float64

    def last_bit(values, *stream):
        normals(rounded=True, wide=wide)(values, *stream)
        values[-1] = torch.nextafter(values[-1], values.new_tensor(torch.inf))

    def no_compiler(*_):
        raise RuntimeError("Failed to find C compiler")

    assert not noise_module._fault(OnCpu(wide=wide))
    assert "other numbers" in noise_module._fault(OnCpu(last_bit, wide))
    assert "Failed to find C compiler" in noise_module._fault(OnCpu(no_compiler, wide))


@pytest.mark.parametrize("can_draw", [False, True])
def test_a_device_gets_the_numbers_of_the_cpu_and_each_draw_once(can_draw, monkeypatch):
    streams = []

    def code(values, key, draw, std, unit):
        streams.append((key, draw))
        normals(rounded=True, wide=False)(values, key, draw, std, unit)

    monkeypatch.setattr(CudaNormals, "usable", lambda values: can_draw and type(values) is OnADevice)
    monkeypatch.setattr(noise_module, "_device_kernel", lambda *_: OnCpu(code, wide=False))
    source, on_a_device = seeded(3), seeded(3)
    for _ in range(2):
        expected = source.add(torch.zeros(500), STD)
        moved = torch.zeros(500).as_subclass(OnADevice)
        assert torch.equal(on_a_device.add(moved, STD).as_subclass(torch.Tensor), expected)
    state, moved_state = source.state(), on_a_device.state()
    assert state is not None and moved_state is not None and torch.equal(state, moved_state)
    assert len(set(streams)) == (2 if can_draw else 0)


class OnADevice(torch.Tensor):
    """A tensor that says that it is not the CPU's."""

    is_cpu = False


def test_no_kernel_is_looked_for_on_the_cpu_or_another_device():
    assert not any(CudaNormals.usable(torch.zeros(3, device=name)) for name in ("cpu", "meta"))


@pytest.mark.gpu
def test_a_cuda_device_draws_the_numbers_of_the_cpu(monkeypatch):
    for size, dtype, key, draw in product((1, 127, 128, 129, 1_000_000), DTYPES, KEYS, DRAWS):
        for std, unit in ((STD, UNIT), (2.0**-60, 1.0), (2.0**-96, 2.0**-114), (STD, None)):
            values = torch.linspace(-99.5, 99.5, size, dtype=torch.float64).to(dtype)
            moved = values.cuda()
            normals(rounded=unit is not None, wide=dtype == torch.float64)(values, key, draw, std, unit)
            kernel = noise_module._device_kernel(moved.device, dtype)
            assert kernel is not None
            kernel(moved, key, draw, std, unit)
            assert torch.equal(moved.cpu(), values), (size, dtype, draw, std, unit)
    source, own = CipherNoise(KEYS[0], "seeded"), CipherNoise(KEYS[0], "seeded")
    expected = source.add(torch.zeros(5000), STD)
    monkeypatch.setattr(noise_module, "normals", None)  # nothing is drawn on the CPU
    assert torch.equal(own.add(torch.zeros(5000).cuda(), STD).cpu(), expected)
