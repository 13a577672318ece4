"""The pure decisions of a node agent.

Intents, the records on disk and reality give an order for each pod; an order and the running manifest give its next
step. Nothing here does I/O or reads a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from store.schema.records import Intent, PodState, Process


@dataclass(frozen=True, slots=True)
class Wanted:
    """The pod has an intent. `index` is the intent's modify index; `tree` names the tree that it was seen in."""

    intent: Intent
    index: int
    tree: str = ""


@dataclass(frozen=True, slots=True)
class Keep:
    """The pod stays as it is, for a reason: its intent is not known, or undecodable."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Gone:
    """A synced view shows no intent for the pod."""


Order = Wanted | Keep | Gone


def orders(
    intents: Mapping[str, Wanted], unreadable: Mapping[str, str], running: Collection[str], realities: Collection[str]
) -> dict[str, Order]:
    """Return an order for every pod in any of the arguments, which are all by pod id; `unreadable` gives reasons.

    `running`: pods that this agent started or adopted; `realities`: pods with a reality record in the store. An
    undecodable intent never counts as missing.
    """
    kept = {pod_id: Keep(reason) for pod_id, reason in unreadable.items()}
    gone = {pod_id: Gone() for pod_id in (*running, *realities) if pod_id not in intents and pod_id not in kept}
    return {**gone, **intents, **kept}


class Step(Enum):
    """The next step of a pod."""

    NOTHING = auto()
    INSTALL = auto()  # fetch, then start
    REPLACE = auto()  # fetch, then stop the old one, then start
    RESTART = auto()  # stop and start: with other ports, or because an operator asked for it
    REMOVE = auto()  # stop, then forget
    FORGET = auto()  # nothing runs; only records are left


def next_step(order: Order, running: str | None, *, lost_port: bool = False, obeyed: str = "") -> Step:
    """Return the next step of a pod that runs the manifest `running` (None: none).

    `lost_port`: another process uses a port that the agent had chosen for the pod. `obeyed`: the last request for a
    restart that was obeyed.
    """
    if isinstance(order, Gone):
        return Step.REMOVE if running is not None else Step.FORGET
    if isinstance(order, Wanted):
        if running is None:
            return Step.INSTALL
        if running != order.intent.manifest:
            return Step.REPLACE
        if (order.intent.restart or obeyed) != obeyed:
            return Step.RESTART
    return Step.RESTART if lost_port and running is not None else Step.NOTHING


def supersedes(new: Order, old: Order) -> bool:
    """Return whether `new` makes the work begun for `old` pointless."""
    if isinstance(new, Wanted) and isinstance(old, Wanted):
        return new.intent.manifest != old.intent.manifest
    return type(new) is not type(old)


def pod_state(processes: Collection[Process]) -> PodState:
    """Return a pod's state: the worst of its launchables'."""
    states = {process.state for process in processes}
    if "stopping" in states or "stopped" in states:
        return "stopping"
    if "failed" in states:
        return "failed"
    return "starting" if states & {"starting", "backoff"} else "running"
