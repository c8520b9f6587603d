"""Several input tensors: every engine has the gradients of a loop, and checks read no tensor of the data."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from leakbench.defenses.core import (
    Block,
    Domain,
    Domains,
    Engine,
    Everything,
    InputTensors,
    Layout,
    StepPlan,
    clip,
    clipped_sums,
    cross_entropy,
    token_cross_entropy,
)
from leakbench.defenses.core.gradients.choose import choose
from leakbench.defenses.core.gradients.engines.one_by_one import OneByOne
from leakbench.defenses.core.gradients.engines.torch_func import TorchFunc
from leakbench.defenses.core.gradients.layerwise.engine import Layerwise
from leakbench.defenses.core.inputs import called

from .....parameters import subtests
from .duties import assert_same_rows
from .modules import CLASSES, WORDS
from .several_inputs import LENGTH, MaskedText, PictureWithTable, loop, pictures, texts

TARGETS = torch.arange(8) % CLASSES
BATCHES = [
    (MaskedText, InputTensors.of(texts(8))),
    (MaskedText, InputTensors.of(tuple(texts(8).values()))),
    (PictureWithTable, InputTensors.of(pictures(8))),
    (PictureWithTable, InputTensors.of(dict(zip(("picture", "table"), pictures(8), strict=True)))),
]


@subtests(("network", "inputs"), BATCHES)
@subtests("kind", [Layerwise, TorchFunc, OneByOne])
def test_rows_are_those_of_a_loop_over_calls_that_are_written_out(kind, network, inputs):
    model = network().double()
    engine, rows = kind(model, cross_entropy, Layout.of(model)), loop(model, inputs, TARGETS, cross_entropy)
    assert_same_rows(engine.rows(inputs, TARGETS), rows)
    assert_same_rows(engine.rows(inputs[2:3], TARGETS[2:3]), rows[2:3])
    doubled = inputs.repeat_interleave(2, dim=0), TARGETS.repeat_interleave(2)
    assert_same_rows(engine.rows(*doubled, views=2), rows)
    expected = torch.stack([cross_entropy(called(model, inputs[i : i + 1]), TARGETS[i : i + 1]) for i in range(8)])
    torch.testing.assert_close(engine.losses(inputs, TARGETS), expected.detach(), rtol=1e-12, atol=0)


@pytest.mark.peers  # the lowest Opacus that is admitted has no float64 embedding
@subtests(
    ("engine", "network", "inputs"),
    [("opacus", *BATCHES[0]), ("opacus", *BATCHES[2]), ("backpack", *BATCHES[2]), ("backpack", *BATCHES[3])],
)
def test_libraries_have_the_rows_of_a_loop(engine, network, inputs):
    pytest.importorskip(engine)
    model = network().double()
    chosen = choose(engine, model, cross_entropy, Layout.of(model), inputs, TARGETS)
    assert_same_rows(chosen.engine.rows(inputs, TARGETS), loop(model, inputs, TARGETS, cross_entropy))


def test_a_library_without_a_layer_refuses_by_name():
    pytest.importorskip("backpack")
    with pytest.raises(ValueError, match=r"engine 'backpack' cannot run this model: layer 'words' \(Embedding\)"):
        Engine(MaskedText(), engine="backpack").prepare(InputTensors.of(texts(8)), TARGETS)


@subtests(("network", "inputs"), BATCHES)
@subtests("microbatch", [None, 3])
def test_sums_are_those_of_the_bounded_rows_of_a_loop(network, inputs, microbatch):
    model = network().double()
    rows = loop(model, inputs, TARGETS, cross_entropy)
    engine = Engine(model, microbatch=microbatch, expected_batch=8)
    plan = StepPlan(Block(codec=Everything(rows.shape[1]), bound=clip(float(rows.norm(dim=1).median()))))
    (expected,) = clipped_sums(plan, [lambda _point: rows], rows)
    assert_same_rows(engine.clipped_sums(plan, inputs, TARGETS)[0], expected)
    assert engine.name == "layerwise"


@subtests("engine", ["auto", "torch.func"])
def test_rows_with_dropout_do_not_depend_on_other_examples(engine):
    torch.manual_seed(1)
    model, inputs = MaskedText(dropout=0.4).double(), InputTensors.of(texts(8))
    runner = Engine(model, engine=engine)
    rows = runner.gradients(inputs, TARGETS, seed=5)(None)
    for removed in (0, 3, 7):
        kept = torch.arange(8) != removed
        assert_same_rows(runner.gradients(inputs[kept], TARGETS[kept], seed=5)(None), rows[kept])


def test_records_that_differ_in_one_tensor_draw_for_themselves():
    model = MaskedText(dropout=0.5)
    both = {"input_ids": torch.ones(2, LENGTH, dtype=torch.long), "attention_mask": torch.ones(2, LENGTH)}
    runner, targets = Engine(model), torch.zeros(2, dtype=torch.long)
    same = runner.gradients(InputTensors.of(both), targets, seed=0)(None)
    assert torch.equal(same[0], same[1])
    both["attention_mask"][1, -1] = 1 + 2**-20  # too small a difference to show without another draw
    rows = runner.gradients(InputTensors.of(both), targets, seed=0)(None)
    assert torch.equal(rows[0], same[0])
    assert float((rows[1] - same[1]).norm() / same[1].norm()) > 0.1


def test_an_engine_refuses_a_model_that_mixes_examples_by_its_mask():
    class Counting(MaskedText):
        def forward(self, input_ids, attention_mask):
            return super().forward(input_ids, attention_mask) * attention_mask.double().mean()

    with pytest.raises(ValueError, match="'layerwise' cannot run this model: differs from the reference"):
        Engine(Counting().double(), engine="layerwise").prepare(InputTensors.of(texts(8)), TARGETS)


class Branching(MaskedText):
    """Takes a faster path without the mask if it counts all words."""

    def forward(self, input_ids, attention_mask):
        if attention_mask.all():
            return self.out(torch.tanh(self.inner(self.words(input_ids))).mean(1))
        return super().forward(input_ids, attention_mask)


def test_branches_on_a_mask_get_fixed_answers():
    model, inputs = Branching().double(), InputTensors.of(texts(8))
    choice = choose("auto", model, cross_entropy, Layout.of(model), inputs, TARGETS)
    assert choice.note.startswith("layerwise (branches fixed: reads values")
    assert_same_rows(choice.engine.rows(inputs, TARGETS), loop(model, inputs, TARGETS, cross_entropy))


class Recording(MaskedText):
    """Keeps outside of itself what it is called with."""

    met: list[tuple[torch.Tensor, torch.Tensor]]

    def forward(self, input_ids, attention_mask):
        self.met.append((input_ids.detach(), attention_mask.detach()))
        return super().forward(input_ids, attention_mask)


@pytest.fixture
def recorded():
    Recording.met = []
    yield Recording.met
    Recording.met = []


@subtests("mask_dtype", [torch.long, torch.bool, torch.float32])
def test_synthetic_examples_have_words_of_the_table_and_masks_of_zeros_and_ones(mask_dtype, recorded):
    poisoned = {
        "input_ids": torch.full((8, LENGTH), 10**6),
        "attention_mask": torch.full((8, LENGTH), 7).to(mask_dtype),
    }
    recorded.clear()
    Engine(Recording()).prepare(InputTensors.of(poisoned), TARGETS)  # reads no value of them
    words, masks = (torch.cat([values.double() for values in met]) for met in zip(*recorded, strict=True))
    assert set(words.unique().tolist()) <= set(range(WORDS))
    assert len(words.unique()) == WORDS
    assert set(masks.unique().tolist()) == {0.0, 1.0}
    assert bool((masks[:, 0] == 1).all())
    assert bool((masks.sum(1) == LENGTH).any())
    assert recorded[0][1].dtype in (mask_dtype, torch.float64)


def test_a_declared_domain_is_that_of_one_tensor(recorded):
    declared = {"input_ids": Domain(low=2, high=3, whole=True)}
    recorded.clear()
    runner = Engine(Recording(), domains=Domains(declared))
    runner.prepare(InputTensors.of(texts(8)), TARGETS)
    words, masks = (torch.cat([values.double() for values in met]) for met in zip(*recorded, strict=True))
    assert set(words.unique().tolist()) == {2.0, 3.0}
    assert set(masks.unique().tolist()) == {0.0, 1.0}


@subtests(
    ("domain", "words"),
    [
        (Domain(low=0, high=1), "must have a Domain by name, of attention_mask, input_ids, got a single Domain"),
        ({"ids": Domain(low=0, high=1)}, "must have a Domain by name, of attention_mask, input_ids, got 'ids'"),
    ],
)
def test_domains_of_other_tensors_are_refused(domain, words):
    with pytest.raises(ValueError, match=words):
        Engine(MaskedText(), domains=Domains(domain)).prepare(InputTensors.of(texts(8)), TARGETS)
    with pytest.raises(ValueError, match="must be a Domain for one input tensor, got one by name: a"):
        Engine(nn.Linear(5, 3), domains=Domains({"a": Domain(low=0, high=1)})).prepare(torch.rand(8, 5), TARGETS)


class Cache:
    """A cache of a language model, in an output that cannot be rebuilt."""

    def __init__(self, states) -> None:
        self.states = [states]


@dataclass
class Output:
    logits: Tensor
    cache: Cache


class Caching(MaskedText):
    def forward(self, input_ids, attention_mask):
        return Output(super().forward(input_ids, attention_mask), Cache(self.words(input_ids)))


def test_outputs_with_a_cache_are_served_in_reduced_precision():
    inputs, full = InputTensors.of(texts(8)), MaskedText()
    engine = Engine(Caching(), precision="bfloat16")
    engine.model.load_state_dict(full.state_dict())
    plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(0.5)))
    (total,), (expected,) = (each.clipped_sums(plan, inputs, TARGETS) for each in (engine, Engine(full)))
    assert engine.name == "layerwise, bfloat16"
    assert float((total - expected).norm() / expected.norm()) < 0.02


class Tagger(nn.Module):
    """A class of each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, 5), nn.Linear(5, CLASSES)

    def forward(self, input_ids, attention_mask):
        return self.out(self.words(input_ids) * attention_mask.unsqueeze(2))


