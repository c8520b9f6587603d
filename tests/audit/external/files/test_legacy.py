"""The format that torch.save had before PyTorch 1.6: honest files, and hostile and broken ones."""

import io
import os
import pickle
import re
import struct
import time
from collections import OrderedDict

import pytest
import torch

from leakbench.audit.external.files import FileRefused, read, read_tensors
from leakbench.audit.external.files.checks import check
from leakbench.audit.external.files.checks.legacy import START

from ....parameters import subtests


class Runs:
    """What a pickle runs when it is read."""

    def __init__(self, sign):
        self.sign = sign

    def __reduce__(self):
        return os.system, (f"touch {self.sign}",)


def saved(what):
    """Saves by torch.save, with names of one length for storages."""
    file = io.BytesIO()
    torch.save(what, file, _use_new_zipfile_serialization=False)
    return with_numbered_storages(file.getvalue())


def with_numbered_storages(content):
    """The file with numbers of 14 digits for the names of storages, which are addresses of as many as the system's."""
    names = {}

    def renamed(text):
        length, address = text.groups()
        if struct.unpack("<i", length) != (len(address),):
            return text[0]
        return struct.pack("<ci", b"X", 14) + names.setdefault(address, b"%014d" % len(names))

    return re.sub(rb"X(.{4})(\d{6,})", renamed, content, flags=re.DOTALL)


BASE = torch.arange(12.0).reshape(3, 4)
STATE = OrderedDict(
    whole=BASE,
    turned=BASE.T,
    part=BASE[1:, 2],
    repeated=BASE[0, :1].expand(5),
    half=torch.tensor([0.5, -1.5], dtype=torch.float16),
    brain=torch.tensor([[0.25], [3.0]], dtype=torch.bfloat16),
    counter=torch.tensor(7),
    mask=torch.tensor([True, False]),
    none=torch.zeros(0, 4),
    parameter=torch.nn.Parameter(torch.ones(2)),
)
HONEST = saved(STATE)
ONE = saved({"a": torch.tensor([1.0, 2.0])})
MACHINE = START + pickle.dumps(
    {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}, 2
)


@pytest.mark.parametrize("digits", [7, 15, 20])
def test_the_files_of_these_tests_are_the_same_however_long_addresses_are(digits):
    name = struct.pack("<i", 14) + key()
    assert HONEST.count(name) > 1 and ONE.count(name) == 2  # in the pickle, and among the keys
    for content in (ONE, HONEST):
        at_an_address = re.sub(
            rb"X\x0e\0\0\0(\d{14})",
            lambda text: struct.pack("<ci", b"X", digits) + b"%d" % (10 ** (digits - 1) + int(text[1])),
            content,
        )
        assert len(at_an_address) != len(content)
        assert with_numbered_storages(at_an_address) == content


def test_every_tensor_comes_back_as_it_was(converted_here, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(saved({"state_dict": STATE, "epoch": 3, "optimizer": {"state": {0: {"m": torch.ones(4)}}}}))
    with pytest.raises(FileRefused, match="--allow-pickle-tensors"):
        read_tensors(path)
    found = read_tensors(path, allow_pickle_tensors=True)
    assert found.kind == "torch.save before 1.6"
    assert list(found.tensors) == list(STATE)
    for name, tensor in STATE.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)
    assert "'epoch', 'optimizer'" in found.notes[0]


def test_what_python_2_wrote_is_what_it_was():
    """Texts of bytes, dictionaries of a list of pairs, no hooks; put together by hand, as no Python 2 is there."""

    def old(value):
        return b"U" + bytes([len(value)]) + value.encode()

    machine = b"\x80\x02}(" + old("protocol_version") + b"M\xe9\x03" + old("little_endian") + b"\x88u."
    storage = b"(" + old("storage") + b"ctorch\nFloatStorage\n" + old("17") + old("cuda:0") + b"\x8a\x01\x02NtQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00(K\x02t(K\x01t\x89NtR"
    made = b"\x80\x02ccollections\nOrderedDict\n](](" + old("a.weight") + tensor + b"ee\x85R."
    content = START + machine + made + b"\x80\x02](" + old("17") + b"e." + struct.pack("<qff", 2, 1.5, -2.5)
    assert check(io.BytesIO(content)).tensors.keys() == {"a.weight"}
    loaded = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    assert torch.equal(loaded["a.weight"], torch.tensor([1.5, -2.5]))


def test_shapes_are_known_before_a_loader_sees_it():
    found = check(io.BytesIO(HONEST))
    assert {name: tensor.shape for name, tensor in found.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in STATE.items()
    }


def exchanged(old, new, content=ONE):
    assert content.count(old) == 1
    return content.replace(old, new)


def more_of(count):
    """The storage of two entries said to be of `count` in the pickle."""
    return exchanged(b"K\x02Ntq", b"J" + struct.pack("<i", count) + b"Ntq")


def key():
    return b"%014d" % 0  # of the only storage


