"""A replication controller alone: its commits, and the conditions under which the store accepts them.

Changes between the plan and the commit are staged exactly: another client acts just before the transaction arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rcfarm.farm.decision_log import DecisionLog
from rcfarm.farm.manifests import Manifests
from rcfarm.farm.replay import read, replayed, segments
from rcfarm.farm.replication_controller import CannotReconcile, Pod, ReplicationController
from rcfarm.farm.shard import RC, Facet, HealthGroup, Intents, Shard
from rcfarm.farm.writer import Tools
from rcfarm.operations.rc_spec import with_manifest
from scheduler.label import LabelScheduler
from scheduler.nodes import WatchedNodes
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.group_commit import GroupCommit
from store.kv.protocol import Op, OwnershipLost, SessionSpec, TxnConflict, TxnResult, Unavailable
from store.kv.view import RefreshBudget, TreeView
from store.schema.keys import Keys
from store.schema.records import (
    ALL_NODES,
    Brake,
    DeletedRC,
    Intent,
    Owner,
    PersonsLock,
    Reason,
    Rollout,
    RolloutState,
    decode,
    encode,
)
from tests.support import require
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.farm.fleet import PATIENCE, Fleet, manifest

KEYS = Keys(shards=1)
BRAKE = encode(Brake(farm="farm-b", since="", code="no_rcs_found", message="all gone"))


class Bench:
    """One RC, `web`, owned by a controller that acts, and whose views are read, only on request."""

    def __init__(self, store: ScriptedStore) -> None:
        self.store = store
        self.fleet = Fleet(store.inner, KEYS)
        self.nodes = WatchedNodes(store.inner, KEYS)
        self.health = HealthGroup("0", store, KEYS, lambda rc_id: None, RefreshBudget())
        self.shard = Shard("00", store, KEYS, self.health, self._changed, RefreshBudget())
        self.intents = Intents(store, KEYS, lambda rc_id: None)
        self.hold = ""
        self.commits = GroupCommit(store)
        self.session = ""
        self.decisions: DecisionLog | None = None
        self.controller: ReplicationController

    def _changed(self, rc: RC, facets: Facet, origin: str) -> None:
        """Ignore changes."""

    async def look(self) -> None:
        """Bring every view up to date."""
        await self.nodes.view.refresh()
        await self.intents.view.refresh()
        await self.shard.view.refresh()

    def watching(self) -> list[WatchedNodes | TreeView[Any] | Shard]:
        """Return what has to run to keep every view up to date."""
        return [self.nodes, self.health.view, self.shard, self.intents.view]

    async def own(self) -> None:
        """Take the RC's lock, under a new session, and refresh the views."""
        session = await self.store.inner.create_session(SessionSpec("farm", ttl=86400.0, check_ttl=None))
        self.session = session.id
        await self.store.inner.txn([ops.lock(KEYS.owner("web"), encode(Owner("farm-a", "")), self.session)])
        await self.look()
        rc = require(self.shard.rcs.get("web"))
        tools = Tools(
            store=self.store,
            keys=KEYS,
            farm="farm-a",
            scheduler=LabelScheduler(self.nodes.table),
            by_label=LabelScheduler(self.nodes.table),
            manifests=Manifests(self.store, KEYS),
            intents=self.intents,
            commits=self.commits,
            hold=lambda: self.hold,
            decisions=self.decisions,
        )
        self.controller = ReplicationController(rc, tools, self.session)

    async def meet(self) -> str:
        """Look, and meet the desires until there is no more to do at once."""
        for _ in range(10):
            await self.look()
            try:
                outcome = await self.controller.meet_desires()
            except TxnConflict as error:
                if isinstance(error, OwnershipLost):
                    raise
                continue
            return outcome.state
        raise AssertionError("it conflicts with itself")

    def just_before_commit(self, act: Callable[[], Awaitable[object]]) -> None:
        """Run an action once, just before the next transaction that writes an RC's records is applied."""

        async def before(writing: Sequence[Op]) -> None:
            if any(op.key.startswith(KEYS.rcs) and op.verb not in ("get", "get-tree") for op in writing):
                self.store.before_txn = None
                await act()

        self.store.before_txn = before

    async def places(self) -> tuple[list[str], list[str]]:
        """Return where the RC has placements, and where its intents are."""
        intents = await self.fleet.intents_of("web")
        return await self.fleet.nodes_of("web"), sorted(n for n, intent in intents.items() if intent.rc == "web")


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    store = ScriptedStore(EmbeddedStore())
    made = Bench(store)
    sending = asyncio.create_task(made.commits.run())
    await made.fleet.add_nodes(["n1", "n2", "n3"])
    yield made
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await sending
    await store.close()


