"""Suite files: what they expand to, and that every mistake is one line that names file, key and way out."""

import numpy as np
import pytest
import torch

from leakbench.attacks.core import MembershipScores, Reconstruction
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.plan.expand import plan
from leakbench.audit.scoring.membership import score_membership
from leakbench.audit.scoring.reconstruction import score_reconstruction
from leakbench.audit.scoring.utility import score_utility
from leakbench.audit.suite.small import small_forms
from leakbench.audit.suite.suite import SuiteError, check_sizes, load
from leakbench.leaderboard.metrics import METRICS, reported

from ...parameters import subtests
from ..conftest import SUITE

GOOD = """
name = "toy"
seeds = [0, 1]
task = { data = "digits", model = "mlp", batch = 64, epochs = 2, lr = 0.5 }
budget = { epsilon = [1, 3.0], delta = 1e-5 }
defense = [
    { name = "sgd" },
    { name = "dp_sgd", clip_norm = [0.5, 1], lr = [0.1, 0.2], batch = 128 },
    { name = "random_sparsification", clip_norm = 1.0, final_sparsity = 0.5 },
]
attack = [{ name = "loss_threshold" }, { name = "inverting_gradients", restarts = [1, 4] }]
share = { data = "photos", model = "convnet", step = 2 }
reported = [
    { defense = "dp_sgd", metric = "accuracy", value = 0.9, source = "T 1", clip_norm = 1.0, epsilon = 3.0 },
    { defense = "sgd", attack = "loss_threshold", metric = "auc", value = 0.6, source = "Table 2" },
]
"""


@pytest.fixture
def suite_of(tmp_path):
    def read(text, **options):
        path = tmp_path / "toy.toml"
        path.write_text(text, encoding="utf-8")
        return load(path, **options)

    return read


def mistakes(suite_of, text):
    """What is wrong with the text, one line each, without the name of the file."""
    with pytest.raises(SuiteError) as caught:
        suite_of(text)
    lines = str(caught.value).splitlines()
    assert all("toy.toml: " in line for line in lines)
    return [line.partition("toml: ")[2] for line in lines]


def test_the_quick_suite_is_as_it_is_described():
    suite = load("quick")
    assert suite.seeds == (0, 1, 2)
    assert suite.budget_grid() == [{"epsilon": 3.0, "delta": 1e-5}]
    assert {choice.name for choice in suite.defense_grid()} == {
        "sgd",
        "clipped_sgd",
        "noisy_sgd",
        "dp_sgd",
        "random_sparsification",
        "dpdr",
    }
    assert {choice.name for choice in suite.attack_grid()} == {
        "likelihood_ratio",
        "loss_threshold",
        "inverting_gradients",
        "bias_division",
        "r_gap",
    }
    assert suite.share is not None
    assert (suite.share.step, suite.share.batch, suite.share.noise) == (2, 1, ("none", "calibrated"))
    assert suite.controls


def test_every_suite_of_the_package_is_without_mistakes():
    for name in (*catalog.names("suites"), *small_forms()):
        assert load(name).name == name


def test_a_small_form_overrides_keys_of_its_suite_and_has_a_name_of_its_own(suite_of):
    text = (
        GOOD
        + """
[small]
about = "In little."
budget.epsilon = 8.0
defense.dp_sgd = { clip_norm = 2.0, lr = 0.3 }
without = ["share.step", "defense.dp_sgd.batch"]
"""
    )
    full, small = suite_of(text), suite_of(text, small=True)
    assert full.digest == suite_of(GOOD).digest != small.digest
    assert (small.name, small.about, small.share.step) == (f"{full.name}_small", "In little.", 0)
    assert small.budget_grid() == [{"epsilon": 8.0, "delta": 1e-5}] and small.reported == ()
    (dp_sgd,) = (choice for choice in small.defense_grid() if choice.name == "dp_sgd")
    assert dp_sgd.settings["clip_norm"] == 2.0 and dp_sgd.training == {"lr": 0.3}
    assert suite_of(text.replace("[small]", '[small]\nname = "tiny"'), small=True).name == "tiny"


