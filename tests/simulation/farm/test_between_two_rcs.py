"""Pods pass from one RC to another, with real farms on an embedded store, and agents that obey at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from rcfarm.operations.errors import BadInput, NoSuchRC, RCRefused
from rcfarm.operations.handovers import Handovers
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import BadRecord, Op, Unavailable
from store.schema.keys import Keys
from store.schema.records import ALL_NODES, Brake, Handover, UpdatePolicy, decode, encode
from tests.support import require
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.farm.fleet import Fleet, running_farm
from tests.support.farm.simulated_agents import SimulatedAgents, running_agents

NODES = [f"n{number}" for number in range(1, 6)]
AT_ONCE = UpdatePolicy(min_healthy_time=0.0)


@pytest.fixture
async def agents(store: EmbeddedStore, keys: Keys) -> AsyncIterator[SimulatedAgents]:
    async with running_agents(store, keys, {node: {} for node in NODES}) as agents:
        yield agents


@pytest.fixture
def handovers(store: EmbeddedStore, keys: Keys) -> Handovers:
    return Handovers(store, keys, actor="me")


async def two(fleet: Fleet, replicas: int = 5, **fields: object) -> None:
    """Create `blue` with pods, and `green` of the same pod id without."""
    await fleet.create("blue", replicas, pod_id="web", update=AT_ONCE)
    await fleet.create("green", 0, pod_id="web", update=AT_ONCE, pod_labels={"color": "green"}, **fields)


async def handover(fleet: Fleet, rc_id: str = "green") -> Handover:
    entry = require(await fleet.store.get(fleet.keys.handover(rc_id)))
    return decode(Handover, entry.key, entry.value)


async def until_healthy(fleet: Fleet, count: int = 5) -> None:
    """Wait until `blue` is whole, and its owner knows."""

    async def is_whole() -> bool:
        status = await fleet.status("blue")
        return status is not None and status.healthy == count == await healthy(fleet)

    await fleet.until(is_whole)


async def until_ended(fleet: Fleet, state: str = "done", rc_id: str = "green") -> None:
    async def ended() -> bool:
        return (await handover(fleet, rc_id)).state == state

    await fleet.until(ended)


async def begin_unhealthy(fleet: Fleet, agents: SimulatedAgents, handovers: Handovers) -> None:
    """Begin a hand-over that does not get beyond its first two pods: what is started from now on is unhealthy."""
    await until_healthy(fleet)
    for node in NODES:
        agents.sick[node] = "critical"
    await handovers.begin("blue", "green", desired=5, minimum=3)
    await fleet.until_placed("green", ["n1", "n2"])


async def is_unlocked(fleet: Fleet, rc_id: str) -> bool:
    entry = await fleet.store.get(fleet.keys.mutation(rc_id))
    return entry is None or entry.session is None


async def healthy(fleet: Fleet) -> int:
    """Return how many pods of both RCs pass on what their intents say."""
    intents, found = await fleet.intents_of("web"), 0
    for node, intent in intents.items():
        entry = await fleet.store.get(fleet.keys.health(intent.rc, node))
        found += entry is not None and b'"passing"' in entry.value and intent.manifest.encode() in entry.value
    return found


async def test_all_pods_pass_on_their_nodes(
    store: EmbeddedStore, keys: Keys, fleet: Fleet, agents: SimulatedAgents, handovers: Handovers
) -> None:
    """Each pod passes on its node, with the new manifest and labels; then the old RC is deleted. The log has it."""
    async with running_farm(store, keys):
        await two(fleet)
        await until_healthy(fleet)
        await handovers.begin("blue", "green", desired=5, minimum=3)
        await until_ended(fleet)
        green = await fleet.rcs.get("green")
        assert {(i.rc, i.manifest, i.labels["color"]) for i in (await fleet.intents_of("web")).values()} == {
            ("green", green.manifest, "green")
        }
        await fleet.until_placed("green", NODES)
        assert green.replicas_desired == 5

        async def is_gone() -> bool:
            return not await store.keys(keys.rc("blue"))

        await fleet.until(is_gone)
        assert (await fleet.until_state("green", "converged")).reasons == ()
        assert await is_unlocked(fleet, "green")
        for rc_id in ("blue", "green"):
            [end] = await fleet.audit(rc_id, "ROLLING_UPDATE_COMPLETION")
            assert (end.event_details["succeeded"], end.event_details["canceled"]) == (True, False)
        moves = [e.event_details for e in await fleet.audit("green") if e.event_details["added"]]
        assert sorted(node for move in moves for node in move["added"]) == NODES
        assert all(len(move["added"]) <= 2 for move in moves), "never more at once than the minimum allows"


async def test_it_stops_at_the_minimum(
    store: EmbeddedStore, keys: Keys, fleet: Fleet, agents: SimulatedAgents, handovers: Handovers
) -> None:
    """A version that never passes takes no more pods than the minimum leaves, and both RCs say why it waits; aborted,
    the pods stay where they are, and both RCs go on."""
    async with running_farm(store, keys):
        await two(fleet)
        await begin_unhealthy(fleet, agents, handovers)

        async def waits() -> bool:
            status = {rc: await fleet.status(rc) for rc in ("blue", "green")}
            found = [{reason.code for reason in each.reasons} for each in status.values() if each]
            return all("handover_waits_for_health" in codes for codes in found) and len(found) == 2

        await fleet.until(waits)
        assert await fleet.nodes_of("green") == ["n1", "n2"]
        assert await healthy(fleet) == 3
        status = require(await fleet.status("blue"))
        [why] = status.reasons
        assert why.message == (
            "hands its pods over: rc green takes over the pods of rc blue: 2 of 5, 0 healthy; waits until more than 3 "
            "pods of both RCs are healthy (3 are); away: n1, n2"
        )
        with pytest.raises(RCRefused, match=r"rc blue is being changed by farm-a .*rollout abort green"):
            await fleet.rcs.set_replicas("blue", 4)
        for pair in (("blue", "other"), ("other", "green")):
            if not await store.get(keys.spec("other")):
                await fleet.create("other", 0, pod_id="web")
            with pytest.raises(
                RCRefused, match=r"in a hand-over already, from rc blue to rc green.*rollout abort green"
            ):
                await handovers.begin(*pair, desired=5, minimum=3)
        await handovers.abort("blue")
        for rc_id, nodes in (("blue", ["n3", "n4", "n5"]), ("green", ["n1", "n2"])):
            await fleet.until_placed(rc_id, nodes)
            assert await is_unlocked(fleet, rc_id)
        spec = await fleet.rcs.get("blue")
        assert (spec.disabled, spec.replicas_desired) == (False, 3)
        await fleet.rcs.set_replicas("green", 1)
        await fleet.until_placed("green", ["n1"])
        with pytest.raises(RCRefused, match="nothing to abort"):
            await handovers.abort("green")


@pytest.mark.parametrize("damaged", ["blue", "green"])
async def test_an_unreadable_record_of_the_other_rc_keeps_it_from_no_abort(
    store: EmbeddedStore, keys: Keys, fleet: Fleet, agents: SimulatedAgents, handovers: Handovers, damaged: str
) -> None:
    """The abort replaces it; that of the damaged RC names the record."""
    other = {"blue": "green", "green": "blue"}[damaged]
    async with running_farm(store, keys):
        await two(fleet)
        await begin_unhealthy(fleet, agents, handovers)
        await store.put(keys.handover(damaged), b"garbage")
        with pytest.raises(BadRecord, match=f"{keys.handover(damaged)}: not a valid Handover"):
            await handovers.abort(damaged)
        await handovers.abort(other)
        for rc_id, nodes in (("blue", ["n3", "n4", "n5"]), ("green", ["n1", "n2"])):
            assert (await handover(fleet, rc_id)).state == "aborted"
            await fleet.until_placed(rc_id, nodes)
            assert await is_unlocked(fleet, rc_id)
            assert not (await fleet.rcs.get(rc_id)).disabled


async def test_more_than_there_are_and_what_is_left(
    store: EmbeddedStore, keys: Keys, fleet: Fleet, agents: SimulatedAgents, handovers: Handovers
) -> None:
    """Replicas beyond the old RC's are placed on further nodes, so that none but those has to be away; the old RC can
    be kept, with what was not needed; then everything goes back the same way."""
    async with running_farm(store, keys):
        await two(fleet, replicas=3)
        await until_healthy(fleet, 3)
        await handovers.begin("blue", "green", desired=4, minimum=3, leave_old=True)
        await until_ended(fleet)
        assert await fleet.nodes_of("green") == ["n1", "n2", "n3", "n4"]
        blue = await fleet.rcs.get("blue")
        assert (blue.replicas_desired, blue.disabled, blue.deleting) == (0, False, False)
        await handovers.begin("green", "blue", desired=2, minimum=1, leave_old=True)
        await fleet.until(lambda: fleet_has(fleet, "blue", 2))
        await fleet.until_placed("blue", ["n1", "n2"])
        await fleet.until_placed("green", ["n3", "n4"])
        assert await healthy(fleet) == 4


async def fleet_has(fleet: Fleet, rc_id: str, count: int) -> bool:
    return len(await fleet.nodes_of(rc_id)) == count and (await handover(fleet, rc_id)).state == "done"


async def test_nodes_that_the_new_rc_may_not_have(
    store: EmbeddedStore, keys: Keys, fleet: Fleet, handovers: Handovers
) -> None:
    """Pods on such nodes don't pass: the new RC places others beside them, and they go with the old RC."""
    labels = {node: {"zone": "a" if node in ("n1", "n2") else "b"} for node in NODES}
    async with running_agents(store, keys, labels), running_farm(store, keys):
        await two(fleet, replicas=3, node_selector="zone=b")
        await until_healthy(fleet, 3)
        await handovers.begin("blue", "green", desired=3, minimum=2)
        await until_ended(fleet)
        await fleet.until_placed("green", ["n3", "n4", "n5"])

        async def only_these() -> bool:
            return sorted(await fleet.intents_of("web")) == ["n3", "n4", "n5"]

        await fleet.until(only_these)


