"""Arbitrary requests against every listener: `python -m tests.fuzz_http --count 100000 [--seed N]`.

The listeners run in a process of their own, as they do in production: the API of an embedded store in a SQLite file
(with and without its token), the health listener, and the HiveD extender with a real scheduler. Each request has a
connection of its own: garbage, a malformed request, or a valid one in which something was changed. A run fails for

- a status of 500 or above that Consul itself would not give, or an answer that reports an internal error;
- an answer, or the end of the connection, later than a second after the request;
- an error or a traceback in the log;
- a listener that does not answer a plain request at the end.

The seed is printed; the same seed sends the same requests. A request whose answer was late is sent again at the end,
alone: only one that is late again counts, so that a busy machine is not taken for a slow listener.
"""

# ruff: noqa: E501  # lists of odd values are read best in long lines
from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from controllers.extender import scheduler as scheduler_module
from controllers.extender.scheduler import HivedScheduler
from controllers.extender.server import CALLS, extender_app
from rcfarm.daemon.health import Condition, Health
from rcfarm.daemon.health_server import serving, web_app
from rcfarm.daemon.listener import Address
from rcfarm.daemon.logging import configure
from rcfarm.telemetry.prometheus import new_registry
from scheduler.hived.algorithm import HivedAlgorithm
from scheduler.hived.contract import POD_BIND_INFO, POD_SCHEDULING_SPEC
from scheduler.hived.inspection.inspection import Inspected, Inspection
from store.embedded.consul_api.app import serve_consul_api
from store.embedded.store import EmbeddedStore
from store.kube.api.objects import NODES, PODS
from store.kube.memory.kube import MemoryKube
from store.kube.memory.rules import NAMESPACES
from tests.support.hived.cluster import Job, node_object, topology_of

TOKEN = "the-right-token"
LATE = 1.0  # seconds
PATIENCE = 20.0  # seconds until an answer that has begun, or is overdue, is given up
WORKERS = 48  # most of them wait for answers to incomplete requests
CONSULS_OWN = ("invalid session", "missing session", "Must provide key", "CheckID ")
SCHEDULING_SPEC = {"virtualCluster": "vision", "priority": 0, "leafCellNumber": 1}
CONFIG: dict[str, Any] = {
    "physicalCluster": {
        "cellTypes": {"HOST": {"childCellType": "GPU", "childCellNumber": 4, "isNodeLevel": True}},
        "physicalCells": [{"cellType": "HOST", "cellAddress": "a0"}, {"cellType": "HOST", "cellAddress": "a1"}],
    },
    "virtualClusters": {"vision": {"virtualCells": [{"cellType": "HOST", "cellNumber": 2}]}},
}


