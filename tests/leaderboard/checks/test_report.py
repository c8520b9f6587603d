"""Faults as lines: alike ones are counted, and none of another kind is lost among them."""

from leakbench.leaderboard.checks.fault import Fault
from leakbench.leaderboard.checks.report import MOST_ALIKE, fault_lines


def test_of_faults_that_differ_in_files_and_numbers_the_first_are_shown_and_the_rest_is_counted():
    alike = [
        Fault(
            file=f"records/{number:032x}.json",
            field=f"cells[{number}].id",
            problem=f"got {number / 7} of {number:032x}",
        )
        for number in range(1000)
    ]
    other = Fault(file="records/last.json", field="seal", problem="it was edited")
    text = "\n".join(fault_lines([*alike, other]))
    assert text.count("cells[") - 1 == MOST_ALIKE
    assert f"{1000 - MOST_ALIKE} more refused, as cells[#].id: got # of #; --json has all" in " ".join(text.split())
    assert "it was edited" in text


def test_a_flagged_fault_is_not_counted_among_refused_ones():
    faults = [
        Fault(file="a", field="x", problem="p", severity=s) for s in ("refused", "flagged") for _ in range(MOST_ALIKE)
    ]
    assert "more" not in "\n".join(fault_lines(faults))
