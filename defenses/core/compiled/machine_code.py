"""Machine code for the processor at hand: written in LLVM's intermediate representation, compiled by llvmlite.

llvmlite is what Numba compiles with. Numba's vectoriser does not keep a tile of sums in registers, which is what makes
a matrix product fast: so kernels name their vectors themselves. Compiling one takes 20 to 100 ms; nothing is written to
disk, and no compiler has to be installed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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


def in_threads(work: Callable[[int], None], count: int, *, at_once: int) -> None:
    """Calls `work` with all numbers below `count`, which leaves other threads of Python running.

    Args:
        work: of one number; what it raises is raised here.
        count: at least 1.
        at_once: threads, this one among them.
    """
    if min(count, at_once) == 1:
        for number in range(count):
            work(number)
        return
    # Made anew, 0.1 ms: one that is kept is dead in a process that was forked.
    with ThreadPoolExecutor(at_once - 1) as threads:
        waiting = [threads.submit(work, number) for number in range(1, count)]
        work(0)
        for each in waiting:
            each.result()


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
        kind = ir.FunctionType(self._vector, [self._vector] * 3)
        self._fma = ir.Function(self.module, kind, f"llvm.fma.v{self._lanes}f{8 * self._bytes}")
        self._build: Any = None  # of the function that is being written

    def _at(self, start: LlvmValue, offset: int, there: int | None = None, number: ir.Type | None = None) -> LlvmValue:
        """A vector of numbers, filled up with zeros where fewer are there.

        Args:
            start: where its first number would be without the offset.
            offset: in numbers.
            there: how many are there; a whole vector where None.
            number: bytes, where they are none of the module's numbers.
        """
        build, vector = self._build, self._vector if number is None else ir.VectorType(number, self._lanes)
        kind, align = vector.as_pointer(), self._bytes if number is None else 1
        place = build.bitcast(build.gep(start, [INT(offset)]), kind)
        if there is None or there >= self._lanes:
            found = build.load(place)
            found.align = align
            return found
        mask, zero = self._mask(there), ir.Constant(vector, None)
        load = self._masked("load", vector, vector, [kind, ir.IntType(32), mask.type, vector])
        return build.call(load, [place, ir.IntType(32)(align), mask, zero])

    def _masked(self, name: str, vector: ir.VectorType, gives: ir.Type, takes: Sequence[ir.Type]) -> ir.Function:
        kind = f"f{8 * self._bytes}" if vector.element == self._number else "i8"
        full = f"llvm.masked.{name}.v{self._lanes}{kind}.p0"
        return self.module.globals.get(full) or ir.Function(self.module, ir.FunctionType(gives, takes), full)

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
