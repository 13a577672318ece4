"""The event recorder against a real API server: stored Events and patches are valid there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from store.kube.api.objects import Object
from store.kube.client.client import KubeClient
from store.kube.events import EventRecorder
from tests.support.kube.control_plane import ControlPlane
from tests.support.waiting import background, until


@asynccontextmanager
async def recording(plane: ControlPlane) -> AsyncIterator[EventRecorder]:
    async with await KubeClient.connect(str(plane.kubeconfig)) as api:
        recorder = EventRecorder(api, "rcfarm-jobs")
        async with background(recorder.run()):
            yield recorder


async def test_events_are_stored_counted_and_combined(control_plane: ControlPlane, namespace: str) -> None:
    """Distinct messages are stored, then combined; counts are raised by patches; deleted Events are created again with
    their whole count; `kubectl` finds Events by the fields of the object."""
    path = f"/api/v1/namespaces/{namespace}"
    made = control_plane.request("POST", f"{path}/configmaps", {"metadata": {"name": "train"}})

    def stored() -> dict[str, Object]:
        selector = f"involvedObject.uid={made['metadata']['uid']},involvedObject.kind=ConfigMap"
        items = control_plane.request("GET", f"{path}/events?fieldSelector={selector}")["items"]
        return {item["message"]: item for item in items}

    async with recording(control_plane) as recorder:

        def record(message: str) -> None:
            recorder.event(made, "Warning", "Failed", message, api_version="v1", kind="ConfigMap")

        for number in range(12):
            record(f"message {number}")
        await until(lambda: recorder.written >= 10)
        combined = "(combined from similar events): message 11"
        assert stored().keys() == {*(f"message {number}" for number in range(9)), combined}
        assert stored()[combined]["count"] == 3

        record("message 0")
        await until(lambda: stored()["message 0"]["count"] == 2)

        control_plane.request("DELETE", f"{path}/events/{stored()['message 0']['metadata']['name']}")
        record("message 0")
        await until(lambda: "message 0" in stored())
        assert stored()["message 0"]["count"] == 3
        assert recorder.rejected == recorder.dropped == 0


async def test_a_namespace_that_is_being_deleted_takes_none(control_plane: ControlPlane) -> None:
    """The API server refuses the Event; the recorder drops it and continues."""
    control_plane.request("POST", "/api/v1/namespaces", {"metadata": {"name": "ending"}, "spec": {}})
    pod = {"metadata": {"name": "held", "finalizers": ["test.rcfarm.dev/held"]}}
    control_plane.request("POST", "/api/v1/namespaces/ending/configmaps", pod)
    control_plane.request("DELETE", "/api/v1/namespaces/ending")
    async with recording(control_plane) as recorder:
        gone = {"metadata": {"name": "held", "namespace": "ending", "uid": "1"}}
        recorder.event(gone, "Normal", "Gone", "it goes", api_version="v1", kind="ConfigMap")
        await until(lambda: recorder.rejected == 1)
        fine = {"metadata": {"name": "fine", "namespace": "default", "uid": "2"}}
        recorder.event(fine, "Normal", "Fine", "it stays", api_version="v1", kind="ConfigMap")
        await until(lambda: recorder.written == 1)
    patch = {"metadata": {"finalizers": None}}
    control_plane.request(
        "PATCH", "/api/v1/namespaces/ending/configmaps/held", patch, content_type="application/merge-patch+json"
    )
