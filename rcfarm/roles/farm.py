"""`rcfarm farm`: a farm with its store, its session, its scheduler, its metrics and its probe.

The probe gives readiness, progress and metrics. It records and changes nothing: each answer is computed from the farm's
objects at the time of the request, in the farm's event loop. At 10,000 RCs a scrape costs a few milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rcfarm.config.settings import FarmSettings, Settings, scheduler_plugins
from rcfarm.daemon.daemon import freeze_all, freeze_survivors
from rcfarm.daemon.health import Condition, Health, StallDetector
from rcfarm.daemon.readiness import PORTS
from rcfarm.farm.farm import Farm
from rcfarm.operations.rc_snapshot import Refinement, state_word
from rcfarm.roles.base import VERSION, Role, run_role
from rcfarm.roles.probe import ownership_conditions, session_metrics, view_metrics
from rcfarm.telemetry.prometheus import FarmMetrics, MeteredStore, counter, gauge, labelled
from scheduler.label import LabelScheduler
from scheduler.protocol import NodeDirectory, Scheduler
from store.kv.protocol import SessionSpec, Store
from store.kv.session import SessionKeeper
from store.schema.keys import Keys
from store.schema.reasons import RC, ROLLOUT
from store.schema.records import RCState

if TYPE_CHECKING:
    from rcfarm.farm.farm import Term

COLLECTIONS = (5000, 2, 1)  # a full collection comes after 30,000 new objects
LEAST_SURVIVORS = 10_000  # surviving objects: the records of some 300 RCs
STALL_AFTER = 20.0  # seconds: above the longest call to the store, so that a slow call does not count as a stall


def run_farm(settings: Settings) -> int:
    """Run a farm until a signal. Return the exit code."""
    freeze_survivors(thresholds=COLLECTIONS, least=LEAST_SURVIVORS)
    freeze_all(collect_before=False)  # modules leave little garbage, and a search through them delays the start
    return run_role(settings, PORTS["farm"], lambda store, registry: FarmRole(settings, store, registry))


class FarmRole(Role):
    """A farm with its metrics and its probe."""

    name = "farm"

    def __init__(self, settings: Settings, store: Store, registry: CollectorRegistry) -> None:
        super().__init__(settings, store, registry)
        self.metrics = FarmMetrics(registry)

    async def work(self, keys: Keys) -> None:
        session, farm = self.settings.session, self.settings.farm
        spec = SessionSpec(f"rcfarm-farm-{farm.name}", session.ttl, session.check_ttl, session.lock_delay)
        store = MeteredStore(self.store, self.registry)
        built = Farm(
            store,
            keys,
            farm,
            SessionKeeper(store, spec),
            scheduler_for(farm, store, keys),
            metrics=self.metrics,
            version=VERSION,
        )
        probe = FarmProbe(built)
        self.health = Health(probe.stalled, probe.conditions)
        self.registry.register(probe)
        await built.start()


def scheduler_for(settings: FarmSettings, store: Store, keys: Keys) -> Callable[[NodeDirectory], Scheduler]:
    """Return a factory of the scheduler that `farm.scheduler` names. An entry point's function is called with the
    store, its keys and the directory of nodes, and returns a `Scheduler`."""
    if settings.scheduler == "label":
        return LabelScheduler
    if settings.scheduler == "pool":
        from scheduler.pool.scheduler import PoolScheduler  # imported late: few farms need it, and its imports are slow

        return lambda directory: PoolScheduler(store, keys, directory, strategy=settings.pool_strategy)
    make = scheduler_plugins()[settings.scheduler].load()
    return partial(make, store, keys)


class FarmProbe(Collector):
    """Answers for one farm. Register it with the registry that `/metrics` shows.

    `clock`: monotonic, in seconds; by default the farm's.
    """

    def __init__(self, farm: Farm, clock: Callable[[], float] | None = None) -> None:
        clock = clock or farm.clock
        self._farm = farm
        self._working = StallDetector(STALL_AFTER, clock)
        self._looking = StallDetector(2 * farm.settings.resync_interval + STALL_AFTER, clock)

    def conditions(self) -> list[Condition]:
        """Return the conditions under which the farm works."""
        farm = self._farm
        return ownership_conditions(farm.views(), farm.keeper, farm.membership, "farms")

    def stalled(self) -> str:
        """Return why reconciling makes no progress, or "". An unavailable store is no stall: the farm keeps
        retrying."""
        term = self._farm.term
        completed = term.queue.completed if term else 0
        sent = term.commits.transactions if term else 0  # a large RC may be one long reconcile
        stuck = self._working.stalled_for(completed + sent, busy=term is not None and term.queue.is_busy)
        idle = self._looking.stalled_for(completed, busy=term is not None and bool(term.ownership.held))
        if stuck:
            return f"RCs are queued, but none was reconciled for {stuck:.0f} s"
        return f"no RC was reconciled for {idle:.0f} s" if idle else ""

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; the registry calls this at every scrape."""
        farm = self._farm
        yield gauge("rcfarm_brake", "1 while the farms remove nothing.", bool(farm.brake.reason))
        brake = farm.brake.engaged
        found = GaugeMetricFamily(
            "rcfarm_brake_info", "1 for the brake that is on, with its reason.", labels=["reason"]
        )
        if brake:
            found.add_metric([brake.words], 1)
        yield found
        yield gauge("rcfarm_audit_failing", "1 while the audit log can't be written.", bool(farm.chronicle.problem))
        unsent = farm.notifier.unsent if farm.notifier else 0
        yield gauge("rcfarm_incidents_unsent", "Events about incidents that wait to be sent.", unsent)
        yield gauge("rcfarm_farms", "Live farms with the same selector.", len(farm.membership.group()))
        nodes = farm.nodes.table.nodes().values()
        counts = {
            "live": sum(node.live for node in nodes),
            "dead": sum(not node.live and not node.lost for node in nodes),
            "lost": sum(node.lost for node in nodes),
        }
        yield labelled("rcfarm_nodes", "Known nodes, by whether their agent lives.", "state", counts)
        codes = {
            "node_dead": sum(not node.live for node in nodes),
            "node_cordoned": sum(not node.schedulable and not node.evict for node in nodes),
            "node_evicting": sum(node.evict for node in nodes),
        }
        text = "Known nodes that have a reason of this code; agents report a full disk."
        yield labelled("rcfarm_node_reasons", text, "code", codes)
        decisions = farm.decisions
        recorded, unrecorded, size = (
            (decisions.recorded, decisions.unrecorded, decisions.size) if decisions else (0,) * 3
        )
        yield counter("rcfarm_decisions_logged", "Decisions written to the decision log.", recorded)
        yield counter("rcfarm_decisions_unlogged", "Decisions that could not be written to it.", unrecorded)
        yield gauge("rcfarm_decision_log_bytes", "Size of the decision log.", size)
        yield from session_metrics(farm.keeper)
        yield from view_metrics(farm.views(), farm.clock())
        yield from _term_metrics(farm.term)