async def owning(bench: Bench, replicas: int) -> None:
    """The RC exists, is owned, and has its pods."""
    await bench.fleet.create("web", replicas)
    await bench.own()
    await bench.meet()


async def test_p2s_current_pods_and_watch_desires(bench: Bench) -> None:
    """`CurrentPods` returns the pods by node; `WatchDesires` reconciles whenever an input changes (the spec, the nodes,
    an intent), yields the errors, retries, and ends when another farm owns the RC."""
    await owning(bench, 2)
    assert bench.controller.current_pods() == [Pod("n1", "web"), Pod("n2", "web")]
    errors: list[Exception] = []

    async def watch() -> None:
        async for error in bench.controller.watch_desires():
            errors.append(error)
            bench.store.faults.clear()

    async with asyncio.TaskGroup() as group:
        views = [group.create_task(part.run()) for part in bench.watching()]
        watching = group.create_task(watch())
        bench.store.faults["txn"] = Unavailable("away")
        await bench.fleet.rcs.set_replicas("web", 3)
        await bench.fleet.until_placed("web", ["n1", "n2", "n3"])
        assert [type(error) for error in errors] == [Unavailable]

        await bench.fleet.rcs.set_replicas("web", 4)
        await bench.fleet.add_nodes(["n4"])
        await bench.fleet.until_placed("web", ["n1", "n2", "n3", "n4"])

        await bench.store.inner.delete(KEYS.intent("n1", "web"))
        async with asyncio.timeout(PATIENCE):
            while "n1" not in (await bench.places())[1]:
                await asyncio.sleep(0.01)

        await bench.store.inner.destroy_session(bench.session)
        await bench.fleet.rcs.set_replicas("web", 1)
        async with asyncio.timeout(PATIENCE):
            await watching
        assert isinstance(errors[-1], OwnershipLost)
        for view in views:
            view.cancel()


@pytest.mark.looptime
async def test_watch_desires_backs_off(bench: Bench) -> None:
    """While the store is away, the pauses grow to five seconds."""
    await owning(bench, 1)
    times: list[float] = []

    async def watch() -> None:
        async for error in bench.controller.watch_desires():
            assert isinstance(error, Unavailable)
            assert len(times) < 25
            times.append(asyncio.get_running_loop().time())

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(part.run()) for part in bench.watching()]
        bench.store.faults["txn"] = Unavailable("away")
        await bench.fleet.rcs.set_replicas("web", 2)
        tasks.append(group.create_task(watch()))
        await asyncio.sleep(60.0)
        for task in tasks:
            task.cancel()
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses[-7:] == pytest.approx([5.0] * 7, abs=0.1)


async def test_every_write_carries_the_fence(bench: Bench) -> None:
    """Placing, repairing, removing, reporting and deleting: each transaction checks the RC's lock first."""
    await owning(bench, 2)
    await bench.store.inner.delete(KEYS.intent("n1", "web"))
    await bench.meet()
    await bench.fleet.rcs.set_replicas("web", 1)
    await bench.meet()
    await bench.fleet.rcs.delete("web", force=True)
    await bench.meet()
    assert await bench.store.keys(KEYS.rc("web")) == []
    fence = ops.check_session(KEYS.owner("web"), bench.session)
    written = [sent for sent in bench.store.transactions if any(not op.verb.startswith("get") for op in sent)]
    assert len(written) >= 4
    assert all(sent[0] == fence for sent in written)


