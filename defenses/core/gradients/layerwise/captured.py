"""A CUDA graph of a pass: forward, backward, norms and weighted sum as two replays, without a launch by Python.

Small networks on a GPU are bound by the time that Python takes to launch their kernels. A graph replays the kernels of
an earlier pass on whatever its input tensors hold by then. The first graph ends with the squared norms. Factors are
computed from them as in any pass, by any bound, and copied into the second graph, which forms the weighted sum. What is
rare (an example whose norm is uncertain, masks, rows) is computed from the tensors that the first replay left.

Passes on a GPU are of one size (`executor.py`), so a model has one graph, as a rule.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from operator import is_
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...inputs import Inputs, form_of, tensors_in
from ...plan.codec import Everything
from ...plan.defense import StepPlan
from ...plan.query import Gradient, NormWithin
from .block_sums import BatchGradients
from .factors import FactoredGradient, Squares
from .masks import Spans

MOST_GRAPHS = 4
"""Graphs of a model that are kept, each with the memory of a pass."""
_AGREES = 1e-3  # relative difference of a replay from the pass that it was captured from, in float32
_NEGLIGIBLE = 1e-12  # squared norm, in gradient units, below which examples are not compared
_USED = "CUDA graph"
_WAIT = "called a synchronizing CUDA operation"  # PyTorch's warning

PassOf = Callable[[Inputs, Tensor], BatchGradients]


def capturable(plan: StepPlan) -> bool:
    """Returns whether a plan needs norms and weighted sums of whole gradients alone."""
    return all(
        type(block.query) is NormWithin
        or (type(block.query) is Gradient and type(block.codec) is Everything and block.bound.kind != "unbounded")
        for block in plan.blocks
    )


class FixedState:
    """State of a model and its loss that a graph has fixed: attributes of their objects, addresses of their tensors.

    The attributes are kept, so that the memory of a tensor that is replaced is not used again.
    """

    def __init__(self, *roots: Any) -> None:
        """Takes modules, with all modules inside, and other objects."""
        objects = [inner for root in roots for inner in (root.modules() if isinstance(root, nn.Module) else (root,))]
        attributes = [getattr(each, "__dict__", {}) for each in objects]
        inner = [value for own in attributes for value in own.values()]
        # Parameters, buffers and hooks are entries of dicts.
        self._dicts = attributes + [value for value in inner if isinstance(value, dict)]
        self._lists = [value for value in inner if isinstance(value, list)]
        self._values = self._attributes()
        self._tensors = [v for v in self._values if isinstance(v, Tensor) and v.layout is torch.strided]
        self._addresses = self._in_memory()

    def unchanged(self) -> bool:
        """Returns whether the attributes are the same objects, and the tensors lie where they lay."""
        values = self._attributes()
        same = len(values) == len(self._values) and all(map(is_, values, self._values))
        return same and self._in_memory() == self._addresses

    def _attributes(self) -> list[Any]:
        """Returns all attributes, and the entries of those that are dicts or lists."""
        return [*chain.from_iterable(map(dict.values, self._dicts)), *chain.from_iterable(self._lists)]

    def _in_memory(self) -> list[int]:
        return [values.data_ptr() for values in self._tensors]


class CapturedGradients(BatchGradients):
    """Gradients of a replayed pass."""

    def __init__(self, of: CapturedPass) -> None:
        """Takes the graph after a replay."""
        examples = of.gradients.examples
        super().__init__(of.gradients.terms, of.gradients.dim, examples, of.gradients.like, examples)
        self._of = of
        # In the place of what the base class would compute at the first use.
        vars(self)["_squares"] = of.squares

    def _sum(self, terms: tuple[tuple[Spans, FactoredGradient], ...], factors: Tensor) -> Float[Tensor, " dim"]:
        return self._of.sum(factors) if terms is self.terms else super()._sum(terms, factors)


class CapturedPass:
    """Two CUDA graphs, of a pass with its squared norms and of a weighted sum, and the tensors that they work on.

    Attributes:
        gradients: factored gradients, overwritten by each replay.
        squares: their squared norms, likewise.
    """

    gradients: BatchGradients
    squares: Squares

    def __init__(self, pass_of: PassOf, inputs: Inputs, targets: Tensor) -> None:
        """Captures a pass over a batch, and compares a replay with it.

        Args:
            pass_of: function from inputs and targets to factored gradients.
            inputs: a batch of the size that is captured.
            targets: as many.

        Raises:
            RuntimeError: for a pass that cannot be captured, as one that waits for the device, or one whose replay
                gives other norms.
        """
        self._inputs, self._targets = inputs.clone(), targets.clone()
        graphs = graphs_on(inputs.device)
        with graphs.beside():
            gradients = pass_of(self._inputs, self._targets)
            squares, rounding = gradients._squares.value.clone(), gradients._squares.rounding
            allowed = _AGREES * squares.abs() + _NEGLIGIBLE + (0.0 if rounding is None else rounding)
            # Factors that make all norms one: the sum of a batch with a huge example shows the others' too.
            self._factors = squares.clamp(min=_NEGLIGIBLE).rsqrt().nan_to_num(nan=0.0).to(gradients.like)
            total = gradients._sum(gradients.terms, self._factors).clone()
        del gradients
        with graphs.capture() as self._pass:
            self.gradients = pass_of(self._inputs, self._targets)
            self.squares = self.gradients._squares
        with graphs.capture() as self._weighted:
            self._sum = self.gradients._sum(self.gradients.terms, self._factors)
        self._pass.replay()
        self._weighted.replay()
        _refuse_differences("norms", self.squares.value, squares, allowed)
        _refuse_differences("sums", self._sum, total, _AGREES * total.abs().where(total.isfinite(), 0.0).amax())

    def __call__(self, inputs: Inputs, targets: Tensor) -> CapturedGradients:
        """Replays the pass on a batch; the gradients are valid until the next replay."""
        for kept, values in zip(tensors_in(self._inputs), tensors_in(inputs), strict=True):
            kept.copy_(values)
        self._targets.copy_(targets)
        self._pass.replay()
        return CapturedGradients(self)

    def sum(self, factors: Float[Tensor, " size"]) -> Float[Tensor, " dim"]:
        """Returns the sum of the gradients times their factors."""
        self._factors.copy_(factors)
        self._weighted.replay()
        return self._sum.clone()


def _refuse_differences(what: str, replayed: Tensor, expected: Tensor, allowed: Tensor) -> None:
    """Refuses results of a replay that differ from those of the pass that it was captured from.

    Args:
        what: name of the results.
        replayed: those of the replay.
        expected: those of the pass; what is not finite is not compared.
        allowed: largest differences.

    Raises:
        RuntimeError: names the results.
    """
    agrees = (replayed - expected).abs() <= allowed  # false for NaN
    if not bool((agrees | ~expected.isfinite()).all()):
        raise RuntimeError(f"a replay gives other {what} than the pass that it was captured from")


class _Graphs:
    """Captures CUDA graphs that share a pool of memory, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._generator = torch.cuda.default_generators[self._index]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Runs on the stream of the captures: libraries allocate their workspaces at their first call on a stream.

        Raises:
            RuntimeError: if what runs waits for the device, or draws numbers. A capture that such a wait ends leaves
                PyTorch's allocator in the state of a capture, and a draw would repeat those of other code.
        """
        current, offset = torch.cuda.current_stream(self._device), self._generator.get_offset()
        self._stream.wait_stream(current)
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        current.wait_stream(self._stream)
        waits = [warning for warning in recorded if _WAIT in str(warning.message)]
        if waits:
            raise RuntimeError(f"the pass waits for the device at {waits[0].filename}:{waits[0].lineno}")
        if self._generator.get_offset() != offset:
            raise RuntimeError("the pass draws random numbers from the device's default generator")

    @contextmanager
    def capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Captures what runs in the context; after a failure, the process can compute and capture as before."""
        graph, failure = torch.cuda.CUDAGraph(), None
        state = self._generator.graphsafe_get_state()
        # A capture that fails leaves its mark on the generator's state, which then refuses to draw.
        self._generator.graphsafe_set_state(state.clone_state())
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    yield graph
                except Exception as error:
                    failure = error
                    raise
        except Exception:
            # Private to PyTorch, which up to 2.11 does not do so itself if the end of the capture fails.
            with suppress(AttributeError, RuntimeError):
                torch._C._cuda_endAllocateToPool(self._index, self._pool)
            if failure is not None:
                raise failure from None  # rather than what the end of the failed capture says
            raise
        finally:
            self._generator.graphsafe_set_state(state)


