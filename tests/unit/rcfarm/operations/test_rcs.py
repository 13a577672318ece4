"""Operations on replication controllers, on the embedded store."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from rcfarm.operations import locks, rc_snapshot
from rcfarm.operations.errors import BadInput, ChangedSincePlanned, Contended, NoSuchRC, RCExists, RCRefused
from rcfarm.operations.rcs import REVISIONS, ReplicationControllers
from rcfarm.operations.restore import restore
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import BadRecord, Entry, Op, SessionSpec
from store.schema import manifest
from store.schema.audit import Actor
from store.schema.keys import Keys
from store.schema.manifest import MAX_MANIFEST_BYTES, digest
from store.schema.records import (
    DeletedRC,
    Health,
    Mutation,
    Owner,
    RCSpec,
    RCStatus,
    Reality,
    Rollout,
    UpdatePolicy,
    encode,
)

KEYS = Keys("test")
HELLO = b'{"id":"hello","launchables":{"web":{"command":["true"]}}}'
HELLO_2 = b'{"id":"hello","launchables":{"web":{"command":["false"]}}}'
OTHER = b'{"id":"other","launchables":{"web":{"command":["true"]}}}'


@pytest.fixture
def store() -> EmbeddedStore:
    return EmbeddedStore()


@pytest.fixture
def rcs(store: EmbeddedStore) -> ReplicationControllers:
    return ReplicationControllers(store, KEYS, actor="ada")


async def test_create_writes_manifest_spec_and_audit_together(
    rcs: ReplicationControllers, store: EmbeddedStore
) -> None:
    """One transaction holds the manifest's exact bytes, the spec and the audit event."""
    spec = await rcs.create(
        HELLO, rc_id="hello", replicas=3, node_selector="b!=1, a=1", pod_labels={"tier": "web"}, rc_labels={"team": "x"}
    )

    entries = {entry.key: entry for entry in (await store.list("test/")).entries}
    assert entries[KEYS.spec("hello")].value == encode(spec)
    assert entries[KEYS.manifest(digest(HELLO))].value == HELLO
    assert len({entry.modify_index for entry in entries.values()}) == 1
    assert spec == RCSpec(
        id="hello",
        manifest=digest(HELLO),
        replicas_desired=3,
        node_selector="a=1,b!=1",
        pod_labels={"tier": "web"},
        rc_labels={"team": "x", "pod_id": "hello"},
        revised_by="ada",
        revised_at=spec.revised_at,
    )
    (event,) = await rcs.history("hello")
    assert (event.event_type, event.actor) == ("REPLICATION_CONTROLLER_CREATED", "ada")


async def test_create_makes_an_id_from_the_pod_id(rcs: ReplicationControllers) -> None:
    """Without an id, two RCs of one pod get different ids that begin with the pod's."""
    first, second = await rcs.create(HELLO), await rcs.create(HELLO)

    assert first.id != second.id
    assert first.id.startswith("hello-")
    assert first.replicas_desired == 0


async def test_an_id_is_taken_once(rcs: ReplicationControllers) -> None:
    """Creating an existing id is refused and changes nothing."""
    before = await rcs.create(HELLO, rc_id="hello")

    with pytest.raises(RCExists, match="hello exists already"):
        await rcs.create(HELLO_2, rc_id="hello", replicas=5)

    assert await rcs.get("hello") == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rc_id": "Not_A_Label"}, "id: 'Not_A_Label' is not a DNS label"),
        ({"replicas": -1}, "replicas: -1 is negative"),
        ({"node_selector": "a in (b"}, "node_selector: .*'a in \\(b'"),
        ({"allocation_strategy": "magic"}, "allocation_strategy: 'magic' is neither static nor dynamic"),
        ({"max_unavailable": 0}, "max_unavailable: 0"),
        ({"pod_labels": {"a b": "c"}}, "pod_labels: .*'a b'"),
        ({"rc_labels": {"a": "b/c"}}, "rc_labels: .*'b/c'"),
        ({"pod_labels": {"replication_controller_id": "x"}}, "replication_controller_id is set by rcfarm"),
        ({"rc_labels": {"pod_id": "other"}}, "pod_id is set by rcfarm"),
        ({"raw_manifest": b""}, "manifest: "),
        ({"raw_manifest": b"id: [broken"}, "manifest: not valid YAML"),
        ({"raw_manifest": b"{}"}, "manifest: .*id"),
        ({"raw_manifest": b" " * (MAX_MANIFEST_BYTES + 1)}, "manifest: .*limit"),
    ],
)
async def test_create_refuses_invalid_values(
    rcs: ReplicationControllers, store: EmbeddedStore, change: dict[str, object], message: str
) -> None:
    """Each kind of bad input names its field, and nothing is written."""
    arguments = {"raw_manifest": HELLO, "rc_id": "hello", **change}

    with pytest.raises(BadInput, match=message):
        await rcs.create(**arguments)  # type: ignore[arg-type]

    assert (await store.list("")).entries == []


