"""Pretraining: public examples alone decide it, and what it freezes stays as it is."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from leakbench.audit.catalog import methods as catalog
from leakbench.audit.plan import pretrain
from leakbench.audit.plan.build import build_model, built, reads_public
from leakbench.audit.plan.pretrain import check_pretraining, freeze_features, pretrained, starting_model
from leakbench.audit.plan.request import Budget, RequestedMethod, TrainingRequest
from leakbench.audit.plan.splits_cache import load_data
from leakbench.audit.suite.fields import ModelChoice
from leakbench.audit.suite.task import PretrainTable, StatisticsTable, Training
from leakbench.benchmarks.core import Sizes, Split
from leakbench.defenses.core import poisson, seeded, train

from ...parameters import subtests

SPLITS = load_data("digits", 0, Sizes(private=100, non_member=50, public=60))
LARGE = load_data("digits", 0, Sizes(private=200, non_member=50, public=200))
SETTINGS = {"epochs": 2, "lr": 0.5, "batch": 20, "optimizer": "sgd", "train": "all"}
INPUTS = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def asked(seed=0, model="mlp", defense="dp_sgd", **settings):
    return TrainingRequest(
        suite="toy",
        defense=RequestedMethod(kind="defenses", name=defense, settings={}),
        budget=Budget(noise_multiplier=1.0, delta=1e-5),
        control=None,
        seed=seed,
        training=Training(
            data="digits", model=ModelChoice(name=model), private=100, batch=20, epochs=1, lr=0.5,
            pretrain=PretrainTable(**SETTINGS | settings),
        ),
    )  # fmt: skip


def started(request, splits=SPLITS):
    """The weights that a training starts from."""
    return starting_model(request, splits, splits.public).state_dict()


def poisoned(pool: Split) -> Split:
    """A pool in which whatever is read spoils the result."""
    labels = torch.full_like(pool.labels, -1)
    return Split(ids=pool.ids, inputs=torch.full_like(pool.inputs, torch.nan), labels=labels)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(pretrain, "_kept", {})


@given(seed=st.integers(0, 3), optimizer=st.sampled_from(["sgd", "adam"]), train=st.sampled_from(["all", "last"]))
def test_no_private_example_and_no_non_member_is_read(seed, optimizer, train):
    request = asked(seed, optimizer=optimizer, train=train, lr=0.05)
    clean = started(request)
    pretrain._kept.clear()
    spoilt = replace(SPLITS, private=poisoned(SPLITS.private), non_member=poisoned(SPLITS.non_member), digest="other")
    assert same(started(request, spoilt), clean)
    # And it can be seen at all.
    with pytest.raises((ValueError, IndexError)):
        started(request, replace(SPLITS, public=poisoned(SPLITS.public)))


@subtests("optimizer", ["sgd", "adam"])
def test_it_is_mean_cross_entropy_on_shuffled_batches(optimizer):
    """One full batch an epoch has no order: plain PyTorch gives the same weights."""
    model = build_model(asked(), SPLITS)
    by_hand = build_model(asked(), SPLITS)
    public = SPLITS.public
    steps = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer](by_hand.parameters(), lr=0.1)
    for _ in range(3):
        steps.zero_grad()
        nn.functional.cross_entropy(by_hand(public.inputs), public.labels).backward()
        steps.step()
    table = PretrainTable(epochs=3, lr=0.1, batch=60, optimizer=optimizer, train="all")
    pretrained(model, table, public, seed=1)
    for mine, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_every_defense_and_both_ways_to_go_on_start_from_the_same_weights_and_a_seed_from_others():
    first = started(asked())
    assert same(started(asked(defense="pcdp")), first) and same(started(asked(train="last")), first)
    adapted = started(asked(train="lora", rank=3))
    assert same(
        {name.replace(".frozen", ""): adapted[name] for name in adapted if "down" not in name and "up" not in name},
        first,
    )
    assert len(pretrain._kept) == 1
    assert not same(started(asked(seed=1)), first)
    assert not same(first, build_model(asked(), SPLITS).state_dict())


def test_it_is_trained_once_for_a_seed_and_settings(monkeypatch):
    real, trained = pretrain.pretrained, []

    def watch(model, settings, *rest):
        trained.append(settings.lr)
        return real(model, settings, *rest)

    monkeypatch.setattr(pretrain, "pretrained", watch)
    for lr in (0.5, 0.5, 0.4, 0.5):
        started(asked(lr=lr))
    assert trained == [0.5, 0.4]
    started(asked(lr=0.3))  # the one that was used longest ago makes room
    started(asked(lr=0.5))
    started(asked(lr=0.4))
    assert trained == [0.5, 0.4, 0.3, 0.4]


def test_what_is_kept_is_nobodys_to_change():
    before = {name: value.clone() for name, value in started(asked()).items()}
    with torch.no_grad():
        for parameter in starting_model(asked(), SPLITS, SPLITS.public).parameters():
            parameter.zero_()
    assert same(started(asked()), before)


@subtests("model", ["mlp", "linear"])
def test_a_linear_probe_trains_the_last_linear_layer_alone(model):
    built = starting_model(asked(model=model, train="last"), SPLITS, SPLITS.public)
    trained = [(name, value) for name, value in built.named_parameters() if value.requires_grad]
    assert [value.shape[0] for _, value in trained] == [10, 10]
    assert trained[-1][0] == list(built.state_dict())[-1]


def test_low_rank_adaptation_starts_from_the_pretrained_outputs_with_products_of_the_seed():
    plain, first, again, other = (
        starting_model(request, SPLITS, SPLITS.public)
        for request in (asked(), asked(train="lora", rank=3), asked(defense="pcdp", train="lora", rank=3, alpha=6.0),
                        asked(seed=1, train="lora", rank=3))
    )  # fmt: skip
    assert torch.equal(first(INPUTS), plain(INPUTS)) and torch.equal(again(INPUTS), plain(INPUTS))
    assert same(first.state_dict(), again.state_dict())  # alpha is no weight
    assert not torch.equal(first.get_parameter("1.down.weight"), other.get_parameter("1.down.weight"))
    assert sum(p.numel() for p in first.parameters() if p.requires_grad) == 3 * (64 + 32) + 32 * 10 + 10


@pytest.mark.long  # what a frozen layer asks of every method, again
@subtests("name", catalog.central_names())
def test_no_defense_moves_what_low_rank_adaptation_has_frozen(name):
    """Plans are of the trained parameters alone, whatever they are made of."""
    request = asked(train="lora", rank=2)
    model = starting_model(request, LARGE, LARGE.public)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    of = RequestedMethod(kind="defenses", name=name, settings=catalog.resolve("defenses", name, {}))
    defense = built(of)
    found = train(
        model, (LARGE.private.inputs, LARGE.private.labels),
        defense if defense.noise_multiplier is not None else defense.with_noise(1.0),
        sampling=poisson(0.5), epochs=1, lr=0.5, noise=seeded(1), seed=0, sampler_key=0,
        public=(LARGE.public.inputs, LARGE.public.labels) if reads_public(of) else None,
    )  # fmt: skip
    moved = {key for key, value in found.model.state_dict().items() if not torch.equal(value, before[key])}
    trained = {key for key, value in model.named_parameters() if value.requires_grad}
    assert moved <= trained == {"1.down.weight", "1.up.weight", "3.weight", "3.bias"}
    assert moved


class Own(nn.Module):
    """A network that reads a layer's weight by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x):
        return self.head(nn.functional.linear(x.flatten(1), self.first.weight))


