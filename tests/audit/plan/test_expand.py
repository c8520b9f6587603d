"""What a suite comes to: requests whose ids depend on nothing but themselves, checked before anything is computed."""

import hashlib
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from leakbench.audit.plan import expand as planning
from leakbench.audit.plan.build import defend, initialised, planned, reads_public
from leakbench.audit.plan.cells import Cell, Job, Plan
from leakbench.audit.plan.expand import plan
from leakbench.audit.plan.request import Request, RequestedMethod, digest_of
from leakbench.audit.plan.splits_cache import load_data
from leakbench.audit.run import harness
from leakbench.audit.suite.suite import SuiteError
from leakbench.benchmarks.core import Sizes
from leakbench.defenses.core import CropAndFlip, Recipe, predict

from ...parameters import subtests
from ..conftest import INVERSION, SHARE, SUITE

WITH_SHARE = SUITE.replace('"loss_threshold" }]', f'"loss_threshold" }}, {INVERSION}]') + SHARE
WITH_CONTROLS = WITH_SHARE.replace("controls = false", "controls = true")
FEDERATED = '''
from leakbench.attacks.core import Access, MembershipScores, SeenMessages, attack

@attack(access=Access.FEDERATED)
def spy(target: SeenMessages, coins) -> MembershipScores:
    """Watches the clients."""
'''


def words(cell: Cell) -> tuple:
    request = cell.request
    attack = request.attack and request.attack.name
    return request.defense.name, attack, request.release_noise, request.control, request.seed


def ids(suite) -> dict[str, tuple]:
    return {cell.id: words(cell) for cell in plan(suite).cells}


def test_a_defense_may_be_shared_with_its_noise_alone_or_without(suite_of):
    """What would be attacked twice for the same answer; the training and the ids of other cells are as they were."""
    whole = ids(suite_of(WITH_SHARE))
    for kept in ("none", "calibrated"):
        text = WITH_SHARE.replace('{ name = "dp_sgd" }', f'{{ name = "dp_sgd", release_noise = "{kept}" }}')
        found = ids(suite_of(text))
        dropped = set(whole.values()) - set(found.values())
        assert [(one[0], one[2]) for one in dropped] == [("dp_sgd", {"none": "calibrated"}.get(kept, "none"))]
        assert found.items() <= whole.items()
    with pytest.raises(SuiteError, match=r"release_noise must be one of share\.noise, got 'calibrated'"):
        plan(suite_of(text.replace("images = 1 }", 'images = 1, noise = "none" }')))
    with pytest.raises(SuiteError, match="release_noise"):
        suite_of(text.replace('"calibrated"', '"loud"'))


def test_every_defense_meets_every_attack_at_every_seed_once(suite_of):
    found = ids(suite_of(WITH_SHARE.replace("seeds = [0]", "seeds = [0, 4]")))
    expected = {
        (defense, attack, noise, None, seed)
        for defense in ("sgd", "dp_sgd")
        for seed in (0, 4)
        for attack, noise in (
            (None, None),
            ("likelihood_ratio", None),
            ("loss_threshold", None),
            ("inverting_gradients", "none"),
            ("inverting_gradients", "calibrated"),
        )
        if (defense, noise) != ("sgd", "calibrated")  # without noise the release is the same either way
    }
    assert set(found.values()) == expected and len(found) == len(expected)


def test_ids_do_not_depend_on_order_or_on_what_else_is_in_the_suite(suite_of):
    few = ids(suite_of(WITH_SHARE))
    more = WITH_SHARE.replace('{ name = "sgd" }', '{ name = "dpdr" }, { name = "sgd" }, { name = "clipped_sgd" }')
    more = more.replace("seeds = [0]", "seeds = [3, 0]").replace("epsilon = 3.0", "epsilon = [1.0, 3.0]")
    more = more.replace('{ name = "loss_threshold" }', '{ name = "one_step_likelihood_ratio" }')
    many = ids(suite_of(more))
    kept = {id for id, cell in few.items() if cell[1] != "loss_threshold"}
    assert kept < set(many)
    assert all(many[id] == few[id] for id in kept)
    turned = WITH_SHARE.replace('{ name = "sgd" }, { name = "dp_sgd" }', '{ name = "dp_sgd" }, { name = "sgd" }')
    assert turned != WITH_SHARE and ids(suite_of(turned)) == few