async def test_changes_raise_the_generation_and_are_audited(rcs: ReplicationControllers) -> None:
    """Every change raises the generation and leaves an event with the differences."""
    await rcs.create(HELLO, rc_id="hello")

    await rcs.set_replicas("hello", 2)
    await rcs.set_selector("hello", "pool=web")
    await rcs.set_strategy("hello", "dynamic")
    await rcs.disable("hello")
    await rcs.enable("hello")
    spec = await rcs.set_labels("hello", pod_labels={"a": "1"}, rc_labels={"b": "2"})

    assert spec == await rcs.get("hello")
    assert spec.generation == 7
    assert (spec.replicas_desired, spec.node_selector, spec.allocation_strategy) == (2, "pool=web", "dynamic")
    assert (spec.pod_labels, spec.rc_labels) == ({"a": "1"}, {"b": "2", "pod_id": "hello"})
    events = await rcs.history("hello")
    assert [event.event_type.removeprefix("REPLICATION_CONTROLLER_") for event in events] == [
        "CREATED",
        "SCALED",
        "CHANGED",
        "CHANGED",
        "DISABLED",
        "ENABLED",
        "CHANGED",
    ]
    assert events[1].event_details["changes"] == {"replicas_desired": [0, 2]}


async def test_a_change_that_changes_nothing_writes_nothing(rcs: ReplicationControllers, store: EmbeddedStore) -> None:
    """Scaling to the present number leaves neither a generation nor an event."""
    await rcs.create(HELLO, rc_id="hello", replicas=2)
    before = (await store.list("")).index

    await rcs.set_replicas("hello", 2)

    assert (await store.list("")).index == before


class Interrupted:
    """The embedded store, with something else happening just before every transaction."""

    def __init__(self, store: EmbeddedStore, before_txn: Callable[[], Awaitable[object]]) -> None:
        self._store = store
        self._before_txn = before_txn

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def txn(self, ops_: list[Op]) -> object:
        await self._before_txn()
        return await self._store.txn(ops_)


async def test_retries_are_bounded(store: EmbeddedStore) -> None:
    """An RC that changes under every attempt is reported, not fought for without end."""
    rcs = ReplicationControllers(store, KEYS)
    spec = await rcs.create(HELLO, rc_id="hello")
    others = itertools.count(100)

    async def someone_else() -> None:
        await store.put(KEYS.spec("hello"), encode(msgspec.structs.replace(spec, max_unavailable=next(others))))

    busy = Interrupted(store, someone_else)
    with pytest.raises(Contended, match="try again"):
        await ReplicationControllers(busy, KEYS).set_replicas("hello", 5)  # type: ignore[arg-type]

    assert 1 < next(others) - 100 <= 10
    assert (await rcs.get("hello")).replicas_desired == 0


async def test_the_manifest_changes_but_never_its_pod_id(rcs: ReplicationControllers, store: EmbeddedStore) -> None:
    """A new manifest is stored with the change; one of another pod id is refused."""
    await rcs.create(HELLO, rc_id="hello")

    spec = await rcs.set_manifest("hello", HELLO_2)
    with pytest.raises(BadInput, match="its id is 'other', but rc hello runs 'hello'"):
        await rcs.set_manifest("hello", OTHER)

    assert spec.manifest == digest(HELLO_2)
    assert await rcs.manifest(spec.manifest) == HELLO_2
    assert await store.get(KEYS.manifest(digest(OTHER))) is None


