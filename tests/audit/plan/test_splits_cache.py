"""Splits are made once for all cells that use them, and no more of them are kept than there is room for."""

import pytest
import torch

from leakbench.audit.plan import splits_cache as sources
from leakbench.benchmarks import data as datasets
from leakbench.benchmarks.core import Sizes

CPU = torch.device("cpu")


@pytest.fixture
def loaded(monkeypatch):
    """Which data sets were made, with an empty memory to begin with."""
    made, real = [], datasets.load
    monkeypatch.setattr(sources, "_kept", {})

    def load(name, *, seed, sizes):
        made.append((name, seed))
        return real(name, seed=seed, sizes=sizes)

    monkeypatch.setattr(datasets, "load", load)
    return made


def ask(*what):
    return [sources.load_data(name, seed, Sizes(), CPU) for name, seed in what]


def test_what_is_asked_for_again_is_the_same(loaded):
    first, _, again = ask(("digits", 0), ("photos", 0), ("digits", 0))
    assert again is first
    assert loaded == [("digits", 0), ("photos", 0)]


def test_a_few_are_kept_and_the_one_that_was_used_longest_ago_goes_first(loaded):
    ask(("digits", 0), ("digits", 1), ("photos", 0), ("digits", 0), ("digits", 2))
    assert [key[:2] for key in sources._kept] == [("photos", 0), ("digits", 0), ("digits", 2)]


def test_a_large_data_set_is_in_memory_under_one_seed(loaded, monkeypatch):
    monkeypatch.setattr(sources, "_LARGE_BYTES", 1)
    at_once = []
    real = sources._load
    monkeypatch.setattr(sources, "_load", lambda *what: at_once.append(list(sources._kept)) or real(*what))
    ask(("digits", 0), ("photos", 0), ("digits", 1))
    # The other seed was let go before this one was made, and other data were not.
    assert [key[:2] for key in at_once[-1]] == [("photos", 0)]
    assert [key[:2] for key in sources._kept] == [("photos", 0), ("digits", 1)]


def test_what_is_kept_takes_no_more_than_so_many_bytes_unless_it_is_one(loaded, monkeypatch):
    monkeypatch.setattr(sources, "_MOST_BYTES", 1)
    ask(("digits", 0), ("photos", 0))
    assert [key[0] for key in sources._kept] == ["photos"]
