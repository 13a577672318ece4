"""What `rcfarm jobs` looks like from outside: its readiness, its progress, and the metrics that are read off it.

A standby is ready: it does what it is for. While it leads, readiness also names what keeps the operator from working.
An API server that is away is no stall, for the operator keeps trying; a restart would not help.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controllers.framework.constants import State
from controllers.framework.operator import FrameworkOperator
from rcfarm.kube_metrics import RestClientMetrics
from rcfarm.progress import Progress
from rcfarm.watch_metrics import election_metrics, event_metrics, informer_metrics
from rcfarm.web import Condition
from store.kube.events import EventRecorder
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
        yield from election_metrics(self._election)
        yield self._frameworks()
        yield from informer_metrics(self._operator.informers)
        yield event_metrics(self._recorder)

    def _frameworks(self) -> Metric:
        states = Counter(dict.fromkeys(map(str, State), 0))
        states.update(str(status.state) for status in self._operator.statuses())
        family = GaugeMetricFamily("rcfarm_frameworks", "Frameworks that we run, by state.", labels=["state"])
        for state, count in states.items():
            family.add_metric([state], count)
        return family
