"""What is particular to SynFlow: scores by hand, without data, past activations and norms, and no layer is cut off."""

import copy

import pytest
import torch
from torch import nn

from leakbench.benchmarks import models
from leakbench.defenses.core import Context, Layout
from leakbench.defenses.synflow import SynFlow, _flow, _positive, synflow

from . import duties


def context_of(model, shape):
    layout = Layout.of(model)
    return Context(
        step=0,
        steps=1,
        layout=layout,
        parameters=layout.read(model),
        architecture=lambda: copy.deepcopy(model),
        input_shape=shape,
    )


def test_scores_of_a_network_of_two_layers_by_hand():
    """R = 1' |B| |A| 1: the score of A_ij is |A_ij| times the sum of |B|'s column i, and likewise for B."""
    model, layout = duties.network(), duties.LAYOUT
    named = layout.unflatten(layout.read(model).double().abs())
    a, b = named["0.weight"], named["2.weight"]
    found = layout.unflatten(_flow(_positive(copy.deepcopy(model)), layout, torch.ones(1, 6, dtype=torch.float64)))
    torch.testing.assert_close(found["0.weight"], a * b.sum(dim=0).unsqueeze(1))
    torch.testing.assert_close(found["2.weight"], b * a.sum(dim=1))
    assert not found["0.bias"].any()
    # Flow is conserved: what goes into a unit comes out of it.
    torch.testing.assert_close(found["0.weight"].sum(), found["2.weight"].sum())


def test_every_round_scores_what_is_left():
    model = duties.network()
    context = context_of(model, (6,))
    kept = SynFlow(prune_rate=0.5, rounds=2).keeps(context)
    layout, double = duties.LAYOUT, _positive(copy.deepcopy(model))
    weights = torch.cat([torch.arange(a, b) for a, b in layout.weights])
    mask = torch.ones(layout.dim, dtype=torch.bool)
    for fraction in (1 - 0.5**0.5, 0.5):
        layout.write(double, (layout.read(model).abs() * mask).double())
        scores = _flow(double, layout, torch.ones(1, 6, dtype=torch.float64))
        mask = torch.ones(layout.dim, dtype=torch.bool)
        mask[weights[scores[weights].argsort(stable=True)[: int(fraction * len(weights))]]] = False
    assert torch.equal(kept, mask) and int((~kept).sum()) == len(weights) // 2


@pytest.mark.parametrize(
    ("name", "settings", "shape"),
    [
        ("lenet", {}, (3, 32, 32)),
        pytest.param("wrn_16_4", {"standardised": True}, (3, 32, 32), marks=pytest.mark.slow),
        ("resnet20", {}, (3, 16, 16)),
    ],
)
def test_no_layer_of_a_real_network_is_cut_off_at_a_hundredth_of_its_weights(name, settings, shape):
    model = models.build(name, input_shape=shape, classes=10, seed=0, **settings)
    context = context_of(model, shape)
    kept = SynFlow(prune_rate=0.99, rounds=10).keeps(context)
    layout = context.layout
    left = [int(kept[a:b].sum()) for a, b in layout.weights]
    total = sum(b - a for a, b in layout.weights)
    assert sum(left) == pytest.approx(0.01 * total, rel=0.05, abs=len(left)) and min(left) >= 1
    double = _positive(copy.deepcopy(model))
    layout.write(double, layout.read(double) * kept)
    assert float(_flow(double, layout, torch.ones(1, *shape, dtype=torch.float64)).sum()) > 0  # a path is left


def test_activations_norms_and_biases_do_not_count():
    """With them, the scores of a network would not grow with its weights."""
    plain = nn.Sequential(nn.Flatten(), nn.Linear(12, 8, bias=False), nn.Linear(8, 3, bias=False))
    dressed = nn.Sequential(
        nn.Flatten(), nn.Linear(12, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Dropout(), nn.Linear(8, 3)
    )
    dressed[1].weight, dressed[5].weight = plain[1].weight, plain[2].weight
    ones = torch.ones(1, 3, 2, 2, dtype=torch.float64)
    flows = [Layout.of(m).unflatten(_flow(_positive(copy.deepcopy(m)), Layout.of(m), ones)) for m in (plain, dressed)]
    torch.testing.assert_close(flows[0]["1.weight"], flows[1]["1.weight"])
    torch.testing.assert_close(flows[0]["2.weight"], flows[1]["5.weight"])


def test_nothing_of_the_model_that_is_trained_changes():
    run = duties.trained(synflow(clip_norm=0.5, prune_rate=0.5, rounds=3, noise_multiplier=1.0))
    kept = torch.zeros(duties.DIM, dtype=torch.bool).index_fill(0, run.state, True)
    start = torch.where(kept, duties.LAYOUT.read(duties.network()), 0.0)
    assert torch.equal(run.transcript.steps[0].parameters, start)


def test_no_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        synflow(rounds=0)


def test_a_model_of_tokens_is_refused():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3))
    defense = synflow(rounds=2, noise_multiplier=1.0)
    context = context_of(model, (3,))
    with pytest.raises(ValueError, match="the model must take an image of ones for synflow, got RuntimeError: "):
        defense.plan(defense.start(context), context)