def test_a_network_that_reads_weights_by_itself_is_no_subject_of_low_rank_adaptation(monkeypatch):
    monkeypatch.setattr(pretrain, "initialised", lambda *_: Own())
    settings = asked(train="lora", rank=2).training
    with pytest.raises(ValueError, match=r"train = 'lora' does not fit the model: .*weight"):
        check_pretraining(settings, SPLITS)


class Dropped(nn.Module):
    """Features with dropout, by a layer or by a function of the model's own mode."""

    def __init__(self, *, by_layer: bool) -> None:
        super().__init__()
        # The head is made first: the order of execution counts, and not that of definition.
        self.head, self.features, self.drop = nn.Linear(32, 10), nn.Linear(64, 32), nn.Dropout()
        self.by_layer = by_layer

    def forward(self, x):
        features = self.features(x.flatten(1))
        return self.head(self.drop(features) if self.by_layer else nn.functional.dropout(features, 0.5, self.training))


def test_features_have_no_dropout_and_the_head_is_found_by_the_order_of_execution():
    model = Dropped(by_layer=True)
    freeze_features(model, INPUTS)
    assert [name for name, value in model.named_parameters() if value.requires_grad] == ["head.weight", "head.bias"]
    assert model.training and model.head.training and not model.drop.training and not model.features.training
    with pytest.raises(ValueError, match="must have features that stay as they are"):
        freeze_features(Dropped(by_layer=False), INPUTS)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(self.layer(x.flatten(1)))


@subtests(
    ("model", "sentence"),
    [
        (nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)), "must have an nn.Linear .* got LayerNorm"),
        (nn.Sequential(nn.Flatten()), "got none"),
        (Twice(), "used once, got 2 times"),
    ],
)
def test_a_model_whose_last_layer_cannot_be_trained_alone_is_refused_by_it(model, sentence):
    with pytest.raises(ValueError, match=sentence):
        freeze_features(model, INPUTS)


def test_it_leaves_the_mode_of_every_part_as_it_was():
    model = Dropped(by_layer=True)
    model.drop.eval()
    pretrained(model, PretrainTable(**SETTINGS), SPLITS.public, seed=0)
    assert model.training and model.features.training and not model.drop.training


@subtests(
    ("splits", "changes", "sentence"),
    [
        (replace(SPLITS, public=poisoned(SPLITS.public)), {}, r"public labels must be in \[0, 10\), got -1"),
        (load_data("digits", 0, Sizes(public=0)), {}, r"must have public examples .* set task\.public"),
        (load_data("digits", 0, Sizes(public=19)), {}, "batch must be at most 19, the public examples, got 20"),
        (SPLITS, {"statistics": StatisticsTable(mean_norm=1.0, square_norm=1.0)}, "leave one of the two out"),
    ],
)
def test_what_could_not_be_pretrained_is_refused(splits, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_pretraining(asked().training.model_copy(update=changes), splits)
    check_pretraining(asked().training.model_copy(update=changes | {"pretrain": None}), splits)


def test_ids_of_requests_without_it_do_not_know_it():
    request = asked()
    without = replace(request, training=request.training.model_copy(update={"pretrain": None}))
    assert "pretrain" not in json.dumps(without.canonical())
    assert request.canonical()["task"]["pretrain"] == SETTINGS
