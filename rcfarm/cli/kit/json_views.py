"""The output of `--output json`. The fields are a contract: some may be added, none are renamed or removed.

Times are RFC 3339 in UTC, or "" when there is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from rcfarm.cli.kit.output import ago, count, distinct, memory, placed
from rcfarm.operations.drains import Departure
from rcfarm.operations.fleet import Farm, Situation, situation_of, why_unowned
from rcfarm.operations.nodes import NodeView
from rcfarm.operations.rc_snapshot import PodView, RCSnapshot, pod_id_of
from rcfarm.operations.tasks import Engine, described, states_of
from store.schema.records import Brake, Capacity, Enforcement, Labels, Process, Reason, Rollout
from store.schema.tasks import TaskFailure

if TYPE_CHECKING:
    from rcfarm.operations.schedules import ScheduleView


class OwnerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`held` false: `farm` was the last owner. `token` counts the acquisitions (the fencing token)."""

    farm: str
    held: bool
    since: str
    token: int


class LockedInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The lock of a person on an RC."""

    holder: str
    reason: str
    since: str


class RCInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One replication controller.

    `state`: converged, completed (every process has ended successfully and is not restarted), progressing, unhealthy
    (pods crash, do not pass, or can't start), failed (processes have failed and are not restarted), short, held,
    quarantined, disabled, deleting, unowned or unreadable; or what its rollout has come to: paused (also before
    promotion), reverting, reverted. `placed` and `healthy` count pods; `healthy_outdated` counts pods that pass with
    another manifest than the desired one. A `daemon_set` has a pod on each node that matches. `reasons` says why
    something is not done; `observed_generation` is the generation that the owner has acted on.
    """

    id: str
    pod_id: str
    state: Situation
    replicas_desired: int
    placed: int
    healthy: int
    node_selector: str = ""
    allocation_strategy: str = "static"
    max_unavailable: int = 1
    disabled: bool = False
    deleting: bool = False
    generation: int = 0
    observed_generation: int = 0
    manifest: str = ""
    pod_labels: Labels = {}
    rc_labels: Labels = {}
    owner: OwnerInfo | None = None
    mutation_holder: str = ""
    reasons: list[Reason] = []
    updated_at: str = ""
    healthy_outdated: int = 0
    revision: int = 1
    rollout: Rollout | None = None
    daemon_set: bool = False
    tolerate_drain: bool = False
    lock: LockedInfo | None = None

    @property
    def counts(self) -> str:
        """Return `3 of 3 placed, 0 healthy`, and how many pass with an older manifest."""
        if self.state == "unreadable":
            return f"{self.placed} placed; the desired number can't be read"
        outdated = f", {self.healthy_outdated} healthy with an older manifest" if self.healthy_outdated else ""
        return f"{placed(self.placed, self.replicas_desired)}, {self.healthy} healthy{outdated}"


class PodInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One pod on one node.

    `state`: what the node's agent reports (running, installing, starting, crashing, stopping, failed, completed), or
    "waiting" if it has not reported. `placed` false: the pod is leaving the node. `health`: "unknown" without a live
    verdict. `condition`, `cause`: further fields of the health record; `restarts`: the sum over the pod's processes.
    """

    node: str
    placed: bool
    state: str
    health: str
    health_output: str = ""
    health_since: str = ""
    manifest: str = ""
    reason: str = ""
    address: str = ""
    ports: dict[str, int] = {}
    launchables: dict[str, Process] = {}
    condition: str = ""
    cause: str = ""
    restarts: int = 0

    def last_words(self) -> list[tuple[str, str, str]]:
        """Return the last lines of each process that has failed: its name, the lines, and the file of all of them."""
        if self.condition not in ("crashing", "failed"):
            return []
        found = sorted(self.launchables.items())
        return [(name, process.output, process.log) for name, process in found if process.output and process.log]

    def details(self, dead: Container[str] = ()) -> list[str]:
        """Return details of the pod beyond its states, without repetition. `dead`: nodes without a live agent."""
        has_ended, end = self.condition in ("crashing", "failed"), ""
        exits = [(last.at, name, last) for name, process in self.launchables.items() if (last := process.last_exit)]
        if exits and (self.restarts or has_ended):
            at, name, last = max(exits, key=lambda each: each[0])
            restarts = f"{count(self.restarts, 'restart')}, " if self.restarts else ""
            end = f"{restarts}{name} {last.words} {ago(at)}"
        return distinct(
            [
                "its agent does not answer" if self.node in dead else "",
                "" if self.placed else "leaving",
                end,
                "" if end and (has_ended or self.condition == "restarted") else self.cause,
                *([] if has_ended else [self.reason, *(process.reason for process in self.launchables.values())]),
                "" if has_ended or self.health == "passing" else " ".join(self.health_output.split()),
            ]
        )

    def used(self) -> str:
        """Return what the pod's processes used when that was last reported: `84 MiB of 512 MiB, 0.03 CPUs, 12 pids`."""
        known = [process.usage for process in self.launchables.values() if process.usage]
        if not known or len(known) < len(self.launchables):
            return ""
        limits = [usage.memory_limit for usage in known]
        limit = f" of {memory(sum(limits))}" if all(limits) else ""
        kills = sum(usage.oom_kills for usage in known)
        return ", ".join(
            [
                f"{memory(sum(usage.memory for usage in known))}{limit}",
                f"{sum(usage.cpu for usage in known) / 1000:.2f} CPUs",
                count(sum(usage.pids for usage in known), "pid"),
                *([count(kills, "OOM kill")] if kills else []),
            ]
        )


