"""The extender over HTTP: what kube-scheduler waits for, alone and while others inspect all of a large cluster.

The server is a process of its own, as in life but for the API server, which is in memory: the scheduler reads all nodes
and pods from it and recovers, then answers. Client and inspector are processes, too, so none of them waits for another
one's Python.
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
from rcfarm.logging import configure
from rcfarm.settled_heap import set_aside, settle
from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.inspection import Inspected, Inspection
from scheduler.hived.scheduler import HivedScheduler
from scheduler.hived.web_server import CLUSTER_STATUS, FILTER, extender_app
from store.kube.memory import MemoryKube
from store.kube.objects import Object
from store.kube.resources import NODES, PODS

NAMED = 1000  # nodes that each filter names

_processes = multiprocessing.get_context("spawn")


class Server:
    """The process's own part. Sends what `measure` needs to know, then serves until it is told to stop."""

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
        set_aside()
        control.send((runner.addresses[0][1], waiting, figures))
        await asyncio.to_thread(control.recv)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await runner.cleanup()


def gangs(pods: int) -> list[Object]:
    """At least so many pods that wait."""
    supply, found = Gangs(2, "waiting"), list[Object]()
    while len(found) < pods:
        found += supply.next()
    return found


def serve(control: Connection, nodes: int, filled: float, waiting: int) -> None:
    """The server process."""
    settle()  # as the extender does
    with Path(os.devnull).open("w") as nowhere:
        configure(stream=nowhere)
        asyncio.run(Server(nodes, filled, waiting).serve(control))


def inspect(sizes: Connection, port: int) -> None:
    """The inspector's process: asks for the state of all cells, again and again, until it is ended."""
    os.nice(10)  # the client must not wait for a core
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while True:
        connection.request("GET", CLUSTER_STATUS)
        sizes.send(len(connection.getresponse().read()))


@contextmanager
def process(target: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """A process, and the other end of its connection; it is ended in the end."""
    ours, theirs = _processes.Pipe()
    child = _processes.Process(target=target, args=(theirs, *arguments), daemon=True)
    child.start()
    try:
        yield ours
    finally:
        child.terminate()
        child.join()


def filters(port: int, pods: list[Object], names: list[str]) -> dict[str, float]:
    """How long kube-scheduler waits for each answer, and what was answered."""
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
    """Filters of so many pods alone, and of as many while all cells are inspected."""
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
