"""The ledger: decisions in the caller's transaction, and what follows from changes by other processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from scheduler.quota.draft import Admission, Draft, Request
from scheduler.quota.ledger import QuotaLedger
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import Op, TxnConflict
from store.schema.keys import Keys
from store.schema.quota import QuotaGrant, QuotaLimit, Rate
from store.schema.records import encode
from tests.support.waiting import background, until

KEYS = Keys()


class Fleet:
    """A store, and the ledgers over it."""

    def __init__(self) -> None:
        self.store = EmbeddedStore()
        self._stack = AsyncExitStack()

    async def limit(self, resource: str, limit: QuotaLimit | int) -> None:
        limit = limit if isinstance(limit, QuotaLimit) else QuotaLimit(units=limit)
        await self.store.put(KEYS.quota_limit(resource), encode(limit))

    async def ledger(self, mine: Callable[[str], bool] = lambda execution: True) -> QuotaLedger:
        ledger = QuotaLedger(self.store, KEYS, mine=mine)
        await self._stack.enter_async_context(running(ledger))
        return ledger

    async def keys(self, kind: str) -> list[str]:
        return [key for key in await self.store.keys(KEYS.quotas) if f"/{kind}/" in key]

    async def close(self) -> None:
        await self._stack.aclose()
        await self.store.close()


@asynccontextmanager
async def running(ledger: QuotaLedger) -> AsyncIterator[None]:
    async with background(ledger.run()):
        await ledger.view.synced()
        yield


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    yield made
    await made.close()


def ask(execution: str, *resources: str, units: int = 1) -> list[Request]:
    names = resources or ("gpu",)
    return [Request(resource=name, token=execution, execution=execution, units=units) for name in names]


async def test_the_callers_operations_and_the_grant_are_one_transaction(fleet: Fleet) -> None:
    """If the caller's own condition does not hold, nothing is granted, and the caller gets the conflict."""
    await fleet.limit("gpu", 1)
    ledger = await fleet.ledger()
    await fleet.store.put("state", b"of another owner")

    def change(draft: Draft) -> Sequence[Op]:
        assert draft.admit(ask("e")).granted
        return [ops.cas("state", b"held", 0)]

    with pytest.raises(TxnConflict) as caught:
        await ledger.transact(change)
    assert caught.value.op_index == 0
    assert await fleet.keys("grants") == []
    assert (await ledger.admit(ask("other"))).granted


async def test_changes_that_wait_together_share_a_transaction(fleet: Fleet) -> None:
    """The head is replaced once for all of them, and a change that raises is its caller's alone."""
    await fleet.limit("gpu", 20)
    ledger = await fleet.ledger()

    def broken(draft: Draft) -> Sequence[Op]:
        draft.admit(ask("broken"))
        raise ValueError("a defect")

    outcomes = await asyncio.gather(
        *(ledger.admit(ask(f"e{number}")) for number in range(20)), ledger.transact(broken), return_exceptions=True
    )
    assert [isinstance(outcome, Admission) and outcome.granted for outcome in outcomes] == [True] * 20 + [False]
    assert (ledger.transactions, ledger.changes, len(await fleet.keys("grants"))) == (1, 20, 20)


async def test_units_are_handed_over_before_new_requests_are_written(fleet: Fleet) -> None:
    """A release, and the holder's next change, do not wait behind a burst of requests; these still have their share."""
    await fleet.limit("gpu", 1)
    ledger = await fleet.ledger()
    await ledger.admit(ask("holder"))
    await ledger.admit(ask("next"))
    burst = [asyncio.create_task(ledger.admit(ask(f"e{number:02}"))) for number in range(60)]
    await asyncio.sleep(0)
    before = ledger.transactions
    await ledger.release("holder")
    assert ledger.held("next")
    assert ledger.transactions <= before + 2
    assert any(ledger.waiting(f"e{number:02}") for number in range(60))
    assert not ledger.waiting("e59")
    await asyncio.gather(*burst)


async def test_several_resources_are_taken_at_once_or_not_at_all(fleet: Fleet) -> None:
    await fleet.limit("gpu", 1)
    await fleet.limit("net", 1)
    ledger = await fleet.ledger()
    assert (await ledger.admit(ask("holder", "net"))).granted
    refused = await ledger.admit(ask("both", "gpu", "net"))
    assert (refused.granted, list(refused.waits)) == (False, ["net"])
    assert ledger.held("both") == []
    await ledger.release("holder")
    assert sorted(name for name, _ in ledger.held("both")) == ["gpu", "net"]


