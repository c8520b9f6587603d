"""Implementation of `leakbench audit`: checks the files, runs the attacks, writes the report, judges the rules.

Invalid requests fail before anything is computed: rules, names of attacks, files, then the pre-flight. The owner's code
runs only if `trust_code` is set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leakbench.attacks.core import Examples
from leakbench.leaderboard.records.audit_report import AuditedData, AuditReport, ModelFile, Normalization, ShadowsReport

from ...catalog import methods as catalog
from ...catalog import plugins
from ...catalog.messages import no_such
from ...subjects.outcome import pick
from ..examples.groups import DataFile, Groups, Preprocess, groups_of, read_examples, read_named
from ..examples.overlap import without_shared
from ..examples.sources.raw import AS_IS, Reading
from ..files import read_weights
from ..gate import Rule, rules
from ..out_folder import check_folder
from ..report import audit_report, write_report
from ..rule_numbers import judged
from ..transcript.attacks import transcript_attacks
from ..transcript.canaries import read_canaries
from ..transcript.claim import TranscriptVerdict, judge_transcript
from ..transcript.format import WatchedTranscript, read_transcript
from .attack_requirements import AuditPlan, PlannedSource, applicable, way_out
from .attacks import Audited, final_model_attacks
from .audit import AuditSettings, ModelAudit, audit_groups
from .image_classifier import image_classifier
from .network import architecture, check_name, filled, own_tensors
from .own_shadows import own_shadows
from .preflight import ACCEPTABLE, preflight, refuse_stops, sentences, without_model
from .shadow_answers import AnsweredAbout, AnsweredBank, read_bank
from .sizes import smallest_leak

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Request of `leakbench audit`, as given; `leakbench audit --help` explains each option.

    Attributes:
        settings: of the audit.
        checkpoint: file of the model.
        model: its architecture; empty for a folder that names its own.
        members: source of the training examples.
        non_members: source of examples outside the training set.
        population: source of public examples; None for none.
        data: built-in data set instead of these three, divided by the split file.
        split_file: assigns its examples to groups.
        preprocess: applied to examples.
        reading: how examples are stored.
        drop_overlap: whether examples in two groups are dropped, rather than an error.
        accept: kinds of pre-flight remarks that do not stop the audit.
        most: largest number of members, and of non-members, used as candidates.
        transcript: folder that `leakbench.watch` wrote of the training; None for none.
        canaries: file of canaries that coins included in the training; None for none.
        shadows: number of shadow models; 0 for none.
        train: the owner's training function.
        bank: file of shadow models' answers, instead of a training function; None for none.
        rules: limits that the audit must keep.
        out: folder of the report; None for none.
        device: device of the computation.
        allow_pickle_tensors: whether PyTorch's restricted loader may be used.
        trust_code: whether the owner's Python files may run.
        command: words of the command line, for the report.
    """

    settings: AuditSettings
    checkpoint: Path
    model: str
    members: str | None = None
    non_members: str | None = None
    population: str | None = None
    data: str | None = None
    split_file: Path | None = None
    preprocess: Preprocess
    reading: Reading = AS_IS
    drop_overlap: bool = False
    accept: Sequence[str] = ()
    most: int = 10_000
    transcript: Path | None = None
    canaries: Path | None = None
    shadows: int = 0
    train: str | None = None
    bank: Path | None = None
    rules: Sequence[Rule] = ()
    out: Path | None = None
    device: torch.device
    allow_pickle_tensors: bool = False
    trust_code: bool = False
    command: Sequence[str] = ()

    def __post_init__(self) -> None:
        if (self.shadows > 0) != (self.train is not None):
            raise ValueError("--shadows and --train go together: a function trains the shadow models")
        if self.bank is not None and self.train is not None:
            raise ValueError("--bank is instead of --shadows and --train, got both")
        if self.shadows % 2:
            raise ValueError(f"--shadows must be an even number, they halve the candidates, got {self.shadows}")
        for option, code in (("--train", self.train), ("--model", self.model)):
            if code is not None and plugins.is_path(code) and not self.trust_code:
                raise ValueError(f"{option} {code} is code that would run; pass --trust-code if you trust it")
        if self.transcript is not None and self.settings.claim is None:
            raise ValueError("--transcript is held against a claim; give --claim epsilon=...,noise_multiplier=...")
        if self.canaries is not None and self.transcript is None:
            raise ValueError("--canaries are sought in the updates of a training; give --transcript")
        if self.train is not None:
            plugins.check("training function", self.train)
        if self.data is None and (self.members is None or self.non_members is None):
            raise ValueError("--members and --non-members must be given, or --data with --split-file")
        if (self.data is None) != (self.split_file is None):
            raise ValueError("--data and --split-file go together: a data set of ours, and who is in which group")
        if self.data is not None and (self.members or self.non_members or self.population):
            raise ValueError("--members, --non-members and --population are instead of --data, got both")
        if strange := [kind for kind in self.accept if kind not in ACCEPTABLE]:
            raise ValueError(f"--accept must be of {', '.join(ACCEPTABLE)}, got {strange[0]!r}")
        check_folder(self.out)