def test_an_id_is_that_of_the_content():
    assert digest_of({"a": 1, "b": [2.5, None]}) == digest_of({"b": [2.5, None], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 2})
    with pytest.raises(ValueError, match="JSON"):
        digest_of({"a": math.nan})
    # Written down: results of former versions must be found again.
    assert digest_of({"a": "é", "b": {"x": 1, "y": 2}}) == "8c91e817e1c7d6a02ac2722c0a831d06"


@subtests(
    ("old", "new"),
    [
        ("lr = 0.5", "lr = 0.6"),
        ("epochs = 1", "epochs = 2"),
        ("hidden = 8", "hidden = 9"),
        ("candidates = 100", "candidates = 101"),
        ("delta = 1e-5", "delta = 1e-6"),
        ("epsilon = 3.0", "noise_multiplier = 3.0"),
        ("batch = 70", 'batch = 70, sampling = "shuffle"'),
        ('name = "toy"', 'name = "toy2"'),
    ],
)
def test_whatever_decides_a_result_is_in_every_id(suite_of, old, new):
    assert SUITE.count(old) == 1
    before, after = (
        {id for id, cell in ids(suite_of(text)).items() if cell[0] == "dp_sgd"}
        for text in (SUITE, SUITE.replace(old, new))
    )
    assert len(before) == len(after) == 3 and not before & after


def test_what_only_describes_a_suite_is_in_no_id(suite_of):
    assert ids(suite_of(SUITE)) == ids(suite_of(SUITE + 'about = "words"\n'))


def test_secure_noise_makes_other_cells(suite_of):
    suite = suite_of(WITH_SHARE)
    seeded, secure = plan(suite), plan(suite, secure_noise=True)
    both = {cell.id for cell in seeded.cells} & {cell.id for cell in secure.cells}
    silent = {c.id for c in seeded.cells if words(c)[0] == "sgd" or c.request.release_noise == "none"}
    assert both == silent  # what has no noise is the same cell
    assert {c.request.secure for c in secure.cells if c.id not in both} == {True}


def test_a_defense_without_noise_runs_once_for_a_grid_of_budgets(suite_of):
    suite = suite_of(WITH_SHARE.replace("epsilon = 3.0", "epsilon = [1.0, 2.0, 3.0]"))
    budgets = {
        name: {tuple(c.request.budget.to_dict().items()) for c in plan(suite).cells if words(c)[0] == name}
        for name in ("sgd", "dp_sgd")
    }
    assert budgets["sgd"] == {(("delta", 1e-5),)}
    assert len(budgets["dp_sgd"]) == 3


def test_a_release_asked_for_with_its_noise_only_is_there_for_defenses_without_noise(suite_of):
    found = ids(suite_of(WITH_SHARE.replace("images = 1", 'images = 1, noise = "calibrated"')))
    shared = {cell for cell in found.values() if cell[1] == "inverting_gradients"}
    assert {cell[:3] for cell in shared} == {
        ("sgd", "inverting_gradients", "calibrated"),
        ("dp_sgd", "inverting_gradients", "calibrated"),
    }


def test_what_two_entries_both_come_to_is_computed_once(suite_of):
    text = SUITE.replace('{ name = "sgd" }', '{ name = "sgd" }, { name = "sgd", lr = 0.5 }, { name = "sgd", lr = 0.7 }')
    cells = plan(suite_of(text)).cells
    assert len(cells) == len({cell.id for cell in cells}) == 9


def test_cells_that_share_a_training_are_one_job_and_a_shared_update_is_its_own(suite_of):
    jobs = plan(suite_of(WITH_SHARE)).jobs
    kinds = [[cell.kind for cell in job.cells] for job in jobs]
    assert kinds.count(["utility", "membership", "membership"]) == 2
    assert kinds.count(["reconstruction"]) == 3 and len(kinds) == 5
    assert {job.words for job in jobs} == {
        "train sgd, seed 0",
        "train dp_sgd, seed 0",
        "share sgd, noise none, seed 0",
        "share dp_sgd, noise none, seed 0",
        "share dp_sgd, noise calibrated, seed 0",
    }


