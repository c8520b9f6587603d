"""Machine code for the host processor: written in LLVM's intermediate representation, compiled by llvmlite.

llvmlite is the compiler behind Numba. A matrix product is fast if a tile of its sums stays in registers; Numba's
vectoriser does not achieve that, so kernels name their vectors explicitly. Compiling a kernel takes 20 to 100 ms;
nothing is written to disk, and no compiler has to be installed.
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
LlvmValue = Any  # a value in LLVM's representation: llvmlite's classes are typed too narrowly for a type checker
COMPILING = Lock()
"""Lock held by the thread that compiles: LLVM's global state is not thread-safe."""


@dataclass(frozen=True)
class Processor:
    """Vector registers of a processor.

    Attributes:
        vector: bytes of a vector register.
        sums: vector registers available to a tile of sums; the others hold the operands.
    """

    vector: int
    sums: int


@cache
def processor() -> Processor | None:
    """Returns the host processor's vectors; None for a processor without fused multiply-add."""
    has = binding.get_host_cpu_features()
    if has.get("avx512f"):
        return Processor(vector=64, sums=24)
    if has.get("avx2") and has.get("fma"):
        return Processor(vector=32, sums=12)
    if has.get("neon") or binding.get_process_triple().startswith(("aarch64", "arm64")):
        return Processor(vector=16, sums=24)
    return None


def compiled(module: ir.Module, name: str, *arguments: Any) -> Callable[..., None]:
    """Compiles a function of a module to a Python function, which releases the GIL during a call.

    Args:
        module: module in LLVM's representation.
        name: name of a function that returns nothing.
        arguments: their types, of `ctypes`.
    """
    with COMPILING:
        engine = _engine(str(module))
        address = engine.get_function_address(name)
    function = ctypes.CFUNCTYPE(None, *arguments)(address)
    function.engine = engine  # type: ignore[attr-defined]  owns the code, which must live as long
    return function


def _engine(text: str) -> binding.ExecutionEngine:
    """Returns the owner of a module's code. The caller holds `COMPILING`: intermediate objects are freed on return."""
    machine = _machine()
    parsed = binding.parse_assembly(text)
    parsed.verify()
    # Tiles are already unrolled as far as they should be.
    tuning = binding.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_unrolling = False
    passes = binding.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(parsed, passes)
    engine = binding.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine


def in_threads(work: Callable[[int], None], count: int, *, at_once: int) -> None:
    """Calls `work` with all numbers below `count`, in threads; other Python threads keep running.

    Args:
        work: takes a number; its exceptions are raised here.
        count: number of calls, at least 1.
        at_once: threads, including this thread.
    """
    if min(count, at_once) == 1:
        for number in range(count):
            work(number)
        return
    # A new pool per call, 0.1 ms: a kept pool would be dead in a forked process.
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


def fused(module: ir.Module, of: ir.Type) -> ir.Function:
    """Returns LLVM's fused multiply-add for numbers or vectors, declared once per module."""
    element, lanes = (of.element, f"v{of.count}") if isinstance(of, ir.VectorType) else (of, "")
    name = f"llvm.fma.{lanes}{'f64' if element == ir.DoubleType() else 'f32'}"
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(of, [of] * 3), name)


@contextmanager
def counted(
    build: ir.IRBuilder, start: LlvmValue, stop: LlvmValue, sums: Sequence[LlvmValue] = ()
) -> Iterator[Counted]:
    """Builds a loop over [start, stop), which must not be empty; code that is built inside the context is its body.

    Args:
        build: the builder.
        start: first number.
        stop: end of the numbers.
        sums: initial values; the body stores in `Counted.sums` the values for the next round, which are the loop's
            result after the last.
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
    """Index of a loop built by `counted`, and its running sums."""

    number: LlvmValue
    sums: list[LlvmValue]


class VectorWriter:
    """Base of kernel writers: loads, broadcasts and sums of vectors as long as the processor's registers."""

    def __init__(self, name: str, host: Processor, *, wide: bool) -> None:
        """Begins a module.

        Args:
            name: name of the module.
            host: the target processor.
            wide: True for numbers of float64, False for float32.
        """
        self._number = ir.DoubleType() if wide else ir.FloatType()
        self._bytes = 8 if wide else 4
        self._lanes = host.vector // self._bytes
        self._vector = ir.VectorType(self._number, self._lanes)
        self.module = ir.Module(name)
        self._fma = self._intrinsic("fma", self._vector, [self._vector] * 3)
        self._build: Any = None  # of the function that is being written

    def _at(
        self,
        start: LlvmValue,
        offset: int,
        active: int | None = None,
        *,
        number: ir.Type | None = None,
    ) -> LlvmValue:
        """Loads a vector of numbers; only the first lanes are read, and the others are zeros.

        Args:
            start: address of its first number without the offset.
            offset: offset in numbers.
            active: number of the lanes that are read; all if None.
            number: type of the numbers, if not the module's.
        """
        build, vector = self._build, ir.VectorType(number or self._number, self._lanes)
        align = self._bytes if number is None else 1
        place = build.bitcast(build.gep(start, [INT(offset)]), vector.as_pointer())
        if active is None or active >= self._lanes:
            loaded = build.load(place)
            loaded.align = align
            return loaded
        mask = self._mask(active)
        load = self._intrinsic("masked.load", vector, [place.type, ir.IntType(32), mask.type, vector])
        return build.call(load, [place, ir.IntType(32)(align), mask, ir.Constant(vector, None)])

    def _intrinsic(self, name: str, gives: ir.Type, takes: Sequence[ir.Type]) -> ir.Function:
        """Returns an LLVM intrinsic on vectors, declared once."""
        vector: Any = takes[0] if isinstance(gives, ir.VoidType) else gives
        element = {ir.DoubleType(): "f64", ir.FloatType(): "f32"}[vector.element]
        full = f"llvm.{name}.v{vector.count}{element}{'.p0' if name.startswith('masked') else ''}"
        return self.module.globals.get(full) or ir.Function(self.module, ir.FunctionType(gives, takes), full)

    def _mask(self, active: int) -> ir.Constant:
        return ir.Constant(ir.VectorType(ir.IntType(1), self._lanes), [int(i < active) for i in range(self._lanes)])

    def _spread(self, value: LlvmValue) -> LlvmValue:
        """Broadcasts a number to a vector."""
        build, none = self._build, ir.Constant(ir.VectorType(value.type, self._lanes), ir.Undefined)
        first_lane = build.insert_element(none, value, ir.IntType(32)(0))
        return build.shuffle_vector(first_lane, none, ir.Constant(ir.VectorType(ir.IntType(32), self._lanes), None))

    def _total(self, vector: LlvmValue) -> LlvmValue:
        """Sums a vector's numbers, adjacent numbers first."""
        parts = [self._build.extract_element(vector, ir.IntType(32)(i)) for i in range(self._lanes)]
        while len(parts) > 1:
            parts = [self._build.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def _table(self, values: Sequence[int]) -> LlvmValue:
        """Adds a constant array to the module."""
        kind = ir.ArrayType(INT, len(values))
        table: Any = ir.GlobalVariable(self.module, kind, self.module.get_unique_name("table"))
        table.global_constant, table.initializer = True, ir.Constant(kind, list(values))
        return table
