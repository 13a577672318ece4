"""The step after a list or a watch that ended, decided without any server."""

from __future__ import annotations

import random

import pytest

from store.kube.api.errors import (
    BadRequest,
    Expired,
    Forbidden,
    KubeError,
    NotFound,
    ServerError,
    ServerTimeout,
    TooManyRequests,
    Unauthorized,
    Unreachable,
)
from store.kube.informer.reflector import AfterWatch, Cursor, after_watch, new_backoff
from store.kube.memory.errors import too_large_version


def after(error: KubeError | None, *, opened: bool = True, lived: float = 60.0, progressed: bool = True) -> AfterWatch:
    return after_watch(error, opened=opened, lived=lived, progressed=progressed)


@pytest.mark.parametrize(("lived", "progressed"), [(60.0, False), (0.5, True)])
def test_a_watch_that_ended_well_is_watched_on(lived: float, progressed: bool) -> None:
    """After a clean close nothing was missed: no list, no pause."""
    assert after(None, lived=lived, progressed=progressed) == (False, "closed", False)


def test_a_short_watch_without_events_is_not_trusted() -> None:
    """A server that closes at once, without an event, has us list again, with a pause."""
    assert after(None, lived=0.9, progressed=False) == (True, "short-watch", True)


@pytest.mark.parametrize("opened", [True, False])
def test_an_unreachable_server_is_never_listed(opened: bool) -> None:
    """When it refuses connections or breaks streams, the same watch follows, after a pause if it was in vain."""
    assert after(Unreachable("refused"), opened=opened, lived=0.0, progressed=False) == (False, "broken", True)
    assert after(Unreachable("broken"), opened=opened, lived=60.0, progressed=False) == (False, "broken", False)
    assert after(Unreachable("broken"), opened=opened, lived=0.1, progressed=True) == (False, "broken", False)


@pytest.mark.parametrize("error", [TooManyRequests("busy"), ServerError("oops"), ServerTimeout("slow")])
def test_a_server_that_sheds_load_is_asked_for_the_same_watch(error: KubeError) -> None:
    """429 and 5xx instead of a stream lead to no list, which would cost the server more."""
    assert after(error, opened=False, lived=0.0) == (False, "refused", True)


@pytest.mark.parametrize("error", [ServerError("undecodable"), Forbidden("no"), BadRequest("what?")])
def test_an_error_in_the_stream_leads_to_a_list(error: KubeError) -> None:
    """An ERROR event says that the server could not go on from where we are."""
    assert after(error, opened=True) == (True, "failed", True)


@pytest.mark.parametrize(
    "error", [Forbidden("no"), Unauthorized("who?"), NotFound("no such kind"), BadRequest("what?")]
)
def test_other_refusals_lead_to_a_list(error: KubeError) -> None:
    """A list shows whether we may read the collection at all."""
    assert after(error, opened=False) == (True, "failed", True)


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("error", [Expired("too old", status=410), too_large_version(200, 100)])
def test_a_version_that_the_server_does_not_know_leads_to_a_list(error: KubeError, opened: bool) -> None:
    """Too old, or too new for a server that was restored or lags behind."""
    assert after(error, opened=opened) == (True, "expired", True)


def test_a_list_starts_from_the_cache_and_goes_on_from_what_was_seen() -> None:
    """ "0" at first, then the last version; "" after a refusal, until a list succeeded."""
    cursor = Cursor(500)
    assert cursor.list_version == "0"
    cursor.listed("0", "17", paginated=False)
    cursor.version = "20"
    assert cursor.list_version == "20"
    cursor.distrust()
    assert cursor.list_version == ""
    cursor.listed("", "31", paginated=True)
    assert cursor.list_version == "31"


def test_only_lists_that_reach_etcd_anyway_are_paged() -> None:
    """A limit would keep the server's watch cache from answering a list at a known version."""
    cursor = Cursor(500)
    assert [cursor.limit(version) for version in ("0", "", "17")] == [500, 500, 0]
    cursor.listed("", "17", paginated=True)
    assert cursor.limit("17") == 0
    cursor.listed("0", "17", paginated=True)
    assert cursor.limit("17") == 500


def test_pauses_grow_to_their_cap_and_spread() -> None:
    """0.8 s doubling to 30 s, each uniform between once and twice that."""
    backoffs = [new_backoff(lambda: 0.0, random.Random(seed)) for seed in range(200)]
    for step in (0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0):
        pauses = [backoff.pause() for backoff in backoffs]
        assert step <= min(pauses) < 1.1 * step
        assert 1.9 * step < max(pauses) < 2.0 * step


def test_pauses_start_afresh_after_a_quiet_time() -> None:
    """More than two minutes without a pause, and the next one is short."""
    now = 0.0
    backoff = new_backoff(lambda: now, random.Random(1))
    for _ in range(10):
        backoff.pause()
    now += 120.0
    assert backoff.pause() >= 30.0
    now += 120.1
    assert backoff.pause() < 1.6


def test_a_pause_is_as_long_as_the_server_asks() -> None:
    """Retry-After lengthens a pause, and never shortens it."""
    backoff = new_backoff(lambda: 0.0, random.Random(1))
    assert backoff.pause(17.0) == 17.0
    assert backoff.pause(0.1) >= 1.6
