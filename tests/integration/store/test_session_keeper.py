"""SessionKeeper on a real Consul: crashes, stopped processes, restarts, permissions."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

import pytest

from store.consul.store import ConsulSettings, ConsulStore
from store.kv import ops
from store.kv.protocol import OwnershipLost, SessionSpec, TxnConflict
from store.kv.session import MAX_BACKOFF, SessionKeeper
from tests.support.consul.failing_sessions import running
from tests.support.consul.server import ConsulServer, StartConsul, opened
from tests.support.waiting import until

SPEC = SessionSpec("keeper-test")
LEASE = 3.0
SLACK = 5.0  # seconds for a busy machine; a lease and this are below the TTL, which is the backstop
PATIENCE = 30.0  # seconds that a condition may take


def store_on(server: ConsulServer, token: str | None = None) -> AbstractAsyncContextManager[ConsulStore]:
    return opened(ConsulSettings.from_env(server.url, environ={"CONSUL_HTTP_TOKEN": token or server.token or ""}))


@contextmanager
def holder(server: ConsulServer, key: str) -> Iterator[subprocess.Popen[str]]:
    """Run another process that holds a session and the lock on `key`, see `tests.support.consul.session_holder`."""
    command = [sys.executable, "-m", "tests.support.consul.session_holder", server.url, key]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def next_line(process: subprocess.Popen[str]) -> Any:
    """Return the holder's next observation; log lines are skipped."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise AssertionError("the holder has ended")


async def holder_of(store: ConsulStore, key: str) -> str | None:
    entry = await store.get(key, consistent=True)
    return None if entry is None else entry.session


async def until_held_by(store: ConsulStore, key: str, session: str | None, *, within: float) -> float:
    """Wait until the lock is held by `session` (None: by no session). Return how long that took."""
    started = time.monotonic()
    async with asyncio.timeout(within):
        while await holder_of(store, key) != session:
            await asyncio.sleep(0.02)
    return time.monotonic() - started


async def test_what_the_session_is_bound_to(consul_server: ConsulServer) -> None:
    """Only our own TTL check ends it early: no check of the node, lock-delay 0, release, and the TTL as backstop."""
    async with store_on(consul_server) as store, running(keeper := SessionKeeper(store, SPEC)):
        session_id = await keeper.held()
        (session,) = consul_server.request("GET", f"/v1/session/info/{session_id}")
        (service,) = consul_server.request("GET", "/v1/agent/services").values()
        assert session["NodeChecks"] == []
        assert session["ServiceChecks"] == [{"ID": service["ID"], "Namespace": ""}]
        assert (session["LockDelay"], session["Behavior"], session["TTL"]) == (0, "release", "10s")
        assert keeper.lease == LEASE
        assert keeper.note == ""


async def test_an_orderly_stop_leaves_nothing_behind(consul_server: ConsulServer, root: str) -> None:
    """No session, no service, no check, no lock, no task; and the next holder does not wait."""
    key = f"{root}/lock"
    async with store_on(consul_server) as store:
        keeper = SessionKeeper(store, SPEC)
        async with running(keeper):
            await store.txn([ops.lock(key, b"", await keeper.held())])
        assert consul_server.request("GET", "/v1/session/list") == []
        assert consul_server.request("GET", "/v1/agent/services") == {}
        assert consul_server.request("GET", "/v1/agent/checks") == {}
        assert len(asyncio.all_tasks()) == 1
        session = await store.create_session(SPEC)
        await store.txn([ops.lock(key, b"", session.id)])


async def test_a_crashed_holder_is_freed_after_its_check(consul_server: ConsulServer, root: str) -> None:
    """kill -9: the lock is free within the check's TTL, not after the session's, and can be taken at once."""
    key = f"{root}/lock"
    async with store_on(consul_server) as store:
        with holder(consul_server, key) as process:
            session = (await asyncio.to_thread(next_line, process))["session"]
            await until_held_by(store, key, session, within=PATIENCE)
            process.kill()
            assert await until_held_by(store, key, None, within=PATIENCE) <= LEASE + SLACK
        other = await store.create_session(SPEC)
        await store.txn([ops.lock(key, b"other", other.id)])


