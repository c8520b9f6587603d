"""Requests of `leakbench audit model`, `update`, `scores` and `transcript`.

The checks of a request run when it is made, before any file is read. They refuse contradictory options, the owner's
code without permission to run it, unknown attacks and rules, and an output folder that cannot be written to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from leakbench.benchmarks.core.data.stored import AS_IS, Reading

from ..catalog import methods as catalog
from ..catalog import plugins
from ..catalog.messages import no_such
from .claim import StatedClaim
from .examples.groups import Preprocess
from .gate import Rule, rules
from .model.attacks import final_model_attacks
from .model.audit import AuditSettings
from .model.preflight import ACCEPTABLE
from .out_folder import check_folder
from .transcript.attacks import transcript_attacks
from .update.convention import UpdateIs


@dataclass(frozen=True, kw_only=True)
class CheckpointRequest:
    """Fields of each request that has a model.

    Attributes:
        checkpoint: file of the model; for an update, of the model before the step.
        model: its architecture; empty for a folder that names its own.
        preprocess: applied to examples.
        reading: how examples are stored.
        out: folder of the report; None for none.
        device: of the computation.
        allow_pickle_tensors: whether PyTorch's restricted loader may be used.
        trust_code: whether the owner's Python files may run.
        command: words of the command line, for the report.
    """

    checkpoint: Path
    model: str = ""
    preprocess: Preprocess
    reading: Reading = AS_IS
    out: Path | None = None
    device: torch.device
    allow_pickle_tensors: bool = False
    trust_code: bool = False
    command: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not self.model and not self.checkpoint.is_dir():
            raise ValueError(
                "--model must be given: a file of weights does not say its architecture; see leakbench list models"
            )
        refuse_untrusted("--model", self.model, trust_code=self.trust_code)
        check_folder(self.out)


@dataclass(frozen=True, kw_only=True)
class ExampleFiles:
    """Members and non-members of a model, and how they are chosen.

    Attributes:
        members: source of the training examples.
        non_members: source of examples outside the training set.
        population: source of public examples; None for none.
        data: built-in data set instead of these three, divided by the split file.
        split_file: assigns its examples to groups.
        drop_overlap: whether examples in two groups are dropped, rather than an error.
        accept: kinds of pre-flight remarks that do not stop the audit.
        most: largest number of members, and of non-members, used as candidates.
    """

    members: str | None = None
    non_members: str | None = None
    population: str | None = None
    data: str | None = None
    split_file: Path | None = None
    drop_overlap: bool = False
    accept: Sequence[str] = ()
    most: int = 10_000

    def __post_init__(self) -> None:
        if self.data is None and (self.members is None or self.non_members is None):
            raise ValueError("--members and --non-members must be given, or --data with --split-file")
        if (self.data is None) != (self.split_file is None):
            raise ValueError("--data and --split-file go together: a data set of ours, and who is in which group")
        if self.data is not None and (self.members or self.non_members or self.population):
            raise ValueError("--members, --non-members and --population are instead of --data, got both")
        if unknown := [kind for kind in self.accept if kind not in ACCEPTABLE]:
            raise ValueError(f"--accept must be of {', '.join(ACCEPTABLE)}, got {unknown[0]!r}")


@dataclass(frozen=True, kw_only=True)
class ShadowModels:
    """Shadow models, to be trained or trained already.

    Attributes:
        number: of models to train; 0 for none.
        train: the owner's training function.
        bank: file of shadow models' answers, instead of a training function; None for none.
    """

    number: int = 0
    train: str | None = None
    bank: Path | None = None

    def __post_init__(self) -> None:
        if (self.number > 0) != (self.train is not None):
            raise ValueError("--shadows and --train go together: a function trains the shadow models")
        if self.bank is not None and self.train is not None:
            raise ValueError("--bank is instead of --shadows and --train, got both")
        if self.number % 2:
            raise ValueError(f"--shadows must be an even number, they halve the candidates, got {self.number}")

    @property
    def given(self) -> bool:
        """True if there are shadow models."""
        return self.number > 0 or self.bank is not None


@dataclass(frozen=True, kw_only=True)
class ModelAuditRequest(CheckpointRequest):
    """Request of `leakbench audit model`.

    Attributes:
        settings: of the audit.
        examples: members and non-members.
        shadows: shadow models.
        rules: limits that the audit must keep.
    """

    settings: AuditSettings
    examples: ExampleFiles
    shadows: ShadowModels = field(default_factory=ShadowModels)
    rules: Sequence[Rule] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shadows.train is not None:
            refuse_untrusted("--train", self.shadows.train, trust_code=self.trust_code)
            plugins.check("training function", self.shadows.train)


@dataclass(frozen=True, kw_only=True)
class TranscriptAuditRequest:
    """Request of `leakbench audit transcript`.

    Attributes:
        transcript: folder that `leakbench.watch` wrote of the training.
        settings: of the audit, with the claim that the transcript is compared with.
        audited: audit of the finished model; None to judge the claim by the transcript alone.
        canaries: file of records whose inclusion in the training was decided by coins; None for none.
    """

    transcript: Path
    settings: AuditSettings
    audited: ModelAuditRequest | None = None
    canaries: Path | None = None

    def __post_init__(self) -> None:
        _ = self.claim
        if self.canaries is not None and self.audited is None:
            raise ValueError("--canaries are sought by their gradients; give --checkpoint, --model and its examples")

    @property
    def model(self) -> ModelAuditRequest:
        """Audit of the finished model, which must be given."""
        if self.audited is None:
            raise ValueError("--checkpoint must be given, with --model and its examples")
        return self.audited

    @property
    def claim(self) -> StatedClaim:
        """Claim that the transcript is compared with."""
        if self.settings.claim is None:
            raise ValueError("a transcript is held against a claim; give --claim epsilon=...,noise_multiplier=...")
        return self.settings.claim


@dataclass(frozen=True, kw_only=True)
class UpdateAuditRequest(CheckpointRequest):
    """Request of `leakbench audit update`.

    Attributes:
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
        seed: of the generators.
    """

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
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("--model must be given: the step is simulated on the architecture of the checkpoint")
        super().__post_init__()
        if self.candidates is not None and self.public is None:
            raise ValueError("--candidates are compared with public examples that were not in the batch; give --public")


@dataclass(frozen=True, kw_only=True)
class ScoresAuditRequest:
    """Request of `leakbench audit scores`.

    Attributes:
        scores: table of scores, CSV or Parquet.
        settings: of the audit, of which claim, split, delta and level are used.
        rules: limits that the audit must keep.
    """

    scores: Path
    settings: AuditSettings
    rules: Sequence[Rule] = ()


def refuse_untrusted(option: str, function: str, *, trust_code: bool) -> None:
    """Refuses a path of the owner's code unless it is trusted.

    Args:
        option: that names the function.
        function: `FILE.py:FUNCTION`, or a name in the catalogue, which passes.
        trust_code: whether the owner's Python files may run.
    """
    if plugins.is_path(function) and not trust_code:
        raise ValueError(f"{option} {function} is code that would run; pass --trust-code if you trust it")


def attack_names(text: str) -> list[str]:
    """Parses `--attacks a,b`.

    Raises:
        ValueError: no name, or a name twice.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"--attacks must be names with commas between, each once, got {text!r}")
    return names


