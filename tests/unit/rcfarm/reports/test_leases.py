"""Whether an operator leads, by its Lease."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from rcfarm.reports.jobs import LeaseInfo, ObservedObjects, lease_info
from rcfarm.reports.jobs import why_nobody_leads as of_observed
from store.kube.api.objects import Object

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


def lease(*, holder: str = "a", renewed: float = 2.0, name: str = "rcfarm-jobs") -> LeaseInfo:
    """Return a Lease renewed `renewed` seconds ago, for 15 s."""
    spec: Object = {"leaseDurationSeconds": 15, "holderIdentity": holder}
    if holder:
        spec["renewTime"] = f"{NOW - timedelta(seconds=renewed):%Y-%m-%dT%H:%M:%S.%fZ}"
    return lease_info({"metadata": {"namespace": "system", "name": name}, "spec": spec})


def why_nobody_leads(leases: Sequence[LeaseInfo] | None) -> str:
    found = of_observed(ObservedObjects({}, (), leases, NOW))
    assert found is None or found.code == "no_operator_leads"
    return found.message if found else ""


def test_a_held_lease_is_not_reported() -> None:
    """A lease just renewed, or late by less than clocks may differ, is no problem; one of several is enough."""
    assert why_nobody_leads([lease()]) == ""
    assert why_nobody_leads([lease(renewed=18)]) == ""
    assert why_nobody_leads([lease(renewed=500), lease()]) == ""


def test_what_is_not_known_is_not_claimed() -> None:
    """Without the permission to read Leases nothing is reported."""
    assert why_nobody_leads(None) == ""


def test_a_silent_leader_is_named() -> None:
    """The message names the last known leader, and since when it has not renewed."""
    text = why_nobody_leads([lease(renewed=500), lease(holder="b", renewed=60)])
    assert text.startswith("no operator leads: b last renewed the Lease system/rcfarm-jobs 60 s ago; ")


def test_a_free_lease_and_a_missing_one_say_what_to_do() -> None:
    """Start an operator, or name its Lease."""
    assert "the Lease system/rcfarm-jobs has no holder; start" in why_nobody_leads([lease(holder="")])
    assert "--lease" in why_nobody_leads([])
