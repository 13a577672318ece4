"""Which nodes pods may be sent to."""

from __future__ import annotations

from store.kube.objects import Object


def why_bad(node: Object) -> str:
    """In words, "" for a healthy node: one that is Ready and takes pods."""
    if (node.get("spec") or {}).get("unschedulable"):
        return "it is cordoned"
    conditions = (node.get("status") or {}).get("conditions") or ()
    is_ready = any(condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions)
    return "" if is_ready else "it is not Ready"
