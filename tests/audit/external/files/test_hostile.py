"""Hostile and broken files: each is refused in one sentence, and nothing that it holds runs."""

import io
import json
import os
import random
import struct

import pytest
import torch
from safetensors.torch import save

from leakbench.audit.external.files import FileRefused, read_tensors
from leakbench.audit.external.files.checks import check

from ....parameters import subtests

HONEST = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2])})


def header_of(entries, *, data=b"", length=None):
    """A file with this header, as JSON or as the bytes given."""
    content = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


EIGHT = bytes(8)
SAFETENSORS = {
    "cut_short": (HONEST[:-3], "cut short"),
    "cut_in_its_header": (HONEST[:30], "cut short"),
    "only_a_length": (HONEST[:8] + b"{", "cut short"),
    "header_longer_than_the_file": (header_of({"a": entry()}, data=EIGHT, length=1 << 20), "cut short"),
    "header_of_exabytes": (header_of({"a": entry()}, data=EIGHT, length=(1 << 64) - 1), "cut short"),
    "header_too_long": (header_of(b"{" + b" " * (5 << 20), data=EIGHT), "at most 4194304 bytes"),
    "garbage_behind": (HONEST + b"#!/bin/sh\n", "belong to none"),
    "payload_between": (
        header_of({"a": entry(), "b": entry(offsets=(12, 20))}, data=bytes(20)),
        "leaves a gap before it, at 12 instead of 8",
    ),
    "overlapping": (
        header_of({"a": entry(), "b": entry(offsets=(4, 12))}, data=bytes(12)),
        "'b' shares bytes with the tensor before it",
    ),
    "same_bytes_twice": (header_of({"a": entry(), "b": entry()}, data=EIGHT), "shares bytes"),
    "behind_the_end": (header_of({"a": entry(offsets=(8, 16))}, data=EIGHT), "ends behind the file"),
    "offsets_swapped": (header_of({"a": entry(offsets=(8, 0))}, data=EIGHT), "takes 8 bytes, got -8"),
    "offset_negative": (header_of({"a": entry(offsets=(-8, 0))}, data=EIGHT), "two integers from 0"),
    "offset_beyond_64_bits": (header_of({"a": entry(offsets=(0, 1 << 64))}, data=EIGHT), "two integers from 0"),
    "offset_is_true": (header_of({"a": entry("U8", (), (False, True))}, data=b"x"), "two integers from 0"),
    "wrong_shape": (header_of({"a": entry(shape=(3,))}, data=EIGHT), "takes 12 bytes, got 8"),
    "shape_overflows_to_its_size": (header_of({"a": entry(shape=(1 << 62, 4, 2))}, data=EIGHT), "bytes, got 8"),
    "shape_negative": (header_of({"a": entry(shape=(-1, -2))}, data=EIGHT), "integers from 0"),
    "shape_is_text": (header_of({"a": entry() | {"shape": "2"}}, data=EIGHT), "integers from 0"),
    "many_dimensions": (header_of({"a": entry(shape=(1,) * 60 + (2,))}, data=EIGHT), "at most 16 dimensions"),
    "wrong_dtype": (header_of({"a": entry("F33")}, data=EIGHT), "dtype of 'a'"),
    "narrow_dtype": (header_of({"a": entry("F8_E4M3", (8,))}, data=EIGHT), "convert it to F32"),
    "dtype_is_a_list": (header_of({"a": entry() | {"dtype": ["F32"]}}, data=EIGHT), "dtype of 'a'"),
    "further_field": (header_of({"a": entry() | {"code": "import os"}}, data=EIGHT), "nothing else"),
    "name_twice": (
        header_of(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":0}', data=EIGHT),
        "names 'a' twice",
    ),
    "field_twice": (
        header_of(b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', data=EIGHT),
        "names 'dtype' twice",
    ),
    "last_of_many_names_twice": (
        header_of(b"{" + b",".join(b'"%d":0' % number for number in [*range(200_000), 199_999]) + b"}"),
        "names '199999' twice",
    ),
    "not_json": (header_of(b"{'a': 1}", data=EIGHT), "must be JSON"),
    "not_utf8": (header_of(b'{"\xff": 1}', data=EIGHT), "must be JSON"),
    "two_objects": (header_of(b"{}{}", data=EIGHT), "must be JSON"),
    "nan_in_its_header": (header_of(b'{"a": NaN}', data=EIGHT), "must be integers"),
    "number_of_5000_digits": (header_of(b'{"a": ' + b"9" * 5000 + b"}"), "must be JSON"),
    "nested_40000_deep": (header_of(b'{"a":' + b"[" * 40_000, data=EIGHT), "must be JSON"),
    "a_header_of_empty_lists": (
        header_of(b'{"a":[' + b"[]," * 1_300_000 + b"0]}", data=EIGHT),
        "at most 20000 tensors, got 1 objects and 1300001 lists",
    ),
    "a_header_of_empty_objects": (
        header_of(b'{"a":[' + b"{}," * 1_300_000 + b"0]}", data=EIGHT),
        "at most 20000 tensors, got 1300001 objects",
    ),
    "a_header_of_numbers": (header_of(b'{"a":[' + b"0," * 2_000_000 + b"0]}", data=EIGHT), "must have dtype, shape"),
    "a_header_of_entries": (
        header_of({str(number): 0 for number in range(280_000)}, data=EIGHT),
        "at most 20000 tensors, got 280000",
    ),
    "a_million_tensors": (
        header_of(b"{" + b",".join(b'"%d":{}' % number for number in range(350_000)) + b"}"),
        "at most 20000 tensors",
    ),
    "thirty_thousand_tensors": (
        header_of({str(n): entry("U8", (1,), (n, n + 1)) for n in range(30_000)}, data=bytes(30_000)),
        "at most 20000 tensors",
    ),
    "no_tensor": (header_of({"__metadata__": {"format": "pt"}}), "holds no tensor"),
    "metadata_is_code": (header_of({"__metadata__": {"a": {"b": 1}}, "a": entry()}, data=EIGHT), "strings to strings"),
    "metadata_is_a_list": (header_of({"__metadata__": [], "a": entry()}, data=EIGHT), "strings to strings"),
    "name_with_escapes": (header_of({"\x1b[2Ja": entry()}, data=EIGHT), "printable characters"),
    "name_too_long": (header_of({"a" * 600: entry()}, data=EIGHT), "printable characters"),
    "name_empty": (header_of({"": entry()}, data=EIGHT), "printable characters"),
    "nan_weights": (save({"a": torch.tensor([float("nan")])}), "NaN or infinite"),
}
OTHERS = {
    "empty": (b"", "is empty"),
    "one_byte": (b"\x00", "no file of weights"),
    "zeros": (bytes(4096), "no file of weights"),
    "web_page": (b"\n <!DOCTYPE html><html><body>Sign in</body></html>", "a web page"),
    "web_page_with_a_mark": (b"\xef\xbb\xbf<html><head></head></html>", "a web page"),
    "pointer_of_git_lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(64), "an HDF5 file"),
    "gguf": (b"GGUF\x03" + bytes(64), "a GGUF file"),
    "program": (b"\x7fELF" + bytes(64), "a program"),
    "gzip": (b"\x1f\x8b\x08" + bytes(64), "unpack it"),
    "noise": (bytes(range(200, 256)) * 8, "of no file of weights that is known"),
}
FILES = SAFETENSORS | OTHERS
ARCHIVE = io.BytesIO()
torch.save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2])}, ARCHIVE)


