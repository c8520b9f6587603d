"""Core of attacks: threat models, the targets that they grant, checked results, image priors, likelihood ratios."""

from .decorator import Attack, attack
from .likelihood import Evidence, log_likelihood_ratio, relative_residual, subsampled
from .narrow import narrow
from .observation import Examples, ModelAccess, Observation, Participation, SeenTranscript, Steps, Target
from .priors import Box, total_variation
from .requires import Access, AccessError, Controls, Knows, Requirements, granted
from .results import RESULTS, MembershipScores, Reconstruction, ResultType, checked_reconstruction, checked_scores

__all__ = [
    "RESULTS",
    "Access",
    "AccessError",
    "Attack",
    "Box",
    "Controls",
    "Evidence",
    "Examples",
    "Knows",
    "MembershipScores",
    "ModelAccess",
    "Observation",
    "Participation",
    "Reconstruction",
    "Requirements",
    "ResultType",
    "SeenTranscript",
    "Steps",
    "Target",
    "attack",
    "checked_reconstruction",
    "checked_scores",
    "granted",
    "log_likelihood_ratio",
    "narrow",
    "relative_residual",
    "subsampled",
    "total_variation",
]
