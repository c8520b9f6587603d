"""The equations behind an update: run from plain data they are the model, and its numbers are the gradient's."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from leakbench import audit
from leakbench.attacks.core import (
    Access,
    Examples,
    Network,
    NotApplicable,
    Observation,
    Operation,
    Reconstruction,
    attack,
    granted,
)
from leakbench.audit.targets.structure import structure
from leakbench.benchmarks import models
from leakbench.defenses.core import Block, Everything, Layout, StepPlan, clip, cross_entropy
from leakbench.defenses.dp_sgd import dp_sgd
from leakbench.defenses.gep import gep
from leakbench.defenses.pdp import pdp
from leakbench.defenses.per_layer import per_layer
from leakbench.defenses.random_sparsification import random_sparsification

DRAWN = torch.Generator().manual_seed(5)


def rerun(network: Network, inputs: torch.Tensor) -> torch.Tensor:
    """The forward pass from the description."""
    found: dict[str, torch.Tensor] = {}
    values = network.parameters

    def of(name: str | None) -> torch.Tensor | None:
        return None if name is None else values[name]

    for one in network.operations:
        given, s = [found[name] for name in one.inputs], one.settings
        found[one.name] = result = _result(one, given, inputs, s, of(one.weight), of(one.bias), values)
        assert tuple(result.shape[1:]) == one.shape
    return found[network.operations[-1].name]


def _result(one: Operation, given, inputs, s, weight, bias, values) -> torch.Tensor:
    match one.kind:
        case "input":
            return inputs
        case "linear":
            return functional.linear(given[0], weight, bias)
        case "conv2d":
            return functional.conv2d(given[0], weight, bias, s["stride"], s["padding"], s["dilation"], s["groups"])
        case "avg_pool2d":
            return functional.avg_pool2d(given[0], s["kernel_size"], s["stride"], s["padding"])
        case "batch_norm":
            mean, variance = values[s["mean"]], values[s["variance"]]
            return functional.batch_norm(given[0], mean, variance, weight, bias, eps=s["eps"])
        case "leaky_relu":
            return functional.leaky_relu(given[0], s["slope"])
        case "flatten":
            return given[0].flatten(1)
        case "add":
            return given[0] + given[1]
        case "identity":
            return given[0]
        case _:
            return getattr(torch, one.kind)(given[0])


class Skip(nn.Module):
    """Two branches, and every kind of operation that has a name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding="same", dilation=2)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, (3, 1), padding=(1, 0), groups=2, bias=False)
        self.pool, self.act, self.out = nn.AvgPool2d(2), nn.LeakyReLU(0.3), nn.Linear(36, 3)
        self.gate = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm(self.first(x)))
        x = torch.tanh(x + self.second(x))
        return self.out(self.gate(torch.flatten(self.pool(x), 1)))


def shared(model, shape, defense, *, classes=3, **settings):
    inputs = torch.rand(1, *shape, generator=DRAWN, dtype=torch.float64)
    observation, _ = audit.share_update(model.double(), inputs, torch.tensor([classes - 1]), defense, **settings)
    return observation, inputs


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (models.build("cnn6", input_shape=(3, 16, 16), classes=1, seed=0), (3, 16, 16)),
        (models.build("mlp", input_shape=(1, 8, 8), classes=3, seed=0), (1, 8, 8)),
    ],
    ids=["cnn6", "mlp"],
)
def test_the_description_computes_what_the_model_computes(model, shape):
    classes = 2 if shape[0] == 3 and shape[1] == 16 else 3
    observation, inputs = shared(model, shape, dp_sgd(noise_multiplier=0.0), classes=classes)
    seen = granted(observation.structure)()
    network = seen.known_network()
    torch.testing.assert_close(rerun(network, inputs), observation.logits(inputs), rtol=1e-12, atol=1e-12)
    assert not [one for one in network.operations if one.kind == "other"]
    assert network.loss == ("logistic" if classes == 2 else "cross_entropy")


def described(model: nn.Module, shape: tuple[int, ...]):
    layout = Layout.of(model)
    plan = StepPlan(Block(codec=Everything(layout.dim), bound=clip(1.0)))
    return structure(plan, model, layout, layout.read(model), cross_entropy, shape)


def test_branches_batch_norms_and_every_kind_of_convolution_are_described():
    model = Skip().double().eval()
    statistics = dict(model.norm.named_buffers())
    torch.nn.init.uniform_(statistics["running_mean"])
    torch.nn.init.uniform_(statistics["running_var"], 0.5, 2.0)
    model.train()  # what is described is evaluation, and the model is left in the mode that it had
    network = described(model, (2, 6, 6)).known_network()
    inputs = torch.rand(2, 2, 6, 6, generator=DRAWN, dtype=torch.float64)
    assert model.training
    torch.testing.assert_close(rerun(network, inputs), model.eval()(inputs), rtol=1e-12, atol=1e-12)
    with pytest.raises(NotApplicable, match="must be a chain of layers"):
        network.chain()


