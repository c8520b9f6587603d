"""Standalone program that converts the expected tensors of a `torch.save` archive to safetensors.

`restricted` starts it, with nothing of this project imported, and the caller checks its output again. Limits on time
and files are set before PyTorch is imported. Before the archive is opened, memory is limited to the size of its
tensors, and access to the network and new processes are disabled, as far as the system lets a user do so.
"""

import ctypes
import json
import resource
import sys
from contextlib import suppress
from pathlib import Path

_NEW_USER, _NEW_NETWORK, _NO_NEW_PRIVILEGES = 0x1000_0000, 0x4000_0000, 38


def main(order: Path) -> None:
    """Converts an archive as a JSON file specifies.

    Args:
        order: names source, target, path, tensors [name, shape] in their order, limits by name, bytes that loading may
            take (`room`), and folders that packages may be imported from.
    """
    request = json.loads(order.read_text(encoding="utf-8"))
    for limit, most in request["limits"].items():
        _limit(getattr(resource, limit), most)
    _leave_network()
    sys.path += [folder for folder in request["folders"] if folder not in sys.path]

    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    _limit_memory(request["room"])
    # After the imports, since libraries start threads then. (The system does not hold root to this limit.)
    _limit(resource.RLIMIT_NPROC, 0)
    checkpoint = torch.load(request["source"], map_location="cpu", weights_only=True)
    for name in request["path"]:
        checkpoint = checkpoint[name]
    tensors = {}
    for name, shape in request["tensors"]:
        tensor = checkpoint[name].detach()
        if list(tensor.shape) != shape:
            sys.exit(f"{name!r} has another shape than its pickle says")
        # Clones separate views and shared storages: in safetensors each tensor has its own bytes.
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    save_file(tensors, request["target"])


def _limit(limit: int, most: int) -> None:
    _, hard = resource.getrlimit(limit)
    # A lower hard limit cannot be raised, and stays.
    lowered = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(limit, (lowered, lowered))


def _leave_network() -> None:
    """Enters an empty network namespace; if the system forbids that, only the limits remain."""
    with suppress(OSError, AttributeError):
        system = ctypes.CDLL(None)
        system.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        if system.unshare(_NEW_USER | _NEW_NETWORK):
            system.unshare(_NEW_NETWORK)


def _limit_memory(room: int) -> None:
    """Limits memory to the current mapping plus `room`; if the system does not report it, the first limit stays."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + room
        _limit(resource.RLIMIT_AS, most)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
