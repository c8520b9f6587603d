"""Files of a site, of which a list lies among them, so that a rebuild removes the pages that nothing needs any more.

Nothing is removed or replaced that is not on that list.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ..records.files import read_bytes, refuse_links, write_bytes
from ..records.validation import RecordError

try:
    import fcntl
except ImportError:  # Windows has no such lock: concurrent builds into one folder are not prevented
    fcntl = None

LIST = "site-files.json"
"""Name of the list, at the root of the site."""


def write_site(files: Mapping[str, bytes], out: Path) -> None:
    """Writes the files of a site, and removes those of its last build that it has no more.

    Args:
        files: path below the root -> content; the last is written last.
        out: root of the site, an absent or empty folder, or one of a former build.

    Raises:
        RecordError: `out` is something else, a link is in the way, or a file that no build wrote.
        WriteError: a file cannot be written.
    """
    _written(out)
    refuse_links(out)
    with _alone(out):
        _write(files, out)


def _write(files: Mapping[str, bytes], out: Path) -> None:
    before = _written(out)
    folders = {out / folder for name in {*files, *before} for folder in list(Path(name).parents)[:-1]}
    refuse_links(out, *folders)
    for name in files:
        if name not in before and (out / name).exists():
            raise RecordError(f"out must hold nothing but a site, and {name} is of no build: move it, or name another")
    # Both, so that after an interruption the list has every file that may have been written.
    _list({*files, *before}, out)
    for name, content in files.items():
        path = out / name
        # An equal file is left as it is: tools that publish a site look at times of modification.
        if path.is_symlink() or not path.is_file() or path.read_bytes() != content:
            write_bytes(path, content)
    for name in sorted(before - files.keys()):
        (out / name).unlink(missing_ok=True)
        for folder in list(Path(name).parents)[:-1]:
            with suppress(OSError):  # as long as it holds anything
                (out / folder).rmdir()
    _list(set(files), out)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Waits until no other build writes into a folder: the pages and the list of two would be mixed."""
    with suppress(OSError):  # the first file that cannot be written has the sentence
        out.mkdir(parents=True, exist_ok=True)
    if fcntl is None or not out.is_dir():
        yield
        return
    handle = os.open(out, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def refuse_occupied(out: Path) -> None:
    """Refuses a folder that holds anything but a site, before its pages are made.

    Raises:
        RecordError: as `write_site`.
    """
    _written(out)


def _written(out: Path) -> set[str]:
    """Files of the last build; empty for an absent or empty folder."""
    if out.exists() and not out.is_dir():
        raise RecordError(f"out must be a folder, and {out} is a file; name another place")
    if not out.exists() or not any(out.iterdir()):
        return set()
    if not (out / LIST).is_file():
        raise RecordError(f"out must be an empty folder or a site, and {out} has files but no {LIST}; name another")
    try:
        names = json.loads(read_bytes(out / LIST, "list of files"))["files"]
        # A list from elsewhere must not lead the removal out of the folder.
        if not all(re.fullmatch(r"(?:[\w-][\w.-]*/)*[\w-][\w.-]*", name) for name in names):
            raise ValueError("a name in it leads elsewhere")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordError(f"{out / LIST} is no list of a site's files ({error}); delete the folder") from None
    return set(names)


def _list(names: set[str], out: Path) -> None:
    content = json.dumps({"files": sorted(names)}, indent=1) + "\n"
    write_bytes(out / LIST, content.encode())
