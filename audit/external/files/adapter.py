"""PEFT adapter in a folder, merged into its base model if that is a local folder.

Low-rank adaptation (Hu et al., "LoRA", ICLR 2022) adds (alpha / r) B A to a weight, or (alpha / sqrt(r)) B A if its
rank is stabilised (Kalajdzievski, "rsLoRA", 2023); modules that the adapter trained as a whole replace the base
model's. It is implemented over tensors: no code of peft runs. Settings that are not known to leave this formula
unchanged are refused, as another reading of them would give a model that nobody trained.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checks import FileRefused
from .checks.limits import shown
from .json_object import read_object, refuse_link
from .read import StateFile, read_as_stored

CONFIG = "adapter_config.json"
WAY_OUT = "merge it where it was trained: model.merge_and_unload().save_pretrained(folder), and name that folder"

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_BEFORE = "base_model.model."
_PART = re.compile(r"(?P<layer>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.default)?(\.weight)?")
_READ = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out"}
_READ |= {"modules_to_save", "base_model_name_or_path", "init_lora_weights"}
_HARMLESS = {"auto_mapping", "bias", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform"}
_HARMLESS |= {"lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision", "target_modules"}
_HARMLESS |= {"task_type", "loftq_config", "eva_config", "corda_config", "runtime_config"}
"""Settings that leave LoRA's formula unchanged: they choose layers, or concern the training alone."""
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations of B A that leave the base model unchanged; PiSSA, OLoRA, CorDA and LoftQ change it."""
_REPEATS = re.compile(r"[*+]")
_PLAIN = re.compile(r"(\\[.dw]|\[[\w\-]+\]|[\w.*+?|$^()\-])*")


def is_adapter(folder: Path) -> bool:
    """Returns whether a folder is that of an adapter."""
    return (folder / CONFIG).is_symlink() or (folder / CONFIG).exists()


@dataclass(frozen=True)
class Adapter:
    """An adapter before it is merged.

    Attributes:
        folder: of the adapter.
        base: folder of its base model.
        state: its own tensors.
        settings: of adapter_config.json.
    """

    folder: Path
    base: Path
    state: StateFile
    settings: Mapping[str, Any]

    def merged(self, whole: StateFile, tensors: Mapping[str, Tensor]) -> StateFile:
        """Merges the adapter into a base model.

        Args:
            whole: weights of the base model, as they were read.
            tensors: of the base model, under the names of its modules.

        Raises:
            FileRefused: tensors that do not fit.
        """
        try:
            merged, note = _merged(tensors, self.state.tensors, self.settings)
        except FileRefused as error:
            raise FileRefused(f"cannot read {self.folder}: {error}") from None
        return StateFile(
            merged,
            f"LoRA ({self.state.kind}) on {whole.kind}",
            hashlib.sha256(f"{self.state.sha256} {whole.sha256}\n".encode()).hexdigest(),
            self.state.bytes + whole.bytes,
            (*whole.notes, *self.state.notes, f"The base model was read from {self.base}. {note}"),
        )


def read_adapter(folder: Path, *, allow_pickle_tensors: bool = False) -> Adapter:
    """Reads an adapter, whose base model must be a local folder.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        allow_pickle_tensors: see `read_tensors`.

    Raises:
        FileRefused: another kind of adapter, or a base model that is no local folder.
    """
    try:
        settings = _settings(folder)
        base = _base(folder, settings)
        name = next(
            (file for file in _WEIGHTS if (folder / file).exists() or (folder / file).is_symlink()), _WEIGHTS[0]
        )
        refuse_link(folder / name)
    except FileRefused as error:
        raise FileRefused(f"cannot read {folder}: {error}") from None
    except OSError as error:
        raise FileRefused(f"cannot read {error.filename or folder}: {error.strerror or error}") from error
    return Adapter(folder, base, read_as_stored(folder / name, allow_pickle_tensors=allow_pickle_tensors), settings)


def _settings(folder: Path) -> dict[str, Any]:
    """Returns the settings, all of which leave LoRA's formula unchanged."""
    settings = read_object(folder / CONFIG)
    if settings.get("peft_type") != "LORA":
        raise FileRefused(
            f"it is a PEFT adapter of kind {shown(settings.get('peft_type'))}, and LORA is read; {WAY_OUT}"
        )
    strange = [name for name, value in settings.items() if name not in _READ | _HARMLESS and value]
    if strange:
        raise FileRefused(f"{CONFIG} sets {shown(strange[0])}, which is not read; {WAY_OUT}")
    if not any(
        settings.get("init_lora_weights") is initial or settings.get("init_lora_weights") == initial
        for initial in _INITIAL
    ):
        kind = shown(settings["init_lora_weights"])
        raise FileRefused(f"init_lora_weights of {CONFIG} is {kind}, which changes the base model; {WAY_OUT}")
    for name, numbers in (("r", _ranks(settings)), ("lora_alpha", _alphas(settings))):
        if not numbers or not all(_positive(number, whole=name == "r") for number in numbers):
            rule = "whole numbers from 1" if name == "r" else "positive numbers"
            raise FileRefused(f"{name} of {CONFIG} and of its pattern must be {rule}, got {shown(numbers)}")
    saved = settings.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(module, str) for module in saved):
        raise FileRefused(f"modules_to_save of {CONFIG} must be a list of names, got {shown(saved)}")
    return settings


def _ranks(settings: Mapping[str, Any]) -> list[Any]:
    return [settings.get("r"), *_pattern(settings, "rank_pattern").values()]


