"""Attacks that are not ours: what they reach of the auditor's memory, and what comes back of them."""

import gc
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from leakbench.attacks.core import Examples, ModelAccess, NotApplicable, SeenTranscript, Steps, granted
from leakbench.audit.catalog import methods as catalog
from leakbench.audit.catalog.messages import CatalogError
from leakbench.audit.isolation import worker
from leakbench.audit.isolation.sending import packed_bytes
from leakbench.audit.isolation.worker import AttackProcessError, InProcessRuns
from leakbench.audit.run import job
from leakbench.audit.subjects.outcome import Outcome
from leakbench.defenses.core import keyed
from leakbench.leaderboard.page.tables import FLAGS, TONES

from ...attacks import toys
from ..run.test_job import of

DIM = 7
MINE = '''
"""Does what a test asks for."""

import gc
import os
import pickle
import sys
import time

import torch

from leakbench.attacks.core import Access, MembershipScores, ModelAccess, RankDeficient, SeenTranscript, attack, granted


class Pickled:
    def __reduce__(self):
        return os.system, ("touch pickled",)


@attack(access=Access.BLACK_BOX)
def mine(
    target: ModelAccess, coins: torch.Generator, *, mode: str = "honest", shape: tuple[int, ...] = (1,)
) -> MembershipScores:
    """Scores by the model, or otherwise."""
    asked = granted(target.candidates)
    scores = target.logits(asked.inputs).double().amax(dim=1) + torch.rand(len(asked), generator=coins)
    if mode == "dig":
        wanted = {row.numpy().tobytes(): place for place, row in enumerate(asked.inputs)}
        scores = torch.zeros(len(asked), dtype=torch.float64)
        variables = [one for frame in sys._current_frames().values() for one in outer(frame)]
        modules = [one for module in list(sys.modules.values()) for one in list(vars(module).values())]
        for one in [*gc.get_objects(), *variables, *modules]:
            if type(one) is torch.Tensor and one.ndim == 2 and len(one) == 20:
                scores[[wanted[row.numpy().tobytes()] for row in one if row.numpy().tobytes() in wanted]] = 1.0
    elif mode in ("first", "second"):
        inputs = asked.inputs.clone().requires_grad_()
        loss = target.logits(inputs).square().sum() + inputs.sum()
        (scores,) = torch.autograd.grad(loss, inputs, create_graph=mode == "second")
        if mode == "second":
            (scores,) = torch.autograd.grad(scores.square().sum(), inputs)
        scores = scores.sum(dim=1).double()
    elif mode == "inherited":
        files = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd")]
        files = [os.readlink(one) for one in files if os.path.exists(one)]
        raise ValueError(" ".join([os.getcwd(), *os.listdir(), *os.environ.values(), *files]))
    elif mode == "print":
        print("loud")
    elif mode == "raise":
        raise KeyError("lost")
    elif mode == "refuse":
        raise RankDeficient("too few", deficit=2)
    elif mode == "withheld":
        return target.population
    elif mode == "exit":
        sys.exit("done")
    elif mode == "crash":
        print("my last words", flush=True)
        os._exit(3)
    elif mode == "killed":
        os.kill(os.getpid(), 9)
    elif mode == "hang":
        time.sleep(1000)
    elif mode == "class":
        return {"ids": asked.ids}
    elif mode == "fewer":
        return MembershipScores(ids=asked.ids[1:], scores=scores[1:], exact=False)
    elif mode == "pickle":
        for one in os.listdir("/proc/self/fd"):
            if os.path.exists(f"/proc/self/fd/{one}") and "socket" in os.readlink(f"/proc/self/fd/{one}"):
                os.write(int(one), pickle.dumps(Pickled()) * 100)
        time.sleep(1000)
    return MembershipScores(ids=asked.ids, scores=scores, exact=False)


def outer(frame):
    while frame is not None:
        yield from frame.f_locals.values()
        frame = frame.f_back


@attack(access=Access.ALL_STEPS)
def reader(target: SeenTranscript, coins: torch.Generator) -> MembershipScores:
    """Sums what is released, twice."""
    asked, final = granted(target.candidates), granted(target.final)
    found = [float(one.released.sum()) for _ in range(2) for one in target.steps]
    scores = final.logits(asked.inputs).double().sum(dim=1) + sum(found) + len(target.steps)
    return MembershipScores(ids=asked.ids, scores=scores, exact=False)
'''


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    file = tmp_path_factory.mktemp("mine") / "mine.py"
    file.write_text(MINE)
    return f"{file}:mine"


def model_access(**fields) -> tuple[ModelAccess, torch.Tensor]:
    """A model and forty candidates, and which twenty of them are members."""
    coins = keyed(1)
    inputs, weights = torch.randn(40, DIM, generator=coins), torch.randn(DIM, 3, generator=coins)
    examples = Examples(ids=torch.arange(40), inputs=inputs, labels=torch.zeros(40, dtype=torch.int64))
    member = torch.zeros(40, dtype=torch.bool)
    member[torch.randperm(40, generator=coins)[:20]] = True
    given = {"logits": lambda x: (x @ weights).tanh(), "input_shape": (DIM,), "classes": 3, "candidates": examples}
    return ModelAccess(**given | fields), member


