"""Quotas as a plugin sees them: names of resources, tokens that hold a unit, and constraints beside the quota.

A *resource* is anything with a limited number of units: the concurrent jobs of a remote cluster, licences, devices. A
*token* stands for one unit that an execution holds; allocating the same token again changes nothing, so a plugin may
repeat the call after a crash. Meanings are those of Flyte's ResourceManager, with two differences: an error is raised
instead of returned, and `NAMESPACE_QUOTA_EXCEEDED` is really returned.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from controllers.tasks.api.phase import NamedEnum


class AllocationStatus(NamedEnum):
    """The answer to a request for a unit."""

    UNDEFINED = 0  # accompanies an error
    GRANTED = 1
    EXHAUSTED = 2  # the whole resource is in use
    NAMESPACE_QUOTA_EXCEEDED = 3  # a constraint of the project or the namespace is reached

    def __str__(self) -> str:
        if self is AllocationStatus.UNDEFINED:
            return "AllocationUndefined"
        return self.name.title().replace("_", "") if self.is_member() else self.name


class ResourceNamespace(str):
    """The name of a resource; levels are separated by ":"."""

    __slots__ = ()

    def create_sub_namespace(self, namespace: str) -> ResourceNamespace:
        """Return the name of a level below this one."""
        return ResourceNamespace(f"{self}:{namespace}")


class ResourceConstraint(msgspec.Struct, frozen=True):
    """At most `value` units; 0 refuses every request."""

    value: int


class ResourceConstraintsSpec(msgspec.Struct, frozen=True):
    """Constraints of a request beside the resource's quota, for all of the execution's project and for all of its
    project and domain. None: no constraint at that level."""

    project_scope_resource_constraint: ResourceConstraint | None = None
    namespace_scope_resource_constraint: ResourceConstraint | None = None


UNCONSTRAINED = ResourceConstraintsSpec()


class ResourceManager(Protocol):
    """Allocates and releases units. A granted unit is durable when the call returns, and is held until it is released
    or the execution ends."""

    def get_id(self) -> str:
        """Return the manager's name."""

    async def allocate_resource(
        self,
        namespace: ResourceNamespace,
        allocation_token: str,
        constraints_spec: ResourceConstraintsSpec = UNCONSTRAINED,
    ) -> AllocationStatus:
        """Return `GRANTED` if the token holds a unit now. After a refusal the execution stays in the resource's queue,
        and `handle` is called when the unit is granted. Raises `UnknownResource` and `StoreError`."""

    async def release_resource(self, namespace: ResourceNamespace, allocation_token: str) -> None:
        """Give the unit back; no error if the token holds none. Raises `StoreError`."""


class ResourceRegistrar(Protocol):
    """Collects quotas while plugins are loaded."""

    async def register_resource_quota(self, namespace: ResourceNamespace, quota: int) -> None:
        """Declare a resource with `quota` units, 1 to 1000. Raises `BadPlugin` for another number, and for a
        resource that the plugin has declared already."""
