"""A killed federated run goes on, and its claims cover the releases that nobody recorded."""

import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant

from leakbench.defenses.adaptive_clipping import adaptive_clipping
from leakbench.defenses.band_mf import band_mf
from leakbench.defenses.core import (
    Execution,
    Federated,
    Federation,
    Ledger,
    PrivateAverage,
    Recipe,
    RoundSchedule,
    cross_entropy,
    federate,
    full,
    partition,
    poisson,
    predict_federated,
)
from leakbench.defenses.core.federated import federation_file
from leakbench.defenses.core.federated.federated_setup import FederatedSetup
from leakbench.defenses.core.federated.rounds import OngoingFederation
from leakbench.defenses.core.gradients import executor
from leakbench.defenses.core.gradients.executor import Engine
from leakbench.defenses.core.training import checkpoint as disk
from leakbench.defenses.core.training import run_file
from leakbench.defenses.diff import diff
from leakbench.defenses.dp_adam import dp_adam
from leakbench.defenses.dp_fed_avg import dp_fed_avg
from leakbench.defenses.dp_ftrl import dp_ftrl
from leakbench.defenses.dp_snip import dp_snip
from leakbench.defenses.dpdr import dpdr
from leakbench.defenses.dpsur import dpsur
from leakbench.defenses.fed_avg import fed_avg
from leakbench.defenses.fed_lrs import fed_lrs
from leakbench.defenses.fed_pcdp import fed_pcdp
from leakbench.defenses.local_noise_filter import local_noise_filter
from leakbench.defenses.moon import moon
from leakbench.defenses.pcdp import pcdp
from leakbench.defenses.pfa import pfa
from leakbench.defenses.random_sparsification import random_sparsification
from leakbench.defenses.ranked import ranked
from leakbench.defenses.scaffold import scaffold
from leakbench.defenses.sgd import sgd

from ....parameters import subtests
from ...duties import PUBLIC, network
from ...federated_runs import EVERYBODY, FEDERATION, SHARDS, federated, parameters

NOISY: dict[str, Any] = {"noise_multiplier": 1.3}
DELTA = 1e-5
SOME = RoundSchedule(((0, 1, 3), (0, 2, 3), (1, 2, 3)), {(1, 3): 2, (2, 3): 0})
"""Client 1 misses the round that is broken off, client 2 begins in it, and client 3 is lost in it."""
USUAL = fed_avg(**NOISY)
OF_SUM = replace(FEDERATION, aggregation="sum", least_honest=2)
CYCLE: dict[str, Any] = {
    "federation": Federation(rounds=4, local_steps=2, participation=0.5, participants="partition"),
}


def of_server(defense) -> Federated:
    """Clients without noise under a private average."""
    return Federated(client=sgd(), server=PrivateAverage(defense=defense))