def both(name):
    """An attack beside the data, and in a process of its own."""
    return catalog.attack_here(name), catalog.attack(name)


def auc(scores: torch.Tensor, member: torch.Tensor) -> float:
    above, below = scores[member][:, None], scores[~member]
    return float((above > below).double().mean() + (above == below).double().mean() / 2)


def test_members_in_the_auditors_memory_are_found_beside_it_and_not_from_a_process_of_its_own(mine, site):
    site.add("attacks", "digger", MINE.replace("def mine(", "def digger("))
    target, member = model_access()
    held = granted(target.candidates).inputs[member].clone()  # as a training holds them
    for name in (mine, "digger"):  # by path, and of another distribution
        assert auc(catalog.attack_here(name)(target, mode="dig").scores, member) == 1.0
        assert auc(catalog.attack(name)(target, mode="dig").scores, member) == 0.5
    assert len(held) == 20


def test_an_honest_attack_has_the_same_scores_in_the_same_process_again_and_advances_its_coins(mine):
    target, _ = model_access()
    coins = [keyed(3), keyed(3)]
    for _ in range(2):
        here, apart = (one(target, c) for one, c in zip(both(mine), coins, strict=True))
        assert torch.equal(here.scores, apart.scores) and torch.equal(here.ids, apart.ids)
    assert torch.equal(coins[0].get_state(), coins[1].get_state())
    assert [key[1] for key, _ in worker._free].count(mine) == 1


def test_few_processes_are_kept_and_the_one_that_was_free_longest_is_ended(monkeypatch):
    ended = []

    class Started:
        usable = True

        def __init__(self, name):
            self.name = name

        def end(self):
            ended.append(self.name)

    monkeypatch.setattr(worker, "Worker", Started)
    monkeypatch.setattr(worker, "_free", [])
    names = [*map(str, range(worker.MOST_FREE)), "0", "another"]
    for name in names:
        with worker.borrowed(name, ()):
            pass
    assert ended == ["1"]  # "0" was asked again since
    with pytest.raises(ValueError, match="mine"), worker.borrowed("0", ("edited",)) as one:
        one.usable = False
        raise ValueError("mine")
    assert ended == ["1", "0"] and len(worker._free) == worker.MOST_FREE


def test_functions_of_the_target_are_differentiated_as_if_they_were_there(mine):
    target, _ = model_access()
    first, again = (attack(target, mode="first").scores for attack in both(mine))
    assert torch.equal(first, again)
    second, again = (attack(target, mode="second").scores for attack in both(mine))
    torch.testing.assert_close(second, again, rtol=1e-5, atol=0)  # terms of several graphs are summed in another order
    assert not torch.equal(first, second)


def test_what_an_attack_declares_is_that_of_its_file(mine):
    here, apart = both(mine)
    assert (apart.name, apart.kind, apart.target, apart.summary) == (here.name, here.kind, here.target, here.summary)
    assert apart.requires == here.requires and apart.requires.access is here.requires.access
    assert dict(apart.defaults) == dict(here.defaults)
    types = {key: one.type for key, one in catalog.settings("attacks", mine).items()}
    assert types == {"mode": "text", "shape": "a list, each an integer"}
    assert catalog.resolve("attacks", mine, {"shape": [2, 3]})["shape"] == (2, 3)
    with pytest.raises(CatalogError, match="mode must be text, got 3"):
        catalog.resolve("attacks", mine, {"mode": 3})


@pytest.mark.parametrize(
    ("mode", "kind", "sentence"),
    [
        ("raise", RuntimeError, "'lost'"),
        ("refuse", NotApplicable, "too few"),
        ("withheld", ValueError, "this attack did not declare Knows.POPULATION"),
        ("exit", RuntimeError, "done"),
        ("class", TypeError, "a membership attack must return MembershipScores, got dict"),
        ("fewer", ValueError, "ids must be those of the 40 candidates, each once, got 39"),
        ("crash", AttackProcessError, "the attack ended its process: exit status 3; it printed last: my last words"),
        ("killed", AttackProcessError, "the attack ended its process: killed by SIGKILL"),
        ("pickle", AttackProcessError, "the attack must answer with numbers: a message must have at most"),
    ],
)
def test_whatever_goes_wrong_in_an_attack_is_one_sentence(mine, mode, kind, sentence):
    with pytest.raises(kind) as caught:
        catalog.attack(mine)(model_access()[0], mode=mode)
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)
    if mode == "raise":
        last = worker.frames_of(caught.value)[-1]
        assert (type(caught.value).__name__, last.name) == ("KeyError", "mine") and last.filename.endswith("mine.py")


