"""The brake: what counts as an accident, when it is checked, and with which result."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from rcfarm.farm.brake import RETRY, WINDOW, BrakeWatch, Evidence, judge
from store.kv import ops
from store.kv.protocol import SessionSpec, Unavailable
from store.schema import audit
from store.schema.keys import Keys
from store.schema.records import AuditEvent, Brake, RCSpec, decode, encode
from tests.support.consul.scripted_store import ScriptedStore

pytestmark = pytest.mark.looptime

KEYS = Keys()
MEMBER = KEYS.farm("farm-a")


@pytest.mark.parametrize(
    ("evidence", "code"),
    [
        (Evidence(known=0, lost=0, zeroed=0, total=0, positive=0), None),
        (Evidence(known=4, lost=4, zeroed=0, total=0, positive=0), "no_rcs_found"),
        (Evidence(known=4, lost=2, zeroed=0, total=2, positive=2), None),
        (Evidence(known=4, lost=3, zeroed=0, total=1, positive=1), "too_many_gone"),
        (Evidence(known=100, lost=51, zeroed=0, total=60, positive=60), "too_many_gone"),
        (Evidence(known=4, lost=0, zeroed=4, total=4, positive=0), "zero_replicas_found"),
        (Evidence(known=4, lost=0, zeroed=4, total=5, positive=1), None),
        (Evidence(known=4, lost=0, zeroed=0, total=4, positive=0), None),
        (Evidence(known=4, lost=0, zeroed=4, total=0, positive=0), None),
    ],
)
def test_the_verdict(evidence: Evidence, code: str | None) -> None:
    """An empty tree is an accident, and so is the loss of a large part of it; ordinary deletions are not."""
    verdict = judge(evidence, share=0.5)
    assert (verdict[0] if verdict else None) == code


def spec(rc_id: str, replicas: int = 1, **fields: object) -> RCSpec:
    return RCSpec(id=rc_id, manifest="0" * 64, replicas_desired=replicas, **fields)  # type: ignore[arg-type]


class Watching:
    """A brake watch at work over RCs that a test writes, as a farm's views would show them."""

    def __init__(self, store: ScriptedStore) -> None:
        self.store = store
        self.notified = 0
        self.brake = BrakeWatch(
            store, KEYS, "farm-a", self._changed, share=0.5, clock=lambda: asyncio.get_running_loop().time()
        )

    def _changed(self) -> None:
        self.notified += 1

    async def create(self, *specs: RCSpec) -> None:
        for one in specs:
            await self.store.inner.put(KEYS.spec(one.id), encode(one))
            self.brake.seen(one)

    async def vanish(self, *rc_ids: str) -> None:
        for rc_id in rc_ids:
            await self.store.inner.delete(KEYS.spec(rc_id))
        for rc_id in rc_ids:
            self.brake.gone(rc_id)

    async def settled(self) -> None:
        """Wait until every suspicion has been looked into, or stands."""
        await asyncio.sleep(0.5)

    async def code(self) -> str:
        """Return the code of the brake record, "" when there is none, once every suspicion was looked into."""
        await asyncio.sleep(0.5)
        record = await self.record()
        return record.code if record else ""

    async def record(self) -> Brake | None:
        entry = await self.store.inner.get(KEYS.brake)
        return decode(Brake, entry.key, entry.value) if entry else None


async def member(store: ScriptedStore) -> str:
    """Return the session of a live member."""
    session = (await store.create_session(SessionSpec("farm", ttl=86400.0, check_ttl=None))).id
    await store.inner.txn([ops.lock(MEMBER, b"{}", session)])
    return session


@contextlib.asynccontextmanager
async def at_work(watching: Watching, session: str) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(watching.brake.view.run()), asyncio.create_task(watching.brake.run(MEMBER, session))]
    try:
        await watching.brake.view.synced()
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@contextlib.asynccontextmanager
async def watched(store: ScriptedStore) -> AsyncIterator[Watching]:
    """Yield a watch at work. Not a fixture, because fixtures run on real time."""
    watching = Watching(store)
    async with at_work(watching, await member(store)):
        yield watching


FOUR = [spec(f"rc-{number}") for number in range(4)]


async def test_an_empty_tree_after_it_was_not_engages(store: ScriptedStore) -> None:
    """Every RC is gone and none was deleted: the brake record and an audit event report it."""
    async with watched(store) as watching:
        await watching.create(*FOUR)
        await store.inner.put(KEYS.pod("rc-0", "spec"), b"{}")  # no spec, but a placement on a node of that name
        await watching.vanish(*(one.id for one in FOUR))
        assert watching.brake.reason
        await watching.settled()
        record = await watching.record()
        assert record is not None
        assert (record.code, record.farm) == ("no_rcs_found", "farm-a")
        assert "all 4 RCs are gone" in watching.brake.reason
        assert "rcfarm brake release" in watching.brake.reason
        [event] = await audit.events(store, KEYS)
        assert isinstance(event, AuditEvent)
        assert (event.event_type, event.actor) == ("BRAKE_ENGAGED", "farm-a")


