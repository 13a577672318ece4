"""`rcfarm agent`: a node agent with its metrics."""

from __future__ import annotations

import asyncio
import ctypes

from prometheus_client import CollectorRegistry

from rcfarm.agent.agent import Agent
from rcfarm.agent.settings import AgentSettings
from rcfarm.agent.state import StateDir
from rcfarm.agent_probe import AgentMetrics, agent_conditions
from rcfarm.config import Settings
from rcfarm.role_ports import PORTS
from rcfarm.roles import VERSION, Role, run_role
from rcfarm.web import Condition
from store.keys import Keys
from store.kv import Store

LAYOUT_PATIENCE = 2.0  # seconds that an agent waits for its store before it looks after its pods alone
_PR_SET_DUMPABLE = 4


def run_agent(settings: Settings) -> int:
    """Run a node agent until a signal; answers the exit code."""
    _keep_secrets()
    return run_role(settings, PORTS["agent"], lambda store, registry: AgentRole(settings, store, registry))


def _keep_secrets() -> None:
    """Close this process, whose environment may hold tokens, to other processes of its user: pods of an agent that does
    not run as root must not read its memory and environment. It writes no core dumps either, then."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


class AgentRole(Role):
    """A node agent. `metrics`: shared by the agents of one process, and registered already."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        registry: CollectorRegistry,
        agent: AgentSettings | None = None,
        metrics: AgentMetrics | None = None,
    ) -> None:
        super().__init__(settings, store, registry)
        self._settings = agent or settings.agent
        self.name = f"agent of {self._settings.node}"
        self._agent: Agent | None = None
        if metrics is None:
            metrics = AgentMetrics()
            registry.register(metrics)
        self._metrics = metrics

    async def _agree(self) -> Keys:
        """The layout. One that an earlier start has noted does for a while: the node's pods need their agent now."""
        shards = StateDir(self._settings.state_dir).load_node().shards
        try:
            async with asyncio.timeout(LAYOUT_PATIENCE if shards else None):
                return await super()._agree()
        except TimeoutError:
            return Keys(self.settings.store.root, shards)

    async def work(self, keys: Keys) -> None:
        self._agent = Agent(self.store, keys, self._settings, version=VERSION)
        self._metrics.watch(self._settings.node, self._agent)
        await self._agent.run()

    def working_conditions(self) -> list[Condition]:
        return agent_conditions(self._agent) if self._agent else []
