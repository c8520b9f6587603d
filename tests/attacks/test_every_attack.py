"""Duties of every attack, over the files that are there: a new one is tested by being there."""

import ast
import importlib
import inspect
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from leakbench import attacks
from leakbench.attacks.core import (
    Access,
    AccessError,
    ActiveServer,
    Attack,
    Controls,
    Examples,
    InconsistentObservation,
    Knows,
    LabelAccess,
    MembershipScores,
    ModelAccess,
    NotApplicable,
    Observation,
    Requirements,
    SeenMessages,
    SeenTranscript,
    Target,
    attack,
)

from ..parameters import long_but, subtests
from . import toys

FOLDER = Path(inspect.getfile(attacks)).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
# Enough for the toys; the defaults are for real images.
CHEAP = {"iterations": 100, "restarts": 1, "shadows": 8}
# Where results are compared with one another, not with the truth.
HASTY = CHEAP | {"iterations": 15}
SEEDS = range(4)
# By default, of duties at more cost: quick attacks of each kind.
EXAMPLES = ("lira", "loss_threshold", "imprint", "rero")
ANSWER = {
    "membership": "scores",
    "reconstruction": "inputs",
    "labels": "counts",
    "canaries": "scores",
    "client_property": "scores",
}


def method(name: str) -> Attack:
    return getattr(importlib.import_module(f"leakbench.attacks.{name}"), name)


def cheap(one: Attack, settings: dict[str, int] = CHEAP) -> dict[str, int]:
    return {name: value for name, value in settings.items() if name in one.defaults}


def of_kind(kind: str) -> list[str]:
    return [name for name in NAMES if method(name).kind == kind]


def leaky(one: Attack, seed: int = 0) -> tuple[Target, torch.Tensor]:
    """A target of the class that the attack needs, with every field filled, that gives its members away."""
    if one.name == "float_grid":  # does not look at what the other toys give away
        return toys.rounded_step(seed=seed)
    if one.name == "loss_trace":  # looks at models, which are the same at all steps of the other
        return toys.learned_transcript(seed=seed)
    if one.target is ActiveServer:
        return toys.active_membership_target(seed=seed, noise=0.4)
    if one.target is Observation and Knows.OTHERS not in one.requires.knows:
        return toys.sparse_step(seed=seed)
    if one.target is Observation:
        return toys.membership_step(seed=seed, noise=0.2)
    if one.target is SeenTranscript:
        seen, member = toys.transcript(seed=seed, noise=0.4)
        if one.requires.access is Access.ONE_OFF:
            seen = replace(seen, steps=(), one_offs=seen.steps)
        return replace(seen, controls=one.requires.controls), member
    if one.target is SeenMessages:
        return toys.messages(seed=seed, noise=0.4)
    if one.target is LabelAccess:
        return toys.label_target(seed=seed)
    return toys.model_target(seed=seed)


def image_target(one: Attack, net: str, *, seed: int = 0, noise: float = 0.0) -> tuple[Any, Examples]:
    """One update of a batch of one, or a client of one image that a server sends models to, and the truth."""
    of = toys.active_target if one.target is ActiveServer else toys.update_target
    return of(net=net, seed=seed, noise=noise)


def update_for(one: Attack) -> str:
    """The first toy network whose updates an attack inverts; a closed form is for some networks only."""
    for net in toys.NETS:
        try:
            one(image_target(one, net)[0], None, **cheap(one, HASTY))
        except NotApplicable:
            continue
        return net
    raise AssertionError(f"{one.name} applies to no update of {', '.join(toys.NETS)}")


@cache
def attacked_net(name: str) -> str:
    return update_for(method(name))


@cache
def scored(name: str, seed: int) -> tuple[Target, torch.Tensor, MembershipScores]:
    """A leaky target, who took part, and the scores of an attack on membership."""
    one = method(name)
    target, member = leaky(one, seed)
    return target, member, one(target, toys.generator(seed), **cheap(one))


@cache
def hasty(name: str) -> tuple[Target, torch.Tensor]:
    """A target with every field filled, and the answer of an attack."""
    one = method(name)
    whole = whole_target(one)
    return whole, getattr(one(whole, toys.generator(5), **cheap(one, HASTY)), ANSWER[one.kind])


def whole_target(one: Attack) -> Target:
    if one.kind in ("membership", "canaries", "client_property"):
        return leaky(one)[0]
    return image_target(one, attacked_net(one.name))[0]


@subtests("name", NAMES)
def test_a_file_holds_the_attack_of_its_name(name):
    one = method(name)
    assert isinstance(one, Attack)
    assert one.name == name
    assert one.summary.endswith(".")


@pytest.mark.parametrize("name", long_but(EXAMPLES, of_kind("membership")))
def test_scores_on_exchangeable_candidates_are_at_chance_level(name):
    aucs = []
    for seed in SEEDS:
        # Whoever took part, the label below is a coin: no attack can know it.
        coin = torch.randperm(400, generator=toys.generator(seed + 77)) < 200
        aucs.append(toys.auc(scored(name, seed)[2].scores, coin))
    # Under exchangeability an AUC of 200 against 200 has std 0.0289; four of them 0.0145; five std.
    assert abs(sum(aucs) / len(aucs) - 0.5) < 5 * 0.0145


