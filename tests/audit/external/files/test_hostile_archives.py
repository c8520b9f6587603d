"""Hostile and broken archives of `torch.save`: each is refused before a loader sees it, and nothing in it runs."""

import io
import os
import pickle
import shlex
import stat
import struct
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from leakbench.audit.external.files import FileRefused, read, read_tensors, restricted
from leakbench.audit.external.files.checks import StoredTensor, check

from ....parameters import subtests

TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
HOOKS = b"ccollections\nOrderedDict\n)R"


class Gadget:
    """What a pickle runs when it is read."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def touching(sign):
    return Gadget(os.system, f"touch {shlex.quote(str(sign))}")


def text(value):
    content = value.encode()
    return b"X" + struct.pack("<I", len(content)) + content


def number(value):
    content = pickle.encode_long(value)
    return b"\x8a" + bytes([len(content)]) + content


def storage(key="0", kind="FloatStorage", device="cpu", entries=2):
    return b"(" + text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text(device) + number(entries) + b"tQ"


def tensor(offset=0, shape=(2,), stride=(1,), of=None, hooks=HOOKS):
    numbers = b"".join(b"(" + b"".join(map(number, values)) + b"t" for values in (shape, stride))
    return TENSOR + b"(" + (of or storage()) + number(offset) + numbers + b"\x89" + hooks + b"tR"


def program(*body):
    return b"\x80\x02" + b"".join(body) + b"."


def state(*pairs):
    return program(b"}(", *(text(name) + value for name, value in pairs), b"u")


HONEST = state(("a", tensor()))


def archive(
    content=HONEST, *, data=None, more=(), change=None, order=b"little", comment=b"", method=zipfile.ZIP_STORED
):
    """An archive as torch.save writes it; `more` are further entries, `change` edits each of its descriptions."""
    file = io.BytesIO()
    entries = [("data.pkl", content), ("byteorder", order), ("version", b"3\n")]
    entries += [(f"data/{key}", value) for key, value in ({"0": bytes(8)} if data is None else data).items()]
    with zipfile.ZipFile(file, "w", method) as target:
        target.comment = comment
        for name, value in [*((f"archive/{name}", value) for name, value in entries), *more]:
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            if change is not None:
                change(info)
            target.writestr(info, value)
    return file.getvalue()


def patched(old, new):
    """An archive with some bytes exchanged, where they come last."""
    whole, at = archive(), archive().rindex(old)
    return whole[:at] + new + whole[at + len(new) :]


def link(info):
    if info.filename.endswith("version"):
        info.external_attr = (stat.S_IFLNK | 0o777) << 16


def folder(info):
    """As DOS marks a folder: PyTorch's reader would not read it, and take for its content what the memory holds."""
    if info.filename.endswith("data.pkl"):
        info.external_attr = 0x10


def padded(info):
    info.extra = struct.pack("<2sH", b"XX", 4) + b"evil"


def patched_in_front(old, new):
    """An archive with some bytes exchanged, where they come first: in the header of an entry, not in the directory."""
    return archive().replace(old, new, 1)


def twice(content):
    """The directory's last entry is made to begin where its first one does."""
    at = content.rindex(b"PK\x01\x02")
    return content[: at + 42] + struct.pack("<I", 0) + content[at + 46 :]


def gap():
    """Bytes between the last entry and the directory, of which the end knows."""
    whole = archive()
    at, end = whole.index(b"PK\x01\x02"), whole.rindex(b"PK\x05\x06")
    moved = struct.pack("<I", at + 4)
    return whole[:at] + b"evil" + whole[at : end + 16] + moved + whole[end + 20 :]


def written_by_torch(saved=None):
    file = io.BytesIO()
    torch.save({"a": torch.ones(2)} if saved is None else saved, file)
    return file.getvalue()


def without_crc():
    whole = written_by_torch()
    at = whole.index(struct.pack("<f", 1.0))
    return whole[:at] + b"\x01" + whole[at + 1 :]


def nested_tuples():
    """A tuple of itself a hundred levels deep, two to the hundredth entries, as a key of a dictionary."""
    return program(b"})", b"q\x01h\x01\x86" * 100, b"K\x01s")


def pt2(sign):
    entries = [("data/sample_inputs/model.pt", pickle.dumps(touching(sign), 2)), ("archive_format", b"pt2")]
    return archive(more=[(f"archive/{name}", value) for name, value in entries])


