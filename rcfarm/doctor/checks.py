"""The checks of `rcfarm doctor`: of the store, of our permissions in it, and of the fleet.

Each check returns findings: the state and, unless it is good, what to do. The checks of the fleet are pure
(`rcfarm.doctor.fleet`); they judge a census, which is several listings read one after the other. An orphan in one
census may be a change seen halfway: it only counts when a second census, a moment later, shows it, too.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime

from rcfarm.config.settings import BadSettings, Settings
from rcfarm.config.sources import load
from rcfarm.doctor import fleet
from rcfarm.doctor.fleet import Census, Finding, Listings, error, ok, warning
from rcfarm.operations.errors import BadInput
from rcfarm.operations.fleet import listed
from rcfarm.operations.layout import of_a_former_layout, read_meta
from store.consul.store import ConsulStore, ServerInfo
from store.kv import ops
from store.kv.protocol import BadRecord, Denied, SessionSpec, Store, StoreError
from store.schema.keys import LAYOUT, Keys
from store.schema.records import Meta, utc_now

RECHECK_AFTER = 1.0  # seconds until a suspected orphan is checked again
MAX_SKEW = 2.0  # seconds between two clocks; the server's has a resolution of a second
SLOW = 0.5  # seconds for one read
OPERATORS_TREES = ("rcs", "manifests", "nodes", "audit", "brake", "meta")
DAEMONS_TREES = ("farms", "intent", "reality", "health", "pools", "history")
_SINGLE_KEYS = ("brake", "meta", "history")
_NEVER = 2**62  # an index that no entry has


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
    yield await _layout(store, keys, meta)
    for finding in [await _sessions(store, settings), *await _permissions(store, keys)]:
        yield finding
    try:
        census = await take_census(store, keys)
        orphans = fleet.orphans(census)
        if orphans:
            await asyncio.sleep(RECHECK_AFTER)
            census = await take_census(store, keys)
            still = fleet.orphans(census)
            orphans = [finding for finding in orphans if finding in still]
        for finding in fleet.state_of(census) + (orphans or [ok("orphans", "nothing is left without an owner")]):
            yield finding
    except Denied as problem:
        yield error("fleet", str(problem), "give a token that may read everything below the root")


async def _layout(store: Store, keys: Keys, meta: Meta | None) -> Finding:
    if meta is None:
        return ok("layout", f"{keys.root}/ is not used yet")
    words = f"schema {meta.schema}, {meta.shards} shards"
    if meta.schema == LAYOUT:
        return ok("layout", words)
    try:
        former = await of_a_former_layout(store, keys)
    except StoreError as problem:
        return warning("layout", f"{words}: {problem}", "give a token that may read everything below the root")
    waits = f"{listed(former)} must be upgraded" if former else "a farm raises it within seconds"
    words += f", being migrated to schema {LAYOUT}"
    return warning("layout", f"{words}: {waits}", "upgrade the farms, then the agents")


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
    findings += _limits(info, settings)
    if info.time is not None:
        skew = (datetime.now(UTC) - info.time).total_seconds()
        if abs(skew) <= MAX_SKEW:
            findings.append(ok("clock", "this clock and the store's agree"))
        else:
            words = f"this machine's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the store's"
            advice = "run a time service; leases do not depend on it, times in records do"
            findings.append(warning("clock", words, advice))
    return findings


def _limits(info: ServerInfo, settings: Settings) -> list[Finding]:
    findings = []
    if info.max_connections is not None:
        each = settings.store.max_connections
        words = f"{info.max_connections} connections per client address; an rcfarm process uses at most {each}"
        fits = info.max_connections // each
        if fits < 1:
            findings.append(
                error("connections", words, "raise limits.http_max_conns_per_client, or lower store.max_connections")
            )
        elif fits < 3:
            findings.append(
                warning("connections", words, f"at most {fits} such processes may share an address; raise the limit")
            )
        else:
            findings.append(ok("connections", words))
    if info.session_ttl_min and info.session_ttl_min > settings.session.ttl:
        words = (
            f"Consul accepts no session below {info.session_ttl_min:g} s, and session.ttl is {settings.session.ttl:g} s"
        )
        findings.append(error("session_ttl", words, "lower Consul's session_ttl_min, or raise session.ttl"))
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


async def _permissions(store: Store, keys: Keys) -> list[Finding]:
    """Probe every subtree by deleting a key that does not exist: that needs the right to write, but writes nothing."""
    probe = f"doctor-{secrets.token_hex(8)}"
    denied: dict[str, Denied] = {}
    for tree in (*OPERATORS_TREES, *DAEMONS_TREES):
        is_key = tree in _SINGLE_KEYS
        name = f"{keys.root}/{tree}" if is_key else f"{keys.root}/{tree}/{probe}"
        try:
            await store.txn([ops.cas(name, b"", _NEVER) if is_key else ops.delete(name)])
        except Denied as problem:
            denied[tree] = problem
        except StoreError:
            pass  # refused by its condition, so it is permitted
    if not denied:
        return [ok("permissions", "this token may write everything below the root")]
    return [
        error(
            "permissions", f"may not write {keys.root}/{tree}: {problem}", "operators need that; give key_prefix write"
        )
        if tree in OPERATORS_TREES
        else warning("permissions", f"may not write {keys.root}/{tree}", "fine for operators; farms and agents need it")
        for tree, problem in denied.items()
    ]


async def take_census(store: Store, keys: Keys) -> Census:
    """Read everything that the checks of the fleet need."""
    read = Listings(
        rcs=(await store.list(keys.rcs, consistent=True)).entries,
        nodes=(await store.list(keys.nodes, consistent=True)).entries,
        intents=(await store.list(keys.intents, consistent=True)).entries,
        realities=(await store.list(keys.realities, consistent=True)).entries,
        health=(await store.list(keys.healths, consistent=True)).entries,
        farms=(await store.list(keys.farms, consistent=True)).entries,
        pools=(await store.list(keys.pools, consistent=True)).entries,
        manifests=await store.keys(keys.manifests, consistent=True),
        brake=await store.get(keys.brake, consistent=True),
    )
    return fleet.census_of(keys, read, utc_now())