@subtests(
    ("table", "sentence"),
    [
        ("", r"has no \[small\] table"),
        ("small = 3", r"has no \[small\] table"),
        ('[small]\nwithout = ["task.view"]', r"small\.without: the suite has no key 'task\.view'"),
        ('[small]\nwithout = "task"', r"small\.without must be a list of keys, as \['task\.views'\], got 'task'"),
        ("[small]\ndefense.dpdr.share = 0.1", "override 'small.defense.dpdr.share': no entry named 'dpdr'"),
        ("[small]\ntask.epoch = 1", r"\[small\]: task\.epoch: unknown key; did you mean 'epochs'\?"),
    ],
)
def test_mistakes_of_a_small_form_are_named(suite_of, table, sentence):
    with pytest.raises(SuiteError, match=sentence):
        suite_of(f"{GOOD}\n{table}\n", small=True)


def test_the_name_of_a_small_form_is_its_old_spelling():
    assert load("rs_table2_small").digest == load("rs_table2_fmnist", small=True).digest
    with pytest.raises(SuiteError, match=r"no \[small\] table; did you mean 'rs_table2_fmnist'"):
        load("rs_table2_svhn", small=True)


def test_lists_are_grids_and_settings_are_complete(suite_of):
    suite = suite_of(GOOD)
    dp_sgd = [choice for choice in suite.defense_grid() if choice.name == "dp_sgd"]
    assert [(choice.settings["clip_norm"], choice.training) for choice in dp_sgd] == [
        (clip_norm, {"lr": lr, "batch": 128}) for clip_norm in (0.5, 1.0) for lr in (0.1, 0.2)
    ]
    assert len(suite.defense_grid()) == 6
    assert "noise_multiplier" not in dp_sgd[0].settings
    attacks = suite.attack_grid()
    assert [attack.settings["restarts"] for attack in attacks[1:]] == [1, 4]
    assert set(attacks[1].settings) == set(catalog.settings("attacks", "inverting_gradients"))
    assert suite.budget_grid() == [{"epsilon": 1.0, "delta": 1e-5}, {"epsilon": 3.0, "delta": 1e-5}]


def test_a_defense_may_override_how_it_is_trained(suite_of):
    suite = suite_of(GOOD)
    plain, dp_sgd = suite.defense_grid()[:2]
    assert (suite.task_for(plain).lr, suite.task_for(plain).batch) == (0.5, 64)
    assert (suite.task_for(dp_sgd).lr, suite.task_for(dp_sgd).batch) == (0.1, 128)
    assert suite.task_for(dp_sgd).epochs == 2


def test_a_defense_may_draw_its_batches_in_ways_of_its_own(suite_of):
    capped = 'lr = 0.5, sampling = "truncated_poisson", largest_batch = 80 }'
    text = GOOD.replace("lr = 0.5 }", capped).replace(
        '{ name = "sgd" }', '{ name = "sgd", sampling = ["poisson", "shuffle"] }'
    )
    suite = suite_of(text)
    tasks = [suite.task_for(choice) for choice in suite.defense_grid()[:3]]
    assert [(task.sampling, task.largest_batch) for task in tasks] == [
        ("poisson", None),
        ("shuffle", None),
        ("truncated_poisson", 80),
    ]


def test_a_defense_has_no_sampling_of_its_own_that_needs_another_key(suite_of):
    (line,) = mistakes(suite_of, GOOD.replace('{ name = "sgd" }', '{ name = "sgd", sampling = "cyclic" }'))
    assert line.startswith("defense[0].sampling: must be ")
    assert "'random_allocation'" in line


def test_a_budget_may_be_a_grid_of_noise_multipliers(suite_of):
    suite = suite_of(GOOD.replace("epsilon = [1, 3.0]", "noise_multiplier = [1, 10]").replace(", epsilon = 3.0", ""))
    assert suite.budget_grid() == [
        {"noise_multiplier": 1.0, "delta": 1e-5},
        {"noise_multiplier": 10.0, "delta": 1e-5},
    ]


def test_a_model_may_have_settings(suite_of):
    suite = suite_of(GOOD.replace('model = "mlp"', 'model = { name = "mlp", hidden = 8 }'))
    assert (suite.task.model.name, suite.task.model.settings) == ("mlp", {"hidden": 8})


def test_reported_figures_belong_to_the_cells_that_their_selectors_name(suite_of):
    suite = suite_of(GOOD)
    weak, strong = suite.budget_grid()
    small, large = (
        next(c for c in suite.defense_grid() if c.settings.get("clip_norm") == norm and c.name == "dp_sgd")
        for norm in (0.5, 1.0)
    )
    assert [row.source for row in suite.reported_for(large, strong)] == ["T 1"]
    assert suite.reported_for(large, weak) == suite.reported_for(small, strong) == []
    loss, inverting = suite.attack_grid()[:2]
    assert [row.value for row in suite.reported_for(suite.defense_grid()[0], weak, loss)] == [0.6]
    assert suite.reported_for(suite.defense_grid()[0], weak, inverting) == []
    assert suite.reported_for(suite.defense_grid()[0], weak) == []