def old_pt2(sign):
    return archive(more=[("archive/serialized_exported_program.json", b"{}")], content=pickle.dumps(touching(sign), 2))


def torchscript(sign):
    return archive(more=[("archive/code/__torch__/m.py", b"def f(): ..."), ("archive/constants.pkl", b"\x80\x02).")])


def inside(function, *, protocol=2):
    """A state dict with a gadget for one of its entries."""
    return lambda sign: archive(pickle.dumps({"a": function(sign)}, protocol))


def bare(function, *, protocol=2):
    return lambda sign: pickle.dumps(function(sign), protocol)


def fixed(content):
    return lambda sign: content


def opens(sign):
    return Gadget(open, str(sign), "w")


def evaluates(sign):
    return Gadget(eval, f"__import__('pathlib').Path({str(sign)!r}).touch()")


def nested(sign):
    return Gadget(pickle.loads, pickle.dumps(touching(sign), 4))


def bytes_of_torch(sign):
    return Gadget(torch.storage._load_from_bytes, pickle.dumps(touching(sign), 2))


def attributes(sign):
    return Gadget(getattr, os.system, "__call__")


def system(sign):
    return text(f"touch {sign}")


BARE_AND_NESTED = {
    "bare_reduce": (bare(touching), "a bare pickle"),
    "bare_protocol_0": (bare(touching, protocol=0), "a bare pickle"),
    "bare_protocol_1": (bare(touching, protocol=1), "a bare pickle"),
    "bare_protocol_5": (bare(touching, protocol=5), "a bare pickle"),
    "legacy_torch": (
        lambda sign: bytes.fromhex("80028a0a6cfc9c46f9206aa850192e") + pickle.dumps(touching(sign), 2),
        "must begin as what torch.save wrote before PyTorch 1.6",
    ),
    "payload_then_archive": (lambda sign: pickle.dumps(touching(sign), 2) + archive(), "a bare pickle"),
    "script_then_archive": (lambda sign: f"#!/bin/sh\ntouch {sign}\n".encode() + archive(), "of no file of weights"),
    "system": (inside(touching), "names 'posix.system'"),
    # "io" up to Python 3.11, "_io" from 3.12 on.
    "open": (inside(opens), f"names '{open.__module__}.open'"),
    "eval": (inside(evaluates), "names '__builtin__.eval'"),
    "getattr": (inside(attributes), "names '__builtin__.getattr'"),
    "pickle_in_a_pickle": (inside(nested), "names 'pickle.loads'"),
    "torch_loads_bytes": (inside(bytes_of_torch), "names 'torch.storage._load_from_bytes'"),
    "protocol_0": (inside(touching, protocol=0), "must be of protocol 2"),
    "protocol_4": (inside(touching, protocol=4), "must be of protocol 2"),
    "frame": (inside(touching, protocol=5), "must be of protocol 2"),
    "numpy_scalar": (
        fixed(archive(program(b"}", text("a"), b"cnumpy.core.multiarray\nscalar\n)Rs"))),
        "names 'numpy.core.multiarray.scalar'",
    ),
    "subclass_of_tensor": (
        fixed(archive(program(b"}", text("a"), b"ctorch._utils\n_rebuild_wrapper_subclass\n)Rs"))),
        "_rebuild_wrapper_subclass'",
    ),
    "global_in_two_lines": (fixed(archive(program(b"ccollections OrderedDict\nos\n)R"))), "names 'collections.Ord"),
    "stack_global": (
        lambda sign: archive(program(text("posix"), text("system"), b"\x93(", system(sign), b"tR")),
        "instruction STACK_GLOBAL",
    ),
    "stack_global_from_memo": (
        lambda sign: archive(
            program(text("posix"), b"q\x000", text("system"), b"q\x010h\x00h\x01\x93(", system(sign), b"tR")
        ),
        "instruction",
    ),
    "inst": (lambda sign: archive(program(b"(", system(sign), b"iposix\nsystem\n")), "instruction INST"),
    "obj": (lambda sign: archive(program(b"(cposix\nsystem\n", system(sign), b"o")), "names 'posix.system'"),
    "newobj": (fixed(archive(program(b"ccollections\nOrderedDict\n)\x81"))), "instruction NEWOBJ"),
    "extension": (fixed(archive(program(b"\x82\x01)R"))), "instruction EXT1"),
    "persistent_id_of_text": (fixed(archive(program(b"Pstorage\n"))), "instruction PERSID"),
    "persistent_id_of_a_module": (
        fixed(archive(program(b"(", text("module"), b"ctorch\nFloatStorage\n", text("m.py"), text("x"), b"tQ"))),
        "where a storage must be",
    ),
    "next_buffer": (fixed(archive(program(b"\x97"))), "instruction NEXT_BUFFER"),
    "text_as_code": (fixed(archive(program(b"S'a'\n"))), "instruction STRING"),
}
PROGRAMS = {
    "build_on_a_dict": (program(b"}}", text("_metadata"), b"}sb"), "sets attributes of a dict"),
    "build_on_a_tensor": (program(tensor(), b"}", text("_metadata"), b"}sb"), "sets attributes of a tensor"),
    "build_on_a_function": (program(b"ctorch._utils\n_rebuild_tensor_v2\n}b"), "sets attributes of 'torch._utils"),
    "build_of_a_class": (program(HOOKS, b"}", text("__class__"), b"}sb"), "sets attributes of an OrderedDict"),
    "call_of_a_tensor": (program(tensor(), b")R"), "calls a tensor"),
    "call_of_text": (program(text("os.system"), b")R"), "calls 'os.system'"),
    "call_without_a_tuple": (program(b"ccollections\nOrderedDict\n]R"), "with a list"),
    "call_of_a_storage_type": (program(b"ctorch\nFloatStorage\n(K\x05tR"), "calls 'torch.FloatStorage'"),
    "ordered_of_texts": (
        program(b"ccollections\nOrderedDict\n(](", text("ab"), b"etR"),
        "other arguments",
    ),
    "ordered_of_threes": (program(b"ccollections\nOrderedDict\n(](](K\x01K\x02K\x03eetR"), "other arguments"),
    "ordered_of_pairs_with_a_list_for_a_key": (
        program(b"ccollections\nOrderedDict\n(](](]K\x02eetR"),
        "must be text or numbers",
    ),
    "ordered_of_pairs_with_a_key_twice": (
        program(b"ccollections\nOrderedDict\n(](](K\x01K\x02e](K\x01K\x02eetR"),
        "two entries 1 in one dictionary",
    ),
    "counts_of_the_same_again_and_again": (
        program(
            *(b"ccollections\nCounter\nq\x01", b"}(", *(number(n) + b"N" for n in range(50_000)), b"uq\x02"),
            b"h\x01h\x02\x85R" * 40_000,
        ),
        "copy more than 300000 entries",
    ),
    "pairs_of_the_same_again_and_again": (
        program(
            *(
                b"ccollections\nOrderedDict\nq\x01",
                b"](",
                *(b"](" + number(n) + b"Ne" for n in range(40_000)),
                b"eq\x02",
            ),
            b"h\x01h\x02\x85R" * 10_000,
        ),
        "copy more than 300000 entries",
    ),
    "bytes_of_the_same_again_and_again": (
        program(
            b"c_codecs\nencode\nq\x01",
            text("a" * (4 << 20)),
            b"q\x02h\x01h\x02",
            text("latin1"),
            b"q\x03\x86R",
            b"h\x01h\x02h\x03\x86R" * 50_000,
        ),
        "copy more than 300000 entries",
    ),
    "text_of_python_2_beyond_ascii": (program(b"U\x02\xc3\xa4"), "must be ASCII"),
    "other_codec": (program(b"c_codecs\nencode\n(", text("a"), text("zlib"), b"tR"), "other arguments"),
    "hooks": (state(("a", tensor(hooks=HOOKS + b"(" + text("x") + b"K\x01u"))), "other arguments"),
    "metadata_of_a_tensor": (state(("a", tensor(hooks=HOOKS + b"}" + text("x") + b"K\x01s"))), "other arguments"),
    "append_to_a_dict": (program(b"}K\x01a"), "APPEND on a dict instead of a list"),
    "item_of_a_tensor": (program(tensor(), b"K\x01K\x01s"), "SETITEM on a tensor instead of a dict"),
    "item_of_a_list": (program(b"](K\x01K\x01u"), "SETITEMS on a list instead of a dict"),
    "key_without_value": (program(b"}(K\x01u"), "a key and no value"),
    "key_of_a_tuple": (
        nested_tuples(),
        "keys of its dictionaries must be text or numbers from 0 to 2**48, got a tuple",
    ),
    "keys_of_one_hash": (
        program(b"}(", b"".join(number(key * ((1 << 61) - 1)) + b"N" for key in range(1, 100_000)), b"u"),
        "text or numbers from 0 to 2**48",
    ),
    "keys_of_one_hash_in_floats": (
        program(b"}(", b"".join(b"G" + struct.pack(">d", 2.0 ** (61 * n)) + b"N" for n in range(10)), b"u"),
        "text or numbers from 0 to 2**48",
    ),
    "marks_without_end": (program(b"(" * 200_000), "at most 1000 deep"),
    "tuples_without_end": (program(b")", b"\x85" * 290_000), "belongs to no tensor"),
    "key_twice": (state(("a", tensor()), ("a", tensor())), "two entries 'a'"),
    "garbage_behind": (HONEST + b"garbage", "must end with its file, got 7 bytes"),
    "second_pickle_behind": (HONEST + pickle.dumps(touching("/dev/null"), 2), "must end with its file"),
    "protocol_twice": (program(b"\x80\x02", tensor()), "say so once"),
    "no_end": (HONEST[:-1], "is broken at byte"),
    "no_stack": (program(b"\x86"), "is broken at byte"),
    "no_mark": (program(b"t"), "is broken at byte"),
    "no_memo": (program(b"h\x07"), "is broken at byte 2, BINGET"),
    "no_instruction": (program(b"\xff"), "is broken at byte"),
    "mark_left": (program(b"(", tensor()), "must leave one object"),
    "text_longer_than_the_file": (program(b"X\xff\xff\xff\x7fa"), "is broken at byte"),
    "number_of_a_gigabyte": (program(b"\x8b\xff\xff\xff\x3f1"), "is broken at byte"),
    "number_of_long_4": (program(b"\x8b\x01\x00\x00\x001"), "instruction LONG4"),
    "storage_larger_than_its_entry": (state(("a", tensor(of=storage(entries=4)))), "must have 16 bytes, got 8"),
    "storage_smaller_than_its_entry": (state(("a", tensor(of=storage(entries=1)))), "must have 4 bytes, got 8"),
    "storage_of_no_entry": (state(("a", tensor(of=storage("7")))), "must have 8 bytes, got none"),
    "storage_outside": (state(("a", tensor(of=storage("../../0")))), "must have 8 bytes, got none"),
    "storage_negative": (state(("a", tensor(of=storage(entries=-2)))), "must be integers from 0"),
    "storage_on_a_strange_device": (state(("a", tensor(of=storage(device="cpu; rm")))), "must be as 'cuda:0'"),
    "storage_of_two_types": (
        state(("a", tensor()), ("b", tensor(of=storage(kind="IntStorage")))),
        "storage '0' has two types",
    ),
    "quantised": (state(("a", tensor(of=storage(kind="QInt8Storage")))), "names 'torch.QInt8Storage'"),
    "offset_negative": (state(("a", tensor(offset=-1))), "must be integers from 0, got -1"),
    "offset_huge": (state(("a", tensor(offset=1 << 62))), "reaches entry 4611686018427387905 of a storage of 2"),
    "offset_of_an_empty_tensor": (state(("a", tensor(offset=3, shape=(0,)))), "begins at entry 3"),
    "stride_negative": (state(("a", tensor(stride=(-1,)))), "must be integers from 0"),
    "stride_huge": (state(("a", tensor(stride=(1 << 40,)))), "reaches entry"),
    "stride_missing": (state(("a", tensor(stride=()))), "must have a stride for each dimension"),
    "shape_huge": (state(("a", tensor(shape=(1 << 40,)))), "reaches entry"),
    "shape_negative": (state(("a", tensor(shape=(-2,)))), "must be integers from 0"),
    "expanded_to_terabytes": (state(("a", tensor(shape=(1 << 40, 2), stride=(0, 1)))), "take more than 16 times"),
    "no_tensor": (program(b"}", text("epoch"), b"K\x03s"), "belongs to no tensor"),
    "a_list_of_tensors": (program(b"]", tensor(), b"a"), "must hold a dictionary of tensors"),
    "weights_under_an_unknown_name": (
        program(b"}", text("stuff"), HONEST[2:-1], b"s"),
        "alone or under one of state_dict, model_state_dict",
    ),
    "a_million_instructions": (program(b")", b"q\x00" * 1_000_000), "at most 300000 instructions"),
    "a_million_tensors": (
        program(tensor(), b"q\x00)q\x01\x86}(", (text("a") + b"h\x00") * 1_000_000, b"u"),
        "at most 300000 instructions",
    ),
    "as_many_tensors_as_instructions_allow": (
        program(b"}(", text(""), tensor(), b"q\x00", b"".join(text(str(n)) + b"h\x00" for n in range(140_000)), b"u"),
        "at most 20000 tensors, got 140001",
    ),
    "pickle_of_20_megabytes": (program(text("a" * (20 << 20))), "at most 16777216 bytes"),
}
ARCHIVES = {
    "cut_short": (archive()[:-5], "was cut short"),
    "cut_to_its_first_bytes": (archive()[:20], "was cut short"),
    "garbage_behind": (archive() + b"garbage", "or something is behind it"),
    "comment": (archive(comment=b"evil"), "or something is behind it"),
    "empty_archive": (b"PK\x05\x06" + bytes(18), "empty or a part of one"),
    "entries_of_no_file": (b"PK\x03\x04" + bytes(60) + b"PK\x05\x06" + bytes(18), "is empty"),
    "bad_checksum": (without_crc(), "the checksum of its entry 'archive/data/0'"),
    "traversal": (archive(more=[("../../evil", b"x")]), "leads out of the archive"),
    "absolute": (archive(more=[("/etc/evil", b"x")]), "leads out of the archive"),
    "other_system's_path": (archive(more=[("archive\\evil", b"x")]), "leads out of the archive"),
    "drive": (archive(more=[("C:evil", b"x")]), "leads out of the archive"),
    "folder": (archive(more=[("archive/evil/", b"")]), "leads out of the archive"),
    "link": (archive(change=link), "'archive/version' is a link"),
    "folder_by_its_attribute": (archive(change=folder), "'archive/data.pkl' is marked as a folder"),
    "stranger": (archive(more=[("archive/evil.so", b"\x7fELF")]), "none that torch.save writes"),
    "two_folders": (archive(more=[("other/data/1", b"")]), "none that torch.save writes"),
    "name_with_escapes": (archive(more=[("archive/\x1b[2J", b"x")]), "printable ASCII"),
    "name_twice": (
        archive(data={"0": bytes(8), "1": bytes(8)}).replace(b"archive/data/1", b"archive/data/0"),
        "two entries 'archive/data/0'",
    ),
    "name_twice_but_for_case": (archive(more=[("archive/DATA.pkl", b"x")]), "two entries"),
    "compressed": (archive(method=zipfile.ZIP_DEFLATED), "is compressed from"),
    "bomb": (archive(data={"0": bytes(64 << 20)}, method=zipfile.ZIP_DEFLATED), "is compressed from"),
    "encrypted": (patched(b"\x14\x00\x00\x00\x00\x00", b"\x14\x00\x01\x00\x00\x00"), "encrypted or patched"),
    "other_name_in_its_own_header": (
        patched_in_front(b"archive/data.pkl", b"archive/evil.pkl"),
        "another name or size in its own header",
    ),
    "other_size_in_its_own_header": (
        patched_in_front(struct.pack("<II", len(HONEST), len(HONEST)), struct.pack("<II", len(HONEST), 9)),
        "another name or size in its own header",
    ),
    "two_entries_in_one_place": (twice(archive()), "overlaps the entry before it"),
    "gap_before_the_directory": (gap(), "its directory must begin at"),
    "payload_in_a_field": (archive(change=padded), "that torch.save never writes"),
    "unused_storage": (archive(data={"0": bytes(8), "1": b"payload!"}), "'data/1' belongs to no tensor"),
    "big_endian": (archive(order=b"big"), "are big-endian"),
    "payload_for_a_version": (
        archive(more=[("archive/.format_version", b"__import__('os')")]),
        "entry .format_version holds something else",
    ),
    "alignment_of_gigabytes": (
        archive(more=[("archive/.storage_alignment", b"9" * 20)]),
        "entry .storage_alignment holds something else",
    ),
    "payload_for_an_id": (
        archive(more=[("archive/.data/serialization_id", bytes(100))]),
        "serialization_id' may have at most 64 bytes",
    ),
    "no_pickle": (
        archive(data={"0": bytes(8), "9999": b""}).replace(b"archive/data.pkl", b"archive/data/123"),
        "it lacks data.pkl",
    ),
    "numpy_archive": (archive(more=[("x.npy", b"\x93NUMPY")]), "NumPy arrays"),
    "package": (archive(more=[("AndroidManifest.xml", b"")]), "an archive of another program"),
}
MADE = {
    "program_of_torch_export": (pt2, "a program of torch.export"),
    "old_program_of_torch_export": (old_pt2, "a program of torch.export"),
    "torchscript": (torchscript, "a TorchScript archive"),
}
FILES = (
    BARE_AND_NESTED
    | MADE
    | {f"pickle_{name}": (fixed(archive(content)), expected) for name, (content, expected) in PROGRAMS.items()}
    | {f"archive_{name}": (fixed(content), expected) for name, (content, expected) in ARCHIVES.items()}
)


