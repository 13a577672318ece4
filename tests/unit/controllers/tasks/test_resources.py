"""Quotas as plugins use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from controllers.tasks.api.errors import BadPlugin, UnknownResource
from controllers.tasks.api.resources import (
    AllocationStatus,
    ResourceConstraint,
    ResourceConstraintsSpec,
    ResourceNamespace,
)
from controllers.tasks.resources import QuotaResourceManager, Scope, declare_quotas, resource_manager
from scheduler.quota.ledger import QuotaLedger
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import Listing, Op, OwnershipLost, SessionSpec
from store.schema.keys import Keys
from store.schema.quota import QuotaLimit
from store.schema.records import encode
from tests.support.waiting import background

KEYS = Keys()
PREFIX = ResourceNamespace("main:http")
POOL = ResourceNamespace("pool")
GRANTED, EXHAUSTED = AllocationStatus.GRANTED, AllocationStatus.EXHAUSTED
EXCEEDED = AllocationStatus.NAMESPACE_QUOTA_EXCEEDED


@asynccontextmanager
async def a_ledger(store: EmbeddedStore, units: int = 3) -> AsyncIterator[QuotaLedger]:
    """A running ledger over a store with one resource."""
    await declare_quotas(store, KEYS, {PREFIX.create_sub_namespace(POOL): units})
    ledger = QuotaLedger(store, KEYS)
    async with background(ledger.run()):
        await ledger.view.synced()
        yield ledger
    await store.close()


def manager(ledger: QuotaLedger, execution: str, fence: Sequence[Op] = (), **scope: str) -> QuotaResourceManager:
    return QuotaResourceManager(ledger, PREFIX, Scope(execution=execution, **scope), fence)  # type: ignore[arg-type]


def constrained(*, project: int | None = None, namespace: int | None = None) -> ResourceConstraintsSpec:
    return ResourceConstraintsSpec(
        None if project is None else ResourceConstraint(project),
        None if namespace is None else ResourceConstraint(namespace),
    )


async def test_a_full_resource_is_exhausted_and_a_held_token_is_granted_again() -> None:
    """Tokens of different executions may have the same name."""
    async with a_ledger(EmbeddedStore()) as ledger:
        managers = [manager(ledger, f"e{number}") for number in range(4)]
        found = [await each.allocate_resource(POOL, "t") for each in managers]
        assert found == [GRANTED, GRANTED, GRANTED, EXHAUSTED]
        assert await managers[0].allocate_resource(POOL, "t") is GRANTED
        assert managers[3].waits["main:http:pool"].used == 3


async def test_a_released_unit_goes_to_the_next_ticket_and_wakes_its_execution() -> None:
    async with a_ledger(EmbeddedStore(), units=1) as ledger:
        woken: list[str] = []
        ledger.on_granted = woken.append
        first, second = manager(ledger, "first"), manager(ledger, "second")
        await first.allocate_resource(POOL, "t")
        assert await second.allocate_resource(POOL, "t") is EXHAUSTED
        await first.release_resource(POOL, "t")
        assert woken == ["second"]
        assert [name for name, _ in ledger.held("second")] == ["main:http:pool"]
        assert await second.allocate_resource(POOL, "t") is GRANTED


async def test_a_constraint_of_the_namespace_says_so_and_binds_no_other() -> None:
    """The refusal names the scope and its usage; a project is not counted with one whose name begins alike."""
    async with a_ledger(EmbeddedStore()) as ledger:
        held = manager(ledger, "e1", project="a", domain="ns1")
        assert await held.allocate_resource(POOL, "t", constrained(namespace=1)) is GRANTED
        refused = manager(ledger, "e2", project="a", domain="ns1")
        assert await refused.allocate_resource(POOL, "t", constrained(namespace=1)) is EXCEEDED
        wait = refused.waits["main:http:pool"]
        assert (wait.scope, wait.used, wait.limit) == ("namespace", 1, 1)
        assert await refused.allocate_resource(POOL, "other", constrained(project=1)) is EXCEEDED
        other = manager(ledger, "e3", project="ab", domain="ns1")
        assert await other.allocate_resource(POOL, "t", constrained(project=1, namespace=1)) is GRANTED


async def test_an_unknown_resource_is_an_error_and_an_absent_token_is_not() -> None:
    async with a_ledger(EmbeddedStore()) as ledger:
        plugin = manager(ledger, "e")
        with pytest.raises(UnknownResource, match="main:http:nothing has no quota"):
            await plugin.allocate_resource(ResourceNamespace("nothing"), "t")
        await plugin.release_resource(POOL, "never allocated")


class SilentStore(EmbeddedStore):
    """Reports no change to a watch."""

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_limit_that_the_view_does_not_show_yet_counts() -> None:
    store = SilentStore()
    async with a_ledger(store) as ledger:
        await store.txn([ops.put(KEYS.quota_limit("main:http:late"), encode(QuotaLimit(units=1)))])
        assert await manager(ledger, "e").allocate_resource(ResourceNamespace("late"), "t") is GRANTED


async def test_an_engine_that_has_lost_the_execution_gets_and_returns_nothing() -> None:
    """The fence is part of both transactions."""
    store = EmbeddedStore()
    async with a_ledger(store) as ledger:
        session = await store.create_session(SessionSpec("engine"))
        await store.txn([ops.lock("owner", b"", session.id)])
        plugin = manager(ledger, "e", fence=[ops.check_session("owner", session.id)])
        assert await plugin.allocate_resource(POOL, "t") is GRANTED
        await store.destroy_session(session.id)
        with pytest.raises(OwnershipLost):
            await plugin.release_resource(POOL, "t")
        with pytest.raises(OwnershipLost):
            await plugin.allocate_resource(POOL, "other")
        assert len(ledger.held("e")) == 1


async def test_a_limit_that_operators_have_changed_is_kept() -> None:
    store = EmbeddedStore()
    async with a_ledger(store, units=1) as ledger:
        await declare_quotas(store, KEYS, {PREFIX.create_sub_namespace(POOL): 7})
        assert await manager(ledger, "e1").allocate_resource(POOL, "t") is GRANTED
        assert await manager(ledger, "e2").allocate_resource(POOL, "t") is EXHAUSTED
        with pytest.raises(BadPlugin, match="can't name a resource"):
            await declare_quotas(store, KEYS, {ResourceNamespace("a/b"): 7})


async def test_everything_is_granted_only_where_that_is_configured_by_name() -> None:
    async with a_ledger(EmbeddedStore(), units=1) as ledger:
        noop = resource_manager("noop", ledger, PREFIX, Scope(execution="e"), ())
        assert [await noop.allocate_resource(POOL, token) for token in "abc"] == [GRANTED] * 3
        assert resource_manager("quota", ledger, PREFIX, Scope(execution="e"), ()).get_id() == "quota"
        with pytest.raises(BadPlugin, match="no resource manager ''"):
            resource_manager("", ledger, PREFIX, Scope(execution="e"), ())