def attacks_asked(text: str | None, *, transcript: bool = False) -> list[tuple[str, Mapping[str, Any]]] | None:
    """Returns the attacks of `--attacks a,b`; None for all that apply.

    Args:
        text: value of the option.
        transcript: whether there is a transcript of the training, for attacks that read updates.

    Raises:
        ValueError: an unknown attack, or an attack that needs more access than is given.
    """
    if text is None:
        return None
    known = _askable(transcript)
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found or len(set(found)) < len(found):
        raise ValueError(f"--attacks must be names with commas between, each once, got {text!r}")
    for name in found:
        if name in known:
            continue
        if name in catalog.names("attacks"):
            needs = catalog.attack(name).requires.access.value
            way_out = "; pass --transcript DIR" if name in transcript_attacks() else ""
            raise ValueError(
                f"{name} attacks no finished model: it needs {needs}{way_out}; there are {', '.join(known)}"
            )
        raise ValueError(no_such("attack", name, known))
    return [(name, {}) for name in found]


def rules_asked(texts: Sequence[str], *, transcript: bool = False) -> list[Rule]:
    """Returns the rules of `--fail-if`; with a transcript they may name attacks that read updates."""
    return rules(texts, _askable(transcript))


def _askable(transcript: bool) -> list[str]:
    return [*final_model_attacks(), *(transcript_attacks() if transcript else [])]


def describe(asked: Asked) -> AuditPlan:
    """Returns the attacks that would run, the unmet requirements of others, and the smallest detectable leak.

    Reads the examples, to count them; the model is not loaded and nothing is computed.

    Raises:
        StoppedError: the pre-flight would stop for any model.
        ValueError: a run would refuse the files.
    """
    sources = _sources(asked)
    if not asked.checkpoint.exists():
        raise ValueError(f"the checkpoint must be a file or a folder, and there is no {asked.checkpoint}")
    if asked.model:
        check_name(asked.model)
    if asked.transcript is not None:
        read_transcript(asked.transcript)
    if asked.canaries is not None:
        read_canaries(asked.canaries)
    if asked.bank is not None and not asked.bank.is_file():
        raise ValueError(f"--bank must be a file, and there is no {asked.bank}")
    groups = groups_of(
        sources["members"], sources["non_members"], sources.get("population"), preprocess=asked.preprocess
    )
    groups = _limited(without_shared(groups) if asked.drop_overlap else groups, asked)
    refuse_stops(without_model(groups, asked.accept))
    chosen = [name for name, _ in asked.settings.attacks or ()]
    everything = [name for name in catalog.names("attacks") if catalog.attack(name).kind == "membership"]
    rows = applicable(
        chosen or everything,
        population="population" in sources,
        shadows=asked.shadows > 0 or asked.bank is not None,
        transcript=asked.transcript is not None,
    )
    delta = asked.settings.delta_of_bounds
    return AuditPlan(
        sources={name: PlannedSource(source=file.source, n=len(file.labels)) for name, file in sources.items()},
        attacks=tuple(rows),
        smallest_leak=smallest_leak(
            len(groups.members), len(groups.non_members), delta, asked.settings.level, sum(row.runs for row in rows)
        ),
    )


