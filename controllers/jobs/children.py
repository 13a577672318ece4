"""The pods and services of a job: the caches that show them, the calls whose effects the caches do not show yet, and
the decision which of them are the job's.

*Informers.* Only objects with the operator's group label are watched. They are indexed by the UID of the controlling
job and, for orphans, by the job that their labels name, so the cost of a sync depends on the number of the job's own
pods only.

*Expectations*, so that a controller never acts twice on a stale cache. Before each call the controller registers its
effect: a creation by name, a deletion by UID. The informer's handlers remove the entry when they see the effect; a call
that certainly failed removes it at once. While any entry of a job is outstanding, under any key, the job is not
reconciled. All operations are idempotent: an event that is seen twice, or that was never expected, changes nothing.
A key is `JOB_UID/REPLICA_TYPE/pods` or `.../services`, so a job that was deleted and created again under its name
inherits nothing. Each entry expires, because an event may be lost:

- after `ttl`, when the call succeeded;
- after `uncertain_ttl`, when no answer came. Names are deterministic and deletions carry the UID, so at worst the API
  server rejects a repeated call; nothing is created or deleted twice.

*Claims.* Candidates are the cached objects under the job's UID and under its labels. A pure rule classifies each; then
owner references are patched where needed. A patch carries the candidate's UID and, for an adoption, its resource
version. So the API server rejects a patch that would touch a successor of the same name, an object that has changed
since, or an object that already has a controller. Before the first adoption of a sync the job itself is read live, once
for all of its pods and services: the cached job may look alive when the real one is being deleted or is another job of
the same name. The result, a success or an error, holds until the sync ends.

Source: client-go's ControllerExpectations, which counts instead of naming, and its controller reference managers.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, Literal, NamedTuple

from controllers.jobs.api import (
    AdoptionRefused,
    ClaimFailed,
    ControllerInterface,
)
from controllers.loop.control_loop import attempt_all
from controllers.loop.workqueue import loop_time
from store.kube.api.errors import Invalid, KubeError, NotFound
from store.kube.api.objects import (
    PODS,
    SERVICES,
    Object,
    Resource,
    controller_of,
    is_deleting,
    key_of,
    labels_of,
    name_of,
    namespace_of,
    resource_version_of,
    uid_of,
)
from store.kube.api.protocol import KubeApi
from store.kube.informer.informer import Informer, by_controller, by_label

OWNER, ORPHANS = "owner", "orphans"  # indexes of the caches

TTL = 300.0  # seconds
UNCERTAIN_TTL = 10.0  # seconds


class JobInformers:
    """Informers in one namespace or, with "", in all. `clock`: monotonic seconds."""

    def __init__(
        self,
        api: KubeApi,
        controller: ControllerInterface,
        *,
        namespace: str = "",
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._api, self._namespace, self._clock, self._rng = api, namespace, clock, rng
        self._selector = f"{controller.get_group_name_label_key()}={controller.get_group_name_label_value()}"
        self._job_label = controller.get_job_name_label_key()
        self.pods, self.services = self._of_children(PODS), self._of_children(SERVICES)

    def make(self, resource: Resource, **options: Any) -> Informer:
        """Make an informer on all objects of one kind. `options`: see `Informer`."""
        return Informer(self._api, resource, namespace=self._namespace, clock=self._clock, rng=self._rng, **options)

    def _of_children(self, resource: Resource) -> Informer:
        """Make an informer on one kind of child. Orphans are indexed by `NAMESPACE/VALUE` of the job's label."""
        named = by_label(self._job_label)
        indexers = {OWNER: by_controller, ORPHANS: lambda obj: named(obj) if controller_of(obj) is None else ()}
        return self.make(resource, label_selector=self._selector, indexers=indexers)


class Expected(NamedTuple):
    """One outstanding effect. `what`: the name of the object to create, or the UID of the object to delete."""

    key: str
    verb: Literal["create", "delete"]
    what: str


class Expectations:
    """The outstanding effects of all jobs. `clock`: monotonic seconds, by default those of the running loop."""

    def __init__(
        self, *, ttl: float = TTL, uncertain_ttl: float = UNCERTAIN_TTL, clock: Callable[[], float] = loop_time
    ) -> None:
        self._ttl, self._uncertain_ttl, self._clock = ttl, uncertain_ttl, clock
        self._deadlines: dict[str, dict[Expected, float]] = {}  # by job UID

    def expect(self, entries: Iterable[Expected]) -> None:
        """Register effects, before the calls are made."""
        deadline = self._clock() + self._ttl
        for expected in entries:
            self._deadlines.setdefault(_job_of(expected.key), {})[expected] = deadline

    def cross_off(self, expected: Expected) -> None:
        """Remove the entry: its effect was seen, or will not come."""
        job_uid = _job_of(expected.key)
        entries = self._deadlines.get(job_uid)
        if entries is not None:
            entries.pop(expected, None)
            if not entries:
                del self._deadlines[job_uid]

    def uncertain(self, expected: Expected) -> None:
        """Let the entry expire within `uncertain_ttl`, because the call got no answer."""
        entries = self._deadlines.get(_job_of(expected.key), {})
        if expected in entries:
            entries[expected] = min(entries[expected], self._clock() + self._uncertain_ttl)

    def outstanding(self, job_uid: str) -> list[Expected]:
        """Return the job's outstanding entries, under any key. Expired ones are dropped."""
        entries = self._deadlines.get(job_uid)
        if not entries:
            return []
        now = self._clock()
        for expired in [expected for expected, deadline in entries.items() if deadline <= now]:
            self.cross_off(expired)
        return list(entries)

    def expires_in(self, job_uid: str) -> float | None:
        """Return the seconds until the job's last entry expires, or None when nothing is outstanding."""
        if not self.outstanding(job_uid):
            return None
        return max(self._deadlines[job_uid].values()) - self._clock()

    def unseen_for(self, job_uid: str) -> float:
        """Return the seconds since the job's oldest outstanding entry was registered; 0 without one."""
        if not self.outstanding(job_uid):
            return 0.0
        return self._clock() + self._ttl - min(self._deadlines[job_uid].values())

    def forget(self, job_uid: str) -> None:
        """Drop all entries of a job that is gone."""
        self._deadlines.pop(job_uid, None)


