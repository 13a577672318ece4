"""The façade's `/v1/agent` and `/v1/status`: services and their TTL checks, which sessions are bound to.

A TTL check is passing until no report has come for its TTL; then it is critical, every session bound to it ends at
once, and `deregister_after` seconds later (if set) the service is removed. Checks of other kinds (HTTP, TCP,
scripts) are kept with the status that they were registered with, but are not run: nothing in an embedded store's
process opens connections to other machines.

Registrations live in memory. Only the checks that a session in the store's file is bound to come back after a restart,
so that their holders keep their sessions; programs that register services for discovery register them again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import structlog
from aiohttp import web

from store.embedded.consul_api.kv import json_response
from store.embedded.consul_api.wire import CheckRequest, ServiceRequest, UpdateRequest, decode_request, parse_duration
from store.embedded.leases import Leases
from store.embedded.state import CheckKind, SessionCheck
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Invalid, Unavailable

log = structlog.get_logger(__name__)

CONSUL_VERSION = "1.8.7"
_VERDICTS = {"pass": "passing", "warn": "warning", "fail": "critical"}
_LONGEST_TIME = 366 * 86_400.0  # seconds; a timer can't wait for just any time
_LEADER = "127.0.0.1:8300"
SERF_HEALTH = "serfHealth"
STATUSES = ("passing", "warning", "critical")


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
        return json_response({check.id: self._check_json(check) for check in self._agent.checks.values()})

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
        self._agent.add_service(service, _service_checks(service, requested))
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

    def _check_json(self, check: Check) -> dict[str, Any]:
        service = self._agent.services.get(check.service_id)
        return {
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


def _service_checks(service: Service, requested: ServiceRequest) -> list[Check]:
    described = [*requested.checks, *([requested.check] if requested.check else ())]
    name = f"Service '{service.name}' check"
    plain = f"service:{service.id}"
    return [
        _check(each, plain if len(described) == 1 else f"{plain}:{number}", name, service.id)
        for number, each in enumerate(described, 1)
    ]


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
