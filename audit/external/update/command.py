"""`leakbench audit --update`: reads a shared update, attacks it, and reports.

The ground truth is unknown, so a reconstruction is reported with the attack's own evidence: its certificate, the
unexplained part of the update, and its objective.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakbench.attacks.core import Access, Examples, Knows, LabelEstimate, MembershipScores, Reconstruction
from leakbench.benchmarks import models
from leakbench.leaderboard.records.files import digest_of_bytes, write_bytes
from leakbench.leaderboard.records.report import DataSource
from leakbench.leaderboard.records.update_report import (
    CandidateResult,
    GuessComparison,
    JudgedCandidates,
    ModelBeforeStep,
    ReconstructedInputs,
    RecoveredLabels,
    UpdateAttack,
    UpdateFile,
    UpdateReport,
)

from ...catalog import methods as catalog
from ...catalog.messages import no_such
from ...run.arrays import write_arrays
from ...run.provenance import library
from ...targets.observe import World
from ..examples.groups import DataFile, Preprocess, Reading, in_order, read_examples
from ..examples.identity import content_ids
from ..files import read_tensors
from ..model.answers import reading
from ..model.audit import gradient_attacks
from ..model.command import fitting, refuse_other_columns
from ..model.network import filled
from ..model.shared_gradients import ranks
from ..out_folder import check_folder
from ..report import ranks_report
from .attacks import UpdateFinding, attack_update, observed, read_update, with_labels
from .convention import UpdateIs
from .public_guesses import beside_guesses
from .verdict import contradicted_labels, rate_of, shown_places, verdict_of


@dataclass(frozen=True, kw_only=True)
class AskedUpdate:
    """Request for an audit of an update; `leakbench audit --help` explains each option.

    Attributes:
        checkpoint: the model before the step.
        model: its architecture.
        update: the shared tensors.
        batch_size: examples in the batch.
        public: source of public examples; None for none.
        candidates: source of examples that may have been in the batch; None without membership attacks.
        labels: of the batch, as `3,5,5`; None if unknown.
        lr: of the step, if the update holds the weights after it, or their difference.
        update_is: content of the update, as in `UpdateIs`; None to infer it.
        weight_decay: coefficient that the step added to the gradient; None to infer it.
        training_mode: whether batch norms used the batch's statistics; implied if the update's running ones moved.
        clip_norm: of each example; None without clipping.
        noise_multiplier: noise standard deviation / clip norm.
        attacks: names separated by commas; None for those of the quick suite, of labels, and of candidates.
        preprocess: applied to examples.
        reading: options on the layout of stored examples.
        seed: of the generators.
        out: folder of the report; None for none.
        device: for computations.
        allow_pickle_tensors: whether PyTorch's restricted loader may be used.
        trust_code: whether the owner's Python files may run.
        command: words of the command line, for the report.
    """

    checkpoint: Path
    model: str
    update: Path
    batch_size: int
    public: str | None = None
    candidates: str | None = None
    labels: str | None = None
    lr: float | None = None
    update_is: UpdateIs | None = None
    weight_decay: float | None = None
    training_mode: bool = False
    clip_norm: float | None = None
    noise_multiplier: float = 0.0
    attacks: str | None = None
    preprocess: Preprocess
    reading: Reading
    seed: int = 0
    out: Path | None = None
    device: torch.device
    allow_pickle_tensors: bool = False
    trust_code: bool = False
    command: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.candidates is not None and self.public is None:
            raise ValueError("--candidates are compared with public examples that were not in the batch; give --public")
        check_folder(self.out)


def audit_update(asked: AskedUpdate, report: Callable[[str], None]) -> UpdateReport:
    """Attacks an update.

    Args:
        asked: the request.
        report: called with the name of each attack before it runs.

    Returns:
        The report; it is also written to the folder, if given, with the reconstructions.

    Raises:
        ValueError: an invalid file or option.
    """
    attacks, labels = _attacks(asked), _labels(asked.labels)
    sources = {
        name: read_examples(source, reading=asked.reading)
        for name, source in (("public", asked.public), ("candidates", asked.candidates))
        if source is not None
    }
    if len(sources) == 2:
        sources["candidates"] = in_order(sources["candidates"], sources["public"])
    groups = {name: _examples(one, asked) for name, one in sources.items()}
    shape, least = _shape(asked, groups, labels)
    before = read_tensors(asked.checkpoint, allow_pickle_tensors=asked.allow_pickle_tensors)
    shared_file = read_tensors(asked.update, allow_pickle_tensors=asked.allow_pickle_tensors)
    model = fitting(asked.model, before.tensors, input_shape=shape, least=least, trust_code=asked.trust_code)
    model = filled(model, before.tensors).to(asked.device).eval()
    for name, one in sources.items():
        refuse_other_columns(model, one.columns, of=name)
    with torch.no_grad():
        if not isinstance(model(torch.zeros(2, *shape, device=asked.device)), Tensor):
            model = reading(model, "logits")
    public = groups.get("public")
    shared = read_update(
        model,
        shared_file.tensors,
        batch_size=asked.batch_size,
        lr=asked.lr,
        update_is=asked.update_is,
        weight_decay=asked.weight_decay,
        clip_norm=asked.clip_norm,
        noise_multiplier=asked.noise_multiplier,
        labels=labels,
        public=public,
        input_shape=shape,
        training_mode=asked.training_mode,
    )
    low, high = (0.0, 1.0) if public is None else (float(public.inputs.min()), float(public.inputs.max()))
    with torch.no_grad():
        classes = int(model(torch.zeros(1, *shape, device=asked.device)).shape[1])
    world = World(input_shape=shape, classes=classes, low=low, high=high, population=public)
    needy = [name for name, _ in attacks if Knows.LABELS in catalog.attack(name).requires.knows]
    informed = with_labels(shared, world, seed=asked.seed) if needy else shared
    found = []
    for one in attacks:
        report(one[0])
        given = informed if one[0] in needy else shared
        found += attack_update(given, world, [one], candidates=groups.get("candidates"), seed=asked.seed)
    names = sources["candidates"].names if "candidates" in sources else ()
    equations = ranks(model, shape, seed=asked.seed)
    rate, target = rate_of(found), observed(shared, world, kind="reconstruction")
    compared = {
        one.name: comparison
        for one in found
        if isinstance(one.result, Reconstruction)
        and (comparison := beside_guesses(target, one.result, seed=asked.seed)) is not None
    }
    read = shared.convention.unreadable or shared.convention.ambiguous
    answer = UpdateReport(
        verdict=verdict_of(found, compared, names, rate, doubt=read or contradicted_labels(found, labels)),
        model=ModelBeforeStep(file=asked.checkpoint.name, sha256=before.sha256, architecture=asked.model),
        update=UpdateFile(
            file=asked.update.name,
            sha256=shared_file.sha256,
            batch_size=asked.batch_size,
            lr=asked.lr,
            convention=shared.convention.report,
            lacking=tuple(shared.lacking),
            training_mode=shared.in_training is not None,
            clip_norm=asked.clip_norm,
            noise_multiplier=asked.noise_multiplier,
        ),
        data={
            name: DataSource(source=one.source, sha256=one.sha256, n=len(one.labels)) for name, one in sources.items()
        },
        input_shape=shape,
        input_range=(low, high),
        classes=classes,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        seed=asked.seed,
        attacks=tuple(result_of(one, compared.get(one.name), names, rate) for one in found),
        notes=(
            *[n for one in sources.values() for n in one.notes],
            *informed.notes,
            *filter(None, [shared.convention.ambiguous]),
        ),
        ranks=ranks_report(equations),
        not_tested=tuple(_untested(found, asked, labels=informed.labels is not None)),
        command=tuple(asked.command),
        device=str(asked.device),
        provenance=library(),
        files={},
    )
    return answer if asked.out is None else _write(asked.out, answer, found, names)


def _untested(found: Sequence[UpdateFinding], asked: AskedUpdate, *, labels: bool) -> list[str]:
    """Lists the tests not run, a sentence each, with the option that enables them."""
    told = [one.why_not for one in found if one.why_not]
    tried = {one.name for one in found}
    if others := [
        name for name, kind in sorted(_on_updates().items()) if kind == "reconstruction" and name not in tried
    ]:
        told.append(f"{', '.join(others)}: pass --attacks with their names")
    if asked.candidates is None:
        told.append("who was in the batch: pass --candidates FILE, and --public FILE for examples that were not in it")
    if not labels:
        told.append("attacks at the labels of the batch: pass --labels where the server knows them")
    told.append("what several updates of one client give away together: pass the transcript of a whole training")
    return told


def result_of(
    finding: UpdateFinding, compared: GuessComparison | None, names: Sequence[str], rate: float
) -> UpdateAttack:
    """Returns an attack's part of the report.

    Args:
        finding: of the attack.
        compared: its reconstruction with guesses; None if there is no comparison.
        names: of the candidates.
        rate: false discovery rate of an attack on candidates.
    """
    about: dict[str, Any] = {"name": finding.name, "settings": dict(finding.settings), "why_not": finding.why_not}
    match finding.result:
        case Reconstruction() as result:
            proved = result.certified
            return ReconstructedInputs(
                **about,
                kind="reconstruction",
                images=len(result.inputs),
                labels=tuple(result.labels.tolist()),
                status=result.status,
                certified=None if proved is None else int(proved.sum()),
                proved=None if proved is None else tuple(proved.tolist()),
                objective=result.objective if np.isfinite(result.objective) else None,
                residual_ratio=result.residual_ratio,
                expected_error=_largest(result.expected_error),
                beside_guesses=compared,
            )
        case LabelEstimate() as result:
            counts = {str(label): int(count) for label, count in enumerate(result.counts.tolist()) if count}
            return RecoveredLabels(**about, kind="labels", labels=counts, status=result.status)
        case MembershipScores():
            rows, shown = zip(names, finding.p_values, finding.q_values, strict=True), shown_places(finding, rate)
            candidates = (
                CandidateResult(name=name, p_value=p, q_value=q, shown=place in shown)
                for place, (name, p, q) in enumerate(rows)
            )
            return JudgedCandidates(**about, kind="membership", false_discovery_rate=rate, candidates=tuple(candidates))
        case None:
            return UpdateAttack(**about, kind=finding.kind)


def _largest(errors: Tensor | None) -> float | None:
    """Returns the largest expected error of the inputs under noise; None if not computed or unbounded."""
    if errors is None or not len(errors) or not bool(errors.isfinite().all()):
        return None
    return float(errors.max())


def _on_updates() -> dict[str, str]:
    """Returns the kind of each attack in the catalogue that reads a single update."""
    attacks = {name: catalog.attack(name) for name in catalog.names("attacks")}
    return {name: one.kind for name, one in attacks.items() if one.requires.access == Access.UPDATE}


def _attacks(asked: AskedUpdate) -> list[tuple[str, Mapping[str, Any]]]:
    on_updates = _on_updates()
    if asked.attacks is not None:
        chosen = [name.strip() for name in asked.attacks.split(",") if name.strip()]
        if not chosen or len(set(chosen)) < len(chosen):
            raise ValueError(f"--attacks must be names with commas between, each once, got {asked.attacks!r}")
        for name in chosen:
            if name not in on_updates:
                raise ValueError(no_such("attack on an update", name, sorted(on_updates)))
        return [(name, {}) for name in chosen]
    wanted = {"labels"} | ({"membership"} if asked.candidates is not None else set())
    return [*gradient_attacks(), *((name, {}) for name, kind in sorted(on_updates.items()) if kind in wanted)]


def _labels(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--labels must be class numbers with commas between, got {text!r}")
    return [int(part) for part in parts]


def _examples(one: DataFile, asked: AskedUpdate) -> Examples:
    inputs = asked.preprocess(one.inputs)
    ids = content_ids(inputs, one.labels)
    return Examples(ids=ids.to(asked.device), inputs=inputs.to(asked.device), labels=one.labels.to(asked.device))


def _shape(asked: AskedUpdate, groups: Mapping[str, Examples], labels: list[int] | None) -> tuple[tuple[int, ...], int]:
    """Returns the shape of an input and the least number of classes; without examples, from the built-in model."""
    least = max([2, *(1 + int(one.labels.max()) for one in groups.values()), *(1 + label for label in labels or ())])
    shapes = {name: tuple(one.inputs.shape[1:]) for name, one in groups.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"--candidates must have inputs of the shape of --public, {shapes['public']}, got {shapes}")
    if shapes:
        return next(iter(shapes.values())), least
    if asked.model not in models.names():
        raise ValueError(f"--public must be given for {asked.model}: nothing else says the shape of its inputs")
    return tuple(models.natural(asked.model).input_shape), least


def _write(folder: Path, report: UpdateReport, found: Sequence[UpdateFinding], names: Sequence[str]) -> UpdateReport:
    """Writes arrays first, and last the document with their digests, so that a document implies all its files."""
    results = {one.name: one.result for one in found if isinstance(one.result, Reconstruction)}
    file = io.BytesIO()
    arrays = {name: result.inputs.detach().cpu().numpy() for name, result in results.items()}
    np.savez(file, **arrays)  # pyright: ignore[reportArgumentType] -- names of arrays
    write_bytes(folder / UpdateReport.ARRAYS, file.getvalue())
    files = {UpdateReport.ARRAYS: digest_of_bytes(file.getvalue())}
    columns: dict[str, Any] = {"name": list(names)}
    for one in found:
        if one.q_values:
            columns |= {f"p_value_{one.name}": one.p_values, f"q_value_{one.name}": one.q_values}
    if len(columns) > 1:
        path, digest = write_arrays(columns, folder, Path(UpdateReport.CANDIDATES).stem)
        files[path.name] = digest
    report = replace(report, files=files)
    report.write(folder)
    return report
