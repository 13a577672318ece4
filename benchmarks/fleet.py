"""Common parts of the farm's benchmarks: a Consul server filled with nodes and RCs, and farms as processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from rcfarm.operations.rc_spec import canonical_json
from store.consul.client import ConsulSettings
from store.consul.store import ConsulStore
from store.kv import ops
from store.kv.protocol import MAX_TXN_OPS, Op, SessionSpec
from store.schema import manifest
from store.schema.keys import LAYOUT, Keys
from store.schema.records import Meta, NodeAlive, NodeSpec, RCSpec, encode
from tests.support.consul.server import ConsulServer

KEYS = Keys()
SELECTOR = "pool=web"
_ALIVE = NodeAlive("agent", "2026-01-01T00:00:00Z", layout=LAYOUT)
WRITERS = 12  # transactions on their way at once when filling the store


def report(benchmark: str, **figures: object) -> None:
    """Print one JSON line."""
    print(json.dumps({"benchmark": benchmark, **figures}), flush=True)


def as_installed() -> dict[str, str]:
    """Return the environment of a program whose modules are compiled once, as an installed one's are."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {"PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "rcfarm-benchmark"), **environ}


@contextmanager
def servers_required() -> Iterator[None]:
    """End the program with one line and exit code 1 when a server program is missing, which would skip a test."""
    try:
        yield
    except (pytest.skip.Exception, pytest.fail.Exception) as missing:
        sys.exit(f"error: {missing}")


@asynccontextmanager
async def consul(max_connections: int | None = None) -> AsyncIterator[tuple[ConsulServer, ConsulStore]]:
    """Start a Consul server and a store on it. `max_connections`: Consul's limit per address; default 200."""
    with tempfile.TemporaryDirectory() as directory:
        server = ConsulServer(Path(directory), max_connections=max_connections)
        server.start()
        store = ConsulStore(ConsulSettings.from_env(server.url))
        try:
            yield server, store
        finally:
            await store.close()
            server.stop()


async def send(store: ConsulStore, writes: Sequence[Op], *, size: int = MAX_TXN_OPS) -> None:
    """Apply independent operations, merged into transactions, several at once."""
    slots = asyncio.Semaphore(WRITERS)

    async def one(batch: Sequence[Op]) -> None:
        async with slots:
            await store.txn(batch)

    await asyncio.gather(*(one(writes[start : start + size]) for start in range(0, len(writes), size)))


def rc_name(number: int) -> str:
    return f"rc{number:05}"


def rc_manifest(number: int) -> bytes:
    """Return a manifest per RC, because each RC has its own pod id; in the form that `rc apply` stores."""
    return canonical_json({"id": rc_name(number), "launchables": {"main": {"command": ["serve"]}}})


def node_name(number: int) -> str:
    return f"node{number:05}"


async def fill(
    store: ConsulStore, *, rcs: int, replicas: int, nodes: int, alive: bool = True, selector: str = SELECTOR
) -> str:
    """Write nodes, with live agents if `alive`, and unclaimed RCs. Return the agents' session."""
    agents = await store.create_session(SessionSpec("agents", ttl=86400.0, check_ttl=None))
    writes = [ops.put(KEYS.meta, encode(Meta(schema=LAYOUT)))]
    for number in range(nodes):
        name = node_name(number)
        writes.append(ops.put(KEYS.node_spec(name), encode(NodeSpec(name=name, labels={"pool": "web"}))))
    if alive:
        writes += [alive_op(node_name(number), agents.id) for number in range(nodes)]
    for number in range(rcs):
        raw = rc_manifest(number)
        spec = RCSpec(
            id=rc_name(number),
            manifest=manifest.digest(raw),
            replicas_desired=replicas,
            node_selector=selector.format(number),
            rc_labels={"pod_id": rc_name(number)},
        )
        writes += [ops.put(KEYS.manifest(spec.manifest), raw), ops.put(KEYS.spec(spec.id), encode(spec))]
    await send(store, writes)
    return agents.id


def alive_op(node: str, session: str) -> Op:
    """Return the operation that makes the node's agent live under this session."""
    return ops.lock(KEYS.node_alive(node), encode(_ALIVE), session)


def dead_op(node: str, session: str) -> Op:
    """Return the operation that makes the node's agent dead."""
    return ops.unlock(KEYS.node_alive(node), encode(_ALIVE), session)


class Delays(NamedTuple):
    """Lateness of timers of a farm's event loop, in milliseconds; `held`: processor time spent between two timers."""

    p99: float
    most: float
    held: float


class FarmProcess:
    """`rcfarm farm` as a process; `settings` as for `--set`. With `sampled`, `delays` returns how late its event loop
    was, which costs the farm 2 % of a core."""

    def __init__(
        self, server: ConsulServer, name: str, log: Path, settings: Sequence[str] = (), *, sampled: bool = False
    ) -> None:
        self._samples = log.with_suffix(".delays")
        program = ["benchmarks.sampled_farm", str(self._samples)] if sampled else ["rcfarm", "farm"]
        command = [sys.executable, "-m", *program, "--store", f"consul://{server.address}"]
        command += ["--name", name, "--listen", "off", "--log-level", "warning"]
        command += [word for setting in settings for word in ("--set", setting)]
        self.started = time.perf_counter()
        with log.open("ab") as output:
            self.process = psutil.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=as_installed()
            )

    @property
    def rss(self) -> int:
        """Return the resident memory in bytes."""
        return int(self.process.memory_info().rss)

    @property
    def cpu(self) -> float:
        """Return the seconds of processor time so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def delays(self, since: float, until: float) -> Delays:
        """Return the delays of the samples that began within this period (`time.time()`)."""
        lines = map(json.loads, self._samples.read_text().splitlines())
        chosen = [line for line in lines if since <= line["at"] <= until]
        late = sorted(delay for line in chosen for delay in line["late"])
        held = max((used for line in chosen for used in line["used"]), default=0.0)
        return Delays(late[len(late) * 99 // 100], late[-1], held) if late else Delays(0.0, 0.0, 0.0)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> float:
        """Send SIGTERM. Return the seconds until the process is gone."""
        began = time.perf_counter()
        self.process.terminate()
        self.process.wait(timeout=30)
        return time.perf_counter() - began


@contextmanager
def farm(
    server: ConsulServer, name: str = "farm-a", *, settings: Sequence[str] = (), sampled: bool = False
) -> Iterator[FarmProcess]:
    """Run a farm process within the context; its log is shown when it fails."""
    log = server.directory / f"{name}.log"
    process = FarmProcess(server, name, log, settings, sampled=sampled)
    try:
        yield process
    except BaseException:
        print(log.read_text(), file=sys.stderr)
        raise
    finally:
        if process.process.is_running():
            process.kill()


async def until_intents(store: ConsulStore, count: int, *, pause: float) -> float:
    """Wait until `count` intents exist. Return that time. `pause`: seconds between polls at the end; they load Consul,
    and are rarer before."""
    async with asyncio.timeout(120):
        while (there := len(await store.keys(KEYS.intents))) < count:  # noqa: ASYNC110  # the writer is another process
            await asyncio.sleep(pause * (1 + 9 * (1 - there / count)))
    return time.perf_counter()
