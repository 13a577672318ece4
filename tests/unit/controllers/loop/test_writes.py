"""Status writes: applied to the state that they were decided from, and kept until the cache shows them. Calls at once:
bounded, complete, and slow at first.
"""

from __future__ import annotations

import asyncio

import pytest

from controllers.loop.control_loop import StatusWriter, attempt_all, slow_start
from store.kube.api.errors import Conflict, NotFound, ServerError
from store.kube.api.objects import Object
from store.kube.memory.kube import Call, MemoryKube
from tests.support.jobs.train_jobs import TRAIN_JOBS, Stored, train_job

pytestmark = pytest.mark.looptime


class Written(Stored):
    """A job in an API server, and its writer."""

    def __init__(self, api: MemoryKube, job: Object) -> None:
        super().__init__(api, job)
        self.writer = StatusWriter(api, TRAIN_JOBS)

    async def change(self, patch: Object, subresource: str = "") -> Object:
        """Write as another client."""
        return await self.api.patch(TRAIN_JOBS, "train", "default", patch, subresource=subresource)

    async def live(self) -> Object:
        return await self.api.get(TRAIN_JOBS, "train", "default")


async def test_only_what_changes_is_written() -> None:
    """Status fields that are not ours survive, and so does the spec."""
    stored = await Written.create()
    job = await stored.change({"status": {"theirs": 1}}, "status")

    await stored.writer.write(job, {"phase": "a"})

    live = await stored.live()
    assert live["status"] == {"theirs": 1, "phase": "a"}
    assert live["spec"] == job["spec"]


async def test_a_status_of_another_client_is_never_overwritten() -> None:
    """Of two deciders the second is refused, and must decide again."""
    stored = await Written.create()
    await stored.change({"status": {"phase": "theirs"}}, "status")

    with pytest.raises(Conflict, match="changed by another client"):
        await stored.writer.write(stored.job, {"phase": "ours"})
    assert (await stored.live())["status"] == {"phase": "theirs"}


async def test_a_namesake_never_gets_our_status() -> None:
    """The job was deleted and created again: the old one's status is not written."""
    stored = await Written.create()
    await stored.api.delete(TRAIN_JOBS, "train", "default")
    with pytest.raises(NotFound):
        await stored.writer.write(stored.job, {"phase": "old"})
    await stored.api.create(TRAIN_JOBS, train_job(), "default")

    with pytest.raises(Conflict, match="created again"):
        await stored.writer.write(stored.job, {"phase": "old"})
    assert "status" not in await stored.live()


async def test_a_storm_of_changes_ends_the_attempts() -> None:
    """After five attempts the error is raised, and the job is retried later."""
    stored = await Written.create()

    def storm(call: Call) -> Exception | None:
        return Conflict("storm") if call.subresource == "status" else None

    stored.writes.fail = storm
    with pytest.raises(Conflict, match="storm"):
        await stored.writer.write(stored.job, {"phase": "a"})
    assert len(stored.writes.of("patch", TRAIN_JOBS, "status")) == 5


async def test_our_write_is_known_before_the_cache_shows_it() -> None:
    """While a stale cache shows earlier states, our last write is returned. After an edit of the spec a
    write is retried onto the new state; the edit stays, and is an earlier state, too.
    """
    stored = await Written.create()
    first = await stored.writer.write(stored.job, {"phase": "a"})
    assert stored.writer.latest(stored.job) == first

    second = await stored.writer.write(first, {"phase": "b"})

    for lagging in (stored.job, first):
        assert stored.writer.latest(lagging) == second
    assert stored.writer.latest(second) == second

    edited = await stored.change({"spec": {"note": "new"}})
    third = await stored.writer.write(second, {"phase": "c"})
    assert stored.writer.latest(edited) == third
    assert (third["status"], third["spec"]["note"]) == ({"phase": "c"}, "new")


