"""The next step of a hand-over between two RCs, as a pure decision: which pods pass from the old RC to the new one now.

This is p2's rolling update of two RCs (`rollAlgorithm`), but the pods that pass are chosen here, and each passes on its
node: there is never a second decider. A pod that does not count is no loss, so those go first. Of those that count, as
many pass as count beyond `minimum`, never all the rest at once; what is unknown does not count. Replicas for which the
old RC has no pod that may pass are placed on further nodes by the new RC itself, beside the old pods.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rcfarm.operations.fleet import listed
from store.schema.records import Handover, Reason

AT_ONCE = 16  # pods that pass in one transaction, which holds at most 64 operations
SHOWN_NODES = 10


@dataclass(frozen=True, slots=True)
class HandoverInput:
    """The input of a step. `old`, `new`: the nodes of each RC's pods, and whether the pod counts. `usable`: nodes of
    old pods that the new RC may have. `dead`: nodes whose agent does not answer. `replicas`: that the new RC desires.
    """

    record: Handover
    old: Mapping[str, bool]
    new: Mapping[str, bool]
    usable: Collection[str]
    dead: Collection[str]
    replicas: int


class HandoverStep(NamedTuple):
    """`nodes`: their pods pass now. `replicas`: that the new RC desires then. `is_done`: nothing is left to do."""

    nodes: tuple[str, ...]
    replicas: int
    reason: Reason
    is_done: bool = False


def step(given: HandoverInput) -> HandoverStep:
    """Decide the next step. A pod that passes is one that does not count until its health says so again."""
    record, have = given.record, len(given.new)
    counting = [node for node, counts in given.new.items() if counts]
    healthy = len(counting) + sum(given.old.values())
    usable = sorted(node for node in given.old if node in given.usable)
    wanted = max(0, record.desired - have)
    broken = [node for node in usable if not given.old[node] and node not in given.dead]
    sound = [node for node in usable if given.old[node]]
    dead = [node for node in usable if not given.old[node] and node in given.dead]  # the last choice: none comes of it
    spare = max(0, healthy - record.minimum)
    candidates = broken + sound[:spare] + (dead if spare >= len(sound) else [])
    nodes = tuple(sorted(candidates[: min(wanted, AT_ONCE)]))
    replicas = max(given.replicas, have + len(nodes), record.desired - len(usable))
    replicas = max(given.replicas, min(replicas, record.desired))
    text = f"takes over the pods of rc {record.old}: {have + len(nodes)} of {record.desired}, {len(counting)} healthy"
    if len(counting) >= record.desired:
        return HandoverStep((), replicas, Reason("handing_over", f"{text}; done"), is_done=True)
    if wanted and usable and not nodes:
        away = sorted(node for node in (*given.old, *given.new) if not {**given.old, **given.new}[node])
        waits = f"waits until more than {record.minimum} pods of both are healthy, and {healthy} are"
        waits += f"; away: {listed(away)}" if away else ""
        return HandoverStep((), replicas, Reason("handover_waits_for_health", f"{text}; {waits}", _shown(away)))
    awaited = sorted({*nodes, *(node for node, counts in given.new.items() if not counts)})
    if awaited:
        text += f"; waits until {listed(awaited)} {'has' if len(awaited) == 1 else 'have'} passed"
    elif wanted:
        text += f"; waits for nodes: rc {record.old} has no further pod where rc {record.new} may have one"
    return HandoverStep(nodes, replicas, Reason("handing_over", text, _shown(awaited)))


def _shown(nodes: list[str]) -> tuple[str, ...]:
    return tuple(nodes[:SHOWN_NODES])
