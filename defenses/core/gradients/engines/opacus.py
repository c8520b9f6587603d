"""Per-example gradients by Opacus, whose `GradSampleModule` computes them layer by layer in backward hooks.

Yousefpour et al., "Opacus: User-Friendly Differential Privacy Library in PyTorch", 2021. Cases that Opacus 1.6 silently
computes wrongly are refused here, or corrected beforehand: see `Opacus`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from .hooked import Hooked, first_line, missing


class Opacus(Hooked):
    """Rows by Opacus, with its formulas for the layers that it knows, and its use of torch.func for all others.

    Corrected: a layer in two containers, which Opacus counts twice; a model in eval mode, which it does not record;
    inputs that are not contiguous. Refused: layers that are not per example (`_wrong`), calls that need more than
    Opacus records, and uses that its hooks do not observe.
    """

    name: ClassVar[str] = "opacus"

    def _attach(self, model: nn.Module) -> list[nn.Module]:
        try:
            from opacus import GradSampleModule
        except ModuleNotFoundError as error:
            raise missing(error, "opacus", self.name) from error
        engine = self

        class Watched(GradSampleModule):
            def iterate_submodules(self, module: nn.Module) -> Iterator[nn.Module]:
                # A layer that is a child of two containers would get its hooks twice, and doubled rows.
                yield from dict.fromkeys(super().iterate_submodules(module))

            def capture_activations_hook(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
                # Opacus records in training mode only, then fails in the backward pass.
                mode, module.training = module.training, True
                super().capture_activations_hook(module, *args, **kwargs)
                module.training = mode

            def capture_backprops_hook(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
                try:
                    super().capture_backprops_hook(module, *args, **kwargs)
                except (torch.OutOfMemoryError, torch.AcceleratorError):
                    raise
                except RuntimeError as error:
                    if engine._knows_uses(module):
                        raise
                    engine.refuse(
                        module, f"must be in torch.func's reach, by which Opacus does it ({first_line(error)})"
                    )

        self._formulas = GradSampleModule.GRAD_SAMPLERS
        for layer in model.modules():
            if any(p.requires_grad for p in layer.parameters(recurse=False)) and any(True for _ in layer.buffers()):
                self.refuse(layer, "must not have buffers, which Opacus takes for statistics of a batch")
        layers = list(Watched(model, loss_reduction="sum").iterate_submodules(model))
        for layer in layers:
            if why := _wrong(layer):
                self.refuse(layer, why)
            if not self._knows_uses(layer) and _shares(layer):
                self.refuse(layer, "must not hold one parameter under two names")
        return layers

    def _knows_uses(self, layer: nn.Module) -> bool:
        return type(layer) in self._formulas

    def _unanswered(self, layer: nn.Module) -> int:
        return len(getattr(layer, "activations", ()))

    def _taken(self, parameter: nn.Parameter) -> Tensor | None:
        # `_current_grad_sample` has the rows of a shared weight while Opacus awaits a use that the loss does not reach.
        rows = getattr(parameter, "grad_sample", None)
        return getattr(parameter, "_current_grad_sample", None) if rows is None else rows

    def _forget(self, layer: nn.Module) -> None:
        for attribute in ("activations", "max_batch_len"):
            vars(layer).pop(attribute, None)
        for parameter in layer.parameters():
            if parameter.requires_grad:
                vars(parameter).pop("_current_grad_sample", None)
                vars(parameter).update(grad_sample=None, _forward_counter=0)


def _wrong(layer: nn.Module) -> str | None:
    """Returns why Opacus 1.6 fails at a layer of this kind, or, mostly, silently gives wrong rows."""
    if type(layer) in (nn.Conv1d, nn.Conv2d, nn.Conv3d) and layer.padding_mode != "zeros":
        return (
            f"must have padding_mode='zeros', which is what Opacus does whatever is asked, got '{layer.padding_mode}'"
        )
    if type(layer) is nn.Embedding:
        unlike = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False}
        for setting, usual in unlike.items():
            if getattr(layer, setting) is not usual:
                return f"must have {setting}={usual}, as Opacus takes for granted, got {getattr(layer, setting)}"
    if type(layer) is nn.LayerNorm and layer.bias is None:
        return "must have a bias, which Opacus takes for granted"
    if isinstance(layer, (nn.EmbeddingBag, nn.RNNBase, nn.MultiheadAttention, nn.Bilinear)):
        return "must have one input and one output"
    if isinstance(layer, ParametrizationList):
        return "must belong to a layer that trains another parameter of its own, else Opacus does not watch that"
    return None


def _shares(layer: nn.Module) -> bool:
    places = list(layer.named_parameters(remove_duplicate=False))
    return len(places) > len(list(layer.parameters()))
