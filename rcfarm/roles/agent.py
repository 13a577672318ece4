"""`rcfarm agent`: a node agent, with its readiness and its metrics, which are read from it at each scrape.

One `AgentMetrics` serves every agent of a process (`rcfarm dev` runs several), distinguished by the label `node`.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rcfarm.agent.agent import Agent
from rcfarm.agent.cgroups import CONTROLLERS
from rcfarm.agent.state import StateDir
from rcfarm.config.agent import AgentSettings
from rcfarm.config.settings import Settings
from rcfarm.daemon.health import Condition, Health
from rcfarm.daemon.readiness import PORTS
from rcfarm.roles.base import VERSION, Role, run_role, secret_store_of
from rcfarm.telemetry.prometheus import labelled
from store.kv.protocol import Store
from store.schema.keys import Keys
from store.schema.records import PodState

LAYOUT_TIMEOUT = 2.0  # seconds that an agent waits for its store before it starts without it
_PR_SET_DUMPABLE = 4
SHOWN_CONDITIONS = ("crashing", "completed")  # conditions of health shown in place of the pod's state


def run_agent(settings: Settings) -> int:
    """Run a node agent until a signal. Return the exit code."""
    # Close this process, whose environment may hold tokens, to other processes of its user: pods of an agent that does
    # not run as root must not read its memory and environment. This also disables core dumps
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    return run_role(settings, PORTS["agent"], lambda store, registry: AgentRole(settings, store, registry))


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
        if metrics is None:
            metrics = AgentMetrics()
            registry.register(metrics)
        self._metrics = metrics

    async def layout_keys(self) -> Keys:
        """Return the layout; after `LAYOUT_TIMEOUT`, the one recorded by an earlier start: the pods need their
        agent."""
        shards = StateDir(self._settings.state_dir).load_node().shards
        try:
            async with asyncio.timeout(LAYOUT_TIMEOUT if shards else None):
                return await super().layout_keys()
        except TimeoutError:
            return Keys(self.settings.store.root, shards)

    async def work(self, keys: Keys) -> None:
        secrets = secret_store_of(self.store, "agent.secrets_token_file", self._settings.secrets_token_file)
        try:
            agent = Agent(self.store, keys, self._settings, version=VERSION, secret_store=secrets)
            self._metrics.watch(self._settings.node, agent)
            self.health = Health(str, partial(agent_conditions, agent))
            await agent.run()
        finally:
            if secrets is not None:
                await secrets.close()


def agent_conditions(agent: Agent) -> list[Condition]:
    """Return the conditions under which the agent follows the farms' intents. Its pods run either way."""
    view_error = agent.view.error
    return [
        Condition("registered", not agent.problem, agent.problem),
        Condition("store", view_error is None, f"the node's intents can't be read: {view_error}" if view_error else ""),
        Condition("disk", not agent.full_disk, agent.full_disk),
    ]


