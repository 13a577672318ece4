"""What node agents look like from outside: readiness, and metrics that are read off them at each scrape.

One `AgentMetrics` serves every agent of a process (`rcfarm dev` runs several), told apart by the label `node`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rcfarm.agent.agent import Agent
from rcfarm.agent.pod import PodWorker
from rcfarm.web import Condition
from store.records import PodState

SHOWN_CONDITIONS = ("crashing", "completed")  # of health, that are shown in place of the pod's state


def _doing(worker: PodWorker) -> str:
    health = worker.health
    return health.condition if health and health.condition in SHOWN_CONDITIONS else worker.state


def _unhealthy(agent: Agent) -> int:
    verdicts = (worker.health for worker in agent.workers.values())
    return sum(
        health is not None and (health.status != "passing" or health.condition == "blocked") for health in verdicts
    )


def agent_conditions(agent: Agent) -> list[Condition]:
    """What must hold for the agent to follow the farms' intents. Its pods run either way."""
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
        """Show this agent from now on."""
        self._agents[node] = agent

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at every scrape."""
        yield self._pods()
        yield self._gauge("unhealthy_pods", "Pods that do not pass, or can't be brought to their intent.", _unhealthy)
        yield self._restarts()
        failures = CounterMetricFamily(
            "rcfarm_agent_worker_failures", "Errors in the work on a pod that the agent does not know.", labels=["node"]
        )
        for node, agent in self._agents.items():
            failures.add_metric([node], agent.worker_failures)
        yield failures
        yield self._gauge("registered", "1 while the node follows intents.", lambda agent: not agent.problem)
        yield self._gauge(
            "session_held", "1 while the agent's session is safe.", lambda agent: agent.keeper.state == "held"
        )
        yield self._gauge("view_age_seconds", "Since the store last answered about intents.", self._age)
        yield self._gauge("view_failing", "1 while intents can't be read.", lambda agent: agent.view.error is not None)
        yield self._gauge("undecodable_intents", "Intents that can't be understood.", lambda agent: len(agent.view.bad))
        losses = CounterMetricFamily("rcfarm_agent_session_losses", "Sessions that the store ended.", labels=["node"])
        for node, agent in self._agents.items():
            losses.add_metric([node], agent.keeper.losses)
        yield losses

    def _pods(self) -> Metric:
        family = GaugeMetricFamily("rcfarm_agent_pods", "Pods, by what they are doing.", labels=["node", "state"])
        for node, agent in self._agents.items():
            states = Counter(dict.fromkeys((*get_args(PodState), *SHOWN_CONDITIONS), 0))
            states.update(_doing(worker) for worker in agent.workers.values())
            for state, count in states.items():
                family.add_metric([node, state], count)
        return family

    def _restarts(self) -> Metric:
        """One series per pod of the node: which one crashes is the question that an alert raises."""
        family = CounterMetricFamily(
            "rcfarm_agent_process_restarts",
            "Starts of a pod's processes after the first ones; begins at 0 with each manifest.",
            labels=["node", "pod"],
        )
        for node, agent in self._agents.items():
            for pod_id, worker in agent.workers.items():
                family.add_metric([node, pod_id], worker.restarts)
        return family

    def _gauge(self, name: str, text: str, read: Callable[[Agent], float]) -> Metric:
        family = GaugeMetricFamily(f"rcfarm_agent_{name}", text, labels=["node"])
        for node, agent in self._agents.items():
            family.add_metric([node], float(read(agent)))
        return family

    def _age(self, agent: Agent) -> float:
        last = agent.view.last_contact
        return 0.0 if last is None else self._clock() - last