async def test_a_removal_is_for_the_spec_that_was_planned_for(bench: Bench) -> None:
    """The RC is scaled up again while a removal is in flight, and our own view shows that before it arrives: the
    removal is refused, and no pod stops."""
    await owning(bench, 3)
    await bench.fleet.rcs.set_replicas("web", 1)

    async def scale_up() -> None:
        await bench.fleet.rcs.set_replicas("web", 3)
        await bench.shard.view.refresh()

    # The plan is made, and then waits for an intent that has to be read before the removal.
    await bench.store.inner.delete(KEYS.intent("n3", "web"))
    await bench.look()
    list_ = bench.store.inner.list
    acted = False

    async def slow(prefix: str, *, consistent: bool = False):  # type: ignore[no-untyped-def]
        nonlocal acted
        if prefix == KEYS.intent("n3", "web") and not acted:
            acted = True
            await scale_up()
        return await list_(prefix, consistent=consistent)

    bench.store.inner.list = slow  # type: ignore[method-assign]
    with pytest.raises(TxnConflict):
        await bench.controller.meet_desires()
    assert acted
    assert (await bench.places())[0] == ["n1", "n2", "n3"]
    await bench.meet()
    assert await bench.places() == (["n1", "n2", "n3"], ["n1", "n2", "n3"])


@pytest.mark.parametrize("state", ["disabled", "held"])
async def test_a_removal_on_its_way_when_it_is_forbidden_does_not_happen(bench: Bench, state: str) -> None:
    """The store refuses the removal of a farm that does not know yet that the RC is disabled, or the brake on."""
    await owning(bench, 2)
    await bench.fleet.rcs.set_replicas("web", 1)
    await bench.look()
    forbid = {
        "disabled": lambda: bench.fleet.rcs.disable("web"),
        "held": lambda: bench.store.inner.put(KEYS.brake, BRAKE),
    }
    bench.just_before_commit(forbid[state])
    with pytest.raises(TxnConflict):
        await bench.controller.meet_desires()
    assert (await bench.places())[0] == ["n1", "n2"]
    bench.hold = "the brake is on" if state == "held" else ""
    assert await bench.meet() == state
    assert (await bench.places())[0] == ["n1", "n2"]


async def test_what_the_plan_wants_is_known_before_it_is_committed(bench: Bench) -> None:
    """A node that comes while a shortage is being reported must wake the RC: its reasons say that it waits."""
    await bench.fleet.create("web", 5)
    await bench.own()
    await bench.look()
    seen: list[bool] = []

    async def note() -> None:
        seen.append(bool(bench.controller.reasons))

    bench.just_before_commit(note)
    await bench.controller.meet_desires()
    assert seen == [True]


async def test_an_rc_never_writes_another_rcs_intent(bench: Bench) -> None:
    """Where the pod belongs to another RC now, only our placement is removed; the other's intent is unchanged."""
    await owning(bench, 1)
    theirs = encode(Intent(manifest="0" * 64, rc="other", shard="00", token=7))
    await bench.store.inner.put(KEYS.intent("n1", "web"), theirs)
    await bench.meet()
    entry = require(await bench.store.get(KEYS.intent("n1", "web")))
    assert entry.value == theirs
    assert await bench.places() == (["n2"], ["n2"])


async def test_a_pod_that_only_seems_taken_is_kept(bench: Bench) -> None:
    """The view of intents may be old: the record is removed only if the intent has not changed since it was seen."""
    await owning(bench, 1)
    ours = require(await bench.store.get(KEYS.intent("n1", "web")))
    await bench.store.inner.put(KEYS.intent("n1", "web"), encode(Intent(manifest="0" * 64, rc="other", shard="00")))
    await bench.look()
    await bench.store.inner.put(KEYS.intent("n1", "web"), ours.value)
    with pytest.raises(TxnConflict):
        await bench.controller.meet_desires()
    assert await bench.meet() == "progressing"
    assert await bench.places() == (["n1"], ["n1"])


