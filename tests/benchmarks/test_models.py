"""Architectures: the sizes of the papers, weights that depend on the seed alone, no mixing of examples."""

import importlib
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leakbench.benchmarks import data, models
from leakbench.benchmarks.core import Catalogue
from leakbench.defenses.core import Layout, cross_entropy
from leakbench.defenses.core.gradients.choose import choose

from ..parameters import subtests

COLOUR, GREY, SMALL = (3, 32, 32), (1, 28, 28), (1, 8, 8)
# Of the papers, at 10 classes; the settings of a wide network: plain, with biases, standardised.
COUNTS = [
    ("linear", (4096,), {}, 40_970),
    ("mlp", SMALL, {}, 64 * 32 + 32 + 32 * 10 + 10),
    ("mlp", SMALL, {"hidden": 5}, 64 * 5 + 5 + 5 * 10 + 10),
    ("convnet", COLOUR, {}, 44_098),
    ("lenet_sigmoid", COLOUR, {}, 912 + 2 * 3_612 + 7_690),
    ("dp_cnn", COLOUR, {}, 550_570),
    ("dp_cnn_small", GREY, {}, 26_010),
    ("h_cnn", COLOUR, {}, 187_210),
    ("h_cnn_small", GREY, {}, 33_066),
    ("scatter_linear", COLOUR, {}, 155_530),
    ("scatter_linear", GREY, {}, 39_700),
    ("lenet", COLOUR, {}, 62_006),
    ("resnet20", COLOUR, {}, 268_346),
    ("dpdr_cnn4", GREY, {}, 26_106),
    ("dpdr_cnn5", COLOUR, {"group_norm": False}, 411_466),
    ("dpdr_cnn5", COLOUR, {"group_norm": True}, 412_426),
    ("resnet18", COLOUR, {"stem": "imagenet"}, 11_181_642),
    ("resnet18", COLOUR, {"stem": "cifar"}, 11_173_962),
    ("resnet34", COLOUR, {"stem": "imagenet"}, 21_289_802),
    ("resnet34", COLOUR, {"stem": "cifar"}, 21_282_122),
    ("resnet50", COLOUR, {"stem": "imagenet"}, 23_528_522),
    ("resnet50", COLOUR, {"stem": "cifar"}, 23_520_842),
    ("wrn_16_4", COLOUR, {}, 2_748_890),
    ("wrn_16_4", COLOUR, {"bias": True}, 2_751_146),
    ("wrn_16_4", COLOUR, {"standardised": True}, 2_753_818),
    ("wrn_28_10", COLOUR, {}, 36_479_194),
    ("wrn_28_10", COLOUR, {"bias": True}, 36_489_290),
    ("wrn_28_10", COLOUR, {"standardised": True}, 36_500_378),
]
OF_MORE_CLASSES = [
    ("resnet18", 100, {"stem": "cifar"}, 11_220_132),
    ("resnet34", 100, {"stem": "cifar"}, 21_328_292),
    ("resnet50", 100, {"stem": "cifar"}, 23_705_252),
    ("resnet18", 1000, {"stem": "imagenet"}, 11_689_512),
    ("resnet34", 1000, {"stem": "imagenet"}, 21_797_672),
    ("resnet50", 1000, {"stem": "imagenet"}, 25_557_032),
    ("wrn_28_10", 100, {}, 36_536_884),
    ("wrn_28_10", 100, {"bias": True}, 36_546_980),
    ("wrn_28_10", 100, {"standardised": True}, 36_558_068),
]
# With one logit, which is what they are inverted with.
BINARY = [("fcn3", GREY, 884_100), ("cnn6", COLOUR, 125_456), ("cnn6_d", COLOUR, 118_544)]
# The wide ones have narrower sisters of the same code.
WEIGHTY = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (models.count(n) > 5_000_000)) for n in models.names()]
)


def images(shape, n=3, seed=0):
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def build(name, **arguments):
    """A model, at an input on which a test of it takes no time; skips where its extra is not installed."""
    try:
        return models.build(name, **{"input_shape": shape_of(name), "classes": 10, "seed": 0, **arguments})
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))


