"""`rcfarm agent`: its process, and readiness and metrics of agents over the embedded store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from rcfarm.agent.agent import Agent
from rcfarm.config.agent import AgentSettings
from rcfarm.roles.agent import AgentMetrics, agent_conditions
from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from tests.support.agent.agents import harness, manifest
from tests.support.waiting import background, until

ASK = (
    "import ctypes; from rcfarm.roles import agent; from rcfarm.config.settings import Settings; "
    "agent.run_role = lambda *_: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0); "
    "print(agent.run_agent(Settings()))"
)


def test_pods_of_the_agents_own_user_can_not_read_its_memory() -> None:
    """The kernel counts the agent's process as not dumpable (PR_GET_DUMPABLE), so only root may look into it."""
    ran = subprocess.run([sys.executable, "-c", ASK], capture_output=True, check=True, text=True)
    assert ran.stdout == "0\n"


async def test_metrics_of_agents_of_one_process_carry_their_node(tmp_path: Path) -> None:
    """Each agent is not ready until it is registered, then it is; its metrics carry its node."""
    store, registry, metrics = EmbeddedStore(None), CollectorRegistry(), AgentMetrics()
    registry.register(metrics)
    agents = {node: Agent(store, Keys(), AgentSettings(node=node, state_dir=tmp_path / node)) for node in ("a", "b")}
    for node, agent in agents.items():
        metrics.watch(node, agent)
        assert {condition.name for condition in agent_conditions(agent) if not condition.holds} == {"registered"}

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"rcfarm_agent_{name}", labels)

    assert value("registered", node="a") == value("session_held", node="a") == 0
    async with background(agents["a"].run()):
        await until(lambda: value("registered", node="a"))
        assert all(condition.holds and not condition.reason for condition in agent_conditions(agents["a"]))
        assert value("session_held", node="a") == 1
        assert value("session_held", node="b") == value("registered", node="b") == 0
        assert value("pods", node="a", state="running") == value("pods", node="a", state="crashing") == 0
        assert value("unhealthy_pods", node="a") == value("worker_failures_total", node="a") == 0
    await store.close()


async def test_a_crash_loop_is_in_the_metrics(tmp_path: Path) -> None:
    """A pod that crashes is counted as crashing and unhealthy, with its restarts under its own name."""
    store, registry, metrics = EmbeddedStore(None), CollectorRegistry(), AgentMetrics()
    registry.register(metrics)
    async with harness(store, tmp_path / "node-1") as node:
        metrics.watch("node-1", node.start())
        await node.intend(manifest(command=["sh", "-c", "exit 3"]))
        await node.until_condition("crashing")
        await node.until(lambda reality: reality.launchables["main"].restarts >= 3)

        def value(name: str, **labels: str) -> float:
            return registry.get_sample_value(f"rcfarm_agent_{name}", {"node": "node-1", **labels}) or 0

        assert value("process_restarts_total", pod="web") >= 3
        assert value("unhealthy_pods") == value("pods", state="crashing") == 1
        assert value("pods", state="starting") == 0
    await store.close()
