"""`rcfarm jobs` around its operator: readiness, the reported obstacles, and fencing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from controllers.framework.api.types import FRAMEWORKS
from controllers.framework.operator import STATUS_SUBRESOURCE, FrameworkOperator
from controllers.jobs.gang import VOLCANO_POD_GROUPS
from controllers.training.pytorch import PYTORCH_JOBS
from rcfarm.config.settings import JobsSettings, KubeSettings, Settings
from rcfarm.daemon.daemon import Component
from rcfarm.daemon.health import Condition
from rcfarm.roles.jobs import JobsRole
from rcfarm.roles.kinds import STALL_AFTER, Kind, KindRunner
from rcfarm.telemetry.kube import SCOPE, RestClientMetrics
from store.kube.api.errors import Forbidden, KubeError, Unreachable
from store.kube.api.objects import CONFIG_MAPS, LEASES
from store.kube.events import EventRecorder
from store.kube.leaderelection.election import LeadershipLost
from store.kube.memory.kube import MemoryKube
from tests.support.framework.cluster import framework, role
from tests.support.kube.faults.network import ScriptedKube
from tests.support.waiting import background, until

SETTINGS = Settings(
    kube=KubeSettings(server="http://127.0.0.1:1"),
    jobs=JobsSettings(kinds=("framework",), lease="default/jobs", lease_duration=3, renew_deadline=2, retry_period=0.1),
)


def new_server() -> MemoryKube:
    """Return a server with the CRD of compatible mode."""
    return MemoryKube(unserved=[STATUS_SUBRESOURCE])


class Replica:
    """A replica on an in-memory server. `api` and `lease_api`: its connections to it."""

    def __init__(self, server: MemoryKube, settings: Settings = SETTINGS) -> None:
        self.registry = CollectorRegistry()
        self.api, self.lease_api = ScriptedKube(server), ScriptedKube(server)
        requests = RestClientMetrics(self.registry, settings.kube.server)
        jobs = JobsRole(settings, self.api, self.lease_api, self.registry, requests)
        self.components: list[Component] = [component for group in jobs.components() for component in group]
        self.task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Replica]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(component.run()) for component in self.components[:-1]]
            self.task = asyncio.create_task(self.components[-1].run())
            try:
                yield self
            finally:
                self.task.cancel()
                await asyncio.wait([self.task])
                for task in tasks:
                    task.cancel()

    def conditions(self) -> list[Condition]:
        return [condition for component in self.components for condition in component.conditions()]

    def problem(self) -> str:
        """Return the conditions that don't hold."""
        return "; ".join(f"{one.name}: {one.reason}" for one in self.conditions() if not one.holds)

    @property
    def leads(self) -> bool:
        return self.registry.get_sample_value("leader_election_master_status", {"name": "jobs"}) == 1.0


async def test_a_leader_is_ready_once_it_works() -> None:
    """It holds the lease, and readiness lists each requirement of its work."""
    async with Replica(new_server()).running() as replica:
        await until(lambda: replica.leads and not replica.problem())
        parts = {f"framework {part}" for part in ("operator", "frameworks", "configmaps", "pods")}
        assert {"lease"} | parts == {one.name for one in replica.conditions()}


async def test_a_standby_is_ready_too() -> None:
    """It waits for the lease and does nothing else; a rollout must not wait for it to lead."""
    server = new_server()
    async with Replica(server).running() as first:
        await until(lambda: first.leads)
        async with Replica(server).running() as second:
            await until(lambda: second.lease_api.calls)
            assert (second.leads, second.problem()) == (False, "")
            assert second.api.calls == []


async def test_a_lease_that_can_t_be_read_is_named() -> None:
    """Without the permission for the lease a replica is not ready, and names the reason."""
    replica = Replica(new_server())
    replica.lease_api.fault = Forbidden('leases "jobs" is forbidden', status=403)
    async with replica.running():
        await until(lambda: replica.problem() == 'lease: leases "jobs" is forbidden')


async def test_a_gang_scheduler_that_is_not_installed_is_named_with_its_setting() -> None:
    """The person who reads /readyz learns which setting asks for what the cluster lacks."""
    server = MemoryKube(unserved=[VOLCANO_POD_GROUPS])
    server.register(PYTORCH_JOBS, has_status=True)
    jobs = msgspec.structs.replace(SETTINGS.jobs, kinds=("pytorchjob",), gang_scheduler="volcano")
    async with Replica(server, msgspec.structs.replace(SETTINGS, jobs=jobs)).running() as replica:
        await until(lambda: "jobs.gang_scheduler: volcano: " in replica.problem())
        assert "does not serve podgroups in scheduling.volcano.sh/v1beta1" in replica.problem()


@pytest.mark.parametrize(
    ("error", "named"),
    [(Unreachable("connection refused"), "connection refused"), (Forbidden("you may not", status=403), "you may not")],
)
async def test_what_keeps_the_operator_from_working_is_named(error: KubeError, named: str) -> None:
    """While the API is unreachable, or refuses, the leader is not ready, but not stalled either; then it continues."""
    replica = Replica(new_server())
    replica.api.fault = error
    async with replica.running():
        await until(lambda: replica.leads and named in replica.problem())
        assert replica.components[-1].stalled() == ""