@pytest.mark.parametrize("name", long_but(EXAMPLES, of_kind("membership")))
def test_members_of_a_leaky_target_are_told_apart(name):
    for seed in SEEDS:
        target, member, result = scored(name, seed)
        assert toys.auc(result.scores, member) > 0.9
        assert target.candidates is not None and torch.equal(result.ids, target.candidates.ids)


@pytest.mark.parametrize("enough", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", long_but(EXAMPLES, of_kind("reconstruction")))
def test_an_update_of_one_image_gives_the_image_away(name, enough):
    one, gains = method(name), []
    for seed in SEEDS:
        target, truth = image_target(one, attacked_net(name), seed=seed)
        result = one(target, toys.generator(seed), **cheap(one))
        assert result.inputs.shape == truth.inputs.shape
        gains.append(toys.psnr(result.inputs, truth.inputs) - toys.psnr(torch.full((1,), 0.5), truth.inputs))
        # dB over grey; one start of four may fail.
        right = sum(gain > 6 for gain in gains)
        if right == 3 or right == len(gains) == enough:
            break
    else:
        pytest.fail(f"gains over grey are {gains} dB")


def picks(one: Attack) -> bool:
    """Whether it is given candidates: another's image may be nearer than grey is, and what counts is whose it is."""
    return Knows.PRIOR in one.requires.knows


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in of_kind("reconstruction") if picks(method(name))])
def test_who_picks_is_right_on_an_update_of_nothing_else_and_at_chance_on_one_of_noise(name):
    one, net = method(name), attacked_net(name)
    right = {0.0: 0, 1e3: 0}
    for noise in right:
        for seed in range(40):
            target, truth = toys.update_target(net=net, seed=seed, noise=noise)
            right[noise] += torch.equal(one(target, toys.generator(seed), **cheap(one)).inputs, truth.inputs)
    # Of 10 candidates; more than 16 of 40 are right by chance once in a million.
    assert right[0.0] == 40 and right[1e3] <= 16


@pytest.mark.parametrize("name", long_but(EXAMPLES, [n for n in of_kind("reconstruction") if not picks(method(n))]))
@pytest.mark.parametrize("seeds", [SEEDS[:1], pytest.param(SEEDS[1:], marks=pytest.mark.slow)])
def test_an_update_of_noise_gives_nothing_away(name, seeds):
    one = method(name)
    for seed in seeds:
        target, truth = image_target(one, attacked_net(name), seed=seed, noise=1e3)
        try:
            result = one(target, toys.generator(seed), **cheap(one))
        except (InconsistentObservation, NotApplicable):
            continue  # a closed form that sees that no data give this update
        if not len(result.inputs):
            continue
        grey = toys.psnr(torch.full((1,), 0.5), truth.inputs)
        assert toys.psnr(result.inputs, truth.inputs) < grey + 1
        assert result.inputs.min() >= 0 and result.inputs.max() <= 1


@pytest.mark.long
@pytest.mark.parametrize("name", of_kind("labels"))
def test_an_update_of_one_image_gives_its_label_away_and_one_of_noise_does_not(name):
    one, named = method(name), 0
    for seed in range(6):
        for net in toys.NETS:
            target, truth = toys.update_target(net=net, seed=seed)
            assert torch.equal(one(target, toys.generator(seed), **cheap(one)).labels, truth.labels)
            named += len(one(toys.update_target(net=net, seed=seed, noise=1e3)[0]).labels)
    # At a level of 0.05 an update of noise, 24 of them give more than 5 names with a chance below 0.001.
    assert named <= 5


@pytest.mark.parametrize("name", NAMES)
def test_without_access_it_is_refused_in_one_sentence(name):
    one = method(name)
    others = (toys.update_target, toys.model_target, toys.label_target, lambda: toys.transcript(noise=1.0, steps=1))
    for kind in (make()[0] for make in others):
        if isinstance(kind, one.target):
            continue
        reason = one.check(kind)
        assert reason is not None and one.name in reason
        assert "\n" not in reason
        with pytest.raises(AccessError, match="needs access to"):
            one(kind)


@pytest.mark.parametrize("name", NAMES)
def test_without_what_it_must_know_it_is_refused_and_told_the_field(name):
    one = method(name)
    whole = whole_target(one)
    assert one.check(whole) is None
    for need in one.requires.knows:
        poorer = without(whole, need)
        reason = one.check(poorer)
        assert reason is not None and str(need.name) in reason
        with pytest.raises(AccessError):
            one(poorer)
        offered = Requirements(access=one.requires.access, knows=~need)
        assert str(need.name) in (one.check(offered) or "")


