"""The digest of a request, the seeds that follow from it, and the draw of a verification."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from leakbench.leaderboard.submissions import identity
from leakbench.leaderboard.submissions.command import command_words, same_command
from leakbench.leaderboard.submissions.declaration import parse
from tests.parameters import subtests

from .declarations import DOCUMENT, declaration

METHOD = DOCUMENT["method"]


def test_the_digest_of_a_declaration_is_pinned():
    """Folders and seeds of published submissions depend on it."""
    assert identity.request_digest(declaration()) == "7d42cc668ac06f53d914a5e432c716f0"
    assert identity.seeds_of("0" * 32, 3) == (1409939723, 1389449263, 604785015)


@given(st.permutations(list(DOCUMENT)), st.permutations(list(METHOD)))
def test_the_digest_does_not_depend_on_the_order_of_keys(keys, inner):
    document = {key: DOCUMENT[key] for key in keys} | {"method": {key: METHOD[key] for key in inner}}
    assert identity.request_digest(parse(document)) == identity.request_digest(declaration())


@given(st.sampled_from(["who", "contact", "hardware", "public_data", "command", "new"]), st.text("abc", min_size=1))
def test_words_do_not_change_the_digest(field, text):
    assert identity.request_digest(declaration(**{field: text})) == identity.request_digest(declaration())
    assert identity.request_digest(declaration(licence="MIT")) == identity.request_digest(declaration())


@subtests(
    "changes",
    [
        {"handle": "eve"},
        {"suite": "membership_small"},
        {"suite_digest": "2" * 64},
        {"small": True},
        {"kind": "attack"},
        {"method": METHOD | {"sha256": "3" * 64}},
        {"method": METHOD | {"settings": {"clip_norm": 3.0}}},
        {"method": METHOD | {"settings": {}}},
        {"method": METHOD | {"function": "other"}},
        {"method": METHOD | {"file": "other.py"}},
    ],
)
def test_whatever_decides_the_computation_changes_the_digest(changes):
    assert identity.request_digest(declaration(**changes)) != identity.request_digest(declaration())


def test_seeds_are_uniform_and_disjoint():
    seeds = [seed for i in range(4000) for seed in identity.seeds_of(f"{i:032x}", 3)]
    fresh = [seed for i in range(4000) for seed in identity.fresh_seeds(f"{i:064x}", 3)]
    assert all(seed in identity.REPORTED for seed in seeds) and all(seed in identity.FRESH for seed in fresh)
    for sample, among in ((seeds, identity.REPORTED), (fresh, identity.FRESH)):
        uniform = stats.chisquare(np.bincount([(seed - among.start) * 64 // len(among) for seed in sample]))
        assert uniform.pvalue > 1e-6
        # 12,000 draws of 2**31: 0.03 collisions are expected, and 5 have a probability below 1e-9.
        assert len(sample) - len(set(sample)) < 5
    assert identity.REPORTED.stop <= identity.FRESH.start


@given(st.text("0123456789abcdef", min_size=32, max_size=32), st.integers(1, 40), st.integers(1, 40))
def test_fewer_seeds_are_the_first_of_more(digest, a, b):
    assert identity.seeds_of(digest, min(a, b)) == identity.seeds_of(digest, max(a, b))[: min(a, b)]
    assert len(set(identity.seeds_of(digest, a))) == a


def cells(number_of_each=6) -> Any:
    kinds = ("membership", "reconstruction", "utility")
    return [
        SimpleNamespace(id=f"{i:02x}{kind}{own}", kind=kind, status="ok", own=own)
        for i in range(number_of_each)
        for kind in kinds
        for own in (True, False)
    ]


def own(record: Any) -> bool:
    return record.own


def drawn(records, draw, number) -> Any:
    return identity.drawn_cells(records, draw, number, own)


def test_a_draw_holds_utility_and_every_kind_of_attack_of_the_method_first():
    for i in range(50):
        chosen = drawn(cells(), f"{i:x}", 6)
        assert [(c.own, c.kind) for c in chosen[:3]] == [(True, k) for k in ("utility", "membership", "reconstruction")]
        assert {c.kind for c in chosen[3:]} == {"utility", "membership", "reconstruction"}


def test_every_cell_of_a_stratum_is_drawn_equally_often():
    counts = dict.fromkeys((c.id for c in cells() if c.own and c.kind == "utility"), 0)
    for i in range(3000):
        counts[drawn(cells(), f"draw {i}", 1)[0].id] += 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-6


def test_a_draw_does_not_depend_on_the_order_of_records_and_leaves_out_cells_without_numbers():
    records = cells()
    shuffled = sorted(records, key=lambda record: record.id[::-1])
    assert [c.id for c in drawn(records, "a", 9)] == [c.id for c in drawn(shuffled, "a", 9)]
    failed = [SimpleNamespace(**vars(c) | {"status": "failed"}) for c in records]
    assert drawn(failed, "a", 9) == [] and len(drawn(records, "a", 999)) == len(records)


@subtests(
    "digest, results, salt",
    [
        ("e" * 32, "r", "s"),
        ("d" * 32, "q", "s"),
        ("d" * 32, "r", "t"),
    ],
)
def test_a_draw_depends_on_request_results_and_salt(digest, results, salt):
    assert identity.draw_digest(digest, results, salt) != identity.draw_digest("d" * 32, "r", "s")


def test_names_and_contents_of_records_decide_the_digest_of_results(tmp_path):
    (tmp_path / "records").mkdir()
    digests = [identity.results_digest(tmp_path)]
    for name, content in (("a.json", "1"), ("b.json", "1"), ("a.json", "2")):
        (tmp_path / "records" / name).write_text(content)
        digests.append(identity.results_digest(tmp_path))
    assert len(set(digests)) == 4


SEEDS = (70_000, 70_001)


def test_the_command_of_a_declaration_is_the_one_of_its_seeds_wherever_it_writes():
    words = command_words(declaration(), SEEDS)
    import shlex

    written = shlex.join(words)
    assert same_command(written, words) and same_command(f"{written} --out . --jobs 2 --device cpu", words)
    assert "clip_norm = 2.0" in written and "70000,70001" in written


@subtests(
    "text",
    [
        "leakbench run quick --set 'seeds=[0,1]'",
        "leakbench run quick; rm -rf x",
        "leakbench 'run",
        "",
    ],
)
def test_another_command_is_not_the_same(text):
    assert not same_command(text, command_words(declaration(), SEEDS))


@pytest.mark.parametrize("changes", [{"kind": "attack"}, {"kind": "run", "method": None}, {"small": True}])
def test_commands_of_other_kinds(changes):
    words = command_words(declaration(**changes), SEEDS)
    assert ("--add-attack" in words) == (changes.get("kind") == "attack")
    assert ("--small" in words) == ("small" in changes)
