"""The Framework operator under faults: killed, stopped, cut off, sent wrong answers, on a control plane that is killed
as well.

Operators are processes, `rcfarm jobs` as users run it. Afterwards `tests.support.framework.witness` reads the complete
history from etcd and checks the guarantees.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from controllers.framework.api.types import FRAMEWORK_NAME, FRAMEWORKS, TASK_INDEX, TASK_ROLE_NAME
from controllers.framework.api.wire import crd
from store.kube.api.objects import CONFIG_MAPS, EVENTS, PODS, Object, Resource, uid_of
from store.kube.client.client import KubeClient
from tests.support.framework.cluster import Frameworks, framework, role
from tests.support.framework.load import Expected, Load, Planned, create, outcome, planned, until_completed
from tests.support.framework.witness import Seen, Witness
from tests.support.jobs.replicas import Replica, until
from tests.support.kube.conformance.writes import is_gone
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.etcd_history import FLAGS
from tests.support.kube.faults.fault_proxy import (
    FaultProxy,
    answers,
    at_random,
    cuts_after,
    cuts_within_a_chunk_header,
    error_event,
    fault_proxy,
    hangs_for,
    in_pages_of,
    loses_answer,
    noting,
    refuses_connection,
    sends,
)
from tests.support.kube.hollow.kubelet import HollowKubelet

LEASE, RENEW, RETRY = 2.0, 1.6, 0.3  # seconds
SHORT = {"jobs__lease_duration": LEASE, "jobs__renew_deadline": RENEW, "jobs__retry_period": RETRY}
PAIRS, KILLS = 3, 10


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane that tests of this module may kill, and that keeps all history."""
    directory = tmp_path_factory.mktemp("framework-faults")
    (directory / "audit.yaml").write_text(_AUDIT)
    audit = [f"--audit-policy-file={directory / 'audit.yaml'}", f"--audit-log-path={directory / 'audit.log'}"]
    with ControlPlane(directory, apiserver_flags=[*FLAGS, *audit]) as plane:
        plane.install(crd())
        yield plane


_AUDIT = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, verbs: [create, update, patch, delete]}
- level: None
"""


@pytest.fixture
def namespace(plane: ControlPlane) -> str:
    return new_namespace(plane)


def new_namespace(plane: ControlPlane) -> str:
    name = f"t{secrets.token_hex(4)}"
    plane.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    return name


@pytest.fixture
async def api(plane: ControlPlane) -> AsyncIterator[KubeClient]:
    """An administrator's client, while nodes run pods."""
    async with (
        await KubeClient.connect(str(plane.kubeconfig)) as api,
        HollowKubelet(api, schedules=True).playing(nodes=8),
    ):
        yield api


class Pair:
    """Two replicas of one namespace. A replica that exits on its own is started again, as the cluster would do."""

    def __init__(self, stack: ExitStack, plane: ControlPlane, directory: Path, namespace: str) -> None:
        made = (
            Replica(directory / namespace / name, plane.kubeconfig, namespace, lease=f"{namespace}/jobs", **SHORT)
            for name in "ab"
        )
        self.replicas: Sequence[Replica] = [stack.enter_context(replica) for replica in made]

    async def leader(self) -> Replica | None:
        """Return the present leader."""
        found = None
        for replica in self.replicas:
            replica.start()
            if await replica.leads():
                found = replica
        return found

    async def until_led(self) -> tuple[Replica, Replica]:
        """Wait for a leader. Return the leader and the other replica."""
        await until(self.leader, "a leader")
        leader = await self.leader() or self.replicas[0]
        return leader, next(each for each in self.replicas if each is not leader)

    async def kill_leaders(self, kills: int, rng: random.Random) -> None:
        """Kill this number of leaders, each some moments after it began to lead, and while a standby waits."""
        while kills:
            leader, standby = await self.until_led()
            waiting = until(partial(self._is_ready, standby), "a standby")
            await asyncio.gather(waiting, asyncio.sleep(rng.uniform(0.0, 1.2)))
            if await leader.leads():
                leader.kill()
                kills -= 1
                await until(self.leader, "another leader")

    async def _is_ready(self, replica: Replica) -> bool:
        replica.start()  # it may have ended on its own: on a busy machine a leader loses its lease
        return await replica.is_ready()


