"""The Kubernetes pattern: a plugin that creates one object per attempt, and follows it until it has ended.

An author supplies the object and reads its state; what is here creates it once, and removes it:

    not created   build and stamp the object, declare the intent, create it. An object of the name that carries this
                  attempt's stamps is its own: an earlier round created it, and its answer was lost
    created       each change of the object wakes the execution. The object comes from an informer's cache, or from the
                  API server where the cache does not show it

Stamps: namespace and name, which never change once the intent is declared; labels and annotations (the settings', then
the object's, then the task's); an owner reference and a finalizer if asked for; last the annotations that name the
execution, its attempt, and the nonce of its intent. An object without them belongs to another client, and is never
changed or deleted. One with another nonce is left of an earlier execution of the same id, which was deleted: it makes
way.

The API server knows no fence. An engine that is stopped for longer than its lease may send a creation after another
engine has taken the execution over: it gets `AlreadyExists` while the attempt's object is there. If the attempt has
ended and its object is gone, the object is created once more; the engine that finalized the attempt sees it appear, and
deletes it.

What a refused creation means:

    exceeded quota, the request alone is above its limit   permanent failure `ResourceRequestsExceedLimits`
    exceeded quota, too many requests, server timeout      WaitingForResources; pods wait at a `CreateGate`
    forbidden for another reason                           failure `RuntimeFailure`, which uses a retry
    too large                                              permanent failure `EntityTooLarge`
    anything else                                          the round is repeated; an invalid object fails at once

An informer runs for each kind and namespace from its first use until `close`.
"""

from __future__ import annotations

import asyncio
import contextvars
import secrets
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar, Literal

import msgspec
import structlog

from controllers.framework.api.types import is_not_ready, is_quota
from controllers.tasks.api.errors import BadConfig, TaskError
from controllers.tasks.api.phase import (
    Phase,
    PhaseInfo,
    Transition,
    do_transition,
    phase_info_failure,
    phase_info_retryable_failure,
    phase_info_system_retryable_failure,
    phase_info_waiting_for_resources,
)
from controllers.tasks.api.plugin import (
    EnqueueOwner,
    NamespacedName,
    PluginProperties,
    SetupContext,
    TaskExecutionContext,
    TaskExecutionMetadata,
    plugin_entry,
)
from controllers.tasks.io.files import FileOutputReader
from controllers.tasks.patterns.kube_identity import (
    ATTEMPT,
    EXECUTION,
    INTENT,
    PLUGIN,
    Place,
    Stamps,
    stamps_for,
    stamps_of,
)
from controllers.tasks.patterns.kube_quota import LONGEST_PAUSE, CreateGate, parse_refusal, pod_demand
from store.kube.api.errors import (
    AlreadyExists,
    BadRequest,
    Conflict,
    Forbidden,
    Invalid,
    KubeError,
    NotFound,
    ServerTimeout,
    TooLarge,
    TooManyRequests,
)
from store.kube.api.objects import (
    PODS,
    Object,
    Resource,
    annotations_of,
    is_deleting,
    key_of,
    namespace_of,
    resource_version_of,
    split_key,
    uid_of,
)
from store.kube.api.protocol import KubeApi, PatchType
from store.kube.informer.informer import DeletedFinalStateUnknown, Informer, last_state
from store.timing import Backoff, retried

log = structlog.get_logger(__name__)

STATE_VERSION = 1
FINALIZER = "rcfarm/task"
LOOK_AGAIN = 30.0  # seconds between looks at an object that has not started
LOOK_AGAIN_RUNNING = 300.0  # and at one that runs, beside the informer's reports
_DESCRIPTIONS = ("labels", "annotations")
FINALIZED = 10_000  # attempts that a plugin remembers
STRAY_PAUSE = 0.2  # seconds between the first tries to delete an object of an attempt that has ended
WAY_PAUSE = 1.0  # seconds between looks whether an earlier execution's object is gone
STRIP_TRIES = 5  # reads of an object that other clients keep changing


class NoCluster(TaskError):
    """The engine has no Kubernetes cluster."""

    retryable = False


@dataclass(frozen=True)
class KubeProperties(PluginProperties):
    """What a plugin asks of the engine and of the pattern. Generated names have at most 63 characters by default."""

    generated_name_max_length: int | None = 63
    owner_reference: bool = True
    finalizer: bool = True


