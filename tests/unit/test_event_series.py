"""What an occurrence becomes: client-go's three rules, without a loop or a clock."""

from __future__ import annotations

from store.kube.event_series import CAPACITY, COMBINED, QUIET_GAP, SPAM_INTERVAL, Correlator, Reference, Series

JOB = Reference("v1", "Job", "space", "train", "uid-1")
OTHER = Reference("v1", "Job", "space", "other", "uid-2")
START = 1_600_000_000.0


def told(
    correlator: Correlator, message: str, now: float = START, *, about: Reference = JOB, reason: str = "Failed"
) -> Series:
    """The series of an occurrence that the spam filter lets pass."""
    series = correlator.observe(about, "Warning", reason, message, now)
    assert series is not None
    return series


def test_an_equal_occurrence_raises_the_count() -> None:
    """The same message again is the same event, seen twice, with its first and its last time."""
    correlator = Correlator()
    first = told(correlator, "no memory")
    again = told(correlator, "no memory", START + 7)
    assert again is first
    assert (again.count, again.first, again.last) == (2, START, START + 7)


def test_what_differs_is_another_event() -> None:
    """Object, type, reason and message tell events apart, and no two have one name."""
    correlator = Correlator()
    series = [
        told(correlator, "a"),
        told(correlator, "b"),
        told(correlator, "a", reason="Killed"),
        told(correlator, "a", about=OTHER),
        correlator.observe(JOB, "Normal", "Failed", "a", START),
    ]
    assert len({one.name for one in series if one}) == 5
    assert all(one and one.count == 1 for one in series)


def test_from_the_tenth_distinct_message_they_are_combined() -> None:
    """Scenario 57: of 12 distinct messages 9 are events of their own, and the rest one event with the latest."""
    correlator = Correlator()
    series = [told(correlator, f"message {number}") for number in range(12)]
    assert [one.message for one in series[:9]] == [f"message {number}" for number in range(9)]
    assert series[9] is series[10] is series[11]
    assert (series[9].message, series[9].count) == (f"{COMBINED}message 11", 3)


def test_known_messages_stay_single_beside_the_combined_event() -> None:
    """A repetition of one of the first nine raises its own count, also later."""
    correlator = Correlator()
    series = [told(correlator, f"message {number}") for number in range(10)]
    assert told(correlator, "message 0") is series[0]
    assert series[0].message == "message 0"


def test_other_reasons_are_not_combined_with_it() -> None:
    """Distinct messages count per object, type and reason."""
    correlator = Correlator()
    for number in range(10):
        told(correlator, f"message {number}")
    assert told(correlator, "new", reason="Killed").message == "new"
    assert told(correlator, "new", about=OTHER).message == "new"


def test_ten_quiet_minutes_end_the_combining() -> None:
    """After the gap a new message is an event of its own again; a moment earlier it is not."""
    correlator = Correlator()
    for number in range(10):
        told(correlator, f"message {number}")
    assert told(correlator, "within", START + QUIET_GAP).message == f"{COMBINED}within"
    assert told(correlator, "after", START + 2 * QUIET_GAP + 1).message == "after"


def test_the_26th_in_a_second_is_held_back() -> None:
    """Scenario 57: 25 occurrences about one object are told at once, the 26th is only counted."""
    correlator = Correlator()
    for _ in range(25):
        series = told(correlator, "again", START + 1)
    assert correlator.observe(JOB, "Warning", "Failed", "again", START + 1) is None
    assert (series.count, correlator.skipped) == (26, 1)
    assert told(correlator, "again", START + 1, about=OTHER)


def test_one_more_is_told_each_five_minutes() -> None:
    """The budget refills slowly, and what was held back is in the count that is told then."""
    correlator = Correlator()
    for _ in range(30):
        correlator.observe(JOB, "Warning", "Failed", "again", START)
    assert correlator.observe(JOB, "Warning", "Failed", "again", START + SPAM_INTERVAL - 1) is None
    assert told(correlator, "again", START + SPAM_INTERVAL).count == 32
    assert correlator.observe(JOB, "Warning", "Failed", "again", START + SPAM_INTERVAL) is None


def test_a_clock_that_is_set_back_does_no_harm() -> None:
    """Times before earlier ones neither refill the budget nor take from it."""
    correlator = Correlator()
    for number in range(25):
        told(correlator, "again", START - 1000 * number)
    assert correlator.observe(JOB, "Warning", "Failed", "again", START - 1e6) is None


def test_memory_is_bounded() -> None:
    """Of very many objects, the latest are remembered; one that was forgotten begins anew."""
    correlator = Correlator()
    first = told(correlator, "a")
    for number in range(CAPACITY):
        told(correlator, "a", about=JOB._replace(uid=str(number)))
    assert told(correlator, "a", about=JOB._replace(uid=str(CAPACITY - 1))).count == 2
    assert told(correlator, "a") is not first


def test_what_is_told_of_often_is_remembered() -> None:
    """It is the silent objects that are forgotten, not those that were first."""
    correlator = Correlator()
    told(correlator, "a")
    for number in range(CAPACITY):
        told(correlator, "a", about=JOB._replace(uid=str(number)))
        if number % 400 == 0:
            correlator.observe(JOB, "Warning", "Failed", "a", START)
    assert told(correlator, "a").count > CAPACITY // 400


def test_names_are_valid_and_messages_are_short() -> None:
    """The longest object name still gives a DNS subdomain, and a message is cut where the API's limit is."""
    correlator = Correlator()
    series = told(correlator, "x" * 5000, about=JOB._replace(name="a" * 235 + "-" + "b" * 17))
    assert len(series.name) <= 253
    assert "-." not in series.name
    assert len(series.message) == 1024
    assert series.message.endswith("…")


def test_an_incomplete_object_can_be_named() -> None:
    """Telling something about an object without metadata does not fail."""
    assert Reference.to({}, "v1", "Job") == Reference("v1", "Job", "", "", "")
