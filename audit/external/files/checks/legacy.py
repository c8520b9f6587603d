"""Files of `torch.save` before PyTorch 1.6: five pickles in a row, and behind them the numbers of the tensors.

The first two identify the format and are always the same bytes. Then come a dictionary about the machine, the saved
object, and the keys of its storages; last, for each key, the number of entries of its storage, and these entries. A
loader allocates storages as large as the pickle says before it reads that number, and leaves those without a key
uninitialised: so all of them must agree, to the last byte of the file.
"""

import io
import pickletools
from io import BufferedIOBase
from typing import Any

from .limits import WAY_OUT, FileRefused, shown
from .pickled import MAX_INSTRUCTIONS, MAX_PICKLE_BYTES, legacy_tensors_in, tensors_in

START = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." + b"\x80\x02M\xe9\x03."
"""Pickles of the magic number and of the format's version, 1001."""
_MACHINE = {"protocol_version": 1001, "little_endian": True}


def read_legacy(file: BufferedIOBase, size: int) -> Any:
    """Returns the saved object of such a file, with a `StoredTensor` in place of each tensor.

    Args:
        file: at any position.
        size: bytes of the file.

    Raises:
        FileRefused: names the broken rule.
    """
    file.seek(0)
    # Enough for all pickles; the numbers behind it are not read.
    head = file.read(MAX_PICKLE_BYTES)
    if not head.startswith(START):
        raise FileRefused(f"it must begin as what torch.save wrote before PyTorch 1.6, got {shown(head[: len(START)])}")
    machine_end, saved_end, keys_end = _ends(head)
    machine = tensors_in(head[len(START) : machine_end], {}, size)
    if not isinstance(machine, dict) or any(machine.get(name) != value for name, value in _MACHINE.items()):
        raise FileRefused(f"its numbers must be little-endian, of a format that PyTorch wrote; {WAY_OUT}")
    saved, storages = legacy_tensors_in(head[machine_end:saved_end], size)
    keys = tensors_in(head[saved_end:keys_end], {}, size)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) < len(keys):
        raise FileRefused("the keys of its storages must be a list of different texts")
    if set(keys) != storages.keys():
        odd = min(set(keys) ^ storages.keys())
        raise FileRefused(f"its storage {shown(odd)} must be both in its pickle and among its keys, got one of them")
    place = keys_end
    for key in keys:
        file.seek(place)
        entries = int.from_bytes(file.read(8), "little", signed=True)
        if entries != storages[key].shape[0]:
            raise FileRefused(
                f"its storage {shown(key)} must have {shown(storages[key].shape[0])} entries as its pickle says, got "
                f"{shown(entries)}"
            )
        place += 8 + storages[key].bytes
        if place > size:
            raise FileRefused(f"its storage {shown(key)} ends behind the file, which was cut short")
    if place != size:
        raise FileRefused(f"{size - place} bytes behind its last storage belong to none")
    return saved


def _ends(head: bytes) -> list[int]:
    """Returns the offsets behind the pickles of the machine, the object and the keys."""
    file, ends, count = io.BytesIO(head), [], 0
    file.seek(len(START))
    try:
        while len(ends) < 3:
            for _ in pickletools.genops(file):
                count += 1
                if count > MAX_INSTRUCTIONS:
                    raise FileRefused(f"its pickles may have at most {MAX_INSTRUCTIONS} instructions, got more")
            ends.append(file.tell())
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        if isinstance(error, FileRefused):
            raise
        raise FileRefused(f"its pickles are broken, or go on behind {MAX_PICKLE_BYTES} bytes") from None
    return ends
