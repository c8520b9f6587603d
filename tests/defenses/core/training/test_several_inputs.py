"""Training on several input tensors: all of them are an example, in claims, draws, checkpoints and comparisons."""

import copy
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import nn
from torch.utils.data import Dataset

from leakbench.defenses.core import (
    CropAndFlip,
    Execution,
    FeatureStatistics,
    Recipe,
    Recording,
    StackError,
    poisson,
    seeded,
    train,
    train_stacked,
)
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.gep import gep
from leakbench.defenses.synflow import synflow

from ....parameters import subtests
from ..gradients.engines.several_inputs import LENGTH, MaskedText, texts

TEXTS = texts(24)
LABELS = torch.arange(24) % 3


def trained(data=(TEXTS, LABELS), *, defense=None, dropout=0.0, steps=3, model=None, **settings):
    torch.manual_seed(0)
    return train(
        model() if model else MaskedText(dropout),
        data,
        defense or dp_sgd(clip_norm=0.5, noise_multiplier=1.0),
        sampling=poisson(0.5),
        steps=steps,
        noise=seeded(1),
        seed=2,
        sampler_key=3,
        **settings,
    )


def weights(*arguments, **settings):
    parameters = trained(*arguments, **settings).model.parameters()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


class Rows(Dataset):
    def __init__(self, row):
        self.row = row

    def __len__(self):
        return 24

    def __getitem__(self, number):
        return self.row(number)


def row(number):
    return {name: values[number] for name, values in TEXTS.items()}


@subtests(
    "data",
    [
        (dict(reversed(TEXTS.items())), LABELS),
        ({name: values.numpy() for name, values in TEXTS.items()}, LABELS),
        ({name: values.tolist() for name, values in TEXTS.items()}, LABELS),
        Rows(lambda i: (row(i), LABELS[i])),
        Rows(lambda i: {**row(i), "label": int(LABELS[i])}),
    ],
)
def test_one_data_set_in_several_forms_trains_one_model_with_the_same_dropout(data):
    assert torch.equal(weights(data, dropout=0.3), weights(dropout=0.3))


def test_a_tuple_is_passed_by_position():
    for data in ((tuple(TEXTS.values()), LABELS), Rows(lambda i: (tuple(row(i).values()), LABELS[i]))):
        assert torch.equal(weights(data), weights())


def test_a_claim_is_that_of_a_run_with_one_tensor():
    run = trained()
    assert run.engine == "layerwise"
    assert not run.unverified
    plain = trained((torch.randn(24, 5), LABELS), model=lambda: nn.Linear(5, 3))
    assert run.claim(1e-5) == plain.claim(1e-5)


def test_a_step_without_noise_is_that_of_bounded_gradients_of_a_loop():
    model = MaskedText()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    total = [torch.zeros_like(value) for value in before]
    for i in range(24):
        outputs = model(TEXTS["input_ids"][i : i + 1], TEXTS["attention_mask"][i : i + 1])
        own = torch.autograd.grad(nn.functional.cross_entropy(outputs, LABELS[i : i + 1]), list(model.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in own]).norm()
        total = [sum_ + gradient * (0.5 / norm).clamp(max=1.0) for sum_, gradient in zip(total, own, strict=True)]
    train(
        model,
        (TEXTS, LABELS),
        dp_sgd(clip_norm=0.5, noise_multiplier=0.0),
        sampling=poisson(1.0),
        steps=1,
        lr=0.7,
    )
    for parameter, value, sum_ in zip(model.parameters(), before, total, strict=True):
        torch.testing.assert_close(parameter.detach(), value - 0.7 * sum_ / 24, rtol=1e-4, atol=1e-6)


def test_a_public_example_is_private_if_all_its_tensors_are():
    public = texts(6, seed=9)
    defense = gep(rank=2, groups=1, auxiliary_size=6, noise_multiplier=1.0)
    other_mask = {**public, "attention_mask": 1 - public["attention_mask"]}
    private = {name: torch.cat([values, public[name][:1]]) for name, values in TEXTS.items()}
    labels = torch.arange(25) % 3
    with pytest.raises(ValueError, match="must be none of the private ones, got 1 of 6"):
        trained((private, labels), defense=defense, public=(public, torch.zeros(6).long()))
    for dtype in (torch.int32, torch.float64):  # in another precision, too
        converted = {name: values.to(dtype) for name, values in public.items()}
        with pytest.raises(ValueError, match="must be none of the private ones, got 1 of 6"):
            trained((private, labels), defense=defense, public=(converted, torch.zeros(6).long()))
    assert trained((private, labels), defense=defense, public=(other_mask, torch.zeros(6).long())).public_used
    with pytest.raises(ValueError, match="same arguments as private ones, attention_mask, input_ids, got one tensor"):
        trained(defense=defense, public=(public["input_ids"], torch.zeros(6).long()))