async def test_what_can_not_begin(
    store: EmbeddedStore, keys: Keys, fleet: Fleet, agents: SimulatedAgents, handovers: Handovers
) -> None:
    """Every refusal names the object and what to do, and nothing is written."""
    await two(fleet)
    await fleet.create("mail", 1)
    before = (await store.list(keys.root + "/")).index
    bad = [
        (BadInput, "rc blue can't hand its pods over to itself", ("blue", "blue", 5, 3)),
        (BadInput, "desired: 0 is below 1", ("blue", "green", 0, 0)),
        (BadInput, "desired: 1000000 is more than 999999", ("blue", "green", 1_000_000, 1)),
        (BadInput, "minimum: 6 is not between 0 and the desired 5", ("blue", "green", 5, 6)),
        (BadInput, "minimum: -1 is not between", ("blue", "green", 5, -1)),
        (BadInput, "minimum: 5 pods are to stay healthy, and there are never more than 5", ("blue", "green", 5, 5)),
        (BadInput, "rc blue runs the pod 'web', and rc mail 'mail'", ("blue", "mail", 5, 3)),
        (BadInput, "desired: 3 is less than the 5 replicas that rc blue has", ("green", "blue", 3, 1)),
        (NoSuchRC, "there is no rc red", ("blue", "red", 5, 3)),
    ]
    for error, words, (old, new, desired, minimum) in bad:
        with pytest.raises(error, match=words):
            await handovers.begin(old, new, desired=desired, minimum=minimum)
    assert (await store.list(keys.root + "/")).index == before
    await fleet.rcs.disable("green")
    with pytest.raises(RCRefused, match="rc green is disabled; enable it"):
        await handovers.begin("blue", "green", desired=5, minimum=3)


