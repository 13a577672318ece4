"""Objects that a label selector stops showing: deleted, or only without the label? On virtual time."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from store.kube.api.errors import Expired, Forbidden, ServerError, Unreachable
from store.kube.api.objects import Object
from store.kube.informer.informer import by_label
from tests.support.kube.informers.checked import watching
from tests.support.kube.informers.collection import Collection
from tests.support.waiting import until

pytestmark = pytest.mark.looptime

OURS = {"group": "ours", "job": "x"}
OTHERS = {"job": "x"}
SELECTOR = "group=ours"


@pytest.fixture
def server() -> Collection:
    collection = Collection()
    collection.put("a", labels=OURS)
    collection.put("other", labels=OTHERS)
    return collection


def questions(server: Collection) -> int:
    """Return the number of reads of a single object."""
    return len(server.times("get"))


async def test_an_object_that_leaves_the_selector_stays_unmatched(server: Collection) -> None:
    """The object still exists: handlers receive an update to its present state; readers and indexes still find it."""
    async with watching(server, label_selector=SELECTOR, indexers={"job": by_label("job")}) as watched:
        watched.recorded.forget()
        server.put("a", labels={"job": "y"})
        await until(lambda: watched.recorded.log)
        assert watched.recorded.log == [("updated", "a@103")]
        assert watched.informer.by_index("job", "team/y") == [server.now["team/a"]]
        assert watched.recorded.violations == []


async def test_a_deletion_is_reported_once_it_is_certain(server: Collection) -> None:
    """An object that no GET finds any more is gone, with the final state that the watch reported."""
    async with watching(server, label_selector=SELECTOR) as watched:
        watched.recorded.forget()
        server.remove("a")
        await until(lambda: watched.recorded.log)
        assert watched.recorded.log == [("deleted", "a@103")]
        assert (watched.recorded.tombstones, questions(server)) == ([], 1)
        assert len(watched.informer) == 0
        await asyncio.sleep(100.0)
        assert questions(server) == 1


async def test_the_end_of_a_terminating_object_is_believed(server: Collection) -> None:
    """A pod that ends normally costs no request."""
    async with watching(server, label_selector=SELECTOR) as watched:
        server.put("a", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
        server.remove("a")
        await until(lambda: watched.recorded.counts["deleted"])
        assert questions(server) == 0


@pytest.mark.parametrize(
    "selector",
    [{}, {"field_selector": "spec.nodeName=n1"}, {"label_selector": "a", "field_selector": "spec.nodeName=n1"}],
)
async def test_without_a_label_selector_an_end_is_believed(selector: dict[str, str]) -> None:
    """DELETED without a selector is unambiguous, and an object that leaves a field selector counts as deleted."""
    server = Collection()
    server.put("a", labels={"a": ""}, spec={"nodeName": "n1"})
    async with watching(server, **selector) as watched:
        server.remove("a")
        await until(lambda: watched.recorded.counts["deleted"])
        assert questions(server) == 0


async def test_an_unmatched_object_that_changes_or_comes_back_is_an_update(server: Collection) -> None:
    """A change is seen at the next read. An object that comes back is watched again and no longer read by name."""
    async with watching(server, label_selector=SELECTOR) as watched:
        server.put("a", labels=OTHERS)
        await until(lambda: watched.recorded.counts["updated"] == 1)
        await asyncio.sleep(60.0)
        assert watched.recorded.counts["updated"] == 1
        server.put("a", labels=OTHERS, spec="new")
        await until(lambda: watched.recorded.counts["updated"] == 2, within=80.0)
        assert watched.informer.get("team/a") == server.now["team/a"]
        server.put("a", labels=OURS)
        await watched.informer.synced()
        await until(lambda: watched.recorded.counts["updated"] == 3)
        asked = questions(server)
        await asyncio.sleep(100.0)
        assert questions(server) == asked
        assert watched.recorded.view == server.selected(SELECTOR)
        assert watched.recorded.violations == []


async def test_an_end_that_was_none_is_forgotten(server: Collection) -> None:
    """An object that comes back before it is read by name, and vanishes later on unseen, ends in a tombstone
    with its last known state, not with the one that the watch reported the first time."""
    async with watching(server, label_selector=SELECTOR) as watched:
        server.fail("get", ServerError("oops"))
        server.put("a", labels=OTHERS)
        await until(lambda: questions(server))
        last = server.put("a", labels=OURS)
        await until(lambda: watched.recorded.counts["updated"])
        await watched.cut_off()
        server.remove("a")
        server.compact()
        await until(lambda: watched.recorded.counts["deleted"])
        assert watched.recorded.tombstones == [("team/a", last)]
        assert watched.recorded.violations == []


async def test_an_unmatched_object_that_is_deleted_is_missed_in_the_end(server: Collection) -> None:
    """No watch reports it: it is read again at growing intervals, and its end is a tombstone."""
    async with watching(server, label_selector=SELECTOR) as watched:
        stray = server.put("a", labels=OTHERS)
        await until(lambda: watched.recorded.counts["updated"])
        await asyncio.sleep(3600.0)
        pauses = [later - earlier for earlier, later in itertools.pairwise(server.times("get"))]
        for step, pause in itertools.zip_longest((10.0, 20.0, 40.0, 80.0), pauses, fillvalue=150.0):
            assert step <= pause <= 2 * step
        server.remove("a")
        await until(lambda: watched.recorded.tombstones, within=300.0)
        assert watched.recorded.tombstones == [("team/a", stray)]
        asked = questions(server)
        await asyncio.sleep(1000.0)
        assert questions(server) == asked


async def test_a_released_unmatched_object_is_forgotten(server: Collection) -> None:
    """`discard` takes it out of the cache, with a tombstone to handlers; it does not touch another object."""
    async with watching(server, label_selector=SELECTOR) as watched:
        uid = server.put("a", labels=OTHERS)["metadata"]["uid"]
        watched.informer.discard("team/a", uid)
        assert len(watched.informer) == 1, "it matches the selector, as far as the watch has shown"
        await until(lambda: watched.recorded.counts["updated"])
        watched.informer.discard("team/a", "another uid")
        watched.informer.discard("team/none", uid)
        assert len(watched.informer) == 1
        watched.informer.discard("team/a", uid)
        assert len(watched.informer) == 0
        assert [tombstone.key for tombstone in watched.recorded.tombstones] == ["team/a"]
        asked = questions(server)
        await asyncio.sleep(100.0)
        assert questions(server) == asked


async def test_a_name_that_was_reused_belongs_to_another_object(server: Collection) -> None:
    """When a GET finds another UID, the cached object is gone; when the new one matches, too, no GET is needed."""
    async with watching(server, label_selector=SELECTOR) as watched:
        watched.recorded.forget()
        server.reuse("a", labels=OTHERS)
        await until(lambda: watched.recorded.log)
        assert watched.recorded.log == [("deleted", "a@103")]
        server.put("b", labels=OURS)
        server.reuse("b", labels=OURS)
        await until(lambda: watched.recorded.view)
        await asyncio.sleep(1.0)
        assert watched.recorded.view == server.selected(SELECTOR)
        assert watched.recorded.violations == []


@pytest.mark.parametrize("error", [Unreachable("away"), ServerError("oops", status=500)])
async def test_a_question_is_repeated_until_it_is_answered(
    server: Collection, error: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """While reads fail, the object counts as existing; that is logged once in each outage."""
    server.put("b", labels=OURS)
    async with watching(server, label_selector=SELECTOR) as watched:
        server.fail("get", *[error] * 4)
        server.remove("a")
        await until(lambda: questions(server) == 4)
        assert len(watched.informer) == 2
        await until(lambda: watched.recorded.counts["deleted"])
        times = server.times("get")
        assert 0.8 <= times[1] - times[0] < 1.7
        assert times[4] - times[3] >= 6.4
        assert capsys.readouterr().out.count("Could not read absent objects") == 1
        server.fail("get", error)
        server.remove("b")
        await until(lambda: watched.recorded.counts["deleted"] == 2)
    assert capsys.readouterr().out.count("Could not read absent objects") == 1


async def test_without_the_right_to_ask_an_end_is_believed(
    server: Collection, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the verb `get` the watch is taken at its word; that is logged, once."""
    server.put("b", labels=OURS)
    async with watching(server, label_selector=SELECTOR) as watched:
        server.fail("get", *[Forbidden("no")] * 2)
        server.remove("a")
        server.put("b", labels=OTHERS)
        await until(lambda: watched.recorded.counts["deleted"] == 2)
    assert capsys.readouterr().out.count("grant the verb `get`") == 1


