"""Whether an operator leads, as its Lease tells it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from rcfarm.operator_lease import LeaseInfo, lease_info, why_nobody_leads
from store.kube.objects import Object

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


def lease(*, holder: str = "a", renewed: float = 2.0, name: str = "rcfarm-jobs") -> LeaseInfo:
    """Renewed so many seconds ago, for 15 s."""
    spec: Object = {"leaseDurationSeconds": 15, "holderIdentity": holder}
    if holder:
        spec["renewTime"] = f"{NOW - timedelta(seconds=renewed):%Y-%m-%dT%H:%M:%S.%fZ}"
    return lease_info({"metadata": {"namespace": "system", "name": name}, "spec": spec})


def test_a_lease_that_is_held_needs_no_word() -> None:
    """Neither one just renewed, nor one that is late by less than clocks may differ; one of several will do."""
    assert why_nobody_leads([lease()], NOW) == ""
    assert why_nobody_leads([lease(renewed=18)], NOW) == ""
    assert why_nobody_leads([lease(renewed=500), lease()], NOW) == ""


def test_what_is_not_known_is_not_claimed() -> None:
    """Without the right to read Leases nothing is said."""
    assert why_nobody_leads(None, NOW) == ""


def test_a_silent_leader_is_named() -> None:
    """Who it was, and since when it is silent; the one that was heard of last."""
    text = why_nobody_leads([lease(renewed=500), lease(holder="b", renewed=60)], NOW)
    assert text.startswith("no operator leads: b renewed the Lease system/rcfarm-jobs 60 s ago for the last time; ")


def test_a_free_lease_and_a_missing_one_say_what_to_do() -> None:
    """Start an operator, or name its Lease."""
    assert "nobody holds the Lease system/rcfarm-jobs; start" in why_nobody_leads([lease(holder="")], NOW)
    assert "--lease" in why_nobody_leads([], NOW)
