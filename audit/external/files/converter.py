"""A program of its own: an archive of `torch.save` in, the tensors that are expected of it out, as safetensors.

Started by `restricted`, with nothing of this project imported, and looked at again by whoever started it. Limits are
set before PyTorch is imported, and further processes are forbidden before the
archive is opened.
"""

import json
import resource
import sys
from pathlib import Path


def main(order: Path) -> None:
    """Converts as a file of JSON says: source, target, path, tensors [name, shape] in order, and limits by name."""
    wanted = json.loads(order.read_text(encoding="utf-8"))
    for limit, most in wanted["limits"].items():
        resource.setrlimit(getattr(resource, limit), (most, most))

    import torch
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    # Not before: libraries start threads when they are imported. (The system does not hold root to it.)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    found = torch.load(wanted["source"], map_location="cpu", weights_only=True)
    for name in wanted["path"]:
        found = found[name]
    tensors = {}
    for name, shape in wanted["tensors"]:
        tensor = found[name].detach()
        if list(tensor.shape) != shape:
            sys.exit(f"{name!r} has another shape than its pickle says")
        # Views and shared storages come apart: each tensor of safetensors has its own bytes.
        tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    save_file(tensors, wanted["target"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
