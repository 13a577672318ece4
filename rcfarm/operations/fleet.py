"""The fleet at a glance, read from the store: farms, RCs, nodes, the brake, and the layout of its keys.

Everything is read once and joined; nothing is cached. The conclusions (which farm may claim an RC, the state of an RC
for an operator) are pure functions.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec

from rcfarm.operations.errors import BadInput
from rcfarm.operations.rc_snapshot import RCSnapshot, State, state_word
from store.kv import ops
from store.kv.protocol import BadRecord, Entry, Store, TxnConflict
from store.schema import audit
from store.schema.keys import LAYOUT, Keys, PodKey, is_dns_label
from store.schema.records import Brake, FarmMember, Intent, Labels, Meta, Reality, decode, encode, utc_now
from store.schema.selectors import BadSelector, Selector
from store.timing import in_turns

T = TypeVar("T")

Situation = State | Literal["unowned", "unreadable"]
MOST_OF_REASON = 500  # characters of the reason for the brake


class Farm(NamedTuple):
    """A farm's member record. `live`: it is a member now."""

    member: FarmMember
    live: bool

    def takes(self, rc_labels: Labels) -> bool:
        """Return whether this farm is live and may claim an RC with these labels."""
        try:
            return self.live and Selector.parse(self.member.selector).matches(rc_labels)
        except BadSelector:
            return False


class Farms(NamedTuple):
    """Farms in order of name, and the undecodable records."""

    farms: list[Farm]
    bad: list[BadRecord]


async def read_farms(store: Store, keys: Keys) -> Farms:
    """Return every farm with a member record, live or not."""
    farms: list[Farm] = []
    bad: list[BadRecord] = []
    for entry in (await store.list(keys.farms)).entries:
        try:
            farms.append(Farm(decode(FarmMember, entry.key, entry.value), entry.session is not None))
        except BadRecord as error:
            bad.append(error)
    return Farms(farms, bad)


async def forget_farm(store: Store, keys: Keys, farm: str, *, actor: str | audit.Actor) -> None:
    """Remove the member record of a farm that does not live. Raises `BadInput`."""
    entry = await store.get(keys.farm(farm), consistent=True) if is_dns_label(farm) else None
    if entry is None:
        raise BadInput(f"there is no farm {farm}; `rcfarm status` names those that are known")
    if entry.session:
        raise BadInput(f"farm {farm} is live; stop it first")
    event = audit.event_op(keys, "FARM_FORGOTTEN", {"farm": farm}, actor=actor)
    try:
        await store.txn([ops.delete_cas(entry.key, entry.modify_index), event])
    except TxnConflict:  # it has come back, or another client was faster
        await forget_farm(store, keys, farm, actor=actor)


async def read_brake(store: Store, keys: Keys) -> Brake | None:
    """Return the brake, if it is on. Raises `BadRecord`."""
    entry = await store.get(keys.brake, consistent=True)
    return decode(Brake, entry.key, entry.value) if entry else None


async def engage_brake(store: Store, keys: Keys, reason: str, *, actor: str | audit.Actor) -> Brake:
    """Have the farms remove and move nothing, for a reason that every reader of the brake is shown. Return the record.

    Raises `BadInput`, also when the brake is on already.
    """
    text = " ".join(reason.split())
    if not text or len(text) > MOST_OF_REASON:
        raise BadInput(f"--reason: write why, in at most {MOST_OF_REASON} characters; it has {len(text)}")
    by = actor.name if isinstance(actor, audit.Actor) else actor
    brake = Brake(farm="", since=utc_now(), code="engaged", message=text, by=by or "an operator")
    event = audit.event_op(keys, "BRAKE_ENGAGED", {"code": brake.code, "message": text}, actor=actor)
    try:
        await store.txn([ops.create(keys.brake, encode(brake)), event])
    except TxnConflict:
        present = await read_brake(store, keys)
        if present is None:  # released just now
            return await engage_brake(store, keys, reason, actor=actor)
        raise BadInput(
            f"the brake is on already since {present.since}: {present.words}; `rcfarm brake release` ends it"
        ) from None
    return brake


async def release_brake(store: Store, keys: Keys, *, actor: str | audit.Actor) -> bool:
    """Release the brake, whatever its record says. Return False when it was not on."""
    entry = await store.get(keys.brake, consistent=True)
    if entry is None:
        return False
    event = audit.event_op(keys, "BRAKE_RELEASED", {"brake": entry.value.decode(errors="replace")}, actor=actor)
    try:
        await store.txn([ops.delete_cas(keys.brake, entry.modify_index), event])
    except TxnConflict:  # released by another client, or engaged again for another reason: read again
        return await release_brake(store, keys, actor=actor)
    return True


class PodsWithoutRC(NamedTuple):
    """Pods that agents run for RCs that are not in the store. `rcs`: how many pods of each RC."""

    rcs: dict[str, int]

    def __str__(self) -> str:
        pods = sum(self.rcs.values())
        run = "pod runs" if pods == 1 else "pods run"
        return (
            f"{pods} {run} for RCs that are not in the store ({listed(sorted(self.rcs))}): was the tree deleted, or "
            "the store restored? Apply the RCs again: the pods are adopted as they are; until then none is stopped"
        )


def ids_with_spec(snaps: Iterable[RCSnapshot]) -> set[str]:
    """Return the RCs that have a spec, readable or not."""
    return {snap.rc_id for snap in snaps if snap.spec or any(key.endswith("/spec") for key in snap.bad)}


