"""The next step of a hand-over between two RCs, as a pure decision: which pods pass from the old RC to the new one now.

This is p2's rolling update of two RCs (`rollAlgorithm`), but the pods that pass are chosen here, and each passes on its
node: there is never a second decider. A pod that does not pass is no loss, so those go first. Of those that pass, as
many go as count beyond `minimum`, never all the rest at once. A pod of unknown health does not count, but it may well
work, so it goes last. Replicas for which the old RC has no pod that may pass over are placed on further nodes by the
new RC itself, beside the old pods.
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
    """The input of a step. `old`: by node, whether the old RC's pod passes, None where its health is unknown. `new`: by
    node, whether the new RC's pod counts. `usable`: nodes of old pods that the new RC may have. `replicas`: that the
    new RC desires.
    """

    record: Handover
    old: Mapping[str, bool | None]
    new: Mapping[str, bool]
    usable: Collection[str]
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
    healthy = len(counting) + sum(passes is True for passes in given.old.values())
    usable = sorted(node for node in given.old if node in given.usable)
    wanted = max(0, record.desired - have)
    broken, sound, unknown = ([node for node in usable if given.old[node] is kind] for kind in (False, True, None))
    spare = healthy - record.minimum
    candidates = broken + sound[: max(0, spare)] + (unknown if len(counting) >= record.minimum else [])
    nodes = tuple(sorted(candidates[: min(wanted, AT_ONCE)]))
    replicas = max(given.replicas, have + len(nodes), record.desired - len(usable))
    replicas = max(given.replicas, min(replicas, record.desired))
    text = f"takes over the pods of rc {record.old}: {have + len(nodes)} of {record.desired}, {len(counting)} healthy"
    if len(counting) >= record.desired:
        return HandoverStep((), replicas, Reason("handing_over", f"{text}; done"), is_done=True)
    if wanted and usable and not nodes:
        away = sorted(node for node in (*given.old, *given.new) if not {**given.old, **given.new}[node])
        waits = f"waits until more than {record.minimum} pods of both RCs are healthy ({healthy} are)"
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
