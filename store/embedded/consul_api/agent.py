"""The façade's `/v1/session`, and its `/v1/agent` and `/v1/status`: services and their TTL checks, which sessions are
bound to. Answers are those of a Consul 1.8 server.

A TTL check is passing until no report has come for its TTL; then it is critical, every session bound to it ends at
once, and `deregister_after` seconds later (if set) the service is removed. Checks of other kinds (HTTP, TCP,
scripts) are kept with the status that they were registered with, but are not run: nothing in an embedded store's
process opens connections to other machines.

Registrations live in memory. Only the checks that a session in the store's file is bound to come back after a restart,
so that their holders keep their sessions; programs that register services for discovery register them again.

A session without a TTL lives until it is destroyed or a check that it is bound to is critical. Its TTL is exact here; a
Consul server may take up to twice as long.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import structlog
from aiohttp import web

from store.embedded.consul_api.wire import (
    CheckRequest,
    ServiceRequest,
    SessionRequest,
    UpdateRequest,
    blocking_of,
    decode_request,
    index_headers,
    json_response,
    parse_duration,
    session_json,
)
from store.embedded.state import CheckKind, SessionCheck, SessionRecord
from store.embedded.store import EmbeddedStore, Leases
from store.kv.protocol import Invalid, SessionExpired, Unavailable

log = structlog.get_logger(__name__)

CONSUL_VERSION = "1.8.7"
_VERDICTS = {"pass": "passing", "warn": "warning", "fail": "critical"}
_LONGEST_TIME = 366 * 86_400.0  # seconds; a timer can't wait for just any time
_LEADER = "127.0.0.1:8300"
SERF_HEALTH = "serfHealth"
STATUSES = ("passing", "warning", "critical")
SHORTEST_TTL, LONGEST_TTL = 10.0, 86_400.0  # seconds, as Consul's
DEFAULT_LOCK_DELAY = 15.0
LONGEST_LOCK_DELAY = 60.0
_SECONDS_BELOW = 1000  # a lock-delay given as a number is in seconds below this, else in nanoseconds
_BEHAVIORS: Mapping[str, Literal["release", "delete"]] = {"release": "release", "delete": "delete"}
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


@dataclass
class Check:
    """A check. `ttl` 0: it is of a kind that is not run. Durations in seconds."""

    id: str
    name: str
    ttl: float = 0.0
    status: str = "critical"
    output: str = ""
    notes: str = ""
    service_id: str = ""
    deregister_after: float = 0.0


@dataclass
class Service:
    """A service as it was registered."""

    id: str
    name: str
    tags: list[str] = field(default_factory=list)
    address: str = ""
    port: int = 0
    meta: dict[str, Any] = field(default_factory=dict)


class LocalAgent:
    """Services and checks beside an embedded store."""

    def __init__(self, store: EmbeddedStore) -> None:
        self.services: dict[str, Service] = {}
        self.checks: dict[str, Check] = {}
        self._store = store
        self._ttls = Leases(self._expire_check, store.clock)
        self._removals = Leases(self._remove_critical, store.clock)

    def restore(self) -> None:
        """Restore the checks of sessions from before a restart; each has a full TTL from now."""
        for record in self._store.state.sessions.values():
            for bound in record.checks:
                if bound.ttl and bound.id not in self.checks:
                    self.add_check(Check(bound.id, bound.id, bound.ttl, "passing"))

    def close(self) -> None:
        """Stop the timers."""
        self._ttls.close()
        self._removals.close()

    def add_service(self, service: Service, checks: list[Check]) -> None:
        """Register a service with its checks, or replace the registration."""
        self.services[service.id] = service
        for check in checks:
            self.add_check(check)

    def add_check(self, check: Check) -> None:
        """Register a check, or replace the registration. Raises `Unavailable`."""
        self._forget_times(check.id)
        self.checks[check.id] = check
        self.report(check.id, check.status, check.output)

    def report(self, check_id: str, status: str, output: str = "") -> None:
        """Set a check's status and start its TTL again. Raises `KeyError`, and `Unavailable` with nothing reported."""
        check = self.checks[check_id]
        check.output = output
        if status == "critical":
            self._end_sessions(check_id)
            if check.deregister_after and check.service_id:
                self._removals.start(check_id, check.deregister_after)
        else:
            self._removals.drop(check_id)
        check.status = status
        if check.ttl:
            self._ttls.start(check_id, check.ttl)

    def remove_service(self, service_id: str) -> None:
        """Deregister a service and its checks; sessions bound to these end."""
        for check in [check for check in self.checks.values() if check.service_id == service_id]:
            self.remove_check(check.id)
        self.services.pop(service_id, None)

    def remove_check(self, check_id: str) -> None:
        """Deregister a check; sessions bound to it end."""
        if check_id in self.checks:
            self._end_sessions(check_id)
            self._forget_times(check_id)
            del self.checks[check_id]

    def bind(self, check_id: str, kind: CheckKind) -> SessionCheck:
        """Return a new session's record of a check. Raises `Invalid` when the session can't be bound to the check."""
        if check_id == SERF_HEALTH:
            return SessionCheck(check_id, kind)
        check = self.checks.get(check_id)
        if check is None:
            raise Invalid(f"Missing check '{check_id}' registration")
        if check.status == "critical":
            raise Invalid(f"Check '{check_id}' is in critical state")
        return SessionCheck(check_id, kind, check.ttl)

    def _expire_check(self, check_id: str) -> bool:
        try:
            self._end_sessions(check_id)
        except Unavailable as error:
            log.error("Could not end the sessions of a critical check", check=check_id, error=str(error))
            return False
        check = self.checks[check_id]
        if check.status != "critical" and check.deregister_after and check.service_id:
            self._removals.start(check_id, check.deregister_after)
        check.status, check.output = "critical", "TTL expired"
        return True

    def _remove_critical(self, check_id: str) -> bool:
        try:
            self.remove_service(self.checks[check_id].service_id)
        except Unavailable as error:
            log.error("Could not remove a critical service", check=check_id, error=str(error))
            return False
        return True

    def _end_sessions(self, check_id: str) -> None:
        for record in list(self._store.state.sessions.values()):
            if any(bound.id == check_id for bound in record.checks):
                self._store.end_session(record.id)

    def _forget_times(self, check_id: str) -> None:
        self._ttls.drop(check_id)
        self._removals.drop(check_id)


