"""Model and examples of a request, read from their files for the pre-flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from leakbench.attacks.core import Examples

from ...catalog import plugins
from ...subjects.outcome import pick
from ..examples.groups import DataFile, Groups, Preprocess, groups_of, read_examples, read_named
from ..examples.overlap import without_shared
from ..files import read_weights
from ..files.read import StateFile
from ..request import ModelAuditRequest
from .fitting import fitting, refuse_other_columns
from .image_classifier import ImageClassifier, image_classifier
from .network import filled, own_tensors
from .shadow_answers import BankExamples


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """Model and its examples, on the device of the computation.

    Attributes:
        model: in evaluation mode.
        weights: tensors and digest of its file.
        notes: changes made to the weights, and settings of their folder that were left out, a sentence each.
        groups: examples as fed to the model, of each group at most as many as requested.
        everybody: the same groups with all examples, which a bank's answers are about.
        preprocess: applied to the examples.
    """

    model: nn.Module
    weights: StateFile
    notes: tuple[str, ...]
    groups: Groups
    everybody: BankExamples
    preprocess: Preprocess


def load(request: ModelAuditRequest, tell: Callable[[str], None]) -> LoadedModel:
    """Reads the files of a request.

    Args:
        request: names them.
        tell: called with each change made to the weights.

    Raises:
        ValueError: an invalid file, or a model that does not fit its file.
    """
    sources = read_sources(request)
    folder = None
    if request.checkpoint.is_dir() and not request.model:
        folder = image_classifier(request.checkpoint, allow_pickle_tensors=request.allow_pickle_tensors)
    if folder is None:
        weights = read_weights(request.checkpoint, allow_pickle_tensors=request.allow_pickle_tensors)
    else:
        weights = folder.state
    preprocess = _preprocess(request, folder)
    groups = groups_of(sources["members"], sources["non_members"], sources.get("population"), preprocess=preprocess)
    everybody = BankExamples(groups.members, groups.non_members, groups.population)
    groups = _moved(limited(groups, request), request.device)
    if folder is None:
        model, notes = _filled(request, weights, groups)
        for note in notes:
            tell(f"note: {note}")
    else:
        model, notes = folder.model, folder.notes
    refuse_other_columns(model, groups.columns)
    return LoadedModel(
        model=model.to(request.device).eval(),
        weights=weights,
        notes=notes,
        groups=groups,
        everybody=everybody,
        preprocess=preprocess,
    )


def read_sources(request: ModelAuditRequest) -> dict[str, DataFile]:
    """Reads the examples of each group that has some."""
    files = request.examples
    if files.data is not None and files.split_file is not None:
        groups = read_named(files.data, files.split_file)
        if missing := [name for name in ("members", "non_members") if name not in groups]:
            raise ValueError(f"{files.split_file} must name {missing[0]}, and has none")
        return groups
    sources = {"members": files.members, "non_members": files.non_members, "population": files.population}
    return {
        name: read_examples(source, reading=request.reading) for name, source in sources.items() if source is not None
    }


def limited(groups: Groups, request: ModelAuditRequest) -> Groups:
    """Leaves out shared examples if requested, then keeps at most `most` members and non-members, drawn by the seed.

    A random part of a random split is a random split.
    """
    files = request.examples
    groups = without_shared(groups) if files.drop_overlap else groups
    generator = torch.Generator().manual_seed(request.settings.seed)

    def some(examples: Examples) -> Examples:
        if len(examples) <= files.most:
            return examples
        return pick(examples, torch.randperm(len(examples), generator=generator)[: files.most].sort().values)

    return replace(groups, members=some(groups.members), non_members=some(groups.non_members))


def _preprocess(request: ModelAuditRequest, folder: ImageClassifier | None) -> Preprocess:
    """Returns the owner's preprocessing, which takes precedence over the normalization that a folder states."""
    if folder is None or request.preprocess != Preprocess() or folder.mean is None or folder.std is None:
        return request.preprocess
    return Preprocess(folder.mean, folder.std)


def _moved(groups: Groups, device: torch.device) -> Groups:
    def moved(examples: Examples) -> Examples:
        return Examples(
            ids=examples.ids.to(device), inputs=examples.inputs.to(device), labels=examples.labels.to(device)
        )

    population = None if groups.population is None else moved(groups.population)
    return replace(groups, members=moved(groups.members), non_members=moved(groups.non_members), population=population)


def _filled(request: ModelAuditRequest, weights: StateFile, groups: Groups) -> tuple[nn.Module, tuple[str, ...]]:
    """Returns the architecture with the weights of the file, and a sentence on each change to their names."""
    labels = torch.cat([groups.members.labels, groups.non_members.labels])
    model = fitting(
        request.model,
        weights.tensors,
        input_shape=tuple(groups.members.inputs.shape[1:]),
        least=max(2, 1 + int(labels.max())),
        lowest=int(labels.min()),
        single=True,
        trust_code=request.trust_code,
    )
    tensors, notes = own_tensors(model, weights.tensors)
    return filled(model, tensors, own_code=plugins.is_path(request.model)), notes