def run_audit(asked: Asked, report: Tell) -> AuditReport:
    """Reads and checks the files, attacks the model, writes the report and judges the rules.

    Args:
        asked: the request.
        report: called with a line for each stage.

    Raises:
        StoppedError: the pre-flight finds that an audit would be meaningless.
        ValueError: an invalid file, option or model.
    """
    sources = _sources(asked)
    folder = None
    if asked.checkpoint.is_dir() and not asked.model:
        folder = image_classifier(asked.checkpoint, allow_pickle_tensors=asked.allow_pickle_tensors)
    if folder is None:
        named = read_weights(asked.checkpoint, allow_pickle_tensors=asked.allow_pickle_tensors)
    else:
        named = folder.state
    # The owner's preprocessing takes precedence over the normalization that a folder states.
    own = asked.preprocess
    if folder is not None and own == Preprocess() and folder.mean is not None and folder.std is not None:
        own = Preprocess(folder.mean, folder.std)
    groups = groups_of(sources["members"], sources["non_members"], sources.get("population"), preprocess=own)
    whole = AnsweredAbout(groups.members, groups.non_members, groups.population)
    groups = without_shared(groups) if asked.drop_overlap else groups
    groups = _moved(_limited(groups, asked), asked.device)
    labels = [group.labels for group in (groups.members, groups.non_members)]
    shape = tuple(groups.members.inputs.shape[1:])
    classes = 1 + int(torch.cat(labels).max())
    said: tuple[str, ...] = ()
    if folder is None:
        least = max(2, classes)
        lowest = min(int(part.min()) for part in labels)
        tensors = named.tensors
        model = fitting(
            asked.model,
            tensors,
            input_shape=shape,
            least=least,
            lowest=lowest,
            single=True,
            trust_code=asked.trust_code,
        )
        tensors, said = own_tensors(model, tensors)
        for note in said:
            report(f"note: {note}")
        model = filled(model, tensors, own_code=plugins.is_path(asked.model or ""))
    else:
        model = folder.model
    refuse_other_columns(model, groups.columns)
    model = model.to(asked.device).eval()
    report("pre-flight")
    delta = asked.settings.delta_of_bounds
    looked = preflight(model, groups, delta=delta, level=asked.settings.level, accept=asked.accept)
    refuse_stops(looked.remarks)
    for line in sentences(looked.remarks):
        report(line)
    audited = Audited(
        model=looked.model,
        members=groups.members,
        non_members=groups.non_members,
        population=groups.population,
        classes=looked.classes,
    )
    bank = _bank(audited, asked, whole, report)
    if asked.transcript is not None and asked.settings.split == "random":
        # Two tests of one claim, each at half the error rate: together they refute a true claim no more often than the
        # level allows.
        asked = replace(asked, settings=replace(asked.settings, level=(1 + asked.settings.level) / 2))
    transcript = None if asked.transcript is None else read_transcript(asked.transcript)
    seen = _transcript(audited, transcript, asked, report)
    found = audit_groups(
        audited,
        asked.settings,
        shift=looked.shift,
        bank=bank,
        transcript=transcript,
        refuted=seen.refuted if seen else (),
        report=report,
    )
    if seen is not None and seen.word == "no verdict" and found.verdict.word != "claim refuted":
        # The owner passed the transcript: the answer must say that it contradicts itself or the model.
        found = replace(found, verdict=replace(found.verdict, sentence=f"{found.verdict.sentence} {seen.sentence}"))
    answer = audit_report(
        found,
        groups.names,
        model=ModelFile(
            file=asked.checkpoint.name,
            sha256=named.sha256,
            kind=named.kind,
            architecture=asked.model or "its folder's own",
            parameters=sum(p.numel() for p in model.parameters()),
            notes=(*named.notes, *said, *(folder.notes if folder else ())),
        ),
        data=AuditedData(
            name=asked.data or Path(str(asked.members)).name,
            members=groups.sources["members"],
            non_members=groups.sources["non_members"],
            population=groups.sources.get("population"),
            preprocess=Normalization(mean=own.mean, std=own.std),
            shadows=None if bank is None else ShadowsReport(models=bank.models, source=bank.source),
        ),
        preflight=looked.report,
        smallest_leak=smallest_leak(
            len(groups.members),
            len(groups.non_members),
            delta,
            asked.settings.level,
            sum(one.scores is not None for one in found.outcomes),
        ),
        transcript=None if seen is None else seen.report(refuted=found.verdict.refuted),
        rules=judged(asked.rules, found.measured, found.verdict),
        not_tested=(*_untested(found, asked), *(seen.skipped if seen else ())),
        command=tuple(asked.command),
    )
    return answer if asked.out is None else write_report(answer, found, groups.names, asked.out)


