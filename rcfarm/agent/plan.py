"""What a node agent decides, without doing it.

Intents, what is on disk and reality together give an order for each pod; an order and what runs give its next step.
Nothing here does I/O or looks at a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from rcfarm.agent.process import ExitStatus
from store.records import Intent, PodState, Process


@dataclass(frozen=True, slots=True)
class Wanted:
    """The pod has an intent. `index` is the intent's modify index; `tree` names the tree that it was seen in."""

    intent: Intent
    index: int
    tree: str = ""


@dataclass(frozen=True, slots=True)
class Keep:
    """The pod stays as it is, for a reason: nothing is known of its intent, or nothing that can be understood."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Gone:
    """A synced view shows no intent for the pod."""


Order = Wanted | Keep | Gone


def orders(
    intents: Mapping[str, Wanted], unreadable: Mapping[str, str], running: Collection[str], realities: Collection[str]
) -> dict[str, Order]:
    """An order for every pod that is known anywhere. All arguments by pod id; `unreadable` says why.

    `running`: pods that this agent started or adopted; `realities`: pods that the store says are here. An intent that
    can't be read is never taken for a missing one.
    """
    kept = {pod_id: Keep(reason) for pod_id, reason in unreadable.items()}
    gone = {pod_id: Gone() for pod_id in (*running, *realities) if pod_id not in intents and pod_id not in kept}
    return {**gone, **intents, **kept}


class Step(Enum):
    """What a pod needs next."""

    NOTHING = auto()
    INSTALL = auto()  # fetch, then start
    REPLACE = auto()  # fetch, then stop the old one, then start
    RESTART = auto()  # stop and start, with other ports
    REMOVE = auto()  # stop, then forget
    FORGET = auto()  # nothing runs; only records are left


def next_step(order: Order, running: str | None, *, lost_port: bool = False) -> Step:
    """The next step of a pod that runs the manifest `running` (None: none).

    `lost_port`: a port that the agent had chosen for it is used by something else by now.
    """
    if isinstance(order, Gone):
        return Step.REMOVE if running is not None else Step.FORGET
    if isinstance(order, Wanted):
        if running is None:
            return Step.INSTALL
        if running != order.intent.manifest:
            return Step.REPLACE
    return Step.RESTART if lost_port and running is not None else Step.NOTHING


def supersedes(new: Order, old: Order) -> bool:
    """Whether work that was begun for `old` is in vain now that there is `new`."""
    if isinstance(new, Wanted) and isinstance(old, Wanted):
        return new.intent.manifest != old.intent.manifest
    return type(new) is not type(old)


def after_exit(
    policy: Literal["always", "on-failure", "never"], status: ExitStatus
) -> Literal["", "completed", "failed"]:
    """How a launchable stands after its process ended: "" means that it is started again.

    An unknown exit status (the process ended while no agent was there) counts as a failure.
    """
    if policy == "always":
        return ""
    if status.code == 0:
        return "completed"
    return "" if policy == "on-failure" else "failed"


def pod_state(processes: Collection[Process]) -> PodState:
    """A pod's state: the worst of its launchables'."""
    states = {process.state for process in processes}
    if "stopping" in states or "stopped" in states:
        return "stopping"
    if "failed" in states:
        return "failed"
    return "starting" if states & {"starting", "backoff"} else "running"
