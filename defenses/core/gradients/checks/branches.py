"""Branches on values that all lead to the same gradients, as one on a padding mask: executed with a fixed answer.

Models ask `if mask.all():` to take a faster path without the mask. The answer depends on the whole batch, so such a
model would need a pass per example. Where every answer leads to an example's own gradient, one answer serves all
batches: the model then reads no value, and is executed as any other.

`choose.py` fixes answers only if some synthetic examples, each alone, answer each question otherwise or are not asked,
and the engine with fixed answers has the gradients that plain autograd has with the model's own.

Guarantee:
    With fixed answers no value of an example decides which operations are executed on another. This holds for any
    answers. That they do not change what is trained is shown on synthetic examples alone: a question that is asked only
    after certain answers may have an answer that no synthetic example gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...inputs import Inputs
from ..engines.interface import Unsupported
from ..reference import ModelFunction

_QUESTIONS: frozenset[Callable[..., Any]] = frozenset(
    {Tensor.__bool__, Tensor.__contains__, Tensor.is_nonzero, Tensor.equal, torch.equal, torch.is_nonzero}
)


class BranchAnswers(TorchFunctionMode):
    """Records a model's answers to its questions about values, or answers them by fixed ones.

    Attributes:
        given: the answers of this pass so far.
    """

    def __init__(self, fixed: Sequence[bool] | None = None) -> None:
        """Takes the fixed answers, in the order of the questions; None to read the values."""
        super().__init__()
        self._fixed = fixed
        self.given: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers questions, and calls all other functions unchanged."""
        asks = func in _QUESTIONS or (func is Tensor.item and args[0].dtype == torch.bool)
        if not asks or self._fixed is None:
            answer = func(*args, **(kwargs or {}))
        elif len(self.given) < len(self._fixed):
            answer = self._fixed[len(self.given)]
        else:
            raise Unsupported(f"a model must ask {len(self._fixed)} questions about values, as in its check, got more")
        if asks:
            self.given.append(answer)
        return answer


class AnsweredModel(ModelFunction):
    """A model as a function whose questions about values have fixed answers."""

    def __init__(self, model: nn.Module, function: ModelFunction, answers: Sequence[bool]) -> None:
        """Takes the model as a function, and the answers in the order of the questions."""
        super().__init__(model)
        self._function, self._answers = function, answers

    def __call__(self, at: Mapping[str, Tensor], batch: Inputs) -> Any:
        """Returns the outputs."""
        with BranchAnswers(self._answers):
            return self._function(at, batch)
