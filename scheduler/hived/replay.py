"""Building an algorithm aside, and telling it what there is, while the present one goes on deciding.

All of it happens in one thread on what `SchedulingView.capture` gave, which nobody changes. Pods that run are never
touched: what a new configuration has no quota for runs on as opportunistic work, and is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from scheduler.hived.constants import OPPORTUNISTIC_PRIORITY
from scheduler.hived.groups import AffinityGroup
from scheduler.hived.scheduling_view import Capture
from scheduler.hived.types import SchedulerAlgorithm
from store.kube.objects import Object, key_of, uid_of

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """An algorithm that was told of everything. `recovered`: the pods that it has placed (`NAMESPACE/NAME`).
    `failed`: why it could not place others.
    """

    algorithm: SchedulerAlgorithm
    recovered: tuple[str, ...]
    failed: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Replacement:
    """What became of the allocated pods when another algorithm took over, and of which groups it has no quota for any
    more: `downgraded`, by name, those that had one before.
    """

    recovered: tuple[str, ...]
    failed: Mapping[str, str]
    downgraded: tuple[str, ...]


def rebuild(build: Callable[[], SchedulerAlgorithm], capture: Capture) -> Rebuilt:
    """A new algorithm, nodes told before pods. Raises what `build` raises."""
    algorithm = build()
    for node in capture.nodes:
        algorithm.add_node(node)
    recovered, failed = [], {}
    for pod in capture.pods:
        problem = _place(algorithm, pod)
        if problem is None:
            recovered.append(key_of(pod))
        else:
            failed[key_of(pod)] = problem
    return Rebuilt(algorithm, tuple(recovered), failed)


def is_downgraded(group: AffinityGroup) -> bool:
    """Whether it asked for quota and holds its devices without any."""
    return group.is_opportunistic and group.spec.priority > OPPORTUNISTIC_PRIORITY


def newly_downgraded(before: SchedulerAlgorithm, after: SchedulerAlgorithm) -> tuple[str, ...]:
    """The groups that only the later one counts as downgraded."""
    known = {name for name, group in before.groups.items() if is_downgraded(group)}
    return tuple(name for name, group in after.groups.items() if is_downgraded(group) and name not in known)


def _place(algorithm: SchedulerAlgorithm, pod: Object) -> str | None:
    """Why the pod could not be placed."""
    try:
        algorithm.add_allocated_pod(pod)
    except Exception as error:
        log.exception("A pod's place does not fit the new configuration", pod=key_of(pod), uid=uid_of(pod))
        return str(error)
    return None
