"""The errors of `MemoryKube`, with the API server's status, reason and details."""

from __future__ import annotations

from store.kube.api.errors import (
    AlreadyExists,
    BadRequest,
    Conflict,
    Expired,
    Forbidden,
    Invalid,
    NotFound,
    ServerTimeout,
    TooManyRequests,
)
from store.kube.api.objects import Resource


def bad_request(message: str) -> BadRequest:
    return BadRequest(message, status=400, reason="BadRequest")


def not_served(resource: Resource, subresource: str = "") -> NotFound:
    what = f"{subresource} of {qualified(resource)}" if subresource else f"{qualified(resource)} {resource.version}"
    return NotFound(f"the server could not find the requested resource ({what})", status=404, reason="NotFound")


def not_found(resource: Resource, name: str) -> NotFound:
    details = {"name": name, "group": resource.group, "kind": resource.plural}
    return NotFound(f'{qualified(resource)} "{name}" not found', status=404, reason="NotFound", details=details)


def already_exists(resource: Resource, name: str) -> AlreadyExists:
    details = {"name": name, "group": resource.group, "kind": resource.plural}
    message = f'{qualified(resource)} "{name}" already exists'
    return AlreadyExists(message, status=409, reason="AlreadyExists", details=details)


def conflict(resource: Resource, name: str, why: str) -> Conflict:
    details = {"name": name, "group": resource.group, "kind": resource.plural}
    message = f'Operation cannot be fulfilled on {qualified(resource)} "{name}": {why}'
    return Conflict(message, status=409, reason="Conflict", details=details)


def invalid(resource: Resource, name: str, field: str, problem: str) -> Invalid:
    causes = [{"reason": "FieldValueInvalid", "message": problem, "field": field}]
    details = {"name": name, "group": resource.group, "kind": resource.kind, "causes": causes}
    message = f'{resource.kind} "{name}" is invalid: {field}: {problem}'
    return Invalid(message, status=422, reason="Invalid", details=details)


def namespace_is_ending(resource: Resource, name: str, namespace: str) -> Forbidden:
    causes = [{"reason": "NamespaceTerminating", "field": "metadata.namespace"}]
    message = (
        f'{qualified(resource)} "{name}" is forbidden: unable to create new content in namespace {namespace} '
        "because it is being terminated"
    )
    return Forbidden(message, status=403, reason="Forbidden", details={"name": name, "causes": causes})


def expired(version: int, oldest: int) -> Expired:
    message = f"too old resource version: {version} ({oldest})"
    return Expired(message, status=410, reason="Expired")


def too_large_version(version: int, current: int) -> ServerTimeout:
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    message = f"Timeout: Too large resource version: {version}, current: {current}"
    return ServerTimeout(
        message, status=504, reason="Timeout", retry_after=1.0, details={"causes": causes, "retryAfterSeconds": 1}
    )


def budget_holds(name: str, message: str) -> TooManyRequests:
    """Return the error for an eviction that the disruption budget `name` does not allow now."""
    causes = [{"reason": "DisruptionBudget", "message": message}]
    return TooManyRequests(
        "Cannot evict pod as it would violate the pod's disruption budget.",
        status=429,
        reason="TooManyRequests",
        details={"name": name, "causes": causes},
    )


def qualified(resource: Resource) -> str:
    """Return the qualified name, as in `leases.coordination.k8s.io` or `pods`."""
    return f"{resource.plural}.{resource.group}" if resource.group else resource.plural
