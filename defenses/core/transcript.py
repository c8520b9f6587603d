"""What each observer of a training run could see, step by step.

`final` sees the last model, `iterates` every model, `updates` every noisy block as it was released: the one
that composition accounting is about. The transcript holds public things only; who took part in a step is not
in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from .defense import StepPlan
from .rows import Layout

Observer = Literal["final", "iterates", "updates"]


@dataclass(frozen=True, eq=False)
class Step:
    """One step as an observer saw it.

    Attributes:
        step: number of the step, from 0.
        parameters: the model before the step [dim].
        noise_multiplier: of the step.
        divisor: expected batch, the public constant that sums were divided by.
        sample_rate: chance that an example took part.
        plan: the plan that was executed; None for `iterates`.
        noisy: undivided noisy sum of each block; None for `iterates`.
    """

    step: int
    parameters: Float[Tensor, " dim"]
    noise_multiplier: float
    divisor: float
    sample_rate: float
    plan: StepPlan | None = None
    noisy: tuple[Tensor, ...] | None = None


@dataclass
class Transcript:
    """The steps of a run in order.

    Attributes:
        observer: how much was recorded.
        layout: names and shapes behind the flat vectors.
        steps: empty for `final`.
    """

    observer: Observer
    layout: Layout
    steps: list[Step] = field(default_factory=list)

    def record(self, step: Step) -> None:
        """Keeps what this observer sees of a step."""
        if self.observer == "updates":
            self.steps.append(step)
        elif self.observer == "iterates":
            bare = Step(step.step, step.parameters, step.noise_multiplier, step.divisor, step.sample_rate)
            self.steps.append(bare)
