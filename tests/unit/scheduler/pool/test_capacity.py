"""Capacity arithmetic."""

from __future__ import annotations

from scheduler.pool.ledger import NOTHING, covers, dominant_share, fits, largest, shortfalls, total, without
from store.schema.records import Capacity

SMALL = Capacity(500, 1024, {"gpu": 1})
LARGE = Capacity(4000, 8 * 1024**3, {"gpu": 4, "fpga": 1})


def test_sums_and_differences_are_inverse() -> None:
    """What is added and taken away again is as before, for every resource."""
    assert total([SMALL, LARGE]) == Capacity(4500, 8 * 1024**3 + 1024, {"gpu": 5, "fpga": 1})
    assert without(total([LARGE, SMALL]), SMALL) == LARGE
    assert total([]) == NOTHING


def test_fits_up_to_the_last_unit() -> None:
    """Exactly full fits; one more of anything does not; asking for nothing always fits."""
    assert fits(LARGE, NOTHING, LARGE)
    assert not fits(Capacity(1), LARGE, LARGE)
    assert not fits(Capacity(0, 1), LARGE, LARGE)
    assert not fits(Capacity(0, 0, {"fpga": 1}), LARGE, LARGE)
    assert not fits(Capacity(0, 0, {"tpu": 1}), NOTHING, LARGE)
    assert fits(Capacity(0, 0, {"gpu": 0}), LARGE, SMALL)


def test_covers_and_largest_go_by_resource() -> None:
    """Growing in one resource is enough to need more; the largest covers both."""
    assert covers(LARGE, SMALL)
    assert not covers(SMALL, Capacity(1, 1, {"gpu": 2}))
    assert not covers(SMALL, Capacity(0, 0, {"tpu": 1}))
    mixed = Capacity(9000, 0, {"tpu": 2})
    assert covers(largest(SMALL, mixed), mixed)
    assert covers(largest(SMALL, mixed), SMALL)


def test_the_dominant_share_is_the_scarcest_resource() -> None:
    """0 when empty, 1 when full, and full as well where a resource is used that the node does not have."""
    assert dominant_share(NOTHING, NOTHING, LARGE) == 0
    assert dominant_share(Capacity(1000, 4 * 1024**3), Capacity(0, 2 * 1024**3), LARGE) == 0.75
    assert dominant_share(NOTHING, Capacity(0, 0, {"fpga": 1}), LARGE) == 1
    assert dominant_share(Capacity(1), NOTHING, NOTHING) == 1
    assert dominant_share(NOTHING, NOTHING, NOTHING) == 0


def test_shortfalls_name_need_free_and_total() -> None:
    """In the units of a manifest; what is overcommitted has none free, never a negative amount."""
    need = Capacity(2000, 3 * 1024**3, {"gpu": 2, "tpu": 1})
    used = Capacity(3500, 9 * 1024**3, {"gpu": 3})
    assert list(shortfalls(need, used, LARGE)) == [
        "needs 2000m cpu, 500m free of 4000m",
        "needs 3 GiB memory, 0 free of 8 GiB",
        "needs 2 gpu, 1 free of 4",
        "needs 1 tpu, 0 free of 0",
    ]
    assert list(shortfalls(SMALL, NOTHING, LARGE)) == []