async def test_either_rc_is_deleted(
    store: EmbeddedStore, keys: Keys, fleet: Fleet, agents: SimulatedAgents, handovers: Handovers
) -> None:
    """What is deleted while no farm works ends the hand-over; the other RC keeps its pods, and goes on."""
    for doomed, other in (("blue", "green"), ("green", "blue")):
        await two(fleet)
        async with running_farm(store, keys):
            await begin_unhealthy(fleet, agents, handovers)
        agents.sick.clear()
        await fleet.rcs.delete(doomed, force=True)
        async with running_farm(store, keys):

            async def is_gone(folder: str = keys.rc(doomed)) -> bool:
                return not await store.keys(folder)

            await fleet.until(is_gone)
            left = ["n1", "n2"] if other == "green" else ["n3", "n4", "n5"]
            await fleet.until_placed(other, left)
            await until_ended(fleet, "aborted", other)
            assert not (await fleet.rcs.get(other)).disabled
            assert await is_unlocked(fleet, other)
            await fleet.rcs.delete(other, force=True)
            await fleet.until(lambda: fleet_is_empty(store, keys))


@pytest.mark.parametrize("removed", [("green",), ("blue", "green")])
async def test_the_records_of_a_hand_over_are_removed_by_hand(
    store: EmbeddedStore,
    keys: Keys,
    fleet: Fleet,
    agents: SimulatedAgents,
    handovers: Handovers,
    removed: tuple[str, ...],
) -> None:
    """No mutation lock is left, which would refuse every change for as long as the farm lives."""
    async with running_farm(store, keys):
        await two(fleet)
        await begin_unhealthy(fleet, agents, handovers)
        await store.txn([ops.delete(keys.handover(rc_id)) for rc_id in removed])
        for rc_id in ("blue", "green"):

            async def is_free(rc_id: str = rc_id) -> bool:
                return await is_unlocked(fleet, rc_id)

            await fleet.until(is_free)
        await fleet.rcs.enable("blue")
        await fleet.rcs.set_replicas("green", 1)
        await fleet.until_placed("green", ["n1"])


