"""The agent's records of a pod: fenced, newest only, and never about a pod that was removed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import msgspec
import pytest

from rcfarm.agent.pods.publisher import Publisher
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import Op, OwnershipLost, SessionSpec, TxnConflict, TxnResult, Unavailable
from store.schema.keys import Keys
from store.schema.records import Health, Process, Reality, decode
from tests.support import require
from tests.support.consul.scripted_store import ScriptedStore

KEYS = Keys()
ALIVE, INTENT = KEYS.node_alive("node-1"), KEYS.intent("node-1", "web")
REALITY, HEALTH = KEYS.reality("node-1", "web"), KEYS.health("rc-1", "node-1")


class Registered:
    """A registration whose session the test decides."""

    def __init__(self) -> None:
        self.session: str | None = None

    async def held(self) -> str:
        assert self.session is not None
        return self.session


class Away(EmbeddedStore):
    """A store that does not answer the next `failing` transactions. `sent`: when each one was sent."""

    failing = 0

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[float] = []

    async def txn(self, operations: Sequence[Op]) -> TxnResult:
        self.sent.append(asyncio.get_running_loop().time())
        if self.failing:
            self.failing -= 1
            raise Unavailable("away")
        return await super().txn(operations)


@pytest.fixture
async def store() -> AsyncIterator[EmbeddedStore]:
    store = EmbeddedStore()
    yield store
    await store.close()


@pytest.fixture
async def registered(store: EmbeddedStore) -> Registered:
    registered = Registered()
    await take_node(store, registered)
    return registered


@pytest.fixture
async def publisher(store: EmbeddedStore, registered: Registered) -> Publisher:
    return await publisher_on(store, registered)


async def publisher_on(store: EmbeddedStore | ScriptedStore, registered: Registered) -> Publisher:
    """Return the publisher of a pod that has an intent."""
    publisher = Publisher(store, KEYS, "node-1", "web", registered, random.Random(0))
    await store.put(INTENT, b"{}")
    intent = require(await store.get(INTENT))
    publisher.intent_index = intent.modify_index
    return publisher


async def test_reality_and_health_are_written_under_the_session(
    store: EmbeddedStore, registered: Registered, publisher: Publisher
) -> None:
    """Reality is a plain key; health is a lock of the agent's session, so that it ends with the agent."""
    publisher.show(reality(), health("passing"))
    await publisher.flush()
    written = require(await store.get(REALITY))
    assert written.session is None
    assert await holder(store, HEALTH) == registered.session


async def test_only_changes_are_written(store: EmbeddedStore, registered: Registered) -> None:
    """Showing the same again sends no transaction."""
    counted = ScriptedStore(store)
    publisher = await publisher_on(counted, registered)
    publisher.show(reality(), health("passing"))
    await publisher.flush()
    publisher.show(reality(), health("passing"))
    await publisher.flush()
    assert len(counted.transactions) == 2  # of the reality and of the health


async def test_changes_that_come_together_are_written_together(store: EmbeddedStore, publisher: Publisher) -> None:
    """Of several changes within one turn of the loop only the newest is written."""
    running = asyncio.create_task(publisher.run())
    before = (await store.list(KEYS.root)).index
    for reason in ("a", "b", "c"):
        publisher.show(reality(reason=reason), None)
    listing = await store.watch(REALITY, before, 5.0)
    assert b'"reason":"c"' in listing.entries[0].value
    assert listing.entries[0].create_index == listing.entries[0].modify_index
    running.cancel()


@pytest.mark.looptime
async def test_a_failed_write_is_sent_again() -> None:
    """After growing pauses, and soon again after the first failure that follows a success."""
    store, registered = Away(), Registered()
    await take_node(store, registered)
    publisher = await publisher_on(store, registered)
    task = asyncio.create_task(publisher.run())
    for reason in ("first", "second"):
        store.failing, store.sent = 2, []
        publisher.show(reality(reason=reason), None)
        await asyncio.sleep(1.0)  # the session is not renewed, and lives longer
        written = require(await store.get(REALITY))
        assert decode(Reality, REALITY, written.value).reason == reason
        pauses = [after - before for before, after in pairwise(store.sent)]
        assert [0.5 <= pause / (0.2 * 2**n) <= 1.0 for n, pause in enumerate(pauses)] == [True] * 2
    task.cancel()


async def test_health_of_a_removed_pod_is_not_resurrected(store: EmbeddedStore, publisher: Publisher) -> None:
    """An agent that has not seen yet that the intent is gone can't write the pod's health any more."""
    publisher.show(reality(), health("passing"))
    await publisher.flush()
    await store.txn([ops.delete(INTENT), ops.delete(HEALTH)])
    publisher.show(reality(), health("critical"))
    with pytest.raises(TxnConflict):
        await publisher.flush()
    assert await store.get(HEALTH) is None