@subtests("name", FILES)
def test_the_file_is_refused_in_one_sentence(name, tmp_path):
    content, expected = FILES[name]
    # The name of a file says nothing of what it is.
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(FileRefused) as caught:
        read_tensors(path, allow_pickle_tensors=True)
    sentence = str(caught.value)
    assert expected in sentence
    assert sentence.startswith(f"cannot read {path}: ")
    assert sentence.isprintable()
    assert len(sentence) < 600 + len(str(path))


@pytest.mark.long
def test_they_are_looked_through_within_seconds_and_a_gigabyte_without_torch(tmp_path, looked_through):
    for name, (content, _) in FILES.items():
        (tmp_path / name).write_bytes(content)
    found = looked_through(tmp_path)
    assert {name for name, (sentence, _) in found["files"].items() if sentence is None} == {"nan_weights"}
    assert max(seconds for _, seconds in found["files"].values()) < 10  # 0.9 at most here; a loader would take minutes
    assert found["resident"] < 1 << 20
    assert not {"torch", "numpy", "safetensors"} & set(found["modules"])


@subtests("content", [HONEST, ARCHIVE.getvalue()])
def test_whatever_byte_is_exchanged_the_file_is_refused_or_has_the_same_form(content):
    expected, coins = check(io.BytesIO(content)).tensors, random.Random(0)  # noqa: S311 - mutations, not secrets
    refused = 0
    for _ in range(400):
        broken = bytearray(content)
        for _ in range(coins.choice((1, 1, 3))):
            broken[coins.randrange(len(broken))] = coins.choice((0, 1, 0x2E, 0x52, 0x7F, 0xFF, coins.randrange(256)))
        try:
            found = check(io.BytesIO(broken)).tensors
        except FileRefused as error:
            refused += str(error).isprintable()
        else:
            # Names and types are the file's own to say; how much there is of each is not.
            assert sorted(tensor.bytes for tensor in found.values()) == sorted(t.bytes for t in expected.values())
    assert refused > 100


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(FileRefused):
            read_tensors(path)
    with pytest.raises(FileRefused, match="no regular file"):
        read_tensors("/dev/zero")


def test_a_sparse_file_beyond_the_limit_is_refused_by_its_size(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(HONEST)
        file.truncate(1 << 40)
    with pytest.raises(FileRefused, match="at most 8589934592 bytes"):
        read_tensors(path)


def test_what_changes_after_the_check_is_not_read(tmp_path, monkeypatch):
    from leakbench.audit.external.files import read

    path, original = tmp_path / "model.safetensors", read.check
    path.write_bytes(HONEST)

    def checked_then_exchanged(file):
        found = original(file)
        path.write_bytes(save({"a": torch.full((2, 3), 9.0), "b": torch.tensor([1, 2])}))
        return found

    monkeypatch.setattr(read, "check", checked_then_exchanged)
    with pytest.raises(FileRefused, match="it changed while it was read"):
        read_tensors(path)