@pytest.mark.long
@subtests("name", FILES)
def test_the_archive_is_refused_in_one_sentence_and_nothing_in_it_runs(name, tmp_path, monkeypatch):
    monkeypatch.setattr(read, "converted", lambda *_: pytest.fail("a loader was started"))
    build, expected = FILES[name]
    sign, path = tmp_path / "ran", tmp_path / "model.safetensors"
    path.write_bytes(build(sign))
    with pytest.raises(FileRefused) as caught:
        read_tensors(path, allow_pickle_tensors=True)
    sentence = str(caught.value)
    assert expected in sentence
    assert sentence.startswith(f"cannot read {path}: ")
    assert sentence.isprintable()
    assert len(sentence) < 600 + len(str(path))
    assert not sign.exists()


@pytest.mark.parametrize("name", ["bare_reduce", "bare_protocol_0"])
def test_the_gadgets_work(name, tmp_path):
    sign = tmp_path / "ran"
    pickle.loads(BARE_AND_NESTED[name][0](sign))  # noqa: S301 - what the files above do where nobody looks
    assert sign.exists()


def test_weights_of_another_device_are_no_harm():
    found = check(io.BytesIO(archive(state(("a", tensor(of=storage(device="cuda:0")))))))
    assert found.tensors == {"a": StoredTensor("F32", (2,))}


