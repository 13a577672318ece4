"""One atomic snapshot of the tree, taken apart."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from store.kv.protocol import BadRecord, Entry
from store.schema.keys import BadKey, Keys
from store.schema.records import (
    ROLLOUT_STOPPED,
    Health,
    Intent,
    Labels,
    NodeSpec,
    Owner,
    RCSpec,
    RCStatus,
    Reality,
    Rollout,
    decode,
    decode_labels,
)

FOLDERS = ("rcs/", "intent/", "reality/", "nodes/", "farms/", "health/", "brake")

R = TypeVar("R", bound=msgspec.Struct)
Place = tuple[str, str]  # node, pod id


class Placement(NamedTuple):
    """`rcs/<shard>/<rc>/pods/<node>`."""

    entry: Entry
    labels: Labels


class Snapshot:
    """The tree at one moment. `malformed`: records that can't be read, which no program should have written."""

    def __init__(self, keys: Keys, entries: Iterable[Entry]) -> None:
        self.keys = keys
        self.entries = {entry.key: entry for entry in entries}
        self.malformed: list[str] = []
        self.specs: dict[str, RCSpec] = {}
        self.owners: dict[str, Owner] = {}
        self.statuses: dict[str, RCStatus] = {}
        self.rollouts: dict[str, Rollout] = {}
        self.placements: dict[tuple[str, str], Placement] = {}  # by RC and node
        self.intents: dict[Place, Intent] = {}
        self.realities: dict[Place, Reality] = {}
        self.nodes: dict[str, NodeSpec] = {}
        self.folders: set[str] = set()  # ids of RCs that have any key
        self.health_keys: set[str] = set()
        for entry in self.entries.values():
            try:
                self._read(entry)
            except (BadRecord, BadKey) as error:
                self.malformed.append(str(error))

    def entry(self, key: str) -> Entry | None:
        return self.entries.get(key)

    def session(self, key: str) -> str | None:
        """Return the session that holds a key, if there is one."""
        entry = self.entries.get(key)
        return entry.session if entry else None

    def waiting_rollouts(self) -> list[str]:
        """Return the RCs whose rollout operators have paused or stopped."""
        waiting = ROLLOUT_STOPPED | {"paused"}
        rollouts = [(self.specs.get(rc), rollout) for rc, rollout in self.rollouts.items()]
        return [spec.id for spec, rollout in rollouts if spec and rollout.is_of(spec) and rollout.state in waiting]

    def health(self, rc: str, node: str) -> Health | None:
        entry = self.entries.get(self.keys.health(rc, node))
        return decode(Health, entry.key, entry.value) if entry else None

    def _read(self, entry: Entry) -> None:
        folder, _, rest = entry.key.removeprefix(f"{self.keys.root}/").partition("/")
        if folder == "rcs":
            self._read_rc(entry)
        elif folder == "intent":
            self.intents[_place(rest)] = decode(Intent, entry.key, entry.value)
        elif folder == "reality":
            self.realities[_place(rest)] = decode(Reality, entry.key, entry.value)
        elif folder == "nodes" and rest.endswith("/spec"):
            self.nodes[rest.removesuffix("/spec")] = decode(NodeSpec, entry.key, entry.value)
        elif folder == "health":
            self.keys.parse_health(entry.key)
            self.health_keys.add(entry.key)

    def _read_rc(self, entry: Entry) -> None:
        key = self.keys.parse_rc(entry.key)
        self.folders.add(key.rc)
        if key.kind == "spec":
            self.specs[key.rc] = decode(RCSpec, entry.key, entry.value)
        elif key.kind == "owner":
            self.owners[key.rc] = decode(Owner, entry.key, entry.value)
        elif key.kind == "status":
            self.statuses[key.rc] = decode(RCStatus, entry.key, entry.value)
        elif key.kind == "rollout":
            self.rollouts[key.rc] = decode(Rollout, entry.key, entry.value)
        elif key.kind == "pods":
            self.placements[key.rc, key.node] = Placement(entry, decode_labels(entry.key, entry.value))
        elif key.kind == "health":
            self.health_keys.add(entry.key)


def reading(keys: Keys) -> list[dict[str, Any]]:
    """Return the operations of the transaction that reads a snapshot, as Consul's API takes them."""
    return [{"KV": {"Verb": "get-tree", "Key": f"{keys.root}/{folder}"}} for folder in FOLDERS]


def entries_of(answer: Mapping[str, Any]) -> list[Entry]:
    """Return the entries in the answer to a transaction of reads."""
    return [entry_of(result["KV"]) for result in answer["Results"] or ()]


def entry_of(answer: Mapping[str, Any]) -> Entry:
    """Return an entry of Consul's key/value API."""
    return Entry(
        key=answer["Key"],
        value=b64decode(answer["Value"] or ""),
        create_index=answer["CreateIndex"],
        modify_index=answer["ModifyIndex"],
        lock_index=answer["LockIndex"],
        flags=answer["Flags"],
        session=answer.get("Session"),
    )


def _place(rest: str) -> Place:
    node, _, pod_id = rest.partition("/")
    return node, pod_id
