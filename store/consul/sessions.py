"""Sessions on Consul that end soon after their holder does.

A session's own TTL is at least 10 s, and Consul may take twice as long. So each session is bound to a TTL check of a
small service that is registered with the local agent: the agent marks the check critical `check_ttl` seconds after it
was last passed, and with that the session ends; measured on 1.8.7, a crashed holder is freed after 3.0 s. The session's
TTL stays as the backstop for an agent that dies together with its holder. No check of the node takes part: a blip of
the node must not move ownership.

Passing the check is local to the agent and cheap; the session itself is renewed every third of its TTL, and whenever
the check may have lapsed or the agent may have restarted since it was last passed, because a check that passes again
does not bring its session back.
"""

from __future__ import annotations

import asyncio
import importlib
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from urllib.parse import urlencode

import msgspec
import structlog

from store.consul.client import CheckNotReady, ConsulTransport, seconds
from store.imports import absent
from store.kv.protocol import Denied, Session, SessionExpired, SessionInfo, SessionSpec, StoreError, Unavailable
from store.timing import Backoff

log = structlog.get_logger(__name__)

SERVICE = "rcfarm-session"
DEREGISTER_AFTER = "1m"  # Consul's minimum; removes the service that a crashed holder left on the agent
READY_TIMEOUT = 5.0  # seconds for a new check to reach the catalog; it takes a few milliseconds
CLEANUP_TIMEOUT = 2.0  # seconds
_CHECK_GONE = ("does not have associated TTL", "Unknown check")
_SERVICE_GONE = "Unknown service"
_EXPECTED = frozenset({200, 404})


@cache
def _endpoints() -> Any:
    """Return `consul.base`. `requests`, on which the package's own client is built, takes 50 ms to import, a twentieth
    of a farm's start with 1,000 RCs. Without it the package fails to import, after this module."""
    if "consul" not in sys.modules:
        with absent("requests"), suppress(ImportError):
            importlib.import_module("consul")
        if "consul" not in sys.modules:
            return sys.modules.pop("consul.base")  # ours alone: another import begins with the package
    return importlib.import_module("consul.base")


class ConsulApi:
    """python-consul2's `agent`, `session`, `health` and `catalog` over our own transport; every method is a coroutine
    function. Failures raise errors of `store.kv.protocol`; only 200 and 404 reach the library's callbacks.

    Only the endpoint classes are used. The library's `Consul` object would let CONSUL_HTTP_ADDR and CONSUL_HTTP_TOKEN
    override its arguments, and its asyncio client opens a connection per call. The token travels with the transport,
    so the library never sees it.
    """

    def __init__(self, transport: ConsulTransport) -> None:
        base = _endpoints()
        self.http = _Http(transport, base.Response)
        self.token = self.dc = None
        self.consistency = "default"
        self.agent = base.Consul.Agent(self)
        self.session = base.Consul.Session(self)
        self.health = base.Consul.Health(self)
        self.catalog = base.Consul.Catalog(self)


class _Http:
    """What the library's endpoints call, with the methods of its `HTTPClient`."""

    def __init__(self, transport: ConsulTransport, response: Callable[..., Any]) -> None:
        self._transport, self._response = transport, response
        self.get, self.put = partial(self._send, "GET"), partial(self._send, "PUT")
        self.delete, self.post = partial(self._send, "DELETE"), partial(self._send, "POST")

    async def _send(
        self,
        method: str,
        callback: Callable[[Any], Any],
        path: str,
        params: Sequence[tuple[str, str]] | dict[str, str] | None = None,
        data: str | bytes = "",
        headers: object = None,
    ) -> Any:
        body = None if method == "GET" else data.encode() if isinstance(data, str) else data
        answer = await self._transport.call(method, path, urlencode(params or ()), body, expected=_EXPECTED)
        index = {} if answer.raft_index is None else {"X-Consul-Index": str(answer.raft_index)}
        return callback(self._response(answer.status, index, answer.body.decode(), answer.body))


class _Created(msgspec.Struct, rename={"id": "ID"}):
    id: str


@dataclass(slots=True)
class _OwnSession:
    """One session of this process. `service`: the id of its service and check on the agent; None without a check.
    `in_doubt`: the last attempt to renew it did not succeed."""

    service: str | None
    ttl: float
    check_ttl: float
    renewed_at: float
    passed_at: float
    in_doubt: bool = False


