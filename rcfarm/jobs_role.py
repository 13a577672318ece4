"""`rcfarm jobs`: the Framework operator under an election, with its events, metrics and probe.

The model: two components. Events come first and end last. The operator runs inside the election: a replica without the
lease only waits for it, and one that loses the lease fails, so that the process starts anew. All that the operator
writes goes through the fence of its election; events don't, for they harm nobody.
"""

from __future__ import annotations

import socket

from prometheus_client import CollectorRegistry

from controllers.framework.operator import FrameworkOperator
from rcfarm import daemon
from rcfarm.config import Settings
from rcfarm.daemon import Component
from rcfarm.jobs_probe import JobsProbe
from rcfarm.kube_metrics import PrometheusJobMetrics, RestClientMetrics
from rcfarm.kube_role import clients, new_election
from rcfarm.logging import configure
from rcfarm.metrics import WorkQueueMetrics, new_registry
from rcfarm.role_ports import PORTS
from rcfarm.roles import VERSION, run_components
from store.kube.api import KubeApi
from store.kube.events import EventRecorder
from store.kube.fence import FencedApi

NAME = "rcfarm-jobs"


def run_jobs(settings: Settings) -> int:
    """Run the Framework operator until a signal; answers the exit code. Raises `BadSettings` and `NoConfig`."""
    settings.jobs.operator()
    configure(settings.log.level, settings.log.format)

    async def main() -> int:
        registry = new_registry(VERSION)
        async with clients(NAME, settings.kube, settings.jobs, registry) as (api, lease_api, requests):
            role = JobsRole(settings, api, lease_api, registry, requests)
            return await run_components(settings, PORTS["jobs"], registry, role.components(), store=requests.host)

    return daemon.run(main)


class JobsRole:
    """An operator with what belongs to it. `lease_api`: what the election uses."""

    def __init__(
        self,
        settings: Settings,
        api: KubeApi,
        lease_api: KubeApi,
        registry: CollectorRegistry,
        requests: RestClientMetrics,
    ) -> None:
        self._recorder = EventRecorder(api, NAME, host=socket.gethostname())
        self._election = new_election(settings.jobs, settings.kube, lease_api)
        self._operator = FrameworkOperator(
            FencedApi(api, self._election) if self._election else api,
            settings.jobs.operator(),
            self._recorder,
            namespaces=settings.kube.watched,
            metrics=PrometheusJobMetrics(registry),
            queue_metrics=WorkQueueMetrics(registry),
        )
        self._probe = JobsProbe(self._operator, self._election, self._recorder, requests)
        registry.register(self._probe)

    def components(self) -> list[list[Component]]:
        """What a daemon runs, in groups."""
        events = Component(name="events", run=self._recorder.run)
        jobs = Component(name="jobs", run=self._run, conditions=self._probe.conditions, stalled=self._probe.stalled)
        return [[events], [jobs]]

    async def _run(self) -> None:
        if self._election is None:
            await self._operator.run()
        else:
            await self._election.run(self._operator.run)
