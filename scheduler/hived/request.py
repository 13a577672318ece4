"""A scheduling request, checked against the cluster: what the planner is asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from scheduler.hived.cells import VirtualCell
from scheduler.hived.chain import Chain
from scheduler.hived.constants import OPPORTUNISTIC_PRIORITY
from scheduler.hived.errors import UserError
from scheduler.hived.pod_contract import PodSchedulingSpec
from scheduler.hived.units import Units
from scheduler.hived.virtual_cluster import VirtualCluster


@dataclass(frozen=True, slots=True)
class Request:
    """A whole group's. `sizes`: leaves per pod, descending. `chains`: where to look, in this order.

    `suggested`: the nodes that may be used, None if all may.
    """

    spec: PodSchedulingSpec
    virtual_cluster: VirtualCluster
    chains: tuple[Chain, ...]
    sizes: tuple[int, ...]
    suggested: frozenset[str] | None

    @property
    def is_opportunistic(self) -> bool:
        return self.spec.priority == OPPORTUNISTIC_PRIORITY

    def quota(self, chain: Chain) -> Units[VirtualCell]:
        """The units of a chain that a guaranteed request may have."""
        tenant, pinned = self.virtual_cluster, self.spec.pinned_cell_id
        return tenant.pinned[pinned] if pinned else tenant.quotas[chain.name]


def new_request(
    spec: PodSchedulingSpec,
    suggested: Collection[str],
    chains: Mapping[str, Chain],
    virtual_clusters: Mapping[str, VirtualCluster],
) -> Request:
    """Raises `UserError` when the cluster has no such virtual cluster, pinned cell or leaf cell type."""
    tenant = virtual_clusters.get(spec.virtual_cluster)
    if tenant is None:
        raise UserError(
            f"virtualCluster: there is no virtual cluster {spec.virtual_cluster!r}; use one of "
            f"{', '.join(virtual_clusters)}"
        )
    return Request(
        spec=spec,
        virtual_cluster=tenant,
        chains=_chains(spec, tenant, chains),
        sizes=tuple(
            member.leaf_cell_number
            for member in sorted(spec.affinity_group.members, key=lambda member: -member.leaf_cell_number)
            for _ in range(member.pod_number)
        ),
        suggested=None if spec.ignore_k8s_suggested_nodes else frozenset(suggested),
    )


def _chains(spec: PodSchedulingSpec, tenant: VirtualCluster, chains: Mapping[str, Chain]) -> tuple[Chain, ...]:
    if spec.pinned_cell_id:
        if spec.pinned_cell_id not in tenant.pinned:
            raise UserError(
                f"pinnedCellId: virtual cluster {tenant.name} has no pinned cell {spec.pinned_cell_id!r}; it has "
                f"{', '.join(tenant.pinned) or 'none'}"
            )
        return (tenant.pinned[spec.pinned_cell_id].cells[0].chain,)
    known = [chain for chain in chains.values() if spec.leaf_cell_type in ("", chain.topology.leaf_cell_type)]
    if not known:
        types = dict.fromkeys(chain.topology.leaf_cell_type for chain in chains.values())
        raise UserError(
            f"leafCellType: the cluster has no {spec.leaf_cell_type!r}; leave it out or use one of {', '.join(types)}"
        )
    if spec.priority == OPPORTUNISTIC_PRIORITY:
        return tuple(known)
    granted = tuple(chain for chain in known if chain.name in tenant.quotas)
    if not granted:
        types = dict.fromkeys(chains[name].topology.leaf_cell_type for name in tenant.quotas)
        what = f"no {spec.leaf_cell_type!r} in its quota" if spec.leaf_cell_type else "no cells but pinned ones"
        raise UserError(
            f"leafCellType: virtual cluster {tenant.name} has {what}; use "
            f"{'one of ' + ', '.join(types) if types else 'pinnedCellId'}, or priority -1"
        )
    return granted
