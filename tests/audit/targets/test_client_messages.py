"""Messages of clients: the sums that they show against the recorded steps, remainders against the noise, narrowing."""

import dataclasses
from functools import cache

import pytest
import torch

from leakbench.attacks.core import Access, AccessError, Knows, NotApplicable, Requirements, granted, narrow
from leakbench.attacks.core.membership.message_evidence import log_ratio
from leakbench.audit.plan.expand import plan
from leakbench.audit.subjects.client_attacks import _messages
from leakbench.audit.subjects.federated_run import ClientsRun
from leakbench.audit.subjects.outcome import join, pick
from leakbench.audit.suite import suite as suites
from leakbench.audit.targets.candidates import Candidates
from leakbench.audit.targets.client_messages import local_weights, sums_of
from leakbench.defenses.core import Recipe

from ...parameters import subtests

SUITE = """
name = "toy"
seeds = [0]
task = { data = "digits", model = { name = "mlp", hidden = 8 }, private = 60, batch = 5, lr = 0.1 }
budget = { noise_multiplier = 2.0, delta = 1e-5 }
federated = { clients = 3, split = "iid", rounds = 4, local_steps = 4, participation = 0.7 }
controls = false
defense = [{ name = "fed_avg" }]
attack = [{ name = "message_likelihood" }]
"""
INFORMED = Knows.OTHERS | Knows.DEFENSE
METHODS = {
    "fed_avg": '{ name = "fed_avg" }',
    "momentum": '{ name = "dp_sgd", momentum = 0.5 }',
    "fed_prox": '{ name = "fed_prox", mu = 0.4 }',
    "scaffold": '{ name = "scaffold" }',
    "stored": '{ name = "scaffold", stored = true }',
    "moon": '{ name = "moon" }',
    "auto_s": '{ name = "auto_s" }',
    "posterior_freeze": '{ name = "posterior_freeze" }',
    "random_freeze": '{ name = "random_freeze" }',
    "random_sparsification": '{ name = "random_sparsification" }',
    "fed_pdp": '{ name = "fed_pdp", rank = 40, auxiliary_size = 50 }',
    "fed_pcdp": '{ name = "fed_pcdp", rank = 40, auxiliary_size = 50 }',
    "pfa": '{ name = "pfa", rank = 40, auxiliary_size = 50 }',
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs that kept messages and steps of the attacked client, by name of the method."""
    folder = tmp_path_factory.mktemp("messages")

    @cache
    def of(name="fed_avg", old="", new="", lr=0.1) -> ClientsRun:
        path = folder / "toy.toml"
        text = SUITE.replace('{ name = "fed_avg" }', METHODS.get(name, name)).replace("lr = 0.1", f"lr = {lr}")
        path.write_text(text.replace(old, new) if old else text, encoding="utf-8")
        (job,) = plan(suites.load(path)).jobs
        model = ClientsRun(job.cells[0].request.of_training(), torch.device("cpu"), {"messages", "local steps"})
        _ = model.run
        return model

    return of


def target_of(model: ClientsRun, knows: Knows = INFORMED):
    client = model.attacked
    own = pick(model.uninserted, model.shards[client])
    outside = pick(model.test, torch.arange(10))
    candidates = Candidates.draw(join(own, outside), 5)
    return _messages(model, client, candidates, knows).target(), candidates, own


def noisy_sums(model: ClientsRun, reply, sums) -> torch.Tensor:
    """The weighted sum of the recorded noisy sums, as the message shows them."""
    first = reply.round.context.step
    steps = {step.step: step for step in model.watched.steps}
    total = torch.zeros(len(reply.displacement), dtype=torch.float64)
    for number, weight in enumerate(sums.weights):
        (released,) = granted(steps[first + number].noisy)
        total += weight * sums.lifted(released.unsqueeze(0)).squeeze(0).double()
    return total


@pytest.mark.long
@subtests("name", list(METHODS))
def test_a_message_shows_the_weighted_sum_of_the_recorded_noisy_sums(runs, name):
    model = runs(name)
    messages = list(target_of(model)[0].messages)
    replies = model.watched.replies[model.attacked]
    data = model.private_side(model.attacked)
    assert len(messages) == len(replies) == len(model.schedule.rounds_of(model.attacked))
    momentum = model.request.training.momentum
    for message, reply in zip(messages, replies, strict=True):
        sums = sums_of(reply, model.run.method, Recipe(momentum=momentum), data.expected_batch)
        assert not isinstance(sums, str)
        expected = noisy_sums(model, reply, sums)
        # Float32 rounding of local models of size 1, in units of a step of rate / batch.
        assert (granted(message.sums).double() - expected).norm() < 1e-4 * expected.norm()
        assert message.round == reply.round.number and message.weights == sums.weights


@pytest.mark.long
@subtests("name", list(METHODS))
def test_what_others_leave_of_a_non_member_is_noise_of_the_stated_size(runs, name):
    model = runs(name)
    target, candidates, own = target_of(model)
    outside = (~torch.isin(candidates.ids, own.ids)).nonzero().flatten()
    total = count = 0.0
    for message in target.messages:
        rows = granted(message.others_removed)(slice(0, len(candidates)))[outside]
        assert torch.equal(rows, rows[:1].expand_as(rows))  # the same noise, without any candidate's contribution
        std = granted(message.noise_std) * sum(w**2 for w in message.weights) ** 0.5
        white = rows[0] / std
        shape = model.watched.replies[model.attacked][0].message.tensors["values"].numel()
        total, count = total + float(white.square().sum()), count + min(shape, int((white != 0).sum()))
    # A mean of `count` squares of standard normals; std ratios of 2/3 and 3/2 are 0.44 and 2.25.
    deviation = (total / count - 1) / (2 / count) ** 0.5
    assert abs(deviation) < 5
    assert (1 - 4 / 9) / (2 / count) ** 0.5 > 5


def test_what_others_leave_of_a_member_has_its_contributions_besides(runs):
    """A member's row less a non-member's is the sum of its contributions over the steps it joined."""
    model = runs()
    target, candidates, own = target_of(model)
    data, inside = model.private_side(model.attacked), torch.isin(candidates.ids, own.ids)
    for message, reply in zip(target.messages, model.watched.replies[model.attacked], strict=True):
        rows = granted(message.others_removed)()
        extra = rows - rows[(~inside).nonzero()[0]]
        first = reply.round.context.step
        times = torch.zeros(len(candidates))
        for number in range(4):
            joined = data.examples.ids[data.sampling.indices(first + number, len(data.examples), data.sampler_key)]
            times += torch.isin(candidates.ids, joined)
        assert torch.equal(extra.norm(dim=1) > 0, times > 0)
        # Each contribution is clipped to 1; at local models near the global one it is nearly the same.
        assert bool((extra.norm(dim=1) <= times * (1 + 1e-5)).all())
        guess = message.contributions(candidates.given.inputs, candidates.given.labels)
        cosines = torch.nn.functional.cosine_similarity(extra[times > 0], guess[times > 0].double(), dim=1)
        assert cosines.min() > 0.8


@pytest.mark.long
@subtests(
    "old, new, sentence",
    [
        (
            '{ name = "fed_avg" }',
            '{ name = "fed_lrs" }',
            "the client rule corrects updates in a way that is not linear",
        ),
        (
            '{ name = "fed_avg" }',
            '{ name = "fed_lrs", penalty = 0.0 }',
            "the client rule corrects updates in a way that is not linear",
        ),
        ('{ name = "fed_avg" }', '{ name = "percentile_filter" }', "the message is encoded by PercentileMessages"),
        ('{ name = "fed_avg" }', '{ name = "per_layer" }', "releases several parts"),
        ('{ name = "fed_avg" }', '{ name = "local_noise_filter" }', "is not in the local steps"),
        (
            'local_steps = 4, participation = 0.7 }\ncontrols = false\ndefense = [{ name = "fed_avg" }]',
            'local_steps = 3, participation = 0.7 }\ncontrols = false\ndefense = [{ name = "random_freeze" }]',
            "mask, directions or bound change within a round",
        ),
        ("lr = 0.1 }", 'lr = 0.1, optimizer = "adam" }', "the optimizer of the local steps is adam"),
        ('{ name = "fed_avg" }', '{ name = "dpdr" }', "follow from releases that the server does not have"),
    ],
)
def test_messages_that_show_no_sums_say_why(runs, old, new, sentence):
    model = runs("fed_avg", old, new)
    replies, data = model.watched.replies[model.attacked], model.private_side(model.attacked)
    recipe = Recipe(optimizer=model.request.training.optimizer)
    whys = [sums_of(reply, model.run.method, recipe, data.expected_batch) for reply in replies]
    assert any(sentence in str(why) for why in whys)
    with pytest.raises(NotApplicable, match="do not show the sums of local steps"):
        target_of(model)
    target, _, _ = target_of(model, Knows.POPULATION)
    message = next(iter(target.messages))
    assert message.displacement.isfinite().all()
    if message.sums is None:
        with pytest.raises(NotApplicable, match="an example's part in a message does not follow"):
            message.contributions(model.test.inputs[:2], model.test.labels[:2])


def test_a_lost_client_sends_nothing_and_others_go_on(runs):
    model = runs("fed_avg", "participation = 0.7", "participation = 1.0, dropout = 0.5")
    target, _, _ = target_of(model)
    sent = [message.round for message in target.messages]
    missing = [record.number for record in model.run.rounds if model.attacked in record.missing]
    assert sorted(sent + missing) == [0, 1, 2, 3] and missing
    charged = sum(model.schedule.steps_of(model.attacked, number, 4) for number in range(4))
    assert len(model.watched.steps) == charged


def test_weights_are_one_for_plain_steps_and_follow_from_unrolling():
    assert local_weights((0.3, 0.3, 0.3)) == pytest.approx((1, 1, 1))
    assert local_weights((0.2,), momentum=0.9, pull=5.0) == pytest.approx((1,))
    # (1 - m^(tau - t)) / (1 - m): a geometric sum of velocities.
    assert local_weights((0.1,) * 3, momentum=0.5) == pytest.approx((1.75, 1.5, 1))
    # (1 - eta mu)^(tau - 1 - t): what is left of an update that is pulled back.
    assert local_weights((0.5,) * 3, pull=0.4) == pytest.approx((0.64, 0.8, 1))
    assert local_weights((0.1, 0.3)) == pytest.approx((0.5, 1.5))


def test_a_view_holds_what_its_access_grants_and_nothing_of_the_auditors(runs):
    model = runs()
    target, candidates, _ = target_of(model)
    assert target.offered() == Requirements(access=Access.FEDERATED, knows=INFORMED)
    models = narrow(target, Requirements(access=Access.BROADCAST))
    with pytest.raises(AccessError, match=r"Access\.FEDERATED.*SeenMessages\.messages"):
        _ = models.messages
    assert [type(m).__name__ for m in models.models] == ["NarrowedModelAccess"] * 4
    plain = next(iter(narrow(target, Requirements(access=Access.FEDERATED)).messages))
    for field in ("noise_std", "others_removed", "population"):
        with pytest.raises(AccessError, match=field):
            getattr(plain, field)
    reply = model.watched.replies[model.attacked][0]
    plain.displacement.zero_()
    plain.sent["values"].zero_()
    assert reply.displacement.any() and reply.message.tensors["values"].any()
    values = [getattr(plain, slot.name) for slot in dataclasses.fields(plain) if slot.name in vars(plain)]
    owners = [getattr(value, "__self__", None) for value in values]
    assert not any(owners) and not any(value is model or value is reply for value in values)
    assert candidates.given is not None


def test_models_of_rounds_are_those_that_the_run_sent(runs):
    model = runs()
    target, _, _ = target_of(model)
    inputs = model.test.inputs[:5]
    answers = [m.logits(inputs) for m in target.models]
    assert len(answers) == 4
    assert torch.allclose(answers[0], model.network(inputs))
    assert torch.allclose(granted(target.final).logits(inputs), model.run.model(inputs))
    for message in target.messages:
        assert torch.equal(message.global_model.logits(inputs), answers[message.round])
    named = {name: p for name, p in model.network.named_parameters()}
    first = granted(next(iter(target.models)).parameters)
    assert {name: p.shape for name, p in first.items()} == {name: p.shape for name, p in named.items()}
    assert all(torch.equal(first[name], named[name]) for name in named)


def traces(message, row: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Entries that a candidate contributes to, and that differ from a multiple of the displacement by rounding alone.

    Where no other record contributes, the remainder is w, whose factor of the displacement any entry shows.
    """
    ratio = row / message.displacement.double()
    off = (ratio / ratio.median() - 1).abs()
    return (own != 0) & (off > 4e-16) & (off < 3e-8 / row.abs().max())


def test_last_digits_of_what_others_leave_do_not_tell_who_took_part(runs):
    """A contribution that is subtracted and added again leaves its rounding, which no noise hides."""
    model = runs(old="noise_multiplier = 2.0", new="noise_multiplier = 50.0")
    target, candidates, own = target_of(model)
    inside = torch.isin(candidates.ids, own.ids)
    for message in target.messages:
        others_removed = granted(message.others_removed)
        rows = others_removed()
        assert torch.equal(rows[3:5], others_removed(slice(3, 5)))
        given = candidates.given
        contributed = message.contributions(given.inputs, given.labels).double()
        left = torch.stack([traces(message, row, part).sum() for row, part in zip(rows, contributed, strict=True)])
        assert left[inside].sum() == left[~inside].sum() == 0


@pytest.mark.long
@pytest.mark.parametrize(("name", "steps", "lr"), [("fed_avg", 1, 0.1), ("momentum", 3, 0.001)])
def test_ratios_of_whole_rounds_average_to_one(runs, name, steps, lr):
    """E_0 exp(LLR) = 1 and E_1 exp(-LLR) = 1 over a run's rounds, whose noise and participation are independent.

    At a low rate local models stay at the global one, where the ratio of several steps is exact, too.
    """
    ratios = {True: [], False: []}
    text = "rounds = 4, local_steps = 4, participation = 0.7"
    model = runs(name, text + " }", f"rounds = 240, local_steps = {steps}, participation = 0.7 }}", lr)
    target, candidates, own = target_of(model)
    inside = torch.isin(candidates.ids, own.ids)
    for message in target.messages:
        given = candidates.given
        added = message.contributions(given.inputs, given.labels).double()
        ratio = log_ratio(message, (added * granted(message.others_removed)()).sum(dim=1), added.square().sum(dim=1))
        for member in (True, False):
            ratios[member].append((-ratio[inside] if member else ratio[~inside]).exp().mean())
    for of_rounds in map(torch.stack, ratios.values()):
        error = of_rounds.std() / len(of_rounds) ** 0.5
        # Half the variance would give 1 + q (exp(1 / 4) - 1) = 1.07 or more.
        assert abs(of_rounds.mean() - 1) < 4 * error and error < 0.017
