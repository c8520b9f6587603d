"""Formats of examples: what a header says is checked before that much is read, and nothing is guessed in silence."""

import io
import json
import struct
import zipfile
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from leakbench.audit.external.examples.groups import groups_of, read_examples, read_named
from leakbench.benchmarks import data
from leakbench.benchmarks.core.data.stored import Reading

from ....parameters import subtests


def test_a_bomb_is_refused_by_what_its_header_says_and_by_what_it_holds(tmp_path):
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        zeros = io.BytesIO()
        np.save(zeros, np.zeros((2**15, 2**9), dtype=np.float32))  # 64 MiB, packed to 64 KiB
        archive.writestr("x.npy", zeros.getvalue())
        labels = io.BytesIO()
        np.save(labels, np.zeros(2**15, dtype=np.int64))
        archive.writestr("y.npy", labels.getvalue())
    assert path.stat().st_size < 2**17
    with pytest.raises(ValueError, match=r"must fit into 0.05 GB, got 16777216 numbers that take 0.268 GB"):
        read_examples(str(path), reading=Reading(memory=50_000_000))
    # A header of a petabyte in a file of nothing.
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**40, 2**8)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header.getvalue())
        archive.writestr("y.npy", labels.getvalue())
    with pytest.raises(ValueError, match="must fit into"):
        read_examples(str(path))
    # More labels than examples is a bomb, too, and so is a member that is longer than its header says.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        few = io.BytesIO()
        np.save(few, np.zeros((3, 4), dtype=np.float32))
        archive.writestr("x.npy", few.getvalue())
        archive.writestr("y.npy", labels.getvalue())
    with pytest.raises(ValueError, match="one small entry for each of 3 inputs"):
        read_examples(str(path))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", few.getvalue() + b"0" * 2**20)
        archive.writestr("y.npy", labels.getvalue())
    with pytest.raises(ValueError, match="as long as its header says, 48 bytes"):
        read_examples(str(path))


def test_a_pickle_inside_an_archive_is_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    path = tmp_path / "some.npz"
    np.savez(path, x=np.array([Payload(), Payload()], dtype=object), y=np.array([0, 1]))
    with pytest.raises(ValueError, match=r"x of .* pickled Python objects"):
        read_examples(str(path))
    np.savez(path, x=np.zeros((2, 3)), y=np.array([Payload(), Payload()], dtype=object))
    with pytest.raises(ValueError, match=r"y of .* pickled Python objects"):
        read_examples(str(path))
    assert not (tmp_path / "ran").exists()


