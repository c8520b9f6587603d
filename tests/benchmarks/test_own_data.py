"""One's own images in folders, Parquet and NumPy archives: loaded as they are, or refused in one sentence."""

import io
import os
import re
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from leakbench.audit.external.examples.groups import read_examples
from leakbench.benchmarks import data
from leakbench.benchmarks.core import Sizes
from leakbench.benchmarks.core.data import images
from leakbench.benchmarks.core.data.stored import Reading

from ..parameters import subtests

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 10\n"


def picture(number: int, *, side: int = 8, mode: str = "RGB") -> Image.Image:
    """A picture of its own for each number: a grey level, and noise."""
    noise = np.random.default_rng(number).integers(0, 200, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(noise + np.uint8(number % 50)).convert(mode)


def different(n: int) -> np.ndarray:
    """Images of which no two are equal."""
    return np.arange(n, dtype=np.uint8)[:, None, None].repeat(4, axis=1).repeat(4, axis=2)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    written = io.BytesIO()
    image.save(written, kind)
    return written.getvalue()


def folders(root: Path, counts: dict[str, int], number: int = 0, **options) -> str:
    """One folder a class with so many pictures, numbered from here on."""
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            picture(number, **options).save(root / name / f"{i:03}.png")
            number += 1
    return f"folder:{root}"


def table(place: Path, contents: list[bytes], labels, *, image: str = "image", label: str = "label") -> str:
    """A Parquet file as the Hub has it."""
    structs = [{"bytes": content, "path": f"{i}.png"} for i, content in enumerate(contents)]
    columns = pa.table({image: structs, label: labels})
    place.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns, place, row_group_size=7)
    return f"parquet:{place}"


def archive(place: Path, **arrays) -> str:
    np.savez(place, **arrays)
    return f"npz:{place}"


def everything(splits: data.Splits):
    pools = [pool for pool in (splits.private, splits.non_member, splits.public, splits.test) if pool is not None]
    order = torch.cat([pool.ids for pool in pools]).argsort()
    return torch.cat([p.inputs for p in pools])[order], torch.cat([p.labels for p in pools])[order]


def refused(name: str, sentence: str) -> None:
    """In one sentence that holds `sentence`."""
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        data.load(name)
    assert "\n" not in str(caught.value)
    assert ". " not in str(caught.value).replace("...", "")


def three_ways(root: Path, pictures: list[Image.Image], labels: list[int]) -> dict[str, str]:
    """The same images as a folder, a Parquet file and an archive, in the same order."""
    for i, (image, label) in enumerate(zip(pictures, labels, strict=True)):
        (root / "folder" / f"class {label}").mkdir(parents=True, exist_ok=True)
        image.save(root / "folder" / f"class {label}" / f"{i:03}.png")
    x = np.stack([np.asarray(image) for image in pictures])
    return {
        "folder": f"folder:{root / 'folder'}",
        "parquet": table(root / "own.parquet", [encoded(image) for image in pictures], labels),
        "npz": archive(root / "own.npz", x=x, y=np.array(labels)),
    }


def test_the_same_images_are_the_same_data_whichever_way_they_are_stored(tmp_path):
    pictures = [picture(i) for i in range(50)]
    labels = sorted(i % 3 for i in range(50))
    loaded = {kind: data.load(name) for kind, name in three_ways(tmp_path, pictures, labels).items()}
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in pictures])).permute(0, 3, 1, 2) / 255
    for splits in loaded.values():
        inputs, classes = everything(splits)
        assert torch.equal(inputs, pixels)
        assert classes.tolist() == labels
        assert (splits.classes, splits.input_shape) == (3, (3, 8, 8))
        assert [len(p) for p in (splits.private, splits.non_member, splits.public)] == [20, 20, 10]
        assert splits.test is None
        assert splits.in_distribution_public


def test_a_data_set_of_ones_own_is_named_by_its_folder_not_by_its_path(tmp_path):
    names = three_ways(tmp_path, [picture(i) for i in range(10)], [0, 1] * 5)
    assert [data.load(name).name for name in names.values()] == ["folder:folder", "parquet:own", "npz:own"]


