"""`process` tasks with an engine and real agents, on the embedded store and on a real Consul."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controllers.tasks.engine.engine import Engine
from controllers.tasks.outcomes import Backoff, Policy
from controllers.tasks.plugins.process import ProcessPlugin
from controllers.tasks.plugins.task_pods import TaskPods
from scheduler.label import LabelScheduler
from store.kv.protocol import Store
from store.schema.keys import Keys
from store.schema.records import Reality, decode
from tests.support import require
from tests.support.agent.agents import AgentHarness, alive, harness
from tests.support.tasks.engines import World, engine_on, running
from tests.support.waiting import background, until

LOST_AFTER = 1.0  # seconds
SOON = Backoff(0.05, 0.2)
POLICY = Policy(round_backoff=SOON, retry_backoff=SOON, cleanup_backoff=SOON)


class Site(World):
    """Two nodes and an engine."""

    def __init__(self, engine: Engine, directory: Path, nodes: dict[str, AgentHarness]) -> None:
        super().__init__(engine.store, engine.keys)
        self.engine, self.directory, self.nodes = engine, directory, nodes

    async def run(self, task_id: str, script: str, **fields: Any) -> None:
        """Submit a shell script, in which `$SITE` is a directory of the test's."""
        config = {"command": ["sh", "-c", script], "env": {"SITE": str(self.directory)}, "stop_timeout": 2}
        await self.submit(task_id, "process", config=config | fields.pop("config", {}), **fields)

    async def pods(self) -> dict[str, Reality]:
        """Return what the agents report of pods of tasks, by node."""
        entries = (await self.store.list(self.keys.task_pods)).entries
        return {self.keys.parse_pod(each.key).node: decode(Reality, each.key, each.value) for each in entries}

    async def until_runs(self) -> tuple[str, int]:
        """Wait until a pod's process runs. Return its node and pid."""

        async def runs() -> tuple[str, int] | None:
            for node, reality in (await self.pods()).items():
                for process in reality.launchables.values():
                    if process.state == "running" and process.pid:
                        return node, process.pid
            return None

        found: tuple[str, int] = await until(runs, "no process of a task runs", within=20)
        return found

    async def nothing_is_left(self) -> None:
        """Wait until no intent, manifest, record or process is left of any task."""

        async def is_clean() -> bool:
            left = [*await self.store.keys(self.keys.intents), *await self.store.keys(self.keys.manifests)]
            return not (left or await self.pods() or any(node.processes() for node in self.nodes.values()))

        await self.until(is_clean, within=20)


@asynccontextmanager
async def site_on(store: Store, keys: Keys, directory: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        nodes = {}
        for name in ("node-1", "node-2"):
            node = await stack.enter_async_context(harness(store, directory / name, node=name, keys=keys))
            node.start()
            nodes[name] = node
        pods = TaskPods(store, keys, LabelScheduler, node_lost_after=LOST_AFTER)
        await stack.enter_async_context(background(pods.run()))
        await pods.synced()
        engine = engine_on(store, keys, ProcessPlugin(pods), virtual=False, policy=POLICY)
        pods.wake = engine.enqueue
        await World(store, keys).quota("licences", 3)
        await stack.enter_async_context(running(engine))
        for node in nodes.values():
            await node.until_registered()
        yield Site(engine, directory, nodes)


@pytest.fixture
async def site(any_store: Store, root: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with site_on(any_store, Keys(root), tmp_path) as site:
        yield site


async def test_a_program_that_fails_once_succeeds_on_another_node(site: Site) -> None:
    """The failed attempt's exit code and last lines are in the history; nothing is left at the end."""
    await site.run("job", 'echo $RCFARM_NODE; [ "$RCFARM_ATTEMPT" = 1 ] || { echo no luck >&2; exit 3; }', retries=1)

    state = await asyncio.wait_for(site.until_done("job"), 30)

    assert (state.phase, state.attempt, state.user_failures) == ("PhaseSuccess", 1, 1)
    [failed] = [event for event in await site.events("job") if event.error]
    assert failed.error is not None
    assert failed.error.code == "NonZeroExit"
    first, second = _custom(failed.info), _custom(state.info)
    assert failed.error.message == f"exited with code 3 on {first['node']}:\n{first['node']}\nno luck"
    assert (first["exit_code"], second["exit_code"]) == (3, 0)
    assert {first["node"], second["node"]} == {"node-1", "node-2"}
    assert second["output"] == second["node"]
    await site.nothing_is_left()


async def test_an_abort_kills_the_program(site: Site) -> None:
    """The execution ends only once the agent has stopped it."""
    await site.run("job", "sleep 1000")
    _, pid = await site.until_runs()
    await site.abort("job")

    state = await asyncio.wait_for(site.until_done("job"), 30)

    assert state.phase == "PhaseAborted"
    assert not alive(pid)
    await site.nothing_is_left()


async def test_when_its_node_dies_the_program_runs_elsewhere(site: Site) -> None:
    """No retry of the task's own is used. The node that comes back stops the program that it still runs."""
    await site.run("job", '[ -e "$SITE/go" ] || { touch "$SITE/waits"; exec sleep 1000; }')
    node, pid = await site.until_runs()
    await until((site.directory / "waits").exists)
    await site.nodes[node].stop()
    (site.directory / "go").touch()

    state = await asyncio.wait_for(site.until_done("job"), 30)

    assert (state.phase, state.user_failures, state.system_failures) == ("PhaseSuccess", 0, 1)
    assert _custom(state.info)["node"] != node
    [failed] = [event for event in await site.events("job") if event.error]
    assert require(failed.error).code == "NodeLost"
    assert alive(pid)
    site.nodes[node].start()
    await site.nothing_is_left()
    assert not alive(pid)


async def test_ten_programs_under_a_quota_of_three(site: Site) -> None:
    """Never more than three run at once, and none waits for a clock."""
    for number in range(10):
        script = 'touch "$SITE/$RCFARM_TASK"; ls "$SITE" | grep -c ^job; sleep 0.1; rm "$SITE/$RCFARM_TASK"'
        await site.run(f"job-{number}", script, quotas={"licences": 1})

    names = [f"job-{number}" for number in range(10)]
    await asyncio.wait_for(site.until_done(*names), 60)

    counts = []
    for name in names:
        state = require(await site.state(name))
        assert state.phase == "PhaseSuccess", state.error
        counts.append(int(_custom(state.info)["output"]))
    assert max(counts) == 3
    assert await site.holders() == []


def _custom(info: dict[str, Any] | None) -> dict[str, Any]:
    return msgspec.convert((info or {})["custom_info"], dict[str, Any])