@cache
def shape_of(name):
    channels, *sides = models.natural(name).input_shape
    return (channels, *(min(side, 8 if models.count(name) > 2_000_000 else 16) for side in sides))


def test_lists_show_the_docstring_that_an_import_would_find():
    for catalogue in (models, data):
        for name in catalogue.names():
            assert catalogue.describe(name) == str(inspect.getdoc(catalogue.factory(name))).partition("\n")[0] != ""


def test_every_architecture_has_a_stated_size():
    assert {entry[0] for entry in COUNTS + BINARY} == set(models.names())


@subtests(
    "name, shape, classes, settings, expected",
    [(name, shape, 10, settings, expected) for name, shape, settings, expected in COUNTS]
    + [(name, COLOUR, classes, settings, expected) for name, classes, settings, expected in OF_MORE_CLASSES]
    + [(name, shape, 1, {}, expected) for name, shape, expected in BINARY],
)
def test_parameters_are_as_many_as_stated(name, shape, classes, settings, expected):
    assert models.count(name, input_shape=shape, classes=classes, **settings) == expected


@WEIGHTY
def test_what_is_built_has_as_many_parameters_as_are_counted_without_memory(name):
    natural = models.natural(name)
    assert parameters(build(name, input_shape=natural.input_shape, classes=natural.classes)) == models.count(name)


def test_all_are_counted_without_memory_or_computation():
    class Devices(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            devices.update(leaf.device.type for leaf in tree_leaves(result) if torch.is_tensor(leaf))
            return result

    devices, before = set(), torch.get_rng_state()
    with Devices():
        for name in models.names():
            models.count(name)
    assert devices == {"meta"} and torch.equal(torch.get_rng_state(), before)


@subtests("name", models.names())
def test_every_file_has_one_row_in_the_readme_with_its_input_and_its_count(name):
    readme = (Path(models.__file__).parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(rf"^\| `{name}` \|(.*)\|$", readme, re.MULTILINE)
    assert len(rows) == 1
    _, natural, count, _ = (cell.strip() for cell in rows[0].split("|"))
    assert natural == "x".join(map(str, models.natural(name).input_shape))
    assert count == f"{models.count(name):,}"


def test_the_readme_has_no_row_for_an_architecture_that_is_not_there():
    readme = (Path(models.__file__).parent / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", readme, re.MULTILINE)) == set(models.names())


QUICK = {"mlp", "linear", "dpdr_cnn4"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n, marks=pytest.mark.slow if models.count(n) > 400_000 else pytest.mark.long if n not in QUICK else ()
        )
        for n in models.names()
    ],
)
def test_our_own_engine_knows_every_layer(name):
    model, inputs = build(name), images(shape_of(name), n=2)
    chosen = choose("auto", model, cross_entropy, Layout.of(model), inputs, torch.tensor([0, 1]))
    assert chosen.note == "layerwise"


@pytest.mark.slow
def test_our_own_engine_knows_standardised_convolutions():
    model, inputs = build("wrn_16_4", standardised=True), images(shape_of("wrn_16_4"), n=2)
    chosen = choose("auto", model, cross_entropy, Layout.of(model), inputs, torch.tensor([0, 1]))
    assert chosen.note == "layerwise"


@WEIGHTY
def test_it_maps_a_batch_to_finite_logits_and_every_parameter_matters(name):
    model = build(name, classes=7)
    logits = model(images(shape_of(name)))
    assert logits.shape == (3, 7)
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2])).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        assert (parameter.grad != 0).any()


@WEIGHTY
def test_the_seed_alone_decides_the_weights(name):
    def weights(seed):
        return torch.cat([p.detach().flatten()[:1000] for p in build(name, seed=seed).parameters()])

    first = weights(5)
    torch.manual_seed(1234)
    before = torch.get_rng_state()
    assert torch.equal(first, weights(5))
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(first, weights(6))


