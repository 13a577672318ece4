"""`rcfarm jobs`: operators of Frameworks and training jobs under one election, with their events, metrics and probe.

The model: two components. Events come first and end last. The operators run inside the election: a replica without the
lease only waits for it, and one that loses the lease fails, so that the process restarts. All writes of the operators
go through the fence of the election, except Frameworks' Events, which are harmless.

Readiness, progress and metrics are read from the operators of each kind. A standby is ready. While a replica leads,
readiness also names what keeps a kind from being run. An unavailable API server is no stall: the operators keep
retrying, and a restart would not help.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controllers.framework.api.types import FRAMEWORKS, State
from controllers.framework.operator import FrameworkOperator
from controllers.jobs.api import NotServed
from controllers.jobs.gang import (
    DisruptionBudget,
    GangKind,
    SchedulerPluginsPodGroup,
    VolcanoPodGroup,
    served_resource,
)
from controllers.jobs.status import BadStatus, decode_status
from controllers.training.kind import TrainingJobs
from controllers.training.kinds import KINDS
from controllers.training.pytorch import AUTOSCALERS
from rcfarm.config.settings import Settings
from rcfarm.daemon import daemon
from rcfarm.daemon.daemon import Component
from rcfarm.daemon.health import Condition
from rcfarm.daemon.logging import configure
from rcfarm.daemon.readiness import PORTS
from rcfarm.reports.framework_explain import CODES, codes_of
from rcfarm.reports.training import NO_STATE, state_of
from rcfarm.roles.base import VERSION, run_components
from rcfarm.roles.kinds import Kind, KindRunner, Operator
from rcfarm.roles.kube import clients, new_election, run_elected
from rcfarm.telemetry.kube import (
    PrometheusJobMetrics,
    RestClientMetrics,
    election_metrics,
    event_metrics,
    informer_metrics,
)
from rcfarm.telemetry.prometheus import WorkQueueMetrics, labelled, new_registry
from store.kube.api.protocol import KubeApi
from store.kube.events import EventRecorder
from store.kube.leaderelection.election import Election, FencedApi

NAME = "rcfarm-jobs"
_STATES = ("Created", "Running", "Restarting", "Suspended", "Succeeded", "Failed", "Blocked", NO_STATE)


def run_jobs(settings: Settings) -> int:
    """Run the operators until a signal. Return the exit code. Raises `BadSettings` and `NoConfig`."""
    settings.jobs.operator()
    settings.jobs.training(os.environ)
    configure(settings.log.level, settings.log.format)

    async def main() -> int:
        registry = new_registry(VERSION)
        async with clients(NAME, settings.kube, settings.jobs.election, registry) as (api, lease_api, requests):
            role = JobsRole(settings, api, lease_api, registry, requests)
            return await run_components(settings, PORTS["jobs"], registry, role.components(), store=requests.host)

    return daemon.run(main)


class JobsRole:
    """The operators of all kinds, with their components. `lease_api`: the client of the election. `clock`: monotonic
    seconds, by which a stall is measured."""

    def __init__(
        self,
        settings: Settings,
        api: KubeApi,
        lease_api: KubeApi,
        registry: CollectorRegistry,
        requests: RestClientMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._recorder = EventRecorder(api, NAME, host=socket.gethostname())
        self._election = new_election(settings.jobs.election, settings.kube, lease_api)
        self._api = FencedApi(api, self._election) if self._election else api
        self._metrics = PrometheusJobMetrics(registry, {each.resource.kind: each.framework for each in KINDS})
        self._queue_metrics = WorkQueueMetrics(registry)
        kinds = [Kind("framework", FRAMEWORKS, "apply deploy/kubernetes/crd.yaml", self._frameworks, waits=True)]
        for each in KINDS:
            install = f"apply deploy/kubernetes/training/crds/{each.resource.plural}.yaml"
            make = partial(self._training, each)
            kinds.append(Kind(each.resource.kind.lower(), each.resource, install, make))
        named = settings.jobs.kinds
        self._runners = [
            KindRunner(api, kind, requests, is_named=bool(named), clock=clock)
            for kind in kinds
            if kind.name in (named or (kind.name,))
        ]
        self._probe = JobsProbe(self._runners, self._election, self._recorder)
        registry.register(self._probe)

    def components(self) -> list[list[Component]]:
        """Return the components for the daemon, in groups."""
        events = Component(name="events", run=self._recorder.run)
        jobs = Component(
            name="jobs",
            run=partial(run_elected, self._election, self._run),
            conditions=self._probe.conditions,
            stalled=self._probe.stalled,
        )
        return [[events], [jobs]]

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for runner in self._runners:
                group.create_task(runner.run(), name=runner.kind.name)

    async def _frameworks(self) -> Sequence[Operator]:
        operator = FrameworkOperator(
            self._api,
            self._settings.jobs.operator(),
            self._recorder,
            namespaces=self._settings.kube.watched,
            metrics=self._metrics,
            queue_metrics=self._queue_metrics,
        )
        return [operator]

    async def _training(self, kind: type[TrainingJobs]) -> Sequence[Operator]:
        jobs = self._settings.jobs
        options = jobs.training(os.environ)
        if options.autoscalers and not await self._api.served(AUTOSCALERS):
            options = replace(options, autoscalers=False)
        gang: GangKind | None = None
        match jobs.gang_scheduler:
            case "":
                pass
            case "volcano":
                gang = VolcanoPodGroup()
            case "disruption-budget":
                gang = DisruptionBudget()
            case scheduler:
                gang = SchedulerPluginsPodGroup(scheduler)
        if gang is not None:
            try:
                await served_resource(self._api, gang.resources)
            except NotServed as error:
                raise NotServed(f"jobs.gang_scheduler: {jobs.gang_scheduler}: {error}") from error
        return [
            kind(
                self._api,
                options=options,
                namespace=namespace,
                workers=jobs.workers,
                gang=gang,
                force_delete_after=jobs.force_delete_after,
                metrics=self._metrics,
                queue_metrics=self._queue_metrics,
            )
            for namespace in self._settings.kube.watched or ("",)
        ]


class JobsProbe(Collector):
    """Answers for the kinds of one process. Register it with the registry that `/metrics` shows. `recorder`: of the
    Events about Frameworks."""

    def __init__(self, runners: Sequence[KindRunner], election: Election | None, recorder: EventRecorder) -> None:
        self._runners, self._election, self._recorder = runners, election, recorder

    @property
    def _leads(self) -> bool:
        return self._election is None or self._election.is_leader

    def conditions(self) -> list[Condition]:
        """Return the conditions under which the replica works, or can take over."""
        found = []
        if self._election is not None:
            found.append(Condition("lease", not self._election.last_error, self._election.last_error))
        if not self._leads:
            return found
        if all(runner.is_absent for runner in self._runners):
            names = ", ".join(runner.kind.name for runner in self._runners)
            found.append(
                Condition("kinds", False, f"the API server serves none of {names}: apply the definition of one")
            )
        return found + [condition for runner in self._runners for condition in runner.conditions()]

    def stalled(self) -> str:
        """Return why there is no progress, or ""."""
        if self._election is not None and (reason := self._election.stalled()):
            return reason
        reasons = [runner.stalled() for runner in self._runners] if self._leads else []
        return "; ".join(filter(None, reasons))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; the registry calls this at every scrape."""
        operators = [operator for runner in self._runners for operator in runner.operators]
        frameworks = [each for each in operators if isinstance(each, FrameworkOperator)]
        training = [each for each in operators if isinstance(each, TrainingJobs)]
        yield from election_metrics(self._election)
        states = Counter(dict.fromkeys(map(str, State), 0))
        states.update(str(status.state) for each in frameworks for status in each.statuses())
        yield labelled("rcfarm_frameworks", "Frameworks of this operator, by state.", "state", states)
        codes = Counter(dict.fromkeys(CODES, 0))
        codes.update(code for each in frameworks for status in each.statuses() for code in codes_of(status))
        text = "Frameworks of this operator whose status has a reason of this code."
        yield labelled("rcfarm_framework_reasons", text, "code", codes)
        family = GaugeMetricFamily(
            "rcfarm_training_jobs", "Training jobs, by kind and state.", labels=["kind", "state"]
        )
        counts = Counter[tuple[str, str]]()
        for each in training:
            for job in each.informer.items():
                try:
                    state = state_of(decode_status(job.get("status")))  # as `rcfarm job list` shows it
                except BadStatus:
                    state = NO_STATE
                counts[each.resource.kind, state if state in _STATES else NO_STATE] += 1
        for kind in dict.fromkeys(each.resource.kind for each in training):
            for state in _STATES:
                family.add_metric([kind, state], counts[kind, state])
        yield family
        running = {runner.kind.name: bool(runner.operators) for runner in self._runners}
        yield labelled("rcfarm_job_kind_running", "1 while jobs of this kind are run here.", "kind", running)
        yield from informer_metrics(informer for each in operators for informer in each.informers)
        yield event_metrics(self._recorder, *(each.recorder for each in training))
