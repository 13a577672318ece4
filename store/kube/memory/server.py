"""The verbs of `MemoryKube` as plain functions of its state, each applied at once.

Objects passed in belong to the server from then on, and returned ones remain its own: the caller copies both ways.

The server never computes the status of a disruption budget: a test or a controller writes its `disruptionsAllowed`,
and each eviction takes one. A budget whose status is older than its spec refuses every eviction. A budget without a
selector covers nothing, as in policy/v1beta1.
"""

from __future__ import annotations

import base64
import binascii
import random
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from store.kube.api.errors import KubeError, ServerError
from store.kube.api.objects import (
    POD_DISRUPTION_BUDGETS,
    PODS,
    Object,
    Resource,
    is_deleting,
    key_of,
    labels_of,
    name_of,
    namespace_of,
    uid_of,
)
from store.kube.api.patches import BadPatch, apply_json_patch, apply_merge_patch, apply_strategic_merge_patch
from store.kube.api.protocol import PatchType, Propagation, WatchEvent
from store.kube.memory.errors import (
    already_exists,
    bad_request,
    budget_holds,
    conflict,
    invalid,
    namespace_is_ending,
    not_found,
    not_served,
    too_large_version,
)
from store.kube.memory.rules import (
    CUSTOM,
    CUSTOM_WITH_STATUS,
    NAMESPACES,
    Kind,
    Place,
    binding,
    built_in_kind,
    check_size,
    is_built_in,
    is_definition,
    place_of,
    plan_deletion,
    prepare_create,
    prepare_update,
)
from store.kube.memory.state import ServerState
from store.kube.memory.watch import BadFieldSelector, FieldSelector, Scope
from store.schema.selectors import BadSelector, Selector

_SUFFIX_CHARACTERS = "bcdfghjklmnpqrstvwxz2456789"
AdmissionHook = Callable[[Resource, Object, Object | None], None]
_UNDISRUPTED = ("Pending", "Succeeded", "Failed")  # phases in which a pod serves no requests
_OPERATORS = {
    "In": "{key} in ({values})",
    "NotIn": "{key} notin ({values})",
    "Exists": "{key}",
    "DoesNotExist": "!{key}",
}


@dataclass(frozen=True, slots=True)
class ListPage:
    """A page, and the token of the next one, "" on the last. `remaining`: how many items follow, None: not counted."""

    items: list[Object]
    version: int
    next_token: str
    remaining: int | None


class Token(NamedTuple):
    version: int
    after: str

    def encode(self) -> str:
        """Return the token in its opaque form for callers."""
        return base64.urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def decode(cls, text: str) -> Token:
        """Decode a token. Raises `BadRequest`."""
        try:
            return msgspec.json.decode(base64.urlsafe_b64decode(text), type=cls)
        except (binascii.Error, msgspec.DecodeError, ValueError) as error:
            raise bad_request(f"invalid continue token: {error}") from None


