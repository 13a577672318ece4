"""Informers on a real control plane, in real time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from store.kube.api import KubeApi
from store.kube.informer import Informer
from store.kube.objects import Object, key_of, resource_version_of, uid_of
from store.kube.resources import Resource
from tests.support.control_plane import ControlPlane
from tests.support.informers import Told, running


async def until(condition: Callable[[], object], within: float = 60.0) -> None:
    """Wait for it, for so many seconds at most."""
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.02)


@dataclass
class Watched:
    """An informer and what its handler was told."""

    informer: Informer
    told: Told

    def shows(self, plane: ControlPlane, namespace: str, plural: str) -> bool:
        """Whether cache and handler have, legally, what the server has."""
        items = plane.request("GET", f"/api/v1/namespaces/{namespace}/{plural}")["items"]
        exists = {key_of(obj): _identity(obj) for obj in items}
        assert self.told.violations == self.told.regressions == []
        cached = {key_of(obj): _identity(obj) for obj in self.informer.items()}
        assert cached == {key: _identity(obj) for key, obj in self.told.view.items()}
        return cached == exists


@asynccontextmanager
async def watching(api: KubeApi, resource: Resource, namespace: str, **options: Any) -> AsyncIterator[Watched]:
    """A running informer that has listed, with a handler that checks what it is told."""
    informer, told = Informer(api, resource, namespace=namespace, **options), Told()
    informer.add_handler(told)
    async with running(informer):
        await asyncio.wait_for(informer.synced(), 60.0)
        yield Watched(informer, told)


def _identity(obj: Object) -> tuple[str, str]:
    return uid_of(obj), resource_version_of(obj)