async def _hold_mutation(store: EmbeddedStore, reason: str = "node transfer") -> str:
    session = (await store.create_session(SessionSpec("holder"))).id
    record = Mutation(holder="farm-1", reason=reason, since="2026-01-01T00:00:00Z")
    await store.txn([ops.lock(KEYS.mutation("hello"), encode(record), session)])
    return session


async def test_edits_respect_the_mutation_lock(rcs: ReplicationControllers, store: EmbeddedStore) -> None:
    """Edits under another client's mutation lock are refused, naming the holder, until its release."""
    await rcs.create(HELLO, rc_id="hello")
    session = await _hold_mutation(store)

    for edit in (rcs.set_replicas("hello", 2), rcs.disable("hello"), rcs.delete("hello")):
        with pytest.raises(RCRefused, match=r"changed by farm-1 \(node transfer\)"):
            await edit

    await store.destroy_session(session)
    assert (await rcs.set_replicas("hello", 2)).generation == 2


@pytest.mark.parametrize(
    ("value", "session", "holder"),
    [
        (encode(Mutation(holder="farm-1", reason="", since="")), "s-1", "farm-1"),
        (b"{", "s-1", "session s-1"),
        (encode(Mutation(holder="farm-1", reason="", since="")), None, None),
        (b"{", None, None),
    ],
)
def test_only_the_lock_says_whether_an_rc_is_being_changed(
    value: bytes, session: str | None, holder: str | None
) -> None:
    """A holder whose record can't be read is named by its session; a record without a lock holds nothing."""
    entry = Entry(KEYS.mutation("hello"), value, 1, 1, session=session)
    snap = rc_snapshot.snapshot(KEYS, "hello", [entry])
    assert (snap.mutation.holder if snap.mutation else None) == holder
    assert set(snap.bad) == ({entry.key} if value == b"{" else set())


async def test_the_mutation_lock_can_be_held(rcs: ReplicationControllers, store: EmbeddedStore) -> None:
    """Its holder can edit repeatedly, other clients can't; it is released after an error, too."""
    await rcs.create(HELLO, rc_id="hello")
    session = (await store.create_session(SessionSpec("tool"))).id

    with contextlib.suppress(ZeroDivisionError):
        async with rcs.lock_for_mutation("hello", session, "moves replicas") as locked:
            await locked.set_replicas("hello", 2)
            await locked.disable("hello")
            with pytest.raises(RCRefused, match=r"rc hello is being changed by ada \(moves replicas\)"):
                await rcs.set_replicas("hello", 3)
            with pytest.raises(RCRefused, match="is being changed by ada"):
                await rcs.lock_for_mutation("hello", session).__aenter__()
            raise ZeroDivisionError

    assert await store.get(KEYS.mutation("hello")) is None
    assert (await rcs.set_replicas("hello", 3)).generation == 4
    with pytest.raises(RCRefused, match="rc ghost is gone"):
        await rcs.lock_for_mutation("ghost", session).__aenter__()
    assert await store.get(KEYS.mutation("ghost")) is None


async def test_a_lost_mutation_lock_refuses_its_former_holder(
    rcs: ReplicationControllers, store: EmbeddedStore
) -> None:
    """Once its session has ended, another may hold the lock: it is neither edited under nor removed."""
    await rcs.create(HELLO, rc_id="hello")
    session = (await store.create_session(SessionSpec("tool"))).id

    async with rcs.lock_for_mutation("hello", session) as locked:
        await store.destroy_session(session)
        with pytest.raises(RCRefused, match="the mutation lock was lost"):
            await locked.set_replicas("hello", 2)
        await _hold_mutation(store)

    assert await store.get(KEYS.mutation("hello")) is not None
    assert (await rcs.get("hello")).replicas_desired == 0


