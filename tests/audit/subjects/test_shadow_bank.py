"""Shadow banks: what models of a target's own training answer, whom each was trained on, and who waits for which."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leakbench.attacks.core import Examples, NotApplicable
from leakbench.attacks.core.membership.shadow_statistics import log_odds
from leakbench.audit.plan.artifact import Artifact
from leakbench.audit.plan.build import load_splits
from leakbench.audit.plan.cells import Cell
from leakbench.audit.plan.expand import plan
from leakbench.audit.run import harness
from leakbench.audit.subjects import shadow_bank
from leakbench.audit.subjects.outcome import candidate_pools, join
from leakbench.audit.subjects.shadow_bank import ShadowStack, by_content, halves_of, packed, read_bank, unpacked
from leakbench.audit.suite.suite import SuiteError
from leakbench.benchmarks.core import Splits
from leakbench.defenses.core import StackError

CPU = torch.device("cpu")
SUITE = """
name = "shadows_toy"
about = "A toy."
seeds = [0]
task = { data = "digits", model = { name = "mlp", hidden = 16 }, SIZES, batch = 30, epochs = 2, lr = 0.5 }
budget = { noise_multiplier = 1.0, delta = 1e-5 }
defense = [{ name = "sgd" }, { name = "dp_sgd", clip_norm = 1.0 }]
attack = [{ name = "lira", shadows = 4 }, { name = "lira", shadows = 4, online = false }, { name = "loss_threshold" }]
controls = true
""".replace("SIZES", "private = 121, non_member = 90, candidates = 80")


def cell_of(suite, defense: str = "dp_sgd", control: str | None = None, attack: str = "lira") -> Cell:
    return next(
        cell
        for cell in plan(suite).cells
        if (cell.request.defense.name, cell.request.control) == (defense, control)
        and cell.request.attack is not None
        and cell.request.attack.name == attack
    )


def stack_of(cell: Cell) -> ShadowStack:
    (artifact,) = cell.needs
    assert isinstance(artifact.make, ShadowStack)
    return artifact.make


@pytest.fixture
def trained_on(monkeypatch):
    """Inputs and keys of each training in a bank; every second stack is trained one after another."""
    seen = []
    real, together = shadow_bank.train, shadow_bank.train_stacked

    def watched(model, examples, *arguments, **settings):
        seen.append((examples[0].clone(), settings["seed"], settings["sampler_key"]))
        return real(model, examples, *arguments, **settings)

    def watched_stack(models, pool, chosen, *arguments, **settings):
        seen.extend(
            (pool[0][one], seed, key)
            for one, seed, key in zip(chosen, settings["seeds"], settings["sampler_keys"], strict=True)
        )
        return together(models, pool, chosen, *arguments, **settings)

    monkeypatch.setattr(shadow_bank, "train", watched)
    monkeypatch.setattr(shadow_bank, "train_stacked", watched_stack)
    return seen


@pytest.mark.parametrize("stacked", [True, False])
def test_every_model_is_trained_on_its_half_and_on_as_many_others_as_the_target(
    suite_of, trained_on, monkeypatch, stacked
):
    stack = stack_of(cell_of(suite_of(SUITE)))
    if not stacked:
        monkeypatch.setattr(shadow_bank, "train_stacked", refuse_to_stack)
    stack(CPU)
    splits = load_splits(stack.request, CPU)
    asked = by_content(join(*candidate_pools(splits, 80, CPU)))
    halves = halves_of(splits, 160, 4)
    pools = join(shadow_bank.examples_of(splits.private, CPU), shadow_bank.examples_of(splits.non_member, CPU))
    assert len(trained_on) == 4
    for half, (inputs, *_) in zip(halves, trained_on, strict=True):
        assert len(inputs) == 121
        found = {tuple(row) for row in inputs.flatten(1).tolist()}
        assert [tuple(row) in found for row in asked.inputs.flatten(1).tolist()] == half.tolist()
        assert found <= {tuple(row) for row in pools.inputs.flatten(1).tolist()}
    # Neither the noise, nor the sampler, nor the masks of one model are those of another.
    for number in (1, 2):
        assert len({keys[number] for keys in trained_on}) == 4


def test_halves_tell_nothing_of_who_is_a_member(suite_of):
    splits = load_splits(stack_of(cell_of(suite_of(SUITE))).request, CPU)
    halves = halves_of(splits, 160, 256)
    inside, outside = candidate_pools(splits, 80, CPU)
    asked = join(inside, outside)
    member = torch.isin(by_content(asked).ids, inside.ids)
    # Of half of the models each, so of 20 pairs' first halves a mean of 40 +- 0.4.
    share = halves[::2, member].double().sum(1).mean()
    assert abs(float(share) - 40) < 5 * (40 / 2 * 160 / 159 / 128) ** 0.5
    places = places_in_bank(splits, asked)
    assert sorted(places.tolist()) == list(range(160))
    # Ranks of the 80 members among 160: a mean of 79.5, in whatever order pools come, and a deviation of 3.7.
    assert abs(float(places[:80].double().mean()) - 79.5) < 4 * 3.7


def places_in_bank(splits, asked: Examples) -> torch.Tensor:
    """Of each candidate, from what an attack is given and the digest, which records show."""
    count = len(asked)
    bank = Artifact(request={}, words="", make=lambda _: {})
    empty = {"logits": packed(torch.zeros(256, count, 1, 10)), "population": packed(torch.zeros(256, 0, 10))}
    given = read_bank([bank], {bank.name: empty}, splits, asked, asked.ids).trained_on
    table = {tuple(column): place for place, column in enumerate(halves_of(splits, count, 256).T.tolist())}
    return torch.tensor([table[tuple(column)] for column in given.T.tolist()])


def test_halves_tell_nothing_where_an_official_test_set_stands_in_for_non_members():
    """Its examples have the highest ids: in the order of those all members would come first."""
    pixels = torch.rand(160, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    pools = (torch.arange(80), torch.arange(0), torch.arange(0))
    splits = Splits.cut(
        pixels, torch.arange(160) % 10, pools, name="toy", classes=10, in_distribution_public=True, about="a toy",
        test=torch.arange(80, 160),
    )  # fmt: skip
    asked = join(*candidate_pools(splits, 80, CPU))
    places = places_in_bank(splits, asked)
    assert sorted(places.tolist()) == list(range(160))
    assert abs(float(places[:80].double().mean()) - 79.5) < 4 * 3.7


def test_the_stacks_of_a_small_bank_are_the_first_of_a_large_one(suite_of):
    names = {}
    for models in (8, 16, 20):
        many = suite_of(SUITE.replace("shadows = 4 }", f"shadows = {models} }}"))
        names[models] = [artifact.name for artifact in cell_of(many).needs]
    assert names[16] == names[20][:2] and names[8] == names[16][:1] and len(set(names[20])) == 3


def test_models_of_one_stack_and_of_others_differ(suite_of):
    first = stack_of(cell_of(suite_of(SUITE)))
    answers = [unpacked(dataclasses.replace(first, first=start)(CPU)["logits"]) for start in (0, 4)]
    flat = torch.cat(answers).flatten(1)
    assert float((torch.corrcoef(flat) - torch.eye(8)).max()) < 0.999
    assert torch.equal(unpacked(first(CPU)["logits"]), answers[0])


@pytest.mark.long
@pytest.mark.parametrize("defense", ["sgd", pytest.param("dp_sgd", marks=pytest.mark.slow)])
def test_a_stack_and_models_one_after_another_answer_alike(suite_of, monkeypatch, defense):
    """Up to the coins of sampling and noise: by how much surer they are of what they were trained on."""
    more = SUITE.replace("shadows = 4 }", "shadows = 8 }").replace("epochs = 2", "epochs = 25")
    stack = stack_of(cell_of(suite_of(more), defense, "positive" if defense == "sgd" else None))
    splits = load_splits(stack.request, CPU)
    asked, halves = by_content(join(*candidate_pools(splits, 80, CPU))), halves_of(splits, 160, 8)
    gains = []
    for alone in (False, True):
        if alone:
            monkeypatch.setattr(shadow_bank, "train_stacked", refuse_to_stack)
        odds = log_odds(unpacked(stack(CPU)["logits"]), asked.labels)[..., 0]
        gains.append(float(odds[halves].mean() - odds[~halves].mean()))
    assert gains[0] == pytest.approx(gains[1], abs=0.25), gains
    assert defense != "sgd" or min(gains) > 0.5


def refuse_to_stack(*arguments, **settings):
    raise StackError("not today")


def test_a_bank_is_shared_by_attacks_controls_and_suites_and_by_no_other_training(suite_of):
    suite = suite_of(SUITE)
    jobs = plan(suite).jobs
    by_defense = {}
    for job in jobs:
        by_defense.setdefault(job.cells[0].request.defense.name, set()).update(job.needs)
    assert {name: len(needs) for name, needs in by_defense.items()} == {"sgd": 1, "dp_sgd": 1}
    assert not by_defense["sgd"] & by_defense["dp_sgd"]
    (same,) = cell_of(suite_of(SUITE.replace("shadows_toy", "another"))).needs
    assert {same.name} == by_defense["dp_sgd"]
    for changed in (
        SUITE.replace("epochs = 2", "epochs = 3"),
        SUITE.replace("noise_multiplier = 1.0", "noise_multiplier = 2.0"),
        SUITE.replace("clip_norm = 1.0", "clip_norm = 0.5"),
        SUITE.replace("seeds = [0]", "seeds = [1]"),
        SUITE.replace("candidates = 80", "candidates = 70"),
    ):
        (other,) = cell_of(suite_of(changed)).needs
        assert other.name not in by_defense["dp_sgd"]
    assert not cell_of(suite, attack="loss_threshold").needs
    many = SUITE.replace("shadows = 4 }", "shadows = 36 }")
    made = [artifact.make for artifact in cell_of(suite_of(many)).needs]
    assert [stack.count for stack in made if isinstance(stack, ShadowStack)] == [8, 8, 8, 8, 4]


def test_answers_come_in_the_order_of_the_candidates_with_the_half_of_each(suite_of):
    cell = cell_of(suite_of(SUITE))
    stack = stack_of(cell)
    splits = load_splits(stack.request, CPU)
    asked = by_content(join(*candidate_pools(splits, 80, CPU)))
    results = {cell.needs[0].name: stack(CPU)}
    plain = read_bank(cell.needs, results, splits, asked, asked.ids)
    assert plain.population is not None and plain.population.shape == (4, len(splits.public), 10)
    order = torch.randperm(160, generator=torch.Generator().manual_seed(3))[:50]
    some = read_bank(cell.needs, results, splits, asked, asked.ids[order])
    assert torch.equal(some.logits, plain.logits[:, order])
    assert torch.equal(some.trained_on, halves_of(splits, 160, 4)[:, order])


def test_a_bank_with_a_model_that_diverged_is_refused(suite_of):
    cell = cell_of(suite_of(SUITE))
    asked = join(*candidate_pools(load_splits(stack_of(cell).request, CPU), 80, CPU))
    logits = torch.zeros(4, 160, 1, 10)
    logits[2, 5] = torch.nan
    result = {"logits": packed(logits), "population": packed(torch.zeros(4, 0, 10))}
    splits = load_splits(stack_of(cell).request, CPU)
    with pytest.raises(NotApplicable, match="1 of its 4 shadow models diverged"):
        read_bank(cell.needs, {cell.needs[0].name: result}, splits, asked, asked.ids)


@pytest.mark.long
def test_a_suite_runs_it_keeps_the_bank_and_records_who_knew_what(suite_of, tmp_path):
    suite, told = suite_of(SUITE), []
    records = harness.run(suite, tmp_path, device=CPU, jobs=1, report=lambda *told_of: told.append(told_of))
    # Shadow models are pieces of the run, too: they take most of its time.
    assert sum(words.startswith("train shadow models") for _, _, words in told) == 2
    assert told[-1][0] == told[-1][1] == len(records) + 2
    by_lira = [r for r in records if r.attack is not None and r.attack.name == "lira"]
    assert by_lira and all(r.status == "ok" and r.requires["knows"] == ["SHADOWS"] for r in by_lira)  # type: ignore[index]
    stores = sorted((tmp_path / "artifacts").glob("*.json"))
    assert len(stores) == 2  # of two defenses, whatever the attacks and controls
    before = {path: path.stat().st_mtime_ns for path in stores}
    kept = {r.id: r.metrics["auc"].value for r in by_lira}
    for path in (tmp_path / "records").glob("*.json"):
        path.unlink()
    again = harness.run(suite, tmp_path, device=CPU, jobs=1)
    assert {r.id: r.metrics["auc"].value for r in again if r.id in kept} == kept
    assert {path: path.stat().st_mtime_ns for path in stores} == before


@pytest.mark.long
def test_a_bank_that_fails_is_the_error_of_the_cells_that_read_it_alone(suite_of, tmp_path, monkeypatch):
    def broken(self, device):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(ShadowStack, "__call__", broken)
    records = harness.run(suite_of(SUITE), tmp_path, device=CPU, jobs=1)
    for record in records:
        reads = record.attack is not None and record.attack.name == "lira"
        assert record.status == ("failed" if reads else "ok"), record.reason
        assert not reads or "train shadow models 1 to 4 of" in (record.reason or "")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("shadows = 3", "shadows of lira must be an even number, at least 2: they halve the candidates, got 3"),
        ("shadows = 0", "got 0"),
        ("shadows = 4, views = 19", r"views of lira must be a whole number in \[1, 18\], got 19"),
    ],
)
def test_impossible_banks_are_refused_before_anything_is_computed(suite_of, settings, sentence):
    with pytest.raises(SuiteError, match=sentence):
        plan(suite_of(SUITE.replace("shadows = 4 }", settings + " }")))


def test_views_of_what_is_no_image_are_refused_before_a_model_is_trained(suite_of, monkeypatch):
    cell = cell_of(suite_of(SUITE.replace("shadows = 4 }", "shadows = 4, views = 2 }")))
    pools = candidate_pools(load_splits(stack_of(cell).request, CPU), 80, CPU)
    flat = tuple(dataclasses.replace(pool, inputs=pool.inputs.flatten(1)) for pool in pools)
    monkeypatch.setattr(shadow_bank, "candidate_pools", lambda *_: flat)
    monkeypatch.setattr(ShadowStack, "_trained", lambda *_: pytest.fail("models were trained"))
    with pytest.raises(NotApplicable, match=r"views are of images .* got inputs of \[64\]"):
        stack_of(cell)(CPU)


@given(shape=st.lists(st.integers(0, 3), max_size=3), seed=st.integers(0, 9))
def test_packed_tensors_come_back_bit_for_bit(shape, seed):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    back = unpacked(json.loads(json.dumps(packed(values))))
    assert torch.equal(back, values)
    odd = torch.tensor([torch.nan, torch.inf, -0.0])
    assert torch.equal(unpacked(packed(odd)).isnan(), odd.isnan())


def test_a_torn_array_is_refused():
    content = packed(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="must have 28 bytes, got 24"):
        unpacked(content | {"shape": [7]})


MINE = """
import torch
from leakbench.attacks.core import Access, Knows, MembershipScores, ModelAccess, attack, granted


