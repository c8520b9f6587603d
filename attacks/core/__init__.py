"""Core of attacks: threat models, their targets, the network structure, checked results, and image priors."""

from typing import TYPE_CHECKING

from leakbench.lazy_names import lazy_names

if TYPE_CHECKING:
    from .membership.likelihood_ratio import Evidence, log_likelihood_ratio, relative_residual, subsampled
    from .membership.matched_filter import MatchedFilter
    from .membership.shadow_models import MOST_VIEWS, Shadows, balanced_halves, viewed
    from .search.image_priors import Box, total_variation, total_variations
    from .targets.active_server import ActiveServer, ImprintBlock
    from .targets.messages import SeenMessage, SeenMessages
    from .targets.narrow import narrow, parts_of, view_of
    from .targets.network import Network, Operation, ReleasedPart, SharedGradient, Structure
    from .targets.observation import (
        Informed,
        LabelAccess,
        LocalSum,
        ModelAccess,
        Observation,
        Participation,
        SeenModels,
        SeenTranscript,
        SeenUpdate,
        Steps,
    )
    from .targets.results import (
        RESULTS,
        ClassScores,
        InclusionScores,
        LabelEstimate,
        MembershipScores,
        Reconstruction,
        ResultType,
        checked_class_scores,
        checked_labels,
        checked_reconstruction,
        checked_scores,
    )
    from .targets.target import Examples, Target
    from .threat_model.attack_errors import InconsistentObservation, NotApplicable, RankDeficient
    from .threat_model.decorator import Attack, attack
    from .threat_model.requires import Access, AccessError, Controls, Knows, Requirements, granted

__all__ = [
    "MOST_VIEWS",
    "RESULTS",
    "Access",
    "AccessError",
    "ActiveServer",
    "Attack",
    "Box",
    "ClassScores",
    "Controls",
    "Evidence",
    "Examples",
    "ImprintBlock",
    "InclusionScores",
    "InconsistentObservation",
    "Informed",
    "Knows",
    "LabelAccess",
    "LabelEstimate",
    "LocalSum",
    "MatchedFilter",
    "MembershipScores",
    "ModelAccess",
    "Network",
    "NotApplicable",
    "Observation",
    "Operation",
    "Participation",
    "RankDeficient",
    "Reconstruction",
    "ReleasedPart",
    "Requirements",
    "ResultType",
    "SeenMessage",
    "SeenMessages",
    "SeenModels",
    "SeenTranscript",
    "SeenUpdate",
    "Shadows",
    "SharedGradient",
    "Steps",
    "Structure",
    "Target",
    "attack",
    "balanced_halves",
    "checked_class_scores",
    "checked_labels",
    "checked_reconstruction",
    "checked_scores",
    "granted",
    "log_likelihood_ratio",
    "narrow",
    "parts_of",
    "relative_residual",
    "subsampled",
    "total_variation",
    "total_variations",
    "view_of",
    "viewed",
]

__getattr__, __dir__ = lazy_names(__name__)
