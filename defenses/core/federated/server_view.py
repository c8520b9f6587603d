"""Plans of local steps that a server can compute itself, because they depend on public values alone.

The server plans a round as a virtual client: the first step at the global model, which it has, and later steps with a
context that hides the local parameters and the last update. If a method reads one of these, or keeps a release in its
state, its plans are unknown to the server.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ..plan.defense import Context, Defense, State, StepPlan

BETWEEN = {
    "parameters": "the parameters between them",
    "update": "the update of the step before",
    "architecture": "the model between them",
    "one_off": "a release of its own between them",
}
"""Fields of a context that depend on earlier local steps, in words."""
_OF_CLIENTS = ("update", "one_off")


class UnknownToServer(Exception):
    """A method reads a value that a server which receives only the sum of local steps does not have."""


class _NoRows:
    """Public examples of known number, whose gradients at local parameters only the client can compute."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, chosen: Tensor) -> Tensor:
        raise UnknownToServer("public gradients at the parameters between them")

    def __getattr__(self, name: str) -> Any:
        raise UnknownToServer("public gradients at the parameters between them")


class _Blind(Context):
    """A context without some fields."""

    def __getattribute__(self, name: str) -> Any:
        if name in BETWEEN and name in object.__getattribute__(self, "__dict__")["_hidden"]:
            raise UnknownToServer(BETWEEN[name])
        return object.__getattribute__(self, name)


def blind(context: Context, hidden: Collection[str] = tuple(BETWEEN)) -> Context:
    """Returns a context that raises `UnknownToServer` where a hidden field is read.

    Args:
        context: of a local step.
        hidden: fields; with the parameters, gradients on public data are hidden, too.
    """
    # Neither the constructor nor `replace`, because both read every field.
    hiding = object.__new__(_Blind)
    vars(hiding).update(vars(context), _hidden=frozenset(hidden))
    if context.public is not None and "parameters" in hidden:
        vars(hiding)["public"] = _NoRows(context.public_size)
    return hiding


class ForeseenPlans:
    """The server's own planning from round to round."""

    def __init__(self, defense: Defense) -> None:
        """Takes the clients' defense."""
        self._defense, self._state, self._started, self.reason = defense, None, False, ""

    def state(self) -> tuple[State, bool, str]:
        """Returns the state for a checkpoint."""
        return self._state, self._started, self.reason

    def load(self, state: tuple[State, bool, str]) -> None:
        """Continues from a checkpoint."""
        self._state, self._started, self.reason = state

    def of_round(self, context: Context, steps: int) -> tuple[StepPlan, ...] | None:
        """Returns the plans of a round's local steps; None, with a `reason`, if they are not known.

        Args:
            context: context of the first local step, at the global model.
            steps: number of local steps.
        """
        if self.reason:
            return None
        try:
            return self._planned(context, steps)
        except UnknownToServer as unknown:
            self.reason = str(unknown)
            return None

    def _planned(self, context: Context, steps: int) -> tuple[StepPlan, ...]:
        if not self._started:
            self._state, self._started = self._defense.start(blind(context.at(0), _OF_CLIENTS)), True
        state: State = self._state
        plans: list[StepPlan] = []
        for number in range(steps):
            at = context.at(context.step + number)
            # A copy: what a method keeps here must not be what a client's own method keeps.
            state, plan = self._defense.plan(copy.copy(state), blind(at, BETWEEN if number else _OF_CLIENTS))
            plans.append(plan)
            ones = tuple(torch.ones(b.codec.size, device=context.device) for b in plan.blocks)
            update = torch.ones(context.dim, device=context.device)
            if self._defense.observe(state, blind(at), ones, update) is not state:
                raise UnknownToServer("the releases of the steps before")
        self._state = state
        return tuple(plans)
