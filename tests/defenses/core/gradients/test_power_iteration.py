"""Spectral norms: one power iteration a step, of weights alone, in both forms that PyTorch has of them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as by_hook

from leakbench.defenses.core import Engine, Execution, Recording, cross_entropy, full, poisson, seeded, train
from leakbench.defenses.dp_sgd import dp_sgd

GENERATOR = torch.Generator().manual_seed(0)
DATA = (torch.randn(12, 2, 5, 5, generator=GENERATOR), torch.randint(0, 3, (12,), generator=GENERATOR))
FORMS = {"parametrization": parametrizations.spectral_norm, "hook": by_hook}


def network(form):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (FORMS[form](nn.Conv2d(2, 4, 3), n_power_iterations=2), nn.Tanh(), nn.Flatten())
        return nn.Sequential(*layers, nn.Dropout(0.0), FORMS[form](nn.Linear(36, 3)))


def trained(form, model=None, **settings):
    return train(
        network(form) if model is None else model, DATA, dp_sgd(clip_norm=1e6, noise_multiplier=0.0),
        **{"sampling": full(), "steps": 3, "lr": 0.1, **settings},
    )  # fmt: skip


def states(model):
    return {key: value for key, value in model.state_dict().items() if key.endswith(("_u", "_v"))}


@pytest.mark.parametrize("form", FORMS)
def test_without_bound_and_noise_weights_and_vectors_are_those_of_pytorch_s_own_training(form):
    theirs = network(form).train()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(theirs(DATA[0]), DATA[1]).mean().backward()
        optimizer.step()
    ours = trained(form).model
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)
    handed_on = copy.deepcopy(ours)
    torch.testing.assert_close(handed_on(DATA[0]), theirs.eval()(DATA[0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_vectors_follow_from_weights_and_not_from_the_batch_or_how_it_is_cut(form):
    """A rate of 1e-30 leaves the weights as they are, whoever is drawn."""
    runs = [
        trained(form, sampling=sampling, lr=1e-30, **settings)
        for sampling, settings in (
            (full(), {}),
            (poisson(1e-9), {}),  # empty batches
            (full(), {"execution": Execution(microbatch=5)}),
        )
    ]
    found = [states(run.model) for run in runs]
    assert len(found[0]) == 4
    before = states(network(form))
    for key, value in found[0].items():
        assert torch.equal(value, found[1][key]) and torch.equal(value, found[2][key])
        assert not torch.equal(value, before[key])


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_has_the_same_weights_and_vectors(form, tmp_path):
    def stop(done, _):
        if done == 2:
            raise KeyboardInterrupt

    def run(model=None, **recording):
        return train(
            network(form) if model is None else model, DATA, dp_sgd(noise_multiplier=0.5), sampling=poisson(0.5),
            steps=4, seed=1, sampler_key=2, noise=seeded(3), recording=Recording(**recording),
        ).model.state_dict()  # fmt: skip

    whole, begun = run(), network(form)
    with pytest.raises(KeyboardInterrupt):
        run(begun, checkpoint=tmp_path / "c", progress=stop)
    for model in (None, begun):  # in another process, or with what the first one left
        resumed = run(model, checkpoint=tmp_path / "c")
        assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_in_evaluation_mode_keeps_its_vectors(form):
    model = network(form).train()
    model[0].eval()
    before = {key: value.clone() for key, value in states(model).items()}
    after = states(trained(form, model).model)
    assert all(torch.equal(before[key], after[key]) == key.startswith("0.") for key in before)


@pytest.mark.parametrize("form", FORMS)
def test_an_engine_by_itself_refuses_vectors_that_move_and_names_the_layer(form):
    engine = Engine(network(form).train())
    layer = r"_SpectralNorm\(\)" if form == "parametrization" else r"Conv2d\(2, 4, kernel_size=\(3, 3\), .*\)"
    with pytest.raises(
        ValueError, match=rf"must change nothing, got another buffer '0\..*_u' of '0.*' \({layer}\) after"
    ):
        engine.prepare(*DATA)
