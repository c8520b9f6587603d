"""An executed step as functions of data: per-example contributions and the release that given data would produce.

All functions follow from the step's plan, so dense, masked, projected and two-part releases need no special case.
`audit/targets/observe.py` decides which of them an attacker receives; the auditor applies the same functions to private
data.
"""

from __future__ import annotations

from functools import cached_property, partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leakbench.attacks.core import InconsistentObservation, Structure
from leakbench.defenses.core import (
    Bound,
    Everything,
    Gradient,
    Layout,
    Loss,
    Step,
    Views,
    contributions,
    outputs,
    per_example_gradients,
)
from leakbench.defenses.core.gradients.candidate_gradients import CandidateGradients, candidate_gradients_of

from .structure import structure

ROWS = 2**26
"""Per-example gradient entries held at a time (256 MiB in float32), in computations that can be chunked."""

_MOST = 2**30  # limit where all rows are held at once (4 GiB in float32), as in answers with a row per candidate


class Observed:
    """An executed step as functions of data: per-example contributions and the release they would produce.

    Attributes:
        sums: [m], the undivided noisy sums of all blocks, concatenated.
        noise_std: [m], standard deviation of the noise on them.
    """

    def __init__(self, step: Step, model: nn.Module, layout: Layout, loss: Loss, views: Views | None = None) -> None:
        """Takes a step recorded with observer="updates", the only setting that keeps plans and noisy blocks.

        Args:
            step: with its plan and noisy blocks.
            model: the architecture; its trained parameters are not read.
            layout: order of the flat vectors.
            loss: per-example loss.
            views: augmentation used in this step; None without augmentation.

        Raises:
            ValueError: the transcript kept no releases.
            InconsistentObservation: a release differs in length from its plan.
        """
        if step.plan is None or step.noisy is None:
            raise ValueError(f"step {step.step} must have its releases, got none; train with observer='updates'")
        self._step, self._plan, self._model, self._layout, self._loss = step, step.plan.plan, model, layout, loss
        self._views = views
        self.sums = torch.cat(step.noisy)
        sizes = [noisy.numel() for noisy in step.noisy]
        planned = [block.codec.size for block in step.plan.blocks]
        if sizes != planned:
            raise InconsistentObservation(
                f"released must have as many numbers as the plan of step {step.step}, {planned} by block, got {sizes}"
            )
        self.noise_std = torch.cat(
            [self.sums.new_full((n,), std) for n, std in zip(sizes, step.plan.stds, strict=True)]
        )
        self._sizes = sizes
        self._by_shape: dict[tuple[int, ...], CandidateGradients | None] = {}
        # Residuals are of divided releases, so the deviation is divided too; 1 without noise to whiten by.
        self._whitening = torch.where(self.noise_std > 0, step.expected_batch / self.noise_std.clamp(min=1e-30), 1.0)

    @property
    def released(self) -> Float[Tensor, " m"]:
        """The noisy sums divided by the expected batch, as the server receives them."""
        return self.sums / self._step.expected_batch

    def rows(self, inputs: Tensor, labels: Tensor) -> Float[Tensor, "n m"]:
        """Returns per-example contributions of these data, differentiable.

        Raises:
            ValueError: the gradients would exceed the memory limit.
        """
        refuse_too_many(len(inputs), self._layout.dim)
        views = [inputs] if self._views is None else self._views(inputs, labels).unbind()

        def gradients(point: Tensor | None) -> Tensor:
            # A query such as DIFF2's also takes gradients at another point than the step's.
            at = self._step.parameters if point is None else point
            rows = partial(per_example_gradients, self._model, self._loss, self._layout, parameters=at)
            # One view of all examples at a time: rows of all views together would multiply the memory.
            total = rows(views[0], labels)
            for view in views[1:]:
                total = total + rows(view, labels)
            return total if len(views) == 1 else total / len(views)

        return torch.cat(contributions(self._plan, gradients), dim=1)

    def simulate(self, inputs: Tensor, labels: Tensor) -> Float[Tensor, " m"]:
        """Returns the release without noise that these data would give."""
        # The divisor is the public constant, not the number of inputs: a guess of another size must not be rescaled.
        return self.rows(inputs, labels).sum(dim=0) / self._step.expected_batch

    def contributions(self, inputs: Tensor, labels: Tensor) -> Float[Tensor, "n m"]:
        """Returns per-example contributions, without an autograd graph."""
        with torch.no_grad():
            return self.rows(inputs, labels)

    def without(self, inputs: Tensor, labels: Tensor) -> Float[Tensor, " m"]:
        """Returns the undivided noisy sums minus the contributions of these data, in float64."""
        remainder = self.sums.double()
        for part in torch.arange(len(inputs), device=inputs.device).split(max(1, ROWS // self._layout.dim)):
            remainder = remainder - self.contributions(inputs[part], labels[part]).sum(dim=0, dtype=torch.float64)
        return remainder

    def residual(self, predicted: Float[Tensor, "*guesses m"]) -> Float[Tensor, "*guesses m"]:
        """Returns released minus predicted, whitened: in noise units, without directions that no row can reach."""
        parts = ((self.released - predicted) * self._whitening).split(self._sizes, dim=-1)
        return torch.cat([b.codec.signal(part) for b, part in zip(self._plan.blocks, parts, strict=True)], dim=-1)

    @cached_property
    def is_dense(self) -> bool:
        """True if the step releases the bounded gradients themselves: one block, one view, identity codec."""
        block = self._plan.blocks[0]
        # Exactly these classes: a subclass may compute something else.
        plain = type(block.codec) is Everything and type(block.query) is Gradient and type(block.bound) is Bound
        return len(self._plan.blocks) == 1 and plain and self._views is None

    def simulate_many(self, inputs: Float[Tensor, "guesses b ..."], labels: Tensor) -> Float[Tensor, "guesses m"]:
        """Returns `simulate` of several batches in one pass; labels are shared by all batches or given per batch."""
        guesses, b = inputs.shape[:2]
        together, all_labels = inputs.flatten(0, 1), _of_each(labels, guesses, b)
        guess_gradients = self._factored(inputs)
        if guess_gradients is None or self._views is not None:
            rows = self.rows(together, all_labels)
        else:
            refuse_too_many(guesses * b, self._layout.dim)

            def gradients(point: Tensor | None) -> Tensor:
                if point is None:
                    return guess_gradients.rows(together, all_labels)
                return per_example_gradients(
                    self._model, self._loss, self._layout, together, all_labels, parameters=point
                )

            rows = torch.cat(contributions(self._plan, gradients), dim=1)
        return rows.view(guesses, b, -1).sum(dim=1) / self._step.expected_batch

    def compare_many(
        self, inputs: Float[Tensor, "guesses b ..."], labels: Tensor
    ) -> tuple[Float[Tensor, " guesses"], Float[Tensor, " guesses"]]:
        """Returns <W simulated, W released> and |W simulated|^2 per guess, W the whitening; for dense releases only."""
        guesses, b = inputs.shape[:2]
        guess_gradients, white = self._factored(inputs), self._whitening[0]
        if guess_gradients is None:
            simulated = self._whitening * self.simulate_many(inputs, labels)
            return simulated @ (self._whitening * self.released), simulated.square().sum(dim=1)
        bound = self._plan.blocks[0].bound
        scale = None if bound.kind == "unbounded" else lambda norms: bound.scale(norms.double(), norms.dtype)
        inner, squares = guess_gradients.compared(inputs, _of_each(labels, guesses, b), self._directions, scale)
        # One block has one noise scale, so the whitening is a scalar.
        size = white / self._step.expected_batch
        return inner * white * size, squares * size.square()

    @cached_property
    def _directions(self) -> dict[str, Tensor]:
        """The released vector, split into parameters."""
        return dict(self._layout.unflatten(self.released))

    def _factored(self, inputs: Tensor) -> CandidateGradients | None:
        """Returns the factored gradients of the model, checked at the first call; None if a layer is unsupported."""
        shape = tuple(inputs.shape[2:])
        if shape not in self._by_shape:
            self._by_shape[shape] = candidate_gradients_of(
                self._model, self._loss, self._layout, self._step.parameters, shape
            )
        return self._by_shape[shape]

    def logits(self, inputs: Tensor) -> Float[Tensor, "n classes"]:
        """Returns the model's logits at the parameters of this step."""
        return outputs(self._model, self._layout, inputs, parameters=self._step.parameters)

    def structure(self, input_shape: tuple[int, ...]) -> Structure:
        """Returns the equations of this step: copies of public values."""
        return structure(self._plan, self._model, self._layout, self._step.parameters, self._loss, input_shape)


def _of_each(labels: Tensor, guesses: int, b: int) -> Tensor:
    """Returns labels of all guesses, concatenated; labels of a single batch are repeated for every guess."""
    own = labels.ndim == 3 or (labels.ndim == 2 and labels.dtype == torch.int64)
    shared = labels if own else labels.expand(guesses, *labels.shape)
    return shared.reshape(guesses * b, *shared.shape[2:])


def refuse_too_many(examples: int, dim: int, width: int = 4) -> None:
    """Refuses per-example gradients that would exceed the memory limit.

    Args:
        examples: number of per-example gradients.
        dim: entries per gradient.
        width: bytes per entry.

    Raises:
        ValueError: too many examples; the message gives the largest number that fits.
    """
    # `_MOST` counts float32 numbers of 4 bytes.
    most = 4 * _MOST // (width * dim)
    if examples > max(most, 1):
        raise ValueError(
            f"gradients of {examples} examples in {dim} parameters take {width * examples * dim / 2**30:.1f} GiB, and "
            f"{4 * _MOST / 2**30:.0f} are allowed; set task.candidates to {max(most // 2, 1)} or fewer, or take a "
            "smaller model"
        )