def test_damaged_and_odd_archives_are_refused(tmp_path):
    path = tmp_path / "some.npz"
    np.savez(path, x=np.arange(600.0).reshape(100, 6), y=np.arange(100) % 3)
    whole = path.read_bytes()
    for content in (whole[:-30], whole[: len(whole) // 2], whole[:200] + b"\xff" + whole[201:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"some.npz"):
            read_examples(str(path))
    with pytest.warns(UserWarning), zipfile.ZipFile(path, "w") as archive:
        for _ in range(2):
            archive.writestr("x.npy", b"")
    with pytest.raises(ValueError, match="two of one name"):
        read_examples(str(path))
    np.savez(path, x=np.zeros((2, 3), dtype=[("a", "f4")]), y=np.array([0, 1]))
    with pytest.raises(ValueError, match="must be plain numbers, got"):
        read_examples(str(path))


def test_arrays_of_other_orders_have_the_same_numbers(tmp_path):
    path, values = tmp_path / "some.npz", np.arange(24.0).reshape(4, 6)
    for stored in (np.asfortranarray(values), values.astype(">f8"), values.astype(np.int16)):
        np.savez(path, X=stored, Y=np.arange(4, dtype=">i4"))
        found = read_examples(str(path))
        assert torch.equal(found.inputs, torch.arange(24.0).view(4, 6))
        assert found.labels.tolist() == [0, 1, 2, 3]


@subtests(
    ("shape", "reading", "made"),
    [
        ((2, 3, 8, 8), Reading(), (2, 3, 8, 8)),
        ((2, 8, 8, 3), Reading(), (2, 3, 8, 8)),
        ((2, 8, 8, 3), Reading(axes="nchw"), (2, 8, 8, 3)),
        ((2, 3, 8, 3), Reading(axes="nhwc"), (2, 3, 3, 8)),
        ((2, 8, 8), Reading(axes="nhw"), (2, 1, 8, 8)),
        ((2, 8, 8), Reading(), (2, 8, 8)),
        ((2, 64), Reading(shape=(1, 8, 8)), (2, 1, 8, 8)),
    ],
)
def test_axes_go_by_a_rule_a_setting_and_a_sentence(tmp_path, shape, reading, made):
    path = tmp_path / "some.npz"
    np.savez(path, x=np.arange(np.prod(shape), dtype=np.float32).reshape(shape), y=np.array([0, 1]))
    found = read_examples(str(path), reading=reading)
    assert tuple(found.inputs.shape) == made
    assert bool(found.notes) == (reading.axes in ("nhw", "nhwc") or shape[1:] == (8, 8, 3) != made[1:])


def test_axes_that_are_ambiguous_or_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "some.npz"
    np.savez(path, x=np.zeros((2, 3, 8, 3)), y=np.array([0, 1]))
    with pytest.raises(ValueError, match="say which by --reading axes=nchw or axes=nhwc"):
        read_examples(str(path))
    with pytest.raises(ValueError, match="3 axes to be nhw"):
        read_examples(str(path), reading=Reading(axes="nhw"))
    with pytest.raises(ValueError, match=r"as many values as an input, 72, got \[1, 8, 8\]"):
        read_examples(str(path), reading=Reading(shape=(1, 8, 8)))


def test_how_it_is_read_is_parsed_or_refused():
    found = Reading.parse("axes=nhwc, shape=1x28x28,resize=32,channels=3,labels=some.csv")
    assert found == Reading(axes="nhwc", shape=(1, 28, 28), resize=32, channels=3, labels="some.csv")
    assert Reading.parse("") == Reading()
    for text in ("axes", "axes=chw", "resize=a", "resize=0", "channels=2", "shape=1x0", "resize=3x3", "size=3"):
        with pytest.raises(ValueError, match=r"must be"):
            Reading.parse(text)


def test_parquet_of_nested_lists_and_of_encoded_images(tmp_path):
    path = tmp_path / "some.parquet"
    pixels = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    pq.write_table(pa.table({"x": pixels.tolist(), "label": [0, 1], "id": ["a", "b"]}), path)
    found = read_examples(str(path))
    assert found.inputs.shape == (2, 3, 4, 4)
    assert found.names == ("a", "b")
    encoded = [{"bytes": _png(image.transpose(1, 2, 0)), "path": ""} for image in pixels]
    pq.write_table(pa.table({"image": encoded, "label": [0, 1]}), path)
    found = read_examples(str(path))
    assert torch.equal(found.inputs, torch.from_numpy(pixels).float() / 255)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(pixels.astype(np.float32))
    pq.write_table(pa.table({"x": tensors, "y": [0, 1]}), path)
    assert torch.equal(read_examples(str(path)).inputs, torch.from_numpy(pixels).float())


@subtests(
    ("columns", "told"),
    [
        ({"x": [[1.0], [2.0]], "label": [0, None]}, "column label of .* got one in row 1"),
        ({"x": [[1.0], None], "label": [0, 1]}, "column x of .* got one in row 1"),
        ({"x": [[1.0], [None]], "label": [0, 1]}, "got one inside a list"),
        ({"x": [[1.0], [1.0, 2.0]], "label": [0, 1]}, "lists of one length, got 1 to 2"),
        ({"x": [["a"], ["b"]], "label": [0, 1]}, "numbers or lists of them, got string"),
        ({"u": [1.0, 2.0], "note": ["a", "b"], "label": [0, 1]}, "got note of string"),
        ({"u": [1.0, 2.0]}, "labels under one of the names"),
        ({"u": [1.0, 2.0], "label": [0.0, 1.5]}, "classes, whole numbers from 0, got 1.5; a regression is audited"),
        ({"u": [1.0, 2.0], "label": ["cat", "dog"]}, "whole numbers, got words"),
        ({"label": [0, 1]}, "must have inputs as one column"),
        ({"u": [1.0, 2.0], "label": [0, 1], "id": [7, 7]}, "ids of .* distinct, got 7 twice"),
        ({"u": [1.0, float("nan")], "label": [0, 1]}, "NaN or infinity in 1 of 2 examples, first in number 1"),
    ],
)
def test_a_bad_parquet_is_refused_in_one_sentence(tmp_path, columns, told):
    path = tmp_path / "some.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(ValueError, match=told) as error:
        read_examples(str(path))
    assert "\n" not in str(error.value)


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array([1.0, 2.0]), pa.array([3.0, 4.0]), pa.array([0, 1])], ["a", "a", "label"])
    pq.write_table(table, tmp_path / "some.parquet")
    with pytest.raises(ValueError, match="must have each column once, got 'a' 2 times"):
        read_examples(str(tmp_path / "some.parquet"))


