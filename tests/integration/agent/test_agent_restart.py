"""Agents that are killed: processes go on, and the next agent identifies them exactly."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from rcfarm.agent.process import stat
from rcfarm.agent.state import PodRecord, StateDir
from store.embedded.consul_api.app import serve_consul_api
from store.embedded.store import EmbeddedStore
from store.kv.protocol import Unavailable
from store.schema.records import Process
from tests.support import require
from tests.support.agent.agents import PATIENCE, AgentHarness, alive, harness, manifest

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
async def url(node: AgentHarness) -> AsyncIterator[str]:
    """Return the URL under which an agent in another process reaches the store."""
    assert isinstance(node.store, EmbeddedStore)
    async with serve_consul_api(node.store) as address:
        yield f"consul://{address}"


def agent_process(node: AgentHarness, url: str, *lease: float) -> AbstractContextManager[None]:
    """Run an agent with quick retries in its own process; killed with SIGKILL at the end."""
    return killed_at_the_end("tests.support.agent.process", url, node.state_dir, node.node, *lease)


def program(node: AgentHarness, url: str) -> AbstractContextManager[None]:
    """Run `rcfarm agent`; killed with SIGKILL at the end."""
    where = ("--store", url, "--node", node.node, "--state-dir", node.state_dir)
    settings = ("--set=agent.address=127.0.0.1", f"--set=agent.default_user={os.geteuid()}")
    return killed_at_the_end("rcfarm", "agent", *where, "--listen", "off", *settings)


@contextmanager
def killed_at_the_end(*arguments: object) -> Iterator[None]:
    command = [sys.executable, "-m", *map(str, arguments)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def test_the_next_agent_adopts_what_a_killed_one_started(node: AgentHarness, url: str) -> None:
    """After `kill -9` of the agent its process goes on, and the next agent has it under the same pid, without waiting
    for the killed agent's lease to expire."""
    with agent_process(node, url, 10 * PATIENCE):
        before = await node.run_pod(manifest())
        await node.until_health("passing")
    assert alive(before.pid)
    node.start()

    def adopted() -> bool:
        assert node.agent is not None
        states = {pod_id: worker.state for pod_id, worker in node.agent.workers.items()}
        return states == {"web": "running"} and not node.agent.problem

    await node.eventually(adopted)
    assert await node.until_running() == before
    await node.until_health("passing")


async def test_a_process_that_ended_without_an_agent_is_started_again(node: AgentHarness, url: str) -> None:
    """A process that ended while no agent was running is started again; its exit status is reported as unknown."""
    with agent_process(node, url):
        before = await node.run_pod(manifest())
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    node.start()
    reality = await node.until(lambda it: it.state == "running" and it.launchables["main"].restarts == 1)
    after = reality.launchables["main"]
    assert after.pid != before.pid
    assert require(after.last_exit).code is None


async def test_a_pod_that_went_over_to_another_rc_leaves_no_health_behind(node: AgentHarness) -> None:
    """Two RCs share a pod id, and the pod changes from one to the other while no agent is running: its process goes on,
    its health is the second RC's from then on, and the first one keeps none."""
    node.start()
    before = await node.run_pod(manifest())
    await node.until_health("passing")
    await node.stop()
    await node.intend(manifest(), rc="rc-2")
    node.start()
    await node.until_health("passing", rc="rc-2")
    assert await node.store.get(node.keys.health("rc-1", node.node)) is None
    assert await node.until_running() == before


async def test_a_recycled_pid_is_never_taken_for_the_process(node: AgentHarness) -> None:
    """A recorded pid that belongs to another process by now is neither adopted nor stopped."""
    with subprocess.Popen(["sleep", "1000"]) as stranger:
        try:
            process = await _started_again(node, stranger.pid)
            assert process.pid != stranger.pid
            await node.unintend()
            await node.until_gone()
            assert alive(stranger.pid)
        finally:
            stranger.kill()


async def test_pods_are_kept_alive_while_the_store_is_away(node: AgentHarness, tmp_path: Path) -> None:
    """An agent that starts without its store adopts its pods and restarts processes that die."""
    node.start()
    before = await node.run_pod(manifest())
    await node.stop()
    async with harness(away(), node.state_dir, node="node-1") as lonely:
        lonely.start()
        assert before.pid is not None

        os.kill(before.pid, signal.SIGKILL)
        await lonely.eventually(lambda: any(pid != before.pid for pid in lonely.processes()), lambda: "no process")