METHODS: dict[str, tuple[Federated, dict[str, Any]]] = {
    "fed_avg": (USUAL, {}),
    "fed_avg with momentum": (USUAL, {"recipe": Recipe(momentum=0.9, schedule="cosine")}),
    "scaffold": (scaffold(**NOISY), {}),
    "scaffold stored": (scaffold(stored=True, **NOISY), {}),
    "scaffold with gradients": (scaffold(control="gradient", control_noise_multiplier=5.0, **NOISY), {}),
    "moon": (moon(**NOISY), {}),
    "fed_lrs": (fed_lrs(penalty=0.1, sparsity=0.5, **NOISY), {}),
    "fed_pcdp": (fed_pcdp(rank=3, **NOISY), {}),
    "pfa": (pfa(variant="full", budgets=(1.0, 2.0, 2.0, 1.0), rank=2), {}),
    "pfa plus": (pfa(variant="plus", budgets=(1.0, 2.0, 2.0, 1.0), rank=2), {}),
    "local_noise_filter": (local_noise_filter(), {}),
    "dp_ftrl": (Federated(client=dp_ftrl(**NOISY)), {"sampling": partition(0.5)}),
    "dp_ftrl over rounds": (
        Federated(client=dp_ftrl(tree_per_epoch=False, **NOISY)),
        {"sampling": partition(0.5), "schedule": EVERYBODY},
    ),
    "dp_snip": (Federated(client=dp_snip(**NOISY)), {}),
    "dpsur": (Federated(client=dpsur(**NOISY)), {}),
    "dpdr": (Federated(client=dpdr(**NOISY)), {}),
    "diff": (Federated(client=diff(**NOISY)), {}),
    "ranked": (Federated(client=ranked(final_sparsity=0.5, **NOISY)), {}),
    "dp_adam": (Federated(client=dp_adam(**NOISY)), {}),
    "random_sparsification": (Federated(client=random_sparsification(final_sparsity=0.8, **NOISY)), {}),
    "pcdp every 3 steps": (Federated(client=pcdp(rank=3, interval=3, **NOISY)), {}),
    "pcdp with a remark": (
        Federated(client=pcdp(rank=3, auxiliary_size=500, shortage="lower_rank", interval=4, **NOISY)),
        {},
    ),
    "pcdp every 8 steps": (Federated(client=pcdp(rank=3, interval=8, **NOISY)), {}),
    "adaptive_clipping": (Federated(client=adaptive_clipping(**NOISY)), {}),
    "dp_fed_avg": (dp_fed_avg(**NOISY), {}),
    "dp_fed_avg in shares": (dp_fed_avg(**NOISY), {"federation": OF_SUM}),
    "dp_fed_avg in shares of secret participants": (
        dp_fed_avg(**NOISY),
        {"federation": replace(OF_SUM, participation=0.9, participants="poisson"), "schedule": None},
    ),
    "scaffold in sums": (scaffold(**NOISY), {"federation": replace(OF_SUM, least_honest=3)}),
    "dp_fed_avg adaptive": (of_server(adaptive_clipping(**NOISY)), {}),
    "dp_fed_avg under band_mf": (of_server(band_mf(bands=2, **NOISY)), CYCLE | {"schedule": None}),
}


class Killed(BaseException):
    """Ends a run without a chance to write anything, as a kill of the process does."""


def after_round(number):
    """A callback that kills the process when a number of rounds is taken."""

    def progress(done, total):
        if done == number:
            raise Killed

    return progress


def killed(path, method=USUAL, *, after=None, releases=None, **settings: Any):
    """Runs until a number of rounds, or of a process's gradient sums; returns the noisy sums of each."""
    released, execute = [], Engine.run

    def recording(self, *args, **options):
        out = execute(self, *args, **options)
        released.append(out.noisy[0])
        if len(released) == releases:
            raise Killed
        return out

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Engine, "run", recording)
        progress = None if after is None else after_round(after)
        run(method, checkpoint=path, progress=progress, **settings)
    return released


def run(method=USUAL, **settings: Any):
    """A run of the usual federation, with some clients."""
    return federated(method, **{"schedule": SOME} | settings)


def check_same(first, other):
    """The same bits in every message, global model and ledger, and in the trained model."""
    assert torch.equal(parameters(first), parameters(other))
    assert [ledger.entries for ledger in first.ledgers] == [ledger.entries for ledger in other.ledgers]
    for mine, theirs in zip(first.rounds, other.rounds, strict=True):
        assert torch.equal(mine.parameters, theirs.parameters)
        assert (mine.clients, mine.missing, mine.bytes_up, mine.bytes_down, mine.kinds) == (
            theirs.clients, theirs.missing, theirs.bytes_up, theirs.bytes_down, theirs.kinds
        )  # fmt: skip
        assert list(mine.messages) == list(theirs.messages)
        for message, same in zip(mine.messages.values(), theirs.messages.values(), strict=True):
            pairs = [(message.tensors, same.tensors), (message.extras, same.extras)]
            assert all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def facts(found):
    """Returns the content of a run's record beside its claim."""
    return found.engine, found.public_used, found.remarks, found.unverified, found.noise, found.empty, found.losses


def charges(ledger):
    """(first step, steps, multiplier, times) of every entry."""
    return [(e.first, e.steps, e.noise_multiplier, e.times) for e in ledger.entries]


ONCE, TWICE, THRICE = 1.3, 1.3 / math.sqrt(2), 1.3 / math.sqrt(3)
"""Multipliers of steps that were taken so many times."""