class ConsulSessions:
    """Creates, renews and ends the sessions of one process. `clock`: seconds, monotonic."""

    def __init__(self, transport: ConsulTransport, api: Callable[[], ConsulApi], clock: Callable[[], float]) -> None:
        self._transport, self._api, self._clock = transport, api, clock
        self._own: dict[str, _OwnSession] = {}

    async def create(self, spec: SessionSpec) -> Session:
        """See `Store.create_session`."""
        await asyncio.to_thread(self._api)  # the first call imports the library, for 70 ms
        started = self._clock()
        service = None if spec.check_ttl is None else f"{SERVICE}-{secrets.token_hex(8)}"
        note = ""
        try:
            if service is not None:
                check = {
                    "CheckID": service,
                    "Name": f"session of {spec.name}",
                    "TTL": f"{spec.check_ttl:g}s",
                    "Status": "passing",
                    "DeregisterCriticalServiceAfter": DEREGISTER_AFTER,
                }
                try:
                    await self._api().agent.service.register(SERVICE, service_id=service, check=check)
                except Denied as error:
                    note = f"no TTL check, so a crash is noticed after {spec.ttl:g} to {2 * spec.ttl:g} s: {error}"
                    service = None
            session_id = await self._create(spec, service)
        except BaseException:
            await self._clean_up(service)
            raise
        check_ttl = spec.ttl if service is None or spec.check_ttl is None else min(spec.ttl, spec.check_ttl)
        self._own[session_id] = _OwnSession(service, spec.ttl, check_ttl, started, started)
        return Session(session_id, check_ttl, note)

    async def renew(self, session_id: str) -> None:
        """See `Store.renew_session`."""
        own = self._own.get(session_id)
        if own is None:
            await self._renew_session(session_id)
            return
        sent = self._clock()
        due = own.in_doubt or own.service is None or sent - own.renewed_at >= own.ttl / 3
        own.in_doubt = True
        try:
            lapsed = own.service is not None and await self._pass_check(own, own.service)
            if lapsed or due:
                await self._renew_session(session_id)
                own.renewed_at = sent
        except SessionExpired:
            del self._own[session_id]
            await self._clean_up(own.service)
            raise
        own.passed_at, own.in_doubt = sent, False

    async def destroy(self, session_id: str) -> None:
        """See `Store.destroy_session`; the service goes, too."""
        own = self._own.pop(session_id, None)
        try:
            await self._api().session.destroy(session_id)
        finally:
            if own is not None and own.service is not None:
                await self._deregister(own.service)

    async def info(self, session_id: str) -> SessionInfo | None:
        """See `Store.session_info`."""
        _, found = await self._api().session.info(session_id)
        if not found:
            return None
        return SessionInfo(found["ID"], found["Name"], seconds(found["TTL"]), found["Behavior"])

    async def _create(self, spec: SessionSpec, service: str | None) -> str:
        """Create the session as soon as its check has arrived in the catalog."""
        checks = [] if service is None else [{"ID": service}]
        request: dict[str, Any] = {
            "Name": spec.name,
            "TTL": f"{spec.ttl:g}s",
            "LockDelay": f"{spec.lock_delay:g}s",
            "Behavior": spec.behavior,
            "NodeChecks": [],  # the library's call can't leave out the node's own check
            "ServiceChecks": checks,
        }
        body = msgspec.json.encode(request)
        backoff, deadline = Backoff(0.005, 0.2), self._clock() + READY_TIMEOUT
        while True:
            try:
                answer = await self._transport.call("PUT", "/v1/session/create", body=body)
            except CheckNotReady:
                if self._clock() > deadline:
                    raise
            else:
                return msgspec.json.decode(answer.body, type=_Created).id
            await asyncio.sleep(backoff.pause())

    async def _pass_check(self, own: _OwnSession, service: str) -> bool:
        """Pass the check. Return whether it may have lapsed before."""
        try:
            await self._api().agent.check.ttl_pass(service)
        except Unavailable as error:
            if any(reason in str(error) for reason in _CHECK_GONE):
                raise SessionExpired(f"the agent has lost the session's check {service}") from error
            raise
        return self._clock() - own.passed_at >= own.check_ttl

    async def _renew_session(self, session_id: str) -> None:
        try:
            await self._api().session.renew(session_id)
        except _endpoints().NotFound:
            raise SessionExpired(f"session {session_id} does not exist any more") from None

    async def _deregister(self, service: str) -> None:
        try:
            await self._api().agent.service.deregister(service)
        except Unavailable as error:
            if _SERVICE_GONE not in str(error):
                raise

    async def _clean_up(self, service: str | None) -> None:
        """Remove the service of a session that was not created or has ended; at worst the agent removes it later."""
        if service is None:
            return
        try:
            async with asyncio.timeout(CLEANUP_TIMEOUT):
                await self._deregister(service)
        except (StoreError, TimeoutError) as error:
            log.warning("Could not remove a session's service; the agent will do so", service=service, error=str(error))
