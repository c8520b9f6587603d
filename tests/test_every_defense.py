"""The duties of every defense, run over the catalogue: each file of `defenses/` with its function of that name.

What is particular to one of them is in its own test file; what the duties are is in `defenses/duties.py`.
"""

import importlib
import inspect
import math
from functools import cache, partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leakbench import defenses
from leakbench.audit.catalog.listing import is_federated
from leakbench.defenses.core import adapted, poisson, predict

from .defenses import duties
from .parameters import long_but

# Values under which six steps of a tiny network see more of a method than its defaults show, by the setting's
# name; a setting that is not here keeps its default.
SMALL = {
    "clip_norm": 0.5,
    "switch_step": 4,
    "refreshes": 2,
    "final_sparsity": 0.8,
    "cooling_epochs": 2,
    "share": 0.3,
    "buffers": 2,
    "rank": 3,
    "restart": 4,
    "rounds": 4,
    "groups": 2,
    "validation_rate": 0.5,
}


def settings_of(name):
    function = getattr(importlib.import_module(f"leakbench.defenses.{name}"), name)
    return function, inspect.signature(function).parameters


def factory(name, **given):
    function, accepted = settings_of(name)
    chosen = {key: value for key, value in SMALL.items() if key in accepted} | given
    for key, setting in accepted.items():
        if setting.default is inspect.Parameter.empty and key not in chosen:
            raise TypeError(f"'{key}' of defenses/{name}.py must have a default, or a small value in SMALL")

    def build(noise_multiplier):
        noise = {"noise_multiplier": noise_multiplier} if "noise_multiplier" in accepted else {}
        return function(**chosen, **noise)

    return build


@cache
def claim(name, noise_multiplier):
    return predict(FACTORIES[name](noise_multiplier), sampling=poisson(0.1), steps=2).claim(1e-5)


@cache
def kind_of_plan(name):
    """What an engine tells plans apart by: codecs, bounds and queries, block by block, and those of trials."""
    plans = [moment.plan for moment in duties.history(FACTORIES[name](1.0))]
    trials = [block for plan in plans if plan.trial for block in plan.trial.plan.blocks]
    blocks = [block for plan in plans for block in plan.blocks] + trials
    inner = [getattr(block.codec, "subspace", None) for block in blocks]
    return frozenset(
        (type(b.codec), type(s), b.bound.kind, type(b.query), b.updates) for b, s in zip(blocks, inner, strict=True)
    ) | {any(plan.correlated for plan in plans)}


def error_of(name):
    """What goes wrong with a method before it takes a step; None for nothing."""
    try:
        FACTORIES[name] = factory(name)
        claim(name, 5.0)
        kind_of_plan(name)
    except Exception as error:  # of whatever kind: the file is somebody's first attempt
        return error
    return None


# A method that cannot be planned fails by itself, so that all others are tested on.
# Federated methods have duties of their own, in `test_every_federated.py`.
METHODS = sorted(p.stem for p in Path(defenses.__path__[0]).glob("*.py") if not p.stem.startswith("_"))
FILES = [name for name in METHODS if not is_federated(name)]
FACTORIES = {}
ERRORS = {name: error_of(name) for name in FILES}
NAMES = [name for name in FILES if ERRORS[name] is None]
PROVED = [name for name in NAMES if math.isfinite(claim(name, 5.0).epsilon)]
UNPROVED = [name for name in NAMES if name not in PROVED]
NOISY = [name for name in NAMES if FACTORIES[name](1.0).calibrated_multiplier > 0]


# Bounds, views and dropout are the core's: of the methods whose plans look alike to it, the first stands for the others
# with the long tests. With `make test-all` all of them are tried.
KINDS = {name: kind_of_plan(name) for name in NAMES}
REPRESENTATIVES = set({KINDS[name]: name for name in reversed(NAMES)}.values())
# Views and dropout are in what an example is asked, before codec and bound: the first that asks it stands for others.
ASKING = set({frozenset(k[3] for k in KINDS[name] if isinstance(k, tuple)): name for name in reversed(NAMES)}.values())

