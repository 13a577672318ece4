"""Expectations: a controller waits for the effects of its calls, but not forever."""

from __future__ import annotations

from controllers.jobs.children.expectations import Expectations, Expected

PODS, SERVICES = "uid-1/worker/pods", "uid-1/worker/services"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def names(count: int, start: int = 0) -> list[str]:
    return [f"p-{index}" for index in range(start, start + count)]


def test_satisfied_when_all_was_seen() -> None:
    """Of 10 creations and 30 deletions, eleven creation events do not make up for the deletions."""
    expectations = Expectations(clock=Clock())
    expectations.expect_creations(PODS, names(10))
    expectations.expect_deletions(PODS, names(30, start=100))

    for name in names(11):
        expectations.creation_observed(PODS, name)
    assert not expectations.satisfied("uid-1")

    for uid in names(31, start=100):
        expectations.deletion_observed(PODS, uid)
    assert expectations.satisfied("uid-1")
    assert len(expectations) == 0


def test_an_expectation_expires() -> None:
    """A lost event holds the job back for the time to live and no longer."""
    clock = Clock()
    expectations = Expectations(ttl=300.0, clock=clock)
    expectations.expect_creations(PODS, ["a"])
    clock.now = 100.0
    expectations.expect_creations(PODS, ["b"])

    assert expectations.expires_in("uid-1") == 300.0
    clock.now = 300.0
    assert expectations.outstanding("uid-1") == [Expected(PODS, "create", "b")]
    clock.now = 400.0
    assert expectations.satisfied("uid-1")
    assert expectations.expires_in("uid-1") is None


def test_a_deletion_seen_twice_counts_once() -> None:
    """The second event of one UID does not count as another pod's deletion."""
    expectations = Expectations(clock=Clock())
    expectations.expect_deletions(PODS, ["uid-a", "uid-b"])

    expectations.deletion_observed(PODS, "uid-a")
    expectations.deletion_observed(PODS, "uid-a")

    assert expectations.outstanding("uid-1") == [Expected(PODS, "delete", "uid-b")]


def test_a_creation_is_not_a_deletion() -> None:
    """The same text as a name and as a UID are two entries."""
    expectations = Expectations(clock=Clock())
    expectations.expect_creations(PODS, ["x"])

    expectations.deletion_observed(PODS, "x")

    assert not expectations.satisfied("uid-1")


def test_every_key_of_a_job_has_to_be_satisfied() -> None:
    """A job waits until all its types are satisfied."""
    expectations = Expectations(clock=Clock())
    expectations.expect_creations(PODS, ["a"])
    expectations.expect_creations(SERVICES, ["a"])

    expectations.creation_observed(PODS, "a")
    assert not expectations.satisfied("uid-1")
    expectations.creation_observed(SERVICES, "a")
    assert expectations.satisfied("uid-1")


def test_jobs_do_not_wait_for_each_other() -> None:
    """The expectations of one job, or their end, do not affect another job."""
    expectations = Expectations(clock=Clock())
    expectations.expect_creations(PODS, ["a"])
    expectations.expect_creations("uid-2/worker/pods", ["a"])

    assert expectations.satisfied("uid-3")
    expectations.forget("uid-1")
    assert expectations.satisfied("uid-1")
    assert not expectations.satisfied("uid-2")
    expectations.forget("uid-1")


def test_an_uncertain_call_holds_the_job_back_briefly() -> None:
    """After a timeout the creation stays expected, but not for as long as after an answer."""
    clock = Clock()
    expectations = Expectations(ttl=300.0, uncertain_ttl=10.0, clock=clock)
    expectations.expect_creations(PODS, ["a"])
    clock.now = 1.0

    expectations.uncertain(Expected(PODS, "create", "a"))
    assert not expectations.satisfied("uid-1")
    assert expectations.expires_in("uid-1") == 10.0
    clock.now = 11.0
    assert expectations.satisfied("uid-1")


def test_uncertainty_about_something_seen_changes_nothing() -> None:
    """The event came before the timeout: no entry is left."""
    expectations = Expectations(clock=Clock())
    expectations.expect_creations(PODS, ["a", "b"])
    expectations.creation_observed(PODS, "a")

    expectations.uncertain(Expected(PODS, "create", "a"))
    expectations.uncertain(Expected("uid-9/worker/pods", "create", "a"))

    assert expectations.outstanding("uid-1") == [Expected(PODS, "create", "b")]
    assert expectations.satisfied("uid-9")
