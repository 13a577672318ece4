"""`rcfarm jobs`: the Framework operator under an election, with its events, metrics and probe.

The model: two components. Events come first and end last. The operator runs inside the election: a replica without the
lease only waits for it, and one that loses the lease fails, so that the process starts anew. All that the operator
writes goes through the fence of its election; events don't, for they harm nobody.

The election has a client of its own: its renewals wait neither for the operator's rate limit nor for its connections.
"""

from __future__ import annotations

import os
import socket
import uuid
from functools import partial

from prometheus_client import CollectorRegistry

from controllers.framework.operator import FrameworkOperator
from rcfarm import daemon
from rcfarm.config import KubeSettings, Settings
from rcfarm.daemon import Component
from rcfarm.jobs_probe import JobsProbe
from rcfarm.kube_metrics import PrometheusJobMetrics, RestClientMetrics
from rcfarm.logging import configure
from rcfarm.metrics import WorkQueueMetrics, new_registry
from rcfarm.roles import VERSION, run_components
from store.kube.access import AccessSource, Credentials
from store.kube.api import KubeApi
from store.kube.client import KubeClient
from store.kube.config import current_namespace, find_access
from store.kube.events import EventRecorder
from store.kube.fence import FencedApi
from store.kube.lease import Election
from store.kube.limits import Limits

JOBS_PORT = 9703  # of the listener, unless web.listen says otherwise
NAME = "rcfarm-jobs"


def run_jobs(settings: Settings) -> int:
    """Run the Framework operator until a signal; answers the exit code. Raises `BadSettings` and `NoConfig`."""
    settings.jobs.operator()
    configure(settings.log.level, settings.log.format)

    async def main() -> int:
        registry = new_registry(VERSION)
        credentials = await Credentials.open(_access(settings.kube))
        requests = RestClientMetrics(registry, credentials.server)
        client = partial(KubeClient, credentials, user_agent=f"{NAME}/{VERSION}", metrics=requests)
        limits, lease_limits = _limits(settings)
        async with client(limits=limits) as api, client(limits=lease_limits) as lease_api:
            role = JobsRole(settings, api, lease_api, registry, requests)
            return await run_components(settings, JOBS_PORT, registry, role.components())

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
        self._election = _election(settings, lease_api)
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


def _access(kube: KubeSettings) -> AccessSource:
    server = kube.server or os.environ.get("KUBE_APISERVER_ADDRESS")
    return find_access(kube.kubeconfig or None, context=kube.context or None, server=server or None)


def _limits(settings: Settings) -> tuple[Limits, Limits]:
    """Of the operator's client, and of the election's."""
    kube = settings.kube
    return (
        Limits(call_timeout=kube.call_timeout, qps=kube.qps, burst=kube.burst),
        Limits(call_timeout=settings.jobs.renew_deadline, max_connections=2),
    )


def _election(settings: Settings, api: KubeApi) -> Election | None:
    jobs, kube = settings.jobs, settings.kube
    lease = jobs.lease_in(current_namespace(kube.kubeconfig or None, context=kube.context or None))
    if lease is None:
        return None
    return Election(
        api,
        lease.namespace,
        lease.name,
        f"{socket.gethostname()}_{uuid.uuid4()}",
        lease_duration=jobs.lease_duration,
        renew_deadline=jobs.renew_deadline,
        retry_period=jobs.retry_period,
    )
