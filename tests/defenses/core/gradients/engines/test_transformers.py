"""Small models of transformers and timm, with random weights: our engine serves each, with the gradients of a loop."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from leakbench.defenses.core import Block, Everything, Layout, StepPlan, clip, clipped_sums, cross_entropy
from leakbench.defenses.core.gradients.choose import choose

from .duties import assert_same_rows, by_loop
from .modules import CLASSES, Problem

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


def test_images_of_transformers():
    torch.manual_seed(0)
    model = Scores(of_transformers("ViT", "Image", {"image_size": 8, "patch_size": 4, **SIZES}))
    check(model, torch.randn(5, 3, 8, 8), "layerwise (expanded: no known layer holds the parameter")


def test_images_of_timm():
    timm = pytest.importorskip("timm", reason="timm is no dependency of leakbench")
    torch.manual_seed(0)
    settings = {"img_size": 8, "patch_size": 4, "num_classes": CLASSES, "depth": 1, "embed_dim": 16, "num_heads": 2}
    check(timm.create_model("vit_tiny_patch16_224", **settings), torch.randn(5, 3, 8, 8), "layerwise (expanded: ")
