"""Attacks that walk: they look at, and write into, everything that can be reached from what they are handed.

They follow attributes, containers, iterators, bound methods, partial functions, storages and autograd graphs. What a
function closes over, its module's globals, frames and the garbage collector they leave alone: no program in Python can
be kept from those, and whoever opens them means to cheat.
"""

import enum
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakbench.attacks.core import (
    Access,
    Examples,
    Knows,
    MembershipScores,
    ModelAccess,
    Observation,
    Reconstruction,
    SeenTranscript,
    Target,
    attack,
    granted,
)

MOST = 20_000  # objects of one walk; a target has a few hundred
FOUND: dict[str, list[Any]] = {}
"""Name of an attack -> everything that it reached when it first ran after this was cleared."""

_ATOMS = (str, bytes, bool, int, float, complex, enum.Enum, type, types.ModuleType, types.CodeType, types.FrameType)
_ATOMS += (type(None), torch.dtype, torch.device, torch.layout)
_LEADING_ON = ("__dict__", "__self__", "__func__", "__wrapped__", "__defaults__", "__kwdefaults__")


def reached(start: Any) -> list[Any]:
    """Every object that one gets to, each once."""
    seen: dict[int, Any] = {}
    todo = [start]
    while todo and len(seen) < MOST:
        one = todo.pop()
        if isinstance(one, _ATOMS) or id(one) in seen:
            continue
        seen[id(one)] = one  # kept, so that no later object gets its id
        todo += list(_parts(one))
    return list(seen.values())


def memory(one: Any) -> bytes:
    """All bytes behind a tensor or an array, those that it does not show included; nothing for other objects."""
    if isinstance(one, Tensor) and one.layout == torch.strided:
        storage = one.untyped_storage()
        return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes())
    return one.tobytes() if isinstance(one, np.ndarray) else b""


def _parts(one: Any) -> Iterator[Any]:
    if isinstance(one, Tensor):
        yield from (one._base, one.grad_fn, one.grad if one.is_leaf else None, *vars(one).values())
        return
    if isinstance(one, types.BuiltinMethodType):
        yield one.__self__
        return
    if isinstance(one, list | tuple | set | frozenset):
        yield from one
        if type(one) in (list, tuple, set, frozenset):
            return
    elif isinstance(one, Mapping):
        yield from itertools.chain(one.keys(), one.values())
        if type(one) is dict:
            return
    elif hasattr(one, "__iter__"):
        try:
            iterator = iter(one)
            if iterator is one:
                yield one.__reduce__()  # of a list's iterator: the list
            else:
                yield iterator
            yield from itertools.islice(iterator, 1000)
        except (TypeError, ValueError, RuntimeError):
            pass
    graph = type(one).__module__ == "torch.autograd" or hasattr(one, "next_functions")
    for name in dir(one):
        if name.startswith("__") and name not in _LEADING_ON:
            continue
        if graph and not (name.startswith("_saved") or name in ("next_functions", "variable")):
            continue
        try:
            value = getattr(one, name)
        except Exception:  # noqa: S112 - withheld, or a property that does not apply
            continue
        yield value


def everything(target: Target) -> list[Any]:
    """What can be reached from a target, from the answers of its functions, and of a transcript from its steps."""
    answers: list[Any] = []
    for one in [target, *(target.steps if isinstance(target, SeenTranscript) else [])]:
        answers += _answers(one)
    if isinstance(target, SeenTranscript) and target.final is not None:
        answers += _answers(target.final)
    return reached([target, answers])


def _answers(target: Target) -> list[Any]:
    """What a target answers when it is asked about made-up inputs."""
    if not isinstance(target, Observation | ModelAccess):
        return []
    inputs = torch.rand(2, *target.input_shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found: list[Any] = [target.logits(inputs)]
    if isinstance(target, Observation):
        probabilities = torch.full((2, target.classes), 1 / target.classes).requires_grad_()
        found += [target.simulate(inputs, probabilities), target.contributions(inputs, torch.zeros(2).long())]
        found += [target.residual(target.released.clone().requires_grad_())]
        if "others_removed" not in vars(target)["_withheld"] and target.others_removed is not None:
            found.append(target.others_removed())
        if "matched_filter" not in vars(target)["_withheld"] and target.matched_filter is not None:
            found.append(target.matched_filter())
    return found


def stolen(loot: list[Any], candidates: Tensor) -> Tensor:
    """A score by what lies about: how early a candidate lies in memory that is not the candidates' own.

    Data sets have their members first, and a run has nobody else.
    """
    own = candidates.untyped_storage().data_ptr()
    elsewhere = {
        one.untyped_storage().data_ptr(): memory(one)
        for one in loot
        if isinstance(one, Tensor) and one.untyped_storage().data_ptr() != own
    }
    rows = [row.contiguous().numpy().tobytes() for row in candidates]
    places = [[found for content in elsewhere.values() if (found := content.find(row)) >= 0] for row in rows]
    return torch.tensor([-float(min(found, default=2**40)) for found in places], dtype=torch.float64)


def _robbed(name: str, target: Any) -> MembershipScores:
    candidates = granted(target.candidates)
    loot = everything(target)
    FOUND.setdefault(name, loot)
    scores = stolen(loot, candidates.inputs)
    return MembershipScores(ids=candidates.ids, scores=scores, exact=False)


@attack(access=Access.BLACK_BOX, knows=Knows.POPULATION)
def thief_black_box(target: ModelAccess, coins: torch.Generator) -> MembershipScores:
    """Looks for the candidates wherever it gets to."""
    return _robbed("thief_black_box", target)


@attack(access=Access.WHITE_BOX, knows=Knows.POPULATION)
def thief_white_box(target: ModelAccess, coins: torch.Generator) -> MembershipScores:
    """Looks for the candidates wherever it gets to."""
    return _robbed("thief_white_box", target)


@attack(access=Access.UPDATE, knows=Knows.POPULATION | Knows.DEFENSE | Knows.OTHERS)
def thief_update(target: Observation, coins: torch.Generator) -> MembershipScores:
    """Looks for the candidates wherever it gets to."""
    return _robbed("thief_update", target)


@attack(access=Access.ALL_STEPS, knows=Knows.POPULATION | Knows.DEFENSE | Knows.OTHERS)
def thief_all_steps(target: SeenTranscript, coins: torch.Generator) -> MembershipScores:
    """Looks for the candidates wherever it gets to."""
    return _robbed("thief_all_steps", target)


@attack(access=Access.UPDATE, knows=Knows.LABELS | Knows.BATCH_SIZE | Knows.POPULATION | Knows.DEFENSE)
def thief_reconstruction(target: Observation, coins: torch.Generator) -> Reconstruction:
    """Looks for the batch wherever it gets to, and returns grey."""
    FOUND.setdefault("thief_reconstruction", everything(target))
    labels = granted(target.labels)
    grey = torch.full((len(labels), *target.input_shape), (target.input_low + target.input_high) / 2)
    return Reconstruction(inputs=grey, labels=labels, objective=0.0)


def vandalised(loot: list[Any]) -> None:
    """Writes nonsense into every tensor."""
    for one in loot:
        if isinstance(one, Tensor) and one.layout == torch.strided:
            torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage()).fill_(63)  # 0.75 as float32


