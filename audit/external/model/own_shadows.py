"""Shadow models by the owner's training function, on random halves of the candidates; only their answers are kept.

The function is `train(inputs, labels, *, seed)`: it trains a model from scratch, as the audited model was trained, on
these examples (in the model's input units, after `--preprocess`), and returns it. The halves depend on the examples and
the seed alone, and reveal no membership. A model's answers are written once it is trained, so that an interrupted audit
reads them again if data, function and seed are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from leakbench.attacks.core import Examples, balanced_halves, viewed
from leakbench.defenses.core import keyed
from leakbench.leaderboard.records.files import write_bytes

from ...catalog.messages import in_one_line
from ...plan.request import seed_of
from ...subjects.outcome import join, pick
from ...targets.observe import logits_of
from .answers import answering_logits, as_logits, form_of
from .attacks import Audited
from .shadow_answers import AnsweredBank, BankOfAnswers

Train = Callable[..., nn.Module]
"""(inputs [n, ...], labels [n], seed=...) -> a trained model."""


def own_shadows(
    audited: Audited,
    train: Train,
    models: int,
    *,
    code: str,
    folder: Path | None = None,
    views: int = 1,
    seed: int = 0,
    report: Callable[[int], None] = lambda done: None,
) -> AnsweredBank:
    """Trains shadow models, or reads the answers of earlier ones, and returns them as a bank.

    Args:
        audited: the model and its candidates, which are halved.
        train: the owner's function.
        models: number of shadow models, even, at least 2.
        code: digest of the function's source, a part of the name under which answers are kept.
        folder: where answers are kept; None to keep none.
        views: number of views of each candidate that the models answer.
        seed: of halves and trainings.
        report: called with the number of models done.

    Raises:
        ValueError: an odd number of models, or a function that fails, or returns no model for these classes.
    """
    candidates = join(audited.members, audited.non_members)
    digest = _digest(candidates, audited.population)
    key = {"data": digest, "code": code, "seed": seed, "views": views, "classes": audited.classes}
    # Sorted by content id: members come first in `candidates`, and the halves must not depend on that order.
    order = candidates.ids.argsort()
    candidates = pick(candidates, order)
    halves = balanced_halves(len(candidates), models, keyed(seed_of({"data": digest, "seed": seed}, "shadow halves")))
    view_inputs = viewed(candidates.inputs, views)
    shadows, forms = [], set[str]()
    for number, half in enumerate(halves):
        # The name is independent of the number of models: a run with more of them reads the earlier answers.
        name = hashlib.sha256(repr(sorted((key | {"model": number}).items())).encode()).hexdigest()[:32]
        path = None if folder is None else folder / f"{name}.safetensors"
        if path is not None and path.is_file():
            answers = load(path.read_bytes())
            form = form_of(answers["logits"])  # older files hold answers that are not logits
            answers = {name: as_logits(part, form) for name, part in answers.items()}
        else:
            own = pick(candidates, half.nonzero()[:, 0])
            answers, note = _answers(
                audited, train, own, view_inputs, candidates.labels, seed_of(key, f"model {number}")
            )
            forms |= {note} if note else set()
            if path is not None:
                write_bytes(path, save(answers))
        shadows.append(answers)
        report(number + 1)
    population = torch.stack([shadow["population"] for shadow in shadows])
    return BankOfAnswers(
        source="; ".join([f"trained here, by a function of SHA-256 {code}", *sorted(forms)]),
        asked_here=True,
        ids=candidates.ids.cpu(),
        logits=torch.stack([shadow["logits"] for shadow in shadows]),
        trained_on=halves,
        population=population if population.shape[1] else None,
    ).bank()


def _answers(
    audited: Audited, train: Train, own: Examples, views: Tensor, labels: Tensor, seed: int
) -> tuple[dict[str, Tensor], str]:
    """Trains a model and returns its answers, and a sentence on their format unless they are logits."""
    device, classes = own.inputs.device, audited.classes
    # PyTorch's own generator is seeded for the function, too, and restored afterwards.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed % 2**63)
        try:
            # Copies: a function may shuffle or scale its arguments in place.
            model: Any = train(own.inputs.clone(), own.labels.clone(), seed=seed % 2**31)
        except Exception as error:
            raise ValueError(
                f"--train must train a model on {len(own)} examples, and failed: {in_one_line(error)}"
            ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"--train must return a torch.nn.Module, got {type(model).__name__}")
    of_views = labels.repeat_interleave(views.shape[1])
    model, note = answering_logits(model.to(device).eval(), views.flatten(0, 1), of_views)
    public = own.inputs.new_zeros(0, *own.inputs.shape[1:]) if audited.population is None else audited.population.inputs
    logits = logits_of(model, views.flatten(0, 1))
    if logits.ndim != 2 or logits.shape[1] != classes:
        raise ValueError(
            f"--train must return a model of {classes} classes, as the audited one, got {list(logits.shape)}"
        )
    population = logits_of(model, public) if len(public) else logits.new_zeros(0, classes)
    answers = {
        "logits": logits.unflatten(0, views.shape[:2]).float().cpu().contiguous(),
        "population": population.float().cpu().contiguous(),
    }
    return answers, note


def _digest(candidates: Examples, population: Examples | None) -> str:
    """Returns a digest of the candidates, whatever their order, and of the public examples."""
    order = candidates.ids.argsort()
    digest = hashlib.sha256()
    parts = [candidates.ids[order], candidates.inputs[order], candidates.labels[order]]
    if population is not None:
        parts += [population.inputs, population.labels]
    for part in parts:
        array = part.detach().cpu().contiguous().numpy()
        digest.update(f"{array.dtype} {array.shape}\n".encode() + array.tobytes())
    return digest.hexdigest()
