"""`rcfarm jobs`: the Framework operator under an election, with its events, metrics and probe.

The model: two components. Events come first and end last. The operator runs inside the election: a replica without the
lease only waits for it, and one that loses the lease fails, so that the process restarts. All writes of the operator go
through the fence of its election, except events, which are harmless.

Readiness, progress and metrics are read from these objects. A standby is ready. While a replica leads, readiness also
names what keeps the operator from working. An unavailable API server is no stall: the operator keeps retrying, and a
restart would not help.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from controllers.framework.api.types import State
from controllers.framework.operator import FrameworkOperator
from rcfarm.config.settings import Settings
from rcfarm.daemon import daemon
from rcfarm.daemon.daemon import Component
from rcfarm.daemon.health_server import Condition, StallDetector
from rcfarm.daemon.logging import configure
from rcfarm.daemon.readiness import PORTS
from rcfarm.roles.base import VERSION, clients, new_election, run_components, run_elected
from rcfarm.telemetry.kube import (
    PrometheusJobMetrics,
    RestClientMetrics,
    election_metrics,
    event_metrics,
    informer_metrics,
)
from rcfarm.telemetry.prometheus import WorkQueueMetrics, labelled, new_registry
from store.kube.api.objects import EVENTS, LEASES
from store.kube.api.protocol import KubeApi
from store.kube.events import EventRecorder
from store.kube.leaderelection.election import Election, FencedApi

NAME = "rcfarm-jobs"
STALL_AFTER = 90.0  # seconds: far above the longest request
_BESIDE_THE_WORK = frozenset({EVENTS.plural, LEASES.plural})


def run_jobs(settings: Settings) -> int:
    """Run the Framework operator until a signal. Return the exit code. Raises `BadSettings` and `NoConfig`."""
    settings.jobs.operator()
    configure(settings.log.level, settings.log.format)

    async def main() -> int:
        registry = new_registry(VERSION)
        async with clients(NAME, settings.kube, settings.jobs.election, registry) as (api, lease_api, requests):
            role = JobsRole(settings, api, lease_api, registry, requests)
            return await run_components(settings, PORTS["jobs"], registry, role.components(), store=requests.host)

    return daemon.run(main)


class JobsRole:
    """An operator with its components. `lease_api`: the client of the election."""

    def __init__(
        self,
        settings: Settings,
        api: KubeApi,
        lease_api: KubeApi,
        registry: CollectorRegistry,
        requests: RestClientMetrics,
    ) -> None:
        self._recorder = EventRecorder(api, NAME, host=socket.gethostname())
        self._election = new_election(settings.jobs.election, settings.kube, lease_api)
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
        """Return the components for the daemon, in groups."""
        events = Component(name="events", run=self._recorder.run)
        jobs = Component(
            name="jobs",
            run=partial(run_elected, self._election, self._operator.run),
            conditions=self._probe.conditions,
            stalled=self._probe.stalled,
        )
        return [[events], [jobs]]


class JobsProbe(Collector):
    """Answers for one operator. Register it with the registry that `/metrics` shows. `clock`: monotonic seconds."""

    def __init__(
        self,
        operator: FrameworkOperator,
        election: Election | None,
        recorder: EventRecorder,
        requests: RestClientMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._operator, self._election, self._recorder, self._requests = operator, election, recorder, requests
        self._progress = StallDetector(STALL_AFTER, clock)

    @property
    def _leads(self) -> bool:
        return self._election is None or self._election.is_leader

    def conditions(self) -> list[Condition]:
        """Return the conditions under which the replica works, or can take over."""
        found = []
        if self._election is not None:
            found.append(Condition("lease", not self._election.last_error, self._election.last_error))
        if self._leads:
            found += [Condition(name, not reason, reason) for name, reason in self._operator.problems().items()]
        return found

    def stalled(self) -> str:
        """Return why there is no progress, or "". Requests count as progress, as one sync of a large Framework may be
        long."""
        if self._election is not None and (reason := self._election.stalled()):
            return reason
        queue = self._operator.queue
        answered = sum(count for name, count in self._requests.answered.items() if name not in _BESIDE_THE_WORK)
        is_at_work = self._leads and not self._operator.problems()["operator"]
        stuck = self._progress.stalled_for(queue.completed + answered, busy=is_at_work and queue.is_busy)
        return f"Frameworks are queued, but none has progressed for {stuck:.0f} s" if stuck else ""

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; the registry calls this at every scrape."""
        yield from election_metrics(self._election)
        states = Counter(dict.fromkeys(map(str, State), 0))
        states.update(str(status.state) for status in self._operator.statuses())
        yield labelled("rcfarm_frameworks", "Frameworks of this operator, by state.", "state", states)
        yield from informer_metrics(self._operator.informers)
        yield event_metrics(self._recorder)
