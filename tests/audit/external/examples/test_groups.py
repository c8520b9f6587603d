"""The owner's examples: what is read, what is said of it, and what is refused in one sentence."""

import io
import zipfile
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from leakbench.audit.external.examples.groups import DataFile, Preprocess, groups_of, read_examples, read_named
from leakbench.benchmarks.core.data.stored import Reading

from ....parameters import subtests


def _npz(folder, **arrays):
    path = folder / "some.npz"
    np.savez(path, **arrays)
    return str(path)


def _images(n=4, shape=(1, 2, 2)):
    return np.arange(n * np.prod(shape), dtype=np.float32).reshape(n, *shape) / 100


def test_an_npz_is_read_with_its_digest(tmp_path):
    found = read_examples(_npz(tmp_path, x=_images(), y=np.array([0, 1, 0, 1])))
    assert found.inputs.shape == (4, 1, 2, 2)
    assert found.labels.tolist() == [0, 1, 0, 1]
    assert found.names == ("0", "1", "2", "3")
    assert len(found.sha256) == 64


def test_bytes_become_fractions_and_channels_move_with_a_sentence(tmp_path):
    path = _npz(tmp_path, images=np.full((2, 4, 5, 3), 255, dtype=np.uint8), labels=np.array([[0], [1]]))
    assert read_examples(path, reading=Reading(axes="plain")).inputs.shape == (2, 4, 5, 3)
    found = read_examples(path)
    assert found.inputs.shape == (2, 3, 4, 5)
    assert float(found.inputs.max()) == 1.0
    moved, divided = found.notes
    assert "channels are taken to be last, and were moved" in moved
    assert divided.endswith("0 to 255, were divided by 255")


