"""A pod of a task on a real agent: its record, its exit, its last lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from store.embedded.store import EmbeddedStore
from store.kv.protocol import Op, TxnResult
from store.schema.keys import Keys
from store.schema.records import TASK_LABEL, Reality, decode
from tests.support.agent.agents import AgentHarness, alive, harness, manifest

FAILS = ["sh", "-c", "seq 1 2000; echo of task $RCFARM_TASK >&2; exit 3"]


def once(command: list[str]) -> dict[str, Any]:
    return manifest("job", command, launchable={"restart": "never"})


async def intend(node: AgentHarness, command: list[str]) -> None:
    await node.intend(once(command), rc="", labels={TASK_LABEL: "task-1"})


async def shown(node: AgentHarness) -> Reality | None:
    entry = await node.store.get(node.keys.task_pod(node.node, "job"))
    return decode(Reality, entry.key, entry.value) if entry else None


async def ended(node: AgentHarness) -> Reality | None:
    found = await shown(node)
    return found if found and any(each.last_exit for each in found.launchables.values()) else None


async def test_the_exit_and_the_last_lines_of_a_tasks_process_are_published(node: AgentHarness) -> None:
    """Its record is under task-pods/ and names the task; it has no health, and nothing of it is under reality/."""
    node.start()
    await intend(node, FAILS)

    reality = await node.eventually(lambda: ended(node))

    main = reality.launchables["main"]
    assert (reality.task, reality.state, main.state) == ("task-1", "failed", "failed")
    assert main.last_exit.code == 3
    lines = main.output.splitlines()
    assert lines[-2:] == ["2000", "of task task-1"]
    assert len(lines) == 20
    assert await node.reality("job") is None
    assert await node.store.keys("rcfarm/health/") == []


async def test_an_agent_that_starts_again_runs_an_ended_process_of_a_task_no_second_time(node: AgentHarness) -> None:
    node.start()
    await intend(node, ["sh", "-c", "echo ran"])
    await node.eventually(lambda: ended(node))
    await node.stop()
    await node.store.delete(node.keys.task_pod(node.node, "job"))

    node.start()

    reality = await node.eventually(lambda: ended(node))
    assert (reality.launchables["main"].state, reality.launchables["main"].output) == ("completed", "ran")
    assert node.log("job") == "ran\n"


async def test_the_exit_of_a_process_that_ended_while_no_agent_was_running_is_known(node: AgentHarness) -> None:
    node.start()
    await intend(node, ["sh", "-c", "echo began; while [ ! -e go ]; do sleep 0.01; done; exit 3"])
    await node.eventually(lambda: node.processes() and "began" in node.log("job"))
    await node.stop()
    (node.state_dir / "pods" / "job" / "main" / "go").touch()
    await node.eventually(lambda: not node.processes())

    node.start()

    exit_ = (await node.eventually(lambda: ended(node))).launchables["main"].last_exit
    assert exit_.code == 3


class Overtaken(EmbeddedStore):
    """A store where the intent of a task's pod is removed just before its agent announces the process."""

    overtaken = False

    async def txn(self, ops_: Sequence[Op]) -> TxnResult:
        written = [op for op in ops_ if op.verb == "set" and "/task-pods/" in op.key]
        if any(op.verb == "check-index" for op in ops_) and written:
            self.overtaken = True
            await self.delete(Keys().intent("node-1", "job"))
        return await super().txn(ops_)


async def test_a_process_whose_intent_is_gone_is_never_started(tmp_path: Path) -> None:
    """However late the agent sees that: an abort that finds no record of the pod can rely on it."""
    store = Overtaken()
    async with harness(store, tmp_path / "node-1") as node:
        node.start()
        await intend(node, ["sh", "-c", "echo ran"])
        await node.eventually(lambda: store.overtaken and node.agent and not node.agent.workers)
        assert not (tmp_path / "node-1" / "logs" / "job" / "main.log").exists()
    await store.close()


async def test_without_its_intent_a_tasks_process_is_stopped_and_its_record_removed(node: AgentHarness) -> None:
    node.start()
    await intend(node, ["sleep", "1000"])
    running = await node.eventually(lambda: shown(node))
    await node.eventually(lambda: node.processes())
    await node.unintend("job")

    await node.eventually(lambda: not node.processes())

    async def is_gone() -> bool:
        return await shown(node) is None

    await node.eventually(is_gone)
    assert not alive(running.launchables["main"].pid if running.launchables else None)
