"""The extender over HTTP: kube-scheduler's waiting time, alone and while other clients inspect all of a large cluster.

The server is a separate process, as in production except for the in-memory API server: the scheduler reads all nodes
and pods from it and recovers, then answers. Client and inspector are separate processes, too, so that no process
delays another's event loop.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from aiohttp import web

from benchmarks.hived_cluster import Cluster, Gangs, Stopwatch, node, node_names, seconds
from controllers.extender.scheduler import HivedScheduler
from controllers.extender.server import CLUSTER_STATUS, FILTER, extender_app
from rcfarm.daemon.daemon import freeze_all, freeze_survivors
from rcfarm.daemon.logging import configure
from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.inspection.inspection import Inspected, Inspection
from store.kube.api.objects import NODES, PODS, Object
from store.kube.memory.kube import MemoryKube

NAMED = 1000  # nodes that each filter names

_processes = multiprocessing.get_context("spawn")


class Server:
    """The part of the server process: sends the data for `measure`, then serves until stopped."""

    def __init__(self, nodes: int, filled: float, waiting: int) -> None:
        cluster = Cluster(nodes)
        cluster.fill(filled)
        self._names, self._bound = cluster.names, cluster.bound()
        self._waiting = gangs(waiting)
        self._topology = cluster.algorithm.topology

    async def serve(self, control: Connection) -> None:
        api = MemoryKube(history_limit=100_000)
        for name in self._names:
            await api.create(NODES, node(name))
        for pod in self._bound:
            await api.create(PODS, pod, "default")
        waiting = [await api.create(PODS, pod, "default") for pod in self._waiting]
        algorithm = HivedAlgorithm(self._topology)
        scheduler = HivedScheduler(api, algorithm, evict_victims="never")
        runner = web.AppRunner(extender_app(scheduler, Inspection(Inspected(algorithm))), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        figures: dict[str, float] = {}
        running = asyncio.create_task(scheduler.run())
        with seconds(figures, "recovery_s"):
            await scheduler.ready.wait()
        freeze_all()
        control.send((runner.addresses[0][1], waiting, figures))
        await asyncio.to_thread(control.recv)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await runner.cleanup()


def gangs(pods: int) -> list[Object]:
    """Return at least `pods` waiting pods."""
    supply, found = Gangs(2, "waiting"), list[Object]()
    while len(found) < pods:
        found += supply.next()
    return found


def serve(control: Connection, nodes: int, filled: float, waiting: int) -> None:
    """Run the server process."""
    freeze_survivors()  # as the extender does
    with Path(os.devnull).open("w") as nowhere:
        configure(stream=nowhere)
        asyncio.run(Server(nodes, filled, waiting).serve(control))


def inspect(sizes: Connection, port: int) -> None:
    """Run the inspector's process: request the state of all cells repeatedly, until it is killed."""
    os.nice(10)  # the client must not wait for a core
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while True:
        connection.request("GET", CLUSTER_STATUS)
        sizes.send(len(connection.getresponse().read()))


@contextmanager
def process(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Yield a process and the other end of its connection; kill the process at the end."""
    ours, theirs = _processes.Pipe()
    child = _processes.Process(target=target, args=(theirs, *arguments), daemon=True)
    child.start()
    try:
        yield ours
    finally:
        child.terminate()
        child.join()


def filters(port: int, pods: list[Object], names: list[str]) -> dict[str, float]:
    """Return the times that kube-scheduler waits for a response."""
    watch = Stopwatch()
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for pod in pods:
        body = json.dumps({"Pod": pod, "NodeNames": names}).encode()
        answer = watch.time("filter", _post, connection, body)
        assert not answer["Error"], answer
    return watch.figures("filter")


def _post(connection: http.client.HTTPConnection, body: bytes) -> Object:
    connection.request("POST", FILTER, body, {"Content-Type": "application/json"})
    answer: Object = json.loads(connection.getresponse().read())
    return answer


def measure(nodes: int, filled: float, pods: int) -> dict[str, object]:
    """Measure filters of that many pods alone, and of as many while all cells are inspected."""
    with process(serve, nodes, filled, 2 * pods) as server:
        port, waiting, figures = server.recv()
        names = node_names(nodes)[:: max(1, nodes // NAMED)][:NAMED]
        alone = filters(port, waiting[:pods], names)
        with process(inspect, port) as sizes:
            size = sizes.recv()
            inspected = filters(port, waiting[pods : 2 * pods], names)
            inspections = 0
            while sizes.poll():
                sizes.recv()
                inspections += 1
        server.send("stop")
    return {
        **figures,
        "names": len(names),
        "filter": alone,
        "filter_inspected": inspected,
        "inspections": inspections,
        "inspected_mb": round(size / 1e6, 1),
    }
