"""Classes by messages: power on clients of few classes, chance on exchanged clients, settings and refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from leakbench.attacks.client_classes import client_classes
from leakbench.attacks.core import ModelAccess, NotApplicable, SeenMessage, SeenMessages

from ..parameters import subtests
from . import toys

MODEL = toys.linear_net((1, 4, 4), seed=3)
PUBLIC = toys.examples(80, (1, 4, 4), seed=97, first_id=2000)


def client(labels: torch.Tensor, *, noise: float, rounds: int = 3, seed: int = 0, public=PUBLIC) -> SeenMessages:
    """Messages of a client with these labels: each is minus the noisy mean of its records' gradients."""
    inputs = toys.examples(len(labels), (1, 4, 4), seed=seed).inputs
    mean = toys.rows(MODEL, inputs, labels).mean(dim=0).detach()
    slices, start = {}, 0
    for name, part in MODEL.named_parameters():
        slices[name] = (start, start + part.numel())
        start += part.numel()
    model = ModelAccess(logits=MODEL, input_shape=(1, 4, 4), classes=toys.CLASSES)
    coins = toys.generator(100 + seed)
    messages = [
        SeenMessage(
            round=number,
            global_model=model,
            slices=slices,
            sent={},
            displacement=-(mean + noise * torch.randn(mean.shape, generator=coins)),
            why_no_sums="of no interest here",
            contributions=lambda x, y: pytest.fail("without sums it has no contributions"),
            gradients=lambda x, y: toys.rows(MODEL, x, y).detach(),
            population=public,
        )
        for number in range(rounds)
    ]
    return SeenMessages(messages=messages, models=[model] * rounds, final=model)


def of_one_class(number: int) -> torch.Tensor:
    return torch.full((40,), number)


@subtests("layer", ["bias", "output", "all"])
def test_the_class_of_clients_with_one_class_is_named(layer):
    for number in range(toys.CLASSES):
        result = client_classes(client(of_one_class(number), noise=0.02, seed=number), layer=layer)
        assert result.named.nonzero().flatten().tolist() == [number]
        assert result.scores.argmax() == number


def test_scores_without_noise_are_the_shares_of_the_classes():
    labels = torch.tensor([0] * 24 + [1] * 12 + [2] * 4)
    scores = client_classes(client(labels, noise=0.0)).scores
    # Public examples stand for the client's own, whose gradients differ by their inputs.
    assert torch.allclose(scores / scores.sum(), torch.tensor([0.6, 0.3, 0.1, 0.0], dtype=torch.float64), atol=0.15)


@pytest.mark.long
def test_more_messages_tell_more_and_noise_alone_tells_nothing():
    right = {"first": 0, "all": 0}
    for seed in range(100):
        target = client(of_one_class(seed % 4), noise=0.3, rounds=10, seed=seed)
        for messages in right:
            right[messages] += int(client_classes(target, messages=messages).scores.argmax() == seed % 4)
    # Chance names 25 of 100 with std 4.3, and 50 once in 10^8.
    assert right["all"] >= 75 and right["all"] > right["first"] > 25
    drowned = sum(
        int(client_classes(client(of_one_class(seed % 4), noise=300.0, seed=seed)).scores.argmax() == seed % 4)
        for seed in range(100)
    )
    assert 5 <= drowned <= 47


@pytest.mark.long
def test_scores_of_exchanged_clients_are_at_chance():
    """A client's answer, held against the classes of another that was drawn independently."""
    coins = toys.generator(8)
    classes = torch.randint(0, 4, (200,), generator=coins)
    others = classes[torch.randperm(200, generator=coins)]
    named = torch.stack(
        [client_classes(client(of_one_class(int(c)), noise=0.02, seed=int(c))).scores.argmax() for c in classes]
    )
    assert (named == classes).double().mean() > 0.95
    # Mean 0.25 and std 0.031 of 200; five of them.
    assert abs((named == others).double().mean() - 0.25) < 0.155


def test_as_many_classes_are_named_as_are_asked_for():
    target = client(torch.tensor([1] * 20 + [3] * 20), noise=0.0)
    assert client_classes(target, named=2).named.tolist() == [False, True, False, True]
    assert client_classes(target, named=9).named.all()


def test_settings_out_of_range_and_models_without_an_output_bias_are_refused():
    target = client(of_one_class(0), noise=0.1)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"messages": "last"}, "messages must be one of all, first, got 'last'"),
        ({"layer": "first"}, "layer must be one of all, output, bias, got 'first'"),
        ({"examples": 0}, "examples must be at least 1, got 0"),
        ({"named": 0}, "named must be at least 1, got 0"),
    ]
    for settings, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            client_classes(target, **settings)
    (first, *_) = target.messages
    other = replace(target, messages=[replace(first, slices={"weight": (0, 68)})])
    with pytest.raises(NotApplicable, match="the last parameter, weight, must be a bias of one entry a class"):
        client_classes(other, layer="bias")
    rare = toys.subset(PUBLIC, PUBLIC.labels != 2)
    with pytest.raises(NotApplicable, match="class 2 must have a public example, got none"):
        client_classes(client(of_one_class(0), noise=0.1, public=rare))
