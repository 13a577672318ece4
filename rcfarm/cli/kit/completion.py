"""Completion of ids and names from the store, and of Frameworks' names from the API server.

A shell must not hang: what does not answer within its time limit gives no completions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from store.kv.protocol import Store
    from store.schema.keys import Keys

STORE_TIMEOUT = 0.8  # seconds
KUBE_TIMEOUT = 2.0  # seconds; reading a kubeconfig alone may take half a second


def complete_rc(ctx: Any, incomplete: str) -> list[str]:
    """Return the RC ids that begin with `incomplete`."""
    return _complete(_rcs(ctx.params), incomplete)


def complete_node(ctx: Any, incomplete: str) -> list[str]:
    """Return the node names that begin with `incomplete`."""
    return _complete(_nodes(ctx.params), incomplete)


def complete_framework(ctx: Any, incomplete: str) -> list[str]:
    """Return the names of the namespace's Frameworks that begin with `incomplete`."""
    return _complete(_frameworks(ctx.params), incomplete)


def _complete(names: Coroutine[Any, Any, set[str]], incomplete: str) -> list[str]:
    try:
        return sorted(name for name in asyncio.run(names) if name and name.startswith(incomplete))
    except Exception:  # completion can't report errors; the command itself will
        return []


async def _rcs(params: dict[str, Any]) -> set[str]:
    async with _opened(params) as (store, keys):
        return {keys.split_rc(key).rc for key in await store.keys(keys.rcs) if keys.is_spec(key)}


async def _nodes(params: dict[str, Any]) -> set[str]:
    async with _opened(params) as (store, keys):
        found = map(keys.parse_node, await store.keys(keys.nodes))
        return {node for node, leaf in found if leaf == "spec"}


async def _frameworks(params: dict[str, Any]) -> set[str]:
    from controllers.framework.api.types import FRAMEWORKS
    from store.kube.api.objects import name_of
    from store.kube.client.client import KubeClient
    from store.kube.client.credentials import current_namespace

    kubeconfig, context = params.get("kubeconfig"), params.get("context")
    async with asyncio.timeout(KUBE_TIMEOUT), await KubeClient.connect(kubeconfig, context=context) as api:
        where = params.get("namespace") or current_namespace(kubeconfig, context=context)
        return set(map(name_of, (await api.list(FRAMEWORKS, where)).items))


@asynccontextmanager
async def _opened(params: dict[str, Any]) -> AsyncIterator[tuple[Store, Keys]]:
    """Yield the store of a command's options, and its keys, for at most `STORE_TIMEOUT`."""
    from rcfarm.cli.kit.command import Options, open_store
    from store.schema.keys import Keys

    options = Options(params.get("store") or "", params.get("root") or "rcfarm", params.get("token_file"))
    async with asyncio.timeout(STORE_TIMEOUT):
        store = open_store(options)
        try:
            yield store, Keys(options.root)
        finally:
            await store.close()
