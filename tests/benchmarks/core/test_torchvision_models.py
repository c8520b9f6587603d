"""torchvision's classifiers by name: built for the data, or refused in one sentence."""

import re
import sys

import pytest
import torch

from leakbench.benchmarks import models

pytestmark = pytest.mark.peers

SHAPE = (3, 32, 32)


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip("torchvision", reason="needs torchvision, of the extra 'images'")


def build(name, shape=SHAPE, classes=7, **settings):
    return models.build(f"torchvision:{name}", input_shape=shape, classes=classes, **settings)


def refused(sentence, name, shape=SHAPE, **settings):
    with pytest.raises(ValueError, match=re.escape(sentence)) as refusal:
        build(name, shape, **settings)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "mobilenet_v3_small", "regnet_y_400mf"])
def test_a_classifier_maps_images_to_as_many_logits_as_there_are_classes(name):
    model = build(name).eval()
    assert model(torch.zeros(2, *SHAPE)).shape == (2, 7)


def test_it_is_torchvisions_own_and_in_training_mode():
    import torchvision

    model = build("resnet18")
    assert type(model) is torchvision.models.ResNet
    assert all(module.training for module in model.modules())
    assert all(values.device.type == "cpu" for values in model.state_dict().values())
    assert not any(int(v) for k, v in model.state_dict().items() if k.endswith("num_batches_tracked"))


def test_the_seed_alone_decides_the_weights_and_torchs_generator_is_left_alone():
    def weights(seed):
        return torch.nn.utils.parameters_to_vector(build("squeezenet1_1", seed=seed).parameters())

    first = weights(3)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert torch.equal(first, weights(3))
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(first, weights(4))


def test_settings_reach_the_builder():
    import torchvision

    model = build("vit_b_16", image_size=32, dropout=0.5)
    assert isinstance(model, torchvision.models.VisionTransformer)
    assert (model.image_size, model.dropout) == (32, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_networks_with_further_heads_are_built_with_one(name):
    model = build(name, (3, 96, 96), seed=0)
    assert isinstance(model.train()(torch.zeros(2, 3, 96, 96)), torch.Tensor)


@pytest.mark.slow
def test_every_classifier_that_fits_on_a_small_machine_is_built_or_refused_in_one_sentence():
    import torchvision

    for name in torchvision.models.list_models(module=torchvision.models):
        if name not in ("vit_h_14", "regnet_y_128gf", "convnext_large", "vit_l_16", "vit_l_32"):  # gigabytes each
            assert isinstance(build(name, (3, 224, 224)), torch.nn.Module)


def test_an_unknown_name_gets_the_nearest_one():
    sentence = "no classifier named 'resnet81' in torchvision; did you mean 'torchvision:resnet18'?"
    refused(sentence, "resnet81")
    with pytest.raises(ValueError, match=re.escape(sentence)):
        models.check("torchvision:resnet81")
    with pytest.raises(ValueError, match="no classifier named '' in torchvision; there are alexnet, "):
        models.check("torchvision:")


def test_what_torchvision_does_not_take_is_refused_in_one_sentence():
    refused("input_shape of torchvision:resnet18 must be (3, height, width), got (1, 28, 28)", "resnet18", (1, 28, 28))
    refused("'torchvision:resnet18' has no setting 'weights'; it is built untrained", "resnet18", weights="DEFAULT")
    refused("'torchvision:resnet18' cannot be built with {'depth': 3}: ", "resnet18", depth=3)
    refused("aux_logits of torchvision:googlenet must be false, got true", "googlenet", aux_logits=True)
    refused("'torchvision:alexnet' cannot take inputs of shape (3, 32, 32): ", "alexnet")
    refused("'torchvision:vit_b_32' cannot take inputs of shape (3, 32, 32): ", "vit_b_32")
    with pytest.raises(ValueError, match="classes must be at least 2, got 1"):
        build("resnet18", classes=1)


def test_names_settings_and_descriptions_are_known_without_building():
    assert models.describe("torchvision:resnet18").startswith("resnet18 of torchvision")
    assert models.defaults("torchvision:resnet18") == {}
    assert models.takes("torchvision:resnet18", "zero_init_residual")
    assert not models.takes("torchvision:resnet18", "weights")


def test_without_torchvision_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    sentence = "model 'torchvision:resnet18' needs torchvision, which is not installed: pip install 'leakbench[images]'"
    with pytest.raises(ModuleNotFoundError, match=re.escape(sentence)) as missing:
        models.check("torchvision:resnet18")
    assert missing.value.name == "torchvision"
