"""The worker of one pod: how it ends."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from rcfarm.agent.pods.plan import Gone, Keep
from rcfarm.agent.pods.running import PodDependencies
from rcfarm.agent.pods.worker import PodWorker
from rcfarm.agent.state import StateDir
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import SessionSpec
from store.schema.keys import Keys
from tests.support.agent.agents import fast_settings


class Registered:
    """A registration that holds its node."""

    def __init__(self, session: str) -> None:
        self.session = session

    async def held(self) -> str:
        return self.session


async def dependencies(state_dir: Path, **settings: Any) -> PodDependencies:
    """Return what a worker without processes uses: a store, where the node is registered, and a state directory."""
    store, keys = EmbeddedStore(), Keys()
    session = (await store.create_session(SessionSpec("agent"))).id
    await store.txn([ops.lock(keys.node_alive("node-1"), b"{}", session)])
    state = StateDir(state_dir)
    state.open()
    registered: Any = Registered(session)
    unused: dict[str, Any] = dict.fromkeys(("installer", "ports", "prober", "discovery", "secrets", "logs"))
    agent = fast_settings("node-1", state_dir, **settings)
    return PodDependencies(store, keys, agent, "127.0.0.1", state, registration=registered, **unused)


@pytest.mark.parametrize("stop_pods_on_exit", [False, True])
async def test_a_cancelled_worker_ends_as_cancelled(tmp_path: Path, stop_pods_on_exit: bool) -> None:
    """A worker that returns has removed its pod. A cancelled one has not, so its task is cancelled, too."""
    worker = PodWorker(await dependencies(tmp_path, stop_pods_on_exit=stop_pods_on_exit), "web", random.Random(0))
    worker.want(Keep("its intent can't be understood"))
    running = asyncio.create_task(worker.run())
    while worker.reason == "":
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running], timeout=10)
    assert running.cancelled()


async def test_a_worker_returns_when_its_pod_is_gone(tmp_path: Path) -> None:
    worker = PodWorker(await dependencies(tmp_path), "web", random.Random(0))
    worker.want(Gone(), rc="rc-1")
    async with asyncio.timeout(10):
        await worker.run()
