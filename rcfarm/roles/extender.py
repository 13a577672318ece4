"""`rcfarm extender`: HiveD's scheduler extender, with its web server, its configuration's watcher, events and metrics.

The model: four components. Events come first and end last. The scheduler keeps its view of the cluster, under an
election where there is one: a standby holds no view, is not ready and answers kube-scheduler with an error. The watcher
passes each new configuration to the scheduler. The web server comes last and ends first, so that calls in flight end
while the scheduler still works.

Two listeners: HiveD's own, at the `webServerAddress` of its file, for kube-scheduler and inspection; and that of every
daemon here, on loopback. The first listens on all addresses by default, as HiveD does, or on the address in HiveD's
file; kube-scheduler can send no token. It is open to every client that reaches it, unless `extender.client_ca_file`
makes it ask for a certificate. Both serve `/livez`, `/readyz` and `/metrics`; a `web.token` is then needed for reasons
and metrics on both.

Long-lived objects (cells, and the pods of the first list) are exempt from garbage collection, and so are later ones,
once they have survived a full collection: groups and pods form no reference cycles, so they are freed without it.

Only a replica that answers kube-scheduler is ready, so that a Service sends calls to no other. An invalid configuration
file does not make it unready, because the earlier one is in use; readiness mentions it.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controllers.extender.config_reload import ConfigChange, ConfigSource, ConfigWatcher, LoadedConfig, ReloadResult
from controllers.extender.pod_states import ExtenderCall, PodState
from controllers.extender.reporting import CallResult, EvictionResult, Metrics, Outcome, write_event
from controllers.extender.scheduler import HivedScheduler
from controllers.extender.server import CALLS, extender_app
from rcfarm.config.settings import BadSettings, Settings
from rcfarm.daemon import daemon
from rcfarm.daemon.daemon import Component, freeze_all, freeze_survivors
from rcfarm.daemon.health import Condition, Health
from rcfarm.daemon.health_server import health_routes, serving
from rcfarm.daemon.listener import Address, read_token
from rcfarm.daemon.logging import configure
from rcfarm.daemon.readiness import PORTS
from rcfarm.roles.base import VERSION, run_components
from rcfarm.roles.kube import clients, new_election, run_elected
from rcfarm.telemetry.kube import election_metrics, event_metrics, informer_metrics
from rcfarm.telemetry.prometheus import gauge, labelled, new_registry
from scheduler.hived.algorithm import HivedAlgorithm, SchedulingPhase
from scheduler.hived.cells.chain import Chain
from scheduler.hived.cells.groups import GroupState
from scheduler.hived.cells.topology import Topology
from scheduler.hived.config.resolve import host_and_port
from scheduler.hived.contract import MIN_GUARANTEED_PRIORITY
from scheduler.hived.errors import InvalidConfig
from scheduler.hived.inspection.inspection import Inspected, Inspection
from store.kube.api.protocol import KubeApi
from store.kube.events import EventRecorder
from store.kube.leaderelection.election import Election, FencedApi

log = structlog.get_logger(__name__)

NAME = "rcfarm-extender"
CALLS_END_WITHIN = 5.0  # seconds that calls in flight have when it stops, then as long again to be cancelled
WARNINGS = 20  # logged at most
NODES_SHOWN = 8
DECISION_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
CALL_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


def run_extender(settings: Settings) -> int:
    """Run the extender until a signal. Return the exit code. Raises `BadSettings` and `NoConfig`."""
    configure(settings.log.level, settings.log.format)
    source = ConfigSource(settings.extender.file(os.environ), os.environ, Path(os.path.expanduser("~")))
    try:
        loaded = source.load()
    except InvalidConfig as error:
        hint = "" if source.path.exists() else "; name HiveD's file with --config, or in the environment as CONFIG"
        problems = str(error).splitlines()
        text = f"{source.path}: {error}{hint}"
        if len(problems) > 1:
            text = "\n  ".join([f"{source.path} can't be used:", *problems])
        raise BadSettings(text) from error
    chains = loaded.topology.chains.values()
    sizes = {
        "chains": len(chains),
        "nodes": len({node for chain in chains for node in chain.nodes}),
        "leaf_cells": sum(len(chain.addresses[0]) for chain in chains),
        "virtual_clusters": len(loaded.topology.virtual_clusters),
    }
    log.info("Configuration file read", file=str(source.path), **sizes)
    for warning in loaded.config.warnings[:WARNINGS]:
        log.warning("Warning about the configuration file", file=str(source.path), warning=str(warning))
    kube = msgspec.structs.replace(
        settings.kube,
        server=settings.kube.server or loaded.config.kube_api_server_address,
        kubeconfig=settings.kube.kubeconfig or loaded.config.kube_config_file_path,
    )

    freeze_survivors()

    async def main() -> int:
        registry = new_registry(VERSION)
        async with clients(NAME, kube, settings.extender, registry) as (api, lease_api, requests):
            role = ExtenderRole(msgspec.structs.replace(settings, kube=kube), source, loaded, api, lease_api, registry)
            groups = role.components()
            return await run_components(settings, PORTS["extender"], registry, groups, store=requests.host)

    return daemon.run(main)


class ExtenderRole:
    """A scheduler with its components. `lease_api`: the client of the election."""

    def __init__(
        self,
        settings: Settings,
        source: ConfigSource,
        loaded: LoadedConfig,
        api: KubeApi,
        lease_api: KubeApi,
        registry: CollectorRegistry,
    ) -> None:
        self._config, self._registry, self._token = loaded.config, registry, read_token(settings.web)
        self._settings = settings.extender
        self._recorder = EventRecorder(api, NAME, host=socket.gethostname())
        self._election = new_election(settings.extender, settings.kube, lease_api)
        self._metrics = ExtenderMetrics(registry)
        algorithm = HivedAlgorithm(loaded.topology)
        self._scheduler = HivedScheduler(
            FencedApi(api, self._election) if self._election else api,
            algorithm,
            force_pod_bind_threshold=loaded.config.force_pod_bind_threshold,
            waiting_pod_scheduling_block_milli_sec=loaded.config.waiting_pod_scheduling_block_milli_sec,
            evict_victims=settings.extender.evict_victims,
            recorder=self._recorder,
            metrics=self._metrics,
        )
        self._inspection = Inspection(
            Inspected(algorithm, loaded.content.decode()),
            self._scheduler.view.waiting,
            check=self._scheduler.check_ready,
        )
        self._watcher = ConfigWatcher(
            source,
            loaded,
            self._take_over,
            interval=settings.extender.reload_interval,
            report=self._reloaded,
        )
        self._probe = ExtenderProbe(self._scheduler, self._election, self._watcher, self._recorder)
        registry.register(self._probe)
        self.listening = ""
        freeze_all()

    def components(self) -> list[list[Component]]:
        """Return the components for the daemon, in groups."""
        events = Component(name="events", run=self._recorder.run)
        scheduler = Component(
            name="extender",
            run=partial(run_elected, self._election, self._schedule),
            conditions=self._probe.conditions,
            stalled=self._probe.stalled,
        )
        configuration = Component(name="configuration", run=self._watcher.run)
        return [[events], [scheduler, configuration], [Component(name="web server", run=self._serve)]]

    async def _schedule(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._scheduler.run())
            await self._scheduler.ready.wait()
            self._log_missing_nodes(self._watcher.in_use.topology)
            freeze_all()

    async def _serve(self) -> None:
        settings = self._settings
        app = extender_app(
            self._scheduler, self._inspection, self._metrics, node_cache_capable=settings.node_cache_capable
        )
        health = Health(self._probe.stalled, self._probe.conditions)
        app.add_routes(health_routes(health, self._registry, token=self._token))
        address = Address(*host_and_port(self._config.web_server_address))
        async with serving(
            app,
            address,
            setting="webServerAddress",
            bounds=CALLS,
            tls=settings.tls,
            shutdown_timeout=CALLS_END_WITHIN,
        ) as where:
            self.listening = where
            asks = "a client certificate" if settings.client_ca_file else "nothing"
            log.info("Listening for kube-scheduler and inspection", address=where, asks_clients_for=asks)
            await asyncio.Event().wait()

    async def _take_over(self, loaded: LoadedConfig, change: ConfigChange) -> None:
        if change.cells:
            inspected: list[Inspected] = []

            def build() -> HivedAlgorithm:
                algorithm = HivedAlgorithm(loaded.topology)
                inspected.append(Inspected(algorithm, loaded.content.decode()))
                return algorithm

            try:
                await self._scheduler.replace(build)
            except BaseException:
                gc.unfreeze()  # so that the new cells are freed
                raise
            self._inspection.follow(inspected[0])
            self._log_missing_nodes(loaded.topology)
            gc.unfreeze()  # so that the old cells are freed; half a second for many
            freeze_all()
        self._scheduler.force_pod_bind_threshold = loaded.config.force_pod_bind_threshold
        self._scheduler.waiting_pod_scheduling_block_milli_sec = loaded.config.waiting_pod_scheduling_block_milli_sec

    def _log_missing_nodes(self, topology: Topology) -> None:
        names = dict.fromkeys(node for chain in topology.chains.values() for node in chain.nodes)
        missing = [name for name in names if name not in self._scheduler.view.nodes]
        if missing:
            log.warning(
                "Nodes of the configuration do not exist; their cells are bad until they do",
                number=len(missing),
                nodes=missing[:NODES_SHOWN],
            )

    def _reloaded(self, result: ReloadResult) -> None:
        self._metrics.reloaded(result)
        # the pod that this process runs in, if the downward API names it
        variables = {"name": "POD_NAME", "namespace": "POD_NAMESPACE", "uid": "POD_UID"}
        metadata = {field: os.environ.get(variable, "") for field, variable in variables.items()}
        pod = {"metadata": metadata} if all(metadata.values()) else None
        if self._watcher.problem and pod is not None:
            message = f"The configuration file is invalid, the previous one stays in use: {self._watcher.problem}"
            write_event(self._recorder, pod, "Warning", "HivedConfigRefused", message)


WAITING_CODES = {
    PodState.WAITING: "gpu_waiting",
    PodState.PREEMPTING: "gpu_preempting",
    PodState.BINDING: "gpu_binding",
}


class ExtenderProbe(Collector):
    """Answers for one scheduler. Register it with the registry that `/metrics` shows."""

    def __init__(
        self, scheduler: HivedScheduler, election: Election | None, watcher: ConfigWatcher, recorder: EventRecorder
    ) -> None:
        self._scheduler, self._election, self._watcher, self._recorder = scheduler, election, watcher, recorder

    def conditions(self) -> list[Condition]:
        """Return the conditions under which the extender answers kube-scheduler."""
        found = []
        if self._election is not None:
            leader = self._election.last_error or f"{self._election.leader or 'no replica'} leads"
            leads = self._election.is_leader
            found.append(Condition("lease", leads, "" if leads else leader))
        waiting = "not everything is known yet"
        for informer in (self._scheduler.informers.nodes, self._scheduler.informers.pods):
            synced = informer.has_synced
            found.append(Condition(informer.resource.plural, synced, informer.problem or ("" if synced else waiting)))
        applied = self._scheduler.ready.is_set()
        found.append(Condition("scheduling", applied, "" if applied else waiting))
        remark = ""
        if self._watcher.problem:
            remark = f"the earlier one is in use, the file is not: {self._watcher.problem}"
        elif self._watcher.needs_restart:
            remark = f"restart to use {', '.join(self._watcher.needs_restart)}"
        found.append(Condition("configuration", True, remark))
        return found

    def stalled(self) -> str:
        """Return why the election needs a restart of the process, or ""."""
        return "" if self._election is None else self._election.stalled()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; the registry calls this at every scrape."""
        view, algorithm = self._scheduler.view, self._scheduler.algorithm
        yield from election_metrics(self._election)
        pods = view.statuses.by_state()
        states = {state: pods[state] for state in PodState}
        yield labelled("rcfarm_hived_pods", "Pods that ask for HiveD.", "state", states)
        codes = {code: pods[state] for state, code in WAITING_CODES.items()}
        yield labelled("rcfarm_hived_reasons", "Pods that wait, by the code of the reason.", "code", codes)
        yield gauge("rcfarm_hived_pods_left_out", "Bound pods whose devices are not counted.", len(view.left_out))
        contested = sum(group.is_contested for group in algorithm.groups.values())
        yield gauge("rcfarm_hived_contested_groups", "Groups found on devices of another group.", contested)
        groups = collections.Counter(group.state for group in algorithm.groups.values())
        placed = {state: groups[state] for state in GroupState}
        yield labelled("rcfarm_hived_groups", "Affinity groups with a place.", "state", placed)
        if isinstance(algorithm, HivedAlgorithm):
            yield from _cells(list(algorithm.chains.values()))
        problem = bool(self._watcher.problem)
        yield gauge("rcfarm_hived_config_problem", "1 while the configuration file can't be used.", problem)
        yield from informer_metrics([self._scheduler.informers.nodes, self._scheduler.informers.pods])
        yield event_metrics(self._recorder)


