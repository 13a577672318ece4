"""The calls of kube-scheduler to an extender, without their wire form. Source: k8s.io/kube-scheduler/extender/v1."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from store.kube.objects import Object


@dataclass(frozen=True, slots=True)
class ExtenderArgs:
    """Of filter: the nodes that kube-scheduler itself finds fit for the pod."""

    pod: Object
    node_names: Collection[str]


@dataclass(frozen=True, slots=True)
class ExtenderFilterResult:
    """Exactly one is set: the node to bind to, why each of the failed nodes can't be used, or an error."""

    node_names: tuple[str, ...] | None = None
    failed_nodes: Mapping[str, str] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class ExtenderBindingArgs:
    """Of bind."""

    pod_name: str
    pod_namespace: str
    pod_uid: str
    node: str


@dataclass(frozen=True, slots=True)
class ExtenderBindingResult:
    """`error` "" when the pod is bound."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class MetaVictims:
    """The UIDs of the pods that have to leave a node. `num_pdb_violations`: of disruption budgets, as kube-scheduler
    counts them; it only compares nodes by it.
    """

    pods: tuple[str, ...]
    num_pdb_violations: int = 0


@dataclass(frozen=True, slots=True)
class ExtenderPreemptionArgs:
    """Of preempt: the nodes that would fit the pod if the given victims, maybe none, left."""

    pod: Object
    node_name_to_meta_victims: Mapping[str, MetaVictims]


@dataclass(frozen=True, slots=True)
class ExtenderPreemptionResult:
    """None when there is nothing to preempt."""

    node_name_to_meta_victims: Mapping[str, MetaVictims] | None = None


class ExtenderHandlers(Protocol):
    """Who answers the calls (the seed's `ExtenderHandlers`). Each raises `HivedError` and nothing else on purpose;
    no call may rely on what kube-scheduler was told before having been done.
    """

    async def filter(self, args: ExtenderArgs) -> ExtenderFilterResult:
        """Decide on a pod (the seed's `FilterHandler`)."""

    async def bind(self, args: ExtenderBindingArgs) -> ExtenderBindingResult:
        """Bind a pod to the node that was decided (the seed's `BindHandler`). It may be called any number of times."""

    async def preempt(self, args: ExtenderPreemptionArgs) -> ExtenderPreemptionResult:
        """Name the pods that must go before the pod fits (the seed's `PreemptHandler`)."""