async def test_an_infeasible_request_is_refused_at_once_and_leaves_no_ticket(fleet: Fleet) -> None:
    await fleet.limit("gpu", 2)
    ledger = await fleet.ledger()
    for requests in (ask("e", units=3), ask("e", "gpu", "typo")):
        found = await ledger.admit(requests)
        assert found.infeasible is not None
        assert found.infeasible.code == "Infeasible"
    assert await fleet.keys("tickets") == []


async def test_a_raised_limit_is_used_without_a_release(fleet: Fleet) -> None:
    """Only the owner of a ticket that fits acts; the other ledger leaves it alone."""
    await fleet.limit("gpu", 1)
    owner, other = await fleet.ledger(), await fleet.ledger(mine=lambda execution: False)
    await owner.admit(ask("first"))
    assert not (await owner.admit(ask("second"))).granted
    woken: list[str] = []
    owner.on_granted = woken.append
    await fleet.limit("gpu", 2)
    await until(lambda: woken == ["second"])
    assert other.transactions == 0


async def test_a_rate_limit_grants_when_it_is_due(fleet: Fleet) -> None:
    await fleet.limit("gpu", QuotaLimit(units=9, rate=Rate(1, 0.05)))
    ledger = await fleet.ledger()
    assert (await ledger.admit(ask("first"))).granted
    refused = await ledger.admit(ask("second"))
    assert refused.waits["gpu"].code == "RateLimited"
    await until(lambda: ledger.held("second"))


async def test_the_units_of_a_dead_engine_are_released_by_the_next_owner(fleet: Fleet) -> None:
    """A holder keeps its unit while no engine handles it. Its next owner sees it, and its release wakes the next."""
    await fleet.limit("gpu", 1)
    first = QuotaLedger(fleet.store, KEYS)
    async with running(first):
        await first.admit(ask("job"))
    second = await fleet.ledger()
    assert not (await second.admit(ask("next"))).granted
    await second.current()
    assert [grant.execution for _, grant in second.held("job")] == ["job"]
    await second.release("job")
    assert second.held("next")


async def test_of_two_ledgers_one_gets_the_last_unit(fleet: Fleet) -> None:
    """The slower one is refused by the store, reads, and waits, although its view showed the unit as free."""
    await fleet.limit("gpu", 1)
    ledgers = [await fleet.ledger() for _ in range(2)]
    found = await asyncio.gather(*(each.admit(ask(f"e{number}")) for number, each in enumerate(ledgers)))
    assert sorted(each.granted for each in found) == [False, True]
    assert len(await fleet.keys("grants")) == len(await fleet.keys("tickets")) == 1


async def test_a_withdrawn_ticket_is_never_granted(fleet: Fleet) -> None:
    """Another engine that still shows the ticket is refused when it grants it."""
    await fleet.limit("gpu", 1)
    one, other = await fleet.ledger(), await fleet.ledger()
    await one.admit(ask("holder"))
    await other.admit(ask("waiter"))
    await until(lambda: one.waiting("waiter"))
    await asyncio.gather(other.release("waiter"), one.release("holder"))
    assert await fleet.keys("grants") == await fleet.keys("tickets") == []


async def test_an_unreadable_holder_stops_grants_and_nothing_else(fleet: Fleet) -> None:
    await fleet.limit("gpu", 2)
    await fleet.limit("net", 2)
    await fleet.store.put(KEYS.quota_grant("gpu", "x"), b"{")
    ledger = await fleet.ledger()
    refused = await ledger.admit(ask("e"))
    assert "grants/x can't be read" in refused.waits["gpu"].message
    assert (await ledger.admit(ask("f", "net"))).granted
    grant = QuotaGrant(token="x", execution="x", order="0")
    await fleet.store.put(KEYS.quota_grant("gpu", "x"), encode(grant))
    await until(lambda: ledger.held("e"))


async def test_a_reason_that_changes_is_reported(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.quota.ledger.REASONS_PAUSE", 0.01)
    await fleet.limit("gpu", QuotaLimit(units=1))
    ledger = await fleet.ledger()
    await ledger.admit(ask("holder"))
    await ledger.admit(ask("waiter"))
    changed: list[str] = []
    ledger.on_reason_changed = changed.append
    await until(lambda: ledger._codes)  # the first reason is known
    assert ledger.waiting("waiter")["gpu"].position == 1
    await fleet.limit("gpu", QuotaLimit(units=2, keys={"default": 1}))
    await until(lambda: changed == ["waiter"])
    assert ledger.waiting("waiter")["gpu"].code == "KeyLimitReached"
