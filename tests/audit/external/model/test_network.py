"""Networks by name, filled with the tensors of a file, and the report where they do not fit."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from leakbench.audit.external.model.fitting import fitting
from leakbench.audit.external.model.network import architecture, filled, own_tensors
from leakbench.benchmarks import models

from ....parameters import subtests


def test_a_registered_network_takes_its_own_tensors_and_is_in_evaluation_mode():
    state = models.build("mlp", input_shape=(1, 8, 8), classes=10, seed=5).state_dict()
    model = filled(architecture("mlp", input_shape=(1, 8, 8), classes=10), state)
    assert not model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])


@pytest.mark.long
def test_a_plain_name_of_torchvisions_is_found_and_ours_come_first():
    pytest.importorskip("torchvision")
    alexnet = architecture("alexnet", input_shape=(3, 64, 64), classes=7)
    assert alexnet(torch.zeros(1, 3, 64, 64)).shape == (1, 7)
    ours = architecture("resnet18", input_shape=(3, 32, 32), classes=10)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in ours.modules())


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'mlp'"):
        architecture("mlpp", input_shape=(1, 8, 8), classes=10)


def test_a_users_code_runs_only_where_it_is_trusted(tmp_path):
    sign = tmp_path / "ran"
    file = tmp_path / "mine.py"
    file.write_text(
        f"import pathlib, torch\npathlib.Path({str(sign)!r}).touch()\n"
        "def build(classes):\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, classes))\n"
    )
    with pytest.raises(ValueError, match="trust_code=True"):
        architecture(f"{file}:build", input_shape=(4,), classes=3)
    assert not sign.exists()
    assert architecture(f"{file}:build", input_shape=(4,), classes=3, trust_code=True)(torch.zeros(1, 4)).shape == (
        1,
        3,
    )
    assert sign.exists()


@subtests("prefix", ["module.", "_orig_mod.", "_module.", "_orig_mod.module."])
def test_prefixes_of_wrappers_come_off_on_either_side(prefix):
    plain, named = nn.Linear(3, 2), OrderedDict()
    for name, tensor in plain.state_dict().items():
        named[prefix + name] = tensor
    assert torch.equal(filled(nn.Linear(3, 2), named).get_parameter("weight"), plain.weight)
    wrapped = nn.Module()
    wrapped.module = nn.Linear(3, 2)
    assert torch.equal(filled(wrapped, plain.state_dict()).get_parameter("module.weight"), plain.weight)


@subtests("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_widths_of_floating_point_are_converted(dtype):
    tensors = {"weight": torch.full((2, 3), 0.5, dtype=dtype), "bias": torch.ones(2, dtype=dtype)}
    model = filled(nn.Linear(3, 2), tensors)
    weight = model.get_parameter("weight")
    assert weight.dtype == torch.float32
    assert torch.equal(weight, torch.full((2, 3), 0.5))


def test_tied_weights_need_be_there_once():
    def tied():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        return model

    state = tied().state_dict()
    del state["1.weight"]
    assert torch.equal(filled(tied(), state).get_parameter("1.weight"), state["0.weight"])
    with pytest.raises(ValueError, match="1 of its 4 tensors are missing"):
        filled(tied(), {name: tensor for name, tensor in state.items() if name != "0.bias"}, own_code=True)


@pytest.mark.long
def test_the_report_has_both_shapes_and_the_closest_network():
    state = models.build("dp_cnn_small", input_shape=(1, 28, 28), classes=10).state_dict()
    with pytest.raises(ValueError) as caught:
        filled(architecture("mlp", input_shape=(1, 28, 28), classes=10), {**state, "head.more": torch.zeros(3)})
    report = str(caught.value)
    first = next(iter(state))
    assert report.startswith("the file does not fit the model: ")
    assert f"{first} {list(state[first].shape)}" in report
    assert "head.more [3]" in report
    assert "closest" in report
    assert "'dp_cnn_small'" in report


@pytest.mark.long
def test_misshapen_tensors_are_told_with_both_shapes_and_nothing_is_filled():
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"weight \[2, 4\] in the file, \[2, 3\] in the model"):
        filled(model, {"weight": torch.zeros(2, 4), "bias": torch.zeros(2)})
    assert torch.equal(model.weight, before)


@pytest.mark.long
def test_lists_of_a_report_are_short():
    many = {f"layer{number}.weight": torch.zeros(1) for number in range(50)}
    with pytest.raises(ValueError) as caught:
        filled(nn.Linear(3, 2), many)
    assert "and 42 more" in str(caught.value)
    assert "layer49" not in str(caught.value)
    assert "no network known by name is like it" in str(caught.value)


def test_torchvisions_network_of_the_same_name_is_named_as_the_closest():
    vision = pytest.importorskip("torchvision.models")
    state = vision.resnet18(num_classes=10).state_dict()
    with pytest.raises(ValueError, match="'torchvision:resnet18' is closest: it has the same names and shapes"):
        filled(architecture("resnet18", input_shape=(3, 32, 32), classes=10), state)


def test_whole_numbers_for_weights_and_what_overflows_are_refused():
    zeros = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    with pytest.raises(ValueError, match="weight must have floating-point entries like the model's float32, got int8"):
        filled(nn.Linear(3, 2), {**zeros, "weight": torch.zeros(2, 3, dtype=torch.int8)})
    with pytest.raises(ValueError, match="bias must be finite"):
        filled(nn.Linear(3, 2), {**zeros, "bias": torch.tensor([0.0, float("nan")])})
    with pytest.raises(ValueError, match="weight must be finite, got NaN or infinite ones as float32"):
        filled(nn.Linear(3, 2), {**zeros, "weight": torch.full((2, 3), 1e300, dtype=torch.float64)})


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))


@subtests("prefix", ["", "model.", "net.backbone.", "module.student."])
@subtests("beside", [{}, {"criterion.weight": torch.ones(3), "metric.count": torch.ones(1)}])
def test_a_model_is_found_behind_any_prefix_and_beside_other_tensors(prefix, beside):
    state = network().state_dict()
    own, notes = own_tensors(network(), {prefix + name: tensor for name, tensor in state.items()} | beside)
    assert own.keys() == state.keys() and all(torch.equal(own[name], state[name]) for name in own)
    assert any("criterion.weight, metric.count" in note for note in notes) == bool(beside)
    assert (not notes) == (not beside and prefix in ("", "module."))


def test_a_file_that_has_the_model_twice_or_more_of_it_is_not_guessed_at():
    state = network().state_dict()
    twice = state | {f"ema.{name}": tensor for name, tensor in state.items()}
    with pytest.raises(ValueError, match=r"has it 2 times, with no prefix and 'ema\.': save the tensors of one"):
        own_tensors(network(), twice)
    with pytest.raises(ValueError, match=r"unexpected: 1.scale \[3\]"):
        filled(network(), state | {"1.scale": torch.ones(3)}, own_code=True)
    with pytest.raises(ValueError, match="the function must build a network whose tensors have the names") as caught:
        filled(network(), {"0.weight": torch.ones(5, 4)}, own_code=True)
    assert "FILE.py:FUNCTION" not in str(caught.value)


@subtests(
    ("changed", "words"),
    [
        (lambda state: {k: v for k, v in state.items() if k != "2.bias"}, r"1 of its 4 .*\n  missing: 2.bias \[3\]"),
        (lambda state: state | {"2.bias": torch.ones(7)}, r"misshapen: 2.bias \[7\] in the file, \[3\] in the model"),
        (lambda state: state | {"5.weight": torch.ones(7)}, r"unexpected: 5.weight \[7\]"),
    ],
)
def test_behind_a_prefix_the_one_tensor_that_differs_is_named_alone(changed, words):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    file = {f"model.{name}": tensor for name, tensor in changed(model.state_dict()).items()}
    with pytest.raises(ValueError, match=words) as caught:
        filled(model, file, own_code=True)
    assert "model.0" not in str(caught.value)


@pytest.mark.long
def test_names_that_differ_come_before_the_shape_of_an_answer(tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.body = nn.Linear(4, 7)\n"
        "    def forward(self, x):\n"
        "        return self.body(x)[:, :6]\n"
        "def build():\n"
        "    return Net()\n",
        encoding="utf-8",
    )
    file = {"head.weight": torch.ones(3, 4), "head.bias": torch.ones(3)}
    model = fitting(f"{tmp_path / 'net.py'}:build", file, input_shape=(4,), least=3, trust_code=True)
    with pytest.raises(ValueError, match=r"missing: body.weight"):
        filled(model, file)
    own = {"body.weight": torch.ones(7, 4), "body.bias": torch.ones(7)}
    with pytest.raises(ValueError, match=r"must map \[2, 4,\] to \[2, 3\], got \(2, 6\)"):
        fitting(f"{tmp_path / 'net.py'}:build", own, input_shape=(4,), least=3, trust_code=True)


def test_a_network_may_answer_with_a_dictionary(tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return {'loss': None, 'logits': super().forward(x)}\n"
        "def build(input_shape, classes):\n"
        "    return Net(4, classes)\n",
        encoding="utf-8",
    )
    file = {"weight": torch.ones(3, 4), "bias": torch.ones(3)}
    model = fitting(f"{tmp_path / 'net.py'}:build", file, input_shape=(4,), least=2, trust_code=True)
    assert filled(model, file)(torch.ones(1, 4))["logits"].tolist() == [[5.0, 5.0, 5.0]]


def test_labels_beyond_the_classes_of_a_file_are_said_to_be_that():
    state = models.build("mlp", input_shape=(4,), classes=3).state_dict()
    with pytest.raises(ValueError, match=r"labels must be below 3, .* go from 0 to 3: is one group counted from"):
        fitting("mlp", state, input_shape=(4,), least=4, lowest=0, trust_code=False)
    with pytest.raises(ValueError, match="go from 1 to 3 where the model answers with 3 classes; subtract 1"):
        fitting("mlp", state, input_shape=(4,), least=4, lowest=1, trust_code=False)


@subtests("body", ["nn.Linear(4, 1)", "nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))"])
def test_a_network_with_one_output_is_found_where_two_do_not_fit(tmp_path, body):
    (tmp_path / "one.py").write_text(f"from torch import nn\ndef build():\n    return {body}\n")
    name, about = f"{tmp_path / 'one.py'}:build", {"input_shape": (4,), "least": 2, "trust_code": True}
    with pytest.raises(ValueError, match=r"must map \[2, 4,\] to \[2, 2\], got"):
        fitting(name, {}, **about)
    model = fitting(name, {}, single=True, **about)
    assert fitting(name, model.state_dict(), single=True, **about)(torch.zeros(3, 4)).numel() == 3
    with pytest.raises(ValueError, match="1 of the file's 1 are unexpected"):
        filled(model, {"other": torch.zeros(1)}, own_code=True)


def test_one_of_the_networks_known_by_name_may_have_one_output():
    state = models.build("mlp", input_shape=(1, 8, 8), classes=1, fewest_classes=1).state_dict()
    model = fitting("mlp", state, input_shape=(1, 8, 8), least=2, single=True, trust_code=False)
    assert filled(model, state)(torch.zeros(2, 1, 8, 8)).shape == (2, 1)