async def test_the_program_looks_after_its_pods_without_its_store(node: AgentHarness, url: str) -> None:
    """`rcfarm agent`, killed and started again while its store is away, adopts its pods and restarts processes that
    die."""
    with program(node, url):
        before = await node.run_pod(manifest())
    with program(node, "consul://127.0.0.1:1"):
        os.kill(require(before.pid), signal.SIGKILL)
        await node.eventually(node.processes)


async def test_a_pod_without_a_readable_manifest_can_still_be_stopped(node: AgentHarness) -> None:
    """If the manifest's copy is lost, the process is adopted all the same, and ends with its intent."""
    node.start()
    sha256 = await node.intend(manifest())
    process = await node.until_running()
    await node.stop()
    (node.state_dir / "manifests" / sha256).unlink()
    await node.store.delete(node.keys.manifest(sha256))
    node.start()
    await node.until(lambda it: "is not in the store" in it.reason)
    assert alive(process.pid)
    await node.unintend()
    await node.until_gone()
    assert not alive(process.pid)


@pytest.mark.timeout(60)
async def test_agents_killed_at_any_moment_leave_one_process_per_pod(node: AgentHarness, url: str) -> None:
    """However often and whenever the agent is killed, each pod has exactly one process in the end."""
    rng = random.Random(48)
    pods = [f"pod-{number}" for number in range(6)]
    wanted = {pod_id: await node.intend(manifest(pod_id), rc=f"rc-of-{pod_id}") for pod_id in pods}
    for round_ in range(8):
        with agent_process(node, url):
            await registered_again(node)
            await asyncio.sleep(rng.uniform(0.0, 0.05))  # also while it adopts
            for pod_id in rng.sample(pods, 3):  # new manifests, so that every round stops and starts something
                changed = manifest(pod_id, config={"round": round_})
                wanted[pod_id] = await node.intend(changed, rc=f"rc-of-{pod_id}")
            await asyncio.sleep(rng.uniform(0.0, 0.1))
    node.start()
    running = [(await node.until_running(sha256, pod_id)).pid for pod_id, sha256 in wanted.items()]
    assert sorted(node.processes()) == sorted(pid for pid in running if pid is not None)


async def registered_again(node: AgentHarness) -> None:
    """Wait until an agent holds the node under a new session."""
    assert isinstance(node.store, EmbeddedStore)
    before = set(node.store.state.sessions)

    async def held() -> bool:
        entry = await node.store.get(node.keys.node_alive(node.node))
        return entry is not None and entry.session is not None and entry.session not in before

    await node.eventually(held)


async def test_a_recycled_pid_may_be_that_of_a_thread(node: AgentHarness) -> None:
    """A recorded pid now names a thread, as after the restart of a container: the pod is started again."""
    ending = threading.Event()
    thread = threading.Thread(target=ending.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        await _started_again(node, thread.native_id)
    finally:
        ending.set()
        thread.join()


def away() -> EmbeddedStore:
    """Return a store that does not answer."""

    class Away(EmbeddedStore):
        async def create_session(self, *_: object, **__: object) -> NoReturn:
            raise Unavailable("no answer")

        list = watch = get = txn = destroy_session = create_session

    return Away()


async def _started_again(node: AgentHarness, pid: int) -> Process:
    """Stop the agent, kill its pod, and start the agent with `pid` in its record of the pod, as if the kernel had used
    the number again a moment later. Return the new process."""
    node.start()
    await node.run_pod(manifest())
    await node.stop()
    for started in node.processes():
        os.kill(started, signal.SIGKILL)
    state = StateDir(node.state_dir)
    record, other = state.load_pod("web"), stat(pid)
    assert isinstance(record, PodRecord)
    main = msgspec.structs.replace(record.launchables["main"], pid=pid, start_time=require(other).start_time - 1)
    state.save_pod("web", msgspec.structs.replace(record, launchables={"main": main}))
    node.start()
    return (await node.until(lambda it: it.launchables["main"].restarts == 1)).launchables["main"]