def _job_of(key: str) -> str:
    return key.partition("/")[0]


class Claim(Enum):
    """The verdict on a candidate."""

    SKIP = "skip"
    KEEP = "keep"
    ADOPT = "adopt"
    RELEASE = "release"


def classify(candidate: Object, owner: Object, selector: Mapping[str, str]) -> Claim:
    """Decide what the owner does with the candidate. `selector`: labels that its objects must carry."""
    controller = controller_of(candidate)
    matches = selector.items() <= labels_of(candidate).items()
    if controller is None:
        unwanted = is_deleting(owner) or not matches or is_deleting(candidate)
        return Claim.SKIP if unwanted else Claim.ADOPT
    if controller.get("uid") != uid_of(owner):
        return Claim.SKIP
    if matches:
        return Claim.KEEP
    return Claim.SKIP if is_deleting(owner) else Claim.RELEASE


def recheck_deletion_timestamp(get_object: Callable[[], Awaitable[Object]], uid: str) -> Callable[[], Awaitable[None]]:
    """Return a check to await before an adoption: `get_object` must find the object with `uid`, and not being deleted.

    The check reads once; every later call has the same result, as in kubeflow's `RecheckDeletionTimestamp`. It raises
    `AdoptionRefused`, or the `KubeError` of the read.
    """
    answers: list[Exception | None] = []
    lock = asyncio.Lock()

    async def can_adopt() -> None:
        async with lock:
            if not answers:
                try:
                    live = await get_object()
                except KubeError as error:
                    answers.append(error)
                else:
                    refusal = ""
                    if uid_of(live) != uid:
                        refusal = f"deleted and created again: its UID is {uid_of(live)}, not {uid}"
                    elif is_deleting(live):
                        refusal = f"being deleted since {live['metadata']['deletionTimestamp']}"
                    answers.append(AdoptionRefused(f"{key_of(live)}: {refusal}") if refusal else None)
        if answers[0] is not None:
            raise answers[0]

    return can_adopt


class ClaimManager:
    """Claims objects of one resource for one owner, during one sync.

    `reference`: the owner reference that an adoption adds. `can_adopt`: see `recheck_deletion_timestamp`; share it
    between the managers of a sync. `released`: called with each object that no longer belongs to the owner.
    """

    def __init__(
        self,
        api: KubeApi,
        resource: Resource,
        owner: Object,
        *,
        reference: Object,
        selector: Mapping[str, str],
        can_adopt: Callable[[], Awaitable[None]],
        released: Callable[[Object], None] = lambda obj: None,
    ) -> None:
        self._api, self._resource, self._owner = api, resource, owner
        self._reference, self._selector = reference, selector
        self._can_adopt, self._released = can_adopt, released

    async def claim(self, candidates: Iterable[Object]) -> list[Object]:
        """Adopt and release. Return the candidates that belong to the owner. Raises `ClaimFailed` at the end."""
        claims: dict[Claim, list[Object]] = {claim: [] for claim in Claim}
        for candidate in candidates:
            claims[classify(candidate, self._owner, self._selector)].append(candidate)
        adoptions = await attempt_all(claims[Claim.ADOPT], self._adopt, errors=(KubeError, AdoptionRefused))
        releases = await attempt_all(claims[Claim.RELEASE], self._release, errors=(KubeError,))
        adopted = [result for result in adoptions if isinstance(result, dict)]
        claimed = claims[Claim.KEEP] + adopted
        if errors := [result for result in (*adoptions, *releases) if isinstance(result, Exception)]:
            raise ClaimFailed(self._owner, self._resource, claimed, errors)
        return claimed

    async def _adopt(self, obj: Object) -> Object | None:
        """Adopt the object and return its new state, or None when it is gone."""
        await self._can_adopt()
        metadata = {
            "uid": uid_of(obj),
            "resourceVersion": resource_version_of(obj),
            "ownerReferences": [self._reference],
        }
        try:
            return await self._patch(obj, {"metadata": metadata})
        except NotFound:
            return None

    async def _release(self, obj: Object) -> None:
        """Remove our owner reference. `NotFound`, or `Invalid` for another UID, means there is nothing to release."""
        reference = {"$patch": "delete", "uid": uid_of(self._owner)}
        metadata = {"uid": uid_of(obj), "ownerReferences": [reference]}
        with suppress(NotFound, Invalid):
            await self._patch(obj, {"metadata": metadata})
        self._released(obj)

    async def _patch(self, obj: Object, patch: Object) -> Object:
        return await self._api.patch(self._resource, name_of(obj), namespace_of(obj), patch, patch_type="strategic")
