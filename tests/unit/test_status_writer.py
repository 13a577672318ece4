"""Writing a status: onto the state that it was decided from, and remembered until the cache shows it."""

from __future__ import annotations

import pytest

from controllers.status_writer import StatusWriter
from store.kube.errors import Conflict, NotFound, ServerError
from store.kube.memory import Call, MemoryKube
from store.kube.objects import Object
from tests.support.train_jobs import TRAIN_JOBS, Writes, memory_kube, train_job


class Stored:
    """A job in an API server, and its writer."""

    def __init__(self, api: MemoryKube, job: Object) -> None:
        self.api, self.job = api, job
        self.writes = Writes(api)
        self.writer = StatusWriter(api, TRAIN_JOBS)

    @classmethod
    async def create(cls) -> Stored:
        api = memory_kube()
        return cls(api, await api.create(TRAIN_JOBS, train_job(), "default"))

    async def change(self, patch: Object, subresource: str = "") -> Object:
        """Somebody else writes."""
        return await self.api.patch(TRAIN_JOBS, "train", "default", patch, subresource=subresource)

    async def live(self) -> Object:
        return await self.api.get(TRAIN_JOBS, "train", "default")


async def test_only_what_changes_is_written() -> None:
    """Status fields that are not ours survive, and so does the spec."""
    stored = await Stored.create()
    job = await stored.change({"status": {"theirs": 1}}, "status")

    await stored.writer.write(job, {"phase": "a"})

    live = await stored.live()
    assert live["status"] == {"theirs": 1, "phase": "a"}
    assert live["spec"] == job["spec"]


async def test_a_change_of_something_else_does_not_stop_the_status() -> None:
    """The spec was edited meanwhile: the write is tried onto the new state, and the edit stays."""
    stored = await Stored.create()
    await stored.change({"spec": {"note": "new"}})

    written = await stored.writer.write(stored.job, {"phase": "a"})

    assert written["status"] == {"phase": "a"}
    assert written["spec"]["note"] == "new"


async def test_a_status_that_somebody_else_wrote_is_never_overwritten() -> None:
    """Two deciders: the second is refused, and has to decide again."""
    stored = await Stored.create()
    await stored.change({"status": {"phase": "theirs"}}, "status")

    with pytest.raises(Conflict, match="changed by somebody else"):
        await stored.writer.write(stored.job, {"phase": "ours"})
    assert (await stored.live())["status"] == {"phase": "theirs"}


async def test_a_namesake_never_gets_our_status() -> None:
    """The job was deleted and created again: the status of the old one is nobody's."""
    stored = await Stored.create()
    await stored.api.delete(TRAIN_JOBS, "train", "default")
    with pytest.raises(NotFound):
        await stored.writer.write(stored.job, {"phase": "old"})
    await stored.api.create(TRAIN_JOBS, train_job(), "default")

    with pytest.raises(Conflict, match="created again"):
        await stored.writer.write(stored.job, {"phase": "old"})
    assert "status" not in await stored.live()


async def test_a_storm_of_changes_ends_the_attempts() -> None:
    """Five tries, then the job's turn comes again later."""
    stored = await Stored.create()

    def storm(call: Call) -> Exception | None:
        return Conflict("storm") if call.subresource == "status" else None

    stored.writes.fail = storm
    with pytest.raises(Conflict, match="storm"):
        await stored.writer.write(stored.job, {"phase": "a"})
    assert len(stored.writes.of("patch", TRAIN_JOBS, "status")) == 5


async def test_our_write_is_known_before_the_cache_shows_it() -> None:
    """A cache that lags shows states that our writes came after; each time our last write is the answer."""
    stored = await Stored.create()
    first = await stored.writer.write(stored.job, {"phase": "a"})
    assert stored.writer.latest(stored.job) == first

    second = await stored.writer.write(first, {"phase": "b"})

    for lagging in (stored.job, first):
        assert stored.writer.latest(lagging) == second
    assert stored.writer.latest(second) == second


async def test_states_between_are_known_as_old() -> None:
    """The edit that our write was tried again onto came before it, too."""
    stored = await Stored.create()
    edited = await stored.change({"spec": {"note": "new"}})
    written = await stored.writer.write(stored.job, {"phase": "a"})

    assert stored.writer.latest(edited) == written


async def test_what_comes_after_our_write_is_believed() -> None:
    """The cache has caught up, or is ahead: its state counts, and ours is forgotten."""
    stored = await Stored.create()
    await stored.writer.write(stored.job, {"phase": "a"})
    ahead = await stored.change({"status": {"phase": "b"}}, "status")

    assert stored.writer.latest(ahead) == ahead
    assert stored.writer.latest(stored.job) == stored.job


async def test_a_failed_write_leaves_no_trace() -> None:
    """Nothing was written: the cache is right. Nor is anything kept of a job that is gone."""
    stored = await Stored.create()
    stored.writes.fail = lambda call: ServerError("broken") if call.subresource else None
    with pytest.raises(ServerError):
        await stored.writer.write(stored.job, {"phase": "a"})
    assert stored.writer.latest(stored.job) == stored.job

    stored.writes.fail = lambda call: None
    await stored.writer.write(stored.job, {"phase": "a"})
    stored.writer.forget(stored.job["metadata"]["uid"])
    assert stored.writer.latest(stored.job) == stored.job


async def test_an_echo_of_our_write_is_known_as_such() -> None:
    """It tells nothing new; a state that somebody else had a part in does, even when we wrote last."""
    stored = await Stored.create()
    written = await stored.writer.write(stored.job, {"phase": "a"})
    assert stored.writer.wrote(written)
    assert not stored.writer.wrote(stored.job)

    await stored.change({"spec": {"note": "new"}})
    onto_the_edit = await stored.writer.write(written, {"phase": "b"})
    assert not stored.writer.wrote(onto_the_edit)