def test_parquet_columns_or_lists_are_inputs(tmp_path):
    path = tmp_path / "some.bin"
    pd.DataFrame({"id": ["a", "b"], "label": [0, 1], "u": [1.0, 2.0], "v": [3.0, 4.0]}).to_parquet(path)
    found = read_examples(str(path))
    assert found.inputs.tolist() == [[1.0, 3.0], [2.0, 4.0]]
    assert found.names == ("a", "b")
    pd.DataFrame({"label": [0, 1], "pixels": [[1.0, 2.0], [3.0, 4.0]]}).to_parquet(path)
    assert read_examples(str(path)).inputs.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_a_folder_has_a_folder_a_class(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name, value in (("cat", 0), ("dog", 255)):
        (tmp_path / name).mkdir()
        image.fromarray(np.full((3, 2, 3), value, dtype=np.uint8)).save(tmp_path / name / "one.png")
    found = read_examples(str(tmp_path))
    assert found.inputs.shape == (2, 3, 3, 2)
    assert found.inputs.flatten(1).mean(1).tolist() == [0.0, 1.0]
    assert found.labels.tolist() == [0, 1]
    assert found.names == ("cat/one.png", "dog/one.png")
    (tmp_path / "dog" / "link.png").symlink_to(tmp_path / "cat" / "one.png")
    with pytest.raises(ValueError, match=r"no links, which may lead anywhere, got dog/link\.png"):
        read_examples(str(tmp_path))
    (tmp_path / "dog" / "link.png").unlink()
    (tmp_path / "dog" / "two.png").write_bytes(b"<html>")
    with pytest.raises(ValueError, match="must be an image"):
        read_examples(str(tmp_path))
    image.fromarray(np.zeros((9, 9, 3), dtype=np.uint8)).save(tmp_path / "dog" / "two.png")
    with pytest.raises(
        ValueError,
        match=r"of one size, got cat/one.png with 2 x 3 pixels and dog/two.png with 9 x 9; .* --reading resize=32",
    ):
        read_examples(str(tmp_path))


@subtests(
    ("arrays", "told"),
    [
        ({"x": _images()}, "labels under one of the names labels, y, .* got x"),
        ({"y": np.array([0])}, "inputs under one of the names inputs, x, .* got y"),
        ({"x": _images(), "inputs": _images(), "y": np.arange(4)}, "inputs under one of the names .* got x, inputs, y"),
        ({"x": _images(), "y": np.array([0, 1])}, "one small entry for each of 4 inputs, got int64"),
        ({"x": _images(), "y": np.array([0.0, 0.5, 1, 1])}, "must be classes, whole numbers from 0, got 0.5; a regr"),
        (
            {"x": _images(), "y": np.array(["a", "b", "c", "d"])},
            "must be whole numbers, got words .* number the classes from 0",
        ),
        ({"x": _images(), "y": np.array([0, 1, -1, 0])}, "must be classes from 0, got -1"),
        (
            {"x": np.full((2, 3), np.nan), "y": np.array([0, 1])},
            "NaN or infinity in 2 of 2 examples, first in number 0",
        ),
        ({"x": np.zeros((0, 3)), "y": np.zeros(0, dtype=int)}, "not empty"),
        ({"x": np.float64(3), "y": np.int64(3)}, r"must be an array \[examples, ...\], got one float64"),
        ({"x": np.zeros((3, 2), dtype="V0"), "y": np.arange(3)}, "must be plain numbers"),
        ({"x": np.zeros(3), "y": np.zeros(3, dtype=int)}, r"must be \[examples, ...\]"),
        (
            {"x": np.array([{}, {}], dtype=object), "y": np.array([0, 1])},
            "got pickled Python objects, which can run any program",
        ),
        ({"x": _images(), "y": np.arange(4), "id": np.array([1, 1, 2, 3])}, "ids of .* must be distinct, got 1 twice"),
    ],
)
def test_a_bad_npz_is_refused_in_one_sentence(tmp_path, arrays, told):
    with pytest.raises(ValueError, match=told) as error:
        read_examples(_npz(tmp_path, **arrays))
    assert "\n" not in str(error.value)


def test_other_files_are_refused_by_their_bytes(tmp_path):
    for name, content in (("a.npz", b"<html>"), ("b.npz", b""), ("c.parquet", b"PAR1 no"), ("d.npz", b"PK\x03\x04 no")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            read_examples(str(tmp_path / name))
    with pytest.raises(ValueError, match="there is no"):
        read_examples(str(tmp_path / "none.npz"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="must hold images"):
        read_examples(str(tmp_path / "empty"))


def test_an_archive_that_says_it_is_huge_is_not_unpacked(tmp_path):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", b"0" * 1000)
    content = bytearray(packed.getvalue())
    place = content.rindex(b"PK\x01\x02") + 24  # the size of the member, in the central directory
    content[place : place + 4] = (0xFFFFFFF0).to_bytes(4, "little")
    content += b""
    path = tmp_path / "bomb.npz"
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"bomb.npz"):
        read_examples(str(path))


def test_missing_values_of_parquet_are_refused(tmp_path):
    path = tmp_path / "some.parquet"
    pd.DataFrame({"label": [0, 1], "u": [1.0, None]}).to_parquet(path)
    with pytest.raises(ValueError, match=r"column u of .* no empty value, got one in row 1"):
        read_examples(str(path))


def _file(n, shape=(3, 2, 2), source="a", first=1):
    values = torch.arange(first, first + n).float().view(-1, 1, 1, 1)
    return DataFile(
        source=source, sha256="0" * 64, inputs=torch.ones(n, *shape) * values, labels=torch.zeros(n, dtype=torch.int64),
        names=tuple(map(str, range(n))),
    )  # fmt: skip


def test_ids_are_by_content_and_keep_the_owners():
    found = groups_of(_file(2), _file(3, first=10), _file(1, first=20))
    ids = torch.cat([found.members.ids, found.non_members.ids])
    assert ids.unique().numel() == 5
    assert found.names[int(ids[4])] == "non_members:2"
    # Exchanged, every example keeps its id: matchings and halves follow from who is a member, and not from files.
    turned = groups_of(_file(3, first=10), _file(2))
    assert turned.members.ids.tolist() == found.non_members.ids.tolist()
    copies = groups_of(_file(1), replace(_file(2), inputs=torch.ones(2, 3, 2, 2)))
    assert copies.non_members.ids.unique().numel() == 2
    with pytest.raises(ValueError, match="members' shape"):
        groups_of(_file(2), _file(2, shape=(1, 2, 2), source="other"))


def test_preprocessing_is_by_channel():
    found = groups_of(_file(1), _file(1), preprocess=Preprocess.parse("mean=1/0.5/0,std=1/0.5/2"))
    assert found.members.inputs.flatten(1).tolist() == [[0.0] * 4 + [1.0] * 4 + [0.5] * 4]
    with pytest.raises(ValueError, match="2 values of mean"):
        groups_of(_file(1), _file(1), preprocess=Preprocess.parse("mean=1/2"))
    for text in ("mean", "mean=a", "std=0", "mean=1,mean=2", "std=-1", "mean=nan", "median=1", ""):
        with pytest.raises(ValueError, match="--preprocess"):
            Preprocess.parse(text)


def test_a_data_set_of_ours_is_dealt_by_a_file(tmp_path):
    path = tmp_path / "split.csv"
    pd.DataFrame({"id": [5, 1, 7], "group": ["member", "non_member", "member"]}).to_csv(path, index=False)
    found = read_named("digits", path)
    assert set(found) == {"members", "non_members"}
    assert found["members"].names == ("5", "7")
    pd.DataFrame({"id": [5, 10**6], "group": ["member", "member"]}).to_csv(path, index=False)
    with pytest.raises(ValueError, match="no example with id 1000000"):
        read_named("digits", path)
    pd.DataFrame({"id": [5], "group": ["public"]}).to_csv(path, index=False)
    with pytest.raises(ValueError, match=r"group of .* got 'public'"):
        read_named("digits", path)
    with pytest.raises(ValueError, match="did you mean 'digits'"):
        read_named("digit", path)


def table(path, columns, rows=6, seed=0):
    """A Parquet file of named columns, of which a number tells its column and its row."""
    numbers = {name: 100.0 * (ord(name[-1]) - ord("a")) + np.arange(rows) + seed for name in columns}
    pd.DataFrame(numbers | {"label": np.arange(rows) % 2}).to_parquet(path)
    return read_examples(str(path))


@subtests("group", ["non_members", "population"])
def test_columns_are_matched_by_their_names_and_not_by_their_places(tmp_path, group):
    members = table(tmp_path / "m.parquet", "abcd")
    other = table(tmp_path / "o.parquet", "dbca", seed=20)
    straight = table(tmp_path / "s.parquet", "abcd", seed=20)
    given = {"non_members": table(tmp_path / "n.parquet", "abcd", seed=10), "population": straight}
    both = (given | {group: other}, given | {group: straight})
    found, expected = (groups_of(members, one["non_members"], one["population"]) for one in both)
    made, wanted = getattr(found, group), getattr(expected, group)
    assert torch.equal(made.inputs, wanted.inputs) and torch.equal(made.ids, wanted.ids)
    assert found.columns == ("a", "b", "c", "d")
    assert "were put into the order of" in found.sources[group].notes[-1]
    assert not [note for note in expected.sources[group].notes if "put into the order" in note]


@subtests(
    ("columns", "words"),
    [("abce", "and lacks d and has e"), ("abc", "and lacks d"), ("abcde", "and has e"), ("ABCD", "and lacks a, b, c")],
)
def test_columns_of_other_names_are_refused(tmp_path, columns, words):
    members, other = table(tmp_path / "m.parquet", "abcd"), table(tmp_path / "o.parquet", columns, seed=10)
    with pytest.raises(
        ValueError, match=f"o.parquet must have the columns of .*m.parquet, whatever their order, {words}"
    ):
        groups_of(members, other)


def test_columns_without_names_beside_some_with_names_are_refused(tmp_path):
    members = table(tmp_path / "m.parquet", "abcd")
    np.savez(tmp_path / "n.npz", x=np.random.default_rng(0).normal(size=(6, 4)), y=np.arange(6) % 2)
    nameless = read_examples(str(tmp_path / "n.npz"))
    for first, second in ((members, nameless), (nameless, members)):
        with pytest.raises(ValueError, match=r"n.npz must name its columns as .*m.parquet does"):
            groups_of(first, second)