async def test_replicas_are_added_and_compared(rcs: ReplicationControllers) -> None:
    """Concurrent additions all count; a comparison with a number that is not desired any more changes nothing."""
    await rcs.create(HELLO, rc_id="hello", replicas=5)

    await asyncio.gather(*(rcs.add_desired_replicas("hello", number) for number in (1, 2, -3, 4)))
    assert (await rcs.get("hello")).replicas_desired == 9
    for change in (rcs.add_desired_replicas("hello", -10), rcs.set_replicas("hello", -1)):
        with pytest.raises(BadInput, match="negative"):
            await change
    with pytest.raises(ChangedSincePlanned, match="rc hello desires 9 replicas, not 5"):
        await rcs.cas_desired_replicas("hello", 5, 6)
    assert (await rcs.cas_desired_replicas("hello", 9, 6)).replicas_desired == 6


async def test_a_status_can_be_set_compared_and_removed(rcs: ReplicationControllers) -> None:
    """For programs that do an owner's work; an RC that does not exist gets no status."""
    await rcs.create(HELLO, rc_id="hello")
    status = RCStatus(state="converged", generation=1, desired=0, placed=0, healthy=0, farm="tool", token=1)

    await rcs.set_status("hello", status, expected_index=0)
    with pytest.raises(ChangedSincePlanned):
        await rcs.set_status("hello", status, expected_index=0)
    assert await rcs.status("hello") == status
    await rcs.delete_status("hello")
    assert await rcs.status("hello") is None
    with pytest.raises(NoSuchRC):
        await rcs.set_status("ghost", status)


async def test_a_mutation_lock_taken_in_between_wins(store: EmbeddedStore) -> None:
    """A lock taken after our look but before our commit still refuses the edit: the check is in the transaction."""
    await ReplicationControllers(store, KEYS).create(HELLO, rc_id="hello")

    async def rollout_starts() -> None:
        if await store.get(KEYS.mutation("hello")) is None:
            await _hold_mutation(store, "rollout")

    interrupted = Interrupted(store, rollout_starts)
    with pytest.raises(RCRefused, match="rollout"):
        await ReplicationControllers(interrupted, KEYS).set_replicas("hello", 2)  # type: ignore[arg-type]

    assert (await ReplicationControllers(store, KEYS).get("hello")).replicas_desired == 0


async def test_a_persons_lock_taken_in_between_wins(store: EmbeddedStore) -> None:
    """Against an edit, and against a program that is about to take the mutation lock. A lock itself is refused when the
    RC was changed, locked or deleted in between."""
    rcs = ReplicationControllers(store, KEYS, actor="ada")
    await rcs.create(HELLO, rc_id="hello")
    bob = Actor("bob@host", 1000)

    async def bob_locks() -> None:
        if await store.get(KEYS.lock("hello")) is None:
            await locks.lock(store, KEYS, rcs, "hello", actor=bob, reason="mine")

    interrupted = Interrupted(store, bob_locks)
    with pytest.raises(RCRefused, match=r"locked by bob@host \(mine\); `rcfarm rc unlock hello`"):
        await ReplicationControllers(interrupted, KEYS).set_replicas("hello", 2)  # type: ignore[arg-type]
    assert (await rcs.get("hello")).replicas_desired == 0
    with pytest.raises(RCRefused, match="locked by bob@host"):
        await rcs.lock_for_mutation("hello", (await store.create_session(SessionSpec("tool"))).id).__aenter__()

    entry = await locks.standing(store, KEYS, rcs, "hello")
    await locks.unlock(store, KEYS, "hello", entry, actor=bob)
    with pytest.raises(ChangedSincePlanned, match="was removed or replaced in the meantime"):
        await locks.unlock(store, KEYS, "hello", entry, actor=bob)

    async def another_changes() -> None:
        await rcs.add_desired_replicas("hello", 1)

    for act in (bob_locks, another_changes, lambda: store.txn([ops.delete_tree(KEYS.rc("hello"))])):
        with pytest.raises(ChangedSincePlanned, match="look at it again"):
            await locks.lock(Interrupted(store, act), KEYS, rcs, "hello", actor=bob, reason="x")  # type: ignore[arg-type]
        await store.delete(KEYS.lock("hello"))
    assert await store.keys(KEYS.rc("hello")) == []


