"""Discovery: one service that is refused hinders no other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rcfarm.agent.discovery import Discovery, Service
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Denied

SERVICE = Service("web", "127.0.0.1", 80, {"http": 80}, {}, "rc-1")


class ConsulAgent:
    """A Consul agent that refuses services named `refused`. `registered`: the others, with the time of each."""

    def __init__(self) -> None:
        self.registered: dict[str, float] = {}
        self.service = SimpleNamespace(register=self._register, deregister=self._deregister)

    async def services(self) -> dict[str, Any]:
        return dict.fromkeys(self.registered)

    async def _register(self, name: str, *, service_id: str, **_: Any) -> None:
        if name == "refused":
            raise Denied("no permission")
        self.registered[service_id] = asyncio.get_running_loop().time()

    async def _deregister(self, service_id: str) -> None:
        del self.registered[service_id]


@pytest.mark.looptime
async def test_a_refused_service_that_is_no_longer_wanted_delays_nothing() -> None:
    """Retries end with the pod: later changes are applied at once again."""
    agent, discovery = ConsulAgent(), Discovery(EmbeddedStore(), "node-1", 60)
    discovery._agent = agent
    running = asyncio.create_task(discovery.run())
    discovery.want("bad", SERVICE._replace(name="refused"))
    await asyncio.sleep(1)
    discovery.want("bad", None)
    await asyncio.sleep(20)
    now = asyncio.get_running_loop().time()
    discovery.want("good", SERVICE)
    await asyncio.sleep(10)
    assert agent.registered == {"rcfarm:node-1:good": now}
    running.cancel()
