"""Completion of ids and names from the store, and of Frameworks' names from the API server.

A shell must not hang: what does not answer within its time limit gives no completions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from store.schema.keys import Keys

STORE_TIMEOUT = 0.8  # seconds
KUBE_TIMEOUT = 2.0  # seconds; reading a kubeconfig alone may take half a second


def complete_rc(ctx: Any, incomplete: str) -> list[str]:
    """Return the RC ids that begin with `incomplete`."""

    def ids(keys: Keys, names: list[str]) -> Iterable[str]:
        return (keys.split_rc(key).rc for key in names if keys.is_spec(key))

    return _complete(_from_store(ctx.params, lambda keys: keys.rcs, ids), incomplete)


def complete_node(ctx: Any, incomplete: str) -> list[str]:
    """Return the node names that begin with `incomplete`."""

    def nodes(keys: Keys, names: list[str]) -> Iterable[str]:
        return (node for node, leaf in map(keys.parse_node, names) if leaf == "spec")

    return _complete(_from_store(ctx.params, lambda keys: keys.nodes, nodes), incomplete)


def complete_framework(ctx: Any, incomplete: str) -> list[str]:
    """Return the names of the namespace's Frameworks that begin with `incomplete`."""

    async def names() -> Iterable[str]:
        from controllers.framework.api.types import FRAMEWORKS
        from store.kube.api.objects import name_of
        from store.kube.client.client import KubeClient
        from store.kube.client.credentials import current_namespace

        kubeconfig, context = ctx.params.get("kubeconfig"), ctx.params.get("context")
        async with asyncio.timeout(KUBE_TIMEOUT), await KubeClient.connect(kubeconfig, context=context) as api:
            where = ctx.params.get("namespace") or current_namespace(kubeconfig, context=context)
            return map(name_of, (await api.list(FRAMEWORKS, where)).items)

    return _complete(names(), incomplete)


def _complete(names: Coroutine[Any, Any, Iterable[str]], incomplete: str) -> list[str]:
    try:
        return sorted({name for name in asyncio.run(names) if name and name.startswith(incomplete)})
    except Exception:  # completion can't report errors; the command itself will
        return []


async def _from_store(
    params: dict[str, Any], prefix: Callable[[Keys], str], parse: Callable[[Keys, list[str]], Iterable[str]]
) -> Iterable[str]:
    """Return what `parse` makes of the keys under a prefix, in the store of a command's options."""
    from rcfarm.cli.kit.command import StoreOptions, open_store
    from store.schema.keys import Keys

    options = StoreOptions(params.get("store") or "", params.get("root") or "rcfarm", params.get("token_file"))
    keys = Keys(options.root)
    async with asyncio.timeout(STORE_TIMEOUT):
        store = open_store(options)
        try:
            return parse(keys, await store.keys(prefix(keys)))
        finally:
            await store.close()
