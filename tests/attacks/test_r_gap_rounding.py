"""Closed forms, above all R-GAP, on updates in float32 that lost digits: saturated units, or a certain label."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from leakbench import audit
from leakbench.attacks.bias_division import bias_division
from leakbench.attacks.core import InconsistentObservation, NotApplicable, Observation, granted
from leakbench.attacks.core.closed_form.recursion.invert import inverted_inputs, layers_of
from leakbench.attacks.core.closed_form.recursion.observed_gradients import observed_gradients
from leakbench.attacks.r_gap import r_gap
from leakbench.defenses.core import Defense, seeded
from leakbench.defenses.dp_sgd import dp_sgd

OPEN = dp_sgd(clip_norm=1e9, noise_multiplier=0.0)
CLIPPED = dp_sgd(clip_norm=0.1, noise_multiplier=0.0)
ACTIVATIONS = (nn.Tanh, nn.Sigmoid, nn.ReLU, nn.LeakyReLU)
GAINS = (1.0, 4.0, 12.0, 40.0)


def network(seed: int, activation: type[nn.Module], gain: float, classes: int) -> nn.Module:
    """Two hidden layers with parameters of `gain` times their usual size: 8 and more saturate most tanh units."""
    torch.manual_seed(seed)
    layers = (
        nn.Flatten(), nn.Linear(48, 24), activation(), nn.Linear(24, 16), activation(), nn.Linear(16, classes),
    )  # fmt: skip
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= gain
    return model


def update(model: nn.Module, seed: int, defense: Defense = OPEN) -> tuple[Observation, Tensor]:
    """A shared update in float32; a drawn label at even seeds, that of the largest logit at odd seeds."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(1, 3, 4, 4, generator=generator)
    with torch.no_grad():
        logits = model(x)
    label = logits.argmax(dim=1) if seed % 2 else torch.randint(logits.shape[1], (1,), generator=generator)
    return audit.share_update(model, x, label, defense, noise=seeded(seed))[0], x


def is_refused(observation: Observation) -> bool:
    """Whether the attack calls an update that of no example."""
    try:
        r_gap(observation)
    except InconsistentObservation:
        return True
    except NotApplicable:
        pass
    return False


@pytest.mark.parametrize("seeds", [range(32), pytest.param(range(32, 200), marks=pytest.mark.slow)])
def test_an_honest_update_in_float32_gives_a_result_or_a_refusal_whatever_the_seed(seeds):
    refused = right = 0
    for seed in seeds:
        activation, gain = ACTIVATIONS[seed // 2 % 4], GAINS[seed // 8 % 4]
        model = network(seed, activation, gain, classes=(10, 2)[seed // 32 % 2])
        observation, x = update(model, seed, (OPEN, CLIPPED)[seed // 64 % 2])
        try:
            result = r_gap(observation)
        except NotApplicable:
            assert gain > 1
            refused += 1
            continue
        right += bool((result.inputs - x).abs().max() < 1e-2)
        assert result.status == "degraded" or bool((result.inputs - x).abs().max() < 1e-2)
    assert refused < len(seeds) / 3 and right > len(seeds) / 2


def test_saturated_units_are_left_out_where_their_arguments_are_rounded_away():
    observation, x = update(network(0, nn.Tanh, 12.0, classes=10), 0)
    structure = granted(observation.structure)()
    parsed = structure.known_network()
    sums = observation.released.double() * observation.expected_batch
    gradients = observed_gradients(structure, sums, torch.zeros_like(sums), layers_of(parsed))
    with pytest.raises(InconsistentObservation, match="explains it better"):
        inverted_inputs(parsed, gradients)
    (explanation,) = inverted_inputs(parsed, gradients, rounding=torch.finfo(torch.float32).eps)
    assert float((explanation.x - x[0]).abs().max()) < 1e-2
    assert float((r_gap(observation).inputs - x).abs().max()) < 1e-2


def test_a_model_that_is_certain_of_the_label_is_refused_as_such():
    observation, _ = update(network(1, nn.ReLU, 12.0, classes=2), 1)
    with pytest.raises(NotApplicable, match="the model is certain of the label"):
        r_gap(observation)


def test_a_gradient_that_underflows_divides_to_no_input():
    for seed in (1, 3, 5, 7):
        observation, _ = update(network(seed, nn.ReLU, 1.0, classes=10), seed)
        tiny = replace(observation, released=observation.released * 1e-41)
        with pytest.raises(NotApplicable, match="must be above"):
            bias_division(tiny)


def test_a_changed_update_of_saturated_units_is_still_told_from_rounding():
    doubled, mixed, turned = [], [], []
    for seed in range(0, 40, 2):
        model = network(seed, nn.Tanh, 8.0, classes=10)
        (one, _), (other, _) = update(model, seed), update(model, seed + 100)
        doubled.append(is_refused(replace(one, released=2 * one.released)))
        mixed.append(is_refused(replace(one, released=(one.released + other.released) / 2)))
        turned.append(is_refused(replace(one, released=-one.released)))
    assert all(doubled) and all(mixed) and all(turned)
