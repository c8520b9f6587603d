"""Shared machinery of all defenses: step plans, the gradient engines that execute them, the training loop, accounting.

A defense file imports `Defense`, `Stateless` or the `Method` protocol, `StepPlan`, `Block`, a codec and a bound. Users
call `calibrate` and `train`.
"""

from typing import TYPE_CHECKING

from leakbench.lazy_names import lazy_names

if TYPE_CHECKING:
    from leakbench.malloc import give_memory_back, keep_freed_memory

    from .federated.client import own_noise, own_sampler_key
    from .federated.messages.codecs import LargestEntries, Messages, PublicCoefficients, Reachable
    from .federated.messages.message import (
        Message,
        coefficients,
        decoded_message,
        dense_message,
        from_arrays,
        share_outside,
        to_arrays,
    )
    from .federated.messages.reach import reach
    from .federated.method import Federated
    from .federated.prediction import calibrate_federated, predict_federated
    from .federated.private_average import PrivateAverage
    from .federated.round import Reply, Round
    from .federated.rounds import federate
    from .federated.rules import Average, ClientRule, Follow, ServerRule, weighted_mean
    from .federated.run import FederatedRun, RoundRecord
    from .federated.schedule import Federation, RoundSchedule, draw_schedule
    from .federated.server_side import ServerSide, aggregate, aggregate_sum
    from .federated.server_view import UnknownToServer, blind
    from .federated.shared_directions import along_shared_directions
    from .federated.side_arrays import summed
    from .federated.sides import ClientSide, local_round
    from .gradients.augmentation import Augmentation, CropAndFlip, RecordSchedule, Views
    from .gradients.checks.batch_norm import group_norm_instead, refuse_batch_norm
    from .gradients.checks.synthetic_examples import Domain, Domains, tensors_of
    from .gradients.executor import Engine, Release, release
    from .gradients.numerics.mkl_determinism import sums_are_alike
    from .gradients.reference import (
        Loss,
        cross_entropy,
        logistic,
        outputs,
        per_example_gradients,
        token_cross_entropy,
    )
    from .gradients.reference_sums import clipped_sums, contributions
    from .inputs import Inputs, InputTensors
    from .plan.bound import Bound, BoundKind, FixedBoundKind, adaptive_weight, bounded, clip, normalize, unbounded
    from .plan.codec import Codec, Complement, Coordinates, Everything, Scaled, Subspace
    from .plan.composed_codecs import ConcatenatedCodec, Masked, SpanCodec, Stretched, nested_codecs, spread
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
    from .plan.families.adaptive_clip_norm import Adapted, EncodedNormWithin, adapted
    from .plan.families.correlated_noise import Streamed
    from .plan.families.counts import dealt, floor_of
    from .plan.families.masks import RandomMasks
    from .plan.families.pruning import Criterion, Sparse, drop_in_each, drop_overall
    from .plan.families.public_subspaces import (
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
    from .plan.families.single_block import Projected, Whole
    from .plan.implicit_subspace import ImplicitSubspace
    from .plan.layout import Layout
    from .plan.linear_algebra.basis import leading_directions
    from .plan.noise_correlation import Banded, BandedInverse, Buffered, NoiseStrategy, StrategyRow, Tree
    from .plan.post import Adaptive, Identity, Keep, Offset, Post, Project, Rescale
    from .plan.public_data import PublicGradients, PublicRows, Rows, ToyRows, refuse_shared
    from .plan.query import Gradient, GradientAhead, GradientDifference, GradientLess, LossChange, NormWithin, Query
    from .plan.refusals import refuse_count, refuse_fraction, refuse_norm, refuse_unknown
    from .privacy.ledger import Claim, Entry, Ledger
    from .privacy.sampling import (
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
    from .randomness.keys import keyed, seed_from
    from .randomness.noise import Noise, from_generator, from_os, secure, seeded
    from .training.assumptions import assumptions, unverified
    from .training.calibration import (
        TOY_DIM,
        MembershipLimit,
        calibrate,
        noise_multiplier,
        noise_within,
        predict,
        predicted,
        rehearsed,
    )
    from .training.momentum import displacement_std, rescale_for_momentum, velocity_std
    from .training.ongoing import OngoingRun
    from .training.run import Run
    from .training.settings import Execution, Meter, Recipe, Recording, TrainingSettings
    from .training.stacked.stack_error import StackError
    from .training.stacked.stacked_training import train_stacked
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
    "Average",
    "Banded",
    "BandedInverse",
    "Bases",
    "Block",
    "Bound",
    "BoundKind",
    "Buffered",
    "Claim",
    "ClientRule",
    "ClientSide",
    "Codec",
    "Complement",
    "ConcatenatedCodec",
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
    "Federated",
    "FederatedRun",
    "Federation",
    "FixedBoundKind",
    "Follow",
    "Gradient",
    "GradientAhead",
    "GradientDifference",
    "GradientLess",
    "Identity",
    "ImplicitSubspace",
    "InputTensors",
    "Inputs",
    "Keep",
    "LargestEntries",
    "Layout",
    "Ledger",
    "Loss",
    "LossChange",
    "Masked",
    "MembershipLimit",
    "Message",
    "Messages",
    "Meter",
    "Method",
    "Noise",
    "NoiseStrategy",
    "NoisyPlan",
    "NormWithin",
    "Offset",
    "OngoingRun",
    "Post",
    "PrivateAverage",
    "Project",
    "Projected",
    "PublicCoefficients",
    "PublicGradients",
    "PublicRows",
    "PublicSubspace",
    "Query",
    "RandomKind",
    "RandomMasks",
    "RandomSubspace",
    "Reachable",
    "Recipe",
    "RecordSchedule",
    "Recording",
    "Release",
    "Remembered",
    "Reply",
    "Rescale",
    "Round",
    "RoundRecord",
    "RoundSchedule",
    "Rows",
    "Run",
    "Sampling",
    "Scaled",
    "Scope",
    "ServerRule",
    "ServerSide",
    "SpanCodec",
    "Sparse",
    "StackError",
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
    "UnknownToServer",
    "Views",
    "Whole",
    "adapted",
    "adaptive_weight",
    "aggregate",
    "aggregate_sum",
    "along_shared_directions",
    "assumptions",
    "blind",
    "bounded",
    "calibrate",
    "calibrate_federated",
    "checked_multiplier",
    "clip",
    "clipped_sums",
    "coefficients",
    "contributions",
    "cross_entropy",
    "cyclic",
    "dealt",
    "decoded_message",
    "dense_message",
    "displacement_std",
    "draw_schedule",
    "drop_in_each",
    "drop_overall",
    "federate",
    "fixed",
    "floor_of",
    "from_arrays",
    "from_generator",
    "from_os",
    "full",
    "give_memory_back",
    "group_directions",
    "group_norm_instead",
    "keep_freed_memory",
    "keyed",
    "leading_directions",
    "local_round",
    "logistic",
    "nested_codecs",
    "noise_multiplier",
    "noise_within",
    "normalize",
    "outputs",
    "own_noise",
    "own_sampler_key",
    "partition",
    "per_example_gradients",
    "poisson",
    "predict",
    "predict_federated",
    "predicted",
    "random_allocation",
    "reach",
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
    "share_outside",
    "shuffle",
    "spread",
    "standardised",
    "summed",
    "sums_are_alike",
    "tensors_of",
    "to_arrays",
    "token_cross_entropy",
    "train",
    "train_stacked",
    "truncated_poisson",
    "unbounded",
    "unverified",
    "velocity_std",
    "weighted_mean",
]

__getattr__, __dir__ = lazy_names(__name__)
