"""Hollow nodes play the deletion of pods as real ones do."""

from __future__ import annotations

from store.kube.api.errors import NotFound
from store.kube.api.objects import PODS, Object
from tests.support.jobs.train_jobs import memory_kube
from tests.support.kube.hollow.kubelet import HollowKubelet
from tests.support.waiting import until


async def test_a_container_that_would_run_for_long_stops_when_its_pod_is_deleted() -> None:
    """The task that plays it is woken and cancelled by the same event; neither may be lost."""
    api = memory_kube()
    body: Object = {
        "metadata": {"name": "long", "annotations": {"hollow/run-seconds": "600", "hollow/exit-code": "0"}},
        "spec": {"containers": [{"name": "main", "image": "main:1"}]},
    }
    async with HollowKubelet(api, schedules=True).playing(nodes=1):
        await api.create(PODS, body, "default")

        async def is_running() -> bool:
            return bool(((await api.get(PODS, "long", "default")).get("status") or {}).get("phase") == "Running")

        async def is_gone() -> bool:
            try:
                await api.get(PODS, "long", "default")
            except NotFound:
                return True
            return False

        await until(is_running, "running", within=10)
        await api.delete(PODS, "long", "default")
        await until(is_gone, "gone", within=10)