async def test_an_intent_without_its_record_goes(bench: Bench) -> None:
    """If a client removes the record of a placement, its intent is removed, too, and the RC becomes complete again."""
    await owning(bench, 2)
    await bench.store.inner.delete(KEYS.pod("web", "n1"))
    await bench.meet()
    await bench.meet()
    recorded, ordered = await bench.places()
    assert recorded == ordered
    assert len(recorded) == 2


async def test_an_intent_that_only_seems_to_lack_its_record_stays(bench: Bench) -> None:
    """The views are not of one moment: before an order is taken back both keys are read."""
    await owning(bench, 2)
    record = bench.shard.view.records[KEYS.pod("web", "n1")]
    assert record.modify_index
    del bench.shard.view.records[KEYS.pod("web", "n1")]
    del bench.controller.state.pods["n1"]
    await bench.controller.meet_desires()
    assert await bench.places() == (["n1", "n2"], ["n1", "n2"])
    assert sorted(bench.controller.state.pods) == ["n1", "n2"]


@pytest.mark.parametrize("was_good", [True, False])
async def test_an_intent_that_cannot_be_read_is_written_again(bench: Bench, was_good: bool) -> None:
    """An undecodable intent is restored, whether or not this farm ever saw it intact."""
    await owning(bench, 1)
    await bench.store.inner.put(KEYS.intent("n1", "web"), b"nonsense")
    if not was_good:
        bench.intents = Intents(bench.store, KEYS, lambda rc_id: None)
        tools = replace(bench.controller.tools, intents=bench.intents)
        bench.controller = ReplicationController(bench.controller.state, tools, bench.session)
    assert await bench.meet() == "progressing"
    assert await bench.places() == (["n1"], ["n1"])


async def test_an_intent_that_cannot_be_read_goes_with_its_placement(bench: Bench) -> None:
    """A removal leaves nothing behind, readable or not."""
    await owning(bench, 2)
    await bench.store.inner.put(KEYS.intent("n2", "web"), b"nonsense")
    await bench.fleet.rcs.set_replicas("web", 1)
    await bench.meet()
    assert await bench.fleet.nodes_of("web") == ["n1"]
    assert await bench.store.get(KEYS.intent("n2", "web")) is None


async def test_a_node_with_an_unreadable_intent_is_avoided(bench: Bench) -> None:
    """Its RC is unknown: it is left as it is, the RC uses another node, or says why there is none."""
    await bench.store.inner.put(KEYS.intent("n1", "web"), b"nonsense")
    await bench.fleet.create("web", 3)
    await bench.own()
    assert await bench.meet() == "short"
    assert await bench.fleet.nodes_of("web") == ["n2", "n3"]
    assert "pod_id_taken" in [reason.code for reason in bench.controller.reasons]


async def test_a_node_that_joins_with_an_unreadable_intent_stops_no_daemon_set(bench: Bench) -> None:
    """It is left as it is, and named; all other nodes have their pods, also those that join with it."""
    await bench.fleet.create("web", ALL_NODES)
    await bench.own()
    await bench.meet()
    await bench.store.inner.put(KEYS.intent("n4", "web"), b"nonsense")
    await bench.fleet.add_nodes(["n4", "n5"])
    await bench.meet()
    await bench.meet()
    assert await bench.fleet.nodes_of("web") == ["n1", "n2", "n3", "n5"]
    assert "pod_id_taken" in [reason.code for reason in bench.controller.reasons]


async def test_a_first_change_together_with_more_nodes_begins_with_a_canary(bench: Bench) -> None:
    """One change makes a daemon set of an RC and gives it another manifest: the nodes that it gets so have the one that
    is known to be good."""
    await owning(bench, 1)
    before = (await bench.fleet.rcs.get("web")).manifest
    changed = manifest("web", version=2)
    await bench.fleet.rcs.update(
        "web",
        lambda spec: msgspec.structs.replace(with_manifest(changed)(spec), replicas_desired=ALL_NODES),
        raw_manifest=changed,
    )
    await bench.meet()
    running = {node: intent.manifest for node, intent in (await bench.fleet.intents_of("web")).items()}
    assert sorted(running) == ["n1", "n2", "n3"]
    assert list(running.values()).count(before) >= 2, running


