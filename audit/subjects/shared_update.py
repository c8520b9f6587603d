"""Shared updates: a fresh model, a defense, one target batch after another, and an attack that wants to see the batch.

A cell's updates are taken with the noise of its budget, or without noise to see what the release alone hides. In the
negative control another batch is shared than the one that is scored against: an attack that still seems to find it
finds what any picture looks like.
"""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attacks.core import Knows, Reconstruction, checked_reconstruction
from benchmarks.core import Splits
from defenses.core import keyed
from leaderboard.records.record import Metric

from ..catalog import methods as catalog
from ..observe import GroundTruth
from ..plan.expand import Cell, build_model, defend, load_splits, seed_of
from ..scoring.reconstruction import ONE_IMAGE
from ..scoring.score import score
from ..scoring.utility import mean_metric
from .outcome import Outcome, column, finite_claim, noise_for, population_of
from .simulate import simulate_share


class SharedUpdates:
    """The shared updates of one reconstruction cell: a fresh model, a defense, one target batch after another."""

    def __init__(self, cell: Cell, device: torch.device) -> None:
        """Names the updates; nothing is computed yet."""
        self._device = device
        self._splits: Splits = load_splits(cell.request, device)

    def outcome(self, cell: Cell) -> Outcome:
        """Shares, attacks and scores every target of the cell."""
        request, splits = cell.request, self._splits
        task = request["task"]
        examples = len(load_splits(request, torch.device("cpu"), training=True).private)
        defense, matched = defend(request, examples)
        calibrated = defense.calibrated_multiplier
        if task["noise"] == "none":
            defense = defense.with_noise(0.0)
        attack = catalog.attack(request["attack"]["name"])
        knows = attack.requires.knows
        results, scored, wanted = [], [], []
        claim: dict[str, Any] = {}
        remarks: dict[str, None] = {}
        engine: str | None = None
        floor: Tensor | None = None
        noise = noise_for(request)
        for image in range(task["images"]):
            inputs, labels, decoy = self._batch(request, image)
            shared = simulate_share(
                build_model(task["model"], task["model_settings"], splits, request["seed"]),
                *((inputs, labels) if decoy is None else decoy),
                defense,
                step=task["step"],
                steps=task["steps"],
                lr=task["lr"],
                history=self._history(request, image),
                seed=seed_of(request, f"coins {image}"),
                noise=noise,
                low=splits.low,
                high=splits.high,
                classes=splits.classes,
                population=population_of(splits, self._device),
                population_known=Knows.POPULATION in knows,
                engine=request["training"].get("engine", "auto"),
            )
            coins = keyed(seed_of(request, f"attack {cell.id} {image}"))
            found = attack(shared.observation, coins, **copy.deepcopy(request["attack"]["settings"]))
            result: Reconstruction = checked_reconstruction(found, len(inputs), inputs)
            about = GroundTruth(
                inputs=inputs,
                labels=labels,
                low=splits.low,
                high=splits.high,
                floor=shared.truth.floor,
                labels_given=Knows.LABELS in knows,
            )
            floor = shared.truth.floor  # the public mean image, the same for every target
            results.append(result)
            scored.append(score(result, about))
            wanted.append((inputs, labels))
            engine = shared.engine
            # Every target took part in its own shared step alone, so one ledger speaks for all of them.
            claim = asdict(shared.claim(request["budget"]["delta"]))
            remarks |= dict.fromkeys(shared.remarks)
        if task["noise"] == "none" and calibrated > 0:
            claim["reason"] = "the noise is switched off to see what the release alone hides"
        flags = [*sorted({r.status for r in results} - {"ok"}), *remarks]
        if matched and task["noise"] != "none":
            flags.append("noise_matched")
        return Outcome(
            metrics=averaged(scored),
            task={
                "digest": splits.digest,
                "parameters": self._parameters(request),
                "participation_known": True,
                "input_shape": list(splits.input_shape),
                "input_range": [splits.low, splits.high],
            },
            claim=finite_claim(claim),
            noise_multiplier=0.0 if task["noise"] == "none" else calibrated,
            noise=noise.kind if task["noise"] != "none" and calibrated > 0 else "none",
            engine=engine,
            flags=flags,
            arrays=_pictures(wanted, results, floor),
        )

    def _batch(self, request: dict[str, Any], image: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Target number `image`; for the negative control also another batch, which is shared in its place."""
        task, pool = request["task"], self._splits.private
        coins = keyed(seed_of({"digest": self._splits.digest}, "targets"))
        order = torch.randperm(len(pool), generator=coins)
        size = task["batch"]
        chosen = order[image * size : (image + 1) * size]
        inputs, labels = pool.inputs[chosen].to(self._device), pool.labels[chosen].to(self._device)
        if request["control"] != "negative":
            return inputs, labels, None
        others = torch.arange(image * size, (image + 1) * size) % len(self._splits.non_member)
        decoy = self._splits.non_member
        return inputs, labels, (decoy.inputs[others].to(self._device), decoy.labels[others].to(self._device))

    def _history(self, request: dict[str, Any], image: int) -> tuple[Tensor, Tensor] | None:
        """Other people's examples for the steps before the shared one."""
        task, pool = request["task"], self._splits.non_member
        needed = task["step"] * task["batch"]
        if not needed:
            return None
        # From the far end of the pool: the decoys of the negative control are taken from the near one.
        chosen = len(pool) - 1 - (torch.arange(needed) + image * needed) % len(pool)
        return pool.inputs[chosen].to(self._device), pool.labels[chosen].to(self._device)

    def _parameters(self, request: dict[str, Any]) -> int:
        task = request["task"]
        model = build_model(task["model"], task["model_settings"], self._splits, request["seed"])
        return sum(p.numel() for p in model.parameters())


def averaged(scored: list[dict[str, Metric]]) -> dict[str, Metric]:
    """One metric over separate targets: their mean, with an interval over targets where there are two or more."""
    if len(scored) == 1:
        return scored[0]
    averaged = {}
    for name, first in scored[0].items():
        values = [metrics[name].value for metrics in scored]
        there = [value for value in values if value is not None]
        if len(there) < len(values):
            missing = next(metrics[name] for metrics in scored if metrics[name].value is None)
            averaged[name] = missing
        else:
            averaged[name] = mean_metric(np.array(there), better=first.better, one=ONE_IMAGE)
    return averaged


def _pictures(
    wanted: list[tuple[Tensor, Tensor]], results: list[Reconstruction], floor: Tensor | None
) -> dict[str, Any]:
    """Truths and reconstructions side by side; shapes are in the record's task. What was not found is null.

    The best guess without the update is in the first row alone.
    """
    found: list[list[float] | None] = []
    for (inputs, _), result in zip(wanted, results, strict=True):
        here = [column(x.flatten()).tolist() for x in result.inputs[: len(inputs)]]
        found += here + [None] * (len(inputs) - len(here))
    return {
        "target": [t for t, (inputs, _) in enumerate(wanted) for _ in inputs],
        "label": [int(label) for _, labels in wanted for label in labels],
        "original": [column(x.flatten()).tolist() for inputs, _ in wanted for x in inputs],
        "reconstruction": found,
        "floor": [*([] if floor is None else [column(floor.flatten()).tolist()]), *[None] * len(found)][: len(found)],
    }