def attacks_of_model(text: str | None, *, transcript: bool = False) -> list[tuple[str, Mapping[str, Any]]] | None:
    """Returns the attacks of `--attacks a,b`; None for all that apply.

    Args:
        text: value of the option.
        transcript: whether there is a transcript of the training, for attacks that read updates.

    Raises:
        ValueError: an unknown attack, or an attack that needs more access than is given.
    """
    if text is None:
        return None
    known, names = known_attacks(transcript), attack_names(text)
    for name in names:
        if name in known:
            continue
        if name in catalog.names("attacks"):
            needs = catalog.attack(name).requires.access.value
            remedy = "; use leakbench audit transcript DIR --checkpoint FILE" if name in transcript_attacks() else ""
            raise ValueError(
                f"{name} attacks no finished model: it needs {needs}{remedy}; there are {', '.join(known)}"
            )
        raise ValueError(no_such("attack", name, known))
    return [(name, {}) for name in names]


def rules_of_model(texts: Sequence[str], *, transcript: bool = False) -> list[Rule]:
    """Parses the rules of `--fail-if`; with a transcript they may name attacks that read updates."""
    return rules(texts, known_attacks(transcript))


def known_attacks(transcript: bool) -> list[str]:
    """Returns the names of attacks on a finished model; with a transcript, also of those that read updates."""
    return [*final_model_attacks(), *(transcript_attacks() if transcript else [])]