async def test_without_an_election_it_works_at_once() -> None:
    """With `jobs.lease = off` no lease is read or written."""
    settings = Settings(kube=SETTINGS.kube, jobs=JobsSettings(kinds=("framework",), lease="off"))
    async with Replica(new_server(), settings).running() as replica:
        await until(
            lambda: {"framework operator"} <= {one.name for one in replica.conditions()} and not replica.problem()
        )
        assert replica.lease_api.calls == []


async def test_frameworks_are_run_and_counted() -> None:
    """The operator works under the lease, and the metrics show its Frameworks."""
    server = new_server()
    async with Replica(server).running() as replica:
        await server.create(FRAMEWORKS, framework("train", role("worker", 2)), "default")

        def sample(metric: str, **labels: str) -> float | None:
            return replica.registry.get_sample_value(metric, labels)

        await until(lambda: sample("rcfarm_frameworks", state="AttemptPreparing") == 1.0)
        assert sample("rcfarm_informer_objects", resource="frameworks") == 1.0
        assert sample("rcfarm_informer_lists_total", resource="pods", reason="start") == 1.0
        assert sample("rcfarm_informer_malformed_total", resource="pods") == 0.0
        assert sample("rcfarm_informer_handler_failures_total", resource="pods") == 0.0
        age = sample("rcfarm_informer_age_seconds", resource="pods")
        assert age is not None
        assert 0 <= age < 20
        assert sample("workqueue_adds_total", name="frameworks")
        await until(lambda: sample("rcfarm_job_reconcile_duration_seconds_count", kind="Framework", result="ok"))
        assert sample("rcfarm_kube_events_total", result="dropped") == 0.0


async def test_a_former_leader_writes_nothing() -> None:
    """Another replica holds the lease; we have not noticed it, but our own deadline has passed: no write is sent."""
    server = new_server()
    replica = Replica(server)
    async with replica.running():
        await until(lambda: replica.leads and not replica.problem())
        replica.lease_api.fault = Unreachable("connection refused")
        await until(lambda: not replica.leads)
        await server.create(FRAMEWORKS, framework("train", role("worker", 2)), "default")
        assert replica.task is not None
        await asyncio.wait([replica.task])
        assert isinstance(replica.task.exception(), LeadershipLost)
        assert (await server.list(CONFIG_MAPS, "default")).items == []


async def test_a_lease_that_another_took_ends_the_process() -> None:
    """The component fails, so that the process ends and restarts as a standby."""
    server = new_server()
    async with Replica(server).running() as replica:
        await until(lambda: replica.leads)
        await server.patch(LEASES, "jobs", "default", {"spec": {"holderIdentity": "another"}})
        assert replica.task is not None
        await asyncio.wait([replica.task])
        with pytest.raises(LeadershipLost, match="another holds it"):
            await replica.task


@pytest.mark.looptime
class TestProgress:
    """The progress that /livez checks."""

    now = 0.0

    @asynccontextmanager
    async def stuck(self, requests: RestClientMetrics) -> AsyncIterator[KindRunner]:
        """Yield the runner of an operator that has started and whose only sync hangs."""
        api = ScriptedKube(new_server())
        operator = FrameworkOperator(api, SETTINGS.jobs.operator(), EventRecorder(api, "test"))

        async def make() -> list[FrameworkOperator]:
            return [operator]

        kind = Kind("framework", FRAMEWORKS, "", make)
        runner = KindRunner(api, kind, requests, is_named=True, clock=lambda: self.now)
        async with background(runner.run()):
            await until(lambda: not operator.problems()["operator"])
            api.answer_delay = 3600
            await api.inner.create(FRAMEWORKS, framework("train", role("worker", 1)), "default")
            await until(lambda: operator.queue.is_busy)
            yield runner

    async def test_work_without_progress_is_a_stall(self) -> None:
        """A sync that neither ends nor gets an answer for long may need a restart."""
        requests = RestClientMetrics(CollectorRegistry(), "http://x")
        async with self.stuck(requests) as runner:
            assert runner.stalled() == ""
            self.now = STALL_AFTER + 1
            assert "none has progressed for" in runner.stalled()

    async def test_requests_are_progress(self) -> None:
        """One long sync of a large Framework is no stall as long as its requests are answered. Events don't count, and
        neither do the requests of other kinds."""
        requests = RestClientMetrics(CollectorRegistry(), "http://x")
        async with self.stuck(requests) as runner:
            runner.stalled()
            self.now = STALL_AFTER + 1
            SCOPE.set("framework")
            requests.request("create", "pods", 201, 0.1)
            assert runner.stalled() == ""
            self.now = 2 * STALL_AFTER + 2
            requests.request("create", "events", 201, 0.1)
            requests.request("replace", "leases", 200, 0.1)
            requests.request("create", "pods", 0, 0.1)
            SCOPE.set("tfjob")
            requests.request("create", "pods", 201, 0.1)
            assert runner.stalled()