async def test_a_part_gone_bit_by_bit_is_ordinary(store: ScriptedStore) -> None:
    """The same RCs that go one by one, each after the window, raise no suspicion."""
    async with watched(store) as watching:
        await watching.create(*FOUR, spec("rc-4"), spec("rc-5"))
        for number in range(3):
            await watching.vanish(f"rc-{number}")
            assert watching.brake.reason == ""
            await asyncio.sleep(WINDOW + 1.0)
        assert await watching.record() is None


@pytest.mark.parametrize(
    ("elsewhere", "code"), [(None, "zero_replicas_found"), (encode(spec("elsewhere")), ""), (b"nonsense", "")]
)
async def test_every_rc_at_zero_engages(store: ScriptedStore, elsewhere: bytes | None, code: str) -> None:
    """All replica counts go to zero at once. An RC in a shard that this farm does not watch may still want replicas,
    readable or not: then the tree is not all zero."""
    async with watched(store) as watching:
        if elsewhere is not None:
            await store.inner.put(KEYS.spec("elsewhere"), elsewhere)
        await watching.create(*FOUR)
        await watching.create(*(spec(one.id, 0) for one in FOUR))
        assert watching.brake.reason
        assert await watching.code() == code
        assert bool(watching.brake.reason) == bool(code)


async def test_scaling_one_rc_to_zero_is_ordinary(store: ScriptedStore) -> None:
    """Scaling a single RC is ordinary, even when it is the only one."""
    async with watched(store) as watching:
        await watching.create(spec("web"))
        await watching.create(spec("web", 0))
        assert watching.brake.reason == ""


@pytest.mark.parametrize("is_seen", [True, False])
async def test_deletions_are_ordinary(store: ScriptedStore, is_seen: bool) -> None:
    """RCs that were marked for deletion may go, however many at once. A view shows only the latest, so a mark may not
    have been seen: the audit log has the deletion."""
    async with watched(store) as watching:
        await watching.create(*FOUR)
        for one in FOUR:
            if is_seen:
                await watching.create(spec(one.id, deleting=True))
            else:
                event = audit.event_op(KEYS, "REPLICATION_CONTROLLER_DELETED", {"rc": one.id}, actor="farm-b")
                await store.inner.txn([event])
        await watching.vanish(*(one.id for one in FOUR))
        assert await watching.code() == watching.brake.reason == ""


async def test_a_view_that_errs_is_corrected_by_a_consistent_read(store: ScriptedStore) -> None:
    """Nothing is removed while the tree is read; if it is whole, removals resume, and the farm is notified of both."""
    async with watched(store) as watching:
        await watching.create(*FOUR)
        before = watching.notified
        for one in FOUR:
            watching.brake.gone(one.id)
        assert "being checked" in watching.brake.reason
        assert watching.notified == before + 1
        await watching.settled()
        assert watching.brake.reason == ""
        assert watching.notified == before + 2
        assert await watching.record() is None


async def test_nothing_is_removed_while_the_tree_cannot_be_read(store: ScriptedStore) -> None:
    """A suspicion stands until a consistent read has answered it."""
    async with watched(store) as watching:
        await watching.create(*FOUR)
        store.faults["list"] = Unavailable("away")
        await watching.vanish(*(one.id for one in FOUR))
        await asyncio.sleep(10 * RETRY)
        assert "being checked" in watching.brake.reason
        store.faults.clear()
        await asyncio.sleep(2 * RETRY)
        assert await watching.record() is not None


async def test_what_happens_during_the_check_is_not_missed(store: ScriptedStore) -> None:
    """RCs that vanish after the tree was read, and before the verdict, raise a suspicion of their own."""
    async with watched(store) as watching:
        await watching.create(*(spec(f"rc-{number}") for number in range(10)))
        store.keep_back("list")
        for number in range(6):
            watching.brake.gone(f"rc-{number}")
        await store.kept("list")
        await watching.vanish(*(f"rc-{number}" for number in range(10)))
        store.deliver("list")
        assert await watching.code()


