"""The NodeTable: what counts as a change, and when a node is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import datetime

import pytest

from scheduler.nodes import NodeChange, NodeRecord, NodeTable, WatchedNodes
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import SessionSpec, Unavailable
from store.kv.view import Change, Record
from store.schema.keys import Keys
from store.schema.records import NodeAlive, NodeSpec, encode
from tests.support.waiting import Clock

keys = Keys()


class Feed:
    """Feeds a NodeTable the way a TreeView does."""

    def __init__(self, table: NodeTable) -> None:
        self.table = table
        self.records: dict[str, Record[NodeRecord]] = {}

    def put(self, key: str, value: NodeRecord, session: str | None = None) -> None:
        old, new = self.records.get(key), Record[NodeRecord](value, 1, 0, session)
        self.records[key] = new
        self.table.apply([Change(key, old, new)])

    def delete(self, key: str) -> None:
        self.table.apply([Change(key, self.records.pop(key), None)])

    def spec(self, name: str, **fields: object) -> None:
        self.put(keys.node_spec(name), NodeSpec(name=name, **fields))  # type: ignore[arg-type]

    def alive(self, name: str, session: str | None, since: str = "") -> None:
        self.put(keys.node_alive(name), NodeAlive(agent="agent", since=since), session)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> NodeTable:
    return NodeTable(keys, node_lost_after=60, clock=clock)


@pytest.fixture
def feed(table: NodeTable) -> Feed:
    return Feed(table)


def test_a_node_is_its_spec_and_its_agent(feed: Feed, table: NodeTable) -> None:
    """Known by its spec, live by its agent's session; an agent without a spec is no node yet."""
    feed.alive("n1", "s1")
    assert dict(table.nodes()) == {}
    feed.spec("n1", labels={"pool": "web"})
    assert table.nodes()["n1"].labels == {"pool": "web"}
    assert table.nodes()["n1"].live
    feed.alive("n1", None)
    assert not table.nodes()["n1"].live
    feed.delete(keys.node_spec("n1"))
    assert dict(table.nodes()) == {}


def test_the_version_grows_only_when_the_meaning_changes(feed: Feed, table: NodeTable) -> None:
    """A renewed `alive` value, a new session at once, or an equal spec leave every cached answer valid."""
    feed.spec("n1", labels={"a": "1"})
    feed.alive("n1", "s1")
    version = table.version
    feed.alive("n1", "s1", since="later")
    feed.alive("n1", "s2")
    feed.spec("n1", labels={"a": "1"})
    assert table.version == version
    feed.spec("n1", labels={"a": "2"})
    assert table.version > version


def test_one_batch_is_one_change(table: NodeTable) -> None:
    """Readers get one call, after the table shows everything, with each node's old and new state."""
    seen: list[list[NodeChange]] = []
    table = NodeTable(keys, on_change=seen.append)
    specs = {name: NodeSpec(name=name) for name in ("n1", "n2")}
    table.apply(Change(keys.node_spec(name), None, Record(spec, 1, 0, None)) for name, spec in specs.items())
    assert [[change.name for change in batch] for batch in seen] == [["n1", "n2"]]
    assert seen[0][0].old is None
    assert seen[0][0].new == table.nodes()["n1"]
    assert table.version == 1


def test_a_blip_loses_nothing(feed: Feed, table: NodeTable, clock: Clock) -> None:
    """Dead for less than the limit, then back: the time starts again at the next death."""
    feed.spec("n1")
    feed.alive("n1", "s1")
    for _ in range(3):
        feed.alive("n1", None)
        clock.now += 59
        table.lose_due()
        assert not table.nodes()["n1"].lost
        feed.alive("n1", "s2")


def test_dead_for_too_long_is_lost_until_it_is_back(feed: Feed, table: NodeTable, clock: Clock) -> None:
    """Counted from when this process first saw the node without a session, also when it never had one."""
    feed.spec("n1")
    feed.spec("n2")
    feed.alive("n2", "s1")
    clock.now += 30
    feed.alive("n2", None)
    clock.now += 30
    table.lose_due()
    assert {name: node.lost for name, node in table.nodes().items()} == {"n1": True, "n2": False}
    feed.alive("n1", "s2")
    assert not table.nodes()["n1"].lost
    clock.now += 30
    table.lose_due()
    assert {name: node.lost for name, node in table.nodes().items()} == {"n1": False, "n2": True}


