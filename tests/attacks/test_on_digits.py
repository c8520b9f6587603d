"""Attacks with shadow models on digits: a small network, trained on few of them until it knows them by heart."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy

from leakbench.attacks.bavaria import bavaria
from leakbench.attacks.calibrated_loss import calibrated_loss
from leakbench.attacks.core import Examples, ModelAccess, Shadows, balanced_halves
from leakbench.attacks.lira import lira
from leakbench.attacks.loss_threshold import loss_threshold
from leakbench.attacks.rmia import rmia

from . import toys

LOW = 0.01


def trained(inputs: Tensor, labels: Tensor, halves: Tensor, *, epochs: int, seed: int) -> list[Tensor]:
    """Weights of one network for each row of `halves`, all trained side by side by plain SGD."""
    coins, models, hidden, batch = toys.generator(seed), len(halves), 64, 20
    chosen = torch.stack([half.nonzero()[:, 0] for half in halves])
    weights = [
        torch.randn(models, 64, hidden, generator=coins) * (2 / 64) ** 0.5,
        torch.zeros(models, 1, hidden),
        torch.randn(models, hidden, 10, generator=coins) * hidden**-0.5,
        torch.zeros(models, 1, 10),
    ]
    weights = [w.requires_grad_() for w in weights]
    for _ in range(epochs):
        order = chosen.gather(1, torch.rand(chosen.shape, generator=coins).argsort(1))
        for some in order.split(batch, dim=1):
            loss = cross_entropy(answers(weights, inputs[some]).flatten(0, 1), labels[some].flatten(), reduction="sum")
            steps = torch.autograd.grad(loss, weights)
            with torch.no_grad():
                for weight, step in zip(weights, steps, strict=True):
                    weight -= 0.3 / some.shape[1] * step
    return [w.detach() for w in weights]


def answers(weights: list[Tensor], inputs: Tensor) -> Tensor:
    first, bias, second, last = weights
    return torch.relu(inputs @ first + bias) @ second + last


def overfitted(*, targets: int, shadows: int, epochs: int, seed: int) -> list[tuple[ModelAccess, Tensor]]:
    """Targets that know half of 400 digits each, with shadow models that know other halves, and the truth."""
    (data, classes), coins = load_digits(return_X_y=True), toys.generator(seed)
    order = torch.randperm(len(classes), generator=coins)
    inputs, labels = torch.tensor(data / 16, dtype=torch.float32)[order], torch.tensor(classes)[order]
    member = torch.stack([torch.randperm(400, generator=coins) < 200 for _ in range(targets)])
    halves = torch.cat([member, balanced_halves(400, shadows, coins)])
    weights = trained(inputs, labels, halves, epochs=epochs, seed=seed)
    with torch.no_grad():
        of_all = answers(weights, inputs.expand(len(halves), -1, -1))
    right = of_all[:, :400].argmax(-1) == labels[:400]
    assert float(right[halves].double().mean()) > 0.999 > 0.96 > float(right[~halves].double().mean())
    candidates, public = (
        Examples(ids=torch.arange(len(n)), inputs=n[:, None].float(), labels=labels[n])
        for n in (torch.arange(400), torch.arange(400, 1400))
    )
    bank = Shadows(
        logits=of_all[targets:, :400, None], trained_on=halves[targets:], population=of_all[targets:, 400:1400]
    )
    # Inputs are numbers of digits, whose answers are there.
    look_up = lambda number: lambda numbers: of_all[number][numbers[:, 0].long()]  # noqa: E731
    return [
        (
            ModelAccess(
                logits=look_up(number),
                input_shape=(1,),
                classes=10,
                candidates=candidates,
                population=public,
                shadows=bank,
            ),
            member[number],
        )
        for number in range(targets)
    ]


def found(worlds: list[tuple[ModelAccess, Tensor]], one, **settings) -> tuple[float, float]:
    """Mean AUC and TPR at an FPR of 1 % over targets."""
    aucs, rates = [], []
    for target, member in worlds:
        scores = one(target, **settings).scores
        aucs.append(toys.auc(scores, member))
        threshold = scores[~member].sort(descending=True).values[int(LOW * int((~member).sum()))]
        rates.append(float((scores[member] > threshold).double().mean()))
    return sum(aucs) / len(aucs), sum(rates) / len(rates)


@pytest.mark.long
def test_shadow_models_find_members_at_a_low_rate_where_the_loss_does_not():
    worlds = overfitted(targets=8, shadows=16, epochs=60, seed=0)
    auc, rate = found(worlds, loss_threshold)
    assert rate < 0.03
    for one in (lira, rmia, bavaria, calibrated_loss):
        better, higher = found(worlds, one, shadows=16)
        # 8 targets with 200 members each: a rate of 0.015 has a standard error of about 0.003.
        assert better > auc + 0.03 and higher > rate + 0.01, one
        if one is not calibrated_loss:
            assert higher > 2 * rate, one


@pytest.mark.long
def test_with_four_references_bavaria_finds_at_least_what_rmia_and_lira_find():
    worlds = overfitted(targets=8, shadows=8, epochs=60, seed=0)
    (by_lira, low_lira), (by_rmia, low_rmia), (by_bavaria, low_bavaria) = (
        found(worlds, one, shadows=8, online=False) for one in (lira, rmia, bavaria)
    )
    assert by_lira < by_rmia < by_bavaria
    assert low_bavaria > max(low_lira, low_rmia)
