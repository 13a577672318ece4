"""The states of one Framework as they come: a list, then a watch of that one name.

The model: `follow` is one attempt; it ends with an error, or when the server ends the watch, and is then called again.
What it learned stays: the next one takes the watch up where the last one was cut, and lists again only when the server
has forgotten that point. Thousands of barriers may follow one Framework, so each asks for the object as rarely as it
can.

Where lists and watches are forbidden but a GET is not, states come from a GET per interval, with a jitter. That the
Framework does not exist is believed only to a GET, which the server answers with quorum.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from controllers.framework.constants import FRAMEWORKS
from store.kube.api import KubeApi
from store.kube.errors import Expired, Forbidden, NotFound
from store.kube.objects import Object, resource_version_of

MIN_WATCH, MAX_WATCH = 300.0, 600.0  # seconds that a watch is asked for; the servers' load is spread so

Show = Callable[[Object], bool]


class FrameworkSource:
    """Follows the Framework `name`. `interval`: seconds between two GETs, where it must be GETs."""

    def __init__(self, api: KubeApi, namespace: str, name: str, *, interval: float, rng: random.Random) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self._interval, self._rng = interval, rng
        self._version = ""
        self._may_watch = True

    async def get(self) -> Object:
        """Its state now. Raises `KubeError`; `NotFound` when it does not exist."""
        return await self._api.get(FRAMEWORKS, self._name, self._namespace)

    async def follow(self, show: Show) -> None:
        """Call `show` with each state, from the present one on, until it returns true. May return earlier, when the
        server ended the watch or forgot where it was. Raises `KubeError`."""
        if not self._may_watch:
            await self._poll(show)
            return
        try:
            await self._watch(show)
        except Expired:
            self._version = ""
        except NotFound:
            self._version = ""
            show(await self.get())  # which decides
        except Forbidden:
            state = await self.get()  # may be forbidden, too; then that is what we may not
            self._may_watch = False
            show(state)

    async def _watch(self, show: Show) -> None:
        name = f"metadata.name={self._name}"
        if not self._version:
            page = await self._api.list(FRAMEWORKS, self._namespace, field_selector=name)
            if not page.items:
                raise NotFound("the list is empty")
            if show(page.items[0]):
                return
            self._version = page.resource_version
        timeout = self._rng.uniform(MIN_WATCH, MAX_WATCH)
        async with self._api.watch(
            FRAMEWORKS, self._namespace, resource_version=self._version, field_selector=name, timeout=timeout
        ) as events:
            async for event in events:
                if event.type == "DELETED":
                    raise NotFound("the Framework was deleted")
                if event.type != "BOOKMARK" and show(event.object):
                    return
                self._version = resource_version_of(event.object)

    async def _poll(self, show: Show) -> None:
        while True:
            if show(await self.get()):
                return
            await asyncio.sleep(self._interval * self._rng.uniform(0.5, 1.5))