@WEIGHTY
def test_no_example_changes_the_logits_of_another_in_training_or_evaluation(name):
    model = build(name).double()
    batch = images(shape_of(name)).double()
    together = model.train()(batch)
    torch.testing.assert_close(model.eval()(batch), together, rtol=0, atol=0)
    torch.testing.assert_close(torch.cat([model(row[None]) for row in batch]), together, rtol=0, atol=1e-12)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


@subtests(
    "name, shape",
    [
        ("dp_cnn", (3, 7, 32)),
        ("dp_cnn", (64,)),
        ("dp_cnn_small", (1, 28, 15)),
        ("dpdr_cnn4", (1, 15, 28)),
        ("dpdr_cnn5", (3, 32, 7)),
        ("lenet", (1, 15, 15)),
        ("convnet", (32, 32)),
        ("convnet", (0, 32, 32)),
        ("lenet_sigmoid", (3, 3, 32)),
        ("h_cnn", (3, 7, 8)),
        ("h_cnn_small", (784,)),
        ("scatter_linear", (1, 8, 7)),
        ("resnet18", (3, 7, 7)),
        ("resnet20", (3, 7, 7)),
        ("resnet34", (32, 32)),
        ("resnet50", (3, 7, 7)),
        ("wrn_16_4", (3, 7, 7)),
        ("wrn_28_10", (3, 7, 7)),
        ("cnn6", (3, 7, 7)),
        ("cnn6_d", (3072,)),
    ],
)
def test_an_input_that_does_not_fit_is_refused_in_one_sentence(name, shape):
    message = f"input_shape of {name} must be (channels, height, width) with at least"
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        models.build(name, input_shape=shape, classes=10, seed=0)
    assert str(tuple(shape)) in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "smallest"),
    [
        *[("dp_cnn", 8), ("dp_cnn_small", 16), ("dpdr_cnn4", 16), ("dpdr_cnn5", 8), ("lenet", 16), ("convnet", 4)],
        ("lenet_sigmoid", 4),
        *[("h_cnn", 8), ("h_cnn_small", 8), ("scatter_linear", 8), ("resnet20", 8), ("wrn_16_4", 8), ("cnn6", 8)],
    ],
)
def test_the_smallest_input_that_is_accepted_works(name, smallest):
    try:
        model = models.build(name, input_shape=(2, smallest, smallest), classes=10, seed=0)
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
    assert model(images((2, smallest, smallest))).shape == (3, 10)


def test_gradients_of_convnet_can_be_differentiated_again():
    model = models.build("convnet", input_shape=COLOUR, classes=10, seed=0)
    batch = images(COLOUR, n=1).requires_grad_()
    loss = nn.functional.cross_entropy(model(batch), torch.tensor([3]))
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (second,) = torch.autograd.grad(nn.utils.parameters_to_vector(gradients).square().sum(), batch)
    assert (second != 0).double().mean() > 0.99


def test_weights_of_the_sigmoid_lenet_are_uniform_between_minus_and_plus_a_half():
    weights = torch.cat([p.detach().flatten() for p in build("lenet_sigmoid", input_shape=COLOUR).parameters()])
    assert weights.abs().max() <= 0.5
    assert weights.std().item() == pytest.approx(12**-0.5, rel=0.02)  # five standard errors of 15,826


def test_unknown_names_and_settings_and_too_few_classes_are_refused():
    with pytest.raises(ValueError, match=r"no model named 'lenett'; did you mean 'lenet'\?"):
        models.build("lenett", input_shape=COLOUR, classes=10, seed=0)
    with pytest.raises(ValueError, match="model 'mlp' has no setting 'width'; it has hidden"):
        models.build("mlp", input_shape=SMALL, classes=10, seed=0, width=3)
    with pytest.raises(ValueError, match="model 'lenet' has no setting 'hidden'; it has none"):
        models.build("lenet", input_shape=COLOUR, classes=10, seed=0, hidden=3)
    with pytest.raises(ValueError, match="classes must be at least 2, got 1"):
        models.build("mlp", input_shape=SMALL, classes=1, seed=0)
    with pytest.raises(ValueError, match="hidden must be at least 1, got 0"):
        models.build("mlp", input_shape=SMALL, classes=10, seed=0, hidden=0)
    with pytest.raises(ValueError, match="classes must be at least 1, got 0"):
        models.build("fcn3", input_shape=GREY, classes=0, seed=0)