@dataclass(frozen=True)
class KubeDefaults:
    """The operator's settings for all objects.

    `finalizer`: an object that another client deletes stays until `finalize`. `delete_on_finalize`: nothing stays after
    an attempt. `cluster_wide`: one watch of all namespaces instead of one for each that is used.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    finalizer: bool = False
    delete_on_finalize: bool = False
    cluster_wide: bool = False


@dataclass(frozen=True)
class Target:
    """An object beside the attempt's own."""

    resource: Resource
    name: str
    namespace: str


@dataclass(frozen=True)
class AbortBehavior:
    """How an abort stops the work. `body`: a patch, or the whole object for `update`. `target`: None is the attempt's
    own object. `delete_on_error`: delete the target if a patch or an update is refused."""

    how: Literal["delete", "patch", "update"] = "delete"
    body: Object | Sequence[Any] | None = None
    patch_type: PatchType = "merge"
    target: Target | None = None
    delete_on_error: bool = False


class KubeState(msgspec.Struct, frozen=True):
    """What is kept between rounds: the UID of the created object, "" until it is known."""

    uid: str = ""


class KubePlugin(ABC):
    """Base of plugins whose work is an object in the cluster. `clock`: seconds since the epoch."""

    id: ClassVar[str]
    properties: ClassVar[KubeProperties] = KubeProperties()
    clock: Callable[[], float] = staticmethod(time.time)
    monotonic: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, defaults: KubeDefaults | None = None) -> None:
        self.defaults = defaults or KubeDefaults()

    # What an author supplies

    @abstractmethod
    def build_identity_resource(self, metadata: TaskExecutionMetadata) -> Resource:
        """Return the kind of the object; the same in all rounds of an attempt."""

    @abstractmethod
    async def build_resource(self, context: TaskExecutionContext) -> Object:
        """Return the object to create; name, namespace and stamps are set later. Raises `BadConfig`."""

    @abstractmethod
    async def get_task_phase(self, context: TaskExecutionContext, resource: Object) -> PhaseInfo:
        """Return the phase that the object's state means. Outputs are those in the attempt's files, unless another
        reader is put."""

    def get_properties(self) -> KubeProperties:
        """Return what the plugin asks of the engine and of the pattern."""
        return self.properties

    def object_name(self, metadata: TaskExecutionMetadata) -> str:
        """Return the object's name: unique to the attempt, and valid for its kind."""
        return metadata.get_task_execution_id().get_generated_name()

    async def on_abort(self, context: TaskExecutionContext, resource: Object) -> AbortBehavior:
        """Return how an abort stops the work."""
        return AbortBehavior()

    def still_runs(self, resource: Object) -> bool:
        """Return whether `finalize` must delete the object because a part of it still runs after the attempt's end."""
        return False

    # The plugin

    def get_id(self) -> str:
        """Return the plugin's id."""
        return self.id

    async def load(self, setup: SetupContext) -> None:
        """Take the cluster's client. Without one, the plugin loads, and its executions fail with `NoCluster`."""
        self._metrics = setup.metrics_scope
        self._gates: dict[str, CreateGate] = {}
        self._finalized: OrderedDict[Stamps, str] = OrderedDict()  # with the UID of the one object that may stay, or ""
        self._deletions: set[asyncio.Task[None]] = set()
        self._api: KubeApi | None = None
        try:
            self._api = setup.kube_client.get_client()
        except TaskError as error:
            log.debug("The plugin has no cluster", plugin=self.id, reason=str(error))
            return
        self._watches = Watches(
            self._api, setup.enqueue_owner, self.id, self._appeared, cluster_wide=self.defaults.cluster_wide
        )

    async def close(self) -> None:
        """Stop watching; the objects stay."""
        for task in self._deletions:
            task.cancel()
        if self._api is not None:
            await self._watches.close()

    async def handle(self, context: TaskExecutionContext) -> Transition:
        """Create the attempt's object, or report what has become of it. Raises `TaskError`, `KubeError`."""
        cluster = self._require_cluster()
        state, _ = context.plugin_state_reader.get(KubeState)
        if not state.uid:
            return await self._created(context)
        resource = self.build_identity_resource(context.task_execution_metadata)
        place = Place.parse(context.intent.key or "")
        informer = self._watches.informer(resource, place.namespace)
        found = informer.get(place.key) if informer.has_synced and not informer.problem else None
        if found is None or uid_of(found) != state.uid:
            with suppress(NotFound):
                found = await cluster.get(resource, place.name, place.namespace)
        if found is None or uid_of(found) != state.uid:
            text = f"{resource.kind} {place.key} was deleted by another client"
            return do_transition(phase_info_system_retryable_failure("ResourceDeletedExternally", text))
        return await self._shown(context, found)

    async def abort(self, context: TaskExecutionContext) -> None:
        """Stop the work as `on_abort` says. Without an intent nothing was created. Raises `KubeError`."""
        own = await self.own_object(context)
        if own is None:
            return
        resource = self.build_identity_resource(context.task_execution_metadata)
        behavior = await self.on_abort(context, own)
        namespace, name = split_key(key_of(own))
        target = behavior.target or Target(resource, name, namespace)
        uid = "" if behavior.target else uid_of(own)
        try:
            if behavior.how == "patch":
                await self._require_cluster().patch(
                    target.resource, target.name, target.namespace, behavior.body or {}, patch_type=behavior.patch_type
                )
            elif behavior.how == "update":
                await self._require_cluster().replace(target.resource, dict(behavior.body or {}))
            else:
                await self._delete(target, uid)
        except NotFound:
            return
        except KubeError as error:
            if behavior.how == "delete" or not behavior.delete_on_error:
                raise
            log.warning("An object can't be stopped; deleting it", plugin=self.id, name=target.name, error=str(error))
            await self._delete(target, uid)

    async def finalize(self, context: TaskExecutionContext) -> None:
        """Remove the finalizer; delete the object if the settings say so, or if it still runs. Raises `KubeError`."""
        if context.intent.key is None:
            return
        resource = self.build_identity_resource(context.task_execution_metadata)
        stamps = stamps_for(context, place := Place.parse(context.intent.key))
        self._require_cluster()
        self._watches.informer(resource, place.namespace)
        for _ in range(STRIP_TRIES):
            own = await self.own_object(context)
            self._finalized[stamps] = uid_of(own) if own is not None else ""
            self._finalized.move_to_end(stamps)
            if len(self._finalized) > FINALIZED:
                self._finalized.popitem(last=False)
            if own is None:
                return
            namespace, name = split_key(key_of(own))
            finalizers = list(own["metadata"].get("finalizers") or ())
            if FINALIZER in finalizers:
                finalizers.remove(FINALIZER)
                patch = {"metadata": {"finalizers": finalizers, "resourceVersion": resource_version_of(own)}}
                try:
                    await self._require_cluster().patch(resource, name, namespace, patch)
                except NotFound:
                    return
                except Conflict:
                    continue
            if not is_deleting(own) and (self.defaults.delete_on_finalize or self.still_runs(own)):
                await self._delete(Target(resource, name, namespace), uid_of(own))
            return
        raise TaskError(f"{resource.kind} {name} changes all the time; its finalizer {FINALIZER} could not be removed")

    # Rounds

    async def _created(self, context: TaskExecutionContext) -> Transition:
        metadata = context.task_execution_metadata
        resource = self.build_identity_resource(metadata)
        fresh = Place(metadata.get_namespace(), self.object_name(metadata), secrets.token_hex(4))
        place = Place.parse(context.intent.key) if context.intent.key else fresh
        namespace, name, _ = place
        body = self._stamped(context, resource, place, await self.build_resource(context))
        gate, demand = None, {}
        if resource == PODS:
            gate = self._gates.setdefault(namespace, CreateGate())
            try:
                demand = pod_demand(body)
            except ValueError as error:
                raise BadConfig(f"resources of the pod: {error}") from error
            if (delay := gate.delay(demand, self.monotonic())) > 0:
                reason = f"pods in {namespace} are refused at present; they are tried again after a while"
                return self._waiting(reason, delay)
        await context.intent.declare(str(place))
        try:
            created = await self._require_cluster().create(resource, body, namespace)
        except AlreadyExists:
            created = await self._require_cluster().get(resource, name, namespace)
            found, own = stamps_of(created), stamps_for(context, place)
            if found[:2] != own[:2]:
                text = f"{resource.kind} {place.key} exists already, and belongs to another client"
                return do_transition(phase_info_retryable_failure("NameTaken", text))
            if found != own:
                await self._delete(Target(resource, name, namespace), uid_of(created))
                text = f"{resource.kind} {place.key} of an earlier execution of this id is being deleted"
                return self._waiting(text, WAY_PAUSE)
        except KubeError as error:
            return self._refused(error, gate)
        if gate is not None:
            gate.succeeded()
        self._metrics.count("created")
        self._watches.informer(resource, namespace)
        context.plugin_state_writer.put(STATE_VERSION, KubeState(uid_of(created)))
        return await self._shown(context, created)

    def _refused(self, error: KubeError, gate: CreateGate | None) -> Transition:
        """Return what a refused creation means. Raises the error if only another round can tell."""
        text = str(error)
        refusal = parse_refusal(text) if isinstance(error, Forbidden) and is_quota(text) else None
        if refusal is not None and (impossible := refusal.impossible):
            reason = f"asks for more {', '.join(impossible)} than the namespace's quota can ever give: {text}"
            return do_transition(phase_info_failure("ResourceRequestsExceedLimits", reason))
        if isinstance(error, TooLarge) or "request is too large" in text:
            return do_transition(phase_info_failure("EntityTooLarge", text))
        is_throttled = isinstance(error, TooManyRequests | ServerTimeout) or error.reason == "ServerTimeout"
        if is_throttled or (isinstance(error, Forbidden) and is_quota(text)):
            self._metrics.count("refused", reason="throttled" if is_throttled else "quota")
            pause, after = LONGEST_PAUSE, error.retry_after or 0.0
            if gate is not None:
                pause = gate.refused(self.monotonic(), refusal.requested if refusal else {}, after)
            return self._waiting(text, max(pause, after))
        if isinstance(error, Forbidden) and not is_not_ready(text):
            return do_transition(phase_info_retryable_failure("RuntimeFailure", text))
        if isinstance(error, Invalid | BadRequest):
            raise BadConfig(text) from error
        raise error

    async def _shown(self, context: TaskExecutionContext, found: Object) -> Transition:
        """Return the phase of the object."""
        await context.output_writer.put(FileOutputReader(context.data_store, context.output_writer))
        info = await self.get_task_phase(context, found)
        if info.phase.is_terminal():
            return do_transition(info)
        if is_deleting(found):
            text = f"another client deleted {key_of(found)}"
            return do_transition(phase_info_system_retryable_failure("UnexpectedObjectDeletion", text, info.info))
        return do_transition(info, poll_after=LOOK_AGAIN_RUNNING if info.phase is Phase.RUNNING else LOOK_AGAIN)

    # Helpers

    def _require_cluster(self) -> KubeApi:
        if self._api is None:
            raise NoCluster(f"{self.id} tasks need a Kubernetes cluster; this engine has none in its settings")
        return self._api

    def _stamped(self, context: TaskExecutionContext, resource: Resource, place: Place, body: Object) -> Object:
        metadata, properties = context.task_execution_metadata, self.get_properties()
        own = body.get("metadata") or {}
        if not isinstance(own, dict) or not all(isinstance(own.get(each) or {}, dict) for each in _DESCRIPTIONS):
            raise BadConfig(f"metadata of the {resource.kind}: it, its labels and its annotations must be mappings")
        finalizers = list(own.get("finalizers") or ())
        if self.defaults.finalizer and properties.finalizer and FINALIZER not in finalizers:
            finalizers.append(FINALIZER)
        owners = list(own.get("ownerReferences") or ())
        if properties.owner_reference and (owner := metadata.get_owner_reference()):
            owners.append(dict(owner))
        labels = {**self.defaults.labels, **(own.get("labels") or {}), **metadata.get_labels()}
        annotations = {**self.defaults.annotations, **(own.get("annotations") or {}), **metadata.get_annotations()}
        stamps = stamps_for(context, place)
        return {
            **body,
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": {
                **own,
                "name": place.name,
                "namespace": place.namespace,
                "labels": {**labels, PLUGIN: self.id},
                "annotations": {**annotations, **dict(zip((EXECUTION, ATTEMPT, INTENT), stamps, strict=True))},
                **({"finalizers": finalizers} if finalizers else {}),
                **({"ownerReferences": owners} if owners else {}),
            },
        }

    async def own_object(self, context: TaskExecutionContext) -> Object | None:
        """Return the attempt's object as the API server has it, None if there is none. Raises `KubeError`."""
        if context.intent.key is None:
            return None
        place = Place.parse(context.intent.key)
        resource = self.build_identity_resource(context.task_execution_metadata)
        try:
            found = await self._require_cluster().get(resource, place.name, place.namespace)
        except NotFound:
            return None
        return found if stamps_of(found) == stamps_for(context, place) else None

    def _appeared(self, resource: Resource, obj: Object) -> None:
        """Delete an object that was created after its attempt was finalized."""
        stays = self._finalized.get(stamps_of(obj))
        if stays is None or stays == uid_of(obj) or is_deleting(obj):
            return
        log.warning(
            "An engine that was stopped created an object for an attempt that had ended; deleting it",
            plugin=self.id,
            execution=stamps_of(obj).execution,
            object=key_of(obj),
        )
        namespace, name = split_key(key_of(obj))
        delete = partial(self._delete, Target(resource, name, namespace), uid_of(obj))
        backoff = Backoff(STRAY_PAUSE, LONGEST_PAUSE)
        deletion = asyncio.get_running_loop().create_task(retried(delete, on=KubeError, backoff=backoff))
        self._deletions.add(deletion)
        deletion.add_done_callback(self._deletions.discard)

    async def _delete(self, target: Target, uid: str) -> None:
        """Delete an object that may be gone already; `uid`: not another one of its name."""
        try:
            await self._require_cluster().delete(
                target.resource, target.name, target.namespace, uid=uid, propagation="Background"
            )
        except (NotFound, Conflict) as error:
            log.debug("The object to delete is gone", plugin=self.id, name=target.name, reason=str(error))

    def _waiting(self, reason: str, pause: float) -> Transition:
        now = datetime.fromtimestamp(self.clock(), UTC)
        return do_transition(phase_info_waiting_for_resources(now, 0, reason), poll_after=pause)