def test_rounds_of_noise_in_shares_are_charged_again_at_the_noise_that_claims_count_on(tmp_path):
    settings: dict[str, Any] = {"key": None, "federation": OF_SUM}
    killed(tmp_path / "c", dp_fed_avg(**NOISY), releases=14, **settings)
    resumed = run(dp_fed_avg(**NOISY), checkpoint=tmp_path / "c", **settings)
    share = math.sqrt(2 / 4)
    assert charges(resumed.ledgers[0]) == [
        (0, 1, pytest.approx(1.3 * share), 1), (1, 1, pytest.approx(1.3 * share / math.sqrt(2)), 2)
    ]  # fmt: skip
    assert [charge[3] for charge in charges(resumed.ledgers[1])] == [1, 1]  # it is not in the lost round


@pytest.mark.long
@subtests("name", list(METHODS))
def test_a_run_that_is_broken_off_goes_on_bit_for_bit(name, tmp_path):
    method, settings = METHODS[name]
    whole = run(method, **settings)

    def stop(done, total):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(method, checkpoint=tmp_path / "between", progress=stop, **settings)
    between = run(method, checkpoint=tmp_path / "between", **settings)
    check_same(between, whole)
    assert between.resumed and not between.repeated

    killed(tmp_path / "after", method, after=2, **settings)
    check_same(run(method, checkpoint=tmp_path / "after", **settings), whole)

    sums = sum(len(clients) for clients in whole.schedule.rounds[:1]) * whole.federation.local_steps + 3
    killed(tmp_path / "within", method, releases=sums, **settings)
    within = run(method, checkpoint=tmp_path / "within", **settings)
    check_same(within, whole)
    assert within.resumed and within.repeated
    finished = run(method, checkpoint=tmp_path / "within", **settings)  # so nothing is taken again
    check_same(finished, whole)
    assert facts(finished) == facts(within) == facts(whole)


def test_a_run_that_is_killed_before_its_first_round_ends_and_twice_goes_on_bit_for_bit(tmp_path):
    whole = run(scaffold(**NOISY))
    for releases in (1, 7, 13):  # the last in round 1
        killed(tmp_path / "c", scaffold(**NOISY), releases=releases)
    check_same(run(scaffold(**NOISY), checkpoint=tmp_path / "c"), whole)


@pytest.mark.long
def test_steps_since_the_checkpoint_are_charged_to_the_clients_that_may_have_taken_them(tmp_path):
    for kind in ("os", "secure"):
        settings: dict[str, Any] = {"key": None, "exact": kind == "secure"}
        killed(tmp_path / kind, releases=14, **settings)  # in the first client of round 1
        resumed = run(checkpoint=tmp_path / kind, **settings)
        assert resumed.resumed and not resumed.repeated
        # Client 1 is not in that round; client 3 takes two of its steps, and is lost at the start of the last round.
        assert [charges(ledger) for ledger in resumed.ledgers] == [
            [(0, 4, ONCE, 1), (4, 4, TWICE, 2)],
            [(0, 4, ONCE, 1), (8, 4, ONCE, 1)],
            [(4, 4, TWICE, 2), (8, 4, ONCE, 1)],
            [(0, 4, ONCE, 1), (4, 2, TWICE, 2)],
        ]
        accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        for sigma in (1.3, 1.3 / math.sqrt(2)):
            event = dp_accounting.PoissonSampledDpEvent(0.4, dp_accounting.GaussianDpEvent(sigma))
            accountant.compose(dp_accounting.SelfComposedDpEvent(event, 4))
        assert resumed.claims(DELTA)[0].epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=2e-3)


def test_noise_of_the_operating_system_is_other_noise_the_second_time(tmp_path):
    """The same sums, so that their difference would be zero under the same noise."""
    usual: dict[str, Any] = {"key": None, "sampling": full(), "seed": 2}
    before = killed(tmp_path / "c", releases=15, **usual)
    resumed, again = [], Engine.run

    def recording(self, *args, **options):
        out = again(self, *args, **options)
        resumed.append(out.noisy[0])
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "run", recording)
        run(checkpoint=tmp_path / "c", **usual)
    # The deviation of 43 numbers is known to 11 %, so a run in a million is off by more than 0.6.
    assert float((resumed[0] - before[12]).std()) / (1.3 * math.sqrt(2)) == pytest.approx(1.0, abs=0.6)


