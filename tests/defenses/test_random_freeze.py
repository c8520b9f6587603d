"""What is particular to random freeze: when the cooling ends."""

import pytest
import torch

from leakbench.defenses.core import Context
from leakbench.defenses.random_freeze import random_freeze
from leakbench.defenses.random_sparsification import random_sparsification

from . import duties


def sizes(defense, epochs=10):
    contexts = [Context(step=step, steps=2 * epochs, steps_per_epoch=2, dim=50) for step in range(2 * epochs)]
    return [defense.plan(None, context)[1].blocks[0].codec.size for context in contexts]


def test_sparsity_grows_to_the_end_of_the_cooling_and_stays():
    frozen = sizes(random_freeze(final_sparsity=0.8, cooling_epochs=5))
    assert frozen == [50, 50, 40, 40, 30, 30, 20, 20, *[10] * 12]


def test_the_density_is_the_papers():
    """Entries sent over those of the un-extended dense run: 0.60 for (40 of 60 epochs, 0.9), 0.575 for (80 of 100)."""
    for cooling, epochs, density in ((40, 60, 0.60), (80, 100, 0.575)):
        defense = random_freeze(final_sparsity=0.9, cooling_epochs=cooling)
        contexts = [Context(step=e, steps=epochs, dim=100_000) for e in range(epochs)]
        sent = sum(defense.plan(None, context)[1].blocks[0].codec.size for context in contexts)
        assert sent / (cooling * 100_000) == pytest.approx(density, abs=0.001)


def test_cooling_as_long_as_the_run_is_random_sparsification():
    one, other = (
        duties.trained(defense)
        for defense in (
            random_freeze(clip_norm=0.5, final_sparsity=0.8, cooling_epochs=3, noise_multiplier=1.3),
            random_sparsification(clip_norm=0.5, final_sparsity=0.8, noise_multiplier=1.3),
        )
    )
    assert torch.equal(duties.parameters(one), duties.parameters(other))


def test_a_cooling_without_epochs_is_refused():
    with pytest.raises(ValueError, match="cooling_epochs must be at least 1, got 0"):
        random_freeze(cooling_epochs=0)
