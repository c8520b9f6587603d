"""A folder of a Hugging Face image classifier, by a stand-in for transformers, and by itself where it is installed."""

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from leakbench.audit.external.files import FileRefused
from leakbench.audit.external.model.image_classifier import image_classifier

from ....parameters import subtests

SETTINGS = {
    "architectures": ["TinyForImageClassification"],
    "model_type": "tiny",
    "hidden_size": 4,
    "num_channels": 1,
    "image_size": 2,
    "id2label": {"0": "cat", "1": "d\x1b[2Jog", "2": "owl"},
    "label2id": {"cat": 0, "dog": 1, "owl": 2},
}


class TinyConfig:
    def __init__(self, hidden_size=4, num_labels=2):
        self.hidden_size, self.num_labels = hidden_size, num_labels

    def to_dict(self):
        return {"hidden_size": self.hidden_size, "num_channels": 1, "image_size": 2}


class TinyForImageClassification(nn.Module):
    """What transformers' classes do, as far as it is used."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.first = nn.Linear(4, config.hidden_size)
        self.last = nn.Linear(config.hidden_size, config.num_labels)

    @classmethod
    def _from_config(cls, config, *, attn_implementation):
        assert attn_implementation == "eager"
        return cls(config)

    @classmethod
    def from_pretrained(
        cls, place, *, config, state_dict, attn_implementation, output_loading_info, ignore_mismatched_sizes
    ):
        assert place is None
        assert output_loading_info
        assert ignore_mismatched_sizes
        assert attn_implementation == "eager"
        model = cls(config)
        own = model.state_dict()
        same = {name: value for name, value in state_dict.items() if name not in own or own[name].shape == value.shape}
        wrong = [(name, value.shape, own[name].shape) for name, value in state_dict.items() if name not in same]
        outcome = model.load_state_dict(same, strict=False)
        missing = [name for name in outcome.missing_keys if name not in state_dict]
        return model, {
            "missing_keys": missing,
            "unexpected_keys": outcome.unexpected_keys,
            "mismatched_keys": wrong,
        }

    def forward(self, pixel_values):
        return SimpleNamespace(logits=self.last(self.first(pixel_values.flatten(1))))


TinyForImageClassification.__module__ = "transformers.models.tiny"


class ForeignForImageClassification(TinyForImageClassification):
    """One that another package has registered."""


def for_model(kind, hidden_size=4, num_labels=2, num_channels=1, image_size=2):
    if kind != "tiny":
        raise ValueError(kind)
    return TinyConfig(hidden_size, num_labels)


@pytest.fixture
def transformers(monkeypatch):
    module, logging = ModuleType("transformers"), ModuleType("transformers.utils.logging")
    shown, levels = [True], [30]
    for name, value in (
        ("is_progress_bar_enabled", lambda: shown[-1]),
        ("disable_progress_bar", lambda: shown.append(False)),
        ("enable_progress_bar", lambda: shown.append(True)),
        ("CRITICAL", 50),
        ("get_verbosity", lambda: levels[-1]),
        ("set_verbosity", levels.append),
    ):
        setattr(logging, name, value)
    networks = (TinyForImageClassification, ForeignForImageClassification)
    for name, value in (
        ("AutoConfig", SimpleNamespace(for_model=for_model)),
        ("AutoModelForImageClassification", SimpleNamespace(_model_mapping={TinyConfig: networks})),
    ):
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setitem(sys.modules, "transformers.utils", ModuleType("transformers.utils"))
    monkeypatch.setitem(sys.modules, "transformers.utils.logging", logging)
    yield module
    assert shown[-1]
    assert levels[-1] == 30


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    save_file(TinyForImageClassification(TinyConfig(4, 3)).state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    return tmp_path


def change(folder, **settings):
    (folder / "config.json").write_text(json.dumps(SETTINGS | settings))


def test_a_folder_becomes_a_map_from_inputs_to_logits(folder, transformers):
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"do_rescale": True, "rescale_factor": 1 / 255, "image_mean": [0.5], "image_std": [0.25]})
    )
    found = image_classifier(folder)
    assert found.model(torch.ones(5, 1, 2, 2)).shape == (5, 3)
    assert not found.model.training
    assert (found.classes, found.labels) == (3, ("cat", "d[2Jog", "owl"))
    assert (found.input_shape, found.mean, found.std, found.notes) == ((1, 2, 2), (0.5,), (0.25,), ())
    weight = found.state.tensors["first.weight"]
    assert torch.equal(found.model.get_parameter("classifier.first.weight"), weight)


def test_settings_that_the_class_does_not_have_are_left_out_and_said(folder, transformers):
    change(folder, _name_or_path="somebody/model", mystery=3, dtype="float16", return_dict=False)
    found = image_classifier(folder)
    assert found.notes == ("Settings that tiny does not have were left out: mystery.",)
    assert (found.mean, found.std) == (None, None)
    assert found.model.get_parameter("classifier.last.weight").dtype == torch.float32


REFUSED = {
    "code": ({"auto_map": {"AutoModel": "modeling.Mine"}}, "names code of its own"),
    "code_of_another": ({"auto_map": {"AutoConfig": "somebody/repository--configuration.Mine"}}, "names code"),
    "quantised": ({"quantization_config": {"bits": 4}}, "is of quantised weights"),
    "no_kind": ({"model_type": None}, "must be a network of transformers' own, got None"),
    "kind_is_a_path": ({"model_type": "../x"}, "must be a network of transformers' own"),
    "timm": ({"model_type": "timm_wrapper"}, "must be a network of transformers' own"),
    "unknown_kind": ({"model_type": "tinier"}, "has no model_type 'tinier'"),
    "kernels_of_a_repository": ({"attn_implementation": "somebody/attention"}, "must name no place"),
    "path": ({"hidden_act": "c:evil"}, "must name no place"),
    "backbone": ({"backbone": "resnet50"}, "asks for another model"),
    "pretrained_backbone": ({"use_pretrained_backbone": True}, "asks for another model"),
    "nested": ({"vision_config": {"model_type": "vit"}}, "must be a number, a text or a short list"),
    "long_list": ({"depths": [1] * 65}, "must be a number, a text or a short list"),
    "large": ({"hidden_size": 1 << 40}, "must be at most 65536"),
    "many_layers": ({"num_hidden_layers": 60000}, "must be at most 1000"),
    "text_for_a_width": ({"hidden_size": "four"}, "transformers does not take its settings, "),
    "negative_width": ({"hidden_size": -4}, "transformers does not take its settings, RuntimeError"),
    "wider_than_the_file": ({"hidden_size": 60000}, "asks for a network of 480003 entries"),
    "labels_with_a_gap": ({"id2label": {"0": "a", "2": "b"}}, "must map 0, 1, ... to texts"),
    "no_network": ({"architectures": None}, "must name one image classifier"),
    "another_task": ({"architectures": ["TinyForMaskedImageModeling"]}, "must name one image classifier"),
    "registered_by_others": ({"architectures": ["ForeignForImageClassification"]}, "registered by another package"),
}


@subtests("name", REFUSED)
def test_settings_that_could_run_or_fetch_anything_are_refused(name, folder, transformers):
    settings, expected = REFUSED[name]
    change(folder, **settings)
    with pytest.raises(FileRefused, match="cannot read") as caught:
        image_classifier(folder)
    assert expected in str(caught.value)


@subtests(
    ("content", "expected"),
    [
        (b"", "must be a file of 1 to"),
        (b"[" * 100_000, "must be JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"a": NaN}', "must be finite"),
        (b'{"a": "\xff"}', "must be JSON in UTF-8"),
        (b" " * ((8 << 20) + 1), "must be a file of 1 to"),
    ],
)
def test_what_is_no_json_is_refused(content, expected, folder):
    (folder / "config.json").write_bytes(content)
    with pytest.raises(FileRefused, match=expected):
        image_classifier(folder)


def test_weights_that_do_not_fit_are_an_error_that_names_them(folder, transformers):
    state = TinyForImageClassification(TinyConfig(4, 3)).state_dict()
    state["other"] = state.pop("last.bias")
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing keys: 'last.bias'; unexpected keys: 'other'"):
        image_classifier(folder)


def test_weights_of_another_shape_are_an_error_that_names_them(folder, transformers):
    change(folder, id2label={"0": "a", "1": "b"})
    with pytest.raises(ValueError, match=r"mismatched keys: .*'last.bias'.*\[3\].*\[2\]"):
        image_classifier(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_links_inside_of_a_folder_are_not_followed(name, folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / name
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(FileRefused, match=f"its {name} is a link"):
        image_classifier(folder)


def test_a_pickle_in_the_place_of_safetensors_is_not_read(folder):
    torch.save({"a": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(FileRefused, match="pickle"):
        image_classifier(folder)


def test_a_folder_without_safetensors_says_how_to_make_them(folder, transformers, converted_here):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileRefused, match=r"No such file .*; save it by model.save_pretrained\(folder\)"):
        image_classifier(folder)
    torch.save(TinyForImageClassification(TinyConfig(4, 3)).state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(FileRefused, match="it is a pickle, which is read only where you allow it"):
        image_classifier(folder)
    assert image_classifier(folder, allow_pickle_tensors=True).state.kind == "torch.save"


def test_shards_are_read_with_the_settings_beside_them(folder, transformers):
    plain = image_classifier(folder).model(torch.ones(2, 1, 2, 2))
    state = TinyForImageClassification(TinyConfig(4, 3)).state_dict()
    state = {name: image_classifier(folder).state.tensors[name] for name in state}
    (folder / "model.safetensors").unlink()
    for name in ("first", "last"):
        save_file({k: v for k, v in state.items() if k.startswith(name)}, folder / f"{name}.safetensors")
    mapped = {name: f"{name.partition('.')[0]}.safetensors" for name in state}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapped}))
    assert torch.equal(image_classifier(folder).model(torch.ones(2, 1, 2, 2)), plain)


def test_an_adapter_is_read_with_the_settings_of_its_base_model(folder, transformers, tmp_path_factory):
    adapter = tmp_path_factory.mktemp("adapter")
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "base_model_name_or_path": str(folder)}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    a, b = torch.ones(1, 4), torch.tensor([[0.0], [0.5], [1.0]])
    before = "base_model.model.last.lora"
    save_file({f"{before}_A.weight": a, f"{before}_B.weight": b}, adapter / "adapter_model.safetensors")
    found, plain = image_classifier(adapter), image_classifier(folder)
    classifier: Any = plain.model.classifier
    hidden = classifier.first(torch.ones(1, 4))
    expected = plain.model(torch.ones(1, 1, 2, 2)) + 2 * hidden.sum() * b.T
    torch.testing.assert_close(found.model(torch.ones(1, 1, 2, 2)), expected)
    assert any("LoRA of 1 layers was merged" in note for note in found.state.notes)


def test_without_transformers_the_error_names_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match="needs transformers, and that is not installed"):
        image_classifier(folder)


def test_a_classifier_of_transformers_itself_gives_its_own_logits(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(num_labels=5, image_size=32, patch_size=8, **sizes)
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    found, inputs = image_classifier(tmp_path), torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(found.model(inputs), model(pixel_values=inputs).logits)
    assert (found.classes, found.input_shape) == (5, (3, 32, 32))
