"""Settings chosen on public data: what is tried on what, what is kept, and what reaches the cells."""

import json

import pytest
import torch

from leakbench.audit.plan import pretrain
from leakbench.audit.plan.expand import plan
from leakbench.audit.plan.splits_cache import load_data
from leakbench.audit.run import harness, tuning
from leakbench.audit.run.resume import StaleError
from leakbench.audit.run.tuning import tune
from leakbench.audit.suite.suite import SuiteError
from leakbench.leaderboard.records.record import read_all

from ...parameters import subtests

CPU = torch.device("cpu")
TUNED = """
name = "toy"
seeds = [0]
task = { data = "digits", model = { name = "mlp", hidden = 8 }, private = 200, batch = 20, epochs = 1, lr = 0.5 }
budget = { noise_multiplier = [1.0, 2.0], delta = 1e-5 }
defense = [{ name = "dp_sgd" }, { name = "pcdp", rank = 3, lr = 0.2 }, { name = "sgd" }]
controls = false
tune = { validation = 50, lr = [1e-4, 0.5], clip_norm = [0.5, 1.0] }
"""
OTHERS = '{ name = "dp_sgd" }, { name = "pcdp", rank = 3, lr = 0.2 }, '


def quiet(done, total, what):
    """Reports nothing."""


def tuned(suite, folder, jobs=1):
    return tune(suite, folder, device=CPU, jobs=jobs, report=quiet)


def documents(folder):
    return [json.loads(path.read_text("utf-8")) for path in sorted((folder / "tuning").glob("*.json"))]


def settings_of(suite):
    found = {}
    for job in plan(suite).jobs:
        request = job.cells[0].request
        key = (request.defense.name, request.budget.noise_multiplier)
        found[key] = (request.training.lr, request.defense.settings.get("clip_norm"))
    return found


@pytest.mark.long
def test_the_best_of_each_grid_reaches_the_cells_and_what_an_entry_sets_is_left_alone(suite_of, tmp_path):
    suite = suite_of(TUNED)
    chosen = settings_of(tuned(suite, tmp_path))
    found = {(d["defense"], d["budget"].get("noise_multiplier")): d for d in documents(tmp_path)}
    assert set(found) == {("dp_sgd", 1.0), ("dp_sgd", 2.0), ("pcdp", 1.0), ("pcdp", 2.0), ("sgd", None)}
    for key, document in found.items():
        assert document["schema"] == 2
        best = max(document["grid"], key=lambda point: point["accuracy"])
        assert document["chosen"] == {name: best[name] for name in document["chosen"]}
        lr, clip_norm = chosen[key]
        assert document["chosen"].get("lr", 0.2) == lr
        assert document["chosen"].get("clip_norm") == clip_norm
        for point in document["grid"]:
            assert point["low"] <= point["accuracy"] <= point["high"] and point["n"] == 50
    assert set(found["pcdp", 1.0]["chosen"]) == {"clip_norm"}  # its entry has a learning rate
    assert set(found["sgd", None]["chosen"]) == {"lr"}  # it has no clip norm
    assert [len(found[key]["grid"]) for key in (("dp_sgd", 1.0), ("pcdp", 1.0), ("sgd", None))] == [4, 2, 2]
    assert chosen["sgd", None][0] == 0.5  # after one epoch at 1e-4 nothing is learnt


@pytest.mark.long
def test_only_public_examples_are_read_and_none_twice(suite_of, tmp_path, monkeypatch):
    real, seen = tuning.train, []

    def watch(model, examples, *rest, public, **settings):
        seen.append((examples[0], public))
        return real(model, examples, *rest, public=public, **settings)

    monkeypatch.setattr(tuning, "train", watch)
    suite = suite_of(TUNED)
    tuned(suite, tmp_path)
    splits = load_data(suite.task.data, suite.tune.seed, suite.task.sizes)
    public = splits.public.inputs.flatten(start_dim=1)
    for own, rest in seen:
        read = own if rest is None else torch.cat([own, rest[0]])
        read = read.flatten(start_dim=1)
        assert len(own) == 200
        assert rest is None or len(rest[0]) == len(splits.public) - 250
        assert (read[:, None] == public[None]).all(dim=2).any(dim=1).all()
        assert len(read.unique(dim=0)) == len(read)


