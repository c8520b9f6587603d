"""Layerwise engine: clipped sums layer by layer, from a single forward and backward pass.

The backward pass computes derivatives of activations only. These and the layer's inputs determine the squared norms
(masked or not) or the coefficients along a basis that the plan requires; the bound turns norms into factors; the
weighted sum is formed once. There is no second backward pass, and a per-example gradient is materialised only if that
is cheaper (book-keeping after Bu et al., "Differentially Private Optimization on Large Model at Small Cost", ICML 2023,
with a formula for each layer chosen by `cost.py`).

Guarantee:
    The same sums as the reference's up to rounding. If float arithmetic cannot certify an example's norm (overflow,
    underflow, cancellation between inner products), its row is formed and bounded as in the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, vjp
from torch.nn.utils import parametrize

from ...inputs import Inputs, changed, tensors_in
from ...plan.defense import StepPlan
from ...plan.layout import Layout
from ...randomness.record_draws import current_keys
from ..checks.branches import AnsweredModel
from ..checks.synthetic_examples import SyntheticBatch
from ..engines.interface import PerExample, Unsupported
from ..engines.one_by_one import OneByOne
from ..numerics.full_precision import passes_in
from ..reference import Loss, ModelFunction
from ..reference_sums import added_up
from .block_sums import BatchGradients, served
from .buffers import BufferPool, Buffers
from .captured import CapturedPasses, capturable
from .factors import FactoredGradient, GradientRows, Mapped, parts
from .layers.linear import added
from .layers.opened.model import OpenedModel, Projections, projections_of
from .layers.opened.projection import Projection
from .layers.rules import refuse_settings, rule_of
from .masks import Spans
from .recorder import Leaf, Use, record
from .shared_uses import SharedUses, aligned, batch_dimension, find_uses, not_held

_SMALL = 2**18  # entries of a first layer's output, up to which the cost of a graph node (`_Begin`) is noticeable


@dataclass(frozen=True)
class _Slot:
    """Place of one or more trained parameters in a layer.

    Attributes:
        role: "weight" or "bias".
        names: the parameter itself, or the trained ones among those that it is computed from.
        keys: their names inside `source`.
        source: module that computes a parametrised parameter.
    """

    role: str
    names: tuple[str, ...]
    keys: tuple[str, ...]
    source: nn.Module | None = None

    def pulled(self, term: FactoredGradient, values: Mapping[str, Tensor]) -> FactoredGradient:
        """Returns gradients of the trained parameters, given those of the layer's weight."""
        if self.source is None:
            return term
        source, inner = self.source, {key: values[name] for key, name in zip(self.keys, self.names, strict=True)}

        def compute(at: dict[str, Tensor]) -> Tensor:
            return functional_call(source, at, ()).flatten()

        # Chain rule: a row of the parameters is Jᵀ times a row of the weight, with the parametrisation's Jacobian J.
        pull: Any = vjp(compute, inner)[1]
        return Mapped(
            term,
            lambda row: torch.cat([pull(row)[0][key].flatten() for key in self.keys]),
            sum(v.numel() for v in inner.values()),
        )


