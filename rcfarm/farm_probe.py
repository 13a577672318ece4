"""What a farm looks like from outside: its readiness, its progress, and the metrics that are read off it.

Nothing is recorded here and nothing is changed: each question is answered from the farm's objects as they are when it
is asked, in the event loop that the farm runs in. At 10,000 RCs a scrape costs a few milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rcfarm.pod_health import state_word
from rcfarm.progress import Progress
from rcfarm.web import Condition
from store.records import RCState
from store.view import TreeView

if TYPE_CHECKING:
    from rcfarm.farm import Farm
    from rcfarm.tenure import Tenure

STALL_AFTER = 20.0  # seconds: above the longest call to the store, so that what stands still is really stuck


class FarmProbe(Collector):
    """Answers for one farm. Register it with the registry that `/metrics` shows.

    `clock`: monotonic, in seconds; by default the farm's.
    """

    def __init__(self, farm: Farm, clock: Callable[[], float] | None = None) -> None:
        clock = clock or farm.clock
        self._farm = farm
        self._working = Progress(STALL_AFTER, clock)
        self._looking = Progress(2 * farm.settings.resync_interval + STALL_AFTER, clock)

    def conditions(self) -> list[Condition]:
        """What must hold for the farm to do its work."""
        return [self._views(), self._session(), self._member()]

    def stalled(self) -> str:
        """Why reconciling stands still, or "". A store that is away is no stall: the farm keeps trying."""
        tenure = self._farm.tenure
        completed = tenure.queue.completed if tenure else 0
        sent = tenure.commits.transactions if tenure else 0  # one large RC may be one long run of many transactions
        stuck = self._working.stalled_for(completed + sent, busy=tenure is not None and tenure.queue.is_busy)
        idle = self._looking.stalled_for(completed, busy=tenure is not None and bool(tenure.owned))
        if stuck:
            return f"RCs wait for their work, but none was finished for {stuck:.0f} s"
        return f"no RC was looked at for {idle:.0f} s" if idle else ""

    def _views(self) -> Condition:
        for view in self._all_views():
            if view.error is not None:
                return Condition("store", False, f"{view.name} can't be read: {view.error}")
            if not view.is_synced:
                return Condition("store", False, f"{view.name} has not been read yet")
        return Condition("store", True)

    def _session(self) -> Condition:
        keeper = self._farm.keeper
        held = keeper.state == "held"
        return Condition("session", held, "" if held else f"{keeper.state}: {keeper.last_error or 'no session yet'}")

    def _member(self) -> Condition:
        farm = self._farm
        record = farm.membership.view.records.get(farm.membership.key)
        joined = record is not None and record.session is not None and record.session == farm.keeper.session_id
        return Condition("member", joined, "" if joined else f"{farm.settings.name} is not among the live farms")

    def _all_views(self) -> Iterator[TreeView[Any]]:
        farm = self._farm
        yield from (farm.membership.view, farm.nodes.view, farm.intents.view, farm.brake.view)
        if farm.tenure:
            yield from (shard.view for shard in farm.tenure.shards.values())
            yield from (health.view for health in farm.tenure.health.values())

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at every scrape."""
        farm = self._farm
        yield _gauge("brake", "1 while the farms remove nothing.", bool(farm.brake.reason))
        yield _gauge("farms", "Live farms that share our selector.", len(farm.membership.group()))
        yield self._nodes()
        yield from self._session_metrics()
        yield from _view_metrics(self._all_views(), farm.clock())
        yield from _tenure_metrics(farm.tenure)

    def _nodes(self) -> Metric:
        nodes = self._farm.nodes.table.nodes().values()
        counts = {
            "live": sum(node.live for node in nodes),
            "dead": sum(not node.live and not node.lost for node in nodes),
            "lost": sum(node.lost for node in nodes),
        }
        return _labelled("nodes", "Known nodes, by whether their agent lives.", "state", counts)

    def _session_metrics(self) -> Iterator[Metric]:
        keeper = self._farm.keeper
        yield _gauge("session_held", "1 while it is safe to act under our session.", keeper.state == "held")
        yield _gauge("session_lease_seconds", "The lease of the session.", keeper.lease)
        yield _counter("session_renewals", "Renewals of the session that succeeded.", keeper.renewals)
        yield _counter("session_losses", "Sessions that the store ended.", keeper.losses)


