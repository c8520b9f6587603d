"""Answers of shadow models about candidates: a bank, made by the owner's training function or read from a file.

The file serves owners who have shadow models already, or train them elsewhere. It holds answers, not models: `logits`
[models, examples, classes] (or [models, examples, views, classes]) and `trained_on` [models, examples], for the members
in the order of their file and then the non-members in theirs; and `population` [models, public, classes] if there are
public examples. Models of two classes may have a single answer per example, [models, examples] or [models, examples,
1].

The number of shadow models trained on a candidate must not depend on its membership in the audited model's training
set, because attacks could read membership from it. Random halves of all candidates together, drawn without regard to
membership, satisfy this; `read_bank` tests it.
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
"""Probability that halves drawn without regard to membership are refused."""

_OTHER_SIZE = {False: 3.0, True: 100.0}
"""Largest ratio between the standard deviations of the audited model's and the shadow models' logits, in either
direction, by `asked_here`: models that were queried here have a known format, so that only a wider ratio is refused."""


@dataclass(frozen=True)
class AnsweredBank:
    """Answers of shadow models, by candidate.

    Attributes:
        models: number of shadow models.
        source: of the answers, for the report.
        of: maps ids of candidates to the answers about them, in that order.
        asked_here: whether the models themselves were queried, rather than a file of their answers read.
    """

    models: int
    source: str
    of: Callable[[Tensor], Shadows]
    asked_here: bool = False


@dataclass(frozen=True)
class BankExamples:
    """Examples that a bank's answers are about, in their order.

    Attributes:
        members: of the audited model.
        non_members: likewise.
        population: public examples; None for none.
    """

    members: Examples
    non_members: Examples
    population: Examples | None = None

    @property
    def ids(self) -> Int[Tensor, " n"]:
        """Ids of the candidates, members first."""
        return torch.cat([self.members.ids, self.non_members.ids])


@dataclass(frozen=True, kw_only=True)
class BankOfAnswers:
    """Answers of shadow models as tensors, from a file or from models just trained.

    Attributes:
        ids: [n], of the queried examples.
        logits: [models, n, views, classes].
        trained_on: [models, n].
        population: [models, public, classes]; None if no public examples were queried.
        source: of the answers, for the report.
        asked_here: see `AnsweredBank`.
    """

    source: str
    asked_here: bool = False
    ids: Int[Tensor, " n"] = field(repr=False)
    logits: Float[Tensor, "models n views classes"] = field(repr=False)
    trained_on: Bool[Tensor, "models n"] = field(repr=False)
    population: Float[Tensor, "models public classes"] | None = field(default=None, repr=False)

    def bank(self) -> AnsweredBank:
        """Returns the bank as attacks query it."""
        order = self.ids.argsort()
        in_order = self.ids[order]

        def of(ids: Tensor) -> Shadows:
            answers = [self.logits, *([] if self.population is None else [self.population])]
            good = torch.stack([logits.isfinite().flatten(1).all(1) for logits in answers]).all(0)
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
    owned: BankExamples,
    *,
    population: Examples | None,
    classes: int,
    allow_pickle_tensors: bool = False,
) -> BankOfAnswers:
    """Reads a bank from a file of answers.

    Args:
        path: safetensors.
        owned: all examples of the owner's files, in their order, whether they are audited or not.
        population: the remaining public examples, as attacks get them.
        classes: of the audited model.
        allow_pickle_tensors: whether PyTorch's restricted loader may be used.

    Raises:
        ValueError: a tensor that is missing or of another shape, or halves that reveal membership.
    """
    file = read_tensors(path, allow_pickle_tensors=allow_pickle_tensors)
    tensors = file.tensors
    if missing := [name for name in ("logits", "trained_on") if name not in tensors]:
        raise ValueError(f"--bank must hold logits and trained_on, and {path.name} lacks {missing[0]}")
    logits, halves, ids = tensors["logits"], tensors["trained_on"], owned.ids
    if logits.ndim == 2:
        logits = logits[:, :, None]
    if logits.ndim == 3:
        logits = logits[:, :, None]
    models, examples = len(logits), len(ids)
    # Models of two classes may have a single output.
    outputs = 1 if classes == 2 and logits.shape[-1] == 1 else classes
    shape = (
        f"[models, {examples}, {classes}]: {len(owned.members)} members, then {len(owned.non_members)} non-members, in "
        "the order of their files"
    )
    if logits.ndim != 4 or tuple(logits.shape[1:2]) + tuple(logits.shape[3:]) != (examples, outputs):
        raise ValueError(f"logits of --bank must be {shape}; got {list(tensors['logits'].shape)}")
    if models < 2 or models % 2:
        raise ValueError(f"--bank must have answers of an even number of models, at least 2, got {models}")
    if tuple(halves.shape) != (models, examples) or not bool(((halves == 0) | (halves == 1)).all()):
        raise ValueError(f"trained_on of --bank must be 0 or 1 for each of {models} models and {examples} examples")
    answered = tensors.get("population")
    public = 0 if owned.population is None else len(owned.population)
    if answered is not None and answered.ndim == 2:
        answered = answered[:, :, None]
    if answered is not None and tuple(answered.shape) != (models, public, outputs):
        raise ValueError(
            f"population of --bank must be [{models}, {public}, {outputs}], as the examples of --population, got "
            f"{list(answered.shape)}"
        )
    forms = _forms(logits)
    logits = _all_as_logits(logits, forms)
    answered = None if answered is None else _all_as_logits(answered, forms)
    # On the CPU, like the file's tensors.
    labels = torch.cat([owned.members.labels, owned.non_members.labels]).cpu()
    factors = torch.tensor([unusual_factor(model_logits[:, 0], labels) for model_logits in logits])
    logits = logits * factors[:, None, None, None]
    answered = None if answered is None else answered * factors[:, None, None]
    inside = halves.bool()
    _refuse_telling_halves(inside, len(owned.members), path)
    if answered is not None and owned.population is not None and population is not None:
        answered = answered[:, torch.isin(owned.population.ids.cpu(), population.ids.cpu())].float()
    return BankOfAnswers(
        source=f"{path.name}, SHA-256 {file.sha256}{_read_as(forms)}",
        ids=ids.cpu(),
        logits=logits,
        trained_on=inside,
        population=answered,
    )


def refuse_other_answers(own: Float[Tensor, "n classes"], examples: Examples, bank: AnsweredBank, classes: int) -> None:
    """Refuses shadow models whose answers differ in form from the audited model's: no comparison would be valid.

    Args:
        own: logits of the audited model.
        examples: the examples of these logits.
        bank: answers of shadow models about the same examples.
        classes: of the audited model.

    Raises:
        ValueError: labels alone, logits of another scale, or another order of classes or of examples.
    """
    try:
        theirs = bank.of(examples.ids)
    except NotApplicable:  # attacks report it themselves
        return
    first = theirs.logits[:, :, 0]
    if any(model_logits.unique().numel() <= 2 for model_logits in first):
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
    labels, guesses = examples.labels.to(first.device), first.argmax(-1)
    shadow_knowledge = knowledge(guesses[theirs.trained_on], labels.expand_as(guesses)[theirs.trained_on], classes)
    if (
        shadow_knowledge.known
        or shadow_knowledge.undecided
        or not knowledge(own.argmax(1), examples.labels, classes).known
    ):
        return
    order = another_order(guesses[theirs.trained_on], labels.expand_as(guesses)[theirs.trained_on], classes)
    why = "the examples are in another order" if order is None else "their classes are in another order"
    raise ValueError(
        f"shadow models must know their own examples, as the audited model does, and are right on "
        f"{shadow_knowledge.right} of {shadow_knowledge.n} that they were trained on: {why}, or they are of other data"
    )


def _forms(answers: Tensor) -> list[Form]:
    """Returns the form of each model's answers; refuses rounded ones, and labels alone."""
    forms: list[Form] = [form_of(model_answers) for model_answers in answers]
    try:
        for model_answers, form in zip(answers, forms, strict=True):
            refuse_rounded(model_answers, form)
    except NoLogits as error:
        raise ValueError(f"logits of --bank: {error}") from None
    return forms


