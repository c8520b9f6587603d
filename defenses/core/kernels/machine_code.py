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
_BYTES: dict[ir.Type, int] = {ir.DoubleType(): 8, ir.FloatType(): 4, ir.IntType(8): 1}
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


def processor_name() -> str:
    """Returns LLVM's name of the host processor's architecture, such as "znver4"."""
    return binding.get_host_cpu_name()


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
    lanes = f"v{of.count}" if isinstance(of, ir.VectorType) else ""
    name = f"llvm.fma.{lanes}f{8 * _BYTES[_element(of)]}"
    return module.globals.get(name) or ir.Function(module, ir.FunctionType(of, [of] * 3), name)


def _element(of: ir.Type) -> ir.Type:
    return of.element if isinstance(of, ir.VectorType) else of


def read(build: Any, place: LlvmValue, of: ir.Type) -> LlvmValue:
    """Loads a number or a vector, from any address of its numbers' type."""
    value = build.load(build.bitcast(place, of.as_pointer()))
    value.align = _BYTES[_element(of)]
    return value


def write(build: Any, value: LlvmValue, place: LlvmValue) -> None:
    """Stores a number or a vector, at any address of its numbers' type."""
    stored: Any = build.store(value, build.bitcast(place, value.type.as_pointer()))
    stored.align = _BYTES[_element(value.type)]


def widened(build: Any, value: LlvmValue, of: ir.Type) -> LlvmValue:
    """Converts a number or a vector to a longer format; returns it as it is if it has that format."""
    return value if value.type == of else build.fpext(value, of)


def spread(build: Any, value: LlvmValue, vector: Any) -> LlvmValue:
    """Broadcasts a number to a vector."""
    none, word = ir.Constant(vector, ir.Undefined), ir.IntType(32)
    first_lane = build.insert_element(none, value, word(0))
    return build.shuffle_vector(first_lane, none, ir.Constant(ir.VectorType(word, vector.count), None))


def added_up(build: Any, vector: LlvmValue) -> LlvmValue:
    """Sums a vector's numbers, adjacent numbers first."""
    parts = [build.extract_element(vector, ir.IntType(32)(i)) for i in range(vector.type.count)]
    while len(parts) > 1:
        parts = [build.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


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
        self._fma = fused(self.module, self._vector)
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
        place = build.gep(start, [INT(offset)])
        if active is None or active >= self._lanes:
            return read(build, place, vector)
        place = build.bitcast(place, vector.as_pointer())
        align, mask = ir.IntType(32)(_BYTES[vector.element]), self._mask(active)
        load = self._masked("load", vector, vector, [place.type, align.type, mask.type, vector])
        return build.call(load, [place, align, mask, ir.Constant(vector, None)])

    def _put(self, value: LlvmValue, place: LlvmValue, active: int) -> None:
        """Stores a vector of numbers; only the first lanes are written."""
        build, vector = self._build, value.type
        if active >= vector.count:
            return write(build, value, place)
        place = build.bitcast(place, vector.as_pointer())
        align, mask = ir.IntType(32)(self._bytes), self._mask(active)
        store = self._masked("store", vector, ir.VoidType(), [vector, place.type, align.type, mask.type])
        build.call(store, [value, place, align, mask])

    def _masked(self, name: str, vector: ir.VectorType, gives: ir.Type, takes: Sequence[ir.Type]) -> ir.Function:
        """Returns LLVM's masked load or store, declared once."""
        name = f"llvm.masked.{name}.v{vector.count}f{8 * _BYTES[vector.element]}.p0"
        return self.module.globals.get(name) or ir.Function(self.module, ir.FunctionType(gives, takes), name)

    def _mask(self, active: int) -> ir.Constant:
        return ir.Constant(ir.VectorType(ir.IntType(1), self._lanes), [int(i < active) for i in range(self._lanes)])

    def _spread(self, value: LlvmValue) -> LlvmValue:
        """Broadcasts a number to a vector."""
        return spread(self._build, value, ir.VectorType(value.type, self._lanes))

    def _table(self, values: Sequence[int]) -> LlvmValue:
        """Adds a constant array to the module."""
        kind = ir.ArrayType(INT, len(values))
        table: Any = ir.GlobalVariable(self.module, kind, self.module.get_unique_name("table"))
        table.global_constant, table.initializer = True, ir.Constant(kind, list(values))
        return table