def test_moving_a_folder_moves_nobody_from_pool_to_pool(tmp_path):
    first = data.load(folders(tmp_path / "here", {"a": 10, "b": 10}))
    (tmp_path / "here").rename(tmp_path / "there")
    again = data.load(f"folder:{tmp_path / 'there'}")
    assert again.digest == first.digest


def test_grey_images_have_one_channel(tmp_path):
    for name in three_ways(tmp_path, [picture(i, mode="L") for i in range(10)], [0, 1] * 5).values():
        assert data.load(name).input_shape == (1, 8, 8)


def test_uneven_classes_are_loaded(tmp_path):
    splits = data.load(folders(tmp_path / "x", {"many": 60, "few": 2, "some": 13}))
    assert torch.bincount(everything(splits)[1]).tolist() == [2, 60, 13]  # in the order of the names


def test_files_that_are_no_images_and_hidden_ones_are_passed_over(tmp_path):
    name = folders(tmp_path, {"a": 5, "b": 5, ".ipynb_checkpoints": 2})
    for file in ("a/Thumbs.db", "a/.DS_Store", "b/.hidden.png", "notes.txt"):
        (tmp_path / file).write_bytes(b"not an image")
    splits = data.load(name)
    assert splits.classes == 2
    assert len(everything(splits)[1]) == 10


def test_images_below_a_class_are_found_at_any_depth_and_through_links(tmp_path):
    folders(tmp_path / "elsewhere", {"b": 4, "more": 2})
    folders(tmp_path / "x" / "a", {"deep": 3, "deeper/still": 3}, number=6)
    (tmp_path / "x" / "b").symlink_to(tmp_path / "elsewhere" / "b")
    (tmp_path / "x" / "a" / "more").symlink_to(tmp_path / "elsewhere" / "more")
    assert everything(data.load(f"folder:{tmp_path / 'x'}"))[1].tolist() == [0] * 8 + [1] * 4


@subtests("test", ["test", "val", "validation"])
def test_a_folder_of_parts_has_an_official_test_set(tmp_path, test):
    folders(tmp_path / "train", {"a": 10, "b": 10, "c": 10})
    folders(tmp_path / test, {"a": 2, "c": 3}, side=8)
    splits = data.load(f"folder:{tmp_path}")
    assert splits.test is not None
    assert splits.test.ids.tolist() == [30, 31, 32, 33, 34]
    assert splits.test.labels.tolist() == [0, 0, 2, 2, 2]
    assert [len(p) for p in (splits.private, splits.non_member, splits.public)] == [12, 12, 6]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_among_the_images_or_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path):
    name = folders(tmp_path / "x", {"a": 12, "b": 12})
    os.mkfifo(tmp_path / "x" / "a" / "z.png")
    refused(name, f"each image of {tmp_path / 'x' / 'a'} must be a regular file, got {tmp_path / 'x' / 'a' / 'z.png'}")
    with pytest.raises(ValueError, match=r"each image of .* must be a regular file, got .*z.png, which is none"):
        read_examples(str(tmp_path / "x"))
    (tmp_path / "x" / "a" / "z.png").unlink()
    os.mkfifo(tmp_path / "labels.csv")
    with pytest.raises(ValueError, match=r"labels labels.csv must be a regular file, got"):
        read_examples(str(tmp_path / "x"), reading=Reading(labels=str(tmp_path / "labels.csv")))
    os.mkfifo(tmp_path / "pipe")
    for kind, expected in (
        ("folder", "folder"),
        ("parquet", "file or a folder"),
        ("npz", "file"),
        ("features", "file"),
    ):
        refused(f"{kind}:{tmp_path / 'pipe'}", f"path of {kind} must be a {expected}, got {tmp_path / 'pipe'}")
    (tmp_path / "x" / "a" / "z.png").symlink_to(tmp_path / "nothing")
    refused(name, "must be a regular file, got")


def test_a_class_that_only_the_test_part_has_is_refused(tmp_path):
    folders(tmp_path / "train", {"a": 5, "b": 5})
    folders(tmp_path / "test", {"a": 2, "z": 2})
    refused(
        f"folder:{tmp_path}", f"classes of {tmp_path / 'test'} must be among those of {tmp_path / 'train'}, got 'z'"
    )


