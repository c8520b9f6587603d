"""Sums of bounded gradients by leakbench's engine against the reference in float64, network by network.

The reference materialises rows by `torch.func`, which shares no code with the layerwise engine. In float64 both agree
up to rounding. In float32 and TF32 an activation near a kink may pass in one and not in the other, so the limits are
those of a sum that lacks nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch import Tensor, nn

from leakbench.defenses.core import (
    Block,
    Engine,
    Everything,
    Layout,
    StepPlan,
    clip,
    cross_entropy,
    per_example_gradients,
    seeded,
)

from .contributions import LIMIT
from .networks import build, data, names
from .products import FLOAT32, TF32, engine_settings, products
from .products import names as precisions
from .rows import CheckedFigure, CheckedRow, NotMeasured, PartSettings

EXAMPLES, SMALL_EXAMPLES = 16, 4
# Relative to the length of the reference's sum.
_LIMITS = {"float64": 1e-9, FLOAT32: 1e-2, TF32: 0.1}
# Examples whose contributions are measured one at a time, at a bound far below their gradients.
_ALONE, _SHORT = 3, 0.01


def measure(settings: PartSettings) -> Iterator[CheckedRow]:
    """Yields a row for each network.

    Args:
        settings: of the part.
    """
    for network in names(small=settings.small):
        try:
            yield _row(network, settings)
        except NotMeasured as reason:
            yield CheckedRow(name=network, remarks=(str(reason),))


def _row(network: str, settings: PartSettings) -> CheckedRow:
    """Compares the sums of a network."""
    model = build(network).to(settings.device)
    inputs, labels = data(network, SMALL_EXAMPLES if settings.small else EXAMPLES, settings.device)
    exact = copy.deepcopy(model).double()
    rows = per_example_gradients(exact, cross_entropy, Layout.of(exact), inputs.double(), labels).detach()
    norms = rows.norm(dim=1)
    bound = float(norms.median())  # so that some are clipped, and some are not
    expected = (rows * (bound / norms.clamp(min=bound)).unsqueeze(1)).sum(dim=0)
    del rows
    figures: dict[str, CheckedFigure] = {}
    wrong: list[str] = []
    own = [("float64", FLOAT32, exact, inputs.double())]
    own += [(precision, precision, model, inputs) for precision in precisions(settings.device)]
    for name, precision, network_there, inputs_there in own:
        with products(precision):
            engine = _engine(network_there, precision, as_given=name == "float64")
            total = _total(engine, bound, inputs_there, labels).double()
            error = float((total - expected).norm() / expected.norm())
            figures[f"error in {name}"] = error
            if not error <= _LIMITS[name]:
                wrong.append(f"the sum in {name} is off by {error:.2g} of its length, and {_LIMITS[name]:g} is allowed")
            if name == "float64":
                continue
            longest = max(
                float(_total(engine, _SHORT, inputs_there[i : i + 1], labels[i : i + 1]).double().norm()) / _SHORT
                for i in range(_ALONE)
            )
            figures[f"longest in {name}"] = longest
            if not longest <= LIMIT:
                wrong.append(f"an example in {name} is {longest:.6f} bounds long")
    return CheckedRow(name=network, figures=figures, wrong=tuple(wrong))


def _engine(model: nn.Module, precision: str, *, as_given: bool) -> Engine:
    return Engine(model, noise=seeded(0), **({} if as_given else engine_settings(precision)))


def _total(engine: Engine, bound: float, inputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the clipped sum, without noise."""
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(bound)))
    return engine.run(plan.at(0.0), inputs, labels).total