async def test_deletion_takes_intents_without_records_along(bench: Bench) -> None:
    """No record of a deleted RC stays behind, whatever a client has done to its records."""
    await owning(bench, 2)
    await bench.store.inner.delete(KEYS.pod("web", "n1"))
    await bench.store.inner.put(KEYS.pod("web", "n2"), b"nonsense")
    await bench.fleet.rcs.delete("web", force=True)
    await bench.meet()
    assert await bench.store.keys(KEYS.rc("web")) == []
    assert await bench.fleet.intents_of("web") == {}


@pytest.mark.parametrize(
    ("state", "revision", "restored"),
    [
        ("reverted", 2, "first"),
        ("rolling", 2, "first"),
        ("awaiting_promotion", 2, "first"),
        ("done", 2, "second"),
        ("done", 1, "first"),  # the rollout of the second has not begun
    ],
)
async def test_what_a_deleted_rc_was_is_kept_with_its_removal(
    bench: Bench, state: RolloutState, revision: int, restored: str
) -> None:
    """Its spec and the last manifest whose rollout was done, in the transaction that removes its folder; a deletion
    that is refused keeps nothing."""
    await owning(bench, 2)
    first = (await bench.fleet.rcs.get("web")).manifest
    await bench.fleet.rcs.set_manifest("web", manifest("web", version=2))
    spec = await bench.fleet.rcs.get("web")
    rollout = Rollout(
        revision=revision,
        manifest=spec.manifest if revision == 2 else first,
        stable=first,
        stable_revision=1,
        state=state,
        since="",
        started="",
        progressed="",
    )
    await bench.store.inner.put(KEYS.rollout("web"), encode(rollout))
    marked = await bench.fleet.rcs.delete("web", force=True)

    async def engage_the_brake() -> None:
        await bench.store.inner.put(KEYS.brake, BRAKE)

    async def until_the_folder_goes(writing: Sequence[Op]) -> None:
        if any(op.verb == "delete-tree" for op in writing):
            bench.store.before_txn = None
            await engage_the_brake()

    bench.store.before_txn = until_the_folder_goes
    with contextlib.suppress(AssertionError):  # the brake refuses each attempt
        await bench.meet()
    assert await bench.store.keys(KEYS.deleted) == []
    await bench.store.inner.delete(KEYS.brake)
    await bench.meet()
    assert await bench.store.keys(KEYS.rc("web")) == []
    entry = require(await bench.store.get(KEYS.deleted_rc("web")))
    kept = decode(DeletedRC, entry.key, entry.value)
    manifests = {"first": first, "second": spec.manifest}
    assert (kept.spec, kept.manifest, kept.farm, kept.until) == (marked, manifests[restored], "farm-a", "")
    (writing,) = [each for each in bench.store.transactions if any(op.key == entry.key for op in each)][-1:]
    assert {op.verb for op in writing} >= {"check-session", "delete-tree", "set"}


async def test_no_pod_moves_while_a_person_has_locked_the_rc(bench: Bench) -> None:
    """Neither when the farm knows of the lock, nor when it is taken just before the move is committed."""
    await bench.fleet.create("web", 1)
    await bench.fleet.rcs.set_strategy("web", "dynamic")
    await bench.own()
    await bench.meet()
    assert (await bench.places())[0] == ["n1"]
    lock = encode(PersonsLock("ada@host", "mine", ""))
    await bench.fleet.relabel("n1", {}, schedulable=False, evict=True)

    bench.just_before_commit(lambda: bench.store.inner.put(KEYS.lock("web"), lock))
    await bench.meet()
    assert (await bench.places())[0] == ["n1"]
    status = require(await bench.fleet.status("web"))
    (reason,) = [reason for reason in status.reasons if reason.code == "transfer_waits_for_lock"]
    assert reason.message == "the mutation lock is held by ada@host; `rcfarm rc unlock web` removes the lock"

    await bench.store.inner.put(KEYS.lock("web"), b"nonsense")
    await bench.meet()
    assert (await bench.places())[0] == ["n1"]
    await bench.store.inner.delete(KEYS.lock("web"))
    await bench.meet()
    assert (await bench.places())[0] == ["n2"]


