"""A full disk is reported clearly, retried, and does not affect other pods."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rcfarm.roles.agent import agent_conditions
from store.embedded.store import EmbeddedStore
from tests.support.agent.agents import AgentHarness, alive, harness, manifest
from tests.support.programs.disk import small_file_system


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    with small_file_system(tmp_path / "disk", "256k") as disk:
        yield disk


@pytest.fixture
async def node(small_disk: Path) -> AsyncIterator[AgentHarness]:
    store = EmbeddedStore()
    async with harness(store, small_disk / "node-1") as node:
        yield node
    await store.close()


async def test_an_artifact_that_does_not_fit(node: AgentHarness, tmp_path: Path) -> None:
    """An artifact larger than the disk fails its pod with the path and the remedy; another pod still starts."""
    large = tmp_path / "large"
    large.write_bytes(os.urandom(1_000_000))
    artifact = {"url": f"file://{large}", "sha256": hashlib.sha256(large.read_bytes()).hexdigest()}
    node.start()
    await node.intend(manifest(launchable={"artifact": artifact}))
    reality = await node.until(lambda it: it.state == "failed")
    assert f"artifact file://{large}: no space left on the disk of {node.state_dir}" in reality.reason
    assert "free some" in reality.reason
    await node.intend(manifest("other"), rc="rc-2")
    assert alive((await node.until_running(pod_id="other")).pid)


async def test_a_full_disk_disturbs_nothing_that_runs(node: AgentHarness) -> None:
    """With the disk full a new pod waits and reports why, as does the agent's readiness; running pods go on; once there
    is room, the new pod starts."""
    agent = node.start()
    running = await node.run_pod(manifest())
    filler = node.state_dir / "filler"
    fill(filler)
    await node.intend(manifest("other"), rc="rc-2")
    reality = await node.until(lambda it: "no space left" in it.reason, "other")
    assert reality.state == "failed"
    assert await node.until_running() == running
    assert agent.full_disk == reality.reason
    assert [(it.name, it.reason) for it in agent_conditions(agent) if not it.holds] == [("disk", reality.reason)]
    assert (await node.until_condition("blocked", rc="rc-2")).cause == reality.reason
    filler.unlink()
    assert alive((await node.until_running(pod_id="other")).pid)
    assert all(it.holds for it in agent_conditions(agent))
    await node.unintend()
    await node.until_gone()


def fill(path: Path) -> None:
    """Write until nothing fits any more."""
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            pass
