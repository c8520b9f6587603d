"""A list of cases in one test hides none that fails."""

import pytest
import torch

from .parameters import in_turn, long_but, pairwise, subtests


def test_every_case_runs_and_all_that_fail_are_named(tmp_path):
    drawn = []

    @subtests("number, sentence", [(1, "a"), (2, "b"), (3, "c")])
    def odd(tmp_path, number, sentence):
        drawn.append(float(torch.rand(())))
        with pytest.raises(ValueError, match=sentence):
            if number != 2:
                raise ValueError("c")

    with pytest.raises(BaseExceptionGroup, match="2 of 3 runs fail") as failed:
        odd(tmp_path=tmp_path)
    notes = [error.__notes__[-1] for error in failed.value.exceptions]
    assert notes == ["with number, sentence = 1, 'a'", "with number, sentence = 2, 'b'"]
    assert len(drawn) == 3 and len(set(drawn)) == 1


@subtests("value", {"first": 1, "second": 2})
def test_fixtures_are_given_beside_the_cases_and_a_folder_is_each_cases_own(tmp_path, value):
    assert tmp_path.is_dir() and not any(tmp_path.iterdir()) and value in ("first", "second")
    (tmp_path / "file").touch()


def test_pairs_meet_in_far_fewer_than_all_combinations():
    values = [list(range(5)), "abcd", [True, False], "xyz"]
    rows = pairwise(*values)
    assert len(rows) < 40 < 5 * 4 * 2 * 3
    for i in range(4):
        for j in range(i):
            assert {(row[i], row[j]) for row in rows} == {(a, b) for a in values[i] for b in values[j]}


def test_in_turn_each_name_meets_one_value_by_default_and_all_with_the_slow_tests():
    cases = in_turn("abcde", [1, 2])
    assert {case.values for case in cases} == {(name, value) for name in "abcde" for value in (1, 2)}
    assert [case.values for case in cases if not case.marks] == [("a", 1), ("b", 2), ("c", 1), ("d", 2), ("e", 1)]
    assert {mark.name for case in cases for mark in case.marks} == {"slow"}
    fewer = in_turn("abcde", [1, 2], every=3)
    assert [case.values for case in fewer if not case.marks] == [("a", 1), ("d", 2)]
    assert [case.values for case in fewer if [mark.name for mark in case.marks] == ["long"]] == [
        ("b", 2),
        ("c", 1),
        ("e", 1),
    ]


def test_cases_are_long_but_those_named():
    cases = long_but(["a", ("b", 2)], ["a", ("b", 1), ("b", 2)])
    assert [case.values for case in cases] == [("a",), ("b", 1), ("b", 2)]
    assert [[mark.name for mark in case.marks] for case in cases] == [[], ["long"], []]
