"""The audit: rarer while nothing happens, and never all at once."""

from __future__ import annotations

import random

from controllers.audit import Audit


class NoJitter(random.Random):
    def random(self) -> float:
        return 0.0


def test_an_idle_job_is_looked_at_less_and_less_often() -> None:
    """15 s, 30 s, 60 s and so on, up to five minutes, as the seed wished for."""
    audit = Audit(15.0, NoJitter())

    assert [audit.next_look("x", idle=True) for _ in range(7)] == [15.0, 30.0, 60.0, 120.0, 240.0, 300.0, 300.0]


def test_a_job_about_which_something_happens_starts_anew() -> None:
    """Others are not concerned, and a job that is gone leaves nothing behind."""
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
    """By up to a fifth, so that jobs found together do not come back together."""
    audit = Audit(10.0, random.Random(1))
    waits = [audit.next_look(str(number), idle=True) for number in range(100)]

    assert all(10.0 <= wait <= 12.0 for wait in waits)
    assert len(set(waits)) == 100


def test_a_period_above_the_longest_is_kept() -> None:
    """Whoever asks for an hour gets an hour."""
    audit = Audit(3600.0, NoJitter())

    assert [audit.next_look("x", idle=True) for _ in range(2)] == [3600.0, 3600.0]
