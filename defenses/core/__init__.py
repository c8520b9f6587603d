"""Shared machinery of all defenses: step plans, the engine that executes them, the training loop, the accountants.

A defense file imports `Defense`, `Stateless` or the `Method` protocol, `StepPlan`, `Block`, a codec and a
bound. A user calls `calibrate` and `train`.
"""

from .gradients import torch_workarounds  # noqa: F401 - before any model is trained
from .gradients.alike import sums_are_alike
from .gradients.executor import Engine, Release, release
from .gradients.made_up import Domain, Domains, tensors_of
from .gradients.normalisation import group_norm_instead, refuse_batch_norm
from .gradients.reference import Loss, cross_entropy, logistic, outputs, per_example_gradients
from .gradients.sums import clipped_sums, contributions
from .plan.adapted import Adapted, EncodedNormWithin, adapted
from .plan.basis import leading_directions
from .plan.bound import Bound, BoundKind, FixedBoundKind, adaptive_weight, bounded, clip, normalize, unbounded
from .plan.codec import Codec, Complement, Coordinates, Everything, Scaled, Subspace
from .plan.composed import Masked, Stacked, Stretched, Within, made_of, spread
from .plan.counts import dealt, floor_of
from .plan.defense import (
    Block,
    Context,
    Defense,
    Method,
    NoisyPlan,
    State,
    Stateless,
    StepPlan,
    Trial,
    checked_multiplier,
)
from .plan.families import Projected, Whole
from .plan.implicit import ImplicitSubspace
from .plan.layout import Layout
from .plan.masks import RandomMasks
from .plan.post import Adaptive, Identity, Keep, Offset, Post, Project, Rescale
from .plan.pruning import Criterion, Sparse, drop_in_each, drop_overall
from .plan.public import PublicGradients, PublicRows, Rows, ToyRows, refuse_shared
from .plan.query import Gradient, GradientAhead, GradientDifference, GradientLess, LossChange, NormWithin, Query
from .plan.refusals import refuse_count, refuse_fraction, refuse_norm, refuse_unknown
from .plan.streamed import Streamed
from .plan.subspaces import (
    Bases,
    PublicSubspace,
    RandomKind,
    RandomSubspace,
    Remembered,
    Scope,
    SubspaceMemory,
    Subspaces,
    group_directions,
)
from .privacy.calibration import (
    TOY_DIM,
    MembershipLimit,
    calibrate,
    noise_multiplier,
    noise_within,
    predict,
    predicted,
    rehearsed,
)
from .privacy.keys import keyed, seed_from
from .privacy.ledger import Claim, Entry, Ledger
from .privacy.noise import Noise, from_generator, from_os, secure, seeded
from .privacy.strategies import Banded, BandedInverse, Buffered, NoiseStrategy, StrategyRow, Tree
from .privacy.verified import assumptions, unverified
from .training.augment import Augmentation, CropAndFlip, RecordSchedule, Views
from .training.heap import give_memory_back, keep_freed_memory
from .training.momentum import displacement_std, rescale_for_momentum, velocity_std
from .training.ongoing import OngoingRun, TrainingSettings
from .training.run import Run
from .training.sampling import (
    Sampling,
    cyclic,
    fixed,
    full,
    partition,
    poisson,
    random_allocation,
    shuffle,
    truncated_poisson,
)
from .training.settings import Execution, Meter, Recipe, Recording
from .training.stacked.not_together import NotTogether
from .training.stacked.together import train_together
from .training.statistics import FeatureStatistics, StandardisedFeatures, standardised
from .training.step import Account, Stepper
from .training.train import train
from .training.transcript import Step, Transcript

__all__ = [
    "TOY_DIM",
    "Account",
    "Adapted",
    "Adaptive",
    "Augmentation",
    "Banded",
    "BandedInverse",
    "Bases",
    "Block",
    "Bound",
    "BoundKind",
    "Buffered",
    "Claim",
    "Codec",
    "Complement",
    "Context",
    "Coordinates",
    "Criterion",
    "CropAndFlip",
    "Defense",
    "Domain",
    "Domains",
    "EncodedNormWithin",
    "Engine",
    "Entry",
    "Everything",
    "Execution",
    "FeatureStatistics",
    "FixedBoundKind",
    "Gradient",
    "GradientAhead",
    "GradientDifference",
    "GradientLess",
    "Identity",
    "ImplicitSubspace",
    "Keep",
    "Layout",
    "Ledger",
    "Loss",
    "LossChange",
    "Masked",
    "MembershipLimit",
    "Meter",
    "Method",
    "Noise",
    "NoiseStrategy",
    "NoisyPlan",
    "NormWithin",
    "NotTogether",
    "Offset",
    "OngoingRun",
    "Post",
    "Project",
    "Projected",
    "PublicGradients",
    "PublicRows",
    "PublicSubspace",
    "Query",
    "RandomKind",
    "RandomMasks",
    "RandomSubspace",
    "Recipe",
    "RecordSchedule",
    "Recording",
    "Release",
    "Remembered",
    "Rescale",
    "Rows",
    "Run",
    "Sampling",
    "Scaled",
    "Scope",
    "Sparse",
    "Stacked",
    "StandardisedFeatures",
    "State",
    "Stateless",
    "Step",
    "StepPlan",
    "Stepper",
    "StrategyRow",
    "Streamed",
    "Stretched",
    "Subspace",
    "SubspaceMemory",
    "Subspaces",
    "ToyRows",
    "TrainingSettings",
    "Transcript",
    "Tree",
    "Trial",
    "Views",
    "Whole",
    "Within",
    "adapted",
    "adaptive_weight",
    "assumptions",
    "bounded",
    "calibrate",
    "checked_multiplier",
    "clip",
    "clipped_sums",
    "contributions",
    "cross_entropy",
    "cyclic",
    "dealt",
    "displacement_std",
    "drop_in_each",
    "drop_overall",
    "fixed",
    "floor_of",
    "from_generator",
    "from_os",
    "full",
    "give_memory_back",
    "group_directions",
    "group_norm_instead",
    "keep_freed_memory",
    "keyed",
    "leading_directions",
    "logistic",
    "made_of",
    "noise_multiplier",
    "noise_within",
    "normalize",
    "outputs",
    "partition",
    "per_example_gradients",
    "poisson",
    "predict",
    "predicted",
    "random_allocation",
    "refuse_batch_norm",
    "refuse_count",
    "refuse_fraction",
    "refuse_norm",
    "refuse_shared",
    "refuse_unknown",
    "rehearsed",
    "release",
    "rescale_for_momentum",
    "secure",
    "seed_from",
    "seeded",
    "shuffle",
    "spread",
    "standardised",
    "sums_are_alike",
    "tensors_of",
    "train",
    "train_together",
    "truncated_poisson",
    "unbounded",
    "unverified",
    "velocity_std",
]