def _all_as_logits(answers: Tensor, forms: Sequence[Form]) -> Tensor:
    return torch.stack([as_logits(mine, form).float() for mine, form in zip(answers, forms, strict=True)])


def _read_as(forms: Sequence[Form]) -> str:
    named = sorted(set(forms) - {"logits"})
    return f", whose answers ({' and '.join(named)}) are read as logits" if named else ""


def _refuse_telling_halves(inside: Bool[Tensor, "models n"], members: int, path: Path) -> None:
    """Raises `ValueError` if the halves depend on membership in the audited model's training set."""
    counts = inside.sum(0).double().numpy()
    chances = []
    if len(set(counts.tolist())) > 1:
        chances.append(float(mannwhitneyu(counts[:members], counts[members:]).pvalue))
    for half in inside:
        table = [[int(part.sum()), int((~part).sum())] for part in (half[:members], half[members:])]
        if min(table[0][0] + table[1][0], table[0][1] + table[1][1]) == 0:
            continue  # trained on all or on none: no information on membership
        test: Any = chi2_contingency(table)  # scipy does not declare its fields
        chances.append(float(test.pvalue))
    if chances and min(chances) * len(chances) < _CHANCE:
        raise ValueError(
            f"the shadow models of {path.name} were trained on members of the audited model more or less often than on "
            "the others, which tells who is one; draw their halves among all candidates, whoever is a member"
        )