@subtests(
    ("old", "new", "expected"),
    [
        ("seeds =", "sedes =", ["seeds: is missing", "sedes: unknown key; did you mean 'seeds'?"]),
        ("seeds = [0, 1]", "seeds = [1, 1]", ["seeds: must be distinct, got [1, 1]"]),
        ("seeds = [0, 1]", "seeds = []", ["seeds: must have at least one entry, got none"]),
        ("lr = 0.5", 'lr = "0.5"', ["task.lr: must be a number, got '0.5'"]),
        ("lr = 0.5", "lr = 0", ["task.lr: must be > 0, got 0"]),
        ("lr = 0.5", "lr = nan", ["task.lr: must be a finite number, got nan"]),
        ("lr = 0.5", "learning = 0.5", None),
        ("epochs = 2", "epochs = 2.5", ["task.epochs: must be an integer, got 2.5"]),
        ("epochs = 2", "epochs = true", ["task.epochs: must be an integer, got True"]),
        ("batch = 64", "batch = 0", ["task.batch: must be >= 1, got 0"]),
        ("lr = 0.5 }", "lr = 0.5, momentum = 1.0 }", ["task.momentum: must be < 1, got 1.0"]),
        ("lr = 0.5 }", "lr = 0.5, average = 1.0 }", ["task.average: must be < 1, got 1.0"]),
        ("lr = 0.5 }", "lr = 0.5, views = 0 }", ["task.views: must be >= 1, got 0"]),
        (
            "lr = 0.5 }",
            "lr = 0.5, statistics = { mean_nrom = 1.0, square_norm = 0 } }",
            [
                "task.statistics.mean_norm: is missing",
                "task.statistics.square_norm: must be > 0, got 0",
                "task.statistics.mean_nrom: unknown key; did you mean 'mean_norm'?",
            ],
        ),
        (
            "lr = 0.5 }",
            'lr = 0.5, pretrain = { epochs = 0, lr = 0.1, batch = 2.5, trian = "last" } }',
            [
                "task.pretrain.epochs: must be >= 1, got 0",
                "task.pretrain.batch: must be an integer, got 2.5",
                "task.pretrain.train: is missing",
                "task.pretrain.trian: unknown key; did you mean 'train'?",
            ],
        ),
        (
            "batch = 128",
            'pretrain = { epochs = 1, lr = nan, batch = 9, train = "last" }',
            ["defense[1].pretrain: lr: must be a finite number, got nan"],
        ),
        (
            "lr = 0.5 }",
            'lr = 0.5, pretrain = { epochs = 1, lr = 1, batch = 9, train = "lora" } }',
            ["task.pretrain: rank must be given for train = 'lora', and for no other, got none for 'lora'"],
        ),
        (
            "batch = 128",
            'pretrain = { epochs = 1, lr = 1, batch = 9, train = "last", rank = 4 }',
            ["defense[1].pretrain: rank must be given for train = 'lora', and for no other, got 4 for 'last'"],
        ),
        (
            "batch = 128",
            'pretrain = { epochs = 1, lr = 1, batch = 9, train = "all", alpha = 4 }',
            ["defense[1].pretrain: alpha must go with train = 'lora', got 4 for 'all'"],
        ),
        (
            "batch = 128",
            'pretrain = { epochs = 1, lr = 1, batch = 9, train = "lora", rank = 0 }',
            ["defense[1].pretrain: rank: must be >= 1, got 0"],
        ),
        (
            "batch = 128",
            'pretrain = [{ epochs = 1, lr = 1, batch = 9, train = "lsat" }, { epochs = 1, trian = "all" }]',
            [
                "defense[1].pretrain[0]: train: must be 'all', 'last' or 'lora', got 'lsat'; did you mean 'last'?",
                "defense[1].pretrain[1]: lr: is missing",
            ],
        ),
        ("batch = 128", "pretrain = true", ["defense[1].pretrain: must be a table, got True"]),
        (
            "lr = 0.5 }",
            'lr = 0.5, sampling = "poison" }',
            [
                "task.sampling: must be 'poisson', 'truncated_poisson', 'random_allocation', 'cyclic', 'shuffle', "
                "'partition', 'fixed' or 'full', got 'poison'; did you mean 'poisson'?"
            ],
        ),
        (
            'data = "digits"',
            'data = "digist"',
            ["task.data: no data set named 'digist'; did you mean 'digits'?"],
        ),
        ('model = "mlp"', "model = 3", None),
        ('model = "mlp"', 'model = "mpl"', ["task.model: no model named 'mpl'; did you mean 'mlp'?"]),
        (
            'model = "mlp"',
            'model = { name = "mlp", hiden = 8 }',
            ["task.model.hiden: unknown setting of 'mlp'; did you mean 'hidden'?"],
        ),
        ("epsilon = [1, 3.0]", "epsilon = 0", ["budget.epsilon: must be > 0, got 0"]),
        ("epsilon = [1, 3.0]", "epsilon = [1, -3]", ["budget.epsilon[1]: must be > 0, got -3"]),
        ("epsilon = [1, 3.0]", "epsilon = [3, 3]", ["budget.epsilon: must be distinct, got [3.0, 3.0]"]),
        (
            "epsilon = [1, 3.0], ",
            "",
            ["budget: must have one of epsilon, advantage, tpr, noise_multiplier, got none of them"],
        ),
        (
            "epsilon = [1, 3.0]",
            "epsilon = 1, noise_multiplier = 1",
            ["budget: must have one of epsilon, advantage, tpr, noise_multiplier, got epsilon and noise_multiplier"],
        ),
        ("epsilon = [1, 3.0]", "advantage = 1.5", ["budget.advantage: must be < 1, got 1.5"]),
        (
            "epsilon = [1, 3.0]",
            "tpr = 0.05",
            ["budget: must have tpr and fpr together, as tpr = 0.05, fpr = 0.01; fpr is missing"],
        ),
        (
            "epsilon = [1, 3.0]",
            "epsilon = 1, fpr = 0.01",
            ["budget: must have tpr and fpr together, as tpr = 0.05, fpr = 0.01; tpr is missing"],
        ),
        (
            "epsilon = [1, 3.0]",
            "tpr = [0.05, 0.01], fpr = 0.01",
            ["budget.tpr: must be above fpr, 0.01, got 0.01: coins have a true positive rate of fpr"],
        ),
        ("delta = 1e-5", "delta = 1.0", ["budget.delta: must be < 1, got 1.0"]),
        ('"dp_sgd", clip', '"dp_sdg", clip', None),
        (
            "final_sparsity = 0.5",
            "final_sparsity = 1.0",
            ["defense[2]: final_sparsity must be in [0, 1), got 1.0"],
        ),
        (
            "final_sparsity = 0.5",
            "final_sparsty = 0.5",
            ["defense[2].final_sparsty: unknown setting of 'random_sparsification'; did you mean 'final_sparsity'?"],
        ),
        (
            "final_sparsity = 0.5",
            'final_sparsity = [0.5, "0.9"]',
            ["defense[2].final_sparsity[1]: must be a number, got '0.9'"],
        ),
        (
            "final_sparsity = 0.5",
            "noise_multiplier = 1.0",
            [
                "defense[2].noise_multiplier: is decided by the budget: give it there, "
                "as budget = { noise_multiplier = 1.0, delta = 1e-5 }"
            ],
        ),
        ("lr = [0.1, 0.2]", "lr = [0.1, -0.2]", ["defense[1].lr[1]: must be > 0, got -0.2"]),
        ("batch = 128", "batch = 12.5", ["defense[1].batch: must be an integer, got 12.5"]),
        ('{ name = "sgd" }', '{ nam = "sgd" }', None),
        ('{ name = "sgd" }', '{ name = "sgd" }, { name = "sgd" }', ["defense[1]: repeats defense[0]"]),
        (
            "restarts = [1, 4]",
            "restarts = []",
            ["attack[1].restarts: must have at least one entry, got none"],
        ),
        (
            '{ name = "sgd" }',
            '{ name = "*" }',
            ["defense[0]: '*' must be there once, as the last entry"],
        ),
        ("restarts = [1, 4]", "lr = true", ["attack[1].lr: must be a number, got True"]),
        ("restarts = [1, 4]", "epochs = 4", None),
        (
            "lr = 0.5",
            'lr = 0.5, sampling = "cyclic"',
            ["task: groups must be given for cyclic sampling, and for no other, got none for 'cyclic'"],
        ),
        (
            "lr = 0.5",
            "lr = 0.5, largest_batch = 90",
            [
                "task: largest_batch must be given for truncated_poisson sampling, and for no other, "
                "got 90 for 'poisson'"
            ],
        ),
        ("lr = 0.5", "lr = 0.5, nominal_size = 0", ["task.nominal_size: must be >= 1, got 0"]),
        (
            "lr = 0.5",
            'lr = 0.5, sampling = "shuffle", nominal_size = 90',
            ["task: nominal_size must go with poisson or full sampling, got 'shuffle'"],
        ),
        ("step = 2", "step = -1", ["share.step: must be >= 0, got -1"]),
        ("step = 2", "local = { epochs = 2 }", ["share.local.batch: is missing"]),
        (
            "step = 2",
            "batch = 4, local = { batch = 2, epoch = 3 }",
            ["share.local.epoch: unknown key; did you mean 'epochs'?"],
        ),
        ("step = 2", "batch = 4, local = { batch = 3 }", ["share: local.batch must divide batch, 4, got 3"]),
        (
            "step = 2",
            "step = 3, batch = 4, local = { batch = 2 }",
            ["share: step must begin an epoch, a multiple of its 2 local steps, got 3"],
        ),
        (
            "step = 2",
            'noise = "calibratd"',
            ["share.noise: must be 'none' or 'calibrated', got 'calibratd'; did you mean 'calibrated'?"],
        ),
        (
            'metric = "auc"',
            'metric = "acu"',
            ["reported[1].metric: no metric named 'acu'; did you mean 'auc'?"],
        ),
        ("clip_norm = 1.0, epsilon", "clip_nrom = 1.0, epsilon", None),
        ('{ defense = "sgd"', '{ defense = "dpdr"', None),
        ("value = 0.6, ", "", ["reported[1].value: is missing"]),
    ],
)
def test_a_mistake_is_one_line_that_names_its_key(suite_of, old, new, expected):
    assert GOOD.count(old) == 1
    found = mistakes(suite_of, GOOD.replace(old, new))
    if expected is None:
        assert 1 <= len(found) <= 2
        expected = found  # what it says is checked below
    assert found == expected


