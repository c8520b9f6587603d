"""A digest sees everything that decides a computation, the same in every process, and refuses what it cannot see."""

import collections
import enum
import functools
import os
import random
import runpy
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from leakbench.defenses.core import (
    Block,
    Coordinates,
    CropAndFlip,
    Projected,
    PublicSubspace,
    Stateless,
    StepPlan,
    Subspace,
    clip,
    cross_entropy,
)
from leakbench.defenses.core.gradients.checks.fingerprint import UnknownContent, architecture, digest, source_digest
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.pcdp import pcdp

from .....parameters import subtests

WEIGHT = 2.0


def weighted(outputs, targets):
    return WEIGHT * cross_entropy(outputs, targets)


def closed_over(value):
    def loss(outputs, targets):
        return value * cross_entropy(outputs, targets)

    return loss


def with_default(outputs, targets, scale=1.0, *, shift=0.0):
    return scale * cross_entropy(outputs, targets) + shift


class Loss:
    factor = 1.0

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, outputs, targets):
        return self.weight * self.factor * cross_entropy(outputs, targets)


class OtherCode(Loss):
    def __call__(self, outputs, targets):
        return self.weight + cross_entropy(outputs, targets)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True, eq=False)
class Setting:
    hidden: torch.Tensor = field(repr=False)
    weight: torch.Tensor | None = field(default=None, compare=False)
    memory: list = field(default_factory=list, init=False, compare=False)


def rescaled(function, factor):
    changed = type(function)(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    changed.__kwdefaults__ = {"shift": factor}
    return changed


class Hiding:
    __slots__ = ("__value",)

    def __init__(self, value):
        self.__value = value


class Queue(collections.deque):
    """Keeps what it holds where no attribute is."""


class Number(float):
    """A number of another type."""


class Annotated(list):
    def __init__(self, note):
        super().__init__([1])
        self.note = note


def with_attribute(scale):
    def loss(outputs, targets):
        return vars(loss)["scale"] * cross_entropy(outputs, targets)

    vars(loss)["scale"] = scale
    return loss


def class_of(content):
    class Holder:
        held = content

    return Holder


def missing(value):
    return collections.defaultdict(lambda: value)


def twister(seed):
    return random.Random(seed)  # noqa: S311  a value to be told from another, no secret


WHITE = torch.zeros(2)


def lent(weight):
    @functools.wraps(torch.nn.functional.mse_loss)
    def loss(*arguments):
        return weight * torch.nn.functional.mse_loss(*arguments)

    return loss


DIFFERENT = {
    "numbers": (1, 2),
    "type of a number": (1, 1.0),
    "truth": (True, 1),
    "strings": ("a", "b"),
    "nesting": ([1, [2]], [[1], 2]),
    "lengths": ([1], [1, 1]),
    "keys": ({"a": 1}, {"b": 1}),
    "sets": ({1, 2}, {1, 3}),
    "tensors": (torch.zeros(3), torch.tensor([0.0, 0.0, 1e-30])),
    "shapes": (torch.zeros(4), torch.zeros(2, 2)),
    "dtypes": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "half": (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
    "arrays": (np.zeros(3), np.ones(3)),
    "a weighted loss": (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])),
    ),
    "a loss without weight": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0]))),
    "a setting of a module": (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss(label_smoothing=0.2)),
    "closures": (closed_over(1.0), closed_over(2.0)),
    "a tensor in a closure": (closed_over(torch.ones(2)), closed_over(torch.zeros(2))),
    "defaults": (with_default, rescaled(with_default, 0.5)),
    "partial arguments": (functools.partial(with_default, scale=2.0), functools.partial(with_default, scale=3.0)),
    "instances": (Loss(1.0), Loss(2.0)),
    "code": (Loss(1.0), OtherCode(1.0)),
    "bound methods": (Loss(1.0).__call__, Loss(2.0).__call__),
    "lambdas": (lambda x: x + 1, lambda x: x + 2),
    "inner functions": (lambda x: [y + 1 for y in x], lambda x: [y + 2 for y in x]),
    "slots": (Slotted(1), Slotted(2)),
    "private slots": (Hiding(1), Hiding(2)),
    "a setting of a module in a module": (nn.Sequential(nn.LeakyReLU(0.1)), nn.Sequential(nn.LeakyReLU(0.2))),
    "a function's attributes": (with_attribute(1.0), with_attribute(2.0)),
    "a cached function": (functools.cache(closed_over(1.0)), functools.cache(closed_over(2.0))),
    "a wrapped function": (np.vectorize(closed_over(1.0)), np.vectorize(closed_over(2.0))),
    "containers of a class": (class_of([1.0]), class_of([2.0])),
    "partial functions of a class": (class_of(functools.partial(max, 1)), class_of(functools.partial(max, 2))),
    "classes of a class": (class_of(class_of(1)), class_of(class_of(2))),
    "numbers of another type": (Number(1.0), Number(2.0)),
    "attributes of a list": (Annotated(1), Annotated(2)),
    "values of an enum": (enum.Enum("E", {"A": 1}).A, enum.Enum("E", {"A": 2}).A),  # pyright: ignore[reportAttributeAccessIssue]  as Python makes it
    "what no comparison looks at": (Setting(WHITE, WHITE), Setting(WHITE, torch.ones(2))),
    "what a missing key is": (missing(1), missing(2)),
    "enums": (Colour.RED, Colour.BLUE),
    "paths": (Path("a"), Path("b")),
    "what repr hides": (Setting(torch.zeros(2)), Setting(torch.ones(2))),
    "masks": (Coordinates(torch.tensor([0]), dim=3), Coordinates(torch.tensor([1]), dim=3)),
    "bases": (Subspace.of(torch.eye(3)[:, :1]), Subspace.of(torch.eye(3)[:, 1:2])),
    "augmentations": (CropAndFlip(padding=1), CropAndFlip(padding=2)),
    "defenses": (dp_sgd(clip_norm=1.0), dp_sgd(clip_norm=2.0)),
    "generators": (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    "functions of a library": (torch.relu, torch.tanh),
    "what a built-in method is bound to": ({0: 1.0}.get, {0: 2.0}.get),
    "a tensor's methods": (torch.ones(2).mul, torch.zeros(2).mul),
    "a number's methods": ((1.0).__mul__, (2.0).__mul__),
    "Python's generators": (twister(1), twister(2)),
    "their methods": (twister(1).random, twister(2).random),
    "functions that a library's function lends its name": (lent(1.0), lent(2.0)),
    "classes": (torch.optim.SGD, torch.optim.Adam),
}


