"""Answers of shadow models about candidates: a bank, made by the owner's training function or read from a file.

The file is for whoever has shadow models already, or trains them elsewhere. It holds answers, not models: `logits`
[models, examples, classes] (or [models, examples, views, classes]) and `trained_on` [models, examples], for the members
in the order of their file and then the non-members in theirs; and `population` [models, public, classes] where there
are public examples. Models of two classes may have one answer an example, [models, examples] or [models, examples, 1].

Who is in how many of the models must not tell who is a member of the audited one: scores could be read off it. Halves
of all candidates together, drawn without regard to membership, are right; this is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from scipy.stats import chi2_contingency, mannwhitneyu
from torch import Tensor

from leakbench.attacks.core import Examples, NotApplicable, Shadows

from ..files import read_tensors
from .answers import Form, NoLogits, as_logits, form_of, refuse_rounded, unusual_factor
from .diagnosis import another_order, knowledge

_CHANCE = 1e-6
"""That halves which do not regard membership are refused."""

_OTHER_SIZE = {False: 3.0, True: 100.0}
"""Ratio of standard deviations of logits to those of every shadow model, from which on they are of another kind; by
whether the models were asked here: then the form is known, and a size tells of another training at most."""


@dataclass(frozen=True)
class AnsweredBank:
    """Shadow models that have answered.

    Attributes:
        models: how many.
        source: where the answers come from, for the report.
        of: (ids of candidates) -> what they answer about them, in that order.
        asked_here: whether the models themselves were asked, and not a file of their answers.
    """

    models: int
    source: str
    of: Callable[[Tensor], Shadows]
    asked_here: bool = False


@dataclass(frozen=True)
class AnsweredAbout:
    """Whom a bank's answers are about, in their order.

    Attributes:
        members: of the audited model.
        non_members: likewise.
        population: public examples; None where there are none.
    """

    members: Examples
    non_members: Examples
    population: Examples | None = None

    @property
    def ids(self) -> Int[Tensor, " n"]:
        """Members first."""
        return torch.cat([self.members.ids, self.non_members.ids])


@dataclass(frozen=True, kw_only=True)
class BankOfAnswers:
    """What is in a file of answers, or was answered by models just trained.

    Attributes:
        ids: [n], of the examples that were asked about.
        logits: [models, n, views, classes].
        trained_on: [models, n].
        population: [models, public, classes]; None where nothing public was asked about.
        source: where they come from, for the report.
        asked_here: as of `AnsweredBank`.
    """

    source: str
    asked_here: bool = False
    ids: Int[Tensor, " n"] = field(repr=False)
    logits: Float[Tensor, "models n views classes"] = field(repr=False)
    trained_on: Bool[Tensor, "models n"] = field(repr=False)
    population: Float[Tensor, "models public classes"] | None = field(default=None, repr=False)

    def bank(self) -> AnsweredBank:
        """As attacks ask it."""
        order = self.ids.argsort()
        in_order = self.ids[order]

        def of(ids: Tensor) -> Shadows:
            answers = [self.logits, *([] if self.population is None else [self.population])]
            good = torch.stack([one.isfinite().flatten(1).all(1) for one in answers]).all(0)
            if not bool(good.all()):
                raise NotApplicable(
                    f"{int((~good).sum())} of {len(good)} shadow models answer NaN or infinity; train them otherwise"
                )
            places = order[torch.searchsorted(in_order, ids.cpu())]
            return Shadows(
                logits=self.logits[:, places].to(ids.device),
                trained_on=self.trained_on[:, places].to(ids.device),
                population=None if self.population is None else self.population.to(ids.device),
            )

        return AnsweredBank(len(self.logits), self.source, of, self.asked_here)


def read_bank(
    path: Path,
    asked: AnsweredAbout,
    *,
    population: Examples | None,
    classes: int,
    allow_pickle_tensors: bool = False,
) -> BankOfAnswers:
    """A bank from a file of answers.

    Args:
        path: safetensors.
        asked: all examples of the owner's files, in their order, whatever of them is audited.
        population: those of its public examples that are left, as attacks get them.
        classes: of the audited model.
        allow_pickle_tensors: whether PyTorch's restricted loader may be used.

    Raises:
        ValueError: a tensor that is missing or of another shape, or halves that tell who is a member.
    """
    file = read_tensors(path, allow_pickle_tensors=allow_pickle_tensors)
    tensors = file.tensors
    if missing := [name for name in ("logits", "trained_on") if name not in tensors]:
        raise ValueError(f"--bank must hold logits and trained_on, and {path.name} lacks {missing[0]}")
    logits, halves, ids = tensors["logits"], tensors["trained_on"], asked.ids
    if logits.ndim == 2:
        logits = logits[:, :, None]
    if logits.ndim == 3:
        logits = logits[:, :, None]
    models, examples = len(logits), len(ids)
    # Of two classes, models may answer with one number.
    outputs = 1 if classes == 2 and logits.shape[-1] == 1 else classes
    wanted = (
        f"[models, {examples}, {classes}]: {len(asked.members)} members, then {len(asked.non_members)} non-members, in "
        "the order of their files"
    )
    if logits.ndim != 4 or tuple(logits.shape[1:2]) + tuple(logits.shape[3:]) != (examples, outputs):
        raise ValueError(f"logits of --bank must be {wanted}; got {list(tensors['logits'].shape)}")
    if models < 2 or models % 2:
        raise ValueError(f"--bank must have answers of an even number of models, at least 2, got {models}")
    if tuple(halves.shape) != (models, examples) or not bool(((halves == 0) | (halves == 1)).all()):
        raise ValueError(f"trained_on of --bank must be 0 or 1 for each of {models} models and {examples} examples")
    answered = tensors.get("population")
    public = 0 if asked.population is None else len(asked.population)
    if answered is not None and answered.ndim == 2:
        answered = answered[:, :, None]
    if answered is not None and tuple(answered.shape) != (models, public, outputs):
        raise ValueError(
            f"population of --bank must be [{models}, {public}, {outputs}], as the examples of --population, got "
            f"{list(answered.shape)}"
        )
    forms: list[Form] = [form_of(one) for one in logits]
    try:
        for one, form in zip(logits, forms, strict=True):
            refuse_rounded(one, form)
    except NoLogits as error:
        raise ValueError(f"logits of --bank: {error}") from None
    logits = torch.stack([as_logits(one, form).float() for one, form in zip(logits, forms, strict=True)])
    if answered is not None:
        answered = torch.stack([as_logits(one, form).float() for one, form in zip(answered, forms, strict=True)])
    # On the CPU, where the file was read to.
    labels = torch.cat([asked.members.labels, asked.non_members.labels]).cpu()
    factors = torch.tensor([unusual_factor(one[:, 0], labels) for one in logits])
    logits = logits * factors[:, None, None, None]
    answered = None if answered is None else answered * factors[:, None, None]
    inside = halves.bool()
    _refuse_telling_halves(inside, len(asked.members), path)
    if answered is not None and asked.population is not None and population is not None:
        answered = answered[:, torch.isin(asked.population.ids.cpu(), population.ids.cpu())].float()
    return BankOfAnswers(
        source=f"{path.name}, SHA-256 {file.sha256}{_read_as(forms)}",
        ids=ids.cpu(),
        logits=logits,
        trained_on=inside,
        population=answered,
    )


def refuse_other_answers(own: Float[Tensor, "n classes"], asked: Examples, bank: AnsweredBank, classes: int) -> None:
    """Refuses shadow models that answer in another form than the audited model does: no comparison would mean anything.

    Args:
        own: what the audited model answers.
        asked: about whom.
        bank: of shadow models, asked about the same.
        classes: of the audited model.

    Raises:
        ValueError: labels alone, logits of another size, or numbers of classes or an order of examples of their own.
    """
    try:
        theirs = bank.of(asked.ids)
    except NotApplicable:  # which attacks say themselves
        return
    first = theirs.logits[:, :, 0]
    if any(one.unique().numel() <= 2 for one in first):
        raise ValueError(
            "shadow models must answer with logits or probabilities, got labels alone, of which attacks learn nothing; "
            "give what they answer before the largest is taken"
        )
    size, sizes = float(own.std(-1).median()), first.std(-1).median(-1).values
    most = _OTHER_SIZE[bank.asked_here]
    if size > 0 and not float(sizes.min()) / most <= size <= float(sizes.max()) * most:
        raise ValueError(
            f"logits of shadow models must be of the size of the audited model's, got a standard deviation of "
            f"{float(sizes.median()):.3g} over classes for {size:.3g}; was a temperature, or another function, applied "
            "to one?"
        )
    labels, guesses = asked.labels.to(first.device), first.argmax(-1)
    told = knowledge(guesses[theirs.trained_on], labels.expand_as(guesses)[theirs.trained_on], classes)
    if told.known or told.undecided or not knowledge(own.argmax(1), asked.labels, classes).known:
        return
    order = another_order(guesses[theirs.trained_on], labels.expand_as(guesses)[theirs.trained_on], classes)
    why = "the examples are in another order" if order is None else "their classes are in another order"
    raise ValueError(
        f"shadow models must know their own examples, as the audited model does, and are right on {told.right} of "
        f"{told.n} that they were trained on: {why}, or they are of other data"
    )


def _read_as(forms: Sequence[Form]) -> str:
    named = sorted(set(forms) - {"logits"})
    return f", whose answers ({' and '.join(named)}) are read as logits" if named else ""


def _refuse_telling_halves(inside: Bool[Tensor, "models n"], members: int, path: Path) -> None:
    """Raises `ValueError` where the halves are drawn with regard to who is a member of the audited model."""
    counts = inside.sum(0).double().numpy()
    chances = []
    if len(set(counts.tolist())) > 1:
        chances.append(float(mannwhitneyu(counts[:members], counts[members:]).pvalue))
    for half in inside:
        table = [[int(part.sum()), int((~part).sum())] for part in (half[:members], half[members:])]
        if min(table[0][0] + table[1][0], table[0][1] + table[1][1]) == 0:
            continue  # trained on all, or on none: it says the same of everybody
        found: Any = chi2_contingency(table)  # scipy says nothing of its fields
        chances.append(float(found.pvalue))
    if chances and min(chances) * len(chances) < _CHANCE:
        raise ValueError(
            f"the shadow models of {path.name} were trained on members of the audited model more or less often than on "
            "the others, which tells who is one; draw their halves among all candidates, whoever is a member"
        )
