"""Encoding: features are those of each image by itself, under the weights that were given, and the file says which."""

import json
import urllib.error

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from leakbench.audit.cli import app as cli
from leakbench.audit.encode import encoder, everybody
from leakbench.benchmarks import data
from leakbench.benchmarks.core import Sizes

from .run.runs import run

NETS = """
from torch import nn

def build(input_shape):
    entering = input_shape[0]
    body = nn.Sequential(nn.Conv2d(entering, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(), nn.AdaptiveAvgPool2d(2))
    return body

def logits():
    return 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A file of encoders and weights for them, in the working folder; the network itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    assert norm.running_mean is not None
    nn.init.normal_(norm.running_mean)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Tanh(), nn.Dropout(), nn.AdaptiveAvgPool2d(2)).eval()
    save_file(network.state_dict(), "mine.safetensors")
    return network


@pytest.fixture
def command(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(["features", *map(str, arguments)])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run


OWN = ("--encoder", "nets.py:build", "--weights", "mine.safetensors", "--out", "digits.npz", "--device", "cpu")


@pytest.mark.parametrize("batch", [7, 256])
def test_all_examples_are_encoded_in_their_order_each_by_itself(mine, command, batch):
    code, out, _ = command("digits", *OWN, "--batch", batch, "--json")
    assert code == 0
    origin = json.loads(out)
    with np.load("digits.npz", allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    splits = data.load("digits", seed=3)
    ids = torch.cat([splits.private.ids, splits.non_member.ids, splits.public.ids])
    inputs = torch.cat([splits.private.inputs, splits.non_member.inputs, splits.public.inputs])
    with torch.no_grad():
        expected = mine(inputs).flatten(1)
    assert arrays["x"].shape == (1797, 16) and arrays["x"].dtype == np.float32 and len(arrays["y"]) == 1797
    torch.testing.assert_close(torch.from_numpy(arrays["x"])[ids], expected)
    assert torch.equal(torch.from_numpy(arrays["y"])[splits.private.ids], splits.private.labels)
    # The file says where it is from.
    told = json.loads(str(arrays["origin"]))
    assert told == {key: value for key, value in origin.items() if key not in ("out", "dim")}
    assert told["encoder"] == "nets.py:build" and told["data"] == "digits" and len(told["weights_sha256"]) == 64
    # And it is data.
    loaded = data.load("features:digits.npz", sizes=Sizes(private=500, public=300))
    assert loaded.input_shape == (16,) and len(loaded.private) == 500


def test_images_are_resized_and_other_public_data_may_standardise(mine, command):
    code, _, err = command("digits", *OWN, "--size", 12, "--public", "digits")
    assert (code, err) == (0, 'written: digits.npz, 16 features an example; task.data = "features:digits.npz"\n')
    images, _, _ = everybody("digits")
    big = nn.functional.interpolate(images.inputs, (12, 12), mode="bilinear", antialias=True)
    with torch.no_grad():
        expected = mine(big).flatten(1).double()
    with np.load("digits.npz") as file:
        torch.testing.assert_close(torch.from_numpy(file["x"]).double(), expected)
        torch.testing.assert_close(torch.from_numpy(file["mean"]), expected.mean(0))
        torch.testing.assert_close(torch.from_numpy(file["std"]), expected.std(0, correction=0))
    assert len(data.load("features:digits.npz", sizes=Sizes(private=1700, public=0)).public) == 0


def test_torchvision_s_features_are_what_its_last_linear_layer_gets(tmp_path):
    models = pytest.importorskip("torchvision.models")
    network = models.get_model("squeezenet1_1", weights=None)
    save_file(network.state_dict(), tmp_path / "squeeze.safetensors")
    with pytest.raises(
        ValueError, match=r"torchvision:squeezenet1_1 must have an nn.Linear as the last layer .* Conv2d"
    ):
        encoder(
            "torchvision:squeezenet1_1", weights=tmp_path / "squeeze.safetensors", input_shape=(3, 64, 64), side=None
        )
    network = models.get_model("mobilenet_v3_small", weights=None).eval()
    save_file(network.state_dict(), tmp_path / "mobile.safetensors")
    found = encoder(
        "torchvision:mobilenet_v3_small", weights=tmp_path / "mobile.safetensors", input_shape=(1, 28, 28), side=64
    )
    grey = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    images = nn.functional.interpolate(grey.expand(-1, 3, -1, -1), (64, 64), mode="bilinear", antialias=True)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    features = found(grey)
    assert features.shape == (3, 1024)
    with torch.no_grad():
        torch.testing.assert_close(network.classifier[3](features), network((images - mean) / std))


def test_published_weights_are_taken_from_where_torchvision_keeps_them(monkeypatch, tmp_path):
    models = pytest.importorskip("torchvision.models")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    network = models.get_model("mobilenet_v3_small", weights=None).eval()
    published = models.get_model_weights("mobilenet_v3_small").DEFAULT
    kept = tmp_path / "hub" / "checkpoints" / published.url.rpartition("/")[2]
    kept.parent.mkdir(parents=True)
    torch.save(network.state_dict(), kept)
    name, images = "torchvision:mobilenet_v3_small", torch.rand(2, 3, 64, 64)
    found = encoder(name, weights=None, input_shape=(3, 64, 64), side=None)
    save_file(network.state_dict(), tmp_path / "own.safetensors")
    own = encoder(name, weights=tmp_path / "own.safetensors", input_shape=(3, 64, 64), side=None)
    assert torch.equal(found(images), own(images))
    assert (
        found.about["weights"] == "MobileNet_V3_Small_Weights.IMAGENET1K_V1"
        and own.about["weights"] == "own.safetensors"
    )


def test_published_weights_that_cannot_be_had_are_one_sentence(command, monkeypatch, tmp_path):
    pytest.importorskip("torchvision")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def cut_off(*_, **__):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", cut_off)
    code, out, err = command("digits", "--encoder", "torchvision:resnet18", "--out", tmp_path / "x.npz")
    assert (code, out) == (2, "") and [line.startswith("error: ") for line in err.splitlines()] == [
        False,
        True,
    ]  # after what is tried
    folder = tmp_path / "hub" / "checkpoints"
    assert f"weights of 'torchvision:resnet18' are not in {folder}, and could not be downloaded (" in err
    assert "put there what is at https://download.pytorch.org/models/resnet18-" in err
    assert not (tmp_path / "x.npz").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"--encoder": "mlp"}, "an encoder must be torchvision:NAME or FILE.py:FUNCTION, got 'mlp'"),
        ({"--weights": None}, "weights of 'nets.py:build' must be given in a file of safetensors"),
        ({"--weights": "no.safetensors"}, "cannot read no.safetensors: No such file"),
        ({"--encoder": "nets.py:logits"}, "must return a torch.nn.Module, got int"),
        ({"--out": "digits.pt"}, "the file of features must end in .npz, got digits.pt"),
        ({"--size": 2}, "model 'nets.py:build' cannot take inputs of shape (1, 2, 2)"),
        ({"--public": "photos"}, "images of photos must be like those of digits, (1, 8, 8), got (3, 32, 32)"),
        ({"--public": "photos", "--size": 16}, "images of photos must be like those of digits, (1, 8, 8), got (3, 32"),
        ({"--encoder": "torchvision:vit_b_16"}, "torchvision:vit_b_16 cannot take images of (3, 8, 8): "),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_no_file(mine, command, changes, sentence, tmp_path):
    if "torchvision" in changes.get("--encoder", ""):
        pytest.importorskip("torchvision")
    options = dict(zip(OWN[::2], OWN[1::2], strict=True)) | changes
    given = [text for pair in options.items() if pair[1] is not None for text in pair]
    code, out, err = command("digits", *given)
    assert (code, out) == (2, "") and sentence in err and err.count("\n") == 1
    assert not list(tmp_path.glob("*.npz"))


def test_weights_that_are_not_the_network_s_are_refused(mine, command):
    save_file({"0.weight": torch.zeros(4, 1, 3, 3)}, "mine.safetensors")
    code, _, err = command("digits", *OWN)
    assert code == 2 and "0.bias" in err


SUITE = """
name = "toy"
seeds = [0]
controls = false
budget = { noise_multiplier = 1.0, delta = 1e-5 }
defense = [{ name = "dp_sgd" }]
attack = [{ name = "likelihood_ratio" }, { name = "label_only" }, { name = "bias_division" },
          { name = "grad_inversion" }]
