"""Reasons of nodes and tasks, derived from their records, and the form in which reasons of all kinds are shown. Pure.

The codes are those of `store.schema.reasons`. RCs and rollouts carry their reasons in their records already.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec

from rcfarm.operations.nodes import NodeView
from rcfarm.operations.rc_snapshot import RCSnapshot
from rcfarm.operations.tasks import Engine, TaskView, reasons
from store.schema.reasons import REASONS
from store.schema.records import NO_SPACE, Reality, Reason, rfc3339


class ReasonInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One reason, of whatever kind of object. `code`: of the list of reasons; `detail`: for people.

    `since`: when it was noticed; `next_wake`: when it changes, or is looked at again, by the clock alone: RFC 3339 in
    UTC, "" where that is not known. `blocking`: what was asked for stands still until an operator acts or something
    outside changes. `act`: what to do, "" where waiting is enough. `about`: the part of the object that it concerns,
    such as one task of a Framework, or "". `nodes`: those that it concerns, the first ten.
    """

    code: str
    detail: str
    since: str = ""
    next_wake: str = ""
    blocking: bool
    act: str = ""
    about: str = ""
    nodes: tuple[str, ...] = ()


def reason_info(reason: Reason, about: str = "", **named: str) -> ReasonInfo:
    """Return a reason as it is shown. A code of a newer program, which the list does not have, counts as blocking.

    `named`: what stands for the words in capitals in the commands of `act`, such as `RC`.
    """
    kind = REASONS.get(reason.code)
    if len(reason.nodes) == 1:
        named.setdefault("NODE", reason.nodes[0])

    def filled_in(command: re.Match[str]) -> str:
        return re.sub(r"(?<= )[A-Z]+\b", lambda word: named.get(word[0], word[0]), command[0])

    return ReasonInfo(
        code=reason.code,
        detail=reason.message,
        since=reason.since,
        next_wake=reason.until,
        blocking=kind is None or kind.blocks,
        act=re.sub(r"`[^`]+`", filled_in, kind.act) if kind else "",
        about=about,
        nodes=reason.nodes,
    )


def full_disks(snaps: Iterable[RCSnapshot], realities: Iterable[tuple[str, Reality]] = ()) -> dict[str, Reason]:
    """Return the nodes whose agents report a full disk. `realities`: of pods, each with its node; those of a dead agent
    may be out of date."""
    found: dict[str, Reason] = {}
    for snap in snaps:
        for node, verdict in snap.health.items():
            if verdict.is_blocked_by_disk:
                found.setdefault(node, Reason("disk_full", verdict.cause, (node,), verdict.since))
    for node, reality in realities:
        if NO_SPACE in reality.reason:
            found.setdefault(node, Reason("disk_full", reality.reason, (node,)))
    return found


def reasons_of_node(view: NodeView, full_disk: Reason | None = None) -> list[Reason]:
    """Return why a node does not take, or can't start, pods. `full_disk`: its agent's report, if there is one."""
    found, name = list[Reason](), view.spec.name
    if view.alive is None:
        found.append(Reason("node_dead", "its agent does not answer: nothing is placed there", (name,)))
    elif full_disk is not None:
        found.append(full_disk)
    if view.spec.evict:
        found.append(Reason("node_evicting", "it is being emptied", (name,)))
    elif not view.spec.schedulable:
        found.append(Reason("node_cordoned", "it is cordoned", (name,)))
    return found


def reasons_of_task(view: TaskView, engines: Sequence[Engine] = ()) -> list[Reason]:
    """Return why an execution does not run, or that it ended without success."""
    found = [
        Reason(wait.code, wait.message, since=_time(wait.since), until=_time(wait.until))
        for wait in reasons(view, engines)
    ]
    if view.word == "unreadable":
        bad = "; ".join(map(str, view.bad.values())) or view.defect
        found.append(Reason("unreadable", f"{bad}; {view.remedy}" if view.remedy else bad))
    elif view.is_ended and view.state is not None and (code := view.state.end_code):
        found.append(Reason(code, view.state.end_message or view.word, since=_time(view.state.ended_at)))
    return found


def _time(moment: float) -> str:
    return rfc3339(datetime.fromtimestamp(moment, UTC)) if moment else ""
