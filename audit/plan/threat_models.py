"""Threat models offered by suites: a table of an attacker's access and knowledge, by kind of result and access.

A row names the subject, the knowledge granted in addition to the access, and the function that builds the target from
an auditor's view of a run (`audit/targets/observe.py`). A new access takes a constant in
`attacks/core/threat_model/requires.py`, the class of its target in `attacks/core/targets/observation.py`, and a row and
a builder here. Suites and audits of finished models and transcripts read this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from leakbench.attacks.core import (
    Access,
    Controls,
    Knows,
    LabelAccess,
    ModelAccess,
    NotApplicable,
    Observation,
    Requirements,
    SeenTranscript,
    Steps,
    Target,
)

from ..subjects.shadow_bank import shadow_artifacts
from ..targets.observe import FinalView, RunView, label_access, model_access
from .artifact import Artifact
from .request import Request

Builder = Callable[[Any], Target]
"""Builds the target of an attack from a `RunView`, or from a `FinalView` if its row reads no step."""

OfClients = Literal["nothing", "final model", "models", "messages", "local steps", "last message", "chosen models"]
"""Part of a federated run that an adversary sees: the final model, or the global model of every round; of one client,
all messages, every local step's release, the last message if it is a single step's, or, instead of the run's, rounds at
models that it chooses."""


@dataclass(frozen=True, kw_only=True)
class ThreatModel:
    """A row: the access that a suite grants to attacks of one kind and access.

    Attributes:
        kind: kind of result of an attack, such as "membership".
        access: access declared by the attack.
        knows: additional knowledge granted by a suite.
        subject: the attacked object, a key of `leakbench.audit.subjects.SUBJECTS`.
        build: view -> target, for runs and finished models; None if the subject builds the target.
        reads: visible releases of a run: none, the last step's, the one-off releases, or all. They have to be kept in
            training. Without noise in them, scores are deterministic decisions, which records flag.
        participation_known: whether the attacker knows which records would have taken part in the visible step. Members
            among the candidates are then the participants of that step, and the claim it is measured against has no
            amplification by sampling for that step.
        needs: results that an attack's cell depends on, such as shadow models; None for none.
        controls: the attacker's permitted control over the training.
        of_clients: part of a federated run that the attacker sees; "nothing" if federated runs do not offer the access.
    """

    kind: str
    access: Access
    knows: Knows
    subject: str
    build: Builder | None = None
    reads: Literal["nothing", "last step", "beside the steps", "every step", "messages"] = "nothing"
    participation_known: bool = False
    needs: Callable[[Request], tuple[Artifact, ...]] | None = None
    controls: Controls = Controls.NOTHING
    of_clients: OfClients = "nothing"

    @property
    def offered(self) -> Requirements:
        """The granted requirements, against which an attack's are checked."""
        return Requirements(access=self.access, knows=self.knows, controls=self.controls)


def every_step(view: RunView) -> SeenTranscript:
    """`Access.ALL_STEPS`: every release of a run, and queries to the final model."""
    # Built on demand: all observations of a run together would not fit into memory.
    steps = Steps(lambda: iter(view), lambda: len(view))
    return SeenTranscript(
        steps=steps,
        one_offs=view.one_offs,
        candidates=view.given,
        final=black_box(view),
        controls=view.controls,
    )


def beside_the_steps(view: RunView) -> SeenTranscript:
    """`Access.ONE_OFF`: the one-off releases of a run on its training set, without steps or final model.

    Raises:
        NotApplicable: the run made no one-off release of gradients.
    """
    if not view.run.transcript.one_offs:
        raise NotApplicable("nothing is released of gradients beside the steps, as the scores behind a mask would be")
    return SeenTranscript(steps=(), one_offs=view.one_offs, candidates=view.given, controls=view.controls)


def last_update(view: RunView) -> Observation:
    """`Access.UPDATE`: the last step of a run, for an attacker who knows which records would have taken part in it."""
    # The last step is always kept, whatever its size.
    return view.at(-1, participation_known=True)


def black_box(view: RunView | FinalView) -> ModelAccess:
    """`Access.BLACK_BOX`: queries to the final model."""
    return model_access(view)


def white_box(view: RunView | FinalView) -> ModelAccess:
    """`Access.WHITE_BOX`: queries to the final model, and its parameters."""
    return model_access(view, white=True)


def label_only(view: RunView | FinalView) -> LabelAccess:
    """`Access.LABEL_ONLY`: labels predicted by the final model."""
    return label_access(view)


OF_CLIENTS = "federation"
"""Subject of attacks on messages of clients, which central trainings do not have."""

_SHARED = Knows.LABELS | Knows.BATCH_SIZE | Knows.POPULATION | Knows.DEFENSE
# The informed adversary of a shared update picks among candidates. Labels of the batch would rule some of them out, so
# no attack may know both (`leakbench.attacks.core.threat_model.decorator`).
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
            reads="last step", participation_known=True, of_clients="last message",
        ),
        ThreatModel(
            kind="membership", access=Access.ONE_OFF, knows=_RUN, subject="trained_model", build=beside_the_steps,
            reads="beside the steps",
        ),
        ThreatModel(
            kind="membership", access=Access.ALL_STEPS, knows=_RUN, subject="trained_model", build=every_step,
            reads="every step", of_clients="local steps",
        ),
        ThreatModel(
            kind="membership", access=Access.BROADCAST, knows=Knows.POPULATION, subject="trained_model",
            build=every_step, reads="every step", of_clients="models",
        ),
        ThreatModel(
            kind="membership", access=Access.FEDERATED, knows=_RUN, subject=OF_CLIENTS, reads="messages",
            of_clients="messages",
        ),
        # Active servers: never ranked with the honest ones above.
        ThreatModel(
            kind="reconstruction", access=Access.ACTIVE_SERVER, knows=_SHARED, subject="shared_update",
            controls=Controls.MODEL,
        ),
        ThreatModel(
            kind="membership", access=Access.ACTIVE_SERVER, knows=_RUN, subject=OF_CLIENTS, reads="messages",
            of_clients="chosen models", controls=Controls.MODEL,
        ),
        ThreatModel(
            kind="client_property", access=Access.FEDERATED, knows=_RUN ^ Knows.OTHERS, subject=OF_CLIENTS,
            reads="messages", of_clients="messages",
        ),
        ThreatModel(
            kind="membership", access=Access.BLACK_BOX, knows=_FINAL, subject="trained_model",
            build=black_box, needs=shadow_artifacts, of_clients="final model",
        ),
        ThreatModel(
            kind="membership", access=Access.LABEL_ONLY, knows=Knows.POPULATION, subject="trained_model",
            build=label_only, of_clients="final model",
        ),
        ThreatModel(
            kind="membership", access=Access.WHITE_BOX, knows=_FINAL, subject="trained_model",
            build=white_box, needs=shadow_artifacts, of_clients="final model",
        ),
        ThreatModel(
            kind="canaries", access=Access.ALL_STEPS, knows=Knows.POPULATION | Knows.DEFENSE, subject="trained_model",
            build=every_step, reads="every step", controls=Controls.CANARIES,
        ),
    )
}  # fmt: skip
"""(kind of result, access) -> its row."""


def reads_no_step(access: Access) -> bool:
    """Returns whether membership attacks of this access read a final model alone, and no step of its training."""
    row = threat_model("membership", access)
    return row is not None and row.reads == "nothing"


def threat_model(kind: str, access: Access) -> ThreatModel | None:
    """Returns the row of an attack; None if no suite grants its access."""
    return THREAT_MODELS.get((kind, access))
