"""Expensive tests that are not marked are named."""

from types import SimpleNamespace

from . import costs


def report(name, when, *properties):
    return SimpleNamespace(nodeid=name, when=when, user_properties=properties)


def test_expensive_default_tests_are_named_by_their_cpu_time_and_no_others():
    reports = [
        report("cheap", "teardown", ("cpu_seconds", costs.LIMIT / 2)),
        report("dear", "call"),
        report("dear", "teardown", ("cpu_seconds", 2 * costs.LIMIT)),
        report("dearer", "teardown", ("cpu_seconds", 3 * costs.LIMIT)),
        report("marked", "teardown"),
    ]
    head, *lines = costs.expensive(reports)
    assert head.startswith("2 default tests") and [line.split()[-1] for line in lines] == ["dearer", "dear"]
    assert costs.expensive(reports[:2]) == []


def test_time_is_that_of_a_processor_and_never_falls():
    begun = costs.cpu_seconds()
    while costs.cpu_seconds() == begun:  # the clock ticks only while this process works
        pass
    assert costs.cpu_seconds() > begun
