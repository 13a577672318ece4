"""Disruption budgets, as an eviction in `MemoryKube` meets them.

Nothing here computes the status of a budget: its `disruptionsAllowed` is what a test or a controller wrote there, and
each eviction takes one. A budget whose status is older than its spec holds everything up. One without a selector
covers nothing, as in policy/v1beta1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from store.kube.errors import ServerError
from store.kube.memory_errors import budget_holds
from store.kube.objects import Object, is_deleting, labels_of, name_of
from store.selectors import Selector

_UNDISRUPTED = ("Pending", "Succeeded", "Failed")  # phases in which a pod serves nobody
_OPERATORS = {
    "In": "{key} in ({values})",
    "NotIn": "{key} notin ({values})",
    "Exists": "{key}",
    "DoesNotExist": "!{key}",
}


def budget_to_spend(pod: Object, budgets: Sequence[Object]) -> Object | None:
    """The budget that an eviction of the pod takes from; None when it needs none.

    Raises `TooManyRequests` when it has nothing left, and `ServerError` when the pod is in several.
    """
    if is_deleting(pod) or pod["status"].get("phase") in _UNDISRUPTED:
        return None
    covering = [budget for budget in budgets if _covers(budget["spec"].get("selector") or {}, pod)]
    if not covering:
        return None
    if len(covering) > 1:
        message = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        raise ServerError(message, status=500)
    _check(covering[0])
    return covering[0]


def spent(budget: Object) -> Object:
    """The budget after one eviction."""
    status = budget["status"]
    return budget | {"status": status | {"disruptionsAllowed": status["disruptionsAllowed"] - 1}}


def _check(budget: Object) -> None:
    status = budget.get("status") or {}
    if status.get("observedGeneration", 0) < budget["metadata"].get("generation", 0):
        raise budget_holds(name_of(budget), f"The disruption budget {name_of(budget)} is still being processed.")
    if status.get("disruptionsAllowed", 0) <= 0:
        raise budget_holds(name_of(budget), f"The disruption budget {name_of(budget)} allows no disruption.")


def _covers(selector: dict[str, Any], pod: Object) -> bool:
    terms = list(_terms(selector))
    return bool(terms) and Selector.parse(",".join(terms)).matches(labels_of(pod))


def _terms(selector: dict[str, Any]) -> Iterator[str]:
    for key, value in (selector.get("matchLabels") or {}).items():
        yield f"{key}={value}"
    for term in selector.get("matchExpressions") or ():
        yield _OPERATORS[term["operator"]].format(key=term["key"], values=",".join(term.get("values") or ()))
