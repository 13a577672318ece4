"""Overload: whatever the amount of work, and however much of it is impossible, the farm's event loop is never blocked
for long."""

from __future__ import annotations

from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.view import Change, TreeView
from store.schema.keys import Keys
from store.schema.records import Intent, NodeSpec, encode
from tests.support.farm.fleet import Fleet, running_farm
from tests.support.loop_holds import held

HELD = 0.15  # seconds; the measured value is a tenth of it, and several times as much on a busy machine
KEYS = Keys()


async def test_a_fleet_that_cannot_be_placed_holds_no_loop(store: EmbeddedStore) -> None:
    """500 RCs find none of 1,000 nodes usable: each reports why, and none delays the others."""
    fleet, nodes = Fleet(store, KEYS), [f"node-{number:04}" for number in range(1000)]
    dead = [ops.put(KEYS.node_spec(name), encode(NodeSpec(name=name, labels={"pool": "web"}))) for name in nodes]
    for start in range(0, len(dead), 64):
        await store.txn(dead[start : start + 64])
    for number in range(500):
        await fleet.create(f"rc-{number}", 3, node_selector="pool=web")
    async with held() as holds, running_farm(store, KEYS) as farm:
        await fleet.until(lambda: farm.term and len(farm.term.ownership.held) == 500)
        owned = farm.term.ownership.held.values() if farm.term else ()
        await fleet.until(lambda: all(one.state.status and one.state.status.value.state == "short" for one in owned))
        assert holds.most < HELD
    status = await fleet.until_state("rc-499", "short")
    assert "1000 without a live agent (node-0000, node-0001, node-0002, …)" in status.reasons[-1].message


async def test_a_large_tree_is_shown_whole_without_holding_the_loop(store: EmbeddedStore) -> None:
    """20,000 records are decoded in steps, and reported as one change where they belong together."""
    intent = encode(Intent(manifest="0" * 64, rc="web", shard="00", token=1, labels={"pod_id": "web"}))
    writes = [ops.put(KEYS.intent(f"node-{number:05}", "web"), intent) for number in range(20_000)]
    for start in range(0, len(writes), 64):
        await store.txn(writes[start : start + 64])
    announced: list[int] = []

    def note(changes: list[Change[int]]) -> None:
        announced.append(len(changes))

    def decode(key: str, value: bytes) -> int:
        return sum(range(500)) + len(value)  # some ten microseconds, as of a real record

    async with held() as holds:
        await TreeView(store, KEYS.intents, decode, on_change=note).refresh()
        whole, announced[:] = announced[:], []
        await TreeView(store, KEYS.intents, decode, on_change=note, whole=False).refresh()
    assert whole == [20_000]
    assert sum(announced) == 20_000
    assert max(announced) < 1000
    assert holds.most < HELD
