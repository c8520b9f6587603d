"""Folder of a Hugging Face image classifier: only its settings and weights are read.

The classes of transformers build the network from checked settings, which is then filled with checked tensors:
transformers never gets the folder, no code of the folder is run, and nothing is looked up on the network.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...environment import environment_variable
from ..files import FileRefused, StateFile, is_adapter, read_adapter, read_folder
from ..files.adapter import WAY_OUT as MERGE
from ..files.adapter import Adapter
from ..files.checks.limits import shown
from ..files.json_object import read_object
from ..files.sharded import WAY_OUT

_CONFIG, _PREPROCESSOR = "config.json", "preprocessor_config.json"
_MAX_NUMBER = 1 << 16
_MAX_LAYERS = 1000
_MAX_BUFFERS = 1 << 27
_LABELS = ("id2label", "label2id")
_FORM = ("dtype", "torch_dtype", "return_dict", "output_attentions", "output_hidden_states", "attn_implementation")
"""Settings of how a network computes and returns its answers, which this module decides itself."""
_IGNORED = frozenset((*_LABELS, *_FORM, "architectures", "model_type", "transformers_version"))


@dataclass(frozen=True)
class ImageClassifier:
    """A classifier and its folder's description of it.

    Attributes:
        model: maps [n, channels, height, width] to logits [n, classes]; in evaluation mode.
        state: tensors of its weights file.
        classes: number of logits.
        labels: name of each class; empty if the folder gives none.
        input_shape: (channels, height, width); None if the settings give no size.
        mean: of each channel, to be subtracted from inputs in [0, 1]; None if the folder gives none.
        std: of each channel, to divide by; None if the folder gives none.
        notes: a sentence on the settings that were left out.
    """

    model: nn.Module
    state: StateFile
    classes: int
    labels: tuple[str, ...]
    input_shape: tuple[int, ...] | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    notes: tuple[str, ...]


class _Logits(nn.Module):
    """Wrapper of a transformers classifier that maps inputs to logits."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, inputs: Tensor) -> Tensor:
        return self.classifier(pixel_values=inputs).logits


def image_classifier(folder: str | Path, *, allow_pickle_tensors: bool = False) -> ImageClassifier:
    """Returns the classifier of a folder that `save_pretrained` wrote.

    Args:
        folder: holds config.json and model.safetensors, or its shards and their index, none of them a link;
            preprocessor_config.json is optional. The folder of a LoRA adapter whose base model is such a folder is
            accepted, too.
        allow_pickle_tensors: whether pytorch_model.bin is read if there are no safetensors; see `read_tensors`.

    Raises:
        FileRefused: settings or weights that are refused, in one sentence.
        ValueError: the report of mismatches between the two.
        ModuleNotFoundError: transformers is not installed.
    """
    folder = Path(folder)
    adapter = read_adapter(folder, allow_pickle_tensors=allow_pickle_tensors) if is_adapter(folder) else None
    folder = folder if adapter is None else adapter.base
    state = read_folder(folder, allow_pickle_tensors=allow_pickle_tensors)
    try:
        settings = _settings(folder)
        mean, std = _normalisation(folder)
        labels = _labels(settings.get("id2label"))
    except FileRefused as error:
        raise FileRefused(f"cannot read {folder}: {error}") from None
    except OSError as error:
        raise FileRefused(f"cannot read {error.filename or folder}: {error.strerror or error}; {WAY_OUT}") from error
    model, left_out = _built(folder, settings, len(labels), state.tensors)
    if adapter is not None:
        # Merged into the network, since adapters go by its modules' names, which may differ from the file's.
        state = _with_adapter(model, adapter, state)
    classes = int(model.config.num_labels)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    notes = [f"Settings that {settings['model_type']} does not have were left out: {', '.join(left_out)}."]
    return ImageClassifier(
        model=_Logits(model).eval(),
        state=state,
        classes=classes,
        labels=labels,
        input_shape=_input_shape(settings),
        mean=mean,
        std=std,
        notes=tuple(notes if left_out else ()),
    )