def test_what_judges_or_is_trained_on_is_new_to_a_pretrained_model_and_pretraining_may_be_chosen(
    suite_of, tmp_path, monkeypatch
):
    real, read, real_train, trained = pretrain.pretrained, [], tuning.train, []
    monkeypatch.setattr(pretrain, "_kept", {})

    def watch(model, settings, public, seed):
        read.append((settings.epochs, public.ids))
        return real(model, settings, public, seed)

    def watch_train(model, examples, *rest, **settings):
        trained.append(examples[0].flatten(start_dim=1))
        return real_train(model, examples, *rest, **settings)

    monkeypatch.setattr(pretrain, "pretrained", watch)
    monkeypatch.setattr(tuning, "train", watch_train)
    tried = [f'{{ epochs = {epochs}, lr = 0.5, batch = 20, train = "last" }}' for epochs in (1, 5)]
    text = TUNED.replace(OTHERS, '{ name = "dp_sgd", clip_norm = 1.0, lr = 1e-4 }, ').replace(', { name = "sgd" }', "")
    text = text.replace("lr = [1e-4, 0.5], clip_norm = [0.5, 1.0]", f"pretrain = [{', '.join(tried)}]")
    suite = tuned(suite_of(text.replace("[1.0, 2.0]", "1.0")), tmp_path)
    (cell,) = plan(suite).cells
    chosen = cell.request.training.pretrain
    assert chosen is not None and chosen.epochs == 5
    assert settings_of(tuned(suite, tmp_path)) == settings_of(suite)
    public = load_data(suite.task.data, 0, suite.task.sizes).public
    assert [epochs for epochs, _ in read] == [1, 5]
    for (_, ids), own in zip(read, trained, strict=True):
        assert len(ids) == len(public) - 250 and torch.isin(ids, public.ids).all()
        seen = public.inputs[torch.isin(public.ids, ids)].flatten(start_dim=1)
        assert len(torch.cat([seen, own]).unique(dim=0)) == len(public) - 50


@pytest.mark.long
def test_what_is_there_is_not_computed_again_and_a_new_grid_is(suite_of, tmp_path, monkeypatch):
    first = settings_of(tuned(suite_of(TUNED), tmp_path))
    monkeypatch.setattr(tuning, "train", lambda *_, **__: pytest.fail("trained again"))
    assert settings_of(tuned(suite_of(TUNED), tmp_path)) == first
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        tuned(suite_of(TUNED.replace("1e-4", "1e-3")), tmp_path)


SMALL = TUNED.replace(OTHERS, "").replace(", clip_norm = [0.5, 1.0]", "")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("result", "accuracy"), 1.0, "it was edited after it was written"),
        (("provenance", "versions", "torch"), "1.0", "torch was 1.0, is "),
        (("provenance",), None, "it is not a whole document of this version"),
    ],
)
def test_a_point_of_another_code_or_an_edited_one_is_refused_by_name_and_can_be_tried_again(
    suite_of, tmp_path, path, value, words
):
    first = settings_of(tuned(suite_of(SMALL), tmp_path))
    chosen = min((tmp_path / "tuning" / "points").glob("*.json"))
    before = json.loads(chosen.read_text("utf-8"))
    inside = changed = json.loads(json.dumps(before))
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    chosen.write_text(json.dumps(changed), "utf-8")
    with pytest.raises(StaleError, match=rf"^1 point in .* cannot be kept \(.*{words}.*--recompute, or name another"):
        tuned(suite_of(SMALL), tmp_path)
    assert json.loads(chosen.read_text("utf-8")) == changed  # left as it is
    again = tune(suite_of(SMALL), tmp_path, device=CPU, jobs=1, report=quiet, recompute=True)
    assert settings_of(again) == first and json.loads(chosen.read_text("utf-8")) == before


