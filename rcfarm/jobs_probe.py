"""What `rcfarm jobs` looks like from outside: its readiness, its progress, and the metrics that are read off it.

A standby is ready: it does what it is for. While it leads, readiness also names what keeps the operator from working.
An API server that is away is no stall, for the operator keeps trying; a restart would not help.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controllers.framework.constants import State
from controllers.framework.operator import FrameworkOperator
from rcfarm.kube_metrics import RestClientMetrics
from rcfarm.progress import Progress
from rcfarm.web import Condition
from store.kube.events import EventRecorder
from store.kube.informer import Informer
from store.kube.lease import Election
from store.kube.resources import EVENTS, LEASES

STALL_AFTER = 90.0  # seconds: far above the longest request
_BESIDE_THE_WORK = frozenset({EVENTS.plural, LEASES.plural})


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
        self._progress = Progress(STALL_AFTER, clock)

    @property
    def _leads(self) -> bool:
        return self._election is None or self._election.is_leader

    def conditions(self) -> list[Condition]:
        """What must hold for us to work, or to be able to take over."""
        found = []
        if self._election is not None:
            found.append(Condition("lease", not self._election.last_error, self._election.last_error))
        if self._leads:
            found += [Condition(name, not reason, reason) for name, reason in self._operator.problems().items()]
        return found

    def stalled(self) -> str:
        """Why work stands still, or "". A large Framework may be one long run, whose requests are its progress."""
        if self._election is not None and (reason := self._election.stalled()):
            return reason
        queue = self._operator.queue
        answered = sum(count for name, count in self._requests.answered.items() if name not in _BESIDE_THE_WORK)
        is_at_work = self._leads and not self._operator.problems()["operator"]
        stuck = self._progress.stalled_for(queue.completed + answered, busy=is_at_work and queue.is_busy)
        return f"Frameworks wait for their work, but nothing was done for {stuck:.0f} s" if stuck else ""

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at every scrape."""
        if self._election is not None:
            leading = GaugeMetricFamily("leader_election_master_status", "1 while we lead.", labels=["name"])
            leading.add_metric([self._election.name], float(self._election.is_leader))
            yield leading
        yield self._frameworks()
        yield from _informer_metrics(self._operator.informers)
        yield self._events()

    def _frameworks(self) -> Metric:
        states = Counter(dict.fromkeys(map(str, State), 0))
        states.update(str(status.state) for status in self._operator.statuses())
        family = GaugeMetricFamily("rcfarm_frameworks", "Frameworks that we run, by state.", labels=["state"])
        for state, count in states.items():
            family.add_metric([state], count)
        return family

    def _events(self) -> Metric:
        family = CounterMetricFamily(
            "rcfarm_kube_events",
            "Events about objects: written, skipped as too many of one object, dropped because too many waited, "
            "rejected by the API server, abandoned without its answer.",
            labels=["result"],
        )
        for result in ("written", "skipped", "dropped", "rejected", "abandoned"):
            family.add_metric([result], getattr(self._recorder, result))
        return family


class _Family(Protocol):
    def add_metric(self, labels: list[str], value: float) -> None: ...


def _informer_metrics(informers: Iterable[Informer]) -> Iterator[Metric]:
    """One series per resource: those of several namespaces are told together, by the worst of them."""
    by_resource: dict[str, list[Informer]] = defaultdict(list)
    for informer in informers:
        by_resource[informer.resource.plural].append(informer)

    def each(family: _Family, read: Callable[[list[Informer]], float]) -> None:
        for resource, group in by_resource.items():
            family.add_metric([resource], read(group))

    ages = GaugeMetricFamily(
        "rcfarm_informer_age_seconds", "Since the API server was last heard of.", labels=["resource"]
    )
    for resource, group in by_resource.items():
        if seen := [informer.age for informer in group if informer.last_seen is not None]:
            ages.add_metric([resource], max(seen))
    objects = GaugeMetricFamily("rcfarm_informer_objects", "Objects in the cache.", labels=["resource"])
    each(objects, lambda group: sum(map(len, group)))
    failing = GaugeMetricFamily(
        "rcfarm_informer_failing", "Caches that can't be kept current at present.", labels=["resource"]
    )
    each(failing, lambda group: sum(bool(informer.problem) for informer in group))
    malformed = CounterMetricFamily(
        "rcfarm_informer_malformed", "Objects that could not be understood and were left out.", labels=["resource"]
    )
    each(malformed, lambda group: sum(informer.malformed for informer in group))
    failures = CounterMetricFamily(
        "rcfarm_informer_handler_failures",
        "Changes that a handler failed on; the log has the traceback.",
        labels=["resource"],
    )
    each(failures, lambda group: sum(informer.handler_failures for informer in group))
    events = CounterMetricFamily("rcfarm_informer_events", "Events of watches.", labels=["resource"])
    each(events, lambda group: sum(informer.stats.events for informer in group))
    yield from (ages, objects, failing, malformed, failures, events)
    yield _reasons("rcfarm_informer_lists", "Lists, by why they were made.", by_resource, "lists")
    yield _reasons("rcfarm_informer_watches", "Watches, by why they were begun.", by_resource, "watches")


def _reasons(name: str, text: str, by_resource: dict[str, list[Informer]], attribute: str) -> Metric:
    family = CounterMetricFamily(name, text, labels=["resource", "reason"])
    for resource, group in by_resource.items():
        total: Counter[str] = Counter()
        for informer in group:
            total.update(getattr(informer.stats, attribute))
        for reason, count in total.items():
            family.add_metric([resource, reason], count)
    return family
