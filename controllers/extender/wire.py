"""kube-scheduler's calls to an extender, as types and as JSON. Source: k8s.io/kube-scheduler/extender/v1.

The JSON is in the form that kube-scheduler of any version and HiveD's clients use: keys of a body are matched case-
insensitively, and null is the same as absent, as in Go. Answers carry every field, in Go's spelling, with null for Go's
nil. An invalid body raises `UserError`.

A kube-scheduler that does not cache nodes (`nodeCacheCapable: false`) sends whole nodes instead of their names, and
expects one of them back; they pass through undecoded. Only `Nodes` may be large: a pod and the names of nodes have a
smaller bound, because decoding them takes much more time and memory than their size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from scheduler.hived.errors import HivedError, NotNow, UserError
from store.decoding import Undecodable, from_json, json_decoder
from store.kube.api.objects import Object

COMPONENT = "hivedscheduler"
MOST_OF_A_FIELD = 1024 * 1024  # bytes; the API server accepts no larger object
BYTES_PER_COMMA = 16  # least size of a list item; decoding smaller items takes many times their size in memory

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ExtenderArgs:
    """Arguments of filter: the nodes that kube-scheduler finds fit for the pod."""

    pod: Object
    node_names: Collection[str]


@dataclass(frozen=True, slots=True)
class ExtenderFilterResult:
    """Exactly one is set: the node to bind to, the reason for each failed node, or an error."""

    node_names: tuple[str, ...] | None = None
    failed_nodes: Mapping[str, str] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class ExtenderBindingArgs:
    """Arguments of bind."""

    pod_name: str
    pod_namespace: str
    pod_uid: str
    node: str


@dataclass(frozen=True, slots=True)
class ExtenderBindingResult:
    """Result of bind; `error` is "" if the pod is bound."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class MetaVictims:
    """The UIDs of the victims on a node. `num_pdb_violations`: kube-scheduler's count of violated disruption budgets,
    which it only uses to compare nodes.
    """

    pods: tuple[str, ...]
    num_pdb_violations: int = 0


@dataclass(frozen=True, slots=True)
class ExtenderPreemptionArgs:
    """Arguments of preempt: the nodes that would fit the pod without the given victims, if any."""

    pod: Object
    node_name_to_meta_victims: Mapping[str, MetaVictims]


@dataclass(frozen=True, slots=True)
class ExtenderPreemptionResult:
    """Result of preempt: the victims by node, None if there are none."""

    node_name_to_meta_victims: Mapping[str, MetaVictims] | None = None


class ExtenderHandlers(Protocol):
    """Handlers of the calls. Each raises only `HivedError`, apart from defects; none may assume that kube-scheduler
    carried out an earlier answer.
    """

    async def filter(self, args: ExtenderArgs) -> ExtenderFilterResult:
        """Decide on a pod (HiveD's `FilterHandler`)."""

    async def bind(self, args: ExtenderBindingArgs) -> ExtenderBindingResult:
        """Bind a pod to the node that was decided (HiveD's `BindHandler`). May be called repeatedly."""

    async def preempt(self, args: ExtenderPreemptionArgs) -> ExtenderPreemptionResult:
        """Return the pods to evict before the pod fits (HiveD's `PreemptHandler`)."""


class _Metadata(msgspec.Struct):
    name: str
    namespace: str
    uid: str
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None


class _Resources(msgspec.Struct):
    limits: dict[str, str | int | float] | None = None


class _Container(msgspec.Struct):
    resources: _Resources | None = None


class _PodSpec(msgspec.Struct, rename="camel"):
    node_name: str | None = None
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None


class _PodStatus(msgspec.Struct):
    phase: str | None = None


class _Pod(msgspec.Struct):
    """The fields of a pod whose types are checked, so that other code can rely on them."""

    metadata: _Metadata
    spec: _PodSpec | None = None
    status: _PodStatus | None = None


class _NodeMetadata(msgspec.Struct):
    name: str


class _Node(msgspec.Struct):
    metadata: _NodeMetadata


class _NodeList(msgspec.Struct):
    items: list[msgspec.Raw] | None = None


@dataclass(frozen=True, slots=True)
class FilterCall:
    """A filter. `nodes`: the undecoded nodes by name, if the call has no names."""

    args: ExtenderArgs
    nodes: Mapping[str, msgspec.Raw] | None = None


def decode_filter(body: bytes) -> FilterCall:
    """Decode a filter call; without nodes, its list is empty."""
    fields = _fields(body, "ExtenderArgs")
    names, nodes = _field(fields, "NodeNames", list[str]), None
    if names is None:
        if (raw := fields.get("nodes")) is not None:
            _check_dense(raw, "Nodes")
            listed: _NodeList | None = _decode(raw, _NodeList | None, "Nodes")
            items = None if listed is None else listed.items or ()
            if items is not None:
                nodes = {_decode(item, _Node, "Nodes.items").metadata.name: item for item in items}
        names = list(nodes or ())
    return FilterCall(ExtenderArgs(_pod(fields), names), nodes)


def encode_filter(result: ExtenderFilterResult, call: FilterCall | None = None) -> bytes:
    """Encode the answer to `call`; None if its body could not be read."""
    chosen: list[msgspec.Raw] | None = None
    if call is not None and call.nodes is not None and result.node_names is not None:
        chosen = [call.nodes[name] for name in result.node_names if name in call.nodes]
    answer = {
        "Nodes": None if chosen is None else {"metadata": {}, "items": chosen},
        "NodeNames": result.node_names if chosen is None else None,
        "FailedNodes": result.failed_nodes,
        "Error": result.error,
    }
    return msgspec.json.encode(answer)


