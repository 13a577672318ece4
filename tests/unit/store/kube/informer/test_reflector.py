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
from store.kube.informer.reflector import Cursor, after_watch, new_backoff
from store.kube.memory.rules import too_large_version

LISTS, GOES_ON = True, False  # whether the collection is listed, or the same watch follows


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize(
    ("error", "lived", "progressed", "then"),
    [
        # After a clean close nothing was missed; but a server that closes at once, without an event, is not trusted.
        (None, 60.0, False, (GOES_ON, "closed", False)),
        (None, 0.5, True, (GOES_ON, "closed", False)),
        (None, 0.9, False, (LISTS, "short-watch", True)),
        # A server that refuses connections or breaks streams is never listed; a watch in vain is followed by a pause.
        (Unreachable("refused"), 0.0, False, (GOES_ON, "broken", True)),
        (Unreachable("broken"), 60.0, False, (GOES_ON, "broken", False)),
        (Unreachable("broken"), 0.1, True, (GOES_ON, "broken", False)),
        # Our version is too old, or too new for a server that was restored or lags behind.
        (Expired("too old", status=410), 60.0, True, (LISTS, "expired", True)),
        (too_large_version(200, 100), 60.0, True, (LISTS, "expired", True)),
        # A list shows whether we may read the collection at all.
        *(
            (error("no"), 60.0, True, (LISTS, "failed", True))
            for error in (Forbidden, Unauthorized, NotFound, BadRequest)
        ),
    ],
)
def test_what_follows_a_watch(
    error: KubeError | None, lived: float, progressed: bool, then: tuple[bool, str, bool], opened: bool
) -> None:
    """Another watch or a list, its reason, and whether there is a pause."""
    assert after_watch(error, opened=opened, lived=lived, progressed=progressed) == then


@pytest.mark.parametrize("error", [TooManyRequests("busy"), ServerError("oops"), ServerTimeout("slow")])
def test_a_server_that_sheds_load_is_asked_for_the_same_watch(error: KubeError) -> None:
    """A list would cost the server more; but an ERROR event says that it could not go on from where we are."""
    assert after_watch(error, opened=False, lived=0.0, progressed=True) == (GOES_ON, "refused", True)
    assert after_watch(error, opened=True, lived=60.0, progressed=True) == (LISTS, "failed", True)


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
