"""Messages: what plans can move, round trips, bytes against closed forms, and what leaves the span of a round."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from leakbench.defenses.core import (
    Block,
    Context,
    Coordinates,
    Defense,
    Everything,
    Federated,
    Federation,
    Keep,
    LargestEntries,
    Layout,
    Message,
    Offset,
    Project,
    Reachable,
    Recipe,
    Round,
    RoundSchedule,
    StepPlan,
    Subspace,
    ToyRows,
    clip,
    decoded_message,
    dense_message,
    federate,
    from_arrays,
    poisson,
    reach,
    share_outside,
    to_arrays,
)
from leakbench.defenses.core.federated.messages.message import at_coordinates, coefficients
from leakbench.defenses.core.federated.messages.reach import reach_of, same
from leakbench.defenses.dp_adam import dp_adam
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.dp_snip import dp_snip
from leakbench.defenses.dpdr import dpdr
from leakbench.defenses.fed_pcdp import fed_pcdp
from leakbench.defenses.fed_prox import Proximal
from leakbench.defenses.pcdp import pcdp
from leakbench.defenses.posterior_freeze import posterior_freeze
from leakbench.defenses.random_pruning import random_pruning
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.defenses.rpdp import rpdp
from leakbench.defenses.scaffold import ControlledAverage, ControlVariates

from ....parameters import subtests
from ...federated_runs import LAYOUT, federated

DIM = 40
DRAW = torch.Generator().manual_seed(3)
DELTA = torch.randn(DIM, generator=DRAW)
KEPT = Coordinates(torch.tensor([1, 4, 7, 30]), dim=DIM)
MORE = Coordinates(torch.tensor([4, 5]), dim=DIM)
BOTH = Coordinates(torch.tensor([1, 4, 5, 7, 30]), dim=DIM)
PLANE = Subspace.of(torch.linalg.qr(torch.randn(DIM, 3, generator=DRAW)).Q)


def plan(codec, **options):
    return StepPlan(Block(codec=codec, bound=clip(1.0)), **options)


def a_round(*plans, foreseen=None, spanned=True):
    context = Context(step=0, steps=4, dim=DIM, parameters=torch.zeros(DIM))
    known: dict[str, Any] = {
        "number": 0,
        "context": context,
        "network": nn.Identity(),
        "clients": 1,
        "rates": (0.1,) * 2,
    }
    return Round(**known, plans=plans, foreseen=plans if foreseen is None else foreseen, spanned=spanned)


def test_a_plan_reaches_its_mask_its_subspace_or_everything():
    assert same(reach(plan(KEPT)), KEPT)
    assert same(reach(plan(Everything(DIM), post=Keep(KEPT))), KEPT)
    assert same(reach(plan(Everything(DIM), moves=KEPT)), KEPT)
    assert same(reach(plan(KEPT, moves=MORE)), Coordinates(torch.tensor([4]), dim=DIM))
    assert same(reach(plan(PLANE)), PLANE)
    assert same(reach(plan(Everything(DIM), post=Project(PLANE, rescale=True))), PLANE)
    for everything in (plan(Everything(DIM)), plan(KEPT, post=Offset(DELTA)), plan(PLANE, start_at=DELTA)):
        assert isinstance(reach(everything), Everything)
    two = StepPlan(*(Block(codec=codec, bound=clip(1.0), share=0.5) for codec in (KEPT, MORE)))
    assert same(reach(two), BOTH)


def test_plans_of_a_round_reach_the_union_of_masks_a_common_subspace_or_everything():
    other = Subspace.of(torch.linalg.qr(torch.randn(DIM, 3, generator=DRAW)).Q)
    assert same(reach_of([plan(KEPT), plan(MORE)]), BOTH)
    assert same(reach_of([plan(PLANE), plan(PLANE)]), PLANE)
    for mixed in ([plan(PLANE), plan(other)], [plan(KEPT), plan(PLANE)], [plan(KEPT), plan(Everything(DIM))]):
        assert isinstance(reach_of(mixed), Everything)
    assert same(PLANE, Subspace.of(PLANE.bases[0].clone())) and not same(PLANE, other)


def test_round_trips_are_exact_for_numbers_and_to_1e_5_for_coefficients():
    inside = {"values": KEPT.decode(DELTA[:4]), "coefficients": PLANE.decode(DELTA[:3])}
    for kind, delta, codec in (("dense", DELTA, None), ("values", inside["values"], KEPT)):
        message = dense_message(delta) if codec is None else at_coordinates(delta, codec.kept, public=True)
        assert message.kind == kind and torch.equal(decoded_message(message, DIM, codec), delta)
    message = coefficients(inside["coefficients"], PLANE)
    torch.testing.assert_close(decoded_message(message, DIM, PLANE), inside["coefficients"], rtol=1e-5, atol=1e-5)
    for count, kind in ((1, "indexed"), (20, "bitmap")):
        kept = torch.arange(count)
        delta = Coordinates(kept, dim=DIM).decode(DELTA[:count])
        message = at_coordinates(delta, kept, public=False)
        assert message.kind == kind and torch.equal(decoded_message(message, DIM), delta)


def test_bytes_are_those_of_the_closed_forms_and_of_what_is_really_sent():
    sizes = {
        "dense": (dense_message(DELTA), 4 * DIM),
        "values": (at_coordinates(DELTA, KEPT.kept, public=True), 4 * 4),
        "indexed": (at_coordinates(DELTA, torch.tensor([3]), public=False), 4 + 4),
        "bitmap": (at_coordinates(DELTA, KEPT.kept, public=False), 4 * 4 + math.ceil(DIM / 8)),
        "coefficients": (coefficients(DELTA, PLANE), 4 * 3),
    }
    for kind, (message, expected) in sizes.items():
        arrays = to_arrays(message)
        assert (message.kind, message.bytes) == (kind, expected)
        assert sum(part.nbytes for part in arrays.values()) == expected
    extra = Message("dense", {"values": DELTA}, {"control": DELTA})
    assert extra.bytes == 8 * DIM


def test_the_papers_network_sends_26010_or_490_numbers():
    """Closed forms 4 d and 4 sum min(k, d_l), of two convolutions and two dense layers."""
    shapes = ((16, 1, 8, 8), (16,), (32, 16, 4, 4), (32,), (32, 512), (32,), (10, 32), (10,))
    layout = Layout(tuple(f"{i}.weight" for i in range(8)), shapes)
    context = Context(step=0, steps=2, layout=layout, public=ToyRows(layout.dim), round_steps=2)
    _, by_rank = fed_pcdp(rank=100, noise_multiplier=1.0).client.plan(None, context)
    codec: Any = by_rank.blocks[0].codec
    assert dense_message(torch.zeros(layout.dim)).bytes == 104_040
    assert coefficients(torch.zeros(layout.dim), codec).bytes == 1_960
    assert sum(100 * size for size in layout.sizes if size > 100) * 4 == 10_368_000


def test_messages_as_arrays_come_back_as_they_were():
    message = at_coordinates(DELTA, KEPT.kept, public=False)
    again = from_arrays(to_arrays(Message(message.kind, message.tensors, {"control": DELTA})))
    assert again.kind == message.kind and torch.equal(again.extras["control"], DELTA)
    assert all(torch.equal(again.tensors[name], part) for name, part in message.tensors.items())
    for wrong in ({"values": np.zeros(3)}, {}, {"dense/values": np.zeros(3), "values/x": np.zeros(3)}):
        with pytest.raises(ValueError, match=r"named as by to_arrays|kind must be"):
            from_arrays(wrong)


def test_the_largest_entries_are_kept_whole_with_their_positions():
    codec, here = LargestEntries(sparsity=0.75), a_round()
    message = codec.encode(DELTA, here)
    back = codec.decode(message, here)
    assert int((back != 0).sum()) == 10 and message.bytes == 4 * 10 + 5
    assert (
        torch.equal(back[back != 0], DELTA[back != 0]) and back.abs()[back != 0].min() >= DELTA[back == 0].abs().max()
    )
    assert LargestEntries(sparsity=0.0).encode(DELTA, here).kind == "dense"
    assert LargestEntries(sparsity=0.9).encode(DELTA[:10], here).tensors["values"].numel() == 1
    with pytest.raises(ValueError, match=r"sparsity must be in \[0, 1\), got 1"):
        LargestEntries(sparsity=1.0)


def test_positions_that_the_server_foresees_are_free_and_others_are_sent():
    codec, delta = Reachable(), KEPT.decode(DELTA[:4])
    public = codec.encode(delta, a_round(plan(KEPT), plan(KEPT)))
    assert (public.kind, public.bytes) == ("values", 16)
    for foreseen in ((plan(MORE),), (plan(Everything(DIM)),)):
        own = a_round(plan(KEPT), foreseen=foreseen)
        message = codec.encode(delta, own)
        assert message.kind == "bitmap" and torch.equal(codec.decode(message, own), delta)
    unknown = replace(a_round(plan(KEPT)), foreseen=None)
    assert codec.encode(delta, unknown).kind == "bitmap"


def test_a_displacement_outside_of_its_plans_is_sent_whole_or_refused():
    inside = PLANE.decode(DELTA[:3])
    strict = Reachable(outside="refuse")
    assert strict.encode(inside, a_round(plan(PLANE))).kind == "coefficients"
    cases = {
        "of its norm lies outside": (DELTA, a_round(plan(PLANE))),
        "optimizer or client rule": (inside, a_round(plan(PLANE), spanned=False)),
        "cannot compute the directions": (inside, a_round(plan(PLANE), foreseen=(plan(Everything(DIM)),))),
        "no common subspace": (inside, a_round(plan(PLANE), plan(KEPT))),
        "moves coordinates": (DELTA, a_round(plan(KEPT))),
    }
    for words, (delta, here) in cases.items():
        assert Reachable().encode(delta, here).kind == "dense"
        with pytest.raises(ValueError, match=words):
            strict.encode(delta, here)


@dataclass(frozen=True)
class Whole:
    """Sends everything, whatever the plans are."""

    def prepare(self, context):
        return None

    def check(self, round):
        pass

    def encode(self, delta, round):
        return dense_message(delta)

    def decode(self, message, round):
        return decoded_message(message, round.context.dim)


def first_codec(record, client) -> Any:
    return record.plans[client][0].plan.blocks[0].codec


def outside_on_digits(*, interval=5, recipe=None, **parts):
    """Mean share of a displacement outside of the directions of its round's first step: digits, six clients, k 20."""
    inputs, labels = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(inputs / 16, dtype=torch.float32), torch.tensor(labels)
    shards = [(inputs[600 + 87 * i : 687 + 87 * i], labels[600 + 87 * i : 687 + 87 * i]) for i in range(6)]
    client = pcdp(rank=20, interval=interval, noise_multiplier=1.0)
    torch.manual_seed(0)
    run = federate(
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), shards,
        Federated(client=client, messages=Whole(), **parts), federation=Federation(rounds=4, local_steps=5),
        sampling=poisson(0.2), lr=0.5, public=(inputs[:600], labels[:600]), seed=1, key=1, recipe=recipe,
        keep_messages=True,
    )  # fmt: skip
    shares = [
        share_outside(message.tensors["values"], first_codec(record, client))
        for record in run.rounds[1:]
        for client, message in record.messages.items()
    ]
    return sum(shares) / len(shares)


