"""Membership attacks on a transcript: updates tell who was trained on; order, aliases and steps read tell nothing."""

import copy

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from leakbench import audit
from leakbench.attacks.core import MembershipScores
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.external.claim import StatedClaim
from leakbench.audit.external.model.attacks import Audited
from leakbench.audit.external.model.audit import audit_model
from leakbench.audit.external.transcript import attacks as module
from leakbench.audit.external.transcript.attacks import run_on_transcript, transcript_attacks
from leakbench.audit.external.transcript.format import read_transcript
from leakbench.audit.plan.threat_models import reads_no_step
from leakbench.leaderboard.records.audit_findings import EpsilonBound
from tests.attacks.toys import moved
from tests.audit.external.transcript.watched import private_steps

CLAIM = StatedClaim(epsilon=8.0, sampling="poisson", sample_rate=0.1)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Hardly any noise, and a model that hardly learns: updates tell of members what the model does not."""
    data, target = load_digits(return_X_y=True)
    inputs = torch.tensor(data / 16, dtype=torch.float32)
    labels = torch.tensor(target, dtype=torch.int64)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    members, others, public = ((inputs[some], labels[some]) for some in (order[:150], order[150:300], order[300:500]))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    folder = tmp_path_factory.mktemp("watched") / "steps"
    with audit.watch(optimizer, folder, noise_multiplier=0.01, clip_norm=1.0, expected_batch=15.0):
        private_steps(model, optimizer, members, sigma=0.01, steps=12, rate=0.1, batch=15.0)
    return model, members, others, public, read_transcript(folder)


@pytest.fixture(scope="module")
def audited(watched):
    from leakbench.attacks.core import Examples
    from leakbench.audit.external.examples.identity import content_ids

    model, *pairs, _ = watched
    members, others, public = (Examples(ids=content_ids(x, y), inputs=x, labels=y) for x, y in pairs)
    return Audited(model=model.eval(), members=members, non_members=others, population=public, classes=10)


def ran(audited, transcript, *names, claim=CLAIM):
    asked = [(name, {}) for name in names]
    return {one.name: one for one in run_on_transcript(audited, transcript, asked, claim=claim, delta=1e-5)}


def low(outcome):
    found = outcome.metrics["auc"].low
    assert found is not None
    return found


@pytest.mark.long
def test_updates_tell_of_members_what_the_model_does_not(watched, audited):
    found = ran(audited, watched[-1], "gaussian_others", "gradient_similarity")
    assert low(found["gaussian_others"]) > 0.6
    assert found["gaussian_others"].settings["steps"] == "12 of 12"
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(audited.model(x), y, reduction="none") for x, y in watched[1:3]]
    of_loss = float((losses[0][:, None] < losses[1][None]).float().mean())
    assert low(found["gaussian_others"]) > of_loss + 0.05


@pytest.mark.long
def test_all_that_read_steps_are_asked_and_say_why_they_cannot(watched, audited):
    names = transcript_attacks()
    assert {"gaussian_others", "gradient_similarity", "loss_trace", "likelihood_ratio"} <= set(names)
    assert all(not reads_no_step(catalog.attack(name).requires.access) for name in names)
    found = ran(audited, watched[-1], *names)
    assert "contributed to each update, which is in no transcript" in found["likelihood_ratio"].why_not
    assert found["loss_trace"].metrics["auc"].n == 300
    alone = Audited(model=audited.model, members=audited.members, non_members=audited.non_members, classes=10)
    assert ran(alone, watched[-1], "gaussian_others")["gaussian_others"].missing


def test_neither_order_nor_aliases_nor_ids_tell_of_membership(watched, audited, monkeypatch):
    seen = []

    def by_place(target, coins):
        seen.append(target.candidates)
        count = len(target.candidates)
        return MembershipScores(ids=target.candidates.ids, scores=-torch.arange(count).double(), exact=False)

    attack = catalog.attack("gradient_similarity")
    monkeypatch.setattr(module.TranscriptView, "scores", lambda view, attack, **_: by_place(view, None))
    metric = ran(audited, watched[-1], attack.name)[attack.name].metrics["auc"]
    assert metric.low is not None and metric.high is not None and metric.low < 0.5 < metric.high
    ids = {int(i) for i in torch.cat([audited.members.ids, audited.non_members.ids])}
    assert not ids & {int(i) for i in seen[0].ids}


def test_of_more_steps_than_it_may_read_it_reads_some_evenly(watched, audited, monkeypatch):
    monkeypatch.setattr(module, "MOST_GRADIENTS", 4 * 300)
    steps = []
    real = module.TranscriptView.observations

    def observed(view):
        for one in real(view):
            steps.append(one.step)
            yield one

    monkeypatch.setattr(module.TranscriptView, "observations", observed)
    found = ran(audited, watched[-1], "gradient_similarity")["gradient_similarity"]
    assert found.settings["steps"] == "4 of 12"
    assert steps == [0, 3, 6, 9]


@pytest.mark.long
def test_an_audit_asks_them_beside_the_others_and_divides_the_level_among_all(watched):
    model, members, others, public, transcript = watched
    asked = {"members": members, "non_members": others, "population": public, "gradients": False, "split": "random"}
    plain = audit_model(model, **asked, accept=("chance",))
    both = audit_model(model, **asked, transcript=transcript, accept=("chance",), claim=CLAIM)
    names = {one.name for one in both.outcomes} - {one.name for one in plain.outcomes}
    assert names == set(transcript_attacks())
    assert isinstance(plain.bound, EpsilonBound) and isinstance(both.bound, EpsilonBound)
    measured = sum(one.scores is not None for one in both.outcomes if one.name in names)
    assert measured >= 3 and both.bound.looks == plain.bound.looks + measured
    assert both.verdict.word in ("leaks", "within the claim", "claim refuted")


@pytest.mark.long
def test_a_model_on_an_accelerator_has_the_outcomes_of_one_on_the_cpu(accelerator, watched, audited):
    there = Audited(
        model=copy.deepcopy(audited.model).to(accelerator),
        **{name: moved(getattr(audited, name), accelerator) for name in ("members", "non_members", "population")},
        classes=10,
    )
    names = transcript_attacks()
    expected, found = (ran(one, watched[-1], *names) for one in (audited, there))
    for name in names:
        assert found[name].why_not == expected[name].why_not
        if expected[name].scores is not None:
            assert found[name].metrics["auc"].value == pytest.approx(expected[name].metrics["auc"].value, abs=0.01)