def unanswered(reasons: Iterable[Reason]) -> set[str]:
    """Return the nodes of the RC's pods whose agents do not answer, according to the RC's status."""
    return {node for reason in reasons if reason.code == "node_dead" for node in reason.nodes}


class ListedPod(PodInfo, frozen=True, kw_only=True):
    """One pod of the fleet. It belongs to the RC `rc`, or to the execution `task` of a task."""

    pod_id: str
    rc: str
    task: str
    labels: Labels


class RCStatusInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An RC and its pods."""

    rc: RCInfo
    pods: list[PodInfo]


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One node. `live`: its agent answers. `evict`: its pods should be moved elsewhere.

    `problems`: records of the node that can't be read; the other fields then come from the readable records. `limits`:
    how its agent holds pods to their limits; null if it has not said so.
    """

    name: str
    live: bool
    schedulable: bool
    evict: bool
    pods: int
    labels: Labels
    capacity: Capacity
    agent: str = ""
    agent_since: str = ""
    address: str = ""
    version: str = ""
    problems: list[str] = []
    limits: Enforcement | None = None


class DrainInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to the pods of nodes that are emptied. `complete`: whether nothing that should leave is there any
    more; null if the command did not wait. `pods`: those that are left, or, if it did not wait, all. `reasons`: why
    the drain is not complete."""

    nodes: list[NodeInfo]
    pods: list[Departure]
    complete: bool | None = None
    reasons: list[str] = []


class NodeRemoval(msgspec.Struct, frozen=True, kw_only=True):
    """A node that was forgotten. `released`: the pods that were given up, as `POD (rc RC)`."""

    node: str
    released: list[str]


class FarmInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One farm. `owned`: RCs that it holds."""

    name: str
    live: bool
    selector: str
    owned: int
    since: str = ""
    address: str = ""
    version: str = ""


class ForgottenFarm(msgspec.Struct, frozen=True, kw_only=True):
    """A farm whose record was removed."""

    farm: str


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One task engine, as it reports itself. `owned`: executions that it holds; `undelivered`: those with events that a
    sink has not taken. `paused`: what it does not call for now, and why."""

    name: str
    live: bool
    selector: str
    owned: int = 0
    undelivered: int = 0
    paused: list[str] = []
    since: str = ""
    version: str = ""


class NodeTrouble(msgspec.Struct, frozen=True, kw_only=True):
    """A node that is dead, or that can't start pods."""

    name: str
    reasons: list[Reason]


class TasksInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the live engines have in hand, a few seconds ago: how many executions are in each state, and how many wait
    for a reason of each code. Those that no engine owns, or that have ended, are not counted. `failures`: the newest
    that failed or timed out since their engine started, the newest first."""

    engines: list[EngineInfo]
    by_state: dict[str, int]
    waits: dict[str, int]
    schedules: int
    schedules_paused: int
    failures: list[TaskFailure] = []


class FleetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The whole fleet. `rcs_by_state` counts RCs; `troubled` and `troubled_nodes` list what needs attention.

    `pods_without_rc`: the number of pods that run for each RC that is not in the store. `tasks`: null where there are
    neither engines nor schedules.
    """

    rcs: int
    rcs_by_state: dict[str, int]
    pods_desired: int
    pods_placed: int
    pods_healthy: int
    farms: list[FarmInfo]
    nodes: int
    nodes_live: int
    nodes_cordoned: int
    troubled: list[RCInfo]
    unreadable: list[str]
    pods_without_rc: dict[str, int] = {}
    brake: Brake | None = None
    tasks: TasksInfo | None = None
    troubled_nodes: list[NodeTrouble] = []


class BrakeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The brake's state; `brake` says why it is on."""

    on: bool
    brake: Brake | None


class ReleaseInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`released` false: the brake was not on."""

    released: bool


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a change to an RC. `action`: created, changed, unchanged, replaced (the record could not be
    read), scaled, restarted, restored, enabled, disabled, deleted; of several RCs also failed, and not tried.

    `rc`: the RC afterwards, null if nothing is left of it. `complete`: null if the command did not wait. `reasons`:
    why the change is not complete; of a deletion that is, what could not be checked. `error`: why it failed.
    """

    id: str
    action: str
    rc: RCInfo | None
    complete: bool | None = None
    reasons: list[str] = []
    error: str = ""