def test_samplers_and_schedule_are_those_of_the_killed_run(tmp_path, monkeypatch):
    """Without a given key and seed, from the file: otherwise other records, and other clients, would be charged."""
    drawn, seen = FederatedSetup.__init__, []

    def recording(self, *args):
        drawn(self, *args)
        keys = {number: client.sampler_key for number, client in self.state.clients.items()}
        seen.append((keys, self.schedule, self.seed))

    monkeypatch.setattr(FederatedSetup, "__init__", recording)
    federation = Federation(rounds=6, local_steps=2, participation=0.5, dropout=0.3)
    usual: dict[str, Any] = {"key": None, "seed": None, "schedule": None, "federation": federation}
    killed(tmp_path / "c", releases=7, **usual)
    run(checkpoint=tmp_path / "c", **usual)
    assert seen[0] == seen[1]


def test_each_kill_is_charged_once_more_and_rounds_between_writes_are_charged_together(tmp_path):
    usual: dict[str, Any] = {"key": None, "schedule": RoundSchedule(((0, 1),) * 3)}
    for releases in (1, 9):  # in round 0; in round 1 of a process that writes after two rounds
        killed(tmp_path / "c", releases=releases, checkpoint_every=2, **usual)
    resumed = run(checkpoint=tmp_path / "c", **usual)
    assert [charges(ledger) for ledger in resumed.ledgers[:2]] == [[(0, 8, THRICE, 3), (8, 4, ONCE, 1)]] * 2
    assert [charges(ledger) for ledger in resumed.ledgers[2:]] == [[], []]


def test_an_interruption_between_two_rounds_has_nothing_to_charge_again(tmp_path):
    def failing(done, total):
        if done == 2:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        run(key=None, checkpoint=tmp_path / "c", checkpoint_every=3, progress=failing)
    resumed = run(key=None, checkpoint=tmp_path / "c")
    assert [ledger.entries for ledger in resumed.ledgers] == [ledger.entries for ledger in run().ledgers]
    assert any(sentence.startswith("nobody else goes on") for sentence in resumed.claim(DELTA).assumes)


def test_releases_before_the_first_step_are_charged_again_to_the_clients_that_begin_in_the_lost_round(tmp_path):
    method = Federated(client=dp_snip(mask_noise_multiplier=5.0, **NOISY))
    killed(tmp_path / "c", method, releases=17, key=None)  # in round 1, in which client 2 begins
    resumed = run(method, checkpoint=tmp_path / "c", key=None)
    of_masks = [[(e.noise_multiplier, e.times) for e in ledger.entries if e.one_off] for ledger in resumed.ledgers]
    assert of_masks == [[(5.0, 1)], [(5.0, 1)], [(5.0 / math.sqrt(2), 2)], [(5.0, 1)]]


def test_releases_of_a_rule_and_trials_are_charged_again_with_their_round(tmp_path):
    method = scaffold(control="gradient", control_noise_multiplier=5.0, **NOISY)
    killed(tmp_path / "rule", method, releases=17, key=None)
    rule = run(method, checkpoint=tmp_path / "rule", key=None).ledgers[0]
    assert [(e.first, e.times) for e in rule.entries if e.one_off] == [(0, 1), (4, 2)]
    method = Federated(client=dpsur(**NOISY))
    killed(tmp_path / "trial", method, releases=26, key=None)
    trial = run(method, checkpoint=tmp_path / "trial", key=None).ledgers[0]
    assert [(e.first, e.steps, e.times) for e in trial.entries if e.trial] == [(0, 4, 1), (4, 4, 2)]


def test_a_stream_that_restarts_in_a_round_is_charged_for_the_lost_round_alone(tmp_path):
    method, sampling = Federated(client=dp_ftrl(**NOISY)), partition(0.5)
    killed(tmp_path / "c", method, releases=14, key=None, sampling=sampling)
    resumed = run(method, checkpoint=tmp_path / "c", key=None, sampling=sampling)
    assert [e.times for e in resumed.ledgers[0].entries] == [1, 1, 2, 2]
    assert resumed.ledgers[1].entries == run(method, sampling=sampling).ledgers[1].entries
    once, twice = (
        predict_federated(
            Federated(client=dp_ftrl(noise_multiplier=sigma)), [12] * 4, federation=FEDERATION, sampling=sampling,
            schedule=RoundSchedule(((0, 1, 3), (), ()) if sigma == ONCE else ((), (0,), ())),
        )[0]
        for sigma in (ONCE, TWICE)
    )  # fmt: skip
    expected = Ledger(sampling, [*once.entries, *twice.entries])
    # Not below the sum of both rounds; a retaken stream is charged by |C|, which is C for a tree.
    assert resumed.claims(DELTA)[0].epsilon == pytest.approx(expected.claim(DELTA).epsilon, rel=1e-6)


