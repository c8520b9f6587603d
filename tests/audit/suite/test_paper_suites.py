"""Suites of the papers' questions: each has a small form that asks the same, and no figure without a cell."""

import math

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

from leakbench.audit.catalog import methods as catalog
from leakbench.audit.plan.expand import budgets_of, plan
from leakbench.audit.suite.small import small_forms
from leakbench.audit.suite.suite import SuiteError, load
from leakbench.audit.suite.task import TRAINING
from leakbench.benchmarks import models
from leakbench.defenses.core import FeatureStatistics, calibrate, poisson
from leakbench.defenses.dp_sgd import dp_sgd

from ...parameters import subtests

LITTLE = 5_000_000
"""Examples that a small suite may train on, tuning included: ten minutes of two cores at 4,000 a second."""

NAMES = catalog.names("suites")
SMALL = sorted({*small_forms(), *(name for name in NAMES if name.endswith("_small"))})
# They ask nothing that a paper has answered.
OURS = {
    *("quick", "mnist_every_defense", "linear_probe_small", "membership", "membership_small", "canaries_small"),
    *("fed_active", "fed_small", "fed_message", "zoo_small"),
}
PAPERS = sorted(set(NAMES) - set(SMALL) - OURS)


def twin(name):
    """The small suite of the same name, or of the longest beginning of it: that of a family with one data set each."""
    words = name.split("_")
    beginnings = ("_".join(words[:end]) + "_small" for end in range(len(words), 0, -1))
    return next((one for one in beginnings if one in SMALL), None)


def asked(name):
    """What a suite asks: the defenses, and of each the settings that it sets, tries or chooses."""
    suite = load(name)
    tried = set() if suite.tune is None else set(suite.tune.grid)
    found = set()
    for entry in suite.defense:
        # How long and how fast differs in little; how batches are drawn is a question.
        trained = set(TRAINING) - {"sampling"}
        settings = {*entry, *(tried & set(catalog.settings("defenses", entry["name"])))} - trained - {"name"}
        found |= {(entry["name"], key) for key in settings or {""}}
    return found


def examples(name):
    """Examples trained on, over all cells and all points of the search."""
    suite = load(name)
    seen = 0
    for choice in suite.defense_grid():
        task, budgets = suite.task_for(choice), len(budgets_of(suite, choice))
        assert task.private is not None, f"{name} must say how many examples are trained on"
        points = 0
        if suite.tune is not None:
            once = suite.tune.epsilon is not None or suite.tune.noise_multiplier is not None
            grid = [values for key, values in suite.tune.grid.items() if key in suite.tunable(choice)]
            points = math.prod(map(len, grid)) * (1 if once else budgets)
        if suite.federated is None:
            assert task.epochs is not None
            of_a_run = task.private * task.epochs
        else:
            federation = suite.federated.federation(steps_per_epoch=round(task.private / task.batch))
            of_a_run = federation.steps * federation.participation * suite.federated.clients * task.batch
        seen += (budgets * len(suite.seeds) + points) * of_a_run * (task.views or 1)
    return seen


@pytest.mark.long
@subtests("name", PAPERS)
def test_a_papers_suite_has_a_small_twin_that_asks_the_same(name):
    small = twin(name)
    assert small is not None, f"{name} has no small twin"
    assert asked(name) <= asked(small)


@pytest.mark.long
@subtests("small", sorted(set(SMALL) - OURS))
def test_a_small_suite_asks_nothing_that_its_papers_do_not(small):
    papers = [name for name in PAPERS if twin(name) == small]
    assert papers, f"{small} is nobody's twin"
    assert asked(small) == set().union(*map(asked, papers))


@pytest.mark.long
@subtests("small", SMALL)
def test_a_small_suite_is_small(small):
    assert load(small).task.data in ("mnist", "digits")
    assert examples(small) <= LITTLE


@pytest.mark.long
@subtests("name", PAPERS)
def test_every_figure_of_a_paper_stands_beside_a_cell(name):
    suite = load(name)
    cells = [(choice, budget) for choice in suite.defense_grid() for budget in budgets_of(suite, choice)]
    attacks = (None, *suite.attack_grid())
    shown = [figure for cell in cells for attack in attacks for figure in suite.reported_for(*cell, attack)]
    for row in suite.reported:
        assert any((one.metric, one.value, one.source) == (row.metric, row.value, row.source) for one in shown), row


def test_the_statistics_of_handcrafted_features_cost_what_the_paper_pays_for_them():
    task = load("random_freeze_handcrafted").task
    assert task.statistics is not None and task.private is not None and task.batch is not None
    assert task.epochs is not None
    before = FeatureStatistics(**task.statistics.model_dump()).plans()
    steps, sampling = round(task.epochs * task.private / task.batch), poisson(task.batch / task.private)
    papers = RdpAccountant()
    papers.compose(PoissonSampledDpEvent(0.16, GaussianDpEvent(5.65)), 500).compose(GaussianDpEvent(8.0), 2)
    assert papers.get_epsilon(1e-5) == pytest.approx(3.0, abs=0.005)
    assert (sampling.rate, steps, [plan.noise_multiplier for plan in before]) == (0.16, 500, [8.0, 8.0])
    found = calibrate(dp_sgd(), epsilon=3.0, delta=1e-5, sampling=sampling, steps=steps, before=before)
    assert found.noise_multiplier == pytest.approx(5.24, abs=0.005)


@pytest.mark.long
def test_the_head_on_public_features_costs_what_the_paper_pays_for_it():
    """The data are the reader's, so their sizes are those that the suite asks for."""
    task, small = load("random_freeze_transfer").task, load("random_freeze_transfer_small").task
    assert task.private is not None and task.epochs is not None
    steps, rate = round(task.epochs * task.private / task.batch), task.batch / task.private
    papers = RdpAccountant()
    papers.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(2.30)), steps)
    assert (rate, steps) == (0.02, 2500) and papers.get_epsilon(1e-5) == pytest.approx(1.996, abs=0.001)
    found = calibrate(dp_sgd(), epsilon=2.0, delta=1e-5, sampling=poisson(rate), steps=steps)
    assert found.noise_multiplier is not None and 2.0 < found.noise_multiplier < 2.30
    # The head is of the same size in little.
    assert models.count("linear", input_shape=(4096,)) == 40_970
    assert small.model.settings["hidden"] * 10 + 10 == 40_970


def test_features_that_a_reader_has_not_made_are_named_before_anything_is_computed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    sentence = rf"task\.data: path of features must be there, and nothing is at {tmp_path}/cifar10_simclrv2\.npz"
    with pytest.raises(SuiteError, match=sentence):
        plan(load("random_freeze_transfer"))
    # Which others may take the place of.
    other = load("random_freeze_transfer").with_overrides(['task.data="features:mine.npz"'])
    assert other.task.data == "features:mine.npz"


@subtests("name", ["mnist_every_defense", "membership", "reconstruction", "reconstruction_small"])
def test_a_suite_of_every_defense_has_them_all(name):
    asked = {choice.name for choice in load(name).defense_grid()}
    assert asked == set(catalog.central_names())


def test_the_small_suite_of_membership_asks_attacks_of_the_large_one_with_fewer_models():
    large, small = load("membership"), load("membership_small")
    assert {one.name for one in small.attack_grid()} <= {one.name for one in large.attack_grid()}
    assert len({one.name for one in small.defense_grid()}) == 8
    shadows = [
        {one.settings["shadows"] for one in s.attack_grid() if "shadows" in one.settings} for s in (small, large)
    ]
    assert shadows == [{16}, {64}]
