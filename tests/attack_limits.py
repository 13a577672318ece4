"""Attack the limits of pods and the end of their processes: `python -m tests.attack_limits --pods 1000 --kills 200`.

Three drills against real agents, each of which ends with a line of JSON; the exit code is 1 if a promise did not hold:

- **trees**: pods whose processes ignore SIGTERM and leave their group in every way that is known: another session, a
  double fork, an empty environment, a loop that starts what was killed again. After the stop timeout the whole tree has
  to be gone within a second, before the agent calls the pod gone, and no control group may be left.
- **kills**: an agent is killed with SIGKILL at random moments, from its start on. Each pod has to keep its one process.
- **memory**: a pod that exceeds its memory limit again and again. Each end has to be named with the limit within a
  second, and the other pods have to keep their processes.

A witness looks for the processes in /proc by a number in their arguments, and knows nothing of control groups.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import structlog

from rcfarm.agent import cgroups
from rcfarm.agent.cgroups import Base, Mount
from store.embedded.consul_api.app import serve_consul_api
from store.embedded.store import EmbeddedStore
from store.schema.records import Reality
from tests.support.agent.agents import AgentHarness, harness, manifest

STOP_TIMEOUT = 0.3  # seconds
PROMISE = 1.0  # seconds: for the end of a tree after its stop timeout, and for the name of a kill
PATIENCE = 60.0  # seconds until a drill gives up
MARKS = 10_000
FIRST_MARK = 1_000_000_000 + os.getpid() * MARKS  # so that two of these programs do not see each other's processes
ESCAPES = """
trap '' TERM INT HUP
sleep MARK &
setsid sleep MARK &
(setsid sh -c 'sleep MARK & exit' &)
env -i setsid sleep MARK &
setsid sh -c 'while :; do sleep MARK; done' &
setsid sh -c 'trap "" TERM; (setsid sleep MARK &) ; exec setsid sleep MARK' &
exec sleep MARK
"""
PROCESSES = 8  # of that script, at least
HUNGRY = "import sys\nheld = []\nwhile True: held.append(bytearray(1 << 20))"


class Broken(AssertionError):
    """A promise did not hold; the message names the pod."""


def processes_by_mark() -> dict[int, set[int]]:
    """Return the pids of the processes whose last argument is a mark."""
    found: dict[int, set[int]] = defaultdict(set)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")  # that of a zombie is empty
        except OSError:
            continue
        for word in words:
            if word.isdigit() and FIRST_MARK <= int(word) < FIRST_MARK + MARKS:
                found[int(word)].add(int(entry.name))
                break
    return found


def groups_left(state_dir: Path) -> list[Path]:
    """Return the groups of pods in the hierarchies that the agents of this directory have used."""
    bases = msgspec.json.decode((state_dir / "cgroups.json").read_bytes(), type=list[Base])
    return [pod for base in bases for directory in base.directories() for pod in directory.glob("pod-*")]


async def eventually(look: Callable[[], Any], what: str) -> Any:
    """Call `look` until its result is true. Return that. Raises `Broken`."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        if time.monotonic() > deadline:
            raise Broken(f"not within {PATIENCE:g} s: {what}")
        await asyncio.sleep(0.02)
    return found


