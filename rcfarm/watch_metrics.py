"""Metrics of what every role on Kubernetes has: an election, informers, events. Read when somebody scrapes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from store.kube.events import EventRecorder
from store.kube.informer import Informer
from store.kube.lease import Election


def election_metrics(election: Election | None) -> Iterator[Metric]:
    """None without an election."""
    if election is not None:
        leading = GaugeMetricFamily("leader_election_master_status", "1 while we lead.", labels=["name"])
        leading.add_metric([election.name], float(election.is_leader))
        yield leading


def event_metrics(recorder: EventRecorder) -> Metric:
    family = CounterMetricFamily(
        "rcfarm_kube_events",
        "Events about objects: written, skipped as too many of one object, dropped because too many waited, "
        "rejected by the API server, abandoned without its answer.",
        labels=["result"],
    )
    for result in ("written", "skipped", "dropped", "rejected", "abandoned"):
        family.add_metric([result], getattr(recorder, result))
    return family


class _Family(Protocol):
    def add_metric(self, labels: list[str], value: float) -> None: ...


def informer_metrics(informers: Iterable[Informer]) -> Iterator[Metric]:
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
    unreadable = GaugeMetricFamily(
        "rcfarm_informer_unreadable",
        "Objects that are there now and can't be understood; the log names them.",
        labels=["resource"],
    )
    each(unreadable, lambda group: sum(len(informer.unreadable) for informer in group))
    failures = CounterMetricFamily(
        "rcfarm_informer_handler_failures",
        "Changes that a handler failed on; the log has the traceback.",
        labels=["resource"],
    )
    each(failures, lambda group: sum(informer.handler_failures for informer in group))
    events = CounterMetricFamily("rcfarm_informer_events", "Events of watches.", labels=["resource"])
    each(events, lambda group: sum(informer.stats.events for informer in group))
    yield from (ages, objects, failing, malformed, unreadable, failures, events)
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
