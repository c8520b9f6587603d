"""Zip archives of `torch.save`, checked entry by entry; all that readers could interpret differently is refused.

A zip has two tables of contents, a local header before each entry and a central directory at the end, and readers
differ in which they trust. So both must agree, entries must lie side by side from the first byte to the directory, and
the directory must end with the file. `torch.save` never compresses, so an entry's size is its size in the file.
"""

import re
import stat
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from io import BufferedIOBase

from .limits import MAX_TENSORS, WAY_OUT, FileRefused, shown

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_DESCRIPTOR = struct.Struct("<4s3I")
_HAS_DESCRIPTOR, _IS_UTF8 = 0x8, 0x800
_MOST = 0xFFFF_FFFF
_ENTRY = re.compile(
    r"data\.pkl|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id|data/\d+"
)
_NUMBER = re.compile(rb"\d{1,4}\n?")
_FORMS = {
    "version": _NUMBER,
    ".format_version": _NUMBER,
    ".storage_alignment": _NUMBER,
    "byteorder": re.compile(rb"little|big"),
    ".data/serialization_id": re.compile(rb"\w{0,64}"),
}
_UNPICKLES = "its loader unpickles whatever is in it, restricted or not"


@dataclass(frozen=True)
class ArchiveEntry:
    """Entry of a zip archive, as its central directory describes it.

    Attributes:
        name: with its folders.
        at: offset of its bytes in the file, once it was compared with its local header.
        bytes: their number.
        crc: of these bytes, as both tables say.
        flags: bits of the zip format.
        method: of compression, 0 for none.
        packed: bytes after compression.
        mode: of the packed file, Unix's in the upper half and DOS's in the lower; 0 if not given.
    """

    name: str
    at: int
    bytes: int
    crc: int
    flags: int
    method: int
    packed: int
    mode: int


def read_archive(file: BufferedIOBase, size: int) -> dict[str, ArchiveEntry]:
    """Returns entries of a `torch.save` archive, by their names without the common folder.

    Args:
        file: at any position.
        size: bytes of the file.

    Raises:
        FileRefused: names the broken rule, or the kind of another archive.
    """
    directory, length, count = _end(file, size)
    entries = _central(file, directory, length, count)
    names = [entry.name for entry in entries]
    _refuse_names(names)
    _refuse_other_archives(names)
    folder = names[0].partition("/")[0] + "/"
    for entry in entries:
        if not entry.name.startswith(folder) or not _ENTRY.fullmatch(entry.name.removeprefix(folder)):
            raise FileRefused(f"its entry {shown(entry.name)} is none that torch.save writes; {WAY_OUT}")
        _refuse_entry(entry)
    named_entries = {entry.name.removeprefix(folder): entry for entry in _local(file, entries, directory)}
    if "data.pkl" not in named_entries or "version" not in named_entries:
        raise FileRefused("it lacks data.pkl or version, which torch.save writes into every archive")
    for entry in named_entries.values():
        _refuse_damage(file, entry)
    for name, form in _FORMS.items():
        if name in named_entries and not form.fullmatch(content(file, named_entries[name], at_most=64)):
            raise FileRefused(f"its entry {name} holds something else than torch.save writes there")
    if "byteorder" in named_entries and content(file, named_entries["byteorder"], at_most=16) != b"little":
        raise FileRefused(f"its numbers are big-endian, and little-endian ones alone are read; {WAY_OUT}")
    return named_entries


def content(file: BufferedIOBase, entry: ArchiveEntry, *, at_most: int) -> bytes:
    """Returns the bytes of an entry.

    Raises:
        FileRefused: more than `at_most` bytes.
    """
    if entry.bytes > at_most:
        raise FileRefused(f"its entry {shown(entry.name)} may have at most {at_most} bytes, got {entry.bytes}")
    file.seek(entry.at)
    return file.read(entry.bytes)