class MemoryServer:
    """See `MemoryKube` for what the parameters mean."""

    def __init__(
        self, clock: Callable[[], float], rng: random.Random, history_limit: int, unserved: Collection[Resource]
    ) -> None:
        self.state = ServerState(history_limit)
        self.admission: AdmissionHook | None = None
        self._clock, self._rng = clock, rng
        self._unserved = frozenset(unserved)
        self._custom: dict[Place, Kind] = {}

    def serves(self, resource: Resource) -> bool:
        plural, slash, _ = resource.plural.partition("/")
        custom = self._custom.get((resource.group, plural))
        return resource not in self._unserved and not (slash and custom is CUSTOM)

    def register(self, place: Place, *, has_status: bool) -> None:
        """Declare whether the custom resources of `place` have a status subresource."""
        self._custom[place] = CUSTOM_WITH_STATUS if has_status else CUSTOM

    def knows(self, reference: Object) -> bool:
        """Return whether the kind of an owner reference exists, as far as the server knows."""
        group, slash, _ = str(reference["apiVersion"]).rpartition("/")
        return (
            not slash or is_built_in(group) or any(place[0] == group for place in (*self._custom, *self.state.places))
        )

    def scope(self, resource: Resource, namespace: str, labels: str, fields: str) -> Scope:
        """Return the scope of a list or watch. Raises `BadRequest` for invalid selectors."""
        kind = self._kind(resource)
        try:
            return Scope(
                resource,
                namespace if resource.namespaced else "",
                Selector.parse(labels),
                FieldSelector.parse(fields, allowed=kind.selectable),
            )
        except (BadSelector, BadFieldSelector) as error:
            raise bad_request(str(error)) from None

    def get(self, resource: Resource, name: str, namespace: str, subresource: str = "") -> Object:
        """Return the stored object. Raises `NotFound`."""
        found = self._find(resource, name, namespace, subresource)
        if found is None:
            raise not_found(resource, name)
        return found

    def list(self, scope: Scope, version: str, limit: int, continue_token: str) -> ListPage:
        """Return one page; version "0" ignores `limit`, as the API server's cache does."""
        if continue_token and version:
            raise bad_request("specifying resource version is not allowed when using continue")
        if not continue_token and version and _number(version) > self.state.version:
            raise too_large_version(_number(version), self.state.version)
        token = Token.decode(continue_token) if continue_token else Token(self.state.version, "")
        found = self.state.items_at(token.version, place_of(scope.resource), scope.namespace)
        matching = [obj for obj in found if key_of(obj) > token.after and scope.has(obj)]
        items = matching[:limit] if limit and version != "0" else matching
        remaining = len(matching) - len(items)
        next_token = Token(token.version, key_of(items[-1])).encode() if remaining else ""
        return ListPage(items, token.version, next_token, remaining if remaining and scope.is_everything() else None)

    def past_events(self, scope: Scope, version: str) -> Sequence[WatchEvent]:
        """Return the first events of a watch: the changes since `version`; for "" and "0", all existing objects. Raises
        `Expired`."""
        if version in ("", "0"):
            found = self.state.items(place_of(scope.resource), scope.namespace)
            return [WatchEvent("ADDED", obj) for obj in found if scope.has(obj)]
        events = map(scope.event, self.state.changes_since(_number(version)))
        return [event for event in events if event is not None]

    def create(self, resource: Resource, body: Object, namespace: str) -> Object:
        """Create the object. Return it as stored."""
        kind = self._kind(resource)
        if resource.namespaced and not namespace:
            message = "the server does not allow this method on the requested resource: a namespace is missing"
            raise KubeError(message, status=405, reason="MethodNotAllowed")
        if (body.get("metadata") or {}).get("resourceVersion"):
            raise ServerError("resourceVersion should not be set on objects to be created", status=500)
        namespace = namespace if resource.namespaced else ""
        obj = prepare_create(
            kind,
            resource,
            body,
            namespace,
            now=self._clock(),
            uid=str(uuid.UUID(int=self._rng.getrandbits(128), version=4)),
            suffix=lambda: "".join(self._rng.choices(_SUFFIX_CHARACTERS, k=5)),
        )
        self._check_namespace(resource, obj)
        if self.state.get(place_of(resource), (namespace, name_of(obj))) is not None:
            raise already_exists(resource, name_of(obj))
        self._admit(resource, obj, None)
        if is_definition(resource):
            obj = self._define(obj)
        return self.state.write(place_of(resource), obj)

    def post(self, resource: Resource, body: Object, namespace: str, name: str, subresource: str) -> None:
        """Apply a post to a subresource."""
        pod = self.get(resource, name, namespace)
        if place_of(resource) == place_of(PODS) and subresource == "binding":
            self.state.write(place_of(resource), binding(resource, pod, body, self._clock()))
        elif place_of(resource) == place_of(PODS) and subresource == "eviction":
            self._evict(pod, body)
        else:
            raise not_served(resource, subresource)

    def replace(self, resource: Resource, body: Object, subresource: str) -> Object:
        """Replace the object. Return it as stored."""
        name, namespace = name_of(body), namespace_of(body)
        old = self._find(resource, name, namespace, subresource)
        if old is not None:
            return self._update(resource, old, body, subresource, is_patch=False)
        if uid_of(body):
            raise conflict(resource, name, f"Precondition failed: UID in precondition: {uid_of(body)}")
        if subresource or not self._kind(resource).replace_creates:
            raise not_found(resource, name)
        metadata = {key: value for key, value in body["metadata"].items() if key != "resourceVersion"}
        return self.create(resource, body | {"metadata": metadata}, namespace)

    def patch(
        self, resource: Resource, name: str, namespace: str, patch: Any, patch_type: PatchType, subresource: str
    ) -> Object:
        """Patch the object. Return it as stored."""
        old = self._find(resource, name, namespace, subresource)
        if patch_type == "strategic" and self._kind(resource).is_custom:
            message = "the body of the request was in an unknown format: custom resources have no strategic merge"
            raise KubeError(message, status=415, reason="UnsupportedMediaType")
        if old is None:
            raise not_found(resource, name)
        body = self._patched(resource, old, patch, patch_type)
        return self._update(resource, old, body, subresource, is_patch=True)

    def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str,
        uid: str,
        grace_period: int | None,
        propagation: Propagation | None,
    ) -> None:
        obj = self.get(resource, name, namespace)
        if uid and uid != uid_of(obj):
            raise conflict(resource, name, f"the UID in the precondition ({uid}) does not match that of the object")
        place = place_of(resource)
        plan = plan_deletion(place, obj, now=self._clock(), grace_period=grace_period, propagation=propagation)
        self.state.delete(place, obj, plan)

    def _evict(self, pod: Object, body: Object) -> None:
        version = str(body.get("apiVersion") or "").removeprefix(f"{POD_DISRUPTION_BUDGETS.group}/")
        if not self.serves(POD_DISRUPTION_BUDGETS.in_version(version)):
            raise bad_request(f'no kind "Eviction" is registered for version "{body.get("apiVersion")}"')
        options = body.get("deleteOptions") or {}
        uid = (options.get("preconditions") or {}).get("uid") or ""
        place = place_of(POD_DISRUPTION_BUDGETS)
        if (not uid or uid == uid_of(pod)) and (
            budget := budget_to_spend(pod, self.state.items(place, namespace_of(pod)))
        ):
            self.state.write(place, spent(budget))
        grace, propagation = options.get("gracePeriodSeconds"), options.get("propagationPolicy")
        self.delete(PODS, name_of(pod), namespace_of(pod), uid, grace, propagation)

    def _find(self, resource: Resource, name: str, namespace: str, subresource: str) -> Object | None:
        kind = self._kind(resource)
        if resource.namespaced and not namespace:
            raise not_served(resource)
        if subresource and not (subresource == "status" and kind.has_status):
            raise not_served(resource, subresource)
        return self.state.get(place_of(resource), (namespace if resource.namespaced else "", name))

    def _kind(self, resource: Resource) -> Kind:
        if not self.serves(resource):
            raise not_served(resource)
        return built_in_kind(resource) if is_built_in(resource.group) else self._custom.get(place_of(resource), CUSTOM)

    def _update(self, resource: Resource, old: Object, body: Object, subresource: str, *, is_patch: bool) -> Object:
        kind = self._kind(resource)
        new = prepare_update(kind, resource, old, body, subresource=subresource, is_patch=is_patch)
        if new != old:
            self._admit(resource, new, old)
        return self.state.update(place_of(resource), old, new)

    def _patched(self, resource: Resource, old: Object, patch: Any, patch_type: PatchType) -> Object:
        old = old | {"apiVersion": resource.api_version}
        try:
            if patch_type == "json":
                patched = apply_json_patch(old, patch)
            elif patch_type == "merge":
                patched = apply_merge_patch(old, patch)
            else:
                patched = apply_strategic_merge_patch(old, patch)
        except BadPatch as error:
            raise invalid(resource, name_of(old), "patch", str(error)) from None
        if not isinstance(patched, dict) or not isinstance(patched.get("metadata"), dict):
            raise invalid(resource, name_of(old), "patch", "the result is no object")
        return patched

    def _check_namespace(self, resource: Resource, obj: Object) -> None:
        if not resource.namespaced:
            return
        namespace = self.state.get(place_of(NAMESPACES), ("", namespace_of(obj)))
        if namespace is None:
            raise not_found(NAMESPACES, namespace_of(obj))
        if is_deleting(namespace):
            raise namespace_is_ending(resource, name_of(obj), namespace_of(obj))

    def _admit(self, resource: Resource, new: Object, old: Object | None) -> None:
        check_size(resource, new)
        if self.admission is not None:
            self.admission(resource, new, old)

    def _define(self, definition: Object) -> Object:
        """Register a CustomResourceDefinition; its resource is served at once."""
        spec = definition["spec"]
        has_status = any("status" in (version.get("subresources") or {}) for version in spec["versions"])
        self.register((spec["group"], spec["names"]["plural"]), has_status=has_status)
        conditions = [{"type": kind, "status": "True"} for kind in ("NamesAccepted", "Established")]
        return definition | {"status": {"conditions": conditions}}


