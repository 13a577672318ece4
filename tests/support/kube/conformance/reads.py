"""The guarantees that control loops need when they list and watch through a `KubeApi`; see `kube_conformance`.

Besides `api` and `namespace`, the fixture `forget` is needed: calling it makes the server forget all history. A real
server caches some history for most kinds, but not for Events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from store.kube.api.errors import BadRequest, Expired, KubeError, NotFound, is_too_large_resource_version
from store.kube.api.objects import CONFIG_MAPS, EVENTS, PODS, SERVICES, Resource, name_of, resource_version_of
from store.kube.api.protocol import KubeApi
from tests.support.kube.conformance.writes import config_map, named, pod, take, watching

UNSERVED = Resource("example.org", "v1", "widgets", "Widget")  # which no definition has


async def version_of(api: KubeApi, namespace: str) -> str:
    return (await api.list(CONFIG_MAPS, namespace)).resource_version


class ReadConformance:
    """Lists, pages, selectors, watches, discovery."""

    async def test_selectors(self, api: KubeApi, namespace: str) -> None:
        """Lists are filtered by labels and by fields."""
        for name, labels in {"a": {"app": "x"}, "b": {"app": "y"}, "c": {}}.items():
            await api.create(PODS, pod(name, labels=labels), namespace)

        async def names(**selectors: Any) -> list[str]:
            return [name_of(item) for item in (await api.list(PODS, namespace, **selectors)).items]

        assert await names(label_selector="app=x") == ["a"]
        assert await names(label_selector="app in (x,y),app!=y") == ["a"]
        assert await names(label_selector="!app") == ["c"]
        assert await names(field_selector="metadata.name=b") == ["b"]
        assert await names(field_selector="status.phase=Pending,spec.nodeName=") == ["a", "b", "c"]
        assert await names(field_selector="spec.nodeName=node-x") == []
        with pytest.raises(BadRequest):
            await names(label_selector="a==b==c")
        with pytest.raises(BadRequest):
            await names(field_selector="spec.no=1")

    async def test_pages_show_one_moment(self, api: KubeApi, namespace: str) -> None:
        """All pages together are the list at the time of the first one, whatever is written in between."""
        for name in "abcde":
            await api.create(CONFIG_MAPS, config_map(name), namespace)
        before = {name_of(item) for item in (await api.list(CONFIG_MAPS, namespace)).items}
        page = await api.list(CONFIG_MAPS, namespace, limit=2)
        assert page.remaining == len(before) - 2
        await api.create(CONFIG_MAPS, config_map("z"), namespace)
        await api.delete(CONFIG_MAPS, "e", namespace)
        await api.patch(CONFIG_MAPS, "d", namespace, {"data": {"new": "1"}})
        listed, version = list(page.items), page.resource_version
        while page.continue_token:
            page = await api.list(CONFIG_MAPS, namespace, limit=2, continue_token=page.continue_token)
            assert page.resource_version == version
            listed += page.items
        assert {name_of(item) for item in listed} == before
        assert len(listed) == len(before)
        assert page.remaining is None
        assert not any("new" in (item.get("data") or {}) for item in listed)

    async def test_a_page_token_that_is_none(self, api: KubeApi, namespace: str) -> None:
        """An invalid page token is refused, as is a token together with a resource version."""
        with pytest.raises(BadRequest):
            await api.list(CONFIG_MAPS, namespace, limit=2, continue_token="nonsense")
        for name in "ab":
            await api.create(CONFIG_MAPS, config_map(name), namespace)
        token = (await api.list(CONFIG_MAPS, namespace, limit=1)).continue_token
        with pytest.raises(BadRequest):
            await api.list(CONFIG_MAPS, namespace, limit=1, continue_token=token, resource_version="1")

    async def test_a_list_from_a_cache(self, api: KubeApi, namespace: str) -> None:
        """Version "0" accepts any state, and a given version is a lower bound: the caller's own writes are in it."""
        created = await api.create(CONFIG_MAPS, config_map("mine"), namespace)
        assert (await api.list(CONFIG_MAPS, namespace, resource_version="0")).resource_version
        page = await api.list(CONFIG_MAPS, namespace, resource_version=resource_version_of(created))
        assert "mine" in [name_of(item) for item in page.items]

    async def test_a_watch_reports_every_change(self, api: KubeApi, namespace: str) -> None:
        """All changes after the version, in order, with the object as it was then; a deletion with its last state."""
        version = await version_of(api, namespace)
        await api.create(CONFIG_MAPS, config_map(x="1"), namespace)
        async with watching(api, namespace, version) as watch:
            await api.patch(CONFIG_MAPS, "a", namespace, {"data": {"x": "2"}})
            await api.delete(CONFIG_MAPS, "a", namespace)
            events = await take(watch, 3)
        assert [(event.type, event.object["data"]["x"]) for event in events] == [
            ("ADDED", "1"),
            ("MODIFIED", "2"),
            ("DELETED", "2"),
        ]
        versions = [int(resource_version_of(event.object)) for event in events]
        assert versions == sorted(set(versions))

    async def test_a_watch_with_a_selector(self, api: KubeApi, namespace: str) -> None:
        """An object that begins to match is ADDED, one that ceases to is DELETED, though it exists."""
        created = await api.create(CONFIG_MAPS, config_map(), namespace)
        version = resource_version_of(created)
        async with api.watch(
            CONFIG_MAPS, namespace, resource_version=version, label_selector="app=x", timeout=60
        ) as watch:
            for value in ("x", "y", "x"):
                await api.patch(CONFIG_MAPS, "a", namespace, {"metadata": {"labels": {"app": value}}})
            await api.create(CONFIG_MAPS, config_map("b"), namespace)
            await api.delete(CONFIG_MAPS, "a", namespace)
            assert named(await take(watch, 4)) == [("ADDED", "a"), ("DELETED", "a"), ("ADDED", "a"), ("DELETED", "a")]

    async def test_a_watch_of_one_object(self, api: KubeApi, namespace: str) -> None:
        """A field selector on the name watches one object."""
        version = await version_of(api, namespace)
        async with api.watch(
            CONFIG_MAPS, namespace, resource_version=version, field_selector="metadata.name=b", timeout=60
        ) as watch:
            for name in "abc":
                await api.create(CONFIG_MAPS, config_map(name), namespace)
            await api.delete(CONFIG_MAPS, "b", namespace)
            assert named(await take(watch, 2)) == [("ADDED", "b"), ("DELETED", "b")]

    async def test_a_watch_ends_in_time(self, api: KubeApi, namespace: str) -> None:
        """At its timeout a watch ends without an error, preceded by a bookmark with its position."""
        version = await version_of(api, namespace)
        async with asyncio.timeout(30), api.watch(CONFIG_MAPS, namespace, resource_version=version, timeout=6) as watch:
            events = [event async for event in watch if event.type == "BOOKMARK"]
        assert events
        assert int(resource_version_of(events[-1].object)) >= int(version)

    async def test_a_watch_of_everything(self, api: KubeApi, namespace: str) -> None:
        """Without a namespace, a watch sees all of them."""
        version = await version_of(api, "")
        async with api.watch(
            CONFIG_MAPS, resource_version=version, label_selector=f"in={namespace}", timeout=60
        ) as watch:
            await api.create(CONFIG_MAPS, {"metadata": {"name": "a", "labels": {"in": namespace}}}, namespace)
            assert named(await take(watch, 1)) == [("ADDED", "a")]

    async def test_history_ends(self, api: KubeApi, namespace: str, forget: Callable[[], None]) -> None:
        """A watch from a compacted version is `Expired`, when it is opened or by its first event; so is the next page
        of an older list."""
        version = await version_of(api, namespace)
        for name in "ab":
            await api.create(CONFIG_MAPS, config_map(name), namespace)
        page = await api.list(CONFIG_MAPS, namespace, limit=1)
        await api.create(CONFIG_MAPS, config_map("c"), namespace)
        forget()
        with pytest.raises(Expired):
            async with api.watch(EVENTS, namespace, resource_version=version, timeout=60) as watch:
                await anext(watch)
        with pytest.raises(Expired):
            await api.list(CONFIG_MAPS, namespace, limit=1, continue_token=page.continue_token)

    async def test_a_version_from_the_future(self, api: KubeApi, namespace: str) -> None:
        """A list at a version that the server has not reached is refused as such, not answered with less."""
        future = str(int(await version_of(api, namespace)) + 1_000_000)
        with pytest.raises(KubeError) as caught:
            await api.list(CONFIG_MAPS, namespace, resource_version=future)
        assert is_too_large_resource_version(caught.value)

    async def test_discovery(self, api: KubeApi) -> None:
        """Served kinds are known by resource and version; an operation on another kind raises `NotFound`."""
        assert await api.served(PODS)
        assert await api.served(SERVICES)
        assert not await api.served(UNSERVED)
        with pytest.raises(NotFound):
            await api.list(UNSERVED, "default")