def test_an_attack_that_hangs_is_ended_by_the_limit_which_does_not_count_what_the_auditor_computes(mine, monkeypatch):
    target, _ = model_access()
    catalog.attack(mine)(target)  # so that its process is there
    monkeypatch.setenv(worker.LIMIT, "2")
    with pytest.raises(
        AttackProcessError, match=r"must answer within 2 s of its own, and did not; LEAKBENCH_ATTACK_SEC"
    ):
        catalog.attack(mine)(target, mode="hang")
    monkeypatch.setenv(worker.LIMIT, "none")
    with pytest.raises(ValueError, match="LEAKBENCH_ATTACK_SECONDS must be a positive number of seconds, got 'none'"):
        catalog.attack(mine)(target)


def test_what_an_attack_prints_goes_to_standard_error(mine, capfd):
    catalog.attack(mine)(model_access()[0], mode="print")
    catalog.attack(mine)(model_access()[0])  # by the answer to which the print has come
    out, err = capfd.readouterr()
    assert out == "" and "loud" in err


def test_neither_the_folder_nor_the_variables_nor_open_files_lead_to_the_results(mine, tmp_path, monkeypatch):
    secret = tmp_path / "where_the_truth_is"
    secret.mkdir()
    monkeypatch.chdir(secret)
    monkeypatch.setenv("LEAKBENCH_DATA", str(secret))
    with (secret / "records").open("w") as handle:
        os.set_inheritable(handle.fileno(), True)
        monkeypatch.setattr(worker, "_free", [])  # so that its process starts now
        monkeypatch.setattr(worker, "subprocess", subprocess)  # as a run starts it
        with pytest.raises(ValueError, match="leakbench-attack-") as caught:
            catalog.attack(mine)(model_access()[0], mode="inherited")
    assert "where_the_truth_is" not in str(caught.value)
    target, member = model_access()
    held = granted(target.candidates).inputs[member].clone()  # as a training holds them
    assert auc(catalog.attack(mine)(target, mode="dig").scores, member) == 0.5 and len(held) == 20


class Unsendable(int):
    """A number of a class that another process cannot make."""

    def __reduce__(self):
        raise TypeError("it stays here")


def test_an_attack_whose_target_cannot_be_sent_runs_beside_the_data_and_its_cell_is_flagged(mine, monkeypatch):
    target, _ = model_access(classes=Unsendable(3))
    before, coins = InProcessRuns.times, keyed(3)
    found = catalog.attack(mine)(target, coins)
    assert InProcessRuns.times == before + 1
    assert torch.equal(found.scores, catalog.attack_here(mine)(target, keyed(3)).scores)

    class Subject:
        def __init__(self, cells, device, read): ...

        def outcome(self, cell):
            catalog.attack(mine)(
                target if cell.request.requested_attack.name == "likelihood_ratio" else model_access()[0]
            )
            return Outcome(flags=["deterministic"])

    cells = [of("membership", None), of("reconstruction", "none")]
    monkeypatch.setattr(job, "SUBJECTS", dict.fromkeys({cell.subject for cell in cells}, Subject))
    names = {cell.request.requested_attack.name for cell in cells}
    flags = {
        cell.request.requested_attack.name: outcome.flags
        for cell, outcome in job.compute(tuple(cells), torch.device("cpu"))
    }
    assert job.BESIDE in FLAGS and TONES[job.BESIDE] == "warn"  # the page has its meaning
    assert len(names) == 2 and "likelihood_ratio" in names
    assert flags.pop("likelihood_ratio") == ["deterministic", job.BESIDE]
    assert set(map(tuple, flags.values())) == {("deterministic",)}


def test_lazy_steps_are_read_from_there_also_by_several_who_wait_for_one_another(mine):
    name = mine.replace(":mine", ":reader")
    seen, _ = toys.transcript(seed=0, noise=0.1)
    here = catalog.attack_here(name)(seen).scores
    attack = catalog.attack(name)
    assert torch.equal(here, attack(seen).scores)

    both_ask = Barrier(2, timeout=120)

    def waiting():
        for one in seen.steps:
            both_ask.wait()
            yield one

    def read(_):
        lazy = Steps(waiting, lambda: 4)
        return attack(SeenTranscript(steps=lazy, candidates=seen.candidates, final=seen.final)).scores

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(read, range(2)):
            assert torch.equal(here, found)


def test_an_attack_that_ends_its_process_when_it_is_imported_is_refused_in_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "ended.py").write_text("import os\nos._exit(4)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CatalogError, match=re.escape("attack 'ended.py:f': the attack ended its process: exit status 4")
    ):
        catalog.attack("ended.py:f")


@pytest.mark.long
def test_what_is_sent_may_be_collected_in_a_cycle():
    """CPython 3.12 and 3.13 crash, or complain, where a collected cycle has a BytesIO and a view of it."""
    cycle = [*packed_bytes({"inputs": torch.zeros(3)}, id)]
    cycle.append(cycle)
    del cycle
    gc.collect()