def refuse_other_columns(model: torch.nn.Module, columns: Sequence[str] | None, *, of: str = "members") -> None:
    """Refuses a table whose columns are not the model's feature names, in their order.

    Args:
        model: may name them as `feature_names`, or as scikit-learn does, `feature_names_in_`.
        columns: of the table; None if they have no names.
        of: group of the table, for the error.

    Raises:
        ValueError: another name, or another order.
    """
    given = [getattr(model, name, None) for name in ("feature_names", "feature_names_in_")]
    wanted = next(([*map(str, one)] for one in given if isinstance(one, list | tuple | np.ndarray)), None)
    if wanted is None or columns is None or wanted == list(columns):
        return
    place = next((i for i, pair in enumerate(zip(wanted, columns, strict=False)) if pair[0] != pair[1]), len(columns))
    named = [str(names[place]) if place < len(names) else "none" for names in (wanted, columns)]
    raise ValueError(
        f"columns of {of} must be the feature_names of the model, in their order, and column {place + 1} is "
        f"{named[1]} instead of {named[0]}; write the table in the order of the training"
    )


def _transcript(
    audited: Audited, transcript: WatchedTranscript | None, asked: Asked, report: Tell
) -> TranscriptVerdict | None:
    """Returns the verdict of the transcript on the claim; None without either."""
    claim = asked.settings.claim
    if transcript is None or claim is None:
        return None
    report("transcript")
    return judge_transcript(
        transcript,
        claim,
        model=audited.model,
        members=audited.members.inputs,
        canaries=None if asked.canaries is None else read_canaries(asked.canaries),
        final=audited.model.state_dict(),
        level=asked.settings.level,
        device=asked.device,
    )


def _untested(found: ModelAudit, asked: Asked) -> list[str]:
    """Returns a sentence for each attack or measurement that was not tested, with the option that enables it."""
    lacking: dict[str, list[str]] = {}
    for one in found.outcomes:
        if one.missing:
            lacking.setdefault(way_out(one.missing), []).append(one.name)
    told = [f"{', '.join(names)}: pass {option}" for option, names in lacking.items()]
    told += [one.why_not for one in found.outcomes if one.scores is None and not one.missing]
    ran = {one.name for one in found.outcomes}
    if left := [name for name in _askable(asked.transcript is not None) if name not in ran]:
        told.append(f"{', '.join(left)}: left out by --attacks")
    if asked.transcript is None:
        told.append("updates as they were shared in training: pass --transcript DIR, which `leakbench.watch` writes")
    if asked.settings.split != "random":
        told.append("epsilon: nobody says that members were drawn at random; pass --split random where they were")
    return told


def _sources(asked: Asked) -> dict[str, DataFile]:
    if asked.data is not None and asked.split_file is not None:
        found = read_named(asked.data, asked.split_file)
        if missing := [name for name in ("members", "non_members") if name not in found]:
            raise ValueError(f"{asked.split_file} must name {missing[0]}, and has none")
        return found
    given = {"members": asked.members, "non_members": asked.non_members, "population": asked.population}
    return {name: read_examples(source, reading=asked.reading) for name, source in given.items() if source is not None}


