"""Periodic syncs: less frequent while nothing changes, and spread over time."""

from __future__ import annotations

import random

from controllers.jobs.reconciler import Audit


class NoJitter(random.Random):
    def random(self) -> float:
        return 0.0


def test_an_idle_job_is_synced_less_and_less_often() -> None:
    """The delays are 15 s, 30 s, 60 s and so on, up to five minutes."""
    audit = Audit(15.0, NoJitter())

    assert [audit.next_look("x", idle=True) for _ in range(7)] == [15.0, 30.0, 60.0, 120.0, 240.0, 300.0, 300.0]


def test_a_change_resets_the_delay() -> None:
    """Other jobs are unaffected, and a deleted job leaves no state."""
    audit = Audit(15.0, NoJitter())
    for key in ("x", "y"):
        audit.next_look(key, idle=True)
        audit.next_look(key, idle=True)

    assert audit.next_look("x", idle=False) == 15.0
    assert audit.next_look("x", idle=True) == 30.0
    assert audit.next_look("y", idle=True) == 60.0
    audit.forget("y")
    assert audit.next_look("y", idle=True) == 15.0


def test_waits_are_spread() -> None:
    """Delays are stretched by up to a fifth, so that jobs created together do not stay in step."""
    audit = Audit(10.0, random.Random(1))
    waits = [audit.next_look(str(number), idle=True) for number in range(100)]

    assert all(10.0 <= wait <= 12.0 for wait in waits)
    assert len(set(waits)) == 100


def test_a_period_above_the_longest_is_kept() -> None:
    """A period of an hour stays an hour."""
    audit = Audit(3600.0, NoJitter())

    assert [audit.next_look("x", idle=True) for _ in range(2)] == [3600.0, 3600.0]
