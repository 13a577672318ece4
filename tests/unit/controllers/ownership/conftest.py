"""A store behind a network that the test controls."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from store.embedded.store import EmbeddedStore
from tests.support.consul.scripted_store import ScriptedStore


@pytest.fixture
async def store() -> AsyncIterator[ScriptedStore]:
    scripted = ScriptedStore(EmbeddedStore())
    yield scripted
    await scripted.close()