def _limited(groups: Groups, asked: Asked) -> Groups:
    """Keeps at most `most` of each group, drawn by the seed: a random part of a random split is a random split."""
    coins = torch.Generator().manual_seed(asked.settings.seed)

    def some(examples: Examples) -> Examples:
        if len(examples) <= asked.most:
            return examples
        return pick(examples, torch.randperm(len(examples), generator=coins)[: asked.most].sort().values)

    return replace(groups, members=some(groups.members), non_members=some(groups.non_members))


def _moved(groups: Groups, device: torch.device) -> Groups:
    def there(examples: Examples) -> Examples:
        return Examples(
            ids=examples.ids.to(device), inputs=examples.inputs.to(device), labels=examples.labels.to(device)
        )

    population = None if groups.population is None else there(groups.population)
    return replace(groups, members=there(groups.members), non_members=there(groups.non_members), population=population)


def fitting(
    name: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    input_shape: tuple[int, ...],
    least: int,
    lowest: int = 0,
    single: bool = False,
    trust_code: bool,
) -> torch.nn.Module:
    """Returns the architecture with the checkpoint's number of classes, as labels may lack rare classes.

    Args:
        name: of the architecture.
        tensors: of the checkpoint.
        input_shape: of an example.
        least: smallest number of classes, by the labels; also the result's if no number fits.
        lowest: smallest label.
        single: whether a network with a single output, for two classes, is tried.
        trust_code: whether the owner's file may run.

    Raises:
        ValueError: an architecture that cannot be built, or labels that count from 1.
    """
    counts = {int(tensor.shape[0]) for tensor in tensors.values() if tensor.ndim in (1, 2)}

    def made(classes: int) -> torch.nn.Module:
        return architecture(name, input_shape=input_shape, classes=classes, trust_code=trust_code)

    def fits(classes: int) -> torch.nn.Module | None:
        """Returns the architecture with so many classes if the file fits; a function may build another number."""
        try:
            model = made(classes)
        except ValueError:
            return None
        own, (found, _) = model.state_dict(), own_tensors(model, tensors)
        return model if {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in found.items()} else None

    more = sorted(count for count in counts if count > least)[:_MOST_COUNTS]
    for classes in [least, *([1] if single else []), *more]:
        if (model := fits(classes)) is not None:
            return model
    # Labels exceed a network that the file fits: they count from 1, or the groups count from different numbers.
    fewer = next((count for count in sorted(counts, reverse=True) if 1 < count < least and fits(count)), None)
    if fewer is not None and not (lowest == 1 and fewer == least - 1):
        raise ValueError(
            f"labels must be below {fewer}, the classes that the model answers with, and go from {lowest} to "
            f"{least - 1}: is one group counted from another number than the other? Classes count from 0 in all of them"
        )
    if lowest == 1 and least > 2 and fits(least - 1) is not None:
        raise ValueError(
            f"labels must count from 0, and go from 1 to {least - 1} where the model answers with {least - 1} classes; "
            "subtract 1"
        )
    try:
        return made(least)
    except ValueError:
        # Differing tensor names are more informative than a wrong output shape: return the network as it is, for their
        # report.
        with suppress(ValueError):
            model = architecture(name, input_shape=input_shape, classes=least, trust_code=trust_code, answers=None)
            if tensors and model.state_dict().keys() != own_tensors(model, tensors)[0].keys():
                return model
        if not single:
            raise
        with suppress(ValueError):
            return made(1)  # the error then reports its names
        raise


_MOST_COUNTS = 8
"""Largest number of class counts that are tried if the labels' own does not fit."""


def _bank(audited: Audited, asked: Asked, whole: AnsweredAbout, report: Tell) -> AnsweredBank | None:
    """Returns shadow models' answers, from a file or by the owner's function; None without either."""
    if asked.bank is not None:
        report("shadow models' answers")
        return read_bank(
            asked.bank,
            whole,
            population=audited.population,
            classes=audited.classes,
            allow_pickle_tensors=asked.allow_pickle_tensors,
        ).bank()
    train = asked.train
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
        asked.shadows,
        code=code.hexdigest(),
        folder=None if asked.out is None else asked.out / "shadows",
        seed=asked.settings.seed,
        report=lambda done: report(f"shadow model {done} of {asked.shadows}"),
    )