async def test_a_stale_agent_writes_nothing(store: EmbeddedStore, registered: Registered, publisher: Publisher) -> None:
    """An agent whose `alive` went over to another can write neither reality nor health."""
    stale = registered.session
    await take_node(store, registered)
    registered.session = stale
    publisher.show(reality(), health("passing"))
    with pytest.raises(OwnershipLost):
        await publisher.flush()
    assert await store.get(REALITY) is None


async def test_health_is_written_again_under_a_new_session(
    store: EmbeddedStore, registered: Registered, publisher: Publisher
) -> None:
    """Health written under a lost session is written again under the new one."""
    publisher.show(reality(), health("passing"))
    await publisher.flush()
    await take_node(store, registered)
    assert await holder(store, HEALTH) is None
    publisher.renew()
    await publisher.flush()
    assert await holder(store, HEALTH) == registered.session


async def test_a_pod_that_went_over_to_another_rc_leaves_no_health_behind(
    store: EmbeddedStore, publisher: Publisher
) -> None:
    """Health lies under the RC: when that changes, it moves."""
    publisher.show(reality(), health("passing"))
    await publisher.flush()
    publisher.show(reality(rc="rc-2"), health("passing"))
    await publisher.flush()
    assert await store.get(HEALTH) is None
    assert await store.get(KEYS.health("rc-2", "node-1")) is not None


@pytest.mark.parametrize("wanted_meanwhile", [True, False])
async def test_health_of_an_earlier_agent_goes_with_its_rc(
    store: EmbeddedStore, registered: Registered, publisher: Publisher, wanted_meanwhile: bool
) -> None:
    """The pod went over to another RC while no agent was there: the first RC's health does not stay behind, whether the
    pod still belongs to the other RC, or to none."""
    publisher.show(reality(), health("passing"))
    await publisher.flush()
    await take_node(store, registered)
    later = Publisher(store, KEYS, "node-1", "web", registered, random.Random(0))
    later.recall("rc-1")
    if wanted_meanwhile:
        later.intent_index = publisher.intent_index
        later.show(reality(rc="rc-2"), health("passing"))
        await later.flush()
    else:
        await store.delete(INTENT)
        assert await later.remove("rc-2")
    assert await store.get(HEALTH) is None


async def test_removing_is_refused_once_there_is_an_intent_again(store: EmbeddedStore, publisher: Publisher) -> None:
    """A pod that is wanted again keeps its records; they are the next one's."""
    publisher.show(reality(), health("passing"))
    await publisher.flush()
    assert not await publisher.remove("rc-1")
    assert await store.get(REALITY) is not None
    await store.delete(INTENT)
    assert await publisher.remove("rc-1")
    assert await store.get(REALITY) is None
    assert await store.get(HEALTH) is None


def reality(rc: str = "rc-1", reason: str = "") -> Reality:
    return Reality(manifest="m", rc=rc, state="running", reason=reason)


def health(status: str) -> Health:
    return Health(status=status, manifest="m")  # type: ignore[arg-type]


async def take_node(store: EmbeddedStore, registered: Registered) -> None:
    """Hold `alive` under a new session; the old one, if any, ends."""
    if registered.session is not None:
        await store.destroy_session(registered.session)
    registered.session = (await store.create_session(SessionSpec("agent"))).id
    await store.txn([ops.lock(ALIVE, b"{}", registered.session)])


async def holder(store: EmbeddedStore, key: str) -> str | None:
    entry = await store.get(key)
    return entry.session if entry else None


async def test_transitions_cost_no_write_of_their_own(store: EmbeddedStore, registered: Registered) -> None:
    """A change of health is one transaction, as ever; the transition is written along with it. A new agent keeps those
    of the last one, and adds none for a pod that passes as before."""
    counted = ScriptedStore(store)
    publisher = await publisher_on(counted, registered)
    running = Process(state="running", pid=7, started_at="2026-01-01T00:00:00Z")
    first = msgspec.structs.replace(reality(), launchables={"main": running})
    publisher.show(first, health("passing"))
    await publisher.flush()
    assert len(counted.transactions) == 2  # of the reality and of the health
    publisher.show(first, health("critical"))
    await publisher.flush()
    assert len(counted.transactions) == 3
    assert await recent(store) == ["main started: process 7", ": passing", ": passing → critical"]

    successor = await publisher_on(counted, registered)
    successor.recall("rc-1")
    again = msgspec.structs.replace(running, pid=8, started_at="2026-01-01T00:00:09Z", restarts=1)
    successor.show(msgspec.structs.replace(first, launchables={"main": again}), health("passing"))
    await successor.flush()
    assert sorted(await recent(store)) == sorted(
        ["main started: process 7", ": passing", ": passing → critical", "main started: process 8, restart 1"]
    )


async def recent(store: EmbeddedStore) -> list[str]:
    entry = require(await store.get(REALITY))
    found = decode(Reality, entry.key, entry.value).recent
    return [f"{each.of} {each.what}: {each.text}" if each.what != "health" else f": {each.text}" for each in found]
