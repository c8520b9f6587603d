"""Requests: ids and seeds that exist stay what they are, and what comes later moves none of them."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest

import leakbench.audit.catalog.canonical as canonical
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.plan.expand import plan
from leakbench.audit.plan.request import Budget, Request, RequestedMethod
from leakbench.audit.suite.federated import FederatedTable
from leakbench.audit.suite.fields import ModelChoice
from leakbench.audit.suite.suite import load
from leakbench.audit.suite.task import Training

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden_ids.json").read_text(encoding="utf-8"))
"""Written by the code before requests had types: suite -> digest, ids in order, seeds of coins and noise of some."""


@pytest.mark.parametrize("suite", ["quick", "elaborate"])
@pytest.mark.parametrize("secure", [False, True])
def test_ids_and_seeds_that_exist_are_what_they_were(suite, secure):
    """Every field of a task, every kind of setting, controls, shares and grids are in one of the two suites."""
    told = load(HERE / f"{suite}.toml")
    cells = plan(told, secure_noise=secure).cells
    golden = GOLDEN[f"{suite} secure" if secure else suite]
    assert told.digest == golden["digest"]
    assert [cell.id for cell in cells] == golden["ids"]
    seeds = {cell.id: [cell.request.seed_for("coins"), cell.request.seed_for("noise")] for cell in cells}
    assert golden["seeds"] == {name: seeds[name] for name in golden["seeds"]}


REQUEST = Request(
    suite="toy",
    defense=RequestedMethod(kind="defenses", name="dp_sgd", settings={"clip_norm": 1.0}),
    budget=Budget(epsilon=3.0, delta=1e-5),
    control=None,
    seed=0,
    training=Training(data="digits", model=ModelChoice(name="mlp"), batch=70, epochs=1, lr=0.5),
    kind="utility",
)


class LaterTraining(Training):
    """A training as a later version may have it."""

    warmup: int = 0


def test_a_field_that_comes_later_moves_an_id_only_where_it_is_set():
    def later(**changes):
        return replace(REQUEST, training=LaterTraining(**dict(REQUEST.training), **changes))

    assert later().id == REQUEST.id and later().seed_for("noise") == REQUEST.seed_for("noise")
    assert later(warmup=3).id != REQUEST.id and later(warmup=3).seed_for("noise") != REQUEST.seed_for("noise")


def test_a_setting_that_comes_later_moves_an_id_only_where_it_is_set(monkeypatch):
    real = canonical.settings
    ahead = catalog.Setting(name="later", annotation=str, required=False, default="none", about="")
    monkeypatch.setattr(canonical, "settings", lambda kind, name: real(kind, name) | {"later": ahead})

    def asked(**more):
        return replace(REQUEST, defense=replace(REQUEST.defense, settings={"clip_norm": 1.0, **more}))

    assert asked(later="none").id == REQUEST.id
    assert asked(later="much").id != REQUEST.id
    # Older than the rule: in every id, also at its default.
    assert asked(clip_norm=2.0).id != REQUEST.id
    assert "clip_norm" in REQUEST.canonical()["defense"]["settings"]


def test_a_record_has_all_settings_and_of_older_methods_those_that_it_always_had(monkeypatch):
    asked = replace(REQUEST.defense, settings={"clip_norm": 1.0, "bound": "clip", "regulariser": None})
    assert asked.to_dict() == {"name": "dp_sgd", "settings": {"clip_norm": 1.0}}
    other = replace(asked, settings={"clip_norm": 1.0, "bound": "normalize", "regulariser": 0.01})
    assert other.to_dict()["settings"] == other.settings
    monkeypatch.setattr(canonical, "older", lambda: {"defenses": {}})
    assert asked.to_dict()["settings"] == asked.settings
    assert asked.canonical()["settings"] == {}


def test_settings_of_methods_without_a_past_are_left_out_at_their_defaults(monkeypatch):
    monkeypatch.setattr(canonical, "older", lambda: {"defenses": {}})
    assert REQUEST.canonical()["defense"]["settings"] == {}


def test_every_field_of_a_request_decides_its_id():
    """Each field of each part is changed by itself; what describes it at its default is left out, and still counts."""
    other = {
        "suite": "other", "control": "positive", "seed": 1, "secure": True, "kind": "membership",
        "no_update": "none", "data": "photos", "private": 5,
        "model": ModelChoice.model_validate({"name": "mlp", "hidden": 3}),
        "candidates": 5, "batch": 71, "epochs": 2, "lr": 0.6, "momentum": 0.1, "optimizer": "adam",
        "schedule": "cosine", "sampling": "shuffle", "non_member": 3, "public": 3, "data_digest": "ab",
        "model_digest": "ab", "tuning_digest": "ab", "engine": "opacus", "precision": "bfloat16", "unchecked": True,
        "groups": 3, "largest_batch": 99, "nominal_size": 99, "average": 0.9,
        "views": 3, "crop_padding": 2, "horizontal_flip": False,
        "statistics": {"mean_norm": 1.0, "square_norm": 1.0}, "pretrain": {"epochs": 1},
        "canaries": {"kind": "blank", "number": 20},
        "federated": FederatedTable(clients=3, rounds=2, local_steps=1), "zoo": "mlps", "checkpoint_digest": "ab",
        "epsilon": 2.0, "advantage": 0.1, "tpr": 0.1, "fpr": 0.01, "noise_multiplier": 1.0,
        "delta": 1e-6, "name": "pcdp", "settings": {"clip_norm": 2.0},
    }  # fmt: skip
    variants = {"nothing": REQUEST}
    for one in dataclasses.fields(Request):
        if one.name not in ("defense", "budget", "training", "attack", "update"):
            variants[one.name] = replace(REQUEST, **{one.name: other[one.name]})
    for name in Training.model_fields:
        training = REQUEST.training.model_copy(update={name: other[name]})
        variants[f"training.{name}"] = replace(REQUEST, training=training)
    for name, part in (("defense", REQUEST.defense), ("budget", REQUEST.budget)):
        for one in dataclasses.fields(part):
            if one.name != "kind":
                variants[f"{name}.{one.name}"] = replace(
                    REQUEST, **{name: replace(part, **{one.name: other[one.name]})}
                )
    attack = RequestedMethod(kind="attacks", name="loss_threshold", settings={"batch_size": 1})
    variants["attack"] = replace(REQUEST, attack=attack)
    assert len(variants) > 25 and len({request.id for request in variants.values()}) == len(variants)


def test_a_request_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        REQUEST.seed = 2  # pyright: ignore[reportAttributeAccessIssue]  that is the test
