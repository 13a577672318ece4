"""Writes that only a leader can send.

Each write is checked twice: when the caller requests it, and when it is sent (`checked_on_send`), maybe
much later.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from store.kube.api.objects import Object, Resource
from store.kube.api.protocol import KubeApi, Page, PatchType, Propagation, WatchEvent, checked_on_send
from store.kube.leaderelection.election import Election


class FencedApi:
    """A `KubeApi` that writes only while `election` is won; every other write raises `LeadershipLost`."""

    def __init__(self, api: KubeApi, election: Election) -> None:
        self._api, self._election = api, election

    async def get(self, resource: Resource, name: str, namespace: str = "") -> Object:
        return await self._api.get(resource, name, namespace)

    async def list(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        label_selector: str = "",
        field_selector: str = "",
        resource_version: str = "",
        limit: int = 0,
        continue_token: str = "",
    ) -> Page:
        return await self._api.list(
            resource,
            namespace,
            label_selector=label_selector,
            field_selector=field_selector,
            resource_version=resource_version,
            limit=limit,
            continue_token=continue_token,
        )

    def watch(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
        timeout: float,
    ) -> AbstractAsyncContextManager[AsyncIterator[WatchEvent]]:
        return self._api.watch(
            resource,
            namespace,
            resource_version=resource_version,
            label_selector=label_selector,
            field_selector=field_selector,
            timeout=timeout,
        )

    async def create(
        self, resource: Resource, body: Object, namespace: str = "", *, name: str = "", subresource: str = ""
    ) -> Object:
        with checked_on_send(self._election.check):
            return await self._api.create(resource, body, namespace, name=name, subresource=subresource)

    async def replace(self, resource: Resource, body: Object, *, subresource: str = "") -> Object:
        with checked_on_send(self._election.check):
            return await self._api.replace(resource, body, subresource=subresource)

    async def patch(
        self,
        resource: Resource,
        name: str,
        namespace: str,
        patch: Object | Sequence[Any],
        *,
        patch_type: PatchType = "merge",
        subresource: str = "",
    ) -> Object:
        with checked_on_send(self._election.check):
            return await self._api.patch(
                resource, name, namespace, patch, patch_type=patch_type, subresource=subresource
            )

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str = "",
        *,
        uid: str = "",
        grace_period: int | None = None,
        propagation: Propagation | None = None,
    ) -> None:
        with checked_on_send(self._election.check):
            await self._api.delete(
                resource, name, namespace, uid=uid, grace_period=grace_period, propagation=propagation
            )

    async def served(self, resource: Resource, *, fresh: bool = False) -> bool:
        return await self._api.served(resource, fresh=fresh)