graphs_on: Callable[[torch.device], Any] = _Graphs


class CapturedPasses:
    """The graphs of a model by size and kind of batch; a pass that cannot be captured runs without one.

    Attributes:
        note: what the record says of them: empty while there are none.
    """

    def __init__(self, model: nn.Module, loss: Any = None) -> None:
        """Starts without graphs, for a model and a loss that passes use."""
        self._roots, self.note = (model, loss), ""
        self._seen: set[tuple[object, ...]] = set()
        self._graphs: dict[tuple[object, ...], CapturedPass] = {}
        self._state: FixedState | None = None
        self._failed = self._out_of_memory = False

    def gradients(
        self, pass_of: PassOf, inputs: Inputs, targets: Tensor, *, views: int, kind: object
    ) -> BatchGradients | None:
        """Returns the gradients of a batch from a graph; None if there is none, and the caller runs the pass.

        A size is captured when it is seen for the second time: rare ones are not worth the memory.

        Args:
            pass_of: function from inputs and targets to factored gradients.
            inputs: `views` adjacent entries for each example.
            targets: as many.
            views: entries of an example.
            kind: anything else that a pass depends on, as its precision.
        """
        if self._failed:
            return None
        if self._state is None or not self._state.unchanged():
            self.clear()
            self._state = FixedState(*self._roots)
        key = (form_of(inputs), targets.shape, targets.dtype, views, kind)
        if key not in self._graphs:
            if key not in self._seen:
                self._seen.add(key)
                return None
            if len(self._graphs) >= MOST_GRAPHS:
                self._free(next(iter(self._graphs)))
            try:
                captured = CapturedPass(pass_of, inputs, targets)
                if not self._state.unchanged():
                    raise RuntimeError("a pass changes attributes of the model or the loss, and a replay would not")
            except Exception as error:  # of CUDA, or of any code of a user's model
                self.clear()
                # Memory may be free later, but a second attempt is the last.
                self._failed = self._out_of_memory or not isinstance(error, torch.OutOfMemoryError)
                self._out_of_memory = not self._failed
                self.note = f"no CUDA graph: {(str(error) or type(error).__name__).splitlines()[0][:120]}"
                return None
            self._graphs[key], self.note = captured, _USED
        else:
            self._graphs[key] = self._graphs.pop(key)  # the last to go
        return self._graphs[key](inputs, targets)

    @staticmethod
    def on(values: Inputs) -> bool:
        """Returns whether the device of inputs has graphs."""
        return values.is_cuda

    def clear(self) -> None:
        """Frees all graphs and their memory."""
        self._free(*self._graphs)
        self._seen.clear()
        self._state = None
        if self.note == _USED:
            self.note = ""

    def _free(self, *keys: tuple[object, ...]) -> None:
        """Frees graphs once the device has done their replays."""
        freed = [self._graphs.pop(key) for key in keys]
        for device in {graph.squares.value.device for graph in freed}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
