"""Update of a request with the model before the step and its examples, read from their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakbench.attacks.core import Examples
from leakbench.benchmarks import models

from ...targets.observe import PublicKnowledge
from ..examples.groups import DataFile, in_order, read_examples
from ..examples.identity import content_ids
from ..files import read_tensors
from ..files.read import StateFile
from ..model.answers import reading
from ..model.fitting import fitting, refuse_other_columns
from ..model.network import filled
from ..request import UpdateAuditRequest
from .attacks import SharedFile, read_update


@dataclass(frozen=True, kw_only=True)
class LoadedUpdate:
    """Update with all that its server knows.

    Attributes:
        model: before the step, in evaluation mode, on the device of the computation.
        before: file of the model.
        after: file of the update.
        shared: the update.
        labels: of the batch, as the owner gives them; None if unknown.
        public_knowledge: shape and range of inputs, number of classes, public examples.
        sources: public examples and candidates as their files have them, those that are given.
        candidates: as fed to the model; None for none.
    """

    model: nn.Module
    before: StateFile
    after: StateFile
    shared: SharedFile
    labels: list[int] | None
    public_knowledge: PublicKnowledge
    sources: Mapping[str, DataFile]
    candidates: Examples | None

    @property
    def names(self) -> tuple[str, ...]:
        """The owner's names of the candidates; empty without any."""
        return self.sources["candidates"].names if "candidates" in self.sources else ()


def load_update(request: UpdateAuditRequest) -> LoadedUpdate:
    """Reads the files of a request.

    Raises:
        ValueError: an invalid file, or an update that is not one of the model.
    """
    labels = _labels(request.labels)
    sources = {
        name: read_examples(source, reading=request.reading)
        for name, source in (("public", request.public), ("candidates", request.candidates))
        if source is not None
    }
    if len(sources) == 2:
        sources["candidates"] = in_order(sources["candidates"], sources["public"])
    groups = {name: _examples(source, request) for name, source in sources.items()}
    shape, least = _shape(request, groups, labels)
    before = read_tensors(request.checkpoint, allow_pickle_tensors=request.allow_pickle_tensors)
    after = read_tensors(request.update, allow_pickle_tensors=request.allow_pickle_tensors)
    model = fitting(request.model, before.tensors, input_shape=shape, least=least, trust_code=request.trust_code)
    model = filled(model, before.tensors).to(request.device).eval()
    for name, source in sources.items():
        refuse_other_columns(model, source.columns, of=name)
    with torch.no_grad():
        if not isinstance(model(torch.zeros(2, *shape, device=request.device)), Tensor):
            model = reading(model, "logits")
        classes = int(model(torch.zeros(1, *shape, device=request.device)).shape[1])
    public = groups.get("public")
    shared = read_update(
        model,
        after.tensors,
        batch_size=request.batch_size,
        lr=request.lr,
        update_is=request.update_is,
        weight_decay=request.weight_decay,
        clip_norm=request.clip_norm,
        noise_multiplier=request.noise_multiplier,
        labels=labels,
        public=public,
        input_shape=shape,
        training_mode=request.training_mode,
    )
    low, high = (0.0, 1.0) if public is None else (float(public.inputs.min()), float(public.inputs.max()))
    return LoadedUpdate(
        model=model,
        before=before,
        after=after,
        shared=shared,
        labels=labels,
        public_knowledge=PublicKnowledge(input_shape=shape, classes=classes, low=low, high=high, population=public),
        sources=sources,
        candidates=groups.get("candidates"),
    )


def _labels(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--labels must be class numbers with commas between, got {text!r}")
    return [int(part) for part in parts]


def _examples(source: DataFile, request: UpdateAuditRequest) -> Examples:
    inputs = request.preprocess(source.inputs)
    ids = content_ids(inputs, source.labels)
    return Examples(
        ids=ids.to(request.device), inputs=inputs.to(request.device), labels=source.labels.to(request.device)
    )


def _shape(
    request: UpdateAuditRequest, groups: Mapping[str, Examples], labels: list[int] | None
) -> tuple[tuple[int, ...], int]:
    """Returns the shape of an input and the least number of classes; without examples, from the built-in model."""
    least = max(
        [2, *(1 + int(examples.labels.max()) for examples in groups.values()), *(1 + label for label in labels or ())]
    )
    shapes = {name: tuple(examples.inputs.shape[1:]) for name, examples in groups.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"--candidates must have inputs of the shape of --public, {shapes['public']}, got {shapes}")
    if shapes:
        return next(iter(shapes.values())), least
    if request.model not in models.names():
        raise ValueError(f"--public must be given for {request.model}: nothing else says the shape of its inputs")
    return tuple(models.natural(request.model).input_shape), least