def decode_bind(body: bytes) -> ExtenderBindingArgs:
    """Decode a bind call. All four fields are required."""
    fields = _fields(body, "ExtenderBindingArgs")
    found = {name: _field(fields, name, str) or "" for name in ("PodName", "PodNamespace", "PodUID", "Node")}
    if missing := [name for name, value in found.items() if not value]:
        raise UserError(f"ExtenderBindingArgs: {', '.join(missing)} must not be empty")
    return ExtenderBindingArgs(found["PodName"], found["PodNamespace"], found["PodUID"], found["Node"])


def encode_bind(result: ExtenderBindingResult) -> bytes:
    return msgspec.json.encode({"Error": result.error})


def decode_preempt(body: bytes) -> ExtenderPreemptionArgs:
    """Decode a preempt call. Victims are UIDs or, where nodes are not cached, whole pods."""
    fields = _fields(body, "ExtenderPreemptionArgs")
    victims = _field(fields, "NodeNameToMetaVictims", dict[str, dict[str, Any] | None])
    if victims is None:
        victims, raw = {}, fields.get("nodenametovictims")
        if raw is not None:
            _check_dense(raw, "NodeNameToVictims")
            whole = _decode(raw, dict[str, dict[str, msgspec.Raw] | None] | None, "NodeNameToVictims") or {}
            victims = {node: None if each is None else _without_pods(each) for node, each in whole.items()}
    pod, decoded = _pod(fields), {}
    for node, each in victims.items():
        victim = _lowered(each)
        pods, violations = victim.get("pods") or [], victim.get("numpdbviolations") or 0
        if not isinstance(pods, list) or not isinstance(violations, int):
            raise UserError(f"NodeNameToMetaVictims[{node}]: Pods must be a list and NumPDBViolations an integer")
        found = (each.get("uid") or _lowered(each.get("metadata")).get("uid") for each in map(_lowered, pods))
        uids = tuple(uid for uid in found if isinstance(uid, str))
        if len(uids) < len(pods):
            raise UserError(f"NodeNameToMetaVictims[{node}]: each of Pods must have a UID")
        decoded[node] = MetaVictims(uids, violations)
    return ExtenderPreemptionArgs(pod, decoded)


def encode_preempt(result: ExtenderPreemptionResult) -> bytes:
    victims = result.node_name_to_meta_victims
    answer = None
    if victims is not None:
        answer = {
            node: {"Pods": [{"UID": uid} for uid in found.pods], "NumPDBViolations": found.num_pdb_violations}
            for node, found in victims.items()
        }
    return msgspec.json.encode({"NodeNameToMetaVictims": answer})


def error_message(error: HivedError) -> str:
    """Return the message for a person: who can fix the error, and the problem."""
    kind = "User Error" if error.code < 500 else "Not Now" if isinstance(error, NotNow) else "Platform Error"
    return f"{COMPONENT}: {kind}: {error}"


def error_text(error: HivedError) -> str:
    """Return the text of the field `Error`, which includes the code."""
    return f"Code: {error.code}, Message: {error_message(error)}"


def _fields(body: bytes, expected: str) -> dict[str, msgspec.Raw]:
    """Return the fields by lower-case name."""
    fields = _decode(body, dict[str, msgspec.Raw] | None, expected)
    return {name.lower(): value for name, value in (fields or {}).items()}


def _field(fields: Mapping[str, msgspec.Raw], name: str, expected: type[T]) -> T | None:
    raw = fields.get(name.lower())
    found: T | None = None if raw is None else _decode(_small(raw, name), expected | None, name)
    return found


def _small(raw: msgspec.Raw, name: str) -> msgspec.Raw:
    size = memoryview(raw).nbytes
    if size > MOST_OF_A_FIELD:
        raise UserError(f"{name} has {size} bytes; at most {MOST_OF_A_FIELD} are accepted")
    return raw


def _check_dense(raw: msgspec.Raw, name: str) -> None:
    """Refuse large values of tiny items, which no Kubernetes objects are."""
    found = bytes(raw)
    if len(found) > MOST_OF_A_FIELD and found.count(b",") > len(found) // BYTES_PER_COMMA:
        raise UserError(f"{name} does not consist of Kubernetes objects: its items are too short")


def _pod(fields: Mapping[str, msgspec.Raw]) -> Object:
    raw = fields.get("pod")
    if raw is None or _decode(_small(raw, "Pod"), _Pod | None, "Pod") is None:
        raise UserError("Pod must not be null")
    pod: Object = _decode(raw, dict[str, Any], "Pod")
    return pod


def _without_pods(fields: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Decode the victims of a call that names them as whole pods. Only the metadata of each pod is decoded, because the
    pods may be many and large."""
    kept: dict[str, Any] = {}
    for name, raw in fields.items():
        if name.lower() == "pods":
            pods = _decode(raw, list[dict[str, msgspec.Raw] | None] | None, "Pods") or []
            kept["pods"] = [
                {
                    key: _decode(value, Any, key)
                    for key, value in (pod or {}).items()
                    if key.lower() in ("metadata", "uid")
                }
                for pod in pods
            ]
        else:
            kept[name] = _decode(_small(raw, name), Any, name)
    return kept


def _lowered(found: Any) -> dict[str, Any]:
    return {name.lower(): value for name, value in found.items()} if isinstance(found, dict) else {}


def _decode(raw: bytes | msgspec.Raw, expected: Any, what: str) -> Any:
    try:
        return from_json(json_decoder(expected), raw, check_depth=False)
    except Undecodable as error:
        raise UserError(f"{what} can't be read: {error}") from error
