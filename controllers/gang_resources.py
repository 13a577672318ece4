"""What the smallest runnable part of a gang requests: the sum over its most important pods. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal

from controllers.job_types import BadSpec, ReplicaSpec
from store.kube.objects import Object
from store.kube.quantities import format_quantity, parse_quantity


def min_resources(
    specs: Mapping[str, ReplicaSpec], min_member: int, priority_of: Callable[[str], int]
) -> dict[str, str]:
    """Requests of the first `min_member` pods by descending priority. `priority_of`: a priority class's value.

    A container without requests counts with its limits. Init containers and overhead are left out, as in the
    reference. Raises `BadSpec` for what is no quantity.
    """
    total: dict[str, Decimal] = {}
    left = min_member
    for replica_type, spec in sorted(specs.items(), key=lambda item: -priority_of(priority_class(item[1]))):
        count = min(spec.replicas, left)
        left -= count
        try:
            for name, amount in _requests(spec.template):
                total[name] = total.get(name, Decimal(0)) + amount * count
        except ValueError as error:
            raise BadSpec(f"{replica_type}: template.spec.containers: resources: {error}") from None
    return {name: format_quantity(amount) for name, amount in total.items() if amount}


def priority_class(spec: ReplicaSpec) -> str:
    """The priority class of the pods; "" for the cluster's default."""
    return str((spec.template.get("spec") or {}).get("priorityClassName") or "")


def _requests(template: Object) -> Iterator[tuple[str, Decimal]]:
    for container in (template.get("spec") or {}).get("containers") or ():
        resources: Mapping[str, Mapping[str, str]] = container.get("resources") or {}
        amounts = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        for name, quantity in amounts.items():
            yield name, parse_quantity(quantity)
