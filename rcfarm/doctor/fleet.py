"""Findings, and the pure checks of the fleet, from a census of the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple, TypeVar

import msgspec

from rcfarm.operations import rc_snapshot
from rcfarm.operations.fleet import Farm, PodsWithoutRC, ids_with_spec, listed, situation_of, why_unowned
from rcfarm.operations.nodes import NodeView, nodes_of
from rcfarm.operations.pod_health import TROUBLE
from rcfarm.operations.rc_snapshot import RCSnapshot
from scheduler.pool.ledger import NodeReservations
from store.kv.protocol import BadRecord, Entry
from store.schema.keys import BadKey, Keys
from store.schema.records import Brake, FarmMember, Health, Intent, Reality, decode

SHOWN = 20  # findings of one kind
SLOW = 60.0  # seconds without progress that are worth a finding

R = TypeVar("R", bound=msgspec.Struct)


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. `check` is stable, for machines. `advice`: what to do, unless it is ok. An error makes
    the exit code 1."""

    level: Literal["ok", "warning", "error"]
    check: str
    message: str
    advice: str = ""


def ok(check: str, message: str) -> Finding:
    """Return a finding without a problem."""
    return Finding("ok", check, message)


def warning(check: str, message: str, advice: str) -> Finding:
    """Return a finding of a problem that needs attention, but stops nothing."""
    return Finding("warning", check, message, advice)


def error(check: str, message: str, advice: str) -> Finding:
    """Return a finding of a problem that must be fixed."""
    return Finding("error", check, message, advice)


class Listings(NamedTuple):
    """The entries of each subtree, and the names of the manifests."""

    rcs: list[Entry]
    nodes: list[Entry]
    intents: list[Entry]
    realities: list[Entry]
    health: list[Entry]
    farms: list[Entry]
    pools: list[Entry]
    manifests: list[str]
    brake: Entry | None


class Place(NamedTuple):
    """A node, and a pod that is, or should be, there."""

    node: str
    pod_id: str

    def __str__(self) -> str:
        return f"{self.pod_id} on {self.node}"


@dataclass(frozen=True, slots=True)
class Census:
    """The decoded records of the store. `manifests`: digests. `bad`: every undecodable or misplaced record.

    `at`: when it was read, RFC 3339; "" if that does not matter.
    """

    keys: Keys
    rcs: Mapping[str, RCSnapshot]
    nodes: Mapping[str, NodeView]
    intents: Mapping[Place, Intent]
    realities: Mapping[Place, Reality]
    farms: list[Farm]
    manifests: frozenset[str]
    brake: Brake | None
    bad: list[BadRecord]
    at: str = ""


def census_of(keys: Keys, read: Listings, at: str = "") -> Census:
    """Decode the listings."""
    bad: list[BadRecord] = []
    snaps = rc_snapshot.snapshots(keys, read.rcs, read.health)
    nodes = nodes_of(keys, read.nodes)
    members = [(entry, _decoded(FarmMember, entry, bad)) for entry in read.farms]
    census = Census(
        keys=keys,
        rcs={snap.rc_id: snap for snap in snaps},
        nodes=nodes.nodes,
        intents=_by_place(Intent, keys, read.intents, bad),
        realities=_by_place(Reality, keys, read.realities, bad),
        farms=[Farm(member, entry.session is not None) for entry, member in members if member],
        manifests=frozenset(keys.name_of(name) for name in read.manifests),
        brake=_decoded(Brake, read.brake, bad) if read.brake else None,
        bad=bad,
        at=at,
    )
    for entry in read.pools:
        _decoded(NodeReservations, entry, bad)
    for entry in read.health:
        _decoded(Health, entry, bad)
    bad += nodes.bad
    known = {problem.key for problem in bad}
    bad += [problem for snap in snaps for problem in snap.bad.values() if problem.key not in known]
    bad += [*_misplaced(keys.parse_rc, read.rcs), *_misplaced(keys.parse_health, read.health)]
    return census


def _decoded(record_type: type[R], entry: Entry, bad: list[BadRecord]) -> R | None:
    try:
        return decode(record_type, entry.key, entry.value)
    except BadRecord as problem:
        bad.append(problem)
        return None


def _by_place(record_type: type[R], keys: Keys, entries: Iterable[Entry], bad: list[BadRecord]) -> dict[Place, R]:
    found: dict[Place, R] = {}
    for entry in entries:
        if record := _decoded(record_type, entry, bad):
            found[Place(*keys.parse_pod(entry.key))] = record
    return found