async def test_what_comes_after_our_write_is_believed() -> None:
    """The cache has caught up, or is ahead: its state counts, and ours is dropped."""
    stored = await Written.create()
    await stored.writer.write(stored.job, {"phase": "a"})
    ahead = await stored.change({"status": {"phase": "b"}}, "status")

    assert stored.writer.latest(ahead) == ahead
    assert stored.writer.latest(stored.job) == stored.job


async def test_a_failed_write_leaves_no_trace() -> None:
    """Nothing was written: the cached state counts. No state is kept for a deleted job, either."""
    stored = await Written.create()
    stored.writes.fail = lambda call: ServerError("broken") if call.subresource else None
    with pytest.raises(ServerError):
        await stored.writer.write(stored.job, {"phase": "a"})
    assert stored.writer.latest(stored.job) == stored.job

    stored.writes.fail = lambda call: None
    await stored.writer.write(stored.job, {"phase": "a"})
    stored.writer.forget(stored.job["metadata"]["uid"])
    assert stored.writer.latest(stored.job) == stored.job


async def test_an_echo_of_our_write_is_known_as_such() -> None:
    """It holds no news; a state with another client's change does, even when we wrote last."""
    stored = await Written.create()
    written = await stored.writer.write(stored.job, {"phase": "a"})
    assert stored.writer.wrote(written)
    assert not stored.writer.wrote(stored.job)

    await stored.change({"spec": {"note": "new"}})
    onto_the_edit = await stored.writer.write(written, {"phase": "b"})
    assert not stored.writer.wrote(onto_the_edit)


class Calls:
    """Work of a second each; counts how much of it was in flight."""

    def __init__(self, *bad: int) -> None:
        self.bad, self.now, self.most, self.ended = bad, 0, 0, 0
        self.batches: dict[float, list[int]] = {}

    async def work(self, item: int) -> int:
        self.batches.setdefault(round(asyncio.get_running_loop().time(), 3), []).append(item)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(1.0)
        finally:
            self.now -= 1
            self.ended += 1
        if item in self.bad:
            raise LookupError(item)
        return item * 10

    async def succeeds(self, item: int) -> bool:
        try:
            await self.work(item)
        except LookupError:
            return False
        return True


async def test_results_come_in_the_order_of_the_items() -> None:
    """An error of the listed kind is the result of its item, and only of that."""
    results = await attempt_all([1, 2, 3], Calls(2).work, errors=(LookupError,))

    assert results[0] == 10
    assert isinstance(results[1], LookupError)
    assert results[2] == 30


async def test_no_more_than_the_limit_at_once() -> None:
    """Ten calls of a second, three at a time, take four seconds."""
    calls = Calls()

    await attempt_all(list(range(10)), calls.work, errors=(), limit=3)

    assert calls.most == 3
    assert asyncio.get_running_loop().time() == pytest.approx(4.0)


async def test_an_unexpected_error_ends_the_others() -> None:
    """No call is left running."""
    calls = Calls(0)

    async def work(item: int) -> int:
        return await calls.work(item) if item else await asyncio.wait_for(calls.work(item), 5)

    with pytest.raises(ExceptionGroup):
        await attempt_all([0, 1, 2], work, errors=())
    assert calls.now == 0


async def test_nothing_to_do_is_done_at_once() -> None:
    """An empty list costs no task and no time."""
    assert await attempt_all([], Calls().work, errors=()) == []
    assert await slow_start([], Calls().succeeds) == []


async def test_slow_start_doubles() -> None:
    """Batches have one item, two, four, and the rest."""
    calls = Calls()

    assert await slow_start(list(range(9)), calls.succeeds) == []
    assert [len(batch) for batch in calls.batches.values()] == [1, 2, 4, 2]


@pytest.mark.parametrize(("bad", "tried"), [(0, 1), (1, 3), (2, 3), (5, 7)])
async def test_slow_start_stops_after_the_first_batch_with_a_failure(bad: int, tried: int) -> None:
    """The batch is finished, the rest is returned: a quota costs few requests, however large the job."""
    calls = Calls(bad)

    left = await slow_start(list(range(100)), calls.succeeds)

    assert list(left) == list(range(tried, 100))
    assert calls.ended == tried
