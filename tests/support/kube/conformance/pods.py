"""The guarantees that a scheduler needs when it binds and evicts pods: one suite for a real API server and
`MemoryKube`."""

from __future__ import annotations

import pytest

from store.kube.api.errors import BadRequest, Conflict, NotFound, TooManyRequests
from store.kube.api.objects import POD_DISRUPTION_BUDGETS, PODS, Object, annotations_of, is_deleting, uid_of
from store.kube.api.protocol import KubeApi
from tests.support.kube.conformance.writes import is_gone, pod

BUDGETS = POD_DISRUPTION_BUDGETS.in_version("v1beta1")


def binding(node: str, uid: str = "", **annotations: str) -> Object:
    metadata = {"name": "a", "annotations": annotations} | ({"uid": uid} if uid else {})
    return {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": {"kind": "Node", "name": node}}


def eviction(namespace: str, uid: str = "", version: str = "policy/v1beta1") -> Object:
    options = {"preconditions": {"uid": uid}} if uid else {}
    metadata = {"name": "a", "namespace": namespace}
    return {"apiVersion": version, "kind": "Eviction", "metadata": metadata, "deleteOptions": options}


async def running(api: KubeApi, namespace: str) -> Object:
    """Return a pod that runs on a node."""
    body = pod(labels={"app": "x"})
    body["spec"]["nodeName"] = "node-x"
    await api.create(PODS, body, namespace)
    return await api.patch(PODS, "a", namespace, {"status": {"phase": "Running"}}, subresource="status")


class PodConformance:
    """Bindings and evictions."""

    async def test_a_binding_carries_annotations(self, api: KubeApi, namespace: str) -> None:
        """The pod gets the node, and the binding's annotations beside its own, in one write."""
        created = await api.create(PODS, pod(annotations={"own": "1", "both": "pod"}), namespace)
        body = binding("node-x", uid_of(created), both="binding", new="2")
        await api.create(PODS, body, namespace, name="a", subresource="binding")
        bound = await api.get(PODS, "a", namespace)
        assert bound["spec"]["nodeName"] == "node-x"
        assert annotations_of(bound) == {"own": "1", "both": "binding", "new": "2"}

    async def test_a_pod_is_bound_once(self, api: KubeApi, namespace: str) -> None:
        """A second binding conflicts, whatever its node, and leaves no annotation."""
        await api.create(PODS, pod(), namespace)
        await api.create(PODS, binding("node-x", late="0"), namespace, name="a", subresource="binding")
        with pytest.raises(Conflict, match='already assigned to node "node-x"'):
            await api.create(PODS, binding("node-x", late="1"), namespace, name="a", subresource="binding")
        assert annotations_of(await api.get(PODS, "a", namespace)) == {"late": "0"}

    async def test_an_eviction_ends_a_pod_gracefully(self, api: KubeApi, namespace: str) -> None:
        """The pod is marked for deletion, as by a deletion; a second eviction changes nothing."""
        seen = await running(api, namespace)
        for _ in range(2):
            await api.create(PODS, eviction(namespace, uid_of(seen)), namespace, name="a", subresource="eviction")
        assert is_deleting(await api.get(PODS, "a", namespace))
        await api.delete(PODS, "a", namespace, grace_period=0)
        with pytest.raises(NotFound):
            await api.create(PODS, eviction(namespace), namespace, name="a", subresource="eviction")

    async def test_a_successor_is_not_evicted(self, api: KubeApi, namespace: str) -> None:
        """A UID as precondition protects a new pod of the same name."""
        await running(api, namespace)
        with pytest.raises(Conflict):
            await api.create(PODS, eviction(namespace, "other"), namespace, name="a", subresource="eviction")
        assert not is_deleting(await api.get(PODS, "a", namespace))

    async def test_a_budget_holds_up_an_eviction(self, api: KubeApi, namespace: str) -> None:
        """A running pod whose budget allows no disruption stays, and the answer says to try again later."""
        spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}}
        await api.create(BUDGETS, {"metadata": {"name": "b"}, "spec": spec}, namespace)
        await running(api, namespace)
        with pytest.raises(TooManyRequests):
            await api.create(PODS, eviction(namespace), namespace, name="a", subresource="eviction")
        assert not is_deleting(await api.get(PODS, "a", namespace))

    async def test_a_pod_that_does_not_run_has_no_budget(self, api: KubeApi, namespace: str) -> None:
        """Evicting it disrupts nothing."""
        spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}}
        await api.create(BUDGETS, {"metadata": {"name": "b"}, "spec": spec}, namespace)
        await api.create(PODS, pod(labels={"app": "x"}), namespace)
        await api.create(PODS, eviction(namespace), namespace, name="a", subresource="eviction")
        assert await is_gone(api, PODS, "a", namespace)

    async def test_the_version_of_an_eviction(self, api: KubeApi, namespace: str) -> None:
        """This server does not know evictions of policy/v1 yet, and reports it."""
        await running(api, namespace)
        with pytest.raises(BadRequest, match="Eviction"):
            await api.create(
                PODS, eviction(namespace, version="policy/v1"), namespace, name="a", subresource="eviction"
            )