def _end(file: BufferedIOBase, size: int) -> tuple[int, int, int]:
    """Returns the central directory's offset, its bytes, and its number of entries."""
    file.seek(max(0, size - _END.size))
    tail = file.read(_END.size)
    if len(tail) < _END.size or not tail.startswith(b"PK\x05\x06"):
        raise FileRefused(
            "its archive must end with the end of its directory: it was cut short, or something is behind it"
        )
    _, disk, first_disk, entries_on_disk, count, length, directory, comment = _END.unpack(tail)
    if disk or first_disk or entries_on_disk != count or comment:
        raise FileRefused("its archive must be one file without a comment")
    if count == 0xFFFF or _MOST in (length, directory):
        raise FileRefused(f"its archive may have at most 4 GiB and 65534 entries; {WAY_OUT}")
    end = size - _END.size
    # PyTorch writes the directory's end in both formats, whatever the size.
    file.seek(max(0, end - _LOCATOR.size))
    locator = file.read(_LOCATOR.size)
    if end >= _LOCATOR.size + _END64.size and locator.startswith(b"PK\x06\x07"):
        end -= _LOCATOR.size + _END64.size
        file.seek(end)
        wide = _END64.unpack(file.read(_END64.size))
        same = (b"PK\x06\x06", _END64.size - 12, 0, 0, count, count, length, directory)
        if (*wide[:2], *wide[4:]) != same or _LOCATOR.unpack(locator)[1:] != (0, end, 1):
            raise FileRefused("the two ends of its directory must say the same")
    if count > MAX_TENSORS + 16:
        raise FileRefused(f"it may hold at most {MAX_TENSORS} tensors, got {count} entries")
    if not count:
        raise FileRefused("its archive is empty")
    if directory + length != end:
        raise FileRefused(
            f"its directory must end at {end}, got {directory + length}: something lies between or before"
        )
    return directory, length, count


def _central(file: BufferedIOBase, directory: int, length: int, count: int) -> list[ArchiveEntry]:
    if length > count * 2000:
        raise FileRefused(f"its directory of {count} entries may have at most {count * 2000} bytes, got {length}")
    file.seek(directory)
    table, at, entries = file.read(length), 0, []
    for _ in range(count):
        if at + _CENTRAL.size > length:
            raise FileRefused("its directory was cut short")
        fields = _CENTRAL.unpack_from(table, at)
        magic, _, _, flags, method, _, _, crc, packed, plain, name, extra, comment, disk, _, mode, offset = fields
        if magic != b"PK\x01\x02" or disk or extra or comment:
            raise FileRefused("its directory has a field that torch.save never writes")
        at += _CENTRAL.size
        entries.append(ArchiveEntry(_text(table[at : at + name]), offset, plain, crc, flags, method, packed, mode))
        at += name
    if at != length:
        raise FileRefused(f"its directory of {count} entries must have {length} bytes, got {at}")
    return entries


def _text(name: bytes) -> str:
    if not name.isascii() or not name.decode("ascii").isprintable() or not 0 < len(name) <= 512:
        raise FileRefused(f"names in its archive must be 1 to 512 printable ASCII characters, got {shown(name)}")
    return name.decode("ascii")


def _refuse_names(names: Iterable[str]) -> None:
    """Refuses names that lead out of the folder, and pairs that a file system could take for the same."""
    names_so_far = set()
    for name in names:
        if name.startswith("/") or "\\" in name or ":" in name or {"", ".", ".."} & set(name.split("/")):
            raise FileRefused(f"its entry {shown(name)} leads out of the archive")
        if name.lower() in names_so_far:
            raise FileRefused(f"its archive has two entries {shown(name)}")
        names_so_far.add(name.lower())


def _refuse_other_archives(names: Iterable[str]) -> None:
    """Refuses archives of other writers, by entries that only these have."""
    for name in names:
        last, folders = name.rpartition("/")[2], name.split("/")[:-1]
        if last in ("archive_format", "serialized_exported_program.json") or "models" in folders[1:2]:
            raise FileRefused(f"it is a program of torch.export (.pt2), and {_UNPICKLES}; {WAY_OUT}")
        if "code" in folders[1:2] or last == "constants.pkl":
            raise FileRefused(f"it is a TorchScript archive, a program, and {_UNPICKLES}; {WAY_OUT}")
        if last.endswith(".npy"):
            raise FileRefused(f"it is an archive of NumPy arrays (.npz), as data come in; {WAY_OUT}")
        if last in ("AndroidManifest.xml", "[Content_Types].xml", "config.json", "model.weights.h5"):
            raise FileRefused(f"it is an archive of another program, with {shown(name)}; {WAY_OUT}")


