"""Small models of transformers and timm, with random weights: our engine serves each, with the gradients of a loop.

Texts are a tensor, or a dictionary with the mask as a tokenizer returns it; losses are of texts or of tokens.
"""

import warnings
from collections.abc import Mapping
from functools import partial

import pytest
import torch
from torch import nn

from leakbench.defenses.core import (
    Block,
    Engine,
    Everything,
    InputTensors,
    Layout,
    Recipe,
    StepPlan,
    clip,
    clipped_sums,
    cross_entropy,
    poisson,
    token_cross_entropy,
    train,
)
from leakbench.defenses.core.gradients.choose import choose
from leakbench.defenses.dp_sgd import dp_sgd

from .duties import assert_same_rows, by_loop
from .modules import CLASSES, Problem
from .several_inputs import loop

pytestmark = pytest.mark.peers

WORDS, LENGTH = 99, 12
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
TEXT = {"vocab_size": WORDS, "max_position_embeddings": 32, **SIZES}
CONFIGURATIONS = {
    "Bert": TEXT,
    "DistilBert": {"vocab_size": WORDS, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 20},
    "GPT2": {"vocab_size": WORDS, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "pad_token_id": 0},
    "Llama": {**TEXT, "num_key_value_heads": 1, "pad_token_id": 0},
    "Qwen2": {**TEXT, "num_key_value_heads": 1, "pad_token_id": 0},
}


class Scores(nn.Module):
    """The scores of a model of transformers, whose texts are padded with 0 if there is a mask."""

    def __init__(self, inner: nn.Module, *, masked: bool = False) -> None:
        super().__init__()
        self.inner, self.masked = inner, masked

    def forward(self, inputs):
        masks = {"attention_mask": (inputs != 0).long()} if self.masked else {}
        return self.inner(inputs, **masks).logits


def of_transformers(name: str, head: str, settings: Mapping[str, object]) -> nn.Module:
    library = pytest.importorskip("transformers", reason="transformers is no dependency of leakbench")
    configuration = getattr(library, f"{name}Config")(num_labels=CLASSES, **settings)
    return getattr(library, f"{name}For{head}Classification")(configuration)


def check(model: nn.Module, inputs: torch.Tensor, note: str) -> None:
    """In training mode by our engine for this reason, and in evaluation mode with a loop's gradients and sums."""
    layout, targets = Layout.of(model), torch.arange(len(inputs)) % CLASSES
    assert choose("auto", model.train(), cross_entropy, layout, inputs, targets).note.startswith(note)
    model.double().eval()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    engine = choose("auto", model, cross_entropy, layout, inputs, targets).engine
    rows = by_loop(Problem(model, inputs, targets))
    assert_same_rows(engine.rows(inputs, targets), rows)
    plan = StepPlan(Block(codec=Everything(layout.dim), bound=clip(float(rows.norm(dim=1).median()))))
    (expected,) = clipped_sums(plan, [lambda _point: rows], rows)
    assert_same_rows(engine.sums(plan, inputs, targets)[0], expected)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", list(CONFIGURATIONS))
def test_texts(name, masked):
    torch.manual_seed(0)
    model = Scores(of_transformers(name, "Sequence", CONFIGURATIONS[name]), masked=masked)
    inputs = torch.randint(1, WORDS, (5, LENGTH))
    inputs[1, 7:], inputs[4, 3:] = 0, 0
    check(model, inputs, "layerwise (branches fixed: " if masked or name == "GPT2" else "layerwise (expanded: ")