def test_leaky_relu_networks_have_their_slope_in_double_precision_and_no_biases():
    for name in ("fcn3", "cnn6", "cnn6_d"):
        model = build(name, classes=1).double()
        slopes = [m(torch.tensor(-1.0, dtype=torch.float64)).item() for m in model.modules() if type(m) is nn.LeakyReLU]
        assert slopes and set(slopes) == {-0.2}
        assert not any(key.endswith("bias") for key, _ in model.named_parameters())


def test_names_can_be_checked_without_building():
    for name in models.names():
        models.check(name)
    with pytest.raises(ValueError, match=r"no model named 'wrn_16_2'; did you mean 'wrn_16_4'\?"):
        models.check("wrn_16_2")
    with pytest.raises(ValueError, match="no model named 'mine:build'; there are cnn6, "):
        models.check("mine:build")
    assert models.takes("resnet18", "stem")
    assert not models.takes("resnet18", "hidden")
    with pytest.raises(ValueError, match="no model named 'resnet81'; did you mean 'resnet18'"):
        models.takes("resnet81", "stem")
    with pytest.raises(ValueError, match="no model named 'torchvision:resnet18'"):
        models.natural("torchvision:resnet18")


DEEPER = '''"""Deeper ResNets.

Of the same paper.
"""

from leakbench.benchmarks.core.catalogue import Variant
from leakbench.benchmarks.models.resnet import COLOUR, bottleneck, resnet

VARIANTS = {
    "resnet101": Variant(
        resnet,
        COLOUR,
        title="ResNet-101.",
        summary="Deeper.",
        fixed={"block": bottleneck, "expansion": 4, "depths": (3, 4, 23, 3)},
    ),
}
'''


def test_another_variant_of_a_family_is_one_row(monkeypatch, tmp_path):
    (tmp_path / "deeper.py").write_text(DEEPER)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    monkeypatch.setattr(models, "_CATALOGUE", Catalogue(models.__name__, models.__path__, "model", families=True))
    assert "resnet101" in models.names()
    assert models.count("resnet101") == 42_512_970
    assert models.defaults("resnet101") == {"stem": "cifar", "groups": 32}
    assert models.describe("resnet101") == "Deeper."
    assert models.about("resnet101").startswith("ResNet-101.\n\nOf the same paper.")
    with pytest.raises(ValueError, match="model 'resnet101' has no setting 'depths'; it has stem, groups"):
        models.build("resnet101", input_shape=COLOUR, classes=10, depths=(1, 1, 1, 1))
    with pytest.raises(ValueError, match="input_shape of resnet101 must be"):
        models.build("resnet101", input_shape=SMALL[1:], classes=10)


def test_no_two_files_claim_one_name():
    files = [
        importlib.import_module(f"{models.__name__}.{file.name}") for file in pkgutil.iter_modules(models.__path__)
    ]
    claimed = [name for file in files for name in getattr(file, "VARIANTS", (file.__name__.rpartition(".")[2],))]
    assert sorted(claimed) == list(models.names())


def test_what_makes_a_variant_is_no_setting_of_it():
    for name in models.names():
        parameters = inspect.signature(models.factory(name)).parameters
        settings = {p.name for p in parameters.values() if p.default is not p.empty}
        assert set(parameters) == {"input_shape", "classes", *settings}
    assert set(inspect.signature(models.factory("wrn_16_4")).parameters) > {"standardised", "bias", "groups"}


def test_open_ended_kinds_of_names_are_listed():
    assert list(models.patterns()) == ["torchvision:NAME", "FILE.py:FUNCTION"]
    assert all(line.endswith(".") for line in models.patterns().values())


@subtests("name", models.names())
def test_it_says_what_it_is(name):
    assert models.describe(name).endswith((".", ")"))


def test_defaults_name_the_settings():
    assert models.defaults("mlp") == {"hidden": 32}
    assert models.defaults("dp_cnn") == {}
