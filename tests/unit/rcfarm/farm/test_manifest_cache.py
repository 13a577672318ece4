"""Manifests by digest: read together, verified, kept; and no request is ever left waiting."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from rcfarm.farm.manifests import WHOLE_FOLDER, Manifests, ManifestUnusable
from store.kv.protocol import Denied, StoreError, Unavailable
from store.schema.keys import Keys
from store.schema.manifest import digest
from tests.support.consul.scripted_store import ScriptedStore
from tests.support.farm.fleet import manifest

pytestmark = pytest.mark.looptime

KEYS = Keys()


@pytest.fixture
def manifests(store: ScriptedStore) -> Manifests:
    return Manifests(store, KEYS)


async def stored(store: ScriptedStore, count: int) -> list[str]:
    """Store `count` new manifests, with pod ids pod-0, pod-1, … Return their digests."""
    raws = [manifest(f"pod-{number}") for number in range(count)]
    for raw in raws:
        await store.inner.put(KEYS.manifest(digest(raw)), raw)
    return [digest(raw) for raw in raws]


async def test_requests_that_come_together_are_read_together(store: ScriptedStore, manifests: Manifests) -> None:
    """A hundred requests at once cost two transactions, and each gets its own manifest."""
    digests = await stored(store, 100)
    found = await asyncio.gather(*map(manifests.get, digests))
    assert [one.id for one in found] == [f"pod-{number}" for number in range(100)]
    assert len(store.transactions) == 2


async def test_many_missing_ones_are_read_with_one_listing(store: ScriptedStore, manifests: Manifests) -> None:
    """At the start of a farm the whole folder comes in one go."""
    digests = await stored(store, WHOLE_FOLDER)
    await asyncio.gather(*map(manifests.get, digests))
    assert store.calls == {"list": 1}


async def test_expected_ones_are_read_with_the_next_request(store: ScriptedStore, manifests: Manifests) -> None:
    """A farm that asks for one manifest after the other reads all of them once it knows them."""
    digests = await stored(store, WHOLE_FOLDER)
    manifests.expect(digests)
    for number, one in enumerate(digests):
        assert (await manifests.get(one)).id == f"pod-{number}"
    assert store.calls == {"list": 1}


async def test_requests_during_a_read_share_the_next_one(store: ScriptedStore, manifests: Manifests) -> None:
    """However requests are spread over the time of a read, they cost one further read."""
    digests = await stored(store, 20)
    store.keep_back("txn")
    requests = []
    for one in digests:
        requests.append(asyncio.create_task(manifests.get(one)))
        await asyncio.sleep(0.001)
    store.deliver("txn")
    assert [one.id for one in await asyncio.gather(*requests)] == [f"pod-{number}" for number in range(20)]
    assert len(store.transactions) == 2


async def test_a_manifest_is_read_once(store: ScriptedStore, manifests: Manifests) -> None:
    """They never change, so a second request costs nothing, until the manifest was dropped."""
    kept, dropped = await stored(store, 2)
    for _ in range(3):
        await manifests.get(kept)
        await manifests.get(dropped)
    assert len(store.transactions) == 2
    manifests.keep([kept, "never read"])
    await manifests.get(kept)
    assert len(store.transactions) == 2
    await manifests.get(dropped)
    assert len(store.transactions) == 3


async def test_a_missing_one_is_named_and_harms_no_other(store: ScriptedStore, manifests: Manifests) -> None:
    """The error says which manifest is missing and what to do; once it is there it is found."""
    raw = manifest("late")
    [good] = await stored(store, 1)
    found, missing = await asyncio.gather(manifests.get(good), manifests.get(digest(raw)), return_exceptions=True)
    assert isinstance(missing, ManifestUnusable)
    assert digest(raw)[:12] in str(missing)
    assert "give the RC its manifest again" in str(missing)
    assert not isinstance(found, BaseException)
    await store.put(KEYS.manifest(digest(raw)), raw)
    assert (await manifests.get(digest(raw))).id == "late"


async def test_a_damaged_one_is_named_and_can_be_put_right(store: ScriptedStore, manifests: Manifests) -> None:
    """Bytes of another digest are refused, and not remembered: the right ones may be written under the same name."""
    raw = manifest("web")
    await store.put(KEYS.manifest(digest(raw)), b"something else")
    with pytest.raises(ManifestUnusable, match=f"{digest(raw)[:12]} is damaged"):
        await manifests.get(digest(raw))
    await store.put(KEYS.manifest(digest(raw)), raw)
    assert (await manifests.get(digest(raw))).id == "web"


async def test_a_malformed_one_is_explained_and_remembered(store: ScriptedStore, manifests: Manifests) -> None:
    """Each request gets an error of its own with that text, from one read, so that no traceback grows."""
    raw = b'{"id": "web", "launchables": {}}'
    await store.put(KEYS.manifest(digest(raw)), raw)
    errors = set()
    for _ in range(3):
        with pytest.raises(ManifestUnusable, match="launchables: at least one is needed") as caught:
            await manifests.get(digest(raw))
        errors.add(caught.value)
    assert (len(errors), len(store.transactions)) == (3, 1)


@pytest.mark.parametrize("error", [Unavailable("away"), Denied("no")])
async def test_a_failing_store_fails_every_waiting_request(
    store: ScriptedStore, manifests: Manifests, error: StoreError
) -> None:
    """Each of the requests of one read gets the error; later ones are read again."""
    digests = await stored(store, 3)
    store.faults["txn"] = error
    outcomes = await asyncio.gather(*map(manifests.get, digests), return_exceptions=True)
    assert outcomes == [error] * 3
    store.faults.clear()
    assert [one.id for one in await asyncio.gather(*map(manifests.get, digests))] == ["pod-0", "pod-1", "pod-2"]


@pytest.mark.parametrize("turns", [1, 2, 4])
async def test_the_end_of_the_reader_hangs_nobody(store: ScriptedStore, manifests: Manifests, turns: int) -> None:
    """If the reader is cancelled, at any moment, waiting and later requests get an error or their manifest."""
    digests = await stored(store, 3)
    store.keep_back("txn")
    leader, *others = [asyncio.create_task(manifests.get(one)) for one in digests]
    for _ in range(turns):
        await asyncio.sleep(0)
    leader.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leader
    async with asyncio.timeout(1.0):
        for outcome in await asyncio.gather(*others, return_exceptions=True):
            assert isinstance(outcome, Unavailable)
        store.deliver("txn")
        found = await asyncio.gather(*map(manifests.get, digests))
    assert [one.id for one in found] == ["pod-0", "pod-1", "pod-2"]


async def test_the_end_of_a_waiter_harms_no_other(store: ScriptedStore, manifests: Manifests) -> None:
    """The cancellation of a request that only waited does not affect the read."""
    digests = await stored(store, 3)
    store.keep_back("txn")
    tasks = [asyncio.create_task(manifests.get(one)) for one in digests]
    await store.kept("txn")
    tasks[1].cancel()
    store.deliver("txn")
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(outcomes[1], asyncio.CancelledError)
    assert [one.id for one in (outcomes[0], outcomes[2]) if not isinstance(one, BaseException)] == ["pod-0", "pod-2"]


async def test_other_tasks_run_while_many_are_parsed(store: ScriptedStore, manifests: Manifests) -> None:
    """Reading thousands of manifests does not hold up the loop, in which leases are renewed."""
    digests = await stored(store, WHOLE_FOLDER)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await asyncio.gather(*map(manifests.get, digests))
    counting.cancel()
    assert turns > WHOLE_FOLDER / 64
