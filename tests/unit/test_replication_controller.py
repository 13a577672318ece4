"""A replication controller by itself: what it commits, and under which conditions the store takes it.

What happens between the plan and the commit is staged exactly: somebody acts just before the transaction arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace

import pytest

from rcfarm.commit import GroupCommit
from rcfarm.fleet import RC, Facet, HealthGroup, Intents, Shard
from rcfarm.manifests import Manifests
from rcfarm.replication_controller import CannotReconcile, Pod, ReplicationController, Tools
from scheduler.label import LabelScheduler
from scheduler.nodes import WatchedNodes
from store import ops
from store.embedded import EmbeddedStore
from store.keys import Keys
from store.kv import Op, OwnershipLost, SessionSpec, TxnConflict, TxnResult, Unavailable
from store.records import Brake, Intent, Owner, encode
from store.view import Pace
from tests.support.fleet import PATIENCE, Fleet, manifest
from tests.support.scripted import ScriptedStore

KEYS = Keys(shards=1)
BRAKE = encode(Brake(farm="farm-b", since="", code="no_rcs_found", message="all gone"))


class Bench:
    """One RC, `web`, owned by a controller that acts when it is told to, on views that are read when it is told to."""

    def __init__(self, store: ScriptedStore) -> None:
        self.store = store
        self.fleet = Fleet(store.inner, KEYS)
        self.nodes = WatchedNodes(store.inner, KEYS)
        self.health = HealthGroup("0", store, KEYS, lambda rc_id: None, Pace())
        self.shard = Shard("00", store, KEYS, self.health, self._changed, Pace())
        self.intents = Intents(store, KEYS, lambda rc_id: None)
        self.hold = ""
        self.commits = GroupCommit(store)
        self.session = ""
        self.controller: ReplicationController

    def _changed(self, rc: RC, facets: Facet) -> None:
        """Nobody waits for changes here."""

    async def look(self) -> None:
        """Bring every view up to date."""
        await self.nodes.view.refresh()
        await self.intents.view.refresh()
        await self.shard.view.refresh()

    async def own(self) -> None:
        """Take the RC's lock, under a session of its own, and look."""
        session = await self.store.inner.create_session(SessionSpec("farm", ttl=86400.0, check_ttl=None))
        self.session = session.id
        await self.store.inner.txn([ops.lock(KEYS.owner("web"), encode(Owner("farm-a", "")), self.session)])
        await self.look()
        rc = self.shard.get("web")
        assert rc is not None
        tools = Tools(
            store=self.store,
            keys=KEYS,
            farm="farm-a",
            scheduler=LabelScheduler(self.nodes.table),
            manifests=Manifests(self.store, KEYS),
            intents=self.intents,
            commits=self.commits,
            hold=lambda: self.hold,
        )
        self.controller = ReplicationController(rc, tools, self.session)

    async def meet(self) -> str:
        """Look, and meet the desires until there is no more to do at once."""
        for _ in range(10):
            await self.look()
            try:
                state = await self.controller.meet_desires()
            except TxnConflict as error:
                if isinstance(error, OwnershipLost):
                    raise
                continue
            return state
        raise AssertionError("it conflicts with itself")

    def just_before_commit(self, act: Callable[[], Awaitable[object]]) -> None:
        """Have somebody act once, when the next transaction that writes an RC's records is on its way."""

        async def before(writing: Sequence[Op]) -> None:
            if any(op.key.startswith(KEYS.rcs) and op.verb not in ("get", "get-tree") for op in writing):
                self.store.before_txn = None
                await act()

        self.store.before_txn = before

    async def places(self) -> tuple[list[str], list[str]]:
        """Where the RC has placements, and where its intents are."""
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


async def test_the_seeds_words(bench: Bench) -> None:
    """`CurrentPods` answers the pods by node; `WatchDesires` meets what is desired whenever an input changes (the spec,
    the nodes, an intent), yields the errors, tries again by itself, and ends when another farm has the RC."""
    await owning(bench, 2)
    assert bench.controller.current_pods() == [Pod("n1", "web"), Pod("n2", "web")]
    errors: list[Exception] = []

    async def watch() -> None:
        async for error in bench.controller.watch_desires():
            errors.append(error)
            bench.store.faults.clear()

    async with asyncio.TaskGroup() as group:
        views = [group.create_task(part.run()) for part in (bench.nodes, bench.health, bench.shard, bench.intents)]
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


