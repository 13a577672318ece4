"""What `rcfarm extender` looks like from outside: its readiness, its progress, and the metrics that are read off it.

Only a replica that answers is ready: a Service sends kube-scheduler there and nowhere else. A configuration file that
can't be used makes it no less ready, for the earlier one is in use; readiness mentions it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rcfarm.watch_metrics import election_metrics, event_metrics, informer_metrics
from rcfarm.web import Condition
from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.chain import Chain
from scheduler.hived.constants import MIN_GUARANTEED_PRIORITY
from scheduler.hived.groups import GroupState
from scheduler.hived.pod_states import PodState
from scheduler.hived.reload import ConfigWatcher
from scheduler.hived.scheduler import HivedScheduler
from store.kube.events import EventRecorder
from store.kube.lease import Election


class ExtenderProbe(Collector):
    """Answers for one scheduler. Register it with the registry that `/metrics` shows."""

    def __init__(
        self, scheduler: HivedScheduler, election: Election | None, watcher: ConfigWatcher, recorder: EventRecorder
    ) -> None:
        self._scheduler, self._election, self._watcher, self._recorder = scheduler, election, watcher, recorder

    def conditions(self) -> list[Condition]:
        """What must hold for us to answer kube-scheduler."""
        found = []
        if self._election is not None:
            found.append(Condition("lease", self._election.is_leader, self._why_not_leading(self._election)))
        informers = (self._scheduler.informers.nodes, self._scheduler.informers.pods)
        found += [
            Condition(informer.resource.plural, informer.has_synced, informer.problem or _if(not informer.has_synced))
            for informer in informers
        ]
        applied = self._scheduler.ready.is_set()
        found.append(Condition("scheduling", applied, _if(not applied)))
        found.append(Condition("configuration", True, self._configuration()))
        return found

    def stalled(self) -> str:
        """Why a restart is needed, or ""."""
        return "" if self._election is None else self._election.stalled()

    def _why_not_leading(self, election: Election) -> str:
        if election.is_leader:
            return ""
        return election.last_error or f"{election.leader or 'nobody'} leads"

    def _configuration(self) -> str:
        if self._watcher.problem:
            return f"the earlier one is in use, the file is not: {self._watcher.problem}"
        if self._watcher.needs_restart:
            return f"restart to use {', '.join(self._watcher.needs_restart)}"
        return ""

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at every scrape."""
        view, algorithm = self._scheduler.view, self._scheduler.algorithm
        yield from election_metrics(self._election)
        yield _counted("rcfarm_hived_pods", "Pods that ask for HiveD.", "state", PodState, view.statuses.by_state())
        left_out = GaugeMetricFamily("rcfarm_hived_pods_left_out", "Bound pods whose devices are not counted.")
        left_out.add_metric([], len(view.left_out))
        yield left_out
        contested = GaugeMetricFamily("rcfarm_hived_contested_groups", "Groups found on devices that another one has.")
        contested.add_metric([], sum(group.is_contested for group in algorithm.groups.values()))
        yield contested
        groups = Counter(group.state for group in algorithm.groups.values())
        yield _counted("rcfarm_hived_groups", "Affinity groups with a place.", "state", GroupState, groups)
        if isinstance(algorithm, HivedAlgorithm):
            yield from _cells(list(algorithm.chains.values()))
        problem = GaugeMetricFamily("rcfarm_hived_config_problem", "1 while the configuration file can't be used.")
        problem.add_metric([], float(bool(self._watcher.problem)))
        yield problem
        yield from informer_metrics([self._scheduler.informers.nodes, self._scheduler.informers.pods])
        yield event_metrics(self._recorder)


def _if(waiting: bool) -> str:
    return "not everything is known yet" if waiting else ""


def _counted(name: str, text: str, label: str, kinds: type[PodState] | type[GroupState], found: Counter[Any]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for kind in kinds:
        family.add_metric([kind], found[kind])
    return family


def _cells(chains: list[Chain]) -> Iterator[Metric]:
    labels = ["chain", "cell_type"]
    total = GaugeMetricFamily("rcfarm_hived_cells", "Cells of the configuration.", labels=labels)
    bad = GaugeMetricFamily("rcfarm_hived_bad_cells", "Cells with a bad node.", labels=labels)
    doomed = GaugeMetricFamily(
        "rcfarm_hived_doomed_cells",
        "Quota that is bound to bad cells, for there are not enough healthy ones.",
        labels=[*labels, "virtual_cluster"],
    )
    free = GaugeMetricFamily(
        "rcfarm_hived_unused_quota_cells",
        "Quota that is not bound to cells, so that it may be had anywhere.",
        labels=[*labels, "virtual_cluster"],
    )
    leaves = GaugeMetricFamily("rcfarm_hived_leaf_cells", "Devices by use.", labels=["chain", "use"])
    for chain in chains:
        types = chain.topology.cell_types
        for level, cell_type in enumerate(types, start=1):
            cells = chain.levels[level - 1]
            total.add_metric([chain.name, cell_type], len(cells))
            bad.add_metric([chain.name, cell_type], len(cells) - chain.healthy[level].bit_count())
        for (tenant, level), mask in chain.doomed.items():
            doomed.add_metric([chain.name, types[level - 1], tenant], mask.bit_count())
        for tenant, unbound in chain.vc_free.items():
            for level, number in enumerate(unbound[1:], start=1):
                free.add_metric([chain.name, types[level - 1], tenant], number)
        for use, number in _uses(chain).items():
            leaves.add_metric([chain.name, use], number)
    yield from (total, bad, doomed, free, leaves)


def _uses(chain: Chain) -> dict[str, int]:
    guaranteed = opportunistic = 0
    for top in chain.levels[-1]:
        opportunistic += top.opportunistic
        guaranteed += sum(number for priority, number in top.used.items() if priority >= MIN_GUARANTEED_PRIORITY)
    free = len(chain.levels[0]) - guaranteed - opportunistic
    return {"guaranteed": guaranteed, "opportunistic": opportunistic, "free": free}