WINDOWS = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2]}
IMAGES = {
    "ViT": {"image_size": 16, "patch_size": 8, **SIZES},
    "Beit": {"image_size": 16, "patch_size": 8, "use_relative_position_bias": True, **SIZES},
    "Swin": {**WINDOWS, "window_size": 2},
    "Swinv2": {**WINDOWS, "window_size": 4},
    "ConvNext": {"image_size": 16, "patch_size": 2, "hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1]},
}


@pytest.mark.parametrize("name", list(IMAGES))
def test_images_of_transformers(name):
    torch.manual_seed(0)
    model = Scores(of_transformers(name, "Image", IMAGES[name]))
    check(model, torch.randn(5, 3, 16, 16), "layerwise (expanded: no known layer holds the parameter")


OF_TIMM = {
    "vit_tiny_patch16_224": {"img_size": 16, "patch_size": 8, "depth": 1, "embed_dim": 16, "num_heads": 2},
    "convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 20)},
    "swin_tiny_patch4_window7_224": {
        **{"img_size": 16, "patch_size": 2, "window_size": 2, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 2)}
    },
}


@pytest.mark.parametrize("name", list(OF_TIMM))
def test_images_of_timm(name):
    timm = pytest.importorskip("timm", reason="timm is no dependency of leakbench")
    torch.manual_seed(0)
    size = 32 if "convnext" in name else 16
    model = timm.create_model(name, num_classes=CLASSES, **OF_TIMM[name])
    check(model, torch.randn(5, 3, size, size), "layerwise (expanded: no known layer holds the parameter")


ADAPTED = {
    "Bert": ["query", "value"],
    "DistilBert": ["q_lin", "v_lin"],
    "GPT2": ["c_attn"],
    "Llama": ["q_proj", "v_proj"],
    "Qwen2": ["q_proj", "v_proj"],
    "ViT": ["q_proj", "v_proj"],
    "Swin": "all-linear",
}


