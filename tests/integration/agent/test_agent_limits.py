"""An agent holds pods to their limits and ends their trees; `tests.attack_limits` does the same a thousand times."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from rcfarm.agent import cgroups
from rcfarm.agent.cgroups import Groups
from rcfarm.doctor.checks import limits, take_census
from store.schema.records import Process
from tests.attack_limits import FIRST_MARK, groups_left, kills, memory, only_v1, processes_by_mark, site, trees
from tests.support.agent.agents import AgentHarness, manifest


def require(state: Path, *limits: str) -> None:
    """Skip the test where no control group can be written, or none limits these."""
    groups = Groups.open(state, "trial")
    groups.close()
    if not groups.enforcement.tree or not {*limits} <= {*groups.enforcement.enforced}:
        pytest.skip(f"needs control groups; here: {groups.enforcement.words}")


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[tuple[AgentHarness, str]]:
    async with site(tmp_path) as found:
        yield found


@pytest.mark.parametrize("versions", ["all", "v1"])
async def test_the_whole_tree_of_a_pod_ends(
    place: tuple[AgentHarness, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: str
) -> None:
    """Whatever its processes do, a pod is gone a second after its stop timeout, and is not called gone before."""
    node, _ = place
    if versions == "v1":
        find = cgroups.find_mounts
        monkeypatch.setattr(cgroups, "find_mounts", lambda *files: only_v1(find(*files)))
    require(tmp_path)
    node.start()
    await trees(node, 8)


async def test_an_agent_that_is_killed_keeps_its_pods(place: tuple[AgentHarness, str], tmp_path: Path) -> None:
    """No pod is lost, duplicated or restarted, and their groups are adopted and, in the end, removed."""
    require(tmp_path)
    node, url = place
    await kills(node, url, 5, 4, random.Random(1))


async def test_a_pod_over_its_memory_limit_is_named_and_alone(place: tuple[AgentHarness, str], tmp_path: Path) -> None:
    """Its end is named with the limit as it was written; its neighbours run on."""
    require(tmp_path, "memory")
    node, _ = place
    node.start()
    await memory(node, 3, neighbours=3)


async def test_an_end_for_lack_of_memory_is_known_though_no_agent_saw_it(
    place: tuple[AgentHarness, str], tmp_path: Path
) -> None:
    """The group outlives the agent, and so does its count."""
    require(tmp_path, "memory")
    node, _ = place
    node.start()
    script = "until [ -e go ]; do sleep 0.05; done; exec tail /dev/zero"
    await node.intend(manifest(command=["sh", "-c", script], launchable={"resources": {"memory": "24Mi"}}))
    pid = (await node.until_running()).pid
    await node.stop()
    (node.state_dir / "pods" / "web" / "main" / "go").touch()
    while pid in node.processes():
        pass
    node.start()
    reality = await node.until(lambda it: it.launchables["main"].last_exit)
    end = reality.launchables["main"].last_exit
    assert end is not None
    assert end.words == "killed by the kernel: over its memory limit of 24Mi"
    assert end.code is None


async def test_a_stuck_tree_is_not_called_stopped(
    place: tuple[AgentHarness, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a process of the pod can't be killed, the pod's record stays, and names it."""
    require(tmp_path)
    node, _ = place
    node.start()
    script = f"trap '' TERM; setsid sleep {FIRST_MARK} & wait"
    await node.intend(manifest(command=["sh", "-c", script], launchable={"stop_timeout": 0}))
    await node.eventually(lambda: processes_by_mark()[FIRST_MARK])  # the signal is ignored by now
    await node.until_running()
    kill = cgroups.Group.kill
    monkeypatch.setattr(cgroups.Group, "kill", lambda group: None)
    await node.unintend()

    def names_it(process: Process) -> bool:
        return process.state == "stopping" and "the kernel has not ended what it was asked to kill" in process.reason

    await node.until(lambda it: names_it(it.launchables["main"]))
    assert len(processes_by_mark()[FIRST_MARK]) > 0
    monkeypatch.setattr(cgroups.Group, "kill", kill)
    await node.until_gone()
    assert not processes_by_mark()[FIRST_MARK]


async def test_operators_see_how_limits_are_enforced(place: tuple[AgentHarness, str]) -> None:
    """The node's record and `rcfarm doctor` say what holds; without control groups the pods run all the same."""
    node, _ = place
    node.settings = msgspec.structs.replace(node.settings, cgroups=False)
    node.start()
    await node.until_registered()
    await node.intend(
        manifest(
            command=["sh", "-c", "ulimit -v; sleep 1000"], launchable={"resources": {"memory": "512Mi", "pids": 200}}
        )
    )
    await node.until_running()
    await node.until_logged("524288")  # KiB: the fallback
    (finding,) = limits(await take_census(node.store, node.keys))
    assert finding.level == "warning"
    assert "node-1: memory of each process by rlimits; cpu and pids not at all" in finding.message
    assert "(agent.cgroups is false)" in finding.message


async def test_an_agent_that_is_killed_while_it_stops_a_pod(place: tuple[AgentHarness, str], tmp_path: Path) -> None:
    """The next agent ends what is left of the tree, though the process that it has on record is gone."""
    require(tmp_path)
    node, url = place
    script = f"(trap '' TERM; setsid sleep {FIRST_MARK} &); exec sleep 1000"
    command = [sys.executable, "-m", "tests.support.agent.process", url, str(node.state_dir), node.node]
    agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await node.intend(manifest(command=["sh", "-c", script], launchable={"stop_timeout": 3}))
        pid = (await node.until_running()).pid
        await node.eventually(lambda: processes_by_mark()[FIRST_MARK])
        await node.unintend()
        await node.eventually(lambda: pid not in node.processes())
    finally:
        agent.kill()
        agent.wait()
    assert processes_by_mark()[FIRST_MARK]
    node.start()
    await node.until_gone()
    assert not processes_by_mark()[FIRST_MARK]
    assert not groups_left(node.state_dir)