async def test_a_placement_that_cannot_be_read_stops_the_rc(bench: Bench) -> None:
    """It may be a running pod: no pod is added in its place or stopped, and the error names the placement."""
    await bench.fleet.create("web", 2)
    await bench.store.inner.put(KEYS.pod("web", "n2"), b"nonsense")
    await bench.own()
    with pytest.raises(CannotReconcile, match="pods/n2 can't be read"):
        await bench.meet()
    assert (await bench.places())[1] == []
    await bench.store.inner.delete(KEYS.pod("web", "n2"))
    await bench.meet()
    assert (await bench.places())[0] == ["n1", "n2"]


@pytest.mark.parametrize("labelled", [True, False])
async def test_the_pod_id_never_changes(bench: Bench, labelled: bool) -> None:
    """A spec written by hand that names a manifest of another pod id is refused, with or without the label `pod_id`;
    running pods are left as they are."""
    await owning(bench, 1)
    spec = await bench.fleet.rcs.get("web")
    await bench.fleet.create("donor", 0, pod_id="other")
    labels = spec.rc_labels if labelled else {}
    digest = (await bench.fleet.rcs.get("donor")).manifest
    changed = encode(type(spec)(id="web", manifest=digest, replicas_desired=1, rc_labels=labels))
    await bench.store.inner.put(KEYS.spec("web"), changed)
    with pytest.raises(CannotReconcile, match="'other', but this RC's pod id is 'web'"):
        await bench.meet()
    assert await bench.places() == (["n1"], ["n1"])
    assert await bench.fleet.intents_of("other") == {}


async def test_a_stale_owner_is_refused_however_far_it_got(bench: Bench) -> None:
    """The lock is lost between the plan and the commit: the store takes nothing of it, nor a status later."""
    await owning(bench, 1)
    await bench.fleet.rcs.set_replicas("web", 3)
    await bench.look()
    thief = await bench.store.inner.create_session(SessionSpec("thief"))
    value = encode(Owner("thief", ""))

    async def steal() -> None:
        await bench.store.inner.txn(
            [ops.unlock(KEYS.owner("web"), value, bench.session), ops.lock(KEYS.owner("web"), value, thief.id)]
        )

    bench.just_before_commit(steal)
    with pytest.raises(OwnershipLost):
        await bench.controller.meet_desires()
    assert await bench.places() == (["n1"], ["n1"])
    before = await bench.fleet.status("web")
    with pytest.raises(OwnershipLost):
        await bench.controller.report("quarantined", [Reason("failing", "late")])
    assert await bench.fleet.status("web") == before


async def test_nothing_is_sent_once_the_lease_may_have_ended(bench: Bench) -> None:
    """A controller that can't be sure of its session does not even try."""
    await bench.fleet.create("web", 1)
    await bench.own()
    controller = ReplicationController(
        bench.controller.state, bench.controller.tools, bench.session, held=lambda: False
    )
    bench.store.transactions.clear()
    with pytest.raises(OwnershipLost, match="lease"):
        await controller.meet_desires()
    assert not [sent for sent in bench.store.transactions if any(op.verb == "cas" for op in sent)]


async def test_a_settled_rc_writes_nothing(bench: Bench) -> None:
    """Reconciling a converged RC, or one with a reported shortage, writes nothing."""
    await owning(bench, 2)
    await bench.meet()
    bench.store.transactions.clear()
    await bench.meet()
    assert bench.store.transactions == []
    await bench.fleet.rcs.set_replicas("web", 9)
    assert await bench.meet() == "short"
    bench.store.transactions.clear()
    assert await bench.meet() == "short"
    assert bench.store.transactions == []