async def test_an_rc_is_restored_once(store: EmbeddedStore) -> None:
    """Of two clients one wins, and the record that it has read is gone; what was replaced since is not restored."""
    rcs = ReplicationControllers(store, KEYS, actor="ada")

    async def keep(replicas: int) -> None:
        spec = RCSpec(id="hello", manifest=digest(HELLO), replicas_desired=replicas, deleting=True)
        record = DeletedRC(spec=spec, manifest=digest(HELLO), farm="farm-a", deleted_at="")
        await store.put(KEYS.deleted_rc("hello"), encode(record))

    await store.put(KEYS.manifest(digest(HELLO)), HELLO)
    await keep(3)
    before = (await store.get(KEYS.manifest(digest(HELLO))),)

    found = await asyncio.gather(*(restore(store, KEYS, rcs, "hello") for _ in range(2)), return_exceptions=True)
    kinds = {type(each) for each in found}
    assert kinds in ({tuple, ChangedSincePlanned}, {tuple, RCExists})
    assert await store.get(KEYS.deleted_rc("hello")) is None
    after = (await store.get(KEYS.manifest(digest(HELLO))),)
    assert before != after, "written again, so that no collector removes it"

    await store.txn([ops.delete_tree(KEYS.rc("hello"))])
    await keep(3)
    interrupted = Interrupted(store, lambda: keep(5))
    with pytest.raises(ChangedSincePlanned):
        await restore(interrupted, KEYS, ReplicationControllers(interrupted, KEYS), "hello")  # type: ignore[arg-type]
    assert await store.get(KEYS.spec("hello")) is None


async def test_delete_is_refused_while_pods_are_desired(rcs: ReplicationControllers) -> None:
    """Deleting needs zero replicas or force; it only marks, and a marked RC takes no more changes."""
    await rcs.create(HELLO, rc_id="hello", replicas=1)

    with pytest.raises(RCRefused, match="desires 1 replicas"):
        await rcs.delete("hello")
    assert not (await rcs.get("hello")).deleting

    assert (await rcs.delete("hello", force=True)).deleting
    assert (await rcs.delete("hello")).deleting
    with pytest.raises(RCRefused, match="being deleted"):
        await rcs.set_replicas("hello", 3)


@pytest.mark.parametrize(
    "operation",
    [
        lambda rcs: rcs.get("ghost"),
        lambda rcs: rcs.set_replicas("ghost", 1),
        lambda rcs: rcs.delete("ghost"),
        lambda rcs: rcs.status("ghost"),
        lambda rcs: rcs.owner("ghost"),
        lambda rcs: rcs.pods("ghost"),
    ],
)
async def test_an_unknown_rc_is_named(
    rcs: ReplicationControllers, operation: Callable[[ReplicationControllers], asyncio.Future[object]]
) -> None:
    """Every operation on an RC that does not exist says so."""
    with pytest.raises(NoSuchRC, match="no rc ghost"):
        await operation(rcs)


async def test_a_bad_record_hides_no_neighbour(rcs: ReplicationControllers, store: EmbeddedStore) -> None:
    """A spec without replicas_desired is an error, never zero, and is listed beside the good ones."""
    await rcs.create(HELLO, rc_id="good")
    await store.put(KEYS.spec("bad"), b'{"id":"bad","manifest":"x"}')

    specs, bad = await rcs.list()

    assert [spec.id for spec in specs] == ["good"]
    assert [error.key for error in bad] == [KEYS.spec("bad")]
    with pytest.raises(BadRecord, match="replicas_desired"):
        await rcs.get("bad")


async def test_owner_tells_live_from_history(rcs: ReplicationControllers, store: EmbeddedStore) -> None:
    """The owner counts while it holds the lock; its name stays as history; the token counts acquisitions."""
    await rcs.create(HELLO, rc_id="hello")
    assert not (await rcs.owner("hello")).held

    session = (await store.create_session(SessionSpec("farm-1"))).id
    await store.txn([ops.lock(KEYS.owner("hello"), encode(Owner("farm-1", "2026-01-01T00:00:00Z")), session)])
    owner = await rcs.owner("hello")
    assert (owner.farm, owner.held, owner.token) == ("farm-1", True, 1)

    await store.destroy_session(session)
    owner = await rcs.owner("hello")
    assert (owner.farm, owner.held) == ("farm-1", False)


