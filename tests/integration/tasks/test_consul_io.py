"""Secrets and reservations on a real Consul."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controllers.tasks.api.data import CatalogKey
from controllers.tasks.api.errors import SecretNotFound
from controllers.tasks.api.phase import CacheStatus
from controllers.tasks.io.catalog import Catalog, digest_of_key
from controllers.tasks.io.data import open_data
from controllers.tasks.io.secrets import SecretManager, SecretUnavailable
from store.consul.store import ConsulStore
from store.schema.keys import Keys
from tests.support.consul.server import ConsulServer, opened
from tests.support.waiting import Clock


async def test_secrets_need_a_token_of_their_own(start_consul: Callable[..., ConsulServer], tmp_path: Path) -> None:
    """The token of an engine reads the root, and not the secrets beside it; that of the secrets reads nothing else."""
    from store.consul.client import ConsulSettings

    server = start_consul(acl=True)
    keys = Keys()
    engine = server.create_token('key_prefix "rcfarm/" { policy = "write" }')
    reader = server.create_token('key_prefix "rcfarm-secrets/" { policy = "read" }')

    def settings(token: str) -> ConsulSettings:
        return ConsulSettings.from_env(server.url, environ={"CONSUL_HTTP_TOKEN": token})

    assert server.token is not None
    async with opened(settings(server.token)) as operator:
        await operator.put(keys.secret("api"), b"hunter22")
    async with opened(settings(engine)) as engines, opened(settings(reader)) as readers:
        with pytest.raises(SecretUnavailable, match="rcfarm-secrets/api") as caught:
            await SecretManager(environ={}, store=engines).get("api")
        assert engine not in str(caught.value)
        secrets = SecretManager(environ={}, directory=tmp_path, store=readers)
        assert await secrets.get("api") == "hunter22"
        assert secrets.redactor.text("401 for hunter22") == "401 for [redacted]"
        with pytest.raises(SecretNotFound, match="rcfarm-secrets/absent"):
            await secrets.get("absent")


async def test_one_of_fifty_computes(consul_store: ConsulStore, root: str) -> None:
    """Every claimant that is refused names the holder, and finds the result when it is put."""
    data, clock, keys = open_data("memory:"), Clock(), Keys(root)
    key = CatalogKey("t", "1", {"x": 1}, {"y": "int"})
    catalogs = [Catalog(consul_store, keys, data, clock=clock) for _ in range(50)]
    answers = await asyncio.gather(*(each.reserve(key, f"e{at}/0") for at, each in enumerate(catalogs)))
    held = [at for at, answer in enumerate(answers) if answer.held]
    assert len(held) == 1
    assert {answer.owner for answer in answers} == {f"e{held[0]}/0"}
    assert (await catalogs[held[0]].put(key, {"y": 2}, owner=f"e{held[0]}/0")).status is CacheStatus.POPULATED
    found: list[Any] = await asyncio.gather(*(each.look_up(key) for each in catalogs))
    assert {answer.status for answer in found} == {CacheStatus.HIT}

    first = await catalogs[0].reserve(key, "e0/1")
    clock.now = first.until
    takers = await asyncio.gather(*(each.reserve(key, f"e{at}/2") for at, each in enumerate(catalogs)))
    assert [answer.held for answer in takers].count(True) == 1
    await asyncio.gather(*(each.release(key, f"e{at}/2") for at, each in enumerate(catalogs)))
    entry = await consul_store.get(keys.cached(digest_of_key(key)))
    assert entry is not None
    assert b'"reservation":null' in entry.value
    await catalogs[0].close()
