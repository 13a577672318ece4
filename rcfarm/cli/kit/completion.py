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


def complete_rc(ctx: Any, incomplete: str) -> list[str]:
    """Return the RC ids that begin with `incomplete`."""

    def ids(keys: Keys, names: list[str]) -> Iterable[str]:
        return (keys.split_rc(key).rc for key in names if keys.is_spec(key))

    return _complete(_from_store(ctx.params, lambda keys: keys.rcs, ids), incomplete)


def complete_deleted(ctx: Any, incomplete: str) -> list[str]:
    """Return the ids of deleted RCs that begin with `incomplete`."""

    def ids(keys: Keys, names: list[str]) -> Iterable[str]:
        return map(keys.name_of, names)

    return _complete(_from_store(ctx.params, lambda keys: keys.deleted, ids), incomplete)


def complete_node(ctx: Any, incomplete: str) -> list[str]:
    """Return the node names that begin with `incomplete`."""

    def nodes(keys: Keys, names: list[str]) -> Iterable[str]:
        return (node for node, leaf in map(keys.parse_node, names) if leaf == "spec")

    return _complete(_from_store(ctx.params, lambda keys: keys.nodes, nodes), incomplete)


def complete_farm(ctx: Any, incomplete: str) -> list[str]:
    """Return the names of farms that begin with `incomplete`."""
    return _complete(
        _from_store(ctx.params, lambda keys: keys.farms, lambda keys, names: map(keys.name_of, names)), incomplete
    )


def complete_pod(ctx: Any, incomplete: str) -> list[str]:
    """Return the pods, as NODE/POD, that begin with `incomplete`."""

    def pods(keys: Keys, names: list[str]) -> Iterable[str]:
        return ("/".join(keys.parse_pod(name)) for name in names)

    return _complete(_from_store(ctx.params, lambda keys: keys.intents, pods), incomplete)


def complete_task(ctx: Any, incomplete: str) -> list[str]:
    """Return the ids of executions that begin with `incomplete`."""

    def ids(keys: Keys, names: list[str]) -> Iterable[str]:
        return (keys.parse_task(key).task for key in names if key.endswith("/spec"))

    return _complete(_from_store(ctx.params, lambda keys: keys.tasks, ids), incomplete)


def complete_quota(ctx: Any, incomplete: str) -> list[str]:
    """Return the resources with a limit that begin with `incomplete`."""

    def resources(keys: Keys, names: list[str]) -> Iterable[str]:
        return (keys.parse_quota(key).resource for key in names if key.endswith("/limit"))

    return _complete(_from_store(ctx.params, lambda keys: keys.quotas, resources), incomplete)


def complete_secret(ctx: Any, incomplete: str) -> list[str]:
    """Return the names of secrets that begin with `incomplete`."""

    def secrets(keys: Keys, names: list[str]) -> Iterable[str]:
        return (key.removeprefix(keys.secrets) for key in names)

    return _complete(_from_store(ctx.params, lambda keys: keys.secrets, secrets), incomplete)


def complete_schedule(ctx: Any, incomplete: str) -> list[str]:
    """Return the names of schedules that begin with `incomplete`."""

    def schedules(keys: Keys, names: list[str]) -> Iterable[str]:
        return (keys.parse_schedule(key).schedule for key in names if key.endswith("/spec"))

    return _complete(_from_store(ctx.params, lambda keys: keys.schedules, schedules), incomplete)


def complete_framework(ctx: Any, incomplete: str) -> list[str]:
    """Return the names of the namespace's Frameworks that begin with `incomplete`."""
    from controllers.framework.api.types import FRAMEWORKS

    return _complete(_from_cluster(ctx.params, FRAMEWORKS), incomplete)


def complete_job(ctx: Any, incomplete: str) -> list[str]:
    """Return the names of the namespace's training jobs that begin with `incomplete`."""
    from controllers.training.kinds import KINDS

    return _complete(_from_cluster(ctx.params, *(kind.resource for kind in KINDS)), incomplete)


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
    store = open_store(options)  # its imports, which are most of the time, can't be cut short
    try:
        async with asyncio.timeout(STORE_TIMEOUT):
            return parse(keys, await store.keys(prefix(keys)))
    finally:
        await store.close()


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
