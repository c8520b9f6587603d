"""Small models of transformers, timm and PyTorch for the speed benchmarks, plain and with low-rank adapters of peft.

Configurations are the libraries' own at small sizes, weights are random. A model takes one tensor and returns logits.
The libraries are no dependencies: a model whose library is not installed is skipped by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

CLASSES, VOCABULARY = 4, 1000


class Logits(nn.Module):
    """The logits of a model of transformers, which returns them in a record.

    Attributes:
        positions: whether each text gets positions of its own, without which Opacus fails on the table of positions.
    """

    def __init__(self, inner: nn.Module, *, positions: bool = False) -> None:
        """Takes the model."""
        super().__init__()
        self.inner, self.positions = inner, positions

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the logits [n, classes]."""
        if self.positions:
            positions = torch.arange(inputs.shape[1], device=inputs.device).expand(len(inputs), -1)
            outputs = self.inner(inputs, position_ids=positions)
        else:
            outputs = self.inner(inputs)
        return outputs.logits if hasattr(outputs, "logits") else outputs


class LSTMClassifier(nn.Module):
    """Word vectors, an LSTM, and a linear layer on its last output."""

    def __init__(self, width: int) -> None:
        """Takes the number of units."""
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the logits [n, classes]."""
        return self.out(self.lstm(self.words(inputs))[0][:, -1])


@dataclass(frozen=True)
class TransformerModel:
    """A model and its data.

    Attributes:
        library: package that it is of; empty for PyTorch alone.
        build: whether it is small -> the model.
        image: size of its images; 0 for texts.
        adapted: names of the layers that get adapters; none if the model has no such form.
        adapter: further settings of the adapters.
    """

    library: str
    build: Callable[[bool], nn.Module]
    image: int = 0
    adapted: str | tuple[str, ...] = ()
    adapter: Mapping[str, Any] = field(default_factory=dict)


def _of_transformers(name: str, head: str, *, positions: bool = False, **settings: Any) -> Callable[[bool], nn.Module]:
    def build(quick: bool) -> nn.Module:
        library = importlib.import_module("transformers")
        sizes = {
            key: value[1 if quick else 0] if isinstance(value, _Sizes) else value for key, value in settings.items()
        }
        configuration = getattr(library, f"{name}Config")(num_labels=CLASSES, **sizes)
        return Logits(getattr(library, f"{name}For{head}Classification")(configuration), positions=positions)

    return build


def _of_timm(name: str, **settings: Any) -> Callable[[bool], nn.Module]:
    def build(quick: bool) -> nn.Module:
        library = importlib.import_module("timm")
        sizes = {
            key: value[1 if quick else 0] if isinstance(value, _Sizes) else value for key, value in settings.items()
        }
        return library.create_model(name, num_classes=CLASSES, **sizes)

    return build


class _Sizes(tuple[Any, Any]):
    """A size and its small form."""

    __slots__ = ()


_WIDTH, _DEPTH, _INNER = _Sizes((128, 16)), _Sizes((2, 1)), _Sizes((512, 20))
_SIZES = {"hidden_size": _WIDTH, "num_hidden_layers": _DEPTH, "num_attention_heads": 2, "intermediate_size": _INNER}
_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0, **_SIZES}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": _WIDTH, "n_layer": _DEPTH, "n_head": 2, "n_positions": 128}
_GPT2 |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TASK = {"task_type": "SEQ_CLS"}

MODELS: Mapping[str, TransformerModel] = {
    "bert": TransformerModel(
        "transformers", _of_transformers("Bert", "Sequence", **_TEXT), 0, ("query", "value"), _TASK
    ),
    "bert_positions": TransformerModel("transformers", _of_transformers("Bert", "Sequence", positions=True, **_TEXT)),
    "distilbert": TransformerModel(
        "transformers",
        _of_transformers(
            "DistilBert", "Sequence", vocab_size=VOCABULARY, dim=_WIDTH, n_layers=_DEPTH, n_heads=2, hidden_dim=_INNER
        ),
        0,
        ("q_lin", "v_lin"),
        _TASK,
    ),
    "gpt2": TransformerModel(
        "transformers",
        _of_transformers("GPT2", "Sequence", **_GPT2),
        0,
        ("c_attn",),
        {**_TASK, "fan_in_fan_out": True},
    ),
    "gpt2_positions": TransformerModel("transformers", _of_transformers("GPT2", "Sequence", positions=True, **_GPT2)),
    "llama": TransformerModel(
        "transformers",
        _of_transformers("Llama", "Sequence", **_TEXT, num_key_value_heads=1),
        0,
        ("q_proj", "v_proj"),
        _TASK,
    ),
    "qwen2": TransformerModel(
        "transformers",
        _of_transformers("Qwen2", "Sequence", **_TEXT, num_key_value_heads=1),
        0,
        ("q_proj", "v_proj"),
        _TASK,
    ),
    "vit": TransformerModel(
        "transformers",
        _of_transformers("ViT", "Image", image_size=32, patch_size=4, **_SIZES),
        32,
        ("q_proj", "v_proj"),
        {"modules_to_save": ["classifier"]},
    ),
    "swin": TransformerModel(
        "transformers",
        _of_transformers(
            "Swin",
            "Image",
            image_size=32,
            patch_size=2,
            embed_dim=_Sizes((48, 8)),
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
        ),
        32,
        "all-linear",
        {"modules_to_save": ["classifier"]},
    ),
    "lstm": TransformerModel("", lambda quick: LSTMClassifier(16 if quick else 128)),
    "timm_vit": TransformerModel(
        "timm",
        _of_timm("vit_tiny_patch16_224", img_size=32, patch_size=4, depth=_DEPTH, embed_dim=_WIDTH, num_heads=2),
        32,
        ("qkv", "proj"),
        {"modules_to_save": ["head"]},
    ),
    "timm_convnext": TransformerModel(
        "timm",
        _of_timm(
            "convnext_atto", depths=_Sizes(((2, 2, 2, 2), (1, 1, 1, 1))), dims=_Sizes(((32, 64, 96, 128), (8, 8, 8, 8)))
        ),
        32,
        ("fc1", "fc2"),
        {"modules_to_save": ["head.fc"]},
    ),
}
ADAPTED = "+lora"


def names() -> list[str]:
    """Returns the models, plain and with adapters."""
    return [name for plain, of in MODELS.items() for name in (plain, plain + ADAPTED) if name == plain or of.adapted]


def missing(name: str) -> str:
    """Returns the first package that a model needs and that is not installed; empty if all are."""
    needed = [MODELS[name.removesuffix(ADAPTED)].library, "peft" if name.endswith(ADAPTED) else ""]
    return next((package for package in needed if package and importlib.util.find_spec(package) is None), "")


def model_of(name: str, *, quick: bool = False) -> nn.Module:
    """Builds a model with random weights, the same each time.

    Args:
        name: of `names()`.
        quick: whether the model is smaller still.
    """
    plain = MODELS[name.removesuffix(ADAPTED)]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one library about another's names
        torch.default_generator.manual_seed(0)
        model = plain.build(quick)
        if not name.endswith(ADAPTED):
            return model
        peft = importlib.import_module("peft")
        modules = plain.adapted if isinstance(plain.adapted, str) else list(plain.adapted)
        settings = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=modules, **plain.adapter)
        if isinstance(model, Logits):
            model.inner = peft.get_peft_model(model.inner, settings)
            return model
        return Logits(peft.get_peft_model(model, settings))


def data_of(name: str, batch: int, *, quick: bool = False) -> tuple[Tensor, Tensor]:
    """Returns random texts or images and labels, the same each time.

    Args:
        name: of `names()`.
        batch: number of examples.
        quick: whether texts are shorter.
    """
    generator = torch.Generator().manual_seed(0)
    size = MODELS[name.removesuffix(ADAPTED)].image
    if size:
        inputs = torch.randn(batch, 3, size, size, generator=generator)
    else:
        inputs = torch.randint(3, VOCABULARY, (batch, 8 if quick else 64), generator=generator)
    return inputs, torch.randint(0, CLASSES, (batch,), generator=generator)
