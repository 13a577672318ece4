"""The façade's `/v1/agent` and `/v1/status`: enough for TTL checks that sessions are bound to, and registrations."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aiohttp import web

from store.consul_api_json import CheckRequest, ServiceRequest, UpdateRequest, decode_request, parse_duration
from store.consul_kv_api import json_response
from store.kv import Invalid
from store.local_agent import STATUSES, Check, LocalAgent, Service

CONSUL_VERSION = "1.8.7"
_VERDICTS = {"pass": "passing", "warn": "warning", "fail": "critical"}
_LONGEST_TIME = 366 * 86_400.0  # seconds; a timer can't wait for just any time
_LEADER = "127.0.0.1:8300"


class AgentApi:
    """Handlers over one local agent. `node`: the name of the only node."""

    def __init__(self, agent: LocalAgent, node: str) -> None:
        self._agent = agent
        self._node = node

    def routes(self) -> list[web.RouteDef]:
        """What to mount."""
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
        return json_response({service.id: _service_json(service) for service in self._agent.services.values()})

    async def checks(self, request: web.Request) -> web.Response:
        """GET /v1/agent/checks."""
        return json_response({check.id: self._check_json(check) for check in self._agent.checks.values()})

    async def register_service(self, request: web.Request) -> web.Response:
        """PUT /v1/agent/service/register."""
        wanted = decode_request(await request.read(), ServiceRequest)
        if not wanted.name:
            raise Invalid("Missing service name")
        service = Service(
            id=wanted.id or wanted.name,
            name=wanted.name,
            tags=wanted.tags,
            address=wanted.address,
            port=wanted.port,
            meta=wanted.meta,
        )
        self._agent.add_service(service, _service_checks(service, wanted))
        return web.Response()

    async def deregister_service(self, request: web.Request) -> web.Response:
        """PUT /v1/agent/service/deregister/ID."""
        self._agent.remove_service(request.match_info["id"])
        return web.Response()

    async def register_check(self, request: web.Request) -> web.Response:
        """PUT /v1/agent/check/register."""
        wanted = decode_request(await request.read(), CheckRequest)
        if not wanted.name:
            raise Invalid("Missing check name")
        if wanted.serviceid and wanted.serviceid not in self._agent.services:
            raise Invalid(f'ServiceID "{wanted.serviceid}" does not exist')
        self._agent.add_check(_check(wanted, wanted.name, wanted.name, wanted.serviceid))
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
        wanted = decode_request(await request.read(), UpdateRequest)
        if wanted.status not in STATUSES:
            raise Invalid(f"Invalid check status: '{wanted.status}'")
        return self._report(request, wanted.status, wanted.output)

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


def _service_checks(service: Service, wanted: ServiceRequest) -> list[Check]:
    described = [*wanted.checks, *([wanted.check] if wanted.check else ())]
    name = f"Service '{service.name}' check"
    plain = f"service:{service.id}"
    return [
        _check(each, plain if len(described) == 1 else f"{plain}:{number}", name, service.id)
        for number, each in enumerate(described, 1)
    ]


def _check(wanted: CheckRequest, default_id: str, default_name: str, service_id: str) -> Check:
    status = wanted.status or "critical"
    if status not in STATUSES:
        raise Invalid(f"Invalid check status: '{status}'")
    return Check(
        id=wanted.checkid or wanted.id or default_id,
        name=wanted.name or default_name,
        ttl=_seconds(wanted.ttl),
        status=status,
        notes=wanted.notes,
        service_id=service_id,
        deregister_after=_seconds(wanted.deregistercriticalserviceafter),
    )


def _seconds(wanted: str | int) -> float:
    seconds = (parse_duration(wanted) if wanted else 0.0) if isinstance(wanted, str) else wanted / 1e9
    if not 0.0 <= seconds <= _LONGEST_TIME:
        raise Invalid(f"a time of {seconds:g} s; it must be within 0 and {_LONGEST_TIME:g} s")
    return seconds


def _service_json(service: Service) -> dict[str, Any]:
    answer = {name.title(): member for name, member in asdict(service).items() if name not in ("id", "name")}
    return {"ID": service.id, "Service": service.name, **answer}
