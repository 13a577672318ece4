"""Lists and watches of an informer whose server fails, forgets or is unavailable, on virtual time."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from store.kube.api.errors import Expired, Forbidden, KubeError, NotFound, ServerError, TooManyRequests, Unreachable
from store.kube.api.protocol import WatchEvent
from store.kube.memory.rules import too_large_version
from tests.support.kube.informers.checked import RecordingHandler, Watched, running, watching
from tests.support.kube.informers.collection import Collection
from tests.support.waiting import loop_time, until

pytestmark = pytest.mark.looptime


@pytest.fixture
def server() -> Collection:
    return Collection()


async def test_what_vanished_during_an_outage_ends_in_a_tombstone(server: Collection) -> None:
    """A list that does not show a cached object any more leads to its deletion, with
    the last known state."""
    server.put("a")
    server.put("b", spec=1)
    async with watching(server) as watched:
        await watched.cut_off()
        last = server.now["team/b"]
        server.put("b", spec="never seen")
        server.remove("b")
        server.compact()
        watched.recorded.forget()
        await watched.current()
        assert watched.recorded.log == [("deleted", "b@102")]
        assert watched.recorded.tombstones == [("team/b", last)]


async def test_what_did_not_change_is_silent_on_a_list(server: Collection) -> None:
    """A relist reports only changes to a handler, and unchanged objects only to
    handlers that asked for resyncs."""
    server.put("a")
    server.put("b")
    async with watching(server) as watched:
        resyncing = RecordingHandler()
        watched.informer.add_handler(resyncing, resync=100_000.0)
        watched.recorded.forget()
        resyncing.forget()
        await watched.cut_off()
        server.put("b")
        server.compact()
        await watched.current()
        assert watched.recorded.log == [("updated", "b@103")]
        assert resyncing.log == [("updated", "a@101"), ("updated", "b@103")]


async def test_a_name_that_was_reused_during_an_outage_is_another_object(server: Collection) -> None:
    """Deletion of the old UID, with its final state unknown, then the new object; never
    an update across UIDs."""
    first = server.put("a")
    async with watching(server) as watched:
        watched.recorded.forget()
        await watched.cut_off()
        server.reuse("a")
        server.compact()
        await watched.current()
        assert watched.recorded.log == [("deleted", "a@101"), ("added", "a@103")]
        assert watched.recorded.tombstones == [("team/a", first)]


@pytest.mark.parametrize("error", [Expired("gone", status=410), too_large_version(200, 100)])
async def test_a_version_that_the_server_does_not_know_is_read_with_quorum(
    server: Collection, error: KubeError
) -> None:
    """A list that is refused for its resource version is repeated at once without one,
    and until one succeeds."""
    async with watching(server) as watched:
        server.put("a")
        await watched.current()
        server.fail("list", error, ServerError("away"), ServerError("away"))
        server.cut(Expired("too old", status=410))
        await until(lambda: watched.informer.stats.watches["listed"] == 2)
        assert server.versions("list") == ["0", "101", "", "", ""]
        times = server.times("list")
        assert times[2] - times[1] < 0.1
        assert times[3] - times[2] > 0.8
        server.cut(Expired("too old", status=410))
        await until(lambda: watched.informer.stats.watches["listed"] == 3)
        assert server.versions("list")[5:] == ["101"]


async def test_a_watch_ahead_of_the_server_is_listed_with_quorum(server: Collection) -> None:
    """A server that was restored, or lags behind, refuses our version for the watch: it would refuse it for a list."""
    async with watching(server) as watched:
        server.fail("watch", too_large_version(200, 100))
        server.cut()
        await until(lambda: watched.informer.stats.lists["expired"])
        assert server.versions("list") == ["0", ""]
        await until(lambda: server.watch_count)


@pytest.mark.parametrize("expires", [False, True])
async def test_pages_are_one_list(server: Collection, expires: bool) -> None:
    """Continue requests carry no version; the list is the first page's, so later changes come by watch. When the token
    of a later page is too old, everything is listed in one page at the version that was asked for first."""
    server.serves_cached_pages, server.latency = True, 1.0
    for number in range(12):
        server.put(f"p{number:02}")
    watched = Watched(server, page_size=5)
    async with running(watched.informer):
        await until(lambda: len(server.calls) == 2)
        server.put("late")
        server.remove("p11")
        if expires:
            server.compact()
        await watched.current()
    calls = [(call.verb, call.version, call.limit, call.continues) for call in server.calls]
    last = [("list", "0", 0, False)] if expires else [("list", "", 5, True)]
    version = "114" if expires else "112"
    assert calls == [("list", "0", 5, False), ("list", "", 5, True), *last, ("watch", version, 0, False)]
    assert watched.recorded.counts == ({"added": 12} if expires else {"added": 13, "deleted": 1})


@pytest.mark.parametrize(("serves_cached_pages", "limit"), [(True, 5), (False, 0)])
async def test_a_server_without_a_watch_cache_is_always_paged(
    server: Collection, serves_cached_pages: bool, limit: int
) -> None:
    """Where the first list came in pages, a relist does, too; elsewhere it goes unpaginated, out of the cache."""
    server.serves_cached_pages = serves_cached_pages
    for number in range(7):
        server.put(f"p{number}")
    async with watching(server, page_size=5) as watched:
        server.cut(Expired("too old", status=410))
        await until(lambda: watched.informer.stats.watches["listed"] == 2)
    assert [call.limit for call in server.calls if call.verb == "list" and call.version == "107"] == [limit]


async def test_a_bookmark_moves_the_position(server: Collection) -> None:
    """After a bookmark the next watch goes on from there, and no handler is called."""
    server.put("a")
    async with watching(server) as watched:
        watched.recorded.forget()
        server.send(WatchEvent("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "150"}}))
        await until(lambda: watched.informer.resource_version == "150")
        server.fail("watch", Forbidden("we only look at the version"))
        server.cut()
        await until(lambda: server.versions("watch")[-1] == "150")
        assert watched.recorded.log == []


async def test_refused_connections_back_off_without_a_list(server: Collection) -> None:
    """Five refused watches are tried again after growing pauses, and then nothing was
    missed."""
    async with watching(server) as watched:
        server.fail("watch", *[Unreachable("refused")] * 5)
        server.cut()
        await until(lambda: not server.watch_count)
        server.put("a")
        await watched.current()
        assert server.versions("list") == ["0"]
        times = server.times("watch")[1:]
        pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
        for step, pause in zip((0.8, 1.6, 3.2, 6.4, 12.8), pauses, strict=True):
            assert step <= pause < 2 * step + 0.01


@pytest.mark.parametrize("error", [TooManyRequests("busy", retry_after=42.0), ServerError("away", retry_after=42.0)])
async def test_a_busy_server_is_left_alone_for_as_long_as_it_asks(server: Collection, error: KubeError) -> None:
    """429 and 5xx on a watch: no list, and Retry-After is honoured."""
    async with watching(server) as watched:
        server.fail("watch", error)
        server.cut()
        await until(lambda: watched.informer.stats.watches["refused"])
        assert server.versions("list") == ["0"]
        assert server.times("watch")[-1] - server.times("watch")[-2] == pytest.approx(42.0, abs=0.01)


async def test_a_busy_server_is_listed_no_sooner_than_it_asks(server: Collection) -> None:
    """Retry-After counts for lists, too."""
    server.fail("list", TooManyRequests("busy", retry_after=42.0))
    watched = Watched(server)
    async with running(watched.informer):
        await watched.informer.synced()
        assert loop_time() == pytest.approx(42.0, abs=0.1)


async def test_a_broken_stream_goes_on_where_it_broke(server: Collection) -> None:
    """A watch that lived and broke is opened again at once from the last event seen: no list, no pause, no gap."""
    async with watching(server) as watched:
        for number in range(20):
            server.put("a", spec=number)
            await asyncio.sleep(2.0)
            server.cut(Unreachable("the stream broke"))
            server.put("b", spec=number)
            began = loop_time()
            await watched.current()
            assert loop_time() - began < 0.1
        assert server.versions("list") == ["0"]
        assert watched.recorded.counts == {"added": 2, "updated": 38}


async def test_watches_end_and_begin_for_hours(server: Collection) -> None:
    """The server closes each watch after five to ten minutes; the next one starts at once, without a list."""
    async with watching(server) as watched:
        for _ in range(600):
            await asyncio.sleep(60.0)
            server.bookmark()
        await watched.current()
        times = server.times("watch")
        lives = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert 60 <= len(lives) <= 120
        assert all(300 <= life <= 601 for life in lives)
        assert max(lives) - min(lives) > 100
        assert server.versions("list") == ["0"]


async def test_watches_that_close_at_once_lead_to_a_list(server: Collection) -> None:
    """A server that closes watches without any event is listed, with pauses, instead of watched in a busy loop."""
    async with watching(server) as watched:
        task = asyncio.create_task(_close_every_watch(server))
        await asyncio.sleep(60.0)
        task.cancel()
        assert 3 <= watched.informer.stats.lists["short-watch"] <= 8
        assert len(server.calls) < 30


async def _close_every_watch(server: Collection) -> None:
    while True:
        await until(lambda: server.watch_count)
        server.cut()


async def test_a_forbidden_list_is_logged_once_and_shown(
    server: Collection, capsys: pytest.CaptureFixture[str]
) -> None:
    """The informer stays unsynced, says why in `problem`, logs it once, and goes on trying; when the right is granted,
    it is current. A refusal for another reason is logged again."""
    server.put("a")
    forbidden = Forbidden('pods is forbidden: User "rcfarm" cannot list', reason="Forbidden")
    server.fail("list", *[forbidden] * 6, NotFound("no such kind"), forbidden)
    watched = Watched(server)
    async with running(watched.informer):
        await until(lambda: len(server.times("list")) == 6)
        assert (watched.informer.has_synced, watched.recorded.log) == (False, [])
        assert watched.informer.problem == 'can\'t list pods: pods is forbidden: User "rcfarm" cannot list'
        assert watched.informer.stats.lists == {"start": 1, "retry": 5}
        await watched.current()
        await until(lambda: not watched.informer.problem)
        assert watched.informer.has_synced
    assert capsys.readouterr().out.count("Could not read the collection") == 3


async def test_a_forbidden_watch_keeps_what_is_known(server: Collection) -> None:
    """A right that was taken away ends no view: it is shown as a problem, and lists keep it fresh."""
    server.put("a")
    async with watching(server) as watched:
        server.fail("watch", *[Forbidden("no watch")] * 3)
        server.cut(Unreachable("broken"))
        await until(lambda: watched.informer.problem)
        assert watched.informer.problem == "can't watch pods: no watch"
        server.put("b")
        await watched.current()
        assert watched.informer.has_synced
        await until(lambda: not watched.informer.problem)
        assert watched.informer.stats.lists["failed"] == 3


async def test_a_stale_first_list_is_caught_up(server: Collection) -> None:
    """The first list may come from a cache that lags: the watch from its version shows the rest."""
    server.put("a")
    server.put("b")
    server.remove("a")
    server.lag = 2
    async with watching(server) as watched:
        await watched.current()
        assert watched.recorded.log == [("added", "a@101"), ("added", "b@102"), ("deleted", "a@103")]


async def test_the_age_shows_how_stale_the_view_may_be(server: Collection) -> None:
    """The age grows without answers; events and bookmarks reset it, and a failing server does not."""
    async with watching(server) as watched:
        await asyncio.sleep(50.0)
        assert watched.informer.age == pytest.approx(52.0, abs=0.1)
        server.bookmark()
        await until(lambda: watched.informer.age < 1.0)
        await watched.cut_off()
        server.fail("watch", *[Unreachable("refused")] * 100)
        await asyncio.sleep(500.0)
        assert watched.informer.age > 500.0


async def test_cancelling_ends_everything(server: Collection) -> None:
    """After `run` was cancelled no task and no watch is left, and another `run` goes on from the last version."""
    server.put("a")
    watched = Watched(server)
    watched.informer.add_handler(RecordingHandler(), resync=5.0)
    async with running(watched.informer):
        await until(lambda: server.watch_count)
    assert server.watch_count == 0
    assert len(asyncio.all_tasks()) == 1
    server.put("b")
    watched.informer.add_handler(RecordingHandler(), resync=5.0)
    async with running(watched.informer):
        await watched.current()
    assert server.versions("list") == ["0", "101"]
