"""`nn.MultiheadAttention` by its two linear layers: inputs of its own and of others, masks, dropout, either order."""

from typing import Any

import pytest
import torch
from torch import nn

from leakbench.defenses.core import Block, Engine, Everything, Layout, StepPlan, clip, clipped_sums, cross_entropy
from leakbench.defenses.core.gradients.choose import choose
from leakbench.defenses.core.gradients.layerwise.engine import Layerwise
from leakbench.defenses.core.gradients.layerwise.layers.opened.model import projections_of

from .....parameters import long_but, subtests
from .duties import assert_same_rows, by_loop, snapshot
from .modules import CLASSES, Problem, frozen, synthetic
from .test_layerwise import plans

LENGTH, WIDTH = 5, 6


class Attending(nn.Module):
    """A network whose attention sees its inputs, and as keys or values something else where that is named."""

    def __init__(self, *others: str, masks: bool = False, weights: bool = False, **settings) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, **settings)
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.others, self.masks, self.weights = others, masks, weights

    def forward(self, inputs):
        values: dict[str, Any] = {"query": torch.tanh(inputs)}
        values |= {name: values["query"] for name in ("key", "value")}
        other = self.into(inputs)[:, :4]
        values |= dict.fromkeys(self.others, other)
        if not self.attention.batch_first:
            swapped = {id(each): each.transpose(0, 1) for each in values.values()}
            values = {name: swapped[id(each)] for name, each in values.items()}
        masks = {}
        if self.masks:
            padding = torch.zeros(len(inputs), LENGTH, dtype=torch.bool)
            padding[:, -1] = inputs[:, 0, 0] > 0
            causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            masks = {"key_padding_mask": padding, "attn_mask": causal}
        hidden = self.attention(**values, need_weights=self.weights, **masks)[0]
        return self.out(hidden.mean(dim=1 if self.attention.batch_first else 0))


def encoder() -> nn.Module:
    layers = (nn.TransformerEncoderLayer(WIDTH, 2, 7, dropout=0.0, batch_first=True) for _ in range(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(LENGTH * WIDTH, CLASSES))


ATTENDING = {
    "batch_first": lambda: Attending(batch_first=True),
    "batch_second": lambda: Attending(),
    "with_weights": lambda: Attending(batch_first=True, weights=True),
    "without_bias": lambda: Attending(batch_first=True, bias=False),
    "masked": lambda: Attending(batch_first=True, masks=True),
    "masked_batch_second": lambda: Attending(masks=True),
    "of_others": lambda: Attending("key", "value", batch_first=True),
    "of_other_keys": lambda: Attending("query", batch_first=True),
    "zeros_attended_to": lambda: Attending(add_zero_attn=True, batch_first=True),
    "output_frozen": lambda: frozen(Attending(batch_first=True), "attention.out_proj.weight"),
    "input_frozen": lambda: frozen(Attending(), "attention.in_proj_weight", "attention.in_proj_bias"),
    "at_rest": lambda: Attending(batch_first=True, dropout=0.5).eval(),
    "encoder": encoder,
}


def made_of(name: str, examples: int = 4) -> Problem:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return synthetic(ATTENDING[name](), (LENGTH, WIDTH), examples)


@pytest.mark.parametrize("name", long_but([*ATTENDING][::3], ATTENDING))
def test_rows_and_sums_are_those_of_a_loop(name):
    for examples in (1, LENGTH, 7):
        made = made_of(name, examples)
        engine, rows, before = (
            Layerwise(made.model, cross_entropy, Layout.of(made.model)),
            by_loop(made),
            snapshot(made.model),
        )
        assert_same_rows(engine.rows(made.inputs, made.targets), rows)
        assert snapshot(made.model) == before
        for plan_name, plan in plans(rows).items():
            if plan_name != "difference" and examples > 1:
                expected = clipped_sums(plan, [lambda _point, rows=rows: rows], rows)
                for computed, wanted in zip(engine.sums(plan, made.inputs, made.targets), expected, strict=True):
                    assert float((computed - wanted).abs().max()) <= 1e-11 * float(wanted.abs().max()), plan_name
    choice = choose("auto", made.model, cross_entropy, Layout.of(made.model), made.inputs, made.targets)
    assert choice.note == "layerwise"


@pytest.mark.long
@subtests("weights", [False, True])
@subtests("batch_first", [False, True])
def test_dropout_of_attention_is_drawn_for_each_record(weights, batch_first):
    torch.manual_seed(0)
    model = Attending(dropout=0.4, weights=weights, batch_first=batch_first)
    inputs, targets = torch.randn(9, LENGTH, WIDTH), torch.arange(9) % CLASSES
    plan = StepPlan(Block(codec=Everything(Layout.of(model).dim), bound=clip(0.05)))
    engines = [Engine(model, engine=name) for name in ("layerwise", "one_by_one")]
    whole, wanted = (engine.run(plan.at(0.0), inputs, targets, seed=3).total for engine in engines)
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-6)
    less = engines[0].run(plan.at(0.0), inputs[1:], targets[1:], seed=3).total
    assert float((whole - less).norm()) <= 0.05 * (1 + 1e-5)


