"""Picks among candidates, from a suite to its board: near the bound, at chance for a decoy, and apart from pictures."""

import copy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from leakbench.attacks.core import Examples, Knows, Reconstruction
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.plan.expand import plan
from leakbench.audit.run import harness
from leakbench.audit.run.job import compute
from leakbench.audit.run.verify import contradiction
from leakbench.audit.scoring.robustness import gaussian_bound
from leakbench.audit.subjects import shared_update
from leakbench.audit.suite import suite as suites
from leakbench.audit.suite.suite import SuiteError
from leakbench.benchmarks import data
from leakbench.leaderboard.board.reconstruction_summary import reconstruction_summaries
from leakbench.leaderboard.board.table import Board
from leakbench.leaderboard.page.build import build

from ..conftest import SUITE

CPU = torch.device("cpu")
SHARE = (
    '\nshare = { data = "photos", model = { name = "mlp", hidden = 8 }, step = 1, batch = 2, images = 32, lr = 0.1 }\n'
)
TEXT = SUITE.replace('{ name = "likelihood_ratio" }, { name = "loss_threshold" }', '{ name = "rero" }')
TEXT = TEXT.replace("epsilon = 3.0", "noise_multiplier = [1.0, 0.05]").replace("controls = false", "controls = true")
TEXT = TEXT.replace("epochs = 1", "private = 200, epochs = 1") + SHARE