def test_folders_without_two_classes_of_images_are_refused(tmp_path):
    refused(folders(tmp_path / "one", {"a": 9}), "at least two of them: a classifier needs two; got 1 folder")
    refused(folders(tmp_path / "none", {".": 3}), "a classifier needs two; got 0 folders and 3 loose images")
    name = folders(tmp_path / "empty", {"a": 5, "b": 0})
    refused(name, f"{tmp_path / 'empty' / 'b'} must hold images, got none of .bmp, .jpeg, .jpg")


def test_too_few_images_are_refused(tmp_path):
    name = folders(tmp_path / "x", {"a": 1, "b": 1})
    refused(name, "folder:x must have examples left for private and non_member and public, got 2 of 2")


@subtests("content", [b"", b"\xff\xd8 nothing", encoded(picture(0))[:60], encoded(picture(0), "JPEG")[:300]])
def test_a_damaged_image_is_named(tmp_path, content):
    name = folders(tmp_path / "x", {"a": 5, "b": 5})
    (tmp_path / "x" / "b" / "002.png").write_bytes(content)
    refused(
        name, f"{tmp_path / 'x' / 'b' / '002.png'} of {name} must be an image, got {len(content)} bytes that cannot be"
    )
    contents = [encoded(picture(i)) for i in range(10)]
    contents[6] = content
    refused(table(tmp_path / "y.parquet", contents, [0, 1] * 5), "row 6 of y.parquet of parquet:")


def test_once_a_damaged_image_is_replaced_the_folder_is_read_again(tmp_path):
    name = folders(tmp_path / "x", {"a": 5, "b": 5})
    first = data.load(name)
    picture(77).save(tmp_path / "x" / "a" / "000.png")
    assert data.load(name).digest != first.digest


@subtests(
    "mode, got", [("L", "000.png in colour and"), ("RGBA", "mode 'RGBA'"), ("P", "mode 'P'"), ("CMYK", "mode 'CMYK'")]
)
def test_an_image_of_another_mode_is_named_and_all_can_be_converted(tmp_path, mode, got):
    name = folders(tmp_path / "x", {"a": 5, "b": 5})
    (tmp_path / "x" / "b" / "003.png").unlink()
    odd = tmp_path / "x" / "b" / ("003.tif" if mode == "CMYK" else "003.png")
    picture(3, mode=mode).save(odd)
    refused(name, got)
    refused(name, str(odd))
    refused(name, f"convert all with {name}?channels=3")
    assert data.load(f"{name}?channels=3").input_shape == (3, 8, 8)
    assert data.load(f"{name}?channels=1").input_shape == (1, 8, 8)


def test_images_of_more_than_8_bits_are_not_squeezed_into_them(tmp_path):
    name = folders(tmp_path / "x", {"a": 5, "b": 5})
    Image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16)).save(tmp_path / "x" / "a" / "000.png")
    for address in (name, f"{name}?channels=1"):
        refused(address, "must be grey or colour, 8 bits a channel, got mode 'I")  # 'I;16', which Pillow 10.0 calls 'I'


def test_images_of_several_sizes_are_refused_with_the_way_to_resize_them(tmp_path):
    name = folders(tmp_path / "x", {"a": 5, "b": 5})
    picture(3, side=20).resize((20, 10)).save(tmp_path / "x" / "b" / "001.png")
    refused(
        name, f"got {tmp_path / 'x' / 'a' / '000.png'} with 8 x 8 pixels and {tmp_path / 'x' / 'b' / '001.png'} with"
    )
    refused(name, f"20 x 10; resize all, for instance with {name}?size=32")
    assert data.load(f"{name}?size=6&channels=1").input_shape == (1, 6, 6)


def test_resizing_keeps_the_centre_of_the_shorter_side(tmp_path):
    wide = np.zeros((4, 12, 3), dtype=np.uint8)
    wide[:, 4:8] = 255  # the centre square
    name = folders(tmp_path / "x", {"a": 5, "b": 5})
    Image.fromarray(wide).save(tmp_path / "x" / "a" / "000.png")
    inputs, _ = everything(data.load(f"{name}?size=4"))
    assert torch.equal(inputs[0], torch.ones(3, 4, 4))


