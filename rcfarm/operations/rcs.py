"""Operations on replication controllers (p2's `ReplicationControllerStore`), for the CLI and other clients.

The model: an RC is its `spec` key. Every change reads the spec, changes it in memory and writes it back in one
transaction `[manifest,] cas spec, check of the mutation lock, audit event`, so it is applied and recorded as a whole,
or not at all. A conflict means that another client wrote in between: the change is computed again from the new spec, a
bounded number of times. Nothing else is retried here; when the store is unavailable the caller has to read again first.

Nothing here places or removes a pod: the RC's owner does, as soon as it sees the new spec.

Which specs are valid, and the changes that several verbs make, are in `rc_spec`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple

import msgspec

from rcfarm.operations import rc_snapshot
from rcfarm.operations.errors import BadInput, ChangedSincePlanned, Contended, NoSuchRC, RCExists, RCRefused
from rcfarm.operations.rc_snapshot import OwnerView, PodView, RCSnapshot
from rcfarm.operations.rc_spec import (
    Change,
    canonical_selector,
    check_labels,
    check_replicas,
    check_strategy,
    checked,
    marked,
    parse_manifest,
    with_labels,
    with_manifest,
)
from store.kv import ops
from store.kv.protocol import BadRecord, Entry, Op, Store, TxnConflict
from store.schema import audit, manifest
from store.schema.keys import Keys
from store.schema.records import (
    BEFORE_PROMOTION,
    POD_ID_LABEL,
    ROLLING_OUT,
    ROLLOUT_STOPPED,
    AuditEvent,
    Labels,
    RCSpec,
    RCStatus,
    Reality,
    Revision,
    Rollout,
    RolloutRequest,
    RolloutState,
    UpdatePolicy,
    decode,
    encode,
    utc_now,
)

Verb = Literal["pause", "resume", "promote", "abort"]  # what operators ask of a rollout

VERBS: dict[Verb, frozenset[RolloutState]] = {  # the states in which each can be asked for
    "pause": ROLLING_OUT,
    "resume": ROLLOUT_STOPPED | {"paused"},
    "promote": BEFORE_PROMOTION,
    "abort": ROLLING_OUT | {"paused"},
}
HIGHEST_REVISION = 10**10 - 1  # that a key has place for
REVISIONS = 10  # former revisions that are kept
DAMAGED_IN_AUDIT = 1000  # bytes of a replaced record kept in the audit log
_BOOKKEEPING = frozenset({"generation", "revised_by", "revised_at"})  # not what an event reports
_ID_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"  # no vowels, so that no words occur


class Stored(NamedTuple):
    """A spec and the modify index of its key."""

    spec: RCSpec
    modify_index: int


class Damaged(NamedTuple):
    """An undecodable spec: the error, its bytes and the modify index of its key. `generation`: the highest one known of
    the RC; `pod_id`: its pods' id, "" when none is placed."""

    error: BadRecord
    value: bytes
    modify_index: int
    generation: int
    pod_id: str


class Listed(NamedTuple):
    """Readable RCs, in order of id, and the undecodable records."""

    specs: list[RCSpec]
    bad: list[BadRecord]


