"""MemoryKube: a Kubernetes API server in memory, for tests of control loops, also in virtual time.

The model: each call is applied in one step of the event loop, so calls are serial, and each sees all that were answered
before; the answer is handed over one loop iteration later, as a real server's would be, so other tasks run between a
read and the reader's next step. Objects are copied on the way in and out, as by a network.

As in the API server: UIDs, resource versions and generations; generated names; preconditions; finalizers and deletion;
pods that end gracefully; owner references with foreground, background and orphan deletion; the status as a subresource;
three kinds of patches; selectors; pages that show one version; watches over a history that can be compacted; namespaces
that end; bindings, and evictions within disruption budgets. Garbage is collected by timers of the event loop.

The server never computes the status of a disruption budget: a test or a controller writes its `disruptionsAllowed`,
and each eviction takes one. A budget whose status is older than its spec refuses every eviction. A budget without a
selector covers nothing, as in policy/v1beta1.

Not implemented: authentication, schemas (fields are not checked or pruned), most defaults and validations, quotas,
server-side apply, cluster IPs. Nothing runs pods, and no scheduler binds them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec

from store.kube.api.errors import KubeError, ServerError, Unreachable
from store.kube.api.objects import (
    CUSTOM_RESOURCE_DEFINITIONS,
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
from store.kube.api.protocol import Page, PatchType, Propagation, WatchEvent
from store.kube.memory.rules import (
    CUSTOM,
    CUSTOM_WITH_STATUS,
    KINDS,
    NAMESPACES,
    OTHER_BUILT_IN,
    Kind,
    Place,
    already_exists,
    bad_request,
    binding,
    budget_holds,
    check_size,
    conflict,
    copy_of,
    invalid,
    is_built_in,
    namespace_is_ending,
    not_found,
    not_served,
    place_of,
    plan_deletion,
    prepare_create,
    prepare_update,
    too_large_version,
)
from store.kube.memory.state import (
    BadFieldSelector,
    Collector,
    FieldSelector,
    ObjectChange,
    Scope,
    ServerState,
    Watcher,
)
from store.schema.selectors import BadSelector, Selector

_SUFFIX_CHARACTERS = "bcdfghjklmnpqrstvwxz2456789"
AdmissionHook = Callable[[Resource, Object, Object | None], None]
_UNDISRUPTED = ("Pending", "Succeeded", "Failed")  # phases in which a pod serves no requests
_PATCHES: Mapping[PatchType, Callable[[Any, Any], Any]] = {
    "json": apply_json_patch,
    "merge": apply_merge_patch,
    "strategic": apply_strategic_merge_patch,
}
_OPERATORS = {
    "In": "{key} in ({values})",
    "NotIn": "{key} notin ({values})",
    "Exists": "{key}",
    "DoesNotExist": "!{key}",
}


class Call(NamedTuple):
    """A call as the hooks see it. `body`: the object that a write sends; for a patch, the patch."""

    verb: str
    resource: Resource
    namespace: str
    name: str = ""
    subresource: str = ""
    body: Any = None


Hook = Callable[[Call], Awaitable[None] | None]


class ListPage(NamedTuple):
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


class MemoryKube:
    """A `KubeApi` without a server; one instance belongs to one event loop.

    `clock`: Unix seconds, for timestamps. `rng`: makes UIDs and generated names. `namespaces`: exist from the start.
    `history_limit`: number of past changes that watches can see. `gc_delay`: seconds until garbage is collected
    (None: never).
    `unserved`: resources that the server does not have. Custom resources need no definition, see `register`.

    `admission`: a function (resource, new, old) that may refuse a write by raising; `old` is None for a creation.

    Hooks, which may be set at any time: `before_call` may wait or raise a `KubeError`, then nothing was applied.
    `after_call` may do so when the call was applied: its answer is late, or lost. Either may be a plain function.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        namespaces: Sequence[str] = ("default",),
        history_limit: int = 10_000,
        gc_delay: float | None = 0.0,
        unserved: Collection[Resource] = (),
    ) -> None:
        self.before_call: Hook | None = None
        self.after_call: Hook | None = None
        self.admission: AdmissionHook | None = None
        self._state = ServerState(history_limit)
        self._clock, self._rng = clock, rng or random.Random()
        self._unserved = frozenset(unserved)
        self._custom: dict[Place, Kind] = {}
        self._watchers: dict[Watcher, None] = {}
        for name in namespaces:
            self._create(NAMESPACES, {"metadata": {"name": name}}, "")
        self._state.listeners.append(self._notify)
        if gc_delay is not None:
            Collector(self._state, self._knows, gc_delay, clock)

    @property
    def version(self) -> int:
        """The resource version of the last write."""
        return self._state.version

    @property
    def watch_count(self) -> int:
        """The number of open watches."""
        return len(self._watchers)

    def register(self, resource: Resource, *, has_status: bool) -> None:
        """Declare whether a custom resource has a status subresource. Without this or a definition, it has none."""
        self._custom[place_of(resource)] = CUSTOM_WITH_STATUS if has_status else CUSTOM

    def compact(self) -> None:
        """Forget all history: earlier versions for watches, and page tokens that a write made stale, are `Expired`."""
        self._state.compact()

    def break_watches(self, error: KubeError | None = None) -> None:
        """End all open watches with an error, by default that of a lost connection."""
        for watcher in self._watchers:
            watcher.end(error or Unreachable("the connection was lost"))

    async def get(self, resource: Resource, name: str, namespace: str = "") -> Object:
        """See `KubeApi.get`."""
        async with self._called(Call("get", resource, namespace, name)):
            found = self._get(resource, name, namespace)
        return _outgoing(resource, found)

    async def list(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        label_selector: str = "",
        field_selector: str = "",
        resource_version: str = "",
        limit: int = 0,
        continue_token: str = "",
    ) -> Page:
        """See `KubeApi.list`. As from the server's cache, version "0" answers everything in one page."""
        async with self._called(Call("list", resource, namespace)):
            scope = self._scope(resource, namespace, label_selector, field_selector)
            found = self._page(scope, resource_version, limit, continue_token)
        items = [_outgoing(resource, obj) for obj in found.items]
        if is_built_in(resource.group):  # items of these kinds carry no kind and version
            for item in items:
                del item["apiVersion"], item["kind"]
        return Page(items, str(found.version), found.next_token, found.remaining)

    @asynccontextmanager
    async def watch(
        self,
        resource: Resource,
        namespace: str = "",
        *,
        resource_version: str,
        label_selector: str = "",
        field_selector: str = "",
        timeout: float,
    ) -> AsyncIterator[AsyncIterator[WatchEvent]]:
        """See `KubeApi.watch`. Versions "" and "0" begin with the existing objects, as ADDED."""
        call = Call("watch", resource, namespace)
        await _run(self.before_call, call)
        scope = self._scope(resource, namespace, label_selector, field_selector)
        watcher = Watcher(scope, self._past_events(scope, resource_version), _outgoing)
        self._watchers[watcher] = None
        try:
            await asyncio.sleep(0)
            await _run(self.after_call, call)
            yield watcher.events(timeout, lambda: self.version)
        finally:
            del self._watchers[watcher]

    async def create(
        self, resource: Resource, body: Object, namespace: str = "", *, name: str = "", subresource: str = ""
    ) -> Object:
        """See `KubeApi.create`. Subresources to post to: `binding` and `eviction` of pods."""
        body = copy_of(body)
        metadata = body.get("metadata") or {}
        name_in_body = str(metadata.get("name") or metadata.get("generateName") or "")
        call = Call("create", resource, namespace, name or name_in_body, subresource, body)
        async with self._called(call):
            if not subresource:
                stored = self._create(resource, body, namespace)
            else:
                pod = self._get(resource, name, namespace)
                if place_of(resource) == place_of(PODS) and subresource == "binding":
                    self._state.write(place_of(resource), binding(resource, pod, body, self._clock()))
                elif place_of(resource) == place_of(PODS) and subresource == "eviction":
                    self._evict(pod, body)
                else:
                    raise not_served(resource, subresource)
        if subresource:
            return {"apiVersion": "v1", "kind": "Status", "status": "Success", "code": 201}
        return _outgoing(resource, stored)

    async def replace(self, resource: Resource, body: Object, *, subresource: str = "") -> Object:
        """See `KubeApi.replace`."""
        body = copy_of(body)
        name, namespace = name_of(body), namespace_of(body)
        async with self._called(Call("replace", resource, namespace, name, subresource, body)):
            old = self._find(resource, name, namespace, subresource)
            if old is not None:
                stored = self._update(resource, old, body, subresource, is_patch=False)
            elif uid_of(body):
                raise conflict(resource, name, f"Precondition failed: UID in precondition: {uid_of(body)}")
            elif subresource or not self._kind(resource).replace_creates:
                raise not_found(resource, name)
            else:
                metadata = {key: value for key, value in body["metadata"].items() if key != "resourceVersion"}
                stored = self._create(resource, body | {"metadata": metadata}, namespace)
        return _outgoing(resource, stored)

    async def patch(
        self,
        resource: Resource,
        name: str,
        namespace: str,
        patch: Object | Sequence[Any],
        *,
        patch_type: PatchType = "merge",
        subresource: str = "",
    ) -> Object:
        """See `KubeApi.patch`."""
        patch = copy_of(patch)
        async with self._called(Call("patch", resource, namespace, name, subresource, patch)):
            old = self._find(resource, name, namespace, subresource)
            if patch_type == "strategic" and self._kind(resource).is_custom:
                message = "the body of the request was in an unknown format: custom resources have no strategic merge"
                raise KubeError(message, status=415, reason="UnsupportedMediaType")
            if old is None:
                raise not_found(resource, name)
            try:
                body = _PATCHES[patch_type](old | {"apiVersion": resource.api_version}, patch)
            except BadPatch as error:
                raise invalid(resource, name, "patch", str(error)) from None
            if not isinstance(body, dict) or not isinstance(body.get("metadata"), dict):
                raise invalid(resource, name, "patch", "the result is no object")
            stored = self._update(resource, old, body, subresource, is_patch=True)
        return _outgoing(resource, stored)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str = "",
        *,
        uid: str = "",
        grace_period: int | None = None,
        propagation: Propagation | None = None,
    ) -> None:
        """See `KubeApi.delete`."""
        async with self._called(Call("delete", resource, namespace, name)):
            self._delete(resource, name, namespace, uid, grace_period, propagation)

    async def served(self, resource: Resource, *, fresh: bool = False) -> bool:
        """See `KubeApi.served`."""
        await _run(self.before_call, Call("served", resource, ""))
        return self._serves(resource)

    @asynccontextmanager
    async def _called(self, call: Call) -> AsyncIterator[None]:
        """Run the hooks around a block that applies the call at once."""
        await _run(self.before_call, call)
        yield
        await asyncio.sleep(0)
        await _run(self.after_call, call)

    def _notify(self, change: ObjectChange) -> None:
        for watcher in self._watchers:
            watcher.notice(change)

    def _serves(self, resource: Resource) -> bool:
        plural, slash, _ = resource.plural.partition("/")
        custom = self._custom.get((resource.group, plural))
        return resource not in self._unserved and not (slash and custom is CUSTOM)

    def _knows(self, reference: Object) -> bool:
        """Return whether the kind of an owner reference exists, as far as the server knows."""
        group, slash, _ = str(reference["apiVersion"]).rpartition("/")
        return (
            not slash or is_built_in(group) or any(place[0] == group for place in (*self._custom, *self._state.places))
        )

    def _scope(self, resource: Resource, namespace: str, labels: str, fields: str) -> Scope:
        """Return the scope of a list or watch. Raises `BadRequest` for invalid selectors."""
        kind = self._kind(resource)
        try:
            return Scope(
                resource,
                namespace if resource.namespaced else "",
                Selector.parse(labels),
                FieldSelector.parse(fields, allowed=kind.fields | {"metadata.name", "metadata.namespace"}),
            )
        except (BadSelector, BadFieldSelector) as error:
            raise bad_request(str(error)) from None

    def _get(self, resource: Resource, name: str, namespace: str) -> Object:
        """Return the stored object. Raises `NotFound`."""
        found = self._find(resource, name, namespace)
        if found is None:
            raise not_found(resource, name)
        return found

    def _page(self, scope: Scope, version: str, limit: int, continue_token: str) -> ListPage:
        """Return one page; version "0" ignores `limit`, as the API server's cache does."""
        if continue_token and version:
            raise bad_request("specifying resource version is not allowed when using continue")
        if not continue_token and version and _number(version) > self._state.version:
            raise too_large_version(_number(version), self._state.version)
        token = Token.decode(continue_token) if continue_token else Token(self._state.version, "")
        found = self._state.items_at(token.version, place_of(scope.resource), scope.namespace)
        matching = [obj for obj in found if key_of(obj) > token.after and scope.has(obj)]
        items = matching[:limit] if limit and version != "0" else matching
        remaining = len(matching) - len(items)
        next_token = Token(token.version, key_of(items[-1])).encode() if remaining else ""
        is_counted = remaining and not scope.labels.text and not scope.fields.terms
        return ListPage(items, token.version, next_token, remaining if is_counted else None)

    def _past_events(self, scope: Scope, version: str) -> Sequence[WatchEvent]:
        """Return the first events of a watch: the changes since `version`; for "" and "0", all existing objects. Raises
        `Expired`."""
        if version in ("", "0"):
            found = self._state.items(place_of(scope.resource), scope.namespace)
            return [WatchEvent("ADDED", obj) for obj in found if scope.has(obj)]
        events = map(scope.event, self._state.changes_since(_number(version)))
        return [event for event in events if event is not None]

    def _create(self, resource: Resource, body: Object, namespace: str) -> Object:
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
        if resource.namespaced:
            found = self._state.get(place_of(NAMESPACES), ("", namespace))
            if found is None:
                raise not_found(NAMESPACES, namespace)
            if is_deleting(found):
                raise namespace_is_ending(resource, name_of(obj), namespace)
        if self._state.get(place_of(resource), (namespace, name_of(obj))) is not None:
            raise already_exists(resource, name_of(obj))
        self._admit(resource, obj, None)
        if place_of(resource) == place_of(CUSTOM_RESOURCE_DEFINITIONS):
            spec = obj["spec"]
            has_status = any("status" in (version.get("subresources") or {}) for version in spec["versions"])
            self._custom[spec["group"], spec["names"]["plural"]] = CUSTOM_WITH_STATUS if has_status else CUSTOM
            conditions = [{"type": name, "status": "True"} for name in ("NamesAccepted", "Established")]
            obj |= {"status": {"conditions": conditions}}
        return self._state.write(place_of(resource), obj)

    def _delete(
        self,
        resource: Resource,
        name: str,
        namespace: str,
        uid: str,
        grace_period: int | None,
        propagation: Propagation | None,
    ) -> None:
        obj = self._get(resource, name, namespace)
        if uid and uid != uid_of(obj):
            raise conflict(resource, name, f"the UID in the precondition ({uid}) does not match that of the object")
        place = place_of(resource)
        plan = plan_deletion(place, obj, now=self._clock(), grace_period=grace_period, propagation=propagation)
        self._state.delete(place, obj, plan)

    def _evict(self, pod: Object, body: Object) -> None:
        version = str(body.get("apiVersion") or "").removeprefix(f"{POD_DISRUPTION_BUDGETS.group}/")
        if not self._serves(POD_DISRUPTION_BUDGETS.in_version(version)):
            raise bad_request(f'no kind "Eviction" is registered for version "{body.get("apiVersion")}"')
        options = body.get("deleteOptions") or {}
        uid = (options.get("preconditions") or {}).get("uid") or ""
        place = place_of(POD_DISRUPTION_BUDGETS)
        if (not uid or uid == uid_of(pod)) and (
            budget := budget_to_spend(pod, self._state.items(place, namespace_of(pod)))
        ):
            allowed = budget["status"]["disruptionsAllowed"] - 1
            self._state.write(place, budget | {"status": budget["status"] | {"disruptionsAllowed": allowed}})
        grace, propagation = options.get("gracePeriodSeconds"), options.get("propagationPolicy")
        self._delete(PODS, name_of(pod), namespace_of(pod), uid, grace, propagation)

    def _find(self, resource: Resource, name: str, namespace: str, subresource: str = "") -> Object | None:
        kind = self._kind(resource)
        if resource.namespaced and not namespace:
            raise not_served(resource)
        if subresource and not (subresource == "status" and kind.has_status):
            raise not_served(resource, subresource)
        return self._state.get(place_of(resource), (namespace if resource.namespaced else "", name))

    def _kind(self, resource: Resource) -> Kind:
        if not self._serves(resource):
            raise not_served(resource)
        kinds, other = (KINDS, OTHER_BUILT_IN) if is_built_in(resource.group) else (self._custom, CUSTOM)
        return kinds.get(place_of(resource), other)

    def _update(self, resource: Resource, old: Object, body: Object, subresource: str, *, is_patch: bool) -> Object:
        kind = self._kind(resource)
        new = prepare_update(kind, resource, old, body, subresource=subresource, is_patch=is_patch)
        if new != old:
            self._admit(resource, new, old)
        return self._state.update(place_of(resource), old, new)

    def _admit(self, resource: Resource, new: Object, old: Object | None) -> None:
        check_size(resource, new)
        if self.admission is not None:
            self.admission(resource, new, old)


async def _run(hook: Hook | None, call: Call) -> None:
    if hook is not None:
        waiting = hook(call)
        if waiting is not None:
            await waiting


def _outgoing(resource: Resource, obj: Object) -> Object:
    """Return a copy for a caller, in the API version of the request."""
    copied: Object = copy_of(obj)
    copied["apiVersion"] = resource.api_version
    return copied


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


def _covers(selector: dict[str, Any], pod: Object) -> bool:
    terms = [f"{key}={value}" for key, value in (selector.get("matchLabels") or {}).items()]
    for term in selector.get("matchExpressions") or ():
        values = ",".join(term.get("values") or ())
        terms.append(_OPERATORS[term["operator"]].format(key=term["key"], values=values))
    return bool(terms) and Selector.parse(",".join(terms)).matches(labels_of(pod))
