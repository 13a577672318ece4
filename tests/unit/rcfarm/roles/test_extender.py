"""`rcfarm extender` around its scheduler: its listeners, readiness, and reloads of its file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from controllers.extender.config_reload import ConfigSource
from rcfarm.config.settings import ExtenderSettings, Settings, WebSettings
from rcfarm.daemon.daemon import Component
from rcfarm.roles.extender import ExtenderRole
from scheduler.hived.contract import (
    POD_BIND_INFO,
    AffinityGroupMemberBindInfo,
    PodBindInfo,
    PodPlacementInfo,
    new_binding_pod,
)
from store.kube.api.errors import Unreachable
from store.kube.api.objects import EVENTS, NODES, PODS, Object, annotations_of, name_of
from store.kube.leaderelection.election import Election
from store.kube.memory.kube import MemoryKube
from store.kube.memory.rules import NAMESPACES
from tests.support.hived.cluster import Job, node_object
from tests.support.kube.faults.network import ScriptedKube
from tests.support.waiting import until

CONFIG: Object = {
    "webServerAddress": "127.0.0.1:0",
    "physicalCluster": {
        "cellTypes": {"HOST": {"childCellType": "GPU", "childCellNumber": 4, "isNodeLevel": True}},
        "physicalCells": [{"cellType": "HOST", "cellAddress": "a0"}, {"cellType": "HOST", "cellAddress": "a1"}],
    },
    "virtualClusters": {
        "vision": {"virtualCells": [{"cellType": "HOST", "cellNumber": 1}]},
        "nlp": {"virtualCells": [{"cellType": "HOST", "cellNumber": 1}]},
    },
}
SETTINGS = Settings(extender=ExtenderSettings(reload_interval=0.1))
ELECTED = Settings(
    extender=ExtenderSettings(lease="default/hived", lease_duration=3, renew_deadline=2, retry_period=0.1)
)


class Replica:
    """A replica on a server in memory, with HiveD's file at `path`."""

    def __init__(self, server: MemoryKube, path: Path, settings: Settings = SETTINGS) -> None:
        self.path = path
        if not path.exists():
            self.write(CONFIG)
        self.registry = CollectorRegistry()
        self.api, self.lease_api = ScriptedKube(server), ScriptedKube(server)
        source = ConfigSource(path, environ={}, home=path.parent)
        self.role = ExtenderRole(settings, source, source.load(), self.api, self.lease_api, self.registry)
        self.components: list[Component] = [each for group in self.role.components() for each in group]

    def write(self, config: Object) -> None:
        self.path.write_text(yaml.safe_dump(config, sort_keys=False))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Replica]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(component.run()) for component in self.components]
            await until(lambda: self.role.listening)
            try:
                yield self
            finally:
                for task in reversed(tasks):
                    task.cancel()
                    await asyncio.wait([task])

    async def fetch(self, path: str, body: Object | None = None, token: str = "") -> tuple[int, str]:
        """Request from HiveD's listener: GET, or POST if there is a body."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(
                "GET" if body is None else "POST", f"http://{self.role.listening}{path}", json=body
            ) as answer,
        ):
            return answer.status, await answer.text()

    async def call(self, name: str, **fields: Any) -> Object:
        """kube-scheduler's call."""
        _, text = await self.fetch(f"/v1/extender/{name}", fields)
        answer: Object = json.loads(text)
        return answer

    def problem(self) -> str:
        """Return the conditions that don't hold."""
        found = [condition for component in self.components for condition in component.conditions()]
        return "; ".join(f"{one.name}: {one.reason}" for one in found if not one.holds)

    def sample(self, metric: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(metric, labels)


@pytest.fixture
async def server() -> MemoryKube:
    """A server with the nodes of `CONFIG`, ready."""
    server = MemoryKube()
    await server.create(NAMESPACES, {"metadata": {"name": "test"}})
    for name in ("a0", "a1"):
        await server.create(NODES, node_object(name))
    return server


@pytest.fixture
async def replica(server: MemoryKube, tmp_path: Path) -> AsyncIterator[Replica]:
    """A replica that answers kube-scheduler."""
    async with Replica(server, tmp_path / "hived.yaml").running() as replica:
        await until(lambda: not replica.problem())
        yield replica


async def new_pod(server: MemoryKube, job: Job, name: str = "train-0") -> Object:
    pod = job.pod(name, job.members[0][1])
    del pod["metadata"]["uid"]
    return await server.create(PODS, pod, "test")


async def test_a_pod_is_filtered_and_bound_and_shown(server: MemoryKube, replica: Replica) -> None:
    """The whole way over HTTP: decided, bound with its annotations, inspected, measured."""
    pod = await new_pod(server, Job("train", "vision", 1, ((1, 2),)))
    answer = await replica.call("filter", Pod=pod, NodeNames=["a0", "a1"])
    assert answer == {"Nodes": None, "NodeNames": ["a0"], "FailedNodes": None, "Error": ""}
    uid = pod["metadata"]["uid"]
    bound = await replica.call("bind", PodName="train-0", PodNamespace="test", PodUID=uid, Node="a0")
    assert bound == {"Error": ""}
    assert POD_BIND_INFO in (await server.get(PODS, "train-0", "test"))["metadata"]["annotations"]
    status, text = await replica.fetch("/v1/inspect/affinitygroups/train")
    assert (status, json.loads(text)["status"]["allocatedPods"]) == (200, [uid])
    status, text = await replica.fetch("/v1/inspect/clusterstatus/virtualclusters/vision")
    assert json.loads(text)[0]["cellState"] == "Used"
    await until(lambda: replica.sample("rcfarm_hived_pods", state="Bound") == 1.0)
    assert replica.sample("rcfarm_hived_groups", state="Allocated") == 1.0
    assert replica.sample("rcfarm_hived_contested_groups") == 0.0
    assert replica.sample("rcfarm_hived_leaf_cells", chain="HOST", use="guaranteed") == 2.0
    assert replica.sample("rcfarm_hived_bindings_total", forced="false", result="ok") == 1.0
    assert replica.sample("rcfarm_hived_call_duration_seconds_count", call="filter", result="ok") == 1.0
    decided = {"phase": "Filtering", "decision": "bind"}
    assert replica.sample("rcfarm_hived_decision_duration_seconds_count", **decided) == 1.0


async def test_groups_that_are_found_on_the_same_device_are_counted(server: MemoryKube, tmp_path: Path) -> None:
    """For an alert: groups that share a device, though each of them needs it alone."""
    for name in ("one", "two"):
        place = PodPlacementInfo("a0", (0,), ("HOST",))
        info = PodBindInfo("a0", (0,), "HOST", (AffinityGroupMemberBindInfo((place,)),))
        pod = new_binding_pod(await new_pod(server, Job(name, "vision", 1), name), info)
        binding = {"metadata": {"annotations": annotations_of(pod)}, "target": {"name": "a0"}}
        await server.create(PODS, binding, "test", name=name_of(pod), subresource="binding")
    async with Replica(server, tmp_path / "hived.yaml").running() as replica:
        await until(lambda: not replica.problem())
        assert replica.sample("rcfarm_hived_contested_groups") == 1.0


async def test_the_listener_of_hived_tells_health_and_metrics(server: MemoryKube, tmp_path: Path) -> None:
    """Probes and Prometheus use HiveD's listener; with a token, other clients get only status codes."""
    settings = msgspec.structs.replace(SETTINGS, web=WebSettings(token="hunter2"))
    async with Replica(server, tmp_path / "hived.yaml", settings).running() as replica:
        await until(lambda: not replica.problem())
        assert (await replica.fetch("/livez")) == (200, "ok\n")
        assert (await replica.fetch("/readyz")) == (200, "ready\n")
        assert (await replica.fetch("/metrics"))[0] == 401
        status, text = await replica.fetch("/readyz", token="hunter2")
        assert (status, text.splitlines()) == (
            200,
            ["[+] nodes", "[+] pods", "[+] scheduling", "[+] configuration", "ready"],
        )
        assert "rcfarm_hived_cells" in (await replica.fetch("/metrics", token="hunter2"))[1]
        assert (await replica.call("filter"))["Error"], "calls need no token"


async def test_without_the_api_server_it_is_not_ready_and_says_so(server: MemoryKube, tmp_path: Path) -> None:
    """It listens all the same, and its error makes kube-scheduler retry."""
    replica = Replica(server, tmp_path / "hived.yaml")
    replica.api.fault = Unreachable("connection refused")
    async with replica.running():
        await until(lambda: "nodes: connection refused" in replica.problem())
        assert (await replica.fetch("/readyz"))[0] == 503
        pod = Job("train", "vision", 1).pod("train-0", 1)
        error = (await replica.call("filter", Pod=pod, NodeNames=["a0"]))["Error"]
        assert error.startswith("Code: 503, Message: hivedscheduler: Not Now: ")
        for path in ("snapshot", "affinitygroups/", "affinitygroups/train", "clusterstatus"):
            status, text = await replica.fetch(f"/v1/inspect/{path}")
            assert (status, "not all nodes and pods are known yet" in text) == (503, True), (
                "nothing is concluded from it"
            )
        assert [component.stalled() for component in replica.components] == ["", "", "", ""]


async def test_only_the_leader_is_ready_and_answers(server: MemoryKube, tmp_path: Path) -> None:
    """With an election: the standby is alive, names the leader, and takes over the leader's bindings."""
    first = Replica(server, tmp_path / "hived.yaml", ELECTED)
    second = Replica(server, tmp_path / "hived.yaml", ELECTED)
    async with second.running():
        pod: Object = {}
        await until(lambda: not second.problem())
        async with first.running():
            await until(lambda: "leads" in first.problem())
            assert (await first.fetch("/livez"))[0] == 200
            assert (await first.fetch("/readyz"))[0] == 503
            pod = await new_pod(server, Job("train", "vision", 1, ((1, 4),)))
            refused = (await first.call("filter", Pod=pod, NodeNames=["a0", "a1"]))["Error"]
            assert refused.startswith("Code: 503")
            assert (await second.call("filter", Pod=pod, NodeNames=["a0", "a1"]))["NodeNames"] == ["a0"]
        assert second.sample("leader_election_master_status", name="hived") == 1.0


async def test_a_changed_file_takes_effect(server: MemoryKube, replica: Replica) -> None:
    """In process: new quota counts, settings too, and inspection shows the new cells."""
    gang = Job("train", "vision", 1, ((2, 4),))
    pod = await new_pod(server, gang)
    assert (await replica.call("filter", Pod=pod, NodeNames=["a0", "a1"]))["FailedNodes"]
    changed = json.loads(json.dumps(CONFIG))
    changed["virtualClusters"] = {"vision": {"virtualCells": [{"cellType": "HOST", "cellNumber": 2}]}}
    replica.write(changed)
    await until(lambda: replica.sample("rcfarm_hived_config_reloads_total", result="applied") == 1.0)
    assert (await replica.call("filter", Pod=pod, NodeNames=["a0", "a1"]))["NodeNames"] == ["a0"]
    _, text = await replica.fetch("/v1/inspect/clusterstatus/virtualclusters/")
    assert [cell["cellAddress"] for cell in json.loads(text)["vision"]] == ["vision/0", "vision/1"]
    assert "nlp" not in json.loads(text)


async def test_a_wrong_file_changes_nothing_and_is_reported(server: MemoryKube, replica: Replica) -> None:
    """The replica stays ready; readiness and metrics say what is wrong."""
    replica.path.write_text("physicalCluster: 7\n")
    await until(lambda: replica.sample("rcfarm_hived_config_problem") == 1.0)
    status, text = await replica.fetch("/readyz")
    assert status == 200
    assert "[+] configuration: the earlier one is in use, the file is not: physicalCluster: " in text
    assert replica.sample("rcfarm_hived_config_reloads_total", result="invalid") == 1.0
    pod = await new_pod(server, Job("train", "vision", 1))
    assert (await replica.call("filter", Pod=pod, NodeNames=["a0", "a1"]))["NodeNames"] == ["a0"]


async def test_nodes_that_the_cluster_lacks_are_logged(server: MemoryKube, tmp_path: Path) -> None:
    """A misspelt name would be a bad node for ever: it is logged at the start, and after a reload of the file."""
    await server.delete(NODES, "a1")
    with capture_logs() as logs:
        async with Replica(server, tmp_path / "hived.yaml").running() as replica:
            await until(lambda: not replica.problem())
            changed = json.loads(json.dumps(CONFIG))
            changed["physicalCluster"]["physicalCells"][0]["cellAddress"] = "ao"
            replica.write(changed)
            await until(lambda: replica.sample("rcfarm_hived_config_reloads_total", result="applied") == 1.0)
    logged = [each["nodes"] for each in logs if "do not exist" in each["event"]]
    assert logged == [["a1"], ["ao", "a1"]]


async def test_a_wrong_file_is_an_event_on_our_pod(
    server: MemoryKube, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the downward API says which pod that is; once per content."""
    for variable, value in {"POD_NAME": "rcfarm-extender-0", "POD_NAMESPACE": "test", "POD_UID": "u1"}.items():
        monkeypatch.setenv(variable, value)
    replica.path.write_text("physicalCluster: 7\n")
    await until(lambda: replica.sample("rcfarm_kube_events_total", result="written") == 1.0)
    [event] = (await server.list(EVENTS, "test")).items
    assert (event["reason"], event["involvedObject"]["uid"]) == ("HivedConfigRefused", "u1")
    assert "physicalCluster" in event["message"]


async def test_nothing_is_bound_once_the_lease_may_be_another_s(
    server: MemoryKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence stops a Binding that was decided before."""
    async with Replica(server, tmp_path / "hived.yaml", ELECTED).running() as replica:
        await until(lambda: not replica.problem())
        pod = await new_pod(server, Job("train", "vision", 1))
        await replica.call("filter", Pod=pod, NodeNames=["a0"])
        monkeypatch.setattr(Election, "is_leader", property(lambda self: False))
        uid = pod["metadata"]["uid"]
        answer = await replica.call("bind", PodName="train-0", PodNamespace="test", PodUID=uid, Node="a0")
        assert answer["Error"].startswith("Code: 503")
        assert "nodeName" not in (await server.get(PODS, "train-0", "test"))["spec"]
        monkeypatch.undo()


async def test_what_kube_scheduler_needs_ends_in_order(server: MemoryKube, tmp_path: Path) -> None:
    """The web server starts last and ends first; events are written to the end."""
    groups = Replica(server, tmp_path / "hived.yaml").role.components()
    assert [[component.name for component in group] for group in groups] == [
        ["events"],
        ["extender", "configuration"],
        ["web server"],
    ]


async def test_calls_in_flight_end_before_the_web_server_does(
    server: MemoryKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop waits for calls in flight; the scheduler keeps working until they have ended."""
    replica = Replica(server, tmp_path / "hived.yaml")
    async with replica.running():
        await until(lambda: not replica.problem())
        pod = await new_pod(server, Job("train", "vision", 1))
        await replica.call("filter", Pod=pod, NodeNames=["a0"])
        release = asyncio.Event()
        create = replica.api.create

        async def slow(*arguments: Any, **named: Any) -> Any:
            await release.wait()
            return await create(*arguments, **named)

        monkeypatch.setattr(replica.api, "create", slow)
        uid = pod["metadata"]["uid"]
        binding = asyncio.create_task(
            replica.call("bind", PodName="train-0", PodNamespace="test", PodUID=uid, Node="a0")
        )
        await asyncio.sleep(0.1)
        asyncio.get_running_loop().call_later(0.3, release.set)
    assert await binding == {"Error": ""}


def test_hived_s_file_is_where_hived_looks() -> None:
    """The setting, else CONFIG, else the working directory."""
    assert ExtenderSettings(config="/a.yaml").file({"CONFIG": "/b.yaml"}) == Path("/a.yaml")
    assert ExtenderSettings().file({"CONFIG": "/b.yaml"}) == Path("/b.yaml")
    assert ExtenderSettings().file({}) == Path("hivedscheduler.yaml")
