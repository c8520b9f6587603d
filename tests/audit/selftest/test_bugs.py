"""Planted bugs are caught by the battery, correct trainers are not accused, and the catalogue knows no bug."""

import re
from functools import partial
from pathlib import Path

import pytest

from leakbench.audit.selftest import bugs, certificate
from leakbench.audit.selftest.battery import battery
from leakbench.audit.selftest.protocol import of_function
from leakbench.audit.selftest.trainers import VIEWS, of_catalogue, of_nominal_size, plain, under_defense

ROOT = Path(__file__).parents[3]
# Scenario by which each is caught.
CAUGHT = {
    "half_noise": "canary",
    "noise_divided_twice": "layers",
    "no_clipping": "order",
    "mean_clipped": "layers",
    "layers_at_full_norm": "layers",
    "inner_product_norms": "positions",
    "private_mask": "traces",
    "two_releases": "canary",
    "noise_reused": "steps",
    "dealt_batches": "participation",
    "divided_by_batch": "count",
    "divided_by_records": "count",
    "batch_norm": "buffers",
    "mask_changes": "traces",
    "seed_published": "traces",
    "float_lattice": "traces",
    "views_by_position": "order",
}
BUGS = {bug.name: bug for bug in bugs.BUGS}


def answers(trainer, *scenarios):
    """Tests that accuse a trainer, scenarios that failed, and the number of those asked."""
    found = battery(trainer, seed=0, only=set(scenarios) or None)
    return found.accused_by, found.failed, found.tests_run


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUGHT)
def test_a_planted_bug_is_caught(name):
    accused, failed, _ = answers(BUGS[name].trainer, CAUGHT[name])
    assert accused and not failed


@pytest.mark.slow
def test_a_bug_is_caught_and_the_loop_that_it_is_planted_in_is_not_accused():
    assert answers(BUGS["divided_by_batch"].trainer, "count") == (("size",), (), 1)
    assert answers(under_defense(plain), "count") == ((), (), 1)


@pytest.mark.long
def test_the_number_of_records_shows_in_our_default_and_not_with_a_nominal_size():
    assert answers(BUGS["divided_by_records"].trainer, "count") == (("size",), (), 1)
    assert answers(under_defense(plain, recipe=of_nominal_size), "count") == ((), (), 1)


@pytest.mark.long
def test_norms_by_inner_products_are_caught_by_positions_that_cancel_and_the_norms_of_the_loop_are_not():
    assert answers(BUGS["inner_product_norms"].trainer, "positions") == (("positions",), (), 1)
    assert answers(under_defense(plain), "positions") == ((), (), 1)


def test_there_are_seventeen_and_each_is_asked_for_by_name():
    assert list(CAUGHT) == list(BUGS) and len(BUGS) == 17
    assert [one.name for one in certificate.planted(["batch_norm"])] == ["batch_norm"]
    with pytest.raises(ValueError, match="no planted bug named 'none'; there are half_noise,"):
        certificate.planted(["none"])


def test_no_module_but_the_certificate_knows_a_bug():
    """So nothing that a suite or a user names can lead there."""
    knowing = []
    for package in ("defenses", "attacks", "audit", "benchmarks", "leaderboard"):
        for file in (ROOT / package).rglob("*.py"):
            if re.search(r"^\s*from\s+(\S*\.)?bugs\s+import\b", file.read_text(encoding="utf-8"), re.MULTILINE):
                knowing.append(file.relative_to(ROOT).as_posix())
    assert knowing == ["audit/selftest/certificate.py"]


CORRECT = {
    "plain": partial(under_defense, plain),
    "views": partial(under_defense, plain, augmentation=VIEWS),
    "nominal_size": partial(under_defense, plain, recipe=of_nominal_size),
} | {name: partial(of_catalogue, name) for name in certificate.representatives()}


def test_the_page_names_every_defense_that_the_self_test_runs():
    text = (ROOT / "docs/selftest.md").read_text(encoding="utf-8")
    assert [name for name in certificate.representatives() if f"`{name}`" not in text] == []
    assert f"which are {len(certificate.representatives())};" in text


@pytest.mark.slow
@pytest.mark.parametrize("trainer", CORRECT)
def test_a_correct_trainer_is_not_accused(trainer):
    assert answers(CORRECT[trainer]()) == ((), (), 11)


def test_representatives_are_of_different_kinds_and_prove_something():
    names = certificate.representatives()
    assert {"pcdp", "gep", "dpdr", "adaptive_clipping", "band_mf"} <= set(names)
    assert not {"sgd", "clipped_sgd", "noisy_sgd"} & set(names)


def opacus():
    pytest.importorskip("opacus")
    from leakbench.audit.selftest import opacus_trainer

    return opacus_trainer


@pytest.mark.peers
def test_opacus_is_not_accused_of_its_normaliser_or_batch_norm():
    found = battery(of_function(opacus().train, "Opacus"), seed=0, only={"buffers", "count"})
    assert not found.accused_by and found.tests_run == 1
    assert found.outcomes[-1].why.startswith("refused: ")


@pytest.mark.peers
def test_ghost_clipping_of_opacus_is_accused_by_positions_that_cancel_and_its_hooks_are_not():
    assert answers(of_function(opacus().train, "Opacus"), "positions") == ((), (), 1)
    accused = answers(of_function(opacus().train_ghost, "Opacus"), "positions")
    assert accused == (("positions",), (), 1), (
        "Opacus's ghost clipping bounds an example whose positions cancel: its row and section in docs/comparison.md, "
        "and its paragraph in docs/selftest.md, hold for Opacus 1.6.0 and must say from which version on they do not"
    )


@pytest.mark.slow
def test_opacus_is_not_accused_over_real_numbers_and_is_over_those_that_it_releases():
    assert not battery(of_function(opacus().train, "Opacus"), seed=0).accused_by
    held = battery(of_function(opacus().train_as_released, "Opacus"), seed=0, only={"traces"})
    assert held.accused_by == ("low_bits",)