async def test_the_release_is_seen_and_is_the_last_word(store: ScriptedStore) -> None:
    """An operator who removes the record has confirmed what happened: the same loss does not engage it again."""
    async with watched(store) as watching:
        await watching.create(*FOUR)
        await watching.vanish("rc-0", "rc-1", "rc-2")  # one of four is left, which does not make it normal
        assert await watching.code() == "too_many_gone"
        before = watching.notified
        await store.delete(KEYS.brake)
        await watching.settled()
        assert watching.brake.reason == ""
        assert watching.notified > before
        await watching.create(spec("new"))
        await watching.vanish("new")
        assert await watching.code() == ""


OTHERS = Brake(farm="farm-b", since="2026-01-01T00:00:00Z", code="no_rcs_found", message="all 7 RCs are gone")


@pytest.mark.parametrize(("value", "words"), [(encode(OTHERS), "all 7 RCs are gone"), (b"nonsense", "can't be read")])
async def test_another_farms_brake_holds_us_too(store: ScriptedStore, value: bytes, words: str) -> None:
    """The record is one for all farms; an undecodable one counts as a brake, too. Its removal is noticed."""
    async with watched(store) as watching:
        await store.put(KEYS.brake, value)
        await watching.settled()
        assert words in watching.brake.reason
        before = watching.notified
        await store.delete(KEYS.brake)
        await watching.settled()
        assert watching.brake.reason == ""
        assert watching.notified > before


async def test_only_a_member_engages_the_brake(store: ScriptedStore) -> None:
    """A farm that lost its membership writes nothing, but keeps holding."""
    session, watching = await member(store), Watching(store)
    async with at_work(watching, session):
        await watching.create(*FOUR)
        await store.inner.delete(MEMBER)
        await watching.vanish(*(one.id for one in FOUR))
        await asyncio.sleep(5 * RETRY)
        assert await watching.record() is None
        assert watching.brake.reason
        await store.inner.txn([ops.lock(MEMBER, b"{}", session)])
        await asyncio.sleep(2 * RETRY)
        assert await watching.record() is not None


async def test_a_suspicion_outlives_the_term(store: ScriptedStore) -> None:
    """When the session ends in the middle of a check, the next term takes it up."""
    session, watching = await member(store), Watching(store)
    async with at_work(watching, session):
        await watching.create(*FOUR)
        store.keep_back("list")
        await watching.vanish(*(one.id for one in FOUR))
        await store.kept("list")
    assert watching.brake.reason
    store.deliver("list")
    async with at_work(watching, session):
        assert await watching.code()


async def test_a_start_on_zeros_with_pods_is_suspicious(store: ScriptedStore) -> None:
    """With pods to lose, a tree of nothing but zeros holds from the first moment."""
    async with watched(store) as watching:
        zeros = [spec(one.id, 0) for one in FOUR]
        await watching.create(*zeros)
        watching.brake.check_start({one.id for one in zeros}, pods=0)
        assert watching.brake.reason == ""
        watching.brake.check_start({one.id for one in zeros}, pods=3)
        assert watching.brake.reason
        assert await watching.code() == "zero_replicas_found"


async def test_an_empty_tree_at_the_start_is_normal(store: ScriptedStore) -> None:
    """A fresh cluster does not engage the brake."""
    async with watched(store) as watching:
        watching.brake.check_start(set(), pods=0)
        assert watching.brake.reason == ""


async def test_a_tree_that_was_emptied_while_we_looked_away_engages(store: ScriptedStore) -> None:
    """A restore from an empty snapshot ends the session, too: what was known under the old one is not forgotten."""
    async with watched(store) as watching:
        await watching.create(*FOUR)
        for one in FOUR:
            await store.inner.delete(KEYS.spec(one.id))
        watching.brake.check_start(set(), pods=0)
        assert await watching.code() == "no_rcs_found"


async def test_what_others_deleted_while_we_looked_away_is_ordinary(store: ScriptedStore) -> None:
    """Under a new session a farm may know of RCs that other farms have deleted since."""
    async with watched(store) as watching:
        await watching.create(*FOUR)
        for one in FOUR[:3]:
            await store.inner.delete(KEYS.spec(one.id))
        watching.brake.check_start({"rc-3"}, pods=1)
        assert watching.brake.reason == ""
        await watching.create(*FOUR)
        await watching.vanish("rc-0", "rc-1")
        assert await watching.code() == ""


async def test_shards_that_were_handed_over_do_not_count(store: ScriptedStore) -> None:
    """RCs that another farm watches now are neither known nor lost here."""
    async with watched(store) as watching:
        await watching.create(*FOUR)
        watching.brake.forget(["rc-0", "rc-1"])
        watching.brake.gone("rc-0")
        watching.brake.gone("rc-1")
        assert watching.brake.reason == ""
        await watching.create(spec("rc-2", 0), spec("rc-3", 0))
        assert watching.brake.reason