@subtests("name", DIFFERENT)
def test_what_differs_has_another_digest(name):
    one, other = DIFFERENT[name]
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)
    assert digest([one, 1]) != digest([other, 1])


def test_a_global_that_a_function_reads_is_part_of_it(monkeypatch):
    before = digest(weighted)
    monkeypatch.setitem(globals(), "WEIGHT", 3.0)
    assert digest(weighted) != before


def test_a_class_attribute_is_part_of_its_instances(monkeypatch):
    before = digest(Loss(1.0))
    monkeypatch.setattr(Loss, "factor", 2.0)
    assert digest(Loss(1.0)) != before


def test_what_does_not_count_in_comparisons_is_memory_and_does_not_count_here():
    one, other = Setting(torch.zeros(2)), Setting(torch.zeros(2))
    other.memory.append(3)
    assert digest(one) == digest(other)
    used, fresh = pcdp(rank=3), pcdp(rank=3)
    assert isinstance(used.method, Projected) and isinstance(used.method.subspace, PublicSubspace)
    used.method.subspace._memory._last = ((), Subspace.of(torch.eye(3)))
    assert digest(used) == digest(fresh)


class Ranked:
    """Is a key in a table that its own method reads."""

    def rank(self):
        return RANKS[type(self)]


RANKS = {Ranked: 1, "others": 2}


def test_cycles_end():
    ring: list[object] = [1]
    ring.append(ring)

    def recursive(n):
        return n if n == 0 else recursive(n - 1)

    assert digest(ring) == digest(ring)
    assert digest(recursive) == digest(recursive)
    assert digest(Ranked) == digest(Ranked) and digest({Ranked, 1}) == digest({1, Ranked})