def test_a_checkpoint_belongs_to_all_tensors(tmp_path):
    def interrupted(done, _steps):
        if done == 2:
            raise KeyboardInterrupt

    def recording(**settings):
        return Recording(checkpoint=tmp_path / "run", checkpoint_every=1, **settings)

    with pytest.raises(KeyboardInterrupt):
        trained(dropout=0.3, recording=recording(progress=interrupted))
    changed = copy.deepcopy(TEXTS)
    changed["attention_mask"][5, -1] ^= 1
    with pytest.raises(ValueError, match="belongs to another run"):
        trained((changed, LABELS), dropout=0.3, recording=recording())
    assert torch.equal(weights(dropout=0.3, recording=recording()), weights(dropout=0.3))


@pytest.mark.long
def test_labels_by_token_train_a_tagger_and_a_language_model():
    class Tagger(MaskedText):
        def forward(self, input_ids, attention_mask):
            return self.out(torch.tanh(self.inner(self.words(input_ids)))) * attention_mask.unsqueeze(2)

    tags = (TEXTS["input_ids"] % 3).masked_fill(TEXTS["attention_mask"] == 0, -100)
    tagger = dp_sgd(clip_norm=0.5, noise_multiplier=0.0)
    run = trained((TEXTS, tags), model=Tagger, defense=tagger, steps=200, lr=2.0)
    assert run.engine == "layerwise"
    guesses = run.model(TEXTS["input_ids"], TEXTS["attention_mask"]).argmax(2)
    counted = tags != -100
    assert float((guesses == tags)[counted].double().mean()) > 0.9
    whole = weights((TEXTS, tags.int()), model=Tagger, recipe=Recipe(loss=nn.CrossEntropyLoss()))
    assert torch.equal(whole, weights((TEXTS, tags), model=Tagger))


@subtests(
    ("labels", "words"),
    [
        (
            TEXTS["input_ids"] % 3 + 1,
            r"must be class numbers from 0 to 2, as the model answers, got 1 to 3; subtract 1",
        ),
        (torch.full((24, LENGTH), -1), "must be class numbers from 0 to 2, as the model answers, got -1 to -1"),
        (LABELS, "not checked|cannot be"),
    ],
)
def test_labels_that_are_no_classes_of_tokens_are_one_sentence(labels, words):
    class Tagger(MaskedText):
        def forward(self, input_ids, attention_mask):
            return self.out(torch.tanh(self.inner(self.words(input_ids))))

    with pytest.raises(ValueError, match=words):
        trained((TEXTS, labels), model=Tagger)


def with_entry(name, values):
    return {**TEXTS, name: values}


@subtests(
    ("inputs", "words"),
    [
        (
            with_entry("attention_mask", TEXTS["attention_mask"][:20]),
            "of one length above 0, got attention_mask of 20, input_ids of 24, labels of 24",
        ),
        (
            {name: values[:20] for name, values in TEXTS.items()},
            "got attention_mask of 20, input_ids of 20, labels of 24",
        ),
        ({name: values[:0] for name, values in TEXTS.items()}, "of one length above 0, got attention_mask of 0"),
        ({}, "inputs of examples must have the names of the model's arguments as their keys, got no entry"),
        ({0: TEXTS["input_ids"]}, "must have the names of the model's arguments as their keys, got 0"),
        ((), "of one length above 0, got 0, 24"),
        (with_entry("attention_mask", None), "attention_mask of examples must hold tensors, .* got NoneType"),
        (with_entry("attention_mask", "yes"), "attention_mask of examples must hold tensors, .* got str"),
        ((TEXTS["input_ids"], object()), "input 1 of examples must hold tensors, .* got object"),
        (
            with_entry("attention_mask", torch.tensor(1)),
            "got attention_mask of a number, input_ids of 24, labels of 24",
        ),
        (
            with_entry("mask", TEXTS["attention_mask"]),
            "arguments of MaskedText.forward, got .* keyword argument 'mask'",
        ),
        (
            {"input_ids": TEXTS["input_ids"]},
            "arguments of MaskedText.forward, got input_ids: missing .*'attention_mask'",
        ),
        ((*TEXTS.values(), LABELS), "arguments of MaskedText.forward, got 3 by position: too many"),
        (
            with_entry("attention_mask", torch.ones(24, LENGTH).index_fill(0, torch.tensor([3]), torch.nan)),
            "attention_mask of examples must not be NaN, got NaN in row 3",
        ),
        (([TEXTS["input_ids"], [[1.0], [2.0]]]), "got input 0 of 24, input 1 of 2, labels of 24"),
    ],
)
def test_inputs_that_are_not_of_one_length_or_no_arguments_are_refused_before_a_pass(inputs, words):
    class Uncalled(MaskedText):
        def forward(self, input_ids, attention_mask):
            raise AssertionError("called")

    Uncalled.__name__ = "MaskedText"
    with pytest.raises(ValueError, match=words):
        trained((inputs, LABELS), model=Uncalled)


