"""Folders of shards and their index: read as one file is, and refused where index and shards do not agree."""

import json

import pytest
import torch
from safetensors.torch import save_file

from leakbench.audit.external.files import FileRefused, read_weights

from ....parameters import subtests

STATE = {f"w{number}": torch.arange(4.0) + number for number in range(4)}
FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
MAP = {"w0": FIRST, "w1": FIRST, "w2": SECOND, "w3": SECOND}


def index(folder, mapped, name="model.safetensors.index.json"):
    content = mapped if isinstance(mapped, str) else json.dumps({"metadata": {}, "weight_map": mapped})
    (folder / name).write_text(content)


@pytest.fixture
def folder(tmp_path):
    for shard in (FIRST, SECOND):
        save_file({name: STATE[name] for name, where in MAP.items() if where == shard}, tmp_path / shard)
    index(tmp_path, MAP)
    return tmp_path


def equal(found, expected):
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_shards_are_one_file(folder):
    found = read_weights(folder)
    equal(found.tensors, STATE)
    assert (found.kind, found.notes) == ("safetensors, 2 shards", ())
    assert found.bytes == sum((folder / shard).stat().st_size for shard in (FIRST, SECOND))
    by_index = read_weights(folder / "model.safetensors.index.json")
    equal(by_index.tensors, STATE)
    assert by_index.sha256 == found.sha256
    save_file({"w2": STATE["w2"], "w3": STATE["w3"] + 1}, folder / SECOND)
    assert read_weights(folder).sha256 != found.sha256


def test_a_prefix_comes_off_where_all_shards_have_it(folder):
    save_file({f"module.{name}": STATE[name] for name in ("w0", "w1")}, folder / FIRST)
    index(folder, {("module." if shard == FIRST else "") + name: shard for name, shard in MAP.items()})
    assert set(read_weights(folder).tensors) == {"module.w0", "module.w1", "w2", "w3"}
    save_file({f"module.{name}": STATE[name] for name in ("w2", "w3")}, folder / SECOND)
    index(folder, {f"module.{name}": shard for name, shard in MAP.items()})
    equal(read_weights(folder).tensors, STATE)


def test_pickled_shards_are_read_where_they_are_allowed(converted_here, tmp_path):
    for number in (1, 2):
        torch.save({f"w{number}": STATE[f"w{number}"]}, tmp_path / f"pytorch_model-{number}.bin")
    index(tmp_path, {f"w{n}": f"pytorch_model-{n}.bin" for n in (1, 2)}, "pytorch_model.bin.index.json")
    with pytest.raises(FileRefused, match=r"it is a pickle, .*--allow-pickle-tensors"):
        read_weights(tmp_path)
    found = read_weights(tmp_path, allow_pickle_tensors=True)
    equal(found.tensors, {name: STATE[name] for name in ("w1", "w2")})
    assert found.kind == "torch.save, 2 shards"


TWICE = f'{{"weight_map": {{"w0": "{FIRST}", "w1": "{FIRST}", "w0": "{SECOND}"}}}}'


@subtests(
    ("mapped", "words"),
    [
        (MAP | {"w3": "model-3.safetensors"}, "names the shard 'model-3.safetensors', which is not in the folder"),
        (MAP | {"w4": SECOND}, f"says that {SECOND} has 'w4', and it lacks it"),
        (MAP | {"w2": FIRST}, f"says that {FIRST} has 'w2', and it lacks it"),
        (MAP | {"w3": "../x.safetensors"}, "must name files of the folder itself, got '../x.safetensors'"),
        (MAP | {"w3": "/etc/passwd"}, "must name files of the folder itself"),
        (MAP | {"w3": "..\\x"}, "must name files of the folder itself"),
        (MAP | {"w3": "sub/x"}, "must name files of the folder itself"),
        (MAP | {"w3": ".."}, "must name files of the folder itself, got '..'"),
        (MAP | {"w3": 3}, "must name files of the folder itself, got 3"),
        (MAP | {"w3": ""}, "must name files of the folder itself"),
        (TWICE, "must have each name once, and has 'w0' twice"),
        ({}, "must have a weight_map"),
        ("[]", "must be a JSON object"),
        ("{", "must be JSON in UTF-8"),
    ],
)
def test_an_index_that_does_not_agree_with_its_shards_is_refused(folder, mapped, words):
    index(folder, mapped)
    with pytest.raises(FileRefused) as caught:
        read_weights(folder)
    assert words in str(caught.value) and str(caught.value).startswith("cannot read ")


def test_a_name_in_two_shards_is_refused(folder):
    save_file({name: STATE[name] for name in ("w1", "w2", "w3")}, folder / SECOND)
    with pytest.raises(FileRefused, match=r"'w1' is in model-00002-of-00002.safetensors and in another shard"):
        read_weights(folder)


def test_links_two_indices_and_folders_without_weights_are_refused(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / SECOND
    (folder / SECOND).rename(elsewhere)
    (folder / SECOND).symlink_to(elsewhere)
    with pytest.raises(FileRefused, match=f"its {SECOND} is a link, .* by cp -rL"):
        read_weights(folder)
    index(folder, MAP, "model.fp16.safetensors.index.json")
    with pytest.raises(FileRefused, match=r"must have one index, and has model\.fp16"):
        read_weights(folder)
    with pytest.raises(FileRefused, match=r"No such file as model\.safetensors"):
        read_weights(tmp_path_factory.mktemp("empty"))
