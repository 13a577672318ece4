"""The changes that an informer reports to its handlers and shows its readers, on virtual time."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from store.kube.api.objects import Object
from store.kube.api.protocol import Page, WatchEvent
from tests.support.kube.informers.checked import RecordingHandler, Watched, running, watching
from tests.support.kube.informers.collection import Collection
from tests.support.waiting import until

pytestmark = pytest.mark.looptime


@pytest.fixture
def server() -> Collection:
    return Collection()


async def test_the_first_list_is_delivered_before_the_informer_counts_as_synced(server: Collection) -> None:
    """`synced` means that handlers have received every existing object."""
    for name in "abc":
        server.put(name)
    watched = Watched(server)
    informer = watched.informer
    assert (informer.has_synced, informer.age, informer.resource_version) == (False, math.inf, "")
    async with running(informer):
        await informer.synced()
        assert watched.recorded.counts == {"added": 3}
        assert informer.has_synced
        await watched.current()


async def test_changes_come_as_they_happen(server: Collection) -> None:
    """After the list a modification is an update from the state before, and the
    position in the history moves on."""
    server.put("a", spec=1)
    async with watching(server) as watched:
        watched.recorded.forget()
        server.put("a", spec=2)
        server.put("b")
        server.remove("a")
        await watched.current()
        assert watched.recorded.log == [("updated", "a@102"), ("added", "b@103"), ("deleted", "a@104")]
        assert watched.recorded.tombstones == []
        assert watched.informer.resource_version == "104"


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED"])
async def test_an_event_for_another_uid_is_no_update(server: Collection, kind: str) -> None:
    """Even if a watch should show a name's new object without the old one's end."""
    server.put("a")
    async with watching(server) as watched:
        watched.recorded.forget()
        metadata = {"name": "a", "namespace": "team", "uid": "new", "resourceVersion": "105"}
        server.send(WatchEvent(kind, {"metadata": metadata}))
        await until(lambda: watched.recorded.log)
        assert watched.recorded.log == [("deleted", "a@101"), ("added", "a@105")]
        assert watched.recorded.violations == []


async def test_a_late_handler_hears_of_all_that_is_cached(server: Collection) -> None:
    """A handler that is added later gets `added` for every object, then the changes."""
    server.put("a")
    server.put("b")
    async with watching(server) as watched:
        late = RecordingHandler()
        watched.informer.add_handler(late)
        assert late.log == [("added", "a@101"), ("added", "b@102")]
        server.remove("a")
        await watched.current()
        assert late.view == watched.recorded.view
        assert late.violations == []


class Failing(RecordingHandler):
    """A handler that raises for some objects, once it has noted them."""

    def _note(self, what: str, obj: Object, *, legal: bool) -> None:
        super()._note(what, obj, legal=legal)
        if obj["metadata"]["name"] == "bad":
            raise RuntimeError("what is this?")


async def test_a_handler_that_raises_hears_of_the_next_object(server: Collection) -> None:
    """A failure of a handler is counted; other handlers and other objects are unaffected."""
    watched = Watched(server)
    failing, after = Failing(), RecordingHandler()
    for handler in (failing, after):
        watched.informer.add_handler(handler)
    server.put("bad")
    server.put("good")
    async with running(watched.informer):
        await watched.informer.synced()
        server.put("bad")
        server.remove("bad")
        server.put("good")
        await watched.current()
        assert [entry[1] for entry in failing.log] == ["bad@101", "good@102", "bad@103", "bad@104", "good@105"]
        assert after.log == watched.recorded.log
        assert watched.informer.handler_failures == 3


async def test_a_handler_may_be_resynced(server: Collection) -> None:
    """Each object is reported again in every period, which is rounded up to whole seconds, to this handler only."""
    for number in range(250):
        server.put(f"p{number}")
    watched, resyncing = Watched(server), RecordingHandler()
    watched.informer.add_handler(resyncing, resync=9.2)
    async with running(watched.informer):
        await watched.informer.synced()
        late = RecordingHandler()
        watched.informer.add_handler(late, resync=0.1)
        await asyncio.sleep(30.5)
        assert resyncing.counts == {"added": 250, "updated": 750}
        assert late.counts == {"added": 250, "updated": 250 * 30}
        assert resyncing.violations == late.violations == []
        assert watched.recorded.counts == {"added": 250}


BAD_OBJECTS: list[Any] = [
    None,
    "text",
    {},
    {"metadata": None},
    {"metadata": {}},
    {"metadata": {"name": "x", "namespace": "team"}},
    {"metadata": {"name": "", "namespace": "team", "resourceVersion": "7"}},
    {"metadata": {"name": 3, "namespace": "team", "resourceVersion": "7"}},
    {"metadata": {"name": "x", "resourceVersion": "7"}},
    {"kind": "Status", "apiVersion": "v1", "metadata": {"name": "x", "namespace": "team", "resourceVersion": "7"}},
    {"kind": "Pod", "apiVersion": "v2", "metadata": {"name": "x", "namespace": "team", "resourceVersion": "7"}},
]


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "DELETED"])
async def test_nonsense_in_a_watch_harms_nothing(server: Collection, kind: str) -> None:
    """An invalid object, or an event of a kind that does not exist yet, is logged, counted and skipped; the stream
    continues."""
    server.put("a")
    async with watching(server) as watched:
        for bad in BAD_OBJECTS:
            server.send(WatchEvent(kind, bad))
        server.send(WatchEvent("PATCHED", server.put("b")))
        server.put("c")
        await watched.current()
        assert watched.informer.malformed == len(BAD_OBJECTS) + 1
        assert len(server.times("watch")) == len(server.times("list")) == 1


async def test_nonsense_in_a_list_harms_nothing(server: Collection) -> None:
    """A list with an object that can't be read shows the others."""

    class Odd(Collection):
        async def list(self, *args: Any, **options: Any) -> Page:
            page = await super().list(*args, **options)
            return replace(page, items=[*page.items[:1], *BAD_OBJECTS, *page.items[1:]])

    server = Odd()
    server.put("a")
    server.put("b")
    async with watching(server) as watched:
        await watched.current()
        assert watched.informer.malformed == len(BAD_OBJECTS)


