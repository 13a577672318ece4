"""Quotas for plugins: the `ResourceManager` of one execution, over the ledger that all executions share.

A call is a transaction of its own, fenced by the execution's lock: a granted unit is durable when the call returns. A
refused request stays in the queue, and the execution is woken when the unit is granted. The scope of a grant (project
and domain) is stored with it, so that later changes of the configuration neither move nor lose it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from controllers.tasks.api.errors import BadPlugin, UnknownResource
from controllers.tasks.api.resources import (
    UNCONSTRAINED,
    AllocationStatus,
    ResourceConstraint,
    ResourceConstraintsSpec,
    ResourceManager,
    ResourceNamespace,
)
from scheduler.quota.decide import Wait
from scheduler.quota.draft import Request
from scheduler.quota.ledger import QuotaLedger
from store.kv import ops
from store.kv.protocol import Op, Store, TxnConflict
from store.schema.keys import Keys, is_resource_name
from store.schema.quota import QuotaLimit
from store.schema.records import encode

QUOTA = "quota"
NOOP = "noop"


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """Where the requests of an execution count, and how they are ranked."""

    execution: str
    project: str = "default"
    domain: str = "default"
    key: str = "default"
    weight: float = 1.0
    priority: int = 0


class QuotaResourceManager:
    """The resource manager of one execution and plugin. `prefix`: `MANAGER:PLUGIN`, under which the plugin's resources
    were registered. `fence`: the operations that refuse the writes of an engine which has lost the execution.

    `waits`: why the latest request for a resource was refused, with the scope and its usage. `is_unsure`: the last call
    got no answer, so it may have been carried out.
    """

    def __init__(self, ledger: QuotaLedger, prefix: ResourceNamespace, scope: Scope, fence: Sequence[Op]) -> None:
        self.waits: dict[str, Wait] = {}
        self.is_unsure = False
        self._ledger, self._prefix, self._scope, self._fence = ledger, prefix, scope, fence

    def get_id(self) -> str:
        return QUOTA

    async def allocate_resource(
        self,
        namespace: ResourceNamespace,
        allocation_token: str,
        constraints_spec: ResourceConstraintsSpec = UNCONSTRAINED,
    ) -> AllocationStatus:
        """Return `GRANTED` if the token holds a unit now, `NAMESPACE_QUOTA_EXCEEDED` if the project or the namespace
        may hold no more, else `EXHAUSTED`. Raises `UnknownResource`, and what `QuotaLedger.transact` raises."""
        resource, token = self._place(namespace, allocation_token)
        request = Request(
            resource=resource,
            token=token,
            execution=self._scope.execution,
            project=self._scope.project,
            domain=self._scope.domain,
            key=self._scope.key,
            weight=self._scope.weight,
            priority=self._scope.priority,
            project_constraint=_units(constraints_spec.project_scope_resource_constraint),
            namespace_constraint=_units(constraints_spec.namespace_scope_resource_constraint),
        )
        self.is_unsure = True
        admission = await self._ledger.admit([request], self._fence)
        if admission.infeasible is not None:  # by the view, which may not show a limit that was set a moment ago
            await self._ledger.current()
            admission = await self._ledger.admit([request], self._fence)
        self.is_unsure = False
        self.waits.pop(resource, None)
        if admission.granted:
            return AllocationStatus.GRANTED
        wait = admission.infeasible or admission.waits[resource]
        if admission.infeasible is not None:
            raise UnknownResource(wait.message)
        self.waits[resource] = wait
        narrow = wait.scope in ("project", "namespace")
        return AllocationStatus.NAMESPACE_QUOTA_EXCEEDED if narrow else AllocationStatus.EXHAUSTED

    async def release_resource(self, namespace: ResourceNamespace, allocation_token: str) -> None:
        """Return the unit, or withdraw the request; no error if the token has neither. Raises what
        `QuotaLedger.transact` raises."""
        self.is_unsure = True
        await self._ledger.release(places=[self._place(namespace, allocation_token)], fence=self._fence)
        self.is_unsure = False
        self.waits.pop(self._place(namespace, allocation_token)[0], None)

    def _place(self, namespace: ResourceNamespace, token: str) -> tuple[str, str]:
        """Return the resource, and the token as it is stored: two executions may use the same one."""
        return self._prefix.create_sub_namespace(namespace), f"{self._scope.execution}/{token}"


class NoopResourceManager:
    """Grants every request and records none; used only where the configuration names it."""

    def get_id(self) -> str:
        return NOOP

    async def allocate_resource(
        self,
        namespace: ResourceNamespace,
        allocation_token: str,
        constraints_spec: ResourceConstraintsSpec = UNCONSTRAINED,
    ) -> AllocationStatus:
        return AllocationStatus.GRANTED

    async def release_resource(self, namespace: ResourceNamespace, allocation_token: str) -> None:
        pass


def resource_manager(
    kind: str, ledger: QuotaLedger, prefix: ResourceNamespace, scope: Scope, fence: Sequence[Op]
) -> ResourceManager:
    """Return the manager that the configuration names: `quota` or `noop`. Raises `BadPlugin` for another name."""
    if kind == QUOTA:
        return QuotaResourceManager(ledger, prefix, scope, fence)
    if kind == NOOP:
        return NoopResourceManager()
    raise BadPlugin(f"there is no resource manager {kind!r}; those are {QUOTA} and {NOOP}")


async def declare_quotas(store: Store, keys: Keys, quotas: Mapping[ResourceNamespace, int]) -> None:
    """Write the limits that plugins have registered. A limit that exists already is kept: operators may have changed
    it. Raises `BadPlugin` for a name that can't be one of a resource, and `StoreError`."""
    for resource in quotas:
        if not is_resource_name(resource):
            raise BadPlugin(f"{resource!r} can't name a resource; use letters, digits, and `-_.:` inside")
    for resource, units in quotas.items():
        limit = QuotaLimit(units=units, description="registered by the plugin")
        try:
            await store.txn([ops.create(keys.quota_limit(resource), encode(limit))])
        except TxnConflict:
            continue


def _units(constraint: ResourceConstraint | None) -> int | None:
    return None if constraint is None else constraint.value
