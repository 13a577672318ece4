"""A fleet over an embedded store in memory; a module may use a store or a fleet of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from store.embedded.store import EmbeddedStore
from store.schema.keys import Keys
from tests.support.farm.fleet import Fleet


@pytest.fixture
async def store() -> AsyncIterator[EmbeddedStore]:
    embedded = EmbeddedStore(None)
    yield embedded
    await embedded.close()


@pytest.fixture
def keys() -> Keys:
    return Keys()


@pytest.fixture
def fleet(store: EmbeddedStore, keys: Keys) -> Fleet:
    return Fleet(store, keys)