task = { data = "features:digits.npz", model = "linear", private = 300, public = 200, batch = 50, epochs = 1, lr = 0.5 }
share = { data = "features:digits.npz", model = "linear", noise = "none" }
"""


@pytest.mark.long
def test_attacks_on_features_run_or_say_why_not(mine, command, tmp_path):
    assert command("digits", *OWN)[0] == 0
    records = {record.attack.name if record.attack else "": record for record in run(SUITE, tmp_path)}
    skipped = {"label_only", "grad_inversion"}
    assert {name: record.status for name, record in records.items()} == {
        name: "skipped" if name in skipped else "ok" for name in ("", "likelihood_ratio", "bias_division", *skipped)
    }
    # Their scale is that of the public pool, which a claim assumes to be public.
    assert all("public_in_distribution" in records[name].flags for name in ("", "likelihood_ratio"))
    claim = records[""].claim
    assert claim is not None and "the public examples are public" in " ".join(claim.assumes)
    reason = "views are of images [channels, height, width], got inputs of [16]"
    assert reason in (records["label_only"].reason or "")
    # A head's gradient gives features away as that of any first layer does inputs; of pictures nothing is said.
    psnr, ssim = (records["bias_division"].metrics[name] for name in ("psnr", "ssim"))
    assert psnr.value is not None and psnr.value > 30 and ssim.value is None
    assert "SSIM needs images [channels, height, width], got inputs of shape [16]" in (ssim.reason or "")
