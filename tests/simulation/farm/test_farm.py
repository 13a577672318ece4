"""A real farm over the embedded store: the life of replication controllers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
import pytest

from rcfarm.farm.owned_rcs import ASK_AGAIN
from scheduler.label import LabelScheduler
from scheduler.protocol import NodeDirectory, SchedulerError
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import SessionSpec
from store.schema.keys import Keys
from store.schema.records import Intent, Mutation, Owner, UpdatePolicy, encode
from store.schema.selectors import Selector
from tests.support import require
from tests.support.farm.fleet import Fleet, manifest, running_farm

WEB = {"pool": "web"}
ON_WEB = "pool=web"


async def test_no_matching_node_is_reported_and_nothing_placed(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """The status reports the missing node, and which nodes were excluded and why."""
    await fleet.add_nodes(["bad"], {"pool": "other"})
    await fleet.create("web", 1, node_selector=ON_WEB)
    async with running_farm(store, keys):
        status = await fleet.until_state("web", "short")
    assert [reason.code for reason in status.reasons] == ["short", "allocation_failed"]
    assert "bad: it has pool=other" in status.reasons[1].message
    assert await fleet.nodes_of("web") == []


async def test_a_shortage_places_what_it_can_and_ends_with_a_node(
    store: EmbeddedStore, keys: Keys, fleet: Fleet
) -> None:
    """With one node for two replicas one is placed; a second node is used as soon as it appears."""
    await fleet.add_nodes(["n1"], WEB)
    await fleet.create("web", 2, node_selector=ON_WEB)
    async with running_farm(store, keys):
        status = await fleet.until_state("web", "short")
        assert (status.placed, status.desired) == (1, 2)
        await fleet.add_nodes(["n2"], WEB)
        await fleet.until_placed("web", ["n1", "n2"])
        await fleet.set_health("web", {"n1": "passing", "n2": "passing"})
        assert (await fleet.until_state("web", "converged")).reasons == ()


async def test_placed_pods_carry_their_labels(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """A placement names its pod and its RC, beside the operator's labels."""
    await fleet.add_nodes(["n1"])
    await fleet.create("web", 1, pod_id="httpd", pod_labels={"tier": "front"})
    async with running_farm(store, keys):
        await fleet.until_placed("web", ["n1"])
    intent = require(await fleet.intent("n1", "httpd"))
    assert intent.labels == {"tier": "front", "pod_id": "httpd", "replication_controller_id": "web"}
    assert intent.token == 1


