"""An embedded store in memory, and what operators do in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from tests.support.tasks.engines import World


@pytest.fixture
async def store() -> AsyncIterator[EmbeddedStore]:
    embedded = EmbeddedStore(None)
    yield embedded
    await embedded.close()


@pytest.fixture
def keys() -> Keys:
    return Keys(shards=4)


@pytest.fixture
def world(store: EmbeddedStore, keys: Keys) -> World:
    return World(store, keys)