class Layerwise(PerExample):
    """The layerwise engine, for the layers of `layers/rules.py`; parameters and layers may be used repeatedly.

    Attributes:
        graphs: CUDA graphs of its passes.
    """

    name: ClassVar[str] = "layerwise"
    reduces: ClassVar[bool] = True
    last: ClassVar[bool] = True
    """True if images have their channels last in memory."""
    _uses = SharedUses()

    def __init__(self, model: nn.Module, loss: Loss, layout: Layout) -> None:
        """Finds every trained parameter in a supported layer.

        Raises:
            Unsupported: names the first parameter outside of the supported layers.
        """
        super().__init__(model, loss, layout)
        self._pool, (self._slots, bare) = BufferPool(), known_slots(model, layout, projections := projections_of(model))
        for name in bare:
            if name not in self._uses.bare and name not in self._uses.values:
                raise Unsupported(not_held(model, name))
        self._of_layers = {name for slots in self._slots.values() for slot in slots for name in slot.names}
        self.graphs = CapturedPasses(model, loss)
        self._forward = OpenedModel(model, projections) if projections else ModelFunction(model)
        self._recurrent = any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules())
        # Kernels to pass channels-last; a parametrised kernel is computed in the forward pass, in its own order.
        self._kernels = [
            slot.names[0]
            for layer, slots in self._slots.items()
            for slot in slots
            if type(layer) is nn.Conv2d and slot.role == "weight" and slot.source is None
        ]
        self._rules = {layer: rule for layer in self._slots if (rule := rule_of(layer)) is not None}
        self._layers = {module: name for name, module in model.named_modules() if module in self._slots}
        self._layers |= {layer: layer.place for layer in self._slots if isinstance(layer, Projection)}
        self._first_biases: dict[str, int] = {}  # with the number of their layers' outputs per entry
        # Smallest number of images that are arranged channels last: two for PyTorch's InstanceNorm, which has wrong
        # derivatives for a single image (2.15, CPU); never without convolutions.
        kinds = {kind for module in model.modules() for kind in type(module).__mro__}
        self._least = (2 if nn.InstanceNorm2d in kinds else 1) if nn.Conv2d in kinds else sys.maxsize

    def each(self, inputs: Inputs, targets: Tensor, point: Float[Tensor, " dim"] | None) -> Float[Tensor, "rows dim"]:
        """Rows from the factors of a pass over the batch."""
        with torch.no_grad():
            return self._gradients(inputs, targets, point, views=1).rows()

    def rows(
        self, inputs: Inputs, targets: Tensor, *, point: Float[Tensor, " dim"] | None = None, views: int = 1
    ) -> Float[Tensor, "rows dim"]:
        """Rows equal to the reference's; the views of an example are averaged before a row is formed."""
        with torch.no_grad():
            return self._gradients(inputs, targets, point, views).rows()

    def batch(self, inputs: Inputs, targets: Tensor) -> BatchGradients:
        """Factors of a pass over the batch."""
        with torch.no_grad():
            return self._gradients(inputs, targets, None, views=1)

    def losses(
        self, inputs: Inputs, targets: Tensor, *, point: Float[Tensor, " dim"] | None = None, views: int = 1
    ) -> Float[Tensor, "rows 1"]:
        """Losses as the reference's; example by example for recurrent layers, which PyTorch's vmap does not run."""
        reference = OneByOne(self.model, self.loss, self.layout) if self._recurrent else super()
        return reference.losses(inputs, targets, point=point, views=views)

    def sums(
        self, plan: StepPlan, inputs: Inputs, targets: Tensor, *, views: int = 1, counted: int | None = None
    ) -> tuple[Tensor, ...]:
        """Clipped sums without rows, for plans of supported queries and codecs; from rows for others."""
        if not all(served(block) for block in plan.blocks):
            return self._by_rows(plan, inputs, targets, views, counted)
        with torch.no_grad(), self._pool.lend() as buffers:
            # Unbounded blocks need the sum alone, which the vendor's kernels compute without rows.
            bounded = any(block.bound.kind != "unbounded" for block in plan.blocks)
            gradients = (
                self._captured(plan, inputs, targets, views) if self.captures and self.graphs.on(inputs) else None
            )
            if gradients is None:
                gradients = self._gradients(inputs, targets, None, views, buffers if bounded else None)
            if counted is not None:
                gradients.counted = counted
            return tuple(gradients.clipped_sum(block) for block in plan.blocks)

    def _captured(self, plan: StepPlan, inputs: Inputs, targets: Tensor, views: int) -> BatchGradients | None:
        """Returns the gradients of a batch from a CUDA graph; None if there is none for it."""
        if current_keys() is not None or not capturable(plan):  # keyed draws are of one batch
            return None

        def pass_of(entries: Inputs, their_targets: Tensor) -> BatchGradients:
            return self._gradients(entries, their_targets, None, views, _fresh)

        return self.graphs.gradients(pass_of, inputs, targets, views=views, kind=passes_in())

    def _by_rows(
        self, plan: StepPlan, inputs: Inputs, targets: Tensor, views: int, counted: int | None
    ) -> tuple[Tensor, ...]:
        """Sums from chunks of rows: passes over all rows are memory-bound, and fresh pages are cleared first."""
        with torch.no_grad(), self._pool.lend() as buffers:

            @cache  # by point: a pass of the batch for all rows there
            def gradients(point: Tensor | None) -> BatchGradients:
                return self._gradients(inputs, targets, point, views, buffers)

            @cache
            def losses(point: Tensor | None) -> Tensor:
                return self.losses(inputs, targets, point=point, views=views)

            like, sums = self._forward.value(self.layout.names[0]), None
            each = 4 * self.layout.dim * like.element_size()  # rows, and their encoded and bounded copies
            for part in parts(counted or targets.shape[0] // views, each, like, wide=True):
                part_sums = added_up(
                    plan,
                    lambda point, part=part: gradients(point).rows(part),
                    lambda point, part=part: losses(point)[part],
                )
                sums = part_sums if sums is None else tuple(a + b for a, b in zip(sums, part_sums, strict=True))
        assert sums is not None  # noqa: S101  there is at least one example
        return sums

    def matched(
        self, plan: StepPlan, directions: Sequence[Tensor], inputs: Inputs, targets: Tensor, *, views: int = 1
    ) -> list[tuple[Tensor, Tensor]]:
        """Inner products and norms from factors, for plans of supported queries and codecs; from rows for others."""
        if not all(served(block) for block in plan.blocks):
            return super().matched(plan, directions, inputs, targets, views=views)
        with torch.no_grad(), self._pool.lend() as buffers:
            gradients = self._gradients(inputs, targets, None, views, buffers)
            return [gradients.matched(block, d) for block, d in zip(plan.blocks, directions, strict=True)]

    @property
    def remark(self) -> str:
        """Says whether passes are replayed as CUDA graphs; empty before."""
        return self.graphs.note

    def release_memory(self) -> None:
        """Frees the buffers of kept rows, and CUDA graphs with their memory."""
        self._pool.clear()
        self.graphs.clear()

    def bytes_per_entry(self, activations: int, itemsize: int) -> int:
        """Estimates four times the activations: outputs, tensors saved by autograd, derivatives, and results."""
        return 4 * activations * itemsize

    def _gradients(
        self,
        inputs: Inputs,
        targets: Tensor,
        point: Tensor | None,
        views: int,
        buffers: Buffers | None = None,
    ) -> BatchGradients:
        """Returns factored gradients of every trained parameter that the loss depends on."""
        trained = self._values() if point is None else self.layout.unflatten(point.detach())
        size = targets.shape[0]
        inputs = self._arranged(inputs, size)
        values = {**trained, **self._arranged_weights(trained, inputs, size)}
        examples, forward = size // views, self._forward
        spans = dict(zip(self.layout.names, self.layout.slices, strict=True))
        terms_by_names: dict[tuple[str, ...], list[FactoredGradient]] = {}

        def take(use: Use) -> None:
            # `layers/rules.py` assumes that an example's entries are adjacent. A model with time first, [t, n, ...],
            # may pass here if t is a multiple of n, and fails the check against the reference (`choose.py`).
            if use.inputs.shape[0] % examples:
                raise Unsupported(
                    f"layer '{use.name}' must have the batch as its first dimension, got {use.inputs.shape[0]} entries "
                    f"for {examples} examples"
                )
            _refuse_rounding(use, values[self.layout.names[0]].dtype)
            if self.last and _misread(use):
                raise Unsupported(f"layer '{use.name}' has one channel, strides and one column, with channels last")
            # Mean over an example's views: gradients are linear in the signals, so a single division here is enough.
            mine = use if views == 1 else use._replace(signals=use.signals / views)
            terms = self._rules[use.layer](mine, use.layer, examples)
            for slot in self._slots[use.layer]:
                # By parameter, not by layer: gradients of a shared weight are added up before their norm is computed.
                terms_by_names.setdefault(slot.names, []).append(slot.pulled(terms[slot.role], values))

        # The graph of a small pass begins at the biases of the first layers, whose derivatives are not requested: any
        # other beginning of the graph takes a percent of a step.
        starting = {
            name: values[name].detach().requires_grad_()
            for name, numbers in self._first_biases.items()
            if name not in self._uses.values and numbers * size <= _SMALL
        }
        met = {**values, **starting}
        leaves: list[Leaf] = []
        for name, alignment in self._uses.bare.items():
            leaf = met[name] = aligned(values[name], alignment, size).detach().requires_grad_()
            leaves.append((leaf, partial(_enter_rows, terms_by_names, name, views, batch_dimension(alignment))))
        if (shared := self._uses.begun(size)) is not None:
            for name in self._uses.values:
                receive = partial(_enter_rows, terms_by_names, name, views, 0)
                met[name] = shared.parameter(values[name], receive, of_layer=name in self._of_layers)
        record(
            lambda batch: forward(met, batch),
            self._layers,
            inputs,
            targets,
            self.loss,
            take,
            buffers,
            self._begins,
            leaves,
            shared,
        )
        return BatchGradients(
            terms=tuple(_of_parameters(terms_by_names, spans, examples)),
            dim=self.layout.dim,
            examples=examples,
            like=values[self.layout.names[0]],
            counted=examples,
        )

    def _begins(self, layer: nn.Module, output: Tensor) -> None:
        """Records the bias of a layer whose input needs no gradient: the graphs of later passes begin at it."""
        if not (output.is_cpu and output.dim() and output.numel()):
            return
        for slot in self._slots[layer]:
            if slot.role == "bias" and slot.source is None:
                self._first_biases[slot.names[0]] = output.numel() // output.shape[0]

    def _values(self) -> dict[str, Tensor]:
        return {name: self._forward.value(name).detach().contiguous() for name in self.layout.names}

    def _arranged(self, inputs: Inputs, size: int) -> Inputs:
        return changed(inputs, channels_last) if size >= self._least else inputs.contiguous()

    def _arranged_weights(self, trained: Mapping[str, Tensor], inputs: Inputs, size: int) -> dict[str, Tensor]:
        """Returns channels-last weights of convolutions: converted once, for the forward and the backward pass."""
        if size < self._least or all(values.dim() != 4 for values in tensors_in(inputs)):
            return {}
        weights = {name: trained[name] for name in self._kernels}
        # With one input channel both orders coincide.
        return {
            name: weight.contiguous(memory_format=torch.channels_last)
            for name, weight in weights.items()
            if weight.shape[1] > 1
        }


class InOrder(Layerwise):
    """`Layerwise` in contiguous order, for models that call `.view` on a convolution's output, or are `_misread`."""

    last: ClassVar[bool] = False

    def _arranged(self, inputs: Inputs, size: int) -> Inputs:
        return inputs.contiguous()

    def _arranged_weights(self, trained: Mapping[str, Tensor], inputs: Inputs, size: int) -> dict[str, Tensor]:
        return {}


class Expanded(InOrder):
    """`InOrder` for models that use parameters of no known layer, or a layer's output, once for the whole batch.

    A copy of each takes its place for every entry (`shared_uses.py`). Branches on values may have fixed answers
    (`branches.py`).
    """

    def __init__(
        self, model: nn.Module, loss: Loss, layout: Layout, uses: SharedUses, answers: Sequence[bool] = ()
    ) -> None:
        """Takes what was found out about a model that differs from this one in its trained weights at most.

        Args:
            model: the network.
            loss: per-example loss.
            layout: the trained parameters and their order.
            uses: the model's shared uses.
            answers: fixed answers to its questions about values.
        """
        self._uses, self._answers = uses, answers
        super().__init__(model, loss, layout)
        if answers:
            self._forward = AnsweredModel(model, self._forward, answers)

    @classmethod
    def informed(
        cls, model: nn.Module, loss: Loss, layout: Layout, examples: SyntheticBatch, answers: Sequence[bool] = ()
    ) -> partial[Expanded]:
        """Returns the engine with a model's shared uses, from passes over synthetic examples in float64 (`find_uses`).

        Raises:
            Unsupported: if copies cannot take the place of a parameter.
        """
        projections = projections_of(model)
        slots, bare = known_slots(model, layout, projections)
        forward = OpenedModel(model, projections) if projections else ModelFunction(model)
        if answers:
            forward = AnsweredModel(model, forward, answers)
        of_layers = [name for name in layout.names if name not in bare]
        uses = find_uses(model, forward, loss, list(slots), bare, of_layers, examples)
        return partial(cls, uses=uses, answers=tuple(answers))

    def losses(
        self, inputs: Inputs, targets: Tensor, *, point: Float[Tensor, " dim"] | None = None, views: int = 1
    ) -> Float[Tensor, "rows 1"]:
        """Losses as the reference's; example by example for a model with branches on values."""
        reference = OneByOne(self.model, self.loss, self.layout) if self._answers else super()
        return reference.losses(inputs, targets, point=point, views=views)

    def bytes_per_entry(self, activations: int, itemsize: int) -> int:
        """Adds rows of parameters that no layer holds."""
        sizes = dict(zip(self.layout.names, self.layout.sizes, strict=True))
        rows = sum(sizes[name] for name in (*self._uses.bare, *self._uses.values))
        return super().bytes_per_entry(activations + rows + self._uses.numbers, itemsize)


def _enter_rows(
    terms: dict[tuple[str, ...], list[FactoredGradient]], name: str, views: int, over: int, signals: Tensor | None
) -> None:
    """Enters the derivative by a parameter's copies, one for each entry, as its rows: means over an example's views."""
    if signals is not None:
        rows = signals.movedim(over, 0).flatten(1) if signals.dim() > 1 else signals.unsqueeze(1)
        mean = rows if views == 1 else rows.unflatten(0, (-1, views)).mean(dim=1)
        terms.setdefault((name,), []).append(GradientRows(mean))


def _fresh(_layer: nn.Module, numbers: int, like: Tensor) -> Tensor:
    """Returns memory of a CUDA graph's own for rows that are kept."""
    return like.new_empty(numbers)


def _of_parameters(
    terms_by_names: Mapping[tuple[str, ...], list[FactoredGradient]],
    spans: Mapping[str, tuple[int, int]],
    examples: int,
) -> Iterator[tuple[Spans, FactoredGradient]]:
    """Yields each parameter's gradient with its place in the flat gradient: the sum of its terms.

    Raises:
        Unsupported: a term is not of the parameter's size, or not of each example.
    """
    for names, terms in terms_by_names.items():
        own = tuple(spans[name] for name in names)
        # Kernels write at a parameter's place as many numbers as a term has: PyTorch allows a single number as the
        # bias of many outputs.
        size = sum(stop - start for start, stop in own)
        if any((each.size, each.examples) != (size, examples) for each in terms):
            raise Unsupported(
                f"parameter '{names[0]}' must have a gradient of its own {size} numbers for each of {examples} "
                f"examples, got {terms[0].size} for {terms[0].examples}"
            )
        yield own, added(terms)


def _refuse_rounding(use: Use, dtype: torch.dtype) -> None:
    """Refuses a layer that computes in another precision than its parameters', as under a model's own autocast.

    Raises:
        Unsupported: names the layer and the precisions.
    """
    met = (use.signals.dtype, use.inputs.dtype)
    if met[0] != dtype or (use.inputs.is_floating_point() and met[1] != dtype):
        raise Unsupported(f"layer '{use.name}' must compute in {dtype} as its parameters, got {met[1]} -> {met[0]}")


def _misread(use: Use) -> bool:
    """Returns whether PyTorch's CPU kernel reads past a layer's channels-last inputs: in float32 alone (2.14).

    The check against the reference runs in float64, and does not detect it.
    """
    layer = use.layer
    if not isinstance(layer, nn.Conv2d) or layer.in_channels > 1 or layer.stride[1] == 1:
        return False
    shape = use.signals.shape
    return len(shape) == 4 and shape[3] == 1 < shape[2]


def channels_last(inputs: Tensor) -> Tensor:
    """Returns images with their channels last in memory; other inputs in contiguous order.

    With one channel both orders coincide, and torch reads the strides as contiguous; these strides mark channels last.
    A single image is converted too: in PyTorch's GroupNorm a pixel of 1e30 gives NaN with channels last, and none in
    contiguous order, so that an example would count as zero in a batch and not alone, when the others are removed.
    """
    if inputs.dim() != 4 or not inputs.is_floating_point():
        return inputs.contiguous()
    _, channels, height, width = inputs.shape
    if channels == 1:
        return inputs.contiguous().as_strided(inputs.shape, (height * width, 1, width, 1))
    return inputs.contiguous(memory_format=torch.channels_last)


def known_slots(
    model: nn.Module, layout: Layout, projections: Projections
) -> tuple[dict[nn.Module, list[_Slot]], list[str]]:
    """Returns supported layers with trained parameters and their roles, and parameters that none of them holds.

    A shared parameter is in several layers.
    """
    # By identity: a tied weight has a single name in the layout, wherever it occurs.
    trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    names = {module: name for name, module in model.named_modules()}
    names |= {layer: layer.place for layers in projections.values() for layer in layers}
    slots: dict[nn.Module, list[_Slot]] = {}
    missing = set(layout.names)
    for layer, place in names.items():
        if rule_of(layer) is None:
            continue
        for role in ("weight", "bias"):
            if parametrize.is_parametrized(layer, role):
                source = layer.get_submodule(f"parametrizations.{role}")
                inner = {f"{key}": trained[id(p)] for key, p in source.named_parameters() if id(p) in trained}
            else:
                own, source = getattr(layer, role, None), None
                inner = {role: trained[id(own)]} if id(own) in trained else {}
            if inner:
                refuse_settings(layer, place)
                slots.setdefault(layer, []).append(_Slot(role, tuple(inner.values()), tuple(inner), source))
                missing -= set(inner.values())
    # Squares of terms add up as |a|² + |b|², which is |a + b|² only if no parameter is in two of them.
    _refuse_overlaps({slot.names for layer_slots in slots.values() for slot in layer_slots})
    return slots, [name for name in layout.names if name in missing]


def _refuse_overlaps(groups: set[tuple[str, ...]]) -> None:
    names_so_far: set[str] = set()
    for names in groups:
        for name in names:
            if name in names_so_far:
                raise Unsupported(f"parameter '{name}' must be shared either as it is or with all it is computed with")
            names_so_far.add(name)
