"""One timeline of the fleet: the audit log, and the last transitions of every pod.

Two sources are merged by time. The audit log has what operators and farms did: it is kept for as long as the farms'
settings say. What agents saw is in their reports (`store.schema.records.Transition`): a few transitions of each pod,
which go when the pod does.

Both are followed by watches. Of the audit log, only the part that is being written is watched: the keys of some minutes
have a prefix in common, so a watch does not read the whole day again after each event.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from heapq import merge
from typing import Any, Literal

import msgspec

from rcfarm.operations.fleet import listed
from store.kv.protocol import BadRecord, Store
from store.kv.view import Change, TreeView
from store.schema import audit
from store.schema.keys import Keys, PodKey
from store.schema.records import ALL_NODES, AuditEvent, Reality, Transition, decode
from store.timing import in_turns

BUCKET_CHARS = 6  # of a ULID: events of 17 minutes have them in common
BUCKET = timedelta(milliseconds=1 << 20)
OVERLAP = timedelta(seconds=60)  # for which clocks may differ: a bucket is watched so long before and after its time
SHOWN = 5  # names in a sentence


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened. `at`: RFC 3339 in UTC. `source`: who recorded it: an operator's command, a farm (or a
    task engine), or an agent. `type`: of the audit log, or POD_STARTED, POD_EXITED, POD_COMPLETED, POD_FAILED,
    POD_HEALTH. `rc`, `node`, `pod`: what it is about, "" where it is about none, or several. `details`: of the event in
    the audit log."""

    at: str
    source: Literal["operator", "farm", "agent"]
    actor: str
    type: str
    rc: str
    node: str
    pod: str
    text: str
    details: dict[str, Any] = {}


class Timeline:
    """Reads the events about one RC or one node, or all, from `since` on. `read` first, then `follow`, if wanted."""

    def __init__(self, store: Store, keys: Keys, *, since: datetime, rc: str = "", node: str = "") -> None:
        self._store, self._keys = store, keys
        self._since, self._rc, self._node = since, rc, node
        self._known: dict[str, tuple[Transition, ...]] = {}  # by pod, as last seen
        self._logged: set[str] = set()  # the newest keys of the audit log

    async def read(self) -> AsyncGenerator[list[FleetEvent]]:
        """Yield the events, oldest first, some thousand at a time: a log of any size can be read."""
        of_pods, recent = list[FleetEvent](), self._first_bucket()
        for prefix in self._reports():
            async for entry in in_turns((await self._store.list(prefix)).entries):
                of_pods += self._of_report(entry.key, entry.value)
        of_pods.sort(key=_at)
        async for page in audit.pages(self._store, self._keys, since=min(self._since, recent)):
            self._logged.update(key for key, event in page if _time(event.timestamp) >= recent)
            found = sorted([event for _, each in page if (event := self._of_audit(each))], key=_at)
            if found:
                earlier = bisect_right(of_pods, found[-1].at, key=_at)
                yield list(merge(found, of_pods[:earlier], key=_at))
                del of_pods[:earlier]
        yield of_pods

    async def follow(self, show: Callable[[FleetEvent], None]) -> None:
        """Show the events that come, until cancelled. Each ends a watch of the store: nothing is asked in intervals."""
        async with asyncio.TaskGroup() as tasks:
            for prefix in self._reports():
                tasks.create_task(self._watch_reports(prefix, show))
            start = self._first_bucket()
            while True:
                time = audit.ulid_time(start + BUCKET / 2)[:BUCKET_CHARS]
                for day in dict.fromkeys(at.date().isoformat() for at in (start, start + BUCKET)):
                    prefix = f"{self._keys.audit}{day}/{time}"
                    tasks.create_task(self._watch_bucket(prefix, start + BUCKET + OVERLAP, show))
                start += BUCKET
                await asyncio.sleep(max(0.0, (start - OVERLAP - datetime.now(UTC)).total_seconds()))

    def _first_bucket(self) -> datetime:
        """Return the beginning of the first part of the audit log into which events may still be written."""
        milliseconds = int((datetime.now(UTC) - OVERLAP).timestamp() * 1000)
        return datetime.fromtimestamp((milliseconds >> 20 << 20) / 1000, UTC)

    def _reports(self) -> list[str]:
        keys, node = self._keys, self._node
        return [keys.node_realities(node), keys.node_task_pods(node)] if node else [keys.realities, keys.task_pods]

    def _of_audit(self, event: AuditEvent) -> FleetEvent | None:
        found = from_audit(event)
        return found if self._concerns(found) else None

    def _of_report(self, key: str, value: bytes) -> Iterator[FleetEvent]:
        """Yield the transitions of a pod that were not yielded before."""
        try:
            reality = decode(Reality, key, value)
        except BadRecord:  # `rcfarm doctor` names it
            return
        known, self._known[key] = self._known.get(key, ()), reality.recent
        for transition in reality.recent:
            event = from_report(self._keys.parse_pod(key), reality, transition)
            if transition not in known and self._concerns(event):
                yield event

    def _concerns(self, event: FleetEvent) -> bool:
        if _time(event.at) < self._since.replace(microsecond=0):
            return False
        if self._rc and self._rc != event.rc and self._rc not in _names(event.details):
            return False
        return not self._node or self._node == event.node or self._node in _names(event.details)

    async def _watch_reports(self, prefix: str, show: Callable[[FleetEvent], None]) -> None:
        def note(changes: list[Change[bytes]]) -> None:
            found = list[FleetEvent]()
            for change in changes:
                if change.new is None:
                    self._known.pop(change.key, None)
                else:
                    found += self._of_report(change.key, change.new.value)
            for event in sorted(found, key=_at):
                show(event)

        view: TreeView[bytes] = TreeView(self._store, prefix, lambda _, value: value, on_change=note, whole=False)
        await view.run()

    async def _watch_bucket(self, prefix: str, end: datetime, show: Callable[[FleetEvent], None]) -> None:
        """Watch a part of the audit log while events may be written into it. Two parts are watched around the change
        from one to the next, because the writers' clocks differ."""

        def note(changes: list[Change[AuditEvent]]) -> None:
            for change in sorted(changes, key=lambda each: each.key):
                if change.new is not None and change.key not in self._logged:
                    self._logged.add(change.key)
                    if event := self._of_audit(change.new.value):
                        show(event)

        view: TreeView[AuditEvent] = TreeView(
            self._store, prefix, lambda key, value: decode(AuditEvent, key, value), on_change=note, whole=False
        )
        with suppress(TimeoutError):
            async with asyncio.timeout((end - datetime.now(UTC)).total_seconds()):
                await view.run()
        self._logged = {key for key in self._logged if not key.startswith(prefix)}


