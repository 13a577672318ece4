"""What the tests of agents share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from store.embedded.store import EmbeddedStore
from tests.support.agent.agents import AgentHarness, harness


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[AgentHarness]:
    """An agent on a store in memory; the test starts it."""
    store = EmbeddedStore()
    async with harness(store, tmp_path / "node-1") as node:
        yield node
    await store.close()
