"""The façade's `/v1/session`, answering as a Consul 1.8 server does.

A session without a TTL lives until it is destroyed or a check that it is bound to is critical. Its TTL is exact here; a
Consul server may take up to twice as long.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Literal

from aiohttp import web

from store.embedded.consul_api.agent import SERF_HEALTH, LocalAgent
from store.embedded.consul_api.kv import blocking_of, index_headers, json_response
from store.embedded.consul_api.wire import (
    SessionRequest,
    decode_request,
    format_duration,
    parse_duration,
    session_json,
)
from store.embedded.state import CheckKind, SessionRecord
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Invalid, SessionExpired

SHORTEST_TTL, LONGEST_TTL = 10.0, 86_400.0  # seconds, as Consul's
DEFAULT_LOCK_DELAY = 15.0
LONGEST_LOCK_DELAY = 60.0
_SECONDS_BELOW = 1000  # a lock-delay given as a number is in seconds below this, else in nanoseconds
_BEHAVIORS: Mapping[str, Literal["release", "delete"]] = {"release": "release", "delete": "delete"}
_UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


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
        ttl, lock_delay = _ttl(requested.ttl), _lock_delay(requested.lockdelay)
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
            lock_delay=lock_delay,
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


def _ttl(text: str) -> float:
    try:
        ttl = parse_duration(text) if text else 0.0
    except Invalid as error:
        raise Invalid(f"Session TTL '{text}' invalid: {error}") from error
    if ttl and not SHORTEST_TTL <= ttl <= LONGEST_TTL:
        bounds = f"[{format_duration(SHORTEST_TTL)}=24h0m0s]"
        raise Invalid(f"Invalid Session TTL '{round(ttl * 1e9)}', must be between {bounds}")
    return ttl


def _lock_delay(requested: str | float | None) -> float:
    if requested is None or requested == "":
        return DEFAULT_LOCK_DELAY
    if isinstance(requested, str):
        seconds = parse_duration(requested)
    else:
        seconds = requested if requested < _SECONDS_BELOW else requested / 1e9
    return max(0.0, min(seconds, LONGEST_LOCK_DELAY))