def rc_info(snap: RCSnapshot, farms: Sequence[Farm] = ()) -> RCInfo:
    """Return the RC as shown in JSON. With `farms`, an unowned RC gets a reason."""
    spec, status = snap.spec, snap.status
    situation = situation_of(snap)
    if spec is None:
        reasons = [Reason("unreadable", str(error)) for error in snap.bad.values()]
        return RCInfo(
            id=snap.rc_id,
            pod_id=pod_id_of(snap),
            state=situation,
            replicas_desired=0,
            placed=len(snap.pods),
            healthy=0,
            owner=owner_info(snap),
            reasons=reasons,
        )
    reasons = list(status.reasons) if status and situation != "unowned" else []
    if situation == "unowned" and farms:
        reasons.append(Reason("unowned", why_unowned(snap, farms)))
    return RCInfo(
        id=spec.id,
        pod_id=pod_id_of(snap),
        state=situation,
        replicas_desired=snap.desired,
        daemon_set=spec.is_daemon_set,
        placed=len(snap.pods),
        healthy=snap.healthy,
        node_selector=spec.node_selector,
        allocation_strategy=spec.allocation_strategy,
        max_unavailable=spec.max_unavailable,
        disabled=spec.disabled,
        deleting=spec.deleting,
        generation=spec.generation,
        observed_generation=status.generation if status else 0,
        manifest=spec.manifest,
        pod_labels=spec.pod_labels,
        rc_labels=spec.rc_labels,
        owner=owner_info(snap),
        mutation_holder=snap.mutation.holder if snap.mutation else "",
        reasons=reasons,
        updated_at=status.updated_at if status else "",
        healthy_outdated=snap.healthy_outdated,
        revision=spec.revision,
        rollout=snap.present_rollout,
        tolerate_drain=spec.tolerate_drain,
        lock=LockedInfo(holder=snap.lock.holder, reason=snap.lock.reason, since=snap.lock.since) if snap.lock else None,
    )


def owner_info(snap: RCSnapshot) -> OwnerInfo | None:
    """Return the owner, or the last one; None if the RC has never had an owner."""
    owner = snap.owner
    if not (owner.held or owner.farm):
        return None
    return OwnerInfo(farm=owner.farm, held=owner.held, since=owner.since, token=owner.token)


def pod_info(pod: PodView) -> PodInfo:
    """Return the pod as shown in JSON."""
    health, reality = pod.health, pod.reality
    processes = reality.launchables if reality else {}
    state: str = reality.state if reality else "waiting"
    if processes and all(process.state == "completed" for process in processes.values()):
        state = "completed"  # agents report it as "running", and a crashing pod as "starting"
    elif health and health.condition == "crashing" and state in ("starting", "running"):
        state = "crashing"
    return PodInfo(
        node=pod.node,
        placed=pod.placed,
        state=state,
        health=health.status if health else "unknown",
        health_output=health.output if health else "",
        health_since=health.since if health else "",
        manifest=reality.manifest if reality else "",
        reason=reality.reason if reality else "",
        address=reality.address if reality else "",
        ports=reality.ports if reality else {},
        launchables=processes,
        condition=health.condition if health else "",
        cause=health.cause if health else "",
        restarts=sum(process.restarts for process in processes.values()),
    )


def node_info(node: NodeView, pods: int) -> NodeInfo:
    """Return the node as shown in JSON."""
    spec, agent = node.spec, node.last
    return NodeInfo(
        name=spec.name,
        live=node.alive is not None,
        schedulable=spec.schedulable,
        evict=spec.evict,
        pods=pods,
        labels=spec.labels,
        capacity=spec.capacity,
        agent=agent.agent if agent else "",
        agent_since=agent.since if agent else "",
        address=agent.address if agent else "",
        version=agent.version if agent else "",
        limits=agent.limits if agent else None,
    )


def tasks_info(engines: Sequence[Engine], schedules: Sequence[ScheduleView]) -> TasksInfo | None:
    """Return what is in hand, None where tasks are not used."""
    if not engines and not schedules:
        return None
    loads = [engine.member.load for engine in engines if engine.live]
    waits = sum((Counter(load.waits) for load in loads), Counter[str]())
    return TasksInfo(
        engines=[
            EngineInfo(
                name=engine.member.engine,
                live=engine.live,
                selector=engine.member.selector,
                # What a dead one had in hand belongs to others now
                owned=engine.member.load.owned if engine.live else 0,
                undelivered=engine.member.load.undelivered if engine.live else 0,
                paused=[described(pause) for pause in engine.member.pauses] if engine.live else [],
                since=engine.member.since,
                version=engine.member.version,
            )
            for engine in engines
        ],
        by_state=states_of(loads),
        waits=dict(waits.most_common()),
        schedules=len(schedules),
        schedules_paused=sum(view.spec is not None and view.spec.paused for view in schedules),
        failures=sorted((each for load in loads for each in load.failures), key=lambda each: each.at, reverse=True),
    )


def farm_info(farm: Farm, owned: int) -> FarmInfo:
    """Return the farm as shown in JSON."""
    member = farm.member
    return FarmInfo(
        name=member.farm,
        live=farm.live,
        selector=member.selector,
        owned=owned,
        since=member.since,
        address=member.address,
        version=member.version,
    )
