"""`rc logs -f` under load. Run: python -m benchmarks.logs [NODES [SECONDS]]

A real Consul, a farm, an agent per node and a pod on each, all of them processes. Each pod writes 1,000 numbered lines
per second, one at a time, into logs that are rotated every few seconds. Measured is how much of a core an agent uses
while nobody reads and while `rcfarm rc logs -f` reads all pods and a second reader the first one, at 4 KiB per second,
and how many lines are lost or out of order.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.fleet import consul, report, servers_required
from rcfarm.operations.nodes import Nodes
from rcfarm.operations.pod_client import Credentials, listener_of, read_logs
from tests.support.programs.installation import Installation, installation
from tests.support.programs.server_process import REPOSITORY

RATE = 1000  # lines per second of each pod
KiB = 1024
LOG_SIZE, LOG_FILES = 128 * KiB, 2
WRITER = f"""
import os, time
number, began = 0, time.monotonic()
while True:
    while number < {RATE} * (time.monotonic() - began):
        os.write(1, b"line %09d of a pod that writes without a pause\\n" % number)
        number += 1
    time.sleep(0.01)
"""
_NUMBER = re.compile(r"line (\d{9}) of a pod that writes without a pause")


class Read(NamedTuple):
    """What a reader got of one pod: the first and the last number, how many, and how many did not follow the one
    before."""

    first: int
    last: int
    lines: int
    faults: int


@asynccontextmanager
async def writers(nodes: int, directory: Path) -> AsyncIterator[tuple[Installation, list[psutil.Process]]]:
    """Yield a fleet with a writing pod on each node, and the processes of the agents."""
    async with consul() as (server, _), installation(server, directory) as site:
        site.farm("farm-a")
        names = [f"node-{number:02}" for number in range(nodes)]
        token = directory.with_name("token")
        token.write_text("a-token-of-all-agents\n")
        settings: dict[str, Any] = {"log_size": LOG_SIZE, "log_files": LOG_FILES, "listen_token_file": token}
        agents = [site.agent(name, **settings) for name in names]
        await site.until_registered(*names)
        manifest = {"id": "writer", "launchables": {"main": {"command": [sys.executable, "-c", WRITER]}}}
        document = json.dumps({"id": "writer", "replicas": nodes, "manifest": manifest})
        ran = await site.cli("rc", "apply", "-f", "-", "--yes", "--wait-healthy", "1", stdin=document)
        assert ran.code == 0, ran.err
        yield site, [psutil.Process(agent.pid) for agent in agents]


async def used(agents: list[psutil.Process], seconds: float) -> list[float]:
    """Return the percentage of a core that each agent uses."""
    before = [sum(agent.cpu_times()[:2]) for agent in agents]
    began = asyncio.get_running_loop().time()
    await asyncio.sleep(seconds)
    passed = asyncio.get_running_loop().time() - began
    return [
        100 * (sum(agent.cpu_times()[:2]) - earlier) / passed for agent, earlier in zip(agents, before, strict=True)
    ]


def check(output: Path) -> dict[str, Read]:
    """Return what `rc logs -f` has shown, by node."""
    found: dict[str, Read] = {}
    for line in output.read_text().splitlines():
        node, _, text = line.partition(" | ")
        if not (match := _NUMBER.fullmatch(text)):
            continue
        number, so_far = int(match[1]), found.get(node)
        if so_far is None:
            found[node] = Read(number, number, 1, 0)
        else:
            fault = number != so_far.last + 1
            found[node] = Read(so_far.first, number, so_far.lines + 1, so_far.faults + fault)
    return found


async def read_slowly(site: Installation, node: str) -> None:
    """Follow one pod at 4 KiB per second until cancelled: after a while nothing more fits between it and the agent."""
    credentials = Credentials(token_file=site.directory.with_name("token"))
    listener = listener_of(node, await Nodes(site.store, site.keys).get(node), credentials)
    async with read_logs(listener, "writer", {"follow": "1"}) as frames:
        async for several in frames:
            await asyncio.sleep(sum(frame.size for frame, _ in several) / (4 * KiB))


async def follow(nodes: int, seconds: float) -> None:
    """Measure with one follower of all pods and one slow reader of the first."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        async with writers(nodes, directory / "site") as (site, agents):
            idle = await used(agents, seconds / 3)
            output = directory / "followed"
            environ = site.environ() | {"RCFARM_STORE": site.url, "RCFARM_STORE_ROOT": site.root}
            environ["RCFARM_LISTENER_TOKEN_FILE"] = str(directory / "token")
            command = [sys.executable, "-m", "rcfarm", "rc", "logs", "writer", "--follow"]
            slow = asyncio.create_task(read_slowly(site, "node-00"))
            with output.open("wb") as file:
                reader = psutil.Popen(command, stdout=file, stderr=subprocess.DEVNULL, env=environ, cwd=REPOSITORY)
                await asyncio.sleep(2)
                before = sum(reader.cpu_times()[:2])
                busy = await used(agents, seconds)
                cli = 100 * (sum(reader.cpu_times()[:2]) - before) / seconds
                reader.terminate()
                reader.wait()
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
            rotated = [len(list((site.state_dir(f"node-{number:02}") / "logs" / "writer").glob("main.log.*")))
                       for number in range(nodes)]  # fmt: skip
            found = check(output)
    report(
        f"follow_{nodes}_nodes_{RATE}_lines",
        nodes_read=len(found),
        lines=sum(each.lines for each in found.values()),
        lines_per_second_and_pod=round(statistics.mean(each.lines for each in found.values()) / (seconds + 2)),
        lost_or_reordered=sum(each.faults for each in found.values()),
        rotated_files=min(rotated),
        agent_core_percent_idle=round(statistics.mean(idle), 1),
        agent_core_percent=round(statistics.mean(busy), 1),
        agent_core_percent_most=round(max(busy), 1),
        agent_core_percent_with_slow_reader=round(busy[0], 1),
        reader_core_percent=round(cli, 1),
    )


if __name__ == "__main__":
    with servers_required():
        asyncio.run(
            follow(int(sys.argv[1]) if len(sys.argv) > 1 else 10, float(sys.argv[2]) if len(sys.argv) > 2 else 30)
        )