def test_with_controls_sgd_must_leak_and_a_model_that_never_saw_the_members_must_not(suite_of):
    cells = [words(cell) for cell in plan(suite_of(WITH_CONTROLS)).cells]
    assert {cell[3] for cell in cells if cell[0] == "sgd"} == {"positive", "negative"}
    # One that proves something is a negative control too: noise-free scores of who took no part are all alike.
    assert {cell[3] for cell in cells if cell[0] == "dp_sgd"} == {None, "negative"}
    negative = {cell[:2] for cell in cells if cell[3] == "negative"}
    both = {(name, attack) for name in ("sgd", "dp_sgd") for attack in ("likelihood_ratio", "loss_threshold", None)}
    assert negative == both | {("sgd", "inverting_gradients")}


def test_the_baseline_is_added_when_a_suite_with_controls_lacks_it(suite_of):
    text = WITH_CONTROLS.replace('{ name = "sgd" }, { name = "dp_sgd" }', '{ name = "dp_sgd" }')
    found = {words(cell)[0::3] for cell in plan(suite_of(text)).cells}
    assert found == {("dp_sgd", None), ("dp_sgd", "negative"), ("sgd", "positive"), ("sgd", "negative")}


def test_the_negative_control_trains_like_the_positive_one(suite_of):
    text = WITH_CONTROLS.replace('{ name = "sgd" }', '{ name = "sgd", lr = 2.0 }')
    cells = [cell for cell in plan(suite_of(text)).cells if cell.kind == "membership"]
    rates = {words(cell)[0::3]: cell.request.task["lr"] for cell in cells}
    alike = {("sgd", "positive"): 2.0, ("sgd", "negative"): 2.0}
    assert rates == alike | {("dp_sgd", None): 0.5, ("dp_sgd", "negative"): 0.5}


def test_a_selection_goes_without_controls(suite_of):
    assert {words(c)[0::3] for c in plan(suite_of(WITH_CONTROLS).select(defenses=["dp_sgd"])).cells} == {
        ("dp_sgd", None)
    }


def test_a_selected_baseline_is_the_same_cells_as_in_the_whole_suite(suite_of):
    suite = suite_of(WITH_CONTROLS)
    selected = {cell.id for cell in plan(suite.select(defenses=["sgd"])).cells}
    assert selected and selected < {cell.id for cell in plan(suite).cells}


def test_what_an_attack_needs_and_the_suite_lacks_is_known_before_any_compute(suite_of, site, monkeypatch):
    site.add("attacks", "spy", FEDERATED)
    text = WITH_SHARE.replace(SHARE, "").replace(INVERSION, f'{INVERSION}, {{ name = "spy" }}')
    monkeypatch.setattr(harness, "run_job", lambda *_, **__: pytest.fail("something was computed"))
    found = plan(suite_of(text))
    assert {words(cell)[1] for cell in found.skipped} == {"inverting_gradients", "spy"}
    assert {words(cell)[0] for cell in found.skipped} == {"sgd", "dp_sgd"}
    assert {cell.skip for cell in found.skipped} == {
        "inverting_gradients needs a shared update, and the suite has no [share] table",
        "spy needs messages of clients, and the suite has no [federated] table",
    }
    assert not {words(cell)[1] for job in found.jobs for cell in job.cells} & {"inverting_gradients", "spy"}


def test_local_steps_whose_plans_a_server_cannot_know_are_skipped_before_any_compute(suite_of):
    local = "step = 0, batch = 4, local = { epochs = 2, batch = 2 }"
    text = WITH_SHARE.replace("step = 1", local).replace(
        '{ name = "dp_sgd" }', '{ name = "dp_sgd" }, { name = "dpdr" }'
    )
    found = plan(suite_of(text))
    assert {words(cell)[:2] for cell in found.skipped} == {("dpdr", "inverting_gradients")}
    (sentence,) = {cell.skip for cell in found.skipped}
    assert sentence.startswith("'dpdr' cannot be shared as the sum of 4 local steps")
    # After the step in which it falls back to DP-SGD, and for a single local step, nothing is in the way.
    assert not plan(suite_of(text.replace("epochs = 2, batch = 2", "batch = 4"))).skipped
    later = text.replace("step = 0", "step = 4").replace('"dpdr"', '"dpdr", switch_step = 4')
    assert not plan(suite_of(later)).skipped


