"""A checkpoint of a zoo as a subject: attacks on a model that was trained before, and its utility; trains nothing.

The claim is that of the checkpoint, which is computed again from its steps. An attack on shadow models gets their
stored outputs.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from leakbench.attacks.core import Knows, NotApplicable
from leakbench.defenses.core import keyed

from .. import progress_events
from ..catalog import methods as catalog
from ..plan.cells import Cell
from ..plan.checkpoints import checkpoint_name
from ..plan.threat_models import threat_model
from ..scoring.truth import GroundTruth
from ..targets.candidates import Candidates, copied
from ..targets.observe import FinalView
from ..zoo.checkpoint import load
from ..zoo.manifest import WEIGHTS
from .membership import data_flags, scored_membership
from .outcome import Finding, Outcome, candidate_pools, join
from .shadow_bank import shadows_on
from .training_data import TrainingData
from .utility import utility_of


class AttackedCheckpoint:
    """The subject of all cells that attack, or measure, the same checkpoint."""

    def __init__(self, cells: tuple[Cell, ...], device: torch.device) -> None:
        """Reads the data and the checkpoint.

        Raises:
            RecordError: the checkpoint has another digest than the request, or is of other examples.
        """
        request = cells[0].request.of_training()
        self.data = TrainingData(request, device)
        training = request.training
        self.checkpoint = load(checkpoint_name(training.zoo, request), sha256=training.checkpoint_digest)
        self.checkpoint.split.check(self.data.splits)
        self.model = copy.deepcopy(self.checkpoint.model).to(device)

    def outcome(self, cell: Cell) -> Outcome:
        """Computes a cell."""
        record = self.checkpoint.record
        proved = self.checkpoint.claim  # refuses a stored claim that does not follow from its steps
        # The cosine of successive updates is of the training, and follows from no final model.
        cosine = record.metrics["successive_cosine"]
        attacked = cell.request.attack is not None
        answer = self._membership(cell) if attacked else utility_of(self.model, self.data.test, cosine)
        resolved = {key: value for key, value in record.task.items() if key not in cell.request.task}
        flags = [*answer.flags, *(flag for flag in record.flags if flag not in answer.flags)]
        assert record.claim is not None  # noqa: S101 - by `Manifest.stored_record`
        if cell.request.budget.overspent(proved) and "claim_violated" not in flags:
            flags.append("claim_violated")
        return Outcome(
            metrics=answer.metrics,
            task=resolved
            | {
                "digest": self.data.splits.digest,
                "private": len(self.data.members),
                "checkpoint": {
                    "name": self.checkpoint.name,
                    "sha256": self.checkpoint.manifest.files[WEIGHTS].sha256,
                },
            },
            claim=dict(vars(record.claim)),
            noise_multiplier=record.noise_multiplier,
            noise=record.noise,
            engine=record.engine,
            flags=flags,
            arrays=answer.arrays,
        )

    def _membership(self, cell: Cell) -> Finding:
        """Runs an attack on the final model, and scores how well it separates members from non-members."""
        data, requested = self.data, cell.request.requested_attack
        attack = catalog.attack(requested.name)
        row = threat_model(attack.kind, attack.requires.access)
        if row is None or row.build is None or row.reads != "nothing":
            raise ValueError(f"{attack.name} needs {attack.requires.access.name} access, which a zoo does not offer")
        knows = attack.requires.knows
        examples = join(*candidate_pools(data.splits, data.request.training.candidates, data.device))
        candidates = Candidates.draw(examples, cell.request.seed_for(f"candidates {cell.id}"))
        shadows = None
        if Knows.SHADOWS in knows:
            logits, population = self.checkpoint.shadow_outputs
            first = slice(requested.settings["shadows"])  # a larger bank begins with the models of a smaller one
            if len(logits[first]) < requested.settings["shadows"]:
                raise NotApplicable(f"the zoo stores outputs of {len(logits)} shadow models")
            shadows = shadows_on(logits[first], population[first], data.splits, examples, candidates.ids)
        public = data.public_knowledge
        population_shown = public.population if Knows.POPULATION in knows else None
        view = FinalView(
            attackers_model=copy.deepcopy(self.model),
            attackers_knowledge=replace(
                public, population=None if population_shown is None else copied(population_shown)
            ),
            given=candidates.given,
            shadows=shadows,
        )
        generator = keyed(cell.request.seed_for(f"attack {cell.id}"))
        with progress_events.named_activity(f"{attack.name} on checkpoint {self.checkpoint.name}"):
            result = candidates.answers(attack(row.build(view), generator, **copy.deepcopy(requested.settings)))
        truth = GroundTruth(members=data.members.ids, candidates=examples.ids)
        return scored_membership(data, knows, result, truth, self.checkpoint.claim, data_flags(data))
