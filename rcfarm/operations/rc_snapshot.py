"""One replication controller in the store: all records of its folder, joined, read only.

`snapshot` is pure: it takes the entries of an RC's folder and of its pods' health, and separates live records from
history. A lock or a health record counts while its key carries a session; an undecodable record is kept in `bad` and
does not affect others. The agents' reports on processes lie in another tree (`reality/`) and are joined by `pods`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec

from store.kv.protocol import BadRecord, Entry
from store.schema.keys import BadKey, Keys
from store.schema.records import (
    POD_ID_LABEL,
    Handover,
    Health,
    Labels,
    Mutation,
    Owner,
    PersonsLock,
    RCSpec,
    RCState,
    RCStatus,
    Reality,
    Reason,
    Revision,
    Rollout,
    RolloutRequest,
    decode,
    decode_labels,
    effective_manifest,
)

SHOWN_OF_CAUSE = 200  # characters of a cause

UNHEALTHY = frozenset({"crashing", "blocked", "disk_full", "unhealthy", "node_dead"})
TROUBLE = UNHEALTHY | {"failed", "restarted"}  # shown to operators in every state of the RC
STOPPED_ROLLOUT = frozenset({"rollout_reverting", "rollout_reverted", "rollout_failed", "rollout_stuck"})

Refinement = Literal["unhealthy", "failed", "completed", "paused", "reverting", "reverted"]
State = RCState | Refinement

_ROLLOUTS: dict[str, State] = {  # by the code of the reason that its owner gives
    "rollout_paused": "paused",
    "awaiting_promotion": "paused",
    "analysis_no_data": "paused",
    "analysis_error": "paused",
    "rollout_reverting": "reverting",
    "rollout_reverted": "reverted",
    "rollout_aborted": "reverted",
    "rollout_failed": "unhealthy",
}
ROLLOUT_CODES = frozenset({*_ROLLOUTS, "rollout_in_progress", "rollout_stuck"})

R = TypeVar("R", bound=msgspec.Struct)


class OwnerView(NamedTuple):
    """The RC's owner, or its last one. `session` None: it has no owner now. `token` counts the acquisitions."""

    farm: str = ""
    since: str = ""
    session: str | None = None
    token: int = 0

    @property
    def held(self) -> bool:
        return self.session is not None


class RCSnapshot(NamedTuple):
    """An RC's folder. `health` holds live verdicts only. `mutation` is None unless a client holds the mutation lock;
    `lock` is None unless a person has locked the RC."""

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
    rollout: Rollout | None = None
    rollout_index: int = 0
    request: RolloutRequest | None = None
    revisions: Sequence[Revision] = ()
    handover: Handover | None = None
    lock: PersonsLock | None = None

    @property
    def wanted(self) -> str:
        """The manifest that the pods should run: the spec's, or the one that its rollout goes back to."""
        return effective_manifest(self.spec, self.rollout) if self.spec else ""

    @property
    def desired(self) -> int:
        """How many pods are wanted; for a daemon set as far as its owner has said it."""
        if self.spec is None or not self.spec.is_daemon_set:
            return self.spec.replicas_desired if self.spec else 0
        return self.status.desired if self.status else 0

    @property
    def is_met(self) -> bool:
        """Return whether every wanted pod is placed and healthy; for a daemon set, all but those on dead nodes."""
        if self.spec is not None and self.spec.is_daemon_set and self.status is not None:
            return self.status.state == "converged" and self.status.desired == len(self.pods)
        return len(self.pods) == self.desired == self.healthy

    @property
    def present_rollout(self) -> Rollout | None:
        """The rollout of what the spec asks for now; None where that had none, or where its owner has not begun it."""
        return self.rollout if self.rollout and self.spec and self.rollout.is_of(self.spec) else None

    @property
    def healthy(self) -> int:
        """Placed pods that pass with the manifest that they should run."""
        wanted = self.wanted
        return sum(
            1
            for node, health in self.health.items()
            if node in self.pods and health.status == "passing" and health.manifest == wanted
        )

    @property
    def is_completed(self) -> bool:
        """Return whether every placed pod passes because its processes have completed."""
        verdicts = [self.health.get(node) for node in self.pods]
        return bool(verdicts) and all(verdict and verdict.condition == "completed" for verdict in verdicts)

    @property
    def healthy_outdated(self) -> int:
        """Placed pods that pass with another manifest than the one that they should run."""
        wanted = self.wanted
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
    """Decodes the records of one folder and collects the undecodable ones."""

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
    placed = ((keys.split_health(entry.key), entry) for entry in health)
    return _joined(rc_id, by_name, [(place.node, entry) for place, entry in placed if place.rc == rc_id])


