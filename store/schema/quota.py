"""The records of quotas: what may be held, who holds it, who waits.

A grant is a holder: the units in use are the sum of the grants, and no counter of them is kept anywhere. A ticket is a
waiter. Both are named after the token of the request, so a token has at most one of each. Times are seconds since the
epoch.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from store.schema.records import Count, Quantity, StoredRecord

Units = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Weight = Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


class Rate(StoredRecord, frozen=True):
    """At most `count` grants per `per` seconds in the long run, and `burst` at once (by default `count`)."""

    count: Units
    per: Annotated[float, msgspec.Meta(gt=0.0, le=1e9)] = 1.0
    burst: Units | None = None


class QuotaLimit(StoredRecord, frozen=True, kw_only=True):
    """`quota/<resource>/limit`: what may be held of a resource; operators write it.

    `project_units`, `namespace_units`: at most this much per project, or per project and domain. `keys`, `key_rates`,
    `weights`: per fair key; without a weight of its own a key has the largest of its requests.
    """

    units: Count
    project_units: Count | None = None
    namespace_units: Count | None = None
    keys: dict[str, Count] = msgspec.field(default_factory=dict)
    rate: Rate | None = None
    key_rates: dict[str, Rate] = msgspec.field(default_factory=dict)
    weights: dict[str, Weight] = msgspec.field(default_factory=dict)
    description: str = ""


class QuotaHead(StoredRecord, frozen=True):
    """`quota/<resource>/head`: every transaction that adds a grant replaces it by compare-and-swap, so the grants of
    several engines are decided one after the other. It holds the rate limits' theoretical arrival times.

    `version` grows with each of these writes: Consul leaves the index of a key that is written with its old value.
    """

    version: Quantity = 0
    tat: Seconds = 0.0
    keys: dict[str, Seconds] = msgspec.field(default_factory=dict)


class QuotaTicket(StoredRecord, frozen=True, kw_only=True):
    """`quota/<resource>/tickets/<token>`: a waiter. `order`: a ULID of the first request; the lowest is the oldest.

    `key`: the fair key. `project_constraint`, `namespace_constraint`: caps that the request itself brings.
    """

    token: str
    execution: str
    order: str
    units: Units = 1
    project: str = "default"
    domain: str = "default"
    key: str = "default"
    weight: Weight = 1.0
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 0
    project_constraint: Count | None = None
    namespace_constraint: Count | None = None
    since: Seconds = 0.0


class QuotaGrant(QuotaTicket, frozen=True, kw_only=True):
    """`quota/<resource>/grants/<token>`: a holder, with all that its request said. `since`: when it was granted."""