async def test_a_stopped_holder_knows_when_it_continues(consul_server: ConsulServer, root: str) -> None:
    """SIGSTOP past the lease, another takes over, SIGCONT: the first look shows no session, and a new one follows."""
    key = f"{root}/lock"
    async with store_on(consul_server) as store:
        with holder(consul_server, key) as process:
            first = (await asyncio.to_thread(next_line, process))["session"]
            await until_held_by(store, key, first, within=PATIENCE)
            process.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            await until_held_by(store, key, None, within=LEASE + SLACK)
            await asyncio.sleep(stopped + LEASE - time.monotonic())  # on a busy machine a session may end early
            other = await store.create_session(SPEC)
            await store.txn([ops.lock(key, b"other", other.id)])
            with pytest.raises(OwnershipLost):
                await store.txn([ops.check_session(key, first), ops.put(f"{root}/x", b"stale")])

            process.send_signal(signal.SIGCONT)
            look = await asyncio.to_thread(next_line, process)
            assert look["session"] is None
            assert look["gap"] > LEASE / 2, "this was the first look after it continued"
            again = await asyncio.to_thread(next_line, process)
            assert again["session"] not in (None, first)
            assert await holder_of(store, key) == other.id


async def test_a_blip_of_consul_moves_nothing(consul_server: ConsulServer, root: str) -> None:
    """Consul hangs for less than the lease: the same session continues, and its lock stays."""
    key = f"{root}/lock"
    async with store_on(consul_server) as store, running(keeper := SessionKeeper(store, SPEC)):
        session_id = await keeper.held()
        await store.txn([ops.lock(key, b"", session_id)])
        consul_server.pause()
        await asyncio.sleep(0.8)
        consul_server.resume()
        renewals = keeper.renewals
        await until(lambda: keeper.renewals >= renewals + 3, within=PATIENCE)
        assert keeper.session_id == session_id
        assert await holder_of(store, key) == session_id


async def test_consul_restarts(start_consul: StartConsul, root: str) -> None:
    """The server restarts with its data: soon after, a session is held, and a lock can be taken under it."""
    server, key = start_consul(durable=True), f"{root}/lock"
    async with store_on(server) as store, running(keeper := SessionKeeper(store, SPEC)):
        await store.txn([ops.lock(key, b"before", await keeper.held())])
        server.kill()
        await until(lambda: keeper.state != "held", within=LEASE + SLACK)
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(MAX_BACKOFF + LEASE + SLACK):
            await _locked_again(store, keeper, key)
        assert keeper.last_error == ""


async def _locked_again(store: ConsulStore, keeper: SessionKeeper, key: str) -> None:
    while True:
        try:
            await store.txn([ops.lock(key, b"after", await keeper.held())])
        except TxnConflict:
            await asyncio.sleep(0.05)
        else:
            return


async def test_consul_loses_everything(consul_server: ConsulServer) -> None:
    """The server comes back empty: the old session is given up and a new one created."""
    async with store_on(consul_server) as store, running(keeper := SessionKeeper(store, SPEC)):
        first = await keeper.held()
        await asyncio.to_thread(consul_server.restart)
        await asyncio.wait_for(keeper.lost(first), LEASE + SLACK)
        second = await asyncio.wait_for(keeper.held(), MAX_BACKOFF + SLACK)
        assert second != first
        assert len(consul_server.request("GET", "/v1/agent/services")) == 1


