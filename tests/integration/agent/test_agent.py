"""One agent, its pods and its store, as an operator sees them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest

from rcfarm.agent.agent import Agent
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import Listing, Op, TxnResult
from store.schema.keys import Keys
from store.schema.records import Health, Intent, NodeSpec, Reality, decode, encode
from tests.support import require
from tests.support.agent.agents import AgentHarness, alive, fast_settings, harness, manifest

POLITE = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("started", flush=True)
signal.sigwait([signal.SIGTERM])
print("stopped", flush=True)
"""
LISTEN = """
import os, socket, time
server = socket.create_server((os.environ["RCFARM_ADDRESS"], int(os.environ["RCFARM_PORT_HTTP"])))
time.sleep(1000)
"""
TRAP = ["python3", "-c", POLITE]


class Fickle(EmbeddedStore):
    """A store where an intent is written again just when its agent removes the pod's records, and deleted before any
    view has shown it."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.returns = 0
        self._key = key

    async def txn(self, ops_: Sequence[Op]) -> TxnResult:
        if self.returns or not any(op.verb == "check-not-exists" and op.key == self._key for op in ops_):
            return await super().txn(ops_)
        self.returns += 1
        await self.put(self._key, encode(Intent(manifest="0" * 64, rc="rc-1", shard="00")))
        try:
            return await super().txn(ops_)
        finally:
            await self.delete(self._key)


class Emptied(EmbeddedStore):
    """A store that is emptied just when its agent reads what it may have missed; `agent` has registered again when it
    gets the answer."""

    agent: Agent | None = None

    async def list(self, prefix: str, *, consistent: bool = False) -> Listing:
        listing = await super().list(prefix, consistent=consistent)
        if self.agent and prefix == Keys().node_realities("node-1"):
            registration, self.agent = self.agent.registration, None
            former = registration.tree
            for key in await self.keys("rcfarm"):
                await self.delete(key)
            while registration.tree == former or registration.session is None:
                await asyncio.sleep(0.01)
        return listing


async def test_a_registration_during_the_last_ones_reads_is_not_missed(tmp_path: Path) -> None:
    """The node is followed in its new tree: pods that get an intent there are removed with it."""
    store = Emptied()
    async with harness(store, tmp_path / "node-1") as node:
        store.agent = node.start()
        await node.eventually(lambda: store.agent is None)
        await node.until_registered()
        await node.run_pod(manifest())
        await node.unintend()
        await node.until_gone()
    await store.close()


async def test_an_intent_that_comes_back_for_a_moment_leaves_no_records(tmp_path: Path) -> None:
    """No view shows such an intent, so no order wakes the pod's worker: the worker retries on its own."""
    store = Fickle(Keys().intent("node-1", "web"))
    async with harness(store, tmp_path / "node-1") as node:
        node.start()
        await node.run_pod(manifest())
        await node.until_health("passing")
        await node.unintend()
        await node.until_gone()
        assert store.returns == 1
    await store.close()


async def test_an_intent_becomes_a_process_and_its_end_leaves_nothing(node: AgentHarness) -> None:
    """An intent starts the pod; when the intent is gone, the process, reality and health are gone, too."""
    node.start()
    sha256 = await node.intend(manifest(command=TRAP))
    process = await node.until_running(sha256)
    assert alive(process.pid)
    await node.until_health("passing")
    await node.until_logged("started")
    await node.unintend()
    await node.until_gone()
    assert not node.processes()
    assert "stopped" in node.log()
    assert await node.store.keys(node.keys.rcs) == []
    assert not (node.state_dir / "pods" / "web").exists()


async def test_the_same_manifest_again_changes_nothing(node: AgentHarness) -> None:
    """An intent that is written again with the same manifest does not disturb the process."""
    node.start()
    sha256 = await node.intend(manifest())
    before = await node.until_running(sha256)
    await node.intend_digest("web", sha256, token=7, labels={"a": "b"})
    await node.intend(manifest("other"), rc="rc-2")
    await node.until_running(pod_id="other")  # the first one's order was given before
    assert await node.until_running(sha256) == before