@pytest.mark.parametrize("name", long_but(EXAMPLES, NAMES))
def test_it_reads_what_it_declared_and_its_coins_alone_and_leaves_global_randomness_as_it_was(name):
    """Runs on a target stripped of everything undeclared, and gives what it gave on a full one from equal coins."""
    one = method(name)
    poorer, answer = hasty(name)
    for need in Knows:
        if need not in one.requires.knows:
            poorer = without(poorer, need)
    before = torch.random.get_rng_state()
    bare = one(poorer, toys.generator(5), **cheap(one, HASTY))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(answer, getattr(bare, ANSWER[one.kind]))


@pytest.mark.parametrize("name", long_but(EXAMPLES, NAMES))
def test_on_an_accelerator_it_finds_what_it_finds_on_the_cpu(name, accelerator):
    one = method(name)
    whole, answer = hasty(name)
    result = one(toys.moved(whole, accelerator), toys.generator(5), **cheap(one, HASTY))
    found = getattr(result, ANSWER[one.kind])
    assert found.device == accelerator
    # Rounding may turn the sign of a gradient, by which a search moves a pixel, in one of its few steps.
    off = (found.cpu() - answer).abs() > 1e-3 * (1 + answer.abs())
    assert off.double().mean() <= 0.02


@pytest.mark.parametrize("name", NAMES)
def test_tensors_on_two_devices_are_refused_in_one_sentence(name, accelerator):
    one = method(name)
    whole: Any = whole_target(one)  # every target is a dataclass
    examples = "candidates" if whole.candidates is not None else "prior"
    there = toys.moved(getattr(whole, examples), accelerator)
    told = "tensors of an attack's target must be on one device, got .* on .* and .* on .*; move .* with .to\\('"
    with pytest.raises(ValueError, match=told) as refused:
        one(replace(whole, **{examples: there}))
    assert "\n" not in str(refused.value) and str(accelerator) in str(refused.value)


@pytest.mark.gpu
def test_a_generator_on_a_gpu_is_refused():
    with pytest.raises(ValueError, match=r"generator must be on the CPU, .*, got cuda:?0?; take torch.Generator\(\)"):
        method("dlg")(toys.update_target()[0], torch.Generator("cuda"))


@subtests("name", NAMES)
def test_an_unknown_setting_is_refused(name):
    with pytest.raises(ValueError, match="no setting 'restart_count'"):
        method(name).settings(restart_count=3)


@subtests("path", sorted(FOLDER.rglob("*.py")))
def test_truth_is_nowhere_in_the_package(path):
    """No module imports another package of ours, and no name in it speaks of the truth."""
    tree = ast.parse(path.read_text())
    imported = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom) and node.level == 0
            else []
        )
    }
    assert not {name for name in imported if name.split(".")[0] in ("leakbench", "tests")} - {
        "leakbench.lazy_names",
        "leakbench.method_package",
    }
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not {name for name in names if "truth" in name.lower() or name in ("is_member", "members", "member")}


@pytest.mark.parametrize("kind", [Observation, ModelAccess, LabelAccess, SeenTranscript, ActiveServer])
def test_no_target_has_a_field_for_the_truth(kind):
    words = ("truth", "member", "private", "batch_inputs", "seed")
    assert not [slot.name for slot in fields(kind) if any(word in slot.name for word in words)]


def test_a_file_is_found_for_every_kind_of_question():
    assert of_kind("membership") and of_kind("reconstruction") and of_kind("labels")


def without(target: Target, need: Knows) -> Target:
    if isinstance(target, SeenTranscript):
        cut = ([without(seen, need) for seen in some] for some in (target.steps, target.one_offs))
        return replace(target, **dict(zip(("steps", "one_offs"), cut, strict=True)))
    if isinstance(target, SeenMessages):
        return replace(target, messages=[without(message, need) for message in target.messages])
    known: Any = target  # every target is a dataclass
    empty = {slot.name: None for slot in fields(known) if slot.metadata.get("needs") == need}
    return replace(known, **empty)


def test_reading_an_undeclared_field_raises_and_names_it():
    @attack(access=Access.UPDATE, knows=Knows.BATCH_SIZE)
    def greedy(target: Observation, coins: torch.Generator) -> MembershipScores:
        """Reads the labels without having declared them."""
        assert target.batch_size == 1
        scores = target.labels.double()  # pyright: ignore[reportOptionalMemberAccess]
        return MembershipScores(ids=torch.arange(1), scores=scores, exact=False)

    with pytest.raises(AccessError, match=r"Knows\.LABELS.*Observation\.labels"):
        greedy(toys.update_target()[0])


def test_what_a_check_says_before_there_is_a_target():
    one = method("likelihood_ratio")
    enough = Requirements(access=Access.ALL_STEPS, knows=Knows.OTHERS | Knows.DEFENSE, controls=Controls.NOTHING)
    assert one.check(enough) is None
    assert "needs access to" in (one.check(replace(enough, access=Access.BLACK_BOX)) or "")
