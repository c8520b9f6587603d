"""Recursion from the result of the last operation back to the input, one operation after another.

For every tensor of the network the walk collects equations from the layers that take it as input: of their output, once
that is known, and of the gradient of their weight, which needs only the derivatives k of the loss with respect to their
output. The tensor is solved for when all operations that take it have been passed. At a sum (skip connections whose
activation follows the sum), one summand is found by its own layer's gradient, and the other is the remainder; if that
gradient is not sufficient, both layers' equations are solved together with the sum. The method is R-GAP's Algorithm 1,
generalised to graphs; K = k (x) . and the recursion k <- (W^T k) * phi' are the paper's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ...targets.network import Network, Operation
from ...threat_model.attack_errors import NotApplicable, RankDeficient
from .forward import doubled
from .joint import OpenSum, joint_equations
from .layer_equations import Known, bias_misfit, of_gradient, of_result
from .linear_systems import Equations, Solution, boxed, solve, with_prior
from .maps import IdentityMap, LinearMap, Reshaped, Then
from .observed_gradients import LayerGradient
from .operations import ACTIVATIONS, LAYERS, affine, invert, of_norm
from .order import backwards, without_identities

Solver = Literal["ls", "gls", "map"]


@dataclass(frozen=True, kw_only=True)
class Belief:
    """Gaussian prior on the entries of a tensor.

    Attributes:
        centre: mean, in the tensor's shape.
        spread: standard deviation of an entry.
    """

    centre: Tensor
    spread: float


@dataclass(kw_only=True)
class Walk:
    """Walk from the last layer (head) to the input, for a candidate input of the head.

    Attributes:
        network: a network of operations that can be inverted.
        gradients: observed gradient of each layer, divided by the clip factor.
        solver: `ls`: least squares; `gls`: generalised least squares, weighted by the noise and by the errors of the
            following layer; `map`: maximum a posteriori, with a Gaussian prior on every tensor and a box around the
            input.
        allow_min_norm: whether undetermined tensors get the solution of smallest norm instead of an error.
        priors: priors of results, by name of the operation, for `map`.
        box: (low, high) of the input, for `map`.
        rounding: machine epsilon of the update, if arguments of saturated units are left out; 0 uses all.
        solutions: by layer, in the order in which they were found.
        largest_residual: largest residual of the solutions.
        slope_error: relative error of the derivatives by rounding of saturated units, over all layers.
        degraded: reasons why the result is not exact; empty if it is.
        determined: bool, in the shape of the input: entries that the equations determine; None for all.
        units: number of results of activations that were inverted.
        clamped: number of these outside of the activation's range.
    """

    network: Network
    gradients: Mapping[str, LayerGradient]
    solver: Solver = "ls"
    allow_min_norm: bool = False
    priors: Mapping[str, Belief] = field(default_factory=dict)
    box: tuple[float, float] = (0.0, 1.0)
    rounding: float = 0.0
    solutions: list[tuple[int, Solution]] = field(default_factory=list)
    largest_residual: float = 0.0
    slope_error: float = 0.0
    degraded: list[str] = field(default_factory=list)
    determined: Tensor | None = None
    units: int = 0
    clamped: int = 0

    def __post_init__(self) -> None:
        self.network = without_identities(self.network)
        self.values = doubled(self.network)
        self.by_name = {operation.name: operation for operation in self.network.operations}
        layers = [operation for operation in self.network.operations if operation.kind in LAYERS]
        self.layer = {operation.name: number for number, operation in enumerate(layers, start=1)}
        self.known: dict[str, Known] = {}
        self.slopes: dict[str, Tensor] = {}
        self.equations: dict[str, list[Equations]] = {}
        self.passed: set[str] = set()
        self.sums: dict[str, Known] = {}

    def begin(self, x: Tensor, slopes: Tensor, variance: float | None = None, unknown: Tensor | None = None) -> None:
        """Starts from the head's input and the derivatives with respect to it; unknown entries are 0."""
        (below,) = self.network.operations[-1].inputs
        shape = self.by_name[below].shape
        if unknown is not None and bool(unknown.any()):
            source = self.by_name[below]
            while source.kind == "flatten":
                source = self.by_name[source.inputs[0]]
            self._restrict(source, ~unknown.view(source.shape))
        spread = None if variance is None else torch.full(shape, variance, dtype=x.dtype, device=x.device)
        self._learn(below, Known(value=x.view(shape), variance=spread))
        self.slopes[below] = slopes.view(shape)

    def steps(self) -> list[Operation]:
        """Returns the operations that are still to be passed, in order."""
        return backwards(self.network)

    def step(self, operation: Operation) -> None:
        """Passes an operation.

        Raises:
            NotApplicable: it has no inverse.
            RankDeficient: its result is not determined.
        """
        if operation.name not in self.slopes and operation.name not in self.known:
            return  # the logits do not depend on it
        self._find(operation)
        self.passed.add(operation.name)
        if operation.kind == "input":
            return
        if operation.kind == "add":
            self._pass_sum(operation)
        elif operation.kind in ACTIVATIONS:
            self._pass_activation(operation)
        else:
            self._pass_linear(operation)

    def input(self) -> Tensor:
        """Returns the network's input, after all operations are passed."""
        (first,) = (operation.name for operation in self.network.operations if operation.kind == "input")
        if first not in self.known:
            raise NotApplicable("the logits must depend on the input")
        return self.known[first].value

    # --- known tensors

    def _find(self, operation: Operation) -> None:
        """Solves for an operation's result, unless its equations are better passed on."""
        equations = self.equations.get(operation.name, [])
        if operation.name in self.known or not equations:
            return
        linear = operation.kind not in (*ACTIVATIONS, "input", "add")
        if operation.kind == "flatten" or (linear and any(e.map.lossy for e in equations)):
            return
        self._learn(operation.name, self._solved(operation, self._equations_of(operation.name)))

    def _solved(self, operation: Operation, equations: list[Equations]) -> Known:
        solution = solve(equations, weighted=self.solver != "ls", shortest=self.allow_min_norm)
        number = equations[0].layer
        if solution.deficit > 0 or self.solver != "ls":
            # The tensor's own equations come first: if sufficient, they are exact, with fewer unknowns.
            together = self._with_branches(operation)
            solution = together if together is not None and together.deficit <= solution.deficit else solution
        if solution.deficit > 0:
            if not self.allow_min_norm:
                raise RankDeficient(
                    f"the equations of layer {number} must determine its input, and they leave {solution.deficit} of "
                    f"its {equations[0].map.unknowns} dimensions open; allow_min_norm takes the shortest input",
                    layer=number,
                    deficit=solution.deficit,
                )
            self._restrict(operation, solution.determined)
            self.degraded.append(f"layer {number}: {solution.deficit} dimensions are open")
        if not solution.converged:
            self.degraded.append(f"layer {number}: the iteration did not converge")
        x = solution.x
        if self.solver == "map" and operation.kind == "input":
            x = boxed(equations, x, *self.box)
        self.solutions.append((number, replace(solution, x=x)))
        self.largest_residual = max(self.largest_residual, solution.residual)
        variance = None if solution.variance is None else torch.full_like(x, solution.variance)
        return Known(value=x, variance=variance)

    def _restrict(self, operation: Operation, determined: Tensor | None) -> None:
        """Restricts the determined entries of the input: to `determined` if `operation` is the input, else to none."""
        (first,) = (each for each in self.network.operations if each.kind == "input")
        if operation is not first or determined is None or self.determined is not None:
            determined = torch.zeros(first.shape, dtype=torch.bool, device=next(iter(self.values.values())).device)
        self.determined = determined

    def _with_branches(self, operation: Operation) -> Solution | None:
        """Solves for a tensor by its own equations, those of the other summands, and the sum."""
        sums = []
        for name, whole in self.sums.items():
            inputs = self.by_name[name].inputs
            # If a summand is known, the other has been computed already.
            if any(each in self.known for each in inputs):
                continue
            (first, a, shift), (second, b, second_shift) = map(self._argument, inputs)
            remainder = replace(whole, value=whole.value - shift - second_shift)
            equations = self._as_equations(a, remainder, "branch", self._number(operation))
            sums.append(OpenSum(summands=((first, a), (second, b)), equations=equations))
        equations = joint_equations(operation.name, sums, self._equations_of)
        if equations is None:
            return None
        size = math.prod(operation.shape)
        solution = solve(equations, weighted=self.solver != "ls", leading=size)
        determined = None if solution.determined is None else solution.determined[:size].view(operation.shape)
        return replace(solution, x=solution.x[:size].view(operation.shape), determined=determined)

    def _argument(self, name: str) -> tuple[str, LinearMap, Tensor]:
        """Returns the tensor that a result is an affine function of, through passed operations: name, map and shift."""
        operation = self.by_name[name]
        like = next(iter(self.slopes.values()))
        if name not in self.passed or operation.kind not in (*LAYERS, "batch_norm"):
            return name, IdentityMap(operation.shape, like), like.new_zeros(operation.shape)
        linear, shift = self._linear(operation)
        argument, before, start = self._argument(operation.inputs[0])
        whole = linear if isinstance(before, IdentityMap) else Then(before, linear)
        return argument, whole, linear.apply(start[None])[0] + shift

    def _equations_of(self, name: str) -> list[Equations]:
        equations = self.equations.get(name, [])
        if self.solver == "map" and name in self.priors:
            prior = self.priors[name]
            equations = with_prior(equations, prior.centre, prior.spread)
        return equations

    def _learn(self, name: str, known: Known) -> None:
        """Records a result, and completes operations that were passed before it was known."""
        self.known[name] = known
        if name in self.passed:
            operation = self.by_name[name]
            if operation.kind in LAYERS:
                self._pose_output(operation, known)
            elif operation.kind == "batch_norm":
                self._learn(operation.inputs[0], self._before_norm(operation, known))
            else:
                raise NotApplicable(f"a summand must be a layer's output, and {operation.words or name} is none")
        # Operations that were passed before their argument was known can be computed now.
        for taker in self.network.operations:
            if name in taker.inputs and taker.name in self.passed and taker.name not in self.known:
                self._forward(taker)

    def _forward(self, operation: Operation) -> None:
        """Computes the result of an operation passed before its input was known, up to the next sum."""
        if operation.kind not in (*LAYERS, "batch_norm"):
            return
        entering = self.known[operation.inputs[0]].value
        linear, shift = self._linear(operation)
        self._learn_summand(operation.name, linear.apply(entering[None])[0] + shift)

    def _learn_summand(self, name: str, value: Tensor) -> None:
        # `_learn` is not used: equations of the summand's own would add nothing.
        self.known[name] = Known(value=value)
        for taker in self.network.operations:
            if name not in taker.inputs or taker.name not in self.passed:
                continue
            if taker.name in self.sums:
                whole, summand = self.sums[taker.name], next(n for n in taker.inputs if n != name)
                if summand not in self.known:
                    self._learn_rest(summand, replace(whole, value=whole.value - value))
            elif taker.name not in self.known:
                self._forward(taker)

    def _learn_rest(self, name: str, summand: Known) -> None:
        """Records the remainder of a sum as the other summand."""
        if name in self.passed:
            self._learn(name, summand)
            return
        # The tensor of an identity skip has other consumers, whose equations are combined with these.
        shape = tuple(summand.value.shape)
        self._pose(name, IdentityMap(shape, summand.value), summand, source="branch", layer=self._below(name))

    # --- passing operations

    def _pass_activation(self, operation: Operation) -> None:
        if operation.name not in self.known:
            raise NotApplicable(
                f"a sum must come before its activation, and {operation.words or operation.name} is a summand of "
                "unknown value"
            )
        known = self.known[operation.name]
        inverse = invert(
            operation,
            known.value,
            error=self.largest_residual if self.solver == "ls" else 0.0,
            rounding=max(self.rounding, self.slope_error) if self.rounding else 0.0,
        )
        self.units += known.value.numel()
        self.clamped += inverse.clamped
        if known.where is not None and inverse.known is not None:
            raise NotApplicable(
                f"one ReLU must not follow another directly, as {operation.words or operation.name} does"
            )
        where = known.where if inverse.known is None else inverse.known
        variance = None if known.variance is None else known.variance * inverse.slope_of_inverse.square()
        above, below = self.slopes[operation.name], self.slopes[operation.name] * inverse.slope
        if inverse.slope_error:
            self.slope_error += inverse.slope_error * float(above.norm() / below.norm().clamp(min=1e-300))
        self._add_slope(operation.inputs[0], below)
        self._learn(operation.inputs[0], Known(value=inverse.before, where=where, variance=variance))

    def _pass_sum(self, operation: Operation) -> None:
        if operation.name not in self.known or len(set(operation.inputs)) != 2:
            raise NotApplicable("a sum must be of two tensors, with an activation or a layer behind it")
        self.sums[operation.name] = self.known[operation.name]
        for name in operation.inputs:
            self._add_slope(name, self.slopes[operation.name])

    def _pass_linear(self, operation: Operation) -> None:
        linear, _ = self._linear(operation)
        below, slopes = operation.inputs[0], self.slopes[operation.name]
        known = self.known.get(operation.name)
        if operation.kind in LAYERS:
            self._pose_gradient(operation, linear, slopes)
        self._add_slope(below, linear.adjoint(slopes[None])[0])
        if known is None:
            for equations in self.equations.get(operation.name, []):
                self._pass_on(operation, linear, equations)
        elif operation.kind == "batch_norm":
            self._learn(below, self._before_norm(operation, known))
        elif operation.kind == "flatten":
            shape = self.by_name[below].shape
            self._learn(
                below,
                Known(
                    value=known.value.view(shape),
                    where=None if known.where is None else known.where.view(shape),
                    variance=None if known.variance is None else known.variance.view(shape),
                ),
            )
        else:
            self._pose_output(operation, known)

    def _pass_on(self, operation: Operation, linear: LinearMap, equations: Equations) -> None:
        """Rewrites equations of a linear operation's result as equations of its argument."""
        _, shift = self._linear(operation)
        if operation.kind == "flatten":
            own: LinearMap = Reshaped(equations.map, linear.shape_in)
        else:
            own = Then(linear, equations.map)
        target = equations.target - equations.map.apply(shift.expand(equations.map.shape_in)[None])[0]
        self.equations.setdefault(operation.inputs[0], []).append(replace(equations, map=own, target=target))

    def _pose_output(self, operation: Operation, known: Known) -> None:
        """Adds the equations W x = z - b."""
        linear, shift = self._linear(operation)
        self._pose(
            operation.inputs[0], linear, replace(known, value=known.value - shift), "output", self._number(operation)
        )

    def _pose(
        self, name: str, linear: LinearMap, known: Known, source: Literal["output", "branch"], layer: int
    ) -> None:
        self.equations.setdefault(name, []).append(self._as_equations(linear, known, source, layer))

    def _as_equations(
        self, linear: LinearMap, known: Known, source: Literal["output", "branch"], layer: int
    ) -> Equations:
        return of_result(linear, known, source=source, layer=layer, weighted=self.solver != "ls")

    def _pose_gradient(self, operation: Operation, linear: LinearMap, slopes: Tensor) -> None:
        """Adds the equations K x = g, and checks k against the bias's gradient."""
        own, weighted = self.gradients[operation.name], self.solver != "ls"
        systems = of_gradient(own, linear, slopes, layer=self._number(operation), weighted=weighted)
        if systems:
            self.equations.setdefault(operation.inputs[0], []).extend(systems)
        if not weighted:
            self.largest_residual = max(self.largest_residual, bias_misfit(own, linear, slopes))

    def _before_norm(self, operation: Operation, known: Known) -> Known:
        factors, shift = of_norm(operation, self.by_name[operation.inputs[0]].shape, self.values)
        if not bool((factors != 0).all()):
            raise NotApplicable(
                f"the weights of {operation.words or operation.name} must not be 0: they hide what comes in"
            )
        variance = None if known.variance is None else known.variance / factors.square()
        return replace(known, value=(known.value - shift) / factors, variance=variance)

    # --- small things

    def _add_slope(self, name: str, slope: Tensor) -> None:
        self.slopes[name] = self.slopes[name] + slope if name in self.slopes else slope

    def _number(self, operation: Operation) -> int:
        """Returns the number of a layer; for an operation between layers, that of the next layer."""
        after = self.network.operations[[each.name for each in self.network.operations].index(operation.name) :]
        return min((self.layer[each.name] for each in after if each.name in self.layer), default=0)

    def _below(self, name: str) -> int:
        """Returns the smallest number of the layers that take a tensor as input."""
        takers = (operation.name for operation in self.network.operations if name in operation.inputs)
        return min((self.layer[taker] for taker in takers if taker in self.layer), default=0)

    def _linear(self, operation: Operation) -> tuple[LinearMap, Tensor]:
        """Returns the linear part of an operation, and its shift."""
        return affine(operation, self.by_name[operation.inputs[0]].shape, self.values, next(iter(self.slopes.values())))