@pytest.mark.slow  # processes are tested on whole runs
def test_processes_find_the_same(suite_of, tmp_path):
    text = TUNED.replace('{ name = "dp_sgd" }, ', "").replace(', { name = "sgd" }', "")
    alone, together = (settings_of(tuned(suite_of(text), tmp_path / str(n), jobs=n)) for n in (1, 2))
    assert alone == together
    grids = [[document["grid"] for document in documents(tmp_path / str(n))] for n in (1, 2)]
    assert grids[0] == grids[1]


@pytest.mark.long
def test_a_run_says_that_its_settings_were_chosen(suite_of, tmp_path):
    suite = suite_of(TUNED.replace("[1.0, 2.0]", "1.0"))
    harness.run(suite, tmp_path, device=CPU, jobs=1)
    for record in read_all(tmp_path):
        assert "tuned_on_public" in record.flags
        assert record.task["tuning_digest"]
    assert (tmp_path / "tuning" / f"{read_all(tmp_path)[0].task['tuning_digest']}.json").is_file()


@pytest.mark.long
def test_one_budget_may_choose_for_all(suite_of, tmp_path, monkeypatch):
    real, seen = tuning.train, []

    def watch(model, examples, defense, *rest, **settings):
        seen.append(defense.noise_multiplier)
        return real(model, examples, defense, *rest, **settings)

    monkeypatch.setattr(tuning, "train", watch)
    text = TUNED.replace("validation = 50", "validation = 50, noise_multiplier = 2.0").replace(', { name = "sgd" }', "")
    suite = tuned(suite_of(text), tmp_path)
    assert seen == [2.0] * 6  # four points of dp_sgd, two of pcdp
    found = settings_of(suite)
    assert found["dp_sgd", 1.0] == found["dp_sgd", 2.0]
    assert [document["budget"]["noise_multiplier"] for document in documents(tmp_path)] == [2.0, 2.0]


def test_a_suite_without_a_grid_is_left_alone(suite_of, tmp_path):
    suite = suite_of("\n".join(line for line in TUNED.splitlines() if not line.startswith("tune")))
    assert tuned(suite, tmp_path) is suite
    assert not (tmp_path / "tuning").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("validation = 50", "validation = 700", "must leave public examples for methods that read some"),
        ("seeds = [0]", "seeds = [0, 1]", "needs public examples that are the same under every seed"),
    ],
)
def test_public_data_that_do_not_serve_are_refused_before_training(suite_of, tmp_path, monkeypatch, old, new, words):
    monkeypatch.setattr(tuning, "train", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(SuiteError, match=words):
        tuned(suite_of(TUNED.replace(old, new)), tmp_path)


@subtests(
    ("old", "new", "words"),
    [
        ("clip_norm = [0.5, 1.0]", "clip_nrm = [0.5]", "tune.clip_nrm: no defense of this suite has this setting; did"),
        (
            "clip_norm = [0.5, 1.0]",
            "clip_norm = 0.5",
            "tune.clip_norm: must be a list of values to choose from, got 0.5",
        ),
        ("clip_norm = [0.5, 1.0]", 'clip_norm = ["a"]', r"tune.clip_norm\[0\]: must be a number"),
        ("lr = [1e-4, 0.5], ", "lr = [-1.0], ", r"tune.lr\[0\]: must be > 0"),
        ("validation = 50, ", "", "tune.validation: is missing"),
        (
            "validation = 50, ",
            "validation = 50, epsilon = 3.0, ",
            "tune.epsilon: must be of the kind that the budget is",
        ),
        ("lr = [1e-4, 0.5], clip_norm = [0.5, 1.0]", "epochs = 1", "tune: must have a grid of at least one setting"),
    ],
)
def test_a_wrong_grid_is_a_mistake_of_the_file(suite_of, old, new, words):
    assert TUNED.count(old) == 1
    with pytest.raises(SuiteError, match=words):
        suite_of(TUNED.replace(old, new))
