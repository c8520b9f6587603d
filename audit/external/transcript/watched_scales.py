"""What is stated of a watched optimizer's noise: its multiplier, the bound on gradients, and what sums are divided by.

Of Opacus's optimizers these are read when a step is under way, because schedulers and adaptive clipping change them; of
PyTorch's, their user says them.
"""

from __future__ import annotations

import math
from typing import Any

from .format import Clipping


class StatedScales:
    """What is stated of noise, bound and divisor, at any time; of an optimizer of PyTorch, what its user says."""

    adaptive = False

    def __init__(self, words: str, clipping: Clipping, stated: dict[str, float]) -> None:
        self.words = words
        self.clipping: Clipping = clipping
        self._stated = stated

    def stated(self) -> dict[str, float]:
        """For the header."""
        return {name: self._stated[name] for name in ("noise_multiplier", "clip_norm", "expected_batch")}

    def now(self) -> dict[str, float]:
        """For a step under way."""
        return self.stated() | {"noise_std": self._stated["noise_multiplier"] * self._stated["clip_norm"]}

    def open(self) -> None:
        """Begins to listen, where that is needed."""

    def close(self) -> None:
        """Ends it."""


class _OpacusScales(StatedScales):
    """The same of Opacus's optimizers, read when a step is under way, since schedulers change them."""

    def __init__(self, optimizer: Any) -> None:
        mro = {one.__name__ for one in type(optimizer).__mro__}
        clipping: Clipping = "by_layer" if getattr(optimizer, "max_grad_norms", None) else "flat"
        super().__init__(f"Opacus {type(optimizer).__name__}", clipping, {})
        self.adaptive = "AdaClipDPOptimizer" in mro
        self._optimizer = optimizer
        self._noted: tuple[float, float] | None = None
        self._before: Any = None

    def stated(self) -> dict[str, float]:
        made = self._optimizer
        divisor = 1.0
        if made.loss_reduction == "mean":
            # Each of several processes divides by its own share, and their sum is divided by how many they are.
            divisor = float(made.expected_batch_size) * getattr(made, "world_size", 1)
        return {
            "noise_multiplier": float(made.noise_multiplier),
            "clip_norm": float(made.max_grad_norm),
            "expected_batch": divisor,
        }

    def now(self) -> dict[str, float]:
        found = self.stated()
        if self._optimizer.loss_reduction == "mean":
            # Opacus divides by the batches that were accumulated, too, while their gradients are still there.
            found["expected_batch"] *= self._optimizer.accumulated_iterations
        if not self.adaptive:
            return found | {"noise_std": found["noise_multiplier"] * found["clip_norm"]}
        if self._noted is None:
            raise ValueError("the step hook of a watched adaptive optimizer was replaced; attach it before watch")
        clip_norm, std = self._noted
        self._noted = None
        return found | {"clip_norm": clip_norm, "noise_std": std}

    def open(self) -> None:
        if self.adaptive:
            # Its bound has moved on by the time that the inner optimizer steps.
            self._before = self._optimizer.step_hook
            self._optimizer.attach_step_hook(self._note)

    def close(self) -> None:
        if self.adaptive and self._optimizer.step_hook == self._note:
            self._optimizer.step_hook = self._before

    def _note(self, made: Any) -> None:
        if self._before is not None:
            self._before(made)
        sigma, clip_norm = float(made.noise_multiplier), float(made.max_grad_norm)
        # Some of the noise multiplier pays for the count of gradients below the bound (Andrew et al. 2021, Theorem 1).
        own = (sigma**-2 - (2 * made.unclipped_num_std) ** -2) ** -0.5 if sigma > 0 else 0.0
        self._noted = clip_norm, own * clip_norm


def scales_of(
    optimizer: Any,
    noise_multiplier: float | None,
    clip_norm: float | None,
    expected_batch: float | None,
    clipping: Clipping | None,
) -> StatedScales:
    """The scales of an optimizer.

    Args:
        optimizer: of PyTorch or Opacus. (Any: Opacus is not imported.)
        noise_multiplier: of PyTorch's, noise standard deviation / clip norm.
        clip_norm: L2, in gradient units.
        expected_batch: what sums were divided by.
        clipping: in what parts gradients were clipped.

    Raises:
        ValueError: one is given for an optimizer that has its own, missing for one that has none, or out of range.
    """
    given = {"noise_multiplier": noise_multiplier, "clip_norm": clip_norm, "expected_batch": expected_batch}
    if hasattr(optimizer, "original_optimizer"):
        if known := [name for name, value in (given | {"clipping": clipping}).items() if value is not None]:
            raise ValueError(f"{known[0]} must not be given for an optimizer of Opacus, which has its own")
        return _OpacusScales(optimizer)
    stated: dict[str, float] = {}
    for name, value in given.items():
        if value is None:
            raise ValueError(f"{name} must be given for an optimizer of PyTorch, which does not know it")
        if not (math.isfinite(value) and (value > 0 or (value == 0 and name == "noise_multiplier"))):
            raise ValueError(f"{name} must be a positive finite number, got {value}")
        stated[name] = float(value)
    return StatedScales(f"PyTorch {type(optimizer).__name__}", clipping or "flat", stated)