def _number(version: str) -> int:
    if not version.isdecimal():
        raise ServerError(f"resourceVersion: Invalid value: {version!r}", status=500)
    return int(version)


def budget_to_spend(pod: Object, budgets: Sequence[Object]) -> Object | None:
    """Return the budget that an eviction of the pod takes from; None when no budget applies.

    Raises `TooManyRequests` when the budget is used up, and `ServerError` when the pod is in several.
    """
    if is_deleting(pod) or pod["status"].get("phase") in _UNDISRUPTED:
        return None
    covering = [budget for budget in budgets if _covers(budget["spec"].get("selector") or {}, pod)]
    if not covering:
        return None
    if len(covering) > 1:
        message = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        raise ServerError(message, status=500)
    budget = covering[0]
    name, status = name_of(budget), budget.get("status") or {}
    if status.get("observedGeneration", 0) < budget["metadata"].get("generation", 0):
        raise budget_holds(name, f"The disruption budget {name} is still being processed.")
    if status.get("disruptionsAllowed", 0) <= 0:
        raise budget_holds(name, f"The disruption budget {name} allows no disruption.")
    return budget


def spent(budget: Object) -> Object:
    """Return the budget after one eviction."""
    status = budget["status"]
    return budget | {"status": status | {"disruptionsAllowed": status["disruptionsAllowed"] - 1}}


def _covers(selector: dict[str, Any], pod: Object) -> bool:
    terms = [f"{key}={value}" for key, value in (selector.get("matchLabels") or {}).items()]
    for term in selector.get("matchExpressions") or ():
        values = ",".join(term.get("values") or ())
        terms.append(_OPERATORS[term["operator"]].format(key=term["key"], values=values))
    return bool(terms) and Selector.parse(",".join(terms)).matches(labels_of(pod))
