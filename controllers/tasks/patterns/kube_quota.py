"""Creations that a Kubernetes quota refuses: what the refusal says, and when which pod may be tried again. Pure.

A `CreateGate` belongs to one kind of object in one namespace. Each refusal in a row doubles the time for which
creations are held back, from 1 s to 20 s. From the refusal's message the gate learns ceilings: an amount that was
refused is too much for now, so a smaller request still passes, and one that is not smaller is held back. A success
forgets everything. As Flyte's `ComputeResourceAwareBackOffHandler`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from store.kube.api.objects import Object
from store.quantity import parse_quantity
from store.timing import doubled

FIRST_PAUSE = 1.0  # seconds
LONGEST_PAUSE = 20.0
_REFUSAL = re.compile(r"requested: (\S+), used: \S+, limited: (\S+)")
_SHORT = frozenset({"cpu", "memory", "ephemeral-storage"})  # a quota may name them without `requests.`

Amounts = Mapping[str, Decimal]


class QuotaRefusal(NamedTuple):
    """The amounts of the resources that exceed a ResourceQuota, by its names for them."""

    requested: Amounts
    limited: Amounts

    @property
    def impossible(self) -> list[str]:
        """The resources of which the request alone is more than the quota's limit."""
        return [name for name, amount in self.requested.items() if amount > self.limited.get(name, amount)]


def parse_refusal(message: str) -> QuotaRefusal | None:
    """Return the amounts in the API server's message, or None if it has none that can be read."""
    found = _REFUSAL.search(message)
    if found is None:
        return None
    try:
        return QuotaRefusal(dict(_amounts(found[1])), dict(_amounts(found[2])))
    except ValueError:
        return None


def _amounts(text: str) -> Iterator[tuple[str, Decimal]]:
    for part in text.split(","):
        name, _, quantity = part.partition("=")
        yield name, parse_quantity(quantity)


def pod_demand(pod: Object) -> dict[str, Decimal]:
    """Return what a pod asks for, by the names of a ResourceQuota. Raises `ValueError` for an invalid quantity.

    Init containers run one after the other before the containers, so of them the largest counts.
    """
    spec: Mapping[str, Any] = pod.get("spec") or {}
    demand = {"pods": Decimal(1), "count/pods": Decimal(1)}
    for kind in ("requests", "limits"):
        total: dict[str, Decimal] = {}
        for container in spec.get("containers") or ():
            for name, amount in _asked(container, kind).items():
                total[name] = total.get(name, Decimal(0)) + amount
        for container in spec.get("initContainers") or ():
            for name, amount in _asked(container, kind).items():
                total[name] = max(total.get(name, Decimal(0)), amount)
        for name, quantity in (spec.get("overhead") or {}).items():
            total[name] = total.get(name, Decimal(0)) + parse_quantity(quantity)
        demand |= {f"{kind}.{name}": amount for name, amount in total.items()}
        if kind == "requests":
            demand |= {name: amount for name, amount in total.items() if name in _SHORT}
    return demand


def _asked(container: Mapping[str, Any], kind: str) -> dict[str, Decimal]:
    """Return a container's requests or limits; a limit is the default of its request."""
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {})} if kind == "requests" else {}
    return {name: parse_quantity(quantity) for name, quantity in (asked | (resources.get(kind) or {})).items()}


class CreateGate:
    """Holds creations back after refusals. Times in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.ceilings: dict[str, Decimal] = {}
        self._refusals, self._until = 0, 0.0

    def delay(self, demand: Amounts, now: float) -> float:
        """Return the seconds to wait before the creation; 0: it may be tried now."""
        left = self._until - now
        if left <= 0:
            return 0.0
        is_smaller = all(demand.get(name, Decimal(0)) < ceiling for name, ceiling in self.ceilings.items())
        return 0.0 if self.ceilings and is_smaller else left

    def refused(self, now: float, requested: Amounts, retry_after: float = 0.0) -> float:
        """Learn from a refusal. Return the seconds to wait. `requested`: the amounts that were too much."""
        for name, amount in requested.items():
            self.ceilings[name] = min(amount, self.ceilings.get(name, amount))
        if self._until <= now:
            self._until = now + doubled(FIRST_PAUSE, LONGEST_PAUSE, self._refusals)
            self._refusals += 1
        self._until = max(self._until, now + retry_after)
        return self._until - now

    def succeeded(self) -> None:
        """Forget everything: there is room."""
        self.ceilings.clear()
        self._refusals, self._until = 0, 0.0