def test_local_steps_decide_an_id_and_single_ones_move_none(suite_of):
    def updates(share):
        return [c for c in plan(suite_of(WITH_SHARE.replace("step = 1", share))).cells if c.request.update]

    plain, local = updates("step = 0, batch = 4"), updates("step = 0, batch = 4, local = { batch = 2 }")
    assert {cell.id for cell in plain}.isdisjoint(cell.id for cell in local)
    assert all("local" not in cell.request.task for cell in plain)
    assert {json.dumps(cell.request.task["local"]) for cell in local} == {'{"epochs": 1, "batch": 2}'}


def test_a_federated_method_is_skipped_in_a_central_suite_with_its_sentence(suite_of):
    """Every cell, utility and shared updates included, and before any compute; the others are as they were."""
    text = WITH_SHARE.replace('{ name = "dp_sgd" }', '{ name = "dp_sgd" }, { name = "moon", mu = 5.0 }')
    with_it = plan(suite_of(text)).cells
    skipped = [cell for cell in with_it if cell.request.defense.name == "moon"]
    assert len(skipped) > 3
    assert {cell.skip for cell in skipped} == {
        "moon is a federated method, and this run has no clients; a suite's [federated] table has them"
    }
    assert {cell.id for cell in with_it} - {cell.id for cell in skipped} == {*ids(suite_of(WITH_SHARE))}


def test_an_attack_that_must_control_training_is_skipped_with_its_sentence(suite_of, site):
    source = FEDERATED.replace("Access.FEDERATED", "Access.ALL_STEPS, controls=Controls.CANARIES")
    source = source.replace("SeenMessages", "SeenTranscript")
    site.add("attacks", "spy", source.replace("import Access", "import Access, Controls"))
    (reason,) = {c.skip for c in plan(suite_of(SUITE.replace("loss_threshold", "spy"))).skipped}
    assert "CANARIES" in reason and "\n" not in reason


@subtests(
    ("old", "new", "sentence"),
    [
        ("batch = 70", "batch = 1400", r"task\.batch: must be at most 700, .* got 1400: a sample rate of 2"),
        ('"sgd" }', '"sgd", batch = 701 }', r"defense 'sgd'\.batch: must be at most 700"),
        ("batch = 70", "batch = 70, private = 60", r"task\.batch: must be at most 60, .* a sample rate of 1\.17"),
        (
            "batch = 70",
            "batch = 70, private = 1798",
            r"task\.data: sizes .* at most 1797, got 1798",
        ),
        ('"digits", model = { name', '"npz:nowhere.npz", model = { name', r"task\.data: .*nowhere\.npz"),
        ("images = 1", "images = 33, batch = 2", r"share\.batch: batch x images must be at most 64, .* got 2 x 33"),
        ("hidden = 8", "hidden = 0", r"toy\.toml: task\.model: 'mlp' cannot be built: hidden must be at least 1"),
        ("hidden = 8", 'hidden = "8"', r"toy\.toml: task\.model\.hidden: must be of type int, got '8'"),
        ('{ name = "mlp", hidden = 8 }', '"lenet"', r"task\.model: 'lenet' cannot be built: input_shape of lenet"),
        (
            '"dp_sgd" }',
            '"dp_sgd", views = 2, crop_padding = 8 }',
            r"views of 'dp_sgd': padding must be below .* 8x8 pix",
        ),
        (
            "epochs = 1",
            'epochs = 1, statistics = { of = "3", mean_norm = 1.0, square_norm = 1.0 }',
            r"task\.statistics: .* fixed features, and '3' has parameters",
        ),
        ('"photos", model = "mlp"', '"digits", model = "lenet"', r"share\.model: 'lenet' cannot be built"),
    ],
)
def test_sizes_and_models_that_do_not_fit_are_mistakes_of_the_suite(suite_of, old, new, sentence):
    assert WITH_SHARE.count(old) == 1
    with pytest.raises(SuiteError, match=sentence) as caught:
        plan(suite_of(WITH_SHARE.replace(old, new)))
    assert "\n" not in str(caught.value)