async def fleet_is_empty(store: EmbeddedStore, keys: Keys) -> bool:
    return not await store.keys(keys.rcs)


@pytest.mark.parametrize("rc_id", ["blue", "green"])
async def test_either_rc_becomes_a_daemon_set_before_it_begins(
    store: EmbeddedStore, keys: Keys, fleet: Fleet, agents: SimulatedAgents, handovers: Handovers, rc_id: str
) -> None:
    """Its pods are not counted, so that no counts pass: the hand-over ends, and no pod is lost."""
    async with running_farm(store, keys):
        await two(fleet)
        await until_healthy(fleet)
        brake = encode(Brake(farm="farm-b", since="", code="no_rcs_found", message="a test"))
        await store.put(keys.brake, brake)
        await handovers.begin("blue", "green", desired=5, minimum=3)
        await fleet.rcs.set_replicas(rc_id, ALL_NODES)
        await store.txn([ops.delete(keys.brake)])
        await until_ended(fleet, "aborted")
        assert sorted(await fleet.intents_of("web")) == NODES
        assert (await fleet.rcs.get(rc_id)).replicas_desired == ALL_NODES
        record = await handover(fleet)
        assert record.reason is not None
        assert record.reason.message == f"ended: rc {rc_id} has `replicas: all` now; the pods stay where they are"


async def test_the_new_rcs_folder_is_removed_by_hand(
    store: EmbeddedStore, keys: Keys, fleet: Fleet, agents: SimulatedAgents, handovers: Handovers
) -> None:
    """The old RC's owner notices, and goes on with what it has."""
    await two(fleet)
    async with running_farm(store, keys):
        await begin_unhealthy(fleet, agents, handovers)
        await store.txn([ops.delete_tree(keys.rc("green"))])
        await fleet.until_placed("blue", ["n3", "n4", "n5"])

        async def goes_on() -> bool:
            return not (await fleet.rcs.get("blue")).disabled and await is_unlocked(fleet, "blue")

        await fleet.rcs.set_labels("blue", rc_labels={"touched": "yes"}) if await goes_on() else None
        await fleet.until(goes_on)


