"""Features are standardised by what two releases on all the data said of them, and the ledger has both."""

from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
import torch
from torch import nn

from leakbench.defenses.core import (
    FeatureStatistics,
    Recipe,
    StandardisedFeatures,
    calibrate,
    full,
    poisson,
    predict,
    secure,
    seeded,
    train,
)
from leakbench.defenses.dp_sgd import dp_sgd

from ....parameters import subtests
from ... import duties

IMAGES = duties.DATA[0].view(-1, 1, 3, 2)
STATISTICS = FeatureStatistics(mean_norm=1.0, square_norm=2.0, noise_multiplier=5.0)


def network(channels=4) -> nn.Sequential:
    """Fixed channels on images of 3 x 2 pixels, and a linear layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        features = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.Tanh()).requires_grad_(False)
        return nn.Sequential(features, nn.Flatten(), nn.Linear(6 * channels, 3))


WORLD = duties.World(network, (IMAGES, duties.DATA[1]), (duties.PUBLIC[0].view(-1, 1, 3, 2), duties.PUBLIC[1]), {})
WIDE = replace(WORLD, network=lambda: network(400))


def trained(statistics, world=WORLD, **settings):
    defense = dp_sgd(noise_multiplier=settings.pop("sigma", 1.0))
    return duties.trained(defense, world, statistics=statistics, **settings)


def layer_of(run) -> StandardisedFeatures:
    layer = run.model[0]
    assert isinstance(layer, StandardisedFeatures)
    return layer


def moments(inputs=IMAGES):
    """Channel means and mean squares of each example, computed with numpy."""
    features = network()[0](inputs).numpy().astype(np.float64)
    return features.mean(axis=(2, 3)), (features**2).mean(axis=(2, 3))


def test_with_next_to_no_noise_channels_are_standardised_by_mean_and_variance_over_all_examples():
    means, squares = moments()
    layer = layer_of(trained(FeatureStatistics(mean_norm=2.0, square_norm=4.0, noise_multiplier=1e-6)))
    np.testing.assert_allclose(layer.mean.numpy(), means.mean(axis=0), atol=1e-5)
    variance = squares.mean(axis=0) - means.mean(axis=0) ** 2
    np.testing.assert_allclose(layer.deviation.numpy(), np.sqrt(variance), rtol=1e-3)
    plain = network()[0](IMAGES).numpy()
    expected = (plain - means.mean(axis=0)[:, None, None]) / np.sqrt(variance)[:, None, None]
    np.testing.assert_allclose(layer(IMAGES).numpy(), expected, rtol=1e-2, atol=1e-3)
    assert not any(p.requires_grad for p in layer.parameters())


def test_an_example_counts_for_at_most_the_norms():
    """Bounded by hand: means to norm 0.3, mean squares to norm 0.1."""
    run = trained(FeatureStatistics(mean_norm=0.3, square_norm=0.1, noise_multiplier=1e-6))
    means, squares = moments()

    def bounded(rows, norm):
        return rows * np.minimum(1, norm / np.linalg.norm(rows, axis=1, keepdims=True))

    assert (np.linalg.norm(means, axis=1) > 0.3).any() and (np.linalg.norm(squares, axis=1) > 0.1).any()
    mean, square = bounded(means, 0.3).mean(axis=0), bounded(squares, 0.1).mean(axis=0)
    np.testing.assert_allclose(layer_of(run).mean.numpy(), mean, atol=1e-5)
    np.testing.assert_allclose(layer_of(run).deviation.square().numpy(), np.maximum(square - mean**2, 0), atol=1e-5)


def test_noise_is_of_the_multiplier_and_what_it_hides_is_no_variance():
    run = trained(FeatureStatistics(mean_norm=1e-3, square_norm=2.0, noise_multiplier=5.0), WIDE)
    mean, variance = layer_of(run).mean, layer_of(run).deviation.square()
    # Means of norm 1e-3 hardly show beside noise 5 x 1e-3, over 24 examples. Of 400 numbers a standard deviation is
    # known to 3.5 %.
    assert float(mean.std()) == pytest.approx(5.0 * 1e-3 / 24, rel=0.25)
    least = 5.0 * 2.0 / 24
    assert (variance >= least * (1 - 1e-6)).all()
    assert float((variance < least * (1 + 1e-6)).float().mean()) > 0.5


def test_the_ledger_has_two_releases_on_all_the_data_before_the_steps():
    run = trained(STATISTICS, sampling=poisson(0.25))
    before, between, steps = run.ledger.entries
    assert [entry.one_off for entry in (before, between, steps)] == [True, True, False]
    assert [entry.noise_multiplier for entry in (before, between, steps)] == [5.0, 5.0, 1.0]
    event = dp_accounting.ComposedDpEvent([
        dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(5.0), 2),
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(0.25, dp_accounting.GaussianDpEvent(1.0)), duties.STEPS
        ),
    ])  # fmt: skip
    alone = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3).compose(event).get_epsilon(1e-5)
    assert run.claim(1e-5).epsilon == pytest.approx(alone, rel=2e-3)
    assert run.claim(1e-5).epsilon > trained(None, sampling=poisson(0.25)).claim(1e-5).epsilon


def test_a_scatternet_run_as_published_costs_three():
    """Noise 8 for both statistics, then 5.65 on batches of 8,000 of 50,000 for 80 epochs."""
    statistics = FeatureStatistics(mean_norm=1.0, square_norm=1.0, noise_multiplier=8.0)
    sampling = poisson(8_000 / 50_000)
    ledger = predict(dp_sgd(noise_multiplier=5.65), sampling=sampling, steps=500, before=statistics.plans())
    assert ledger.claim(1e-5).epsilon_rdp == pytest.approx(3.00, abs=0.005)


def test_calibration_leaves_room_for_what_comes_before():
    wanted = {"epsilon": 4.0, "delta": 1e-5, "sampling": full(), "steps": duties.STEPS}
    defense = calibrate(dp_sgd(), **wanted, before=STATISTICS.plans())
    assert defense.calibrated_multiplier > calibrate(dp_sgd(), **wanted).calibrated_multiplier
    run = trained(STATISTICS, sampling=full(), sigma=defense.calibrated_multiplier)
    assert 3.9 < run.claim(1e-5).epsilon <= 4.0


def test_without_noise_on_them_nothing_is_proved():
    claim = trained(FeatureStatistics(mean_norm=1.0, square_norm=1.0, noise_multiplier=0.0)).claim(1e-5)
    assert claim.epsilon == float("inf") and claim.reason == "no noise is added"


@pytest.mark.parametrize("after", [1, 3])
def test_a_resumed_run_has_the_same_statistics_and_spends_them_once(tmp_path, after):
    whole = trained(STATISTICS)
    path = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt):
        trained(STATISTICS, checkpoint=path, progress=duties._Stop(after))
    resumed = trained(STATISTICS, checkpoint=path, noise=seeded(777))
    duties.check_same_run(resumed, whole)
    assert torch.equal(layer_of(resumed).mean, layer_of(whole).mean)
    with pytest.raises(ValueError, match="belongs to another run"):
        trained(FeatureStatistics(mean_norm=1.1, square_norm=2.0, noise_multiplier=5.0), checkpoint=path)


def test_a_model_that_is_trained_again_gets_fresh_statistics_and_exact_noise_serves_too():
    model, settings = network(), {"sampling": poisson(0.5), "steps": 1, "seed": 0, "sampler_key": 0}
    found = []
    for noise in (seeded(1), secure()):
        recipe = Recipe(statistics=STATISTICS)
        run = train(model, WORLD.data, dp_sgd(noise_multiplier=1.0), noise=noise, recipe=recipe, **settings)
        assert [entry.exact for entry in run.ledger.entries] == [noise.exact] * 3
        found.append(layer_of(run))
    assert not isinstance(found[1].part, StandardisedFeatures)
    assert not torch.equal(found[0].mean, found[1].mean)


@subtests(
    ("of", "message"),
    [
        ("features", "must be of a part of the model, as '0', '1', '2', got 'features'"),
        ("", "must be of a part of the model"),
        ("2", "must be of fixed features, and '2' has parameters that are trained"),
        ("1", "must be of what the model computes from its inputs first, and '1' is not"),
        ("0.1", "must be of what the model computes from its inputs first"),
    ],
)
def test_statistics_of_what_is_no_fixed_first_part_are_refused(of, message):
    with pytest.raises(ValueError, match=message):
        trained(FeatureStatistics(of=of, mean_norm=1.0, square_norm=1.0))


@subtests("bad", [{"mean_norm": 0.0}, {"square_norm": float("inf")}, {"noise_multiplier": -1.0}])
def test_settings_without_sense_are_refused(bad):
    with pytest.raises(ValueError, match="must be"):
        FeatureStatistics(**({"mean_norm": 1.0, "square_norm": 1.0} | bad))
