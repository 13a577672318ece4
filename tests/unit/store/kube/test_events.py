"""Events: the recorder on virtual time (what is written, in which order, and what becomes of trouble), and the
correlation of occurrences, client-go's three rules, without a loop or a clock.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from store.kube.api.errors import Forbidden, KubeError, ServerTimeout, TooManyRequests, Unreachable
from store.kube.api.objects import EVENTS, Object
from store.kube.events import (
    ATTEMPTS,
    CAPACITY,
    COMBINED,
    DRAIN,
    MAX_BACKOFF,
    QUIET_GAP,
    REMEMBERED,
    SPAM_INTERVAL,
    Correlator,
    EventRecorder,
    Reference,
    Series,
)
from store.kube.memory.kube import MemoryKube
from tests.support.kube.faults.network import ScriptedKube
from tests.support.waiting import loop_time as now

pytestmark = pytest.mark.looptime
START = 1_600_000_000.0
AWAY = Unreachable("connection refused")
JOB = Reference("v1", "Job", "space", "train", "uid-1")
OTHER = Reference("v1", "Job", "space", "other", "uid-2")


def pod(name: str = "pod-0") -> Object:
    return {"metadata": {"name": name, "namespace": "space", "uid": f"uid-of-{name}"}}


class Installation:
    """A recorder on an API in memory, with a network between."""

    def __init__(self) -> None:
        self.api = ScriptedKube(MemoryKube(namespaces=("default", "space")))
        self.recorder = EventRecorder(
            self.api, "rcfarm-jobs", host="node-1", clock=lambda: START + now(), rng=random.Random(1)
        )

    def record(self, message: str = "created", name: str = "pod-0", reason: str = "Created") -> None:
        self.recorder.event(pod(name), "Normal", reason, message, api_version="v1", kind="Pod")

    async def stored(self) -> list[Object]:
        """The events that the API has, oldest first."""
        items = (await self.api.inner.list(EVENTS, "")).items
        return sorted(items, key=lambda event: int(event["metadata"]["resourceVersion"]))

    async def messages(self) -> list[str]:
        return [event["message"] for event in await self.stored()]


@asynccontextmanager
async def recording() -> AsyncIterator[Installation]:
    installation = Installation()
    task = asyncio.create_task(installation.recorder.run())
    try:
        yield installation
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


async def test_an_event_has_all_that_kubectl_shows() -> None:
    """Object, reason, message, type, times and source are on the object as `kubectl describe` reads them."""
    async with recording() as one:
        one.record("pod created")
        await asyncio.sleep(1)
        (event,) = await one.stored()
    assert event["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": "space",
        "name": "pod-0",
        "uid": "uid-of-pod-0",
    }
    assert (event["type"], event["reason"], event["message"], event["count"]) == ("Normal", "Created", "pod created", 1)
    assert event["firstTimestamp"] == event["lastTimestamp"] == "2020-09-13T12:26:40Z"
    assert event["source"] == {"component": "rcfarm-jobs", "host": "node-1"}
    assert event["metadata"]["namespace"] == "space"


async def test_repetitions_raise_the_count_of_one_event() -> None:
    """Each further occurrence is a patch of count and time; the first time stays."""
    async with recording() as one:
        for _ in range(3):
            one.record()
            await asyncio.sleep(10)
        (event,) = await one.stored()
    assert (event["count"], event["firstTimestamp"], event["lastTimestamp"]) == (
        3,
        "2020-09-13T12:26:40Z",
        "2020-09-13T12:27:00Z",
    )
    assert one.api.verbs() == ["create", "patch", "patch"]


async def test_what_happens_during_a_write_is_one_more_write() -> None:
    """A hundred repetitions while a request is under way cost one patch, not a hundred."""
    async with recording() as one:
        one.api.answer_delay = 1.0
        one.record()
        await asyncio.sleep(0.5)
        for _ in range(20):
            one.record()
        await asyncio.sleep(10)
        (event,) = await one.stored()
    assert event["count"] == 21
    assert one.api.verbs() == ["create", "patch"]
    for _ in range(5):
        one.record()
    assert one.recorder.skipped == 1, "of 26 about one object the spam filter lets 25 pass"


async def test_events_about_one_object_keep_their_order() -> None:
    """They are created in the order of their first occurrence, one after the other, however slow the API is."""
    async with recording() as one:
        one.api.request_delay = 0.5
        for reason in ("Created", "Running", "Failed"):
            one.record(reason=reason)
        await asyncio.sleep(10)
        assert [event["reason"] for event in await one.stored()] == ["Created", "Running", "Failed"]
    assert one.api.times("create") == pytest.approx([0.0, 0.5, 1.0])


async def test_trouble_with_one_object_delays_no_other() -> None:
    """While requests about one object get no answer, events about others are written at once."""
    async with recording() as one:
        one.record(name="stuck")
        one.api.fault = AWAY
        await asyncio.sleep(0.1)
        one.api.fault = None
        one.record(name="fine")
        await asyncio.sleep(0.1)
        assert [event["involvedObject"]["name"] for event in await one.stored()] == ["fine"]
        await asyncio.sleep(2)
        assert [event["involvedObject"]["name"] for event in await one.stored()] == ["fine", "stuck"]


async def test_an_expired_event_is_created_again() -> None:
    """The API server keeps events for an hour: a patch that finds none becomes a new event with the whole count."""
    async with recording() as one:
        one.record()
        await asyncio.sleep(1)
        (event,) = await one.stored()
        await one.api.inner.delete(EVENTS, event["metadata"]["name"], "space")
        one.record()
        await asyncio.sleep(1)
        (event,) = await one.stored()
    assert event["count"] == 2
    assert one.api.verbs() == ["create", "patch", "create"]


async def test_a_refused_event_is_given_up() -> None:
    """An event that the API server refuses is not retried, and the next event about the object is written."""
    async with recording() as one:
        one.api.faults["create"] = Forbidden("the namespace is being terminated", status=403)
        one.record(reason="Refused")
        await asyncio.sleep(60)
        assert one.api.verbs() == ["create"]
        assert one.recorder.rejected == 1
        one.api.faults.clear()
        one.record(reason="Fine")
        await asyncio.sleep(1)
        assert [event["reason"] for event in await one.stored()] == ["Fine"]


async def test_a_lost_answer_does_not_double_an_event() -> None:
    """The create went in though its answer was lost: the retry finds the event and only brings its count up."""
    async with recording() as one:
        one.api.lost = AWAY
        one.record()
        await asyncio.sleep(0.1)
        one.record()
        one.api.lost = None
        await asyncio.sleep(10)
        (event,) = await one.stored()
    assert event["count"] == 2


async def test_an_outage_is_outlasted_with_growing_pauses() -> None:
    """Without an answer each series is tried a bounded number of times, further and further apart, then given up."""
    async with recording() as one:
        one.api.fault = AWAY
        one.record()
        await asyncio.sleep(3600)
        times = one.api.times("create")
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert len(times) == ATTEMPTS
        assert gaps[0] <= 1.0
        assert MAX_BACKOFF / 2 <= gaps[-1] <= MAX_BACKOFF
        assert one.recorder.abandoned == 1
        one.api.fault = None
        one.record()
        await asyncio.sleep(1)
        assert [event["count"] for event in await one.stored()] == [2]


@pytest.mark.parametrize("error", [ServerTimeout("try later", retry_after=7), TooManyRequests("slow", retry_after=7)])
async def test_the_server_says_when_to_come_again(error: KubeError) -> None:
    """Retry-After is honoured instead of our own pause."""
    async with recording() as one:
        one.api.faults["create"] = error
        one.record()
        await asyncio.sleep(7.5)
        assert one.api.times("create") == pytest.approx([0.0, 7.0])


async def test_what_waits_is_bounded() -> None:
    """Beyond the bound events are dropped and counted; `event` never waits, and what waited is written."""
    async with recording() as one:
        one.api.request_delay = 1.0
        for number in range(CAPACITY + 5):
            one.record(name=f"pod-{number}")
        assert one.recorder.dropped == 5
        await asyncio.sleep(CAPACITY)
        assert len(await one.stored()) == CAPACITY
        one.record(name="pod-0")
        await asyncio.sleep(2)
        assert len(one.api.times("patch")) == 1, "what was written does not count as waiting any more"


async def test_a_dropped_occurrence_is_in_the_next_count() -> None:
    """Dropping loses a request, not the count: the next occurrence that finds room brings it along."""
    async with recording() as one:
        one.api.request_delay = 1.0
        for number in range(CAPACITY):
            one.record(name=f"pod-{number}")
        one.record(name="late")
        await asyncio.sleep(CAPACITY)
        one.record(name="late")
        await asyncio.sleep(2)
        assert [event["count"] for event in await one.stored() if event["involvedObject"]["name"] == "late"] == [2]


async def test_events_from_before_the_start_are_written() -> None:
    """Events that were recorded before the recorder runs are written."""
    one = Installation()
    one.record("early")
    task = asyncio.create_task(one.recorder.run())
    await asyncio.sleep(1)
    task.cancel()
    assert await one.messages() == ["early"]


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize(("fault", "written"), [(None, ["last"]), (AWAY, [])])
async def test_the_end_waits_a_moment_for_what_is_under_way(
    fault: KubeError | None, written: list[str], seen: bool
) -> None:
    """The last events of a program are written when the API answers, and don't hold the end up when it does not. An
    event that came in the same turn of the loop as the end counts, too."""
    one = Installation()
    task = asyncio.create_task(one.recorder.run())
    await asyncio.sleep(1)
    one.record("last")
    one.api.fault, one.api.request_delay = fault, 0.5
    if seen:
        await asyncio.sleep(0)
    task.cancel()
    began = now()
    await asyncio.wait([task])
    assert task.cancelled()
    assert now() - began <= DRAIN
    assert await one.messages() == written


async def test_an_object_of_the_whole_cluster_has_its_events_in_default() -> None:
    """Events are namespaced: those about cluster objects are kept in the default namespace, as kubectl expects."""
    async with recording() as one:
        node = {"metadata": {"name": "node-1", "uid": "uid-1"}}
        one.recorder.event(node, "Normal", "Ready", "it is back", api_version="v1", kind="Node")
        await asyncio.sleep(1)
        (event,) = await one.stored()
    assert event["metadata"]["namespace"] == "default"
    assert "namespace" not in event["involvedObject"]


def observe(
    correlator: Correlator, message: str, now: float = START, *, about: Reference = JOB, reason: str = "Failed"
) -> Series:
    """The series of an occurrence that the spam filter lets pass."""
    series = correlator.observe(about, "Warning", reason, message, now)
    assert series is not None
    return series


def test_what_differs_is_another_event() -> None:
    """Object, type, reason and message distinguish events, and no two have the same name."""
    correlator = Correlator()
    series = [
        observe(correlator, "a"),
        observe(correlator, "b"),
        observe(correlator, "a", reason="Killed"),
        observe(correlator, "a", about=OTHER),
        correlator.observe(JOB, "Normal", "Failed", "a", START),
    ]
    assert len({one.name for one in series if one}) == 5
    assert all(one and one.count == 1 for one in series)


def test_from_the_tenth_distinct_message_they_are_combined() -> None:
    """Of 12 distinct messages 9 are events of their own, and the rest one event with the latest."""
    correlator = Correlator()
    series = [observe(correlator, f"message {number}") for number in range(12)]
    assert [one.message for one in series[:9]] == [f"message {number}" for number in range(9)]
    assert series[9] is series[10] is series[11]
    assert (series[9].message, series[9].count) == (f"{COMBINED}message 11", 3)


def test_what_stays_single_beside_the_combined_event() -> None:
    """A repetition of one of the first nine, and what has another object or reason."""
    correlator = Correlator()
    series = [observe(correlator, f"message {number}") for number in range(10)]
    assert observe(correlator, "message 0") is series[0]
    assert series[0].message == "message 0"
    assert observe(correlator, "new", reason="Killed").message == "new"
    assert observe(correlator, "new", about=OTHER).message == "new"


def test_ten_quiet_minutes_end_the_combining() -> None:
    """After the gap a new message is an event of its own again; a moment earlier it is not."""
    correlator = Correlator()
    for number in range(10):
        observe(correlator, f"message {number}")
    assert observe(correlator, "within", START + QUIET_GAP).message == f"{COMBINED}within"
    assert observe(correlator, "after", START + 2 * QUIET_GAP + 1).message == "after"


def test_the_26th_in_a_second_is_held_back() -> None:
    """25 occurrences about one object are written at once, the 26th is only counted."""
    correlator = Correlator()
    for _ in range(25):
        series = observe(correlator, "again", START + 1)
    assert correlator.observe(JOB, "Warning", "Failed", "again", START + 1) is None
    assert (series.count, correlator.skipped) == (26, 1)
    assert observe(correlator, "again", START + 1, about=OTHER)


def test_one_more_is_written_each_five_minutes() -> None:
    """The budget refills slowly, and the next written count includes the occurrences held back."""
    correlator = Correlator()
    for _ in range(30):
        correlator.observe(JOB, "Warning", "Failed", "again", START)
    assert correlator.observe(JOB, "Warning", "Failed", "again", START + SPAM_INTERVAL - 1) is None
    assert observe(correlator, "again", START + SPAM_INTERVAL).count == 32
    assert correlator.observe(JOB, "Warning", "Failed", "again", START + SPAM_INTERVAL) is None


def test_a_clock_that_is_set_back_does_no_harm() -> None:
    """Times before earlier ones neither refill the budget nor take from it."""
    correlator = Correlator()
    for number in range(25):
        observe(correlator, "again", START - 1000 * number)
    assert correlator.observe(JOB, "Warning", "Failed", "again", START - 1e6) is None


def test_memory_is_bounded() -> None:
    """Of very many objects, the latest are remembered; a forgotten one begins again."""
    correlator = Correlator()
    first = observe(correlator, "a")
    for number in range(REMEMBERED):
        observe(correlator, "a", about=JOB._replace(uid=str(number)))
    assert observe(correlator, "a", about=JOB._replace(uid=str(REMEMBERED - 1))).count == 2
    assert observe(correlator, "a") is not first


def test_a_frequent_event_is_remembered() -> None:
    """The least recently active objects are forgotten, not the oldest."""
    correlator = Correlator()
    observe(correlator, "a")
    for number in range(REMEMBERED):
        observe(correlator, "a", about=JOB._replace(uid=str(number)))
        if number % 400 == 0:
            correlator.observe(JOB, "Warning", "Failed", "a", START)
    assert observe(correlator, "a").count > REMEMBERED // 400


def test_names_are_valid_and_messages_are_short() -> None:
    """The longest object name still gives a DNS subdomain, and a message is cut where the API's limit is."""
    correlator = Correlator()
    series = observe(correlator, "x" * 5000, about=JOB._replace(name="a" * 235 + "-" + "b" * 17))
    assert len(series.name) <= 253
    assert "-." not in series.name
    assert len(series.message) == 1024
    assert series.message.endswith("…")


def test_an_incomplete_object_can_be_named() -> None:
    """Recording an event about an object without metadata does not fail."""
    assert Reference.to({}, "v1", "Job") == Reference("v1", "Job", "", "", "")