async def serve(directory: Path) -> None:
    """Run the listeners until standard input ends; their addresses are the first line of standard output."""
    configure("warning", "json")
    store = EmbeddedStore(directory / "store.db")
    health = Health(lambda: "", lambda: [Condition("running", True, "a reason")])
    cluster = MemoryKube()
    await cluster.create(NAMESPACES, {"metadata": {"name": "test"}})
    for node in ("a0", "a1"):
        await cluster.create(NODES, node_object(node))
    algorithm = HivedAlgorithm(topology_of(CONFIG))
    scheduler = HivedScheduler(cluster, algorithm)
    pod = await cluster.create(PODS, Job("good", "vision", 1).pod("good", 1), "test")
    running = asyncio.create_task(scheduler.run())
    await scheduler.ready.wait()
    loopback = Address("127.0.0.1", 0)
    calls = extender_app(scheduler, Inspection(Inspected(algorithm)))
    with patch.object(scheduler_module, "PATIENCE", 0.01):  # that a call about an unknown pod waits
        async with (
            serve_consul_api(store, token=TOKEN) as facade,
            serving(web_app(health, new_registry("0"), token=TOKEN), loopback) as web,
            serving(calls, loopback, bounds=CALLS) as extender,
        ):
            print(json.dumps({"facade": facade, "web": web, "extender": extender, "pod": pod}), flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    assert not running.done(), running
    running.cancel()
    await asyncio.wait([running])
    await store.close()


class Requests:
    """Makes requests. `pod`: one that the extender knows."""

    def __init__(self, rng: random.Random, pod: dict[str, Any]) -> None:
        self.rng = rng
        self._pod = pod
        self._kinds: dict[str, Callable[[], tuple[str, str, bytes]]] = {
            "facade": self._of_facade,
            "web": lambda: ("GET", rng.choice(["/livez", "/readyz", "/metrics", "/", "/metrics?x=1"]), b""),
            "extender": self._of_extender,
        }

    def make(self, listener: str) -> bytes:
        rng = self.rng
        if rng.random() < 0.05:
            return self._bytes(rng.choice([1, 10, 100, 5000]))
        method, target, body = self._kinds[listener]()
        headers = self._headers(listener, body)
        if rng.random() < 0.1:
            method = rng.choice(["GET", "PUT", "POST", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "CONNECT", "PRI", "get",
                                 "X" * rng.choice([3, 300]), "G\x00T", "-"])  # fmt: skip
        if rng.random() < 0.12:
            target = self._odd_target(target)
        version = rng.choice(["HTTP/1.1"] * 30 + ["HTTP/1.0", "HTTP/2.0", "HTTP/0.9", "HTTP/1.10", "HTTPS/1.1", ""])
        head = "\r\n".join([f"{method} {target} {version}", *headers, "", ""]).encode("utf-8", "surrogateescape")
        sent = head + body
        if rng.random() < 0.1:
            sent = self._mutated(sent)
        return sent

    def _headers(self, listener: str, body: bytes) -> list[str]:
        rng = self.rng
        headers = ["Host: 127.0.0.1", "Connection: close"]
        if rng.random() < 0.9:
            headers.append(f"Content-Length: {len(body)}" if rng.random() < 0.95 else self._odd_header(listener))
        if rng.random() < 0.8:
            headers.append(rng.choice([f"X-Consul-Token: {TOKEN}", f"Authorization: Bearer {TOKEN}"]))
        while rng.random() < 0.15:
            headers.append(self._odd_header(listener))
        rng.shuffle(headers)
        return headers

    def _odd_header(self, listener: str) -> str:
        rng = self.rng
        value = rng.choice(
            [
                "",
                "0",
                "-1",
                "9" * 30,
                "x" * rng.choice([10, 9000]),
                "\udcff\udcfe",
                "\x00",
                "a b",
                "ß",
                "[::1",
                "@",
                ":",
                "%",
            ]
        )
        name = rng.choice(["Host", "Origin", "Authorization", "X-Consul-Token", "Content-Length", "Transfer-Encoding", "Expect",
                           "Upgrade", "Connection", "Content-Encoding", "Content-Type", "Accept", "Accept-Encoding", "Cookie",
                           "Range", "If-None-Match", "X-Forwarded-For", "", " ", "\udcff", "A" * 9000])  # fmt: skip
        known = {
            "Host": ["localhost", "evil.example", "127.0.0.1:99999", "[::1]:1"],
            "Origin": ["null", "http://127.0.0.1", "http://evil.example"],
            "Authorization": ["Bearer", "Bearer \udcff", "Basic eA==", f"Bearer {TOKEN}x"],
            "Transfer-Encoding": ["chunked", "gzip, chunked", "chunked, chunked"],
            "Expect": ["100-continue", "200-ok"],
            "Upgrade": ["websocket", "h2c"],
            "Connection": ["upgrade", "keep-alive", "close, upgrade"],
            "Content-Encoding": ["gzip", "deflate", "br", "zstd"],
            "Accept": ["application/openmetrics-text; version=1.0.0", "text/plain;version=" + "9" * 50, "*/*;q=x", ";;,"],
        }  # fmt: skip
        return f"{name}: {rng.choice([*known.get(name, []), value])}"

    def _odd_target(self, target: str) -> str:
        rng = self.rng
        return rng.choice([
            "*", "", "//", "http://evil.example/", "/..//../etc/passwd", "/" + "a/" * 2000, target + "%", target + "%ff",
            target + "%00", target + "?" + "a=b&" * 1500, target + "?" + "x" * 7000, target + "#f", target + "\udcff", target + "?%ff=%zz",
            "/%2e%2e/", target + ";x=y", target.replace("/", "%2f"), "http://[::1/", target + "?a=" + "%f0" * 500, target * 20,
            self.rng.choice("abc/?%&=#\x00\t[]") * self.rng.choice([1, 50]),
        ])  # fmt: skip

    def _of_facade(self) -> tuple[str, str, bytes]:
        rng = self.rng
        key = rng.choice(["a", "b/c", "rcfarm/rcs/00/web/spec", "", "%00", "%ff", "ß", "a" * 600, "..", "a//b"])
        number = rng.choice(["0", "1", "-1", str(1 << 64), "9" * 30, "x", "", "٣", "1.5", "0x10", "9" * 4500])
        wait = rng.choice(["1ms", "0", "1" * rng.choice([5, 2000]) + "s", "1" * 60, "-1s", "s", "1h1m1ms"[:3], ""])
        query = "&".join(
            rng.sample(
                [f"flags={number}", f"cas={number}", f"index={rng.choice(['0', '1', number])}&wait=1ms", f"wait={wait}", "recurse",
                 "keys", "separator=/", "raw", "stale", "consistent", "acquire=x", f"release={number}", "pretty", f"token={TOKEN}"],
                rng.choice([0, 0, 1, 1, 2, 3]),
            )
        )  # fmt: skip
        target = f"/v1/kv/{key}" + (f"?{query}" if query else "")
        name = rng.choice(["session/create", "session/renew/x", "session/destroy/0", "session/info/y", "session/list", "session/node/n",
                           "agent/self", "agent/services", "agent/checks", "agent/service/register", "agent/check/register",
                           "agent/check/update/c", "agent/check/pass/c", "agent/service/deregister/s", "agent/check/deregister/c",
                           "status/leader", "txn", "catalog/nodes", "x"])  # fmt: skip
        if rng.random() < 0.4:
            return rng.choice(["GET", "PUT", "PUT", "DELETE"]), target, self._bytes(rng.choice([0, 5, 500]))
        method = rng.choice(["GET", "PUT", "PUT", "PUT"])
        return method, f"/v1/{name}" + (f"?{query}" if rng.random() < 0.2 else ""), self._facade_body(name)

    def _facade_body(self, name: str) -> bytes:
        value = self._value
        if name == "txn":
            ops = [
                {"KV": {"Verb": self._either(["set", "cas", "lock", "unlock", "get", "get-tree", "check-index", "delete", "check-not-exists"]),
                        "Key": self._either(["a", "b/c", ""]), "Value": self._either(["YQ==", "", "?"]), "Flags": self._either([0, 1, 1 << 64]),
                        "Index": self._either([0, 1]), "Session": self._either(["", "x"])}}
                for _ in range(self.rng.choice([0, 1, 2, 70]))
            ]  # fmt: skip
            return self._json(ops if self.rng.random() < 0.9 else value(3))
        fields: dict[str, list[object]] = {
            "Name": ["web"], "ID": ["s", "c"], "TTL": ["10s", "1ms", 10**9], "LockDelay": ["15s", 0, 15], "Behavior": ["release", "delete"],
            "NodeChecks": [[], ["serfHealth"]], "ServiceChecks": [[{"ID": "c"}]], "Checks": [["c"], [{"TTL": "10s"}]], "Node": ["n"],
            "Check": [{"TTL": "10s", "Status": "passing"}], "Status": ["passing", "critical"], "Output": ["text"], "Port": [80],
            "Tags": [["a"]], "Meta": [{"A": "b"}], "Address": ["127.0.0.1"], "ServiceID": ["s"], "DeregisterCriticalServiceAfter": ["1m"],
        }  # fmt: skip
        chosen = self.rng.sample(list(fields), self.rng.randrange(6))
        return self._json({key: self._either(fields[key]) for key in chosen} if self.rng.random() < 0.9 else value(3))

    def _of_extender(self) -> tuple[str, str, bytes]:
        rng = self.rng
        name = rng.choice(["filter", "filter", "bind", "preempt", ""])
        if not name:
            target = rng.choice(["/", "/livez", "/v1/inspect/affinitygroups/", "/v1/inspect/affinitygroups/x", "/v1/inspect/clusterstatus",
                                 "/v1/inspect/clusterstatus/physicalcluster", "/v1/inspect/clusterstatus/virtualclusters/vision",
                                 "/v1/inspect/clusterstatus/virtualclusters", "/v1/inspect/snapshot", "/v1/x"])  # fmt: skip
            return rng.choice(["GET", "GET", "GET", "POST"]), target, b""
        pod = json.loads(json.dumps(self._pod))
        annotations = pod["metadata"].setdefault("annotations", {})
        if rng.random() < 0.5:
            spec = {key: self._either([known]) for key, known in SCHEDULING_SPEC.items()}
            texts = [
                json.dumps(spec),
                "a: &a [*a]",
                "{" * 50,
                self._json(self._value(3)).decode(errors="replace"),
                "x" * 1000,
            ]
            annotations[rng.choice([POD_SCHEDULING_SPEC, POD_BIND_INFO])] = rng.choice(texts)
        if rng.random() < 0.3:
            pod[rng.choice(list(pod))] = self._value(3)
        body: dict[str, Any] = {
            "filter": {"Pod": pod, "NodeNames": self._either([["a0", "a1"], [], ["x"] * 5000])},
            "bind": {"PodName": self._either(["good"]), "PodNamespace": "test", "PodUID": self._either(["x"]), "Node": self._either(["a0"])},
            "preempt": {"Pod": pod, "NodeNameToMetaVictims": self._either([{"a0": None}, {"a0": {"Pods": [{"UID": "u"}]}}])},
        }[name]  # fmt: skip
        if rng.random() < 0.1:
            body["Nodes"] = self._either([{"items": [{"metadata": {"name": "a0"}}]}, {"items": [{}] * 1000}])
        return "POST", f"/v1/extender/{name}", self._json(body if rng.random() < 0.95 else self._value(4))

    def _either(self, known: list[Any]) -> object:
        """Return one of the known values, or now and then an arbitrary one."""
        return self._value(2) if self.rng.random() < 0.1 else self.rng.choice(known)

    def _value(self, depth: int) -> object:
        rng = self.rng
        kinds = rng.randrange(10 if depth else 7)
        if kinds >= 7:
            items = [self._value(depth - 1) for _ in range(rng.randrange(4))]
            return (
                items
                if kinds == 7
                else {rng.choice(["a", "ID", "metadata", "", "KV"]) + str(at): item for at, item in enumerate(items)}
            )
        return rng.choice(
            [None, True, 0, -1, 1 << 70, 10**400, 1.5, 1e300, "", "x", "\x00", "\u202e", "a" * 3000, "10s", [[]] * 50]
        )

    def _json(self, value: object) -> bytes:
        rng = self.rng
        if (choice := rng.random()) < 0.01:
            return rng.choice([b"[" * 50_000, b'{"a":' * 20_000, b"[" * 5000 + b"]" * 5000, b"9" * 100_000])
        encoded = json.dumps(value).encode()
        return self._mutated(encoded) if choice < 0.08 else encoded

    def _bytes(self, count: int) -> bytes:
        return self.rng.randbytes(count) if self.rng.random() < 0.7 else bytes([self.rng.randrange(256)]) * count

    def _mutated(self, sent: bytes) -> bytes:
        rng = self.rng
        changed = bytearray(sent)
        for _ in range(rng.choice([1, 1, 2, 8])):
            at = rng.randrange(len(changed) + 1)
            match rng.randrange(5):
                case 0:
                    changed[at : at + 1] = rng.randbytes(1)
                case 1:
                    changed[at:at] = rng.choice(
                        [b"\x00", b"\r\n", b"\n", b"%", b"\xff", b" ", b"9" * 40, b"\r\n\r\n", rng.randbytes(8)]
                    )
                case 2:
                    del changed[at : at + rng.choice([1, 10, 100])]
                case 3:
                    changed[at:at] = changed[at : at + rng.choice([1, 20, 200])]
                case 4:
                    del changed[at:]
        return bytes(changed)


@dataclass
class Findings:
    """The results of a run. Durations in seconds."""

    statuses: Counter[str] = field(default_factory=Counter)
    durations: list[float] = field(default_factory=list)
    late_once: int = 0
    late: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


async def exchange(address: str, sent: bytes) -> tuple[bytes, float]:
    """Return what came back until the connection ended, and the seconds it took.

    A request that may be incomplete is ended after `LATE` seconds.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = b""
    started = ended = time.perf_counter()
    try:
        writer.write(sent)
        while True:
            async with asyncio.timeout(PATIENCE if is_complete(sent) and not answer else LATE):
                part = await reader.read(1 << 18)
            ended = time.perf_counter()
            if not part:
                break
            answer += part
    except ConnectionError:
        ended = time.perf_counter()
    except TimeoutError:
        if is_complete(sent) and not answer:
            ended = time.perf_counter()
    finally:
        writer.transport.abort()
    return answer, ended - started


def is_complete(sent: bytes) -> bool:
    """Return whether the request is certainly complete, so that it must be answered."""
    head, end, body = sent.lstrip(b"\r\n").partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    lengths = [line for line in lines if line.startswith(b"content-length:")]
    is_odd = any(word in head.lower() for word in (b"transfer-encoding", b"expect", b"upgrade", b"connect "))
    return bool(end) and not is_odd and (not lengths or lengths == [b"content-length: %d" % len(body)])


def fault_of(answer: bytes) -> str:
    """Return why the answer is wrong, or ""."""
    if not answer.startswith(b"HTTP/"):
        return "an answer that is no HTTP" if answer else ""
    status = int(answer[9:12])
    body = answer.partition(b"\r\n\r\n")[2].decode(errors="replace")
    if b"Platform Error" in answer or "defect" in body:
        return "an answer that calls it a defect"
    if status >= 500 and not (status == 500 and body.startswith(CONSULS_OWN)):
        return f"status {status}"
    return ""


async def attack(addresses: dict[str, Any], count: int, seed: int, workers: int) -> Findings:
    """Send the requests, some at a time."""
    findings = Findings()
    requests = Requests(random.Random(seed), addresses["pod"])
    numbers = iter(range(count))
    late: list[tuple[str, bytes]] = []

    async def work() -> None:
        for number in numbers:
            listener = ("facade", "facade", "extender", "web")[number % 4]
            sent = requests.make(listener)
            answer, seconds = await exchange(addresses[listener], sent)
            findings.durations.append(seconds)
            findings.statuses[answer[9:12].decode(errors="replace") if answer else "none"] += 1
            shown = f"{listener}, request {number}: {sent[:300]!r} -> {answer[:300]!r}"
            if seconds > LATE:
                late.append((listener, sent))
            if fault := fault_of(answer):
                findings.violations.append(f"{fault}: {shown}")

    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(work())
    findings.late_once = len(late)
    for listener, sent in late:
        answer, seconds = await exchange(addresses[listener], sent)
        if seconds > LATE:
            findings.late.append(f"an answer after {seconds:.1f} s: {listener}: {sent[:300]!r} -> {answer[:300]!r}")
    plain = {"facade": "/v1/status/leader", "web": "/livez", "extender": "/"}
    for listener, path in plain.items():
        sent = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        answer, _ = await exchange(addresses[listener], sent)
        if b" 200 " not in answer[:16]:
            findings.violations.append(f"{listener} does not answer any more: {answer[:200]!r}")
    return findings


def run(count: int, seed: int, workers: int = WORKERS) -> tuple[Findings, dict[str, object]]:
    """Make a whole run. Return the findings and a summary of them."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        with log.open("wb") as errors, subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz_http", "--serve", directory],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=os.environ | {"PYTHONASYNCIODEBUG": ""},
        ) as server:  # fmt: skip
            assert server.stdout is not None
            assert server.stdin is not None
            addresses = json.loads(server.stdout.readline() or b"{}")
            assert addresses, log.read_text()
            started = time.perf_counter()
            findings = asyncio.run(attack(addresses, count, seed, workers))
            seconds = time.perf_counter() - started
            memory = _memory_of(server.pid)
            server.stdin.close()
            server.wait(30)
        if server.returncode:
            findings.violations.append(f"the listeners ended with {server.returncode}")
        lines = log.read_text(errors="replace").splitlines()
        findings.violations += [
            f"in the log: {line}" for line in lines if '"level":"warning"' not in line or "exception" in line
        ]
    durations = sorted(findings.durations)
    summary = {
        "seed": seed,
        "requests": len(durations),
        "seconds": round(seconds, 1),
        "p50_ms": round(durations[len(durations) // 2] * 1000, 2),
        "p99_ms": round(durations[len(durations) * 99 // 100] * 1000, 2),
        "max_ms": round(durations[-1] * 1000, 1),
        "late_once": findings.late_once,
        "statuses": dict(sorted(findings.statuses.items())),
        "server_rss_mb": memory,
        "late": len(findings.late),
        "violations": len(findings.violations),
    }
    return findings, summary


def _memory_of(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve))
        return 0
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr)
    findings, summary = run(options.count, seed)
    for violation in [*findings.violations, *findings.late][:50]:
        print(violation, file=sys.stderr)
    print(msgspec.json.encode(summary).decode())
    return int(bool(findings.violations or findings.late))


if __name__ == "__main__":
    sys.exit(main())
