"""Recording of all noisy updates of a training run: two lines around an optimizer of Opacus or PyTorch.

```python
with leakbench.watch(optimizer, "transcript", model=model):   # a DPOptimizer of Opacus
    ...the loop as it is...
```

The recorded release is the optimizer's input: a PyTorch hook runs before the inner optimizer moves the parameters, when
the gradient has been clipped, summed, noised and divided. Skipped steps of Opacus's `BatchMemoryManager` do not reach
the hook; ghost clipping, clipping by layer and distributed sums are complete by then. The hook copies and draws no
random numbers, so the training stays the same bit for bit. No batch is written: a transcript contains the view of an
observer of all updates, and is as public as that.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save
from torch import Tensor, nn

from leakbench.leaderboard.records.files import write_bytes

from ..files.unwrap import without_wrappers
from .format import (
    END,
    HEADER,
    Clipping,
    KeptParameters,
    TranscriptHeader,
    TranscriptRefused,
    file_fault,
    listed,
    read_header_file,
    read_transcript,
    step_file,
)
from .watched_scales import StatedScales, scales_of

_NO_SUMS = {"FSDPOptimizerFastGradientClipping", "DistributedPerLayerOptimizer"}
"""Opacus optimizers whose gradient before the step is a shard, or whose noise has several scales."""


class Watch:
    """Transcript being written; a context manager, or ended by `close`.

    Attributes:
        folder: of the transcript.
        header: header of the transcript.
        steps: updates so far, those of earlier sessions included.
        stopped: number of the first step left out because of `max_bytes`; None if all were written.
    """

    def __init__(self, optimizer: Any, folder: Path, header: TranscriptHeader, **settings: Any) -> None:
        """Use `watch`, which checks the arguments."""
        self.folder, self.header = folder, header
        self.stopped: int | None = None
        self._scales: StatedScales = settings["scales"]
        self._parameters: list[nn.Parameter] = settings["parameters"]
        self._max_bytes: int | None = settings["max_bytes"]
        self._inner: torch.optim.Optimizer = _inner(optimizer)
        self.steps, self._session = _resumed(folder, header)
        self._opens = True
        self._bytes = sum(path.stat().st_size for path in folder.iterdir())
        self._handle: Any = self._inner.register_step_pre_hook(self._before_step)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the transcript: writes the number of steps taken, and removes the hook. A second call does nothing."""
        if self._handle is None:
            return
        self._handle.remove()
        self._scales.close()
        self._handle = None
        write_bytes(self.folder / END, f'{{"steps": {self.steps}}}\n'.encode())

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # PyTorch passes the optimizer itself among the arguments.
        if any(argument is not None and argument is not optimizer for argument in (*args, *kwargs.values())):
            raise ValueError(
                "step of a watched optimizer must be called without a closure, which computes the gradient after it "
                "was looked at; call the closure before step()"
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            raise ValueError(
                "gradients of a watched optimizer must not be scaled by a GradScaler when it steps; call "
                "scaler.unscale_(optimizer) with an optimizer that is not fused"
            )
        self._refuse_others()
        grads = [parameter.grad for parameter in self._parameters]
        if all(grad is None for grad in grads):
            return  # no parameter moves, so nothing is released
        number = self.steps
        content = b"" if self.stopped is not None else self._content(grads)
        self.steps += 1
        if self.stopped is not None:
            return
        if self._max_bytes is not None and self._bytes + len(content) > self._max_bytes:
            self.stopped = number
            warnings.warn(
                f"the transcript in {self.folder} has reached max_bytes, {self._max_bytes}: steps from {number} on are "
                "counted and not written; the training goes on",
                stacklevel=3,
            )
            return
        path = self.folder / step_file(number)
        if path.exists():
            raise TranscriptRefused(
                f"a step must be written once, and {path} is there: another process watches into this folder; watch in "
                "the first one alone"
            )
        write_bytes(path, content)
        self._bytes += len(content)
        self._opens = False

    def _content(self, grads: list[Tensor | None]) -> bytes:
        """Encodes a step's file."""
        step: dict[str, Tensor] = {
            "step": torch.tensor([self.steps]),
            "session": torch.tensor([self._session]),
            "released": _flat([_dense(g, n) for g, n in zip(grads, self.header.names, strict=True)], self._parameters),
        }
        if self.header.parameters == "every" or self._opens:
            step["parameters"] = _flat([p.detach() for p in self._parameters], self._parameters)
        if absent := [at for at, grad in enumerate(grads) if grad is None]:
            step["absent"] = torch.tensor(absent)
        numbers = self._scales.now() | ({} if (lr := _plain_lr(self._inner)) is None else {"lr": lr})
        for name, value in numbers.items():
            first_value = getattr(self.header, name, None)
            if first_value is not None and value != first_value:
                raise ValueError(
                    f"{name} of the watched optimizer changed from {first_value} to {value}; watch it with varies=True,"
                    " in a folder of its own"
                )
            step[name] = torch.tensor([value], dtype=torch.float64)
        return save(step)

    def _refuse_others(self) -> None:
        known = {id(parameter) for parameter in self._parameters}
        for group in self._inner.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known and parameter.grad is not None:
                    raise ValueError(
                        f"parameters of a watched optimizer must be those that it had, got another one of shape "
                        f"{list(parameter.shape)} with a gradient; unfreeze and add parameters before it is watched"
                    )


def watch(
    optimizer: Any,
    folder: str | Path,
    *,
    model: nn.Module | None = None,
    noise_multiplier: float | None = None,
    clip_norm: float | None = None,
    expected_batch: float | None = None,
    clipping: Clipping | None = None,
    varies: bool = False,
    parameters: KeptParameters = "every",
    max_bytes: int | None = None,
) -> Watch:
    """Writes every update of a training run to a folder, until it is closed.

    A folder that holds a transcript with the same header is continued. Only the first of several processes watches.

    Args:
        optimizer: a `DPOptimizer` of Opacus, after `make_private`; or a PyTorch optimizer whose gradients are already
            noised when it steps. (Any: Opacus is not needed to watch.)
        folder: of the transcript; created if absent.
        model: for the names and order of parameters; without it they are numbered in the optimizer's order.
        noise_multiplier: noise standard deviation / clip norm; for PyTorch optimizers only, as are the next two.
        clip_norm: L2 bound on a per-example gradient.
        expected_batch: divisor of the noisy sum: a public constant; 1 for sums.
        clipping: `flat` or `by_layer`; read from Opacus's optimizers, `flat` by default for others.
        varies: whether noise, bound or divisor change between steps, as under a scheduler; each step then records its
            own. Opacus's adaptive clipping always varies.
        parameters: `every` keeps the parameters before each step, `first` those before the first step of a session, in
            half the space. Attacks need them at each step; under plain SGD they follow from the first ones.
        max_bytes: of the folder; later steps are counted but not written.

    Raises:
        ValueError: an argument out of range, or an optimizer whose gradients cannot be read.
        TranscriptRefused: the folder holds another transcript, or other files.
    """
    inner = _inner(optimizer)
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    for name, value, words in (("clipping", clipping or "flat", Clipping), ("parameters", parameters, KeptParameters)):
        if value not in get_args(words):
            raise ValueError(f"{name} must be one of {', '.join(get_args(words))}, got {value!r}")
    names, watched = _named(inner, model)
    scales = scales_of(optimizer, noise_multiplier, clip_norm, expected_batch, clipping)
    varies = varies or scales.adaptive
    stated: dict[str, Any] = {} if varies else dict(scales.stated())
    header = TranscriptHeader(
        names=names,
        shapes=tuple(tuple(parameter.shape) for parameter in watched),
        optimizer=scales.words,
        clipping=scales.clipping,
        parameters=parameters,
        **stated,
    )
    folder = Path(folder)
    _prepare(folder, header)
    scales.open()
    return Watch(optimizer, folder, header, scales=scales, parameters=watched, max_bytes=max_bytes)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the PyTorch optimizer that moves the parameters."""
    names = {base.__name__ for base in type(optimizer).__mro__}
    if refused := names & _NO_SUMS:
        raise ValueError(f"optimizer must hand on one noisy sum, got {sorted(refused)[0]}, which does not")
    inner = getattr(optimizer, "original_optimizer", optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise ValueError(f"optimizer must be one of PyTorch or of Opacus, got {type(optimizer).__name__}")
    if isinstance(inner, torch.optim.LBFGS):
        raise ValueError("optimizer must take one gradient a step, got LBFGS, which takes several by a closure")
    return inner


def _named(inner: torch.optim.Optimizer, model: nn.Module | None) -> tuple[tuple[str, ...], list[nn.Parameter]]:
    """Returns names and trained parameters, in the model's order if it is given."""
    own = [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
    if not own:
        raise ValueError("optimizer must have a parameter that requires a gradient, got none")
    if bad := [p for p in own if not p.is_floating_point() or p.layout is not torch.strided]:
        raise ValueError(f"parameters must be dense real numbers, got {bad[0].dtype} of layout {bad[0].layout}")
    if model is None:
        return tuple(str(number) for number in range(len(own))), own
    bare, _ = without_wrappers(dict(model.named_parameters()))
    known = {id(parameter) for parameter in own}
    parameters = {name: parameter for name, parameter in bare.items() if id(parameter) in known}
    if len(parameters) < len(known):
        raise ValueError(
            f"model must hold the parameters of the optimizer, got {len(parameters)} of {len(known)}; give the model "
            "that the optimizer was made for"
        )
    return tuple(parameters), list(parameters.values())


def _prepare(folder: Path, header: TranscriptHeader) -> None:
    """Creates the folder with its header, or checks that the same header is there."""
    if not (folder / HEADER).exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise TranscriptRefused(f"folder must be empty or hold a transcript, got {folder}; name another one")
        write_bytes(folder / HEADER, header.to_bytes())
        return
    existing = read_header_file(folder)
    for field in fields(header):
        stored, requested = getattr(existing, field.name), getattr(header, field.name)
        if field.name != "optimizer" and stored != requested:
            raise TranscriptRefused(
                f"{field.name} of the transcript in {folder} must be as it was, {_brief(stored)}, got "
                f"{_brief(requested)}; name another folder for another run"
            )


def _resumed(folder: Path, header: TranscriptHeader) -> tuple[int, int]:
    """Returns the next step's number and the session's number; renames a truncated last file."""
    whole, broken, _ = listed(folder)
    if not whole and not broken:
        return 0, 0
    if whole and file_fault(folder / step_file(whole[-1]), header) is not None:
        # Renamed, not deleted: its step was taken, and is counted.
        cut = whole.pop()
        (folder / step_file(cut)).replace(folder / step_file(cut, "broken"))
        broken.append(cut)
    sessions = 0
    if whole:
        transcript = read_transcript(folder)
        if transcript.steps_taken is not None and transcript.steps_taken > len(transcript) + len(transcript.lost):
            raise TranscriptRefused(
                f"the transcript in {folder} stopped at its limit of disk, and steps are missing; name another folder"
            )
        from ..files import read_tensors

        sessions = int(read_tensors(folder / step_file(whole[-1])).tensors["session"]) + 1
    (folder / END).unlink(missing_ok=True)
    return max([*whole, *broken]) + 1, sessions


def _flat(tensors: list[Tensor | None], parameters: list[nn.Parameter]) -> Tensor:
    """Concatenates tensors on the CPU, with zeros for absent ones; float32 unless a parameter is float64."""
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    parts = [
        torch.zeros(p.numel(), dtype=dtype) if t is None else t.detach().reshape(-1).to("cpu", dtype)
        for t, p in zip(tensors, parameters, strict=True)
    ]
    return torch.cat(parts)


def _dense(grad: Tensor | None, name: str) -> Tensor | None:
    if grad is not None and grad.layout is not torch.strided:
        raise ValueError(f"gradients of a watched optimizer must be dense, got a sparse one of parameter {name!r}")
    return grad


def _plain_lr(inner: torch.optim.Optimizer) -> float | None:
    """Returns the learning rate of plain SGD, the only rule that derives parameters from a release; else None."""
    if type(inner) is not torch.optim.SGD:
        return None
    groups = inner.param_groups
    if any(group["momentum"] or group["weight_decay"] or group["maximize"] for group in groups):
        return None
    # At lower precision, rounding exceeds the tolerance of the check that a step was taken.
    if any(p.dtype not in (torch.float32, torch.float64) for group in groups for p in group["params"]):
        return None
    rates = {float(group["lr"]) for group in groups}
    return rates.pop() if len(rates) == 1 else None


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}"
