"""MemoryKube against a real API server: the same random calls, and every answer and event compared.

UIDs and versions differ in value but must correspond: equal UIDs or versions in one are equal in the other. Times
are compared by presence. Of pods and errors, only the parts that control loops read are compared: a server fills in
many defaults and words its refusals in its own way. Managed fields are off in the server, because changes of them alone
would make new versions of objects. Garbage collection is left out, since a real one is slow.

`RCFARM_DIFFERENTIAL_RUNS` sets how many random runs are tried.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from store.kube.api.errors import KubeError
from store.kube.api.objects import CONFIG_MAPS, LEASES, PODS, Object, Resource, name_of
from store.kube.api.protocol import KubeApi, PatchType, Propagation, WatchEvent
from store.kube.client.client import KubeClient
from store.kube.memory.kube import MemoryKube
from tests.support.kube.control_plane import StartControlPlane

RUNS = int(os.environ.get("RCFARM_DIFFERENTIAL_RUNS", "60"))
STEPS = 20
SPLIT = Resource("test.rcfarm.dev", "v1", "splits", "Split")  # has a status subresource
WHOLE = Resource("test.rcfarm.dev", "v1", "wholes", "Whole")
FIELDS: dict[Resource, tuple[str, ...]] = {  # the fields written to objects of each kind, besides metadata
    CONFIG_MAPS: ("data",),
    PODS: ("status",),
    LEASES: (),
    SPLIT: ("spec", "status"),
    WHOLE: ("spec", "status"),
}
KINDS = tuple(FIELDS)
TIMES = ("creationTimestamp", "deletionTimestamp")


def definition(resource: Resource, *, has_status: bool = False) -> Object:
    """Return a CustomResourceDefinition of `resource`, whose schema accepts every field."""
    version = {
        "name": resource.version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
        **({"subresources": {"status": {}}} if has_status else {}),
    }
    names = {"plural": resource.plural, "kind": resource.kind, "listKind": f"{resource.kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{resource.plural}.{resource.group}"},
        "spec": {
            "group": resource.group,
            "scope": "Namespaced" if resource.namespaced else "Cluster",
            "names": names | {"singular": resource.kind.lower()},
            "versions": [version],
        },
    }


kinds = st.sampled_from(KINDS)
names = st.sampled_from(["a", "a", "b"])
finalizers = st.lists(st.sampled_from(["example.dev/one", "example.dev/two"]), unique=True)
labels = st.dictionaries(st.sampled_from(["x", "y"]), st.sampled_from(["1", "2"]), max_size=2)
metadata = st.fixed_dictionaries({}, optional={"labels": labels, "finalizers": finalizers})
versions = st.sampled_from(["current", "current", "stale", "none"])
uids = st.sampled_from(["current", "none", "none", "wrong"])
changes = st.fixed_dictionaries(
    {},
    optional={
        "data": st.dictionaries(st.sampled_from("kl"), st.sampled_from(["1", "2", None]), max_size=2),
        "spec": st.fixed_dictionaries({"n": st.sampled_from([1, 2, None])}),
        "status": st.fixed_dictionaries({"phase": st.sampled_from(["Running", "Succeeded"])}),
    },
)


class Side:
    """One of the two servers, and how its UIDs and versions are numbered."""

    namespace = "default"

    def __init__(self, api: KubeApi, prefix: str) -> None:
        self.api, self.prefix = api, prefix
        self.seen: dict[tuple[str, str], list[Object]] = {}  # by kind and name: what a loop has read, oldest first
        self.start = ""
        self._numbers: dict[str, int] = {}

    def name(self, short: str) -> str:
        return self.prefix + short

    async def outcome(self, resource: Resource, call: Awaitable[Object | None]) -> Any:
        """Return an answer, or the type of the refusal, in comparable form."""
        try:
            answer = await call
        except KubeError as error:
            return type(error).__name__, error.status
        if answer is None or answer.get("kind") == "Status":
            return None
        self.seen.setdefault((resource.plural, name_of(answer)), []).append(answer)
        return self.comparable(resource, answer)

    def known(self, resource: Resource, short: str, version: str, uid: str) -> Object:
        """Return metadata to write with: name, namespace, and the preconditions as drawn, if the object was read
        before."""
        result: Object = {"name": self.name(short), "namespace": self.namespace}
        read = self.seen.get((resource.plural, self.name(short)))
        if read and version != "none":
            result["resourceVersion"] = read[-1 if version == "current" else 0]["metadata"]["resourceVersion"]
        if uid == "wrong" or (read and uid == "current"):
            result["uid"] = "wrong" if uid == "wrong" or not read else read[-1]["metadata"]["uid"]
        return result

    def comparable(self, resource: Resource, obj: Object) -> Object:
        meta = {key: value for key, value in obj["metadata"].items() if key != "managedFields"}
        meta["name"] = meta["name"].removeprefix(self.prefix)
        meta["namespace"] = ""
        for field in ("uid", "resourceVersion"):
            meta[field] = self._numbers.setdefault(f"{field} {meta[field]}", len(self._numbers))
        meta |= {field: True for field in TIMES if field in meta}
        rest: Object = {key: obj[key] for key in ("data", "spec", "status") if key in obj}
        if resource == PODS:
            rest["spec"] = {key: rest["spec"].get(key) for key in ("nodeName", "activeDeadlineSeconds")}
            rest["status"] = {"phase": rest["status"]["phase"]}
        if resource == LEASES:
            rest.pop("spec", None)
        return {"metadata": meta, **rest}

    async def items(self, resource: Resource, labels: str = "", fields: str = "") -> list[Object]:
        page = await self.api.list(resource, self.namespace, label_selector=labels, field_selector=fields)
        return [self.comparable(resource, item) for item in page.items if name_of(item).startswith(self.prefix)]

    async def events(self, resource: Resource, count: int | None) -> list[tuple[str, Object]]:
        """Return the events of this run's objects since its start: the first `count`, or, if None, all available
        without waiting."""
        found: list[WatchEvent] = []
        timeout = 0.0 if count is None else 30.0
        async with self.api.watch(resource, self.namespace, resource_version=self.start, timeout=timeout) as events:
            while count is None or len(found) < count:
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    break
                if event.type != "BOOKMARK" and name_of(event.object).startswith(self.prefix):
                    found.append(event)
        return [(event.type, self.comparable(resource, event.object)) for event in found]


class Differential(RuleBasedStateMachine):
    """`real` and `run` (a coroutine to its end) come from the test."""

    real: KubeClient
    run: Callable[[Any], Any]

    @initialize(kind=kinds)
    def begin(self, kind: Resource) -> None:
        """Choose one kind for the run, so that its calls interact."""
        self.kind = kind
        memory = MemoryKube(gc_delay=None)
        memory.register(SPLIT, has_status=True)
        prefix = f"r{secrets.token_hex(5)}-"
        self.sides = (Side(memory, prefix), Side(self.real, prefix))
        for side in self.sides:
            side.start = self.run(side.api.list(CONFIG_MAPS, side.namespace)).resource_version

    def both(self, call: Callable[[Side], Awaitable[Object | None]]) -> None:
        memory, real = [self.run(side.outcome(self.kind, call(side))) for side in self.sides]
        assert memory == real

    @rule(name=names, meta=metadata, change=changes, node=st.sampled_from(["", "n1"]))
    def create(self, name: str, meta: Object, change: Object, node: str) -> None:
        def body(side: Side) -> Object:
            return content(self.kind, change, node) | {"metadata": {**meta, "name": side.name(name)}}

        self.both(lambda side: side.api.create(self.kind, body(side), side.namespace))

    @precondition(lambda self: self.kind != PODS)  # whose defaults would have to be sent back
    @rule(name=names, meta=metadata, change=changes, version=versions, uid=uids)
    def replace(self, name: str, meta: Object, change: Object, version: str, uid: str) -> None:
        def body(side: Side) -> Object:
            return content(self.kind, change, "") | {"metadata": {**meta, **side.known(self.kind, name, version, uid)}}

        self.both(lambda side: side.api.replace(self.kind, body(side)))

    @rule(
        name=names,
        meta=metadata,
        change=changes,
        version=st.sampled_from(["none", "none", "current", "stale"]),
        patch_type=st.sampled_from(["merge", "strategic"]),
        part=st.sampled_from(["", "", "status"]),
    )
    def patch(self, name: str, meta: Object, change: Object, version: str, patch_type: PatchType, part: str) -> None:
        fitting = {key: value for key, value in change.items() if key in FIELDS[self.kind]}
        if patch_type == "strategic" and "data" in fitting:  # where the server adds "" for a null that removes nothing
            fitting["data"] = {key: value for key, value in fitting["data"].items() if value is not None}

        def patch(side: Side) -> Object:
            return {**fitting, "metadata": {**meta, **side.known(self.kind, name, version, "none")}}

        self.both(
            lambda side: side.api.patch(
                self.kind, side.name(name), side.namespace, patch(side), patch_type=patch_type, subresource=part
            )
        )

    @rule(name=names, uid=st.sampled_from(["none", "wrong"]))
    def patch_with_another_uid(self, name: str, uid: str) -> None:
        meta = {"labels": {"z": "1"}} | ({"uid": "wrong"} if uid == "wrong" else {})
        self.both(lambda side: side.api.patch(self.kind, side.name(name), side.namespace, {"metadata": meta}))

    @rule(name=names, operation=st.sampled_from(["add", "remove", "test"]))
    def patch_by_operations(self, name: str, operation: str) -> None:
        operations = [{"op": operation, "path": "/metadata/labels/x", "value": "1"}]
        self.both(
            lambda side: side.api.patch(self.kind, side.name(name), side.namespace, operations, patch_type="json")
        )

    @rule(name=names, uid=uids, grace=st.sampled_from([None, None, 0, 5]), force=st.booleans())
    def delete(self, name: str, uid: str, grace: int | None, force: bool) -> None:
        def call(side: Side) -> Awaitable[None]:
            precondition = side.known(self.kind, name, "none", uid).get("uid", "")
            propagation: Propagation | None = "Background" if force else None
            return side.api.delete(
                self.kind,
                side.name(name),
                side.namespace,
                uid=precondition,
                grace_period=grace,
                propagation=propagation,
            )

        self.both(call)

    @precondition(lambda self: self.kind == PODS)
    @rule(name=names)
    def bind(self, name: str) -> None:
        def call(side: Side) -> Awaitable[Object]:
            target = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": side.name(name)}}
            body = target | {"target": {"kind": "Node", "name": "n2"}}
            return side.api.create(PODS, body, side.namespace, name=side.name(name), subresource="binding")

        self.both(call)

    @rule(name=names)
    def get(self, name: str) -> None:
        self.both(lambda side: side.api.get(self.kind, side.name(name), side.namespace))

    @rule(
        labels=st.sampled_from(["x", "!x", "x=1", "x!=1", "x in (1,2),y"]),
        fields=st.sampled_from(["", "metadata.name!=a"]),
    )
    def select(self, labels: str, fields: str) -> None:
        memory, real = [self.run(side.items(self.kind, labels, fields)) for side in self.sides]
        assert memory == real

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        memory, real = [self.run(side.items(self.kind)) for side in self.sides]
        assert memory == real
        seen = self.run(self.sides[0].events(self.kind, None))
        if seen:
            assert seen == self.run(self.sides[1].events(self.kind, len(seen)))


def content(kind: Resource, change: Object, node: str) -> Object:
    """Return an object of the kind, without metadata, that has the drawn content as far as it fits."""
    if kind == CONFIG_MAPS:
        return {"data": {key: value for key, value in (change.get("data") or {}).items() if value is not None}}
    if kind == PODS:
        spec: Object = {"containers": [{"name": "main", "image": "scratch"}], **({"nodeName": node} if node else {})}
        return {"spec": spec, **{key: change[key] for key in ("status",) if key in change}}
    if kind == LEASES:
        return {"spec": {"leaseDurationSeconds": 5}}
    own: Object = {key: change[key] for key in ("spec", "status") if key in change}
    return {"apiVersion": kind.api_version, "kind": kind.kind, **own}


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_the_memory_answers_as_the_server(start_control_plane: StartControlPlane, runner: asyncio.Runner) -> None:
    """Over random histories, answers, refusals, lists and events are the same."""
    plane = start_control_plane(apiserver_flags=["--feature-gates=ServerSideApply=false"])
    plane.install(definition(SPLIT, has_status=True), definition(WHOLE))
    client = runner.run(KubeClient.connect(str(plane.kubeconfig)))
    Differential.real, Differential.run = client, staticmethod(runner.run)
    try:
        run_state_machine_as_test(
            Differential,
            settings=settings(
                max_examples=RUNS, stateful_step_count=STEPS, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
    finally:
        runner.run(client.close())
