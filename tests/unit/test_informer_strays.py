"""Objects that a label selector stops showing: deleted, or only without the label? On virtual time."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from store.kube.errors import Expired, Forbidden, ServerError, Unreachable
from store.kube.indexes import by_label
from store.kube.objects import Object
from tests.support.collection import Collection
from tests.support.informers import until, watching

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
    """How often the server was asked for a single object."""
    return len(server.times("get"))


async def test_an_object_that_leaves_the_selector_strays(server: Collection) -> None:
    """It still exists: handlers hear of an update to its state of now, and readers and indexes go on finding it."""
    async with watching(server, label_selector=SELECTOR, indexers={"job": by_label("job")}) as watched:
        watched.told.forget()
        server.put("a", labels={"job": "y"})
        await until(lambda: watched.told.log)
        assert watched.told.log == [("updated", "a@103")]
        assert watched.informer.by_index("job", "team/y") == [server.now["team/a"]]
        assert watched.told.violations == []


async def test_a_deletion_is_told_once_it_is_sure(server: Collection) -> None:
    """An object that no GET finds any more is gone, with the final state that the watch told."""
    async with watching(server, label_selector=SELECTOR) as watched:
        watched.told.forget()
        server.delete("a")
        await until(lambda: watched.told.log)
        assert watched.told.log == [("deleted", "a@103")]
        assert (watched.told.tombstones, questions(server)) == ([], 1)
        assert len(watched.informer) == 0
        await asyncio.sleep(100.0)
        assert questions(server) == 1


async def test_the_end_of_a_terminating_object_is_believed(server: Collection) -> None:
    """A pod that ends in good order costs no request."""
    async with watching(server, label_selector=SELECTOR) as watched:
        server.put("a", metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
        server.delete("a")
        await until(lambda: watched.told.counts["deleted"])
        assert questions(server) == 0


@pytest.mark.parametrize(
    "selector", [{}, {"field_selector": "spec.nodeName=n1"}, {"label_selector": "a", "field_selector": "b=c"}]
)
async def test_without_a_label_selector_an_end_is_believed(selector: dict[str, str]) -> None:
    """A DELETED without a selector can't mean anything else, and what leaves a field selector counts as deleted."""
    server = Collection()
    server.put("a", labels={"a": ""})
    async with watching(server, **selector) as watched:
        server.delete("a")
        await until(lambda: watched.told.counts["deleted"])
        assert questions(server) == 0


async def test_a_stray_that_comes_back_is_an_update(server: Collection) -> None:
    """It is watched again, and nobody asks for it any more; its deletion is then told as usual."""
    async with watching(server, label_selector=SELECTOR) as watched:
        server.put("a", labels=OTHERS)
        await until(lambda: watched.told.counts["updated"] == 1)
        server.put("a", labels=OURS)
        await watched.informer.synced()
        await until(lambda: watched.told.counts["updated"] == 2)
        asked = questions(server)
        await asyncio.sleep(100.0)
        assert questions(server) == asked
        assert watched.told.view == server.selected(SELECTOR)
        assert watched.told.violations == []


async def test_an_end_that_was_none_is_forgotten(server: Collection) -> None:
    """An object that comes back before anybody could ask for it, and vanishes later on unseen, ends in a tombstone
    with its last known state, not in the end that the watch seemed to tell the first time."""
    async with watching(server, label_selector=SELECTOR) as watched:
        server.fail("get", ServerError("oops"))
        server.put("a", labels=OTHERS)
        await until(lambda: questions(server))
        last = server.put("a", labels=OURS)
        await until(lambda: watched.told.counts["updated"])
        await watched.cut_off()
        server.delete("a")
        server.compact()
        await until(lambda: watched.told.counts["deleted"])
        assert watched.told.tombstones == [("team/a", last)]
        assert watched.told.violations == []


async def test_a_stray_that_is_deleted_is_missed_in_the_end(server: Collection) -> None:
    """No watch tells of it: it is asked for again, ever more seldom, and its end is a tombstone."""
    async with watching(server, label_selector=SELECTOR) as watched:
        stray = server.put("a", labels=OTHERS)
        await until(lambda: watched.told.counts["updated"])
        await asyncio.sleep(3600.0)
        pauses = [later - earlier for earlier, later in itertools.pairwise(server.times("get"))]
        for step, pause in itertools.zip_longest((10.0, 20.0, 40.0, 80.0), pauses, fillvalue=150.0):
            assert step <= pause <= 2 * step
        server.delete("a")
        await until(lambda: watched.told.tombstones, within=300.0)
        assert watched.told.tombstones == [("team/a", stray)]
        asked = questions(server)
        await asyncio.sleep(1000.0)
        assert questions(server) == asked


async def test_a_stray_that_changes_is_an_update(server: Collection) -> None:
    """What is found when it is asked for again is told, if it is new."""
    async with watching(server, label_selector=SELECTOR) as watched:
        server.put("a", labels=OTHERS)
        await until(lambda: watched.told.counts["updated"] == 1)
        await asyncio.sleep(60.0)
        assert watched.told.counts["updated"] == 1
        server.put("a", spec="new")
        await until(lambda: watched.told.counts["updated"] == 2, within=80.0)
        assert watched.informer.get("team/a") == server.now["team/a"]


