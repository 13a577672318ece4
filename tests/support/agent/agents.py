"""A node agent under test: its store, its state directory, and what a user would see.

`AgentHarness` runs the agent as a task of the test and waits for conditions instead of for time. All processes that the
agent started are found by their environment and killed at the end, so no test leaves a process behind.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rcfarm.agent.agent import Agent
from rcfarm.config.agent import AgentSettings
from store.kv import ops
from store.kv.protocol import Store
from store.schema.keys import Keys, shard_of
from store.schema.manifest import digest
from store.schema.records import Health, Intent, Process, Reality, decode, encode

SLEEP = ["sleep", "1000"]
PATIENCE = 15.0  # seconds that a condition may take


def manifest(pod_id: str = "web", command: list[str] | None = None, **fields: Any) -> dict[str, Any]:
    """Return a manifest with one launchable, `main`. `launchable` holds further fields of it."""
    launchable = {"command": command or SLEEP, "stop_timeout": 5, **fields.pop("launchable", {})}
    return {"id": pod_id, "launchables": {"main": launchable}, **fields}


def fast_settings(node: str, state_dir: Path, **changes: Any) -> AgentSettings:
    """Return settings with delays short enough for a test."""
    fields = {
        "address": "127.0.0.1",
        "default_user": str(os.geteuid()),  # also root: user `nobody` can't enter test directories
        "artifact_sources": ("https://", "http://", "file:///"),
        "install_retry": 0.05,
        "install_retry_cap": 0.2,
        "restart_backoff": 0.05,
        "restart_backoff_cap": 0.2,
        **changes,
    }
    return AgentSettings(node=node, state_dir=state_dir, **fields)


class AgentHarness:
    """One node: an agent that can be started and stopped, and its view from outside."""

    def __init__(self, store: Store, state_dir: Path, node: str = "node-1", keys: Keys | None = None, **changes: Any):
        self.store = store
        self.keys = keys or Keys()
        self.node = node
        self.state_dir = state_dir
        self.settings = fast_settings(node, state_dir, **changes)
        self.agent: Agent | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> Agent:
        """Start the agent; it may be started again after `stop`."""
        self.agent = Agent(self.store, self.keys, self.settings, version="test")
        self._task = asyncio.create_task(self.agent.run())
        return self.agent

    async def stop(self) -> None:
        """Stop the agent as SIGTERM would. Raises the error that it died of."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def eventually(self, look: Callable[[], Any], describe: Callable[[], object] | None = None) -> Any:
        """Call `look`, a function or a coroutine function, until its result is true. Return that.

        Raises the agent's error if it died. Fails on timeout with `describe`, or the pod's reality.
        """
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while True:
            if self._task is not None and self._task.done():
                self._task.result()
            found = look()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            if asyncio.get_running_loop().time() > deadline:
                seen = describe() if describe else f"reality of web is {await self.reality()}"
                raise AssertionError(f"not within {PATIENCE:g} s: {seen}")
            await asyncio.sleep(0.01)

    async def put_manifest(self, fields: dict[str, Any]) -> str:
        """Put a manifest into the store. Return its digest."""
        raw = json.dumps(fields).encode()
        await self.store.put(self.keys.manifest(digest(raw)), raw)
        return digest(raw)

    async def intend(self, fields: dict[str, Any], rc: str = "rc-1", **intent: Any) -> str:
        """Write the manifest and its intent, as a farm would. Return the manifest's digest."""
        sha256 = await self.put_manifest(fields)
        await self.intend_digest(fields["id"], sha256, rc, **intent)
        return sha256

    async def run_pod(self, fields: dict[str, Any]) -> Process:
        """Have the agent start the pod. Return its `main` process once it runs."""
        await self.intend(fields)
        return await self.until_running(pod_id=fields["id"])

    async def intend_digest(self, pod_id: str, sha256: str, rc: str = "rc-1", **intent: Any) -> None:
        value = encode(Intent(manifest=sha256, rc=rc, shard=shard_of(rc), **intent))
        await self.store.txn([ops.put(self.keys.intent(self.node, pod_id), value)])

    async def unintend(self, pod_id: str = "web") -> None:
        await self.store.delete(self.keys.intent(self.node, pod_id))

    async def reality(self, pod_id: str = "web") -> Reality | None:
        entry = await self.store.get(self.keys.reality(self.node, pod_id))
        return decode(Reality, entry.key, entry.value) if entry else None

    async def health(self, rc: str = "rc-1") -> Health | None:
        """Return the pod's health while it is valid: its key carries a session."""
        entry = await self.store.get(self.keys.health(rc, self.node))
        return decode(Health, entry.key, entry.value) if entry and entry.session else None

    async def until(self, condition: Callable[[Reality], Any], pod_id: str = "web") -> Reality:
        """Wait until reality meets the condition. Return it."""
        seen: list[Reality | None] = []

        async def look() -> Reality | None:
            seen[:] = [await self.reality(pod_id)]
            return seen[0] if seen[0] is not None and condition(seen[0]) else None

        found: Reality = await self.eventually(look, lambda: f"reality of {pod_id} is {seen}")
        return found

    async def until_running(self, sha256: str = "", pod_id: str = "web") -> Process:
        """Wait until the pod runs (that manifest). Return its `main` process."""
        reality = await self.until(lambda it: it.state == "running" and it.manifest == (sha256 or it.manifest), pod_id)
        return reality.launchables["main"]

    async def until_health(self, status: str = "", rc: str = "rc-1", *, condition: str | None = None) -> Health:
        """Wait until the pod's health has this status, or condition. Return it."""

        async def look() -> Health | None:
            health = await self.health(rc)
            is_it = health and status in ("", health.status) and condition in (None, health.condition)
            return health if is_it else None

        found: Health = await self.eventually(look)
        return found

    async def until_condition(self, condition: str, rc: str = "rc-1") -> Health:
        return await self.until_health(rc=rc, condition=condition)

    async def until_gone(self, pod_id: str = "web") -> None:
        """Wait until the agent has removed what it wrote about the pod."""

        async def look() -> bool:
            return await self.reality(pod_id) is None

        await self.eventually(look)

    async def until_registered(self) -> None:
        agent = self.agent
        assert agent is not None
        await self.eventually(lambda: agent.problem == "", lambda: agent.problem)

    async def until_logged(self, text: str) -> None:
        await self.eventually(lambda: text in self.log(), self.log)

    def log(self, pod_id: str = "web", launchable: str = "main") -> str:
        return (self.state_dir / "logs" / pod_id / f"{launchable}.log").read_text()

    def processes(self) -> list[int]:
        """Return the running processes that any agent on this state directory started."""
        return started_under(self.state_dir)


@asynccontextmanager
async def harness(store: Store, state_dir: Path, **options: Any) -> AsyncIterator[AgentHarness]:
    """A harness whose agent and processes are gone at the end."""
    node = AgentHarness(store, state_dir, **options)
    try:
        yield node
    finally:
        try:
            await node.stop()
        finally:
            kill_started_under(state_dir)


def alive(pid: int | None) -> bool:
    """Return whether the process runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def started_under(state_dir: Path) -> list[int]:
    """Return the processes whose environment names a directory under `state_dir`."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"RCFARM_DIR={state_dir}/".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return [pid for pid in found if alive(pid)]


def kill_started_under(state_dir: Path) -> None:
    """Kill them, and reap those that are children of the test."""
    while pids := started_under(state_dir):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
