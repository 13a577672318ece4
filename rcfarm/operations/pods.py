"""The pods of the fleet: intents, agents' reports and health, joined; and stopping one, once.

A stop is a request in the pod's intent. The agent obeys each request once: it stops the processes, as the manifest
says, and starts them again, because the desired state is unchanged. Nothing else of the intent changes, so the owner of
the RC has nothing to repair.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from rcfarm.operations.rc_snapshot import PodView
from store.errors import RcfarmError
from store.kv import ops
from store.kv.protocol import BadRecord, Entry, Store
from store.schema import audit
from store.schema.keys import Keys, PodKey, is_dns_label, is_node_name
from store.schema.records import Health, Intent, NodeAlive, Reality, decode, encode

R = TypeVar("R", bound=msgspec.Struct)


class PodError(RcfarmError):
    """An operation on a pod failed; nothing was written."""


class PodOfFleet(NamedTuple):
    """One pod on one node. `intent` None: it is not wanted there any more, or its intent can't be read.

    `view` joins what is known of it. `rc`: "" for a pod of a task. `task`: its execution, "" for a pod of an RC.
    """

    place: PodKey
    intent: Intent | None
    view: PodView
    rc: str
    task: str


class Pods:
    """Reads pods, and stops them. `actor`: named in the audit log. The store's errors pass through."""

    def __init__(
        self, store: Store, keys: Keys, *, actor: str | audit.Actor = "", rng: random.Random | None = None
    ) -> None:
        self._store, self._keys, self._actor = store, keys, actor
        self._rng = rng or random.Random()

    async def all(self, node: str = "") -> list[PodOfFleet]:
        """Return the pods, of one node or of all, in order of node and id. Undecodable records are left out."""
        keys = self._keys
        intents = await self._read(Intent, [keys.node_intents(node) if node else keys.intents])
        folders = [keys.node_realities(node), keys.node_task_pods(node)] if node else [keys.realities, keys.task_pods]
        realities = await self._read(Reality, folders)
        health: dict[tuple[str, str], Health] = {}
        for prefix in keys.node_healths(node) if node else [keys.healths]:
            for entry in (await self._store.list(prefix)).entries:
                if entry.session and (verdict := _decoded(Health, entry)):
                    place = keys.split_health(entry.key)
                    health[place.node, place.rc] = verdict
        return joined(intents, realities, health)

    async def with_pid(self, pid: int, nodes: Iterable[str]) -> PodOfFleet | None:
        """Return the pod on these nodes of which a process was started with this id, as their agents report."""
        for node in nodes:
            for pod in await self.all(node):
                processes = pod.view.reality.launchables.values() if pod.view.reality else ()
                if any(process.pid == pid for process in processes):
                    return pod
        return None

    async def stop(self, place: PodKey) -> Reality:
        """Have the agent stop the pod's processes once, and start them again. Return its last report before that.

        Raises `PodError`: there is no such pod, it belongs to a task, nothing of it runs, or its agent does not answer.
        """

        async def attempt() -> Reality:
            keys, name = self._keys, f"{place.node}/{place.pod_id}"
            is_name = is_node_name(place.node) and is_dns_label(place.pod_id)
            entry = await self._store.get(keys.intent(*place), consistent=True) if is_name else None
            if entry is None:
                raise PodError(f"there is no pod {name}; `rcfarm pod list` shows those that exist")
            intent = decode(Intent, entry.key, entry.value)
            if intent.task:
                raise PodError(f"pod {name} belongs to task {intent.task}; `rcfarm task abort {intent.task}` ends it")
            alive = await self._store.get(keys.node_alive(place.node), consistent=True)
            if alive is None or not alive.session:
                raise PodError(f"pod {name}: the agent of {place.node} does not answer; start it (`rcfarm agent`)")
            found = await self._store.get(keys.reality(*place), consistent=True)
            reality = decode(Reality, found.key, found.value) if found else None
            if reality is None or not any(process.pid for process in reality.launchables.values()):
                raise PodError(f"pod {name}: no process of it runs; `rcfarm rc status {intent.rc}` says why")
            request = audit.new_ulid()
            details = {"rc": intent.rc, "node": place.node, "pod": place.pod_id, "restart": request}
            wanted = encode(msgspec.structs.replace(intent, restart=request))
            await self._store.txn(
                [
                    ops.check_session(keys.node_alive(place.node), alive.session),
                    ops.cas(entry.key, wanted, entry.modify_index),
                    audit.event_op(keys, "POD_STOPPED", details, actor=self._actor),
                ]
            )
            return reality

        return await ops.retry_conflicts(f"pod {place.node}/{place.pod_id}", attempt, rng=self._rng, error=PodError)

    async def agents(self) -> dict[str, NodeAlive]:
        """Return the live agents, by node."""
        found = {}
        for entry in (await self._store.list(self._keys.nodes)).entries:
            place = self._keys.parse_node(entry.key)
            if place.leaf == "alive" and entry.session and (alive := _decoded(NodeAlive, entry)):
                found[place.node] = alive
        return found

    async def _read(self, record_type: type[R], prefixes: Iterable[str]) -> dict[PodKey, R]:
        found = {}
        for prefix in prefixes:
            for entry in (await self._store.list(prefix)).entries:
                if (record := _decoded(record_type, entry)) is not None:
                    found[self._keys.parse_pod(entry.key)] = record
        return found


def joined(
    intents: Mapping[PodKey, Intent], realities: Mapping[PodKey, Reality], health: Mapping[tuple[str, str], Health]
) -> list[PodOfFleet]:
    """Join the records of pods. `health`: the live verdicts, by node and RC."""
    found = []
    for place in sorted({*intents, *realities}):
        intent, reality = intents.get(place), realities.get(place)
        known = intent or reality
        rc, task = (known.rc, known.task) if known else ("", "")
        labels = dict(intent.labels) if intent else {}
        view = PodView(place.node, intent is not None, labels, health.get((place.node, rc)), reality)
        found.append(PodOfFleet(place, intent, view, rc, task))
    return found


def _decoded(record_type: type[R], entry: Entry) -> R | None:
    try:
        return decode(record_type, entry.key, entry.value)
    except BadRecord:  # `rcfarm doctor` names it
        return None