@attack(access=Access.BLACK_BOX, knows=KNOWS)
def mine(target: ModelAccess, coins: torch.Generator, *, SETTING) -> MembershipScores:
    \"\"\"How sure it is.\"\"\"
    asked = granted(target.candidates)
    return MembershipScores(ids=asked.ids, scores=target.logits(asked.inputs).amax(1).double(), exact=False)
"""


@pytest.mark.parametrize(
    ("knows", "setting", "stacks"),
    [
        ("Knows.SHADOWS", "shadows: int = 10", 2),
        ("Knows.NOTHING", "shadows: int = 10", 0),
        ("Knows.SHADOWS", "n: int = 4", None),
    ],
)
def test_an_attack_of_ones_own_says_by_its_setting_how_many_models_it_reads(suite_of, tmp_path, knows, setting, stacks):
    file = tmp_path / f"mine_{stacks}.py"
    file.write_text(MINE.replace("KNOWS", knows).replace("SETTING", setting))
    suite = suite_of(SUITE.replace('{ name = "loss_threshold" }', f'{{ name = "{file}:mine" }}'))
    if stacks is None:
        with pytest.raises(SuiteError, match="knows shadow models, so it must have a setting `shadows`"):
            plan(suite)
    else:
        assert len(cell_of(suite, attack=f"{file}:mine").needs) == stacks
