"""The probes of a real farm over the embedded store: readiness, progress, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from rcfarm.roles.farm import STALL_AFTER, FarmProbe
from rcfarm.telemetry.prometheus import MeteredStore
from scheduler.pool.scheduler import PoolScheduler
from store.embedded.store import EmbeddedStore
from store.kv import ops
from store.kv.protocol import Listing, TxnConflict, Unavailable
from store.schema.keys import Keys
from store.schema.records import Brake, encode
from tests.support.farm.fleet import Fleet, running_farm
from tests.support.farm.stage import Stage
from tests.support.waiting import background, until


class FlakyStore(EmbeddedStore):
    """`away`: reads and watches fail; the session is kept."""

    away = False

    async def watch(self, prefix: str, index: int, wait: float) -> Listing:
        if self.away:
            raise Unavailable("connection refused")
        return await super().watch(prefix, index, min(wait, 0.05))


@pytest.fixture
async def store() -> AsyncIterator[FlakyStore]:
    embedded = FlakyStore(None)
    yield embedded
    await embedded.close()


def failing(probe: FarmProbe) -> dict[str, str]:
    return {condition.name: condition.reason for condition in probe.conditions() if not condition.holds}


async def test_a_farm_is_ready_once_it_is_a_member(store: FlakyStore, keys: Keys, fleet: Fleet) -> None:
    """Until its views, its session and its membership are there, each is named as missing; then none is."""
    async with running_farm(store, keys) as farm:
        probe = FarmProbe(farm)
        assert failing(probe) == {
            "store": "farms has not been read yet",
            "session": "seeking: no session yet",
            "member": "farm-a is not among the live farms",
        }
        await fleet.until(lambda: not failing(probe))
        assert [condition.reason for condition in probe.conditions()] == [""] * 3, "nothing missing"


async def test_a_store_that_goes_away_is_named_and_forgiven(store: FlakyStore, keys: Keys, fleet: Fleet) -> None:
    """While views can't be read the farm is not ready, and reports which and why; afterwards it is ready again."""
    async with running_farm(store, keys) as farm:
        probe = FarmProbe(farm)
        await fleet.until(lambda: not failing(probe))
        store.away = True
        await until(lambda: failing(probe).get("store", "").endswith("can't be read: connection refused"))
        assert probe.stalled() == ""
        store.away = False
        await until(lambda: not failing(probe))


async def test_the_views_of_the_scheduler_count(store: FlakyStore, keys: Keys) -> None:
    """A reservation that can't be read is in the metrics of a farm that schedules by reserved capacity."""
    await store.put(keys.reservations("n1"), b"{")
    registry = CollectorRegistry()
    async with running_farm(store, keys, make_scheduler=partial(PoolScheduler, store, keys)) as farm:
        registry.register(FarmProbe(farm))
        await until(lambda: registry.get_sample_value("rcfarm_view_undecodable", {"view": "reservations"}) == 1)


async def test_a_lost_session_makes_the_farm_unready(store: FlakyStore, keys: Keys, fleet: Fleet) -> None:
    """A session that the store has ended is replaced; in between the farm is not ready."""
    async with running_farm(store, keys) as farm:
        probe = FarmProbe(farm)
        await fleet.until(lambda: not failing(probe))
        session = farm.keeper.session_id
        assert session is not None
        await store.destroy_session(session)
        await until(lambda: "member" in failing(probe))
        await until(lambda: not failing(probe))
        assert farm.keeper.session_id != session


async def test_metrics_show_what_the_farm_owns_and_did(store: FlakyStore, keys: Keys, fleet: Fleet) -> None:
    """RCs by state, claims, commits, nodes, views, session and brake are read from the farm at each scrape."""
    await fleet.add_nodes(["n1", "n2"], {"pool": "web"})
    await fleet.create("web", 2, node_selector="pool=web")
    await fleet.create("none", 1, node_selector="pool=none")
    await store.put(keys.spec("bad"), b"{")
    registry = CollectorRegistry()
    async with running_farm(store, keys) as farm:
        registry.register(FarmProbe(farm))
        await fleet.until_placed("web", ["n1", "n2"])
        await fleet.until_state("none", "short")
        await fleet.until_state("bad", "quarantined")

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"rcfarm_{name}", labels)

        await until(lambda: value("rcs", state="quarantined") == value("rcs", state="short") == 1)
        assert value("owned_rcs") == value("known_rcs") == 3
        assert value("free_rcs") == 0
        assert sum(value("rcs", state=state) or 0 for state in ("converged", "progressing")) == 1
        assert value("claims_total") == 3
        assert (value("commit_units_total") or 0) >= 2
        assert value("nodes", state="live") == 2
        assert value("session_held") == value("farms") == 1
        assert value("view_undecodable", view="shards") == 1
        assert value("view_failing", view="nodes") == 0
        assert value("brake") == 0
        await store.txn([ops.put(keys.brake, encode(Brake(farm="x", since="", code="no_rcs_found", message="m")))])
        await until(lambda: value("brake") == 1)


async def test_work_that_hangs_is_a_stall(store: FlakyStore, keys: Keys, fleet: Fleet) -> None:
    """When RCs wait and none is finished for a minute, the farm reports a stall, which silences the watchdog."""
    now, stage = 0.0, Stage()
    stage.gates["web"] = asyncio.Event()
    async with running_farm(store, keys, make_scheduler=stage.scheduler) as farm:
        probe = FarmProbe(farm, clock=lambda: now)
        await fleet.add_nodes(["n1"], {})
        await fleet.create("web", 1)
        await until(lambda: farm.term and farm.term.queue.is_busy)
        assert probe.stalled() == ""
        now = STALL_AFTER + 1
        assert probe.stalled() == f"RCs are queued, but none was reconciled for {now:.0f} s"
        stage.gates["web"].set()
        await fleet.until_placed("web", ["n1"])
        await until(lambda: probe.stalled() == "")


async def test_a_farm_that_looks_at_nothing_is_a_stall(store: FlakyStore, keys: Keys, fleet: Fleet) -> None:
    """Each RC is reconciled once per resync interval; a farm that has stopped doing so is not alive."""
    now = 0.0
    async with running_farm(store, keys) as farm:
        probe = FarmProbe(farm, clock=lambda: now)
        await fleet.create("web", 0)
        await fleet.until_state("web", "converged")
        await until(lambda: farm.term and not farm.term.queue.is_busy)
        assert probe.stalled() == ""
        now = 2 * farm.settings.resync_interval
        assert probe.stalled() == ""
        now += STALL_AFTER + 1
        assert "no RC was reconciled for" in probe.stalled()


async def test_a_metered_store_counts_calls_and_refusals(store: FlakyStore) -> None:
    """Calls by verb, errors by kind, and the connections that calls and watches hold."""
    registry = CollectorRegistry()
    metered = MeteredStore(store, registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"rcfarm_store_{name}", labels)

    await metered.txn([ops.create("a", b"")])
    with pytest.raises(TxnConflict):
        await metered.txn([ops.create("a", b"")])
    await metered.watch("a", 0, 10)
    async with background(metered.watch("a", 10**6, 10)):
        await asyncio.sleep(0)
        assert value("connections_in_use", kind="watch") == 1

    assert value("connections_in_use", kind="watch") == value("connections_in_use", kind="call") == 0
    assert value("request_duration_seconds_count", verb="txn") == 1
    assert value("request_duration_seconds_count", verb="watch") is None
    assert value("errors_total", verb="txn", error="TxnConflict") == 1
    assert value("errors_total", verb="watch", error="CancelledError") is None