async def test_pods_join_placement_health_and_reality(rcs: ReplicationControllers, store: EmbeddedStore) -> None:
    """A pod shows its placement, its live health and what its agent reports; one that is only left over shows as such;
    health without its agent's session does not count; a pod of another RC is not ours."""
    spec = await rcs.create(HELLO, rc_id="hello", replicas=2)
    agent = (await store.create_session(SessionSpec("agent"))).id
    labels = {"pod_id": "hello", "replication_controller_id": "hello"}
    passing = encode(Health("passing", spec.manifest))
    mine = encode(Reality(manifest=spec.manifest, rc="hello", state="running"))
    foreign = encode(Reality(manifest=spec.manifest, rc="someone-else", state="running"))
    await store.txn(
        [
            ops.create(KEYS.pod("hello", "node-1"), encode(labels)),
            ops.create(KEYS.pod("hello", "node-2"), encode(labels)),
            ops.lock(KEYS.health("hello", "node-1"), passing, agent),
            ops.put(KEYS.health("hello", "node-2"), passing),
            ops.put(KEYS.reality("node-1", "hello"), mine),
            ops.put(KEYS.reality("node-3", "hello"), mine),
            ops.put(KEYS.reality("node-4", "hello"), foreign),
            ops.put(KEYS.reality("node-1", "hello-2"), mine),
        ]
    )

    pods = {pod.node: pod for pod in await rcs.pods("hello")}

    assert sorted(pods) == ["node-1", "node-2", "node-3"]
    assert pods["node-1"].health == Health("passing", spec.manifest)
    assert pods["node-1"].reality is not None
    assert (pods["node-2"].health, pods["node-2"].reality) == (None, None)
    assert not pods["node-3"].placed
    assert (await rcs.snapshot("hello")).healthy == 1


async def test_a_changed_manifest_is_a_revision_and_the_former_ones_are_kept(
    rcs: ReplicationControllers, store: EmbeddedStore
) -> None:
    """Who and when are known of each; ten are kept; other changes are no revisions."""
    await rcs.create(HELLO, rc_id="hello")
    await rcs.set_replicas("hello", 3)
    assert (await rcs.get("hello")).revision == 1
    for number in range(REVISIONS + 3):
        await rcs.set_manifest("hello", HELLO_2 if number % 2 == 0 else HELLO)
    snap = await rcs.snapshot("hello")
    assert snap.spec is not None
    assert (snap.spec.revision, snap.spec.revised_by) == (REVISIONS + 4, "ada")
    assert sorted(each.number for each in snap.revisions) == list(range(4, REVISIONS + 4))
    fifth = next(each for each in snap.revisions if each.number == 5)
    assert (fifth.manifest, fifth.by, fifth.stable) == (digest(HELLO), "ada", False), "no farm has rolled it out"


async def test_undo_gives_the_manifest_before_again(rcs: ReplicationControllers) -> None:
    """As a new revision; or that of a number. One that is not kept is named."""
    await rcs.create(HELLO, rc_id="hello")
    with pytest.raises(BadInput, match="no former revision is stable; name one with --to; kept are: none"):
        await rcs.undo("hello")
    await rcs.set_manifest("hello", HELLO_2)
    undone = await rcs.undo("hello")
    assert (undone.manifest, undone.revision) == (digest(HELLO), 3)
    with pytest.raises(BadInput, match="has the manifest of revision 1 already"):
        await rcs.undo("hello", 1)
    assert (await rcs.undo("hello", 2)).manifest == digest(HELLO_2)
    with pytest.raises(BadInput, match="no revision 9; kept are: 3, 2, 1"):
        await rcs.undo("hello", 9)