async def test_every_write_carries_the_fence(bench: Bench) -> None:
    """Weakness 3: placing, repairing, removing, reporting and deleting: each transaction checks the RC's lock first."""
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
    """Somebody scales up again while a removal is on its way, and our own view shows that before it arrives: the
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


async def test_a_removal_on_its_way_when_the_rc_is_disabled_does_not_happen(bench: Bench) -> None:
    """Scenario 15, at the last moment: the store refuses the removal."""
    await owning(bench, 2)
    await bench.fleet.rcs.set_replicas("web", 0)
    await bench.look()
    bench.just_before_commit(lambda: bench.fleet.rcs.disable("web"))
    assert await bench.meet() == "disabled"
    assert (await bench.places())[0] == ["n1", "n2"]


async def test_a_removal_on_its_way_when_the_brake_goes_on_does_not_happen(bench: Bench) -> None:
    """Also a farm that has not heard of the brake yet removes nothing: the store knows."""
    await owning(bench, 2)
    await bench.fleet.rcs.set_replicas("web", 1)
    await bench.look()
    bench.just_before_commit(lambda: bench.store.inner.put(KEYS.brake, BRAKE))
    with pytest.raises(TxnConflict):
        await bench.controller.meet_desires()
    assert (await bench.places())[0] == ["n1", "n2"]
    bench.hold = "the brake is on"
    assert await bench.meet() == "held"
    assert (await bench.places())[0] == ["n1", "n2"]


async def test_a_deletion_waits_for_the_brake(bench: Bench) -> None:
    """An RC that is to be deleted stays whole, even without pods, and counts as held until the brake is released."""
    await owning(bench, 1)
    bench.hold = "the brake is on"
    await bench.fleet.rcs.delete("web", force=True)
    assert await bench.meet() == "held"
    assert bench.controller.concerned
    assert await bench.places() == (["n1"], ["n1"])
    bench.hold = ""
    await bench.meet()
    assert await bench.store.keys(KEYS.rc("web")) == []
    assert await bench.fleet.intents_of("web") == {}


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
    """Weakness 13: where the pod is another RC's by now, only our record goes; the other's order stays as it is."""
    await owning(bench, 1)
    theirs = encode(Intent(manifest="0" * 64, rc="other", shard="00", token=7))
    await bench.store.inner.put(KEYS.intent("n1", "web"), theirs)
    await bench.meet()
    entry = await bench.store.get(KEYS.intent("n1", "web"))
    assert entry is not None
    assert entry.value == theirs
    assert await bench.places() == (["n2"], ["n2"])


async def test_a_pod_that_only_seems_taken_is_kept(bench: Bench) -> None:
    """The view of intents may be old: the record goes only if the intent still is what it was seen to be."""
    await owning(bench, 1)
    ours = await bench.store.get(KEYS.intent("n1", "web"))
    assert ours is not None
    await bench.store.inner.put(KEYS.intent("n1", "web"), encode(Intent(manifest="0" * 64, rc="other", shard="00")))
    await bench.look()
    await bench.store.inner.put(KEYS.intent("n1", "web"), ours.value)
    with pytest.raises(TxnConflict):
        await bench.controller.meet_desires()
    assert await bench.meet() == "progressing"
    assert await bench.places() == (["n1"], ["n1"])


async def test_an_intent_without_its_record_goes(bench: Bench) -> None:
    """Somebody removes the record of a placement: the order does not stay behind, and the RC is whole again."""
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
async def test_an_intent_that_cannot_be_read_is_written_anew(bench: Bench, was_good: bool) -> None:
    """Scenario 10: what was damaged beyond reading is restored, whether or not this farm ever saw it whole."""
    await owning(bench, 1)
    await bench.store.inner.put(KEYS.intent("n1", "web"), b"nonsense")
    if not was_good:
        bench.intents = Intents(bench.store, KEYS, lambda rc_id: None)
        bench.controller.tools = replace(bench.controller.tools, intents=bench.intents)
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
    """Nobody knows whose it is: it is left as it is, the RC uses another node and says why, if there is none."""
    await bench.store.inner.put(KEYS.intent("n1", "web"), b"nonsense")
    await bench.fleet.create("web", 3)
    await bench.own()
    assert await bench.meet() == "short"
    assert await bench.fleet.nodes_of("web") == ["n2", "n3"]
    assert "pod_id_taken" in [reason.code for reason in bench.controller.reasons]


async def test_deletion_takes_intents_without_records_along(bench: Bench) -> None:
    """Weakness 22: nothing of a deleted RC stays behind, whatever somebody has done to its records."""
    await owning(bench, 2)
    await bench.store.inner.delete(KEYS.pod("web", "n1"))
    await bench.store.inner.put(KEYS.pod("web", "n2"), b"nonsense")
    await bench.fleet.rcs.delete("web", force=True)
    await bench.meet()
    assert await bench.store.keys(KEYS.rc("web")) == []
    assert await bench.fleet.intents_of("web") == {}


async def test_a_placement_that_cannot_be_read_stops_the_rc(bench: Bench) -> None:
    """Weakness 7: it may be a pod that runs: nothing is added in its place, nothing stops, and the error names it."""
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
    """Weakness 22: a spec written by hand that names a manifest of another pod id is refused, with or without the
    label that says how the pods are called; what runs is left as it is."""
    await owning(bench, 1)
    other = manifest("other")
    spec = await bench.fleet.rcs.get("web")
    await bench.fleet.create("donor", 0, pod_id="other")
    labels = spec.rc_labels if labelled else {}
    digest = (await bench.fleet.rcs.get("donor")).manifest
    assert other
    changed = encode(type(spec)(id="web", manifest=digest, replicas_desired=1, rc_labels=labels))
    await bench.store.inner.put(KEYS.spec("web"), changed)
    with pytest.raises(CannotReconcile, match="'other', but this RC's pods are called 'web'"):
        await bench.meet()
    assert await bench.places() == (["n1"], ["n1"])
    assert await bench.fleet.intents_of("other") == {}


async def test_a_stale_owner_is_refused_however_far_it_got(bench: Bench) -> None:
    """Weakness 3: the lock is lost between the plan and the commit: the store takes nothing of it."""
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


async def test_nothing_is_sent_once_the_lease_may_be_over(bench: Bench) -> None:
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
    """Weakness 11: looking again at what is as it should be, or at a shortage that was reported, costs no write."""
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