class AgentApi:
    """Handlers over one local agent. `node`: the name of the only node."""

    def __init__(self, agent: LocalAgent, node: str) -> None:
        self._agent = agent
        self._node = node

    def routes(self) -> list[web.RouteDef]:
        """Return the routes to mount."""
        return [
            web.get("/v1/status/leader", self.leader),
            web.get("/v1/status/peers", self.peers),
            web.get("/v1/agent/self", self.self_),
            web.get("/v1/agent/services", self.services),
            web.get("/v1/agent/checks", self.checks),
            web.put("/v1/agent/service/register", self.register_service),
            web.put("/v1/agent/service/deregister/{id:.+}", self.deregister_service),
            web.put("/v1/agent/check/register", self.register_check),
            web.put("/v1/agent/check/deregister/{id:.+}", self.deregister_check),
            web.put("/v1/agent/check/update/{id:.+}", self.update_check),
            web.put("/v1/agent/check/{verdict:pass|warn|fail}/{id:.+}", self.report_check),
        ]

    async def leader(self, request: web.Request) -> web.Response:
        """GET /v1/status/leader: there is always one."""
        return json_response(_LEADER)

    async def peers(self, request: web.Request) -> web.Response:
        """GET /v1/status/peers."""
        return json_response([_LEADER])

    async def self_(self, request: web.Request) -> web.Response:
        """GET /v1/agent/self."""
        config = {
            "Datacenter": "dc1",
            "NodeName": self._node,
            "Server": True,
            "Revision": "",
            "Version": CONSUL_VERSION,
        }
        return json_response({"Config": config, "Member": {"Name": self._node, "Addr": "127.0.0.1", "Status": 1}})

    async def services(self, request: web.Request) -> web.Response:
        """GET /v1/agent/services."""
        answer: dict[str, Any] = {}
        for service in self._agent.services.values():
            others = {name.title(): member for name, member in asdict(service).items() if name not in ("id", "name")}
            answer[service.id] = {"ID": service.id, "Service": service.name, **others}
        return json_response(answer)

    async def checks(self, request: web.Request) -> web.Response:
        """GET /v1/agent/checks."""
        answer: dict[str, Any] = {}
        for check in self._agent.checks.values():
            service = self._agent.services.get(check.service_id)
            answer[check.id] = {
                "Node": self._node,
                "CheckID": check.id,
                "Name": check.name,
                "Status": check.status,
                "Notes": check.notes,
                "Output": check.output,
                "ServiceID": check.service_id,
                "ServiceName": "" if service is None else service.name,
                "ServiceTags": [] if service is None else service.tags,
                "Type": "ttl" if check.ttl else "",
            }
        return json_response(answer)

    async def register_service(self, request: web.Request) -> web.Response:
        """PUT /v1/agent/service/register."""
        requested = decode_request(await request.read(), ServiceRequest)
        if not requested.name:
            raise Invalid("Missing service name")
        service = Service(
            id=requested.id or requested.name,
            name=requested.name,
            tags=requested.tags,
            address=requested.address,
            port=requested.port,
            meta=requested.meta,
        )
        described = [*requested.checks, *([requested.check] if requested.check else ())]
        name, plain = f"Service '{service.name}' check", f"service:{service.id}"
        checks = [
            _check(each, plain if len(described) == 1 else f"{plain}:{number}", name, service.id)
            for number, each in enumerate(described, 1)
        ]
        self._agent.add_service(service, checks)
        return web.Response()

    async def deregister_service(self, request: web.Request) -> web.Response:
        """PUT /v1/agent/service/deregister/ID."""
        self._agent.remove_service(request.match_info["id"])
        return web.Response()

    async def register_check(self, request: web.Request) -> web.Response:
        """PUT /v1/agent/check/register."""
        requested = decode_request(await request.read(), CheckRequest)
        if not requested.name:
            raise Invalid("Missing check name")
        if requested.serviceid and requested.serviceid not in self._agent.services:
            raise Invalid(f'ServiceID "{requested.serviceid}" does not exist')
        self._agent.add_check(_check(requested, requested.name, requested.name, requested.serviceid))
        return web.Response()

    async def deregister_check(self, request: web.Request) -> web.Response:
        """PUT /v1/agent/check/deregister/ID."""
        self._agent.remove_check(request.match_info["id"])
        return web.Response()

    async def report_check(self, request: web.Request) -> web.Response:
        """PUT /v1/agent/check/{pass,warn,fail}/ID."""
        return self._report(request, _VERDICTS[request.match_info["verdict"]], request.query.get("note", ""))

    async def update_check(self, request: web.Request) -> web.Response:
        """PUT /v1/agent/check/update/ID."""
        requested = decode_request(await request.read(), UpdateRequest)
        if requested.status not in STATUSES:
            raise Invalid(f"Invalid check status: '{requested.status}'")
        return self._report(request, requested.status, requested.output)

    def _report(self, request: web.Request, status: str, output: str) -> web.Response:
        check_id = request.match_info["id"]
        check = self._agent.checks.get(check_id)
        if check is None or not check.ttl:
            return web.Response(status=500, text=f'CheckID "{check_id}" does not have associated TTL')
        self._agent.report(check_id, status, output)
        return web.Response()