def _refuse_entry(entry: ArchiveEntry) -> None:
    # PyTorch's reader trusts DOS's mark of a folder, and returns uninitialised memory for such an entry.
    if entry.mode & 0xFFFF:
        raise FileRefused(f"its entry {shown(entry.name)} is marked as a folder or hidden, which torch.save never does")
    kind = stat.S_IFMT(entry.mode >> 16)
    if kind not in (0, stat.S_IFREG):
        type_words = "a link" if kind == stat.S_IFLNK else "no regular file"
        raise FileRefused(f"its entry {shown(entry.name)} is {type_words}")
    if entry.method or entry.packed != entry.bytes:
        raise FileRefused(
            f"its entry {shown(entry.name)} is compressed from {entry.bytes} bytes to {entry.packed}, which torch.save "
            f"never does; {WAY_OUT}"
        )
    if entry.flags & ~(_HAS_DESCRIPTOR | _IS_UTF8):
        raise FileRefused(f"its entry {shown(entry.name)} is encrypted or patched")


def _local(file: BufferedIOBase, entries: list[ArchiveEntry], directory: int) -> Iterable[ArchiveEntry]:
    """Yields entries in the order of the file, with their offsets; they lie side by side, up to the directory."""
    reached = 0
    for entry in sorted(entries, key=lambda entry: entry.at):
        if entry.at != reached:
            how = "overlaps the entry before it" if entry.at < reached else "leaves a gap before it"
            raise FileRefused(f"its entry {shown(entry.name)} {how}, at {entry.at} instead of {reached}")
        file.seek(entry.at)
        header = file.read(_LOCAL.size)
        if len(header) < _LOCAL.size:
            raise FileRefused(f"its entry {shown(entry.name)} was cut short")
        magic, _, flags, method, _, _, crc, packed, plain, name, extra = _LOCAL.unpack(header)
        inside = file.read(name).decode("ascii", "replace")
        padding = file.read(extra)
        sizes = (entry.crc, entry.packed, entry.bytes)
        later = flags & _HAS_DESCRIPTOR and (crc, packed, plain) == (0, 0, 0)
        same = (inside, flags, method) == (entry.name, entry.flags, entry.method)
        if magic != b"PK\x03\x04" or not same or ((crc, packed, plain) != sizes and not later):
            raise FileRefused(
                f"its entry {shown(entry.name)} has another name or size in its own header, {shown(inside)}"
            )
        # PyTorch pads with Z to align the bytes of a tensor.
        if padding and (
            padding[:2] != b"FB" or int.from_bytes(padding[2:4], "little") != extra - 4 or padding[4:].strip(b"Z")
        ):
            raise FileRefused(f"its entry {shown(entry.name)} has a field in its header that torch.save never writes")
        at = entry.at + _LOCAL.size + name + extra
        reached = at + entry.bytes
        if flags & _HAS_DESCRIPTOR:
            file.seek(reached)
            if file.read(_DESCRIPTOR.size) != _DESCRIPTOR.pack(b"PK\x07\x08", *sizes):
                raise FileRefused(f"its entry {shown(entry.name)} has another size behind it than in the directory")
            reached += _DESCRIPTOR.size
        yield replace(entry, at=at)
    if reached != directory:
        raise FileRefused(f"its directory must begin at {reached}, behind its last entry, got {directory}")


def _refuse_damage(file: BufferedIOBase, entry: ArchiveEntry) -> None:
    file.seek(entry.at)
    crc, remaining = 0, entry.bytes
    while remaining and (block := file.read(min(remaining, 1 << 20))):
        crc, remaining = zlib.crc32(block, crc), remaining - len(block)
    if remaining or crc != entry.crc:
        raise FileRefused(f"the checksum of its entry {shown(entry.name)} must be {entry.crc:08x}, got {crc:08x}")
