"""Per-example gradients by BackPACK: extended layers store `grad_batch` at their parameters in the backward pass.

Dangel, Kunstner & Hennig, "BackPACK: Packing more into Backprop", ICLR 2020. It supports linear layers and
convolutions; a parameter keeps the rows of a single use, so repeated use is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor, nn

from .hooked import Hooked, missing

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class BackPACK(Hooked):
    """Rows by BackPACK's `BatchGrad`.

    Refused: other layers with trained parameters; embeddings, which it computes in PyTorch's default dtype; paddings
    for which its rows are silently wrong.
    """

    name: ClassVar[str] = "backpack"

    def _attach(self, model: nn.Module) -> list[nn.Module]:
        try:
            import backpack
            from backpack.extensions import BatchGrad
        except ModuleNotFoundError as error:
            raise missing(error, "backpack", self.name) from error
        self._library, self._extension = backpack, BatchGrad
        layers = [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        owner: dict[nn.Parameter, nn.Module] = {}
        for layer in layers:
            if why := _wrong(layer):
                self.refuse(layer, why)
            for parameter in layer.parameters():
                if owner.setdefault(parameter, layer) is not layer:
                    name_of_other = self._names[owner[parameter]]
                    self.refuse(
                        layer, f"must not share a parameter with '{name_of_other}', of which BackPACK keeps one use"
                    )
            # Layer by layer, because extending a container warns of every module that BackPACK does not know.
            backpack.extend(layer)
        return layers

    @contextmanager
    def _listening(self) -> Iterator[None]:
        with self._library.backpack(self._extension()):
            yield

    def _check_call(self, layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        checked = super()._check_call(layer, arguments, named)
        if self._calls[layer] > 1:
            self.refuse(layer, "must be used once, because BackPACK keeps the rows of one use")
        return checked

    def _knows_uses(self, layer: nn.Module) -> bool:
        return True

    def _unanswered(self, layer: nn.Module) -> int:
        return int("output" in vars(layer))  # BackPACK drops it when the gradient arrives

    def _taken(self, parameter: nn.Parameter) -> Tensor | None:
        return getattr(parameter, "grad_batch", None)

    def _forget(self, layer: nn.Module) -> None:
        for attribute in ("input0", "output"):
            vars(layer).pop(attribute, None)
        for parameter in layer.parameters():
            vars(parameter).pop("grad_batch", None)


def _wrong(layer: nn.Module) -> str | None:
    """Returns why BackPACK 1.7 fails at a layer of this kind, or silently gives wrong rows."""
    if type(layer) in _CONVOLUTIONS:
        if layer.padding_mode != "zeros":
            mode = layer.padding_mode
            return f"must have padding_mode='zeros', which is what BackPACK does whatever is asked, got '{mode}'"
        if layer.padding == "same":
            return "must have its padding in numbers, because BackPACK applies 'same' to another convolution"
    elif type(layer) is not nn.Linear:
        return "must be one of Linear, Conv1d, Conv2d, Conv3d, or have nothing to train"
    return None
