"""Informers on a real control plane, in real time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from store.kube.api.objects import Object, Resource, key_of, resource_version_of, uid_of
from store.kube.api.protocol import KubeApi
from store.kube.informer.informer import Informer
from tests.support.kube.control_plane import ControlPlane
from tests.support.kube.informers.checked import RecordingHandler, running


@dataclass
class Watched:
    """An informer and its handler."""

    informer: Informer
    recorded: RecordingHandler

    def shows(self, plane: ControlPlane, namespace: str, plural: str) -> bool:
        """Return whether cache and handler have the server's state, reached by legal steps."""
        items = plane.request("GET", f"/api/v1/namespaces/{namespace}/{plural}")["items"]
        exists = {key_of(obj): _identity(obj) for obj in items}
        assert self.recorded.violations == self.recorded.regressions == []
        cached = {key_of(obj): _identity(obj) for obj in self.informer.items()}
        assert cached == {key: _identity(obj) for key, obj in self.recorded.view.items()}
        return cached == exists


@asynccontextmanager
async def watching(api: KubeApi, resource: Resource, namespace: str, **options: Any) -> AsyncIterator[Watched]:
    """Yield a running informer that has listed, with a handler that checks its events."""
    informer, recorded = Informer(api, resource, namespace=namespace, **options), RecordingHandler()
    informer.add_handler(recorded)
    async with running(informer):
        await asyncio.wait_for(informer.synced(), 60.0)
        yield Watched(informer, recorded)


def _identity(obj: Object) -> tuple[str, str]:
    return uid_of(obj), resource_version_of(obj)