@attack(access=Access.WHITE_BOX, knows=Knows.POPULATION)
def vandal_white_box(target: ModelAccess, coins: torch.Generator) -> MembershipScores:
    """Writes into everything it gets to."""
    ids = granted(target.candidates).ids.clone()
    vandalised(everything(target))
    return MembershipScores(ids=ids, scores=torch.zeros(len(ids), dtype=torch.float64), exact=False)


@attack(access=Access.ALL_STEPS, knows=Knows.POPULATION | Knows.DEFENSE | Knows.OTHERS)
def vandal_all_steps(target: SeenTranscript, coins: torch.Generator) -> MembershipScores:
    """Writes into everything it gets to."""
    ids = granted(target.candidates).ids.clone()
    vandalised(everything(target))
    return MembershipScores(ids=ids, scores=torch.zeros(len(ids), dtype=torch.float64), exact=False)


@attack(access=Access.UPDATE, knows=Knows.LABELS | Knows.BATCH_SIZE | Knows.POPULATION | Knows.DEFENSE)
def vandal_reconstruction(target: Observation, coins: torch.Generator) -> Reconstruction:
    """Writes into everything it gets to, and returns grey."""
    labels = granted(target.labels).clone()
    vandalised(everything(target))
    return Reconstruction(inputs=torch.full((len(labels), *target.input_shape), 0.5), labels=labels, objective=0.0)


@attack(access=Access.UPDATE, knows=Knows.DEFENSE | Knows.OTHERS)
def forger(target: Observation, coins: torch.Generator) -> MembershipScores:
    """Makes the contributions of the candidates loud, so that what is left of members would drown the noise."""
    candidates = granted(target.candidates)
    target.contributions(candidates.inputs, candidates.labels).fill_(1e3)
    candidates.inputs.fill_(1e3)
    scores = granted(target.others_removed)().double().sum(dim=1)
    return MembershipScores(ids=candidates.ids, scores=scores, exact=False)


@attack(access=Access.UPDATE, knows=Knows.DEFENSE | Knows.OTHERS)
def comparer(target: Observation, coins: torch.Generator) -> MembershipScores:
    """Takes what is left for most candidates for the noise, which is the same for all who took no part."""
    return _compared([target], target.candidates)


@attack(access=Access.ALL_STEPS, knows=Knows.DEFENSE | Knows.OTHERS)
def comparer_all_steps(target: SeenTranscript, coins: torch.Generator) -> MembershipScores:
    """The same at every step."""
    return _compared(target.steps, target.candidates)


@attack(access=Access.ONE_OFF, knows=Knows.DEFENSE | Knows.OTHERS)
def comparer_one_off(target: SeenTranscript, coins: torch.Generator) -> MembershipScores:
    """The same of the releases beside the steps."""
    return _compared(target.one_offs, target.candidates)


def _compared(releases: Iterable[Observation], candidates: Examples | None) -> MembershipScores:
    asked = granted(candidates)
    scores = torch.zeros(len(asked), dtype=torch.float64)
    for one in releases:
        left = granted(one.others_removed)().double()
        scores += (left - left.median(dim=0).values).norm(dim=1)
    return MembershipScores(ids=asked.ids, scores=scores, exact=False)


@attack(access=Access.BLACK_BOX)
def by_id(target: ModelAccess, coins: torch.Generator) -> MembershipScores:
    """Takes those with small ids for members."""
    candidates = granted(target.candidates)
    FOUND.setdefault("by_id", [candidates.ids.clone(), candidates.inputs.clone()])
    return MembershipScores(ids=candidates.ids, scores=-candidates.ids.double(), exact=False)


@attack(access=Access.BLACK_BOX)
def by_position(target: ModelAccess, coins: torch.Generator) -> MembershipScores:
    """Takes those that come first for members."""
    candidates = granted(target.candidates)
    return MembershipScores(ids=candidates.ids, scores=-torch.arange(len(candidates)).double(), exact=False)