async def test_a_bad_object_in_a_list_is_no_deletion(server: Collection) -> None:
    """An object that can't be taken in any more keeps its last good state, until it is good, or gone."""

    def refusing(obj: Object) -> Object:
        if obj.get("spec") == "bad":
            raise ValueError("no")
        return obj

    server.put("a", spec="good")
    async with watching(server, transform=refusing) as watched:
        watched.recorded.forget()
        await watched.cut_off()
        server.put("a", spec="bad")
        server.compact()
        await until(lambda: watched.informer.resource_version == "102" and server.watch_count)
        assert watched.recorded.log == []
        server.put("a", spec="bad again")
        await watched.current()
        assert watched.recorded.log == [("updated", "a@103")]
        assert watched.informer.malformed == 1
        server.put("a", spec="bad")
        await until(lambda: [*watched.informer.unreadable] == ["team/a"])
        server.remove("a")
        await until(lambda: not watched.informer.unreadable)
        assert watched.recorded.tombstones[0].key == "team/a"


async def test_managed_fields_are_left_out_and_others_stay(server: Collection) -> None:
    """By default the cache drops the field managers' bookkeeping; the server's own object is not touched."""
    server.put("a", metadata={"managedFields": [{"manager": "kubectl"}], "future": 1}, future=[1])
    watched = Watched(server)
    async with running(watched.informer):
        await watched.informer.synced()
        found = watched.informer.get("team/a")
        assert found is not None
        assert "managedFields" not in found["metadata"]
        assert (found["metadata"]["future"], found["future"]) == (1, [1])
    assert "managedFields" in server.now["team/a"]["metadata"]


async def test_events_that_repeat_what_is_known_are_silent(server: Collection) -> None:
    """An event with the cached version is not reported, nor is the end of an unknown object."""
    known = server.put("a")
    async with watching(server) as watched:
        watched.recorded.forget()
        server.send(WatchEvent("MODIFIED", known))
        server.send(WatchEvent("DELETED", {"metadata": {**known["metadata"], "name": "never-seen"}}))
        server.put("b")
        await until(lambda: watched.informer.resource_version == "102")
        assert watched.recorded.log == [("added", "b@102")]


async def test_the_end_of_another_object_of_the_name_is_an_end(server: Collection) -> None:
    """A DELETED for a UID that was never seen means that the name is free: the cached object is gone, unobserved."""
    known = server.put("a")
    async with watching(server) as watched:
        server.send(WatchEvent("DELETED", {"metadata": {**known["metadata"], "uid": "x", "resourceVersion": "107"}}))
        await until(lambda: watched.recorded.tombstones)
        assert watched.recorded.tombstones == [("team/a", known)]
        assert watched.recorded.violations == []