@pytest.mark.parametrize("name", list(ADAPTED))
def test_low_rank_adapters_have_the_gradients_of_a_loop_and_dropout_by_record(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft about names of transformers
        peft = pytest.importorskip("peft", reason="peft is no dependency of leakbench")
        torch.manual_seed(0)
        image = name in IMAGES
        inner = of_transformers(name, *(("Image", IMAGES[name]) if image else ("Sequence", CONFIGURATIONS[name])))
        settings = {"modules_to_save": ["classifier"]} if image else {"task_type": "SEQ_CLS"}
        settings |= {"fan_in_fan_out": True} if name == "GPT2" else {}
        adapters = peft.LoraConfig(r=2, lora_dropout=0.3, target_modules=ADAPTED[name], **settings)
        model = Scores(peft.get_peft_model(inner, adapters))
    inputs = torch.randn(5, 3, 16, 16) if image else torch.randint(1, WORDS, (5, LENGTH))
    targets = torch.arange(5) % CLASSES
    plan = StepPlan(Block(codec=Everything(Layout.of(model).dim), bound=clip(0.01)))
    ours, alone = Engine(model.train()), Engine(model, engine="one_by_one")
    total, wanted = (engine.run(plan.at(0.0), inputs, targets, seed=3).total for engine in (ours, alone))
    assert ours.name.startswith("layerwise (branches fixed: " if name == "GPT2" else "layerwise")
    torch.testing.assert_close(total, wanted, rtol=1e-3, atol=1e-6)
    check(model, inputs, ours.name)


def batch(count: int, *, types: bool = False) -> InputTensors:
    """Texts of several lengths, of which two are whole, padded with 0."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, LENGTH + 1, (count, 1), generator=generator)
    lengths[:2] = LENGTH
    mask = (torch.arange(LENGTH) < lengths).long()
    words = torch.randint(1, WORDS, (count, LENGTH), generator=generator) * mask
    further = {"token_type_ids": torch.randint(0, 2, (count, LENGTH), generator=generator)} if types else {}
    return InputTensors.of({"input_ids": words, "attention_mask": mask, **further})


def check_dictionary(model: nn.Module, inputs: InputTensors, targets: torch.Tensor, loss, reference) -> None:
    """Sums in evaluation mode are those of a loop, by the engine that training mode gets; a run has a claim."""
    layout = Layout.of(model)
    note = choose("auto", model.train(), loss, layout, inputs, targets).note
    assert note.startswith("layerwise ("), note
    model.double().eval()
    engine = choose("auto", model, loss, layout, inputs, targets).engine
    rows = loop(model, inputs, targets, reference)
    assert_same_rows(engine.rows(inputs, targets), rows)
    plan = StepPlan(Block(codec=Everything(layout.dim), bound=clip(float(rows.norm(dim=1).median()))))
    (expected,) = clipped_sums(plan, [lambda _point: rows], rows)
    assert_same_rows(engine.sums(plan, inputs, targets)[0], expected)
    model.float().train()
    before = layout.read(model).clone()
    run = train(
        model,
        (dict(zip(inputs.names or (), inputs.tensors, strict=True)), targets),
        dp_sgd(clip_norm=1.0, noise_multiplier=1.0),
        sampling=poisson(0.5),
        steps=3,
        recipe=Recipe(loss=loss),
    )
    assert run.engine == note
    assert not run.unverified
    assert 0 < run.claim(1e-5).epsilon < 10
    assert not torch.equal(layout.read(model), before)


@pytest.mark.parametrize("name", ["Bert", "DistilBert", "GPT2"])
def test_classifiers_of_dictionaries(name):
    torch.manual_seed(0)
    model, inputs = of_transformers(name, "Sequence", CONFIGURATIONS[name]), batch(7, types=name == "Bert")

    def by_text(outputs, targets):
        return nn.functional.cross_entropy(outputs.logits, targets)

    check_dictionary(model, inputs, torch.arange(7) % CLASSES, cross_entropy, by_text)


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
@pytest.mark.parametrize("shifted", [False, True])
def test_language_models_by_token(name, shifted):
    torch.manual_seed(0)
    library = pytest.importorskip("transformers", reason="transformers is no dependency of leakbench")
    configuration = getattr(library, f"{name}Config")(**{**CONFIGURATIONS[name], "bos_token_id": 1, "eos_token_id": 2})
    model = getattr(library, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(configuration)
    inputs = batch(7)
    mask, words = inputs.tensors
    labels = words.masked_fill(mask == 0, -100)
    # Labels of the next token by hand, or by the loss.
    behind = torch.cat([labels[:, 1:], torch.full((7, 1), -100)], dim=1)

    def by_tokens(outputs, targets):
        return nn.functional.cross_entropy(outputs.logits[0, :-1], targets[0, 1:])

    def at_their_places(outputs, targets):
        return nn.functional.cross_entropy(outputs.logits[0], targets[0])

    loss, targets, reference = (
        (partial(token_cross_entropy, next_token=True), labels, by_tokens)
        if shifted
        else (cross_entropy, behind, at_their_places)
    )
    check_dictionary(model, inputs, targets, loss, reference)
    alone = inputs[:1].passed_to(model.eval())  # transformers' own loss, of a batch of one
    own = model.loss_function(alone.logits, labels[:1], vocab_size=WORDS)
    torch.testing.assert_close(loss(alone, targets[:1])[0], own, rtol=1e-5, atol=0)


def test_taggers_by_token():
    torch.manual_seed(0)
    inputs = batch(7)
    targets = (inputs.tensors[1] % CLASSES).masked_fill(inputs.tensors[0] == 0, -100)

    def by_tokens(outputs, targets):
        return nn.functional.cross_entropy(outputs.logits.transpose(1, 2), targets)

    model = of_transformers("DistilBert", "Token", CONFIGURATIONS["DistilBert"])
    check_dictionary(model, inputs, targets, cross_entropy, by_tokens)


def test_a_keyword_that_a_model_of_transformers_does_not_declare_is_refused():
    inputs = {"input_ids": torch.ones(7, LENGTH, dtype=torch.long), "atention_mask": torch.ones(7, LENGTH)}
    with pytest.raises(ValueError, match="got an unexpected keyword argument 'atention_mask'"):
        train(
            of_transformers("Bert", "Sequence", TEXT),
            (inputs, torch.zeros(7).long()),
            dp_sgd(noise_multiplier=1.0),
            sampling=poisson(0.5),
            steps=1,
        )
