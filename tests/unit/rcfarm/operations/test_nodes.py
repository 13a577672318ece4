"""Operations on nodes under contention, and reading them."""

from __future__ import annotations

import asyncio

import pytest

from rcfarm.operations.nodes import NodeError, Nodes, nodes_of
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Entry
from store.schema.keys import Keys
from store.schema.records import Intent, NodeAlive, NodeSpec, encode

KEYS = Keys("test")


async def test_concurrent_changes_of_one_node_all_take_effect() -> None:
    """Labels set by several operators at once, while one cordons: nothing is lost."""
    store = EmbeddedStore()
    await store.put(KEYS.node_spec("node-1"), encode(NodeSpec(name="node-1", labels={"a": "1"})))
    nodes = Nodes(store, KEYS)

    await asyncio.gather(
        nodes.set_labels("node-1", {"b": "2"}),
        nodes.set_labels("node-1", {"c": "3"}, removed=["a"]),
        nodes.cordon("node-1", evict=True),
    )

    spec = (await nodes.get("node-1")).spec
    assert spec == NodeSpec(name="node-1", labels={"b": "2", "c": "3"}, schedulable=False, evict=True)


async def test_a_change_that_changes_nothing_writes_nothing() -> None:
    """Uncordoning a node in service leaves no event."""
    store = EmbeddedStore()
    await store.put(KEYS.node_spec("node-1"), encode(NodeSpec(name="node-1")))
    before = (await store.list("")).index

    await Nodes(store, KEYS).uncordon("node-1")

    assert (await store.list("")).index == before


@pytest.mark.parametrize("name", ["ghost", "Not/a node", ""])
async def test_an_unknown_node_is_named(name: str) -> None:
    """Also one that could not be a node's name."""
    with pytest.raises(NodeError, match="there is no node"):
        await Nodes(EmbeddedStore(), KEYS).get(name)


def test_a_node_lives_while_its_agent_holds_the_key() -> None:
    """The agent's record stays as history; only its session shows that the node is live."""
    spec, alive = encode(NodeSpec(name="node-1")), encode(NodeAlive("agent", "2026-01-01T00:00:00Z"))
    held = Entry(KEYS.node_alive("node-1"), alive, 1, 1, session="s")
    left = Entry(KEYS.node_alive("node-2"), alive, 1, 1)

    found = nodes_of(
        KEYS,
        [
            Entry(KEYS.node_spec("node-1"), spec, 1, 1),
            held,
            Entry(KEYS.node_spec("node-2"), spec.replace(b"node-1", b"node-2"), 1, 1),
            left,
            Entry(KEYS.node("node-3") + "what", b"", 1, 1),
        ],
    )

    assert [(name, node.alive is not None, node.last is not None) for name, node in found.nodes.items()] == [
        ("node-1", True, True),
        ("node-2", False, True),
    ]
    assert [error.key for error in found.bad] == ["test/nodes/node-3/what"]
    assert found.nodes["node-2"].state().live is False


async def test_nodes_that_are_drained_together_are_marked_together() -> None:
    """In one transaction, so that no pod moves from one to another; an unknown one leaves all as they are."""
    store = EmbeddedStore()
    names = ["node-1", "node-2", "node-3"]
    for name in names:
        await store.put(KEYS.node_spec(name), encode(NodeSpec(name=name)))
    nodes = Nodes(store, KEYS)
    with pytest.raises(NodeError, match="there is no node ghost"):
        await nodes.drain([*names, "ghost"])
    assert not any(node.spec.evict for node in (await nodes.list()).nodes.values())

    await nodes.drain(names)

    entries = [await store.get(KEYS.node_spec(name)) for name in names]
    assert len({entry.modify_index for entry in entries if entry}) == 1
    assert all(node.spec.evict for node in (await nodes.list()).nodes.values())


async def test_a_dead_node_is_removed_with_what_it_reported() -> None:
    """Its pods are given up only when that is asked for, and never while the brake is on."""
    store = EmbeddedStore()
    await store.put(KEYS.node_spec("node-1"), encode(NodeSpec(name="node-1")))
    await store.put(KEYS.intent("node-1", "web"), encode(Intent(manifest="m", rc="web", shard="00")))
    await store.put(KEYS.pod("web", "node-1"), b"{}")
    await store.put(KEYS.reality("node-1", "web"), b"{}")
    nodes = Nodes(store, KEYS)
    with pytest.raises(NodeError, match=r"1 pod is placed there: web \(rc web\)"):
        await nodes.remove("node-1")
    await store.put(KEYS.brake, b"{}")
    with pytest.raises(NodeError, match="the brake is on"):
        await nodes.remove("node-1", release_pods=True)
    assert await store.get(KEYS.pod("web", "node-1")) is not None
    await store.delete(KEYS.brake)
    assert await nodes.remove("node-1", release_pods=True) == ["web (rc web)"]
    assert [entry.key for entry in (await store.list("test/")).entries if "/audit/" not in entry.key] == []
