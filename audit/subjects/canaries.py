"""Canaries of a trained model: an attack's scores of them, and their inclusion bits, bound epsilon from below."""

from __future__ import annotations

import copy

from leakbench.attacks.core import Knows, NotApplicable
from leakbench.defenses.core import Coordinates, Everything, keyed

from ..catalog import methods as catalog
from ..plan.canaries import Canaries
from ..plan.cells import Cell
from ..plan.threat_models import threat_model
from ..scoring.canaries import NAME, compared_with_claim
from ..scoring.score import score
from ..scoring.truth import GroundTruth
from ..targets.candidates import Candidates
from ..targets.observe import RunView
from .outcome import Finding, column
from .trained_run import TrainedRun


def canaries(model: TrainedRun, cell: Cell) -> Finding:
    """Runs an attack on the canaries of a trained model, and compares the resulting bound with the claim.

    Raises:
        NotApplicable: the training has no canaries.
        ValueError: the attack needs access that no suite offers, or the run is too long for its transcript.
    """
    requested_attack = cell.request.requested_attack
    attack = catalog.attack(requested_attack.name)
    row = threat_model(attack.kind, attack.requires.access)
    if row is None or row.build is None:
        raise ValueError(f"{attack.name} needs {attack.requires.access.name} access, which no suite offers yet")
    if (inserted_canaries := model.canaries) is None:
        raise NotApplicable("no canaries were put into this training")
    if Knows.POPULATION in attack.requires.knows and model.public_knowledge.population is None:
        raise NotApplicable("it reads public examples, and the task has none; set task.public")
    candidates = Candidates.draw(inserted_canaries.examples, cell.request.seed_for(f"candidates {cell.id}"))
    view = RunView(
        model.run,
        model.public_knowledge,
        model.trained_on,
        model.sampling[0],
        candidates,
        informed=Knows.OTHERS in attack.requires.knows,
        controls=row.controls,
        steps=model.all_steps,
    )
    generator = keyed(cell.request.seed_for(f"attack {cell.id}"))
    result = candidates.answers(attack(row.build(view), generator, **copy.deepcopy(requested_attack.settings)))
    claim = model.run.claim(model.request.budget.delta)
    # The composition of Gaussian mechanisms without sampling is a single Gaussian mechanism. Its trade-off curve is
    # refuted by fewer canaries than an epsilon, and refutes the claim.
    steps = claim.gaussians
    gaussian = steps is not None and all(step.sample_rate == 1 for step in steps)
    truth = GroundTruth(
        members=inserted_canaries.put_in.ids,
        candidates=inserted_canaries.examples.ids,
        gaussian=gaussian,
        apart=_apart(model, inserted_canaries),
    )
    metrics = score(result, truth, delta=claim.delta)
    metrics[NAME], violated = compared_with_claim(metrics[NAME], claim)
    columns = {
        "id": column(result.ids),
        "score": column(result.scores),
        "member": column(truth.membership(result.ids)),
    }
    return Finding(metrics, columns, ("claim_violated",) if violated else ())


def _apart(model: TrainedRun, canaries: Canaries) -> bool:
    """True if in every step each canary contributed to its own direction, orthogonal to those of all other canaries.

    With isotropic noise, canaries are then independent trials.
    """
    if canaries.directions is None:
        return False
    checked_masks: set[tuple[int, bytes]] = set()
    for step in model.all_steps:
        plan = None if step.plan is None else step.plan.plan
        # Exact classes only: a codec that mixes coordinates, or releases the number of rows, would couple canaries.
        if plan is None or len(plan.blocks) != 1:
            return False
        codec, place = plan.blocks[0].codec, canaries.of_step[step.step]
        if type(codec) not in (Everything, Coordinates):
            return False
        key = place, codec.kept.cpu().numpy().tobytes() if isinstance(codec, Coordinates) else b""
        if key not in checked_masks:
            own = codec.encode(canaries.directions[place])
            inner = (own @ own.T).fill_diagonal_(0.0)
            if float(inner.abs().max()) > _ORTHOGONAL:
                return False
            checked_masks.add(key)
    return True


_ORTHOGONAL = 1e-4
"""Largest inner product of unit vectors that counts as orthogonal up to rounding."""
