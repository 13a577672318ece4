"""Binding a pod: one POST that sets its node and its annotations together, so there is no pod with only one of them.

The API server takes a binding once. One that it refuses because the pod has a node by now, counts as done if the pod
is as we wanted it: an earlier answer was lost, or somebody else posted the same.
"""

from __future__ import annotations

from collections.abc import Collection

from scheduler.hived.errors import NotNow, UserError
from scheduler.hived.pod_contract import extract_pod_bind_annotations
from scheduler.hived.pod_states import PodScheduleStatus
from store.kube.api import KubeApi
from store.kube.errors import Conflict, KubeError, NotFound
from store.kube.objects import Object, annotations_of, key_of, name_of, namespace_of, uid_of
from store.kube.resources import NODES, PODS


async def bind_pod(api: KubeApi, binding_pod: Object) -> None:
    """Bind a pod to the node in its spec, with the annotations of its placement (the seed's `BindPod`).

    Raises `UserError` when the pod is gone or bound otherwise, and `NotNow` when the API server does not do it.
    """
    try:
        await api.create(
            PODS, binding_of(binding_pod), namespace_of(binding_pod), name=name_of(binding_pod), subresource="binding"
        )
    except NotFound as error:
        raise UserError(f"pod {key_of(binding_pod)} can't be bound: {error}") from error
    except Conflict as error:
        if not await _is_done(api, binding_pod):
            raise UserError(f"pod {key_of(binding_pod)} can't be bound: {error}") from error
    except KubeError as error:
        raise NotNow(f"pod {key_of(binding_pod)} is not bound yet: {error}") from error


def binding_of(binding_pod: Object) -> Object:
    """The Binding to post."""
    metadata = {
        "name": name_of(binding_pod),
        "namespace": namespace_of(binding_pod),
        "uid": uid_of(binding_pod),
        "annotations": extract_pod_bind_annotations(binding_pod),
    }
    target = {"apiVersion": NODES.api_version, "kind": NODES.kind, "name": binding_pod["spec"]["nodeName"]}
    return {"apiVersion": PODS.api_version, "kind": "Binding", "metadata": metadata, "target": target}


def why_force_bind(
    status: PodScheduleStatus, *, threshold: int, suggested: Collection[str], nodes: Collection[str]
) -> str:
    """Why a Binding pod is to be bound without kube-scheduler's help, or "".

    kube-scheduler binds to none but the nodes that it asked about. `threshold`: filters that it may take until then;
    `nodes`: those that exist.
    """
    node = status.pod["spec"]["nodeName"]
    if status.pod_bind_attempts >= threshold:
        return f"after {status.pod_bind_attempts} more filters it is still not bound"
    if node not in nodes:
        return f"node {node} does not exist, or was not seen yet"
    if node not in suggested:
        return f"node {node} is not among those that kube-scheduler asked about"
    return ""


async def _is_done(api: KubeApi, binding_pod: Object) -> bool:
    try:
        pod = await api.get(PODS, name_of(binding_pod), namespace_of(binding_pod))
    except KubeError:
        return False
    wanted = extract_pod_bind_annotations(binding_pod)
    return bool(
        uid_of(pod) == uid_of(binding_pod)
        and pod["spec"].get("nodeName") == binding_pod["spec"]["nodeName"]
        and wanted.items() <= annotations_of(pod).items()
    )