def test_large_images_are_decoded_by_several_threads_in_their_order(tmp_path, monkeypatch):
    name = folders(tmp_path / "x", {"a": 30, "b": 30})
    alone = data.load(name)
    monkeypatch.setattr(images, "WORTH_A_THREAD", 1)
    monkeypatch.setattr(images, "CHUNK", 4)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    together = data.load(f"{name}?channels=3")  # another address, so that it is decoded again
    assert together.digest == alone.digest
    for damaged in ("a/020.png", "a/021.png", "b/020.png"):
        (tmp_path / "x" / damaged).write_bytes(b"")
    refused(name, "a/020.png")  # the first of them, whichever thread was first


def test_data_that_would_not_fit_into_memory_are_refused_before_they_are_decoded(tmp_path, monkeypatch):
    name = folders(tmp_path / "x", {"a": 5, "b": 5})
    (tmp_path / "x" / "b" / "004.png").write_bytes(b"not reached")
    monkeypatch.setattr(images, "memory_bytes", lambda: 10_000)
    refused(name, f"{name} must fit into memory, got 10 images of 192 values")
    name = archive(tmp_path / "x.npz", x=np.zeros((40, 9, 9), np.uint8), y=np.arange(40) % 2)
    refused(name, "must fit into memory, got 40 images of 81 values")


@subtests(
    "kind, names", [("npz", ("x", "y")), ("npz", ("x_train", "y_train", "x_test", "y_test")), ("features", ("x", "y"))]
)
def test_an_archive_larger_than_the_memory_is_refused_before_any_of_it_is_read(tmp_path, monkeypatch, kind, names):
    x, y = (
        (np.zeros((4000, 32, 32), np.uint8), np.arange(4000) % 4)
        if kind == "npz"
        else (np.zeros((4000, 256), "f4"), np.arange(4000) % 4)
    )
    arrays: dict[str, Any] = {name: x if name.startswith("x") else y for name in names}
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    monkeypatch.setattr(images, "memory_bytes", lambda: 5_000_000)
    tracemalloc.start()
    try:
        refused(
            f"{kind}:{tmp_path / 'x.npz'}",
            f"{kind}:{tmp_path / 'x.npz'} must fit into memory, got arrays {', '.join(names)}",
        )
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_every_option_that_a_refusal_names_exists(tmp_path, monkeypatch):
    folder = folders(tmp_path / "x", {"a": 5, "b": 5})
    parquet = table(tmp_path / "x.parquet", [encoded(picture(i)) for i in range(10)], [0, 1] * 5)
    npz = archive(tmp_path / "x.npz", x=np.zeros((40, 9, 9), np.uint8), y=np.arange(40) % 2)
    monkeypatch.setattr(images, "memory_bytes", lambda: 10_000)
    for name in (folder, f"{folder}?channels=3", f"{parquet}?size=64", npz, "imagenet", "imagenet?size=64"):
        with pytest.raises(ValueError, match="must fit into memory") as caught:
            data.load(name)
        for address in re.findall(r"for instance (\S+)", str(caught.value)):
            data.check(address)
        assert ("for instance" in str(caught.value)) == (name != npz)
    assert images.with_option("folder:a?size=64&channels=3", "size=32") == "folder:a?channels=3&size=32"


def test_memory_is_what_the_machine_has():
    assert 2**28 < images.memory_bytes() < 2**50


def test_a_git_lfs_pointer_is_named_wherever_it_lies(tmp_path):
    name = folders(tmp_path / "x", {"a": 5, "b": 5})
    (tmp_path / "x" / "a" / "001.png").write_bytes(POINTER)
    refused(name, "got a Git-LFS pointer; fetch the content with 'git lfs pull'")
    for kind in ("parquet", "npz"):
        (tmp_path / f"x.{kind}").write_bytes(POINTER)
        refused(f"{kind}:{tmp_path / f'x.{kind}'}", "a Git-LFS pointer to them; fetch them with 'git lfs pull'")