def test_views_and_averages_may_be_a_defenses_own_and_move_no_cell_of_others(suite_of):
    plain = ids(suite_of(SUITE))
    # What would be said of views means nothing without them.
    assert ids(suite_of(SUITE.replace("lr = 0.5,", "lr = 0.5, crop_padding = 2, horizontal_flip = false,"))) == plain
    own = '{ name = "dp_sgd", average = [0.9, 0.99], views = 4, horizontal_flip = false }'
    cells = plan(suite_of(SUITE.replace('{ name = "dp_sgd" }', own))).cells
    assert {cell.id for cell in cells} & set(plain) == {i for i, told in plain.items() if told[0] == "sgd"}
    recipes = {cell.request.training.recipe for cell in cells if cell.request.defense.name == "dp_sgd"}
    views = CropAndFlip(views=4, padding=4, flip=False)
    assert recipes == {Recipe(average=average, augmentation=views) for average in (0.9, 0.99)}
    # With a default written out, the same cells.
    written = suite_of(SUITE.replace('{ name = "dp_sgd" }', own.replace("views = 4", "views = 4, crop_padding = 4")))
    assert {cell.id for cell in plan(written).cells} == {cell.id for cell in cells}


PRETRAIN = '{ epochs = 2, lr = 0.1, batch = 20, train = "last" }'


def test_pretraining_may_be_a_defenses_own_and_moves_no_cell_of_others(suite_of):
    plain = ids(suite_of(SUITE))
    own = f'{{ name = "dp_sgd" }}, {{ name = "dp_sgd", pretrain = [{PRETRAIN}, {PRETRAIN.replace("last", "all")}] }}'
    suite = suite_of(SUITE.replace('{ name = "dp_sgd" }', own))
    cells = plan(suite).cells
    assert plain.keys() < {cell.id for cell in cells}
    asked = [cell.request.training.pretrain for cell in cells if cell.id not in plain]
    assert {one.train if one else None for one in asked} == {"last", "all"}
    # With a default written out, the same cells and the same suite.
    written = suite_of(SUITE.replace('{ name = "dp_sgd" }', own.replace("batch", 'optimizer = "sgd", batch')))
    assert written.digest == suite.digest and {cell.id for cell in plan(written).cells} == {cell.id for cell in cells}


def test_pretraining_of_a_task_is_that_of_every_defense_and_control_and_may_be_overridden(suite_of):
    text = SUITE.replace("lr = 0.5,", f"lr = 0.5, pretrain = {PRETRAIN},").replace("controls = false", "")
    cells = plan(suite_of(text)).cells
    assert {json.dumps(cell.request.training.to_dict()["pretrain"]) for cell in cells} == {
        '{"epochs": 2, "lr": 0.1, "batch": 20, "optimizer": "sgd", "train": "last"}'
    }
    longer = f"defense.dp_sgd.pretrain={PRETRAIN.replace('epochs = 2', 'epochs = 5')}"
    told = {
        (cell.request.defense.name, cell.request.control): cell.request.training.to_dict()["pretrain"]["epochs"]
        for cell in plan(suite_of(text).with_overrides([longer])).cells
    }
    assert told["dp_sgd", None] == 5 and set(told.values()) == {2, 5}


@subtests(
    ("old", "new", "sentence"),
    [
        ("lr = 0.5,", f"lr = 0.5, public = 0, pretrain = {PRETRAIN},", r"task\.pretrain: .*set task\.public"),
        (
            '{ name = "dp_sgd" }',
            f'{{ name = "dp_sgd", pretrain = {PRETRAIN.replace("20", "999")} }}',
            "pretrain of 'dp_sgd': batch must be at most 397, the public examples, got 999",
        ),
        (
            "lr = 0.5,",
            f"lr = 0.5, pretrain = {PRETRAIN.replace('}', ', rank = 9 }').replace('last', 'lora')},",
            "train = 'lora' does not fit the model: rank must be at most 8, that of layer '1', got 9",
        ),
    ],
)
def test_pretraining_that_cannot_be_is_a_mistake_of_the_suite(suite_of, old, new, sentence):
    with pytest.raises(SuiteError, match=sentence) as caught:
        plan(suite_of(SUITE.replace(old, new)))
    assert "\n" not in str(caught.value)


def test_a_model_with_batch_norm_is_refused_with_the_way_out(suite_of, monkeypatch):
    mixing = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    monkeypatch.setattr(planning, "initialised", lambda *_: mixing)
    with pytest.raises(SuiteError, match=r"task\.model: 'mlp' .*BatchNorm.*group_norm_instead"):
        plan(suite_of(SUITE))