async def test_more_pods_than_a_transaction_holds(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """A hundred pods are added and removed completely, over several transactions."""
    names = [f"n{number:03}" for number in range(100)]
    await fleet.add_nodes(names)
    await fleet.create("web", 100)
    async with running_farm(store, keys):
        await fleet.until_placed("web", names)
        await fleet.rcs.set_replicas("web", 0)
        await fleet.until_placed("web", [])
        assert await fleet.intents_of("web") == {}
    added, *_, removed = [event.event_details["nodes"] for event in await fleet.audit("web")]
    assert (set(added) <= set(names), removed) == (True, [])


@pytest.mark.parametrize("altered", [None, Intent(manifest="0" * 64, rc="web", shard="00")])
async def test_a_lost_or_altered_intent_is_restored(
    store: EmbeddedStore, keys: Keys, fleet: Fleet, altered: Intent | None
) -> None:
    """An intent that was deleted by hand, or made to name another manifest, is written again."""
    await fleet.add_nodes(["n1"])
    await fleet.create("web", 1)
    async with running_farm(store, keys):
        await fleet.until_placed("web", ["n1"])
        before, key = await fleet.intent("n1", "web"), keys.intent("n1", "web")
        await (store.put(key, encode(altered)) if altered else store.delete(key))
        await fleet.until(lambda: _is_intent(fleet, "n1", "web", before))


async def _is_intent(fleet: Fleet, node: str, pod_id: str, expected: Intent | None) -> bool:
    return await fleet.intent(node, pod_id) == expected


async def _has_reason(fleet: Fleet, rc_id: str, code: str) -> bool:
    status = await fleet.status(rc_id)
    return status is not None and code in [reason.code for reason in status.reasons]


async def moved(fleet: Fleet, rc_id: str) -> list[tuple[str, str, str, str]]:
    """Return the RC's node transfers from the audit log: event, old and new node, id."""
    found = []
    for word in ("START", "COMPLETION", "ROLLBACK"):
        for event in await fleet.audit(rc_id, f"NODE_TRANSFER_{word}"):
            details = event.event_details
            found.append((word, details["old_node"], details["new_node"], details["id"]))
    return found


async def draining(fleet: Fleet, **update: float) -> None:
    """Let `web` have pods on n1 and n2 that pass, of which n1's has to leave; n3 is free."""
    await fleet.add_nodes(["n1", "n2", "n3"], WEB)
    policy = UpdatePolicy(**{"min_healthy_time": 0.0, **update})  # type: ignore[arg-type]
    await fleet.create("web", 2, node_selector=ON_WEB, allocation_strategy="dynamic", update=policy)


async def leave_n1(fleet: Fleet) -> None:
    await fleet.until_placed("web", ["n1", "n2"])
    await fleet.set_health("web", {"n1": "passing", "n2": "passing"})
    await fleet.until_state("web", "converged")
    await fleet.relabel("n1", {"pool": "other"})
    await fleet.until_placed("web", ["n1", "n2", "n3"])


async def test_a_dynamic_rc_moves_off_an_ineligible_node(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """With all pods passing, the one on the ineligible node moves: the new pod is there, and passes, before the former
    one goes. The audit names both nodes; the farm that completes it need not be the one that began."""
    await draining(fleet)
    async with running_farm(store, keys):
        await leave_n1(fleet)
        status = require(await fleet.status("web"))
        assert (status.state, require(status.node_transfer).ends) == ("progressing", ("n1", "n3"))
        await fleet.until(lambda: _has_reason(fleet, "web", "transfer_in_progress"))
        assert await fleet.nodes_of("web") == ["n1", "n2", "n3"]
    async with running_farm(store, keys, "farm-b"):
        await fleet.set_health("web", {"n3": "passing"})
        await fleet.until_placed("web", ["n2", "n3"])
        await fleet.until_state("web", "converged")
    status = require(await fleet.status("web"))
    assert status.node_transfer is None
    (start, *_, one), (end, *_, other) = await moved(fleet, "web")
    assert (start, end, one) == ("START", "COMPLETION", other)
    event = (await fleet.audit("web"))[-1]
    assert (event.event_details["removed"], event.event_details["added"]) == (["n1"], [])
    assert await store.get(keys.mutation("web")) is None


async def test_a_transfer_that_does_not_get_healthy_is_rolled_back(
    store: EmbeddedStore, keys: Keys, fleet: Fleet
) -> None:
    """The new pod goes, the former one stays, and the node is left alone for a while, which the status says."""
    await draining(fleet, healthy_deadline=0.3, progress_deadline=1.0)
    async with running_farm(store, keys):
        await leave_n1(fleet)
        await fleet.set_health("web", {"n3": "critical"})
        await fleet.until_placed("web", ["n1", "n2"])
        await fleet.until(lambda: _has_reason(fleet, "web", "transfer_in_progress"))
        assert [word for word, *_ in await moved(fleet, "web")] == ["START", "ROLLBACK"]
        await fleet.add_nodes(["n4"], WEB)
        await fleet.until_placed("web", ["n1", "n2", "n4"])
        await fleet.relabel("n1", WEB)  # it may stay after all
        await fleet.until_placed("web", ["n1", "n2"])
    assert (await moved(fleet, "web"))[-1][:3] == ("ROLLBACK", "n1", "n4")


async def test_a_transfer_waits_for_the_mutation_lock(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """A held mutation lock defers the move and leaks nothing; its release lets the move happen."""
    await fleet.add_nodes(["n1", "n2"], WEB)
    await fleet.create("web", 1, node_selector=ON_WEB, allocation_strategy="dynamic")
    async with running_farm(store, keys):
        await fleet.until_placed("web", ["n1"])
        holder = (await store.create_session(SessionSpec("rollout", ttl=86400.0, check_ttl=None))).id
        lock = encode(Mutation(holder="rollout-7", reason="test", since=""))
        await store.txn([ops.lock(keys.mutation("web"), lock, holder)])
        await fleet.relabel("n1", {"pool": "other"})
        await fleet.until(lambda: _has_reason(fleet, "web", "transfer_waits_for_lock"))
        assert await fleet.nodes_of("web") == ["n1"]
        await store.txn([ops.unlock(keys.mutation("web"), lock, holder)])
        await fleet.until_placed("web", ["n2"])


class FailingScheduler(LabelScheduler):
    """A scheduler that can reserve nothing, or free nothing."""

    fails_to_free = False

    async def deallocate_nodes(self, node_selector: Selector, nodes: Iterable[str], *, pod_id: str = "") -> None:
        if self.fails_to_free:
            raise SchedulerError("the reservations can't be freed")


async def test_a_failing_allocation_leaves_the_membership(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """Without a free node the pod stays, and the reason is reported."""
    await fleet.add_nodes(["n1"], WEB)
    await fleet.create("web", 1, node_selector=ON_WEB, allocation_strategy="dynamic")
    async with running_farm(store, keys):
        await fleet.until_placed("web", ["n1"])
        await fleet.relabel("n1", {"pool": "other"})
        await fleet.until(lambda: _has_reason(fleet, "web", "allocation_failed"))
        assert await fleet.nodes_of("web") == ["n1"]


async def test_a_failing_deallocation_leaves_the_membership(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """When the old node can't be freed the pod stays, and the status reports it after a few attempts."""
    schedulers: list[FailingScheduler] = []

    def make(directory: NodeDirectory) -> FailingScheduler:
        schedulers.append(FailingScheduler(directory))
        return schedulers[0]

    await fleet.add_nodes(["n1", "n2"], WEB)
    await fleet.create("web", 1, node_selector=ON_WEB, allocation_strategy="dynamic")
    async with running_farm(store, keys, make_scheduler=make):
        await fleet.until_placed("web", ["n1"])
        schedulers[0].fails_to_free = True
        await fleet.relabel("n1", {"pool": "other"})
        status = await fleet.until_state("web", "quarantined")
        assert "can't be freed" in status.reasons[0].message
        assert await fleet.nodes_of("web") == ["n1"]
        schedulers[0].fails_to_free = False
        await fleet.relabel("n2", {"pool": "web", "again": "true"})
        await fleet.until_placed("web", ["n2"])


async def test_two_rcs_with_one_pod_id_do_not_fight(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """The second RC takes other nodes, and reports when there are none."""
    await fleet.add_nodes(["n1", "n2"])
    await fleet.create("first", 1, pod_id="web")
    async with running_farm(store, keys):
        await fleet.until_placed("first", ["n1"])
        await fleet.create("second", 2, pod_id="web")
        await fleet.until_placed("second", ["n2"])
        await fleet.until(lambda: _has_reason(fleet, "second", "pod_id_taken"))
        assert await fleet.nodes_of("first") == ["n1"]


async def test_a_pod_id_that_is_freed_is_used_at_once(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """An RC that found no node because of another RC takes the node as soon as the other one leaves it."""
    await fleet.add_nodes(["n1"])
    await fleet.create("first", 1, pod_id="web")
    async with running_farm(store, keys):
        await fleet.until_placed("first", ["n1"])
        await fleet.create("second", 1, pod_id="web")
        await fleet.until_state("second", "short")
        async with asyncio.timeout(ASK_AGAIN / 3):
            await fleet.rcs.set_replicas("first", 0)
            await fleet.until_placed("second", ["n1"])


async def test_deletion_leaves_no_key(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """A deleted RC leaves neither intent nor folder, but what it is restored from."""
    await fleet.add_nodes(["n1", "n2"])
    spec = await fleet.create("web", 2)
    kept = await fleet.create("db", 1)
    async with running_farm(store, keys, manifest_gc_interval=1.0):
        await fleet.until_placed("web", ["n1", "n2"])
        await fleet.rcs.delete("web", force=True)
        await fleet.until(lambda: _is_gone(store, keys.spec("web")))
    assert await store.keys(keys.rc("web")) == []
    assert await fleet.intents_of("web") == {}
    assert await store.keys(keys.deleted) == [keys.deleted_rc("web")]
    assert set(await store.keys(keys.manifests)) == {keys.manifest(each.manifest) for each in (spec, kept)}
    assert await fleet.audit("web", "REPLICATION_CONTROLLER_DELETED")


async def _is_gone(store: EmbeddedStore, key: str) -> bool:
    return await store.get(key) is None


async def test_a_changed_manifest_rolls_within_the_budget(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """A new manifest reaches one node at a time, each after the previous one passes."""
    names = ["n1", "n2", "n3"]
    await fleet.add_nodes(names)
    await fleet.create("web", 3)
    async with running_farm(store, keys):
        await fleet.until_placed("web", names)
        await fleet.set_health("web", dict.fromkeys(names, "passing"))
        await fleet.until(lambda: _healthy(fleet, "web", 3))
        changed = await fleet.rcs.set_manifest("web", manifest("web", version=2))
        for updated in range(1, 4):
            await fleet.until(lambda count=updated: _running(fleet, "web", changed.manifest, count))  # type: ignore[misc]
            assert sum(i.manifest == changed.manifest for i in (await fleet.intents_of("web")).values()) == updated
            await fleet.set_health("web", {f"n{updated}": "passing"})
        await fleet.until(lambda: _healthy(fleet, "web", 3))


async def _healthy(fleet: Fleet, rc_id: str, count: int) -> bool:
    status = await fleet.status(rc_id)
    return status is not None and status.healthy == count


async def _running(fleet: Fleet, pod_id: str, digest: str, count: int) -> bool:
    return sum(intent.manifest == digest for intent in (await fleet.intents_of(pod_id)).values()) == count


async def test_all_zero_at_the_start_holds_until_released(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """A farm that starts on RCs of zero replicas that have pods removes nothing until the brake is released."""
    await fleet.add_nodes(["n1"])
    await fleet.create("web", 1)
    async with running_farm(store, keys):
        await fleet.until_placed("web", ["n1"])
    spec = await fleet.rcs.get("web")
    await store.put(keys.spec("web"), encode(msgspec.structs.replace(spec, replicas_desired=0)))
    async with running_farm(store, keys) as farm:
        await fleet.until(lambda: farm.brake.engaged)
        assert farm.brake.engaged
        assert farm.brake.engaged.code == "zero_replicas_found"
        assert (await fleet.until_state("web", "held")).reasons[0].code == "held"
        assert await fleet.nodes_of("web") == ["n1"]
        await store.delete(keys.brake)
        await fleet.until_placed("web", [])


async def test_rcs_that_are_scaled_to_zero_by_commands_never_pull_the_brake(
    store: EmbeddedStore, keys: Keys, fleet: Fleet
) -> None:
    """One after the other or while no farm runs: the audit log records that an operator scaled them."""
    await fleet.add_nodes(["n1"])
    rc_ids = [f"rc-{number}" for number in range(6)]
    for rc_id in rc_ids:
        await fleet.create(rc_id, 1)
    async with running_farm(store, keys) as farm:
        for rc_id in rc_ids:
            await fleet.until_placed(rc_id, ["n1"])
        for rc_id in rc_ids[1:]:
            await fleet.rcs.set_replicas(rc_id, 0)
            await asyncio.sleep(0.6)
        assert farm.brake.engaged is None
    await fleet.rcs.set_replicas("rc-0", 0)
    async with running_farm(store, keys) as farm:
        for rc_id in rc_ids:
            await fleet.until_placed(rc_id, [])
        assert farm.brake.engaged is None


async def test_farms_with_selectors_take_only_their_rcs(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """An RC selector decides which RCs a farm claims."""
    await fleet.add_nodes(["n1"])
    await fleet.create("mine", 1, rc_labels={"team": "a"})
    await fleet.create("other", 1, rc_labels={"team": "b"})
    async with running_farm(store, keys, selector="team=a") as farm:
        await fleet.until_placed("mine", ["n1"])
        assert list(require(farm.term).ownership.held) == ["mine"]
    assert await fleet.owner_session("other") is None


async def test_a_blip_of_a_node_moves_nothing_but_its_loss_does(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """A dead node keeps its pods until it counts as lost; then a dynamic RC moves them."""
    await fleet.add_nodes(["n1", "n2"])
    await fleet.create("web", 1, allocation_strategy="dynamic")
    async with running_farm(store, keys, node_lost_after=0.5):
        await fleet.until_placed("web", ["n1"])
        await fleet.kill_node("n1")
        await fleet.create("db", 1)
        await fleet.until_placed("db", ["n2"])
        assert await fleet.nodes_of("web") == ["n1"]
        await fleet.until_placed("web", ["n2"])


async def test_what_a_late_claim_left_of_a_deleted_rc_is_removed(
    store: EmbeddedStore, keys: Keys, fleet: Fleet
) -> None:
    """A farm that claimed an RC at the moment of its deletion, and died, leaves a lock without an RC: the next farm
    removes it, whatever its selector."""
    await store.put(keys.owner("web"), encode(Owner("farm-dead", "")))
    async with running_farm(store, keys, selector="team=a"):
        await fleet.until(lambda: _is_gone(store, keys.owner("web")))
    assert await store.keys(keys.rcs) == []


async def test_a_vanished_spec_leaves_the_pods(store: EmbeddedStore, keys: Keys, fleet: Fleet) -> None:
    """A spec that was deleted by hand stops nothing: its pods stay, its lock is released. The last pulls the brake."""
    await fleet.add_nodes(["n1"])
    for rc_id in ("web", "db", "cache"):
        await fleet.create(rc_id, 1)
    async with running_farm(store, keys) as farm:
        await fleet.until_placed("web", ["n1"])
        await store.delete(keys.spec("web"))
        await fleet.until(lambda: farm.term and "web" not in farm.term.ownership.held)
        assert await fleet.intent("n1", "web") is not None
        assert await fleet.owner_session("web") is None
        assert farm.brake.reason == ""
        for rc_id in ("db", "cache"):
            await store.delete(keys.spec(rc_id))
        await fleet.until(lambda: farm.brake.engaged)