def test_a_parquet_of_one_number_a_billion_times_is_not_read(tmp_path):
    path = tmp_path / "some.parquet"
    count = 300_000
    pq.write_table(
        pa.table({"label": np.zeros(count, dtype=np.int64), **{f"c{i}": np.zeros(count) for i in range(9)}}), path
    )
    assert path.stat().st_size < 2**17
    with pytest.raises(ValueError, match=r"must fit into 0.03 GB, got 2700000 numbers"):
        read_examples(str(path), reading=Reading(memory=30_000_000))
    # One value of a dictionary stands for all that lists hold.
    pq.write_table(pa.table({"label": np.arange(40), "x": [[0.0] * 50_000] * 40}), path)
    assert path.stat().st_size < 2**14
    with pytest.raises(ValueError, match=r"must fit into 0.01 GB, got 2000000 numbers"):
        read_examples(str(path), reading=Reading(memory=10_000_000))
    assert read_examples(str(path)).inputs.shape == (40, 50_000)
    pq.write_table(pa.table({"label": [], "x": pa.array([], pa.list_(pa.float32()))}), path)
    with pytest.raises(ValueError, match="got no row"):
        read_examples(str(path))


def _png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return out.getvalue()


def _folder(root, names, size=(4, 4)):
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        (root / name / "one.png").write_bytes(_png(np.full((*size, 3), number, dtype=np.uint8)))


def test_classes_of_a_folder_are_by_name_and_the_same_in_all_groups(tmp_path):
    _folder(tmp_path / "in", ["10", "2", "cat"])
    _folder(tmp_path / "out", ["10", "cat"])
    inside, outside = (read_examples(str(tmp_path / name)) for name in ("in", "out"))
    assert inside.class_names == ("10", "2", "cat")
    assert "0 = 10, 1 = 2, 2 = cat" in inside.notes[0]
    with pytest.raises(ValueError, match="a folder for each class of the members"):
        groups_of(inside, outside)
    with pytest.raises(ValueError, match="stored as the members are, uint8, got float32"):
        groups_of(inside, replace(inside, stored="float32"))
    (tmp_path / "in" / "2" / "one.png").rename(tmp_path / "in" / "2" / "two.png")
    assert read_examples(str(tmp_path / "in")).sha256 != inside.sha256


def test_a_folder_by_a_table_of_labels_resized(tmp_path):
    for name, side in (("a.png", 4), ("b.png", 6)):
        (tmp_path / name).write_bytes(_png(np.full((side, side, 3), side, dtype=np.uint8)))
    table = tmp_path / "labels.csv"
    table.write_text("file,label\nb.png,1\na.png,0\n")
    with pytest.raises(ValueError, match=r"must be in a folder of their class, got a.png"):
        read_examples(str(tmp_path))
    with pytest.raises(ValueError, match="of one size"):
        read_examples(str(tmp_path), reading=Reading(labels=str(table)))
    found = read_examples(str(tmp_path), reading=Reading(labels=str(table), resize=4, channels=1))
    assert found.names == ("b.png", "a.png")
    assert found.labels.tolist() == [1, 0]
    assert found.inputs.shape == (2, 1, 4, 4)
    assert any("resized to 4 x 4" in note for note in found.notes)
    for text, told in (("file,class\n", "columns file and label"), ("file,label\nc.png,0\n", "got 'c.png'"),
                       ("file,label\na.png,cat\n", "whole numbers from 0, got 'cat'"), ("", "got no row")):  # fmt: skip
        table.write_text(text)
        with pytest.raises(ValueError, match=told):
            read_examples(str(tmp_path), reading=Reading(labels=str(table)))