def _joined(rc_id: str, by_name: Mapping[str, Entry], health: Iterable[tuple[str, Entry]]) -> RCSnapshot:
    """Return the snapshot. `by_name`: the entries of the folder, by the rest of the key; `health`: those of its pods,
    each with the node."""
    reader = _Reader()
    spec, mutation, rollout = by_name.get("spec"), by_name.get("mutation"), by_name.get("rollout")
    verdicts = [
        (name.removeprefix("health/"), entry.session, reader.read(Health, entry))
        for name, entry in by_name.items()
        if name.startswith("health/")  # written by an agent of layout 1
    ]
    verdicts += [(node, entry.session, reader.read(Health, entry)) for node, entry in health]
    locked = reader.read(PersonsLock, by_name.get("lock"))
    if locked is None and "lock" in by_name:  # its record is undecodable, but it refuses edits
        locked = PersonsLock("a person whose record can't be read", "", "")
    desired, status = reader.read(RCSpec, spec), reader.read(RCStatus, by_name.get("status"))
    owner = OwnerView()
    if entry := by_name.get("owner"):
        record = reader.read(Owner, entry)
        farm, since = (record.farm, record.since) if record else ("", "")
        owner = OwnerView(farm, since, entry.session, entry.lock_index)
    holder = reader.read(Mutation, mutation)
    if mutation is None or mutation.session is None:
        holder = None
    elif holder is None:  # its record is undecodable, but the lock is held
        holder = Mutation(f"session {mutation.session}", "", "")
    return RCSnapshot(
        rc_id=rc_id,
        spec=desired,
        spec_index=spec.modify_index if spec else 0,
        status=status,
        owner=owner,
        mutation=holder,
        mutation_index=mutation.modify_index if mutation else 0,
        pods={
            name.removeprefix("pods/"): reader.labels(entry)
            for name, entry in by_name.items()
            if name.startswith("pods/")
        },
        health={node: verdict for node, session, verdict in verdicts if session and verdict},
        rollout=reader.read(Rollout, rollout),
        rollout_index=rollout.modify_index if rollout else 0,
        request=reader.read(RolloutRequest, by_name.get("rollout-request")),
        handover=reader.read(Handover, by_name.get("handover")),
        lock=locked,
        revisions=tuple(
            revision
            for name, entry in by_name.items()
            if name.startswith("revisions/") and (revision := reader.read(Revision, entry))
        ),
        bad=reader.bad,
    )


def snapshots(keys: Keys, entries: Iterable[Entry], health: Iterable[Entry] = ()) -> list[RCSnapshot]:
    """Return every RC folder of listings of `rcs/` and `health/`, in order of id. Keys of no RC are left out."""
    folders: dict[str, dict[str, Entry]] = {}
    verdicts: dict[str, list[tuple[str, Entry]]] = {}
    for entry in entries:
        with contextlib.suppress(BadKey):  # `rcfarm doctor` reports them
            place = keys.parse_rc(entry.key)
            name = f"{place.kind}/{place.node}" if place.node else place.kind
            folders.setdefault(place.rc, {})[name] = entry
    for entry in health:
        with contextlib.suppress(BadKey):
            node, rc_id = keys.parse_health(entry.key)
            verdicts.setdefault(rc_id, []).append((node, entry))
    return [_joined(rc_id, folders[rc_id], verdicts.get(rc_id, ())) for rc_id in sorted(folders)]


def pod_id_of(snap: RCSnapshot) -> str:
    """Return the RC's pod id, or "" when none of its records has it."""
    for labels in ((snap.spec.rc_labels if snap.spec else {}), *snap.pods.values()):
        if POD_ID_LABEL in labels:
            return labels[POD_ID_LABEL]
    return ""


def realities(keys: Keys, entries: Iterable[Entry]) -> dict[str, Reality]:
    """Return the agents' reports on one pod id, by node; undecodable ones are left out."""
    reader = _Reader()
    found = {keys.parse_pod(entry.key).node: reader.read(Reality, entry) for entry in entries}
    return {node: reality for node, reality in found.items() if reality}


def pods(snap: RCSnapshot, realities: Mapping[str, Reality]) -> list[PodView]:
    """Return the placements joined with the agents' reports, in order of node name. A pod without a placement that
    still runs has `placed` False."""
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


def state_word(status: RCStatus) -> State:
    """Return the status's state, refined: what its rollout has come to, unhealthy or failed while it progresses,
    completed when converged."""
    if status.state == "converged" and 0 < status.placed == status.completed:
        return "completed"
    return word_of(status.state, status.reasons)


def word_of(state: RCState, reasons: Iterable[Reason]) -> State:
    """Return the state, refined by the owner's reasons."""
    codes = {reason.code for reason in reasons}
    if state not in ("converged", "progressing"):
        return state
    if rolled := next((word for code, word in _ROLLOUTS.items() if code in codes), None):
        return rolled
    if state == "progressing" and "failed" in codes:
        return "failed"
    return "unhealthy" if state == "progressing" and codes & UNHEALTHY else state


def describe(verdict: Health) -> str:
    """Return why the pod does not pass, in one line."""
    if not verdict.condition or not verdict.cause:
        output = " ".join(verdict.output.split())[:SHOWN_OF_CAUSE]
        return f"{verdict.status}: {output}" if output else verdict.status
    count = verdict.restarts
    restarts = f" ({'at least ' if count > 1 else ''}{count} restart{'s' if count > 1 else ''})" if count else ""
    return " ".join(verdict.cause.split())[:SHOWN_OF_CAUSE] + restarts
