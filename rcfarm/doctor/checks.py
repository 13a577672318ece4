"""The checks of `rcfarm doctor`: of the store, of our permissions in it, and of the fleet.

Each check returns findings: the state and, unless it is good, what to do. The checks of the fleet are pure; they judge
a census, which is several listings read one after the other. An orphan in one census may be a change seen halfway: it
only counts when a second census, a moment later, shows it, too.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from rcfarm.config.settings import BadSettings, Settings
from rcfarm.config.sources import load
from rcfarm.doctor.findings import Finding, counted, error, ok, warning
from rcfarm.doctor.permissions import permissions
from rcfarm.doctor.tasks import examine_tasks
from rcfarm.operations import rc_snapshot
from rcfarm.operations.errors import BadInput
from rcfarm.operations.fleet import (
    Farm,
    PodsWithoutRC,
    ids_with_spec,
    listed,
    of_a_former_layout,
    rarest,
    read_meta,
    situation_of,
    why_unowned,
)
from rcfarm.operations.nodes import NodeView, nodes_of
from rcfarm.operations.rc_snapshot import STOPPED_ROLLOUT, TROUBLE, RCSnapshot
from rcfarm.operations.reasons import full_disks
from scheduler.pool.ledger import NodeReservations
from store.consul.store import ConsulStore
from store.kv.protocol import BadRecord, Denied, Entry, SessionSpec, Store, StoreError
from store.schema.keys import LAYOUT, BadKey, Keys, is_dns_label
from store.schema.records import Brake, DeletedRC, FarmMember, Health, Incident, Intent, Reality, decode, utc_now

RECHECK_AFTER = 1.0  # seconds until a suspected orphan is checked again
MAX_SKEW = 2.0  # seconds between two clocks; the server's has a resolution of a second
SLOW = 0.5  # seconds for one read
OPERATORS_TREES = ("rcs", "deleted", "manifests", "nodes", "audit", "brake", "meta")
DAEMONS_TREES = ("farms", "intent", "reality", "health", "pools", "history", "incidents")
SHOWN = 20  # findings of one kind
UNSENT = 60.0  # seconds for which an incident may wait to be sent
STANDSTILL = 60.0  # seconds without progress that are worth a finding

R = TypeVar("R", bound=msgspec.Struct)


async def examine(store: Store, root: str, *, environ: Mapping[str, str] = os.environ) -> AsyncIterator[Finding]:
    """Yield every finding, in order. Ends early when the store does not answer, as no other check is possible then."""
    settings = Settings()
    try:
        settings = load(environ=environ)
        session, farm = settings.session, settings.farm
        check = f", its check {session.check_ttl:g} s" if session.check_ttl else ""
        words = f"session {session.ttl:g} s{check}; a node counts as lost after {farm.node_lost_after:g} s"
        yield ok("settings", words)
    except BadSettings as problem:
        yield error("settings", str(problem), "correct it; daemons started in this environment refuse it, too")
    answered = await _answers(store, root)
    yield answered
    if answered.level == "error":
        return
    if isinstance(store, ConsulStore):
        for finding in await _server(store, settings):
            yield finding
    try:
        meta = await read_meta(store, Keys(root))
    except (BadRecord, BadInput) as problem:
        yield error("layout", str(problem), "use an rcfarm that fits; nothing else was checked")
        return
    keys = Keys(root, meta.shards) if meta else Keys(root)
    words = f"schema {meta.schema}, {meta.shards} shards" if meta else f"{keys.root}/ is not used yet"
    if meta is None or meta.schema == LAYOUT:
        yield ok("layout", words)
    else:
        advice = "upgrade the farms, then the agents"
        try:
            former = await of_a_former_layout(store, keys)
            waits = f"{listed(former)} must be upgraded" if former else "a farm raises it within seconds"
            words += f", being migrated to schema {LAYOUT}: {waits}"
        except StoreError as problem:
            words, advice = f"{words}: {problem}", "give a token that may read everything below the root"
        yield warning("layout", words, advice)
    yield await _sessions(store, settings)
    everything = f"everything below {keys.root}/ that concerns RCs"
    for finding in await permissions(
        store, keys, operators=OPERATORS_TREES, daemons=DAEMONS_TREES, what=everything, who="farms and agents"
    ):
        yield finding
    try:
        census = await take_census(store, keys)
        suspects = orphans(census)
        if suspects:
            await asyncio.sleep(RECHECK_AFTER)
            census = await take_census(store, keys)
            still = orphans(census)
            suspects = [finding for finding in suspects if finding in still]
        for about in (records, brake, farms, nodes, limits, rcs, notifier):
            for finding in about(census):
                yield finding
        for finding in suspects or [ok("orphans", "nothing is left without an owner")]:
            yield finding
        for finding in await examine_tasks(store, keys):
            yield finding
    except Denied as problem:
        yield error("fleet", str(problem), "give a token that may read everything below the root")


async def _answers(store: Store, root: str) -> Finding:
    """Check the store with one consistent read, which needs a leader."""
    began = time.monotonic()
    try:
        await store.get(f"{root}/meta", consistent=True)
    except Denied as problem:
        return error("store", str(problem), "give a token with key_prefix read on the root")
    except StoreError as problem:
        return error("store", str(problem), "start it, or name another one with --store")
    took = time.monotonic() - began
    words = f"a consistent read took {took * 1000:.0f} ms"
    if took > SLOW:
        return warning("store", words, "check the load and the disks of the servers")
    return ok("store", words)


async def _server(store: ConsulStore, settings: Settings) -> list[Finding]:
    try:
        info = await store.server_info()
    except Denied as problem:
        return [warning("server", str(problem), "give agent read to have version, limits and clock checked")]
    kind = f"Consul {info.version}" if info.max_connections else "the embedded store of an rcfarm"
    leader = f", leader {info.leader}" if info.leader else ""
    findings = [ok("server", f"{kind} at {store.settings.place} (node {info.node}, {info.datacenter}{leader})")]
    if info.leader == "":
        findings.append(error("leader", "the agent knows no leader", "bring back a majority of the servers"))
    if info.max_connections is not None:
        each = settings.store.max_connections
        words = f"{info.max_connections} connections per client address; an rcfarm process uses at most {each}"
        fits = info.max_connections // each
        advice = f"at most {fits} such processes may share an address; raise the limit"
        if fits < 1:
            advice = "raise limits.http_max_conns_per_client, or lower store.max_connections"
            findings.append(error("connections", words, advice))
        else:
            findings.append(warning("connections", words, advice) if fits < 3 else ok("connections", words))
    if info.session_ttl_min and info.session_ttl_min > settings.session.ttl:
        words = f"Consul accepts no session below {info.session_ttl_min:g} s"
        words += f", and session.ttl is {settings.session.ttl:g} s"
        findings.append(error("session_ttl", words, "lower Consul's session_ttl_min, or raise session.ttl"))
    if info.time is not None:
        skew = (datetime.now(UTC) - info.time).total_seconds()
        if abs(skew) <= MAX_SKEW:
            findings.append(ok("clock", "this clock and the store's agree"))
        else:
            words = f"this machine's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the store's"
            advice = "run a time service; leases do not depend on it, times in records do"
            findings.append(warning("clock", words, advice))
    return findings


async def _sessions(store: Store, settings: Settings) -> Finding:
    """Open a session as a farm would, and end it."""
    session = settings.session
    spec = SessionSpec("rcfarm-doctor", session.ttl, session.check_ttl, session.lock_delay)
    try:
        opened = await store.create_session(spec)
        await store.destroy_session(opened.id)
    except Denied as problem:
        return warning("sessions", str(problem), "farms and agents need session write; operators do not")
    except StoreError as problem:
        return error("sessions", str(problem), "farms and agents can't work without sessions")
    words = f"a crashed holder is freed after {opened.lease:g} s"
    if opened.note:
        return warning(
            "sessions", f"{words}: {opened.note}", "give service write, so that the shorter check can be used"
        )
    return ok("sessions", words)


class Place(NamedTuple):
    """A node, and a pod that is, or should be, there."""

    node: str
    pod_id: str

    def __str__(self) -> str:
        return f"{self.pod_id} on {self.node}"


@dataclass(frozen=True, slots=True)
class Census:
    """The decoded records of the store. `tasks`: ids of executions. `manifests`: digests. `bad`: every undecodable or
    misplaced record.

    `at`: when it was read, RFC 3339.
    """

    keys: Keys
    rcs: Mapping[str, RCSnapshot]
    nodes: Mapping[str, NodeView]
    intents: Mapping[Place, Intent]
    realities: Mapping[Place, Reality]
    farms: list[Farm]
    tasks: frozenset[str]
    manifests: frozenset[str]
    brake: Brake | None
    bad: list[BadRecord]
    at: str
    incidents: Sequence[Incident] = ()


async def take_census(store: Store, keys: Keys) -> Census:
    """Read and decode everything that the checks of the fleet need."""
    rcs = (await store.list(keys.rcs, consistent=True)).entries
    nodes = nodes_of(keys, (await store.list(keys.nodes, consistent=True)).entries)
    intents = (await store.list(keys.intents, consistent=True)).entries
    realities = (await store.list(keys.realities, consistent=True)).entries
    realities += (await store.list(keys.task_pods, consistent=True)).entries
    health = (await store.list(keys.healths, consistent=True)).entries
    farms = (await store.list(keys.farms, consistent=True)).entries
    pools = (await store.list(keys.pools, consistent=True)).entries
    deleted = (await store.list(keys.deleted, consistent=True)).entries
    manifests = await store.keys(keys.manifests, consistent=True)
    tasks = await store.keys(keys.tasks, consistent=True)
    brake = await store.get(keys.brake, consistent=True)
    incidents = (await store.list(keys.incidents, consistent=True)).entries
    bad: list[BadRecord] = []
    snaps = rc_snapshot.snapshots(keys, rcs, health)
    members = [(entry, _decoded(FarmMember, entry, bad)) for entry in farms]
    census = Census(
        keys=keys,
        rcs={snap.rc_id: snap for snap in snaps},
        nodes=nodes.nodes,
        intents=_by_place(Intent, keys, intents, bad),
        realities=_by_place(Reality, keys, realities, bad),
        farms=[Farm(member, entry.session is not None) for entry, member in members if member],
        tasks=frozenset(key.split("/")[-2] for key in tasks if key.endswith("/spec")),
        manifests=frozenset(map(keys.name_of, manifests)),
        brake=_decoded(Brake, brake, bad) if brake else None,
        bad=bad,
        at=utc_now(),
        incidents=[found for entry in incidents if (found := _decoded(Incident, entry, bad))],
    )
    for entry in pools:
        _decoded(NodeReservations, entry, bad)
    for entry in deleted:
        _decoded(DeletedRC, entry, bad)
    for entry in health:
        _decoded(Health, entry, bad)
    bad += nodes.bad
    known = {problem.key for problem in bad}
    bad += [problem for snap in snaps for problem in snap.bad.values() if problem.key not in known]
    misplaced = [
        *_misplaced(keys.parse_rc, rcs),
        *_misplaced(keys.parse_health, health),
        *_misplaced(partial(_check_pod, keys), (*intents, *realities)),
    ]
    known = {problem.key for problem in misplaced}
    bad[:] = [*(problem for problem in bad if problem.key not in known), *misplaced]
    return census


class Misplaced(BadRecord):
    """A key that the layout does not have."""


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


def _misplaced(parse: Callable[[str], object], entries: Iterable[Entry]) -> list[Misplaced]:
    """Return an error for each key that the layout does not have."""
    found = []
    for entry in entries:
        try:
            parse(entry.key)
        except BadKey as problem:
            found.append(Misplaced(entry.key, str(problem).removeprefix(f"{entry.key}: ")))
    return found


def _check_pod(keys: Keys, key: str) -> None:
    place = keys.parse_pod(key)
    if not (place.node and is_dns_label(place.pod_id)):
        raise BadKey("no key of a pod; those are <node>/<pod id>")


def records(census: Census) -> list[Finding]:
    """Report undecodable records."""
    found = []
    for problem in census.bad:
        key = shlex.quote(problem.key)
        advice = f"repair its value with `consul kv put {key} -`, or, if nothing needs it, `consul kv delete {key}`"
        if isinstance(problem, Misplaced):
            advice = f"remove it, no program reads it: `consul kv delete {key}`"
        elif census.keys.is_spec(problem.key):
            advice = f"`rcfarm rc apply -f` the RC's file, which replaces it; or {advice}"
        found.append(error("records", str(problem), advice))
    return _shortened("records", found) or [
        ok(
            "records",
            f"every record can be read ({counted(len(census.rcs), 'RC')}, {counted(len(census.nodes), 'node')})",
        )
    ]


def brake(census: Census) -> list[Finding]:
    """Report whether the brake is on."""
    if census.brake is None:
        return [ok("brake", "the brake is off")]
    advice = "restore the desired state, or confirm it with `rcfarm brake release`"
    if census.brake.by:
        advice = "once the reason has passed: `rcfarm brake release`"
    return [error("brake", f"the brake is on, nothing is removed: {census.brake.words}", advice)]


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
        forget = " and ".join(f"`rcfarm farm forget {name}`" for name in dead[:3])
        found.append(
            warning(
                "farms",
                f"not live any more: {listed(dead)}",
                f"start them again (`rcfarm farm`); to forget them: {forget}",
            )
        )
    return found


def nodes(census: Census) -> list[Finding]:
    """Report nodes whose agent does not answer, or has no space on its disk."""
    if not census.nodes:
        return [warning("nodes", "no node is registered", "start an agent on each machine: `rcfarm agent`")]
    pods = Counter(place.node for place in census.intents)
    dead = [name for name, node in census.nodes.items() if node.alive is None]
    unknown = sorted(pods.keys() - census.nodes.keys())
    since: dict[str, str] = {}  # when a node died, by the earliest reason of an owner about this node alone
    for reason in (reason for snap in census.rcs.values() if snap.status for reason in snap.status.reasons):
        if reason.code == "node_dead" and len(reason.nodes) == 1:
            node = reason.nodes[0]
            since[node] = min(since.get(node, f" since {reason.since}"), f" since {reason.since}")
    found = [
        error(
            "nodes",
            f"{name} is dead{since.get(name, '')} and should run {pods[name]} pod{'s' * (pods[name] != 1)}",
            f"start its agent (`rcfarm agent`); if the machine is gone, `rcfarm node cordon {name} --evict` has "
            "the pods of dynamic RCs moved and those of daemon sets removed; those of static RCs stay with the node",
            ["node_dead"],
        )
        if pods[name]
        else warning(
            "nodes",
            f"{name} is dead; nothing is placed there",
            f"start its agent (`rcfarm agent`); if the machine is gone: `rcfarm node remove {shlex.quote(name)}`",
            ["node_dead"],
        )
        for name in dead
    ]
    found += [error("nodes", f"{name} has pods but no record", "start its agent (`rcfarm agent`)") for name in unknown]
    realities = [(place.node, reality) for place, reality in census.realities.items()]
    for name, reason in sorted(full_disks(census.rcs.values(), realities).items()):
        if name in census.nodes and name not in dead:
            advice = f"free space on {name}; `rcfarm node cordon {name}` keeps further pods away"
            found.append(error("nodes", f"{name} can't install or start pods: {reason.message}", advice, [reason.code]))
    return _shortened("nodes", found) or [
        ok("nodes", f"{counted(len(census.nodes), 'node')}, {'all ' if len(census.nodes) > 1 else ''}live")
    ]


def limits(census: Census) -> list[Finding]:
    """Report how the live agents hold pods to their limits."""
    known = {name: node.alive.limits for name, node in census.nodes.items() if node.alive and node.alive.limits}
    whole = {name: each for name, each in known.items() if each.tree and not each.why}
    found = [
        ok("limits", f"{listed([name for name in whole if whole[name] == way])}: {way.words}")
        for way in dict.fromkeys(whole.values())
    ]
    found += [
        warning("limits", f"{name}: {each.words}", "give its agent a control group of its own; see the page Limits")
        for name, each in known.items()
        if name not in whole
    ]
    return _shortened("limits", found)


def rcs(census: Census) -> list[Finding]:
    """Report RCs that no farm owns, or that do not reach their desired state."""

    def stands_still(snap: RCSnapshot) -> bool:
        try:
            updated = datetime.fromisoformat(snap.status.updated_at if snap.status else "")
            return (datetime.fromisoformat(census.at) - updated).total_seconds() > STANDSTILL
        except (ValueError, TypeError):  # not a valid time, or without a time zone
            return False

    found = []
    for snap in census.rcs.values():
        if snap.spec is None:
            continue
        state = situation_of(snap)
        reasons = "; ".join(reason.message for reason in snap.status.reasons[:1]) if snap.status else ""
        troubles = [reason for reason in snap.status.reasons if reason.code in TROUBLE] if snap.status else []
        trouble = "; ".join(reason.message for reason in troubles)
        rolled = [why for why in snap.status.reasons if why.code in STOPPED_ROLLOUT] if snap.status else []
        first = [reason.code for reason in snap.status.reasons[:1]] if snap.status else []
        codes = [reason.code for reason in troubles]
        advice = f"see `rcfarm rc explain {snap.rc_id}`"
        if state == "unowned":
            repair = "start a farm whose selector matches"
            found.append(error("rcs", why_unowned(snap, census.farms), repair, ["unowned"]))
        elif state == "quarantined":
            found.append(error("rcs", f"rc {snap.rc_id} keeps failing: {reasons}", advice, first))
        elif state in ("short", "held"):
            found.append(warning("rcs", f"rc {snap.rc_id} is {state}: {reasons}", advice, first))
        elif rolled:
            of_state = error if state == "unhealthy" else warning
            repair = f"apply a corrected manifest, or `rcfarm rollout undo {snap.rc_id}`"
            if rolled[0].code == "rollout_stuck":
                repair = f"bring back what it waits for, or `rcfarm rollout abort {snap.rc_id}`"
            whole = [rolled[0].code, *codes]
            found.append(of_state("rcs", f"rc {snap.rc_id} is {state}: {rolled[0].message}", repair, whole))
        elif state == "unhealthy":
            found.append(error("rcs", f"rc {snap.rc_id} is unhealthy: {trouble}", advice, codes))
        elif troubles:  # it has failed, or crashes repeatedly
            found.append(warning("rcs", f"rc {snap.rc_id} is {state}: {trouble}", advice, codes))
        elif state == "progressing" and stands_still(snap):
            found.append(warning("rcs", f"rc {snap.rc_id} has made no progress for a minute: {reasons}", advice, first))
    of_rcs = [intent for intent in census.intents.values() if not intent.task]
    if not census.rcs and of_rcs:
        return [error("rcs", f"no RCs, but {len(of_rcs)} intents of pods", "see the check of orphans")]
    fine = f"{counted(len(census.rcs), 'RC')}, each owned, and no pod crashes or fails" if census.rcs else "no RCs yet"
    return _shortened("rcs", found) or [ok("rcs", fine)]


def notifier(census: Census) -> list[Finding]:
    """Report incidents that nobody could be notified about. Without any, nothing is said: most fleets send none."""
    if not census.incidents:
        return []
    now = datetime.fromisoformat(census.at)
    waiting = [
        each
        for each in census.incidents
        if not (each.sent or each.resolved) and (now - datetime.fromisoformat(each.since)).total_seconds() > UNSENT
    ]
    waiting += [each for each in census.incidents if each.resolved and each.problem]
    if not waiting:
        return [ok("notifier", f"{counted(len(census.incidents), 'incident')} open; the receiver knows")]
    why = next((each.problem for each in waiting if each.problem), "no farm with `farm.notify_url` sends them")
    about = listed(f"{each.kind} {each.about}" for each in waiting)
    words = f"{counted(len(waiting), 'incident')} can't be sent ({about}): {why}"
    return [error("notifier", words, "correct `farm.notify_url` or its key in the farms' settings; they try again")]


def orphans(census: Census) -> list[Finding]:
    """Report records that belong to an object that does not exist."""
    known, running = ids_with_spec(census.rcs.values()), {intent.rc for intent in census.intents.values()}
    # Deleting the intents of pods whose RC is not in the store would stop them, so that is never advised.
    lost = Counter(intent.rc for intent in census.intents.values() if intent.rc not in known and not intent.task)
    advice = (
        "`rcfarm rc apply -f FILE` for each of them; to stop one instead, apply it and then delete it: "
        "`rcfarm rc delete RC`"
    )
    found = [error("orphans", str(PodsWithoutRC(dict(lost))), advice)] if lost else []
    found += [
        error(
            "orphans",
            f"{place} runs for task {intent.task}, which is not in the store",
            f"if the task was deleted, stop the pod: `consul kv delete {census.keys.intent(*place)}`",
        )
        for place, intent in census.intents.items()
        if intent.task and intent.task not in census.tasks
    ]
    found += [  # a folder without a spec may be removed only if no pod runs for it
        error(
            "orphans",
            f"rc {snap.rc_id} has no spec, but other records, and no pod runs for it",
            "apply its file again (`rcfarm rc apply -f FILE`); if it was deleted on purpose: `consul kv delete "
            f"-recurse {census.keys.rc(snap.rc_id)}`",
        )
        for snap in census.rcs.values()
        if snap.rc_id not in known and snap.rc_id not in running
    ]
    found += [
        error(
            "orphans",
            f"rc {snap.rc_id}: its manifest {snap.spec.manifest[:12]} is missing",
            "give it again: `rcfarm rc apply -f FILE`",
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
    # Pods with a reality but no intent: a live agent is stopping them, or reports why not; a dead one can't. An
    # undecodable intent is reported by `records`.
    bad = {problem.key for problem in census.bad}
    for place in sorted(census.realities.keys() - census.intents.keys(), key=str):
        if census.keys.intent(*place) in bad:
            continue
        node, reality = census.nodes.get(place.node), census.realities[place]
        if node is None or node.alive is None:
            advice = "start the agent (`rcfarm agent`): it stops pods without an intent"
            found.append(warning("orphans", f"{place} may still run: its agent is dead", advice))
        elif reality.reason:
            advice = f"restart the agent of {place.node} with `rcfarm agent --set agent.stop_orphans=true`"
            if not reality.task:
                advice = (
                    f"`rcfarm rc apply -f` the file of rc {reality.rc} adopts the pod; to stop it, then `rcfarm rc "
                    f"delete {reality.rc}`, or {advice}"
                )
            found.append(warning("orphans", f"{place} runs without an intent: {reality.reason}", advice))
    return _shortened("orphans", found)


def _shortened(check: str, found: list[Finding]) -> list[Finding]:
    """Return at most `SHOWN` findings, errors first, and how many are left out."""
    if len(found) <= SHOWN:
        return found
    found = sorted(found, key=lambda finding: finding.level != "error")
    shown = rarest(found, lambda finding: (finding.level, finding.codes), SHOWN)
    errors, shown_errors = (sum(finding.level == "error" for finding in some) for some in (found, shown))
    make = error if errors > shown_errors else warning
    return [*shown, make(check, f"and {len(found) - SHOWN} more of the kind", "see the first ones")]