class Watches:
    """The informers of a plugin's objects, and a handler that wakes the execution that owns a changed one."""

    def __init__(
        self,
        api: KubeApi,
        enqueue: EnqueueOwner,
        plugin: str,
        on_added: Callable[[Resource, Object], None],
        *,
        cluster_wide: bool = False,
    ) -> None:
        self._api, self._enqueue, self._plugin, self._cluster_wide = api, enqueue, plugin, cluster_wide
        self._on_added = on_added
        self._running: dict[tuple[Resource, str], tuple[Informer, asyncio.Task[None]]] = {}

    def informer(self, resource: Resource, namespace: str) -> Informer:
        """Return the informer of a kind in a namespace; it runs from now on."""
        place = resource, "" if self._cluster_wide else namespace
        known = self._running.get(place)
        if known is None or known[1].done():
            loop, selector = asyncio.get_running_loop(), f"{PLUGIN}={self._plugin}"
            informer = Informer(self._api, resource, namespace=place[1], label_selector=selector, clock=loop.time)
            informer.add_handler(_Waking(resource, self._enqueue, self._on_added))
            task = loop.create_task(
                informer.run(), name=f"{resource.plural} of {self._plugin}", context=contextvars.Context()
            )
            known = self._running[place] = informer, task
        return known[0]

    async def close(self) -> None:
        """Stop all informers."""
        tasks = [task for _, task in self._running.values()]
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Waking:
    """Wakes the owners of objects that appear, change, or are gone."""

    def __init__(self, resource: Resource, enqueue: EnqueueOwner, on_added: Callable[[Resource, Object], None]) -> None:
        self._resource, self._enqueue, self._on_added = resource, enqueue, on_added

    def added(self, obj: Object) -> None:
        self._on_added(self._resource, obj)
        self._wake(obj)

    def updated(self, old: Object, new: Object) -> None:
        self._wake(new)

    def deleted(self, obj: Object | DeletedFinalStateUnknown) -> None:
        self._wake(last_state(obj))

    def _wake(self, obj: Object) -> None:
        if execution := annotations_of(obj).get(EXECUTION):
            self._enqueue(NamespacedName(namespace_of(obj), execution))


kube_entry = plugin_entry
