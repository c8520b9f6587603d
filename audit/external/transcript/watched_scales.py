"""Stated scales of a watched optimizer: noise multiplier, clip norm, and divisor of the sums.

For Opacus's optimizers they are read during a step, because schedulers and adaptive clipping change them; for
PyTorch's, the user states them.
"""

from __future__ import annotations

import math
from typing import Any

from .format import Clipping


class StatedScales:
    """Stated noise, bound and divisor of a step; for a PyTorch optimizer, as the user states them."""

    adaptive = False

    def __init__(self, words: str, clipping: Clipping, stated: dict[str, float]) -> None:
        self.words = words
        self.clipping: Clipping = clipping
        self._stated = stated

    def stated(self) -> dict[str, float]:
        """Returns the scales for the header."""
        return {name: self._stated[name] for name in ("noise_multiplier", "clip_norm", "expected_batch")}

    def now(self) -> dict[str, float]:
        """Returns the scales for the current step."""
        return self.stated() | {"noise_std": self._stated["noise_multiplier"] * self._stated["clip_norm"]}

    def open(self) -> None:
        """Attaches hooks, if they are needed."""

    def close(self) -> None:
        """Removes the hooks."""


class _OpacusScales(StatedScales):
    """Scales of Opacus's optimizers, read during a step, since schedulers change them."""

    def __init__(self, optimizer: Any) -> None:
        mro = {base.__name__ for base in type(optimizer).__mro__}
        clipping: Clipping = "by_layer" if getattr(optimizer, "max_grad_norms", None) else "flat"
        super().__init__(f"Opacus {type(optimizer).__name__}", clipping, {})
        self.adaptive = "AdaClipDPOptimizer" in mro
        self._optimizer = optimizer
        self._noted: tuple[float, float] | None = None
        self._before: Any = None

    def stated(self) -> dict[str, float]:
        optimizer = self._optimizer
        divisor = 1.0
        if optimizer.loss_reduction == "mean":
            # Each process divides by its own share, and the sum over processes by their number.
            divisor = float(optimizer.expected_batch_size) * getattr(optimizer, "world_size", 1)
        return {
            "noise_multiplier": float(optimizer.noise_multiplier),
            "clip_norm": float(optimizer.max_grad_norm),
            "expected_batch": divisor,
        }

    def now(self) -> dict[str, float]:
        scales = self.stated()
        if self._optimizer.loss_reduction == "mean":
            # Opacus also divides by the number of accumulated batches, whose gradients are still there.
            scales["expected_batch"] *= self._optimizer.accumulated_iterations
        if not self.adaptive:
            return scales | {"noise_std": scales["noise_multiplier"] * scales["clip_norm"]}
        if self._noted is None:
            raise ValueError("the step hook of a watched adaptive optimizer was replaced; attach it before watch")
        clip_norm, std = self._noted
        self._noted = None
        return scales | {"clip_norm": clip_norm, "noise_std": std}

    def open(self) -> None:
        if self.adaptive:
            # The adaptive bound has already changed when the inner optimizer steps.
            self._before = self._optimizer.step_hook
            self._optimizer.attach_step_hook(self._note)

    def close(self) -> None:
        if self.adaptive and self._optimizer.step_hook == self._note:
            self._optimizer.step_hook = self._before

    def _note(self, optimizer: Any) -> None:
        if self._before is not None:
            self._before(optimizer)
        sigma, clip_norm = float(optimizer.noise_multiplier), float(optimizer.max_grad_norm)
        # Part of the noise multiplier pays for the count of gradients below the bound (Andrew et al. 2021, Theorem 1).
        own = (sigma**-2 - (2 * optimizer.unclipped_num_std) ** -2) ** -0.5 if sigma > 0 else 0.0
        self._noted = clip_norm, own * clip_norm


def scales_of(
    optimizer: Any,
    noise_multiplier: float | None,
    clip_norm: float | None,
    expected_batch: float | None,
    clipping: Clipping | None,
) -> StatedScales:
    """Returns the source of an optimizer's scales: the optimizer itself for Opacus, the arguments for PyTorch.

    Args:
        optimizer: of PyTorch or Opacus. (Any: Opacus is not imported.)
        noise_multiplier: noise standard deviation / clip norm; for PyTorch's optimizers, as are the next two.
        clip_norm: L2, in gradient units.
        expected_batch: divisor of the sums.
        clipping: parts in which gradients were clipped.

    Raises:
        ValueError: a scale is given for an optimizer with its own, missing for one without, or out of range.
    """
    by_name = {"noise_multiplier": noise_multiplier, "clip_norm": clip_norm, "expected_batch": expected_batch}
    if hasattr(optimizer, "original_optimizer"):
        if known := [name for name, value in (by_name | {"clipping": clipping}).items() if value is not None]:
            raise ValueError(f"{known[0]} must not be given for an optimizer of Opacus, which has its own")
        return _OpacusScales(optimizer)
    stated: dict[str, float] = {}
    for name, value in by_name.items():
        if value is None:
            raise ValueError(f"{name} must be given for an optimizer of PyTorch, which does not know it")
        if not (math.isfinite(value) and (value > 0 or (value == 0 and name == "noise_multiplier"))):
            raise ValueError(f"{name} must be a positive finite number, got {value}")
        stated[name] = float(value)
    return StatedScales(f"PyTorch {type(optimizer).__name__}", clipping or "flat", stated)
