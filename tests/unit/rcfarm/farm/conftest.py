"""A store behind a network that the test controls; a module may use a store of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from store.embedded.store import EmbeddedStore
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.farm.fleet import Fleet
from tests.support.farm.stage import KEYS, Stage


@pytest.fixture
async def store() -> AsyncIterator[ScriptedStore]:
    scripted = ScriptedStore(EmbeddedStore())
    yield scripted
    await scripted.close()


@pytest.fixture
def fleet(store: ScriptedStore) -> Fleet:
    """Return the store of the operator and the agents, whose calls are not disturbed."""
    return Fleet(store.inner, KEYS)


@pytest.fixture
def stage() -> Stage:
    return Stage()