@subtests("kind", [Layerwise, TorchFunc, OneByOne])
@subtests(
    "loss",
    [
        cross_entropy,
        token_cross_entropy,
        partial(token_cross_entropy, next_token=True),
        partial(token_cross_entropy, reduction="sum", ignore_index=1),
    ],
)
def test_losses_by_token_have_the_rows_of_a_loop_over_single_tokens(kind, loss):
    model, inputs = Tagger().double(), InputTensors.of(texts(8))
    settings = loss.keywords if isinstance(loss, partial) else {}
    ignored, shift = settings.get("ignore_index", -100), settings.get("next_token", False)
    targets = torch.randint(0, CLASSES, (8, LENGTH)).masked_fill(inputs.tensors[0] == 0, ignored)
    targets[3] = ignored

    def token_by_token(outputs, their_targets):
        pairs = zip(outputs[0][: LENGTH - shift], their_targets[0][shift:], strict=True)
        losses = [-row.log_softmax(0)[target] for row, target in pairs if target != ignored]
        if not losses:
            return 0.0 * outputs.sum()
        return torch.stack(losses).sum() / (1 if settings.get("reduction") == "sum" else len(losses))

    expected = loop(model, inputs, targets, token_by_token)
    assert_same_rows(kind(model, loss, Layout.of(model)).rows(inputs, targets), expected)
    assert not expected[3].any()