@pytest.mark.timeout(900)
async def test_leaders_are_killed_at_random_moments(plane: ControlPlane, api: KubeClient, tmp_path: Path) -> None:
    """Thirty leaders die under load. A task never has two pods, no pod's end is lost, all Frameworks end as expected,
    and each time the other replica takes over."""
    namespaces = [await asyncio.to_thread(new_namespace, plane) for _ in range(PAIRS)]
    witnesses = [Witness(plane, namespace) for namespace in namespaces]
    loads = [Load(api, namespace, random.Random(namespace), slots=3) for namespace in namespaces]
    with ExitStack() as stack:
        pairs = [Pair(stack, plane, tmp_path, namespace) for namespace in namespaces]
        async with asyncio.TaskGroup() as group:
            for load in loads:
                group.create_task(load.run())
            async with asyncio.TaskGroup() as killing:
                for number, pair in enumerate(pairs):
                    killing.create_task(pair.kill_leaders(KILLS, random.Random(number)))
            for load in loads:
                load.finish()
            for pair in pairs:
                await pair.until_led()
    for witness, load in zip(witnesses, loads, strict=True):
        seen = await asyncio.to_thread(witness.check)
        assert load.ended == len(seen.completed) > KILLS
        assert len(seen.ended) > KILLS


async def test_parts_of_the_control_plane_are_killed(
    plane: ControlPlane, api: KubeClient, namespace: str, tmp_path: Path
) -> None:
    """The API server and then etcd die in the middle of two dozen Frameworks: all of them end as expected."""
    rng = random.Random(1)
    witness = Witness(plane, namespace)
    plans = [planned(f"f{number}", rng) for number in range(24)]
    with Replica(tmp_path / "a", plane.kubeconfig, namespace):
        for plan in plans:
            await create(api, plan.body, namespace)
        await asyncio.to_thread(plane.restart_apiserver)
        await asyncio.to_thread(plane.etcd.kill)
        await asyncio.to_thread(plane.etcd.start)
        await hold_to_plans(api, namespace, plans)
    seen = await asyncio.to_thread(witness.check)
    assert len(seen.completed) == len(plans)


async def test_a_stopped_leader_writes_nothing_after_it_was_continued(
    plane: ControlPlane, api: KubeClient, namespace: str, tmp_path: Path
) -> None:
    """SIGSTOP past the lease, with writes queued: continued, the leader exits, and the API server's audit log shows no
    later write of it. The other replica has taken over, and all Frameworks end as expected."""
    rng = random.Random(2)
    witness = Witness(plane, namespace)
    plans = [planned(f"f{number}", rng) for number in range(8)]
    for plan in plans:
        await create(api, plan.body, namespace)
    with ExitStack() as stack:
        first, second = (
            Replica(
                tmp_path / name,
                plane.write_kubeconfig(tmp_path / f"kubeconfig-{name}", certificate=plane.issue_certificate(name)),
                namespace,
                lease=f"{namespace}/jobs",
                kube__qps=10,
                kube__burst=1,
                **SHORT,
            )
            for name in (f"first-{namespace}", f"second-{namespace}")
        )
        stack.enter_context(first)
        await until(lambda: writes(plane, first), "writing")
        first.pause()
        stack.enter_context(second)
        await until(lambda: writes(plane, second), "written by the other")
        resumed = time.time()
        first.resume()
        await first.until_ended()
        assert max(writes(plane, first)) < resumed
        second.kill()
        stack.enter_context(Replica(tmp_path / "last", plane.kubeconfig, namespace))
        await hold_to_plans(api, namespace, plans)
    await asyncio.to_thread(witness.check)


def writes(plane: ControlPlane, replica: Replica) -> list[float]:
    """Return when (Unix seconds) the API server received the replica's writes, except Events and its lease."""
    lines = (plane.directory / "audit.log").read_text().splitlines()
    entries = [json.loads(line) for line in lines if f'"{replica.directory.name}"' in line]
    return [
        datetime.fromisoformat(entry["requestReceivedTimestamp"]).timestamp()
        for entry in entries
        if entry["objectRef"]["resource"] in ("frameworks", "pods", "configmaps")
    ]