async def test_another_farm_takes_over_in_the_middle(
    store: EmbeddedStore, keys: Keys, fleet: Fleet, agents: SimulatedAgents, handovers: Handovers
) -> None:
    """The farm that carries it on vanishes without a word, at whatever transaction: the next one goes on where it was,
    also under the locks of the former one, and each pod passes once."""
    for stop_after in range(1, 8):
        await two(fleet)
        deaf = ScriptedStore(store)
        sent = 0

        async def vanish(writing: Sequence[Op], stop_after: int = stop_after, deaf: ScriptedStore = deaf) -> None:
            nonlocal sent
            sent += any(op.key == keys.handover("green") for op in writing)
            if sent > stop_after:
                raise Unavailable("killed")

        async with running_farm(deaf, keys, "farm-a") as first:
            await until_healthy(fleet)
            deaf.before_txn = vanish
            await handovers.begin("blue", "green", desired=5, minimum=3)
            async with asyncio.timeout(20):
                while sent <= stop_after and (await handover(fleet)).is_active:
                    await asyncio.sleep(0.01)
            session = first.keeper.session_id
        if session is not None:
            await store.destroy_session(session)
        deaf.before_txn = None
        async with running_farm(store, keys, "farm-b"):
            await until_ended(fleet)
            await fleet.until_placed("green", NODES)
            await fleet.rcs.delete("green", force=True)
            await fleet.until(lambda: fleet_is_empty(store, keys))
        moves = [event.event_details["added"] for event in await fleet.audit("green")]
        assert sorted(node for move in moves for node in move) == sorted(NODES * stop_after)


@pytest.mark.parametrize("what", ["owner", "spec", "lock"])
async def test_what_changes_at_the_last_moment_refuses_the_write(
    store: EmbeddedStore, keys: Keys, fleet: Fleet, agents: SimulatedAgents, handovers: Handovers, what: str
) -> None:
    """Another owner of the old RC, an edit of it, or a lost lock, just before the transaction arrives: it moves
    nothing, and the next one does."""
    await two(fleet)
    between, seen = ScriptedStore(store), list[list[str]]()

    async def interfere(writing: Sequence[Op]) -> None:
        if not any(op.key.startswith(keys.rc("green") + "pods/") for op in writing):
            return
        seen.append(await fleet.nodes_of("green"))
        if len(seen) > 1:
            return
        if what == "lock":
            await store.delete(keys.mutation("blue"))
            return
        entry = require(await store.get(keys.owner("blue") if what == "owner" else keys.spec("blue")))
        await store.put(entry.key, entry.value, flags=7)

    between.before_txn = interfere
    async with running_farm(between, keys):
        await until_healthy(fleet)
        await handovers.begin("blue", "green", desired=5, minimum=4)
        await until_ended(fleet)
        await fleet.until_placed("green", NODES)
    assert seen[:2] == [[], []]


async def test_more_pods_than_a_transaction_holds(
    store: EmbeddedStore, keys: Keys, fleet: Fleet, handovers: Handovers
) -> None:
    """Without a minimum all pass at once, over several transactions."""
    names = [f"n{number:03}" for number in range(100)]
    async with running_agents(store, keys, {name: {} for name in names}), running_farm(store, keys):
        await two(fleet, replicas=100)
        await until_healthy(fleet, 100)
        await handovers.begin("blue", "green", desired=100, minimum=0)
        await until_ended(fleet)
        await fleet.until_placed("green", names)
        moves = [event.event_details["added"] for event in await fleet.audit("green")]
        assert max(map(len, moves)) == 16