def test_a_loader_that_leaves_a_link_is_not_followed(tmp_path, monkeypatch):
    path, elsewhere, start = tmp_path / "checkpoint.pt", tmp_path / "elsewhere", restricted.subprocess.Popen
    path.write_bytes(archive())
    save_file({"a": torch.ones(2)}, elsewhere)

    def instead(command, **settings):
        code = f"import os, sys; os.symlink({str(elsewhere)!r}, 'converted')"
        return start([command[0], "-I", "-c", code], **settings)

    monkeypatch.setattr(restricted.subprocess, "Popen", instead)
    with pytest.raises(FileRefused, match="restricted loader refuses it: exit 0"):
        read_tensors(path, allow_pickle_tensors=True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # PyTorch's own, on TorchScript
def test_programs_that_torch_itself_wrote_are_refused_under_another_name(tmp_path):
    model, name = torch.nn.Linear(3, 2).eval(), "model.safetensors"
    exported, scripted = tmp_path / "exported", tmp_path / "scripted"
    for folder in (exported, scripted):
        folder.mkdir()
    with (exported / name).open("wb") as file:
        torch.export.save(torch.export.export(model, (torch.zeros(1, 3),)), file)
    torch.jit.script(model).save(scripted / name)
    for folder, what in ((exported, "a program of torch.export"), (scripted, "a TorchScript archive")):
        with pytest.raises(FileRefused, match=f"{what}.*its loader unpickles whatever is in it.*save_model"):
            read_tensors(folder / name, allow_pickle_tensors=True)


@pytest.mark.long
def test_they_are_looked_through_within_seconds_and_a_gigabyte_without_torch(tmp_path, looked_through):
    folder = tmp_path / "files"
    folder.mkdir()
    for name, (build, _) in FILES.items():
        (folder / name).write_bytes(build(tmp_path / "ran"))
    found = looked_through(folder)
    assert [name for name, (sentence, _) in found["files"].items() if sentence is None] == []
    assert max(seconds for _, seconds in found["files"].values()) < 10  # 0.9 at most here; a loader would take minutes
    assert found["resident"] < 1 << 20
    assert not {"torch", "numpy", "safetensors"} & set(found["modules"])
    assert not (tmp_path / "ran").exists()