@subtests(
    ("participants", "expected"),
    [
        ("fixed", [[(0, 1, ONCE, 1), (1, 1, TWICE, 2)], [(0, 1, ONCE, 1), (2, 1, ONCE, 1)]]),
        ("poisson", [[(0, 1, ONCE, 1), (1, 1, TWICE, 2), (2, 1, ONCE, 1)]] * 2),
    ],
)
def test_rounds_of_a_private_average_are_charged_to_the_clients_in_them(participants, expected, tmp_path):
    settings: dict[str, Any] = {"key": None}
    if participants == "poisson":  # whose schedule may not be given
        settings |= {
            "federation": replace(FEDERATION, participants=participants, participation=0.7), "schedule": None
        }  # fmt: skip
    average = federation_file.PrivateServer.average
    calls = []

    def then_killed(self, *args):
        moved = average(self, *args)
        calls.append(moved)
        if len(calls) == 2:
            raise Killed  # after the release of round 1, which no file records
        return moved

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(federation_file.PrivateServer, "average", then_killed)
        run(dp_fed_avg(**NOISY), checkpoint=tmp_path / "c", **settings)
    resumed = run(dp_fed_avg(**NOISY), checkpoint=tmp_path / "c", **settings)
    assert [charges(ledger) for ledger in resumed.ledgers[:2]] == expected
    lost = resumed.rounds[2].parameters - resumed.rounds[1].parameters
    assert (lost - calls[1]).norm() > 0.1 * calls[1].norm()


def test_a_stream_over_rounds_is_charged_as_a_whole_to_everybody(tmp_path):
    method = of_server(band_mf(bands=2, **NOISY))
    usual: dict[str, Any] = CYCLE | {"schedule": None, "key": None}
    killed(tmp_path / "c", method, releases=6, **usual)
    resumed = run(method, checkpoint=tmp_path / "c", **usual)
    assert [e.times for e in resumed.ledgers[0].entries] == [1, 2, 1]
    once = run(method, **usual).claim(DELTA)
    assert resumed.claim(DELTA).epsilon > 1.2 * once.epsilon


def test_noise_of_updates_is_charged_again_unless_the_client_is_lost(tmp_path):
    method = local_noise_filter()
    killed(tmp_path / "c", method, releases=14, key=None)
    resumed = run(method, checkpoint=tmp_path / "c", key=None)
    times = [[(e.first, e.steps, e.times) for e in ledger.entries] for ledger in resumed.ledgers]
    assert times == [[(0, 1, 1), (1, 1, 2)], [(0, 1, 1), (2, 1, 1)], [(1, 1, 2), (2, 1, 1)], [(0, 1, 1)]]


@pytest.mark.parametrize("method", [USUAL, dp_fed_avg(**NOISY)], ids=lambda m: m.name)
def test_no_checkpoint_has_a_key_of_noise_that_is_not_drawn_again(method, tmp_path, monkeypatch):
    parties, started = [], FederatedSetup.__init__

    def recording(self, *args):
        started(self, *args)
        parties.extend([*self.state.clients.values(), *([self.state.private] if self.state.private else [])])

    monkeypatch.setattr(FederatedSetup, "__init__", recording)
    killed(tmp_path / "c", method, after=2, key=None)
    run(method, key=None, checkpoint=tmp_path / "c")
    content = (tmp_path / "c").read_bytes()
    keys = [party.noise.state().numpy().tobytes()[:32] for party in parties]
    assert len({*keys}) == len(keys) >= 8  # nor is one used again by the run that goes on
    assert all(key not in content for key in keys)


@subtests("setting", [{"engine": "torch.func"}, {"microbatch": 5}])
def test_seeded_noise_is_another_where_sums_are_rounded_otherwise(setting, tmp_path):
    before = killed(tmp_path / "c", releases=14, sampling=full())
    resumed, again = [], Engine.run

    def recording(self, *args, **options):
        out = again(self, *args, **options)
        resumed.append(out.noisy[0])
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "run", recording)
        last = run(checkpoint=tmp_path / "c", sampling=full(), execution=Execution(**setting))
    assert charges(last.ledgers[0]) == [(0, 4, ONCE, 1), (4, 4, TWICE, 2)]
    assert charges(last.ledgers[1]) == [(0, 4, ONCE, 1), (8, 4, ONCE, 1)]
    assert float((resumed[0] - before[12]).std()) / (1.3 * math.sqrt(2)) == pytest.approx(1.0, abs=0.6)