def _misplaced(parse: Callable[[str], object], entries: Iterable[Entry]) -> list[BadRecord]:
    """Return an error for each key that the layout does not have."""
    found = []
    for entry in entries:
        try:
            parse(entry.key)
        except BadKey as problem:
            found.append(BadRecord(entry.key, str(problem).removeprefix(f"{entry.key}: ")))
    return found


def state_of(census: Census) -> list[Finding]:
    """Return the findings about the fleet's state."""
    return [*records(census), *brake(census), *farms(census), *nodes(census), *rcs(census)]


def records(census: Census) -> list[Finding]:
    """Report undecodable records."""
    found = []
    for problem in census.bad:
        key = problem.key
        advice = f"repair its value with `consul kv put {key} -`, or, if nothing needs it, `consul kv delete {key}`"
        if census.keys.is_spec(key):
            advice = f"`rcfarm rc apply -f` the RC's file, which replaces it; or {advice}"
        found.append(error("records", str(problem), advice))
    return _shortened("records", found) or [
        ok("records", f"every record can be read ({_count(census.rcs, 'RC')}, {_count(census.nodes, 'node')})")
    ]


def brake(census: Census) -> list[Finding]:
    """Report whether the brake is on."""
    if census.brake is None:
        return [ok("brake", "the brake is off")]
    advice = "restore the desired state, or confirm it with `rcfarm brake release`"
    return [error("brake", f"the brake is on, nothing is removed: {census.brake.message}", advice)]


def farms(census: Census) -> list[Finding]:
    """Report live and dead farms."""
    live = [farm.member.farm for farm in census.farms if farm.live]
    dead = [farm.member.farm for farm in census.farms if not farm.live]
    found = [ok("farms", f"live: {listed(live)}")] if live else []
    if not live and census.rcs:
        found.append(
            error("farms", f"no farm is live, and there are {len(census.rcs)} RCs", "start one: `rcfarm farm`")
        )
    elif not live:
        found.append(warning("farms", "no farm is live", "start one: `rcfarm farm`"))
    elif len(live) == 1:
        found[0] = ok("farms", f"live: {live[0]}; a second one would take over if it crashed")
    if dead:
        keys = " and ".join(f"`consul kv delete {census.keys.farms}{name}`" for name in dead[:3])
        found.append(
            warning("farms", f"not live any more: {listed(dead)}", f"start them again; to forget them: {keys}")
        )
    return found


def nodes(census: Census) -> list[Finding]:
    """Report nodes whose agent does not answer."""
    if not census.nodes:
        return [warning("nodes", "no node is registered", "start an agent on each machine: `rcfarm agent`")]
    pods = Counter(place.node for place in census.intents)
    dead = [name for name, node in census.nodes.items() if node.alive is None]
    unknown = sorted(pods.keys() - census.nodes.keys())
    found = [
        error(
            "nodes",
            f"{name} is dead{_dead_since(census, name)} and should run {pods[name]} pod{'s' * (pods[name] != 1)}",
            f"start its agent; if the machine is gone, `rcfarm node cordon {name} --evict` has the pods of dynamic RCs "
            "moved; those of static RCs stay with the node",
        )
        if pods[name]
        else warning(
            "nodes",
            f"{name} is dead; nothing is placed there",
            f"start its agent; if the machine is gone: `consul kv delete -recurse {census.keys.node(name)}`",
        )
        for name in dead
    ]
    found += [error("nodes", f"{name} has pods but no record", "start its agent") for name in unknown]
    return _shortened("nodes", found) or [
        ok("nodes", f"{_count(census.nodes, 'node')}, {'all ' if len(census.nodes) > 1 else ''}live")
    ]


def _has_stood(snap: RCSnapshot, now: str) -> bool:
    """Return whether the owner has not updated the RC's status for `SLOW` seconds."""
    try:
        updated = datetime.fromisoformat(snap.status.updated_at if snap.status else "")
        return (datetime.fromisoformat(now) - updated).total_seconds() > SLOW
    except (ValueError, TypeError):  # not a valid time, or without a time zone
        return False


def _dead_since(census: Census, node: str) -> str:
    """Return " since TIME" if an owner's reason about this node alone has it, else ""."""
    reasons = (reason for snap in census.rcs.values() if snap.status for reason in snap.status.reasons)
    since = [reason.since for reason in reasons if reason.code == "node_dead" and reason.nodes == (node,)]
    return f" since {min(since)}" if since else ""