class Away(EmbeddedStore):
    """An embedded store that can be cut off."""

    away = False

    async def list(self, prefix, *, consistent=False):  # type: ignore[no-untyped-def]
        if self.away:
            raise Unavailable("cut off")
        return await super().list(prefix, consistent=consistent)


@asynccontextmanager
async def running(nodes: WatchedNodes) -> AsyncIterator[None]:
    task = asyncio.create_task(nodes.run())
    await nodes.synced()
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _register(store: EmbeddedStore, names: Iterable[str]) -> None:
    for name in names:
        await store.put(keys.node_spec(name), encode(NodeSpec(name=name)))


@pytest.mark.looptime
async def test_wakes_exactly_when_a_node_turns_lost() -> None:
    """Nobody has to poll: listeners hear of the lost node at its second, and of the recovery."""
    loop = asyncio.get_running_loop()
    store, heard = EmbeddedStore(), list[tuple[float, NodeChange]]()
    await _register(store, ["n1", "n2"])
    session = await store.create_session(SessionSpec("agent", ttl=3600, check_ttl=None))
    await store.txn([ops.lock(keys.node_alive("n1"), encode(NodeAlive(agent="a", since="")), session.id)])
    nodes = WatchedNodes(
        store, keys, clock=loop.time, on_change=lambda changes: heard.extend((loop.time(), c) for c in changes)
    )
    async with running(nodes):
        started = loop.time()
        await asyncio.sleep(100)
        await store.destroy_session(session.id)
        died = loop.time()
        await asyncio.sleep(100)
        lost = [(at, change.name) for at, change in heard if change.new is not None and change.new.lost]
        assert [name for _, name in lost] == ["n2", "n1"]
        assert [at for at, _ in lost] == pytest.approx([started + 60, died + 60], abs=0.1)


@pytest.mark.looptime
async def test_no_node_is_lost_while_the_store_is_away() -> None:
    """A farm that can't reach the store knows nothing about its nodes; it waits for a read that confirms the loss."""
    loop = asyncio.get_running_loop()
    store = Away()
    await _register(store, ["n1"])
    nodes = WatchedNodes(store, keys, clock=loop.time)
    async with running(nodes):
        store.away = True
        await asyncio.sleep(600)
        assert not nodes.table.nodes()["n1"].lost
        store.away = False
        await asyncio.sleep(2)
        assert nodes.table.nodes()["n1"].lost


@pytest.mark.looptime
async def test_bad_node_records_are_isolated() -> None:
    """A malformed spec, a foreign key or a name that is not the key's hide no other node."""
    loop = asyncio.get_running_loop()
    store, bad = EmbeddedStore(), []
    await _register(store, ["n1", "n3"])
    await store.put(keys.node_spec("n2"), b"{")
    await store.put(keys.node("n1") + "notes", b"x")
    await store.put(keys.node_spec("n4"), encode(NodeSpec(name="n1")))
    nodes = WatchedNodes(store, keys, clock=loop.time, on_bad=lambda error: bad.append(error.key))
    async with running(nodes):
        assert sorted(nodes.table.nodes()) == ["n1", "n3"]
        assert sorted(bad) == [keys.node("n1") + "notes", keys.node_spec("n2"), keys.node_spec("n4")]
        await store.put(keys.node_spec("n3"), b"damaged")
        await asyncio.sleep(1)
        assert "n3" in nodes.table.nodes(), "a record that can't be read is not a deletion"
        await store.delete(keys.node("n1") + "notes")
        await store.delete(keys.node_spec("n3"))
        await asyncio.sleep(1)
        assert sorted(nodes.table.nodes()) == ["n1"], "the end of a foreign key says nothing of the node"


@pytest.mark.looptime
async def test_stopping_leaves_no_task() -> None:
    """Cancelling `run` ends the view and the timer."""
    nodes = WatchedNodes(EmbeddedStore(), keys, clock=asyncio.get_running_loop().time)
    async with running(nodes):
        pass
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_dead_node_says_since_when_and_until_when(feed: Feed, table: NodeTable) -> None:
    """From the first look at a dead node on it has the time of it and of its loss; its agent's return ends that."""
    feed.spec("n1")
    feed.alive("n1", "s1")
    assert table.absence("n1") is None
    feed.alive("n1", None)
    absence = table.absence("n1")
    assert absence is not None
    lost_after = datetime.fromisoformat(absence.lost_at) - datetime.fromisoformat(absence.since)
    assert lost_after.total_seconds() == 60
    feed.alive("n1", None, since="later")
    assert table.absence("n1") == absence
    feed.alive("n1", "s2")
    assert table.absence("n1") is None
