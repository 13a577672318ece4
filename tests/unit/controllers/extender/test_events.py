"""Events on pods, as the API server receives them."""

from __future__ import annotations

import asyncio

import pytest

from controllers.extender.reporting import write_event
from store.kube.api.objects import EVENTS
from store.kube.events import EventRecorder
from store.kube.memory.kube import MemoryKube
from tests.support.hived.cluster import pod_object

pytestmark = pytest.mark.looptime


async def test_an_event_is_on_the_pod() -> None:
    """Pods from a list have no kind; `kubectl describe pod` finds Events by it."""
    api = MemoryKube(namespaces=("default", "test"))
    recorder = EventRecorder(api, "test", clock=lambda: 0.0)
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(recorder.run())
        write_event(recorder, pod_object("job-0"), "Warning", "HivedQuotaLost", "it lost its quota")
        await asyncio.sleep(1)
        writing.cancel()
    (event,) = (await api.list(EVENTS, "test")).items
    about = event["involvedObject"]
    assert (about["apiVersion"], about["kind"], about["name"], about["uid"]) == ("v1", "Pod", "job-0", "job-0")
    assert (event["type"], event["reason"], event["message"]) == ("Warning", "HivedQuotaLost", "it lost its quota")