@subtests("kept", [0, 3, 200, -1])
def test_a_truncated_file_is_named(tmp_path, kept):
    for name in (
        table(tmp_path / "x.parquet", [encoded(picture(i)) for i in range(10)], [0, 1] * 5),
        archive(tmp_path / "x.npz", x=np.zeros((10, 4, 4), np.uint8), y=np.array([0, 1] * 5)),
    ):
        file = Path(name.partition(":")[2])
        whole = file.read_bytes()
        file.write_bytes(whole[:kept])
        refused(name, f"{file} must be a whole")


def test_a_parquet_file_damaged_in_the_middle_is_named(tmp_path):
    name = table(tmp_path / "x.parquet", [encoded(picture(i)) for i in range(10)], [0, 1] * 5)
    content = bytearray((tmp_path / "x.parquet").read_bytes())
    content[4:200] = bytes(196)
    (tmp_path / "x.parquet").write_bytes(content)
    refused(name, f"{tmp_path / 'x.parquet'} must be a whole Parquet file")


def test_a_folder_of_parquet_files_has_parts_by_their_names(tmp_path):
    contents = [encoded(picture(i)) for i in range(40)]
    labels = [i % 2 for i in range(40)]
    table(tmp_path / "data" / "train-00000-of-00002.parquet", contents[:10], labels[:10])
    table(tmp_path / "data" / "train-00001-of-00002.parquet", contents[10:30], labels[10:30])
    table(tmp_path / "data" / "test-00000-of-00001.parquet", contents[30:], labels[30:])
    table(tmp_path / ".cache" / "train-old.parquet", contents[:10], labels[:10])
    splits = data.load(f"parquet:{tmp_path}")
    assert splits.test is not None
    assert splits.test.ids.tolist() == list(range(30, 40))
    pixels = torch.from_numpy(np.stack([np.asarray(picture(i)) for i in range(40)])).permute(0, 3, 1, 2) / 255
    assert torch.equal(everything(splits)[0], pixels)
    (tmp_path / "data" / "test-00000-of-00001.parquet").rename(tmp_path / "data" / "more.parquet")
    assert data.load(f"parquet:{tmp_path}").test is None


def test_columns_may_have_the_other_names_of_the_hub_and_plain_bytes(tmp_path):
    contents = [encoded(picture(i)) for i in range(10)]
    first = data.load(table(tmp_path / "a.parquet", contents, [0, 1] * 5, image="img", label="fine_label"))
    pq.write_table(pa.table({"image": contents, "labels": pa.array([0, 1] * 5, pa.uint8())}), tmp_path / "b.parquet")
    assert data.load(f"parquet:{tmp_path / 'b.parquet'}").digest == first.digest