def test_gradients_are_found_at_their_places_and_what_was_dropped_is_not_seen():
    model = models.build("mlp", input_shape=(1, 8, 8), classes=3, seed=0)
    whole, inputs = shared(model, (1, 8, 8), dp_sgd(clip_norm=1e9, noise_multiplier=0.0))
    found = granted(whole.structure)().gradients(whole.released)
    loss = functional.cross_entropy(model(inputs), torch.tensor([2]))
    for (name, parameter), expected in zip(
        model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        assert found[name].values.shape == parameter.shape and bool(found[name].observed.all())
        torch.testing.assert_close(found[name].values, expected)
    sparse = random_sparsification(clip_norm=1e9, final_sparsity=0.7, noise_multiplier=0.0)
    masked, _ = shared(model, (1, 8, 8), sparse, step=3, steps=4)
    part = granted(masked.structure)().gradients(masked.released)
    seen = torch.cat([one.observed.flatten() for one in part.values()])
    assert int(seen.sum()) == masked.released.numel() < 0.31 * len(seen)
    values = torch.cat([one.values.flatten() for one in part.values()])
    assert torch.equal(values[seen], masked.released) and not values[~seen].any()


def test_layers_that_were_bounded_apart_are_groups_of_their_own():
    model = models.build("mlp", input_shape=(1, 8, 8), classes=3, seed=0)
    observation, _ = shared(model, (1, 8, 8), per_layer(clip_norm=0.1, noise_multiplier=0.0))
    found = granted(observation.structure)().gradients(observation.released)
    groups = {name: set(one.group.unique().tolist()) for name, one in found.items()}
    assert groups["1.weight"] == groups["1.bias"] != groups["3.weight"] == groups["3.bias"]
    assert all(len(group) == 1 and -1 not in group for group in groups.values())


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_coefficients_are_directions_with_their_bases_and_two_part_updates_are_refused(sparsity):
    model = models.build("mlp", input_shape=(1, 8, 8), classes=3, seed=0)
    drawn = torch.rand(40, 1, 8, 8, generator=DRAWN, dtype=torch.float64)
    public = Examples(ids=torch.arange(40), inputs=drawn, labels=torch.arange(40) % 3)
    embedded = gep(clip_norm=1.0, rank=4, final_sparsity=sparsity, cooling_epochs=0, noise_multiplier=0.0)
    observation, _ = shared(model, (1, 8, 8), embedded, population=public)
    seen = granted(observation.structure)()
    directions = next(part for part in seen.parts if part.kind == "directions")
    for basis, (start, stop) in zip(directions.bases, directions.spans, strict=True):
        torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1], dtype=basis.dtype))
        assert basis.shape[0] == stop - start
        dropped = float((basis == 0).all(dim=1).double().mean())  # directions are told in coordinates of whole rows
        assert dropped == pytest.approx(sparsity, abs=0.1)
    with pytest.raises(NotApplicable, match="must release coordinates of one gradient"):
        seen.gradients(observation.released)
    dense, _ = shared(model, (1, 8, 8), pdp(clip_norm=1.0, rank=4, noise_multiplier=0.0), population=public)
    assert granted(dense.structure)().parts  # projected after the noise: what is released is all there


def test_a_hooked_layer_and_control_flow_are_not_taken_for_what_they_look_like():
    class ByValue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum() > -1e9 else self.layer(-x)

    def doubled(module: nn.Module, given: object, result: torch.Tensor) -> torch.Tensor:
        return 2 * result

    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    network[1].register_forward_hook(doubled)

    assert [one.kind for one in described(network, (4,)).known_network().operations] == ["input", "flatten", "other"]
    with pytest.raises(NotApplicable, match="cannot be traced"):
        described(ByValue(), (4,)).known_network()


def test_a_subclass_is_not_described_as_its_class_and_a_shared_weight_has_one_name():
    class Halved(nn.AvgPool2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) / 2

    Halved.__module__ = "torch.nn.modules.pooling"  # so that tracing takes it for one operation
    assert [
        one.kind
        for one in described(nn.Sequential(Halved(2), nn.Flatten(), nn.Linear(1, 3)), (1, 2, 2))
        .known_network()
        .operations
    ][1] == "other"
    shared = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    shared[2].weight = shared[0].weight
    network = described(shared, (4,)).known_network()
    assert [one.weight for one in network.operations if one.kind == "linear"] == ["0.weight", "0.weight", "4.weight"]
    inputs = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rerun(network, inputs), shared(inputs))


def test_an_attack_reads_it_without_declaring_anything_and_gets_copies():
    @attack(access=Access.UPDATE)
    def spoiling(target: Observation, coins: torch.Generator) -> Reconstruction:
        """Writes into what it is given."""
        network = granted(target.structure)().known_network()
        for value in network.parameters.values():
            value.zero_()
        return Reconstruction(inputs=torch.zeros(1, 1, 8, 8), labels=torch.zeros(1, dtype=torch.int64), objective=0.0)

    model = models.build("mlp", input_shape=(1, 8, 8), classes=3, seed=0)
    observation, inputs = shared(model, (1, 8, 8), dp_sgd(noise_multiplier=0.0))
    before = observation.logits(inputs).clone()
    spoiling(observation)
    assert torch.equal(observation.logits(inputs), before)
    after = granted(observation.structure)().known_network().parameters
    assert all(value.abs().sum() > 0 for value in after.values())
