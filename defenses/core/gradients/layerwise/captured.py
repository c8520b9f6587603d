"""A CUDA graph of a pass: forward, backward, norms and weighted sum as two replays, without a launch by Python.

Small networks on a GPU are bound by the time that Python takes to launch their kernels. A graph replays the kernels of
an earlier pass on whatever its input tensors hold by then. The first graph ends with the squared norms. Factors are
computed from them as in any pass, by any bound, and copied into the second graph, which forms the weighted sum. What is
rare (an example whose norm is uncertain, masks, rows) is computed from the tensors that the first replay left.

Passes on a GPU are of one size (`executor.py`), so a model has one graph, as a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ...plan.codec import Everything
from ...plan.defense import StepPlan
from ...plan.query import Gradient, NormWithin
from .block_sums import BatchGradients
from .factors import FactoredGradient, Squares
from .masks import Spans

MOST_GRAPHS = 4
"""Graphs of a model that are kept, each with the memory of a pass."""
_AGREES = 1e-3  # relative difference of a replay from the pass that it was captured from, in float32

PassOf = Callable[[Tensor, Tensor], BatchGradients]


def capturable(plan: StepPlan) -> bool:
    """Returns whether a plan needs norms and weighted sums of whole gradients alone."""
    return all(
        type(block.query) is NormWithin
        or (type(block.query) is Gradient and type(block.codec) is Everything and block.bound.kind != "unbounded")
        for block in plan.blocks
    )


def addresses(model: nn.Module) -> tuple[int, ...]:
    """Returns where the model's tensors lie in memory, which a graph has fixed."""
    return tuple([values.data_ptr() for values in chain(model.parameters(), model.buffers())])


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

    def __init__(self, pass_of: PassOf, inputs: Tensor, targets: Tensor) -> None:
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
            squares, self._factors = gradients._squares.value.clone(), gradients.like.new_ones(gradients.examples)
            total = gradients._sum(gradients.terms, self._factors).clone()
        del gradients
        with graphs.capture() as self._pass:
            self.gradients = pass_of(self._inputs, self._targets)
            self.squares = self.gradients._squares
        with graphs.capture() as self._weighted:
            self._sum = self.gradients._sum(self.gradients.terms, self._factors)
        self._pass.replay()
        self._weighted.replay()
        _refuse_differences("norms", self.squares.value, squares)
        _refuse_differences("sums", self._sum, total)

    def __call__(self, inputs: Tensor, targets: Tensor) -> CapturedGradients:
        """Replays the pass on a batch; the gradients are valid until the next replay."""
        self._inputs.copy_(inputs)
        self._targets.copy_(targets)
        self._pass.replay()
        return CapturedGradients(self)

    def sum(self, factors: Float[Tensor, " size"]) -> Float[Tensor, " dim"]:
        """Returns the sum of the gradients times their factors."""
        self._factors.copy_(factors)
        self._weighted.replay()
        return self._sum.clone()


def _refuse_differences(what: str, replayed: Tensor, expected: Tensor) -> None:
    """Refuses results of a replay that differ from those of the pass that it was captured from.

    Raises:
        RuntimeError: names the results.
    """
    differences = (replayed - expected).abs() > _AGREES * expected.abs().amax()
    # A result that is not finite differs from itself, and says nothing.
    if bool((differences & expected.isfinite()).any()):
        raise RuntimeError(f"a replay gives other {what} than the pass that it was captured from")


class _Graphs:
    """Captures CUDA graphs that share a pool of memory, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Runs on the stream of the captures: libraries allocate their workspaces at their first call on a stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextmanager
    def capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Captures what runs in the context."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            yield graph


graphs_on: Callable[[torch.device], Any] = _Graphs


class CapturedPasses:
    """The graphs of a model by size and kind of batch; a pass that cannot be captured runs without one.

    Attributes:
        note: what the record says of them: empty before the first.
    """

    def __init__(self, model: nn.Module) -> None:
        """Starts without graphs."""
        self._model, self.note = model, ""
        self._seen: set[tuple[object, ...]] = set()
        self._graphs: dict[tuple[object, ...], CapturedPass] = {}
        self._addresses: tuple[int, ...] = ()
        self._failed = False

    def gradients(
        self, pass_of: PassOf, inputs: Tensor, targets: Tensor, *, views: int, kind: object
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
        if self._addresses != (in_memory := addresses(self._model)):
            self.clear()
            self._addresses = in_memory
        key = (inputs.shape, inputs.dtype, targets.shape, targets.dtype, views, kind)
        if key not in self._graphs:
            if key not in self._seen:
                self._seen.add(key)
                return None
            try:
                captured = CapturedPass(pass_of, inputs, targets)
            except (RuntimeError, ValueError, TypeError) as error:  # of CUDA, or of any code of a user's model
                self._failed, self.note = True, f"no CUDA graph: {str(error).splitlines()[0][:120]}"
                self._graphs.clear()
                return None
            while len(self._graphs) >= MOST_GRAPHS:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[key], self.note = captured, "CUDA graph"
        else:
            self._graphs[key] = self._graphs.pop(key)  # the last to go
        return self._graphs[key](inputs, targets)

    @staticmethod
    def on(values: Tensor) -> bool:
        """Returns whether a tensor's device has graphs."""
        return values.is_cuda

    def clear(self) -> None:
        """Frees all graphs and their memory."""
        self._graphs.clear()
        self._seen.clear()
