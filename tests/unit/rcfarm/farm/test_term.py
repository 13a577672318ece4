"""A term: the work of a farm under one session, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rcfarm.config.settings import FarmSettings
from rcfarm.farm.owned_rcs import ASK_AGAIN
from scheduler.protocol import SchedulerError
from store.kv.protocol import Op, OpFailure, TxnConflict
from store.schema.records import Brake, encode
from tests.support import require
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.farm.fleet import Fleet, running_farm
from tests.support.farm.stage import KEYS, SOON, Stage, owned, owner
from tests.support.waiting import loop_time

pytestmark = pytest.mark.looptime

DEFAULTS = FarmSettings(name="farm-a")


async def test_every_rc_is_reconciled_once_per_interval(store: ScriptedStore, fleet: Fleet, stage: Stage) -> None:
    """Nothing polls; a missed wake-up is repaired by one reconcile per RC and interval, evenly spread, which reads
    nothing from the store."""
    rc_ids = [f"rc-{number}" for number in range(10)]
    for rc_id in rc_ids:
        await fleet.create(rc_id, 0)
    async with running_farm(store, KEYS, "farm-a", make_scheduler=stage.scheduler) as farm:
        await fleet.until(lambda: owned(farm) == rc_ids)
        await asyncio.sleep(DEFAULTS.resync_interval + SOON)
        stage.asked.clear()
        store.calls.clear()
        store.transactions.clear()
        for _ in range(10):
            before = stage.asked.total()
            await asyncio.sleep(DEFAULTS.resync_interval / 10)
            assert stage.asked.total() - before == 1
        assert set(stage.asked.values()) == {1}
        looks = sum(any(op.key == KEYS.history for op in ops) for ops in store.transactions)
        links = store.calls["get"]  # each is read before the next is written
        assert looks + links <= DEFAULTS.resync_interval * 0.8
        watches = store.calls["watch"] + store.calls["watch_keys"]
        searches = 8  # for manifests that nothing names, and for old events of the audit log
        assert store.calls.total() - looks - links - store.calls["renew_session"] - watches <= searches


async def test_damage_without_an_event_is_repaired_by_the_next_resync(store: ScriptedStore, fleet: Fleet) -> None:
    """The removal of a status wakes no RC (a farm's own writes look the same); the resync restores it."""
    await fleet.create("web", 0)
    async with running_farm(store, KEYS, "farm-a"):
        await fleet.until_state("web", "converged")
        await store.inner.delete(KEYS.status("web"))
        await asyncio.sleep(2 * DEFAULTS.resync_interval + SOON)
        assert await fleet.status("web") is not None


async def test_a_lost_session_ends_the_work_in_flight(store: ScriptedStore, fleet: Fleet, stage: Stage) -> None:
    """When the store ends the session, the work under it is cancelled before any work begins under the next one."""
    await fleet.add_nodes(["n1"])
    await fleet.create("web", 1)
    stage.gates["web"] = asyncio.Event()
    async with running_farm(store, KEYS, "farm-a", make_scheduler=stage.scheduler) as farm:
        await fleet.until(lambda: stage.hanging["web"])
        old = require(farm.keeper.session_id)
        await store.inner.destroy_session(old)
        await fleet.until(lambda: stage.hanging["web"] and farm.term and farm.term.session != old)
        assert stage.cancelled == ["web"]
        assert stage.hanging["web"] == 1
        stage.gates["web"].set()
        await fleet.until_placed("web", ["n1"])
    intent = require(await fleet.intent("n1", "web"))
    assert intent.token == 2


async def test_a_farm_is_back_soon_after_a_lost_session(store: ScriptedStore, fleet: Fleet) -> None:
    """No back-off idles a farm for minutes, not even after many losses."""
    await fleet.create("web", 0)
    async with running_farm(store, KEYS, "farm-a") as farm:
        for _ in range(5):
            await fleet.until(lambda: owned(farm) == ["web"])
            session = require(farm.keeper.session_id)
            await store.inner.destroy_session(session)
            began = loop_time()
            await fleet.until(lambda lost=session: farm.keeper.session_id not in (None, lost))  # type: ignore[misc]
            await fleet.until(lambda: owned(farm) == ["web"])
            assert loop_time() - began < 5.0


async def test_an_orderly_stop_takes_less_than_a_second(store: ScriptedStore, fleet: Fleet, stage: Stage) -> None:
    """Even with work that hangs, the farm deregisters, and all its RCs are free."""
    for rc_id in ("web", "db"):
        await fleet.create(rc_id, 0)
    stage.gates["web"] = asyncio.Event()
    async with running_farm(store, KEYS, "farm-a", make_scheduler=stage.scheduler):
        await fleet.until(lambda: stage.hanging["web"])
        await fleet.until_state("db", "converged")
        began = loop_time()
    assert loop_time() - began < 1.0
    assert stage.cancelled == ["web"]
    assert (await owner(store, "web"), await owner(store, "db")) == (None, None)
    assert await store.inner.get(KEYS.farm("farm-a")) is None


async def test_a_stop_finishes_what_was_begun(store: ScriptedStore, fleet: Fleet, stage: Stage) -> None:
    """Work that ends within the grace time is committed whole, and nothing new is begun."""
    await fleet.add_nodes(["n1"])
    for rc_id in ("web", "late"):
        await fleet.create(rc_id, 1)
        stage.gates[rc_id] = asyncio.Event()
    async with running_farm(store, KEYS, "farm-a", make_scheduler=stage.scheduler, concurrent_reconciles=1):
        await fleet.until(lambda: stage.hanging["web"] or stage.hanging["late"])
        [begun] = [rc_id for rc_id in ("web", "late") if stage.hanging[rc_id]]
        for gate in stage.gates.values():
            asyncio.get_running_loop().call_later(0.3, gate.set)
    assert await fleet.nodes_of(begun) == ["n1"]
    assert stage.asked.total() == 1


async def test_a_stop_with_the_store_away_does_not_hang(store: ScriptedStore, fleet: Fleet) -> None:
    """Calls without an answer are abandoned; the lease expires."""
    await fleet.create("web", 0)
    async with running_farm(store, KEYS, "farm-a") as farm:
        await fleet.until(lambda: owned(farm) == ["web"])
        store.cut()
        began = loop_time()
    assert loop_time() - began < 5.0
    store.reconnect()


async def test_stopping_leaves_no_task_and_no_watch_behind(store: ScriptedStore, fleet: Fleet) -> None:
    """No task outlives the farm, whatever its work."""
    await fleet.add_nodes(["n1"])
    for number in range(20):
        await fleet.create(f"rc-{number}", 1)
    before = asyncio.all_tasks()
    for pause in (0.0, 0.001, 0.05, 5.0):
        async with running_farm(store, KEYS, "farm-a"):
            await asyncio.sleep(pause)
        assert asyncio.all_tasks() == before
        assert store.inner.watcher_count == 0


async def test_a_commit_that_was_not_even_tried_loses_no_rc(
    store: ScriptedStore, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a moment the farm could not be sure of its session: the RC is still locked by it, and still reconciled."""
    await fleet.add_nodes(["n1"])
    await fleet.create("web", 0)
    async with running_farm(store, KEYS, "farm-a") as farm:
        await fleet.until_state("web", "converged")
        monkeypatch.setattr(require(farm.term).ownership.held["web"].writer, "_held", lambda: False)
        await fleet.rcs.set_replicas("web", 1)
        await asyncio.sleep(0.1)
        assert owned(farm) == ["web"]
        monkeypatch.undo()
        await fleet.until_placed("web", ["n1"])


async def test_a_shortage_is_reconciled_again(store: ScriptedStore, fleet: Fleet, stage: Stage) -> None:
    """A scheduler may have freed something, without any change of nodes that wakes the RC. While its answers stay the
    same, no RC asks."""
    await fleet.create("web", 1)
    async with running_farm(store, KEYS, "farm-a", make_scheduler=stage.scheduler):
        await fleet.until_state("web", "short")
        await asyncio.sleep(SOON)
        before = stage.asked["web"]
        await asyncio.sleep(2 * ASK_AGAIN)
        assert stage.asked["web"] == before
        stage.freed += 1
        await asyncio.sleep(2 * SOON)
        assert stage.asked["web"] > before


async def test_only_rcs_that_can_use_a_node_are_woken_by_it(store: ScriptedStore, fleet: Fleet, stage: Stage) -> None:
    """Overload: a node that comes back is used at once by an RC that waits for one; RCs of another pool, or with a pod
    there, are not reconciled, and a node that is briefly dead wakes no RC."""
    await fleet.add_nodes(["n1"], {"pool": "web"})
    await fleet.create("placed", 1, node_selector="pool=web")
    await fleet.create("wants-more", 2, node_selector="pool=web")
    await fleet.create("elsewhere", 1, node_selector="pool=db")
    async with running_farm(store, KEYS, "farm-a", make_scheduler=stage.scheduler) as farm:
        for rc_id in ("wants-more", "elsewhere"):
            await fleet.until_state(rc_id, "short")
        await fleet.until_placed("placed", ["n1"])
        await asyncio.sleep(2 * ASK_AGAIN)
        before = stage.asked.copy()
        for _ in range(3):
            await fleet.kill_node("n1")
            await fleet.until(lambda: not farm.nodes.table.nodes()["n1"].live)
            await fleet.add_nodes(["n1"], {"pool": "web"})
            await fleet.until(lambda: farm.nodes.table.nodes()["n1"].live)
        assert stage.asked == before
        began = loop_time()
        await fleet.add_nodes(["n2"], {"pool": "web"})
        await fleet.until_placed("wants-more", ["n1", "n2"])
        assert loop_time() - began < SOON
        assert stage.asked["elsewhere"] == before["elsewhere"]


async def test_rcs_that_wait_for_a_node_ask_again_one_by_one(store: ScriptedStore, fleet: Fleet, stage: Stage) -> None:
    """Overload: when the reason may have changed, each RC without a node is reconciled once, evenly over a while,
    however often the nodes change."""
    rc_ids = [f"rc-{number}" for number in range(30)]
    for rc_id in rc_ids:
        await fleet.create(rc_id, 1, node_selector="pool=web")
    async with running_farm(store, KEYS, "farm-a", make_scheduler=stage.scheduler):
        for rc_id in rc_ids:
            await fleet.until_state(rc_id, "short")
        await asyncio.sleep(ASK_AGAIN + SOON / 2)
        before, most = stage.asked.total(), 0
        for number in range(int(ASK_AGAIN)):
            last = stage.asked.total()
            await fleet.add_nodes(["n1"], {"pool": f"db-{number}"})
            await asyncio.sleep(1.0)
            most = max(most, stage.asked.total() - last)
        assert len(rc_ids) * 0.8 <= stage.asked.total() - before <= len(rc_ids) * 1.2
        assert most <= 3


async def test_a_conflict_that_does_not_end_is_reported(store: ScriptedStore, fleet: Fleet) -> None:
    """An RC that the store refuses again and again says so in its status, and is retried."""
    await fleet.add_nodes(["n1"])
    await fleet.create("web", 1)

    async def refuse(sent: Sequence[Op]) -> None:
        refused = [number for number, op in enumerate(sent) if op.key == KEYS.intent("n1", "web")]
        if refused:
            raise TxnConflict([OpFailure(refused[0], "index is stale")])

    store.before_txn = refuse
    async with running_farm(store, KEYS, "farm-a"):
        status = await fleet.until_state("web", "quarantined")
        assert "index is stale" in status.reasons[0].message
        store.before_txn = None
        await asyncio.sleep(120.0)
        assert await fleet.nodes_of("web") == ["n1"]
        await fleet.set_health("web", {"n1": "passing"})
        assert (await fleet.until_state("web", "converged")).reasons == ()


async def test_an_rcs_own_writes_do_not_wake_it(store: ScriptedStore, fleet: Fleet, stage: Stage) -> None:
    """An RC is reconciled when it is claimed, and once more when an operator changes it."""
    await fleet.add_nodes(["n1", "n2"])
    await fleet.create("web", 1)
    async with running_farm(store, KEYS, "farm-a", make_scheduler=stage.scheduler):
        await asyncio.sleep(SOON)
        assert len(await fleet.nodes_of("web")) == 1
        assert stage.asked["web"] == 1
        await fleet.rcs.set_replicas("web", 2)
        await asyncio.sleep(SOON)
        assert await fleet.nodes_of("web") == ["n1", "n2"]
        assert stage.asked["web"] == 2


async def test_an_rc_that_has_moved_a_pod_goes_on_at_once(store: ScriptedStore, fleet: Fleet) -> None:
    """An RC's own write does not wake it, so a step that is not the last one is followed by another reconcile: the
    status then says what the RC waits for."""
    await fleet.add_nodes(["n1", "n2"])
    await fleet.create("web", 1, allocation_strategy="dynamic")
    async with running_farm(store, KEYS, "farm-a"):
        await fleet.until(lambda: fleet.nodes_of("web"))
        [node] = await fleet.nodes_of("web")
        await fleet.set_health("web", {node: "passing"})
        await fleet.until_state("web", "converged")
        await fleet.relabel(node, {}, schedulable=False, evict=True)
        await asyncio.sleep(2 * SOON)
        status = await fleet.status("web")
        assert await fleet.nodes_of("web") == ["n1", "n2"]
        assert [reason.code for reason in require(status).reasons] == ["transfer_in_progress"]


@pytest.mark.parametrize("error", [SchedulerError("no answer from the pool"), ZeroDivisionError("a bug")])
async def test_an_error_of_the_scheduler_is_one_rcs(
    store: ScriptedStore, fleet: Fleet, stage: Stage, error: Exception
) -> None:
    """Any error of the scheduler for an RC, also a bug, is in that RC's status, and the farm keeps running."""
    await fleet.add_nodes(["n1"])
    stage.errors["web"] = error
    for rc_id in ("web", "db"):
        await fleet.create(rc_id, 1)
    async with running_farm(store, KEYS, "farm-a", make_scheduler=stage.scheduler):
        status = await fleet.until_state("web", "quarantined")
        assert str(error) in status.reasons[0].message
        await fleet.until_placed("db", ["n1"])
        stage.errors.clear()
        await fleet.until_placed("web", ["n1"])


async def test_a_released_brake_wakes_what_it_held(store: ScriptedStore, fleet: Fleet) -> None:
    """Removals, moves and deletions that waited go on as soon as the operator confirms."""
    brake = Brake(farm="farm-b", since="", code="too_many_gone", message="5 of 6 RCs are gone")
    await fleet.add_nodes(["n1"])
    for rc_id in ("web", "db"):
        await fleet.create(rc_id, 1)
    async with running_farm(store, KEYS, "farm-a"):
        for rc_id in ("web", "db"):
            await fleet.until_placed(rc_id, ["n1"])
        await store.inner.put(KEYS.brake, encode(brake))
        await asyncio.sleep(SOON)
        await fleet.rcs.set_replicas("web", 0)
        await fleet.rcs.delete("db", force=True)
        for rc_id in ("web", "db"):
            await fleet.until_state(rc_id, "held")
        await asyncio.sleep(60.0)
        assert await fleet.nodes_of("web") == await fleet.nodes_of("db") == ["n1"]
        await store.inner.delete(KEYS.brake)
        await asyncio.sleep(SOON)
        assert await fleet.nodes_of("web") == []
        assert await store.inner.keys(KEYS.rc("db")) == []


async def test_a_node_that_comes_while_a_shortage_is_reported_is_used(store: ScriptedStore, fleet: Fleet) -> None:
    """No change is missed between the plan and the end of its commit."""
    await fleet.create("web", 1)
    store.keep_back("txn")
    async with running_farm(store, KEYS, "farm-a") as farm:
        await store.kept("txn")
        store.deliver("txn")
        await fleet.until(lambda: owned(farm) == ["web"])
        store.keep_back("txn")
        await fleet.rcs.set_replicas("web", 2)
        await store.kept("txn")
        await fleet.add_nodes(["n1", "n2"])
        await asyncio.sleep(SOON)
        store.deliver("txn")
        await asyncio.sleep(SOON)
        assert await fleet.nodes_of("web") == ["n1", "n2"]


async def test_a_spec_that_was_never_readable_leaves_nothing(store: ScriptedStore, fleet: Fleet) -> None:
    """It is reported while it is there; removed, neither its lock nor its status stays behind."""
    await store.inner.put(KEYS.spec("web"), b"nonsense")
    async with running_farm(store, KEYS, "farm-a") as farm:
        await fleet.until_state("web", "quarantined")
        await store.inner.delete(KEYS.spec("web"))
        await asyncio.sleep(SOON)
        assert owned(farm) == []
        assert await store.inner.keys(KEYS.rc("web")) == []


async def test_invalid_records_of_every_kind_affect_no_other_rc(store: ScriptedStore, fleet: Fleet) -> None:
    """Nonsense in every folder that a farm reads, before its start and while it runs: valid RCs are served, and the
    farm continues when the nonsense is removed."""
    await fleet.add_nodes(["n1"])
    await fleet.create("web", 1)
    foreign = [
        KEYS.farm("odd"), KEYS.node_spec("odd"), KEYS.node_alive("odd"), KEYS.node("n1") + "x",
        KEYS.intent("n1", "odd"),
        KEYS.intent("n1", "odd") + "/x", KEYS.intents, KEYS.rcs, KEYS.rcs + "zz/web/spec", KEYS.shard("00"),
        KEYS.shard("00") + "x", KEYS.spec("odd"), KEYS.rc("web") + "x", KEYS.rc("web") + "pods", KEYS.pod("odd", "n1"),
        KEYS.health("web", "n1"), KEYS.status("web"), KEYS.mutation("db"), KEYS.owner("odder"), KEYS.brake + "x",
        *(f"{KEYS.shard(shard)}web/{leaf}" for shard in ("00", "01", "02", "03") for leaf in ("x", "x/y", "health")),
    ]  # fmt: skip
    for key in foreign:
        await store.inner.put(key, b"nonsense")
    async with running_farm(store, KEYS, "farm-a") as farm:
        await asyncio.sleep(SOON)
        await fleet.until_placed("web", ["n1"])
        for key in foreign:
            await store.inner.put(key, b"other nonsense")
        await asyncio.sleep(SOON)
        for key in foreign:
            await store.inner.delete(key)
        await asyncio.sleep(SOON)
        await fleet.create("db", 1)
        await fleet.until_placed("db", ["n1"])
        assert {"db", "web"} <= set(owned(farm))
        assert await fleet.nodes_of("web") == ["n1"]