def _check(requested: CheckRequest, default_id: str, default_name: str, service_id: str) -> Check:
    status = requested.status or "critical"
    if status not in STATUSES:
        raise Invalid(f"Invalid check status: '{status}'")
    return Check(
        id=requested.checkid or requested.id or default_id,
        name=requested.name or default_name,
        ttl=_seconds(requested.ttl),
        status=status,
        notes=requested.notes,
        service_id=service_id,
        deregister_after=_seconds(requested.deregistercriticalserviceafter),
    )


def _seconds(requested: str | int) -> float:
    seconds = (parse_duration(requested) if requested else 0.0) if isinstance(requested, str) else requested / 1e9
    if not 0.0 <= seconds <= _LONGEST_TIME:
        raise Invalid(f"a time of {seconds:g} s; it must be within 0 and {_LONGEST_TIME:g} s")
    return seconds


class SessionApi:
    """Handlers over one store and the agent that keeps the checks. `node`: the name of the only node."""

    def __init__(self, store: EmbeddedStore, agent: LocalAgent, node: str) -> None:
        self._store = store
        self._agent = agent
        self._node = node

    def routes(self) -> list[web.RouteDef]:
        """Return the routes to mount."""
        return [
            web.put("/v1/session/create", self.create),
            web.put("/v1/session/renew/{id}", self.renew),
            web.put("/v1/session/destroy/{id}", self.destroy),
            web.get("/v1/session/info/{id}", self.info),
            web.get("/v1/session/list", self.list),
            web.get("/v1/session/node/{node}", self.list),
        ]

    async def create(self, request: web.Request) -> web.Response:
        """PUT /v1/session/create."""
        requested = decode_request(await request.read(), SessionRequest)
        try:
            ttl = parse_duration(requested.ttl) if requested.ttl else 0.0
        except Invalid as error:
            raise Invalid(f"Session TTL '{requested.ttl}' invalid: {error}") from error
        if ttl and not SHORTEST_TTL <= ttl <= LONGEST_TTL:
            raise Invalid(f"Invalid Session TTL '{round(ttl * 1e9)}', must be between [10s=24h0m0s]")
        lock_delay = requested.lockdelay
        if lock_delay is None or lock_delay == "":
            lock_delay = DEFAULT_LOCK_DELAY
        elif isinstance(lock_delay, str):
            lock_delay = parse_duration(lock_delay)
        elif lock_delay >= _SECONDS_BELOW:
            lock_delay /= 1e9
        behavior = _BEHAVIORS.get(requested.behavior or "release")
        if behavior is None:
            raise Invalid(f"Invalid Behavior setting '{requested.behavior}'")
        named: dict[CheckKind, list[str]] = {
            "NodeChecks": [SERF_HEALTH] if requested.nodechecks is None else requested.nodechecks,
            "ServiceChecks": [check.id for check in requested.servicechecks],
            "Checks": [check_id for check_id in requested.checks if check_id != SERF_HEALTH],
        }
        record = SessionRecord(
            id=str(uuid.uuid4()),
            name=requested.name,
            lease=ttl,
            lock_delay=max(0.0, min(lock_delay, LONGEST_LOCK_DELAY)),
            behavior=behavior,
            ttl=ttl,
            node=requested.node or self._node,
            checks=tuple(self._agent.bind(check_id, kind) for kind, ids in named.items() for check_id in ids),
        )
        await self._store.open_session(record)
        return json_response({"ID": record.id})

    async def renew(self, request: web.Request) -> web.Response:
        """PUT /v1/session/renew/ID; 404 when there is no such session."""
        session_id = _session_id(request)
        try:
            await self._store.renew_session(session_id)
        except SessionExpired:
            return web.Response(status=404, text=f"Session id '{session_id}' not found")
        return json_response([session_json(self._store.state.sessions[session_id])])

    async def destroy(self, request: web.Request) -> web.Response:
        """PUT /v1/session/destroy/ID."""
        await self._store.destroy_session(_session_id(request))
        return json_response(True)

    async def info(self, request: web.Request) -> web.Response:
        """GET /v1/session/info/ID: a list of one, or of none."""
        session_id = _session_id(request)
        index = await self._store.watch_sessions(*blocking_of(request))
        record = self._store.state.sessions.get(session_id)
        answer = [] if record is None else [session_json(record)]
        return json_response(answer, headers=index_headers(index))

    async def list(self, request: web.Request) -> web.Response:
        """GET /v1/session/list, and /v1/session/node/NODE for those of one node."""
        index = await self._store.watch_sessions(*blocking_of(request))
        node = request.match_info.get("node")
        records = sorted(self._store.state.sessions.values(), key=lambda record: record.id)
        answer = [session_json(record) for record in records if node in (None, record.node)]
        return json_response(answer, headers=index_headers(index))


def _session_id(request: web.Request) -> str:
    session_id = request.match_info["id"]
    if _UUID.fullmatch(session_id) is None:
        raise Invalid("failed session lookup: index error: UUID must be 36 characters")
    return session_id
