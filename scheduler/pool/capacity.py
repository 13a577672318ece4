"""Arithmetic on capacities: sums, whether a request fits, and shortfalls in words.

A pod that requests none of a resource fits wherever the rest does, even on a node with less of it than is reserved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from store.schema.records import Capacity

NOTHING = Capacity()
_BINARY_UNITS = ("", " KiB", " MiB", " GiB", " TiB")


def total(capacities: Iterable[Capacity]) -> Capacity:
    """Return the sum of the capacities."""
    cpu = memory = 0
    devices: dict[str, int] = {}
    for capacity in capacities:
        cpu += capacity.cpu
        memory += capacity.memory
        for kind, count in capacity.devices.items():
            devices[kind] = devices.get(kind, 0) + count
    return Capacity(cpu, memory, devices)


def largest(one: Capacity, other: Capacity) -> Capacity:
    """Return the larger of the two, for each resource."""
    kinds = {**one.devices, **other.devices}
    return Capacity(
        max(one.cpu, other.cpu),
        max(one.memory, other.memory),
        {kind: max(one.devices.get(kind, 0), other.devices.get(kind, 0)) for kind in kinds},
    )


def covers(reserved: Capacity, need: Capacity) -> bool:
    """Return whether `reserved` is at least `need` in every resource."""
    return (
        reserved.cpu >= need.cpu
        and reserved.memory >= need.memory
        and all(reserved.devices.get(kind, 0) >= count for kind, count in need.devices.items())
    )


def without(used: Capacity, part: Capacity) -> Capacity:
    """Return `used` minus one of its summands."""
    devices = {kind: count - part.devices.get(kind, 0) for kind, count in used.devices.items()}
    return Capacity(used.cpu - part.cpu, used.memory - part.memory, devices)


def fits(need: Capacity, used: Capacity, capacity: Capacity) -> bool:
    """Return whether `need` can be added to `used` without exceeding `capacity`."""
    if need.cpu and used.cpu + need.cpu > capacity.cpu:
        return False
    if need.memory and used.memory + need.memory > capacity.memory:
        return False
    return not need.devices or all(
        not count or used.devices.get(kind, 0) + count <= capacity.devices.get(kind, 0)
        for kind, count in need.devices.items()
    )


def dominant_share(used: Capacity, need: Capacity, capacity: Capacity) -> float:
    """Return the largest share of any one resource that `used` and `need` take: 0 of an empty node, 1 of a full one."""
    share = max(_share(used.cpu + need.cpu, capacity.cpu), _share(used.memory + need.memory, capacity.memory))
    if used.devices or need.devices:
        devices = total((used, need)).devices
        share = max(share, *(_share(count, capacity.devices.get(kind, 0)) for kind, count in devices.items()))
    return share


def _share(amount: int, limit: int) -> float:
    return amount / limit if limit else float(amount > 0)


def shortfalls(need: Capacity, used: Capacity, capacity: Capacity) -> Iterator[str]:
    """Yield what is missing for `need` to fit, as in "needs 2000m cpu, 500m free of 4000m"."""
    if need.cpu and used.cpu + need.cpu > capacity.cpu:
        yield f"needs {need.cpu}m cpu, {max(0, capacity.cpu - used.cpu)}m free of {capacity.cpu}m"
    if need.memory and used.memory + need.memory > capacity.memory:
        free = max(0, capacity.memory - used.memory)
        yield f"needs {_bytes(need.memory)} memory, {_bytes(free)} free of {_bytes(capacity.memory)}"
    for kind, count in sorted(need.devices.items()):
        there, taken = capacity.devices.get(kind, 0), used.devices.get(kind, 0)
        if count and taken + count > there:
            yield f"needs {count} {kind}, {max(0, there - taken)} free of {there}"


def _bytes(amount: int) -> str:
    value, unit = float(amount), 0
    while value >= 1024 and unit < len(_BINARY_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g}{_BINARY_UNITS[unit]}"