SCRIPT = """
import functools, torch, sys
sys.path.insert(0, {folder!r})
import numpy as np
from torch import nn
from leakbench.defenses.core.gradients.checks.fingerprint import digest, architecture, source_digest
from leakbench.defenses.dp_sgd import dp_sgd
CONSTANT = {{"b": 2, "a": {{3, 1, 2}}}}
def outer(scale):
    def loss(outputs, targets, *, extra=(1, 2.5, "x")):
        return scale * nn.functional.cross_entropy(outputs, targets, reduction="none") * CONSTANT["b"]
    return loss
model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
print(digest(outer(torch.arange(3)), dp_sgd(clip_norm=0.5), functools.partial(outer, 3), np.arange(4), CONSTANT,
             dict(architecture(model)), nn.CrossEntropyLoss(weight=torch.ones(3)), torch.optim.SGD), source_digest())
"""


@pytest.mark.long
def test_it_is_the_same_in_every_process(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parents[5])))
    # Python's own hashes, which order sets, are others there than here.
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        check=True,
    )
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == done.stdout
    assert done.stdout.split()[1] == source_digest()


@subtests(
    ("value", "what"),
    [
        (threading.Lock(), r"\[0\] is of type _thread.lock"),
        ({"a": [iter([1])]}, r"\[0\]\['a'\]\[0\] is of type builtins.list_iterator"),
        (closed_over(threading.Lock()), "variable 'value' is of type _thread.lock"),
        ((i for i in range(3)), "is of type builtins.generator"),
        (np.frompyfunc(abs, 1, 1), "is of type numpy.ufunc"),
        (Queue([1]), "is of type .*Queue"),
        ([1].__iter__().__next__, r"__self__ is of type builtins.list_iterator"),
    ],
)
def test_what_cannot_be_looked_into_is_refused_by_place_and_type(value, what):
    with pytest.raises(UnknownContent, match=what):
        digest(value)
    assert digest(value, hidden="pickle")


def test_an_architecture_is_all_but_the_values_that_a_checkpoint_restores():
    def of(model):
        return digest(dict(architecture(model)))

    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))
    same = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))
    assert of(model) == of(same)
    assert of(model) != of(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.4)))
    assert of(model) != of(nn.Sequential(nn.Linear(2, 3), nn.Identity()))
    assert of(model) != of(nn.Sequential(nn.Linear(2, 3).requires_grad_(False), nn.Dropout(0.5)))
    before = of(model)
    model[0].register_forward_hook(lambda module, args, output: output.tanh())
    assert of(model) != before
    first, second = nn.Module(), nn.Module()
    first.register_buffer("table", torch.zeros(2), persistent=False)
    second.register_buffer("table", torch.ones(2), persistent=False)
    assert of(first) != of(second)


def test_a_layer_that_is_called_in_two_places_makes_another_model():
    def model(*, twice):
        torch.manual_seed(0)
        layer = nn.Tanh()
        return nn.Sequential(nn.Linear(3, 3), layer, nn.Linear(3, 3), *[layer] * twice)

    assert digest(model(twice=1)) == digest(model(twice=1)) != digest(model(twice=0))
    assert dict(architecture(model(twice=1))) != dict(architecture(model(twice=0)))


def test_the_plan_that_an_author_wrote_counts():
    def method(kept):
        class Mine(Stateless):
            def plan(self, context):
                return StepPlan(Block(codec=Coordinates(torch.arange(kept), dim=context.dim), bound=clip(1.0)))

        Mine.__module__ = "mine"
        return Mine()

    assert digest(method(3)) == digest(method(3))
    assert digest(method(3)) != digest(method(4))


def test_an_object_that_answers_every_name_has_no_attributes_by_that():
    class Library:
        __slots__ = ("name",)

        def __init__(self, name):
            self.name = name

        def __getattr__(self, name):
            return object()

    assert digest(Library("a"), hidden="pickle") != digest(Library("b"), hidden="pickle")