def suite_in(folder, text):
    path = folder / "toy.toml"
    path.write_text(text, encoding="utf-8")
    return suites.load(path)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run with its records, those of choices by (noise multiplier asked for, noise of the release, control)."""
    folder = tmp_path_factory.mktemp("choices")
    records = harness.run(suite_in(folder, TEXT), folder / "out", device=CPU, jobs=1)
    assert [record.reason for record in records if record.status != "ok"] == []
    found = {
        (record.budget.get("noise_multiplier"), record.task["noise"], record.control): record
        for record in records
        if record.kind == "reconstruction"
    }
    return folder / "out", records, found


@pytest.mark.long
def test_success_is_near_the_bound_under_noise_high_with_little_and_certain_without(ran):
    _, _, found = ran
    for (sigma, noise, control), record in found.items():
        success, bound = record.metrics["prior_success"], record.metrics["rero_bound"]
        assert success.n == 32 and success.detail["kappa"] == 0.1 and success.low <= success.value <= success.high
        assert "claim_violated" not in record.flags
        if noise == "none":
            assert bound.value is None and "nothing is proved" in str(bound.reason)
            assert (success.value <= 0.4) if control == "negative" else (success.value == 1)
            continue
        # The record that is sought has one chance, whatever the batch.
        assert bound.value == pytest.approx(gaussian_bound(0.1, 1 / sigma)) and bound.detail["batch"] == 1
        hits = round((success.value or 0.0) * 32)
        assert stats.binom.sf(hits - 1, 32, min(bound.value, 1 - 1e-9)) > 1e-6
        assert success.value > (0.9 if sigma == 0.05 else 0.2)
    assert len(found) == 6


@pytest.mark.long
def test_none_of_its_pictures_is_scored_shown_or_told_as_found(ran):
    folder, _, found = ran
    for record in found.values():
        measured = {name for name, metric in record.metrics.items() if metric.value is not None}
        assert measured <= {"prior_success", "rero_bound", "objective"}
    board = Board.from_folder(folder, contradiction)
    told = dict(reconstruction_summaries(board.rows))
    for sentence in told.values():
        assert "rero picks the image out of 10 candidates in" in sentence and "LEAKS" not in sentence
    assert any("0.39 at most by the claim" in sentence for sentence in told.values())
    assert any("no claim bounds it" in sentence for sentence in told.values())
    for row in board.rows:
        assert row.estimates["psnr_free"].value is None and row.estimates["psnr_noisy"].value is None
    words = board.to_text(width=250)
    assert "picked," in words and "1.00 [0.89, 1.00]" in words
    page = build(folder, folder / "page").read_text(encoding="utf-8")
    assert "Picked right" in page and "data:image/png" not in page and "holds no images" not in page


@pytest.mark.long
def test_its_controls_are_judged_by_what_was_picked(ran):
    folder, _, _ = ran
    board = Board.from_folder(folder, contradiction)
    verdicts = {c.name: c for c in board.controls if "choice" in c.name}
    assert len(verdicts) == 2 and all(c.ok for c in verdicts.values())
    assert {c.expected for c in verdicts.values()} == {"picked right above chance", "picked right not above chance"}
    assert not any("reconstruction" in c.name for c in board.controls)


@pytest.mark.long
def test_what_was_picked_lies_beside_the_record_and_gives_its_share_again(ran):
    folder, _, found = ran
    places = []
    for record in found.values():
        assert contradiction(record, folder / "records") == ""
        table = pd.read_parquet(folder / "records" / str(record.arrays))
        assert (table.picked == table.sought).mean() == record.metrics["prior_success"].value
        places.append(table.sought.to_numpy())
        forged = copy.deepcopy(record.metrics)
        forged["prior_success"] = replace(forged["prior_success"], value=0.5, low=0.4, high=0.6)
        assert "its prior_success is 0.5" in contradiction(replace(record, metrics=forged), folder / "records")
    # The same candidates in the same order for every budget and control; the truth is at many places.
    assert all(np.array_equal(places[0], other) for other in places) and len(set(places[0])) > 5


class Watching:
    """Stands in for an attack on a prior: keeps what it is given and picks the first candidate."""

    def __init__(self, real):
        self.requires, self.kind, self.check, self.seen = real.requires, real.kind, real.check, []
        self.answer = lambda prior: prior.inputs[:1]

    def __call__(self, target, coins, **settings) -> Reconstruction:
        self.seen.append(target)
        inputs = self.answer(target.prior)
        return Reconstruction(inputs=inputs, labels=torch.zeros(len(inputs), dtype=torch.int64), objective=0.0)


@pytest.fixture
def watching(monkeypatch):
    double = Watching(catalog.attack("rero"))
    real = catalog.attack
    monkeypatch.setattr(catalog, "attack", lambda name: double if name == "rero" else real(name))
    return double


def outcomes(text, folder, **wanted):
    """Outcomes of the choices of a suite, with the given noise of the release and control."""
    cells = [
        cell
        for cell in plan(suite_in(folder, text)).cells
        if cell.kind == "reconstruction"
        and (cell.request.release_noise, cell.request.control) == (wanted["noise"], wanted["control"])
    ]
    found = [result for cell in cells for _, result in compute((cell,), CPU)]
    assert [one.error for one in found if one.error] == []
    return found


def rows_of(images: torch.Tensor) -> set[bytes]:
    return {one.numpy().tobytes() for one in images}


@pytest.mark.long
def test_candidates_took_part_in_nothing_that_the_attacker_sees(watching, tmp_path):
    photos = data.load("photos", seed=0)
    private, others = rows_of(photos.private.inputs), rows_of(photos.non_member.inputs)
    (positive,) = outcomes(TEXT, tmp_path, noise="none", control="positive")
    trained = watching.seen[:]
    watching.seen.clear()
    (negative,) = outcomes(TEXT, tmp_path, noise="none", control="negative")
    for image, (one, decoy) in enumerate(zip(trained, watching.seen, strict=True)):
        assert torch.equal(one.prior.inputs, decoy.prior.inputs) and torch.equal(one.prior.labels, decoy.prior.labels)
        given, sought = [x.numpy().tobytes() for x in one.prior.inputs], positive.arrays["sought"][image]
        assert given[sought] in private and sum(x in private for x in given) == 1 and len(set(given)) == 10
        assert set(given) - {given[sought]} <= others
        # Neither the decoy of the control, nor those of the step before.
        shown = rows_of(photos.non_member.inputs[image * 2 : image * 2 + 2])
        past = rows_of(photos.non_member.inputs[[63 - image * 2, 62 - image * 2]])
        assert not set(given) & (shown | past)
        # The one that is sought is in the release, with somebody else.
        own = one.contributions(one.prior.inputs[sought : sought + 1], one.prior.labels[sought : sought + 1])[0]
        torch.testing.assert_close(one.remainder, own.double(), atol=1e-4, rtol=1e-4)
        assert not torch.allclose(one.released * 2, own, atol=1e-3)
    # Whoever picks by the order alone has what chance gives: 32 targets of 10 candidates, more than 14 are improbable.
    for found in (positive, negative):
        assert (found.metrics["prior_success"].value or 0.0) <= 14 / 32


@pytest.mark.long
def test_an_attack_cannot_change_what_it_is_scored_against(watching, tmp_path):
    def overwrites(prior: Examples) -> torch.Tensor:
        prior.inputs.copy_(prior.inputs[:1].expand_as(prior.inputs))
        return prior.inputs[:1]

    honest = outcomes(TEXT, tmp_path, noise="none", control="positive")[0].metrics["prior_success"]
    watching.answer = overwrites
    assert outcomes(TEXT, tmp_path, noise="none", control="positive")[0].metrics["prior_success"] == honest
    watching.answer = lambda prior: prior.inputs[:2]  # of two guesses the truth would choose the better
    (cell,) = [
        cell
        for cell in plan(suite_in(tmp_path, TEXT)).cells
        if cell.kind == "reconstruction" and cell.request.control == "positive"
    ]
    ((_, refused),) = compute((cell,), CPU)
    assert "inputs must be one of the candidates" in refused.error


@pytest.mark.long
def test_candidates_that_are_an_official_test_set_are_flagged(watching, tmp_path, monkeypatch):
    real = shared_update.load_splits
    assert "non_members_are_test" not in outcomes(TEXT, tmp_path, noise="none", control="positive")[0].flags

    def stand_in(*asked, **of):
        splits = real(*asked, **of)
        return replace(splits, test=splits.non_member)

    monkeypatch.setattr(shared_update, "load_splits", stand_in)
    assert "non_members_are_test" in outcomes(TEXT, tmp_path, noise="none", control="positive")[0].flags


@pytest.mark.long
def test_who_picks_everything_right_under_noise_is_a_violation(watching, tmp_path):
    photos = rows_of(data.load("photos", seed=0).private.inputs)
    knows = lambda prior: torch.stack([x for x in prior.inputs if x.numpy().tobytes() in photos])  # noqa: E731 - cheats
    watching.answer = knows
    strong, weak = outcomes(TEXT, tmp_path, noise="calibrated", control=None)
    assert strong.metrics["prior_success"].value == weak.metrics["prior_success"].value == 1
    assert (
        "claim_violated" in strong.flags and "claim_violated" not in weak.flags
    )  # 1 at a multiplier of 0.05 is allowed


def test_more_candidates_are_other_cells_of_who_picks_and_of_nobody_else(tmp_path):
    both = TEXT.replace('{ name = "rero" }', '{ name = "rero" }, { name = "bias_division" }')

    def ids(text, attack):
        return {
            c.id for c in plan(suite_in(tmp_path, text)).cells if c.request.attack and c.request.attack.name == attack
        }

    more = both.replace("lr = 0.1 }\n", "lr = 0.1, prior = 20 }\n")
    usual = both.replace("lr = 0.1 }\n", "lr = 0.1, prior = 10 }\n")
    assert more != both != usual
    assert (
        ids(more, "bias_division")
        == ids(both, "bias_division")
        == ids(TEXT.replace("rero", "bias_division"), "bias_division")
    )
    assert ids(usual, "rero") == ids(both, "rero") and not ids(more, "rero") & ids(both, "rero")
    with pytest.raises(SuiteError, match=r"share.prior: must be at most 61, .*, got 62"):
        plan(suite_in(tmp_path, both.replace("lr = 0.1 }\n", "lr = 0.1, prior = 62 }\n")))
    # Who asks for no choice may have any number of it.
    plan(suite_in(tmp_path, TEXT.replace("rero", "bias_division").replace("lr = 0.1 }\n", "lr = 0.1, prior = 62 }\n")))


def test_suites_offer_candidates_for_shared_updates_alone(tmp_path):
    needs = [catalog.attack(name).requires.knows for name in catalog.names("attacks")]
    assert sum(Knows.PRIOR in one for one in needs) == 1
    alone = TEXT[: TEXT.index("\nshare")]
    (cell, *_) = [c for c in plan(suite_in(tmp_path, alone)).cells if c.request.attack is not None]
    assert "needs a shared update" in cell.skip
