"""Completion of ids and names from the store, and of the names of jobs from the API server.

A shell must not hang: what does not answer within its time limit gives no completions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from store.kube.api.objects import Resource
    from store.schema.keys import Keys

STORE_TIMEOUT = 0.8  # seconds
KUBE_TIMEOUT = 2.0  # seconds; reading a kubeconfig alone may take half a second


def _complete(names: Coroutine[Any, Any, Iterable[str]], incomplete: str) -> list[str]:
    try:
        return sorted({name for name in asyncio.run(names) if name and name.startswith(incomplete)})
    except Exception:  # completion can't report errors; the command itself will
        return []


async def _from_store(
    params: dict[str, Any], folder: Callable[[Keys], str], name_of: Callable[[Keys, str], str], leaf: str = ""
) -> Iterable[str]:
    """Return the names in the keys of a folder that end in `leaf`, in the store of a command's options."""
    from rcfarm.cli.kit.command import StoreOptions, open_store
    from store.schema.keys import Keys

    options = StoreOptions(params.get("store") or "", params.get("root") or "rcfarm", params.get("token_file"))
    keys = Keys(options.root)
    store = open_store(options)  # its imports, which are most of the time, can't be cut short
    try:
        async with asyncio.timeout(STORE_TIMEOUT):
            found = await store.keys(folder(keys))
    finally:
        await store.close()
    return [name_of(keys, key) for key in found if key.endswith(leaf)]


def _of_store(
    folder: Callable[[Keys], str], name_of: Callable[[Keys, str], str], leaf: str = ""
) -> Callable[[Any, str], list[str]]:
    """Return a function that completes the names in a folder of the store; see `_from_store`."""

    def complete(ctx: Any, incomplete: str) -> list[str]:
        return _complete(_from_store(ctx.params, folder, name_of, leaf), incomplete)

    return complete


complete_rc = _of_store(lambda keys: keys.rcs, lambda keys, key: keys.split_rc(key).rc if keys.is_spec(key) else "")
complete_deleted = _of_store(lambda keys: keys.deleted, lambda keys, key: keys.name_of(key))
complete_node = _of_store(lambda keys: keys.nodes, lambda keys, key: keys.parse_node(key).node, "/spec")
complete_farm = _of_store(lambda keys: keys.farms, lambda keys, key: keys.name_of(key))
complete_pod = _of_store(lambda keys: keys.intents, lambda keys, key: "/".join(keys.parse_pod(key)))
complete_task = _of_store(lambda keys: keys.tasks, lambda keys, key: keys.parse_task(key).task, "/spec")
complete_quota = _of_store(lambda keys: keys.quotas, lambda keys, key: keys.parse_quota(key).resource, "/limit")
complete_secret = _of_store(lambda keys: keys.secrets, lambda keys, key: key.removeprefix(keys.secrets))
complete_schedule = _of_store(lambda keys: keys.schedules, lambda keys, key: keys.parse_schedule(key).schedule, "/spec")


async def _from_cluster(params: dict[str, Any], *resources: Resource) -> Iterable[str]:
    """Return the names of the objects in the namespace of a command's options. What is not served has none."""
    from store.kube.api.errors import NotFound
    from store.kube.api.objects import name_of
    from store.kube.client.client import KubeClient
    from store.kube.client.credentials import current_namespace

    kubeconfig, context = params.get("kubeconfig"), params.get("context")
    names: list[str] = []
    async with asyncio.timeout(KUBE_TIMEOUT), await KubeClient.connect(kubeconfig, context=context) as api:
        where = params.get("namespace") or current_namespace(kubeconfig, context=context)
        for resource in resources:
            with suppress(NotFound):
                names += map(name_of, (await api.list(resource, where)).items)
    return names


def complete_framework(ctx: Any, incomplete: str) -> list[str]:
    """Return the names of the namespace's Frameworks that begin with `incomplete`."""
    from controllers.framework.api.types import FRAMEWORKS

    return _complete(_from_cluster(ctx.params, FRAMEWORKS), incomplete)


def complete_job(ctx: Any, incomplete: str) -> list[str]:
    """Return the names of the namespace's training jobs that begin with `incomplete`."""
    from controllers.training.kinds import KINDS

    return _complete(_from_cluster(ctx.params, *(kind.resource for kind in KINDS)), incomplete)