HOSTILE = {
    "gadget_instead_of_its_version": (lambda sign: START[:15] + pickle.dumps(Runs(sign), 2), "must begin as"),
    "gadget_instead_of_the_machine": (lambda sign: START + pickle.dumps(Runs(sign), 2) * 3, "names 'posix.system'"),
    "gadget_instead_of_the_object": (lambda sign: MACHINE + pickle.dumps(Runs(sign), 2) * 2, "names 'posix.system'"),
    "gadget_among_the_entries": (
        lambda sign: MACHINE + pickle.dumps({"a": Runs(sign)}, 2) + pickle.dumps([], 2),
        "names 'posix.system'",
    ),
    "gadget_among_the_keys": (
        lambda sign: MACHINE + pickle.dumps({}, 2) + pickle.dumps([Runs(sign)], 2),
        "names 'posix.system'",
    ),
    "gadget_behind": (lambda sign: ONE + pickle.dumps(Runs(sign), 2), "bytes behind its last storage belong to none"),
    "gadget_in_another_protocol": (
        lambda sign: MACHINE + pickle.dumps(Runs(sign), 4) + pickle.dumps([], 2),
        "must be of protocol 2",
    ),
}
BROKEN = {
    "only_its_start": (START, "are broken"),
    "big_endian": (
        START + pickle.dumps({"protocol_version": 1001, "little_endian": False}, 2) + pickle.dumps({}, 2) * 2,
        "must be little-endian",
    ),
    "machine_is_a_list": (START + pickle.dumps([], 2) * 3, "must be little-endian"),
    "cut_in_its_pickle": (ONE[:200], "are broken"),
    "cut_in_its_numbers": (ONE[:-3], "was cut short"),
    "cut_before_its_numbers": (ONE[:-16], "must have 2 entries as its pickle says, got 0"),
    "one_byte_behind": (ONE + b"\0", "1 bytes behind its last storage"),
    "another_count_in_its_numbers": (ONE[:-16] + struct.pack("<q", 3) + bytes(12), "must have 2 entries"),
    "negative_count_in_its_numbers": (ONE[:-16] + struct.pack("<q", -2) + bytes(8), "got -2"),
    "larger_in_its_pickle": (more_of(1 << 30), "must have 1073741824 entries as its pickle says, got 2"),
    "negative_in_its_pickle": (more_of(-2), "must be integers from 0"),
    "smaller_in_its_pickle": (more_of(1), "reaches entry 1 of a storage of 1"),
    "a_key_too_few": (ONE[: ONE.rindex(b"\x80\x02]")] + pickle.dumps([], 2), "got one of them"),
    "a_key_too_many": (
        ONE[: ONE.rindex(b"\x80\x02]")] + pickle.dumps([key().decode(), "1"], 2) + ONE[-16:] + bytes(8),
        "storage '1' must be both",
    ),
    "a_key_twice": (
        ONE[: ONE.rindex(b"\x80\x02]")] + pickle.dumps([key().decode()] * 2, 2) + ONE[-16:] * 2,
        "must be a list of different texts",
    ),
    "keys_are_numbers": (ONE[: ONE.rindex(b"\x80\x02]")] + pickle.dumps([1], 2) + ONE[-16:], "different texts"),
    "a_view_of_a_storage": (
        exchanged(b"K\x02Ntq", b"K\x02X\x01\x00\x00\x000K\x00K\x02\x87tq"),
        "where a storage must be",
    ),
    "a_network_and_its_source": (
        MACHINE
        + b"\x80\x02(X\x06\x00\x00\x00modulectorch\nFloatStorage\nX\x04\x00\x00\x00m.pyX\x01\x00\x00\x00xtQ."
        + pickle.dumps([], 2),
        "where a storage must be",
    ),
    "a_storage_as_archives_have_it": (exchanged(b"K\x02Ntq", b"K\x02tq"), "where a storage must be"),
    "a_million_instructions": (MACHINE + b"\x80\x02}" + b"q\x00" * 1_000_000 + b".", "at most 300000 instructions"),
    "a_million_instructions_in_three_pickles": (
        START + b"".join(b"\x80\x02}" + b"q\x00" * 290_000 + b"." for _ in range(3)),
        "at most 300000 instructions",
    ),
    "pickle_without_end": (MACHINE + b"\x80\x02X\xff\xff\xff\x7f" + bytes(20 << 20), "are broken, or go on behind"),
}
FILES = HOSTILE | {name: (lambda _, content=content: content, expected) for name, (content, expected) in BROKEN.items()}


@subtests("name", FILES)
def test_the_file_is_refused_in_one_sentence_and_nothing_in_it_runs(name, tmp_path, monkeypatch):
    monkeypatch.setattr(read, "converted", lambda *_: pytest.fail("a loader was started"))
    build, expected = FILES[name]
    sign, path = tmp_path / "ran", tmp_path / "model.pt"
    path.write_bytes(build(sign))
    before = time.process_time()
    with pytest.raises(FileRefused) as caught:
        read_tensors(path, allow_pickle_tensors=True)
    assert time.process_time() - before < 10  # 0.4 at most here
    sentence = str(caught.value)
    assert expected in sentence
    assert sentence.startswith(f"cannot read {path}: ")
    assert sentence.isprintable()
    assert not sign.exists()


def test_the_gadget_works(tmp_path):
    sign = tmp_path / "ran"
    pickle.loads(pickle.dumps(Runs(sign), 2))  # noqa: S301 - what the files above do where nobody looks
    assert sign.exists()


@subtests("end", [*range(1, len(ONE), 7), len(ONE) - 1])
def test_wherever_it_is_cut_it_is_refused(end):
    with pytest.raises(FileRefused):
        check(io.BytesIO(ONE[:end]))
