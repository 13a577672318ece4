"""Whether an operator leads, as far as its Lease tells those who look from outside.

Clocks differ between machines: what is a few seconds late may be renewed still.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from store.kube.objects import Object, key_of

SKEW = timedelta(seconds=5)


class LeaseInfo(NamedTuple):
    """A Lease. `key`: NAMESPACE/NAME. `holder`: "" for nobody. `ends`: when the last renewal stops to count."""

    key: str
    holder: str
    renewed: datetime | None
    ends: datetime | None

    def is_held(self, now: datetime) -> bool:
        return bool(self.holder) and self.ends is not None and now < self.ends + SKEW


def lease_info(lease: Object) -> LeaseInfo:
    spec: Object = lease.get("spec") or {}
    renewed = datetime.fromisoformat(spec["renewTime"]) if spec.get("renewTime") else None
    duration = timedelta(seconds=int(spec.get("leaseDurationSeconds") or 0))
    return LeaseInfo(key_of(lease), str(spec.get("holderIdentity") or ""), renewed, renewed and renewed + duration)


def why_nobody_leads(leases: Sequence[LeaseInfo] | None, now: datetime) -> str:
    """ "" when somebody leads, or when that is not known (None)."""
    if leases is None or any(lease.is_held(now) for lease in leases):
        return ""
    if not leases:
        return (
            "no operator leads: there is no such Lease; start `rcfarm jobs`, or name the Lease that yours has with "
            "--lease"
        )
    last = max(leases, key=lambda lease: lease.renewed.timestamp() if lease.renewed else 0.0)
    if not last.holder or last.renewed is None:
        return f"no operator leads: nobody holds the Lease {last.key}; start `rcfarm jobs`"
    silent = int((now - last.renewed).total_seconds())
    return (
        f"no operator leads: {last.holder} renewed the Lease {last.key} {silent} s ago for the last time; see whether "
        "it runs, and its log"
    )
