"""Options that several kinds of audit share, in groups, and the parts of a request that are built from them.

(Any: the parts are in `leakbench.audit.external`, whose import takes seconds, too long for a command's help.)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

CHECKPOINT = "safetensors, a PyTorch state dict, or a folder: image classifier, shards, LoRA adapter."
Describe = Annotated[bool, typer.Option(help="What would run, and what it could show; computes nothing.")]
SharedGradients = Annotated[bool, typer.Option(help="Also attack shared gradients of this architecture.")]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options on how the model and examples are read, where the audit runs, and where its report goes."""

    model: Annotated[
        str | None, typer.Option(help="Architecture of `leakbench list models`, torchvision:NAME, or FILE.py:FUNCTION.")
    ] = None
    preprocess: Annotated[str | None, typer.Option(help="As mean=0.5,std=0.25; by channel with slashes between.")] = (
        None
    )
    reading: Annotated[
        str, typer.Option(help="How examples are stored: axes=nhwc,shape=1x28x28,resize=32,channels=3,labels=FILE.csv.")
    ] = ""
    out: Annotated[Path | None, typer.Option(help="Folder of the report.")] = None
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto"
    allow_pickle_tensors: Annotated[
        bool, typer.Option(help="Read .pt and .pth by PyTorch's restricted loader, in a process of its own.")
    ] = False
    trust_code: Annotated[bool, typer.Option(help="Run the FILE.py that options name.")] = False

    def request(self, checkpoint: Path) -> dict[str, Any]:
        """Returns the fields of `CheckpointRequest`."""
        from leakbench.benchmarks.core.data.stored import Reading

        from ...external.examples.groups import Preprocess
        from ...run.harness import pick_device

        return {
            "checkpoint": checkpoint,
            "model": self.model or "",
            "preprocess": Preprocess.parse(self.preprocess),
            "reading": Reading.parse(self.reading),
            "out": self.out,
            "device": pick_device(self.device),
            "allow_pickle_tensors": self.allow_pickle_tensors,
            "trust_code": self.trust_code,
            "command": ("leakbench", *sys.argv[1:]),
        }


@dataclass(frozen=True, kw_only=True)
class ExampleOptions:
    """Options on members and non-members."""

    members: Annotated[
        str | None, typer.Option(help="Examples that it was trained on: .npz, Parquet, or a folder of images by class.")
    ] = None
    non_members: Annotated[str | None, typer.Option(help="Examples that it was not trained on.")] = None
    population: Annotated[str | None, typer.Option(help="Public examples, disjoint from both.")] = None
    data: Annotated[str | None, typer.Option(help="Instead of these: a data set of `leakbench list data`.")] = None
    split_file: Annotated[
        Path | None, typer.Option(help="Of --data: CSV with id and group (member, non_member, population).")
    ] = None
    drop_overlap: Annotated[
        bool, typer.Option("--drop-overlap", help="Leave out examples that are in two groups, instead of stopping.")
    ] = False
    accept: Annotated[
        list[str] | None, typer.Option(help="Check of the pre-flight whose stop is ignored, as chance; repeat it.")
    ] = None
    most: Annotated[int, typer.Option(min=1, help="Most members, and most non-members, that are asked about.")] = 10_000

    def files(self) -> Any:
        """Returns the `ExampleFiles` of a request."""
        from ...external.request import ExampleFiles

        return ExampleFiles(**{**vars(self), "accept": self.accept or ()})


@dataclass(frozen=True, kw_only=True)
class ShadowOptions:
    """Options on shadow models."""

    shadows: Annotated[int, typer.Option(min=0, help="Shadow models, an even number; needs --train.")] = 0
    train: Annotated[
        str | None, typer.Option(metavar="FILE.py:FUNCTION", help="train(inputs, labels, *, seed) -> model.")
    ] = None
    bank: Annotated[
        Path | None, typer.Option(help="Instead of these: safetensors with logits and trained_on of shadow models.")
    ] = None

    def models(self) -> Any:
        """Returns the `ShadowModels` of a request."""
        from ...external.request import ShadowModels

        return ShadowModels(number=self.shadows, train=self.train, bank=self.bank)


@dataclass(frozen=True, kw_only=True)
class AttackOptions:
    """Options on the attacks."""

    attacks: Annotated[str | None, typer.Option(help="Names with commas between; all that apply if not given.")] = None
    seed: Annotated[int, typer.Option(min=0, help="Of orders, coins and draws.")] = 0


@dataclass(frozen=True, kw_only=True)
class JudgementOptions:
    """Options on the claim and the rules that results are compared with."""

    split: Annotated[
        str, typer.Option(help="random: members and non-members are a random split of one pool; else unknown.")
    ] = "unknown"
    claim: Annotated[
        str | None,
        typer.Option(help="As epsilon=3,delta=1e-5; noise_multiplier, sample_rate, sampling and steps are checked."),
    ] = None
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="As 'tpr_at_1pct_fpr>0.05', by its lower end; 'auc.high>0.6' by the upper; repeat it."),
    ] = None
    level: Annotated[float, typer.Option(help="Confidence of the bound on epsilon.")] = 0.95
    delta: Annotated[float, typer.Option(help="Of the bound on epsilon, where nothing is claimed.")] = 1e-5

    def settings(
        self,
        *,
        attacks: Sequence[tuple[str, Mapping[str, Any]]] | None = None,
        gradients: bool = True,
        seed: int = 0,
    ) -> Any:
        """Returns the `AuditSettings` of a request.

        Args:
            attacks: names, each with its settings; None for all that apply.
            gradients: whether shared gradients are attacked, too.
            seed: of orders, generators and draws.
        """
        from ...external.claim import StatedClaim
        from ...external.model.audit import AuditSettings

        if self.split not in ("random", "unknown"):
            raise ValueError(f"--split must be random or unknown, got {self.split!r}")
        return AuditSettings(
            attacks=attacks,
            split="random" if self.split == "random" else "unknown",
            claim=None if self.claim is None else StatedClaim.parse(self.claim),
            delta=self.delta,
            level=self.level,
            gradients=gradients,
            seed=seed,
        )


def chosen_options(*groups: Any) -> list[str]:
    """Returns the names of options whose value is not the default."""
    return [field.name for group in groups for field in fields(group) if getattr(group, field.name) != field.default]