def of_optimizer(function, **settings):
    return Recipe(optimizer=lambda parameters: function(parameters, **settings))


SPANS = {
    "plain": ({}, 0.0),
    "FedProx": ({"rule": Proximal(mu=0.1)}, 0.0),
    "momentum that starts again": ({"recipe": Recipe(momentum=0.9)}, 0.0),
    "weight decay": ({"recipe": of_optimizer(torch.optim.SGD, lr=0.5, weight_decay=0.015)}, 0.25),
    "SCAFFOLD": ({"rule": ControlVariates(), "server": ControlledAverage()}, 0.48),
    "a basis a step": ({"interval": 1}, 0.6),
    "Adam": ({"recipe": of_optimizer(torch.optim.Adam, lr=0.01)}, 0.65),
}


@pytest.mark.long
@subtests("name", list(SPANS))
def test_a_displacement_leaves_its_span_where_the_specification_says_so(name):
    settings, expected = SPANS[name]
    share = outside_on_digits(**settings)
    assert share < 2e-6 if expected == 0 else share == pytest.approx(expected, abs=0.1)


@pytest.mark.long
def test_messages_of_central_methods_follow_from_their_plans():
    """Masks are free where the server draws them too; what reads releases or local models is sent whole."""
    noisy: dict[str, Any] = {"noise_multiplier": 1.0}
    everybody = RoundSchedule(((0, 1, 2, 3),) * 3)
    sizes = LAYOUT.sizes
    expected = {
        "random_sparsification": (random_sparsification(final_sparsity=0.8, **noisy), "values"),
        "posterior_freeze": (posterior_freeze(**noisy), "values"),
        "random_pruning": (random_pruning(**noisy), "values"),
        "dp_snip": (dp_snip(**noisy), "bitmap"),
        "rpdp": (rpdp(rank=3, interval=4, **noisy), "coefficients"),
        "pcdp": (pcdp(rank=3, interval=4, **noisy), "coefficients"),
        "pcdp a step": (pcdp(rank=3, **noisy), "dense"),
        "dp_sgd": (dp_sgd(**noisy), "dense"),
        "dpdr": (dpdr(**noisy), "dense"),
        "dp_adam": (dp_adam(**noisy), "dense"),
    }
    for name, (client, kind) in expected.items():
        run = federated(Federated(client=client), schedule=everybody)
        last = run.rounds[2]
        assert {*last.kinds.values()} == {kind}, name
        if kind == "coefficients":
            assert {*last.bytes_up.values()} == {4 * sum(min(3, size) for size in sizes)}
        if kind == "dense":
            assert {*last.bytes_up.values()} == {4 * LAYOUT.dim}
        if kind == "values":
            assert max(last.bytes_up.values()) < 4 * LAYOUT.dim
        assert {*last.bytes_down.values()} == {4 * LAYOUT.dim}
        assert run.bytes_up(0) == sum(record.bytes_up[0] for record in run.rounds)