async def test_a_released_stray_is_forgotten(server: Collection) -> None:
    """`discard` takes it out of the cache, with a tombstone to handlers; it does not touch another object."""
    async with watching(server, label_selector=SELECTOR) as watched:
        uid = server.put("a", labels=OTHERS)["metadata"]["uid"]
        watched.informer.discard("team/a", uid)
        await until(lambda: watched.told.counts["updated"])
        watched.informer.discard("team/a", "another uid")
        watched.informer.discard("team/none", uid)
        assert len(watched.informer) == 1
        watched.informer.discard("team/a", uid)
        assert len(watched.informer) == 0
        assert [tombstone.key for tombstone in watched.told.tombstones] == ["team/a"]
        asked = questions(server)
        await asyncio.sleep(100.0)
        assert questions(server) == asked


async def test_an_object_that_is_watched_is_never_discarded(server: Collection) -> None:
    """Releasing an object that matches the selector again, or always did, leaves it in the cache."""
    async with watching(server, label_selector=SELECTOR) as watched:
        watched.informer.discard("team/a", server.now["team/a"]["metadata"]["uid"])
        assert watched.told.view == server.selected(SELECTOR)


async def test_a_name_that_was_reused_belongs_to_another_object(server: Collection) -> None:
    """When a GET finds another UID, ours is gone; when the new one is ours, too, no question is needed."""
    async with watching(server, label_selector=SELECTOR) as watched:
        watched.told.forget()
        server.replace("a", labels=OTHERS)
        await until(lambda: watched.told.log)
        assert watched.told.log == [("deleted", "a@103")]
        server.put("b", labels=OURS)
        server.replace("b", labels=OURS)
        await until(lambda: watched.told.view)
        await asyncio.sleep(1.0)
        assert watched.told.view == server.selected(SELECTOR)
        assert watched.told.violations == []


@pytest.mark.parametrize("error", [Unreachable("away"), ServerError("oops", status=500)])
async def test_a_question_is_repeated_until_it_is_answered(
    server: Collection, error: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as the server does not say that the object is gone, it counts as there; that is logged, once."""
    async with watching(server, label_selector=SELECTOR) as watched:
        server.fail("get", *[error] * 4)
        server.delete("a")
        await until(lambda: questions(server) == 4)
        assert len(watched.informer) == 1
        await until(lambda: watched.told.counts["deleted"])
        times = server.times("get")
        assert 0.8 <= times[1] - times[0] < 1.7
        assert times[4] - times[3] >= 6.4
    assert capsys.readouterr().out.count("can't be asked for") == 1


async def test_without_the_right_to_ask_an_end_is_believed(
    server: Collection, capsys: pytest.CaptureFixture[str]
) -> None:
    """A role without the verb `get` has what a watch says; that is logged, once."""
    server.put("b", labels=OURS)
    async with watching(server, label_selector=SELECTOR) as watched:
        server.fail("get", *[Forbidden("no")] * 2)
        server.delete("a")
        server.put("b", labels=OTHERS)
        await until(lambda: watched.told.counts["deleted"] == 2)
    assert capsys.readouterr().out.count("allow the verb `get`") == 1


async def test_a_list_leaves_the_same_doubt(server: Collection) -> None:
    """What is missing in a list after an outage may have left the selector, too: only what is gone for sure, or was
    terminating, is told of as deleted."""
    for name in ("leaves", "vanishes"):
        server.put(name, labels=OURS)
    server.put("ends", labels=OURS, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    async with watching(server, label_selector=SELECTOR) as watched:
        await watched.cut_off()
        watched.told.forget()
        server.put("leaves", labels=OTHERS)
        server.delete("vanishes")
        server.delete("ends")
        server.compact()
        await until(lambda: len(watched.told.log) == 3)
        assert sorted(watched.told.log) == [
            ("deleted", "ends@105"),
            ("deleted", "vanishes@104"),
            ("updated", "leaves@106"),
        ]
        assert questions(server) == 2
        assert {tombstone.key for tombstone in watched.told.tombstones} == {"team/ends", "team/vanishes"}


async def test_a_list_settles_what_it_shows_and_leaves_strays_alone(server: Collection) -> None:
    """An object in doubt that is listed is there; a known stray goes on being asked for at its own pace."""
    server.put("stray", labels=OURS)
    async with watching(server, label_selector=SELECTOR) as watched:
        server.put("stray", labels=OTHERS)
        await until(lambda: watched.told.counts["updated"])
        server.fail("get", *[ServerError("oops")] * 100)
        server.put("a", labels=OTHERS)
        await until(lambda: questions(server) > 1)
        await watched.cut_off()
        server.put("a", labels=OURS)
        server.compact()
        await until(lambda: watched.informer.stats.lists["expired"])
        await asyncio.sleep(5.0)
        assert watched.told.violations == []
        assert set(watched.told.view) == {"team/a", "team/stray"}
        assert watched.told.counts["deleted"] == 0


async def test_a_thousand_ends_are_asked_for_a_few_at_a_time(server: Collection) -> None:
    """However many objects vanish at once, the server gets a bounded number of questions at a time."""
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
            server.delete(f"p{number}")
        await until(lambda: watched.told.counts["deleted"] == 1000)
        assert busiest == 8
        assert questions(server) == 1000