def _cells(chains: list[Chain]) -> Iterator[Metric]:
    labels = ["chain", "cell_type"]
    total = GaugeMetricFamily("rcfarm_hived_cells", "Cells of the configuration.", labels=labels)
    bad = GaugeMetricFamily("rcfarm_hived_bad_cells", "Cells with a bad node.", labels=labels)
    doomed = GaugeMetricFamily(
        "rcfarm_hived_doomed_cells",
        "Quota bound to bad cells for lack of healthy ones.",
        labels=[*labels, "virtual_cluster"],
    )
    free = GaugeMetricFamily(
        "rcfarm_hived_unused_quota_cells",
        "Guaranteed quota not bound to physical cells; can be placed anywhere.",
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
        guaranteed = opportunistic = 0
        for top in chain.levels[-1]:
            opportunistic += top.opportunistic
            guaranteed += sum(number for priority, number in top.used.items() if priority >= MIN_GUARANTEED_PRIORITY)
        leaves.add_metric([chain.name, "guaranteed"], guaranteed)
        leaves.add_metric([chain.name, "opportunistic"], opportunistic)
        leaves.add_metric([chain.name, "free"], len(chain.levels[0]) - guaranteed - opportunistic)
    yield from (total, bad, doomed, free, leaves)


class ExtenderMetrics(Metrics):
    """The `Metrics` of an extender, and the reloads of its configuration file."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        text = "Decisions on unplaced pods, by kube-scheduler's phase and by decision."
        self._decisions = histogram(
            "rcfarm_hived_decision_duration_seconds", text, ["phase", "decision"], buckets=DECISION_BUCKETS
        )
        text = "Duration of kube-scheduler's calls, by result; failures by whose fault they were."
        self._calls = histogram("rcfarm_hived_call_duration_seconds", text, ["call", "result"], buckets=CALL_BUCKETS)
        text = "Bindings posted; forced are those that kube-scheduler did not ask for."
        self._bindings = counter("rcfarm_hived_bindings_total", text, ["forced", "result"])
        text = "Evictions of victims posted by the extender."
        self._evictions = counter("rcfarm_hived_evictions_total", text, ["result"])
        text = "Bound pods left out: their placement is undecodable."
        self._left_out = counter("rcfarm_hived_not_recovered_total", text)
        text = "Pods found bound by another extender: only one may decide."
        self._elsewhere = counter("rcfarm_hived_foreign_bindings_total", text)
        text = "New contents of the configuration file."
        self._reloads = counter("rcfarm_hived_config_reloads_total", text, ["result"])

    def decided(self, phase: SchedulingPhase, decision: Outcome, seconds: float) -> None:
        self._decisions.labels(phase, decision).observe(seconds)

    def bound(self, *, forced: bool, ok: bool) -> None:
        self._bindings.labels(str(forced).lower(), "ok" if ok else "error").inc()

    def evicted(self, result: EvictionResult) -> None:
        self._evictions.labels(result).inc()

    def not_recovered(self) -> None:
        self._left_out.inc()

    def bound_elsewhere(self) -> None:
        self._elsewhere.inc()

    def answered(self, call: ExtenderCall, result: CallResult, seconds: float) -> None:
        self._calls.labels(call, result).observe(seconds)

    def reloaded(self, result: ReloadResult) -> None:
        self._reloads.labels(result).inc()