class ReplicationControllers:
    """Reads and changes RCs. `actor`: named in the audit log. `conditions`: operations that every change of a spec
    carries, such as a fence; if one fails, nothing is changed.

    The store's `StoreError`s pass through every method; the errors of `rcfarm.operations.errors` are named per method.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        *,
        actor: str | audit.Actor = "",
        conditions: Sequence[Op] = (),
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._actor, self._conditions = actor, conditions
        self._rng = rng or random.Random()
        self._name = actor.name if isinstance(actor, audit.Actor) else actor
        self._mutation_session = ""  # the session that holds the mutation lock of the RC to change

    async def create(
        self,
        raw_manifest: bytes,
        *,
        rc_id: str = "",
        replicas: int = 0,
        node_selector: str = "",
        pod_labels: Labels | None = None,
        rc_labels: Labels | None = None,
        allocation_strategy: str = "static",
        max_unavailable: int = 1,
        disabled: bool = False,
        update: UpdatePolicy | None = None,
    ) -> RCSpec:
        """Create an RC. Without `rc_id` its id is made from the pod id. Raises `BadInput`, `RCExists`."""
        pod_id = parse_manifest(raw_manifest).id
        spec = RCSpec(
            id=rc_id or f"{pod_id[:57]}-{''.join(self._rng.choices(_ID_ALPHABET, k=5))}",
            manifest=manifest.digest(raw_manifest),
            replicas_desired=replicas,
            node_selector=canonical_selector(node_selector),
            pod_labels=check_labels("pod_labels", pod_labels or {}),
            rc_labels={**check_labels("rc_labels", rc_labels or {}, pod_id=pod_id), POD_ID_LABEL: pod_id},
            allocation_strategy=check_strategy(allocation_strategy),
            max_unavailable=max_unavailable,
            disabled=disabled,
            update=update,
        )
        return await self.create_from(spec, raw_manifest)

    async def create_from(
        self,
        spec: RCSpec,
        raw_manifest: bytes,
        *,
        event: str = "REPLICATION_CONTROLLER_CREATED",
        others: Sequence[Op] = (),
    ) -> RCSpec:
        """Create exactly this RC, at its first revision. `others`: further operations of the transaction. Raises
        `BadInput`, `RCExists`, also when one of the others is refused."""
        spec = msgspec.structs.replace(spec, revision=1, revised_by=self._name, revised_at=utc_now())
        try:
            await self._store.txn(
                [
                    ops.create(self._keys.spec(spec.id), encode(checked(spec))),
                    self._store_manifest(spec.manifest, raw_manifest),
                    self._event(
                        event,
                        spec,
                        {"replicas_desired": spec.replicas_desired, "manifest": [None, spec.manifest]},
                    ),
                    *others,
                    *self._conditions,
                ]
            )
        except TxnConflict as error:
            raise RCExists(
                f"rc {spec.id} exists already; choose another id, or change it with `rcfarm rc apply`"
            ) from error
        return spec

    async def read(self, rc_id: str) -> Stored:
        """Return the spec and its version. Raises `NoSuchRC`, `BadRecord`."""
        entry = await self._store.get(self._keys.spec(rc_id), consistent=True)
        if entry is None:
            raise NoSuchRC(f"there is no rc {rc_id}; `rcfarm rc list` shows those that exist")
        return Stored(decode(RCSpec, entry.key, entry.value), entry.modify_index)

    async def read_damaged(self, rc_id: str) -> Damaged | None:
        """Return the RC's spec for `replace_damaged`, or None when it can be read now. Raises `NoSuchRC`."""
        snap = await self.snapshot(rc_id)
        try:
            await self.read(rc_id)
        except BadRecord as error:
            entry = await self._store.get(error.key, consistent=True)
            if entry is None:
                raise NoSuchRC(f"rc {rc_id} was deleted; `rcfarm rc restore {rc_id}` brings it back") from error
            found = re.search(rb'"generation"\s*:\s*(\d{1,15})\b', entry.value)
            in_text = int(found[1]) if found else 0
            known = max(snap.status.generation if snap.status else 0, in_text)
            return Damaged(error, entry.value, entry.modify_index, known, rc_snapshot.pod_id_of(snap))
        return None

    async def replace_damaged(self, damaged: Damaged, spec: RCSpec, raw_manifest: bytes) -> RCSpec:
        """Replace an undecodable record by `spec`, if it has not changed.

        Raises `BadInput`, `RCRefused`, `ChangedSincePlanned`.
        """
        new = checked(msgspec.structs.replace(spec, generation=damaged.generation + 1))
        was = {"error": damaged.error.reason, "value": damaged.value[:DAMAGED_IN_AUDIT].decode(errors="replace")}
        snap = await self.snapshot(spec.id)
        former = [each.number for each in snap.revisions] + ([snap.rollout.revision] if snap.rollout else [])
        revision = min(max(former, default=0) + 1, HIGHEST_REVISION)
        new = msgspec.structs.replace(new, revision=revision, revised_by=self._name, revised_at=utc_now())
        details = {"replaced_unreadable": was, "manifest": [None, new.manifest]}
        writing = [
            ops.cas(self._keys.spec(new.id), encode(new), damaged.modify_index),
            *await self._unlocked(new.id),
            self._store_manifest(new.manifest, raw_manifest),
            self._event("REPLICATION_CONTROLLER_CHANGED", new, details),
            *self._conditions,
        ]
        try:
            await self._store.txn(writing)
        except TxnConflict as error:
            raise ChangedSincePlanned(
                f"rc {new.id} was changed in the meantime; review the difference again"
            ) from error
        return new

    async def get(self, rc_id: str) -> RCSpec:
        """Return the spec. Raises `NoSuchRC`, `BadRecord`."""
        return (await self.read(rc_id)).spec

    async def manifest(self, sha256: str) -> bytes:
        """Return the manifest's exact bytes. Raises `NoSuchRC` when it is not in the store."""
        entry = await self._store.get(self._keys.manifest(sha256))
        if entry is None:
            raise NoSuchRC(
                f"manifest {sha256[:12]} is not in the store; give the rc its manifest again: `rcfarm rc apply -f FILE`"
            )
        return entry.value

    async def manifests(self) -> dict[str, bytes]:
        """Return every manifest by its digest."""
        entries = (await self._store.list(self._keys.manifests)).entries
        return {entry.key.removeprefix(self._keys.manifests): entry.value for entry in entries}

    async def update(
        self,
        rc_id: str,
        change: Change,
        *,
        event: str = "REPLICATION_CONTROLLER_CHANGED",
        raw_manifest: bytes | None = None,
        expected_index: int | None = None,
    ) -> RCSpec:
        """Read, change, compare-and-swap; the change is computed again after a conflict. Writes nothing if the spec
        stays equal.

        `raw_manifest` is stored in the same transaction. `expected_index`: change the spec only at that version. Raises
        `NoSuchRC`, `RCRefused`, `ChangedSincePlanned`, `Contended`, and whatever `change` raises.
        """

        async def attempt() -> RCSpec:
            old, index = await self.read(rc_id)
            if expected_index is not None and index != expected_index:
                raise ChangedSincePlanned(f"rc {rc_id} was changed in the meantime; review the difference again")
            if old.deleting:
                raise RCRefused(f"rc {rc_id} is being deleted and accepts no changes")
            new = change(old)
            if new == old:
                return old
            revised: list[Op] = []
            if new.manifest != old.manifest:
                number = min(max(old.revision, new.revision - 1, 0) + 1, HIGHEST_REVISION)
                new = msgspec.structs.replace(new, revision=number, revised_by=self._name, revised_at=utc_now())
                revised = await self._keep_revision(old)
            new = checked(msgspec.structs.replace(new, generation=old.generation + 1))
            lock_checks = await self._unlocked(rc_id)
            stored = [] if raw_manifest is None else [self._store_manifest(new.manifest, raw_manifest)]
            before, after = msgspec.structs.asdict(old), msgspec.structs.asdict(new)
            fields = [field for field in before if before[field] != after[field] and field not in _BOOKKEEPING]
            changes = {field: [before[field], after[field]] for field in fields}
            change_ops = [
                ops.cas(self._keys.spec(new.id), encode(new), index),
                *lock_checks,
                *stored,
                *revised,
                self._event(event, new, {"changes": changes, "manifest": [old.manifest, new.manifest]}),
                *self._conditions,
            ]
            await self._store.txn(change_ops)
            return new

        return await ops.retry_conflicts(f"rc {rc_id}", attempt, rng=self._rng, error=Contended)

    async def _keep_revision(self, spec: RCSpec) -> list[Op]:
        """Return the operations that keep the spec's revision, which is about to be followed by another one."""
        entry = await self._store.get(self._keys.rollout(spec.id), consistent=True)
        stable = spec.revision == 1  # what the RC began with
        if entry is not None:
            with contextlib.suppress(BadRecord):
                rollout = decode(Rollout, entry.key, entry.value)
                stable = rollout.is_of(spec) and rollout.state == "done"
        kept = Revision(
            number=spec.revision, manifest=spec.manifest, by=spec.revised_by, at=spec.revised_at, stable=stable
        )
        if not 0 < spec.revision <= HIGHEST_REVISION:
            return []  # written by hand
        writing = [ops.put(self._keys.revision(spec.id, spec.revision), encode(kept))]
        if spec.revision > REVISIONS:
            writing.append(ops.delete(self._keys.revision(spec.id, spec.revision - REVISIONS)))
        return writing

    async def request(self, rc_id: str, verb: Verb, revision: int | None = None) -> RolloutRequest:
        """Ask the owner to pause, resume, promote or abort a rollout: that of `revision`, or the present one.

        The request is only written if the owner has not changed the rollout since it was read. Raises `NoSuchRC`,
        `RCRefused` when the rollout can't obey it, or another one has begun, `Contended`.
        """
        meant = revision

        async def attempt() -> RolloutRequest:
            nonlocal meant
            snap, spec = await self._with_spec(rc_id)
            meant, rollout = meant or spec.revision, snap.present_rollout
            if spec.revision != meant:
                is_now = f"its present revision is {spec.revision}, not {meant}"
            elif rollout is None:
                is_now = "it has no rollout"
            else:
                is_now = f"its rollout is {rollout.state.replace('_', ' ')}"
            if rollout is None or spec.revision != meant or rollout.state not in VERBS[verb]:
                raise RCRefused(f"rc {rc_id}: nothing to {verb}: {is_now}; `rcfarm rollout status {rc_id}` shows it")
            request = RolloutRequest(id=audit.new_ulid(), verb=verb, revision=meant, by=self._name, at=utc_now())
            details = {"verb": verb, "revision": meant, "state": rollout.state}
            is_same = ops.check_index(self._keys.rollout(rc_id), snap.rollout_index)
            await self._ask(snap, request, "REPLICATION_CONTROLLER_ROLLOUT_REQUESTED", details, is_same)
            return request

        return await ops.retry_conflicts(f"rc {rc_id}", attempt, rng=self._rng, error=Contended)

    async def shrink(self, rc_id: str) -> int:
        """Confirm that a daemon set may lose the pods on nodes that do not match any more. Return how many are left.

        Raises `NoSuchRC`, `RCRefused` when nothing waits for it, `ChangedSincePlanned`.
        """
        snap, spec = await self._with_spec(rc_id)
        status = snap.status
        if not spec.is_daemon_set or status is None or status.state != "held" or status.desired >= len(snap.pods):
            raise RCRefused(f"rc {rc_id}: no pod waits to be removed; `rcfarm ds status {rc_id}` shows it")
        request = RolloutRequest(
            id=audit.new_ulid(),
            verb="shrink",
            revision=spec.revision,
            by=self._name,
            at=utc_now(),
            least=status.desired,
        )
        details = {"pods": len(snap.pods), "least": request.least}
        try:
            await self._ask(snap, request, "DAEMON_SET_SHRINK_CONFIRMED", details)
        except TxnConflict as error:
            raise ChangedSincePlanned(f"rc {rc_id} was changed in the meantime; look at it again") from error
        return request.least

    async def _ask(
        self, snap: RCSnapshot, request: RolloutRequest, event: str, details: dict[str, Any], *conditions: Op
    ) -> None:
        """Write a request to the RC's owner, about the spec of the snapshot. Raises `TxnConflict`."""
        assert snap.spec is not None, "checked by the caller"
        await self._store.txn(
            [
                ops.put(self._keys.rollout_request(snap.rc_id), encode(request)),
                ops.check_index(self._keys.spec(snap.rc_id), snap.spec_index),
                *conditions,
                self._event(event, snap.spec, details),
                *self._conditions,
            ]
        )

    async def undo(self, rc_id: str, revision: int | None = None) -> RCSpec:
        """Give the RC the manifest of a former revision again, as a new one: of the latest that was stable, unless
        `revision` names another. Raises as `update`, and `BadInput` when there is no such revision."""
        snap, spec = await self._with_spec(rc_id)
        known = sorted(snap.revisions, key=lambda each: -each.number)
        kept = ", ".join(str(each.number) for each in known) or "none"
        history = f"kept are: {kept}; `rcfarm rollout history {rc_id}` shows them"
        if revision is not None:
            found = next((each for each in known if each.number == revision), None)
            if found is None:
                raise BadInput(f"rc {rc_id}: no revision {revision}; {history}")
            if found.manifest == spec.manifest:
                raise BadInput(f"rc {rc_id} has the manifest of revision {revision} already; {history}")
        else:
            others = [each for each in known if each.manifest != spec.manifest]
            running = [each for each in others if each.manifest == snap.wanted]  # where its rollout was stopped
            found = next((each for each in [*running, *others] if each.stable or each in running), None)
            if found is None:
                raise BadInput(f"rc {rc_id}: no former revision is stable; name one with --to; {history}")
        raw = await self.manifest(found.manifest)
        return await self.update(rc_id, with_manifest(raw), raw_manifest=raw, expected_index=snap.spec_index)

    async def restart(self, rc_id: str) -> RCSpec:
        """Roll the RC's pods out again, with the manifest that they run but for a mark. Raises as `update`, and
        `BadInput` for a manifest that can't be read."""
        snap, _ = await self._with_spec(rc_id)
        raw = marked(await self.manifest(snap.wanted), utc_now())
        return await self.update(rc_id, with_manifest(raw), raw_manifest=raw, expected_index=snap.spec_index)

    async def set_replicas(self, rc_id: str, replicas: int) -> RCSpec:
        """Set the desired number of pods; `ALL_NODES`: one on each node that matches. Raises as `update`, and
        `BadInput`."""
        check_replicas(replicas)
        return await self.update(
            rc_id,
            lambda spec: checked(msgspec.structs.replace(spec, replicas_desired=replicas)),
            event="REPLICATION_CONTROLLER_SCALED",
        )

    async def add_desired_replicas(self, rc_id: str, number: int) -> RCSpec:
        """Add `number`, which may be negative, to the desired number of pods. Raises as `update`, and `BadInput` below
        zero."""

        def change(spec: RCSpec) -> RCSpec:
            if spec.is_daemon_set:
                raise BadInput(f"rc {rc_id} has `replicas: all`, which nothing can be added to; set a number")
            return msgspec.structs.replace(spec, replicas_desired=spec.replicas_desired + number)

        return await self.update(rc_id, change, event="REPLICATION_CONTROLLER_SCALED")

    async def cas_desired_replicas(self, rc_id: str, expected: int, replicas: int) -> RCSpec:
        """Set the desired number of pods if it is `expected` now. Raises as `update`, `BadInput`, and
        `ChangedSincePlanned` when it is another."""

        def change(spec: RCSpec) -> RCSpec:
            if spec.replicas_desired != expected:
                raise ChangedSincePlanned(f"rc {rc_id} desires {spec.replicas_desired} replicas, not {expected}")
            return msgspec.structs.replace(spec, replicas_desired=replicas)

        check_replicas(replicas)
        return await self.update(rc_id, change, event="REPLICATION_CONTROLLER_SCALED")

    @contextlib.asynccontextmanager
    async def lock_for_mutation(
        self, rc_id: str, session: str, reason: str = ""
    ) -> AsyncIterator[ReplicationControllers]:
        """Hold the RC's mutation lock under `session`, which the caller keeps alive, and yield operations that may
        change the RC under it: every other edit, and every transfer of a pod, waits or is refused.

        Raises `RCRefused` while another process holds the lock, and for an RC that does not exist. The yielded
        operations raise it once the lock is lost.
        """
        locked = ReplicationControllers(self._store, self._keys, actor=self._actor, rng=self._rng)
        locked._mutation_session = session
        try:
            async with audit.mutation_lock(self._store, self._keys, rc_id, session, holder=self._name, reason=reason):
                yield locked
        except audit.ChangeRefused as error:
            raise RCRefused(str(error)) from error

    async def enable(self, rc_id: str) -> RCSpec:
        """Enable the RC: its owner acts again. Raises as `update`."""
        return await self.update(
            rc_id,
            lambda spec: msgspec.structs.replace(spec, disabled=False),
            event="REPLICATION_CONTROLLER_ENABLED",
        )

    async def disable(self, rc_id: str) -> RCSpec:
        """Disable the RC: its owner adds, removes and repairs nothing. Raises as `update`."""
        return await self.update(
            rc_id,
            lambda spec: msgspec.structs.replace(spec, disabled=True),
            event="REPLICATION_CONTROLLER_DISABLED",
        )

    async def set_manifest(self, rc_id: str, raw_manifest: bytes) -> RCSpec:
        """Set another manifest with the same pod id. Raises as `update`, and `BadInput`."""
        return await self.update(rc_id, with_manifest(raw_manifest), raw_manifest=raw_manifest)

    async def set_strategy(self, rc_id: str, allocation_strategy: str) -> RCSpec:
        """Set the allocation strategy, "static" or "dynamic". Raises as `update`, and `BadInput`."""
        strategy = check_strategy(allocation_strategy)
        return await self.update(rc_id, lambda spec: msgspec.structs.replace(spec, allocation_strategy=strategy))

    async def set_selector(self, rc_id: str, node_selector: str) -> RCSpec:
        """Set the node selector. Raises as `update`, and `BadInput`."""
        selector = canonical_selector(node_selector)
        return await self.update(rc_id, lambda spec: msgspec.structs.replace(spec, node_selector=selector))

    async def set_labels(
        self, rc_id: str, *, pod_labels: Labels | None = None, rc_labels: Labels | None = None
    ) -> RCSpec:
        """Replace the labels of future pods, of the RC, or both. The RC's `pod_id` label stays. Raises as `update`, and
        `BadInput`."""
        return await self.update(rc_id, with_labels(pod_labels, rc_labels))

    async def delete(self, rc_id: str, *, force: bool = False) -> RCSpec:
        """Mark for deletion: the owner removes the RC's pods, then the RC. Does nothing if it is marked already.

        Raises as `update`, and `RCRefused` while the RC desires pods, unless forced.
        """
        spec = await self.get(rc_id)
        if spec.deleting:
            return spec

        def mark(spec: RCSpec) -> RCSpec:
            if spec.replicas_desired and not force:
                raise RCRefused(
                    f"rc {rc_id} desires {spec.replicas_desired} replicas; scale it to 0 first "
                    f"(`rcfarm rc scale {rc_id} 0`), or delete it by force (`rcfarm rc delete {rc_id} --force`)"
                )
            return msgspec.structs.replace(spec, deleting=True)

        return await self.update(rc_id, mark, event="REPLICATION_CONTROLLER_DELETION_REQUESTED")

    async def snapshot(self, rc_id: str) -> RCSnapshot:
        """Return everything in the RC's folder, and its pods' health. Raises `NoSuchRC` when there is nothing."""
        listing = await self._store.list(self._keys.rc(rc_id), consistent=True)
        if not listing.entries:
            raise NoSuchRC(f"there is no rc {rc_id}; `rcfarm rc list` shows those that exist")
        health = await self._store.list(self._keys.health_of(rc_id), consistent=True)
        return rc_snapshot.snapshot(self._keys, rc_id, listing.entries, health.entries)

    async def _with_spec(self, rc_id: str) -> tuple[RCSnapshot, RCSpec]:
        """Return the snapshot and its spec. Raises `NoSuchRC`."""
        snap = await self.snapshot(rc_id)
        if snap.spec is None:
            raise NoSuchRC(f"rc {rc_id} has no spec; `rcfarm rc list` shows those that have")
        return snap, snap.spec

    async def snapshots(self) -> list[RCSnapshot]:
        """Return every RC folder, in order of id, each with its pods' health."""
        rcs, health = await asyncio.gather(
            self._store.list(self._keys.rcs, consistent=True), self._store.list(self._keys.healths, consistent=True)
        )
        return rc_snapshot.snapshots(self._keys, rcs.entries, health.entries)

    async def status(self, rc_id: str) -> RCStatus | None:
        """Return the status written by the owner, or None when there is none yet. Raises `NoSuchRC`."""
        return (await self.snapshot(rc_id)).status

    async def set_status(self, rc_id: str, status: RCStatus, *, expected_index: int | None = None) -> None:
        """Write the RC's status, for programs that replace an owner; a farm that owns the RC overwrites it.

        `expected_index`: write only at that version of the status; 0: only if there is none. Raises `NoSuchRC`,
        `ChangedSincePlanned`.
        """
        key, value = self._keys.status(rc_id), encode(status)
        write = ops.put(key, value) if expected_index is None else ops.cas(key, value, expected_index)
        await self._write_status(rc_id, write)

    async def delete_status(self, rc_id: str) -> None:
        """Remove the RC's status. Raises `NoSuchRC`."""
        await self._write_status(rc_id, ops.delete(self._keys.status(rc_id)))

    async def _write_status(self, rc_id: str, write: Op) -> None:
        try:
            await self._store.txn([ops.get(self._keys.spec(rc_id)), write])
        except TxnConflict as error:
            if any(failure.op_index == 0 for failure in error.failures):
                raise NoSuchRC(f"there is no rc {rc_id}; `rcfarm rc list` shows those that exist") from error
            raise ChangedSincePlanned(f"the status of rc {rc_id} was changed in the meantime; read it again") from error

    async def owner(self, rc_id: str) -> OwnerView:
        """Return the RC's owner, or its last one. Raises `NoSuchRC`."""
        return (await self.snapshot(rc_id)).owner

    async def pods(self, rc_id: str) -> list[PodView]:
        """Return the RC's pods with their health and what their agents report. Raises `NoSuchRC`."""
        snap = await self.snapshot(rc_id)
        return rc_snapshot.pods(snap, await self.realities(rc_snapshot.pod_id_of(snap)))

    async def realities(self, pod_id: str) -> dict[str, Reality]:
        """Return the agents' reports on pods with that id, of any RC, by node. Undecodable records are left out."""
        return rc_snapshot.realities(self._keys, await self._of_pod(self._keys.realities, pod_id))

    async def intents(self, pod_id: str) -> list[Entry]:
        """Return the intents of a pod id on all nodes, of any RC or task, undecoded."""
        return await self._of_pod(self._keys.intents, pod_id)

    async def _of_pod(self, prefix: str, pod_id: str) -> list[Entry]:
        names = [name for name in await self._store.keys(prefix) if self._keys.parse_pod(name).pod_id == pod_id]
        limit = asyncio.Semaphore(16)

        async def read(name: str) -> Entry | None:
            async with limit:
                return await self._store.get(name)

        return [entry for entry in await asyncio.gather(*map(read, names)) if entry]

    async def history(
        self, rc_id: str, *, last: int = 0, since: datetime | None = None, all_lives: bool = True
    ) -> list[AuditEvent]:
        """Return the audit events that name the RC, oldest first: the `last` ones (0: all) from `since` on.

        The log is read backwards, as far as needed; without `all_lives` no further than the RC's latest creation.
        """
        found: list[AuditEvent] = []
        pages = audit.pages(self._store, self._keys, since=since, rc=rc_id, newest_first=True)
        async with contextlib.aclosing(pages):
            async for page in pages:
                for _, event in page:
                    found.append(event)
                    is_first = event.event_type == "REPLICATION_CONTROLLER_CREATED" and not all_lives
                    if is_first or len(found) == last:
                        return found[::-1]
        return found[::-1]

    async def _unlocked(self, rc_id: str) -> list[Op]:
        """Return operations that fail if another client or a person holds the mutation lock at the commit. Raises
        `RCRefused` if one holds it already."""
        try:
            return await audit.unlocked(self._store, self._keys, rc_id, self._mutation_session)
        except audit.ChangeRefused as error:
            raise RCRefused(str(error)) from error

    def _store_manifest(self, sha256: str, raw: bytes) -> Op:
        """Return the write of the manifest, with random flags so that its index always rises.

        In Consul a write of equal contents keeps the index, and the collector of manifests must notice ours.
        """
        return ops.put(self._keys.manifest(sha256), raw, flags=self._rng.getrandbits(32))

    def _event(self, event: str, spec: RCSpec, details: dict[str, Any]) -> Op:
        return audit.event_op(
            self._keys, event, {"rc": spec.id, "generation": spec.generation, **details}, actor=self._actor
        )

    async def list(self) -> Listed:
        """Return every RC, and the undecodable records."""
        snaps = await self.snapshots()
        bad = [error for snap in snaps for key, error in snap.bad.items() if key.endswith("/spec")]
        return Listed([snap.spec for snap in snaps if snap.spec], bad)