async def trees(node: AgentHarness, pods: int, *, at_once: int = 25) -> dict[str, object]:
    """Start and stop that many pods that try to escape. Return the figures. Raises `Broken`."""
    marks, late, started = iter(range(FIRST_MARK, FIRST_MARK + pods)), list[float](), 0
    while batch := {f"pod{mark}": mark for mark in islice(marks, at_once)}:
        for pod_id, mark in batch.items():
            script = ESCAPES.replace("MARK", str(mark))
            launchable = {"stop_timeout": STOP_TIMEOUT, "resources": {"memory": "64Mi", "pids": 100}}
            await node.intend(manifest(pod_id, ["sh", "-c", script], launchable=launchable), rc=pod_id)

        def all_run(batch: dict[str, int] = batch) -> bool:
            found = processes_by_mark()
            return all(len(found[mark]) >= PROCESSES for mark in batch.values())

        await eventually(all_run, "every process of the pods runs")
        started += sum(len(pids) for pids in processes_by_mark().values())
        for pod_id in batch:
            await node.unintend(pod_id)
        asked, left = time.monotonic(), dict(batch)
        while left:
            shown = {pod_id for pod_id in left if await node.reality(pod_id) is not None}
            found = processes_by_mark()
            waited = time.monotonic() - asked
            for pod_id, mark in batch.items():
                if pod_id in left and not found[mark]:
                    late.append(waited - STOP_TIMEOUT)
                    del left[pod_id]
                elif found[mark] and pod_id in left and pod_id not in shown:
                    raise Broken(f"{pod_id} is called gone, and {len(found[mark])} of its processes run")
            if waited > PATIENCE:
                raise Broken(f"processes are left of {', '.join(left)}")
            await asyncio.sleep(0.03)
        for pod_id in batch:
            await node.until_gone(pod_id)
    if groups := groups_left(node.state_dir):
        raise Broken(f"{len(groups)} control groups are left, such as {groups[0]}")
    late.sort()
    if late[-1] > PROMISE:
        raise Broken(f"a tree was gone {late[-1]:.2f} s after its stop timeout")
    return {
        "drill": "trees",
        "pods": pods,
        "processes": started,
        "limits": node.agent.groups.enforcement.words if node.agent else "",
        "gone_after_stop_timeout_p50_s": round(late[len(late) // 2], 3),
        "gone_after_stop_timeout_max_s": round(late[-1], 3),
        "groups_left": 0,
    }


async def kills(node: AgentHarness, url: str, pods: int, number: int, rng: random.Random) -> dict[str, object]:
    """Kill an agent that often. Return the figures. Raises `Broken`."""
    marks = {f"pod{mark}": mark for mark in range(FIRST_MARK, FIRST_MARK + pods)}
    command = [sys.executable, "-m", "tests.support.agent.process", url, str(node.state_dir), node.node]
    for pod_id, mark in marks.items():
        await node.intend(manifest(pod_id, ["sh", "-c", f"sleep {mark} & wait"]), rc=pod_id)
    before: dict[int, set[int]] = {}
    adopted, session = list[float](), ""
    for times in range(number + 1):
        start = time.monotonic()
        agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            if not before:
                await eventually(lambda: len(processes_by_mark()) == pods, "every pod runs")
                for pod_id in marks:
                    await node.until_running(pod_id=pod_id)
                before, session = processes_by_mark(), await _registered(node, "")
            elif times % 2:  # at any moment of the start
                await asyncio.sleep(rng.uniform(0, 2))
                session = await _session(node)
            else:
                session = await _registered(node, session)
                adopted.append(time.monotonic() - start)
                await asyncio.sleep(rng.uniform(0, 0.3))
        finally:
            agent.kill()
            agent.wait()
        if (found := processes_by_mark()) != before:
            changed = {mark for mark in {*found, *before} if found.get(mark) != before.get(mark)}
            raise Broken(f"after {times + 1} kills, {len(changed)} pods have other processes: {sorted(changed)[:5]}")
    node.start()
    await node.until_registered()
    for pod_id in marks:
        process = await node.until_running(pod_id=pod_id)
        if process.restarts or process.pid not in before[marks[pod_id]] | _parents(before[marks[pod_id]]):
            raise Broken(f"{pod_id} was restarted: {process}")
        await node.unintend(pod_id)
    for pod_id in marks:
        await node.until_gone(pod_id)
    if processes_by_mark() or groups_left(node.state_dir):
        raise Broken(f"left: {processes_by_mark()}, {groups_left(node.state_dir)}")
    adopted.sort()
    return {
        "drill": "kills",
        "pods": pods,
        "kills": number,
        "lost": 0,
        "duplicated": 0,
        "restarted": 0,
        "start_to_registered_p50_s": round(adopted[len(adopted) // 2], 2) if adopted else None,
        "groups_left": 0,
    }


async def _session(node: AgentHarness) -> str:
    """Return the session that holds the node, or ""."""
    entry = await node.store.get(node.keys.node_alive(node.node))
    return entry.session or "" if entry is not None else ""


async def _registered(node: AgentHarness, former: str) -> str:
    """Return the session of the running agent, once it has registered with another one than the former agent's."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if (session := await _session(node)) not in ("", former):
            return session
        await asyncio.sleep(0.01)
    raise Broken("the agent has not registered")


def _parents(pids: set[int]) -> set[int]:
    found = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] for pid in pids)
    return set(map(int, found))


async def memory(node: AgentHarness, kills: int, *, neighbours: int = 10) -> dict[str, object]:
    """Have a pod exceed its limit that often. Return the figures. Raises `Broken`."""
    calm = {f"calm{mark}": mark for mark in range(FIRST_MARK, FIRST_MARK + neighbours)}
    for pod_id, mark in calm.items():
        await node.intend(manifest(pod_id, ["sleep", str(mark)]), rc=pod_id)
    await eventually(lambda: len(processes_by_mark()) == neighbours, "the neighbours run")
    before = processes_by_mark()
    mark = FIRST_MARK + neighbours
    # the process that the agent started waits for one that is killed: the whole tree has to end
    script = f"(setsid sleep {mark} &); {sys.executable} -c '{HUNGRY}' {mark}; sleep {mark}"
    fields = {"resources": {"memory": "48Mi"}}
    await node.intend(manifest("hungry", ["sh", "-c", script], launchable=fields), rc="hungry")
    late: list[float] = []
    for number in range(kills):
        pids = await eventually(lambda: len(found := processes_by_mark()[mark]) > 1 and found, "it runs")

        def all_killed(pids: set[int] = pids) -> bool:
            return not pids & processes_by_mark()[mark]

        await eventually(all_killed, "all of its tree is killed")
        killed = time.monotonic()

        def is_named(reality: Reality, number: int = number) -> bool:
            process = reality.launchables.get("main")
            ended = process and (process.restarts > number or process.state == "backoff")
            return bool(process and ended and process.last_exit and process.restarts >= number)

        reality = await node.until(is_named, "hungry")
        late.append(time.monotonic() - killed)
        end = reality.launchables["main"].last_exit
        if end is None or end.words != "killed by the kernel: over its memory limit of 48Mi":
            raise Broken(f"the end is named {end}")
        if {each: pids for each, pids in processes_by_mark().items() if each != mark} != before:
            raise Broken("a neighbour has another process")
    for pod_id in calm:
        if (process := await node.until_running(pod_id=pod_id)).restarts:
            raise Broken(f"{pod_id} was restarted: {process}")
    for pod_id in (*calm, "hungry"):
        await node.unintend(pod_id)
    for pod_id in (*calm, "hungry"):
        await node.until_gone(pod_id)
    if processes_by_mark() or groups_left(node.state_dir):
        raise Broken(f"left: {processes_by_mark()}, {groups_left(node.state_dir)}")
    if max(late) > PROMISE:
        raise Broken(f"a kill was named after {max(late):.2f} s")
    return {
        "drill": "memory",
        "oom_kills": kills,
        "named_with_the_limit": kills,
        "named_after_max_s": round(max(late), 3),
        "neighbours": neighbours,
        "neighbours_restarted": 0,
        "groups_left": 0,
    }


def only_v1(mounts: Sequence[Mount]) -> list[Mount]:
    """Return what a machine without cgroup v2 would have mounted."""
    return [mount for mount in mounts if mount.version == 1]


@asynccontextmanager
async def site(directory: Path) -> AsyncIterator[tuple[AgentHarness, str]]:
    """Yield a node whose agent is not started yet, and the URL of its store."""
    store = EmbeddedStore()
    async with serve_consul_api(store) as address, harness(store, directory / "node-1") as node:
        yield node, f"consul://{address}"
    await store.close()


async def drills(pods: int, agent_kills: int, oom_kills: int, seed: int) -> None:
    for drill in ("trees", "kills", "memory"):
        with tempfile.TemporaryDirectory() as directory:
            async with site(Path(directory)) as (node, url):
                if drill != "kills":
                    node.start()
                if drill == "trees" and pods:
                    result = await trees(node, pods)
                elif drill == "kills" and agent_kills:
                    result = await kills(node, url, 20, agent_kills, random.Random(seed))
                elif drill == "memory" and oom_kills:
                    result = await memory(node, oom_kills)
                else:
                    continue
                print(json.dumps(result), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pods", type=int, default=1000, help="that try to escape; 0: no such drill")
    parser.add_argument("--kills", type=int, default=200, help="of the agent, with 20 pods; 0: no such drill")
    parser.add_argument("--oom-kills", type=int, default=50, help="0: no such drill")
    parser.add_argument("--v1", action="store_true", help="leave cgroup v2 aside (for trees and memory)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    arguments = parser.parse_args()
    if arguments.v1:
        find = cgroups.find_mounts
        cgroups.find_mounts = lambda *files: only_v1(find(*files))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        asyncio.run(drills(arguments.pods, arguments.kills, arguments.oom_kills, arguments.seed))
    except AssertionError as error:
        print(json.dumps({"broken": str(error), "seed": arguments.seed}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