def rcs(census: Census) -> list[Finding]:
    """Report RCs that no farm owns, or that do not reach their desired state."""
    found = []
    for snap in census.rcs.values():
        if snap.spec is None:
            continue
        state = situation_of(snap)
        reasons = "; ".join(reason.message for reason in snap.status.reasons[:1]) if snap.status else ""
        troubles = [reason for reason in snap.status.reasons if reason.code in TROUBLE] if snap.status else []
        trouble = "; ".join(reason.message for reason in troubles)
        advice = f"see `rcfarm rc explain {snap.rc_id}`"
        if state == "unowned":
            found.append(error("rcs", why_unowned(snap, census.farms), "start a farm whose selector matches"))
        elif state == "quarantined":
            found.append(error("rcs", f"rc {snap.rc_id} keeps failing: {reasons}", advice))
        elif state in ("short", "held"):
            found.append(warning("rcs", f"rc {snap.rc_id} is {state}: {reasons}", advice))
        elif state == "unhealthy":
            found.append(error("rcs", f"rc {snap.rc_id} is unhealthy: {trouble}", advice))
        elif troubles:  # it has failed, or crashes repeatedly
            found.append(warning("rcs", f"rc {snap.rc_id} is {state}: {trouble}", advice))
        elif state == "progressing" and _has_stood(snap, census.at):
            found.append(warning("rcs", f"rc {snap.rc_id} has made no progress for a minute: {reasons}", advice))
    if not census.rcs and census.intents:
        return [error("rcs", f"no RCs, but {len(census.intents)} intents of pods", "see the check of orphans")]
    fine = f"{_count(census.rcs, 'RC')}, each owned, and no pod crashes or fails" if census.rcs else "no RCs yet"
    return _shortened("rcs", found) or [ok("rcs", fine)]


def _count(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def orphans(census: Census) -> list[Finding]:
    """Report records that belong to an object that does not exist."""
    known, running = ids_with_spec(census.rcs.values()), {intent.rc for intent in census.intents.values()}
    # Deleting the intents of pods whose RC is not in the store would stop them, so that is never advised.
    lost = Counter(intent.rc for intent in census.intents.values() if intent.rc not in known)
    advice = (
        "`rcfarm rc apply -f FILE` for each of them; to stop one instead, apply it and then delete it: "
        "`rcfarm rc delete RC`"
    )
    found = [error("orphans", str(PodsWithoutRC(dict(lost))), advice)] if lost else []
    found += [  # a folder without a spec may be removed only if no pod runs for it
        error(
            "orphans",
            f"rc {snap.rc_id} has no spec, but other records, and no pod runs for it",
            f"apply it again; if it was deleted on purpose: `consul kv delete -recurse {census.keys.rc(snap.rc_id)}`",
        )
        for snap in census.rcs.values()
        if snap.rc_id not in known and snap.rc_id not in running
    ]
    found += [
        error(
            "orphans",
            f"rc {snap.rc_id}: its manifest {snap.spec.manifest[:12]} is missing",
            "give it again: `rc apply`",
        )
        for snap in census.rcs.values()
        if snap.spec and snap.spec.manifest not in census.manifests
    ]
    found += [
        error(
            "orphans",
            f"{place} runs for rc {intent.rc}, which has no placement there",
            f"its owner adopts or stops it; see `rcfarm rc explain {intent.rc}` for what it waits for",
        )
        for place, intent in census.intents.items()
        if (snap := census.rcs.get(intent.rc)) and snap.spec and place.node not in snap.pods
    ]
    found += _without_intent(census)
    return _shortened("orphans", found)


def _without_intent(census: Census) -> list[Finding]:
    """Report pods with a reality but no intent: a live agent is stopping them, or reports why not; a dead one can't. An
    undecodable intent is reported by `records`."""
    found = []
    bad = {problem.key for problem in census.bad}
    for place in census.realities.keys() - census.intents.keys():
        if census.keys.intent(*place) in bad:
            continue
        node, reason = census.nodes.get(place.node), census.realities[place].reason
        if node is None or node.alive is None:
            advice = "start the agent: it stops pods without an intent"
            found.append(warning("orphans", f"{place} may still run: its agent is dead", advice))
        elif reason:
            rc_id = census.realities[place].rc
            advice = (
                f"`rcfarm rc apply -f` the file of rc {rc_id} adopts the pod; to stop it, then `rcfarm rc delete "
                f"{rc_id}`, or restart the agent of {place.node} with `--set agent.stop_orphans=true`"
            )
            found.append(warning("orphans", f"{place} runs without an intent: {reason}", advice))
    return sorted(found, key=lambda finding: finding.message)


def _shortened(check: str, found: list[Finding]) -> list[Finding]:
    if len(found) <= SHOWN:
        return found
    worst = "error" if any(finding.level == "error" for finding in found[SHOWN:]) else "warning"
    make = error if worst == "error" else warning
    return [*found[:SHOWN], make(check, f"and {len(found) - SHOWN} more of the kind", "see the first ones")]