def _tenure_metrics(tenure: Tenure | None) -> Iterator[Metric]:
    shards = list(tenure.shards.values()) if tenure else []
    owned = list(tenure.owned.values()) if tenure else []
    known = sum(len(shard.rcs) for shard in shards)
    free = sum(rc.session is None and rc.spec is not None for shard in shards for rc in shard)
    statuses = [one.state.status.value for one in owned if one.state.status]
    states = Counter(dict.fromkeys((*get_args(RCState), "unhealthy", "failed", "completed"), 0))
    states.update(state_word(status) for status in statuses)
    states["progressing"] += len(owned) - len(statuses)
    pods = {
        "desired": sum(status.desired for status in statuses),
        "placed": sum(status.placed for status in statuses),
        "healthy": sum(status.healthy for status in statuses),
        "completed": sum(status.completed for status in statuses),
    }
    yield _gauge("watched_shards", "Shards that this farm watches.", len(shards))
    yield _gauge("known_rcs", "RCs in the watched shards.", known)
    yield _gauge("free_rcs", "RCs in the watched shards that nobody owns.", free)
    yield _gauge("owned_rcs", "RCs that this farm owns.", len(owned))
    yield _labelled("rcs", "Owned RCs, by the state that `rcfarm rc list` shows.", "state", states)
    yield _labelled("pods", "Pods of the owned RCs; those that are healthy count as placed, too.", "state", pods)
    yield _counter("claims", "RCs claimed under this session.", tenure.claims.claimed if tenure else 0)
    yield _counter("claim_conflicts", "Claims that were refused.", tenure.claims.conflicts if tenure else 0)
    commits = tenure.commits if tenure else None
    yield _counter("commit_transactions", "Merged transactions sent.", commits.transactions if commits else 0)
    yield _counter("commit_units", "What single RCs wrote in them.", commits.units if commits else 0)
    yield _counter("commit_conflicts", "Merged transactions refused.", commits.conflicts if commits else 0)


def _view_metrics(views: Iterable[TreeView[Any]], now: float) -> Iterator[Metric]:
    """One series per kind of view: all shards are one series, by the worst of them, and so is all health."""
    groups: dict[str, list[TreeView[Any]]] = {}
    for view in views:
        kind = view.name.partition(" ")[0]
        groups.setdefault({"shard": "shards", "health": "health"}.get(kind, view.name), []).append(view)
    ages = {name: max(_age(view, now) for view in group) for name, group in groups.items()}
    failing = {name: sum(view.error is not None for view in group) for name, group in groups.items()}
    records = {name: sum(len(view.records) for view in group) for name, group in groups.items()}
    bad = {name: sum(len(view.bad) for view in group) for name, group in groups.items()}
    yield _labelled(
        "view_age_seconds", "Since the store last answered; it need not while nothing changes.", "view", ages
    )
    yield _labelled("view_failing", "Views whose last refresh failed: what they show may be old.", "view", failing)
    yield _labelled("view_records", "Records in the view.", "view", records)
    yield _labelled("view_undecodable", "Records that can't be understood, and are left out.", "view", bad)


def _age(view: TreeView[Any], now: float) -> float:
    return 0.0 if view.last_contact is None else now - view.last_contact


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"rcfarm_{name}", text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"rcfarm_{name}", text, value=float(value))


def _labelled(name: str, text: str, label: str, values: dict[str, Any] | Counter[str]) -> Metric:
    family = GaugeMetricFamily(f"rcfarm_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family
