"""Audit of a checkpoint: reads and checks the files, runs the attacks, judges the rules, writes the report.

Invalid requests fail before anything is computed: the request itself, files, then the pre-flight. The owner's code runs
only if the request trusts it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from leakbench.leaderboard.records.audit_findings import SmallestLeak
from leakbench.leaderboard.records.audit_report import AuditedData, AuditReport, ModelFile, Normalization, ShadowsReport

from ...catalog import methods as catalog
from ...catalog import plugins
from ..examples.groups import Groups, groups_of
from ..report import audit_report, write_report
from ..request import ModelAuditRequest, known_attacks
from ..rule_numbers import judged
from ..transcript.canaries import GradientCanaries
from ..transcript.claim import TranscriptVerdict, judge_transcript
from ..transcript.format import WatchedTranscript
from .attack_requirements import AuditPlan, PlannedSource, applicable, way_out
from .attacks import Audited
from .audit import ModelAudit, audit_groups
from .loaded_model import LoadedModel, limited, load, read_sources
from .network import check_name
from .own_shadows import own_shadows
from .preflight import Preflight, preflight, refuse_stops, sentences, without_model
from .shadow_answers import AnsweredBank, BankExamples, read_bank
from .sizes import smallest_leak

Tell = Callable[[str], None]


def describe(request: ModelAuditRequest, *, transcript: bool = False) -> AuditPlan:
    """Returns the attacks that would run, the unmet requirements of others, and the smallest detectable leak.

    Reads the examples, to count them; the model is not loaded and nothing is computed.

    Args:
        request: of the audit.
        transcript: whether there is a transcript of the training, for attacks that read updates.

    Raises:
        StoppedError: the pre-flight would stop for any model.
        ValueError: a run would refuse the files.
    """
    sources, bank = read_sources(request), request.shadows.bank
    if not request.checkpoint.exists():
        raise ValueError(f"the checkpoint must be a file or a folder, and there is no {request.checkpoint}")
    if request.model:
        check_name(request.model)
    if bank is not None and not bank.is_file():
        raise ValueError(f"--bank must be a file, and there is no {bank}")
    groups = groups_of(
        sources["members"], sources["non_members"], sources.get("population"), preprocess=request.preprocess
    )
    groups = limited(groups, request)
    refuse_stops(without_model(groups, request.examples.accept))
    chosen = [name for name, _ in request.settings.attacks or ()]
    everything = [name for name in catalog.names("attacks") if catalog.attack(name).kind == "membership"]
    rows = applicable(
        chosen or everything,
        population="population" in sources,
        shadows=request.shadows.given,
        transcript=transcript,
    )
    return AuditPlan(
        sources={name: PlannedSource(source=file.source, n=len(file.labels)) for name, file in sources.items()},
        attacks=tuple(rows),
        smallest_leak=_smallest_leak(request, groups, sum(row.runs for row in rows)),
    )


def audit_checkpoint(
    request: ModelAuditRequest,
    tell: Tell,
    *,
    transcript: WatchedTranscript | None = None,
    canaries: GradientCanaries | None = None,
) -> AuditReport:
    """Reads and checks the files, attacks the model, judges the rules and writes the report.

    Args:
        request: of the audit.
        tell: called with a line for each stage.
        transcript: of the training; it is compared with the claim, and attacks that read updates run on it.
        canaries: records whose inclusion in that training was decided by coins; None for none.

    Raises:
        StoppedError: the pre-flight finds that an audit would be meaningless.
        ValueError: an invalid file, option or model.
    """
    loaded = load(request, tell)
    audited, looked = _checked(loaded, request, tell)
    bank = _bank(audited, request, loaded.everybody, tell)
    if transcript is not None and request.settings.split == "random":
        # Two tests of one claim, each at half the error rate: together they refute a true claim no more often than the
        # level allows.
        request = replace(request, settings=replace(request.settings, level=(1 + request.settings.level) / 2))
    transcript_verdict = _transcript(audited, transcript, canaries, request, tell)
    audit = audit_groups(
        audited,
        request.settings,
        shift=looked.shift,
        bank=bank,
        transcript=transcript,
        refuted=transcript_verdict.refuted if transcript_verdict else (),
        report=tell,
    )
    if (
        transcript_verdict is not None
        and transcript_verdict.word == "no verdict"
        and audit.verdict.word != "claim refuted"
    ):
        # The owner passed the transcript: the answer must say that it contradicts itself or the model.
        audit = replace(
            audit, verdict=replace(audit.verdict, sentence=f"{audit.verdict.sentence} {transcript_verdict.sentence}")
        )
    answer = _report(request, loaded, looked, bank, audit, transcript_verdict)
    return answer if request.out is None else write_report(answer, audit, loaded.groups.names, request.out)


def _checked(loaded: LoadedModel, request: ModelAuditRequest, tell: Tell) -> tuple[Audited, Preflight]:
    """Runs the pre-flight, and returns the model as it is attacked."""
    tell("pre-flight")
    settings, groups = request.settings, loaded.groups
    looked = preflight(
        loaded.model,
        groups,
        delta=settings.delta_of_bounds,
        level=settings.level,
        accept=request.examples.accept,
    )
    refuse_stops(looked.remarks)
    for line in sentences(looked.remarks):
        tell(line)
    audited = Audited(
        model=looked.model,
        members=groups.members,
        non_members=groups.non_members,
        population=groups.population,
        classes=looked.classes,
    )
    return audited, looked


def _report(
    request: ModelAuditRequest,
    loaded: LoadedModel,
    looked: Preflight,
    bank: AnsweredBank | None,
    audit: ModelAudit,
    transcript_verdict: TranscriptVerdict | None,
) -> AuditReport:
    """Judges the rules, and returns the report with the sections that follow from the request and its files."""
    groups = loaded.groups
    return audit_report(
        audit,
        groups.names,
        model=ModelFile(
            file=request.checkpoint.name,
            sha256=loaded.weights.sha256,
            kind=loaded.weights.kind,
            architecture=request.model or "its folder's own",
            parameters=sum(p.numel() for p in loaded.model.parameters()),
            notes=(*loaded.weights.notes, *loaded.notes),
        ),
        data=AuditedData(
            name=request.examples.data or Path(str(request.examples.members)).name,
            members=groups.sources["members"],
            non_members=groups.sources["non_members"],
            population=groups.sources.get("population"),
            preprocess=Normalization(mean=loaded.preprocess.mean, std=loaded.preprocess.std),
            shadows=None if bank is None else ShadowsReport(models=bank.models, source=bank.source),
        ),
        preflight=looked.report,
        smallest_leak=_smallest_leak(request, groups, sum(outcome.scores is not None for outcome in audit.outcomes)),
        transcript=None if transcript_verdict is None else transcript_verdict.report(refuted=audit.verdict.refuted),
        rules=judged(request.rules, audit.measured, audit.verdict),
        not_tested=(
            *_untested(audit, request, transcript=transcript_verdict is not None),
            *(transcript_verdict.skipped if transcript_verdict else ()),
        ),
        command=tuple(request.command),
    )


def _smallest_leak(request: ModelAuditRequest, groups: Groups, attacks: int) -> SmallestLeak:
    settings = request.settings
    return smallest_leak(
        len(groups.members), len(groups.non_members), settings.delta_of_bounds, settings.level, attacks
    )


def _transcript(
    audited: Audited,
    transcript: WatchedTranscript | None,
    canaries: GradientCanaries | None,
    request: ModelAuditRequest,
    tell: Tell,
) -> TranscriptVerdict | None:
    """Returns the verdict of the transcript on the claim; None if either is missing."""
    claim = request.settings.claim
    if transcript is None or claim is None:
        return None
    tell("transcript")
    return judge_transcript(
        transcript,
        claim,
        model=audited.model,
        members=audited.members.inputs,
        canaries=canaries,
        final=audited.model.state_dict(),
        level=request.settings.level,
        device=request.device,
    )


def _untested(audit: ModelAudit, request: ModelAuditRequest, *, transcript: bool) -> list[str]:
    """Returns a sentence for each attack or measurement that was not tested, with the option that enables it."""
    lacking: dict[str, list[str]] = {}
    for outcome in audit.outcomes:
        if outcome.missing:
            lacking.setdefault(way_out(outcome.missing), []).append(outcome.name)
    reasons = [f"{', '.join(names)}: pass {option}" for option, names in lacking.items()]
    reasons += [outcome.why_not for outcome in audit.outcomes if outcome.scores is None and not outcome.missing]
    ran = {outcome.name for outcome in audit.outcomes}
    if excluded := [name for name in known_attacks(transcript) if name not in ran]:
        reasons.append(f"{', '.join(excluded)}: left out by --attacks")
    if not transcript:
        reasons.append(
            "updates as they were shared in training: use leakbench audit transcript DIR --checkpoint FILE, "
            "with DIR by `leakbench.watch`"
        )
    if request.settings.split != "random":
        reasons.append("epsilon: nobody says that members were drawn at random; pass --split random where they were")
    return reasons


def _bank(audited: Audited, request: ModelAuditRequest, everybody: BankExamples, tell: Tell) -> AnsweredBank | None:
    """Returns shadow models' answers, from a file or by the owner's function; None without either."""
    if request.shadows.bank is not None:
        tell("shadow models' answers")
        return read_bank(
            request.shadows.bank,
            everybody,
            population=audited.population,
            classes=audited.classes,
            allow_pickle_tensors=request.allow_pickle_tensors,
        ).bank()
    train = request.shadows.train
    if train is None:
        return None
    function = plugins.load("training function", train)
    code = hashlib.sha256()
    for file in plugins.source_files(train):
        content = file.read_bytes()
        code.update(f"{file.name} {len(content)}\n".encode() + content)
    return own_shadows(
        audited,
        function,
        request.shadows.number,
        code=code.hexdigest(),
        folder=None if request.out is None else request.out / "shadows",
        seed=request.settings.seed,
        report=lambda done: tell(f"shadow model {done} of {request.shadows.number}"),
    )