async def test_each_event_names_its_logged_decision(bench: Bench, tmp_path: Path) -> None:
    """Placing, a shortage, removing, deleting: logged with the transaction that wrote it, and decided again as it was.
    What changes nothing and says nothing new is not logged."""
    bench.decisions = DecisionLog(tmp_path, "farm-a", "1", max_size=2**20, max_age=1e9)
    await owning(bench, 2)
    await bench.meet()
    await bench.fleet.rcs.set_replicas("web", 9)
    await bench.meet()
    await bench.meet()
    await bench.fleet.rcs.set_replicas("web", 1)
    await bench.meet()
    await bench.fleet.rcs.delete("web", force=True)
    await bench.meet()
    await bench.decisions.flush()
    [path] = segments(tmp_path)
    found = {one.id: one for one in read(path, pytest.fail)}
    events = await bench.fleet.audit("web") + await bench.fleet.audit("web", "REPLICATION_CONTROLLER_DELETED")
    assert len(events) == 5
    assert {event.event_details["decision"] for event in events} <= found.keys()
    assert all(one.index > 0 and not replayed(one).differs for one in found.values())
    plans = [one.decision for one in found.values()]
    changes = [any(plan[name] for name in ("add", "remove")) or plan["state"] == "deleting" for plan in plans]
    reasons = [plan["reasons"] for plan in plans]
    assert all(changed or reasons[at] != reasons[at - 1] for at, changed in enumerate(changes))


async def test_what_a_daemon_set_places_on_nodes_that_join_is_a_logged_decision(bench: Bench, tmp_path: Path) -> None:
    """Its input are these nodes alone, and the planner decides the same about them again."""
    bench.decisions = DecisionLog(tmp_path, "farm-a", "1", max_size=2**20, max_age=1e9)
    await bench.fleet.create("web", ALL_NODES)
    await bench.own()
    await bench.meet()
    await bench.fleet.add_nodes(["n4", "n5"])
    await bench.look()
    await bench.controller.meet_desires()
    assert await bench.fleet.nodes_of("web") == ["n1", "n2", "n3", "n4", "n5"]
    await bench.decisions.flush()
    event = (await bench.fleet.audit("web"))[-1].event_details
    assert event["added"] == ["n4", "n5"]
    [path] = segments(tmp_path)
    [logged] = [one for one in read(path, pytest.fail) if one.id == event["decision"]]
    assert (logged.decision["add"], logged.index > 0) == (["n4", "n5"], True)
    again = replayed(logged)
    assert not again.differs
    assert (dict(again.given.current), again.given.eligibility.placeable) == ({}, ("n4", "n5"))


async def test_a_refused_decision_is_logged_without_a_transaction(bench: Bench, tmp_path: Path) -> None:
    bench.decisions = DecisionLog(tmp_path, "farm-a", "1", max_size=2**20, max_age=1e9)
    await owning(bench, 2)
    await bench.fleet.rcs.set_replicas("web", 1)
    await bench.look()
    bench.just_before_commit(lambda: bench.fleet.rcs.disable("web"))
    with pytest.raises(TxnConflict):
        await bench.controller.meet_desires()
    await bench.decisions.flush()
    [path] = segments(tmp_path)
    last = list(read(path, pytest.fail))[-1]
    assert (last.decision["remove"], last.index) == (["n2"], 0)


async def test_an_answer_that_got_lost_is_found_out_by_reading(bench: Bench) -> None:
    """A commit that was applied though its answer never came does not place a second time."""
    await bench.fleet.create("web", 1)
    await bench.own()
    await bench.look()
    txn = bench.store.inner.txn

    async def lost(ops_: Sequence[Op]) -> TxnResult:
        result = await txn(ops_)
        if any(op.key == KEYS.pod("web", "n1") for op in ops_):
            bench.store.inner.txn = txn  # type: ignore[method-assign]
            raise Unavailable("the answer was lost")
        return result

    bench.store.inner.txn = lost  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await bench.controller.meet_desires()
    await bench.meet()
    assert await bench.places() == (["n1"], ["n1"])
    assert len(await bench.fleet.audit("web")) == 1
