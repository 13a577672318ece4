"""A pure comparison of the tree, the desired state and the processes: has the fleet converged?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from store.schema.records import POD_ID_LABEL, RCSpec
from store.schema.selectors import Selector
from tests.chaos.site import PodProcess
from tests.chaos.snapshot import Place, Snapshot


def shortcomings(
    snapshot: Snapshot, processes: Collection[PodProcess], farms: Iterable[str], nodes: Iterable[str]
) -> list[str]:
    """Return what has not converged yet; nothing, once all farms and agents live and the fleet has converged."""
    keys = snapshot.keys
    found = [f"farm {farm} is no member" for farm in farms if not snapshot.session(keys.farm(farm))]
    found += [f"node {node} is not alive" for node in nodes if not snapshot.session(keys.node_alive(node))]
    if snapshot.entry(keys.brake):
        found.append("the brake is on")
    for rc in sorted(snapshot.folders):
        spec = snapshot.specs.get(rc)
        if spec is None or spec.deleting:
            found.append(f"rc {rc} is not wanted, and its folder is there")
        else:
            found += [f"rc {rc}: {what}" for what in _of_rc(snapshot, spec)]
    found += _of_pods(snapshot, processes)
    return found


def held_orphans(snapshot: Snapshot) -> list[Place]:
    """Return the pods without an intent that their agents keep, because the whole tree had vanished."""
    orphans = snapshot.realities.keys() - snapshot.intents.keys()
    return [place for place in orphans if "stop_orphans" in snapshot.realities[place].reason]


def _of_rc(snapshot: Snapshot, spec: RCSpec) -> list[str]:
    keys, found = snapshot.keys, list[str]()
    lock, owner = snapshot.entry(keys.owner(spec.id)), snapshot.owners.get(spec.id)
    if lock is None or owner is None or lock.session is None:
        return ["it has no owner"]
    if snapshot.session(keys.farm(owner.farm)) != lock.session:
        found.append(f"its owner {owner.farm} is a member under another session")
    status = snapshot.statuses.get(spec.id)
    if status is None:
        return [*found, "it has no status"]
    if (status.generation, status.farm, status.token) != (spec.generation, owner.farm, lock.lock_index):
        acted = f"generation {status.generation} by {status.farm}, token {status.token}"
        found.append(f"status is of {acted}; the spec has {spec.generation}, the lock {owner.farm} {lock.lock_index}")
    current = {node for rc, node in snapshot.placements if rc == spec.id}
    if spec.disabled:
        return found if status.state == "disabled" else [*found, f"it is disabled, and its status {status.state}"]
    found += _of_placements(snapshot, spec, current)
    healthy = sum(_manifest(snapshot, spec, node) == spec.manifest for node in current)
    counts, desired = (status.placed, status.healthy, status.desired), _desired(spec, current)
    if counts != (len(current), healthy, desired):
        found.append(f"status counts {counts} placed, healthy and desired; it should be {len(current)} and {healthy}")
    wanted = {"converged"} if len(current) == desired else {"short"}
    if spec.allocation_strategy == "dynamic" and not current <= _matching(snapshot, spec):
        wanted.add("progressing")  # it would move a pod if there were a free node
    if status.state not in wanted:
        reasons = "; ".join(reason.message for reason in status.reasons)
        found.append(f"its status is {status.state}, not {' or '.join(sorted(wanted))}: {reasons}")
    return found


def _desired(spec: RCSpec, current: set[str]) -> int:
    """Return how many pods the RC wants; a daemon set as many as it has, if it has them on the right nodes."""
    return len(current) if spec.is_daemon_set else spec.replicas_desired


def _matching(snapshot: Snapshot, spec: RCSpec) -> set[str]:
    """Return the nodes on which the RC may keep pods."""
    selector = Selector.parse(spec.node_selector)
    return {name for name, node in snapshot.nodes.items() if selector.matches(node.labels) and not node.evict}


def _manifest(snapshot: Snapshot, spec: RCSpec, node: str) -> str:
    """Return the manifest of the RC's intent on a node, or ""."""
    intent = snapshot.intents.get((node, spec.rc_labels[POD_ID_LABEL]))
    return intent.manifest if intent and intent.rc == spec.id else ""


def _of_placements(snapshot: Snapshot, spec: RCSpec, current: set[str]) -> list[str]:
    """Return what is wrong with the choice of nodes and the intents of an enabled RC."""
    matching, pod_id = _matching(snapshot, spec), spec.rc_labels[POD_ID_LABEL]
    taken = {node for node, other in snapshot.intents if other == pod_id}
    free = {name for name in matching if snapshot.nodes[name].schedulable} - taken - current
    found, surplus = [], len(current) - _desired(spec, current)
    if spec.is_daemon_set and free:
        found.append(f"it has no pod on {', '.join(sorted(free))}")
    if spec.is_daemon_set and not current <= matching:
        found.append(f"it should leave {', '.join(sorted(current - matching))}")
    if surplus > 0:
        found.append(f"{surplus} pods too many")
    if surplus < 0 and free:
        found.append(f"{-surplus} pods are missing, and {', '.join(sorted(free))} free")
    if spec.allocation_strategy == "dynamic" and free and (left := current - matching):
        found.append(f"it should leave {', '.join(sorted(left))}, and {', '.join(sorted(free))} free")
    outdated = [node for node in sorted(current & matching) if _manifest(snapshot, spec, node) != spec.manifest]
    return found + [f"the intent on {node} is not of its manifest" for node in outdated]


def _of_pods(snapshot: Snapshot, processes: Collection[PodProcess]) -> list[str]:
    """Return where agents have not done, or not reported, what the intents say."""
    found, running = [], Counter((process.node, process.pod_id) for process in processes)
    pids = {(process.node, process.pod_id): process.pid for process in processes}
    for place in sorted(snapshot.intents.keys() | running.keys() | snapshot.realities.keys()):
        problems = _of_pod(snapshot, place, running[place], pids.get(place))
        found += [f"pod {place[1]} on {place[0]}: {problem}" for problem in problems]
    wanted = {snapshot.keys.health(intent.rc, node) for (node, _), intent in snapshot.intents.items()}
    found += [f"{key} is left" for key in sorted(snapshot.health_keys - wanted)]
    return found


def _of_pod(snapshot: Snapshot, place: Place, running: int, pid: int | None) -> list[str]:
    intent, reality, node = snapshot.intents.get(place), snapshot.realities.get(place), place[0]
    if intent is None:
        left = [f"no intent, and {running} processes"] if running else []
        return [*left, f"no intent, and reality says {reality.state}: {reality.reason}"] if reality else left
    found = [] if running == 1 else [f"{running} processes"]
    if reality is None:
        return [*found, "no reality"]
    if (reality.rc, reality.manifest, reality.state) != (intent.rc, intent.manifest, "running"):
        found.append(f"reality is {reality.state} for {reality.rc}, manifest {reality.manifest[:8]}: {reality.reason}")
    if [process.pid for process in reality.launchables.values()] != [pid]:
        found.append(f"reality names other processes than {pid}")
    health, session = snapshot.health(intent.rc, node), snapshot.session(snapshot.keys.health(intent.rc, node))
    if health is None or session != snapshot.session(snapshot.keys.node_alive(node)):
        found.append("no health under its agent's session")
    elif (health.status, health.manifest) != ("passing", intent.manifest):
        found.append(f"health is {health.status} for {health.manifest[:8]}")
    return found