@subtests(
    ("old", "new", "sentence"),
    [
        ("lr = 0.5", "learning = 0.5", "task.lr: is missing"),
        ("lr = 0.5", "learning = 0.5", "task.learning: unknown key; there are data, model"),
        ('model = "mlp"', "model = 3", "task.model: must be text, got 3"),
        (
            '"dp_sgd", clip',
            '"dp_sdg", clip',
            "defense[1].name: no defense named 'dp_sdg'; did you mean 'dp_sgd'?",
        ),
        ('{ name = "sgd" }', '{ nam = "sgd" }', "defense[0].name: is missing"),
        ("restarts = [1, 4]", "epochs = 4", "attack[1].epochs: unknown setting of 'inverting_gradients'; "),
        (
            "clip_norm = 1.0, epsilon",
            "clip_nrom = 1.0, epsilon",
            "reported[0].clip_nrom: unknown selector; did you mean 'clip_norm'?",
        ),
        ('{ defense = "sgd"', '{ defense = "dpdr"', "reported[1].defense: no defense named 'dpdr'; "),
    ],
)
def test_mistakes_that_come_with_others_are_said_too(suite_of, old, new, sentence):
    assert any(line.startswith(sentence) or sentence in line for line in mistakes(suite_of, GOOD.replace(old, new)))