@subtests(
    ("rows", "words"),
    [
        (
            lambda i: (row(i) if i else {"input_ids": row(i)["input_ids"]}, 0),
            "must be input_ids in every row, got .* row 1",
        ),
        (lambda i: (row(i) if i < 2 else 3.0, 0), "must be input_ids, attention_mask in every row, got one in row 2"),
        (lambda i: ({**row(i), "input_ids": torch.zeros(3 + i % 2)}, 0), r"input_ids of examples must be of one shape"),
        (lambda i: {**row(i), "text": "words", "label": 0}, "must hold tensors, arrays or numbers, got str"),
    ],
)
def test_rows_of_other_forms_are_one_sentence(rows, words):
    with pytest.raises(ValueError, match=words):
        trained(Rows(rows))


@subtests(
    ("settings", "words"),
    [
        (
            {"recipe": Recipe(augmentation=CropAndFlip(views=2))},
            "augmentation must be of examples of one tensor, got 2",
        ),
        (
            {"recipe": Recipe(statistics=FeatureStatistics(of="words", mean_norm=1.0, square_norm=1.0))},
            "statistics must be of a model with one input tensor, got 2",
        ),
        ({"defense": synflow(clip_norm=1.0, prune_rate=0.5, noise_multiplier=1.0)}, "one input tensor for synflow"),
        ({"execution": Execution(engine="backpack")}, "engine 'backpack' cannot run this model: layer 'words'"),
    ],
)
def test_methods_for_one_tensor_say_so(settings, words):
    if "execution" in settings:
        pytest.importorskip("backpack")
    with pytest.raises(ValueError, match=words):
        trained(**settings)


def test_a_stack_is_of_models_with_one_tensor():
    settings: dict[str, Any] = {
        "sampling": poisson(0.5),
        "steps": 1,
        "lr": 0.1,
        "seeds": [0, 1],
        "sampler_keys": [0, 1],
    }
    pool: Any = (TEXTS, LABELS)
    members, noise = torch.tensor([[0, 1], [1, 2]]), torch.Generator()
    with pytest.raises((StackError, TypeCheckError), match=r"a stack must have one input tensor, got dict|'pool'"):
        train_stacked(
            [nn.Linear(5, 3), nn.Linear(5, 3)],
            pool,
            members,
            dp_sgd(noise_multiplier=1.0),
            noise=noise,
            **settings,
        )


@pytest.mark.long
def test_a_model_may_have_its_logits_in_an_output_object():
    class Output(dict):
        @property
        def logits(self):
            return self["logits"]

    class WithOutput(MaskedText):
        def forward(self, input_ids, attention_mask):
            return Output(logits=super().forward(input_ids, attention_mask), hidden=None)

    class Pair(MaskedText):
        def forward(self, input_ids, attention_mask):
            return super().forward(input_ids, attention_mask), None

    for loss in (None, nn.CrossEntropyLoss()):
        recipe = None if loss is None else Recipe(loss=loss)
        assert torch.equal(weights(model=WithOutput, recipe=recipe), weights())
    with pytest.raises(
        ValueError, match=r"outputs must be a tensor, or have one as .logits, got tuple; wrap the model"
    ):
        trained(model=Pair)