def _at(event: FleetEvent) -> str:
    return event.at


def from_report(place: PodKey, reality: Reality, transition: Transition) -> FleetEvent:
    """Return a pod's transition as an event."""
    of = f"{transition.of} " if transition.of else ""
    words = {"health": transition.text, "started": f"{of}started: {transition.text}"}
    text = words.get(transition.what, f"{of}{transition.text}")
    if transition.what in ("completed", "failed"):
        text += ", and is not restarted"
    return FleetEvent(
        at=transition.at,
        source="agent",
        actor=place.node,
        type=f"POD_{transition.what.upper()}",
        rc=reality.rc,
        node=place.node,
        pod=place.pod_id,
        text=text,
        details={"task": reality.task} if reality.task else {},
    )


def from_audit(event: AuditEvent) -> FleetEvent:
    """Return an event of the audit log. Any program may have written it: details of another form are shown as is."""
    details, kind = event.event_details, event.event_type
    is_person = isinstance(event.uid, int) or "@" in event.actor
    return FleetEvent(
        at=event.timestamp,
        source="operator" if is_person else "farm",
        actor=event.actor,
        type=kind,
        rc=_text(details, "rc"),
        node=_text(details, "node"),
        pod=_text(details, "pod"),
        text=_sentence(kind, details),
        details=details,
    )


