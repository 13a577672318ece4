"""A started version of a pod: its processes, each under a supervisor, and the monitor of its health.

The model: `run` is one task that supervises all launchables and watches the pod's health; cancelling it leaves the
processes running. After that either `stop` ends them, or `release` leaves them to the next agent. What each supervisor
records of its process goes into the pod's one record on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from rcfarm.agent import launch, ports
from rcfarm.agent.discovery import Discovery, Service
from rcfarm.agent.errors import AgentError
from rcfarm.agent.health import FlapLimiter, HealthMonitor
from rcfarm.agent.installer import Installed, Installer
from rcfarm.agent.probes import Prober, Verdict
from rcfarm.agent.process import LaunchSpec
from rcfarm.agent.registration import Registration
from rcfarm.agent.settings import AgentSettings
from rcfarm.agent.state import LaunchRecord, PodRecord, StateDir
from rcfarm.agent.supervisor import Backoff, Supervisor
from store.keys import Keys
from store.kv import Store
from store.records import Labels, Process, utc_now

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Tools:
    """What the pods of one agent share."""

    store: Store
    keys: Keys
    settings: AgentSettings
    address: str
    state: StateDir
    installer: Installer
    ports: ports.Ports
    prober: Prober
    registration: Registration
    discovery: Discovery


class RunningPod:
    """One pod with its processes. `on_change`: a process changed; `on_verdict`: the pod's health did."""

    def __init__(
        self,
        tools: Tools,
        pod_id: str,
        installed: Installed,
        record: PodRecord,
        limiter: FlapLimiter,
        *,
        on_change: Callable[[], None],
        on_verdict: Callable[[Verdict], None],
    ) -> None:
        self.installed = installed
        self.record = record
        self.lost_port = False
        self._tools = tools
        self._pod_id = pod_id
        self._on_change = on_change
        self._manifest = installed.manifest
        self._supervisors = {name: self._supervisor(name) for name in self._manifest.launchables}
        check = self._manifest.health
        has_check = check.http or check.tcp or check.exec
        self._monitor = HealthMonitor(check, self._probe if has_check else None, self.processes, on_verdict, limiter)

    def processes(self) -> dict[str, Process]:
        """Every launchable as it is now."""
        return {name: supervisor.process for name, supervisor in self._supervisors.items()}

    def groups(self) -> list[int]:
        """The process groups of the pod."""
        return [process.pid for process in self.processes().values() if process.pid is not None]

    def service(self, labels: Labels) -> Service | None:
        """How others find the pod, or None without ports. Its main port is the one named http, else the first."""
        numbers = self.record.ports
        if not numbers:
            return None
        port = numbers.get("http") or next(iter(numbers.values()))
        name = self._tools.settings.service_prefix + self._manifest.id
        return Service(name, self._tools.address, port, numbers, labels, self.record.rc)

    async def run(self) -> None:
        """Supervise until cancelled; the processes go on."""
        async with asyncio.TaskGroup() as tasks:
            for supervisor in self._supervisors.values():
                tasks.create_task(supervisor.run())
            tasks.create_task(self._monitor.run())

    async def stop(self) -> None:
        """Stop all processes at once, each as its manifest says. Call it only once `run` has ended."""
        async with asyncio.TaskGroup() as tasks:
            for supervisor in self._supervisors.values():
                tasks.create_task(supervisor.stop())

    def release(self) -> None:
        """Leave the processes to the next agent. Call it only once `run` has ended."""
        for supervisor in self._supervisors.values():
            supervisor.release()

    def prepare(self, name: str) -> LaunchSpec:
        """See `SupervisorHost`."""
        try:
            ports.check_ports(self.record.ports, self._manifest.ports, self.groups())
        except ports.PortTaken as error:
            self.lost_port = error.chosen
            raise
        paths = self._tools.state.paths(self._pod_id, name)
        spec = launch.launch_spec(self._context(), name, paths)
        launch.prepare_files(self._manifest, spec.credentials, paths)
        launch.check_directory(spec, f"launchables.{name}")
        launch.check_program(spec, f"launchables.{name}")
        return spec

    def save(self, name: str, record: LaunchRecord) -> None:
        """See `SupervisorHost`."""
        saved = msgspec.structs.replace(self.record, launchables={**self.record.launchables, name: record})
        self._tools.state.save_pod(self._pod_id, saved)
        self.record = saved

    def changed(self) -> None:
        """See `SupervisorHost`."""
        self._monitor.changed()
        self._on_change()

    def hand_over(self, rc: str, tree: str) -> None:
        """The pod belongs to that RC, and its intent to that tree, from now on; its processes learn of the RC when they
        are started again."""
        saved = msgspec.structs.replace(self.record, rc=rc, tree=tree)
        self._tools.state.save_pod(self._pod_id, saved)
        self.record = saved

    def _supervisor(self, name: str) -> Supervisor:
        settings = self._tools.settings
        return Supervisor(
            name,
            self._manifest.launchables[name],
            self.record.launchables.get(name, LaunchRecord()),
            self,
            Backoff(settings.restart_backoff, settings.restart_backoff_cap, settings.restart_reset),
            log=log.bind(node=settings.node, pod=self._pod_id, launchable=name),
            now=utc_now,
        )

    async def _probe(self) -> Verdict:
        check = self._manifest.health
        try:
            command = self._check_command() if check.exec else None
        except AgentError as error:
            return Verdict("critical", str(error))
        return await self._tools.prober.probe(check, self.record.ports, command)

    def _check_command(self) -> LaunchSpec:
        """What an exec check starts: its command, otherwise as the first launchable."""
        check = self._manifest.health.exec
        assert check is not None
        name = next(iter(self._manifest.launchables))
        paths = self._tools.state.paths(self._pod_id, name)
        spec = launch.launch_spec(self._context(), name, paths)
        argv = [launch.expand(word, spec.env, "health.exec.command") for word in check.command]
        return spec._replace(argv=argv, log=paths.check_output, limits={})

    def _context(self) -> launch.PodContext:
        return pod_context(self._tools, self._pod_id, self.record, self.installed)


def pod_context(tools: Tools, pod_id: str, record: PodRecord, installed: Installed) -> launch.PodContext:
    """What the pod is told of itself."""
    return launch.PodContext(
        node=tools.settings.node,
        address=tools.address,
        rc=record.rc,
        pod_id=pod_id,
        manifest_id=installed.manifest_id,
        manifest=installed.manifest,
        ports=record.ports,
        artifacts=installed.artifacts,
        users=launch.Users(tools.settings.default_user, tools.settings.allowed_users),
    )
