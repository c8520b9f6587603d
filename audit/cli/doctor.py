"""`leakbench doctor`: this machine's device, versions, data sets, extras and optional weights; downloads nothing."""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path
from typing import Any

from ..versions import CORE, EXTRAS, installed, verdict, version
from .options import OK, Json, print_json

_SUMS = {
    True: "an example's last digits are the same without the others of its batch, in the products that were tried",
    False: "an example's last digits depend on the others of its batch (docs/limits.md); try OMP_NUM_THREADS=1",
}


def examine() -> dict[str, Any]:
    """Collects the output of `leakbench doctor` as plain data."""
    import torch

    from leakbench.defenses.core import sums_are_alike

    from ..catalog import methods as catalog
    from ..catalog.listing import describe
    from ..scoring.perceptual import LPIPS_WEIGHTS

    cuda = torch.cuda.is_available()
    data = os.environ.get("LEAKBENCH_DATA")
    weights = os.environ.get(LPIPS_WEIGHTS)
    return {
        "device": torch.cuda.get_device_name(0) if cuda else platform.processor() or platform.machine(),
        "auto": "cuda" if cuda else "cpu",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "sums_alike": sums_are_alike(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("leakbench", *CORE)},
        "tested": verdict(installed()),
        # By module and by metadata: either may remain without the other.
        "extras": {
            extra: {name: version(name) if importlib.util.find_spec(module) else None for name, module in parts.items()}
            for extra, parts in EXTRAS.items()
        },
        "data": {name: describe("data", name) for name in catalog.names("data")},
        "data_folder": {
            "variable": "LEAKBENCH_DATA",
            "value": data,
            "there": bool(data) and Path(data).is_dir(),
        },
        "lpips_weights": {
            "variable": LPIPS_WEIGHTS,
            "value": weights,
            "there": bool(weights) and Path(weights).is_file(),
        },
    }


def words(findings: dict[str, Any]) -> str:
    """Formats the findings as text."""
    lines = [
        f"device     {findings['auto']}: {findings['device']}, "
        f"{findings['cores']} cores, {findings['threads']} threads",
        f"sums       {_SUMS[findings['sums_alike']]}",
        f"python     {findings['python']}",
    ]
    lines += [f"{name:<14} {number or 'not installed'}" for name, number in findings["versions"].items()]
    lines.append(f"versions   {findings['tested']}")
    for extra, parts in findings["extras"].items():
        installed = ", ".join(f"{name} {number}" for name, number in parts.items() if number)
        missing = ", ".join(name for name, number in parts.items() if not number)
        lines.append(f"extra {extra:<8} {installed or 'nothing'}" + (f"; without {missing}" if missing else ""))
        if missing:
            lines.append(f"{'':15}pip install 'leakbench[{extra}]'")
    lines += [f"data  {name:<8} {about}" for name, about in findings["data"].items()]
    for key in ("data_folder", "lpips_weights"):
        where = findings[key]
        state = (
            "not set" if not where["value"] else where["value"] if where["there"] else f"{where['value']} is not there"
        )
        lines.append(f"{where['variable']}: {state}")
    return "\n".join(lines)


def doctor(as_json: Json = False) -> int:
    """Shows the device, versions, data sets, extras and optional weights of this machine."""
    report = examine()
    if as_json:
        print_json(report)
    else:
        print(words(report))
    return OK