def _term_metrics(term: Term | None) -> Iterator[Metric]:
    shards = list(term.ownership.shards.values()) if term else []
    owned = list(term.ownership.held.values()) if term else []
    known = sum(len(shard.rcs) for shard in shards)
    free = sum(rc.session is None and rc.spec is not None for shard in shards for rc in shard)
    statuses = [one.state.status.value for one in owned if one.state.status]
    states = Counter(dict.fromkeys((*get_args(RCState), *get_args(Refinement)), 0))
    states.update(state_word(status) for status in statuses)
    states["progressing"] += len(owned) - len(statuses)
    codes = Counter(dict.fromkeys((*RC, *ROLLOUT), 0))
    codes.update(code for status in statuses for code in {reason.code for reason in status.reasons})
    pods = {
        "desired": sum(status.desired for status in statuses),
        "placed": sum(status.placed for status in statuses),
        "healthy": sum(status.healthy for status in statuses),
        "completed": sum(status.completed for status in statuses),
    }
    yield gauge("rcfarm_watched_shards", "Shards that this farm watches.", len(shards))
    yield gauge("rcfarm_known_rcs", "RCs in the watched shards.", known)
    yield gauge("rcfarm_free_rcs", "RCs in the watched shards that no farm owns.", free)
    yield gauge("rcfarm_owned_rcs", "RCs that this farm owns.", len(owned))
    yield labelled("rcfarm_rcs", "Owned RCs, by the state that `rcfarm rc list` shows.", "state", states)
    yield labelled("rcfarm_rc_reasons", "Owned RCs that have a reason of this code.", "code", codes)
    yield labelled("rcfarm_pods", "Pods of the owned RCs; those that are healthy count as placed, too.", "state", pods)
    yield counter("rcfarm_claims", "RCs claimed under this session.", term.ownership.claims.claimed if term else 0)
    yield counter("rcfarm_claim_conflicts", "Claims that were refused.", term.ownership.claims.conflicts if term else 0)
    commits = term.commits if term else None
    yield counter("rcfarm_commit_transactions", "Merged transactions sent.", commits.transactions if commits else 0)
    yield counter("rcfarm_commit_units", "Units of single RCs in those transactions.", commits.units if commits else 0)
    yield counter("rcfarm_commit_conflicts", "Merged transactions refused.", commits.conflicts if commits else 0)
