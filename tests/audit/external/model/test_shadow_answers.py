"""Shadow models' answers from a file: found by content, in whatever order, and refused where they tell members."""

import pytest
import torch
from safetensors.torch import save_file

from leakbench.attacks.core import Examples, NotApplicable, balanced_halves
from leakbench.audit.external.model.shadow_answers import BankExamples, BankOfAnswers, read_bank

from ....parameters import subtests

MEMBERS, OTHERS, PUBLIC, CLASSES, MODELS = 60, 40, 7, 3, 8


def examples(count, seed):
    coins = torch.Generator().manual_seed(seed)
    return Examples(
        ids=torch.randperm(10_000, generator=coins)[:count] + 10_000 * seed,
        inputs=torch.randn(count, 2, generator=coins),
        labels=torch.randint(CLASSES, (count,), generator=coins),
    )


@pytest.fixture
def asked():
    return BankExamples(examples(MEMBERS, 1), examples(OTHERS, 2), examples(PUBLIC, 3))


def tensors(**other):
    coins = torch.Generator().manual_seed(0)
    made = {
        "logits": torch.randn(MODELS, MEMBERS + OTHERS, CLASSES, generator=coins),
        "trained_on": balanced_halves(MEMBERS + OTHERS, MODELS, coins),
        "population": torch.randn(MODELS, PUBLIC, CLASSES, generator=coins),
    }
    return {name: value for name, value in (made | other).items() if value is not None}


@pytest.fixture
def read(tmp_path, asked):
    def from_file(*, left=None, **other):
        save_file(tensors(**other), tmp_path / "bank.safetensors")
        return read_bank(tmp_path / "bank.safetensors", asked, population=left or asked.population, classes=CLASSES)

    return from_file


def test_answers_are_found_by_id_in_whatever_order(read, asked):
    bank, given = read().bank(), tensors()
    order = torch.randperm(MEMBERS + OTHERS, generator=torch.Generator().manual_seed(5))[:33]
    found = bank.of(asked.ids[order])
    assert bank.models == MODELS and "bank.safetensors, SHA-256 " in bank.source
    assert torch.equal(found.logits[:, :, 0], given["logits"][:, order])
    assert torch.equal(found.trained_on, given["trained_on"][:, order])
    assert torch.equal(found.population, given["population"])


def test_of_public_examples_those_that_are_left_are_answered(read, asked):
    left = torch.tensor([0, 2, 3, 6])
    of = asked.population
    bank = read(left=Examples(ids=of.ids[left], inputs=of.inputs[left], labels=of.labels[left])).bank()
    assert torch.equal(bank.of(asked.ids[:4]).population, tensors()["population"][:, left])


def test_a_file_without_public_answers_has_none(read, asked):
    assert read(population=None).bank().of(asked.ids).population is None


def test_views_have_an_axis_of_their_own(read, asked):
    wide = torch.randn(MODELS, MEMBERS + OTHERS, 4, CLASSES)
    assert torch.equal(read(logits=wide).bank().of(asked.ids).logits, wide)


@subtests(
    ("other", "told"),
    [
        ({"trained_on": None}, "lacks trained_on"),
        ({"logits": torch.zeros(MODELS, MEMBERS + OTHERS + 1, CLASSES)}, "60 members, then 40 non-members"),
        (
            {"logits": torch.zeros(MODELS, MEMBERS + OTHERS, CLASSES + 1)},
            r"logits of --bank must be \[models, 100, 3\]",
        ),
        ({"logits": torch.zeros(3, MEMBERS + OTHERS, CLASSES)}, "even number of models, at least 2, got 3"),
        ({"trained_on": torch.full((MODELS, MEMBERS + OTHERS), 2)}, "0 or 1 for each of 8 models and 100 examples"),
        ({"population": torch.zeros(MODELS, PUBLIC + 1, CLASSES)}, r"\[8, 7, 3\], as the examples of --population"),
    ],
)
def test_what_is_of_another_shape_is_refused_in_one_sentence(read, other, told):
    with pytest.raises(ValueError, match=told) as error:
        read(**other)
    assert "\n" not in str(error.value)


def test_models_that_were_trained_on_the_members_themselves_are_refused(read):
    telling = torch.zeros(MODELS, MEMBERS + OTHERS, dtype=torch.bool)
    telling[:, :MEMBERS] = torch.rand(MODELS, MEMBERS, generator=torch.Generator().manual_seed(0)) < 0.8
    telling[:, MEMBERS:] = torch.rand(MODELS, OTHERS, generator=torch.Generator().manual_seed(1)) < 0.3
    with pytest.raises(ValueError, match="tells who is one; draw their halves among all"):
        read(trained_on=telling)


@pytest.mark.long
def test_halves_without_regard_to_membership_are_taken(read):
    for seed in range(200):
        coins = torch.Generator().manual_seed(seed)
        read(trained_on=torch.rand(MODELS, MEMBERS + OTHERS, generator=coins) < 0.5)


def test_models_that_diverged_end_the_attacks_that_read_them_alone(asked):
    given = tensors()
    given["logits"][3, 7, 1] = torch.inf
    bank = BankOfAnswers(
        source="here", ids=asked.ids, logits=given["logits"][:, :, None], trained_on=given["trained_on"]
    ).bank()
    with pytest.raises(NotApplicable, match="1 of 8 shadow models answer NaN or infinity"):
        bank.of(asked.ids)


def test_a_file_with_nan_is_refused(read):
    answers = tensors()["logits"]
    answers[3, 7, 1] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        read(logits=answers)


@pytest.mark.parametrize("axes", ["models n", "models n 1"])
def test_one_answer_of_two_classes_is_two_logits(tmp_path, asked, axes):
    coins = torch.Generator().manual_seed(4)
    for group in (asked.members, asked.non_members):
        group.labels.clamp_(max=1)
    single = torch.randn(MODELS, MEMBERS + OTHERS, generator=coins)
    public = torch.randn(MODELS, PUBLIC, generator=coins)
    two = [torch.stack([torch.zeros_like(one), one], -1) for one in (single, public)]
    given = [one if axes == "models n" else one[..., None] for one in (single, public)]

    def bank(logits, population):
        save_file(tensors(logits=logits, population=population), tmp_path / "bank.safetensors")
        return read_bank(tmp_path / "bank.safetensors", asked, population=asked.population, classes=2)

    plain, found, shares = bank(*two), bank(*given), bank(*(one.sigmoid() for one in given))
    for read in (found, shares):
        assert read.population is not None and plain.population is not None
        torch.testing.assert_close(read.logits.log_softmax(-1), plain.logits.log_softmax(-1))
        torch.testing.assert_close(read.population.log_softmax(-1), plain.population.log_softmax(-1))
    assert "answers (one probability) are read as logits" in shares.source
    with pytest.raises(ValueError, match=r"must be \[models, 100, 3\]"):
        save_file(tensors(logits=single), tmp_path / "bank.safetensors")
        read_bank(tmp_path / "bank.safetensors", asked, population=asked.population, classes=3)