async def test_consul_is_down_at_the_start(consul_server: ConsulServer) -> None:
    """The keeper starts before Consul does: it reports the error, and holds a session soon after Consul is up."""
    consul_server.stop()
    async with store_on(consul_server) as store, running(keeper := SessionKeeper(store, SPEC)):
        await until(lambda: "Connection refused" in keeper.last_error, within=PATIENCE)
        await asyncio.to_thread(consul_server.start)
        await asyncio.wait_for(keeper.held(), MAX_BACKOFF + SLACK)
        assert keeper.last_error == ""


async def test_someone_removes_the_check(consul_server: ConsulServer) -> None:
    """An operator deregisters our service: the loss is noticed at the next renewal and corrected at once."""
    async with store_on(consul_server) as store, running(keeper := SessionKeeper(store, SPEC)):
        first = await keeper.held()
        (service,) = consul_server.request("GET", "/v1/agent/services")
        renewals = keeper.renewals
        consul_server.request("PUT", f"/v1/agent/service/deregister/{service}")
        await asyncio.wait_for(keeper.lost(first), LEASE / 3 + SLACK)
        assert keeper.renewals - renewals <= 1, "at most one that was under way; the next one fails"
        assert await asyncio.wait_for(keeper.held(), SLACK) != first
        assert keeper.losses == 1


async def test_someone_destroys_the_session(consul_server: ConsulServer) -> None:
    """Its check still passes, but the session is gone: noticed within a third of the TTL; the old service goes, too."""
    async with store_on(consul_server) as store, running(keeper := SessionKeeper(store, SPEC)):
        first = await keeper.held()
        renewals = keeper.renewals
        consul_server.request("PUT", f"/v1/session/destroy/{first}")
        await asyncio.wait_for(keeper.lost(first), SPEC.ttl / 3 + LEASE / 3 + SLACK)
        assert keeper.renewals - renewals <= SPEC.ttl / LEASE, "renewals of the check alone, a third of a lease apart"
        assert await asyncio.wait_for(keeper.held(), SLACK) != first
        assert len(consul_server.request("GET", "/v1/agent/services")) == 1


async def test_without_permission_for_the_check(start_consul: StartConsul, root: str) -> None:
    """Services may not be registered: the session has its TTL alone, and the keeper reports it with the reason."""
    server = start_consul(acl=True)
    token = server.create_token('session_prefix "" { policy = "write" } key_prefix "" { policy = "write" }')
    async with store_on(server, token) as store, running(keeper := SessionKeeper(store, SPEC)):
        await store.txn([ops.lock(f"{root}/lock", b"", await keeper.held())])
        assert keeper.lease == SPEC.ttl
        assert "service:write" in keeper.note
        assert "10 to 20 s" in keeper.note
        assert token not in keeper.note


async def test_without_permission_for_sessions(start_consul: StartConsul) -> None:
    """Sessions may not be created: the keeper reports it, leaves nothing on the agent, and works once it is allowed."""
    server = start_consul(acl=True)
    token = server.create_token('service_prefix "" { policy = "write" }')
    async with store_on(server, token) as store, running(keeper := SessionKeeper(store, SPEC)):
        await until(lambda: keeper.last_error, within=PATIENCE)
        assert "needs session:write" in keeper.last_error
        assert keeper.state == "seeking"
    assert server.request("GET", "/v1/agent/services") == {}


async def test_a_session_outlives_an_election(start_consul: StartConsul) -> None:
    """No leader for 12 s, as Consul's default timing takes: the check on the living server keeps the session's id."""
    living = start_consul(leaderless=True)
    join = [f"127.0.0.1:{living.ports['serf_lan']}"]
    other = start_consul(durable=True, config={"bootstrap_expect": 2, "node_name": "other", "retry_join": join})
    async with store_on(living) as store, running(keeper := SessionKeeper(store, SPEC)):
        session_id = await keeper.held()
        other.pause()
        await keeper.lost(session_id)
        await asyncio.sleep(12 - LEASE)
        other.resume()
        async with asyncio.timeout(PATIENCE):
            assert await keeper.held() == session_id
        assert keeper.losses == 0
        assert "missed TTL" not in living.log()
