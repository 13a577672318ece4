"""The protocol between control loops and the Kubernetes API: a dozen verbs over raw objects.

`store.kube.client.client.KubeClient` speaks it to an API server. `store.kube.memory.kube.MemoryKube` is an API server
in memory with the same semantics (resource versions, UIDs, preconditions, watches, finalizers, garbage collection), on
which loops are tested in virtual time. One conformance suite checks both. Every verb raises
`store.kube.api.errors.KubeError` and nothing else; every call ends within the client's timeout.

A write may wait: for the client's own rate, for a pause that the server asked for, for a free connection. A fence
checks before all that, and leaves its check (`checked_on_send`) for the transport, which repeats it when there is
nothing left to wait for. It is in a context variable, `before_sending`, because any number of other `KubeApi`s may
stand between the two.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from store.kube.api.objects import Object, Resource

PatchType = Literal["merge", "strategic", "json"]
Propagation = Literal["Foreground", "Background", "Orphan"]
Check = Callable[[], None]  # raises when nothing may be sent
before_sending: ContextVar[Check | None] = ContextVar("before sending", default=None)


class WatchEvent(NamedTuple):
    """One event of a watch. `type`: ADDED, MODIFIED, DELETED, or BOOKMARK, whose object carries only its resource
    version. ERROR events are raised instead."""

    type: str
    object: Object


@dataclass(frozen=True, slots=True)
class Page:
    """One answer to a list. `continue_token`: "" on the last page. `remaining`: how many items follow, if known.

    Each access to `items` may decode the objects again.
    """

    items: Sequence[Object]
    resource_version: str
    continue_token: str = ""
    remaining: int | None = None


class KubeReader(Protocol):
    """The read-only verbs. `namespace` "" means all namespaces for list and watch, and none for cluster
    objects.
    """

    async def get(self, resource: Resource, name: str, namespace: str = "") -> Object:
        """Return one object, by a quorum read."""

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
        """Return a page. `resource_version`: "" reads with quorum, "0" takes any cached state, else not older than it.
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
        """Watch events after `resource_version`, with bookmarks, until the server closes at about `timeout` seconds.

        Entering raises the server's error if it answers no stream; the iterator ends at a clean close, raises the
        typed error of an ERROR event (`Expired` for 410), and `Unreachable` when the stream breaks or falls silent.
        """


class KubeApi(KubeReader, Protocol):
    """Verbs on one API server."""

    async def create(
        self, resource: Resource, body: Object, namespace: str = "", *, name: str = "", subresource: str = ""
    ) -> Object:
        """Create an object. Return it as stored. Raises `AlreadyExists` when its name is taken.

        With `name` and `subresource`, post to that part of an existing object: a pod's `binding` or `eviction`, a
        service account's `token`; the server's answer is returned.
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
        """Patch an object; a merge patch's `metadata.resourceVersion` and `metadata.uid` are preconditions (`Conflict`,
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
        """Return whether the server serves the resource in its version (discovery; a positive answer is cached).

        With `fresh` the server is asked in any case.
        """


@contextmanager
def checked_on_send(check: Check) -> Iterator[None]:
    """Run the check now, and before each request that is sent within the block."""
    check()
    token = before_sending.set(check)
    try:
        yield
    finally:
        before_sending.reset(token)