async def test_a_list_leaves_the_same_doubt(server: Collection) -> None:
    """An object that a list after an outage lacks may have left the selector, too: only an object that is certainly
    gone, or was terminating, is reported as deleted."""
    for name in ("leaves", "vanishes"):
        server.put(name, labels=OURS)
    server.put("ends", labels=OURS, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    async with watching(server, label_selector=SELECTOR) as watched:
        await watched.cut_off()
        watched.recorded.forget()
        server.put("leaves", labels=OTHERS)
        server.remove("vanishes")
        server.remove("ends")
        server.compact()
        await until(lambda: len(watched.recorded.log) == 3)
        assert sorted(watched.recorded.log) == [
            ("deleted", "ends@105"),
            ("deleted", "vanishes@104"),
            ("updated", "leaves@106"),
        ]
        assert questions(server) == 2
        assert {tombstone.key for tombstone in watched.recorded.tombstones} == {"team/ends", "team/vanishes"}


async def test_a_list_settles_what_it_shows_and_leaves_unmatched_objects_alone(server: Collection) -> None:
    """A listed object is no longer in doubt; a known unmatched object is still read at its own pace."""
    server.put("stray", labels=OURS)
    async with watching(server, label_selector=SELECTOR) as watched:
        server.put("stray", labels=OTHERS)
        await until(lambda: watched.recorded.counts["updated"])
        server.fail("get", *[ServerError("oops")] * 100)
        server.put("a", labels=OTHERS)
        await until(lambda: questions(server) > 1)
        await watched.cut_off()
        server.put("a", labels=OURS)
        server.compact()
        await until(lambda: watched.informer.stats.lists["expired"])
        await asyncio.sleep(5.0)
        assert watched.recorded.violations == []
        assert set(watched.recorded.view) == {"team/a", "team/stray"}
        assert watched.recorded.counts["deleted"] == 0


async def test_a_thousand_ends_are_asked_for_a_few_at_a_time(server: Collection) -> None:
    """When many objects vanish at once, the server gets a bounded number of reads at a time."""
    busiest = running = 0

    class Slow(Collection):
        async def get(self, *args: Any, **options: Any) -> Object:
            nonlocal busiest, running
            running += 1
            busiest = max(busiest, running)
            try:
                await asyncio.sleep(0.01)
                return await super().get(*args, **options)
            finally:
                running -= 1

    server = Slow()
    for number in range(1000):
        server.put(f"p{number}", labels=OURS)
    async with watching(server, label_selector=SELECTOR) as watched:
        server.cut(Expired("too old", status=410))
        for number in range(1000):
            server.remove(f"p{number}")
        await until(lambda: watched.recorded.counts["deleted"] == 1000)
        assert busiest == 8
        assert questions(server) == 1000
