"""What attacks can reach and change of the auditor's things, for every access that a suite offers: nothing."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from leakbench.audit.catalog import methods as catalog
from leakbench.audit.plan.expand import plan
from leakbench.audit.run.job import compute
from leakbench.audit.subjects import trained_run
from leakbench.audit.subjects.outcome import Outcome
from leakbench.benchmarks import data

from ..attacks import walker
from ..parameters import long_but
from .conftest import SHARE, SUITE

CPU = torch.device("cpu")
BEFORE = '{ name = "likelihood_ratio" }, { name = "loss_threshold" }'
# What holds the truth, by the names of classes: none of them may lie on a path that an attack can walk.
HOLDS_TRUTH = {
    "AllSteps", "Candidates", "Cell", "GroundTruth", "Observed", "OngoingRun", "Run", "RunView", "Sampling",
    "SharedUpdates", "Split", "Splits", "Step", "TrainedModel", "TrainedRun",
}  # fmt: skip
MEMBERSHIP = ("thief_black_box", "thief_white_box", "thief_update", "thief_all_steps")


@pytest.fixture(autouse=True)
def beside_the_data(monkeypatch):
    """Attacks in this very process, which is what ours have: those of others get a process of their own."""
    monkeypatch.setattr(catalog, "attack", catalog.attack_here)


@pytest.fixture
def outcomes(suite_of, site):
    """Outcomes by attack of a suite with these attacks, of which those of the walker come as a third party's."""

    def computed(*names: str, text: str = SUITE, share: str = "") -> dict[str | None, Outcome]:
        walker.FOUND.clear()
        for name in names:
            if hasattr(walker, name) and name not in catalog.names("attacks"):
                site.add("attacks", name, f"from tests.attacks.walker import {name}\n")
        attacks = ", ".join(f'{{ name = "{name}" }}' for name in names)
        suite = suite_of(text.replace(BEFORE, attacks).replace('{ name = "sgd" }, ', "") + share)
        done = itertools.chain.from_iterable(compute(job.cells, CPU) for job in plan(suite).jobs)
        found = {cell.request.attack and cell.request.attack.name: outcome for cell, outcome in done}
        assert not [outcome.error for outcome in found.values() if outcome.error]
        return found

    return computed


@pytest.fixture
def failures(suite_of, site):
    """The sentences with which the cells of an attack fail."""

    def failed(name: str, text: str = SUITE) -> list[str]:
        site.add("attacks", name, f"from tests.attacks.walker import {name}\n")
        text = text.replace(BEFORE, f'{{ name = "{name}" }}').replace('{ name = "sgd" }, ', "")
        done = itertools.chain.from_iterable(compute(job.cells, CPU) for job in plan(suite_of(text)).jobs)
        return [outcome.error for cell, outcome in done if cell.kind == "membership"]

    return failed


def rows(inputs: Tensor) -> list[bytes]:
    return [row.contiguous().numpy().tobytes() for row in inputs]


def storages(loot: list) -> dict[int, bytes]:
    tensors = [one for one in loot if isinstance(one, Tensor)]
    return {tensor.untyped_storage().data_ptr(): walker.memory(tensor) for tensor in tensors}


def classes(loot: list) -> set[str]:
    return {type(one).__name__ for one in loot}


@pytest.mark.parametrize(
    ("name", "memory"),
    long_but([(MEMBERSHIP[0], 2**30)], [*((name, 2**30) for name in MEMBERSHIP), ("thief_all_steps", 10_000)]),
)
def test_a_thief_finds_no_member_and_no_list_of_members(outcomes, name, memory, monkeypatch):
    monkeypatch.setattr(trained_run, "TRANSCRIPT_MEMORY", memory)
    outcome = outcomes(name)[name]
    loot, splits = walker.FOUND[name], data.load("digits", seed=0)
    assert len(loot) < walker.MOST and {"Tensor"} <= classes(loot)
    assert not classes(loot) & HOLDS_TRUTH
    # Of the private examples candidates alone, and those in one place: the candidates that it was given.
    asked = torch.isin(splits.private.ids, torch.tensor(outcome.arrays["id"]))
    assert asked.any() and not asked.all()
    memories = list(storages(loot).values())
    others = rows(splits.private.inputs[~asked])
    assert not any(row in content for content in memories for row in others)
    holding = [content for content in memories if any(row in content for row in rows(splits.private.inputs[asked]))]
    (given,) = holding
    assert len(given) == len(outcome.arrays["id"]) * len(others[0])
    auc = outcome.metrics["auc"]
    assert auc.value == 0.5  # nobody was found, so all are tied
    real, member = torch.tensor(outcome.arrays["id"]), torch.tensor(outcome.arrays["member"])
    tensors = [one for one in loot if isinstance(one, Tensor)]
    numbers = [one for one in tensors if one.dtype == torch.int64]
    assert numbers  # ids and labels
    for one in numbers:
        assert not torch.isin(real[member], one).all()
    assert not any(one.dtype == torch.bool and one.numel() == len(real) for one in tensors)