async def hold_to_plans(api: KubeClient, namespace: str, plans: Sequence[Planned]) -> None:
    """Wait for the ends of the Frameworks and assert that they are as planned."""
    for plan in plans:
        obj = await until_completed(api, plan.body["metadata"]["name"], namespace)
        assert outcome(obj) == plan.expected


@pytest.fixture
async def proxy(plane: ControlPlane) -> AsyncIterator[FaultProxy]:
    async with fault_proxy(plane.url, ca=plane.ca) as proxy:
        yield proxy


@pytest.fixture
def behind(plane: ControlPlane, proxy: FaultProxy, namespace: str, tmp_path: Path) -> Replica:
    """An operator behind the bad network, not started yet; its calls end after a second."""
    kubeconfig = plane.write_kubeconfig(tmp_path / "kubeconfig", url=proxy.url)
    return Replica(tmp_path / "operator", kubeconfig, namespace, kube__call_timeout=1)


Happened = Callable[[Seen], bool]  # whether the fault took effect


def cut_watches(proxy: FaultProxy, rng: random.Random) -> Happened:
    """Cut watches at any byte: within lines, within multi-byte characters, and within the length of a chunk. Cuts
    before the first event are rare, because each one makes the back-off longer."""
    for number in range(48):
        size = rng.randrange(1, 3000) if number % 16 == 0 else rng.randrange(6000, 60000)
        fault = cuts_within_a_chunk_header(size) if number % 4 == 0 else cuts_after(size)
        proxy.add(fault, path="watch=true", times=1)
    return lambda seen: proxy.count("GET", "watch=true") > 20


def forget_history(proxy: FaultProxy, rng: random.Random) -> Happened:
    """Answer watches and lists that their version is too old, and lists also at their second page."""
    proxy.add(sends(error_event(410, "Expired")), path="watch=true", times=6)
    proxy.add(answers(410, "Gone"), path="watch=true", times=3)
    proxy.add(answers(410, "Expired"), method="GET", path=r"\?(?!.*watch=).*resourceVersion=\d", times=6)
    proxy.add(answers(410, "Expired"), path="continue=", times=4)
    proxy.add(in_pages_of(2), method="GET", path="limit=")
    return lambda seen: proxy.count("GET", "continue=") > 0


def refuse(proxy: FaultProxy, rng: random.Random) -> Happened:
    """Answer with conflicts for statuses and overload or server errors; some requests never arrive."""
    storm = [answers(409, "Conflict"), answers(429, "TooManyRequests", retry_after=1), answers(503, "Unavailable")]
    proxy.add(at_random(rng, storm, 0.6), method="PATCH", path="frameworks", times=60)
    failures = [answers(500, "InternalError"), answers(429, "TooManyRequests"), refuses_connection, hangs_for(2.0)]
    proxy.add(at_random(rng, failures, 0.3), times=150)
    return lambda seen: proxy.count("PATCH", "frameworks") > 60


def lose_answers(proxy: FaultProxy, rng: random.Random) -> Happened:
    """Let the server do the request, but lose the answer: the operator thus creates pods that no status ever names."""
    for method, path, times in (
        ("POST", "/configmaps", 3),
        ("POST", "/pods", 10),
        ("PATCH", "/frameworks", 10),
        ("DELETE", "/configmaps", 3),
        ("DELETE", "/pods", 3),
    ):
        proxy.add(at_random(rng, [loses_answer], 0.5), method=method, path=path, times=2 * times)
    return lambda seen: len(seen.pods) > len(seen.owners)