_SENTENCES = {  # with the event's details in their places
    "BRAKE_ENGAGED": "brake engaged: {message}",
    "BRAKE_RELEASED": "brake released",
    "FARM_FORGOTTEN": "farm {farm} forgotten",
    "FARM_JOINED": "the farm works",
    "NODE_REMOVED": "forgotten",
    "NODE_UNCORDONED": "takes pods again",
    "NODE_TRANSFER_START": "a pod moves: {old_node} → {new_node}",
    "NODE_TRANSFER_COMPLETION": "a pod has moved: {old_node} → {new_node}",
    "NODE_TRANSFER_ROLLBACK": "a pod did not move: {old_node} → {new_node}",
    "POD_STOPPED": "processes stopped once, to be started again",
    "REPLICATION_CONTROLLER_DELETED": "deleted",
}
_SEVERAL = {  # the field with the names, and the sentence about one and about more
    "FARMS_LEFT": ("farms", "farm {names} left", "farms {names} left"),
    "FARMS_LOST": ("farms", "farm {names} lost its lease", "farms {names} lost their leases"),
    "NODES_BACK": ("nodes", "the agent of {names} is back", "{number} agents are back: {names}"),
    "NODES_DEAD": ("nodes", "the agent of {names} does not answer", "{number} agents do not answer: {names}"),
    "NODES_LOST": (
        "nodes",
        "{names} is lost: its pods may be moved",
        "{number} nodes are lost, and their pods may be moved: {names}",
    ),
    "RCS_CLAIMED": ("rcs", "took rc {names}", "took {number} rcs: {names}"),
    "RCS_RELEASED": ("rcs", "gave up rc {names}", "gave up {number} rcs: {names}"),
}
_LEFT_OUT = frozenset({"rc", "node", "pod", "token", "decision", "manifest", "digest"})


def _sentence(kind: str, details: Mapping[str, Any]) -> str:
    """Say what happened. What is not known here is named by its type and details."""
    try:
        if kind in _SENTENCES:
            return _SENTENCES[kind].format_map(details)
        if kind in _SEVERAL:
            field, one, more = _SEVERAL[kind]
            names, number = details[field], details["count"]
            shown = ", ".join(names[:SHOWN]) + (f" and {number - SHOWN} more" if number > SHOWN else "")
            return (one if number == 1 else more).format(names=shown, number=number)
        match kind:
            case "NODE_CORDONED":
                return "drained of its pods" if details["evict"] else "cordoned"
            case "REPLICATION_CONTROLLER_CHANGED" | "REPLICATION_CONTROLLER_SCALED":
                parts = [f"{key} {_value(pair[0])} → {_value(pair[1])}" for key, pair in details["changes"].items()]
                return "changed: " + ", ".join(parts) if parts else "changed"
            case "REPLICATION_CONTROLLER_REPAIR":
                if details.get("nodes"):
                    return f"manifest {_value(details['manifest'])} given to {_list(details['nodes'])}"
                return f"{details['intents']} intents repaired"
            case "REPLICATION_CONTROLLER_RETARGET":
                parts = [f"placed on {_list(details['added'])}"] if details.get("added") else []
                parts += [f"removed from {_list(details['removed'])}"] if details.get("removed") else []
                return ", ".join(parts) + (f" ({details['why']})" if details.get("why") else "")
            case "REPLICATION_CONTROLLER_ROLLOUT":
                state = str(details["state"]).replace("_", " ")
                why = f": {details['reason']}" if "reason" in details else ""
                return f"rollout of revision {details['revision']}: {state}{why}"
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        pass  # of another program, or of another version
    words = kind.removeprefix("REPLICATION_CONTROLLER_").lower().replace("_", " ")
    facts = [
        f"{key} {_value(value)}"
        for key, value in details.items()
        if key not in _LEFT_OUT and value not in ("", None, [], {})
    ]
    return f"{words}: {'; '.join(facts)}" if facts else words


def _text(details: Mapping[str, Any], name: str) -> str:
    value = details.get(name)
    return value if isinstance(value, str) else ""


def _names(value: Any) -> set[str]:
    """Return every text in the details of an event, at any depth."""
    if isinstance(value, str):
        return {value}
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return set()
    return set().union(*map(_names, value))


def _list(names: Iterable[str]) -> str:
    return listed(map(str, names), SHOWN)


def _value(value: Any) -> str:
    if value == ALL_NODES and not isinstance(value, bool):
        return "all"
    if isinstance(value, list):
        return _list(value)
    if isinstance(value, dict):
        return ",".join(f"{key}={_value(each)}" for key, each in value.items()) or "none"
    text = str(value).lower() if isinstance(value, bool) or value is None else str(value)
    return text[:12] if len(text) == 64 and text.isalnum() else text


def _time(text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
    return at if at.tzinfo else at.replace(tzinfo=UTC)