@pytest.mark.long
def test_a_thief_finds_no_private_picture(outcomes):
    text = SUITE.replace("epsilon = 3.0", "noise_multiplier = 1.0")
    outcome = outcomes("thief_reconstruction", text=text, share=SHARE)["thief_reconstruction"]
    loot, splits = walker.FOUND["thief_reconstruction"], data.load("photos", seed=0)
    assert len(loot) < walker.MOST and not classes(loot) & HOLDS_TRUTH
    wanted = torch.tensor(np.array(outcome.arrays["original"])).float()
    memories = storages(loot).values()
    public = rows(splits.public.inputs)
    assert any(public[0] in content for content in memories)  # the search finds what is there
    for row in [*rows(wanted), *rows(splits.private.inputs), *rows(splits.non_member.inputs)]:
        assert not any(row in content for content in memories)


@pytest.mark.long
@pytest.mark.parametrize("name", ["vandal_white_box", "vandal_all_steps"])
def test_a_vandal_changes_nothing_for_the_cells_after_it(outcomes, name):
    after = ("likelihood_ratio", "loss_threshold", "one_step_likelihood_ratio")
    alone, disturbed = outcomes(*after), outcomes(name, *after)
    for attack in after:
        assert disturbed[attack].metrics == alone[attack].metrics
        assert disturbed[attack].flags == alone[attack].flags
        for column in ("id", "score", "member"):
            np.testing.assert_array_equal(disturbed[attack].arrays[column], alone[attack].arrays[column])


@pytest.mark.long
def test_a_vandal_changes_nothing_for_the_pictures_after_it_nor_for_their_floor(outcomes):
    share = SHARE.replace("images = 1", "images = 2")
    quiet = outcomes("thief_reconstruction", share=share)["thief_reconstruction"]
    loud = outcomes("vandal_reconstruction", share=share)["vandal_reconstruction"]
    assert loud.metrics == quiet.metrics
    assert loud.arrays["original"] == quiet.arrays["original"]


def test_who_forges_the_contributions_of_candidates_forges_its_own_alone(outcomes):
    auc = outcomes("forger")["forger"].metrics["auc"].value
    assert auc is not None and auc < 0.7  # members would stand out by a thousand where the noise is about one


def test_who_compares_what_is_left_for_one_candidate_with_what_is_left_for_others_is_refused(failures):
    (error,) = failures("comparer")
    assert error.startswith("ValueError: comparer must score a candidate by what is left without everybody else")


def test_who_compares_is_refused_where_steps_are_taken_once_more_and_four_ask_alone_at_once(failures, monkeypatch):
    monkeypatch.setattr(trained_run, "TRANSCRIPT_MEMORY", 10_000)
    (error,) = failures("comparer_all_steps")
    assert error.startswith("ValueError: comparer_all_steps must score a candidate by what is left without everybody")


@pytest.mark.parametrize("noise_multiplier", [1.0, 0.0])
def test_who_compares_is_refused_at_a_release_beside_steps_that_have_noise_or_none(failures, noise_multiplier):
    text = SUITE.replace('{ name = "dp_sgd" }', '{ name = "dp_snip" }')
    (error,) = failures("comparer_one_off", text.replace("epsilon = 3.0", f"noise_multiplier = {noise_multiplier}"))
    assert error.startswith("ValueError: comparer_one_off must score a candidate by what is left without everybody")


@pytest.mark.parametrize("name", ["by_id", "by_position"])
@pytest.mark.parametrize("test_set_stands_in", [False, True])
def test_neither_the_id_nor_the_place_of_a_candidate_tells_whether_it_is_a_member(
    outcomes, tmp_path, name, test_set_stands_in
):
    text = SUITE
    if test_set_stands_in:
        draw = np.random.default_rng(0)
        x, y = draw.integers(0, 256, (400, 8, 8), dtype=np.uint8), draw.integers(0, 3, 400)
        np.savez(tmp_path / "own.npz", x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])
        everybody = f'"npz:{tmp_path / "own.npz"}", private = 200, non_member = 0, public = 0'
        text = text.replace('"digits"', everybody).replace("batch = 70", "batch = 20")
    auc = outcomes(name, text=text)[name].metrics["auc"]
    assert auc.n == 200 and auc.value is not None
    assert abs(auc.value - 0.5) < 5 * (201 / (12 * 100**2)) ** 0.5  # five standard errors of chance


@pytest.mark.long
def test_ids_are_drawn_for_each_cell_and_answers_come_back_under_those_of_the_data_set(outcomes):
    first = outcomes("by_id")["by_id"]
    ids, inputs = walker.FOUND["by_id"]
    again = outcomes("by_id")["by_id"]
    assert torch.equal(walker.FOUND["by_id"][0], ids)  # of the same cell the same
    outcomes("by_id", text=SUITE.replace("seeds = [0]", "seeds = [1]"))
    assert not torch.isin(walker.FOUND["by_id"][0], ids).any()
    assert ids.min() > 2**40 and (ids.diff() > 0).all()
    real = first.arrays["id"]
    assert (np.diff(real) > 0).all() and (again.arrays["id"] == real).all()
    # By content: every score lies beside the id of the example that it is about.
    splits = data.load("digits", seed=0)
    pool = torch.cat([splits.private.inputs, splits.non_member.inputs]).flatten(1)
    places = torch.cat([splits.private.ids, splits.non_member.ids])
    for alias, row in zip(ids[:20], inputs.flatten(1)[:20], strict=True):
        (same,) = places[(pool == row).all(dim=1)]
        assert first.arrays["score"][real == int(same)] == -float(alias)