async def test_a_restart_is_a_manifest_with_a_mark(rcs: ReplicationControllers) -> None:
    """Nothing else of it changes, and a second one is another again."""
    await rcs.create(HELLO, rc_id="hello")
    first = await rcs.restart("hello")
    assert first.revision == 2
    marked = manifest.parse(await rcs.manifest(first.manifest))
    assert marked.restarted_at
    assert msgspec.structs.replace(marked, restarted_at="") == manifest.parse(HELLO)


async def test_a_request_needs_a_rollout_that_can_obey_it(rcs: ReplicationControllers, store: EmbeddedStore) -> None:
    """Refused with the state that it is in; else written beside the spec, with an event."""
    await rcs.create(HELLO, rc_id="hello")
    with pytest.raises(RCRefused, match="nothing to promote: it has no rollout"):
        await rcs.request("hello", "promote")
    with pytest.raises(NoSuchRC):
        await rcs.request("nope", "pause")
    spec = await rcs.set_manifest("hello", HELLO_2)
    record = Rollout(revision=2, manifest=spec.manifest, state="done", since="", started="", progressed="")
    await store.put(KEYS.rollout("hello"), encode(record))
    with pytest.raises(RCRefused, match="nothing to abort: its rollout is done"):
        await rcs.request("hello", "abort")
    await store.put(KEYS.rollout("hello"), encode(msgspec.structs.replace(record, state="awaiting_promotion")))
    request = await rcs.request("hello", "promote")
    assert (await rcs.snapshot("hello")).request == request
    assert (await rcs.history("hello"))[-1].event_type == "REPLICATION_CONTROLLER_ROLLOUT_REQUESTED"
    with pytest.raises(RCRefused, match="nothing to pause: its present revision is 2, not 1"):
        await rcs.request("hello", "pause", 1)


async def test_a_request_that_comes_too_late_is_refused(rcs: ReplicationControllers, store: EmbeddedStore) -> None:
    """The rollout that it means ends, or another one begins, just before it is written. A rollout that only goes on
    refuses nothing."""
    await rcs.create(HELLO, rc_id="hello")
    spec = await rcs.set_manifest("hello", HELLO_2)
    rolling = Rollout(revision=2, manifest=spec.manifest, state="rolling", since="", started="", progressed="")

    async def requested_after(before_txn: Callable[[], Awaitable[object]]) -> None:
        await store.put(KEYS.rollout("hello"), encode(rolling))
        happens = [before_txn]

        async def once() -> None:
            while happens:
                await happens.pop()()

        await ReplicationControllers(Interrupted(store, once), KEYS).request("hello", "pause")  # type: ignore[arg-type]

    async def record(**fields: object) -> None:
        await store.put(KEYS.rollout("hello"), encode(msgspec.structs.replace(rolling, **fields)))

    with pytest.raises(RCRefused, match="nothing to pause: its rollout is done"):
        await requested_after(lambda: record(state="done"))
    with pytest.raises(RCRefused, match="nothing to pause: its present revision is 3, not 2"):
        await requested_after(lambda: rcs.set_manifest("hello", HELLO))
    assert (await rcs.snapshot("hello")).request is None
    rolling = msgspec.structs.replace(rolling, revision=3, manifest=digest(HELLO))
    await requested_after(lambda: record(updated=1))
    request = (await rcs.snapshot("hello")).request
    assert request is not None
    assert (request.verb, request.revision) == ("pause", 3)


@pytest.mark.parametrize(
    ("update", "complaint"),
    [
        (UpdatePolicy(max_unavailable="0"), r"update\.max_unavailable: 0, and update\.max_surge is 0, too"),
        (UpdatePolicy(min_healthy_time=300), r"update\.healthy_deadline: 300 s is not longer than update\.min_healthy"),
        (UpdatePolicy(progress_deadline=60), r"update\.progress_deadline: 60 s is not longer than update\.healthy"),
        (UpdatePolicy(canary="200%"), r"update\.canary: 200% is more than all pods"),
    ],
)
async def test_a_policy_by_which_nothing_could_be_rolled_out_is_refused(
    rcs: ReplicationControllers, update: UpdatePolicy, complaint: str
) -> None:
    with pytest.raises(BadInput, match=complaint):
        await rcs.create(HELLO, update=update)
