"""Pod events per second from bytes to queued key, on one core, and the memory of 10,000 watched pods.

`python -m benchmarks.informer [--events N] [--pods N]` prints one JSON line. The events come through the client's own
decoding: once out of memory, once over loopback from a server in a process of its own, both with the handler of an
operator that queues the owner's key, and a worker that takes the keys. Memory is measured in a fresh process with the
real client: at its start (`base`), once it has all pods, and its peak in between.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, cast

import psutil

from benchmarks.pod_server import FIRST_VERSION, event_chunks, event_templates, page
from controllers.loop.workqueue import WorkQueue
from store.kube.api.objects import PODS, Object, Resource, controller_of, namespace_of
from store.kube.api.protocol import KubeApi, Page, WatchEvent
from store.kube.client.client import KubeClient, decode_page, events_in
from store.kube.informer.informer import DeletedFinalStateUnknown, Informer, by_controller, by_label, last_state

EVENT_PODS = 1000


class Memory:
    """The server's responses without a server: lists and watches only."""

    def __init__(self, pods: int, events: int) -> None:
        self._page = page(pods)
        self._templates, self._events = event_templates(pods), events

    async def list(self, resource: Resource, namespace: str = "", **options: Any) -> Page:
        return decode_page(self._page)

    @asynccontextmanager
    async def watch(
        self, resource: Resource, namespace: str = "", **options: Any
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        left = event_chunks(self._templates, self._events)

        async def chunks() -> bytes:
            chunk = next(left, None)
            if chunk is None:
                await asyncio.Event().wait()  # the stream stays open at its end
            await asyncio.sleep(0)  # as from a socket
            return chunk or b""

        yield events_in(chunks)


class OwnerHandler:
    """Queues the key of the object that owns a pod."""

    def __init__(self, queue: WorkQueue[str]) -> None:
        self._queue = queue

    def added(self, obj: Object) -> None:
        self._enqueue(obj)

    def updated(self, old: Object, new: Object) -> None:
        before, now = controller_of(old), controller_of(new)
        if before is not None and (now is None or before["uid"] != now["uid"]):
            self._enqueue(old)
        self._enqueue(new)

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        self._enqueue(last_state(obj))

    def _enqueue(self, obj: Object) -> None:
        owner = controller_of(obj)
        if owner is not None:
            self._queue.add(f"{namespace_of(obj)}/{owner['name']}")


@asynccontextmanager
async def informing(api: KubeApi) -> AsyncIterator[Informer]:
    """Run an informer as in an operator, and a worker that takes the keys."""
    queue = WorkQueue[str]()
    indexers = {"controller": by_controller, "job": by_label("FC_FRAMEWORK_NAME")}
    informer = Informer(api, PODS, indexers=indexers)
    informer.add_handler(OwnerHandler(queue))
    tasks = [asyncio.create_task(informer.run()), asyncio.create_task(_take_keys(queue))]
    try:
        await informer.synced()
        yield informer
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _take_keys(queue: WorkQueue[str]) -> None:
    while True:
        queue.done(await queue.get())


async def event_rates(name: str, api: KubeApi, events: int) -> dict[str, int]:
    """Return events per second, and per second of this process's CPU time, which is independent of other load."""
    async with informing(api) as informer:
        began, began_cpu = time.perf_counter(), time.process_time()
        while informer.resource_version != str(FIRST_VERSION + events):  # noqa: ASYNC110 - nothing to wait for
            await asyncio.sleep(0.001)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
        assert informer.stats.events == events
    return {f"{name}_per_second": round(events / seconds), f"{name}_per_cpu_second": round(events / cpu_seconds)}


@contextmanager
def pod_server(pods: int, events: int) -> Iterator[str]:
    """Yield the URL of a server in its own process."""
    command = [sys.executable, "-m", "benchmarks.pod_server", f"--pods={pods}", f"--events={events}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


async def over_loopback(url: str, events: int) -> dict[str, int]:
    async with await KubeClient.connect(server=url) as client:
        return await event_rates("loopback", client, events)


async def watch_and_weigh(url: str, pods: int) -> None:
    """Run in the new process: print megabytes before and after, as JSON."""
    import kubernetes_asyncio.config  # noqa: F401 - the import that a kubeconfig needs is part of the base

    process = psutil.Process()
    async with await KubeClient.connect(server=url) as client:
        base = process.memory_info().rss
        async with informing(client) as informer:
            assert len(informer) == pods
            await asyncio.sleep(1.0)
            watched = process.memory_info().rss
    print(json.dumps({"base_mb": _mb(base), "watched_mb": _mb(watched), "peak_mb": _mb(_peak())}))


def _peak() -> int:
    """Return the peak memory of this process; `ru_maxrss` would include its parent's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _mb(size: int) -> int:
    return round(size / 1e6)


def weigh(pods: int) -> dict[str, int]:
    """Return the result of `watch_and_weigh` in its own process."""
    with pod_server(pods, 0) as url:
        command = [sys.executable, "-m", "benchmarks.informer", f"--pods={pods}", f"--weigh={url}"]
        result: dict[str, int] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--pods", type=int, default=10_000)
    parser.add_argument("--weigh", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    events: int = arguments.events
    if arguments.weigh:
        asyncio.run(watch_and_weigh(arguments.weigh, arguments.pods))
        return
    memory = cast(KubeApi, Memory(EVENT_PODS, events))
    in_memory = asyncio.run(event_rates("in_memory", memory, events))
    with pod_server(EVENT_PODS, events) as url:
        loopback = asyncio.run(over_loopback(url, events))
    result = {
        "benchmark": "informer",
        "events": events,
        "event_bytes": len(page(EVENT_PODS)) // EVENT_PODS,
        **in_memory,
        **loopback,
        "pods": arguments.pods,
        **weigh(arguments.pods),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
