"""Machine code for the processor at hand: written in LLVM's intermediate representation, compiled by llvmlite.

llvmlite is what Numba compiles with. Numba's vectoriser does not keep a tile of sums in registers, which is what makes
a matrix product fast: so kernels name their vectors themselves. Compiling one takes 20 to 100 ms; nothing is written to
disk, and no compiler has to be installed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

from llvmlite import binding, ir

INT = ir.IntType(64)
LlvmValue = Any  # of LLVM: llvmlite's classes are typed too narrowly for a type checker
_COMPILING = Lock()  # LLVM's global state is not for two threads


@dataclass(frozen=True)
class Processor:
    """What a kernel has to know.

    Attributes:
        vector: bytes of a vector register.
        sums: vector registers that a tile of sums may take; the others hold what is multiplied.
    """

    vector: int
    sums: int


@cache
def processor() -> Processor | None:
    """The processor's vectors; None for one without fused multiply-add."""
    has = binding.get_host_cpu_features()
    if has.get("avx512f"):
        return Processor(vector=64, sums=24)
    if has.get("avx2") and has.get("fma"):
        return Processor(vector=32, sums=12)
    if has.get("neon") or binding.get_process_triple().startswith(("aarch64", "arm64")):
        return Processor(vector=16, sums=24)
    return None


def compiled(module: ir.Module, name: str, *arguments: Any) -> Callable[..., None]:
    """A function of a module as a function of Python, which leaves other threads of Python running.

    Args:
        module: in LLVM's representation.
        name: of a function that returns nothing.
        arguments: their types, of `ctypes`.
    """
    with _COMPILING:
        machine = _machine()
        parsed = binding.parse_assembly(str(module))
        parsed.verify()
        # Tiles are unrolled as far as they should be.
        tuning = binding.create_pipeline_tuning_options(speed_level=2)
        tuning.loop_unrolling = False
        passes = binding.create_pass_builder(machine, tuning)
        passes.getModulePassManager().run(parsed, passes)
        engine = binding.create_mcjit_compiler(parsed, machine)
        engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, *arguments)(engine.get_function_address(name))
    function.engine = engine  # type: ignore[attr-defined]  owns the code, which must live as long
    return function


def _machine() -> binding.TargetMachine:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple()
    name, features = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=name, features=features, opt=3)


@contextmanager
def counted(
    build: ir.IRBuilder, start: LlvmValue, stop: LlvmValue, sums: Sequence[LlvmValue] = ()
) -> Iterator[Counted]:
    """A loop over [start, stop), which is not empty, around what is built inside of the context.

    Args:
        build: where.
        start: first number.
        stop: end of the numbers.
        sums: what the loop goes on from; the body leaves in `Counted.sums` what the next round begins with, and the
            loop what it ends with.
    """
    before, body = build.block, build.append_basic_block()
    build.branch(body)
    build.position_at_end(body)
    number = build.phi(INT)
    number.add_incoming(start, before)
    phis = [build.phi(value.type) for value in sums]
    for phi, value in zip(phis, sums, strict=True):
        phi.add_incoming(value, before)
    state = Counted(number, list(phis))
    yield state
    following = build.add(number, INT(1))
    for phi, value in zip([number, *phis], [following, *state.sums], strict=True):
        phi.add_incoming(value, build.block)
    done = build.append_basic_block()
    build.cbranch(build.icmp_signed("<", following, stop), body, done)
    build.position_at_end(done)


@dataclass
class Counted:
    """A loop's number, and its sums."""

    number: LlvmValue
    sums: list[LlvmValue]


class VectorWriter:
    """What writers of kernels share: vectors of a processor's registers, filled up with zeros where numbers end."""

    def __init__(self, name: str, host: Processor, *, wide: bool) -> None:
        """Begins a module.

        Args:
            name: of the module.
            host: what it is for.
            wide: whether numbers are float64, not float32.
        """
        self._number = ir.DoubleType() if wide else ir.FloatType()
        self._bytes = 8 if wide else 4
        self._lanes = host.vector // self._bytes
        self._vector = ir.VectorType(self._number, self._lanes)
        self.module = ir.Module(name)
        self._fma = self._declared("fma", self._vector, [self._vector] * 3)
        self._build: Any = None  # of the function that is being written

    def _declared(self, name: str, gives: ir.Type, takes: Sequence[ir.Type]) -> ir.Function:
        kind = f"v{self._lanes}f{8 * self._bytes}"
        suffix = f"{kind}.p0" if name.startswith("masked") else kind
        return ir.Function(self.module, ir.FunctionType(gives, takes), f"llvm.{name}.{suffix}")

    def _at(self, start: LlvmValue, offset: int, there: int | None = None) -> LlvmValue:
        """A vector of numbers, filled up with zeros where fewer are there."""
        build, kind = self._build, self._vector.as_pointer()
        place = build.bitcast(build.gep(start, [INT(offset)]), kind)
        if there is None or there >= self._lanes:
            found = build.load(place)
            found.align = self._bytes
            return found
        mask, zero = self._mask(there), ir.Constant(self._vector, [0.0] * self._lanes)
        load = self._masked("load", self._vector, [kind, ir.IntType(32), mask.type, self._vector])
        return build.call(load, [place, ir.IntType(32)(self._bytes), mask, zero])

    def _masked(self, name: str, gives: ir.Type, takes: Sequence[ir.Type]) -> ir.Function:
        known = self.module.globals.get(f"llvm.masked.{name}.v{self._lanes}f{8 * self._bytes}.p0")
        return known or self._declared(f"masked.{name}", gives, takes)

    def _mask(self, there: int) -> ir.Constant:
        return ir.Constant(ir.VectorType(ir.IntType(1), self._lanes), [int(i < there) for i in range(self._lanes)])

    def _spread(self, value: LlvmValue) -> LlvmValue:
        """A vector of one number."""
        build, none = self._build, ir.Constant(ir.VectorType(value.type, self._lanes), ir.Undefined)
        one = build.insert_element(none, value, ir.IntType(32)(0))
        return build.shuffle_vector(one, none, ir.Constant(ir.VectorType(ir.IntType(32), self._lanes), None))

    def _total(self, vector: LlvmValue) -> LlvmValue:
        """The sum of a vector's numbers, of neighbours first."""
        parts = [self._build.extract_element(vector, ir.IntType(32)(i)) for i in range(self._lanes)]
        while len(parts) > 1:
            parts = [self._build.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def _table(self, values: Sequence[int]) -> LlvmValue:
        """A constant array."""
        kind = ir.ArrayType(INT, len(values))
        table: Any = ir.GlobalVariable(self.module, kind, self.module.get_unique_name("table"))
        table.global_constant, table.initializer = True, ir.Constant(kind, list(values))
        return table