def _settings(folder: Path) -> dict[str, Any]:
    """Returns settings of a network: numbers, texts and short lists of them, which name no code and no location."""
    settings = read_object(folder / _CONFIG)
    for name, why in (("auto_map", "names code of its own"), ("quantization_config", "is of quantised weights")):
        if settings.get(name):
            raise FileRefused(f"{_CONFIG} {why} ({name}), which is not run; save a model of transformers' own classes")
    kind = settings.get("model_type")
    if not isinstance(kind, str) or not kind.replace("-", "_").isidentifier() or kind.startswith("timm"):
        raise FileRefused(f"model_type in {_CONFIG} must be a network of transformers' own, got {shown(kind)}")
    for name, value in settings.items():
        if name in _LABELS:
            continue
        for item in _items(value):
            _refuse_setting(name, item)
    return settings


def _items(value: Any) -> list[Any]:
    """Returns a setting, or the items of a short list, which may hold short lists as for stages of some networks."""
    if not isinstance(value, list):
        return [value]
    inner = [part for item in value for part in (item if isinstance(item, list) else [item])]
    return inner if max(len(value), len(inner)) <= 64 else [value]


def _refuse_setting(name: str, item: Any) -> None:
    if not isinstance(item, str | int | float | None):
        raise FileRefused(f"{shown(name)} in {_CONFIG} must be a number, a text or a short list of them")
    # Transformers looks up settings that name a location: backbones, attention kernels from a repository.
    if isinstance(item, str) and not name.startswith("_") and any(sign in item for sign in "/:\\"):
        raise FileRefused(f"{shown(name)} in {_CONFIG} must name no place, got {shown(item)}")
    if name in ("backbone", "use_timm_backbone", "use_pretrained_backbone") and item:
        raise FileRefused(f"{name} in {_CONFIG} asks for another model, which is not fetched")
    most = _MAX_LAYERS if any(part in name for part in ("layers", "depth", "blocks", "stages")) else _MAX_NUMBER
    if isinstance(item, int | float) and not abs(item) <= most:
        raise FileRefused(f"{shown(name)} in {_CONFIG} must be at most {most}, got {shown(item)}")


def _built(
    folder: Path, settings: Mapping[str, Any], labels: int, tensors: Mapping[str, Tensor]
) -> tuple[nn.Module, list[str]]:
    """Returns the filled network of these settings, and the names of settings that its class does not have."""
    transformers = _transformers(folder)
    kind = settings["model_type"]
    try:
        known = transformers.AutoConfig.for_model(kind).to_dict()
    except ValueError:
        raise FileRefused(f"cannot read {folder}: transformers has no model_type {shown(kind)}") from None
    public_settings = {
        name: value for name, value in settings.items() if not name.startswith("_") and name not in _IGNORED
    }
    used = {name: value for name, value in public_settings.items() if name in known}
    if labels:
        used["num_labels"] = labels
    with _of_transformers(folder):
        config = transformers.AutoConfig.for_model(kind, **used)
    network = _network(folder, transformers.AutoModelForImageClassification._model_mapping, config, settings)

    # On the meta device first: the settings must ask for as much as the file has, before memory is allocated.
    with torch.device("meta"), _of_transformers(folder):
        outline = network._from_config(config, attn_implementation="eager")
    expected = sum(tensor.numel() for tensor in outline.state_dict().values())
    stored = sum(tensor.numel() for tensor in tensors.values())
    buffers = sum(buffer.numel() for buffer in outline.buffers())
    if not expected / 2 <= stored <= 2 * expected or buffers > _MAX_BUFFERS:
        raise FileRefused(
            f"cannot read {folder}: {_CONFIG} asks for a network of {expected} entries and buffers of {buffers}, and "
            f"its weights have {stored}"
        )
    # No folder is named: transformers renames tensors of older versions, and reads no file.
    with _quiet(), _of_transformers(folder):
        model, outcome = network.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # mismatches are in the outcome, and refused with the others
        )
    wrong = [f"{kind.replace('_', ' ')}: {_listed(names)}" for kind, names in sorted(outcome.items()) if names]
    if wrong:
        raise ValueError(f"the weights of {folder} do not fit its {_CONFIG}: {'; '.join(wrong)}")
    return model, sorted(public_settings.keys() - known.keys())


