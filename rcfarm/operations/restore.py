"""Restore a deleted RC: `rcfarm rc restore`.

The model: the owner that removes an RC keeps its spec, and the digest of its manifest, in `deleted/<rc>`, in the very
transaction that removes it. The record protects the manifest from the collector. The farms remove it after a set time
(`rcfarm.farm.housekeeping.DeletedRetention`). Restoring is one transaction, too: it creates the spec if there is none,
writes the manifest again, and removes exactly the record that was read.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from rcfarm.operations.errors import ChangedSincePlanned, NoSuchRC, RCExists
from rcfarm.operations.rcs import ReplicationControllers
from store.kv import ops
from store.kv.protocol import BadRecord, Store
from store.schema.keys import Keys, is_dns_label
from store.schema.records import DeletedRC, RCSpec, decode


class Deleted(NamedTuple):
    """The deleted RCs that can be restored, the latest deletion first, and the records that can't be read."""

    records: list[DeletedRC]
    bad: list[BadRecord]


async def deleted_rcs(store: Store, keys: Keys) -> Deleted:
    """Return the deleted RCs that are kept."""
    found, bad = list[DeletedRC](), list[BadRecord]()
    for entry in (await store.list(keys.deleted, consistent=True)).entries:
        try:
            found.append(decode(DeletedRC, entry.key, entry.value))
        except BadRecord as error:
            bad.append(error)
    return Deleted(sorted(found, key=lambda each: (each.deleted_at, each.spec.id), reverse=True), bad)


async def restore(store: Store, keys: Keys, rcs: ReplicationControllers, rc_id: str) -> tuple[RCSpec, str]:
    """Create the RC again as it was when it was deleted, at its first revision. Return its spec, and the manifest that
    it asked for if that is another one, because its rollout was not done; else "".

    Raises `RCExists`, `NoSuchRC` where nothing of it is kept, `BadRecord`, and `ChangedSincePlanned` when its record
    was replaced or removed since it was read.
    """
    standing = await store.get(keys.spec(rc_id), consistent=True) if is_dns_label(rc_id) else None
    if standing is not None:
        raise RCExists(
            f"rc {rc_id} exists, so there is nothing to restore; `rcfarm rc status {rc_id}` shows it, also while it is "
            "being deleted"
        )
    entry = await store.get(keys.deleted_rc(rc_id), consistent=True) if is_dns_label(rc_id) else None
    if entry is None:
        raise NoSuchRC(f"no deleted rc {rc_id} is kept; `rcfarm rc restore --list` shows those that can be restored")
    record = decode(DeletedRC, entry.key, entry.value)
    raw = await rcs.manifest(record.manifest)
    spec = msgspec.structs.replace(record.spec, manifest=record.manifest, deleting=False, generation=1)
    try:
        created = await rcs.create_from(
            spec,
            raw,
            event="REPLICATION_CONTROLLER_RESTORED",
            others=[ops.delete_cas(entry.key, entry.modify_index)],
        )
    except RCExists as error:
        raise ChangedSincePlanned(
            f"rc {rc_id} was restored, created or deleted again by another client; `rcfarm rc status {rc_id}` shows it"
        ) from error
    return created, record.spec.manifest if record.spec.manifest != record.manifest else ""
