"""`leakbench audit update`: reads a shared update, attacks it, and reports.

The ground truth is unknown, so a reconstruction is reported with the attack's own evidence: its certificate, the
unexplained part of the update, and its objective.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from leakbench.attacks.core import Access, Knows, LabelEstimate, MembershipScores, Reconstruction
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
from ..model.audit import gradient_attacks
from ..model.shared_gradients import ranks
from ..report import ranks_report
from ..request import UpdateAuditRequest, attack_names
from .attacks import SharedFile, UpdateFinding, attack_update, observed, with_labels
from .loaded_update import LoadedUpdate, load_update
from .public_guesses import compared_with_guesses
from .verdict import contradicted_labels, rate_of, shown_places, verdict_of


def audit_update(request: UpdateAuditRequest, tell: Callable[[str], None]) -> UpdateReport:
    """Attacks an update, and writes the results with the reconstructions to the folder, if one is given.

    Args:
        request: of the audit.
        tell: called with the name of each attack before it runs.

    Raises:
        ValueError: an invalid file or option.
    """
    attacks = _attacks(request)
    loaded = load_update(request)
    informed, findings = _attacked(loaded, attacks, request, tell)
    answer = _report(request, loaded, informed, findings)
    return answer if request.out is None else _write(request.out, answer, findings, loaded.names)


def _attacked(
    loaded: LoadedUpdate,
    attacks: Sequence[tuple[str, Mapping[str, Any]]],
    request: UpdateAuditRequest,
    tell: Callable[[str], None],
) -> tuple[SharedFile, list[UpdateFinding]]:
    """Returns the update with labels, recovered if an attack needs them, and the results of the attacks."""
    needy = [name for name, _ in attacks if Knows.LABELS in catalog.attack(name).requires.knows]
    informed = with_labels(loaded.shared, loaded.public_knowledge, seed=request.seed) if needy else loaded.shared
    findings = []
    for attack in attacks:
        tell(attack[0])
        shared = informed if attack[0] in needy else loaded.shared
        findings += attack_update(
            shared, loaded.public_knowledge, [attack], candidates=loaded.candidates, seed=request.seed
        )
    return informed, findings


def _compared(loaded: LoadedUpdate, findings: Sequence[UpdateFinding], seed: int) -> dict[str, GuessComparison]:
    """Compares the reconstructions of each attack with guesses."""
    target = observed(loaded.shared, loaded.public_knowledge, kind="reconstruction")
    return {
        finding.name: comparison
        for finding in findings
        if isinstance(finding.result, Reconstruction)
        and (comparison := compared_with_guesses(target, finding.result, seed=seed)) is not None
    }


def _report(
    request: UpdateAuditRequest, loaded: LoadedUpdate, informed: SharedFile, findings: Sequence[UpdateFinding]
) -> UpdateReport:
    """Judges the results, and returns the whole report."""
    shared, public_knowledge, sources, names = loaded.shared, loaded.public_knowledge, loaded.sources, loaded.names
    equations = ranks(loaded.model, public_knowledge.input_shape, seed=request.seed)
    compared, rate = _compared(loaded, findings, request.seed), rate_of(findings)
    read = shared.convention.unreadable or shared.convention.ambiguous
    return UpdateReport(
        verdict=verdict_of(findings, compared, names, rate, doubt=read or contradicted_labels(findings, loaded.labels)),
        model=ModelBeforeStep(file=request.checkpoint.name, sha256=loaded.before.sha256, architecture=request.model),
        update=UpdateFile(
            file=request.update.name,
            sha256=loaded.after.sha256,
            batch_size=request.batch_size,
            lr=request.lr,
            convention=shared.convention.report,
            lacking=tuple(shared.lacking),
            training_mode=shared.in_training is not None,
            clip_norm=request.clip_norm,
            noise_multiplier=request.noise_multiplier,
        ),
        data={
            name: DataSource(source=source.source, sha256=source.sha256, n=len(source.labels))
            for name, source in sources.items()
        },
        input_shape=public_knowledge.input_shape,
        input_range=(public_knowledge.low, public_knowledge.high),
        classes=public_knowledge.classes,
        parameters=sum(parameter.numel() for parameter in loaded.model.parameters()),
        seed=request.seed,
        attacks=tuple(result_of(finding, compared.get(finding.name), names, rate) for finding in findings),
        notes=(
            *[note for source in sources.values() for note in source.notes],
            *informed.notes,
            *filter(None, [shared.convention.ambiguous]),
        ),
        ranks=ranks_report(equations),
        not_tested=tuple(_untested(findings, request, labels=informed.labels is not None)),
        command=tuple(request.command),
        device=str(request.device),
        provenance=library(),
        files={},
    )


def _untested(findings: Sequence[UpdateFinding], request: UpdateAuditRequest, *, labels: bool) -> list[str]:
    """Lists the tests not run, a sentence each, with the option that enables them."""
    sentences = [finding.why_not for finding in findings if finding.why_not]
    tried = {finding.name for finding in findings}
    if others := [
        name for name, kind in sorted(_on_updates().items()) if kind == "reconstruction" and name not in tried
    ]:
        sentences.append(f"{', '.join(others)}: pass --attacks with their names")
    if request.candidates is None:
        sentences.append(
            "who was in the batch: pass --candidates FILE, and --public FILE for examples that were not in it"
        )
    if not labels:
        sentences.append("attacks at the labels of the batch: pass --labels where the server knows them")
    sentences.append("what several updates of one client give away together: pass the transcript of a whole training")
    return sentences


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
    return {name: attack.kind for name, attack in attacks.items() if attack.requires.access == Access.UPDATE}


def _attacks(request: UpdateAuditRequest) -> list[tuple[str, Mapping[str, Any]]]:
    on_updates = _on_updates()
    if request.attacks is not None:
        chosen = attack_names(request.attacks)
        for name in chosen:
            if name not in on_updates:
                raise ValueError(no_such("attack on an update", name, sorted(on_updates)))
        return [(name, {}) for name in chosen]
    kinds = {"labels"} | ({"membership"} if request.candidates is not None else set())
    return [*gradient_attacks(), *((name, {}) for name, kind in sorted(on_updates.items()) if kind in kinds)]


def _write(folder: Path, report: UpdateReport, findings: Sequence[UpdateFinding], names: Sequence[str]) -> UpdateReport:
    """Writes arrays first, and last the document with their digests, so that a document implies all its files."""
    results = {finding.name: finding.result for finding in findings if isinstance(finding.result, Reconstruction)}
    file = io.BytesIO()
    arrays = {name: result.inputs.detach().cpu().numpy() for name, result in results.items()}
    np.savez(file, **arrays)  # pyright: ignore[reportArgumentType] -- names of arrays
    write_bytes(folder / UpdateReport.ARRAYS, file.getvalue())
    files = {UpdateReport.ARRAYS: digest_of_bytes(file.getvalue())}
    columns: dict[str, Any] = {"name": list(names)}
    for finding in findings:
        if finding.q_values:
            columns |= {f"p_value_{finding.name}": finding.p_values, f"q_value_{finding.name}": finding.q_values}
    if len(columns) > 1:
        path, digest = write_arrays(columns, folder, Path(UpdateReport.CANDIDATES).stem)
        files[path.name] = digest
    report = replace(report, files=files)
    report.write(folder)
    return report