def test_a_decompression_bomb_among_images_is_refused_by_its_header(tmp_path):
    _folder(tmp_path, ["a", "b"])
    png = bytearray(_png(np.zeros((4, 4, 3), dtype=np.uint8)))
    png[16:24] = struct.pack(">II", 20_000, 20_000)  # width and height
    import zlib

    png[29:33] = struct.pack(">I", zlib.crc32(bytes(png[12:29])))
    (tmp_path / "b" / "two.png").write_bytes(bytes(png))
    with pytest.raises(ValueError, match=r"b/two.png of .* got a decompression bomb"):
        read_examples(str(tmp_path))
    (tmp_path / "b" / "two.png").write_bytes(_png(np.zeros((4, 4, 4), dtype=np.uint8)))
    with pytest.raises(ValueError, match="grey or colour with 8 bits a channel, got mode 'RGBA'"):
        read_examples(str(tmp_path))
    (tmp_path / "b" / "two.png").unlink()
    with pytest.raises(ValueError, match="must fit into 1e-07 GB"):
        read_examples(str(tmp_path), reading=Reading(memory=100))


def test_the_whole_of_a_data_set_is_there_by_a_split_of_json(tmp_path):
    path = tmp_path / "split.json"
    path.write_text(json.dumps({"members": list(range(0, 1797, 2)), "non_members": list(range(1, 1797, 2))}))
    found = read_named("digits", path)
    assert len(found["members"].labels) == 899
    assert len(found["non_members"].labels) == 898
    pools = data.load("digits", seed=3)
    place = int(pools.private.ids[0])
    row = found["members" if place % 2 == 0 else "non_members"]
    assert torch.equal(row.inputs[place // 2], pools.private.inputs[0])
    for text, told in (
        ('{"members": [1], "others": [2]}', "keys members, non_members, population alone, got 'others'"),
        ('{"members": 1}', "must be a list of ids"),
        ('{"members": ["a"]}', "ids of .* whole numbers, got 'a'"),
        ('{"members": [1], "non_members": [1]}', "one group each, once, got 1 again"),
        ("{", "must be a CSV or JSON file"),
        ("id,group\n1,members\n", "got 'members'"),
        ("a,b\n", "columns id and group; it has a, b"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=told):
            read_named("digits", path)
    pd.DataFrame({"id": [1], "group": ["member"]}).to_csv(path, index=False)
    assert read_named("digits", path)["members"].names == ("1",)


@subtests(
    "form",
    [
        lambda y: y.astype(np.float32),
        lambda y: y[:, None].astype(np.float64),
        lambda y: np.eye(3)[y],
        lambda y: np.eye(3, dtype=bool)[y],
        lambda y: y.astype(np.uint8),
    ],
)
def test_labels_are_classes_however_they_are_written(tmp_path, form):
    y = np.arange(30) % 3
    np.savez(tmp_path / "some.npz", x=np.random.default_rng(0).normal(size=(30, 4)), y=form(y))
    assert read_examples(str(tmp_path / "some.npz")).labels.tolist() == y.tolist()


@subtests(
    ("labels", "words"),
    [
        (
            np.linspace(0, 1, 4),
            "got 0.3333333333333333; a regression is audited by its losses, without the model: leakbench",
        ),
        (np.array([0.0, np.nan, 1.0, 1.0]), "whole numbers from 0, got nan"),
        (np.array([-1, 1, 1, -1]), "must be classes from 0, got -1; write 0 for -1"),
        (np.array([-1, 0, 1, 1]), "must be classes from 0, got -1$"),
        (np.eye(4) * 0.9, "one class an example, got shape .*; give the likeliest class of each"),
        (np.array(["a", "b", "c", "d"]), "must be whole numbers, got words of shape .*; number the classes from 0"),
    ],
)
def test_labels_that_are_no_classes_are_refused_with_the_way_out(tmp_path, labels, words):
    np.savez(tmp_path / "some.npz", x=np.zeros((4, 2)), y=labels)
    with pytest.raises(ValueError, match=words):
        read_examples(str(tmp_path / "some.npz"))
    (tmp_path / "some.csv").write_text("x0,x1,label\n1,2,0\n")
    with pytest.raises(ValueError, match=r"write a CSV table as Parquet: pandas.read_csv\(file\).to_parquet"):
        read_examples(str(tmp_path / "some.csv"))