def test_rounds_that_a_killed_run_took_are_remembered_when_the_next_one_writes_sooner(tmp_path):
    """Otherwise the noise of round 1 would be drawn again where sums are rounded otherwise, uncharged."""

    def stop(done, total):
        if done == 1:
            raise KeyboardInterrupt

    killed(tmp_path / "c", after=2, checkpoint_every=3)
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint=tmp_path / "c", progress=stop)
    resumed = run(checkpoint=tmp_path / "c", execution=Execution(engine="torch.func"))
    assert charges(resumed.ledgers[0]) == [(0, 4, ONCE, 1), (4, 4, TWICE, 2)]
    assert charges(resumed.ledgers[2]) == [(4, 8, TWICE, 2)]


def other_loss(outputs, targets):
    return 2 * cross_entropy(outputs, targets)


@pytest.mark.long
@subtests(
    "setting",
    [
        {"shards": [SHARDS[0], SHARDS[1], SHARDS[2], (SHARDS[3][0], SHARDS[3][1].roll(1))]},
        {"shards": [*SHARDS[:3], None], "schedule": RoundSchedule(((0, 1), (0, 2), (1, 2)))},
        {"method": fed_avg(noise_multiplier=1.4)},
        {"method": fed_avg(clip_norm=0.9, **NOISY)},
        {"method": scaffold(**NOISY)},
        {"federation": replace(FEDERATION, server_lr=0.5)},
        {"sampling": poisson(0.3)},
        {"lr": 0.2},
        {"seed": 3},
        {"key": 8},
        {"key": None},
        {"recipe": Recipe(loss=other_loss)},
        {"schedule": replace(SOME, lost={})},
        {"keep_messages": False},
        {"public": (PUBLIC[0] + 1, PUBLIC[1])},
    ],
)
def test_a_checkpoint_belongs_to_one_run(setting, tmp_path):
    killed(tmp_path / "c", after=1)
    with pytest.raises(ValueError, match="belongs to another run"):
        run(**{"method": USUAL, "checkpoint": tmp_path / "c"} | setting)


def test_content_that_cannot_be_inspected_is_refused_with_seeded_noise(tmp_path):
    with (tmp_path / "log").open("w") as handle:

        def loss(outputs, targets, log=handle):
            return cross_entropy(outputs, targets)

        with pytest.raises(ValueError, match="into which nothing can look"):
            run(checkpoint=tmp_path / "c", recipe=Recipe(loss=loss))
        run(checkpoint=tmp_path / "c", recipe=Recipe(loss=loss), key=None)


def test_a_checkpoint_whose_ledger_lacks_steps_is_refused(tmp_path, monkeypatch):
    save = disk.save

    def lacking(content, *rest):
        ledgers = [([replace(e, steps=e.steps - 1) for e in entries], other) for entries, other in content["ledgers"]]
        save(content | {"ledgers": ledgers}, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "save", lacking)
        killed(tmp_path / "c", after=1)
    with pytest.raises(ValueError, match="got 3 charged of 4 taken by client 0"):
        run(checkpoint=tmp_path / "c")


