"""One replication controller as the store shows it: all records of its folder, joined, read only.

`snapshot` is pure: it takes the entries of an RC's folder and of its pods' health, and separates what is live from
what is only history. A lock or a health record counts while its key carries a session; a record that can't be decoded
is kept in `bad` and hides no neighbour. What the agents report of processes lies in another tree (`reality/`) and is
joined by `pods`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from store.keys import BadKey, Keys
from store.kv import Entry
from store.records import (
    POD_ID_LABEL,
    BadRecord,
    Health,
    Labels,
    Mutation,
    Owner,
    RCSpec,
    RCStatus,
    Reality,
    decode,
    decode_labels,
)

R = TypeVar("R", bound=msgspec.Struct)


class OwnerView(NamedTuple):
    """Who holds the RC, or held it last. `session` None: nobody does now. `token` counts the acquisitions."""

    farm: str = ""
    since: str = ""
    session: str | None = None
    token: int = 0

    @property
    def held(self) -> bool:
        return self.session is not None


class RCSnapshot(NamedTuple):
    """An RC's folder. `health` holds live verdicts only; `mutation` is None unless somebody holds the mutation lock."""

    rc_id: str
    spec: RCSpec | None = None
    spec_index: int = 0
    status: RCStatus | None = None
    owner: OwnerView = OwnerView()
    mutation: Mutation | None = None
    mutation_index: int = 0
    pods: Mapping[str, Labels] = {}
    health: Mapping[str, Health] = {}
    bad: Mapping[str, BadRecord] = {}

    @property
    def healthy(self) -> int:
        """Placed pods that pass with the manifest that the RC desires now."""
        wanted = self.spec.manifest if self.spec else ""
        return sum(
            1
            for node, health in self.health.items()
            if node in self.pods and health.status == "passing" and health.manifest == wanted
        )

    @property
    def is_completed(self) -> bool:
        """Every placed pod passes because its processes have ended with success, for good."""
        verdicts = [self.health.get(node) for node in self.pods]
        return bool(verdicts) and all(verdict and verdict.condition == "completed" for verdict in verdicts)

    @property
    def healthy_outdated(self) -> int:
        """Placed pods that pass with another manifest than the desired one."""
        wanted = self.spec.manifest if self.spec else ""
        return sum(
            1
            for node, health in self.health.items()
            if node in self.pods and health.status == "passing" and health.manifest != wanted
        )


class PodView(NamedTuple):
    """One pod on one node: placed by the RC, still running there, or both.

    `health` None: no live verdict. `reality` None: the node's agent has not reported the pod.
    """

    node: str
    placed: bool
    labels: Labels
    health: Health | None
    reality: Reality | None


class _Reader:
    """Decodes the records of one folder and collects those that can't be."""

    def __init__(self) -> None:
        self.bad: dict[str, BadRecord] = {}

    def read(self, record_type: type[R], entry: Entry | None) -> R | None:
        if entry is None:
            return None
        try:
            return decode(record_type, entry.key, entry.value)
        except BadRecord as error:
            self.bad[entry.key] = error
            return None

    def labels(self, entry: Entry) -> Labels:
        try:
            return decode_labels(entry.key, entry.value)
        except BadRecord as error:
            self.bad[entry.key] = error
            return {}


def snapshot(keys: Keys, rc_id: str, entries: Iterable[Entry], health: Iterable[Entry] = ()) -> RCSnapshot:
    """Read the entries of one RC's folder. `health`: entries of its group under `health/`, also of other RCs."""
    folder = keys.rc(rc_id)
    by_name = {entry.key.removeprefix(folder): entry for entry in entries}
    reader = _Reader()
    spec, mutation = by_name.get("spec"), by_name.get("mutation")
    verdicts = [
        (name.removeprefix("health/"), entry.session, reader.read(Health, entry))
        for name, entry in by_name.items()
        if name.startswith("health/")  # written by an agent of layout 1
    ]
    verdicts += [
        (entry.key.split("/")[-2], entry.session, reader.read(Health, entry))
        for entry in health
        if entry.key.endswith(f"/{rc_id}")
    ]
    return RCSnapshot(
        rc_id=rc_id,
        spec=reader.read(RCSpec, spec),
        spec_index=spec.modify_index if spec else 0,
        status=reader.read(RCStatus, by_name.get("status")),
        owner=_owner(reader, by_name.get("owner")),
        mutation=_mutation(reader, mutation),
        mutation_index=mutation.modify_index if mutation else 0,
        pods={
            name.removeprefix("pods/"): reader.labels(entry)
            for name, entry in by_name.items()
            if name.startswith("pods/")
        },
        health={node: verdict for node, session, verdict in verdicts if session and verdict},
        bad=reader.bad,
    )


def _owner(reader: _Reader, entry: Entry | None) -> OwnerView:
    record = reader.read(Owner, entry)
    if entry is None:
        return OwnerView()
    farm, since = (record.farm, record.since) if record else ("", "")
    return OwnerView(farm, since, entry.session, entry.lock_index)


def _mutation(reader: _Reader, entry: Entry | None) -> Mutation | None:
    """Whoever holds the lock counts, even if what they wrote can't be read."""
    record = reader.read(Mutation, entry)
    if entry is None or entry.session is None:
        return None
    return record or Mutation(f"session {entry.session}", "", "")


def snapshots(keys: Keys, entries: Iterable[Entry], health: Iterable[Entry] = ()) -> list[RCSnapshot]:
    """Every RC folder of listings of `rcs/` and `health/`, in order of id. Keys of no RC are left out."""
    folders: dict[str, list[Entry]] = {}
    verdicts: dict[str, list[Entry]] = {}
    for entry in entries:
        with contextlib.suppress(BadKey):  # not ours to judge here: `rcfarm doctor` names them
            folders.setdefault(keys.classify(entry.key).rc, []).append(entry)
    for entry in health:
        with contextlib.suppress(BadKey):
            verdicts.setdefault(keys.classify_health(entry.key).rc, []).append(entry)
    return [snapshot(keys, rc_id, folders[rc_id], verdicts.get(rc_id, ())) for rc_id in sorted(folders)]


def pod_id_of(snap: RCSnapshot) -> str:
    """The RC's pod id, or "" when none of its records tells it."""
    for labels in ((snap.spec.rc_labels if snap.spec else {}), *snap.pods.values()):
        if POD_ID_LABEL in labels:
            return labels[POD_ID_LABEL]
    return ""


def realities(keys: Keys, entries: Iterable[Entry]) -> dict[str, Reality]:
    """Reports of agents on one pod id, by node; those that can't be read are left out."""
    reader = _Reader()
    found = {entry.key.removeprefix(keys.realities).partition("/")[0]: reader.read(Reality, entry) for entry in entries}
    return {node: reality for node, reality in found.items() if reality}


def pods(snap: RCSnapshot, realities: Mapping[str, Reality]) -> list[PodView]:
    """Placements joined with what the agents report, in order of node name. A pod that has been taken off its node but
    still runs there has `placed` False."""
    running = {node for node, reality in realities.items() if reality.rc == snap.rc_id}
    return [
        PodView(
            node=node,
            placed=node in snap.pods,
            labels=dict(snap.pods.get(node, {})),
            health=snap.health.get(node),
            reality=realities[node] if node in running else None,
        )
        for node in sorted(running | set(snap.pods))
    ]