@subtests(
    "columns, sentence",
    [
        (
            {"picture": [b""], "label": [0]},
            "must have a column image or img and a column label, labels or fine_label, got",
        ),
        ({"image": [b""]}, "got image"),
        (
            {"image": ["a.png"], "label": [0]},
            "must hold encoded images, as bytes or as a struct with a field 'bytes', got",
        ),
        ({"image": [{"path": "a.png"}], "label": [0]}, "as a struct with a field 'bytes', got struct<path: string>"),
        ({"image": [b"x"], "label": ["dog"]}, "must hold whole numbers, got string; number the classes from 0"),
        ({"image": [encoded(picture(0))] * 3, "label": [0, 1, None]}, "must have no empty value, got one in row 2"),
        ({"image": [encoded(picture(0)), None], "label": [0, 1]}, "must have no empty value, got one in row 1"),
        ({"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())}, "must hold images, got none"),
    ],
)
def test_other_columns_are_refused(tmp_path, columns, sentence):
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    refused(f"parquet:{tmp_path / 'x.parquet'}", sentence)


@subtests("names", [("image", "label", "label"), ("image", "image", "label"), ("image", "other", "other", "label")])
def test_a_column_that_occurs_twice_is_refused(tmp_path, names):
    arrays = [pa.array([0, 1] * 5) if name == "label" else pa.array([encoded(picture(0))] * 10) for name in names]
    pq.write_table(pa.Table.from_arrays(arrays, names=list(names)), tmp_path / "x.parquet")
    twice = next(name for name in names if names.count(name) > 1)
    refused(f"parquet:{tmp_path / 'x.parquet'}", f"must have each column once, got {twice!r} 2 times")


def test_structs_are_opened_to_any_depth_and_an_empty_one_at_any_is_named(tmp_path):
    contents = [encoded(picture(i)) for i in range(10)]
    plain = data.load(table(tmp_path / "plain.parquet", contents, [0, 1] * 5))
    for depth in (2, 3):
        structs = contents
        for _ in range(depth):
            structs = [{"bytes": content} for content in structs]
        pq.write_table(pa.table({"image": structs, "label": [0, 1] * 5}), tmp_path / "deep.parquet")
        assert data.load(f"parquet:{tmp_path / 'deep.parquet'}").digest == plain.digest
    for empty in (None, {"bytes": None}, {"bytes": {"bytes": None}}):
        structs = [{"bytes": {"bytes": content}} for content in contents[:9]] + [empty]
        pq.write_table(pa.table({"image": structs, "label": [0, 1] * 5}), tmp_path / "gap.parquet")
        refused(f"parquet:{tmp_path / 'gap.parquet'}", "column image of")


def test_a_folder_without_parquet_files_is_refused(tmp_path):
    refused(f"parquet:{tmp_path}", f"a folder with *.parquet below it, got none in {tmp_path}")


def test_labels_with_gaps_are_renumbered_in_their_order(tmp_path):
    contents, labels = [encoded(picture(i)) for i in range(12)], [7, 1, 40] * 4
    for name in (
        table(tmp_path / "x.parquet", contents, labels),
        archive(tmp_path / "x.npz", images=different(12), labels=np.array(labels)),
    ):
        splits = data.load(name)
        assert splits.classes == 3
        assert everything(splits)[1].tolist() == [1, 0, 2] * 4


@subtests(
    "labels, sentence",
    [
        ([0] * 10, "must have at least two classes, got 1"),
        ([0, 1] * 4 + [0, -1], "whole numbers from 0, got -1 for example 9"),
    ],
)
def test_labels_that_no_classifier_can_learn_are_refused(tmp_path, labels, sentence):
    refused(table(tmp_path / "x.parquet", [encoded(picture(i)) for i in range(10)], labels), sentence)
    refused(archive(tmp_path / "x.npz", x=np.zeros((10, 4, 4), np.uint8), y=np.array(labels)), sentence)


def test_a_test_part_with_a_class_of_its_own_is_refused(tmp_path):
    x, y = np.zeros((10, 4, 4), np.uint8), np.array([0, 1] * 5)
    name = archive(tmp_path / "x.npz", x_train=x, y_train=y, x_test=x[:2], y_test=np.array([1, 2]))
    refused(name, "must have every class in its training part, got class 2 in the test part alone")


@subtests("shape, input_shape", [((9, 6, 5), (1, 6, 5)), ((9, 6, 5, 3), (3, 6, 5)), ((9, 1, 6, 5), (1, 6, 5))])
@subtests("dtype", [np.uint8, np.float64, np.float16])
def test_arrays_may_have_their_channels_first_last_or_none(tmp_path, shape, input_shape, dtype):
    x = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    stored = x if dtype == np.uint8 else (x / 255).astype(dtype)
    splits = data.load(archive(tmp_path / "x.npz", x=stored, y=np.arange(9)[:, None] % 2))
    expected = x if len(shape) == 4 and shape[1] == 1 else x[:, None] if len(shape) == 3 else x.transpose(0, 3, 1, 2)
    assert splits.input_shape == input_shape
    np.testing.assert_allclose(everything(splits)[0].numpy(), expected / 255, atol=1e-3)


def test_an_archive_with_a_test_part_has_an_official_test_set(tmp_path):
    x, y = different(20), np.arange(20) % 2
    for first, second in (("x_train", "x_test"), ("train_images", "test_images")):
        names = {first: x, first.replace("x_", "y_").replace("images", "labels"): y}
        names |= {second: np.full_like(x[:4], 9), second.replace("x_", "y_").replace("images", "labels"): y[:4]}
        splits = data.load(archive(tmp_path / f"{first}.npz", **names))
        assert splits.test is not None
        assert splits.test.ids.tolist() == [20, 21, 22, 23]
        assert (splits.test.inputs == 9 / 255).all()


X, Y = np.zeros((6, 4, 4), np.uint8), np.array([0, 1] * 3)


@subtests(
    "arrays, sentence",
    [
        ({"a": X, "b": Y}, "must have arrays x_train and y_train, x and y, images and labels"),
        ({"x": X, "y": Y, "x_test": X}, "must have arrays x_test and y_test"),
        (
            {"x": X.reshape(6, 16), "y": Y},
            "must be [n, height, width], or have its 1 or 3 channels either second or last, got",
        ),
        ({"x": np.zeros((6, 3, 9, 3), np.uint8), "y": Y}, "either second or last, got shape [6, 3, 9, 3]"),
        ({"x": np.zeros((6, 9, 9, 4), np.uint8), "y": Y}, "either second or last, got shape [6, 9, 9, 4]"),
        ({"x": X[:0], "y": Y[:0]}, "x of {file} must hold images, got shape [0, 1, 4, 4]"),
        ({"x": X.astype(np.int32), "y": Y}, "x of {file} must be bytes (uint8) or floats in [0, 1], got int32"),
        ({"x": X + 2.0, "y": Y}, "must be in [0, 1] where it is floats, got values from 2 to 2; scale them, or store"),
        ({"x": X + np.nan, "y": Y}, "must be in [0, 1] where it is floats, got values from nan to nan"),
        ({"x": X, "y": Y / 2}, "y of {file} must be one whole number an image, got float64 of shape [6]"),
        (
            {"x": X, "y": np.eye(6, dtype=int)},
            "y of {file} must be one whole number an image, got int64 of shape [6, 6]",
        ),
        ({"x": X, "y": Y[:5]}, "y of {file} must have one class an image, got 5 for 6 images"),
        (
            {"x": X, "y": Y, "x_test": X[:, :2], "y_test": Y},
            "must be alike in training and test, got x uint8[6, 1, 4, 4] and x_test uint8[6, 1, 2, 4]",
        ),
        (
            {"x": np.array([{}] * 6), "y": Y},
            "must be a whole .npz file of plain numeric arrays, got one that cannot be read",
        ),
    ],
)
def test_other_arrays_are_refused(tmp_path, arrays, sentence):
    file = tmp_path / "x.npz"
    refused(archive(file, **arrays), sentence.replace("{file}", str(file)))


def test_a_pickle_in_an_archive_is_never_run(tmp_path):
    class Harm:
        def __reduce__(self):
            return (Path(tmp_path / "harmed").touch, ())

    np.savez(tmp_path / "x.npz", x=np.array([Harm()] * 6, dtype=object), y=Y, other=np.array([Harm()], dtype=object))
    refused(f"npz:{tmp_path / 'x.npz'}", "must be a whole .npz file of plain numeric arrays")
    assert not (tmp_path / "harmed").exists()


def test_one_array_is_no_archive(tmp_path):
    np.save(tmp_path / "x.npy", X)
    refused(f"npz:{tmp_path / 'x.npy'}", "one array, not an archive of several")
    refused(f"npz:{tmp_path}", f"path of npz must be a file, got {tmp_path}")


def test_sizes_of_ones_own_data_may_be_asked_for(tmp_path):
    name = folders(tmp_path / "x", {"a": 20, "b": 20})
    splits = data.load(name, sizes=Sizes(private=5, non_member=7, public=0))
    assert [len(p) for p in (splits.private, splits.non_member, splits.public)] == [5, 7, 0]
    with pytest.raises(ValueError, match=re.escape("sizes of folder:x must add up to at most 40, got 41 (private=41)")):
        data.load(name, sizes=Sizes(private=41))


@subtests("side", [10**13, 10**15, 2**62])  # of more memory than there is, and than there can be
def test_an_archive_whose_header_declares_more_than_fits_into_memory_is_one_sentence(tmp_path, side):
    with zipfile.ZipFile(tmp_path / "lies.npz", "w") as archive:
        for name, shape, dtype in (("x", (side, 2, 2), "|u1"), ("y", (side,), "<i8")):
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
            archive.writestr(f"{name}.npy", header.getvalue() + b"abc")
    with pytest.raises(ValueError, match=r"lies.npz must be a whole .npz file"):
        data.load(f"npz:{tmp_path / 'lies.npz'}", seed=0)