def requests(suite) -> dict[tuple, Request]:
    return {words(cell): cell.request for cell in plan(suite).cells}


def test_attacks_on_one_model_share_its_seeds_and_other_trainings_have_their_own(suite_of):
    found = requests(suite_of(SUITE.replace("seeds = [0]", "seeds = [0, 1]")))
    sampler = {key: request.seed_for("sampler") for key, request in found.items()}
    assert len({sampler["dp_sgd", attack, None, None, 0] for attack in (None, "likelihood_ratio")}) == 1
    assert len(set(sampler.values())) == 4  # two defenses, two seeds
    one = found["dp_sgd", None, None, None, 0]
    assert len({one.seed_for(purpose) for purpose in ("sampler", "noise", "coins")}) == 3
    assert all(0 <= seed < 2**63 for seed in sampler.values())


def test_all_defenses_of_a_seed_start_from_the_same_weights():
    splits = load_data("digits", 0, Sizes(), torch.device("cpu"))
    first, again = (initialised("mlp", {"hidden": 8}, splits, 0).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = initialised("mlp", {"hidden": 8}, splits, 1).state_dict()
    assert not torch.equal(first["1.weight"], other["1.weight"])


def test_planned_steps_are_epochs_of_the_sampler(suite_of):
    (request, *_) = requests(suite_of(SUITE.replace("epochs = 1", "epochs = 3"))).values()
    sampling, steps = planned(request, 700)
    assert (sampling.kind, sampling.rate, steps) == ("poisson", 0.1, 30)
    (full, *_) = requests(suite_of(SUITE.replace("epochs = 1", 'epochs = 3, sampling = "full"'))).values()
    sampling, steps = planned(full, 700)
    assert (sampling.rate, steps) == (1.0, 3)


def test_a_negative_control_whose_pool_is_smaller_than_a_batch_takes_all_of_it(suite_of):
    found = requests(suite_of(WITH_CONTROLS.replace("batch = 70", "batch = 500")))
    sampling, steps = planned(found["sgd", "loss_threshold", None, "negative", 0], 397)
    assert (sampling.rate, steps) == (1.0, 1)
    with pytest.raises(ValueError, match="sample_rate"):
        planned(found["sgd", "loss_threshold", None, "positive", 0], 397)


def test_budgets_become_noise(suite_of):
    names = ["sgd", "clipped_sgd", "noisy_sgd", "dp_sgd"]
    text = SUITE.replace('{ name = "sgd" }, { name = "dp_sgd" }', ", ".join(f'{{ name = "{n}" }}' for n in names))
    found = {key[0]: request for key, request in requests(suite_of(text)).items() if key[1] is None}
    made = {name: defend(request, 700) for name, request in found.items()}
    assert {name: matched for name, (_, matched) in made.items() if matched} == {"noisy_sgd": True}
    sigma = {name: defense.noise_multiplier for name, (defense, _) in made.items()}
    assert sigma["sgd"] == sigma["clipped_sgd"] == 0
    assert sigma["noisy_sgd"] == sigma["dp_sgd"]
    sampling, steps = planned(found["dp_sgd"], 700)
    assert predict(made["dp_sgd"][0], sampling=sampling, steps=steps).claim(1e-5).epsilon == pytest.approx(3, rel=0.01)
    given = plan(suite_of(SUITE.replace("epsilon = 3.0", "noise_multiplier = [0.0, 1.5]"))).cells
    noise = [defend(c.request, 700)[0].noise_multiplier for c in given if words(c)[:2] == ("dp_sgd", None)]
    assert noise == [0.0, 1.5]


@subtests("budget", ["advantage = 0.3", "tpr = 0.05, fpr = 0.01"])
def test_budgets_in_what_a_test_of_membership_may_do_become_noise(suite_of, budget):
    names = ["clipped_sgd", "noisy_sgd", "dp_sgd"]
    text = SUITE.replace('{ name = "sgd" }, { name = "dp_sgd" }', ", ".join(f'{{ name = "{n}" }}' for n in names))
    text = text.replace("batch = 70", 'batch = 70, sampling = "full"')  # whose curves have a closed form
    cells = plan(suite_of(text.replace("epsilon = 3.0", budget))).cells
    found = {
        (r.defense.name, r.budget.advantage or r.budget.tpr): r for r in (c.request for c in cells) if not r.attack
    }
    limit = 0.3 if "advantage" in budget else 0.05
    # `clipped_sgd` adds no noise.
    assert found.keys() == {("clipped_sgd", None), ("noisy_sgd", limit), ("dp_sgd", limit)}
    request = found["dp_sgd", limit]
    (defense, matched), (sampling, steps) = defend(request, 700), planned(request, 700)
    claim = predict(defense, sampling=sampling, steps=steps).claim(1e-5)
    reached = claim.advantage if "advantage" in budget else claim.tpr_at(0.01)
    assert not matched and reached == pytest.approx(limit, rel=0.01) and not request.budget.overspent(claim)
    less = predict(defense.with_noise(0.9 * defense.calibrated_multiplier), sampling=sampling, steps=steps)
    assert request.budget.overspent(less.claim(1e-5))
    # An unbounded defense gets the noise that a bounded defense would need.
    other, matched = defend(found["noisy_sgd", limit], 700)
    assert matched and other.noise_multiplier == pytest.approx(defense.calibrated_multiplier, rel=2e-3)


STARTS = """
from leakbench.defenses.core import Block, Defense, Everything, StepPlan, clip


class Pruned:
    def start(self, context):
        return context.release(self.plan(None, context)[1].at(1.0))

    def plan(self, state, context):
        return state, StepPlan(Block(codec=Everything(context.dim), bound=clip(1.0)))

    def observe(self, state, context, noisy, update):
        return state


def borrowed(*, noise_multiplier: float | None = None) -> Defense:
    \"\"\"Releases something once, before its first step.\"\"\"
    return Defense(Pruned(), noise_multiplier=noise_multiplier)
"""


@pytest.mark.long
def test_what_a_method_releases_once_is_a_part_of_the_budget(suite_of, site):
    site.add("defenses", "borrowed", STARTS)
    text = SUITE.replace('{ name = "sgd" }, { name = "dp_sgd" }', '{ name = "dp_sgd" }, { name = "borrowed" }')
    text = text.replace("epsilon = 3.0", "epsilon = 8.0")
    found = {key[0]: request for key, request in requests(suite_of(text)).items() if key[1] is None}
    claims, sigma = {}, {}
    for name, request in found.items():
        (defense, matched), (sampling, steps) = defend(request, 700), planned(request, 700)
        assert not matched
        sigma[name] = defense.calibrated_multiplier
        claims[name] = predict(defense, sampling=sampling, steps=steps).claim(1e-5).epsilon
    assert all(7.9 < claimed <= 8 for claimed in claims.values())
    assert sigma["borrowed"] > sigma["dp_sgd"]


def test_a_budget_that_the_one_release_exceeds_by_itself_is_refused(suite_of, site):
    site.add("defenses", "borrowed", STARTS)
    text = SUITE.replace('{ name = "sgd" }, { name = "dp_sgd" }', '{ name = "borrowed" }')
    (request,) = (
        r for key, r in requests(suite_of(text.replace("controls = true", "controls = false"))).items() if not key[1]
    )
    with pytest.raises(ValueError, match="epsilon"):
        defend(request, 700)


def test_figures_of_papers_stand_beside_the_cells_they_are_about(suite_of):
    row = '\nreported = [{ defense = "dp_sgd", metric = "accuracy", value = 0.9, source = "Table 1" }]\n'
    cells = plan(suite_of(WITH_CONTROLS + row)).cells
    with_figures = [words(cell)[:2] for cell in cells if cell.reported]
    assert with_figures == [("dp_sgd", None)]
    # None beside a changed suite; a changed attack leaves accuracy as it was.
    for override, words_of_it in (("task.epochs=2", ("task.epochs 1 -> 2",)), ("seeds=[3]", ())):
        (cell,) = [
            one
            for one in plan(suite_of(WITH_CONTROLS + row).with_overrides([override])).cells
            if words(one)[:2] == ("dp_sgd", None) and one.request.control is None
        ]
        assert cell.changes == words_of_it and bool(cell.reported) == (not words_of_it)


def test_a_plan_takes_a_cell_once_and_a_job_says_what_it_is(suite_of):
    (cell, *_) = [
        c for c in plan(suite_of(WITH_CONTROLS)).cells if c.request.control == "positive" and c.kind == "utility"
    ]
    other = replace(cell, request=replace(cell.request, seed=3), skip="cannot")
    found = Plan()
    for _ in range(2):
        found.add([cell], "digest")
        found.add([other], "digest")
    assert (len(found.jobs), len(found.skipped), len(found.cells)) == (1, 1, 2)
    assert Job((cell,), "").words == "train sgd (positive control), seed 0"


FACTORY = """
from torch import nn

def build(*, input_shape, classes, width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[1] * input_shape[2], width), nn.Linear(width, classes))
"""


def test_a_model_and_data_of_ones_own_move_their_cells_when_they_change(suite_of, tmp_path):
    file, arrays = tmp_path / "net.py", tmp_path / "own.npz"
    file.write_text(FACTORY)
    draw = np.random.default_rng(0)

    def save():
        np.savez(arrays, x=draw.integers(0, 256, (300, 8, 8), dtype=np.uint8), y=draw.integers(0, 3, 300))

    save()
    text = SUITE.replace('"digits"', f'"npz:{arrays}"').replace("batch = 70", "batch = 20")
    text = text.replace('{ name = "mlp", hidden = 8 }', f'{{ name = "{file}:build", width = 5 }}')
    ids = [{cell.id for cell in plan(suite_of(text)).cells}]
    assert plan(suite_of(text)).cells[0].id in ids[0]
    file.write_text(FACTORY + "\n# another")
    ids.append({cell.id for cell in plan(suite_of(text)).cells})
    save()
    ids.append({cell.id for cell in plan(suite_of(text)).cells})
    assert not ids[0] & ids[1] and not ids[1] & ids[2]
    built_in = plan(suite_of(SUITE)).cells[0].request.task
    assert not {"data_digest", "model_digest"} & set(built_in)


@pytest.mark.peers
def test_layers_of_torchvision_that_mix_examples_are_replaced():
    pytest.importorskip("torchvision")
    splits = load_data("photos", 0, Sizes(), torch.device("cpu"))
    model = initialised("torchvision:resnet18", {}, splits, 0)
    kinds = {type(module) for module in model.modules()}
    assert nn.GroupNorm in kinds and nn.BatchNorm2d not in kinds
    assert model(splits.private.inputs[:2]).shape == (2, 10)


def test_whether_a_defense_reads_public_data_is_found_by_trying():
    read = {
        name: reads_public(RequestedMethod(kind="defenses", name=name, settings=settings))
        for name, settings in {"pcdp": {"rank": 3}, "dp_sgd": {}, "rpdp": {"rank": 3}}.items()
    }
    assert read == {"pcdp": True, "dp_sgd": False, "rpdp": False}


def test_a_share_of_ones_own_moves_its_cells_when_it_changes(suite_of, tmp_path):
    file = tmp_path / "net.py"
    file.write_text(FACTORY.replace("input_shape[1]", "3 * input_shape[1]"))
    text = WITH_SHARE.replace('"photos", model = "mlp"', f'"photos", model = "{file}:build"')
    assert str(file) in text

    def ids(kind):
        return {cell.id for cell in plan(suite_of(text)).cells if cell.kind == kind}

    before = {kind: ids(kind) for kind in ("reconstruction", "membership")}
    file.write_text(file.read_text() + "# another")
    assert not before["reconstruction"] & ids("reconstruction")
    assert before["membership"] == ids("membership")


def test_an_architecture_of_ones_own_is_its_file_and_what_it_imports_beside_it(tmp_path):
    (tmp_path / "net.py").write_text("def f(): ...\n")
    alone = planning._own("digits", f"{tmp_path}/net.py:f", Sizes(), 0)
    assert alone == {"model_digest": hashlib.sha256(b"def f(): ...\n").hexdigest()}
    (tmp_path / "net.py").write_text("from width import W\n")
    seen = set()
    for width in (4, 64):
        (tmp_path / "width.py").write_text(f"W = {width}\n")
        seen.add(planning._own("digits", f"{tmp_path}/net.py:f", Sizes(), 0)["model_digest"])
    assert len(seen) == 2
