"""The protocol between control loops and the Kubernetes API: a dozen verbs over raw objects.

`store.kube.client.KubeClient` speaks it to an API server. `store.kube.memory.MemoryKube` is an API server in memory
with the same semantics (resource versions, UIDs, preconditions, watches, finalizers, garbage collection), on which
loops are tested in virtual time. One conformance suite holds both to it.
Every verb raises `store.kube.errors.KubeError` and nothing else; every call ends within the client's timeout.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from store.kube.objects import Object
from store.kube.resources import Resource

PatchType = Literal["merge", "strategic", "json"]
Propagation = Literal["Foreground", "Background", "Orphan"]
EventType = Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]


class WatchEvent(NamedTuple):
    """One event of a watch. A BOOKMARK's object carries only its resource version. ERROR events are raised instead."""

    type: str
    object: Object


@dataclass(frozen=True, slots=True)
class Page:
    """One answer to a list. `continue_token`: "" on the last page. `remaining`: how many items follow, if known.

    Each look at `items` may decode anew.
    """

    items: Sequence[Object]
    resource_version: str
    continue_token: str = ""
    remaining: int | None = None


class KubeReader(Protocol):
    """The verbs that change nothing. `namespace` "" means all namespaces for list and watch, and none for cluster
    objects.
    """

    async def get(self, resource: Resource, name: str, namespace: str = "") -> Object:
        """One object, by a quorum read."""

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
        """One page. `resource_version`: "" reads with quorum, "0" takes any cached state, else not older than that.
        `limit` 0: everything in one page. With `continue_token`, `resource_version` must be ""."""

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
        """Events after `resource_version`, bookmarks included, until the server closes at about `timeout` seconds.

        Entering raises what the server answers instead of a stream; the iterator ends at a clean close, raises the
        typed error of an ERROR event (`Expired` for 410), and `Unreachable` when the stream breaks or falls silent.
        """


class KubeApi(KubeReader, Protocol):
    """Verbs on one API server."""

    async def create(
        self, resource: Resource, body: Object, namespace: str = "", *, name: str = "", subresource: str = ""
    ) -> Object:
        """The object as stored. `AlreadyExists` when its name is taken.

        With `name` and `subresource`, post to that part of an existing object: a pod's `binding` or `eviction`, a
        service account's `token`; the answer is what the server answers.
        """

    async def replace(self, resource: Resource, body: Object, *, subresource: str = "") -> Object:
        """Write the object whole, under the name in it; its resource version is a precondition when present."""

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
        """A patch; `metadata.resourceVersion` or `metadata.uid` in a merge patch are preconditions (`Conflict`,
        `Invalid` for another UID)."""

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
        """Accept the deletion; the object may exist for longer. `uid`: refuse (`Conflict`) a successor of that name.
        `grace_period` in seconds, 0 removes a pod at once."""

    async def served(self, resource: Resource, *, fresh: bool = False) -> bool:
        """Whether the server serves the resource in its version (discovery, cached for a while when it does).

        With `fresh` the server is asked in any case.
        """