async def pods_without_rc(store: Store, keys: Keys, known: Container[str]) -> PodsWithoutRC:
    """Find the pods whose RC is not in the store. `known`: ids of RCs with a spec, from a listing made just before.

    Suspects are read a second time, so an RC created or deleted during these reads is not counted. While the brake is
    on, reality records count, too: if the root was deleted, the intents are gone, but agents keep their pods.
    """
    suspects = await _pods_of_others(store, keys, known)
    if suspects:
        specs = {keys.split_rc(key).rc for key in await store.keys(keys.rcs, consistent=True) if keys.is_spec(key)}
        later = await _pods_of_others(store, keys, specs)
        suspects = {rc_id: pods for rc_id, pods in later.items() if rc_id in suspects}
    return PodsWithoutRC(suspects)


async def _pods_of_others(store: Store, keys: Keys, known: Container[str]) -> dict[str, int]:
    listings: list[tuple[str, type[Intent | Reality]]] = [(keys.intents, Intent)]
    if await store.get(keys.brake, consistent=True) is not None:
        listings.append((keys.realities, Reality))
    rc_of: dict[PodKey, str] = {}
    for prefix, record_type in listings:
        for entry in (await store.list(prefix)).entries:
            with contextlib.suppress(BadRecord):  # `rcfarm doctor` names it
                rc_of.setdefault(keys.parse_pod(entry.key), decode(record_type, entry.key, entry.value).rc)
    return dict(sorted(Counter(rc_id for rc_id in rc_of.values() if rc_id and rc_id not in known).items()))


def situation_of(snap: RCSnapshot) -> Situation:
    """Return the state of an RC for an operator, in one word."""
    spec, status = snap.spec, snap.status
    if spec is None:
        return "unreadable"
    if not snap.owner.held:
        return "unowned"
    word = state_word(status) if status and status.generation >= spec.generation else "progressing"
    if word not in ("converged", "completed", "progressing"):
        return word
    if spec.deleting:
        return "deleting"
    if spec.disabled:
        return "disabled"
    if not snap.is_met:
        return "progressing"
    return "completed" if word == "converged" and snap.is_completed else word


def why_unowned(snap: RCSnapshot, farms: Sequence[Farm]) -> str:
    """Return why no farm owns the RC, and what to do."""
    labels = snap.spec.rc_labels if snap.spec else {}
    live = [farm for farm in farms if farm.live]
    takers = [farm.member.farm for farm in live if farm.takes(labels)]
    if takers:
        return f"no farm owns rc {snap.rc_id} yet; {listed(takers)} may claim it"
    if not live:
        return f"no live farm: rc {snap.rc_id} waits until one is started (`rcfarm farm`)"
    shown = ",".join(f"{key}={value}" for key, value in sorted(labels.items())) or "none"
    selectors = listed(f"{farm.member.farm} takes {farm.member.selector or 'everything'}" for farm in live)
    return f"no live farm matches the labels of rc {snap.rc_id} ({shown}): {selectors}"


def rarest(items: Sequence[T], kind: Callable[[T], Hashable], most: int) -> list[T]:
    """Return at most `most` of the items, in their order, one of each kind before a second one of any: a thousand RCs
    without a node do not hide the one that crashes."""
    seen, ranks = Counter[Hashable](), []
    for place, item in enumerate(items):
        is_second = seen[kind(item)] > 0
        seen[kind(item)] += 1
        ranks.append((is_second, place))
    return [items[place] for place in sorted(place for _, place in sorted(ranks)[:most])]


def listed(names: Iterable[str], shown: int = 3) -> str:
    """Return the names like `a, b, c and 4 more`."""
    every = list(names)
    more = f" and {len(every) - shown} more" if len(every) > shown else ""
    return ", ".join(every[:shown]) + more


class _Participant(msgspec.Struct, frozen=True):
    """The common field of a farm's member record and a node's `alive` key; programs of layout 1 omit it."""

    layout: int = 1


async def read_meta(store: Store, keys: Keys) -> Meta | None:
    """Return `<root>/meta`, or None in a store not used by rcfarm yet. Raises `BadInput` when its schema is newer."""
    entry = await store.get(keys.meta)
    if entry is None:
        return None
    meta = decode(Meta, entry.key, entry.value)
    if meta.schema > LAYOUT:
        raise BadInput(
            f"{entry.key}: the store is of schema {meta.schema}, this rcfarm knows up to {LAYOUT}; use a newer rcfarm"
        )
    return meta


async def ensure_meta(store: Store, keys: Keys) -> Keys:
    """Return the keys for the store's `meta`, which is created if absent. Raises `BadInput`."""
    meta = await read_meta(store, keys)
    if meta is None:
        fresh = Meta(schema=LAYOUT, shards=keys.shards)
        try:
            await store.txn([ops.create(keys.meta, encode(fresh))])
        except TxnConflict:  # another program was first: its record counts
            return await ensure_meta(store, keys)
        meta = fresh
    return Keys(keys.root, meta.shards)


async def of_a_former_layout(store: Store, keys: Keys) -> list[str]:
    """Return the live programs of a former layout, as `farm farm-a` or `the agent of node-1`, in order."""
    farms = (await store.list(keys.farms, consistent=True)).entries
    nodes = (await store.list(keys.nodes, consistent=True)).entries

    def is_former(entry: Entry) -> bool:
        try:
            return entry.session is not None and decode(_Participant, entry.key, entry.value).layout < LAYOUT
        except BadRecord:
            return True  # the layout of its author is unknown

    former = [f"farm {keys.name_of(entry.key)}" for entry in farms if is_former(entry)]
    former += [
        f"the agent of {keys.parse_node(entry.key).node}"
        async for entry in in_turns(nodes)
        if keys.parse_node(entry.key).leaf == "alive" and is_former(entry)
    ]
    return former