@pytest.mark.parametrize("spoil", [cut_watches, forget_history, refuse, lose_answers])
async def test_a_bad_network(
    plane: ControlPlane,
    api: KubeClient,
    proxy: FaultProxy,
    behind: Replica,
    namespace: str,
    spoil: Callable[[FaultProxy, random.Random], Happened],
) -> None:
    """Network faults between operator and API server do not change how Frameworks end. Objects whose creation was never
    confirmed are orphans, which are removed and created again."""
    rng = random.Random(spoil.__name__)
    witness = Witness(plane, namespace)
    happened = spoil(proxy, rng)
    plans = [planned(f"f{number}", rng) for number in range(10)]
    with behind:
        for plan in plans:
            plan.body["spec"]["description"] = "überall Umlaute: äöü €, 漢字 🙂 " * 10
            await create(api, plan.body, namespace)
        await hold_to_plans(api, namespace, plans)
    seen = await asyncio.to_thread(witness.check)
    assert len(seen.completed) == len(plans)
    assert happened(seen)


@pytest.mark.parametrize("how", ["down", "cut off"])
async def test_names_are_used_again_behind_the_operators_back(
    plane: ControlPlane, api: KubeClient, proxy: FaultProxy, behind: Replica, namespace: str, how: str
) -> None:
    """While the operator is down a Framework, a pod and a ConfigMap are deleted, and other objects get their names. The
    new Framework takes over nothing of the old one; foreign objects are left alone, and waited for."""
    witness = Witness(plane, namespace)
    frameworks = Frameworks(api, namespace, patience=60.0)
    lasting = {"hollow/stop-seconds": "1"}
    fancy = {"fancyRetryPolicy": True, "maxRetryCount": 0}
    old = framework("reborn", role("worker", 2, annotations=lasting))
    with behind:
        for body in (
            old,
            framework("podless", role("worker", 1, annotations=lasting, retry=fancy)),
            # retried whether the end of its ConfigMap or that of its pod is seen first
            framework("mapless", role("worker", 1, annotations=lasting, policy=FIRST_FAILURE), retryPolicy=fancy),
        ):
            await create(api, body, namespace)
        for name in ("reborn", "podless", "mapless"):
            await until_running(frameworks, name)

        await go_away(proxy, behind, how)
        before = await uids_of(frameworks, "reborn")
        await api.delete(FRAMEWORKS, "reborn", namespace)
        await until(lambda: is_gone(api, FRAMEWORKS, "reborn", namespace), "deleted")
        await create(api, framework("reborn", role("worker", 2)), namespace)
        pod = await take_name(api, PODS, "podless-worker-0", namespace, {"spec": {"containers": [CONTAINER]}})
        config_map = await take_name(api, CONFIG_MAPS, "mapless-attempt", namespace, {})
        await come_back(proxy, behind, how)

        reborn = await until_completed(api, "reborn", namespace)
        assert outcome(reborn) == Expected(0, 0)
        assert not before & await uids_of(frameworks, "reborn")
        for name in ("podless", "mapless"):
            await until_condition(frameworks, name, "CreationBlocked", "NameTaken")
        assert uid_of(await api.get(PODS, "podless-worker-0", namespace)) == uid_of(pod)
        assert uid_of(await api.get(CONFIG_MAPS, "mapless-attempt", namespace)) == uid_of(config_map)

        await api.delete(PODS, "podless-worker-0", namespace, grace_period=0)
        await api.delete(CONFIG_MAPS, "mapless-attempt", namespace)
        for name in ("podless", "mapless"):
            await until_running(frameworks, name)
            await api.patch(FRAMEWORKS, name, namespace, {"spec": {"executionType": "Stop"}})
            obj = await until_completed(api, name, namespace)
            assert outcome(obj) == Expected(-210, 1 if name == "mapless" else 0)
    await asyncio.to_thread(witness.check)


CONTAINER = {"name": "main", "image": "example.org/stranger:1"}
FIRST_FAILURE = {"minFailedTaskCount": 1}


async def go_away(proxy: FaultProxy, operator: Replica, how: str) -> None:
    if how == "down":
        operator.kill()
    else:
        await proxy.go_down()


async def come_back(proxy: FaultProxy, operator: Replica, how: str) -> None:
    if how == "down":
        operator.start()
    else:
        await proxy.come_up()


async def until_running(frameworks: Frameworks, name: str) -> None:
    """Wait until all tasks of the Framework run."""
    await frameworks.until(name, lambda status: {each["state"] for each in all_tasks(status)} == {"AttemptRunning"})


