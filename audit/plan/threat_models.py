"""Threat models that suites offer: a table of what an attacker is granted, by kind of result and access.

A row says which subject is attacked, what an attacker knows beside its access, and how the target is built from a run.
Another access is another row here and its builder in `audit/targets/observe.py`, the one place where an attacker is
given anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from leakbench.attacks.core import Access, Controls, Knows, Requirements, Target

from ..subjects.shadow_bank import shadow_artifacts
from ..targets.observe import RunView, beside_the_steps, black_box, every_step, label_only, last_update, white_box
from .artifact import Artifact
from .request import Request

OfRun = Callable[[RunView], Target]
"""Builds the target of an attack from a run as the auditor holds it."""


@dataclass(frozen=True, kw_only=True)
class ThreatModel:
    """One row: what a suite grants to attacks of one access that find out one kind of thing.

    Attributes:
        kind: of what an attack finds out, as "membership".
        access: that the attack declares.
        knows: what beside it a suite grants.
        subject: what is attacked, a key of `leakbench.audit.subjects.SUBJECTS`.
        build: run -> target, for subjects that are runs; None where the subject makes its own.
        reads: releases of a run that are shown: none, that of the last step, those beside the steps, or all. All have
            to be kept while training; and scores of what was released without noise are decisions, which records flag.
        participation_known: whether the attacker knows who would have taken part in the step that it sees. It is then
            asked about those who did; sampling amplifies nothing, and the claim is that of this step alone.
        needs: results that an attack's cell waits for, as shadow models; none where None.
        controls: what the attacker may put into training.
    """

    kind: str
    access: Access
    knows: Knows
    subject: str
    build: OfRun | None = None
    reads: Literal["nothing", "last step", "beside the steps", "every step"] = "nothing"
    participation_known: bool = False
    needs: Callable[[Request], tuple[Artifact, ...]] | None = None
    controls: Controls = Controls.NOTHING

    @property
    def offered(self) -> Requirements:
        """What this threat model grants, which an attack's requirements are checked against."""
        return Requirements(access=self.access, knows=self.knows, controls=self.controls)


_SHARED = Knows.LABELS | Knows.BATCH_SIZE | Knows.POPULATION | Knows.DEFENSE
# The informed adversary of a shared update picks among candidates. Labels of the batch would rule some of them out, so
# that no attack may know both (`leakbench.attacks.core.threat_model.decorator`).
_INFORMED = Knows.OTHERS | Knows.PRIOR
_RUN = Knows.POPULATION | Knows.DEFENSE | Knows.OTHERS
_FINAL = Knows.POPULATION | Knows.SHADOWS

THREAT_MODELS = {
    (row.kind, row.access): row
    for row in (
        ThreatModel(kind="reconstruction", access=Access.UPDATE, knows=_SHARED | _INFORMED, subject="shared_update"),
        ThreatModel(kind="labels", access=Access.UPDATE, knows=_SHARED ^ Knows.LABELS, subject="shared_update"),
        ThreatModel(
            kind="membership", access=Access.UPDATE, knows=_RUN, subject="trained_model", build=last_update,
            reads="last step", participation_known=True,
        ),
        ThreatModel(
            kind="membership", access=Access.ONE_OFF, knows=_RUN, subject="trained_model", build=beside_the_steps,
            reads="beside the steps",
        ),
        ThreatModel(
            kind="membership", access=Access.ALL_STEPS, knows=_RUN, subject="trained_model", build=every_step,
            reads="every step",
        ),
        ThreatModel(
            kind="membership", access=Access.BLACK_BOX, knows=_FINAL, subject="trained_model",
            build=black_box, needs=shadow_artifacts,
        ),
        ThreatModel(
            kind="membership", access=Access.LABEL_ONLY, knows=Knows.POPULATION, subject="trained_model",
            build=label_only,
        ),
        ThreatModel(
            kind="membership", access=Access.WHITE_BOX, knows=_FINAL, subject="trained_model",
            build=white_box, needs=shadow_artifacts,
        ),
        ThreatModel(
            kind="canaries", access=Access.ALL_STEPS, knows=Knows.POPULATION | Knows.DEFENSE, subject="trained_model",
            build=every_step, reads="every step", controls=Controls.CANARIES,
        ),
    )
}  # fmt: skip
"""(kind of result, access) -> its row."""


def threat_model(kind: str, access: Access) -> ThreatModel | None:
    """The row of an attack; None where no suite grants it."""
    return THREAT_MODELS.get((kind, access))