def _with_adapter(model: nn.Module, adapter: Adapter, whole: StateFile) -> StateFile:
    """Merges an adapter into a network, and returns its weights."""
    own = model.state_dict()
    state = adapter.merged(whole, own)
    strange = [name for name, tensor in state.tensors.items() if name not in own or own[name].shape != tensor.shape]
    if strange:
        shape = list(state.tensors[strange[0]].shape)
        raise FileRefused(
            f"cannot read {adapter.folder}: its {shown(strange[0])} {shown(shape)} does not fit the network of its "
            f"base model; {MERGE}"
        )
    model.load_state_dict(state.tensors)
    return state


def _network(folder: Path, mapping: Any, config: Any, settings: Mapping[str, Any]) -> Any:
    """Returns the transformers class for these settings; among several, the class that the settings name."""
    networks = mapping.get(type(config), ())
    classes = {
        network.__name__: network for network in (networks if isinstance(networks, tuple | list) else (networks,))
    }
    named = settings.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 else None
    if name not in classes:
        hint = f"; transformers has {', '.join(classes)}" if classes else ""
        raise FileRefused(
            f"cannot read {folder}: architectures in {_CONFIG} must name one image classifier of "
            f"{shown(settings['model_type'])}, got {shown(named)}{hint}"
        )
    if not classes[name].__module__.startswith("transformers."):
        raise FileRefused(f"cannot read {folder}: {name} was registered by another package than transformers")
    return classes[name]


def _listed(names: Any) -> str:
    texts = sorted(str(name) for name in names)
    return ", ".join(shown(text) for text in texts[:8]) + (f" and {len(texts) - 8} more" if len(texts) > 8 else "")


def _transformers(folder: Path) -> Any:
    with _offline():
        try:
            return importlib.import_module("transformers")
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise  # transformers is installed, but a dependency of it is not
            raise ModuleNotFoundError(
                f"{folder} is a Hugging Face model, which needs transformers, and that is not installed: pip install "
                "transformers",
                name="transformers",
            ) from error


@contextmanager
def _of_transformers(folder: Path) -> Iterator[None]:
    """Turns any error that transformers raises on these settings into `FileRefused`."""
    try:
        yield
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), "")
        raise FileRefused(
            f"cannot read {folder}: transformers does not take its settings, {type(error).__name__}: {shown(line)}"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the progress bars of transformers and its own report of mismatches."""
    logging = importlib.import_module("transformers.utils.logging")
    shows, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows:
            logging.enable_progress_bar()


def _offline() -> AbstractContextManager[None]:
    """Keeps transformers, which reads this variable when it is imported, from looking anything up on the network."""
    return environment_variable("HF_HUB_OFFLINE", "1")


def _labels(id2label: Any) -> tuple[str, ...]:
    """Returns the name of each class, in the order of the logits."""
    if not isinstance(id2label, dict) or not id2label:
        return ()
    if id2label.keys() != {str(index) for index in range(len(id2label))} or not all(
        isinstance(label, str) for label in id2label.values()
    ):
        raise FileRefused(f"id2label in {_CONFIG} must map 0, 1, ... to texts")
    return tuple("".join(c for c in id2label[str(index)][:80] if c.isprintable()) for index in range(len(id2label)))


def _input_shape(settings: Mapping[str, Any]) -> tuple[int, ...] | None:
    channels, size = settings.get("num_channels", 3), settings.get("image_size")
    sides = [size, size] if isinstance(size, int) else size
    shape = [channels, *sides] if isinstance(sides, list) and len(sides) == 2 else []
    return tuple(shape) if shape and all(type(side) is int and side > 0 for side in shape) else None


def _normalisation(folder: Path) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Returns mean and standard deviation of each channel for inputs in [0, 1]; None if the folder gives none."""
    path = folder / _PREPROCESSOR
    if not path.is_symlink() and not path.exists():
        return None, None
    settings = read_object(path)
    scaled = settings.get("do_rescale", True) and math.isclose(
        settings.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-3
    )
    mean, std = settings.get("image_mean"), settings.get("image_std")
    if not scaled or not settings.get("do_normalize", True) or mean is None or std is None:
        return None, None
    for values, least in ((mean, -1e6), (std, 1e-6)):
        right = isinstance(values, list) and 0 < len(values) == len(mean)
        if not right or not all(isinstance(value, int | float) and least <= value <= 1e6 for value in values):
            raise FileRefused(f"image_mean and image_std in {_PREPROCESSOR} must be a number for each channel")
    return tuple(map(float, mean)), tuple(map(float, std))