async def test_a_changed_manifest_replaces_the_process(node: AgentHarness) -> None:
    """The old process is asked to stop before the new one starts."""
    node.start()
    old = await node.until_running(await node.intend(manifest(command=TRAP)))
    await node.until_logged("started")
    new_sha256 = await node.intend(manifest(command=["sh", "-c", "echo new; exec sleep 1000"]))
    new = await node.until_running(new_sha256)
    assert not alive(old.pid)
    assert alive(new.pid)
    await node.until_logged("new")
    assert node.log().split() == ["started", "stopped", "new"]


async def test_a_failed_installation_leaves_the_old_one_running(node: AgentHarness, tmp_path: Path) -> None:
    """A failed installation launches nothing and stops nothing; reality gives the reason, and it is retried."""
    node.start()
    old = await node.until_running(await node.intend(manifest()))
    archive = tmp_path / "content"
    artifact = {"url": f"file://{archive}", "sha256": "0" * 64}
    await node.intend(manifest(launchable={"artifact": artifact}))
    reality = await node.until(lambda it: "artifact" in it.reason)
    assert reality.state == "running"
    assert f"{archive}: No such file" in reality.reason
    archive.write_text("other")
    reality = await node.until(lambda it: "sha256 is" in it.reason)
    assert reality.launchables["main"].pid == old.pid
    assert alive(old.pid)


async def test_a_failing_start_is_visible_and_retried(node: AgentHarness, tmp_path: Path) -> None:
    """A launchable that can't be started is shown with its reason, and started once the cause is removed."""
    program = tmp_path / "program"
    node.start()
    await node.intend(manifest(command=[str(program)]))
    reality = await node.until(lambda it: it.state == "failed")
    assert str(program) in reality.reason
    assert "not an executable file" in reality.reason
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    assert alive((await node.until_running()).pid)


async def test_a_slow_installation_blocks_no_other_pod(node: AgentHarness) -> None:
    """While one pod waits for its artifact, another one starts; a newer order ends the waiting."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and never answers
        node.start()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/slow.tar"
        artifact = {"url": url, "sha256": "0" * 64}
        await node.intend(manifest("slow", launchable={"artifact": artifact}))
        await node.until(lambda it: it.state == "installing", "slow")
        await node.intend(manifest("quick"), rc="rc-2")
        await node.until_running(pod_id="quick")
        await node.until(lambda it: it.state == "installing", "slow")
        sha256 = await node.intend(manifest("slow"))
        await node.until_running(sha256, "slow")


async def test_a_killed_process_comes_back(node: AgentHarness) -> None:
    """A process that is killed is started again, and reality counts it."""
    node.start()
    first = await node.run_pod(manifest())
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    reality = await node.until(lambda it: it.launchables["main"].restarts == 1 and it.state == "running")
    second = reality.launchables["main"]
    assert second.pid != first.pid
    assert require(second.last_exit).signal == "SIGKILL"
    assert alive(second.pid)


async def test_a_crash_loop_is_critical(node: AgentHarness) -> None:
    """A pod whose process keeps ending is `starting`, not running, with the exit code, and its health is critical."""
    node.start()
    await node.intend(manifest(command=["sh", "-c", "exit 3"]))
    reality = await node.until(lambda it: it.state == "starting" and it.launchables["main"].restarts >= 2)
    assert "exited with code 3" in reality.reason
    health = await node.until_health("critical")
    assert "exited with code 3" in health.output
    assert (health.condition, health.cause) == ("crashing", "main exited with code 3")


@pytest.mark.parametrize(("code", "condition", "status"), [(0, "completed", "passing"), (4, "failed", "critical")])
async def test_the_health_of_a_finished_job_says_so(node: AgentHarness, code: int, condition: str, status: str) -> None:
    """The health of a finished job says that it has ended permanently, and with which result."""
    node.start()
    await node.intend(manifest(command=["sh", "-c", f"exit {code}"], launchable={"restart": "never"}))
    health = await node.until_condition(condition)
    assert health.status == status
    assert health.cause == ("" if code == 0 else "main exited with code 4")


async def test_a_pod_that_can_not_be_changed_says_so_in_its_health(node: AgentHarness) -> None:
    """A new manifest that can't start leaves the old process running and passing, and health names the obstacle."""
    node.start()
    first = await node.intend(manifest())
    running = await node.until_running()
    await node.intend(manifest(command=["./bin/nope"]))
    health = await node.until_condition("blocked")
    assert (health.status, health.manifest) == ("passing", first)
    assert "'./bin/nope' is not an executable file" in health.cause
    await node.intend(manifest())
    assert (await node.until_condition("")).status == "passing"
    assert await node.until_running() == running