def test_an_error_before_the_first_release_leaves_no_checkpoint_and_a_later_error_leaves_one(tmp_path, monkeypatch):
    def broken(outputs, targets):
        raise RuntimeError("not yet")

    path = tmp_path / "c"
    with pytest.raises(ValueError, match="not yet"):
        run(checkpoint=path, recipe=Recipe(loss=broken))
    assert not path.exists()
    execute, calls = Engine.run, []

    def failing(self, *args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return execute(self, *args, **options)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(Engine, "run", failing)
        run(checkpoint=path, key=None)
    assert charges(run(checkpoint=path, key=None).ledgers[0]) == [(0, 4, TWICE, 2), (4, 4, ONCE, 1)]


def interrupting(times):
    """Sends Control-C at the start of round 1."""
    take = OngoingFederation.round

    def interrupted(self):
        if self.state.round == 1:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        take(self)

    return interrupted


@pytest.mark.parametrize("times", [1, 2])
def test_a_first_control_c_waits_for_the_end_of_the_round_and_a_second_does_not(times, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(OngoingFederation, "round", interrupting(times))
        run(checkpoint=tmp_path / "c", key=None, checkpoint_every=3)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = run(checkpoint=tmp_path / "c", key=None)
    assert charges(resumed.ledgers[0]) == ([(0, 8, ONCE, 1)] if times == 1 else [(0, 8, TWICE, 2)])


def test_of_two_processes_with_one_file_only_the_last_goes_on_and_is_charged_for_both(tmp_path):
    second = []

    def overtaken(done, total):
        if done == 1 and not second:
            second.append(run(checkpoint=tmp_path / "c", key=None))

    with pytest.raises(ValueError, match="one process at a time"):
        run(checkpoint=tmp_path / "c", key=None, progress=overtaken)
    assert charges(second[0].ledgers[0]) == [(0, 4, ONCE, 1), (4, 4, TWICE, 2)]


@pytest.mark.parametrize("every", [0, -1, 1.5])
def test_a_checkpoint_is_written_every_whole_number_of_rounds(every, tmp_path):
    with pytest.raises(ValueError, match="checkpoint_every must be"):
        run(checkpoint=tmp_path / "c", checkpoint_every=every)


def test_a_run_goes_on_from_the_weights_of_its_file(tmp_path):
    """The weights and buffers that another process begins with count for nothing."""
    whole = run()
    killed(tmp_path / "c", after=1)
    other = network()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-2)
    settings: dict[str, Any] = {"sampling": poisson(0.4), "lr": 0.3, "seed": 2, "key": 7, "public": PUBLIC}
    resumed = federate(
        other, SHARDS, USUAL, federation=FEDERATION, schedule=SOME, keep_messages=True, checkpoint=tmp_path / "c",
        **settings,
    )  # fmt: skip
    check_same(resumed, whole)


def test_another_processor_draws_other_noise(tmp_path, monkeypatch):
    killed(tmp_path / "c", releases=14)
    monkeypatch.setattr(run_file, "processor_name", lambda: "another")
    assert charges(run(checkpoint=tmp_path / "c").ledgers[0]) == [(0, 4, ONCE, 1), (4, 4, TWICE, 2)]


@pytest.mark.long
def test_passes_are_of_the_same_size_again_whatever_memory_is_free_by_then(tmp_path, monkeypatch):
    killed(tmp_path / "c", releases=14, sampling=full())
    whole = run(sampling=full())
    monkeypatch.setattr(executor, "MEMORY_BUDGET", 1)
    assert not torch.equal(parameters(run(sampling=full())), parameters(whole))  # so the size of passes does matter
    check_same(run(checkpoint=tmp_path / "c", sampling=full()), whole)


def test_steps_of_a_model_that_could_not_be_checked_stay_unverified_where_it_can_be(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_describe", lambda self, choice: setattr(self, "unverified", "it did not run"))
        killed(tmp_path / "c", after=2)
    resumed = run(checkpoint=tmp_path / "c")
    assert "it did not run" in resumed.unverified and "unverified_model" in resumed.remarks


OTHERS = """
import os, pathlib, signal, sys
import torch
from leakbench.defenses.core import Federation, federate, poisson
from leakbench.defenses.fed_avg import fed_avg

def kill(done, total):
    if done == 2:
        os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
inputs, labels = torch.randn(24, 6, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
federate(
    torch.nn.Linear(6, 3), [(inputs[::2], labels[::2]), (inputs[1::2], labels[1::2])], fed_avg(noise_multiplier=1.3),
    federation=Federation(rounds=3, local_steps=2, participation=1.0), sampling=poisson(0.5),
    checkpoint=pathlib.Path(sys.argv[1]), checkpoint_every=3, progress=kill,
)
"""


@pytest.mark.long
def test_a_process_that_is_killed_leaves_a_file_to_go_on_from(tmp_path):
    path = tmp_path / "c"
    done = subprocess.run([sys.executable, "-c", OTHERS, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    source = OTHERS.replace("federate(\n", "run = federate(\n").replace(", progress=kill", "")
    again = f"{source}\nprint([(e.first, e.steps, e.times) for ledger in run.ledgers for e in ledger.entries])"
    done = subprocess.run([sys.executable, "-c", again, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[(0, 6, 2), (0, 6, 2)]"
    assert sorted(Path(tmp_path).iterdir()) == [path]