class Guided:
    """Clients drop the coordinate of the largest gradient of the step before, which has no noise."""

    def start(self, context):
        return None

    def plan(self, state, context):
        kept = torch.arange(5, context.dim)
        if context.update is not None:
            kept = kept[kept != 5 + int(context.update[5:].abs().argmax())]
        whole = torch.cat([torch.arange(5), kept])
        return state, StepPlan(Block(codec=Coordinates(whole, dim=context.dim), bound=clip(1.0)))

    def observe(self, state, context, noisy, update):
        return state


class FirstFive:
    """Releases five coordinates of an update."""

    def start(self, context):
        return None

    def plan(self, state, context):
        return state, StepPlan(Block(codec=Coordinates(torch.arange(5), dim=context.dim), bound=clip(1.0)))

    def observe(self, state, context, noisy, update):
        return state


def test_a_message_of_a_noisy_update_shows_nothing_of_the_local_steps_but_that_update():
    method = Federated(client=Defense(Guided(), 0.0), update=Defense(FirstFive(), 1.3))
    one_step = Federation(rounds=3, local_steps=1, participation=1.0)
    run = federated(method, federation=one_step)
    for record in run.rounds:
        for message in record.messages.values():
            assert (message.kind, message.bytes) == ("bitmap", 5 * 4 + 6)
            assert message.tensors["bitmap"].tolist() == [0b11111000, 0, 0, 0, 0, 0]