def all_tasks(status: Object) -> list[Object]:
    roles = status["attemptStatus"]["taskRoleStatuses"] or ()
    return [task for role in roles for task in role["taskStatuses"]]


async def uids_of(frameworks: Frameworks, name: str) -> set[str]:
    """Return the UIDs of the Framework's pods."""
    return {task["attemptStatus"]["podUID"] for task in all_tasks(await frameworks.status(name))}


async def until_condition(frameworks: Frameworks, name: str, kind: str, reason: str) -> None:
    """Wait until the status has a condition of this kind and reason."""
    found = {"type": kind, "reason": reason}
    await frameworks.until(
        name, lambda status: any(found.items() <= each.items() for each in status.get("conditions") or ())
    )


async def take_name(api: KubeClient, resource: Resource, name: str, namespace: str, body: Object) -> Object:
    """Delete an object; another, labelled like it, gets its name."""
    labels = {FRAMEWORK_NAME: name.partition("-")[0], TASK_ROLE_NAME: "worker", TASK_INDEX: "0"}
    await api.delete(resource, name, namespace)
    await until(lambda: is_gone(api, resource, name, namespace), f"{name} deleted")
    return await api.create(resource, body | {"metadata": {"name": name, "labels": labels}}, namespace)


async def test_what_is_malformed_fails_alone(
    plane: ControlPlane, api: KubeClient, proxy: FaultProxy, behind: Replica, namespace: str
) -> None:
    """A malformed template, a template that the API server refuses, and an unreadable status affect only their own
    Framework, which reports it. Unknown fields stay in the spec, and are in the request for the pod."""
    created: list[Any] = []
    proxy.add(noting(created), method="POST", path=f"{namespace}/pods")
    shapeless, refused, garbled, future = (
        framework(name, role("worker", 1), role("other", 1)) for name in ("shapeless", "refused", "garbled", "future")
    )
    template(shapeless)["spec"]["containers"] = "one"
    template(refused)["spec"]["containers"][0]["ports"] = [{"containerPort": "http"}]
    template(future)["spec"]["schedulingGates"] = [{"name": "later"}]
    template(future)["spec"]["containers"][0]["knob"] = {"of": ["the", "future"]}
    garbled["status"] = {"state": 5}
    for body in (shapeless, refused, garbled, future, framework("good", role("worker", 2))):
        await create(api, body, namespace)
    with behind:
        assert outcome(await until_completed(api, "good", namespace)) == Expected(0, 0)
        assert outcome(await until_completed(api, "future", namespace)) == Expected(0, 0)
        frameworks = Frameworks(api, namespace, patience=60.0)
        await until_condition(frameworks, "shapeless", "Valid", "InvalidSpec")
        await until(lambda: warned_of(api, namespace, "shapeless", "spec.containers: must be a list"), "warned")
        await until(lambda: warned_of(api, namespace, "garbled", "status.state"), "warned")
        tasks = {task["attemptStatus"]["podName"]: task for task in all_tasks(await frameworks.status("refused"))}
        ended = tasks["refused-worker-0"]["attemptStatus"]["completionStatus"]
        assert ended["code"] in (-200, -310)
        assert "containerPort" in ended["diagnostics"]
        assert tasks["refused-other-0"]["attemptStatus"]["podUID"]
    stored = template(await api.get(FRAMEWORKS, "future", namespace))
    assert stored == template(future)
    sent = next(body for body in created if body["metadata"]["name"] == "future-worker-0")
    assert sent["spec"]["schedulingGates"] == [{"name": "later"}]
    assert sent["spec"]["containers"][0]["knob"] == {"of": ["the", "future"]}


def template(body: Object) -> Object:
    """Return the pod template of the first role."""
    found: Object = body["spec"]["taskRoles"][0]["task"]["pod"]
    return found


async def warned_of(api: KubeClient, namespace: str, name: str, text: str) -> bool:
    events = (await api.list(EVENTS, namespace, field_selector=f"involvedObject.name={name}")).items
    return any(event["reason"] == "InvalidFramework" and text in event["message"] for event in events)