def _alphas(settings: Mapping[str, Any]) -> list[Any]:
    return [settings.get("lora_alpha"), *_pattern(settings, "alpha_pattern").values()]


def _positive(value: Any, *, whole: bool) -> bool:
    return type(value) in ((int,) if whole else (int, float)) and 0 < value < 1e6


def _pattern(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    patterns = settings.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > 1000:
        raise FileRefused(f"{name} of {CONFIG} must map at most 1000 names of layers to numbers")
    for key in patterns:
        # Untrusted regular expressions may take exponential time; those with few repetitions, none of a group, do not.
        often = len(_REPEATS.findall(key)) > 2 or key.count("?") > 8 or ")?" in key or ")*" in key or ")+" in key
        if len(key) > 512 or often or not _PLAIN.fullmatch(key):
            raise FileRefused(
                f"{name} of {CONFIG} must have names of layers or short patterns, got {shown(key)}; {WAY_OUT}"
            )
        try:
            re.compile(key)
        except re.error:
            raise FileRefused(f"{name} of {CONFIG} must have patterns that can be read, got {shown(key)}") from None
    return patterns


def _of_layer(settings: Mapping[str, Any], pattern: str, usual: str, layer: str) -> Any:
    """Returns a layer's rank or alpha: that of the first pattern that its name, or the end of its name, matches."""
    for key, value in _pattern(settings, pattern).items():
        if re.match(key if key.startswith("^") else rf"(.*\.)?({key})$", layer):
            return value
    return settings[usual]


def _base(folder: Path, settings: Mapping[str, Any]) -> Path:
    named = settings.get("base_model_name_or_path")
    if isinstance(named, str) and named and "\0" not in named:
        for base in (Path(named).expanduser(), folder / named):
            if base.is_dir():
                if is_adapter(base):
                    raise FileRefused(f"its base model {shown(named)} is an adapter itself; {WAY_OUT}")
                return base
    raise FileRefused(f"it is a PEFT adapter, whose base model, {shown(named)}, is no local folder; {WAY_OUT}")


def _merged(
    base: Mapping[str, Tensor], own: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[dict[str, Tensor], str]:
    """Returns the base model's tensors with the adapter merged, and a sentence on the changes."""
    merged, parts, replaced = dict(base), dict[str, dict[str, Tensor]](), 0
    for stored, tensor in own.items():
        # A wrapped layer has its own tensors one level down.
        name = stored.removeprefix(_BEFORE).replace(".base_layer.", ".")
        if part := _PART.fullmatch(name):
            sides = parts.setdefault(part["layer"], {})
            key = f"{part['embedding'] or ''}{part['side']}"
            if key in sides:
                raise FileRefused(
                    f"it must have one adapter, and {shown(part['layer'])} has two of lora_{key}; {WAY_OUT}"
                )
            sides[key] = tensor
            continue
        name = name.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")
        if not _is_saved(name, settings) and (name not in base or base[name].shape != tensor.shape):
            raise FileRefused(f"its tensor {shown(stored)} is none of LoRA's and none of the base model's; {WAY_OUT}")
        merged[name], replaced = tensor, replaced + 1
    if not parts and not replaced:
        raise FileRefused("it holds no tensor of an adapter")
    for layer, sides in parts.items():
        name = f"{layer}.weight"
        if name not in base or not base[name].is_floating_point():
            raise FileRefused(
                f"its layer {shown(layer)} must have a floating-point weight in the base model; {WAY_OUT}"
            )
        merged[name] = _added(base[name], sides, settings, layer)
    also = f", and {replaced} tensors that it trained as a whole took the place of the base model's" if replaced else ""
    return merged, f"LoRA of {len(parts)} layers was merged into it{also}."


def _is_saved(name: str, settings: Mapping[str, Any]) -> bool:
    """Returns whether a tensor is of a module that was trained as a whole, by the end of the module's name."""
    modules = settings.get("modules_to_save") or []
    layers = name.split(".")[:-1]
    return any(".".join(layers[: end + 1]).endswith(module) for module in modules for end in range(len(layers)))


def _added(weight: Tensor, sides: Mapping[str, Tensor], settings: Mapping[str, Any], layer: str) -> Tensor:
    """Returns W + scale * B A; for convolutions, B A is computed with filters as rows."""
    embedding = sides.keys() == {"embedding_A", "embedding_B"}
    if not embedding and sides.keys() != {"A", "B"}:
        raise FileRefused(f"its layer {shown(layer)} must have lora_A and lora_B, got {', '.join(sorted(sides))} alone")
    a, b = (sides[f"embedding_{side}" if embedding else side].double() for side in "AB")
    rank = _of_layer(settings, "rank_pattern", "r", layer)
    alpha = _of_layer(settings, "alpha_pattern", "lora_alpha", layer)
    shapes = f"lora_A {list(a.shape)} and lora_B {list(b.shape)}"
    if min(a.ndim, b.ndim) < 2 or a.shape[0] != rank or b.shape[1] != rank or b[0].numel() != rank:
        raise FileRefused(f"its layer {shown(layer)} must be of rank {rank}, as {CONFIG} says, got {shapes}")
    product = b.flatten(1) @ a.flatten(1)
    turned = embedding or bool(settings.get("fan_in_fan_out"))
    shape = (len(b), *a.shape[1:])
    added = product.T if turned and a.ndim == 2 else product.reshape(shape)
    if added.shape != weight.shape:
        raise FileRefused(f"{shapes} of its layer {shown(layer)} do not fit the weight {list(weight.shape)}; {WAY_OUT}")
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return (weight.double() + scale * added).to(torch.promote_types(weight.dtype, torch.float32))