class AgentMetrics(Collector):
    """The agents of this process, by node. Register it once. `clock`: monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._agents: dict[str, Agent] = {}

    def watch(self, node: str, agent: Agent) -> None:
        """Include this agent in the metrics."""
        self._agents[node] = agent

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; the registry calls this at every scrape."""
        pods = GaugeMetricFamily("rcfarm_agent_pods", "Pods, by state.", labels=["node", "state"])
        restarts = CounterMetricFamily(
            "rcfarm_agent_process_restarts",
            "Starts of a pod's processes after the first ones; begins at 0 with each manifest.",
            labels=["node", "pod"],  # an alert names the pod that crashes
        )
        unhealthy: dict[str, int] = {}
        for node, agent in self._agents.items():
            states = Counter(dict.fromkeys((*get_args(PodState), *SHOWN_CONDITIONS), 0))
            unhealthy[node] = 0
            for pod_id, worker in agent.workers.items():
                health = worker.health
                condition = health.condition if health else ""
                states[condition if condition in SHOWN_CONDITIONS else worker.state] += 1
                unhealthy[node] += health is not None and (health.status != "passing" or condition == "blocked")
                restarts.add_metric([node, pod_id], worker.restarts)
            for state, count in states.items():
                pods.add_metric([node, state], count)
        yield pods
        text = "Pods that do not pass, or can't be reconciled with their intent."
        yield labelled("rcfarm_agent_unhealthy_pods", text, "node", unhealthy)
        yield restarts
        yield from self._used()
        failures = {node: agent.worker_failures for node, agent in self._agents.items()}
        text = "Unexpected errors in the worker of a pod."
        yield labelled("rcfarm_agent_worker_failures", text, "node", failures, CounterMetricFamily)
        reasons = GaugeMetricFamily(
            "rcfarm_agent_reasons", "1 while the node has a reason of this code.", labels=["node", "code"]
        )
        for node, agent in self._agents.items():
            reasons.add_metric([node, "disk_full"], float(bool(agent.full_disk)))
        yield reasons
        yield self._gauge("registered", "1 while the node follows intents.", lambda agent: not agent.problem)
        yield self._gauge(
            "session_held", "1 while the agent's session is safe.", lambda agent: agent.keeper.state == "held"
        )
        now = self._clock()
        yield self._gauge(
            "view_age_seconds",
            "Since the store last answered about intents.",
            lambda agent: 0.0 if agent.view.last_contact is None else now - agent.view.last_contact,
        )
        yield self._gauge("view_failing", "1 while intents can't be read.", lambda agent: agent.view.error is not None)
        yield self._gauge("undecodable_intents", "Undecodable intents.", lambda agent: len(agent.view.bad))
        losses = {node: agent.keeper.losses for node, agent in self._agents.items()}
        text = "Sessions that the store ended."
        yield labelled("rcfarm_agent_session_losses", text, "node", losses, CounterMetricFamily)

    def _used(self) -> Iterator[Metric]:
        """Yield what each pod used some seconds ago."""

        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"rcfarm_pod_{name}", text, labels=["node", "pod"])

        memory = gauge("memory_bytes", "Memory of the pod's processes, without the file cache that can be dropped.")
        limit = gauge("memory_limit_bytes", "The sum of the memory limits of its launchables, if all have one.")
        pids = gauge("pids", "Processes and threads of the pod.")
        cpu = CounterMetricFamily(
            "rcfarm_pod_cpu_seconds", "CPU time of the pod since it runs its manifest.", labels=["node", "pod"]
        )
        ooms = CounterMetricFamily(
            "rcfarm_pod_oom_kills",
            "Processes of the pod that the kernel killed for lack of memory, since it runs its manifest.",
            labels=["node", "pod"],
        )
        for node, agent in self._agents.items():
            for pod_id, worker in agent.workers.items():
                if worker.pod is None or not (samples := worker.pod.samples.values()):
                    continue
                labels = [node, pod_id]
                memory.add_metric(labels, sum(sample.memory for sample in samples))
                if bound := worker.pod.memory_limit:
                    limit.add_metric(labels, bound)
                pids.add_metric(labels, sum(sample.pids for sample in samples))
                cpu.add_metric(labels, sum(sample.cpu for sample in samples))
                ooms.add_metric(labels, sum(sample.oom_kills for sample in samples))
        yield from (memory, limit, pids, cpu, ooms)
        enforced = GaugeMetricFamily(
            "rcfarm_agent_limits_enforced",
            "1 if limits of this kind hold for whole trees of processes, by control groups.",
            labels=["node", "limit"],
        )
        for node, agent in self._agents.items():
            for controller in CONTROLLERS:
                enforced.add_metric([node, controller], float(controller in agent.groups.enforcement.enforced))
        yield enforced

    def _gauge(self, name: str, text: str, read: Callable[[Agent], float]) -> Metric:
        return labelled(f"rcfarm_agent_{name}", text, "node", {node: read(each) for node, each in self._agents.items()})
