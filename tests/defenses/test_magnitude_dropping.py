"""What is particular to magnitude dropping: it leaves out the smallest weights of a layer."""

import torch

from leakbench.defenses.core import Coordinates
from leakbench.defenses.magnitude_dropping import magnitude_dropping

from . import duties


def test_the_smallest_weights_of_every_layer_are_dropped_at_the_parameters_of_each_step():
    run = duties.trained(magnitude_dropping(clip_norm=0.5, drop_rate=0.5, noise_multiplier=1.0))
    seen = set()
    for step in run.transcript.steps:
        assert step.plan and isinstance(step.plan.blocks[0].codec, Coordinates)
        mask = torch.zeros(duties.DIM, dtype=torch.bool).index_fill(0, step.plan.blocks[0].codec.kept, True)
        seen.add(tuple(mask.tolist()))
        for start, stop in duties.LAYOUT.weights:
            size, kept = step.parameters[start:stop].abs(), mask[start:stop]
            assert int((~kept).sum()) == (stop - start) // 2 and size[~kept].max() <= size[kept].min()
        biases = [mask[a:b] for a, b in duties.LAYOUT.slices if (a, b) not in duties.LAYOUT.weights]
        assert all(bool(bias.all()) for bias in biases)
    assert len(seen) > 1  # weights move, and so does the choice


def test_the_sign_of_a_weight_does_not_matter():
    defense = magnitude_dropping(drop_rate=0.5)
    moment = duties.history(defense.with_noise(1.0))[0]
    assert moment.context.parameters is not None
    flipped = moment.context.at(0, parameters=-moment.context.parameters)
    (one,), (other,) = (defense.plan(defense.start(c), c)[1].blocks for c in (moment.context, flipped))
    assert isinstance(one.codec, Coordinates) and isinstance(other.codec, Coordinates)
    assert torch.equal(one.codec.kept, other.codec.kept)