class OtherWidths(nn.Module):
    """Attention whose keys, and values where they have a width of their own, are parts of the inputs."""

    def __init__(self, **settings) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, kdim=4, **settings)
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        first = self.attention.batch_first
        query = torch.tanh(self.into(inputs))
        query = query if first else query.transpose(0, 1)
        key = query[..., :4]
        value = key if self.attention.vdim == 4 else query
        return self.out(self.attention(query, key, value)[0].mean(dim=1 if first else 0))


OTHERS = {
    "other_widths": lambda: OtherWidths(vdim=4, batch_first=True),
    "other_widths_batch_second": lambda: OtherWidths(vdim=4),
    "other_keys": lambda: OtherWidths(batch_first=True),
    "learned_keys": lambda: Attending(batch_first=True, add_bias_kv=True),
    "learned_keys_batch_second": lambda: Attending(add_bias_kv=True, weights=True),
    "all_of_it": lambda: OtherWidths(vdim=4, add_bias_kv=True, add_zero_attn=True),
}


@pytest.mark.parametrize("name", long_but(["other_keys"], OTHERS))
def test_parameters_added_by_functions_have_the_rows_and_sums_of_a_loop(name):
    for examples in (1, LENGTH, 7):
        torch.manual_seed(0)
        made = synthetic(OTHERS[name](), (LENGTH, WIDTH), examples)
        rows, before = by_loop(made), snapshot(made.model)
        choice = choose("auto", made.model, cross_entropy, Layout.of(made.model), made.inputs, made.targets)
        assert choice.note.startswith("layerwise (expanded: no known layer holds the parameter 'attention.")
        assert_same_rows(choice.engine.rows(made.inputs, made.targets), rows)
        assert snapshot(made.model) == before
        if examples > 1:
            for plan_name, plan in plans(rows).items():
                if plan_name != "difference":
                    expected = clipped_sums(plan, [lambda _point, rows=rows: rows], rows)
                    sums = choice.engine.sums(plan, made.inputs, made.targets)
                    for computed, wanted in zip(sums, expected, strict=True):
                        assert float((computed - wanted).abs().max()) <= 1e-11 * float(wanted.abs().max()), plan_name


def test_keys_of_another_width_without_biases_are_linear_layers_alone():
    torch.manual_seed(0)
    made = synthetic(OtherWidths(vdim=4, bias=False), (LENGTH, WIDTH), 4)
    engine = Layerwise(made.model, cross_entropy, Layout.of(made.model))
    assert_same_rows(engine.rows(made.inputs, made.targets), by_loop(made))


def test_projections_read_the_parameters_that_the_module_has_now():
    module = nn.MultiheadAttention(WIDTH, 2)
    into, out = projections_of(module)[module]
    assert (into.in_features, into.out_features, out.in_features, out.out_features) == (WIDTH, 3 * WIDTH, WIDTH, WIDTH)
    assert into.weight is module.in_proj_weight and out.bias is module.out_proj.bias
    assert not list(into.parameters())
    module.in_proj_weight = nn.Parameter(torch.ones(3 * WIDTH, WIDTH))
    assert torch.equal(into.weight, torch.ones(3 * WIDTH, WIDTH))


@subtests("size", [1e2, 1e4, 1e6])
def test_positions_that_cancel_do_not_let_an_example_past_its_bound(size):
    """All positions see equal values, and their derivatives cancel up to a part in a million."""
    torch.manual_seed(0)
    model, generator = nn.MultiheadAttention(64, 2, batch_first=True), torch.Generator().manual_seed(0)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = model

        def forward(self, inputs):
            return self.attention(inputs, inputs, inputs, need_weights=False)[0]

    inputs = torch.randn(1, 1, 64, generator=generator).expand(1, 4, 64)
    signal = torch.randn(1, 1, 64, generator=generator) * size
    example = inputs, torch.cat([signal, -signal * (1 + 1e-6)], dim=1).repeat(1, 2, 1)
    others = [1e-3 * torch.randn(3, 4, 64, generator=generator) for _ in range(2)]
    inputs, targets = (torch.cat(pair) for pair in zip(example, others, strict=True))
    engine = Engine(First(), loss=lambda outputs, y: (outputs * y).flatten(1).sum(dim=1), engine="layerwise")
    for norm in (1e-3, 1e-5):
        plan = StepPlan(Block(codec=Everything(engine.layout.dim), bound=clip(norm * size)))
        whole, rest = (engine.clipped_sums(plan, inputs[i:], targets[i:])[0] for i in (0, 1))
        assert float((whole - rest).norm()) <= (1 + 1e-5) * norm * size
