"""The stores that an engine runs on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from store.embedded.store import EmbeddedStore
from store.kv.protocol import Store


@pytest.fixture(params=["embedded", "consul"])
async def any_store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An embedded store in memory, then the shared Consul, under a `root` of the test's own."""
    if request.param == "embedded":
        embedded = EmbeddedStore()
        yield embedded
        await embedded.close()
        return
    from store.consul.client import ConsulSettings
    from tests.support.consul.server import opened

    consul = request.getfixturevalue("consul")
    async with opened(ConsulSettings.from_env(consul.url)) as store:
        yield store