# By default, of duties at more cost: a bound of its own, and a codec.
EXAMPLES = ("auto_s", "ranked")


def unless_alike(name, *values, **settings):
    """A case of a few methods by default, and slow where another method's plans look alike."""
    first = name in (ASKING if duties.DRAWN in values else REPRESENTATIVES)
    long = [] if first and name in EXAMPLES else [pytest.mark.long]
    return pytest.param(*values, marks=long if first else [*long, pytest.mark.slow], **settings)


def moving(name, noise_multiplier):
    return adapted(FACTORIES[name](noise_multiplier))


def has_one_norm(name):
    if getattr(FACTORIES[name](1.0).method, "not_adapted", ""):
        return False
    plans = [moment.plan for moment in duties.history(FACTORIES[name](1.0))]
    return all(sum(block.updates and math.isfinite(plan.sensitivity) for block in plan.blocks) == 1 for plan in plans)


each = pytest.mark.parametrize("name", NAMES)
# Of batches for every method: fewer than for a test of one thing, and in proportion to the profile's.
some_batches = settings(max_examples=max(5, settings().max_examples * 2 // 5))
with_each_bound = pytest.mark.parametrize(
    "build",
    [
        unless_alike(name, factory(name, bound=bound), id=f"{name} {bound}")
        for name in NAMES
        for bound in ("normalize", "adaptive_weight")
        if "bound" in settings_of(name)[1]
    ]
    + [
        unless_alike(name, partial(moving, name), id=f"{name} adaptive")
        for name in NAMES
        if "bound" in settings_of(name)[1] and has_one_norm(name)
    ],
)


def in_each_world(*plain):
    """All methods as they are, by default those named, and those that stand for others with views and dropout."""
    cases = [
        pytest.param(name, world, id=f"{name} {kind}", marks=() if name in plain else pytest.mark.long)
        if world is duties.PLAIN
        else unless_alike(name, name, world, id=f"{name} {kind}")
        for name in NAMES
        for kind, world in duties.WORLDS.items()
    ]
    return pytest.mark.parametrize(("name", "world"), cases)


# What is the engine's in the first place: sums without somebody, in parts, or one by one, and a step done twice.
each_kind_in_each_world = pytest.mark.parametrize(
    ("name", "world"),
    [unless_alike(name, name, world, id=f"{name} {kind}") for name in NAMES for kind, world in duties.WORLDS.items()],
)
each_that_proves = pytest.mark.parametrize("name", PROVED)


def test_the_catalogue_has_methods_that_prove_something_and_methods_that_do_not():
    assert "dp_sgd" in PROVED
    assert "sgd" in UNPROVED
    assert "sgd" not in NOISY


@pytest.mark.parametrize("name", FILES)
def test_a_defense_can_be_planned_has_its_files_name_and_releases_nothing_without_a_noise_multiplier(name):
    if (error := ERRORS[name]) is not None:
        raise error
    function, accepted = settings_of(name)
    assert FACTORIES[name](1.0).name == function.__name__ == name
    for setting in accepted.values():
        assert setting.kind is inspect.Parameter.KEYWORD_ONLY
    duties.check_coins(FACTORIES[name])
    if name in NOISY:
        duties.check_refusals(FACTORIES[name])


@each_that_proves
@some_batches
@given(rows=duties.BATCHES, pick=st.integers(0, 10**6))
def test_removing_any_row_moves_the_sums_by_at_most_the_sensitivity(name, rows, pick):
    moments = duties.histories(FACTORIES[name])
    duties.check_bound(moments[pick % len(moments)].plan, rows)


def test_what_takes_a_clip_norm_takes_any_bound():
    for name in NAMES:
        accepted = settings_of(name)[1]
        build = factory(name, bound="normalize") if "bound" in accepted else FACTORIES[name]
        plan = duties.history(build(1.0))[-1].plan
        kinds = {block.bound.kind for block in plan.blocks if block.updates}
        if "bound" in accepted:
            assert {"clip_norm", "regulariser"} <= set(accepted) and kinds == {"normalize"}
        else:  # of those with a clip norm, only what is another bound itself
            assert "clip_norm" not in accepted or kinds <= {"normalize", "adaptive_weight"}


@with_each_bound
def test_whatever_bounds_it_some_row_fills_the_bound_and_none_moves_the_sums_by_more(build):
    for moment in duties.history(build(1.0)):
        duties.check_bound_is_reached(moment.plan)
    moments = duties.histories(build)

    @some_batches
    @given(rows=duties.BATCHES, pick=st.integers(0, 10**6))
    def check(rows, pick):
        duties.check_bound(moments[pick % len(moments)].plan, rows)

    check()


@each_kind_in_each_world
def test_removing_an_example_from_a_batch_takes_its_contribution_off_and_no_more(name, world):
    duties.check_removal(FACTORIES[name], world)


@pytest.mark.parametrize("name", UNPROVED)
def test_what_is_not_bounded_or_not_noised_proves_nothing_and_says_why(name):
    for sigma in (0.0, 1e-3, 1.0, 1e6):
        proved = claim(name, sigma)
        assert proved.epsilon == proved.epsilon_rdp == math.inf
        assert set(proved.reason.split("; ")) <= {"no noise is added", "one example's contribution is not bounded"}


@each_that_proves
def test_a_bounded_step_is_one_gaussian_at_the_noise_multiplier_and_some_row_fills_its_bound(name):
    ledger = predict(FACTORIES[name](1.3), sampling=poisson(0.1), steps=5)
    assert [(e.steps, e.noise_multiplier) for e in ledger.entries if not e.own_noise] == [(5, 1.3)]
    assert claim(name, 0.0).epsilon == math.inf
    assert claim(name, 0.0).reason == "no noise is added"
    assert claim(name, 1.0).reason == ""
    for moment in duties.history(FACTORIES[name](1.0)):
        duties.check_bound_is_reached(moment.plan)


@pytest.mark.parametrize("name", [unless_alike(name, name, id=name) for name in NOISY])
def test_noise_has_its_scale_and_two_thirds_or_three_halves_of_it_are_rejected(name):
    duties.check_noise(FACTORIES[name])


@in_each_world(*EXAMPLES)
def test_the_ledger_of_a_run_agrees_with_the_prediction_and_its_seeds_decide_the_rest(name, world):
    duties.check_ledger(FACTORIES[name], world)
    duties.check_seeds(FACTORIES[name], world)


@each_kind_in_each_world
def test_exact_noise_trains_it_too_and_is_charged_as_what_it_is(name, world):
    duties.check_exact_noise(FACTORIES[name], world)


@in_each_world(*NAMES)
def test_the_steps_of_a_run_can_be_taken_once_more_and_an_empty_batch_is_one(name, world):
    duties.check_retaken(FACTORIES[name], world)
    duties.check_empty_batches(FACTORIES[name], world)


@each_kind_in_each_world
def test_microbatches_change_nothing(name, world):
    duties.check_microbatches(FACTORIES[name], world)


@pytest.mark.parametrize("name", long_but(EXAMPLES, NAMES))
def test_a_run_interrupted_halfway_goes_on_bit_for_bit_and_float64_stays_float64(name, tmp_path):
    duties.check_interruption(FACTORIES[name], tmp_path)
    duties.check_doubles(FACTORIES[name])


@each_kind_in_each_world
def test_a_run_interrupted_anywhere_goes_on_bit_for_bit_whatever_optimizes(name, world, tmp_path):
    duties.check_interruptions(FACTORIES[name], tmp_path, world)
    duties.check_interruption_inside_a_step(FACTORIES[name], tmp_path, world)


@pytest.mark.gpu
@each
def test_on_a_gpu_it_is_the_same_run(name, tmp_path):
    duties.check_device(FACTORIES[name], tmp_path, "cuda")