async def test_a_pod_that_can_not_be_started_is_critical(node: AgentHarness) -> None:
    """A pod that has never run is critical on the manifest that it should run, with the reason."""
    node.start()
    sha256 = await node.intend(manifest(command=["./bin/nope"]))
    health = await node.until_condition("blocked")
    assert (health.status, health.manifest) == ("critical", sha256)
    assert health.output == health.cause


async def test_an_unexpected_error_in_a_worker_is_published(
    node: AgentHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect of the agent itself is shown in reality, health and metrics; the process goes on."""
    agent = node.start()
    running = await node.run_pod(manifest())

    def fail(*arguments: object) -> None:
        raise RuntimeError("pidfd_open: no such process")

    with monkeypatch.context() as patch:
        patch.setattr("rcfarm.agent.pods.worker.RunningPod.hand_over", fail)
        await node.intend(manifest(), rc="rc-2")
        reality = await node.until(lambda it: "RuntimeError: pidfd_open: no such process" in it.reason)
        assert reality.launchables["main"].pid == running.pid
        health = await node.until_condition("blocked")
        assert "RuntimeError: pidfd_open: no such process" in health.cause
        assert agent.worker_failures == 1
    await node.until_condition("", rc="rc-2")
    assert await node.until_running() == running


async def test_a_finished_job_is_not_run_again(node: AgentHarness, tmp_path: Path) -> None:
    """With `restart: on-failure` a launchable that exits with 0 is completed, also for the next agent."""
    node.start()
    runs = tmp_path / "runs"
    await node.intend(manifest(command=["sh", "-c", f"echo run >> {runs}"], launchable={"restart": "on-failure"}))
    await node.until(lambda it: it.launchables and it.launchables["main"].state == "completed")
    await node.until_health("passing")
    await node.stop()
    node.start()
    await node.until_health("passing")
    assert runs.read_text() == "run\n"


async def test_a_process_gets_its_own_variables_and_nothing_of_the_agents(
    node: AgentHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RCFARM_* name the pod, its node and its RC; the agent's own environment, with its tokens, is not passed on."""
    monkeypatch.setenv("CONSUL_HTTP_TOKEN", "secret")
    node.start()
    command = ["sh", "-c", "env | sort; cat $RCFARM_CONFIG; pwd; echo ${RCFARM_NODE} done; sleep 1000"]
    sha256 = await node.intend(
        manifest(command=command, ports={"http": 0, "admin-api": 0}, config={"greeting": "hello"})
    )
    reality = await node.until(lambda it: it.state == "running")
    await node.until_logged("node-1 done")
    assert set(node.log().splitlines()) >= {
        "RCFARM_NODE=node-1",
        "RCFARM_ADDRESS=127.0.0.1",
        "RCFARM_RC=rc-1",
        "RCFARM_POD_ID=web",
        f"RCFARM_MANIFEST={sha256}",
        f"RCFARM_PORT_HTTP={reality.ports['http']}",
        f"RCFARM_PORT_ADMIN_API={reality.ports['admin-api']}",
        '  "greeting": "hello"',
        str(node.state_dir / "pods" / "web" / "main"),
    }
    assert "secret" not in node.log()


async def test_a_web_server_is_checked_and_answers(node: AgentHarness) -> None:
    """A pod with port 0 gets a free port, is passing once it answers, and answers at the port in reality."""
    node.start()
    command = ["python3", "-u", "-m", "http.server", "${RCFARM_PORT_HTTP}", "--bind", "${RCFARM_ADDRESS}"]
    await node.intend(
        manifest(command=command, ports={"http": 0}, health={"http": {}, "interval": 0.2, "timeout": 0.5})
    )
    await node.until_health("passing")
    reality = await node.until(lambda it: it.state == "running")
    url = f"http://{reality.address}:{reality.ports['http']}/"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
    process = reality.launchables["main"]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    output = (await node.until_health("critical")).output
    os.kill(process.pid, signal.SIGCONT)
    assert "no answer" in output
    await node.until_health("passing")


@pytest.mark.parametrize(
    ("variable", "status", "output"),
    [
        ("RCFARM_POD_ID", "passing", "web"),
        ("RCFARM_POD", "critical", "health.exec.command: ${RCFARM_POD} is not defined; there are RCFARM_"),
    ],
)
async def test_a_check_by_command_gets_the_variables_of_the_pod(
    node: AgentHarness, variable: str, status: str, output: str
) -> None:
    """The command runs as the first launchable would; one that names an unknown variable makes the pod critical."""
    node.start()
    command = ["echo", f"${{{variable}}}"]
    await node.intend(manifest(health={"exec": {"command": command}, "interval": 0.2, "timeout": 5}))
    assert (await node.until_health(status)).output.startswith(output)
    assert (await node.until_running()).restarts == 0


async def test_a_port_in_use_names_who_listens(node: AgentHarness) -> None:
    """A fixed port in use keeps the pod from starting, the process that has it is named, and the start is retried."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node.start()
        await node.intend(manifest(ports={"http": port}))
        reality = await node.until(lambda it: it.state == "failed")
        assert f"ports.http: {port} is in use by process {os.getpid()}" in reality.reason
    await node.until_running()


async def test_a_chosen_port_stays_with_the_pod(node: AgentHarness) -> None:
    """Port 0 gives the same number after a restart of the process, of the agent, and under a new manifest."""
    node.start()
    listen = ["python3", "-c", LISTEN]
    check = {"tcp": {"port": "http"}, "interval": 0.2}
    await node.intend(manifest(command=listen, ports={"http": 0}, health=check))
    await node.until_health("passing")
    first = require(await node.reality())
    await node.stop()
    node.start()
    await node.intend(manifest(command=listen, ports={"http": 0, "other": 0}, health=check))
    second = await node.until(lambda it: it.state == "running" and "other" in it.ports)
    assert second.ports["http"] == first.ports["http"]
    assert second.ports["other"] != first.ports["http"]


async def test_a_lost_chosen_port_is_replaced(node: AgentHarness) -> None:
    """When another process takes a chosen port while the pod's is down, the pod starts again on another port."""
    node.start()
    await node.intend(manifest(ports={"http": 0}))
    reality = await node.until(lambda it: it.state == "running")
    port, pid = reality.ports["http"], reality.launchables["main"].pid
    assert pid is not None
    with socket.create_server(("127.0.0.1", port)):
        os.kill(pid, signal.SIGKILL)
        reality = await node.until(lambda it: it.state == "running" and it.ports["http"] != port)
        assert alive(reality.launchables["main"].pid)


async def test_stopping_the_agent_leaves_processes_and_ends_the_session(node: AgentHarness) -> None:
    """On SIGTERM of the agent its node stops being live at once; its processes go on, and their pod is not removed."""
    agent = node.start()
    process = await node.run_pod(manifest())
    await node.until_health("passing")
    await node.stop()
    entry = require(await node.store.get(node.keys.node_alive("node-1")))
    assert entry.session is None
    assert await node.health() is None
    assert alive(process.pid)
    assert list(agent.workers) == ["web"]


async def test_stopping_the_agent_can_stop_its_pods(tmp_path: Path) -> None:
    """With `stop_pods_on_exit` the processes are stopped as their manifests say; the next agent starts them again."""
    store = EmbeddedStore()
    async with harness(store, tmp_path, stop_pods_on_exit=True) as node:
        node.start()
        await node.run_pod(manifest(command=TRAP))
        await node.until_logged("started")
        await node.stop()
        assert node.processes() == []
        assert "stopped" in node.log()
        await node.until(lambda it: it.launchables["main"].state == "stopped")
        node.start()
        await node.until(lambda it: it.state == "running")
        await node.stop()


async def test_a_stubborn_process_is_killed(node: AgentHarness) -> None:
    """A process that ignores its stop signal is killed with its children after `stop_timeout`."""
    node.start()
    await node.intend(
        manifest(command=["sh", "-c", "trap '' TERM; sleep 1000 & echo up; wait"], launchable={"stop_timeout": 0.3})
    )
    await node.until_running()
    await node.until_logged("up")
    assert len(node.processes()) == 2
    await node.unintend()
    await node.until_gone()
    assert node.processes() == []


async def test_adoption_keeps_the_process(node: AgentHarness) -> None:
    """A restarted agent keeps the same process; a pod whose intent was removed while the agent was down is stopped."""
    node.start()
    await node.intend(manifest("stays"))
    await node.intend(manifest("leaves"), rc="rc-2")
    stays = await node.until_running(pod_id="stays")
    leaves = await node.until_running(pod_id="leaves")
    await node.stop()
    await node.unintend("leaves")
    node.start()
    await node.until_gone("leaves")
    assert not alive(leaves.pid)
    await node.until_health("passing")
    assert await node.until_running(pod_id="stays") == stays
    os.kill(require(stays.pid), signal.SIGKILL)  # an adopted process is watched like any other
    await node.until(lambda it: it.state == "running" and it.launchables["main"].restarts == 1, "stays")


async def test_records_of_unknown_pods_are_removed(node: AgentHarness) -> None:
    """Reality without an intent and without a process, left by an agent that was killed, is removed."""
    node.start()
    await node.intend(manifest())
    await node.until_health("passing")
    await node.stop()
    await node.unintend()
    for pid in node.processes():
        os.kill(pid, signal.SIGKILL)
    for path in (node.state_dir / "pods" / "web").glob("*.json"):
        path.unlink()
    node.start()
    await node.until_gone()
    assert await node.store.keys(node.keys.rcs) == []


async def test_health_that_belongs_to_no_pod_is_removed(node: AgentHarness) -> None:
    """A restored store may assign the pod to another RC, and hold health of an RC that has no pod here."""
    kept, left = encode(Health("passing", "0" * 64)), [node.keys.health(rc, node.node) for rc in ("rc-2", "rc-3")]
    reality = Reality(manifest="0" * 64, rc="rc-2", state="running")
    await node.store.txn([ops.put(key, kept) for key in left])
    await node.store.put(node.keys.reality(node.node, "web"), encode(reality))
    await node.intend(manifest(), rc="rc-1")
    node.start()
    await node.until_health("passing")

    async def is_gone() -> bool:
        return not any([await node.store.get(key) for key in left])

    await node.eventually(is_gone)


async def test_a_lost_session_is_replaced_and_everything_written_again(node: AgentHarness) -> None:
    """When the session ends, alive and health are written again under the new one."""
    agent = node.start()
    process = await node.run_pod(manifest())
    await node.until_health("passing")
    lost = require(agent.registration.session)
    await node.store.destroy_session(lost)

    async def held_again() -> bool:
        keys = [node.keys.node_alive("node-1"), node.keys.health("rc-1", "node-1")]
        entries = [await node.store.get(key) for key in keys]
        return all(entry is not None and entry.session not in (None, lost) for entry in entries)

    await node.eventually(held_again)
    assert await node.until_running() == process


async def test_an_unreadable_intent_is_not_a_deletion(node: AgentHarness) -> None:
    """An unreadable intent leaves the pod as it is and is reported; other pods go on."""
    node.start()
    process = await node.run_pod(manifest())
    await node.store.put(node.keys.intent("node-1", "web"), b'{"manifest": 7}')
    await node.intend(manifest("other"), rc="rc-2")
    await node.until_running(pod_id="other")
    reality = await node.until(lambda it: "can't be understood" in it.reason)
    assert reality.launchables["main"].pid == process.pid
    assert alive(process.pid)


async def test_names_that_would_leave_the_state_directory_are_refused(node: AgentHarness) -> None:
    """Pod ids and digests become file names: all but DNS labels and sha256 is a bad record, and nothing is written."""
    node.start()
    await node.intend_digest("web", "../../outside")
    sha256 = await node.put_manifest(manifest())
    for pod_id in ("..", "../../evil/web", "web/nested", "Web"):
        await node.intend_digest(pod_id, sha256)
    await node.intend(manifest("other"), rc="rc-2")
    await node.until_running(pod_id="other")
    reality = await node.until(lambda it: "sha256" in it.reason)
    assert reality.state == "failed"
    assert sorted(path.name for path in (node.state_dir / "pods").iterdir()) == ["other"]


async def test_a_damaged_or_missing_manifest_is_named(node: AgentHarness) -> None:
    """A manifest that is missing or does not match its digest gives a clear reason and is retried."""
    node.start()
    await node.intend_digest("web", "a" * 64)
    await node.until(lambda it: "is not in the store" in it.reason)
    await node.store.put(node.keys.manifest("a" * 64), b"id: other")
    await node.until(lambda it: "is damaged in the store" in it.reason)
    await node.run_pod(manifest())


async def test_an_oversized_manifest_is_named(node: AgentHarness) -> None:
    """A manifest over the limit is refused with its size; other pods are unaffected."""
    node.start()
    await node.intend(manifest(config={"blob": "x" * 300_000}))
    await node.intend(manifest("other"), rc="rc-2")
    reality = await node.until(lambda it: it.state == "failed")
    assert "the limit is 262144" in reality.reason
    await node.until_running(pod_id="other")


async def test_an_emptied_store_stops_nothing(node: AgentHarness) -> None:
    """When the tree vanishes, pods are kept and report why; once their intents are back they are normal pods again."""
    node.start()
    sha256 = await node.intend(manifest())
    process = await node.until_running()
    for key in await node.store.keys(node.keys.root):
        await node.store.delete(key)
    reality = await node.until(lambda it: "the store was emptied or replaced" in it.reason)
    assert reality.launchables["main"].pid == process.pid
    assert alive(process.pid)
    await node.intend_digest("web", sha256)
    await node.until(lambda it: it.reason == "")
    await node.unintend()
    await node.until_gone()
    assert not alive(process.pid)


async def test_an_empty_listing_is_not_believed(tmp_path: Path) -> None:
    """A stale answer without intents, as a lagging server gives it, stops nothing: a consistent read contradicts it."""
    store = Blind()
    async with harness(store, tmp_path) as node:
        node.start()
        process = await node.run_pod(manifest())
        store.blind = True
        await node.intend(manifest("other"), rc="rc-2")
        reality = await node.until(lambda it: "stale answer" in it.reason)
        assert reality.launchables["main"].pid == process.pid
        assert alive(process.pid)
        store.blind = False
        await node.intend(manifest("third"), rc="rc-3")
        await node.until(lambda it: it.reason == "")
        assert await node.until_running() == process
    await store.close()


class Blind(EmbeddedStore):
    """A store whose watches see no intents while it is `blind`."""

    blind = False

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        listing = await super().watch(prefix, index, wait)
        return Listing([], listing.index) if self.blind and "/intent/" in prefix else listing


async def test_a_store_that_was_emptied_while_no_agent_ran_stops_nothing(node: AgentHarness) -> None:
    """The next agent keeps the pods that it adopts when the tree that held their intents is gone, however often it is
    started, until an operator orders them stopped. The new tree has the same indexes as the old one."""
    node.start()
    sha256 = await node.intend(manifest())
    process = await node.until_running()
    await node.stop()
    node.store = EmbeddedStore()
    for _ in range(2):
        node.start()
        await node.until(lambda it: "the store was emptied or replaced" in it.reason)
        await node.stop()
    assert alive(process.pid)
    assert sha256 == (await node.until(lambda it: it.launchables["main"].pid == process.pid)).manifest
    node.settings = fast_settings("node-1", node.state_dir, stop_orphans=True)
    node.start()
    await node.until_gone()
    assert not alive(process.pid)
    await node.stop()


async def test_pods_of_an_emptied_store_are_normal_again_with_their_intents(node: AgentHarness) -> None:
    """Intents that are written again find the same process, also after the agent's restart, and can be removed."""
    node.start()
    process = await node.run_pod(manifest())
    await node.stop()
    for key in await node.store.keys(node.keys.root):
        await node.store.delete(key)
    await node.intend(manifest())
    node.start()
    await node.until_health("passing")
    assert (await node.until_running()).pid == process.pid
    await node.stop()
    await node.unintend()
    node.start()
    await node.until_gone()
    assert not alive(process.pid)


async def test_an_operators_cordon_and_labels_stay(node: AgentHarness) -> None:
    """An operator's changes of the node's spec survive restarts of the agent; changed settings are merged."""
    key = node.keys.node_spec("node-1")
    node.settings = node.settings.__class__(node="node-1", state_dir=node.state_dir, labels={"pool": "web"}, cpu=4000)
    node.start()
    await node.until_registered()
    entry = require(await node.store.get(key))
    edited = entry.value.replace(b'{"pool":"web"}', b'{"pool":"db","rack":"7"}').replace(b"true", b"false")
    await node.store.put(key, edited)
    await node.stop()
    node.settings = node.settings.__class__(
        node="node-1", state_dir=node.state_dir, labels={"pool": "web", "zone": "a"}, cpu=8000
    )
    node.start()
    await node.until_registered()
    entry = require(await node.store.get(key))
    spec = decode(NodeSpec, key, entry.value)
    assert spec.labels == {"pool": "db", "rack": "7", "zone": "a"}
    assert spec.capacity.cpu == 8000
    assert not spec.schedulable


async def test_two_agents_never_share_a_node(tmp_path: Path) -> None:
    """A second agent of the same name only reports the conflict; it takes over once the first has stopped."""
    store = EmbeddedStore()
    async with harness(store, tmp_path / "a") as first, harness(store, tmp_path / "b") as second:
        first.start()
        await first.until_registered()
        agent = second.start()

        await second.eventually(lambda: "held by another agent" in agent.problem, lambda: agent.problem)
        await first.run_pod(manifest())
        assert second.processes() == []
        await first.stop()
        await second.until_registered()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes as another user")
async def test_a_process_runs_as_its_user() -> None:
    """A process of another user has only that user's rights: its directory and config file, nothing of the agent's."""
    store = EmbeddedStore()
    with tempfile.TemporaryDirectory() as open_to_all:  # pytest's own directories are closed to other users
        Path(open_to_all).chmod(0o755)
        async with harness(store, Path(open_to_all) / "node-1") as node:
            node.start()
            script = (
                "id -un; cat $RCFARM_CONFIG; touch own && echo owned; touch ../pod.json ../x || echo refused; sleep 9"
            )
            await node.run_pod(manifest(command=["sh", "-c", script], launchable={"user": "nobody"}, config={"a": 1}))
            await node.until_logged("refused")
            assert "nobody" in node.log()
            assert '"a": 1' in node.log()
            assert "owned" in node.log()
            await node.unintend()
            await node.until_gone()
            assert node.processes() == []