def test_all_mistakes_of_a_file_are_reported_at_once(suite_of):
    text = GOOD.replace("seeds", "sedes").replace("lr = 0.5", "lr = -1").replace("delta = 1e-5", "delta = 2.0")
    text = text.replace('"digits"', '"digist"').replace("restarts = [1, 4]", "restart = 1")
    text = text.replace("final_sparsity = 0.5", "final_sparsity = 2.0").replace('"sgd" }', '"sdg" }')
    keys = {line.partition(":")[0] for line in mistakes(suite_of, text)}
    assert {
        "sedes",
        "seeds",
        "task.lr",
        "budget.delta",
        "task.data",
        "attack[1].restart",
        "defense[2]",
    } <= keys
    assert "defense[0].name" in keys


@subtests(
    "text",
    [
        "",
        "defense = 3",
        "defense = [3]",
        "task = 3",
        "reported = 3",
        "name = 2021-01-01",
        "defense = [{}]\nattack = {}",
    ],
)
def test_files_of_another_shape_are_refused_not_crashed_on(suite_of, text):
    assert mistakes(suite_of, text)


def test_a_file_that_is_no_toml_or_not_there_is_one_sentence(suite_of, tmp_path):
    with pytest.raises(SuiteError, match=r"toy.toml: not TOML: .*line 2"):
        suite_of("name = 1\nname = 2\n")
    with pytest.raises(SuiteError, match=r"cannot read suite .*gone.toml: No such file"):
        load(tmp_path / "gone.toml")
    with pytest.raises(SuiteError, match="no suite named 'quikc'; did you mean 'quick'"):
        load("quikc")
    (tmp_path / "toy.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SuiteError, match="must be UTF-8 text"):
        load(tmp_path / "toy.toml")


def test_the_digest_is_that_of_the_content(suite_of):
    digest = suite_of(GOOD).digest
    assert len(digest) == 64
    assert suite_of("# a comment\n" + GOOD.replace("lr = 0.5", "lr = 5e-1")).digest == digest
    assert suite_of(GOOD.replace("step = 2 }", "step = 2, batch = 1 }")).digest == digest  # the default, spelled out
    assert suite_of(GOOD.replace("final_sparsity = 0.5", "final_sparsity = 0.6")).digest != digest
    assert suite_of(GOOD.replace("lr = 0.5", "lr = 0.6")).digest != digest


def test_a_selection_keeps_the_digest_and_only_the_methods_named(suite_of):
    suite = suite_of(GOOD)
    part = suite.select(defenses=["dp_sgd"], attacks=["loss_threshold"])
    assert {choice.name for choice in part.defense_grid()} == {"dp_sgd"}
    assert [choice.name for choice in part.attack_grid()] == ["loss_threshold"]
    assert part.digest == suite.digest
    assert len(suite.defense_grid()) == 6
    assert suite.select(defenses=[]).defense_grid() == suite.defense_grid()
    with pytest.raises(SuiteError, match="suite 'toy': no defense named 'dp_sdg'; did you mean 'dp_sgd'"):
        suite.select(defenses=["dp_sdg"])
    with pytest.raises(SuiteError, match="suite 'toy': no attack named 'lira'"):
        suite.select(attacks=["lira"])


def test_an_override_is_told_of_the_cells_that_it_touches(suite_of):
    suite = suite_of(GOOD).with_overrides(
        ["seeds=[5]", "task.lr=0.7", "defense.dp_sgd.clip_norm=3", "share.images = 2", "attack.1.restarts=1"]
    )
    plain, dp_sgd = suite.defense_grid()[:2]
    attack = suite.attack_grid()[1]
    assert suite.changes_for(plain, None, shared=False) == ("task.lr 0.5 -> 0.7",)
    # It has a rate of its own, whatever the task's.
    assert suite.changes_for(dp_sgd, None, shared=False) == ("defense.dp_sgd.clip_norm [0.5, 1] -> 3",)
    assert suite.changes_for(plain, attack, shared=True) == (
        "task.lr 0.5 -> 0.7",
        "share.images not set -> 2",
        "attack.1.restarts [1, 4] -> 1",
    )
    again = suite.with_overrides(["task.lr=0.9"])
    assert again.changes_for(plain, None, shared=False) == ("task.lr 0.5 -> 0.7", "task.lr 0.7 -> 0.9")
    assert suite_of(GOOD).changes_for(plain, None, shared=False) == ()


def test_overrides_replace_values_and_change_the_digest(suite_of):
    suite = suite_of(GOOD)
    other = suite.with_overrides(
        [
            "task.epochs=5",
            "budget.epsilon=[1, 2]",
            "defense.dp_sgd.clip_norm=3",
            "share.images = 2",
            "attack.1.restarts=1",
        ]
    )
    assert (other.task.epochs, suite.task.epochs) == (5, 2)
    assert other.budget_grid()[1]["epsilon"] == 2
    assert {c.settings["clip_norm"] for c in other.defense_grid() if c.name == "dp_sgd"} == {3.0}
    assert len(other.attack_grid()) == 2
    assert other.share is not None and other.share.images == 2
    assert other.digest != suite.digest
    assert suite.with_overrides([]) is suite
    assert suite.with_overrides(["task.optimizer='adam'"]).task.optimizer == "adam"
    assert suite.with_overrides(["budget={noise_multiplier=2.0, delta=1e-6}", "reported=[]"]).budget_grid() == [
        {"noise_multiplier": 2.0, "delta": 1e-6}
    ]


@subtests(
    ("override", "sentence"),
    [
        ("task.epoch=5", "task.epoch: unknown key; did you mean 'epochs'?"),
        ("tsk.epochs=5", "tsk: unknown key; did you mean 'task'?"),
        ("task.epochs=0", "task.epochs: must be >= 1, got 0"),
        ("task.epochs", "an override must be key.path=value, as task.epochs=2, got 'task.epochs'"),
        ("task.optimizer=adam", "the value of task.optimizer must be TOML (text in quotes), got 'adam'"),
        ("task.epochs=1\nname='x'", "must be TOML"),
        ("task.lr.x=1", "override 'task.lr.x=1' leads nowhere"),
        ("defense.dp_sdg.clip_norm=1", "no entry named 'dp_sdg'; did you mean 'dp_sgd'?"),
        ("defense.dp_sgd.clip=1", "defense[1].clip: unknown setting of 'dp_sgd'; did you mean 'clip_norm'?"),
    ],
)
def test_an_override_that_does_not_fit_is_refused(suite_of, override, sentence):
    with pytest.raises(SuiteError) as caught:
        suite_of(GOOD).with_overrides([override])
    assert sentence in str(caught.value)


DEALT = '{ name = "sgd", sampling = "partition" }'


def test_a_method_that_is_added_changes_no_other_cell_and_takes_settings(suite_of):
    suite = suite_of(SUITE)
    entry = '{ name = "random_freeze", clip_norm = 2.0 }'
    larger = suite.with_added(defenses=[entry], attacks=["lira"]).with_overrides(["seeds=[7]"])
    assert [choice.name for choice in larger.defense_grid()] == ["sgd", "dp_sgd", "random_freeze"]
    assert larger.defense_grid()[-1].settings["clip_norm"] == 2.0
    assert [choice.name for choice in larger.attack_grid()][-1] == "lira"
    both = [s.with_overrides(["seeds=[7]"]) for s in (suite, suite.with_added(defenses=[entry]))]
    small, large = ({cell.id for cell in plan(s).cells} for s in both)
    assert small < large
    assert suite.with_added() is suite


@subtests(
    "entry, sentence",
    [
        ("dp_sdg", "did you mean 'dp_sgd'"),
        ("dp_sgd", "repeats"),
        ("{ name = ", "must be a name, a path or a TOML table"),
        ('{ name = "dp_sgd" }\nseeds = [3]', "must be a name, a path or a TOML table"),
        ('{ name = "random_freeze", surprise = 1 }', "surprise"),
    ],
)
def test_a_bad_added_method_is_a_sentence(suite_of, entry, sentence):
    with pytest.raises(SuiteError, match=sentence):
        suite_of(SUITE).with_added(defenses=[entry])


def test_a_part_of_a_plan_has_the_cells_asked_for_alone(suite_of):
    whole = plan(suite_of(SUITE))
    wanted = {whole.cells[0].id, whole.cells[-1].id, "none"}
    part = whole.only(wanted)
    assert {cell.id for cell in part.cells} == wanted - {"none"}
    assert all(job.cells for job in part.jobs)


def test_batches_that_the_data_cannot_fill_are_refused(suite_of):
    suite = suite_of(GOOD)
    check_sizes(suite, 128, n_share=1)
    with pytest.raises(
        SuiteError, match=r"task.batch: must be at most 32, the private examples, got 64: a sample rate of 2$"
    ):
        check_sizes(suite.select(defenses=["sgd"]), 32)
    with pytest.raises(SuiteError, match=r"defense 'dp_sgd'.batch: must be at most 100"):
        check_sizes(suite, 100)
    grouped = suite.with_overrides(['task.sampling="cyclic"', "task.groups=4"]).select(defenses=["sgd"])
    with pytest.raises(
        SuiteError, match=r"task.batch: must be at most 50, the private examples of one of 4 groups, got 64$"
    ):
        check_sizes(grouped, 200)
    # A nominal size stands for the number of examples, which may be smaller than a batch.
    nominal = suite.with_overrides(["task.nominal_size=500"])
    check_sizes(nominal, 100)
    with pytest.raises(SuiteError, match=r"batch: must be at most 90, nominal_size, got 128: a sample rate of 1\.42"):
        check_sizes(suite.with_overrides(["task.nominal_size=90"]), 1000)
    dealt = suite_of(GOOD.replace("lr = 0.5 }", "lr = 0.5, nominal_size = 500 }").replace('{ name = "sgd" }', DEALT))
    with pytest.raises(SuiteError, match=r"defense 'sgd'\.sampling: must be poisson or full with task\.nominal_size"):
        check_sizes(dealt, 1000)
    with pytest.raises(SuiteError, match=r"task.private: must be at most 1000, the private examples, got 2000"):
        check_sizes(suite.with_overrides(["task.private=2000"]), 1000)
    with pytest.raises(SuiteError, match=r"share.batch: batch x images must be at most 3"):
        check_sizes(suite.with_overrides(["share.images=4"]), 1000, n_share=3)


def test_a_paper_can_report_every_metric_that_is_scored():
    members = torch.arange(2400) < 1200
    scores = MembershipScores(
        ids=torch.arange(2400), scores=torch.as_tensor(np.arange(2400.0)), exact=False, dependence="per_model"
    )
    found = Reconstruction(inputs=torch.zeros(1, 1, 8, 8), labels=torch.tensor([0]), objective=0.0)
    scored = (
        set(score_membership(scores, members))
        | set(score_utility(torch.eye(2), torch.tensor([0, 1])))
        | set(score_reconstruction(found, found.inputs, found.labels, low=0.0, high=1.0))
    )
    ours = {"objective", "psnr_floor", "psnr_match", "gain_over_mean", "gain_over_match", "leak"}
    assert scored - set(reported()) == ours
    assert scored <= set(METRICS)


@subtests(
    ("row", "why"),
    [
        ('metric = "epsilon", attack = "loss_threshold"', "'epsilon' is no attack's, so it must go without attack"),
        ('metric = "auc"', "'auc' is an attack's, so attack must name one, got none"),
        (
            'metric = "psnr", attack = "loss_threshold"',
            "'psnr' is of reconstruction, and loss_threshold is of membership",
        ),
        ('metric = "implied_epsilon", attack = "loss_threshold"', "no metric named 'implied_epsilon'"),
    ],
)
def test_a_papers_figure_that_no_cell_can_have_is_refused(suite_of, row, why):
    text = f'{SUITE}\nreported = [{{ defense = "dp_sgd", value = 1.0, source = "T", {row} }}]'
    with pytest.raises(SuiteError, match=rf"reported\[0\].metric: {why}"):
        suite_of(text)


def test_a_papers_epsilon_belongs_to_utility(suite_of):
    text = f'{SUITE}\nreported = [{{ defense = "dp_sgd", value = 3.0, source = "T", metric = "epsilon" }}]'
    suite = suite_of(text)
    (dp_sgd,) = (choice for choice in suite.defense_grid() if choice.name == "dp_sgd")
    assert [row.metric for row in suite.reported_for(dp_sgd, suite.budget_grid()[0])] == ["epsilon"]


def test_a_star_is_no_method_of_another_distribution(suite_of, monkeypatch):
    """Else one that is installed could break a suite of ours, or change what it asks."""
    known = catalog.names
    monkeypatch.setattr(catalog, "names", lambda kind: (*known(kind), "foreign"))
    begin, end = GOOD.index("defense = ["), GOOD.index("attack = [")
    text = GOOD[:begin] + 'defense = [{ name = "*" }]\n' + GOOD[end : GOOD.index("reported")]
    names = {choice.name for choice in suite_of(text).defense_grid()}
    assert "foreign" not in names and {"dp_sgd", "rpdp"} <= names


def test_a_star_is_every_method_that_no_other_entry_names(suite_of):
    begin, end = GOOD.index("defense = ["), GOOD.index("attack = [")
    named = 'defense = [{ name = "dp_sgd", clip_norm = [0.1, 1.0] }, { name = "*" }]\n'
    text = GOOD[:begin] + named + GOOD[end : GOOD.index("reported")]
    found = suite_of(text)
    names = [choice.name for choice in found.defense_grid()]
    assert names == ["dp_sgd", "dp_sgd", *(name for name in catalog.central_names() if name != "dp_sgd")]
    # Of which each may be chosen or given other settings, as if it were written there.
    assert [one.name for one in found.select(defenses=["dpdr"]).defense_grid()] == ["dpdr"]
    other = found.with_overrides(["defense.dpdr.share=0.3"]).defense_grid()[names.index("dpdr")]
    assert other.settings["share"] == 0.3
    assert mistakes(suite_of, text.replace('"*"', '"*", clip_norm = 1.0')) == [
        "defense[1]: '*' must have no settings, got clip_norm"
    ]
