"""What a Consul agent says of itself: for an operator's checks, not for decisions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from store.consul_transport import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """`time`: the agent's clock, to the second, or None. What an embedded store's API does not tell is None, too.

    `max_connections`: that it accepts per client address. `session_ttl_min` in seconds.
    """

    version: str
    datacenter: str
    node: str
    leader: str | None
    time: datetime | None
    max_connections: int | None
    session_ttl_min: float | None
    acls: bool | None


async def server_info(transport: Transport) -> ServerInfo:
    """Ask the agent. Raises `Unavailable`, and `Denied` without `agent:read`."""
    answer = await transport.call("GET", "/v1/agent/self")
    said: dict[str, Any] = msgspec.json.decode(answer.body)
    config, debug = said["Config"], said.get("DebugConfig", {})
    shortest = debug.get("SessionTTLMin")
    return ServerInfo(
        version=config["Version"],
        datacenter=config["Datacenter"],
        node=config["NodeName"],
        leader=said.get("Stats", {}).get("consul", {}).get("leader_addr"),
        time=parsedate_to_datetime(answer.date) if answer.date else None,
        max_connections=debug.get("HTTPMaxConnsPerClient"),
        session_ttl_min=None if shortest is None else seconds(shortest),
        acls=debug.get("ACLsEnabled"),
    )


def seconds(duration: str) -> float:
    """A Go duration, such as `1m30s` or `250ms`, in seconds."""
    sizes = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
    return sum(float(number) * sizes[unit] for number, unit in re.findall(r"([0-9.]+)([a-zµ]+)", duration))
